"""Everything that a recipe may say, section by section, before anything is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_magi.config import MagiConfig


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, SwiGLU, rotary positions, grouped query heads, no biases."""

    num_layers: int = 4
    """Decoder layers of the whole model, over all pipeline stages."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int = 352
    """Width of the gated MLP (each of gate and up)."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: int = 2
    """Key/value heads; equal to num_attention_heads for plain multi-head attention."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    vocab_size: int = 257
    """Token ids in use, before padding. 257 is the built-in byte tokenizer with its EOD."""
    vocab_multiple: int = 128
    """The embedding is padded to a multiple of this; independent of tp, so layouts agree."""
    rotary_base: int = 10000
    """Base of the rotary frequencies: 10000 in Llama 2, 500000 in Llama 3."""
    rope_scaling: bool = False
    """Llama-3.1's long-context frequency scaling."""
    rope_scaling_factor: float = 8.0
    """Factor of rope_scaling: 8 in Llama-3.1, 32 in Llama-3.2."""
    norm_epsilon: float = 1e-5
    """The epsilon that is added to the mean square in every RMSNorm."""
    tie_embeddings: bool = True
    """Use the input embedding as the output matrix too."""
    init_std: float = 0.02
    """Standard deviation of new weights; that of projections into the residual stream is
    init_std / sqrt(2 * num_layers)."""
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
    """Reduce gradients while the backward pass still computes others."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass begins. Needs distributed_optimizer and
    overlap_grad_reduce."""

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def token_multiple(self) -> int:
        """The number that the rows of a rank must be divisible by."""
        return self.tp if self.sequence_parallel else 1

    @property
    def num_processes(self) -> int:
        """Processes of a run that no launcher started: one replica where dp is not given."""
        return self.model_size * (self.dp or 1)


@dataclass(frozen=True)
class DataConfig:
    """Packed documents in Megatron's .bin/.idx files; `megatron-magi data` writes them."""

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
    """Order in which a step's samples go to replicas and microbatches. It changes the last bits of
    sums alone: "reversed" shows how far rounding moves two equal runs apart."""
    balance_steps: int | None = None
    """Steps whose samples change places, so that replicas and pipeline microbatches of a step cost
    the same. 1: every step keeps its samples. None: the sampler's order."""
    prefetch: int = 2
    """Microbatches that a thread reads and plans ahead. 0: none."""
    moved_boundary: int = 0
    """A control: moves each sample's first inner document boundary by this many tokens, in the
    attention mask only. A comparison must catch it. 0 in real runs."""


@dataclass(frozen=True)
class LogConfig:
    """What a run writes, under log.dir/NAME."""

    dir: str = "runs"
    """Folder that holds the folders of runs."""
    interval: int = 1
    """Iterations between lines on the screen; the CSV has every iteration."""
    progress: bool = True
    """A progress bar on rank 0's standard error, if that is a terminal."""
    csv: bool = True
    """Write steps.csv, a line for every iteration."""
    overwrite: bool = False
    """Let a run from the start replace the steps.csv of another run of this name."""
    tensorboard: bool = False
    """Also TensorBoard event files, in log.dir/NAME/tensorboard. Needs the tensorboard package."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run saves, and from where it resumes; see docs/trainer/training.md."""

    dir: str | None = None
    """Folder of the checkpoints. None: log.dir/NAME/checkpoints."""
    interval: int | None = None
    """Iterations between checkpoints; the last iteration saves too. None: only a signal saves."""
    keep: int | None = 2
    """Number of newest checkpoints that are kept. None: all."""
    load: str | None = None
    """"latest": resume from the newest in dir. "auto": the same, or from the start if there is
    none. A path: that checkpoint, or imported weights. None: from the start."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, on Megatron's learning-rate schedule."""

    lr: float = 3e-4
    """Highest learning rate, at the end of the warm-up."""
    min_lr: float = 3e-5
    """Learning rate at the end of the decay, and after it."""
    warmup_iters: int = 0
    """Iterations in which the learning rate rises from 0 to lr. 0: none."""
    decay_iters: int | None = None
    """Iterations until min_lr. None: train.iterations."""
    decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay from lr to min_lr; "constant" stays at lr."""
    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """The epsilon that is added to the root of that mean before the division by it."""
    weight_decay: float = 0.1
    """An update shrinks weights by this number times the learning rate. 0: none."""
    clip_grad: float = 1.0
    """Limit of the global gradient norm. 0: no limit."""


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch and precision."""

    iterations: int = 100
    """Steps of the run, each one global batch and one update."""
    global_batch_size: int = 8
    """Samples per step over all data-parallel replicas; a microbatch is one packed sample."""
    seed: int = 1234
    """Seed of the weights (drawn by parameter name) and of the order of samples."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations; with bf16, main weights and reduced gradients are fp32."""
    recompute: Literal["none", "attention", "full"] = "none"
    """What the backward pass computes again: nothing, core attention, or whole layers."""
    dump_gradients: tuple[int, ...] = ()
    """Iterations whose gradients are written, whole and in fp32, to log.dir/NAME/gradients. Those
    beyond train.iterations are not reached and not written."""


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
class RunValues:
    """Everything of a run, as it was written; `RunConfig` is the same and checked."""

    name: str = "run"
    """Name of the folder that the run leaves behind, under log.dir."""
    attention: Literal["magi", "dense", "flex_plain", "sdpa"] = "magi"
    """"magi": this package. The others are baselines and need cp 1: "dense" is Megatron's own
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
