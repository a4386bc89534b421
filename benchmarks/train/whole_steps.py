"""Cases of pretrain.py that time whole steps: stock as its maintainers set it up, and the flag.

Every model has its layers from TransformerEngine. `1b` is a Llama of about a billion parameters,
`8b` has four layers of the shape of Llama-3 8B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.planner.plans import DISTRIBUTIONS
from benchmarks.train.corpora import TOKENS
from benchmarks.train.pretrain_cases import BILLION, DOCUMENTS, MAGI, WORK, Case, Flags, layout
from benchmarks.train.pretrain_te import (
    ATTENTION_GRAPHS,
    CUDNN,
    EXCHANGING,
    FA3,
    RECOMPUTE,
    TENSORWISE,
    case,
)

EIGHT_B: Flags = {
    "num-layers": 4,
    "hidden-size": 4096,
    "num-attention-heads": 32,
    "num-query-groups": 8,
    "ffn-hidden-size": 14336,
    "global-batch-size": 4,
    "train-iters": 8,
    "vocab-size": 32767,
    "max-position-embeddings": 131072,
}
"""Layers of Llama-3 8B, but 4 of them, and a smaller vocabulary."""
MODELS = {"1b": BILLION, "8b": EIGHT_B}
MAINTAINED: Flags = {
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "cross-entropy-loss-fusion": True,
    "calculate-per-token-loss": True,
    "manual-gc": True,
}
"""Flags of Megatron's example job for Llama-3 8B that concern speed."""
KERNELS = {"cudnn": CUDNN, "fa3": FA3}
WAYS = ("p2p", "all_gather", "a2a")
HIERARCHICAL = "a2a+p2p"
ALONE = ("alone",)
LAYOUTS = {
    1: {"cp1": (layout(), ALONE)},
    2: {"cp2": (layout(cp=2), WAYS), "tp2": (layout(tp=2), ALONE)},
    4: {
        "cp4": (layout(cp=4), (*WAYS, HIERARCHICAL)),
        "tp2cp2": (layout(cp=2, tp=2), WAYS),
        "pp2cp2": (layout(cp=2, pp=2), WAYS),
        "tp4": (layout(tp=4), ALONE),
    },
    8: {
        "cp8": (layout(cp=8), (*WAYS, HIERARCHICAL)),
        "tp2cp4": (layout(cp=4, tp=2), (*WAYS, HIERARCHICAL)),
        "dp2cp4": (layout(cp=4), (*WAYS, HIERARCHICAL)),
        "tp8": (layout(tp=8), ALONE),
    },
}
"""By GPUs: layouts, with stock's ways of context parallelism. Those without any are a check: where
stock is slow there too, the setting is at fault and not its context parallelism."""
GRAPH_LENGTHS = (2048, 8192)
"""Tokens of a GPU that is busy for less and for more than the host needs to start a layer."""
ONE_STEP: Flags = {
    "profile": True,
    "use-pytorch-profiler": True,
    "profile-step-start": 6,
    "profile-step-end": 7,
    "profile-ranks": 0,
    "tensorboard-dir": f"{WORK}/tensorboard",
}
"""Megatron's own trace of one step of rank 0."""
SFT: Flags = {"sft": True}
SFT_MODULE = "benchmarks.train.pretrain_sft"
SFT_KINDS = ("sft-short", "sft-long")


@dataclass(frozen=True)
class Shape:
    """What a stock case and its counterpart train."""

    model: str
    length: int
    kind: str | None = None
    """How it differs from bf16 on causal sequences; or `profile`."""
    flags: Flags | None = None

    @property
    def all_flags(self) -> Flags:
        """Flags of the model, its maintainers' and those of the kind."""
        common = {**MODELS[self.model], **MAINTAINED, "seq-length": self.length}
        return {**common, **(self.flags or {})}


PLAIN = (Shape("1b", 8192), Shape("1b", 32768), Shape("8b", 32768), Shape("8b", 65536))
ONE_GROUP = (
    Shape("8b", 131072, "recompute", {**RECOMPUTE, "global-batch-size": 2}),
    Shape("1b", 32768, "fp8", TENSORWISE),
    Shape("1b", 8192, "profile", ONE_STEP),
    Shape("1b", 32768, "profile", ONE_STEP),
    Shape("8b", 65536, "profile", ONE_STEP),
    *(Shape("1b", length, kind, SFT) for kind in SFT_KINDS for length in (32768, 65536)),
)
"""On the layout alone that has one context-parallel group of all GPUs."""
LONGEST = Shape("8b", 131072)
"""16,384 tokens on each of eight GPUs, as 65,536 on four: recomputes nothing."""


def whole_step_cases(gpus: int) -> list[Case]:
    """Stock in every way on both kernels, and magi, on the GPUs of one host."""
    places = LAYOUTS[gpus]
    plain = PLAIN + (LONGEST,) * (gpus == 8)
    cases = [x for shape in plain for place in places for x in _next_to_stock(shape, place, gpus)]
    return cases + [x for shape in ONE_GROUP for x in _next_to_stock(shape, f"cp{gpus}", gpus)]


def _next_to_stock(shape: Shape, place: str, gpus: int) -> list[Case]:
    """Magi, and stock on each kernel in every way of a layout."""
    parallel, ways = LAYOUTS[gpus][place]
    first = place if shape.kind is None else f"{shape.kind} {place}"
    last = f"{shape.model} {shape.length}"
    flags = {**shape.all_flags, **parallel}
    cases = [case(f"magi {first} {last}", gpus, flags, MAGI)]
    for kernel, backend in KERNELS.items():
        for way in ways:
            name = f"stock {first} {kernel} {way} {last}"
            cases.append(case(name, gpus, flags, _exchange(way, parallel), backend))
    if shape.kind not in SFT_KINDS:
        return cases
    lengths = {"CONVERSATIONS": shape.kind.removeprefix("sft-")}
    return [replace(x, module=SFT_MODULE, environment=lengths) for x in cases]


def _exchange(way: str, parallel: Flags) -> Flags:
    """Flags of one of stock's ways of context parallelism on a layout."""
    if way == HIERARCHICAL:
        sizes = [2, parallel["context-parallel-size"] // 2]
        return {"cp-comm-type": way, "hierarchical-context-parallel-sizes": sizes}
    return {"cp-comm-type": way} if way in WAYS else {}


def graph_cases(gpus: int) -> list[Case]:
    """Magi's attention and stock's, eager and in each kind of CUDA graph that may hold it."""
    parallel, place = layout(cp=gpus), "" if gpus == 1 else f"cp{gpus} "
    kinds: dict[str, Flags] = {"eager": {}, **ATTENTION_GRAPHS}
    backends = {"magi": MAGI, **{f"stock {kernel}": x for kernel, x in KERNELS.items()}}
    if gpus > 1:
        kinds = {kind: kinds[kind] for kind in ("eager", *EXCHANGING)}
        ways = {f"stock fa3 {way}": {**FA3, **_exchange(way, parallel)} for way in WAYS}
        backends = {"magi": MAGI, **ways}
    return [
        case(f"{name} {place}{kind} 1b {gpus * rows}", gpus, Shape("1b", gpus * rows).all_flags,
             parallel, backend, graphs)
        for rows in GRAPH_LENGTHS
        for name, backend in backends.items()
        for kind, graphs in kinds.items()
    ]  # fmt: skip


DEALT: Flags = {"magi-balance-step": True}
BALANCE_LENGTHS = (32768, 131072)
ONE_A_GPU, FOUR_A_GPU = 1, 4
"""Samples of a step."""
SAMPLES, SLOW_STEPS = 64, 4
"""Whose times count, and the first steps, in which kernels are loaded."""
NO_DOCUMENTS: Flags = dict.fromkeys(DOCUMENTS)
"""Conversations mask documents anyway."""


def balance_cases(gpus: int) -> list[Case]:
    """Real lengths of documents, new ones in every step, on divisions of the GPUs.

    Stock masks documents of data files without context parallelism alone. With it, stock trains on
    the same documents as conversations, and balances them with hybrid context parallelism. A name's
    last words are the distribution, the samples of a step and their length.
    """
    return [
        each
        for length in BALANCE_LENGTHS
        for name in DISTRIBUTIONS
        for samples in (ONE_A_GPU * gpus, FOUR_A_GPU * gpus)
        for each in _divisions(gpus, length, name, samples)
    ]


def sample_cases() -> list[Case]:
    """A replica of one GPU that trains one new sample in a step, so that each sample has a time.

    Stock masks documents of data files, because there is no context parallelism.
    """
    length = min(BALANCE_LENGTHS)
    flags = _of_real_lengths(length, samples=1, steps=SAMPLES + SLOW_STEPS)
    backends = {"magi": MAGI, **{f"stock {kernel} alone": x for kernel, x in KERNELS.items()}}
    return [
        replace(case(f"{name} {documents}-docs {length}", 1, flags, x), documents=documents)
        for documents in DISTRIBUTIONS
        for name, x in backends.items()
    ]


def _of_real_lengths(length: int, samples: int, steps: int) -> Flags:
    return {
        **Shape("8b", length).all_flags,
        **DOCUMENTS,
        "vocab-size": 16383,  # a whole model's share of the products
        "global-batch-size": samples,
        "train-iters": steps,
    }


def _divisions(gpus: int, length: int, documents: str, samples: int) -> list[Case]:
    new = TOKENS // (samples * max(BALANCE_LENGTHS))  # steps
    flags = _of_real_lengths(length, samples, min(30 if samples == gpus else 12, new))
    last = f"{documents}-docs {samples} {length}"

    def of(name: str, *parts: Flags) -> Case:
        return replace(case(f"{name} {last}", gpus, flags, *parts), documents=documents)

    def packed(name: str, *parts: Flags) -> Case:
        chosen = of(f"stock sft {name}", SFT, NO_DOCUMENTS, *parts)
        return replace(chosen, module=SFT_MODULE, environment={"CONVERSATIONS": documents})

    cases = [
        of(f"stock {place} {kernel} alone", parallel, backend)
        for place, parallel in _without_cp(gpus).items()
        for kernel, backend in KERNELS.items()
    ]
    cases.append(of(f"magi dp{gpus}", layout(), MAGI))
    if samples > gpus:
        cases.append(of(f"magi dealt dp{gpus}", layout(), MAGI, DEALT))
    if gpus > 2:
        half = gpus // 2
        cases.append(of(f"magi dealt dp2cp{half}", layout(cp=half), MAGI, DEALT))
    cases.append(of(f"magi cp{gpus}", layout(cp=gpus), MAGI))
    cases.append(of(f"magi joined cp{gpus}", layout(cp=gpus), MAGI, {"micro-batch-size": gpus}))
    return cases + [
        packed(f"{place} {kernel} {way}", parallel, _exchange(way, parallel), backend)
        for place, (parallel, ways) in _with_cp(gpus, length).items()
        for kernel, backend in KERNELS.items()
        for way in ways
    ]


def _without_cp(gpus: int) -> dict[str, Flags]:
    """Layouts in which stock masks the documents of a data file."""
    more = {f"tp2dp{gpus // 2}": layout(tp=2)} if gpus > 2 else {}
    return {f"dp{gpus}": layout(), **more, f"tp{gpus}": layout(tp=gpus)}


def _with_cp(gpus: int, length: int) -> dict[str, tuple[Flags, tuple[str, ...]]]:
    """Layouts of conversations, with stock's ways; hybrid gives each as many ranks as it needs."""
    hybrid = {"hybrid-context-parallel": True, "max-seqlen-per-dp-cp-rank": length // gpus}
    one_group, half = layout(cp=gpus), gpus // 2
    more = {f"dp2cp{half}": (layout(cp=half), WAYS)} if gpus > 2 else {}
    return {**more, f"cp{gpus}": (one_group, WAYS), "hybrid": ({**one_group, **hybrid}, ("p2p",))}
