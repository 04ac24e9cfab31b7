"""Every way to start the program, from a directory full of files that must not be imported."""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from support import LEDGER_UPSTREAM, ROOT, call_line, ledger_lines, line_of, rows

from checkpoint import VERSION

SOURCES: Final = sorted(path.name for path in ROOT.glob("*.py"))
# What the program or the standard library below it imports at some time; a folder counts as much as a file.
LOOK_ALIKES: Final = (
    *(name for name in SOURCES if name != "__main__.py"),
    *("anyio.py", "argparse.py", "contextlib.py", "enum.py", "hashlib.py", "json.py", "jsonschema.py", "logging.py"),
    *("random.py", "runpy.py", "selectors.py", "shlex.py", "socket.py", "sqlite3.py", "ssl.py", "subprocess.py"),
    *("asyncio/__init__.py", "collections/__init__.py", "urllib/__init__.py", "urllib/parse.py"),
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory whose files leave a canary behind when they are imported."""
    folder = tmp_path / "hostile"
    for name in LOOK_ALIKES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'canary')!r}, 'a').write(__file__ + '\\n')\n", encoding="utf-8")
    return folder


def copy_of_the_sources(target: Path) -> Path:
    """What somebody vendors: the modules, nothing else."""
    target.mkdir(parents=True)
    for name in SOURCES:
        shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, and a virtual environment with nothing else. Whoever needs it first makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / f"installed-{os.environ.get('PYTEST_XDIST_TESTRUNUID', 'alone')}"
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build_and_install(folder)
    return folder


def build_and_install(folder: Path) -> None:
    """Builds the wheel from a copy of the checkout and installs it, without a network."""
    source = copy_of_the_sources(folder / "source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    python = folder / "venv" / "bin" / "python"
    run_module("build", "--wheel", "--no-isolation", "--outdir", folder, source)
    run_module("venv", "--without-pip", folder / "venv")
    run_module("pip", "--python", python, "install", "--no-index", "--no-deps", *folder.glob("*.whl"))


def run_module(*words: str | Path) -> None:
    """Runs a module of ours to its end; what it said is shown only when it failed."""
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


# Each way to start, made in a folder of its own: the words, and where it may be started.
def from_the_checkout(_: Path) -> list[str]:
    return [sys.executable, "-m", "checkpoint"]


def by_its_directory(_: Path) -> list[str]:
    return [sys.executable, str(ROOT)]


def by_a_relative_path(hostile: Path) -> list[str]:
    copy_of_the_sources(hostile / "checkpoint")
    return [sys.executable, "checkpoint"]


def vendored(hostile: Path) -> list[str]:
    return [sys.executable, str(copy_of_the_sources(hostile.parent / "vendor" / "checkpoint"))]


def vendored_under_another_name(hostile: Path) -> list[str]:
    return [sys.executable, str(copy_of_the_sources(hostile.parent / "third party" / "mcp-journal.v1"))]


def through_a_link(hostile: Path) -> list[str]:
    (hostile.parent / "link").symlink_to(ROOT)
    return [sys.executable, str(hostile.parent / "link")]


STARTS: Final[tuple[Callable[[Path], list[str]], ...]] = (
    from_the_checkout,
    by_its_directory,
    by_a_relative_path,
    vendored,
    vendored_under_another_name,
    through_a_link,
)


def check_start(words: list[str], cwd: Path, folder: Path) -> None:
    """Starts twice, from `cwd`: relays a handshake and a journaled call, then replays the call."""
    upstream = [sys.executable, str(LEDGER_UPSTREAM), str(folder / "ledger")]
    info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    lines = line_of({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": info})
    lines += call_line("append", {"n": 1}, request_id=2, seq=1)
    for _ in range(2):
        ended = subprocess.run(
            [*words, "--journal", str(folder / "j.db"), "--log-level", "error", "--", *upstream],
            cwd=cwd,
            input=lines,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        answers = {answer["id"]: answer["result"] for answer in map(json.loads, ended.stdout.splitlines())}
        assert answers[1]["serverInfo"]["name"] == "checkpoint"
        assert answers[2]["content"][0]["text"] == "effect 1"
    assert ledger_lines(folder / "ledger") == ['append {"n": 1}']
    assert [row["status"] for row in rows(folder / "j.db")] == ["COMPLETED"]
    canary = folder / "canary"
    assert not canary.exists(), canary.read_text("utf-8")


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_a_start_relays_journals_and_imports_no_stranger(
    start: Callable[[Path], list[str]], hostile: Path, tmp_path: Path
) -> None:
    # Plain -m puts the working directory first, so it is for the checkout, whose files are ours.
    check_start(start(hostile), ROOT if start is from_the_checkout else hostile, tmp_path)


@pytest.mark.parametrize("words", [["bin/checkpoint"], ["bin/python", "-P", "-m", "checkpoint"]], ids=" ".join)
def test_the_installed_program_relays_journals_and_imports_no_stranger(
    words: list[str], installed: Path, hostile: Path, tmp_path: Path
) -> None:
    program, *rest = words
    check_start([str(installed / "venv" / program), *rest], hostile, tmp_path)


def test_a_canary_sings_when_a_stranger_is_imported(hostile: Path, tmp_path: Path) -> None:
    # The one start that no code of ours can make safe: README.md warns of it.
    subprocess.run([sys.executable, "-m", "checkpoint"], cwd=hostile, capture_output=True, timeout=60, check=False)
    assert str(hostile) in (tmp_path / "canary").read_text("utf-8")


def test_a_start_from_a_directory_that_is_gone_still_speaks(tmp_path: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" "$1" --version'
    ended = subprocess.run(
        ["sh", "-c", script, sys.executable, ROOT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"checkpoint {VERSION}\n", "")


def test_an_old_python_is_told_in_one_line() -> None:
    script = f"import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path({str(ROOT)!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("checkpoint: needs Python 3.11 or newer")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "start", [by_its_directory, vendored_under_another_name, vendored], ids=lambda start: start.__name__
)
def test_a_refusal_names_a_command_that_starts_this_program(
    start: Callable[[Path], list[str]], hostile: Path, tmp_path: Path
) -> None:
    check_next_action(start(hostile), hostile, tmp_path)


def test_a_refusal_of_the_installed_program_names_its_script(installed: Path, hostile: Path, tmp_path: Path) -> None:
    script = str(installed / "venv" / "bin" / "checkpoint")
    assert check_next_action([script], hostile, tmp_path) == [script]


def check_next_action(words: list[str], cwd: Path, folder: Path) -> list[str]:
    """Provokes a refusal, and runs the command in it from another directory; its first words."""
    lines = call_line("append", {"n": 1}, request_id=1, seq=1) + call_line("append", {"n": 2}, request_id=2, seq=1)
    upstream = [sys.executable, str(LEDGER_UPSTREAM), str(folder / "ledger")]
    argv = [*words, "--journal", "j.db", "--log-level", "error", "--", *upstream]
    ended = subprocess.run(argv, cwd=cwd, input=lines, capture_output=True, timeout=60, check=True)
    errors = [answer["error"] for answer in map(json.loads, ended.stdout.splitlines()) if "error" in answer]
    command = shlex.split(errors[0]["data"]["checkpoint"]["next_action"])
    ours = command[: command.index("journal")]
    assert command[len(ours) :] == ["journal", "show", str(cwd / "j.db"), "1", "--workflow-id", "j.db"]
    version = subprocess.run([*ours, "--version"], cwd="/", capture_output=True, text=True, timeout=60, check=True)
    assert version.stdout == f"checkpoint {VERSION}\n"
    return ours


def test_the_wheel_holds_one_folder_with_every_module_and_no_tests(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    metadata = f"checkpoint_relay-{VERSION}.dist-info/"
    assert sorted(name for name in names if not name.startswith(metadata)) == [f"checkpoint/{name}" for name in SOURCES]
    assert f"{metadata}licenses/LICENSE" in names


def test_the_script_of_this_checkout_runs_it_from_anywhere(hostile: Path) -> None:
    # In a copy, so that nothing is installed here: what its pyproject.toml asks for counts as installed.
    copy = copy_of_the_sources(hostile.parent / "check out")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "python").symlink_to(sys.executable)
    stamp = subprocess.run(["cksum", "pyproject.toml"], cwd=copy, capture_output=True, text=True, check=True)
    (copy / ".venv" / "installed").write_text(stamp.stdout, encoding="utf-8")
    start = copy / "scripts" / "start"
    version = subprocess.run([start, "--version"], cwd=hostile, capture_output=True, text=True, timeout=60, check=True)
    assert (version.stdout, version.stderr) == (f"checkpoint {VERSION}\n", "")
    demo = subprocess.run([start], cwd=hostile, capture_output=True, text=True, timeout=60, check=True)
    assert "Charges that happened twice: 0" in demo.stdout
    assert not (hostile.parent / "canary").exists()


def test_a_relay_that_does_not_report_imports_nothing_of_the_reporter(tmp_path: Path) -> None:
    """It would cost each start some milliseconds."""
    words = [sys.executable, "-X", "importtime", str(ROOT), "--journal", str(tmp_path / "j.db"), "--", "true"]
    said = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stderr
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert {"relay", "calls", "journal"} <= imported
    assert not {"reporter", "reports", "courier", "commands", "anyio", "jsonschema", "urllib.request"} & imported
