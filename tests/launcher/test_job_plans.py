"""Plans of a job that does not run are those that its ranks would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_magi.adapter  # noqa: F401  prepares the import of Megatron
from megatron_magi import AttnMask, masks
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.config import MagiConfig
from megatron_magi.launcher import job_plans
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.job_plans import UnknownMask, plan_job
from megatron_magi.launcher.job_sizes import ModelSizes
from tests.data_files import write_documents
from tests.launcher.few_arguments import arguments

OPTIONS = LauncherOptions(MagiConfig())


def job(**given: Any) -> Any:
    usual = {
        "num_layers": 2,
        "num_query_groups": None,
        "kv_channels": None,
        "multi_latent_attention": False,
        "window_size": None,
        "window_attn_skip_freq": None,
        "global_batch_size": 4,
        "seed": 1234,
    }
    return arguments(**{**usual, **given})


def windows_of(request: MaskRequest) -> AttnMask:
    return masks.from_cu_seqlens(request.bounds, window_size=(8, 0))


def by_rows(request: MaskRequest) -> AttnMask:
    assert request.batch is not None, "rows"
    return windows_of(request)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_documents(tmp_path / "corpus", [60, 30, 90] * 10)


def test_a_causal_job_counts_every_cell() -> None:
    found = plan_job(job(), OPTIONS)
    (plan,) = found.plans
    bounds = [0, 96]
    own = make_packed_seq_params(
        bounds, ModelSizes(job(context_parallel_size=1), torch.float32), None
    )
    assert plan.cp_size == 2 and plan.mask == own.token_plan.mask
    cells = 96 * 97 // 2
    assert found.causal_share == 1.0 and found.documents == "each sample is one document"
    # 4 samples, 2 layers, 4 heads of 16 channels
    assert found.flops == 12 * 16 * 4 * 2 * 4 * cells


def test_window_layers_have_their_own_plans() -> None:
    found = plan_job(job(window_size=(7, 0), window_attn_skip_freq=2), OPTIONS)
    full, window = found.plans
    assert full.layout == window.layout and window.mask.area() == 36 + 8 * 88
    assert found.causal_share == pytest.approx((full.mask.area() + 740) / (2 * full.mask.area()))


def test_documents_come_from_the_data_file(corpus: str) -> None:
    args = job(dataloader_inter_document_masking=True, data_path=["0.5", "none", "0.5", corpus])
    args.micro_batch_size, args.global_batch_size = 2, 6
    found = plan_job(args, OPTIONS)
    assert found.documents == f"documents of {corpus}, shuffled" and found.tokens == 192
    assert len(found.plans) == 3 and 0.3 < found.causal_share < 0.9
    assert len({plan.digest for plan in found.plans}) > 1
    args.data_path = ["none"]
    found = plan_job(args, OPTIONS)
    assert found.documents == "its data is not here; each sample as one document"
    assert found.causal_share == 1.0 and found.plans[0].mask.num_slices == 2
    args.mock_data, args.data_path = True, None
    assert plan_job(args, OPTIONS).documents == "documents of Megatron's mock data"


def test_what_is_not_known_before_the_run_is_said(corpus: str) -> None:
    with pytest.raises(UnknownMask, match="the conversations of --sft are known when"):
        plan_job(job(sft=True), OPTIONS)
    with pytest.raises(UnknownMask, match="must hold a sample of 9,999 tokens, got 1,800"):
        plan_job(job(reset_attention_mask=True, data_path=[corpus], seq_length=9999), OPTIONS)
    with pytest.raises(UnknownMask, match=r"no mask without a batch \(AssertionError: rows"):
        plan_job(job(), LauncherOptions(MagiConfig(), f"{__name__}:by_rows"))


def test_a_function_makes_the_mask() -> None:
    found = plan_job(job(), LauncherOptions(MagiConfig(), f"{__name__}:windows_of"))
    assert found.plans[0].mask.area() == 45 + 9 * 87


def test_only_the_first_microbatches_are_planned(corpus: str) -> None:
    args = job(reset_attention_mask=True, data_path=[corpus], global_batch_size=64)
    found = plan_job(args, OPTIONS)
    assert len(found.plans) == job_plans.MAX_MICROBATCHES
    args.global_batch_size = 32
    assert plan_job(args, OPTIONS).flops == found.flops / 2
