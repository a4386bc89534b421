"""Megatron-Bridge's own pretrain and finetune with and without `use_magi`, on GPUs.

    python -m benchmarks.train.pretrain_bridge --record FILE.json

Bridge builds TransformerEngine's layers; weights are drawn by parameter name, so that all layouts
of a model begin with the same. `packed` trains on packed documents of uneven lengths, `lora`
finetunes low-rank adapters on them. Every case has processes of its own. Without a GPU the small
cases run over gloo, with a stand-in for TransformerEngine on the path.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.command import command_line
from benchmarks.lib.options import positive
from benchmarks.lib.record import describe
from benchmarks.train.pretrain_named import with_named_weights
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser

ROOT = Path(__file__).parents[2]
PACKED_SAMPLES = 16
LENGTH_WITHOUT_A_GPU = 96
SIZES = {
    "small": {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4,
              "ffn_hidden_size": 1408, "vocab_size": 383},
    "1b": {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 8,
           "ffn_hidden_size": 8192, "vocab_size": 128255},
}  # fmt: skip
"""Fields of Bridge's provider."""


@dataclass(frozen=True)
class BridgeCase:
    """One run of Bridge."""

    name: str
    """It has the words `packed` or `lora` where the data is packed or adapters are trained."""
    cp: int = 1
    """Context-parallel size, which is the number of GPUs."""
    magi: bool = False
    """Whether `use_magi` is called."""
    model: str = "small"
    """One of `SIZES`."""
    length: int = 2048
    """Tokens of a sequence."""

    @property
    def packed(self) -> bool:
        """Whether samples are packed documents."""
        return "packed" in self.name or self.lora

    @property
    def lora(self) -> bool:
        """Whether adapters are trained."""
        return "lora" in self.name


CASES = [
    BridgeCase("stock cp1"),
    BridgeCase("stock cp2", cp=2),
    BridgeCase("magi cp1", magi=True),
    BridgeCase("magi cp2", cp=2, magi=True),
    BridgeCase("stock packed cp1"),
    BridgeCase("magi packed cp1", magi=True),
    BridgeCase("magi packed cp2", cp=2, magi=True),
    BridgeCase("stock lora cp1"),
    BridgeCase("magi lora cp2", cp=2, magi=True),
    BridgeCase("stock 1b 8192 cp2", 2, False, "1b", 8192),
    BridgeCase("magi 1b 8192 cp2", 2, True, "1b", 8192),
]


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="JSON file of the results")
    parser.add_argument("--only", nargs="*", default=[""], help="cases with one of these words")
    parser.add_argument("--case-limit-s", type=positive, default=180, help="stop a case after it")
    parser.add_argument("--commit")
    parser.add_argument("--rank-of", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        print("RESULT", json.dumps(run(BridgeCase(**json.loads(options.rank_of)))), flush=True)
        return
    if options.record is None:
        parser.error("--record needs a file's path")
    rows = []
    meta = describe(command_line(), options.commit)
    for case in CASES:
        if any(word in case.name for word in options.only):
            rows.append(measure(case, options.case_limit_s))
            print(rows[-1], flush=True)
            options.record.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


def measure(case: BridgeCase, limit_s: float) -> dict[str, Any]:
    """Start the ranks of a case and collect what the first one saw."""
    given = json.dumps(dataclasses.asdict(case))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.cp)]
    command += ["--master-port", str(20_000 + time.time_ns() // 10**9 % 9_000)]
    command += ["-m", "benchmarks.train.pretrain_bridge", "--rank-of", given]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"case": case.name, "error": f"stopped after {limit_s:g} s"}
    results = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    if done.returncode or not results:
        return {"case": case.name, "error": (done.stdout + done.stderr)[-3000:]}
    active = [line for line in done.stdout.splitlines() if line.startswith("megatron_magi")]
    result = json.loads(results[0].removeprefix("RESULT "))
    return {"case": case.name, **result, "lines": active}


def run(case: BridgeCase) -> dict[str, Any]:
    """Losses, gradient norms and milliseconds of every step on this rank."""
    import torch

    from megatron_magi.bridge import use_magi
    from megatron_magi.bridge.cpu import install_cpu_bridge

    install_cpu_bridge()  # does nothing where CUDA is available
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = configured(case, torch.cuda.is_available())
    steps: dict[str, list[float]] = {"loss": [], "grad_norm": [], "ms": []}
    GPTModel.__init__ = with_named_weights(GPTModel.__init__)
    _observe(steps)
    if case.magi:
        use_magi(config)
    if case.lora:
        _skip_pretrained_checkpoint()
        config.peft = LoRA(dim=8)
        config.checkpoint.pretrained_checkpoint = str(config.dataset.dataset_root)
    (finetune if case.lora else pretrain)(config, forward_step)
    return steps


def configured(case: BridgeCase, on_gpu: bool) -> Any:
    """The example's configuration at this case's sizes."""
    config = runpy.run_path(str(ROOT / "examples" / "megatron_bridge.py"))["small_config"](on_gpu)
    length = case.length if on_gpu else LENGTH_WITHOUT_A_GPU
    for name, value in {**SIZES[case.model], "seq_length": length}.items():
        setattr(config.model, name, value)
    config.model.context_parallel_size = case.cp
    config.model.calculate_per_token_loss = True  # use_magi sets it; both count in the same way
    config.ddp.average_in_collective = False
    config.train.train_iters = 8
    config.train.global_batch_size = 4
    config.optimizer.lr = config.optimizer.min_lr = 2e-4
    config.dataset.seq_length = length
    config.tokenizer.vocab_size = SIZES[case.model]["vocab_size"]
    if case.packed:
        config.dataset = packed_documents(length)
    return config


def packed_documents(length: int) -> Any:
    """Documents of uneven lengths that Bridge reads as packed samples."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    NullTokenizer.eos_id = NullTokenizer.eod  # Bridge's packed data sets ask for it
    folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(5)
    samples = [packed_sample(length, rng) for _ in range(PACKED_SAMPLES)]
    (folder / "metadata.json").write_text("[]")
    np.save(folder / "packed.npy", np.array(samples, dtype=object), allow_pickle=True)
    specs = PackedSequenceSpecs(
        packed_sequence_size=length,
        packed_train_data_path=folder / "packed.npy",
        packed_metadata_path=folder / "metadata.json",
    )
    return GPTSFTDatasetConfig(
        seq_length=length,
        dataset_root=folder,
        enable_offline_packing=True,
        offline_packing_specs=specs,
        dataset_kwargs={"pad_to_max_length": True},
        do_validation=False,
        do_test=False,
        num_workers=0,
    )


def packed_sample(length: int, rng: np.random.Generator) -> dict[str, Any]:
    """Five documents, of whose tokens some give no loss."""
    starts = [0, *sorted(rng.choice(np.arange(4, length - 8), 4, replace=False).tolist())]
    return {
        "input_ids": rng.integers(0, 256, length).tolist(),
        "seq_start_id": starts,
        "loss_mask": (rng.random(length) < 0.7).astype(int).tolist(),
    }


def _skip_pretrained_checkpoint() -> None:
    """The pretrained weights are those drawn by name."""
    from megatron.bridge.training import setup

    setup.checkpoint_exists = lambda path: path is not None
    setup._load_checkpoint_from_path = lambda **kwargs: None


def _observe(steps: dict[str, list[float]]) -> None:
    """Note the figures of every training step."""
    from megatron.bridge.training import train

    original = train.train_step

    @functools.wraps(original)  # the launcher asks for the parameters that it knows
    def train_step(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        steps["loss"].append(float(result[0]["lm loss"]))  # waits for the GPU
        steps["grad_norm"].append(float(result[5]))
        steps["ms"].append(round(1e3 * (time.perf_counter() - begin), 1))
        return result

    train.train_step = train_step


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
