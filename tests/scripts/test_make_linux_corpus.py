"""The corpus of the convergence runs: what is taken, and the same file from archive and folder."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_linux_corpus.py"
MAKEFILE = "VERSION = 6\nPATCHLEVEL = 1\nSUBLEVEL = 77\nEXTRAVERSION =\n"
AMD = "drivers/gpu/drm/amd/include/asic"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_linux_corpus", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def in_share(path: str) -> bool:
    first = hashlib.sha256(f"linux-source-6.1/{path}".encode()).hexdigest()[:8]
    return int(first, 16) < 0.26 * 16**8


def text_of(path: str, num_bytes: int = 256) -> str:
    return (path + " \u00e9\n").ljust(num_bytes - 1, "x")  # one letter has two bytes


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "unpacked" / "linux-source-6.1"
    suffixes = ("c", "h", "rst", "txt", "S", "py", "sh", "pl", "rs", "dts", "o")
    texts = {f"kernel/f{i}.{s}": text_of(f"{i}.{s}") for i in range(12) for s in suffixes}
    texts |= {f"kernel/short{i}.c": text_of(str(i), 255) for i in range(20)}
    texts |= {f"{AMD}/r{i}.h": text_of(str(i)) for i in range(20)}
    texts |= {f"drivers/copy{i}.c": text_of("copy") for i in range(20)}
    texts |= {f"d{i}/Makefile": text_of(f"make {i}") for i in range(20)}
    for path, text in ({"Makefile": MAKEFILE} | texts).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for i in range(20):
        (root / f"link{i}.c").symlink_to("kernel/f1.c")
    return root


def expected_paths() -> list[str]:
    suffixes = ("c", "h", "rst", "txt", "S", "py", "sh", "pl", "rs")
    plain = [f"kernel/f{i}.{s}" for i in range(12) for s in suffixes]
    copies = sorted(f"drivers/copy{i}.c" for i in range(20))
    return sorted([p for p in plain if in_share(p)] + [p for p in copies if in_share(p)][:1])


def test_files_are_taken_by_path_and_content(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load().main([str(tree), str(tmp_path / "linux.jsonl")]) == 0
    raw = (tmp_path / "linux.jsonl").read_bytes()
    records = [json.loads(line) for line in raw.splitlines()]
    assert [r["path"] for r in records] == expected_paths()
    assert all(len(r["text"].encode()) == 256 for r in records)
    assert 10 < len(records) < 60
    said = capsys.readouterr().out
    assert f"Linux 6.1.77: {len(records)} documents, {256 * len(records):,} bytes" in said
    assert hashlib.sha256(raw).hexdigest() in said


def test_the_archive_gives_the_file_of_the_folder(tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "linux-source-6.1.tar.xz"
    with tarfile.open(archive, "w:xz") as target:
        for path in sorted(tree.rglob("*"), reverse=True):
            target.add(path, str(path.relative_to(tree.parent)), recursive=False)
    assert load().main([str(tree), str(tmp_path / "a.jsonl")]) == 0
    assert load().main([str(archive), str(tmp_path / "b.jsonl.xz")]) == 0
    packed = (tmp_path / "b.jsonl.xz").read_bytes()
    assert lzma.decompress(packed) == (tmp_path / "a.jsonl").read_bytes()


def test_what_is_no_linux_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.c").write_text(text_of("a"))
    assert load().main([str(tmp_path / "in"), str(tmp_path / "out.jsonl")]) == 2
    assert "must hold the Makefile of a Linux source tree" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        load().main([str(tmp_path / "nowhere"), str(tmp_path / "out.jsonl")])
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
