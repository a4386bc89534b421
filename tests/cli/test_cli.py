"""The command line in process: what it prints, its exit codes, its suggestions."""

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megatron_magi.cli import COMMANDS, main
from tests.cli.command import Capture, run

# Help and usage


def test_help_has_examples_for_every_command(capsys: Capture) -> None:
    code, out, _ = run(capsys)
    assert code == 2 and all(name in out for name in COMMANDS) and "examples:" in out
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        out = capsys.readouterr().out
        assert ended.value.code == 0 and f"  megatron-magi {name} " in out, name


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["plna"], "error: COMMAND cannot be 'plna'; did you mean plan?"),
        (["zzz"], "choose from doctor, plan, viz, train, compare"),
        (["plan", "--chunksize", "4"], "has no option --chunksize; did you mean --chunk-size?"),
        (["doctor", "--jsn"], "megatron-magi doctor has no option --jsn; did you mean --json?"),
        (["doctor", "now"], "megatron-magi doctor takes no further argument, got 'now'"),
        (
            ["viz", "--lengths", "8", "--only", "mosk"],
            "--only cannot be 'mosk'; did you mean mask?",
        ),
        (
            ["plan", "--cp", "two"],
            "argument --cp: invalid int value: 'two'; see megatron-magi plan",
        ),
        (["plan", "--cp", "2"], "a mask is needed, got none; pass --lengths"),
        (["plan", "--lengths", "8"], "ranks is needed, at least 1, got none; pass --cp"),
        (["plan", "--lengths", "8x", "--cp", "2"], "numbers must look like 4096,8192x3, got '8x'"),
        (["plan", "--lengths", "8", "--cp", "2", "a=1"], "got 'a=1' without --recipe"),
        (["plan", "--lengths", "8", "--cp", "2", "--heads", "8,2"], "three numbers Q,KV,DIM"),
        (["plan", "--lengths", "8", "--cp", "2", "--heads", "8,2,4,4,4"], "or four with the head"),
        (["plan", "--lengths", "8", "--cp", "0"], "at least 1, got 0; pass --cp N"),
        (["plan", "--lengths", "8", "--cp", "2", "--chunk-size", "8"], "chunk_size must leave"),
        (["plan", "--cu-seqlens", "0,9,4", "--cp", "2"], "must start at 0 and never decrease"),
        (["plan", "--lengths", "8", "--global-tokens", "2", "--cp", "2"], "needs --window"),
        (["plan", "--data", "nowhere", "--cp", "2"], "--data needs --seq-length"),
        (["plan", "--recipe", "nowhere.yaml"], "or the name of a packaged one, got nowhere.yaml"),
        (["compare", "one"], "two runs or more are needed, the baseline first, got only one"),
        (["compare", "one", "two"], "must have a steps.csv, got none in one"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    capsys: Capture, arguments: list[str], text: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and text in err
    assert err.count("\n") == 1


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "megatron_magi", "plan", "--lengths", "64", "--cp", "2", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and done.stdout.startswith("cp 2: balance (max/mean) 1.0")


# plan


def plan_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, "plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_plan_report(capsys: Capture) -> None:
    code, out, _ = run(capsys, "plan", "--lengths", "4096x3,1024x4", "--cp", "4")
    assert code == 0
    assert out.startswith("mask      7 documents, 16,384 tokens, causal inside each\n")
    for word in ("balance", "of the key rows a ring moves", "stages", "MiB a rank",
                 "rank   load", "key rows from rank (down) to rank (across)"):  # fmt: skip
        assert word in out


def layout_cells(out: str) -> dict[str, list[str]]:
    """Lines of the table of layouts by their names."""
    names = ("zigzag per sequence", "zigzag per document", "megatron_magi")
    lines = out.splitlines()
    return {n: next(x for x in lines if x.startswith(f"{n} ")).removeprefix(n).split()
            for n in names}  # fmt: skip


def test_plan_names_both_zigzags(capsys: Capture) -> None:
    given = ["--lengths", "4096x3,1001,1023x3", "--cp", "4"]
    facts = plan_json(capsys, *given)
    layouts = facts["layouts"]
    per_document = layouts["zigzag per document"]
    padded = 4096 * 3 + 1008 + 3 * 1024  # to multiples of 2 * cp
    assert per_document["padding_tokens"] == padded - facts["mask"]["tokens"] == 10
    assert per_document["rows_received"] == padded * 3 / 4
    assert per_document["imbalance"] < 1.1 < layouts["zigzag per sequence"]["imbalance"]
    assert layouts["zigzag per sequence"]["rows_received"] == 8 * 2045 * 3 / 4
    assert layouts["megatron_magi"]["rows_received"] == layouts["megatron_magi"]["rows_needed"]
    assert layouts["megatron_magi"]["rows_received_of_ring"] == facts["plan"]["rows_of_ring"]
    for layout in layouts.values():
        assert 0 < layout["rows_needed"] <= layout["rows_received"]
    code, out, _ = run(capsys, "plan", *given)
    cells = layout_cells(out)
    assert code == 0 and cells["zigzag per document"][-1] == "10"
    for name, layout in layouts.items():
        assert cells[name][0] == f"{layout['imbalance']:.3f}"
        assert cells[name][1] == f"{layout['rows_received']:,.0f}"
        assert cells[name][3] == f"{layout['rows_needed']:,.0f}"


def test_a_mask_without_documents_has_no_zigzag_per_document(capsys: Capture) -> None:
    given = ["--lengths", "4096,512x8", "--window", "256", "--global-tokens", "4", "--cp", "2"]
    assert plan_json(capsys, *given)["layouts"]["zigzag per document"] is None
    code, out, _ = run(capsys, "plan", *given)
    assert code == 0 and layout_cells(out)["zigzag per document"] == ["-"] * 4
    assert "only masks of packed documents" in out


@pytest.mark.parametrize("lengths, is_said", [("1000x16", False), ("8192,300x20", True)])
def test_plan_says_why_more_rows_may_travel(capsys: Capture, lengths: str, is_said: bool) -> None:
    layouts = plan_json(capsys, "--lengths", lengths, "--cp", "4")["layouts"]
    more = layouts["megatron_magi"]["rows_received"] > layouts["zigzag per sequence"]["rows_needed"]
    _, out, _ = run(capsys, "plan", "--lengths", lengths, "--cp", "4")
    assert more == is_said == ("Balance is bought with rows" in out)


def test_values_of_another_width(capsys: Capture) -> None:
    options = ("--lengths", "3000,5192", "--cp", "4", "--heads", "8,8,192,128")
    assert plan_json(capsys, *options)["heads"] == {
        "q": 8, "kv": 8, "dim": 192, "value_dim": 128, "bytes_per_element": 2,
    }  # fmt: skip
    assert main(["plan", *options]) == 0
    assert "(heads 8/8 of 192, values of 128, 2 bytes)" in capsys.readouterr().out


def test_plan_json_adds_up(capsys: Capture) -> None:
    facts = plan_json(capsys, "--lengths", "3000,5192", "--cp", "4", "--overlap-degree", "2",
                      "--heads", "8,4,64")  # fmt: skip
    rows = facts["rows_from_rank_to_rank"]
    assert facts["mask"]["visible_cells"] == 3000 * 3001 // 2 + 5192 * 5193 // 2
    assert facts["plan"]["overlap_degree"] == 2 and facts["plan"]["tokens_per_rank"] == 2048
    assert facts["heads"] == {"q": 8, "kv": 4, "dim": 64, "value_dim": 64, "bytes_per_element": 2}
    for j, rank in enumerate(facts["ranks"]):
        assert rank["rows_received"] == sum(r[j] for r in rows) == sum(rank["rows_by_stage"])
        row = 2 * 4 * 64 * 2
        most = (rank["rows_received"] + 2048) * row  # beside all own rows
        assert rank["rows_received"] * row <= rank["receive_buffer_bytes"] <= most
    ring = 3 * 2048 * 4
    assert facts["plan"]["rows_of_ring"] == pytest.approx(sum(map(sum, rows)) / ring)
    assert facts["plan"]["imbalance"] <= 1.01 < facts["layouts"]["zigzag per sequence"]["imbalance"]


@pytest.mark.parametrize("mode, text", [
    ("at_once", "forward: everything is received first; backward: received keys in 2 stages"),
    ("local_first", "forward: rows that see own keys only, then the others; backward"),
    ("staged", "forward: own keys, then received keys in 2 stages, merged; backward"),
])  # fmt: skip
def test_plan_says_how_the_forward_goes(capsys: Capture, mode: str, text: str) -> None:
    given = ["--lengths", "3000,5192", "--cp", "2", "--overlap-degree", "2", "--forward-mode", mode]
    assert plan_json(capsys, *given)["plan"]["forward_mode"] == mode
    assert main(["plan", *given]) == 0
    assert text in capsys.readouterr().out


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
    ranges = {"q_ranges": [[0, 4], [4, 8]], "k_ranges": [[0, 4], [0, 8]], "attn_type_map": [0, 1],
              "total": 8}  # fmt: skip
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(ranges))
    assert area("--ranges", str(path)) == 16 + 5 + 6 + 7 + 8
    path.write_text(json.dumps({"q_ranges": []}))
    code, _, err = run(capsys, "plan", "--ranges", str(path), "--cp", "2")
    assert code == 2 and "with q_ranges, k_ranges, total" in err


def test_large_groups_show_a_summary(capsys: Capture) -> None:
    code, out, _ = run(capsys, "plan", "--lengths", "65536", "--cp", "64")
    assert code == 0 and "48 more ranks; --json has all" in out and "from rank (down)" not in out


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("megatron.core")
    from megatron_magi.training.data.corpus import ByteTokenizer, Document, pack

    prefix = tmp_path_factory.mktemp("packed") / "corpus"
    lengths = [40 + 37 * i % 300 for i in range(40)]
    pack((Document(f"d{n}", b"x" * n) for n in lengths), prefix, ByteTokenizer())
    return str(prefix)


def test_plan_of_a_data_file_and_a_recipe(capsys: Capture, packed: str) -> None:
    from_data = plan_json(capsys, "--data", packed, "--seq-length", "1024", "--cp", "2")
    recipe = Path(__file__).parents[2] / "recipes" / "tiny_llama_cpu.yaml"
    from_recipe = plan_json(
        capsys, "--recipe", str(recipe), f"data.path={packed}", "data.seq_length=1024"
    )
    assert from_data["mask"]["tokens"] == from_recipe["mask"]["tokens"] == 1024
    assert from_data["mask"]["visible_cells"] == from_recipe["mask"]["visible_cells"]
    assert from_data["mask"]["slices"] > 3
    assert from_recipe["plan"]["cp_size"] == 2
    assert from_recipe["heads"] == {
        "q": 4,
        "kv": 2,
        "dim": 32,
        "value_dim": 32,
        "bytes_per_element": 4,
    }
    other = plan_json(
        capsys, "--data", packed, "--seq-length", "1024", "--cp", "2", "--sample", "1"
    )
    assert other["plan"]["digest"] != from_data["plan"]["digest"]
    code, _, err = run(capsys, "plan", "--recipe", str(recipe), f"data.path={packed}", "--window",
                       "4")  # fmt: skip
    assert code == 2 and "got --window beside --recipe" in err


# viz


def test_viz_writes_every_picture_twice(capsys: Capture, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "viz", "--lengths", "700,300", "--cp", "3", "--out", str(tmp_path))
    assert code == 0
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {f"{n}.{f}" for n in ("shares", "mask", "traffic", "timeline")
                     for f in ("png", "svg")}  # fmt: skip
    for path in tmp_path.iterdir():
        head = path.read_bytes()[:8]
        assert head == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else head.startswith(b"<?xml")
        assert str(path) in out
    svg = (tmp_path / "shares.svg").read_text()
    for name in ("zigzag per sequence", "zigzag per document", "megatron_magi"):
        assert f"{name}: max/mean" in svg
    assert "rank 2" in svg
    assert "of a ring's rows" in (tmp_path / "traffic.svg").read_text()


def test_viz_as_text(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = run(capsys, "viz", "--lengths", "16,16", "--cp", "2", "--text")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("zigzag per sequence: max/mean 1.0")
    assert "zigzag per document: max/mean" in lines[0] and "megatron_magi" in lines[0]
    per_sequence, per_document = zip(*(line.split()[:2] for line in lines[1:]), strict=True)
    assert per_sequence[0].startswith("0.") and per_sequence[-1].endswith("0" * 14)
    assert set("".join(per_sequence)) == set("01.")
    owners = "".join(line.replace(".", "")[0] for line in per_document)
    assert [owner for owner, _ in groupby(owners)] == list("01010")  # 0110 in each document


def test_viz_as_text_says_what_a_mask_does_not_have(capsys: Capture) -> None:
    given = ["--lengths", "64", "--window", "8", "--global-tokens", "2", "--cp", "2"]
    code, out, _ = run(capsys, "viz", *given, "--text")
    assert code == 0 and out.startswith("zigzag per document: - (only masks of packed documents")


def test_equal_input_gives_equal_pictures(capsys: Capture, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(capsys, "viz", "--lengths", "300,200", "--cp", "2", "--only", "shares", "traffic",
            "--format", "svg", "--out", str(tmp_path / name), "-q")  # fmt: skip
    for name in ("shares.svg", "traffic.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_viz_of_one_rank_and_of_many(capsys: Capture, tmp_path: Path) -> None:
    for cp in ("1", "24"):
        code, out, _ = run(capsys, "viz", "--lengths", "5000", "--cp", cp, "--format", "svg",
                           "--out", str(tmp_path / cp), "--json")  # fmt: skip
        assert code == 0 and len(json.loads(out)["pictures"]) == 4


def test_viz_without_matplotlib(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, "viz", "--lengths", "8", "--cp", "2", "--out", str(tmp_path))
    assert code == 2 and "pictures need matplotlib" in err and "megatron-magi[viz]" in err
