"""How scores become weights: their scale, their cap, and the sinks that join a row's softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_magi.checks import number
from megatron_magi.core.tensor_checks import tensor

LIMITS = (1e-30, 1e30)
"""Of scale and softcap: products and quotients with scores stay inside fp32."""


@dataclass(frozen=True, eq=False)
class Softmax:
    """The softmax of an attention call.

    Raises:
        TypeError: a scale or softcap that is no number, or a sink that is no tensor.
        ValueError: a scale that is not in 1e-30 to 1e30, or a softcap that is neither so nor 0.
    """

    scale: float | None = None
    """The factor of scores; None: 1 / sqrt(D), D being the head_dim of queries."""
    softcap: float = 0.0
    """Above 0, logits are softcap * tanh(scaled score / softcap); 0: scaled scores."""
    sink: Tensor | None = None
    """Learnable logits without values, which join the softmax of every row: [s, H] for all rows or
    [T, s, H] per token, finite, any float dtype. None: there are none."""

    def __post_init__(self) -> None:
        check_softmax(self.scale, self.softcap, self.sink)

    def numbers(self, q: Tensor) -> tuple[float, float]:
        """(the factor of these queries' scores, softcap).

        Args:
            q: [T, H, D].

        Raises:
            TypeError: no tensor.
            ValueError: no heads, or heads without elements.
        """
        tensor(q, "q")
        if q.ndim != 3 or q.shape[2] == 0:
            raise ValueError(
                f"q must be [tokens, heads, head_dim] with head_dim of at least 1, got "
                f"{list(q.shape)}; pass the queries of the call"
            )
        return scale_for(self.scale, q), float(self.softcap)


def check_softmax(scale: float | None, softcap: float, sink: Tensor | None) -> None:
    """Refuse what no ``Softmax`` has.

    Raises:
        as ``Softmax``.
    """
    least, most = LIMITS
    if scale is not None and not least <= number(scale, "softmax_scale") <= most:
        raise ValueError(
            f"softmax_scale must be between {least} and {most}, got {scale}; pass None for "
            f"1 / sqrt(head_dim), or negate the queries"
        )
    cap = number(softcap, "softcap")
    if cap and not least <= cap <= most:
        raise ValueError(
            f"softcap must be 0.0 (logits are not capped) or between {least} and {most}, got "
            f"{softcap}; pass the size that logits may reach, such as 50.0"
        )
    if sink is not None:
        tensor(sink, "sink")


def scale_for(scale: float | None, q: Tensor) -> float:
    """The factor of the scores of queries [T, H, D]; None: 1 / sqrt(D)."""
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


PLAIN_SOFTMAX = Softmax()
"""Scores times 1 / sqrt(D), without cap and sinks."""
