"""The other processes of test_storage.py: each does one thing to a journal, says so on stdout, and ends or waits.

They leave with os._exit, as the relay does after a failure: what is on disk then is what the next start finds.
"""

import gc
import os
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from storage_helpers import an_entry, answer, dispatch, open_journal, taken  # noqa: E402  # the path comes first

from journal import Journal  # noqa: E402
from storage import Files, JournalError  # noqa: E402


def say(line: str) -> None:
    """One line, out of the process at once."""
    os.write(1, line.encode() + b"\n")


def leave() -> NoReturn:
    """Ends without closing anything."""
    os._exit(0)


def stay() -> NoReturn:
    """Waits for the test to end."""
    say("ready")
    sys.stdin.read()
    leave()


def own(path: str) -> None:
    """Owns a journal, with one call under way."""
    journal = taken(path)
    dispatch(journal, an_entry(1))
    stay()


def read(path: str) -> None:
    """Holds the lock of a journal, and has only read."""
    journal = taken(path)
    assert not journal.has_dispatched
    stay()


def exclude(path: str) -> None:
    """Has a database for itself, as a program does that is told to."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("BEGIN EXCLUSIVE")
    database.execute("UPDATE journal SET created_at = created_at")
    database.execute("COMMIT")
    stay()


def leave_open(path: str, first: str, last: str, answered: str) -> None:
    """Dispatches calls, answers some of them ("2,3"; "" for none), and dies."""
    journal = taken(path)
    entries = dispatch(journal, *(an_entry(sequence) for sequence in range(int(first), int(last) + 1)))
    done = [entry for entry in entries if str(entry.sequence) in answered.split(",")]
    if done:
        answer(journal, *done)
    leave()


def create(path: str) -> None:
    """Makes a journal."""
    taken(path)
    leave()


def create_until(path: str, point: str) -> None:
    """Makes a journal, and is killed right before the n-th call that reaches the disk's names or content."""
    left = int(point)

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    for name in ("open", "fsync", "replace", "unlink", "close"):
        setattr(os, name, counting(getattr(os, name)))
    taken(path)
    leave()


def check(path: str) -> None:
    """Says what a start says of a file."""
    try:
        journal = open_journal(path)
        journal.probe()
        say(f"taken {journal.take()}")
    except JournalError as error:
        say(f"refused {error}")
    leave()


def batch(path: str, count: str) -> None:
    """Commits one fact first, then many facts at once."""
    journal = taken(path)
    dispatch(journal, an_entry(1))
    say("begin")
    dispatch(journal, *(an_entry(2 + more) for more in range(int(count))))
    say("end")
    leave()


def work(path: str, count: str, size: str, max_file_bytes: str = "") -> None:
    """Makes calls until the journal fails, and says what was acknowledged; then tries the rest of what one can do."""
    journal = taken(path)
    first = journal.last_sequence("w") + 1
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_file_bytes), resource.RLIM_INFINITY))
    _work(journal, first, int(count), b'"' + b"x" * int(size) + b'"')
    leave()


def _work(journal: Journal, first: int, count: int, arguments: bytes) -> None:
    last, act = 0, "nothing"
    try:
        for sequence in range(first, first + count):
            act = f"dispatch {sequence}"
            (entry,) = dispatch(journal, an_entry(sequence, arguments=arguments))
            say(act)
            act = f"answer {sequence}"
            answer(journal, entry)
            say(act)
            last = sequence
            act = "tidy"
            journal.tidy()
    except JournalError as error:
        say(f"failed {act}: {type(error).__name__} {error}")
        for again in (lambda: dispatch(journal, an_entry(1_000_000)), lambda: journal.append([])):
            try:
                again()
            except JournalError as second:
                say(f"again {type(second).__name__}")
        if last:
            found = journal.entry("w", last)
            say(f"read {found and found.status}")


def end_after_failure(path: str, how: str) -> None:
    """Makes calls until a checkpoint fails, and ends in one of three ways."""
    journal: Journal | None = taken(path)
    assert journal is not None
    _work(journal, 1, 30, b'"' + b"x" * 60_000 + b'"')
    assert journal.failure is not None
    if how == "close":
        journal.close()
    elif how == "drop":
        journal = None
        gc.collect()
    elif how == "sqlite close":
        assert journal._database is not None
        journal._database.close()
    say(f"log {'stays' if os.path.exists(Files(path).wal) else 'is gone'}")
    leave()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
