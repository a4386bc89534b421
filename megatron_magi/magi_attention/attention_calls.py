"""Attention under MagiAttention's names: of one device, and of a dispatched sequence."""

from __future__ import annotations

from torch import Tensor

from megatron_magi.checks import flag, integer
from megatron_magi.core.kernel.attention import AttnForwardMeta
from megatron_magi.core.kernel.attention import flex_flash_attn_func as _flex_flash_attn
from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.kernel.sink import check_layout
from megatron_magi.core.kernel.softmax import Softmax
from megatron_magi.core.runtime.dist_attn import dist_attn, dist_attn_and_max_logits
from megatron_magi.magi_attention.renamed import tell_about_environment
from megatron_magi.magi_attention.runtime_key import DistAttnRuntimeKey, remember

TUNING_ARGUMENTS = (
    "sm_margin", "disable_fwd_atomic_reduction", "disable_bwd_dkv_atomic_reduction",
    "ref_block_size", "max_seqlen_q", "auto_range_merge", "swap_ab", "pack_gqa", "cat_gqa",
    "sparse_load", "swap_bwd_qk_loop",
)  # fmt: skip
"""Arguments of ``flex_flash_attn_func`` that choose among MagiAttention's kernels; they are
accepted and change nothing here."""


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor | None = None,
    k_ranges: Tensor | None = None,
    attn_type_map: Tensor | None = None,
    *,
    index_attn_indices: Tensor | None = None,
    q_block_size: int = 1,
    k_block_size: int = 1,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    disable_fwd_atomic_reduction: bool = False,
    disable_bwd_dkv_atomic_reduction: bool = False,
    ref_block_size: tuple[int, int] | None = None,
    max_seqlen_q: int | None = None,
    auto_range_merge: bool = False,
    swap_ab: bool = False,
    pack_gqa: bool = False,
    cat_gqa: bool = False,
    sparse_load: bool = False,
    index_attn: bool = False,
    swap_bwd_qk_loop: bool = False,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention on one device where a query sees the keys that ranges and types say.

    Args:
        q: [T, H, D]; k, v: [S, G, D], H a multiple of G; fp16, bf16 (fp32 and fp64 run on the
            reference backend).
        q_ranges, k_ranges: int32 [N, 2]; all None: full attention.
        attn_type_map: int32 [N], 0 full, 1 causal, 2 inv_causal, 3 bi_causal; None: all full.
        sink: learnable logits that join every row's softmax, "sh" [s, H] or "ssh" [T, s, H].
        softmax_scale: None: 1 / sqrt(D).
        deterministic: gradients with equal bits from run to run.
        return_max_logits: refused where FlexAttention runs.
        softcap: above 0, logits are softcap * tanh(scaled score / softcap); 0: scaled scores.
        the rest: only their defaults mean something here: ``index_attn``, ``index_attn_indices``
            and block sizes are refused otherwise, ``TUNING_ARGUMENTS`` are ignored.

    Returns:
        out: [T, H, D] in q's dtype, 0 where a row sees nothing; AttnForwardMeta with lse [T, H]
        and max_logits [H] (largest visible logit, without the sink) or None.

    Raises:
        TypeError, ValueError: inputs that do not fit.
        NotImplementedError: what is refused.
    """
    tell_about_environment()
    _refuse_index_attention(index_attn, index_attn_indices, q_block_size, k_block_size)
    check_layout(sink_layout, sink)
    return _flex_flash_attn(
        q, k, v, q_ranges, k_ranges, attn_type_map,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        return_max_logits=return_max_logits,
        softcap=softcap,
        sink=sink,
    )  # fmt: skip


@one_graph_break
def calc_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: DistAttnRuntimeKey,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention of a dispatched sequence; local rows in, local rows out; differentiable.

    Args:
        q: [num_tokens_local, H, D]; k, v: [num_tokens_local, G, D].
        key: the key that dispatched them, or one of a second mask on the same tokens.
        sink: [s, H] logits, the same on every rank ("sh"). Its gradient is this rank's share: sum
            it over the group, as with any replicated parameter whose tokens are spread.
        softmax_scale: None: 1 / sqrt(D).
        softcap: above 0, logits are softcap * tanh(scaled score / softcap); 0: scaled scores.
        return_max_logits: refused where FlexAttention runs.

    Returns:
        out: [num_tokens_local, H, D]; AttnForwardMeta with lse [num_tokens_local, H] and
        max_logits [H] (over the whole sequence, the same on every rank) or None.

    Raises:
        TypeError, ValueError: tensors that do not fit the key.
        NotImplementedError: return_max_logits with FlexAttention.
        AgreementError: ranks that planned different things.
    """
    remember(key)
    check_layout("sh", sink)
    call = (q, k, v, key.plan, key.cp_group, Softmax(softmax_scale, softcap, sink))
    most = None
    if flag(return_max_logits, "return_max_logits"):
        out, lse, most = dist_attn_and_max_logits(*call)
    else:
        out, lse = dist_attn(*call)
    return out, AttnForwardMeta(lse, most)


def _refuse_index_attention(
    index_attn: bool, indices: Tensor | None, q_block_size: int, k_block_size: int
) -> None:
    sizes = integer(q_block_size, "q_block_size"), integer(k_block_size, "k_block_size")
    if flag(index_attn, "index_attn") or indices is not None or sizes != (1, 1):
        raise NotImplementedError(
            f"keys must be chosen by ranges, got index_attn={index_attn}, "
            f"{'indices' if indices is not None else 'no indices'} and block sizes "
            f"({q_block_size}, {k_block_size}); write the chosen keys as q_ranges and k_ranges"
        )
