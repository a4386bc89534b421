"""cuDNN attention through nvidia-cudnn-frontend: packed documents and windows, which SDPA lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def packed_call(
    direction: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: list[int],
    causal: bool, window: int | None,
) -> Callable[[], Any]:  # fmt: skip
    """One forward or backward over documents of these lengths; THD tensors, bf16."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    docs, longest = len(lengths), max(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda").view(-1, 1, 1, 1)
    out = torch.empty_like(q)
    stats = torch.empty(docs, q.shape[1], longest, 1, device="cuda")
    grads = [torch.empty_like(x) for x in (q, k, v)]

    def offsets(heads: int) -> Tensor:  # in elements
        return (starts * heads * q.shape[2]).view(-1, 1, 1, 1).cuda()

    off_q, off_k = offsets(q.shape[1]), offsets(k.shape[1])
    mask: dict[str, Any] = {"use_padding_mask": True}
    if causal:
        mask["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
        mask["diagonal_band_right_bound"] = 0
    if window is not None:
        mask["diagonal_band_left_bound"] = window

    def new_graph() -> Any:
        return cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )

    def add(graph: Any, x: Tensor, offset: Any) -> Any:
        heads, dim = x.shape[1:]
        node = graph.tensor(
            dim=[docs, heads, longest, dim], stride=[longest * heads * dim, dim, heads * dim, 1],
            data_type=cudnn.data_type.BFLOAT16,
        )  # fmt: skip
        node.set_ragged_offset(offset)
        return node

    def shape_output(node: Any, x: Tensor, offset: Any) -> None:
        heads, dim = x.shape[1:]
        node.set_output(True).set_dim([docs, heads, longest, dim])
        node.set_stride([longest * heads * dim, dim, heads * dim, 1]).set_ragged_offset(offset)

    def finish(graph: Any) -> Tensor:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)

    scale = 1 / math.sqrt(q.shape[2])

    def build(backward: bool) -> Callable[[], Any]:
        graph = new_graph()
        rq, rk = graph.tensor_like(off_q), graph.tensor_like(off_k)
        lq, lk = graph.tensor_like(counts), graph.tensor_like(counts)
        nq, nk, nv = add(graph, q, rq), add(graph, k, rk), add(graph, v, rk)
        pack = {nq: q, nk: k, nv: v, rq: off_q, rk: off_k, lq: counts, lk: counts}
        common = dict(q=nq, k=nk, v=nv, attn_scale=scale, seq_len_q=lq, seq_len_kv=lk, **mask)
        if not backward:
            no, ns = graph.sdpa(name="sdpa", generate_stats=True, **common)
            shape_output(no, q, rq)
            ns.set_output(True).set_data_type(cudnn.data_type.FLOAT)
            pack |= {no: out, ns: stats}
        else:
            no, nd = add(graph, out, rq), add(graph, dout, rq)
            ns = graph.tensor_like(stats)
            nodes = graph.sdpa_backward(name="bwd", o=no, dO=nd, stats=ns, **common)
            for node, x, offset in zip(nodes, (q, k, v), (rq, rk, rk), strict=True):
                shape_output(node, x, offset)
            pack |= {no: out, nd: dout, ns: stats, **dict(zip(nodes, grads, strict=True))}
        workspace = finish(graph)
        return lambda: graph.execute(pack, workspace, handle=handle)

    forward = build(False)
    if direction == "fwd":
        return forward
    forward()
    return build(True)
