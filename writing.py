"""The way an operator's command writes: with the lock, on one connection, one commit at a time."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from typing import Final

from processes import is_running
from reader import Busy, holder_of
from render import clean
from storage import Files, JournalError, Lock, connect_owner, is_busy, sync

_LOCK_WAIT_S: Final = 1.0  # a relay that only replays gives the lock back at once
_POLL_S: Final = 0.02


@contextlib.contextmanager
def writing(typed: str) -> Iterator[sqlite3.Connection]:
    """The one connection that may write. Raises Busy, naming the process that owns the journal, or JournalError."""
    files = Files(typed)
    if not (os.path.isdir(files.folder) and files.exists()):
        raise JournalError(f"journal {typed}: there is none, or it is empty; give the path of a journal")
    lock = Lock(files.lock)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not lock.take():
        if time.monotonic() > deadline:
            raise busy(files, holder_of(files.lock) or lock.owner_pid())
        time.sleep(_POLL_S)
    try:
        if not files.exists():  # it may have gone while we waited
            raise JournalError(f"journal {typed}: it was deleted; restore it")
        with contextlib.closing(connect_owner(files.path)) as database:
            database.execute("PRAGMA journal_mode = WAL")  # what it is, unless somebody has changed that
            yield database
    except sqlite3.Error as error:
        if is_busy(error):
            raise Busy(f"journal {typed}: another program has the database for itself; nothing was changed") from error
        raise JournalError(
            f"journal {typed}: {clean(str(error))}; see to the disk, then look at what is on record"
        ) from error
    except OSError as error:
        raise JournalError(f"journal {typed}: {error.strerror}; see to the disk, then try again") from error
    finally:
        lock.give_back()


def busy(files: Files, pid: int | None) -> Busy:
    """That somebody owns a journal, and what to do about it."""
    name = f"process {pid}" if pid else "another process"
    how = f" (kill {pid})" if pid and is_running(pid) else ""
    return Busy(f"busy: {name} owns {files.typed}; end it{how} and try again, nothing was changed")


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, folder: str) -> Iterator[None]:
    """One commit, on disk when it ends; nothing of it when anything is raised."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        sync(folder)  # the log may have got its name just now, and SQLite ignores what that sync says
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            if database.in_transaction:
                database.execute("ROLLBACK")
        raise
