"""Building work lists before the first call, if magi's kernels will run it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_magi.config import MagiConfig
from megatron_magi.core.kernel.head_dims import HeadDims, compiled_widths
from megatron_magi.core.kernel.select import choose_backend_name
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.plan import HeadShape


def make_work_lists(
    forward: Iterable[SliceTable],
    backward: Iterable[SliceTable],
    heads: HeadShape,
    config: MagiConfig,
    device: torch.device,
) -> None:
    """Choose and upload what calls on these tables will launch; do nothing for another backend.

    Args:
        forward, backward: the tables of calls of each direction.

    Cost: milliseconds on the host for each long table, and one upload each; the host does not wait.
    """
    widths = compiled_widths(HeadDims(heads.head_dim, heads.value_dim))
    if widths is None or not _is_chosen(heads, config, device):
        return
    # Imported here, like the backend, because a CPU user needs none of it.
    from megatron_magi.core.kernel.hopper.choice import chosen_backward, chosen_forward
    from megatron_magi.core.kernel.hopper.launch_values import HeadsKey

    key = HeadsKey(heads.num_heads_q, heads.num_heads_kv, *widths, device)
    for table in forward:
        chosen_forward(table, key)
    for table in backward:
        chosen_backward(table, key, config.deterministic)


def _is_chosen(heads: HeadShape, config: MagiConfig, device: torch.device) -> bool:
    """True if magi's kernels will compute calls with these heads; elements of two bytes count as
    bf16."""
    dtype = torch.bfloat16 if heads.bytes_per_element == 2 else torch.float32
    chosen = choose_backend_name(device, dtype) == "cuda"
    return chosen and config.kernel_backend in ("auto", "cuda")
