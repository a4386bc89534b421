"""What the launcher does with stock batches of graphs that hold attention, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_magi.bridge import batch as bridge_batch
from megatron_magi.config import MagiConfig
from megatron_magi.launcher import batch, captured_attention, model_hooks
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState
from tests.launcher.few_arguments import arguments


def launch(graphs: str = "full_iteration") -> LauncherState:
    """Of a job whose graphs hold the whole step, or another's."""
    args = arguments(context_parallel_size=1, micro_batch_size=3, cuda_graph_impl=graphs)
    return LauncherState(LauncherOptions(MagiConfig()), args, has_said_startup=True)


class Model(torch.nn.Module):
    def forward(
        self, input_ids: Any, attention_mask: Any = None, packed_seq_params: Any = None
    ) -> None: ...


def test_a_model_gets_rows_without_plan_and_mask() -> None:
    rows, mask = torch.zeros(2, 4), torch.ones(4, 4)
    _, given = model_hooks._give_plan(launch(), Model(), (rows, mask), {})
    assert given["input_ids"] is rows
    assert given["attention_mask"] is None and given.get("packed_seq_params") is None


def test_schedules_and_buffers_keep_megatrons_sizes() -> None:
    for graphs, shape in (("full_iteration", (96, 3)), ("none", (288, 1))):
        state = launch(graphs)
        assert state.stream_shape(96, 3, state.args) == shape
        assert state.joins_samples() == (graphs == "none")


def test_documents_are_refused_where_a_graph_would_ignore_them() -> None:
    given = {"packed_seq_params": PackedSeqParams(qkv_format="thd")}
    with pytest.raises(ValueError, match="whole sequences, got PackedSeqParams"):
        model_hooks._give_plan(launch(), Model(), (torch.zeros(1, 4),), given)


@pytest.mark.parametrize("wrap", [batch.replace_cp_batch, bridge_batch.replace_rows])
def test_megatron_shares_out_the_rows(wrap: Any) -> None:
    """Ranks that kept all rows would attend over the sequence once for each of them."""
    share = wrap(lambda given, group: {"tokens": given["tokens"][:, group:]}, launch("local"))
    assert share({"tokens": torch.arange(4).view(1, 4)}, 2)["tokens"].tolist() == [[2, 3]]


def test_a_graph_has_no_dense_mask() -> None:
    def static_inputs(layer: Any, *sizes: int) -> dict[str, Any]:
        return {"hidden_states": sizes, "attention_mask": torch.ones(sizes)}

    def replay_arguments(layer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    state = launch()
    inputs = captured_attention.wrap_static_inputs(static_inputs, state)
    assert inputs(None, 4, 2) == {"hidden_states": (4, 2)}
    replay = captured_attention.wrap_replay_arguments(replay_arguments, state)
    assert replay(None, 1, attention_mask=None, rotary_pos_emb=3) == {"rotary_pos_emb": 3}


@pytest.mark.parametrize("length", [96, 98, None])
def test_a_length_is_one_that_megatron_can_cut(length: int | None) -> None:
    """It has two names, and either may be left out before Megatron has checked its arguments."""
    for named in ({"encoder_seq_length": None}, {"encoder_seq_length": length, "seq_length": None}):
        args = arguments(**{"cuda_graph_impl": "local", "seq_length": length, **named})
        lines = [*captured_attention.refuse_captured_attention(args, MagiConfig(), None)]
        assert len(lines) == (length == 98), lines
        assert all("--seq-length 98 with" in line and "4 equal pieces" in line for line in lines)
