"""HeadShape: what a row of queries or keys weighs."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class HeadShape:
    """Attention heads on one tensor-parallel rank.

    Raises:
        ValueError: a count below 1, or query heads that do not divide over the key heads.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    """Elements of one head of a query, key or value row."""
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"HeadShape.{field.name} must be an integer >= 1, got {value!r}; "
                    f"give the counts of one tensor-parallel rank"
                )
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_q must be a multiple of num_heads_kv, got {self.num_heads_q} and "
                f"{self.num_heads_kv}; every key head serves the same number of query heads"
            )

    @property
    def kv_row_bytes(self) -> int:
        """Bytes that travel for one received row: its key and its value."""
        return 2 * self.num_heads_kv * self.head_dim * self.bytes_per_element
