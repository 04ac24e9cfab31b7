"""scripts/fuzz.py: a quick run finds nothing here, and it would find what is wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
FUZZ: Final = ROOT / "scripts" / "fuzz.py"

# Faults of the kind that each target is there to find, as a line before the run.
FAULTS: Final = {
    "wire": "wire._has_doubtful_keys = lambda members, names: False",
    "redact": "fuzz.redact = lambda text: (text.replace('a', 'aa'), text.count('a'))",
    "file": "fuzz.decode = lambda content: content.decode()",
    "git": "gitfacts._FIELDS_BEFORE_PATH[b'1'] = 9",
    "paths": "worktree.place_named = lambda root, path: path",
}


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FUZZ), "--engine", "random", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_a_quick_run_finds_nothing() -> None:
    ended = fuzz("--quick", "--seed", "1")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    first, _, _, *rows = ended.stdout.splitlines()
    assert first == "seed 1, engine random"
    assert [row.split()[0] for row in rows] == ["wire", "redact", "file", "git", "paths"]
    assert all(row.endswith("nothing") for row in rows)


@pytest.mark.parametrize("target", FAULTS)
def test_a_fault_is_found_shortened_and_shown(target: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(FUZZ.parent)!r}); import fuzz, gitfacts, wire, worktree; "
        f"{FAULTS[target]}; "
        f"sys.argv[1:] = ['--engine', 'random', '--seed', '1', '--seconds', '20', '--target', {target!r}]; "
        "sys.exit(fuzz.main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "SOMETHING" in ended.stdout
    assert "\ninput: b" in ended.stdout


def test_an_unknown_target_is_a_usage_error() -> None:
    ended = fuzz("--target", "nothing")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
