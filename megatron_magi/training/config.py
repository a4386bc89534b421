"""A training run as one frozen value; a recipe is this value written as YAML.

Values are checked here once, before any process starts; `recipe.py` reads files and overrides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_magi.config import MagiConfig
from megatron_magi.training.config_checks import check_run


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
        check_run(self)
