"""The journal: one file, one owner, facts appended to it.

`append` returns when facts are on disk, or raises and has recorded nothing that anyone may rely on. states.py says what
the facts mean, records.py reads them back, storage.py knows the files.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Final, assert_never

import reportrows
from branches import Family, Fork, root_of
from records import DueReport, Records
from states import (
    MAX_SEQUENCE,
    Answered,
    Cause,
    Delivered,
    Dispatched,
    Doubted,
    Entry,
    Fact,
    Forked,
    ReportDelivered,
    ReportFailed,
    ReportQueued,
    Round,
    Status,
    TaskEnded,
    UpstreamStarted,
    storable,
)
from storage import (
    FORMAT,
    PROBES,
    Files,
    Inode,
    JournalError,
    Lock,
    OpenFile,
    connect,
    connect_owner,
    inode_of,
    is_busy,
    sync,
)


class JournalBusy(JournalError):
    """Another program holds the database for the moment; nothing was written, and nothing is wrong."""


class JournalFailed(JournalError):
    """A write, sync or check failed: nothing can be recorded until the next start, so nothing may be dispatched."""


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
        self._log: OpenFile | None = None  # SQLite makes it when it needs it
        self._database: sqlite3.Connection | None = None
        self._records: Records | None = None
        self._reading = _Reading(self)
        self._transaction = _Transaction(self)
        self.failure: str | None = None
        self.upstream_pid: int | None = None  # goes on record with our epoch
        self.report_doubt: Callable[[Entry], ReportQueued] | None = None  # of what an earlier owner left
        self._forget()

    def _forget(self) -> None:
        """Drops what was read: after the lock was given back, another process may have written."""
        self._epoch: int | None = None  # ours, once we have dispatched
        self._newest_epoch: int | None = None
        self._next_id = 1
        self._last_sequence: dict[str, int] = {}
        self._families: dict[str, Family] = {}
        self._live: dict[tuple[str, int], Entry] = {}  # ours and not answered, in the order of their ids
        self._doubts: dict[int, Entry] = {}
        self._left_open: list[Entry] = []
        self._rounds: dict[tuple[str, int], Round] | None = None  # by place, once they were asked for
        self._new_pages = 0  # in the log, since it was last written back
        self._has_answered = False
        self._is_log_written_out = False

    @property
    def path(self) -> str:
        """The path as it was typed, for messages."""
        return self._files.typed

    @property
    def is_open(self) -> bool:
        """Whether this process has the lock and the database."""
        return self._database is not None

    @property
    def exists(self) -> bool:
        """Whether there is a file; taking the journal makes one."""
        return inode_of(self._files.path) is not None

    @property
    def has_dispatched(self) -> bool:
        return self._epoch is not None

    def owner_pid(self) -> int | None:
        """The process that has the lock, as far as it says so itself."""
        return self._lock.owner_pid()

    def probe(self) -> None:
        """Reads a row of each table, without the lock and without writing.

        Raises JournalError for a damaged file, and for a branch that was named and is not there.
        """
        if self._inode is None:
            self._check_branch(Family)
            return
        try:
            with contextlib.closing(connect(self._files.path, "ro")) as database:
                for query in PROBES:
                    database.execute(query).fetchone()
                self._read_workflow_id(Records(database))
                self._check_branch(Records(database).family)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise JournalError(
                    f"journal {self.path}: {error}; it was left as it is: restore a copy or give another path"
                ) from error

    def _check_branch(self, family_of: Callable[[str], Family]) -> None:
        """Who starts with a branch's name means one that is there: to follow another could repeat what is on it."""
        root = root_of(self.workflow_id)
        if root != self.workflow_id and self.workflow_id not in (members := family_of(root).members):
            raise JournalError(
                f"journal {self.path}: there is no branch {self.workflow_id}; there is {', '.join(members)}"
            )

    def _read_workflow_id(self, records: Records) -> None:
        if self._given_workflow_id is None:
            self.workflow_id = records.workflow_id()

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
        records = self._records = Records(database)
        self._read_workflow_id(records)
        self._newest_epoch = records.newest_epoch()
        self._next_id = records.last_id() + 1
        self._left_open = records.left_open()
        self._doubts = {entry.id: entry for entry in (*records.open_doubts(), *self._left_open)}
        self._watch_log()

    def _watch_log(self) -> None:
        self._log = OpenFile(self._files.wal) if inode_of(self._files.wal) is not None else None

    def give_back(self) -> None:
        """Lets another process have the journal, unless this one has dispatched from it."""
        if self._epoch is None and not self._live:
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
            self._database = self._records = None
        self._lock.give_back()
        self._forget()

    # ------------------------------------------------------------------------------------------------------ reads
    # What is on disk, and on top of that what this process has drafted or not heard of yet. All of it needs the lock.

    def entry(self, workflow_id: str, sequence: int) -> Entry | None:
        """What a place holds: its newest attempt of which something may be in the world, or None."""
        live = self._live.get((workflow_id, sequence))
        if live is not None or sequence > self.last_sequence(workflow_id):
            return live
        with self._reading as records:
            return records.standing(workflow_id, sequence)

    def arguments(self, entry: Entry) -> bytes | None:
        """The arguments of an attempt as they are on disk; None where it has none, or is not there yet."""
        with self._reading as records:
            return records.arguments(entry.id)

    def unanswered(self) -> list[Entry]:
        """The calls of this process without an answer on disk, those included whose own row is not there yet."""
        return list(self._live.values())

    def next_attempt(self, workflow_id: str, sequence: int) -> int:
        """The number of one more attempt at a place that has had some."""
        with self._reading as records:
            return records.last_attempt(workflow_id, sequence) + 1

    def last_sequence(self, workflow_id: str) -> int:
        """The highest sequence of a workflow, 0 for one that has none."""
        if workflow_id not in self._last_sequence:
            with self._reading as records:
                drafted = (sequence for owner, sequence in self._live if owner == workflow_id)
                self._last_sequence[workflow_id] = max([records.last_sequence(workflow_id), *drafted])
        return self._last_sequence[workflow_id]

    def next_sequence(self, workflow_id: str, after: int, below: int | None) -> int | None:
        """The first place behind `after` and before `below` that has a row."""
        with self._reading as records:
            written = records.next_sequence(workflow_id, after, below)
        places = [sequence for owner, sequence in self._live if owner == workflow_id and sequence > after]
        places += [] if written is None else [written]
        return min((place for place in places if below is None or place < below), default=None)

    def with_call_id(self, call_id: str) -> list[tuple[str, int]]:
        """The places that a host knows by an id, the last that it gave it to first."""
        live = [place for place, entry in self._live.items() if entry.call_id == call_id]
        with self._reading as records:
            return [*reversed(live), *records.with_call_id(call_id)]

    def with_signature(
        self, workflow_id: str, signature: str, after: int, below: int | None, *, is_undelivered: bool
    ) -> Iterator[int]:
        """Where earlier processes made a call, behind `after` and before `below`, in order."""
        epoch = self._epoch or (self._newest_epoch or 0) + 1
        with self._reading as records:
            yield from records.with_signature(
                workflow_id, signature, after, below, epoch, is_undelivered=is_undelivered
            )

    def rounds(self) -> list[Round]:
        """The calls that wait for input, the oldest first."""
        if self._rounds is None:
            with self._reading as records:
                self._rounds = {one.place: one for one in records.rounds()}
        waiting = [one for place, one in self._rounds.items() if place not in self._live]
        return sorted(waiting, key=lambda one: one.begun)

    def with_state(self, state: str, signature: str) -> Iterator[tuple[str, int]]:
        """The places of a call that ever gave this state, the last to do so first."""
        with self._reading as records:
            yield from records.with_state(state, signature)

    def family(self, root: str) -> Family:
        """A root workflow and its branches."""
        if root not in self._families:
            with self._reading as records:
                self._families[root] = records.family(root)
        return self._families[root]

    def with_task(self, task_id: str) -> Entry | None:
        """The newest attempt that was answered with a handle of this task."""
        with self._reading as records:
            return records.with_task(task_id)

    def task_answer(self, dispatch: int, method: str) -> tuple[bytes | None, bytes | None] | None:
        """The last final answer to a `tasks/*` method, as result or error."""
        with self._reading as records:
            return records.task_answer(dispatch, method)

    def has_task_ended(self, dispatch: int) -> bool:
        """Whether upstream's last word on a task is on record."""
        with self._reading as records:
            return records.has_task_ended(dispatch)

    def due_reports(self, base_url: str, now_ms: int, limit: int) -> list[DueReport]:
        """Reports for this endpoint that are to be sent now, the longest due first."""
        with self._reading as records:
            return records.due_reports(base_url, now_ms, limit)

    def next_report_at(self, base_url: str) -> int | None:
        """When the next report for this endpoint is due, as epoch ms; None while there is none."""
        with self._reading as records:
            return records.next_report_at(base_url)

    def doubts(self) -> list[Entry]:
        """The entries that are in doubt, whoever left them, and that no later attempt has settled."""
        found = [(doubt, self.entry(*doubt.place)) for doubt in self._doubts.values()]
        return [doubt for doubt, standing in found if standing is not None and standing.id == doubt.id]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Says what an error of SQLite's means for us."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._meaning(error) from error

    def _meaning(self, error: sqlite3.Error) -> JournalError:
        if is_busy(error):
            return JournalBusy(f"journal {self.path}: {error}")
        return self._failed(self._explain(error))

    # ----------------------------------------------------------------------------------------------------- writes

    def draft(
        self,
        workflow_id: str,
        sequence: int,
        attempt: int,
        tool_name: str,
        signature: str,
        arguments: bytes | None,
        *,
        started_at: int,
        call_id: str | None = None,
        is_modern: bool = False,
    ) -> Entry:
        """An entry that claims its place; nothing is on disk before its Dispatched fact is appended.

        Texts are storable.
        """
        if self.failure is not None:
            raise JournalFailed(self.failure)
        last = self.last_sequence(workflow_id)
        if sequence > MAX_SEQUENCE:
            raise JournalError(f"workflow {workflow_id} has no place after {last}; use another workflow")
        if attempt > 1:
            self.rounds()  # one that this is a leg of cannot be read any more while the leg is under way
        drafted = Entry(
            self._next_id, workflow_id, sequence, attempt, tool_name, signature, arguments, Status.PENDING,
            started_at=started_at, call_id=call_id, is_modern=is_modern,
        )  # fmt: skip
        self._next_id += 1
        self._live.pop((workflow_id, sequence), None)  # one in doubt that may run again: else this would stand before
        self._live[workflow_id, sequence] = drafted
        self._last_sequence[workflow_id] = max(sequence, last)
        return drafted

    def let_go_of_arguments(self, entry: Entry) -> Entry:
        """A call of this process without its arguments, which may be large and are on disk: `arguments` reads them."""
        self._live[entry.place] = slim = entry._replace(arguments=None)
        return slim

    def withdraw(self, entry: Entry) -> None:
        """Takes back a draft whose fact was not appended."""
        self._live.pop(entry.place, None)
        self._last_sequence.pop(entry.workflow_id, None)

    def draft_fork(self, fork: Fork) -> None:
        """Begins a branch; it is on disk with the Forked fact, in the commit of its first row."""
        root = root_of(fork.branch)
        self._families[root] = self.family(root).with_fork(fork)

    def withdraw_fork(self, fork: Fork) -> None:
        """Takes back a branch whose fact was not appended."""
        self._families.pop(root_of(fork.branch), None)

    def append(self, facts: Sequence[Fact]) -> None:
        """Commits facts together; on return they are on disk. With its first dispatch this process becomes the owner.

        Raises JournalBusy (nothing was written, try again) or JournalFailed (they may or may not be on disk; this
        process writes no more).
        """
        epoch = self._epoch
        with self._transaction as database:
            if epoch is None and any(isinstance(fact, Dispatched) for fact in facts):
                epoch = self._take_over(database, (self._newest_epoch or 0) + 1)
            doubted: set[int] = set()
            size = sum([self._insert(database, fact, epoch or 0, doubted) for fact in facts])
        if self._log is None:
            self._watch_log()
        if epoch is not None:
            self._epoch = self._newest_epoch = epoch
        self._new_pages += _PAGES_PER_COMMIT + (size + _FACT_BYTES * len(facts)) // _PAGE_BYTES
        for fact in facts:
            self._remember(fact)

    def _take_over(self, database: sqlite3.Connection, epoch: int) -> int:
        """Writes our epoch, and on record what earlier owners left in doubt."""
        sync(self._files.folder)  # the log may have got its name just now, and SQLite ignores what that sync says
        now = self._now_ms()
        values = (epoch, self._lock.pid, self.upstream_pid, now)
        database.execute("INSERT INTO owners (epoch, pid, upstream_pid, started_at) VALUES (?, ?, ?, ?)", values)
        for entry in self._left_open:
            self._insert_doubt(database, entry.id, Cause.RELAY_LOST, now)
        report = self.report_doubt
        if report is not None and self._records is not None:
            for entry in (*self._left_open, *self._records.given_up(epoch - 1)):
                reportrows.queue(database, report(entry))
        reportrows.forget_delivered(database)
        return epoch

    def _insert(self, database: sqlite3.Connection, fact: Fact, epoch: int, doubted: set[int]) -> int:
        """Writes a fact; how many bytes of arguments, answers and the like are in it.

        `doubted` takes the ids of attempts that are put on record as in doubt in this transaction.
        """
        payload: bytes | None = None
        match fact:
            case Dispatched(entry):
                payload, era = entry.arguments, "modern" if entry.is_modern else "handshake"
                pending = (live.id for live in self._live.values() if live.status is Status.PENDING)
                settled_below = min(entry.id, next(pending, entry.id))
                database.execute(
                    "INSERT INTO dispatches (id, workflow_id, sequence, attempt, epoch, settled_below, tool_name,"
                    " call_signature, call_id, era, started_at, arguments) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        entry.id, entry.workflow_id, entry.sequence, entry.attempt, epoch, settled_below,
                        entry.tool_name, entry.signature, entry.call_id, era, entry.started_at, payload,
                    ),
                )  # fmt: skip
            case Answered(entry, status, at_ms, result, error, state, task_id):
                payload = result or error
                database.execute(
                    "INSERT INTO outcomes (dispatch, status, completed_at, request_state, task_id, result, error)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (entry.id, status, at_ms, state, task_id, result, error),
                )
                if entry.id in self._doubts or entry.id in doubted:  # an answer has come after all
                    database.execute("UPDATE doubts SET is_open = 0 WHERE dispatch = ?", (entry.id,))
            case Doubted(entry, cause, at_ms):
                doubted.add(entry.id)
                self._insert_doubt(database, entry.id, cause, at_ms)
            case Forked(fork, at_ms):
                database.execute(
                    "INSERT INTO forks (root, branch, parent, sequence, forked_at) VALUES (?, ?, ?, ?, ?)",
                    (root_of(fork.branch), *fork, at_ms),
                )
            case Delivered(dispatch):
                # Since it was replayed, its row may have been pruned.
                database.execute(
                    "INSERT OR IGNORE INTO deliveries (dispatch) SELECT id FROM dispatches WHERE id = ?", (dispatch,)
                )
            case TaskEnded(entry, method, at_ms, result, error):
                database.execute(
                    "INSERT OR REPLACE INTO tasks (dispatch, method, ended_at, result, error)"
                    " SELECT id, ?, ?, ?, ? FROM dispatches WHERE id = ?",  # it may have been pruned meanwhile
                    (method, at_ms, result, error, entry.id),
                )
                database.execute("UPDATE doubts SET is_open = 0 WHERE dispatch = ?", (entry.id,))
            case UpstreamStarted(pid):
                database.execute("UPDATE owners SET upstream_pid = ? WHERE epoch = ?", (pid, epoch))
            case ReportQueued():
                payload = fact.body
                reportrows.queue(database, fact)
            case ReportDelivered(id):
                reportrows.mark_delivered(database, id)
            case ReportFailed(id, attempts, due_at, error):
                reportrows.mark_failed(database, id, attempts, due_at, error)
            case _:
                assert_never(fact)
        return 0 if payload is None else len(payload)

    def _insert_doubt(self, database: sqlite3.Connection, dispatch: int, cause: Cause, at_ms: int) -> None:
        # A call can become doubtful twice, first cancelled and then lost with its upstream: the first cause stands.
        # One that was answered in the same commit has no doubt left; a handle is no answer, the task may be lost.
        database.execute(
            "INSERT INTO doubts (dispatch, cause, noted_at, is_open) VALUES (?1, ?2, ?3,"
            " NOT EXISTS (SELECT 1 FROM outcomes WHERE dispatch = ?1 AND status <> 'TASK'))"
            " ON CONFLICT DO UPDATE SET is_open = excluded.is_open",
            (dispatch, cause, at_ms),
        )

    def _remember(self, fact: Fact) -> None:
        match fact:
            case Answered(entry):
                self._live.pop(entry.place, None)
                self._doubts.pop(entry.id, None)
                self._has_answered = True
                self._follow_round(fact)
            case TaskEnded(entry):
                self._doubts.pop(entry.id, None)
            case Doubted(entry, cause) if entry.id not in self._doubts:
                doubted = entry._replace(status=Status.IN_DOUBT, cause=cause, arguments=None)  # it may be kept for long
                if entry.place in self._live:
                    self._doubts[entry.id] = self._live[entry.place] = doubted
                elif entry.status is Status.TASK:
                    self._doubts[entry.id] = doubted

    def _follow_round(self, answered: Answered) -> None:
        """What an answer makes of the rounds that are open."""
        entry, rounds = answered.entry, self._rounds
        if rounds is None or answered.status is Status.NOT_SENT:  # then all is as it was
            return
        before = rounds.pop(entry.place, None)
        if answered.status is Status.INPUT_REQUIRED:
            rounds[entry.place] = Round(
                *entry.place,
                entry.signature,
                answered.request_state,
                is_repeated=answered.error is not None,
                begun=entry.id if before is None else before.begun,
            )

    def _abandon(self, database: sqlite3.Connection, error: BaseException) -> None:
        """Rolls a transaction back, and raises what the error of SQLite's or the system's means, if it is one."""
        meaning: JournalError | None = None
        if isinstance(error, (sqlite3.Error, OSError)):
            busy = JournalBusy(f"journal {self.path}: {error}") if is_busy(error) else None
            meaning = busy or self._failed(self._explain(error))
        # SQLite has rolled back by itself after some errors; what the rollback itself says adds nothing.
        with contextlib.suppress(sqlite3.Error):
            if database.in_transaction:
                database.execute("ROLLBACK")
        if meaning is not None:
            raise meaning from error

    def _failed(self, why: str) -> JournalFailed:
        self.failure = why
        if self._database is not None:
            _LEFT_ALONE.append(self._database)
        return JournalFailed(why)

    def _check_files(self) -> None:
        """Commits to files that were moved, deleted or replaced would be acknowledged and lost."""
        intact = (
            inode_of(self._files.path) == self._inode
            and (self._log is None or self._log.is_in_place())
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
        with self._transaction as database:
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
        database = self._database
        if database is None:
            return
        self._check_files()
        with self._watching():
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._new_pages = 0


class _Reading:
    """The journal's records, for the length of a `with`: says what an error of SQLite's in it means for us.

    A class, since every call reads: a generator costs three times as much.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> Records:
        records = self._journal._records
        if records is None:
            raise JournalFailed(self._journal.failure or "the journal is not open")
        return records

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise self._journal._meaning(error) from error


class _Transaction:
    """One transaction, for the length of a `with`, if files and owner are what they were; on disk when it ends.

    Raises what `Journal.append` does.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> sqlite3.Connection:
        journal = self._journal
        database, records = journal._database, journal._records
        if journal.failure is not None or database is None or records is None:
            raise JournalFailed(journal.failure or "the journal is not open")
        journal._check_files()
        try:
            database.execute("BEGIN IMMEDIATE")
            if records.newest_epoch() != journal._newest_epoch:
                raise journal._failed(f"journal {journal.path}: another process has written to it; restart to go on")
        except BaseException as error:
            journal._abandon(database, error)
            raise
        return database

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        database = self._journal._database
        assert database is not None
        if error is None:
            try:
                database.execute("COMMIT")
            except BaseException as refused:
                self._journal._abandon(database, refused)
                raise
        else:
            self._journal._abandon(database, error)
