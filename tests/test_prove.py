"""scripts/prove.py: it runs, it finds nothing here, and it would find what is wrong with another relay."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from storage_helpers import powerless
from support import ROOT, descendants_of, is_running, until

PROVE: Final = ROOT / "scripts" / "prove.py"
KILLS: Final = [f"kill {victim}, at random" for victim in ("relay", "upstream", "agent", "all at once")]
FAULTS: Final = [
    "kill relay at n-th fdatasync",
    *(f"n-th {call} fails: {error}" for call in ("fdatasync", "pwrite64") for error in ("EIO", "ENOSPC")),
]
IMAGES: Final = [f"crash image: {damage}" for damage in ("log cut", "log garbled", "database torn")]
POWER_CUT: Final = "crash image: unsynced lost"

# Relays that break the promise, as scripts that start the real one.
WITHOUT_JOURNAL: Final = """
import os, sys
words = sys.argv[1:]
at = words.index("--journal")
os.execv(sys.executable, [sys.executable, ROOT, *words[:at], *words[at + 2:]])
"""
FORGETFUL: Final = """
import contextlib, os, sqlite3, sys
journal = sys.argv[sys.argv.index("--journal") + 1]
if os.path.exists(journal):
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("DELETE FROM deliveries")
        database.execute("DELETE FROM outcomes")
        database.commit()
os.execv(sys.executable, [sys.executable, ROOT, *sys.argv[1:]])
"""
SILENT: Final = "raise SystemExit(1)"
UNSYNCED: Final = """
import runpy, sys
sys.path.insert(0, ROOT)
import storage
connect = storage.connect_owner

def connect_unsynced(path):
    database = connect(path)
    database.execute("PRAGMA synchronous = OFF")
    return database

storage.connect_owner = connect_unsynced
import journal
journal.connect_owner = connect_unsynced
sys.argv[0] = ROOT
runpy.run_path(ROOT, run_name="__main__")
"""


def prove(folder: Path, *options: str, relay: str | None = None) -> tuple[int, dict[str, Any], str]:
    """Runs it with a relay of ours or another; its exit code, what it found, and its stderr."""
    if relay is not None:
        script = folder.parent / "relay.py"
        script.write_text(f"ROOT = {str(ROOT)!r}\n{relay}", "utf-8")
        options = (*options, "--relay", f"{sys.executable} {script}")
    folder.mkdir()
    words = [sys.executable, str(PROVE), "--dir", str(folder), "--seed", "1", "--json", *options]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in found["rows"]}


def test_a_quick_run_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    code, found, stderr = prove(tmp_path / "disk", "--quick")
    rows = rows_of(found)
    assert (code, found["is_bad"], found["seed"], stderr) == (0, False, 1, "")
    assert list(rows) == [*KILLS, *FAULTS, *IMAGES, POWER_CUT]
    for name, row in rows.items():
        if shutil.which("strace") is None and name in (*FAULTS, POWER_CUT):
            assert "strace" in row["skipped"]
            continue
        assert row["skipped"] is None
        assert row["cases"] >= 4
        assert (row["effects_run_twice"], row["recorded_outcomes_lost"], row["evidence"]) == (0, 0, [])
        assert row["images_refused"] < row["cases"]
    assert sum(row.get("calls_replayed", 0) for row in rows.values()) > 0  # in which row, the timing decides
    assert sum(row["doubts_reported"] for row in rows.values()) > 0
    assert os.listdir(tmp_path / "disk") == []
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: no disk failed")


def test_the_judge_sees_effects_that_run_twice(tmp_path: Path) -> None:
    code, found, _ = prove(tmp_path / "disk", "--kills", "16", "--only", "at random", relay=WITHOUT_JOURNAL)
    rows = rows_of(found)
    assert code == 1
    assert list(rows) == KILLS
    assert all(row["effects_run_twice"] > 0 for row in rows.values())
    (story, *_) = [Path(path) / "story.txt" for path in rows[KILLS[0]]["evidence"]]
    assert "EFFECTS in the ledger" in story.read_text("utf-8")
    assert (story.parent / "ledger").exists()


def test_the_judge_sees_outcomes_that_are_lost(tmp_path: Path) -> None:
    code, found, _ = prove(tmp_path / "disk", "--kills", "24", "--only", KILLS[0], relay=FORGETFUL)
    row = rows_of(found)[KILLS[0]]
    assert code == 1
    assert row["recorded_outcomes_lost"] > 0
    assert row["effects_run_twice"] == 0


def test_the_judge_sees_what_was_not_synced(tmp_path: Path) -> None:
    """No kill of a process can show it: what the kernel holds survives that."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nobody looked at syncs")
    code, found, _ = prove(tmp_path / "disk", "--quick", "--only", POWER_CUT, relay=UNSYNCED)
    row = rows_of(found)[POWER_CUT]
    assert code == 1
    assert row["effects_run_twice"] > 0
    assert row["recorded_outcomes_lost"] > 0


def test_a_relay_that_does_not_even_run_is_no_proof(tmp_path: Path) -> None:
    code, found, stderr = prove(tmp_path / "disk", "--kills", "4", "--only", "kill relay, at random", relay=SILENT)
    assert code == 3
    assert "a healthy relay ended with exit code 1" in stderr
    assert not found["is_bad"]


def test_an_interrupt_leaves_nothing_running_and_nothing_on_disk(tmp_path: Path) -> None:
    words = [sys.executable, str(PROVE), "--dir", str(tmp_path), "--kills", "1000", "--only", "all at once"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(descendants_of(process.pid)) >= 3, "agent, relay and server run")
        started = descendants_of(process.pid)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted (seed " in stderr
    until(lambda: not any(is_running(pid) for pid in started), "all have ended", deadline_s=5)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_tried_is_a_usage_error(tmp_path: Path) -> None:
    for options in (["--kills", "0"], ["--only", "nothing like it"], ["--dir", str(tmp_path / "missing")]):
        ended = subprocess.run([sys.executable, str(PROVE), *options], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr


def test_a_folder_that_cannot_be_written_is_a_usage_error_and_no_finding(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    words = [*powerless(), sys.executable, str(PROVE), "--dir", str(tmp_path), "--quick"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"{tmp_path}: Permission denied\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_what_cannot_be_printed_is_no_finding_and_leaves_nothing_on_disk(tmp_path: Path, options: list[str]) -> None:
    words = [sys.executable, str(PROVE), "--dir", str(tmp_path), "--kills", "1", "--only", "kill relay, at random"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*words, *options], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 3
    assert "No space left on device (seed " in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []
