"""plan: its report and its JSON."""

import pytest

from megatron_magi.cli import main
from tests.cli.command import Capture, plan_json, run


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
                      "--heads", "8/4,64")  # fmt: skip
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
    assert facts["plan"]["imbalance"] < facts["layouts"]["zigzag per sequence"]["imbalance"]


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


def test_large_groups_show_a_summary(capsys: Capture) -> None:
    code, out, _ = run(capsys, "plan", "--lengths", "65536", "--cp", "64")
    assert code == 0 and "48 more ranks; --json has all" in out and "from rank (down)" not in out


def test_plan_counts_what_crosses_between_nodes(capsys: Capture) -> None:
    words = ["plan", "--lengths", "4096", "--full", "--cp", "8", "--heads", "8,2,64"]
    assert main([*words, "--ranks-per-node", "4"]) == 0
    text = capsys.readouterr().out
    # Each of 512 * 8 rows crosses once to the other node, where four ranks read it.
    assert "nodes     2 of 4 ranks; 4,096 key rows cross between them (16,384 if each" in text
    assert main(words) == 0
    assert "nodes" not in capsys.readouterr().out
    assert main([*words, "--ranks-per-node", "3"]) == 2
    assert "CostTable.ranks_per_node must divide the 8 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tp 2", "--gpus 8", "--replicas-meet", "--memory 80"])
def test_options_of_layouts_need_layouts(capsys: Capture, option: str) -> None:
    code, out, err = run(capsys, "plan", "--lengths", "64", "--cp", "2", *option.split())
    assert (code, out) == (2, "") and f"{option.split()[0]} requires --layouts, got" in err
