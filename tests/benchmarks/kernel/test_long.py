"""One long sequence: sampled rows are exact, and a wrong one is found."""

import argparse

import pytest
import torch

from benchmarks.kernel import long as script

ARGS = argparse.Namespace(tokens=300, heads=[4, 2], head_dim=16, device="cpu")


def test_samples_lie_on_both_sides_of_the_31st_bit() -> None:
    rows = script.sampled_rows(1 << 20, 64 * 128)
    assert {0, 2**18 - 1, 2**18, (1 << 20) - 1} <= set(rows) and len(rows) == 8
    assert script.sampled_rows(2, 64) == [0, 1]


def test_fp32_is_exact_in_every_tensor() -> None:
    errors = script.run(ARGS)["errors"]
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
    assert max(errors.values()) < 1e-4


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_row_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.autograd.grad

    def wrong(*args: object) -> list[torch.Tensor]:
        grads = [x.clone() for x in plain(*args)]  # type: ignore[arg-type]
        grads[["dq", "dk", "dv"].index(name)][127, 0, 3] += 0.5
        return grads

    monkeypatch.setattr(torch.autograd, "grad", wrong)
    assert script.run(ARGS)["errors"][name] > script.MOST_ERROR[name]
