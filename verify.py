"""Whether a journal says what a journal can say. Reads, finds, repairs nothing.

A finding is something that no life of a relay leaves behind, whatever killed it. A note is worth knowing and in order.
"""

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import wire
from branches import root_of
from reader import Reader
from render import clean, count, cut, decoded
from states import REDACTED_ARGUMENTS
from storage import DDL, PROBES, JournalError, is_busy

_MOST: Final = 100  # of one kind of finding; the rest is counted
_STEP: Final = 2000  # rows between two words of progress
_GAPS: Final = 5  # that are named for a workflow
_NOTES: Final = 20  # workflows whose gaps are named
_SHOWN_CHARS: Final = 100  # of a text that is no text
# What SQLite says of a journal that is damaged; anything else it says of the disk, or of whoever else is at it.
_DAMAGE: Final = frozenset({1, 11, 26})  # SQLITE_ERROR (no such column), SQLITE_CORRUPT, SQLITE_NOTADB
_SHORT_READ: Final = 522  # SQLITE_IOERR_SHORT_READ

# Each gives row, workflow, sequence, attempt and a detail; without rows, all is well.
_CHECKS: Final = (
    ("an outcome without its dispatch", "SELECT o.dispatch, NULL, NULL, NULL, o.status FROM outcomes AS o"
     " LEFT JOIN dispatches AS d ON d.id = o.dispatch WHERE d.id IS NULL"),
    ("a doubt without its dispatch", "SELECT f.dispatch, NULL, NULL, NULL, f.cause FROM doubts AS f"
     " LEFT JOIN dispatches AS d ON d.id = f.dispatch WHERE d.id IS NULL"),
    ("a decision without its dispatch", "SELECT f.dispatch, NULL, NULL, NULL, f.status FROM decisions AS f"
     " LEFT JOIN dispatches AS d ON d.id = f.dispatch WHERE d.id IS NULL"),
    ("a delivery without its dispatch", "SELECT f.dispatch, NULL, NULL, NULL, '' FROM deliveries AS f"
     " LEFT JOIN dispatches AS d ON d.id = f.dispatch WHERE d.id IS NULL"),
    ("a task's answer without its handle", "SELECT f.dispatch, NULL, NULL, NULL, f.method FROM tasks AS f"
     " LEFT JOIN outcomes AS o ON o.dispatch = f.dispatch WHERE o.dispatch IS NULL"),
    ("a dispatch of an epoch that no owner has", "SELECT d.id, d.workflow_id, d.sequence, d.attempt, d.epoch"
     " FROM dispatches AS d LEFT JOIN owners ON owners.epoch = d.epoch WHERE owners.epoch IS NULL"),
    ("a dispatch of an earlier epoch than one before it", "SELECT id, workflow_id, sequence, attempt, epoch FROM"
     " (SELECT *, lag(epoch) OVER (ORDER BY id) AS before FROM dispatches) WHERE epoch < before"),
    ("an attempt without the one before it", "SELECT d.id, d.workflow_id, d.sequence, d.attempt, ''"
     " FROM dispatches AS d WHERE d.attempt > 1 AND NOT EXISTS (SELECT 1 FROM dispatches AS b"
     " WHERE b.workflow_id = d.workflow_id AND b.sequence = d.sequence AND b.attempt = d.attempt - 1)"),
    ("a call that ran again though its outcome was on record", "SELECT d.id, d.workflow_id, d.sequence, d.attempt,"
     " 'the attempt before is ' || b.status FROM dispatches AS d JOIN attempts AS b ON b.workflow_id = d.workflow_id"
     " AND b.sequence = d.sequence AND b.attempt = d.attempt - 1 WHERE d.attempt > 1"
     " AND b.status IN ('COMPLETED', 'FAILED', 'TASK')"),
    ("a signature that differs from the attempt before", "SELECT d.id, d.workflow_id, d.sequence, d.attempt, ''"
     " FROM dispatches AS d JOIN dispatches AS b ON b.workflow_id = d.workflow_id AND b.sequence = d.sequence"
     " AND b.attempt = d.attempt - 1 WHERE d.attempt > 1 AND b.call_signature <> d.call_signature"),
    ("an open call that no later owner would find", "SELECT a.id, a.workflow_id, a.sequence, a.attempt, a.status"
     " FROM attempts AS a WHERE a.id < (SELECT settled_below FROM dispatches ORDER BY id DESC LIMIT 1)"
     " AND a.status IN ('PENDING', 'IN_DOUBT') AND a.cause IS NULL"),
    ("a doubt that was closed by nothing", "SELECT a.id, a.workflow_id, a.sequence, a.attempt, a.cause"
     " FROM doubts AS f JOIN attempts AS a ON a.id = f.dispatch WHERE NOT f.is_open AND a.status = 'IN_DOUBT'"),
    ("a doubt that stayed open though it was settled", "SELECT a.id, a.workflow_id, a.sequence, a.attempt, a.status"
     " FROM doubts AS f JOIN attempts AS a ON a.id = f.dispatch WHERE f.is_open AND a.status <> 'IN_DOUBT'"),
    ("a row of a place that was pruned", "SELECT d.id, d.workflow_id, d.sequence, d.attempt, ''"
     " FROM prunings AS p JOIN dispatches AS d ON d.workflow_id = p.workflow_id AND d.sequence <= p.last_sequence"),
    ("a branch's row below the place where it left", "SELECT d.id, d.workflow_id, d.sequence, d.attempt, ''"
     " FROM forks JOIN dispatches AS d ON d.workflow_id = forks.branch AND d.sequence < forks.sequence"),
    ("an owner that can be no process", "SELECT epoch, NULL, NULL, NULL, pid || ', upstream''s ' ||"
     " coalesce(upstream_pid, '-') FROM owners WHERE NOT (pid BETWEEN 1 AND 2147483647"
     " AND coalesce(upstream_pid, 2) BETWEEN 2 AND 2147483647)"),
    # What is replayed is one line of the protocol, and so was what was received.
    ("more than one line", "SELECT d.id, d.workflow_id, d.sequence, d.attempt, b.what FROM ("
     "SELECT id, 'arguments' AS what, arguments AS body FROM dispatches"
     " UNION ALL SELECT dispatch, 'result', result FROM outcomes"
     " UNION ALL SELECT dispatch, 'error', error FROM outcomes"
     " UNION ALL SELECT dispatch, 'result', result FROM decisions"
     " UNION ALL SELECT dispatch, 'error', error FROM decisions"
     " UNION ALL SELECT dispatch, 'task''s result', result FROM tasks"
     " UNION ALL SELECT dispatch, 'task''s error', error FROM tasks"
     ") AS b LEFT JOIN dispatches AS d USING (id) WHERE instr(b.body, X'0A')"),
)  # fmt: skip
_BROKEN: Final = (
    "SELECT t.rowid, d.workflow_id, d.sequence, d.attempt, NULL FROM ({}) AS t"
    " LEFT JOIN dispatches AS d ON d.id = t.dispatch"
)
_ROWS: Final = (
    "SELECT id, workflow_id, sequence, attempt, tool_name, call_signature, arguments FROM dispatches ORDER BY id"
)
_GAPS_OF: Final = """
SELECT workflow_id, after + 1, sequence - 1 FROM (
    SELECT workflow_id, sequence, lag(sequence, 1, 0) OVER (PARTITION BY workflow_id ORDER BY sequence) AS after
    FROM (SELECT DISTINCT workflow_id, sequence FROM dispatches)
)
WHERE sequence > after + 1 ORDER BY workflow_id, sequence
"""
_comments: Final = re.compile(r"--.*").sub
_table: Final = re.compile(r"CREATE TABLE (\w+) \((.*?)\n\) STRICT;", re.DOTALL).finditer
_text_column: Final = re.compile(r"^ +(\w+) TEXT", re.MULTILINE).findall
_has_escape: Final = re.compile(r"\\ud[89a-f][0-9a-f]{2}").search
_unescaped: Final = re.compile(r"\\u(d[89a-f][0-9a-f]{2})").sub


class Remark(NamedTuple):
    """Something that verify saw."""

    is_finding: bool
    text: str


Progress = Callable[[str], None]


def verified(reader: Reader, progress: Progress) -> Iterator[Remark]:
    """All that is to be said about a journal, of one moment of it.

    Raises sqlite3.Error where another program is in the way, and JournalError where the disk is.
    """
    is_sound = True
    try:
        with reader.snapshot():
            for text in _unsound(reader.database, progress):
                is_sound = False
                yield Remark(True, text)
            if is_sound:
                yield from _content(reader.database, progress)
    except sqlite3.Error as error:
        if is_busy(error):
            raise
        said = clean(str(error))
        if error.sqlite_errorcode & 0xFF not in _DAMAGE and error.sqlite_errorcode != _SHORT_READ:
            raise JournalError(f"journal {reader.files.typed}: {said}; see to the disk, then verify again") from error
        is_sound = False
        yield Remark(True, f"SQLite cannot read on: {said}")
    if not is_sound:
        yield Remark(False, "what else there is was not looked at, since it rests on that; restore a copy")


def _content(database: sqlite3.Connection, progress: Progress) -> Iterator[Remark]:
    if database.execute("SELECT count(*) FROM journal").fetchone()[0] != 1:
        yield Remark(True, "the journal has not one identity")
    for what, query in (*_constraints(), *_CHECKS):
        progress(what)
        yield from _capped(what, (_place(*row) for row in database.execute(query)))
    yield from _capped("a fork that does not fit its family", _unfit_forks(database))
    progress("texts")
    yield from _capped("a text that is no UTF-8", _garbled(database))
    yield from _signatures(database, progress)
    progress("gaps")
    yield from _gap_notes(database)


# ------------------------------------------------------------------------------------ what the rest takes for granted


def _unsound(database: sqlite3.Connection, progress: Progress) -> Iterator[str]:
    """Where the tables are not those of a journal, or SQLite itself cannot make sense of them."""
    progress("schema")
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(DDL)
        expected, found = _schema(fresh), _schema(database)
    for name, (kind, definition) in expected.items():
        if found.get(name) != (kind, definition):
            yield f"{kind} {name} is {'not what it was made as' if name in found else 'missing'}"
    for name, (kind, _) in found.items():
        if kind == "trigger":  # a table, index or view of somebody's own does nothing to ours
            yield f"trigger {clean(name)} was added"
    progress("SQLite's own check")
    for (said,) in database.execute(f"PRAGMA integrity_check({_MOST})"):
        if said != "ok":
            yield f"SQLite: {clean(str(said))}"
    for query in PROBES:
        database.execute(query).fetchone()


def _schema(database: sqlite3.Connection) -> dict[str, tuple[str, str]]:
    """By name, of what kind each part of a database is, and the words that make it."""
    rows = database.execute("SELECT name, type, sql FROM sqlite_schema WHERE sql IS NOT NULL")
    return {name: (kind, " ".join(sql.split())) for name, kind, sql in rows}


def _tables() -> Iterator[tuple[str, str]]:
    """Every table of a journal, and what stands between its brackets."""
    return ((found[1], found[2]) for found in _table(_comments("", DDL)))


def _constraints() -> Iterator[tuple[str, str]]:
    """Every CHECK of a journal as a query for what breaks it: on a connection that only reads, SQLite knows of none."""
    for table, columns in _tables():
        key = "id" if table == "dispatches" else "dispatch" if "dispatch INTEGER" in columns else "NULL"
        for check in _checks(columns):
            broken = f"SELECT rowid, {key} AS dispatch FROM {table} WHERE NOT ({check})"  # noqa: S608  # ours
            yield f"a row of {table} without CHECK ({check})", _BROKEN.format(broken)


def _checks(columns: str) -> Iterator[str]:
    """What stands between the brackets of each CHECK."""
    for part in columns.split("CHECK (")[1:]:
        depth, end = 1, 0
        while depth:
            depth += {"(": 1, ")": -1}.get(part[end], 0)
            end += 1
        yield part[: end - 1]


def _garbled(database: sqlite3.Connection) -> Iterator[str]:
    """Texts that are none, by table, row and column: SQLite takes any bytes for one."""
    usual, database.text_factory = database.text_factory, bytes
    try:
        for table, columns in _tables():
            names = _text_column(columns)
            query = f"SELECT rowid, {', '.join(names)} FROM {table}"  # noqa: S608  # ours
            for row, *values in database.execute(query) if names else ():
                for name, value in zip(names, values, strict=True):
                    if value is not None and (text := decoded(value)).encode() != value:
                        yield f"{table}, row {row}: {name} {cut(clean(text), _SHOWN_CHARS)}"
    finally:
        database.text_factory = usual


# ------------------------------------------------------------------------------------------------------------- the rest


def _capped(what: str, places: Iterator[str]) -> Iterator[Remark]:
    more = 0
    for number, place in enumerate(places):
        if number < _MOST:
            yield Remark(True, f"{what}: {place}")
        else:
            more += 1
    if more:
        yield Remark(True, f"{what}: {more:,} more")


def _place(row: int, workflow_id: str | None, sequence: Any, attempt: Any, detail: Any) -> str:
    about = f" ({clean(str(detail))})" if detail not in (None, "") else ""
    if workflow_id is None:
        return f"row {row}{about}"
    return f"sequence {sequence} of workflow {clean(workflow_id)}, attempt {attempt}{about}"


def _unfit_forks(database: sqlite3.Connection) -> Iterator[str]:
    known: set[str] = set()
    for root, branch, parent in database.execute("SELECT root, branch, parent FROM forks ORDER BY id"):
        if root_of(branch) != root or branch == root or parent not in (root, *known):
            yield f"{clean(branch)}, which left {clean(parent)}"
        known.add(branch)


def _signatures(database: sqlite3.Connection, progress: Progress) -> Iterator[Remark]:
    total = database.execute("SELECT count(*) FROM dispatches").fetchone()[0]
    redacted = 0

    def wrong() -> Iterator[str]:
        nonlocal redacted
        for number, row in enumerate(database.execute(_ROWS)):
            if number % _STEP == 0:
                progress(f"signatures: {number:,} of {total:,}")
            dispatch, workflow_id, sequence, attempt, tool_name, signature, arguments = row
            why = _wrong_signature(tool_name, signature, arguments)
            if why and arguments == REDACTED_ARGUMENTS:
                redacted += 1
            elif why:
                yield _place(dispatch, workflow_id, sequence, attempt, why)

    yield from _capped("a signature that is not that of its call", wrong())
    if redacted:
        yield Remark(False, f"the arguments of {count(redacted, 'row')} are redacted; signatures stay as they are")


def _wrong_signature(tool_name: str, signature: str, arguments: bytes | None) -> str | None:
    """Why a signature is not the one of a call; None where it is."""
    try:
        parsed = None if arguments is None else wire.parse(arguments)
        if wire.signature(tool_name, parsed) == signature:
            return None
        if _has_escape(tool_name):  # a lone surrogate, which is signed as it came and stored as an escape
            original = _unescaped(lambda found: chr(int(found[1], 16)), tool_name)
            if wire.signature(original, parsed) == signature:
                return None
    except (ValueError, RecursionError):
        return "its arguments are not JSON"
    return "tool, arguments or signature were changed"


def _gap_notes(database: sqlite3.Connection) -> Iterator[Remark]:
    pruned = dict(database.execute("SELECT workflow_id, last_sequence FROM prunings").fetchall())
    begins = dict(database.execute("SELECT branch, sequence FROM forks").fetchall())
    gaps: dict[str, list[tuple[int, int]]] = {}
    for workflow_id, first, last in database.execute(_GAPS_OF):
        first = max(first, pruned.get(workflow_id, 0) + 1, begins.get(workflow_id, 1))
        if first <= last:
            gaps.setdefault(workflow_id, []).append((first, last))
    for workflow_id, some in list(gaps.items())[:_NOTES]:
        number = sum(last - first + 1 for first, last in some)
        named = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in some[:_GAPS])
        more = ", ..." if len(some) > _GAPS else ""
        text = f"workflow {clean(workflow_id)} has {count(number, 'place')} without a row ({named}{more}): sparse pins"
        yield Remark(False, text)
    if len(gaps) > _NOTES:
        yield Remark(False, f"{len(gaps) - _NOTES:,} more workflows have gaps")
