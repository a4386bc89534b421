"""What nvidia-smi prints, and the figures that are made of it."""

from __future__ import annotations

from benchmarks.kernel.power import Samples, parse, row


def test_lines_are_parsed_without_the_first_tenth_and_a_cut_one() -> None:
    lines = ["1980, 150.20, Not Active", *["1605, 698.31, Active"] * 18, "1590, 690"]
    got = parse("\n".join(lines))
    assert got == Samples([1605.0] * 18, [698.31] * 18, [True] * 18)


def test_figures_of_a_row() -> None:
    """A kernel that runs at half of the peak of its clock, half of the time at the power limit."""
    clock, num_sms = 1500.0, 100
    flops = 0.5 * num_sms * 4096 * clock * 1e6 * 2e-3  # of 2 ms
    samples = Samples([clock] * 4, [700.0] * 4, [True, True, False, False])
    got = row(flops, [(2.0, samples), (2.0, samples)], num_sms)
    assert got["of_peak"] == 0.5 and got["power_capped"] == 0.5 and got["samples"] == 8
    assert got["clock_mhz"] == 1500 and got["ms"] == 2.0
    assert got["tflops"] == round(0.5 * 100 * 4096 * 1.5e9 / 1e12, 1)
    assert got["pj_per_flop"] == round(700 / got["tflops"], 3)
