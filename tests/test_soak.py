"""scripts/soak.py: it runs, nothing grows or happens twice here, and it would see a relay that leaks or forgets."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from support import ROOT, descendants_of, is_running, until

SOAK: Final = ROOT / "scripts" / "soak.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

START: Final = """
sys.argv[0] = ROOT
runpy.run_path(ROOT, run_name="__main__")
"""
LEAKY: Final = """
import os, runpy, sys
sys.path.insert(0, ROOT)
import wire
read, kept = wire.read_downstream, []

def read_and_keep(line, **options):
    kept.append((os.dup(2), bytearray(os.urandom(1 << 20))))
    return read(line, **options)

wire.read_downstream = read_and_keep
"""
WITHOUT_PINS: Final = """
import runpy, sys
sys.path.insert(0, ROOT)
import calls
read = calls.read_pin
calls.read_pin = lambda meta: read({key: value for key, value in meta.items() if key != "checkpoint_seq"})
"""


def soak(folder: Path, *options: str, relay: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs it with a relay of ours or another."""
    if relay is not None:
        script = folder.parent / "relay.py"
        script.write_text(f"ROOT = {str(ROOT)!r}\n{relay}{START}", "utf-8")
        options = (*options, "--relay", f"{sys.executable} {script}")
    folder.mkdir()
    words = [sys.executable, str(SOAK), "--dir", str(folder), "--seed", "1", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_a_quick_run_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    ended = soak(tmp_path / "disk", "--quick")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    for line in ("effects run twice              0", "recorded outcomes lost         0"):
        assert line in ended.stdout
    assert "GREW" not in ended.stdout
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_relay_that_leaks_is_seen(tmp_path: Path) -> None:
    ended = soak(tmp_path / "disk", "--minutes", "0.1", relay=LEAKY)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (row,) = [line for line in ended.stdout.splitlines() if line.startswith("pins, modern era")]
    assert row.endswith("GREW: memory, MiB, descriptors")


def test_effects_that_run_twice_and_answers_that_change_are_seen(tmp_path: Path) -> None:
    ended = soak(tmp_path / "disk", "--minutes", "0.1", relay=WITHOUT_PINS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = {line.rpartition(" ")[0].strip(): line.rpartition(" ")[2] for line in ended.stdout.splitlines()}
    assert int(found["effects run twice"]) > 0
    assert int(found["recorded outcomes lost"]) > 0


def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    words = [sys.executable, str(SOAK), "--dir", str(tmp_path), "--minutes", "5"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(descendants_of(process.pid)) >= 10, "relays and servers run")
        started = descendants_of(process.pid)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    until(lambda: not any(is_running(pid) for pid in started), "all have ended", deadline_s=5)


@pytest.mark.parametrize("options", [["--minutes", "0"], ["--minutes", "nan"], ["--dir", "/nowhere/at/all"]])
def test_what_cannot_be_tried_is_a_usage_error(options: list[str]) -> None:
    ended = subprocess.run([sys.executable, str(SOAK), *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
