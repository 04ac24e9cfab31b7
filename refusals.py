"""What we tell downstream instead of an answer: codes, sentences, and the facts a program or a person needs. Pure.

The sentence is for a model: it must not repeat or rephrase a call whose effect may be in the world. How to settle a
doubt stands in no refusal, since an agent with a shell would paste it; `next_action` only shows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice, zip_longest
from shlex import join
from typing import Any, Final

import wire
from states import Entry, Status


class Reason(StrEnum):
    """Why a request is refused, as `data.checkpoint.reason` says it."""

    IN_DOUBT = "in_doubt"
    DIVERGED = "diverged"
    BUSY = "busy"
    JOURNAL_UNAVAILABLE = "journal_unavailable"
    UPSTREAM_LOST = "upstream_lost"
    SHUTTING_DOWN = "shutting_down"
    RESOLVED_FAILED = "resolved_failed"
    INVALID_META = "invalid_meta"


# Outside -32768…-32000: that range is JSON-RPC's and the protocol's. Source: MCP 2026-07-28 basic/index#error-codes.
CODES: Final[Mapping[Reason, int]] = {
    Reason.IN_DOUBT: 31001,
    Reason.DIVERGED: 31002,
    Reason.BUSY: 31003,
    Reason.JOURNAL_UNAVAILABLE: 31004,
    Reason.UPSTREAM_LOST: 31005,
    Reason.SHUTTING_DOWN: 31006,
    Reason.RESOLVED_FAILED: 31007,
    Reason.INVALID_META: wire.INVALID_PARAMS,
}

_MESSAGES: Final[Mapping[Reason, str]] = {
    Reason.IN_DOUBT: "Checkpoint cannot know whether the call {what} ran",
    Reason.DIVERGED: "The call differs from the one on record as {what}, so it was not run",
    Reason.BUSY: "The call {what} was not run, because another process holds the journal",
    Reason.JOURNAL_UNAVAILABLE: "The journal cannot be used, so the call {what} is not on record",
    Reason.UPSTREAM_LOST: "The upstream server ended before it got or answered the request {what}",
    Reason.SHUTTING_DOWN: "Checkpoint is shutting down, so the call {what} was not run",
    Reason.RESOLVED_FAILED: "An operator settled the call {what} as failed",
    Reason.INVALID_META: "The call {what} names its place in a way that cannot be meant, so it was not run",
}
_ADVICE: Final = "do not repeat or rephrase it, and ask your operator"

_MAX_VALUE_CHARS: Final = 200
_MAX_POINTERS: Final = 20


class Refusals:
    """Builds refusal lines. `command` starts this program the way this process was started."""

    def __init__(self, journal_path: str | None, command: Sequence[str], *, hides_arguments: bool) -> None:
        self._journal_path = journal_path
        self._command = command
        self._hides_arguments = hides_arguments

    def line(
        self,
        id_bytes: bytes,
        reason: Reason,
        *,
        tool: str | None = None,
        workflow_id: str | None = None,
        entry: Entry | None = None,
        why: str | None = None,
        extra: Mapping[str, Any] | None = None,
        answer: tuple[bool, bytes] | None = None,
    ) -> bytes:
        """One error line. `entry` is the row it speaks of, `why` a clause of detail, `extra` further members.

        `answer` (is it an error, its bytes) hands over what upstream said and the journal could not keep.
        """
        facts: dict[str, Any] = {
            "reason": reason,
            "workflow_id": entry.workflow_id if entry else workflow_id,
            "sequence": entry.sequence if entry else None,
            "tool": (entry and entry.tool_name) or tool,
            "status": entry.status if entry else None,
            "started_at": (entry and entry.started_at) or None,
            "next_action": self._next_action(entry),
        }
        if reason is Reason.IN_DOUBT and entry:
            facts["cause"] = entry.cause
        elif entry and entry.status is Status.PRUNED:  # all that is left of it is its place
            facts["cause"] = "pruned"
        facts.update(extra or {})
        if answer:
            facts["answer"] = None
        row = f"{facts['tool']} (sequence {entry.sequence} of workflow {entry.workflow_id})" if entry else tool
        what = _MESSAGES[reason].format(what=row or "")
        if entry and reason is Reason.IN_DOUBT and tool not in (None, entry.tool_name):
            what += f", so {tool} was not run"
        message = f"{what}{f' ({why})' if why else ''}; {_ADVICE}."
        line = wire.error_line(id_bytes, CODES[reason], message, {"checkpoint": facts})
        if answer:  # its bytes, not a value of ours: what upstream said is kept to the letter
            is_error, body = answer
            head, _, tail = line.rpartition(b'"answer":null')
            line = b'%b"answer":{"%b":%b}%b' % (head, b"error" if is_error else b"result", body, tail)
        return line

    def diverged(self, id_bytes: bytes, entry: Entry, tool: str, arguments: bytes | None) -> bytes:
        """A refusal that shows how the call and the row at its place differ."""
        expected: dict[str, Any] = {"tool": entry.tool_name}
        received: dict[str, Any] = {"tool": tool}
        extra: dict[str, Any] = {"expected": expected, "received": received}
        if not self._hides_arguments:
            given = wire.parse(arguments or b"{}")
            try:
                recorded = wire.parse(entry.arguments or b"{}")
            except (ValueError, RecursionError):  # somebody has edited the journal
                recorded = None
            expected["arguments"], received["arguments"] = _shortened(recorded), _shortened(given)
            extra["differs"] = list(islice(_differences(recorded or {}, given or {}), _MAX_POINTERS))
        return self.line(id_bytes, Reason.DIVERGED, entry=entry, extra=extra)

    def _next_action(self, entry: Entry | None) -> str | None:
        if self._journal_path is None or entry is None:
            return None
        words = ["journal", "show", self._journal_path, str(entry.sequence), "--workflow-id", entry.workflow_id]
        return join([*self._command, *words])


def is_resolved_failed(error: bytes) -> bool:
    """Whether an error on record is an operator's word, which has no other form, and not upstream's."""
    return error.startswith(b'{"code":%d,' % CODES[Reason.RESOLVED_FAILED])


def _shortened(arguments: Any) -> Any:
    """Arguments for a person to read: the first 20 members, each cut to 200 characters of its JSON text."""
    if not isinstance(arguments, dict):
        return _cut(arguments)
    return {_cut(key): _cut(value) for key, value in islice(arguments.items(), _MAX_POINTERS)}


def _cut(value: Any) -> Any:
    """A value as JSON can write it, or what its text begins with."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_VALUE_CHARS else value[: _MAX_VALUE_CHARS - 1] + "…"
    try:
        text = json.dumps(value, default=_number, allow_nan=False)
    except ValueError:
        return "(an object that repeats a key)"  # wire's form of one holds what JSON does not
    return json.loads(text) if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def _number(number: Any) -> float | str:
    """A number that is no int: as one where that shows it as it was written, else its text."""
    literal = repr(number)
    value = float(literal)
    return value if repr(value) == literal else literal


def _differences(expected: Any, received: Any, pointer: str = "") -> Iterator[str]:
    """JSON pointers (RFC 6901) to what differs; a member that is on one side only is named itself.

    A pointer that would be too long to read ends at the last container that still fits.
    """
    pairs: list[tuple[str, Any, Any]]
    if isinstance(expected, dict) and isinstance(received, dict):
        keys = sorted({*expected, *received})
        pairs = [(key, expected.get(key, _ABSENT), received.get(key, _ABSENT)) for key in keys]
    elif type(expected) is list and type(received) is list:
        pairs = [(str(at), *both) for at, both in enumerate(zip_longest(expected, received, fillvalue=_ABSENT))]
    else:
        if _are_different(expected, received):
            yield pointer
        return
    is_cut = False
    for key, mine, theirs in pairs:
        below = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        if len(below) <= _MAX_VALUE_CHARS:
            yield from _differences(mine, theirs, below)
        elif not is_cut and _are_different(mine, theirs):
            is_cut = True
            yield pointer


def _are_different(expected: Any, received: Any) -> bool:
    return expected is _ABSENT or received is _ABSENT or wire.canonical(expected) != wire.canonical(received)


_ABSENT: Final = object()
