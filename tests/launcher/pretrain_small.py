"""examples/pretrain_gpt.py with one more flag, the tests' baseline for masks.

`--dense-mask module:function` gives stock attention the mask of a `--magi-mask` function as a dense
one.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args

from megatron_magi.launcher.documents import MaskRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"


def add_arguments(parser: Any) -> Any:
    parser.add_argument("--dense-mask")
    return parser


def dense_mask(name: str, causal: torch.Tensor) -> torch.Tensor:
    """Returns a mask of Megatron's shape and meaning: True hides."""
    module, _, function = name.partition(":")
    request = MaskRequest((0, causal.shape[-1]), None)
    mask = getattr(importlib.import_module(module), function)(request)
    return torch.from_numpy(~mask.to_dense()).expand_as(causal)


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("pretrain_gpt_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    get_batch = example.get_batch

    def get_masked_batch(*given: Any) -> dict[str, Any]:
        batch: dict[str, Any] = get_batch(*given)
        name, mask = get_args().dense_mask, batch["attention_mask"]
        if name is not None and mask is not None:
            batch["attention_mask"] = dense_mask(name, mask)
        return batch

    example.get_batch = get_masked_batch
    example.main(add_arguments)
