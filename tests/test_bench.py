"""scripts/bench.py: it works from end to end. How fast anything is here is nobody's business: no test is timed."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Final

from support import ROOT

BENCH: Final = ROOT / "scripts" / "bench.py"


WITHOUT_SLOW: Final = ("--without", "SDK transports")  # it takes seconds to start, in almost every part
# Without that peer, without a compiler, on systems that do not tell the memory of a process.
MAY_BE_MISSING: Final = {
    "pass-through 200 B, to the SDK's transports",
    "pass-through 10 KB, to the SDK's transports",
    "pass-through 200 B, to a C copy",
    "pass-through 10 KB, to a C copy",
    "idle memory, to the bare process",
    "peak above idle for one 10 MB call, in messages",
}


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs it with next to nothing of each kind, and what it said."""
    words = [sys.executable, str(BENCH), "--tiny", "--dir", str(folder), *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_a_tiny_run_measures_every_part_and_is_quiet_in_a_pipe(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    ended = bench(tmp_path, *WITHOUT_SLOW, "--json", "--seed", "7", "--svg", str(plot))
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["seed"] == 7
    assert "cores" in found["machine"]
    assert list(found["parts"]) == [
        *("200 B", "10 KB", "1 MB", "in flight", "new journal", "grown journal", "reporting", "first reply", "memory"),
    ]
    assert {row["subject"] for row in found["parts"]["200 B"]["subjects"]} | found["left_out"].keys() == {
        *("direct", "C two-pipe copy", "SDK transports", "fastmcp proxy", "pass-through", "journaled"),
        *("two commits, back to back", "two commits, paced"),
    }
    measured = {row["name"] for row in found["targets"] if row["verdict"] != "not measured"}
    assert {row["name"] for row in found["targets"]} - measured <= MAY_BE_MISSING
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert list(tmp_path.iterdir()) == [plot]  # nothing of it is left


def test_the_tables_name_seed_and_machine_first_and_the_targets_last(tmp_path: Path) -> None:
    ended = bench(tmp_path, "--only", "new")
    assert (ended.returncode, ended.stderr) == (0, "")
    first, *tables = ended.stdout.strip().split("\n\n")
    assert first.startswith("tiny run, seed ")
    assert tables[0].startswith("| new journal | p50 us | ")
    assert tables[-1].startswith("| target ")
    [judged] = tables[-1].splitlines()[2:]
    assert judged.startswith("| first 50 calls of a new journal, to steady ")


def test_the_official_transports_are_measured_as_well(tmp_path: Path) -> None:
    ended = bench(tmp_path, "--json", "--only", "10 KB")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "SDK transports" in {row["subject"] for row in json.loads(ended.stdout)["parts"]["10 KB"]["subjects"]}


def test_what_cannot_be_measured_is_a_usage_error(tmp_path: Path) -> None:
    for options in (["--only", "nothing like it"], ["--only", "memory", "--svg", "plot.svg"], ["--dir", "nowhere"]):
        assert bench(tmp_path, *options).returncode == 2
