"""HeadShape: the number and size of the attention heads, and so the size of a row."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_magi.checks import integer, shown

MOST = 2**16
"""The most heads, and the widest one. The planner goes through the heads of a launch."""


@dataclass(frozen=True)
class HeadShape:
    """Attention heads on one tensor-parallel rank.

    Shapes with equal sizes are equal: a ``head_dim_v`` equal to ``head_dim`` becomes None.

    Raises:
        ValueError: a count that is not 1 to 65536, or query heads that do not divide over the key
            heads.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    """Elements of one head of a query or key row; of a value row too, unless ``head_dim_v`` is
    given."""
    bytes_per_element: int = 2
    head_dim_v: int | None = None
    """Elements of one head of a value or output row (multi-latent attention); None: head_dim."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "head_dim_v" or self.head_dim_v is not None:
                object.__setattr__(self, field.name, _count(getattr(self, field.name), field.name))
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", None)
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_q must be a multiple of num_heads_kv, got {self.num_heads_q} and "
                f"{self.num_heads_kv}; every key head serves the same number of query heads"
            )

    @property
    def value_dim(self) -> int:
        """Elements of one head of a value or output row."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def kv_row_elements(self) -> int:
        """Elements of one row of keys and values together."""
        return self.num_heads_kv * (self.head_dim + self.value_dim)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes that are sent for one received row: its key and its value."""
        return self.kv_row_elements * self.bytes_per_element

    @property
    def query_row_bytes(self) -> int:
        """Bytes of a query whose output is computed on another rank, forward and backward: q, dout
        and the query again in the inputs' dtype; out, lse, delta, lse again and dq in fp32."""
        rows = 2 * self.head_dim + self.value_dim
        in_fp32 = self.value_dim + 3 + self.head_dim
        return self.num_heads_q * (rows * self.bytes_per_element + in_fp32 * 4)

    def __str__(self) -> str:
        """Heads and widths for a screen: 32/8x128, or 16/16x192+128 with narrower values."""
        values = "" if self.head_dim_v is None else f"+{self.head_dim_v}"
        return f"{self.num_heads_q}/{self.num_heads_kv}x{self.head_dim}{values}"


def _count(value: object, name: str) -> int:
    try:
        return integer(value, name, 1, MOST)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"HeadShape.{name} must be an integer from 1 to {MOST}, got {shown(value)}; "
            f"give the counts of one tensor-parallel rank"
        ) from None
