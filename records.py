"""What is on record: every query of the journal, over a connection that somebody else opened. Reads only.

No query walks past a row's arguments or grows with the journal: each finds its rows by a key or an index. What grows
with something else says so.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from branches import Family, Fork
from states import MAX_SEQUENCE, VOID, VOID_SQL, Cause, Entry, Round, Status

_ENTRY: Final = (
    "SELECT id, workflow_id, sequence, attempt, tool_name, call_signature, arguments, status, result, error,"
    " started_at, call_id, era = 'modern', cause FROM attempts "
)
_ATTEMPTS_AT: Final = _ENTRY + "WHERE workflow_id = ? AND sequence = ? ORDER BY attempt DESC"
_ARGUMENTS: Final = "SELECT arguments FROM dispatches WHERE id = ?"
_LAST_ATTEMPT: Final = "SELECT max(attempt) FROM dispatches WHERE workflow_id = ? AND sequence = ?"
_ENTRY_BY_ID: Final = _ENTRY + "WHERE id = ?"
_OPEN_DOUBTS: Final = "SELECT dispatch FROM doubts WHERE is_open ORDER BY dispatch"
# What an owner left open: every dispatch carries the id below which all were settled or recorded as in doubt.
_LEFT_OPEN: Final = (
    "SELECT id FROM attempts WHERE id >= (SELECT settled_below FROM dispatches ORDER BY id DESC LIMIT 1)"
    " AND status IN ('PENDING', 'IN_DOUBT') AND cause IS NULL"
)
_LAST_SEQUENCE: Final = "SELECT max(sequence) FROM dispatches WHERE workflow_id = ?"
_NEXT_SEQUENCE: Final = "SELECT min(sequence) FROM dispatches WHERE workflow_id = ? AND sequence > ? AND sequence < ?"
_WITH_CALL_ID: Final = "SELECT workflow_id, sequence FROM dispatches WHERE call_id = ? ORDER BY id DESC"
# By the newest attempt of a place: whose it is, and whether its answer was read.
_WITH_SIGNATURE: Final = """
SELECT d.sequence FROM dispatches AS d INDEXED BY by_signature LEFT JOIN deliveries ON deliveries.dispatch = d.id
WHERE d.workflow_id = ? AND d.call_signature = ? AND d.sequence > ? AND d.sequence < ? AND d.epoch < ?
    AND (deliveries.dispatch IS NULL OR NOT ?) AND NOT EXISTS (
        SELECT 1 FROM dispatches AS later
        WHERE later.workflow_id = d.workflow_id AND later.sequence = d.sequence AND later.attempt > d.attempt
    )
ORDER BY d.sequence
"""
# Grows with how often a server asked for input, and is read once by whoever takes the journal.
_ROUNDS: Final = """
SELECT a.workflow_id, a.sequence, a.call_signature, request_state, outcomes.error IS NOT NULL, (
    SELECT d.id FROM dispatches AS d WHERE d.workflow_id = a.workflow_id AND d.sequence = a.sequence AND d.attempt = 1
)
FROM outcomes JOIN attempts AS a ON a.id = dispatch
WHERE outcomes.status = 'INPUT_REQUIRED' AND a.status = 'INPUT_REQUIRED' AND NOT EXISTS (
    SELECT 1 FROM attempts AS later
    WHERE later.workflow_id = a.workflow_id AND later.sequence = a.sequence AND later.attempt > a.attempt
        AND later.status NOT IN VOID
)
""".replace("VOID", VOID_SQL)
_WITH_STATE: Final = (
    "SELECT d.workflow_id, d.sequence FROM outcomes AS o JOIN dispatches AS d ON d.id = o.dispatch"
    " WHERE o.request_state = ? AND d.call_signature = ? ORDER BY o.dispatch DESC"
)
_WITH_TASK: Final = "SELECT dispatch FROM outcomes WHERE task_id = ? ORDER BY dispatch DESC LIMIT 1"
_TASK_ANSWER: Final = "SELECT result, error FROM tasks WHERE dispatch = ? AND method = ?"
_TASK_ENDED: Final = "SELECT 1 FROM tasks WHERE dispatch = ? LIMIT 1"
_DUE_REPORTS: Final = (
    "SELECT id, tool_name, attempts, body FROM reports"
    " WHERE base_url = ? AND due_at BETWEEN ? AND ? ORDER BY due_at, id LIMIT ?"
)
_NEXT_REPORT: Final = "SELECT min(due_at) FROM reports WHERE base_url = ? AND due_at IS NOT NULL"
# A task's handle is an outcome, and was reported as one; that the task was lost later is no second dispatch.
_GIVEN_UP: Final = (
    "SELECT dispatch FROM doubts JOIN dispatches ON id = dispatch"
    " WHERE is_open AND cause IN ('cancelled', 'timeout') AND epoch = ?"
    " AND NOT EXISTS (SELECT 1 FROM outcomes WHERE outcomes.dispatch = doubts.dispatch) ORDER BY dispatch"
)
_FORKS: Final = "SELECT branch, parent, sequence FROM forks WHERE root = ? ORDER BY id"
_PRUNED: Final = "SELECT last_sequence FROM prunings WHERE workflow_id = ?"
_NEWEST_EPOCH: Final = "SELECT max(epoch) FROM owners"
# Of any dispatch that there ever was: an id that was given twice could mark another call as delivered.
_LAST_ID: Final = (
    "SELECT max(coalesce((SELECT max(id) FROM dispatches), 0), coalesce((SELECT max(last_id) FROM prunings), 0))"
)
_WORKFLOW_ID: Final = "SELECT workflow_id FROM journal"
QUERIES: Final = (
    _ATTEMPTS_AT, _LAST_ATTEMPT, _ENTRY_BY_ID, _OPEN_DOUBTS, _LEFT_OPEN, _LAST_SEQUENCE, _NEXT_SEQUENCE, _WITH_CALL_ID,
    _WITH_SIGNATURE, _ROUNDS, _WITH_STATE, _WITH_TASK, _TASK_ANSWER, _TASK_ENDED, _FORKS, _PRUNED, _NEWEST_EPOCH,
    _LAST_ID, _DUE_REPORTS, _NEXT_REPORT, _GIVEN_UP, _ARGUMENTS,
)  # fmt: skip


MAX_REPORT_DELAY_MS: Final = 90 * 60 * 1000  # no report is put off for longer


class DueReport(NamedTuple):
    """A report that is to be sent."""

    id: int
    tool_name: str
    attempts: int
    body: bytes


class Records:
    """The journal as it is on disk, seen by whoever did not dispatch what is open. Methods raise sqlite3.Error."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._pruned: dict[str, int] = {}  # by workflow, its last pruned place; nobody prunes what is open

    def _one(self, query: str, *values: Any) -> Any:
        """The first column of the first row; None where there is no row."""
        row = self._database.execute(query, values).fetchone()
        return row[0] if row else None

    def workflow_id(self) -> str:
        """The id of the journal's own workflow."""
        found = self._one(_WORKFLOW_ID)
        if found is None:
            raise sqlite3.DatabaseError("the journal has lost its identity")
        return str(found)

    def newest_epoch(self) -> int | None:
        """The epoch of the last process that dispatched."""
        found: int | None = self._database.execute(_NEWEST_EPOCH).fetchone()[0]  # every commit asks
        return found

    def arguments(self, dispatch: int) -> bytes | None:
        """The arguments of an attempt; None where it has none."""
        found: bytes | None = self._one(_ARGUMENTS, dispatch)
        return found

    def last_id(self) -> int:
        """The highest id that a dispatch has or had; 0 in an empty journal."""
        return self._one(_LAST_ID) or 0

    def standing(self, workflow_id: str, sequence: int) -> Entry | None:
        """What a place holds: its newest attempt of which something may be in the world.

        An attempt that was not sent settles nothing about one before it that is in doubt.
        """
        newest = None
        for entry in self._attempts(workflow_id, sequence):
            if entry.status not in VOID:
                return entry
            newest = newest or entry
        return newest

    def _attempts(self, workflow_id: str, sequence: int) -> Iterator[Entry]:
        """The attempts at a place, newest first; what is left of a place that was pruned."""
        row = None
        for row in self._database.execute(_ATTEMPTS_AT, (workflow_id, sequence)):
            yield _entry(row)
        if row is None and sequence <= self._last_pruned(workflow_id):
            yield Entry(0, workflow_id, sequence, 0, "", "", None, Status.PRUNED)

    def _last_pruned(self, workflow_id: str) -> int:
        """The last place of a workflow that was pruned; 0 where nothing was."""
        if workflow_id not in self._pruned:
            self._pruned[workflow_id] = self._one(_PRUNED, workflow_id) or 0
        return self._pruned[workflow_id]

    def last_attempt(self, workflow_id: str, sequence: int) -> int:
        """How many attempts there were at a place."""
        return self._one(_LAST_ATTEMPT, workflow_id, sequence) or 0

    def by_id(self, dispatch: int) -> Entry:
        """One attempt."""
        return _entry(self._database.execute(_ENTRY_BY_ID, (dispatch,)).fetchone())

    def open_doubts(self) -> list[Entry]:
        """The attempts that are on record as in doubt and that nothing has settled; without arguments."""
        found = [self._slim(dispatch) for (dispatch,) in self._database.execute(_OPEN_DOUBTS).fetchall()]
        return [entry for entry in found if entry.status is Status.IN_DOUBT]  # else an operator has settled it

    def left_open(self) -> list[Entry]:
        """The attempts that an earlier owner left without an outcome, not in doubt on record yet; without arguments."""
        return [self._slim(dispatch) for (dispatch,) in self._database.execute(_LEFT_OPEN).fetchall()]

    def _slim(self, dispatch: int) -> Entry:
        """An attempt that may be kept for long: nothing is asked of its arguments, which may be large."""
        return self.by_id(dispatch)._replace(arguments=None)

    def last_sequence(self, workflow_id: str) -> int:
        """The highest place that a workflow has or had; 0 for one that has none."""
        return max(self._one(_LAST_SEQUENCE, workflow_id) or 0, self._last_pruned(workflow_id))

    def next_sequence(self, workflow_id: str, after: int, below: int | None) -> int | None:
        """The first place behind `after` and before `below` that has a row, or had one that was pruned."""
        if after < min(self._last_pruned(workflow_id), (below or MAX_SEQUENCE) - 1):
            return after + 1
        found: int | None = self._one(_NEXT_SEQUENCE, workflow_id, after, below or MAX_SEQUENCE + 1)
        return found

    def with_call_id(self, call_id: str) -> list[tuple[str, int]]:
        """The places that a host knows by an id, the last that it gave it to first, in whatever workflow."""
        return self._database.execute(_WITH_CALL_ID, (call_id,)).fetchall()

    def with_signature(
        self, workflow_id: str, signature: str, after: int, below: int | None, epoch: int, *, is_undelivered: bool
    ) -> Iterator[int]:
        """Where a call was last made by a process before `epoch`, behind `after` and before `below`, in order."""
        values = (workflow_id, signature, after, below or MAX_SEQUENCE + 1, epoch, is_undelivered)
        for (sequence,) in self._database.execute(_WITH_SIGNATURE, values):
            yield sequence

    def rounds(self) -> Iterator[Round]:
        """The calls that wait for input."""
        for workflow_id, sequence, signature, state, is_repeated, begun in self._database.execute(_ROUNDS):
            yield Round(workflow_id, sequence, signature, state, bool(is_repeated), begun)

    def with_state(self, state: str, signature: str) -> Iterator[tuple[str, int]]:
        """The places of a call that ever gave this state, the last to do so first."""
        yield from self._database.execute(_WITH_STATE, (state, signature))

    def with_task(self, task_id: str) -> Entry | None:
        """The newest attempt that was answered with a handle of this task."""
        dispatch = self._one(_WITH_TASK, task_id)
        return None if dispatch is None else self.by_id(dispatch)

    def task_answer(self, dispatch: int, method: str) -> tuple[bytes | None, bytes | None] | None:
        """The last final answer to a `tasks/*` method, as result or error."""
        row = self._database.execute(_TASK_ANSWER, (dispatch, method)).fetchone()
        return (row[0], row[1]) if row else None

    def has_task_ended(self, dispatch: int) -> bool:
        """Whether a final answer to any method is on record."""
        return self._one(_TASK_ENDED, dispatch) is not None

    def due_reports(self, base_url: str, now_ms: int, limit: int) -> list[DueReport]:
        """Reports for an endpoint that are to be sent now, the longest due first."""
        # A time that is further away than any that is given is of a clock that was set back.
        for span in ((0, now_ms), (now_ms + MAX_REPORT_DELAY_MS, MAX_SEQUENCE)):
            if rows := self._database.execute(_DUE_REPORTS, (base_url, *span, limit)).fetchall():
                return [DueReport(*row) for row in rows]
        return []

    def next_report_at(self, base_url: str) -> int | None:
        """When the next report for an endpoint is due; None while there is none."""
        found: int | None = self._one(_NEXT_REPORT, base_url)
        return found

    def given_up(self, epoch: int) -> list[Entry]:
        """The calls of an owner that only its clients gave up on, and that nobody has answered."""
        return [self.by_id(dispatch) for (dispatch,) in self._database.execute(_GIVEN_UP, (epoch,)).fetchall()]

    def family(self, root: str) -> Family:
        """A root workflow and its branches."""
        return Family(root, [Fork(*row) for row in self._database.execute(_FORKS, (root,)).fetchall()])


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
