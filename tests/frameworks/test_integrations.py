"""Frameworks that import ``magi_attention``: their own files on our names, against SDPA.

`pytest tests/frameworks --framework NAME=PATH`, once for each framework: ``automodel`` and
``veomni`` are source trees, ``megatron_lite`` is its file ``modules/attention/magi.py``. Automodel
also needs einops and Transformers, VeOmni needs Transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_magi.magi_attention import flex_flash_attn_func
from tests.frameworks import integration_jobs as jobs
from tests.frameworks import token_tables
from tests.process_pool import pool

pytestmark = [pytest.mark.framework, pytest.mark.timeout(600)]

CheckoutOf = Callable[[str], str]


@pytest.fixture(scope="module")
def language_sdpa() -> list[list[Tensor]]:
    """Gradients of the same model with Transformers' SDPA, in fp32 and in bf16."""
    pytest.importorskip("transformers")
    return [language_gradients_in(torch.float32), language_gradients_in(torch.bfloat16)]


def language_gradients_in(dtype: torch.dtype) -> list[Tensor]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def rounded(module, q, k, v, mask, **options):  # type: ignore[no-untyped-def]
        cast = (x.to(dtype) for x in (q, k, v))
        out, weights = sdpa_attention_forward(module, *cast, None, is_causal=True, **options)
        return out.to(q.dtype), weights

    ALL_ATTENTION_FUNCTIONS.register("rounded", rounded)
    return jobs.language_gradients(jobs.language_model("rounded"), jobs.language_batch())


@pytest.mark.parametrize("cp_size", [1, 2])
def test_automodel_trains_a_model_of_transformers(
    framework: CheckoutOf, language_sdpa: list[list[Tensor]], cp_size: int
) -> None:
    for mine in pool(2).run(jobs.automodel_language, framework("automodel"), cp_size)[:cp_size]:
        token_tables.assert_as_good(mine, *language_sdpa)


def test_automodel_trains_packed_documents_on_two_ranks(framework: CheckoutOf) -> None:
    bounds, mask = token_tables.documents(jobs.DOCUMENTS)
    for mine in pool(2).run(jobs.automodel_packed, framework("automodel"), 2):
        token_tables.assert_as_good_as_sdpa(mine, token_tables.tokens(bounds[-1]), mask)


def test_automodel_trains_samples_that_share_a_prefix(framework: CheckoutOf) -> None:
    (mine, _) = pool(2).run(jobs.automodel_tree, framework("automodel"))
    ends = torch.tensor(jobs.NODES).cumsum(0)
    node = torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
    above = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    mask = above[node[:, None], node] & torch.ones(len(node), len(node)).tril().bool()
    token_tables.assert_as_good_as_sdpa(mine, token_tables.tokens(len(node)), mask)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_megatron_lite_trains_packed_documents(framework: CheckoutOf, cp_size: int) -> None:
    bounds, mask = token_tables.documents(jobs.DOCUMENTS)
    for mine in pool(2).run(jobs.lite, framework("megatron_lite"), cp_size)[:cp_size]:
        token_tables.assert_as_good_as_sdpa(mine, token_tables.tokens(bounds[-1]), mask)


@pytest.mark.parametrize("kernels", ["fa4", "one call"])
def test_veomni_trains_packed_documents(
    framework: CheckoutOf, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no GPU it has no kernels, but a place to put some: its own autograd function
    around FA4's names, or our call."""
    file = jobs.veomni(framework("veomni"))
    attend = flex_flash_attn_func
    if kernels == "fa4":
        kernels_of = importlib.import_module(f"{file.__name__}._fa4_cuda")
        monkeypatch.setattr(kernels_of, "_prepare_default_magi_kernel", lambda _: ("cute", {}))
        attend = kernels_of._fa4_cuda_attention_forward
    monkeypatch.setattr(file, "_magi_attention_forward", attend)
    bounds, mask = token_tables.documents((7, 41, 2))
    sums = torch.tensor(bounds, dtype=torch.int32)
    made = file.create_magi_mask(1, bounds[-1], bounds[-1], device="cpu", cu_seq_lens_q=sums)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = file.magi_attention_forward(torch.nn.Module(), q, k, v, made)
        assert lse.shape == q.shape[:3]
        return out[0]

    ids = token_tables.tokens(bounds[-1])
    mine = token_tables.gradients(ids, forward, torch.float32)
    want = token_tables.gradients(ids, token_tables.sdpa(mask), torch.float32)
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)
