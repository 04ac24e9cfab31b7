"""What is on record about a call, and what follows from it. Pure: statuses, the decision table, facts.

Facts are appended (dispatched, answered, in doubt, forked) and never changed; a status is what they add up to.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from branches import Fork

MAX_SEQUENCE: Final = 2**53 - 1  # the highest place: what every JSON implementation holds exactly


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


# After these nothing of an attempt can be in the world: the place holds what it held before.
VOID: Final = frozenset({Status.NOT_SENT, Status.NOT_EXECUTED})


VOID_SQL: Final = "('" + "', '".join(sorted(VOID)) + "')"
REDACTED_ARGUMENTS: Final = b'{"checkpoint_redacted":true}'  # stands for arguments that are not to be stored


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


class Entry(NamedTuple):
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


class Round(NamedTuple):
    """A call that upstream wants input for: its next leg, or after error -32042 the very same call, continues it."""

    workflow_id: str
    sequence: int
    signature: str
    state: str | None  # that the last interim answer gave, as a hash
    is_repeated: bool  # the very same call is sent again
    begun: int  # the id of its first leg: the lower, the older

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
            blocks = entry.tool_name == tool_name
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


class Dispatched(NamedTuple):
    """A call is about to leave for upstream."""

    entry: Entry


class Answered(NamedTuple):
    """Upstream answered a dispatched call, or no byte of it had left for an upstream that is gone (NOT_SENT)."""

    entry: Entry
    status: Status
    at_ms: int
    result: bytes | None = None
    error: bytes | None = None
    request_state: str | None = None  # of an interim answer, as a hash
    task_id: str | None = None  # of a handle


class Doubted(NamedTuple):
    """Why a dispatched call may never be answered; an answer may still come."""

    entry: Entry
    cause: Cause
    at_ms: int


class Forked(NamedTuple):
    """A branch begins; its first row is dispatched in the same commit."""

    fork: Fork
    at_ms: int


class Delivered(NamedTuple):
    """The client has read the answer to a call. Worth no sync of its own: a lost mark means one more replay."""

    dispatch: int


class TaskEnded(NamedTuple):
    """The last word that upstream had on a task, as the answer to one method."""

    entry: Entry
    method: str
    at_ms: int
    result: bytes | None = None
    error: bytes | None = None


class UpstreamStarted(NamedTuple):
    """Another upstream process runs in place of one that is gone, and gets what is dispatched from now on."""

    pid: int


class ReportQueued(NamedTuple):
    """The endpoint of `--report-…` is to be told of something; on record from now on, until it was told."""

    dispatch: int | None  # what it is about; None for what was never dispatched: a replay, a refusal
    base_url: str  # of the endpoint that it was made for
    tool_name: str
    body: bytes
    at_ms: int
    attempts: int = 0  # that the endpoint has answered
    due_at: int | None = None  # epoch ms; None: now


class ReportDelivered(NamedTuple):
    """The endpoint was told. A lost mark means that it is told once more."""

    id: int


class ReportFailed(NamedTuple):
    """The endpoint answered that it did not take a report."""

    id: int
    attempts: int
    due_at: int | None  # None: it is not tried again
    error: str


Report = ReportQueued | ReportDelivered | ReportFailed
Fact = Dispatched | Answered | Doubted | Forked | Delivered | TaskEnded | UpstreamStarted | Report
