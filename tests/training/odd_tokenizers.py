"""Tokenizers that show where a packer goes wrong; a module, so that other processes import them."""

from __future__ import annotations

import os
import time

import numpy as np
import numpy.typing as npt


class WideTokenizer:
    """A byte b is 100,000 + b: ids that 16 bits cannot hold."""

    name = "wide"
    vocab_size = 128_256
    eod = 128_001

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64) + 100_000


class MoodyTokenizer(WideTokenizer):
    """Sleeps over "slow", gives the EOD for "eod", and takes its process along at "die"."""

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        if text.startswith(b"slow"):
            time.sleep(0.5)
        if text.startswith(b"die"):
            os._exit(9)
        return np.array([self.eod]) if text.startswith(b"eod") else super().encode(text)
