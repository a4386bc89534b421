"""Tensors that no kernel takes."""

import pytest
import torch

from megatron_magi.core.kernel.attention import flex_flash_attn_func
from tests.core.kernel.test_attention import FULL, tensors


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x: x.__setitem__(1, x[1].double()), TypeError, "share q's dtype torch.float32"),
        (lambda x: x.__setitem__(2, x[2].double()), TypeError, "share q's dtype torch.float32"),
        (lambda x: x.__setitem__(1, x[1].to("meta")), ValueError, "must be on q's device cpu"),
        (lambda x: x.__setitem__(0, x[0].int()), TypeError, "must be fp16, bf16"),
        (lambda x: x.__setitem__(0, x[0][None]), ValueError, "fold the batch into the tokens"),
        (lambda x: x.__setitem__(1, x[1][:3]), ValueError, "k and v must have equal tokens"),
        (lambda x: x.__setitem__(1, x[1][..., :3]), ValueError, "and k q's head_dim 4, got"),
        (lambda x: x.__setitem__(2, x[2][..., :0]), ValueError, r"at least 1.*\[4, 2, 0\]"),
        (lambda x: x.__setitem__(0, torch.zeros(4, 3, 4)), ValueError, "got 3 and 2"),
        (lambda x: x.__setitem__(slice(1, 3), [torch.zeros(4, 0, 4)] * 2), ValueError, "and 0"),
        (lambda x: x.__setitem__(0, torch.zeros(4, 4, 2).mT), ValueError, "contiguous in head_dim"),
        (lambda x: x.__setitem__(2, torch.zeros(4, 4, 2).mT), ValueError, "contiguous in head_dim"),
        (lambda x: x.__setitem__(2, x[2].to("meta")), ValueError, "must be on q's device cpu"),
    ],
)
def test_bad_tensors_are_refused(change: object, error: type, text: str) -> None:
    """Also after a good call with the same mask."""
    good = tensors()
    flex_flash_attn_func(*good, slices=FULL)
    x = tensors()
    change(x)  # type: ignore[operator]
    for kwargs in ({}, {"slices": FULL}):
        with pytest.raises(error, match=text):
            flex_flash_attn_func(*x, **kwargs)
