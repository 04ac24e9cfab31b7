"""The journal: what is on record about a call, what follows from it, and how facts get to disk.

The first half is pure: statuses, the decision table, what an answer amounts to. The second half is SQLite. Facts are
appended (dispatched, answered, in doubt), never changed; `append` returns when they are on disk, or raises and has
recorded nothing that anyone may rely on.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, assert_never

from storage import FORMAT, PROBES, Files, Inode, JournalError, Lock, connect, connect_owner, inode_of, is_busy, sync

# ------------------------------------------------------------------------------------------------------ what follows


class Status(StrEnum):
    """What the facts on record about a call add up to."""

    PENDING = "PENDING"  # dispatched by this process, no answer yet
    IN_DOUBT = "IN_DOUBT"  # dispatched, and nobody can know whether it ran
    COMPLETED = "COMPLETED"  # upstream answered with a result, isError or not
    FAILED = "FAILED"  # upstream answered with a JSON-RPC error
    INPUT_REQUIRED = "INPUT_REQUIRED"  # upstream wants input first; the next leg is a further attempt
    TASK = "TASK"  # upstream answered with a handle of a task
    NOT_SENT = "NOT_SENT"  # no byte of it left for upstream
    NOT_EXECUTED = "NOT_EXECUTED"  # an operator found that it did not run
    PRUNED = "PRUNED"  # it was on record once


class Action(StrEnum):
    """What to do with a call whose place is known."""

    PROCEED = "proceed"
    JOIN = "wait, then the same answer"
    REPLAY = "replay"
    REFUSE_IN_DOUBT = "refuse in_doubt"
    REFUSE_PRUNED = "refuse diverged, cause pruned"
    DIVERGE = "diverge"


# (what is on record at the place, does the signature match?) -> what to do. There is no row for doubt that goes away by
# itself: only an answer of upstream's or an operator's decision changes what a place holds.
DECISIONS: Final[Mapping[tuple[Status | None, bool], Action]] = {
    (None, True): Action.PROCEED,
    (None, False): Action.PROCEED,
    (Status.NOT_SENT, True): Action.PROCEED,
    (Status.NOT_SENT, False): Action.DIVERGE,
    (Status.NOT_EXECUTED, True): Action.PROCEED,
    (Status.NOT_EXECUTED, False): Action.DIVERGE,
    (Status.PENDING, True): Action.JOIN,
    (Status.PENDING, False): Action.DIVERGE,
    (Status.IN_DOUBT, True): Action.REFUSE_IN_DOUBT,
    (Status.IN_DOUBT, False): Action.REFUSE_IN_DOUBT,
    (Status.COMPLETED, True): Action.REPLAY,
    (Status.COMPLETED, False): Action.DIVERGE,
    (Status.FAILED, True): Action.REPLAY,
    (Status.FAILED, False): Action.DIVERGE,
    (Status.INPUT_REQUIRED, True): Action.PROCEED,
    (Status.INPUT_REQUIRED, False): Action.DIVERGE,
    (Status.TASK, True): Action.REPLAY,
    (Status.TASK, False): Action.DIVERGE,
    (Status.PRUNED, True): Action.REFUSE_PRUNED,
    (Status.PRUNED, False): Action.REFUSE_PRUNED,
}


class Cause(StrEnum):
    """Why nobody can know whether a call ran."""

    RELAY_LOST = "relay_lost"
    UPSTREAM_LOST = "upstream_lost"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    JOURNAL_UNAVAILABLE = "journal_unavailable"


@dataclass(frozen=True, slots=True)
class Entry:
    """One attempt of one call, and what is on record about it."""

    id: int
    workflow_id: str
    sequence: int
    attempt: int
    tool_name: str
    signature: str
    arguments: bytes | None
    status: Status
    result: bytes | None = None
    error: bytes | None = None
    started_at: int = 0  # epoch ms
    call_id: str | None = None
    is_modern: bool = False  # of the 2026-07-28 era
    cause: Cause | None = None

    @property
    def place(self) -> tuple[str, int]:
        """What tells one call from every other: workflow and sequence."""
        return self.workflow_id, self.sequence


def decide(entry: Entry | None, signature: str) -> Action:
    """What to do with a call of this signature at the place where `entry` is on record."""
    if entry is None:
        return DECISIONS[None, True]
    return DECISIONS[entry.status, entry.signature == signature]


def blocking_doubt(doubts: Iterable[Entry], tool_name: str, signature: str, in_flight: Collection[int]) -> Entry | None:
    """The lowest entry in doubt that stops an unpinned new call, which might be the same deed again.

    A call that only its client gave up on stops less than one that was lost: while upstream may still answer it (its id
    is in `in_flight`), calls of the same signature; after that, calls of the same tool.
    """
    for entry in sorted(doubts, key=lambda entry: entry.sequence):
        if entry.id in in_flight:
            blocks = entry.signature == signature
        elif entry.cause in (Cause.CANCELLED, Cause.TIMEOUT):
            blocks = entry.tool_name == storable(tool_name)
        else:
            blocks = True
        if blocks:
            return entry
    return None


def storable(text: str) -> str:
    """A text as SQLite can hold it: lone surrogates, which JSON can spell and UTF-8 cannot, stand as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


# Error answers that a bridge in front of a server writes by itself in the middle of a call; the call may have run.
_BRIDGE_ERRORS: Final = ((-32000, "Connection closed"), (-32001, "Request timed out"))


def status_of_answer(
    is_error: bool, members: Mapping[str, Any], *, is_modern: bool, is_stdin_closed: bool
) -> Status | None:
    """What upstream's answer to a `tools/call` says of it; None where it says nothing.

    `members` are those of the `result` or `error` object. Source: MCP 2026-07-28 basic/patterns/mrtr, 2025-11-25 tasks.
    """
    if not is_error:
        kind = members.get("resultType")
        if is_modern and kind == "input_required":
            return Status.INPUT_REQUIRED
        if (is_modern and kind == "task") or (not is_modern and isinstance(members.get("task"), dict)):
            return Status.TASK
        return Status.COMPLETED
    code, data = members.get("code"), members.get("data")
    if (code, members.get("message")) in _BRIDGE_ERRORS or (code == -32000 and is_stdin_closed):
        return None
    if isinstance(data, dict):
        if code == -32042 and isinstance(data.get("elicitations"), list):
            return Status.INPUT_REQUIRED
        refusal = data.get("checkpoint")
        if isinstance(refusal, dict) and "reason" in refusal:  # another Checkpoint behind us could not tell either
            return None
    return Status.FAILED


# ------------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A call is about to leave for upstream."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Answered:
    """Upstream answered a dispatched call, or no byte of it had left for an upstream that is gone (NOT_SENT)."""

    entry: Entry
    status: Status
    at_ms: int
    result: bytes | None = None
    error: bytes | None = None


@dataclass(frozen=True, slots=True)
class Doubted:
    """Why a dispatched call may never be answered; an answer may still come."""

    entry: Entry
    cause: Cause
    at_ms: int


Fact = Dispatched | Answered | Doubted


class JournalBusy(JournalError):
    """Another program holds the database for the moment; nothing was written, and nothing is wrong."""


class JournalFailed(JournalError):
    """A write, sync or check failed: nothing can be recorded until the next start, so nothing may be dispatched."""


# ----------------------------------------------------------------------------------------------------------- storage

_ENTRY: Final = (
    "SELECT id, workflow_id, sequence, attempt, tool_name, call_signature, arguments, status, result, error,"
    " started_at, call_id, era = 'modern', cause FROM attempts "
)
_ENTRY_AT: Final = _ENTRY + "WHERE workflow_id = ? AND sequence = ? ORDER BY attempt DESC LIMIT 1"
_ENTRY_BY_ID: Final = _ENTRY + "WHERE id = ?"
_OPEN_DOUBTS: Final = "SELECT dispatch FROM doubts WHERE is_open ORDER BY dispatch"
# What an owner left open: every dispatch carries the id below which all were settled or recorded as in doubt.
_LEFT_OPEN: Final = (
    "SELECT id FROM attempts WHERE id >= (SELECT settled_below FROM dispatches ORDER BY id DESC LIMIT 1)"
    " AND status IN ('PENDING', 'IN_DOUBT') AND cause IS NULL"
)
_LAST_SEQUENCE: Final = "SELECT max(sequence) FROM dispatches WHERE workflow_id = ?"
_NEWEST_EPOCH: Final = "SELECT max(epoch) FROM owners"
_LAST_ID: Final = "SELECT max(id) FROM dispatches"
_WORKFLOW_ID: Final = "SELECT workflow_id FROM journal"
QUERIES: Final = (_ENTRY_AT, _ENTRY_BY_ID, _OPEN_DOUBTS, _LEFT_OPEN, _LAST_SEQUENCE, _NEWEST_EPOCH, _LAST_ID)

MAX_SEQUENCE: Final = 2**53 - 1  # the table holds none above; see places.py
_WAL_PAGES: Final = 256  # then the write-ahead log is written back and starts over
_PAGE_BYTES: Final = 4096
_FACT_BYTES: Final = 300  # a row and its key, about, without arguments or result
_PAGES_PER_COMMIT: Final = 2  # the leaves that are begun or filled up

# Connections to journals that failed: to drop the last reference to one would close it (see Journal.close).
_LEFT_ALONE: Final[list[sqlite3.Connection]] = []


class Journal:
    """One journal file: read by place, appended to by whoever owns its lock.

    Not for use from several threads. Every method that touches the file raises JournalFailed when it is not what it was
    or cannot be used; from then on `failure` says why, nothing is written, and what can still be read is read.
    """

    def __init__(self, files: Files, *, exists: bool, workflow_id: str | None, now_ms: Callable[[], int]) -> None:
        self._files = files
        self._now_ms = now_ms
        self._given_workflow_id = workflow_id
        self.workflow_id = workflow_id or storable(files.typed)  # until the file says otherwise
        self._lock = Lock(files.lock)
        self._inode: Inode | None = inode_of(files.path) if exists else None
        self._wal_inode: Inode | None = None
        self._database: sqlite3.Connection | None = None
        self.failure: str | None = None
        self.upstream_pid: int | None = None  # goes on record with our epoch
        self._forget()

    def _forget(self) -> None:
        """Drops what was read: after the lock was given back, another process may have written."""
        self._epoch: int | None = None  # ours, once we have dispatched
        self._newest_epoch: int | None = None
        self._next_id = 1
        self._last_sequence: dict[str, int] = {}
        self._live: dict[tuple[str, int], Entry] = {}  # ours, dispatched or about to be, not answered
        self._doubts: dict[int, Entry] = {}
        self._left_open: list[Entry] = []
        self._new_pages = 0  # in the log, since it was last written back
        self._has_answered = False
        self._is_log_written_out = False

    @property
    def path(self) -> str:
        """The path as it was typed, for messages."""
        return self._files.typed

    @property
    def is_owned(self) -> bool:
        return self._database is not None

    @property
    def has_dispatched(self) -> bool:
        return self._epoch is not None

    def owner_pid(self) -> int | None:
        """The process that has the lock, as far as it says so itself."""
        return self._lock.owner_pid()

    def probe(self) -> None:
        """Reads a row of each table, without the lock and without writing. Raises JournalError for a damaged file."""
        if self._inode is None:
            return
        try:
            with contextlib.closing(connect(self._files.path, "ro")) as database:
                for query in PROBES:
                    database.execute(query).fetchone()
                self._read_workflow_id(database)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise JournalError(
                    f"journal {self.path}: {error}; it was left as it is: restore a copy or give another path"
                ) from error

    def _read_workflow_id(self, database: sqlite3.Connection) -> None:
        if self._given_workflow_id is None:
            row = database.execute(_WORKFLOW_ID).fetchone()
            if row is None:
                raise sqlite3.DatabaseError("the journal has lost its identity")
            self.workflow_id = row[0]

    # -------------------------------------------------------------------------------------------------- ownership

    def take(self) -> bool:
        """Takes the lock without waiting and reads what is needed; False while others are in the way.

        Creates the journal where there is none: on return it is on disk.
        """
        if self._database is not None:
            return True
        if self.failure is not None:
            raise JournalFailed(self.failure)
        try:
            if not self._lock.take():
                return False
            self._open()
        except JournalBusy:
            self._let_go()
            return False
        except (JournalError, OSError, sqlite3.Error) as error:
            if is_busy(error):
                self._let_go()
                return False
            failed = self._failed(self._explain(error))
            if self._database is None:
                self._lock.give_back()
            self._database = None  # it is left alone, like every connection that failed, and so is the lock
            raise failed from error
        return True

    def _explain(self, error: JournalError | OSError | sqlite3.Error) -> str:
        if isinstance(error, JournalError):
            return str(error)
        why = error.strerror if isinstance(error, OSError) else error
        return f"journal {self.path}: {why}; see to the disk, then start again"

    def _open(self) -> None:
        if not self._files.exists():
            if self._inode is not None:
                raise JournalError(f"journal {self.path}: it was deleted; restore it and start again")
            self._files.create(self.workflow_id, self._now_ms())
        if self._inode not in (None, inode_of(self._files.path)):
            raise JournalError(f"journal {self.path}: another file took its place; restore it and start again")
        self._inode = inode_of(self._files.path)
        database = self._database = connect_owner(self._files.path)
        mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"journal {self.path}: its file system has no shared memory for SQLite; use a local disk"
            )
        self._read_workflow_id(database)
        self._newest_epoch = database.execute(_NEWEST_EPOCH).fetchone()[0]
        self._next_id = (database.execute(_LAST_ID).fetchone()[0] or 0) + 1
        for (dispatch,) in database.execute(_OPEN_DOUBTS).fetchall():
            doubt = self._entry_by_id(dispatch)
            if doubt.status is Status.IN_DOUBT:  # else an operator has settled it
                self._doubts[dispatch] = doubt
        for (left,) in database.execute(_LEFT_OPEN).fetchall():
            self._doubts[left] = self._entry_by_id(left)
            self._left_open.append(self._doubts[left])
        self._wal_inode = inode_of(self._files.wal)

    def give_back(self) -> None:
        """Lets another process have the journal, unless this one has dispatched from it."""
        if not self.has_dispatched and not self._live:
            self.close()

    def close(self) -> None:
        """Writes the log back and gives the journal up.

        After a failure, connection and lock are kept: closing would write the log back and delete it, though a disk
        that failed once may say that it has what it has not. Whoever ends the process then must end it at once
        (os._exit), or the interpreter closes what is open.
        """
        if self._database is not None and self.failure is None:
            self._let_go()

    def _let_go(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        self._lock.give_back()
        self._forget()

    # ------------------------------------------------------------------------------------------------------ reads

    def entry(self, workflow_id: str, sequence: int) -> Entry | None:
        """What is on record at a place: its newest attempt, or None. Needs the lock."""
        live = self._live.get((workflow_id, sequence))
        if live is not None:
            return live
        with self._reading() as database:
            row = database.execute(_ENTRY_AT, (workflow_id, sequence)).fetchone()
        return _entry(row) if row else None

    def _entry_by_id(self, dispatch: int) -> Entry:
        with self._reading() as database:
            return _entry(database.execute(_ENTRY_BY_ID, (dispatch,)).fetchone())

    def last_sequence(self, workflow_id: str) -> int:
        """The highest sequence of a workflow, 0 for one that has none. Needs the lock."""
        if workflow_id not in self._last_sequence:
            with self._reading() as database:
                written = database.execute(_LAST_SEQUENCE, (workflow_id,)).fetchone()[0] or 0
            drafted = (place[1] for place in self._live if place[0] == workflow_id)
            self._last_sequence[workflow_id] = max([written, *drafted])
        return self._last_sequence[workflow_id]

    def doubts(self, workflow_id: str) -> list[Entry]:
        """The entries of a workflow that are in doubt, whoever left them. Needs the lock."""
        return [entry for entry in self._doubts.values() if entry.workflow_id == workflow_id]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self._database is None:
            raise JournalFailed(self.failure or "the journal is not open")
        try:
            yield self._database
        except sqlite3.Error as error:
            if is_busy(error):
                raise JournalBusy(f"journal {self.path}: {error}") from error
            raise self._failed(self._explain(error)) from error

    # ----------------------------------------------------------------------------------------------------- writes

    def draft(self, entry: Entry) -> Entry:
        """Gives an entry its id and claims its place; nothing is on disk before its Dispatched fact is appended."""
        if self.failure is not None:
            raise JournalFailed(self.failure)
        last = self.last_sequence(entry.workflow_id)
        if entry.sequence > MAX_SEQUENCE:
            raise JournalError(f"workflow {entry.workflow_id} has no place after {last}; use another workflow")
        call_id = None if entry.call_id is None else storable(entry.call_id)
        drafted = replace(
            entry, id=self._next_id, tool_name=storable(entry.tool_name), call_id=call_id, status=Status.PENDING
        )
        self._next_id += 1
        self._live[drafted.place] = drafted
        self._last_sequence[drafted.workflow_id] = max(drafted.sequence, last)
        return drafted

    def withdraw(self, entry: Entry) -> None:
        """Takes back a draft whose fact was not appended."""
        self._live.pop(entry.place, None)
        self._last_sequence.pop(entry.workflow_id, None)

    def append(self, facts: Sequence[Fact]) -> None:
        """Commits facts together; on return they are on disk.

        Raises JournalBusy (nothing was written, try again) or JournalFailed (they may or may not be on disk; this
        process writes no more).
        """
        epoch = self._epoch
        with self._transaction() as database:
            if epoch is None:
                epoch = self._take_over(database, (self._newest_epoch or 0) + 1)
            pending = (entry.id for entry in self._live.values() if entry.status is Status.PENDING)
            settled_below = min(pending, default=self._next_id)
            for fact in facts:
                self._insert(database, fact, epoch, settled_below)
        self._wal_inode = self._wal_inode or inode_of(self._files.wal)
        self._epoch = self._newest_epoch = epoch
        self._new_pages += _PAGES_PER_COMMIT + sum(map(_size, facts)) // _PAGE_BYTES
        for fact in facts:
            self._remember(fact)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction, if files and owner are what they were; on disk when it ends. Raises what `append` does."""
        if self.failure is not None:
            raise JournalFailed(self.failure)
        database = self._database
        if database is None:
            raise JournalFailed("the journal is not open")
        self._check_files()
        try:
            database.execute("BEGIN IMMEDIATE")
            if database.execute(_NEWEST_EPOCH).fetchone()[0] != self._newest_epoch:
                raise self._failed(f"journal {self.path}: another process has written to it; restart to go on")
            yield database
            database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            busy = is_busy(error)
            failure = None if busy else self._failed(self._explain(error))
            self._roll_back(database)
            raise failure or JournalBusy(f"journal {self.path}: {error}") from error
        except BaseException:
            self._roll_back(database)
            raise

    def _take_over(self, database: sqlite3.Connection, epoch: int) -> int:
        """Writes our epoch, and on record what earlier owners left in doubt."""
        sync(self._files.folder)  # the log may have got its name just now, and SQLite ignores what that sync says
        now = self._now_ms()
        values = (epoch, self._lock.pid, self.upstream_pid, now)
        database.execute("INSERT INTO owners (epoch, pid, upstream_pid, started_at) VALUES (?, ?, ?, ?)", values)
        for entry in self._left_open:
            self._insert_doubt(database, entry.id, Cause.RELAY_LOST, now)
        return epoch

    def _insert(self, database: sqlite3.Connection, fact: Fact, epoch: int, settled_below: int) -> None:
        match fact:
            case Dispatched(entry):
                era = "modern" if entry.is_modern else "handshake"
                database.execute(
                    "INSERT INTO dispatches (id, workflow_id, sequence, attempt, epoch, settled_below, tool_name,"
                    " call_signature, call_id, era, started_at, arguments) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        entry.id, *entry.place, entry.attempt, epoch, min(settled_below, entry.id), entry.tool_name,
                        entry.signature, entry.call_id, era, entry.started_at, entry.arguments,
                    ),
                )  # fmt: skip
            case Answered(entry, status, at_ms, result, error):
                database.execute(
                    "INSERT INTO outcomes (dispatch, status, completed_at, result, error) VALUES (?, ?, ?, ?, ?)",
                    (entry.id, status, at_ms, result, error),
                )
                database.execute("UPDATE doubts SET is_open = 0 WHERE dispatch = ?", (entry.id,))
            case Doubted(entry, cause, at_ms):
                self._insert_doubt(database, entry.id, cause, at_ms)
            case _:
                assert_never(fact)

    def _insert_doubt(self, database: sqlite3.Connection, dispatch: int, cause: Cause, at_ms: int) -> None:
        # A call can become doubtful twice, first cancelled and then lost with its upstream: the first cause stands.
        # One that was answered in the same commit has no doubt left.
        database.execute(
            "INSERT INTO doubts (dispatch, cause, noted_at, is_open)"
            " VALUES (?1, ?2, ?3, NOT EXISTS (SELECT 1 FROM outcomes WHERE dispatch = ?1)) ON CONFLICT DO NOTHING",
            (dispatch, cause, at_ms),
        )

    def _remember(self, fact: Fact) -> None:
        match fact:
            case Answered(entry):
                self._live.pop(entry.place, None)
                self._doubts.pop(entry.id, None)
                self._has_answered = True
            case Doubted(entry, cause) if entry.place in self._live and entry.id not in self._doubts:
                doubted = replace(entry, status=Status.IN_DOUBT, cause=cause)
                self._doubts[entry.id] = self._live[entry.place] = doubted

    def _roll_back(self, database: sqlite3.Connection) -> None:
        # SQLite has rolled back by itself after some errors; what the rollback itself says adds nothing.
        with contextlib.suppress(sqlite3.Error):
            if database.in_transaction:
                database.execute("ROLLBACK")

    def _failed(self, why: str) -> JournalFailed:
        self.failure = why
        if self._database is not None:
            _LEFT_ALONE.append(self._database)
        return JournalFailed(why)

    def _check_files(self) -> None:
        """Commits to files that were moved, deleted or replaced would be acknowledged and lost."""
        intact = (
            inode_of(self._files.path) == self._inode
            and (self._wal_inode is None or inode_of(self._files.wal) == self._wal_inode)
            and self._lock.is_held()
        )
        if not intact:
            raise self._failed(
                f"journal {self.path}: it was moved, deleted or replaced while in use; put it back and start again"
            )

    # ------------------------------------------------------------------------------------------------------- log

    def tidy(self) -> None:
        """Keeps the log a file of about 256 pages that is written over and over; for when nobody waits.

        Raises JournalBusy (another program is in the way; to be tried again) or JournalFailed.
        """
        if self._database is None or self.failure is not None:
            return
        if self._has_answered and not self._is_log_written_out:
            self._write_log_out()
        if self._new_pages >= _WAL_PAGES:
            self._write_log_back()

    def _write_log_out(self) -> None:
        """Makes the log's file as long as it will be, since to overwrite blocks is cheaper than to allocate them.

        Nothing is added to the journal: with a small cache SQLite writes pages to the log before their transaction
        ends, and they are rolled back. The commit after that brings them to disk.
        """
        with self._transaction() as database:
            database.execute("PRAGMA cache_size = 16")
            database.execute("SAVEPOINT scratch")
            database.execute("CREATE TABLE scratch (filler BLOB)")
            database.execute("INSERT INTO scratch VALUES (zeroblob(?))", (_WAL_PAGES * _PAGE_BYTES,))
            database.execute("ROLLBACK TO scratch")
            database.execute("PRAGMA cache_size = -2000")  # SQLite's default, in KiB
            database.execute(f"PRAGMA user_version = {FORMAT}")  # what it is: the least that makes a commit
        self._is_log_written_out = True

    def _write_log_back(self) -> None:
        """A checkpoint, after which the log starts over. A reader that is in the way puts that off until next time.

        SQLite's automatic one would hide an I/O error; here one raises JournalFailed.
        """
        self._check_files()
        with self._reading() as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._new_pages = 0


def _size(fact: Fact) -> int:
    """About how many bytes a fact adds to the log."""
    match fact:
        case Dispatched(entry):
            payload = entry.arguments
        case Answered(_, _, _, result, error):
            payload = result or error
        case _:
            payload = None
    return _FACT_BYTES + len(payload or b"")


def _entry(row: Sequence[Any]) -> Entry:
    """An entry from a row of `attempts`, as whoever holds the lock sees it: what others left open is in doubt."""
    dispatch, workflow_id, sequence, attempt, tool_name, signature, arguments = row[:7]
    status, result, error, started_at, call_id, is_modern, cause = row[7:]
    if status == Status.PENDING:
        status = Status.IN_DOUBT
    if status == Status.IN_DOUBT and cause is None:
        cause = Cause.RELAY_LOST
    return Entry(
        id=dispatch,
        workflow_id=workflow_id,
        sequence=sequence,
        attempt=attempt,
        tool_name=tool_name,
        signature=signature,
        arguments=arguments,
        status=Status(status),
        result=result,
        error=error,
        started_at=started_at,
        call_id=call_id,
        is_modern=bool(is_modern),
        cause=Cause(cause) if cause else None,
    )
