"""A journal as an operator looks at it: read-only, with or without a running owner, and never in anyone's way.

Takes no lock and writes nothing. While a connection is open here, nothing of this process opens the file, its -wal or
its -shm any other way.
"""

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

from branches import Family, Fork, root_of
from processes import is_running
from render import clean, cut, decoded
from states import VOID_SQL, Cause, Status
from storage import Files, JournalError, Lock, connect, is_busy

_BUSY_MS: Final = 5000  # another program may have the database for itself for a moment
_may_say_error: Final = re.compile(rb'"isError"\s*:\s*true').search
_SHOWN_CHARS: Final = 60  # of a value that should not be there
_SNIFFED_BYTES: Final = 1 << 20  # of a result in a listing, whose isError is worth reading that much

# Whether an attempt is what its place holds: the newest of which something may be in the world, else the newest. Most
# places have but one.
_STANDS: Final = (
    "(NOT EXISTS (SELECT 1 FROM dispatches AS o WHERE o.workflow_id = a.workflow_id AND o.sequence = a.sequence"
    " AND o.attempt <> a.attempt) OR a.attempt = coalesce("
    "(SELECT max(s.attempt) FROM attempts AS s WHERE s.workflow_id = a.workflow_id AND s.sequence = a.sequence"
    " AND s.status NOT IN VOID),"
    " (SELECT max(d.attempt) FROM dispatches AS d WHERE d.workflow_id = a.workflow_id AND d.sequence = a.sequence)))"
).replace("VOID", VOID_SQL)
_COLUMNS: Final = (
    "SELECT a.id, a.workflow_id, a.sequence, a.attempt, a.tool_name, a.call_signature,"
    " CASE a.status WHEN 'PENDING' THEN ?1 ELSE a.status END AS shown, a.started_at, a.completed_at, a.call_id, a.era,"
    " a.owner_epoch, a.cause, a.delivered, EXISTS (SELECT 1 FROM decisions AS e WHERE e.dispatch = a.id), "
)
_FROM: Final = " FROM attempts AS a "
_ROWS: Final = _COLUMNS + _STANDS + _FROM
# An earlier attempt in doubt is listed too: it has to be settled, whatever a later one came to.
_LISTED: Final = f"WHERE (a.status IN ('PENDING', 'IN_DOUBT') OR {_STANDS}) "
_WANTED: Final = (
    "AND (?2 IS NULL OR a.workflow_id = ?2) AND (?3 IS NULL OR a.tool_name = ?3)"
    " AND (?4 IS NULL OR a.started_at >= ?4) AND (?5 IS NULL OR instr(?5, ' ' || shown || ' '))"
    " ORDER BY a.id DESC LIMIT ?6"
)
_LIST: Final = _ROWS + _LISTED + _WANTED
# What has no outcome is on record as in doubt, or was left open at or behind the mark that the last dispatch carries.
_MAY_BE_OPEN: Final = (
    "AND a.id IN (SELECT dispatch FROM doubts UNION SELECT id FROM dispatches"
    " WHERE id >= (SELECT settled_below FROM dispatches ORDER BY id DESC LIMIT 1)) "
)
_LIST_OPEN: Final = _ROWS + _LISTED + _MAY_BE_OPEN + _WANTED
_OPEN: Final = frozenset({Status.PENDING, Status.IN_DOUBT})
_AT: Final = _ROWS + "WHERE a.workflow_id = ?2 AND a.sequence = ?3 ORDER BY a.attempt"
_AFTER: Final = _ROWS + "WHERE a.id > ?2 AND (?3 IS NULL OR a.workflow_id = ?3) ORDER BY a.id"
_BODIES: Final = "SELECT arguments, result, error FROM attempts WHERE id = ?"
_ANSWER: Final = "SELECT status, completed_at, result, error FROM outcomes WHERE dispatch = ?"
_SNIFF: Final = (
    "SELECT CASE WHEN length(result) <= ?2 THEN result END FROM outcomes WHERE dispatch = ?1"
    " AND NOT EXISTS (SELECT 1 FROM decisions WHERE decisions.dispatch = ?1)"
    " UNION ALL SELECT * FROM (SELECT result FROM decisions WHERE dispatch = ?1 ORDER BY id DESC LIMIT 1)"
)
_SHOWN: Final = "SELECT CASE a.status WHEN 'PENDING' THEN ?1 ELSE a.status END AS shown, count(*)"
_BY_STATUS: Final = _SHOWN + _FROM + "WHERE " + _STANDS + " GROUP BY shown"


class Era(StrEnum):
    """Which revision of the protocol a call came in."""

    HANDSHAKE = "handshake"
    MODERN = "modern"


class Identity(NamedTuple):
    """What a journal says of itself."""

    workflow_id: str
    created_at: int


class _Number(NamedTuple):
    status: Status
    places: int


class Totals(NamedTuple):
    """The journal's attempts, together."""

    attempts: int
    newest_at: int | None


class Row(NamedTuple):
    """One attempt of a call, without its arguments and its answer."""

    id: int
    workflow_id: str
    sequence: int
    attempt: int
    tool_name: str
    signature: str
    status: Status
    started_at: int
    completed_at: int | None
    call_id: str | None
    era: Era
    owner_epoch: int
    cause: Cause | None  # why it is in doubt; None where it is not
    is_delivered: bool
    is_settled: bool  # by an operator
    stands: bool  # it is what its place holds; a later attempt is, where it does not
    is_error: bool | None = False  # whether its result says so; None where that was not looked at


class Bodies(NamedTuple):
    """What went over the wire."""

    arguments: bytes | None
    result: bytes | None
    error: bytes | None


class Answer(NamedTuple):
    """What upstream said of an attempt itself, whatever an operator decided later."""

    status: Status
    completed_at: int
    result: bytes | None
    error: bytes | None


class Judgement(NamedTuple):
    """What an operator decided."""

    status: Status
    decided_at: int
    reason: str


class Doubt(NamedTuple):
    """Why an attempt was or is in doubt."""

    cause: Cause
    noted_at: int
    is_open: bool


class TaskAnswer(NamedTuple):
    """The last word of upstream's on a task."""

    method: str
    ended_at: int
    result: bytes | None
    error: bytes | None


class Owner(NamedTuple):
    """A process that has dispatched from this journal."""

    epoch: int
    pid: int
    upstream_pid: int | None
    started_at: int


class Forking(NamedTuple):
    """A branch, and when it began."""

    branch: str
    parent: str
    sequence: int
    forked_at: int


class Pruning(NamedTuple):
    """What is left of a workflow that was pruned."""

    workflow_id: str
    last_sequence: int
    pruned_at: int


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows are asked for; None means any."""

    workflow_id: str | None = None
    statuses: Sequence[str] = ()
    tool_name: str | None = None
    since_ms: int | None = None
    limit: int | None = None  # of the newest


_Fact = TypeVar("_Fact", bound=tuple[Any, ...])


@cache
def _kinds(fact: type[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """The members of a fact: their names, and what each may be."""
    return [(name, get_args(hint) or (hint,)) for name, hint in get_type_hints(fact).items()]


def _taken(kinds: Iterable[Any], value: Any) -> Any:
    """A value as the first kind that it can be. Raises ValueError if there is none."""
    for kind in kinds:
        if issubclass(kind, StrEnum):
            with contextlib.suppress(ValueError):
                return kind(value)
        elif kind is bool and value in (0, 1):
            return bool(value)
        elif isinstance(value, kind):
            return value
    raise ValueError


# -------------------------------------------------------------------------------------------------------------- owners


def holder_of(lock: str) -> int | None:
    """The process that has a journal's lock, 0 for one that cannot be named, None for nobody. Does not take it."""
    try:
        found = os.stat(lock)
    except OSError:
        return None
    said = Lock(lock).owner_pid() or 0
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            return _held(file, found.st_dev, found.st_ino, said)
    except OSError:  # no Linux: all there is to go by is the number that the last owner left
        return said if said and is_running(said) else None


def _held(lines: Iterable[str], device: int, inode: int, said: int) -> int | None:
    """Who holds a lock on a file, out of /proc/locks; some file systems show another device there."""
    for line in lines:
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":  # one that waits for a lock
            continue
        major, _, rest = fields[5].partition(":")
        minor, _, number = rest.partition(":")
        if number != str(inode):
            continue
        with contextlib.suppress(ValueError):
            pid, is_same = int(fields[4]), os.makedev(int(major, 16), int(minor, 16)) == device
            if is_same or pid == said:
                return max(pid, 0)
    return None


# ------------------------------------------------------------------------------------------------------------ the file


@contextlib.contextmanager
def reading(typed: str) -> Iterator["Reader"]:
    """A journal that is there, open for reading. Raises JournalError for one that is not, or cannot be read."""
    files = Files(typed)
    if not (os.path.isdir(files.folder) and files.exists(for_reading=True)):
        raise JournalError(f"journal {typed}: there is none, or it is empty; give the path of a journal")
    # A closed journal in a folder where no -shm can be made. A live one looks malformed so, hence only then.
    is_frozen = not os.path.exists(files.wal) and not os.access(files.folder, os.W_OK)
    try:
        with contextlib.closing(connect(files.path, "ro&immutable=1" if is_frozen else "ro")) as database:
            database.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            database.text_factory = decoded  # SQLite does not care what bytes a text is made of
            yield Reader(files, database)
    except sqlite3.Error as error:
        if is_busy(error):
            raise Busy(f"journal {typed}: another program has the database for itself; try again later") from error
        raise JournalError(f"journal {typed}: {clean(str(error))}; it was left as it is: {_ADVICE}") from error


_ADVICE: Final = "see what journal verify says, restore a copy"


class Busy(Exception):
    """Somebody else is in the way; nothing is wrong, and nothing was changed."""


class Reader:
    """What is on record, to be looked at. Methods raise sqlite3.Error, and JournalError for what no relay writes.

    SQLite vouches for little: a page may be damaged, and another program can switch constraints off. So a value is
    looked at as it is read, and who uses it need not ask.
    """

    def __init__(self, files: Files, database: sqlite3.Connection) -> None:
        self.files = files
        self.database = database
        self.holder = holder_of(files.lock)

    @cached_property
    def newest_epoch(self) -> int | None:
        """The epoch of whoever dispatched last."""
        found: int | None = self._one("SELECT max(epoch) FROM owners")
        return found

    @cached_property
    def is_owned(self) -> bool:
        """Whether whoever holds the lock is who left the rows of the newest epoch open: it has dispatched something."""
        newest = self._one("SELECT pid FROM owners WHERE epoch = ?", self.newest_epoch)
        return self.holder is not None and newest is not None and Lock(self.files.lock).owner_pid() == newest

    @cached_property
    def open_status(self) -> Status:
        """What a row is that has no outcome."""
        return Status.PENDING if self.is_owned else Status.IN_DOUBT

    def _fact(self, kind: type[_Fact], values: Sequence[Any], about: str) -> _Fact:
        """A row of a table as what it is. Raises JournalError, naming the row."""
        made = []
        for (name, kinds), value in zip(_kinds(kind), values, strict=False):
            try:
                made.append(_taken(kinds, value))
            except ValueError:
                shown = cut(clean(repr(value)), _SHOWN_CHARS)
                what = f"{about} has a {name} that no relay writes, {shown}"
                raise JournalError(f"journal {self.files.typed}: {what}; {_ADVICE}") from None
        return kind(*made)

    def _one(self, query: str, *values: Any) -> Any:
        row = self.database.execute(query, values).fetchone()
        return row[0] if row else None

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """One state of the journal for several questions. Short: a reader delays the owner's checkpoints."""
        self.database.execute("BEGIN")
        try:
            yield
        finally:
            if self.database.in_transaction:
                self.database.execute("ROLLBACK")

    def _row(self, values: Sequence[Any]) -> Row:
        row = self._fact(Row, values, f"dispatch {values[0]}")
        return row._replace(cause=(row.cause or Cause.RELAY_LOST) if row.status is Status.IN_DOUBT else None)

    # ---------------------------------------------------------------------------------------------------- many rows

    def listed(self, wanted: Filter) -> list[Row]:
        """What places hold, and earlier attempts that are in doubt all the same; oldest first."""
        statuses = f" {' '.join(wanted.statuses)} " if wanted.statuses else None
        values = (
            self.open_status,
            wanted.workflow_id,
            wanted.tool_name,
            wanted.since_ms,
            statuses,
            -1 if wanted.limit is None else wanted.limit,
        )
        query = _LIST_OPEN if wanted.statuses and _OPEN.issuperset(wanted.statuses) else _LIST
        rows = [self._row(found) for found in self.database.execute(query, values)]
        return [self._sniffed(row) for row in reversed(rows)]

    def _sniffed(self, row: Row) -> Row:
        if row.status != Status.COMPLETED:
            return row
        result = self._one(_SNIFF, row.id, _SNIFFED_BYTES)
        return row._replace(is_error=None if result is None else says_error(result))

    def totals(self) -> Totals:
        """How many attempts are on record, and when the newest of them began."""
        found = self.database.execute("SELECT count(*), max(started_at) FROM dispatches").fetchone()
        return self._fact(Totals, found, "a dispatch")

    def after(self, dispatch: int, workflow_id: str | None, max_bytes: int) -> list[tuple[Row, Bodies]]:
        """The next attempts behind an id, whole: at least one, if there is one, and about so many bytes."""
        found: list[tuple[Row, Bodies]] = []
        with contextlib.closing(self.database.cursor()) as cursor:
            for values in cursor.execute(_AFTER, (self.open_status, dispatch, workflow_id)):
                row = self._row(values)
                bodies = self.bodies(row.id)
                is_error = row.status == Status.COMPLETED and says_error(bodies.result or b"")
                found.append((row._replace(is_error=is_error), bodies))
                max_bytes -= 1000 + sum(len(body) for body in bodies if body is not None)
                if max_bytes < 0:
                    break
        return found

    def by_status(self) -> dict[Status, int]:
        """By status, how many places."""
        found = self.database.execute(_BY_STATUS, (self.open_status,))
        return dict(self._fact(_Number, values, "a dispatch") for values in found)

    def places_of(self, sequence: int) -> list[str]:
        """The workflows that have a row at a sequence; for a hint, so a few of them."""
        query = "SELECT DISTINCT workflow_id FROM dispatches WHERE sequence = ? LIMIT 6"
        return [workflow_id for (workflow_id,) in self.database.execute(query, (sequence,))]

    # ------------------------------------------------------------------------------------------------------ one row

    def identity(self) -> Identity:
        """What the journal says of itself."""
        found = self.database.execute("SELECT workflow_id, created_at FROM journal LIMIT 2").fetchall()
        if len(found) != 1:
            raise JournalError(f"journal {self.files.typed}: has not one identity; {_ADVICE}")
        return self._fact(Identity, found[0], "its identity")

    def attempts(self, workflow_id: str, sequence: int) -> list[Row]:
        """All attempts at a place, oldest first."""
        found = self.database.execute(_AT, (self.open_status, workflow_id, sequence)).fetchall()
        rows = []
        for values in found:
            row = self._row(values)
            if row.status == Status.COMPLETED:
                row = row._replace(is_error=says_error(self.bodies(row.id).result or b""))
            rows.append(row)
        return rows

    def bodies(self, dispatch: int) -> Bodies:
        """What went over the wire for one attempt, or an operator put in its place."""
        found = self.database.execute(_BODIES, (dispatch,)).fetchone()
        return self._fact(Bodies, found, f"dispatch {dispatch}")

    def answer(self, dispatch: int) -> Answer | None:
        """What upstream said of an attempt."""
        found = self.database.execute(_ANSWER, (dispatch,)).fetchone()
        return self._fact(Answer, found, f"the outcome of dispatch {dispatch}") if found else None

    def judgements(self, dispatch: int) -> list[Judgement]:
        """What operators decided about an attempt, oldest first; the last one counts."""
        query = "SELECT status, decided_at, reason FROM decisions WHERE dispatch = ? ORDER BY id"
        about = f"a decision about dispatch {dispatch}"
        return [self._fact(Judgement, found, about) for found in self.database.execute(query, (dispatch,))]

    def doubt(self, dispatch: int) -> Doubt | None:
        """Why an attempt is in doubt, or was, as far as that is on record."""
        query = "SELECT cause, noted_at, is_open FROM doubts WHERE dispatch = ?"
        found = self.database.execute(query, (dispatch,)).fetchone()
        return self._fact(Doubt, found, f"the doubt of dispatch {dispatch}") if found else None

    def task_answers(self, dispatch: int) -> list[TaskAnswer]:
        """What upstream said last of a task."""
        query = "SELECT method, ended_at, result, error FROM tasks WHERE dispatch = ? ORDER BY method"
        about = f"a task's answer to dispatch {dispatch}"
        return [self._fact(TaskAnswer, found, about) for found in self.database.execute(query, (dispatch,))]

    def owners(self, workflow_id: str | None) -> list[Owner]:
        """The processes that have dispatched from the journal, or from a workflow of it."""
        query = (
            "SELECT * FROM owners WHERE ?1 IS NULL"
            " OR epoch IN (SELECT epoch FROM dispatches WHERE workflow_id = ?1) ORDER BY epoch"
        )
        found = self.database.execute(query, (workflow_id,))
        return [self._fact(Owner, values, f"owner {values[0]}") for values in found]

    def owner(self, epoch: int) -> Owner | None:
        """The process of an epoch."""
        found = self.database.execute("SELECT * FROM owners WHERE epoch = ?", (epoch,)).fetchone()
        return self._fact(Owner, found, f"owner {epoch}") if found else None

    def family(self, workflow_id: str) -> Family:
        """A workflow's root and all its branches."""
        root = root_of(workflow_id)
        query = "SELECT branch, parent, sequence FROM forks WHERE root = ? ORDER BY id"
        return Family(root, [self._fact(Fork, found, "a fork") for found in self.database.execute(query, (root,))])

    def forks(self) -> list[Forking]:
        """All branches, oldest first."""
        query = "SELECT branch, parent, sequence, forked_at FROM forks ORDER BY id"
        return [self._fact(Forking, found, "a fork") for found in self.database.execute(query)]

    def prunings(self, workflow_id: str | None = None) -> list[Pruning]:
        """What is left of workflows that were pruned."""
        query = (
            "SELECT workflow_id, last_sequence, pruned_at FROM prunings"
            " WHERE ?1 IS NULL OR workflow_id = ?1 ORDER BY pruned_at, workflow_id"
        )
        return [self._fact(Pruning, found, "a pruning") for found in self.database.execute(query, (workflow_id,))]


def standing(attempts: Sequence[Row]) -> Row:
    """What a place holds, out of all attempts at it."""
    return next((row for row in attempts if row.stands), attempts[-1])


def says_error(result: bytes) -> bool:
    """Whether a tool result says of itself that it is an error."""
    if _may_say_error(result) is None:
        return False
    import json

    try:
        value = json.loads(result)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("isError") is True
