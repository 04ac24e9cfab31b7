"""scripts/matrix.py: its small part finds nothing here, and it would find what is wrong with another relay."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from support import ROOT

MATRIX: Final = ROOT / "scripts" / "matrix.py"
ONE: Final = ("--quick", "--only", "auto")  # one client, one server

# A relay that records and replays nothing, as a script that starts the real one.
WITHOUT_JOURNAL: Final = """
import os, sys
words = sys.argv[1:]
at = words.index("--journal")
os.execv(sys.executable, [sys.executable, ROOT, *words[:at], *words[at + 2:]])
"""
# A relay whose journal does not outlive it.
FORGETFUL: Final = """
import os, sys
from pathlib import Path
journal = Path(sys.argv[sys.argv.index("--journal") + 1])
for path in journal.parent.glob(f"{journal.name}*"):
    path.unlink()
os.execv(sys.executable, [sys.executable, ROOT, *sys.argv[1:]])
"""


def matrix(*options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Runs it; its exit code, its cells, and its stderr."""
    words = [sys.executable, str(MATRIX), "--json", *options]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)["cells"], ended.stderr


def broken_relay(folder: Path, script: str) -> str:
    """The command of another relay."""
    path = folder / "relay.py"
    path.write_text(f"ROOT = {str(ROOT)!r}\n{script}", "utf-8")
    return f"{sys.executable} {path}"


def test_the_small_part_is_all_well_and_quiet_in_a_pipe() -> None:
    code, cells, stderr = matrix("--quick")
    assert [(cell["row"], cell["column"], cell["outcome"], cell["note"]) for cell in cells] == [
        (f"python mcp 2, {mode}", "mcp-server-git", "ok", "") for mode in ("auto", "legacy")
    ]
    assert code == 0
    assert stderr == ""


def test_a_relay_that_changes_what_a_server_says_is_found() -> None:
    code, [cell], _ = matrix(*ONE, "--relay", f"{sys.executable} {ROOT} --name other")
    assert (code, cell["outcome"]) == (1, "FAILED")
    assert cell["note"].startswith("relayed: expected ")
    assert '"name": "other"' in cell["note"]


def test_a_relay_that_puts_nothing_on_record_is_found(tmp_path: Path) -> None:
    code, [cell], _ = matrix(*ONE, "--relay", broken_relay(tmp_path, WITHOUT_JOURNAL))
    assert (code, cell["outcome"]) == (1, "FAILED")
    assert cell["note"].startswith("calls were answered that are not on record")


def test_a_relay_that_runs_calls_again_is_found(tmp_path: Path) -> None:
    code, [cell], _ = matrix(*ONE, "--relay", broken_relay(tmp_path, FORGETFUL))
    assert (code, cell["outcome"]) == (1, "FAILED")
    assert cell["note"].startswith("replayed: expected ")


def test_what_cannot_be_tried_is_a_usage_error() -> None:
    ended = subprocess.run([sys.executable, str(MATRIX), "--only", "nothing like it"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no cell contains 'nothing like it'" in ended.stderr
