"""Jobs whose samples cannot be dealt by cost."""

from __future__ import annotations

import pytest

from megatron_magi.launcher.constraints import refusals, refuse_arguments
from tests.launcher.few_arguments import arguments


def test_samples_are_dealt_by_the_cost_of_their_documents() -> None:
    documents = {"dataloader_inter_document_masking": True}
    for given in (documents, {"sft": True}, {"reset_attention_mask": True}):
        assert refusals(arguments(**given), balance_step=True) == []
    assert refusals(arguments(dataloader_type="external")) == []
    external = arguments(dataloader_type="external")
    lines = refusals(external, mask_name="masks:frames", balance_step=True)
    for line, said in zip(
        lines,
        (
            "requires --dataloader-type single or cyclic, got external, whose loader",
            "requires the cost of a sample before its rows are read, got --magi-mask masks:frames;",
            "requires documents in a sample, got none, so that all samples cost the same; pass",
        ),
        strict=True,
    ):
        assert line.startswith(f"--magi-balance-step {said}") and "; " in line
    with pytest.raises(SystemExit, match="requires documents in a sample"):
        refuse_arguments(arguments(), balance_step=True)
