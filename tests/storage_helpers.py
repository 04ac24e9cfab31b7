"""A journal as tests use one: calls in one line, other processes as children, files looked at from outside.

Closing any descriptor of a file drops the locks that SQLite has on it in this process. So while a journal is open here,
its files are read by other processes only.
"""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from journal import Journal
from states import Answered, Cause, Dispatched, Doubted, Entry, Status
from storage import Files

ROOT: Final = Path(__file__).resolve().parent.parent
WORKFLOW: Final = "w"
NOW_MS: Final = 1_700_000_000_000
DEADLINE_S: Final = 60.0


def open_journal(path: Path | str, workflow_id: str | None = WORKFLOW) -> Journal:
    """A journal as a process starts with it; nothing is taken or created."""
    files = Files(str(path))
    return Journal(files, exists=files.exists(), workflow_id=workflow_id, now_ms=lambda: NOW_MS)


def taken(path: Path | str, workflow_id: str | None = WORKFLOW) -> Journal:
    """A journal whose lock this process holds."""
    journal = open_journal(path, workflow_id)
    assert journal.take()
    return journal


@contextlib.contextmanager
def owned(path: Path | str, workflow_id: str | None = WORKFLOW) -> Iterator[Journal]:
    """A journal for the length of a test, or of one life of a relay."""
    journal = taken(path, workflow_id)
    try:
        yield journal
    finally:
        journal.close()


def an_entry(
    sequence: int,
    *,
    tool: str = "t",
    arguments: bytes | None = b"{}",
    attempt: int = 1,
    workflow_id: str = WORKFLOW,
    is_modern: bool = False,
    call_id: str | None = None,
) -> Entry:
    """An entry that is not on record yet."""
    return Entry(
        id=0,
        workflow_id=workflow_id,
        sequence=sequence,
        attempt=attempt,
        tool_name=tool,
        signature="s" * 64,
        arguments=arguments,
        status=Status.PENDING,
        started_at=NOW_MS + sequence,
        is_modern=is_modern,
        call_id=call_id,
    )


def draft(journal: Journal, entry: Entry) -> Entry:
    """Claims a place for a call."""
    return journal.draft(
        *entry.place,
        entry.attempt,
        entry.tool_name,
        entry.signature,
        entry.arguments,
        started_at=entry.started_at,
        call_id=entry.call_id,
        is_modern=entry.is_modern,
    )


def dispatch(journal: Journal, *entries: Entry) -> list[Entry]:
    """Puts calls on record, in one commit."""
    drafted = [draft(journal, entry) for entry in entries]
    journal.append([Dispatched(entry) for entry in drafted])
    return drafted


def answer(journal: Journal, *entries: Entry, result: bytes = b'{"content":[]}') -> None:
    """Puts results on record, in one commit."""
    journal.append([Answered(entry, Status.COMPLETED, NOW_MS + 999, result=result) for entry in entries])


def doubt(journal: Journal, entry: Entry, cause: Cause = Cause.UPSTREAM_LOST) -> None:
    """Puts on record that a call may never be answered."""
    journal.append([Doubted(entry, cause, NOW_MS)])


def completed(journal: Journal, *sequences: int) -> list[Entry]:
    """Puts whole calls on record."""
    entries = dispatch(journal, *(an_entry(sequence) for sequence in sequences))
    answer(journal, *entries)
    return entries


def rows(
    path: Path | str, query: str = "SELECT sequence, status FROM calls ORDER BY sequence"
) -> list[tuple[object, ...]]:
    """What any SQLite tool reads from a journal, while a relay runs or after."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return database.execute(query).fetchall()


def change(path: Path | str, *statements: str) -> None:
    """What another program, or a person with one, does to a database."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but for the lock's, which name who looked last. Reads from outside this process."""
    copy = folder.parent / f"{folder.name}.copy"
    subprocess.run(["cp", "-a", str(folder), str(copy)], check=True)
    try:
        return {
            str(path.relative_to(copy)): path.read_bytes()
            for path in sorted(copy.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        }
    finally:
        shutil.rmtree(copy)


# ------------------------------------------------------------------------------------------------------ other processes


def child_words(action: str, *words: object) -> list[str]:
    """The command of another process; see storage_child.py."""
    return [sys.executable, str(ROOT / "tests" / "storage_child.py"), action, *map(str, words)]


def run_child(action: str, *words: object, under: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs another process to its end, `under` another program if one is given."""
    command = [*under, *child_words(action, *words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@contextlib.contextmanager
def child(action: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that has done its part and stays until the end of the block, or until it is killed."""
    process = subprocess.Popen(child_words(action, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(DEADLINE_S)


def strace(*options: str, log: Path) -> list[str]:
    """The words that run a child under strace; skips the test, aloud, where there is none."""
    found = shutil.which("strace")
    if found is None:
        pytest.skip("strace is not installed: what reaches the disk is not looked at")
    # The filter stops at the traced calls only, which is quick; signals are not injected with it.
    quick = [] if any("signal=" in option for option in options) else ["-f", "--seccomp-bpf"]
    return [found, *quick, "-o", str(log), *options]


def traced(log: Path) -> list[str]:
    """The lines of an strace log, without the process's number."""
    return [line.partition(" ")[2].lstrip() for line in log.read_text().splitlines()]


def powerless() -> list[str]:
    """The words that run a child to which file modes apply, also where the tests run as root."""
    if os.geteuid() != 0:
        return []
    found = shutil.which("setpriv")
    if found is None:
        pytest.skip("these tests run as root, to whom no file is unwritable, and setpriv is not installed")
    return [found, "--bounding-set=-all", "--inh-caps=-all"]
