"""Statistics of a packed corpus: for the screen and for PREFIX.json."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_magi.training.data.tokenizers import Tokenizer

HISTOGRAM_EDGES = (50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper ends, in tokens, of the length histogram; a last bin takes what is longer."""


@dataclass(frozen=True)
class CorpusStats:
    """What was packed; also written to PREFIX.json."""

    tokenizer: str
    vocab_size: int
    eod_token: int
    num_documents: int
    num_tokens: int
    length_percentiles: dict[str, int]
    """Tokens per document, its EOD included: p50, p90, p99, max."""
    length_histogram: dict[str, int]
    """Documents by upper end of their bin."""
    sha256: str
    """Of PREFIX.bin."""

    def table(self) -> str:
        """Numbers and a histogram for the screen."""
        p = self.length_percentiles
        lines = [
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens "
            f"({self.tokenizer} tokenizer, vocabulary {self.vocab_size}, EOD {self.eod_token})",
            "tokens per document: " + ", ".join(f"{k} {v:,}" for k, v in p.items()),
        ]
        peak = max(self.length_histogram.values())
        for label, number in self.length_histogram.items():
            bar = "#" * round(40 * number / peak)
            lines.append(
                f"  {label:>8} {number:>8,} {100 * number / self.num_documents:5.1f}% {bar}"
            )
        return "\n".join([*lines, f"sha256 {self.sha256}"])


def corpus_stats(lengths: npt.NDArray[np.int64], tokenizer: Tokenizer, sha256: str) -> CorpusStats:
    """Statistics of documents with these lengths in tokens."""
    percentiles = {
        f"p{p}": int(np.percentile(lengths, p, method="nearest")) for p in (50, 90, 99)
    } | {"max": int(lengths.max())}
    bins = np.searchsorted(HISTOGRAM_EDGES, lengths, side="left")
    counts = np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).tolist()
    labels = [f"<={edge}" for edge in HISTOGRAM_EDGES] + ["longer"]
    last = max(i for i, number in enumerate(counts) if number)
    return CorpusStats(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod_token=tokenizer.eod,
        num_documents=len(lengths),
        num_tokens=int(lengths.sum()),
        length_percentiles=percentiles,
        length_histogram=dict(zip(labels[: last + 1], counts[: last + 1], strict=True)),
        sha256=sha256,
    )
