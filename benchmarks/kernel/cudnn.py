"""cuDNN attention: dense masks through PyTorch's SDPA, packed documents and windows through
nvidia-cudnn-frontend, which alone offers them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.cell import Call, Case, Direction, Inputs, autograd_call
from benchmarks.lib.masks import Documents, cu_seqlens
from megatron_magi.core.kernel.head_dims import HeadDims, widths_of


class Cudnn:
    """Two doors to one library; SDPA costs nothing above the frontend on dense masks."""

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case, direction: Direction) -> str | None:
        if case.documents is None:
            return "no documents in this mask"
        if case.softcap:
            return "no softcap"
        if case.deterministic:
            return "its deterministic backward is not asked for here"
        if is_dense(case.documents) or importlib.util.find_spec("cudnn"):
            return None
        return "no nvidia-cudnn-frontend here, and SDPA has neither documents nor windows"

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        assert case.documents is not None
        if is_dense(case.documents):
            causal = case.documents.causal
            attend = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION, causal)
            return autograd_call(attend, direction, x)
        graphs = _graphs(case, (x.q.shape[1], x.k.shape[1]), widths_of(x.q, x.v))
        return autograd_call(lambda *qkv: _Packed.apply(*qkv, graphs), direction, x)


class _Packed(torch.autograd.Function):
    """The frontend's graphs as a differentiable function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, graphs: Graphs) -> Tensor:
        out, stats = q.new_empty(*q.shape[:2], v.shape[2]), graphs.new_stats()
        graphs.forward.run({"q": q, "k": k, "v": v, "o": out, "stats": stats})
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.graphs = graphs
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        tensors = dict(zip(("q", "k", "v", "o", "stats"), ctx.saved_tensors, strict=True))
        grads = {f"d{n}": torch.empty_like(tensors[n]) for n in ("q", "k", "v")}
        ctx.graphs.backward.run({**tensors, "do": dout.contiguous(), **grads})
        return *grads.values(), None


def is_dense(docs: Documents) -> bool:
    """Whether PyTorch's SDPA has this mask: one document, causal or full."""
    return len(docs.lengths) == 1 and docs.window is None


def sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's SDPA by one of its kernels: q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
    views = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*views, is_causal=causal, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@functools.lru_cache(maxsize=1)
def _graphs(case: Case, heads: tuple[int, int], widths: HeadDims) -> Graphs:
    assert case.documents is not None
    return Graphs(case.documents, heads, widths)


@dataclass
class Graph:
    """A finished graph: ``nodes`` by name, ``fixed`` tensors that every run takes."""

    graph: Any
    handle: Any
    nodes: dict[str, Any]
    fixed: dict[str, Tensor]
    workspace: Tensor

    def run(self, tensors: dict[str, Tensor]) -> None:
        pack = {self.nodes[n]: t for n, t in (tensors | self.fixed).items()}
        self.graph.execute(pack, self.workspace, handle=self.handle)


class Graphs:
    """Forward and backward over ragged tensors. Dimensions are [documents, heads, longest document,
    D]; where a document begins comes from offsets, counted in elements."""

    def __init__(self, docs: Documents, heads: tuple[int, int], widths: HeadDims) -> None:
        import cudnn

        self.cudnn, self.docs, self.longest = cudnn, docs, max(docs.lengths)
        self.tokens, self.scale = sum(docs.lengths), widths.head_dim**-0.5
        self.shapes = row_shapes(heads, widths)
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        starts = torch.tensor(cu_seqlens(docs.lengths), dtype=torch.int64, device="cuda")
        counts = torch.tensor(docs.lengths, dtype=torch.int32, device="cuda")
        fixed = {"counts_q": counts, "counts_k": counts.clone()}
        rows = {heads * dim for heads, dim in self.shapes.values()}
        fixed |= {f"offsets_{row}": starts * row for row in rows}
        self.fixed = {n: t.view(-1, 1, 1, 1) for n, t in fixed.items()}

    def new_stats(self) -> Tensor:
        count, (heads, _) = len(self.docs.lengths), self.shapes["q"]
        return torch.empty(count, heads, self.longest, 1, device="cuda")

    @functools.cached_property
    def forward(self) -> Graph:
        graph, nodes, common = self._begin("q", "k", "v")
        nodes["o"], nodes["stats"] = graph.sdpa(name="fwd", generate_stats=True, **common)
        self._outputs(nodes, "o")
        nodes["stats"].set_output(True).set_data_type(self.cudnn.data_type.FLOAT)
        return self._finish(graph, nodes)

    @functools.cached_property
    def backward(self) -> Graph:
        """With the number of tokens said; else work space is padded to the longest document."""
        try:
            return self._backward(max_total_seq_len_q=self.tokens, max_total_seq_len_kv=self.tokens)
        except self.cudnn.cudnnGraphNotSupportedError as error:
            print(f"cudnn: backward with padded work space: {error}", file=sys.stderr)
            return self._backward()

    def _backward(self, **totals: int) -> Graph:
        graph, nodes, common = self._begin("q", "k", "v", "o", "do")
        nodes["stats"] = graph.tensor_like(self.new_stats())
        nodes["dq"], nodes["dk"], nodes["dv"] = graph.sdpa_backward(
            name="bwd", o=nodes["o"], dO=nodes["do"], stats=nodes["stats"], **totals, **common
        )
        self._outputs(nodes, "dq", "dk", "dv")
        return self._finish(graph, nodes)

    def _begin(self, *inputs: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """A graph, its nodes by name, and the arguments that both directions take."""
        kinds = self.cudnn.data_type
        graph = self.cudnn.pygraph(
            io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT, handle=self.handle,
        )  # fmt: skip
        nodes = {n: graph.tensor_like(t) for n, t in self.fixed.items()}
        for n in inputs:
            dim, stride = self._layout(n)
            nodes[n] = graph.tensor(dim=dim, stride=stride, data_type=kinds.BFLOAT16)
            nodes[n].set_ragged_offset(self._offsets(nodes, n))
        common = {n: nodes[n] for n in ("q", "k", "v")} | self._rule()
        return (
            graph,
            nodes,
            common | dict(seq_len_q=nodes["counts_q"], seq_len_kv=nodes["counts_k"]),
        )

    def _rule(self) -> dict[str, Any]:
        rule: dict[str, Any] = {"use_padding_mask": True, "attn_scale": self.scale}
        if self.docs.causal:
            rule["diagonal_alignment"] = self.cudnn.diagonal_alignment.TOP_LEFT
            rule["diagonal_band_right_bound"] = 0
        if self.docs.window is not None:  # this bound is exclusive: so many keys, the own included
            rule["diagonal_band_left_bound"] = self.docs.window
        return rule

    def _layout(self, name: str) -> tuple[list[int], list[int]]:
        """dim and stride."""
        heads, dim = self.shapes[name]
        dims = [len(self.docs.lengths), heads, self.longest, dim]
        return dims, [self.longest * heads * dim, dim, heads * dim, 1]

    def _offsets(self, nodes: dict[str, Any], name: str) -> Any:
        heads, dim = self.shapes[name]
        return nodes[f"offsets_{heads * dim}"]

    def _outputs(self, nodes: dict[str, Any], *names: str) -> None:
        for n in names:
            dim, stride = self._layout(n)
            nodes[n].set_output(True).set_dim(dim).set_stride(stride)
            nodes[n].set_ragged_offset(self._offsets(nodes, n))

    def _finish(self, graph: Any, nodes: dict[str, Any]) -> Graph:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
        return Graph(graph, self.handle, nodes, self.fixed, workspace)


def row_shapes(heads: tuple[int, int], widths: HeadDims) -> dict[str, tuple[int, int]]:
    """Heads and columns of a token in every tensor of the graphs."""
    heads_q, heads_kv = heads
    queries = dict.fromkeys(("q", "dq"), (heads_q, widths.head_dim))
    keys = dict.fromkeys(("k", "dk"), (heads_kv, widths.head_dim))
    values = dict.fromkeys(("v", "dv"), (heads_kv, widths.value_dim))
    return queries | keys | values | dict.fromkeys(("o", "do"), (heads_q, widths.value_dim))
