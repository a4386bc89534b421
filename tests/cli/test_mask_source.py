"""The mask that a command is about: options, files, recipes."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import Capture, plan_json, run
from tests.data_files import write_documents


@pytest.mark.parametrize("heads", ["16,4,64", "16/4,64", "16/4x64", "16/4x64,64"])
def test_heads_are_read_in_every_form(capsys: Capture, heads: str) -> None:
    code, out, err = run(capsys, "plan", "--lengths", "64", "--cp", "2", "--heads", heads)
    assert (code, err) == (0, "") and "(heads 16/4 of 64, 2 bytes)" in out


def test_plan_masks_by_option(capsys: Capture, tmp_path: Path) -> None:
    def area(*arguments: str) -> int:
        return plan_json(capsys, *arguments, "--cp", "2")["mask"]["visible_cells"]

    assert area("--lengths", "10,6") == area("--cu-seqlens", "0,10,16") == 55 + 21
    (tmp_path / "sums.txt").write_text("0 10\n16\n")
    assert area("--cu-seqlens", f"@{tmp_path / 'sums.txt'}", "--total", "20") == 76
    assert area("--lengths", "10", "--full") == 100
    assert area("--lengths", "10", "--window", "2") == 1 + 2 + 8 * 3
    assert area("--lengths", "10", "--window", "2,1", "--full") == 27 + 9
    assert area("--lengths", "10", "--window", "2", "--global-tokens", "1") == 27 + 7
    assert area("--lengths", "10,6", "--prefix", "4") == 55 + 21 + 2 * 6
    assert area("--lengths", "3", "--prefix", "4", "--total", "8") == 9
    assert area("--lengths", "10", "--block-tokens", "4") == 16 + 32 + 20
    assert area("--lengths", "10", "--block-tokens", "4", "--block-window", "1") == 16 + 16 + 4
    function = "tests.cli.mask_functions:prefixes"
    assert area("--lengths", "10,6", "--mask", function) == 55 + 21 + 2 * 6
    assert area("--lengths", "8", "--mask", "tests.cli.mask_functions:with_a_default") == 36
    file = Path(__file__).with_name("mask_functions.py")
    assert area("--lengths", "10,6", "--mask", f"{file}:prefixes") == 55 + 21 + 2 * 6
    ranges = {"q_ranges": [[0, 4], [4, 8]], "k_ranges": [[0, 4], [0, 8]], "attn_type_map": [0, 1],
              "total": 8}  # fmt: skip
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(ranges))
    assert area("--ranges", str(path)) == 16 + 5 + 6 + 7 + 8
    path.write_text(json.dumps({"q_ranges": []}))
    code, _, err = run(capsys, "plan", "--ranges", str(path), "--cp", "2")
    assert code == 2 and "with q_ranges, k_ranges, total" in err
    path.write_text(json.dumps({**ranges, "attn_type_maps": [0, 1]}))
    code, _, err = run(capsys, "plan", "--ranges", str(path), "--cp", "2")
    assert code == 2 and "unknown attn_type_maps" in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--lengths 8 --prefix 0 --full", "--prefix is a whole rule, got --full with it; drop"),
        ("--lengths 8 --mask a:b --total 9", "--mask is a whole rule, got --total with it; drop"),
        ("--lengths 8 --block-window 2", "--block-window needs --block-tokens, got none; pass it"),
        ("--lengths 8 --block-tokens 0", "--block-tokens must be at least 1, got 0; such as 1024"),
        ("--lengths 8 --prefix -1", "prefix length must be at least 0, got -1"),
        ("--lengths 8 --mask none:f", "FILE.py:function, got 'none:f' (ModuleNotFoundError: "),
        ("--lengths 8 --mask none.py:f", "got 'none.py:f' (FileNotFoundError: "),
        ("--lengths 8 --mask M:of_the_batch", "without a batch, got TypeError: 'NoneType' object"),
        (
            "--lengths 8 --mask M:no_mask",
            "error: the function of --mask must return an AttnMask, got int; build one",
        ),
        (
            "--lengths 8 --mask M:of_two",
            "error: --mask must name a function of one argument, the MaskRequest, got M:of_two(",
        ),
        (
            "--lengths 8 --mask M:of_half",
            "must return a mask of all 8 tokens, got one of 4 x 4 from M:of_half; build it for",
        ),
        ("--lengths 8 --mask os:getcwd", "the MaskRequest, got os:getcwd(); read what it needs"),
        ("--ranges r.json --window 4", "--ranges are the whole mask, got --window with it; drop"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "viz"])
def test_a_rule_stands_alone(capsys: Capture, command: str, options: str, text: str) -> None:
    options = options.replace("M:", "tests.cli.mask_functions:")
    text = text.replace("M:", "tests.cli.mask_functions:")
    code, out, err = run(capsys, command, *options.split(), "--cp", "2")
    assert (code, out) == (2, "") and text in err and err.count("\n") == 1


def test_viz_draws_a_prefix(capsys: Capture) -> None:
    options = ["--lengths", "24", "--prefix", "12", "--cp", "2", "--text"]
    code, out, _ = run(capsys, "viz", *options)
    rows = [line.split()[0] for line in out.splitlines() if set(line) <= set("01. ") and line]
    assert code == 0 and rows[0].count(".") == rows[len(rows) // 2 - 1].count("."), out
    assert rows[0].count(".") > rows[-1].count(".") == 0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("megatron.core")
    from megatron_magi.text.documents import Document
    from megatron_magi.text.pack import pack
    from megatron_magi.text.tokenizers import ByteTokenizer

    prefix = tmp_path_factory.mktemp("packed") / "corpus"
    lengths = [40 + 37 * i % 300 for i in range(40)]
    pack((Document(f"d{n}", b"x" * n) for n in lengths), prefix, ByteTokenizer())
    return str(prefix)


def test_plan_of_a_data_file(capsys: Capture, packed: str) -> None:
    from_data = plan_json(capsys, "--data", packed, "--seq-length", "1024", "--cp", "2")
    assert from_data["mask"]["tokens"] == 1024 and from_data["mask"]["slices"] > 3
    other = plan_json(
        capsys, "--data", packed, "--seq-length", "1024", "--cp", "2", "--sample", "1"
    )
    assert other["plan"]["digest"] != from_data["plan"]["digest"]
    by_token = plan_json(
        capsys, "--data", packed, "--seq-length", "1024", "--cp", "2", "--eod-token", "256"
    )
    assert by_token["plan"]["digest"] == from_data["plan"]["digest"]


def test_a_sample_that_the_file_does_not_have_is_refused(capsys: Capture, packed: str) -> None:
    for number in (-1, 10**6):
        given = ["--data", packed, "--seq-length", "1024", "--cp", "2", "--sample", str(number)]
        code, out, err = run(capsys, "plan", *given)
        assert (code, out) == (2, "")
        assert re.search(rf"--sample must be between 0 and \d+, got {number}; pass", err)


def test_deep_ranges_are_one_line(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    code, _, err = run(capsys, "plan", "--ranges", f"{tmp_path / 'deep.json'}", "--cp", "2")
    assert code == 2 and "--ranges must be a JSON object" in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--sample 3", "--seq-length 64", "--eod-token 3"])
def test_options_of_data_need_data(capsys: Capture, option: str) -> None:
    code, out, err = run(capsys, "plan", "--lengths", "64", "--cp", "2", *option.split())
    assert (code, out) == (2, "") and f"{option.split()[0]} requires --data, got none" in err


def test_documents_of_an_index_need_no_eod(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    corpus = write_documents(tmp_path / "corpus", [60, 0, 30, 90] * 10)
    given = ("--data", corpus, "--seq-length", "512", "--cp", "2")
    found = plan_json(capsys, *given)
    assert found["mask"]["tokens"] == 512 and found["mask"]["slices"] > 5
