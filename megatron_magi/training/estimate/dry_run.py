"""Facts of a run, computed in one process without starting it: `pretrain.py --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.core.plan import AttnPlan, HeadShape, make_attn_plan
from megatron_magi.training.checkpoint.checkpoint_folder import choose_checkpoint
from megatron_magi.training.data.packed_samples import (
    PackedDataset,
    PackedSample,
    has_files,
    mask_of_documents,
)
from megatron_magi.training.estimate.flops import model_parameters, step_flops
from megatron_magi.training.estimate.memory import RankMemory, rank_memory
from megatron_magi.training.estimate.pack_cost import sample_order
from megatron_magi.training.recipe.config_checks import data_parallel_size
from megatron_magi.training.recipe.run_config import RunConfig

HOPPER_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200, for recipes that train in bf16. Those in fp32 run on the CPU or
away from the fused kernels, where no rate is a fair guess."""


@dataclass(frozen=True)
class DryRun:
    """Facts of a run that was not started."""

    config: RunConfig
    dp: int
    """Data-parallel size."""
    data: str
    """The origin of the masks below."""
    num_documents: int
    """Documents in the first sample."""
    area: int
    """Visible cells of the first global batch."""
    flops: int
    """FLOPs of a step."""
    plan: AttnPlan | None
    """Plan of the first sample; None for the dense baseline."""
    memory: tuple[RankMemory, ...]
    """Memory of a rank, per pipeline stage."""
    epochs: float | None
    """Epochs of the data in the whole run; None without data."""
    resumes_at: int
    """Iterations that the checkpoint to load has completed."""

    @property
    def world_size(self) -> int:
        return self.config.parallel.model_size * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.data.seq_length

    def step_seconds(self, mfu: float, peak_tflops: float) -> float:
        """Time of a step if every rank reaches the share `mfu` of its peak rate."""
        return self.flops / (self.world_size * mfu * peak_tflops * 1e12)


def dry_run(config: RunConfig, world_size: int | None = None) -> DryRun:
    """Compute the facts of a run. Reads the data files if they exist, else assumes documents.

    Raises:
        RecipeError: what would stop the run at its start, except missing data.
    """
    p = config.parallel
    dp = data_parallel_size(config, world_size or p.num_processes)
    samples, data, per_epoch = _first_batch(config, dp)
    masks = [mask_of_documents(s.cu_seqlens, config.data) for s in samples]
    area = sum(mask.area() for mask in masks)
    tokens = config.train.global_batch_size * config.data.seq_length
    plan = _plan(config, masks[0])
    checkpoint = choose_checkpoint(config).checkpoint
    used = config.train.iterations * config.train.global_batch_size
    return DryRun(
        config=config,
        dp=dp,
        data=data,
        num_documents=len(samples[0].cu_seqlens) - 1,
        area=area,
        flops=step_flops(config.model, tokens, area),
        plan=plan,
        memory=tuple(rank_memory(config, plan, dp, stage) for stage in range(p.pp)),
        epochs=None if per_epoch is None else used / per_epoch,
        resumes_at=0 if checkpoint is None else checkpoint.iteration,
    )


def report(run: DryRun, mfu: float, peak_tflops: float | None = None) -> str:
    """The facts for a screen.

    Args:
        peak_tflops: of a rank; None: that of a Hopper GPU for a run in bf16, else unknown.
    """
    blocks = (_layout, _parameters, _work, _memory, _plan_text)
    lines = [line for block in blocks for line in block(run)]
    return "\n".join([*lines, *_time(run, mfu, peak_tflops), "dry run: nothing was started"])


def _first_batch(config: RunConfig, dp: int) -> tuple[list[PackedSample], str, int | None]:
    """Samples of the first global batch, their origin, and the number of samples of an epoch."""
    numbers = range(config.train.global_batch_size)
    if has_files(config.data):
        dataset = PackedDataset(
            config.data,
            config.train.seed,
            config.validation.fraction,
            vocab_size=config.model.vocab_size,
        )
        sample_at = sample_order(dataset, config, dp)
        samples = [dataset[sample_at(n)] for n in numbers]
        return samples, config.data.path, dataset.samples_per_epoch
    where = f"assumed documents (no data at {config.data.path})"
    return [assumed_sample(config, n) for n in numbers], where, None


def assumed_sample(config: RunConfig, number: int) -> PackedSample:
    """A sample of documents whose lengths fall off exponentially, an eighth of it long on average.

    It depends only on the seed and the number. Its tokens are all 0.
    """
    length = config.data.seq_length
    rng = np.random.RandomState([config.train.seed & 0xFFFFFFFF, number])
    ends = np.cumsum(1 + rng.exponential(length / 8, 64).astype(np.int64))
    inner = ends[ends < length]
    cu_seqlens = np.concatenate([[0], inner, [length]]).astype(np.int32)
    tokens = np.zeros(length, dtype=np.int64)
    return PackedSample(number, tokens, tokens, np.ones(length, np.float32), cu_seqlens, ())


def _plan(config: RunConfig, mask: AttnMask) -> AttnPlan | None:
    if config.attention != "magi":
        return None
    heads, multiple = heads_of(config), config.parallel.token_multiple
    return make_attn_plan(mask, config.parallel.cp, heads, config.magi, token_multiple=multiple)


def heads_of(config: RunConfig) -> HeadShape:
    """Attention heads of a run on one tensor-parallel rank."""
    m, tp = config.model, config.parallel.tp
    heads, groups = m.num_attention_heads // tp, m.num_query_groups // tp
    return HeadShape(heads, groups, m.kv_channels, 4 if config.train.dtype == "fp32" else 2)


def _layout(run: DryRun) -> list[str]:
    c, p = run.config, run.config.parallel
    named = ("sequence_parallel", "distributed_optimizer", "overlap_grad_reduce")
    options = [n.replace("_", " ") for n in (*named, "overlap_param_gather") if getattr(p, n)]
    return [
        f"run         {c.name}: attention {c.attention}, {c.train.dtype}, "
        f"recompute {c.train.recompute}",
        f"layout      {run.world_size} processes: tp {p.tp} pp {p.pp}"
        + (f" (vpp {p.vpp})" if p.vpp else "")
        + f" cp {p.cp} dp {run.dp}"
        + "".join(f", {o}" for o in options),
    ]


def _parameters(run: DryRun) -> list[str]:
    parts = model_parameters(run.config)
    text = ", ".join(f"{name} {number:,}" for name, number in parts.items() if number)
    tied = ", output tied to embedding" if run.config.model.tie_embeddings else ""
    return [f"parameters  {sum(parts.values()):,}: {text}{tied}"]


def _work(run: DryRun) -> list[str]:
    c = run.config
    batch, length = c.train.global_batch_size, c.data.seq_length
    attention = run.flops - step_flops(c.model, run.tokens, 0)
    causal = batch * length * (length + 1) // 2
    epochs = "" if run.epochs is None else f", {run.epochs:.3g} epochs"
    return [
        f"data        {run.data}; first sample: {run.num_documents} documents",
        f"tokens      {run.tokens:,} a step ({batch} samples of {length:,}), "
        f"{c.train.iterations * run.tokens:,} in {c.train.iterations:,} steps{epochs}",
        f"FLOPs       {run.flops:.4g} a step, {100 * attention / run.flops:.1f} % of it attention "
        f"(visible cells: {100 * run.area / causal:.1f} % of a causal mask)",
    ]


def _memory(run: DryRun) -> list[str]:
    stage = max(range(len(run.memory)), key=lambda s: run.memory[s].total)
    memory = run.memory[stage]
    where = f" (fullest pipeline stage: {stage})" if len(run.memory) > 1 else ""
    unit, name = (2**30, "GiB") if memory.total >= 2**29 else (2**20, "MiB")
    lines = [f"memory      {memory.total / unit:.2f} {name} a rank{where}, estimated"]
    for part, number in vars(memory).items():
        lines.append(f"  {part.replace('_', ' '):<20} {number / unit:8.3f} {name}")
    return lines


def _plan_text(run: DryRun) -> list[str]:
    plan = run.plan
    if plan is None:
        return []
    layout = plan.layout
    ring = layout.num_local_tokens * (plan.cp_size - 1)
    rows = plan.rows_received
    text = (
        f"plan        first sample on cp {plan.cp_size}: {layout.num_local_tokens:,} tokens a "
        f"rank in chunks of {layout.chunk_size}, balance (max/mean) {plan.imbalance:.3f}, "
        f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"
    )
    if plan.cp_size == 1:
        unused = "  transport symm_mem is not used: one rank exchanges nothing"
        return [text, *([unused] if plan.config.transport == "symm_mem" else [])]
    each = ", ".join(f"{n:,}" for n in rows[:16].tolist()) + (", ..." if len(rows) > 16 else "")
    lines = [text, f"  key rows received by each rank: {each} (a ring: {ring:,} each)"]
    if plan.config.transport == "symm_mem":
        lines.append(
            f"  transport {plan.config.transport}: needs Hopper GPUs of one host, which are not "
            f"checked here"
        )
    return lines


def _time(run: DryRun, mfu: float, peak_tflops: float | None) -> list[str]:
    dtype, of_whom = run.config.train.dtype, ""
    if peak_tflops is None and dtype == "bf16":
        peak_tflops, of_whom = HOPPER_TFLOPS, " (dense bf16 of an H100 or H200)"
    if peak_tflops is None:
        return [
            f"time        unknown: no rate is assumed for {dtype}; pass --peak-tflops N of a rank"
        ]
    seconds = run.step_seconds(mfu, peak_tflops)
    left = run.config.train.iterations - run.resumes_at
    begun = f" (resumed after {run.resumes_at:,})" if run.resumes_at else ""
    total = timedelta(seconds=round(max(0, left) * seconds))
    rate = f"{100 * mfu:.0f} % of {peak_tflops:g} TFLOP/s a rank{of_whom}"
    return [
        f"time        {seconds:.4g} s a step at {rate}, {run.tokens / seconds:,.0f} tokens/s; "
        f"{left:,} steps{begun}: {total}",
    ]
