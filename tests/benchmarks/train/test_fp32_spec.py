"""The fp32 truth is attention by its definition, document by document."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import megatron_magi.adapter  # prepares the import of Megatron
from benchmarks.train.fp32_spec import DocumentSdpa, layer_spec
from megatron_magi import masks
from tests.dense import dense_attention

assert megatron_magi.adapter.MEGATRON_VERSION
BOUNDS = [0, 5, 6, 17]


def attention() -> DocumentSdpa:
    from megatron.core.transformer import TransformerConfig

    return DocumentSdpa(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=4), 1)


@pytest.mark.parametrize("batch", [(), (1,)], ids=["thd", "sbhd"])
def test_documents_and_grouped_heads(batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(17, *batch, heads, 8) for heads in (4, 2, 2))
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(BOUNDS, dtype=torch.int32))
    out = attention()(q, k, v, None, packed_seq_params=packed)
    wide = (x.reshape(17, -1, 8).double() for x in (q, k, v))
    wanted, _ = dense_attention(*wide, masks.from_cu_seqlens(BOUNDS), 8**-0.5)
    assert out.shape == (17, *batch, 32)
    torch.testing.assert_close(out.reshape(17, 4, 8).double(), wanted, rtol=1e-5, atol=1e-6)
    whole = attention()(q, k, v, None)
    assert not torch.allclose(whole, out), "without documents the stream is one"


def test_other_precision_is_refused() -> None:
    x = torch.randn(4, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="compared with fp32, got torch"):
        attention()(x, x, x, None)


def test_the_spec_is_megatrons_local_layer() -> None:
    assert layer_spec.submodules.self_attention.submodules.core_attention is DocumentSdpa
