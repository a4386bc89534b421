"""A training run as one frozen value; a recipe is this value written as YAML.

Values are checked here once, before any process starts; `recipe.py` reads files and overrides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

from megatron_magi.config import MagiConfig
from megatron_magi.training.field_kinds import misfits


class RecipeError(ValueError):
    """A recipe that cannot run: says what is required, what came and what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, SwiGLU, rotary positions, grouped query heads, no biases."""

    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 352
    """Width of the gated MLP (each of gate and up)."""
    num_attention_heads: int = 4
    num_query_groups: int = 2
    """Key/value heads; equal to num_attention_heads for plain multi-head attention."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    vocab_size: int = 257
    """Token ids in use, before padding. 257 is the built-in byte tokenizer with its EOD."""
    vocab_multiple: int = 128
    """The embedding is padded to a multiple of this; independent of tp, so layouts agree."""
    rotary_base: int = 10000
    rope_scaling: bool = False
    """Llama-3.1's long-context frequency scaling."""
    rope_scaling_factor: float = 8.0
    """Of rope_scaling: 8 in Llama-3.1, 32 in Llama-3.2."""
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
    init_std: float = 0.02
    fused: Literal["auto", "off"] = "auto"
    """"auto": one kernel for what Megatron's local layers do in several, where this machine can.
    "off": Megatron's own operations alone."""

    @property
    def kv_channels(self) -> int:
        """Head dimension in use."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True)
class ParallelConfig:
    """How processes are laid out; the world is tp * pp * cp * dp processes."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int | None = None
    """Model chunks per pipeline rank (interleaved schedule). None: no interleaving."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size. Only 1 today: the models here have no experts."""
    dp: int | None = None
    """Data parallel size. None: what is left of the world (1 where pretrain.py launches itself)."""
    sequence_parallel: bool = False
    """Split norms and dropouts over tp along the sequence."""
    distributed_optimizer: bool = False
    """Shard optimizer state over dp * cp."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    """Needs distributed_optimizer and overlap_grad_reduce."""

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def num_processes(self) -> int:
        """Processes of a run that no launcher started: one replica where dp is not given."""
        return self.model_size * (self.dp or 1)


@dataclass(frozen=True)
class DataConfig:
    """Packed documents in Megatron's .bin/.idx files; see scripts/prepare_data.py."""

    path: str = ""
    """Prefix of PREFIX.bin and PREFIX.idx."""
    seq_length: int = 1024
    """Tokens of a packed sample; any number."""
    eod_token: int = 256
    """Id that ends a document. 256 is the built-in byte tokenizer's."""
    mask: Literal["document", "causal", "block_causal"] = "document"
    """"document": causal inside each document. "causal": causal over the whole sample.
    "block_causal": the sample in blocks, such as video frames; a token sees its whole block and the
    blocks before."""
    block_tokens: int | None = None
    """Tokens of a block of mask block_causal; a sample's last block may be shorter."""
    block_window: int | None = None
    """Blocks that a token sees, its own included, with mask block_causal. None: all before it."""
    window: int | None = None
    """Keys a token sees, itself included (sliding window). None: all before it."""
    mask_across_documents: bool = True
    """Leave the label after an EOD out of the loss: it is the next document's first token."""
    step_order: Literal["forward", "reversed"] = "forward"
    """Order in which a step's samples go to replicas and microbatches. Sums alone see it, in their
    last bits: "reversed" shows how far two equal runs drift apart."""
    prefetch: int = 2
    """Microbatches read and planned ahead, in a thread. 0: none."""
    moved_boundary: int = 0
    """Negative control: moves each sample's first inner document boundary by this many tokens, in
    the attention mask alone. A comparison that does not notice is worthless. 0 in real runs."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, Megatron's schedule."""

    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_iters: int = 0
    decay_iters: int | None = None
    """Iterations until min_lr. None: train.iterations."""
    decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    """Global gradient norm cap."""


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch and precision."""

    iterations: int = 100
    global_batch_size: int = 8
    """Samples per step over all data-parallel replicas; a microbatch is one packed sample."""
    seed: int = 1234
    """Of weights (drawn by parameter name) and sample order."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights and activations; bf16 keeps fp32 main weights and reduces gradients in fp32."""
    recompute: Literal["none", "attention", "full"] = "none"
    """What the backward pass computes again: nothing, core attention, whole layers."""
    dump_gradients: tuple[int, ...] = ()
    """Iterations whose gradients are written, whole and in fp32, to log.dir/NAME/gradients. Those
    beyond train.iterations are not reached and not written."""


@dataclass(frozen=True)
class LogConfig:
    """What a run leaves behind, under log.dir/NAME."""

    dir: str = "runs"
    interval: int = 1
    """Iterations between lines on the screen; the CSV has every iteration."""
    progress: bool = True
    """A bar on rank 0's standard error, where that is a terminal."""
    csv: bool = True
    overwrite: bool = False
    """Let a run from the start replace the steps.csv of another run of this name."""
    tensorboard: bool = False
    """Also TensorBoard event files, in log.dir/NAME/tensorboard. Needs the tensorboard package."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on documents that training never sees."""

    fraction: float = 0.0
    """Share of the documents held out, by document number alone: the same for every seed."""
    interval: int | None = None
    """Iterations between validations; the last iteration validates too. None: never."""
    batches: int = 4
    """Batches of train.global_batch_size samples, the same ones every time."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run saves of itself, and where it goes on from; see docs/training.md."""

    dir: str | None = None
    """Folder of the checkpoints. None: log.dir/NAME/checkpoints."""
    interval: int | None = None
    """Iterations between checkpoints; the last iteration saves too. None: only a signal saves."""
    keep: int | None = 2
    """Newest checkpoints that stay. None: all."""
    load: str | None = None
    """"latest": go on from the newest in dir. "auto": the same, or from the start where there is
    none. A path: that checkpoint, or imported weights (docs/weights.md). None: from the start."""


@dataclass(frozen=True)
class RunConfig:
    """Everything of a run."""

    name: str = "run"
    attention: Literal["magi", "dense", "flex_plain", "sdpa"] = "magi"
    """"magi": this package. The others are references and need cp 1: "dense" is Megatron's own
    DotProductAttention with an explicit mask, "flex_plain" PyTorch's FlexAttention with a document
    mask, "sdpa" PyTorch's scaled_dot_product_attention for data.mask causal."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    magi: MagiConfig = field(default_factory=MagiConfig)

    @property
    def folder(self) -> Path:
        """Where the run leaves what it leaves behind."""
        return Path(self.log.dir) / self.name

    def __post_init__(self) -> None:
        for check in (
            _check_kinds,
            _check_positive,
            _check_optimizer,
            _check_model,
            _check_parallel,
            _check_train,
            _check_mask,
            _check_validation,
        ):
            check(self)


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Replicas in a world of `world_size` processes; the batch must divide over them.

    Raises:
        RecipeError: if the world or the batch does not divide.
    """
    p = config.parallel
    layout = f"tp {p.tp} * pp {p.pp} * cp {p.cp}"
    dp, rest = divmod(world_size, p.model_size)
    if rest or (p.dp is not None and p.dp != dp):
        want = (
            f"a multiple of {layout} = {p.model_size}"
            if p.dp is None
            else (f"{layout} * dp {p.dp} = {p.model_size * p.dp}")
        )
        raise RecipeError(
            f"the number of processes must be {want}, got {world_size}; "
            f"start that many, or change parallel.*"
        )
    batch = config.train.global_batch_size
    _require(
        batch % dp == 0,
        f"train.global_batch_size must be a multiple of the data-parallel size {dp}, got {batch}; "
        f"use {_ceil_to(batch, dp)}",
    )
    microbatches = batch // dp
    _require(
        p.vpp is None or microbatches % p.pp == 0,
        f"with parallel.vpp the microbatches per step must be a multiple of parallel.pp {p.pp}, "
        f"got {microbatches}; use train.global_batch_size={_ceil_to(batch, dp * p.pp)}",
    )
    return dp


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RecipeError(message)


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_kinds(c: RunConfig) -> None:
    for section in (f.name for f in fields(c) if is_dataclass(getattr(c, f.name))):
        for misfit in misfits(section, getattr(c, section)):
            raise RecipeError(misfit)


def _check_optimizer(c: RunConfig) -> None:
    o = c.optimizer
    for name in ("beta1", "beta2"):
        _require(
            0 <= getattr(o, name) < 1,
            f"optimizer.{name} must be at least 0 and below 1, got {getattr(o, name)}; "
            f"0.9 is usual",
        )
    for name, value, usual in (
        ("optimizer.eps", o.eps, 1e-8),
        ("model.norm_epsilon", c.model.norm_epsilon, 1e-5),
        ("model.init_std", c.model.init_std, 0.02),
    ):
        _require(value > 0, f"{name} must be positive, got {value}; {usual} is usual")
    for name, value, remark in (
        ("optimizer.weight_decay", o.weight_decay, "0 is none"),
        ("optimizer.clip_grad", o.clip_grad, "0 is no cap"),
        ("data.prefetch", c.data.prefetch, "0 reads nothing ahead"),
        ("data.eod_token", c.data.eod_token, "it comes from the tokenizer"),
    ):
        _require(value >= 0, f"{name} must be at least 0, got {value}; {remark}")


def _check_positive(c: RunConfig) -> None:
    sections = {
        "model": (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "head_dim",
            "vocab_size",
            "vocab_multiple",
            "rotary_base",
            "rope_scaling_factor",
        ),
        "parallel": ("tp", "pp", "vpp", "cp", "ep", "dp"),
        "data": ("seq_length", "window", "block_tokens", "block_window"),
        "train": ("iterations", "global_batch_size"),
        "log": ("interval",),
        "validation": ("interval", "batches"),
        "checkpoint": ("interval", "keep"),
        "optimizer": ("decay_iters", "lr"),
    }
    for section, names in sections.items():
        for name in names:
            value = getattr(getattr(c, section), name)
            _require(
                value is None or value > 0,
                f"{section}.{name} must be positive, got {value}; set it to 1 or more",
            )


def _check_model(c: RunConfig) -> None:
    m = c.model
    _require(
        m.head_dim is not None or m.hidden_size % m.num_attention_heads == 0,
        f"model.hidden_size must be a multiple of model.num_attention_heads, got {m.hidden_size} "
        f"and {m.num_attention_heads}; change one, or set model.head_dim",
    )
    _require(
        m.num_attention_heads % m.num_query_groups == 0,
        f"model.num_attention_heads must be a multiple of model.num_query_groups, got "
        f"{m.num_attention_heads} and {m.num_query_groups}; each key/value head serves as many "
        f"query heads",
    )
    _require(
        c.data.eod_token < m.vocab_size,
        f"data.eod_token must be below model.vocab_size, got {c.data.eod_token} and "
        f"{m.vocab_size}; both come from the tokenizer the data was packed with",
    )


def _check_parallel(c: RunConfig) -> None:
    p, m = c.parallel, c.model
    for value, name in (
        (m.num_attention_heads, "model.num_attention_heads"),
        (m.num_query_groups, "model.num_query_groups"),
        (m.ffn_hidden_size, "model.ffn_hidden_size"),
        (m.padded_vocab_size, "the padded vocabulary"),
    ):
        _require(
            value % p.tp == 0,
            f"{name} must be a multiple of parallel.tp {p.tp}, got {value}; lower parallel.tp",
        )
    stages = p.pp * (p.vpp or 1)
    _require(
        m.num_layers % stages == 0,
        f"model.num_layers must be a multiple of pp * vpp = {stages}, got {m.num_layers}; "
        f"use {_ceil_to(m.num_layers, stages)} layers or fewer stages",
    )
    _require(
        p.vpp is None or p.pp > 1,
        f"parallel.vpp needs parallel.pp of 2 or more, got pp {p.pp}; set parallel.vpp=null",
    )
    _require(
        p.ep == 1,
        f"parallel.ep must be 1 for these models without experts, got {p.ep}; set parallel.ep=1",
    )
    _require(
        not p.sequence_parallel or p.tp > 1,
        f"parallel.sequence_parallel needs parallel.tp of 2 or more, got tp {p.tp}; "
        f"set parallel.sequence_parallel=false",
    )
    _require(
        not p.overlap_param_gather or (p.distributed_optimizer and p.overlap_grad_reduce),
        "parallel.overlap_param_gather needs parallel.distributed_optimizer and "
        "parallel.overlap_grad_reduce, got one of them off; switch them on, or this one off",
    )
    _require(
        c.attention == "magi" or p.cp == 1,
        f"attention: {c.attention} needs parallel.cp 1 (the references have no context "
        f"parallelism), got cp {p.cp}; set attention=magi or parallel.cp=1",
    )


def _check_train(c: RunConfig) -> None:
    decay = c.optimizer.decay_iters or c.train.iterations
    _require(
        0 <= c.optimizer.warmup_iters < decay,
        f"optimizer.warmup_iters must be at least 0 and below the {decay} decay iterations, got "
        f"{c.optimizer.warmup_iters}; shorten the warm-up",
    )
    _require(
        all(i >= 1 for i in c.train.dump_gradients),
        f"train.dump_gradients must name iterations, which count from 1, got "
        f"{list(c.train.dump_gradients)}; leave out what is smaller",
    )
    _require(
        0 <= c.optimizer.min_lr <= c.optimizer.lr,
        f"optimizer.min_lr must lie between 0 and optimizer.lr {c.optimizer.lr}, got "
        f"{c.optimizer.min_lr}; lower it",
    )
    _require(
        c.data.path != "",
        "data.path must name packed data (PREFIX of PREFIX.bin and PREFIX.idx), got nothing; "
        "make it with scripts/prepare_data.py",
    )


def _check_mask(c: RunConfig) -> None:
    d = c.data
    is_plain = c.attention in ("flex_plain", "sdpa")
    _require(
        not is_plain or (d.mask != "block_causal" and d.window is None),
        f"attention: {c.attention} needs data.mask document or causal without a window, got "
        f"{d.mask} with window {d.window}; use attention=dense as the reference",
    )
    if d.mask == "block_causal":
        _require(
            d.block_tokens is not None,
            "data.mask block_causal needs the tokens of a block, got none; set data.block_tokens",
        )
        _require(
            d.window is None,
            f"data.mask block_causal has a window of blocks, got data.window {d.window} in tokens; "
            f"set data.block_window, and data.window=null",
        )
        return
    for name in ("block_tokens", "block_window"):
        value = getattr(d, name)
        _require(
            value is None,
            f"data.{name} needs data.mask block_causal, got {value} with mask {d.mask}; "
            f"set data.mask=block_causal or data.{name}=null",
        )


def _check_validation(c: RunConfig) -> None:
    v = c.validation
    _require(
        0 <= v.fraction < 1,
        f"validation.fraction must be at least 0 and below 1, got {v.fraction}; 0.02 is usual",
    )
    _require(
        v.interval is None or v.fraction > 0,
        f"validation.interval needs held-out documents, got interval {v.interval} and fraction "
        f"{v.fraction}; set validation.fraction=0.02",
    )
