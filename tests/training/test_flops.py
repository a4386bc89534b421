"""A step's arithmetic, counted by hand."""

import pytest

from megatron_magi.training.estimate.flops import matmul_parameters, peak_tflops, step_flops
from megatron_magi.training.recipe.run_values import ModelConfig

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=10,
)


def test_parameters_of_matrix_products() -> None:
    attention = 8 * (8 + 4 + 4) + 8 * 8  # q, k, v and the output projection; head_dim 2
    mlp = 8 * 16 * 2 + 16 * 8
    assert matmul_parameters(MODEL) == 2 * (attention + mlp) + 8 * 10


def test_a_visible_cell_costs_four_products() -> None:
    without = step_flops(MODEL, 100, 0)
    assert without == 6 * 100 * matmul_parameters(MODEL)
    # Forward q k^T and p v: 2 * 2 * head_dim a head; backward four such products.
    assert step_flops(MODEL, 100, 7) - without == 7 * 2 * 4 * 2 * (2 * 2 + 4 * 2)


@pytest.mark.parametrize(
    ("device", "rate"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", None),
        ("NVIDIA H20", None),
    ],
)
def test_the_peak_rate_of_a_gpu_is_known_or_left_out(device: str, rate: float | None) -> None:
    """A name that only begins like a known one has another rate."""
    assert peak_tflops(device) == rate
