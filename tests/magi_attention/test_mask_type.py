"""Names and codes of the mask types."""

import pytest

from megatron_magi.magi_attention import AttnMaskType
from megatron_magi.magi_attention.mask_type import mask_types


def test_type_names_and_codes() -> None:
    assert [t.to_int_type() for t in AttnMaskType] == [0, 1, 2, 3]
    assert [AttnMaskType.from_int_type(i).value for i in range(4)] == [
        "full", "causal", "inv_causal", "bi_causal"]  # fmt: skip
    assert mask_types("causal", 2) == [AttnMaskType.CAUSAL] * 2
    assert mask_types([AttnMaskType.FULL, "bi_causal"], 2)[1] is AttnMaskType.BICAUSAL
    with pytest.raises(ValueError, match="got 'casual'; did you mean 'causal'"):
        mask_types("casual", 1)
    with pytest.raises(ValueError, match=r"one type or one per range \(3\), got 2"):
        mask_types(["full", "causal"], 3)
