"""The counts that the house keeps."""

from __future__ import annotations

from tools import house_counts


def test_the_way_to_the_kernel_is_short_and_true() -> None:
    """From the public function to the kernel; every file names the next one's function or file."""
    way = house_counts.way_to_the_kernel()
    assert way[0] == "core/kernel/attention.py" and way[-1] == "csrc/attention/forward/kernel.cuh"
    assert len(way) <= 9 and all((house_counts.PACKAGE / step).is_file() for step in way)
    texts = [(house_counts.PACKAGE / step).read_text() for step in way]
    needles = ["attend(", "select_backend(", 'prepared("magi_attn_fwd"', "prepared_call(",
               '"prepared_call"', "magi_attn_fwd(", "fwd_kernel<", "fwd_kernel("]  # fmt: skip
    for text, needle, name in zip(texts, needles, way, strict=True):
        assert needle in text, (name, needle)


def test_own_functions_have_at_most_six_parameters() -> None:
    assert not house_counts.counts()["own functions above 6 parameters"]
