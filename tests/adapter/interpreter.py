"""Triton's kernels on the GPU, or interpreted where there is none. Import it before the kernels."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("Triton is there for compiling; run this file alone", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are declared
pytest.importorskip("triton", reason="the fused kernels are Triton's")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
