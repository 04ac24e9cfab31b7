"""How a person settles a call: checks what was asked for, and puts the decision on record.

A decision is one more fact: nothing that upstream said is overwritten. On return it is on disk, and the doubt that it
ends is closed in the same commit.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import wire
from console import ConsoleError, json_line, no_row, row_object
from processes import has_running, may_be_group
from reader import Owner, Reader, Row, standing
from records import Records
from refusals import Reason, Refusals
from render import clean, compact, cut, decoded, iso
from states import Cause, Entry, Status
from storage import Files
from writing import busy, transaction, writing

_MAX_MESSAGE_CHARS: Final = 160
_SHOWN_CHARS: Final = 400  # of arguments, in the question

# What replaying takes for granted of a result, in every revision of the protocol. Source: MCP 2024-11-05 to 2026-07-28,
# server/tools. Members that are not named here may be anything.
_TEXT: Final = {"type": "string"}
_BLOCKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "text": {"text": _TEXT},
    "image": {"data": _TEXT, "mimeType": _TEXT},
    "audio": {"data": _TEXT, "mimeType": _TEXT},
    "resource_link": {"uri": _TEXT, "name": _TEXT},
    "resource": {
        "resource": {
            "type": "object",
            "required": ["uri"],
            "properties": {"uri": _TEXT, "text": _TEXT, "blob": _TEXT},
            "anyOf": [{"required": ["text"]}, {"required": ["blob"]}],
        }
    },
}
RESULT_SCHEMA: Final[Mapping[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["content"],
    "properties": {
        "content": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": list(_BLOCKS)}},
                "allOf": [
                    {
                        "if": {"properties": {"type": {"const": kind}}},
                        "then": {"required": list(members), "properties": members},
                    }
                    for kind, members in _BLOCKS.items()
                ],
            },
        },
        "isError": {"type": "boolean"},
        "_meta": {"type": "object"},
        "resultType": {"const": "complete"},  # the others are no outcome
    },
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person says of a call: COMPLETED with a result, FAILED with a text, or NOT_EXECUTED."""

    status: Status
    result: bytes | None = None
    text: str | None = None
    reason: str = ""
    is_forced: bool = False


def read_result(value: bytes) -> bytes:
    """A tool result from a file as it will be replayed: on one line, spelt as it was. Raises ConsoleError."""
    import jsonschema

    try:
        text = value.decode("utf-8-sig")
        # Only its shape counts here, so a number of any size is a number.
        parsed = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=lambda _: 1,
            parse_float=lambda _: 0.5,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise ConsoleError(f"no tool result: {error}") from None
    if isinstance(parsed, dict) and "task" in parsed:
        raise ConsoleError("no tool result: it is the handle of a task, which is no outcome")
    errors = jsonschema.Draft202012Validator(RESULT_SCHEMA).iter_errors(parsed)
    for wrong in sorted(errors, key=lambda each: list(map(str, each.path))):
        where = "/".join(map(str, wrong.path))
        message = cut(clean(wrong.message), _MAX_MESSAGE_CHARS)
        raise ConsoleError(f"no tool result: {f'{where}: ' if where else ''}{message}")
    return compact(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object repeats a key, and parsers disagree on which counts")
    return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# ---------------------------------------------------------------------------------------------------------- may it be?


@dataclass(frozen=True, slots=True)
class Plan:
    """A row that may be settled, as it was when a person looked at it."""

    row: Row
    arguments: bytes | None
    attempts: int  # at its place


def plan(reader: Reader, sequence: int, workflow_id: str | None, attempt: int | None, verdict: Verdict) -> Plan:
    """The row that is to be settled. Raises ConsoleError or Busy, saying why not and what to do instead."""
    if reader.is_owned:
        raise busy(reader.files, reader.holder)
    name = workflow_id if workflow_id is not None else reader.identity().workflow_id
    rows = reader.attempts(name, sequence)
    if not rows:
        raise ConsoleError(no_row(reader, name, sequence))
    chosen = [row for row in rows if attempt in (None, row.attempt)]
    if not chosen:
        raise ConsoleError(f"sequence {sequence} of workflow {clean(name)} has no attempt {attempt}")
    row = standing(chosen)
    _check_status(row, verdict, has_decision=bool(reader.judgements(row.id)))
    if verdict.status is Status.NOT_EXECUTED and not verdict.is_forced:
        _check_upstream(reader.owner(row.owner_epoch))
    return Plan(row, reader.bodies(row.id).arguments, len(rows))


def _check_status(row: Row, verdict: Verdict, *, has_decision: bool) -> None:
    what = f"{clean(row.tool_name)} (sequence {row.sequence} of workflow {clean(row.workflow_id)})"
    if row.status == Status.IN_DOUBT:
        return
    if not row.stands:
        raise ConsoleError(f"{what}: attempt {row.attempt} is {row.status}, and another attempt decides the place")
    if row.status == Status.PENDING:
        raise ConsoleError(f"{what}: is under way; its outcome will be on record")
    if row.status == Status.NOT_SENT:
        raise ConsoleError(f"{what}: did not leave for the server; the place is free as it is")
    may_be_forced = (
        row.status in (Status.INPUT_REQUIRED, Status.TASK, Status.FAILED)
        or (row.status == Status.COMPLETED and row.is_error)
        or (row.status == Status.NOT_EXECUTED and has_decision)
    )
    if not may_be_forced:
        raise ConsoleError(f"{what}: is {row.status}, an outcome on record; it stays, and a new workflow can begin")
    if not (verdict.is_forced and verdict.reason):
        state = "COMPLETED with isError" if row.is_error else row.status
        raise ConsoleError(f"{what}: is {state} and not in doubt; --force --reason TEXT settles it all the same")


def _check_upstream(owner: Owner | None) -> None:
    """A server that still runs may still run the call."""
    group = owner.upstream_pid if owner else None
    if group is not None and not may_be_group(group):
        raise ConsoleError(f"the server that got the call is on record as process {group}, which none can be; --force")
    if group is not None and has_running(group, counts_others=True):
        raise ConsoleError(
            f"the server that got the call may still run it: process group {group} lives; end it (kill -- -{group}) "
            "and look again, or give --force if that group is another program's by now"
        )


def question(plan: Plan, verdict: Verdict) -> list[str]:
    """What a person is asked before anything is written."""
    row = plan.row
    state = row.status + (f", {row.cause}" if row.cause else "")
    lines = [f"{clean(row.tool_name)}, sequence {row.sequence} of workflow {clean(row.workflow_id)}: {state}"]
    lines.append(f"started {iso(row.started_at)}")
    if plan.arguments is not None:
        lines.append(f"arguments {cut(clean(decoded(plan.arguments)), _SHOWN_CHARS)}")
    return [*lines, f"Settle it as {verdict.status}? {_MEANING[verdict.status]}"]


_MEANING: Final[Mapping[Status, str]] = {
    Status.COMPLETED: "The agent gets your result, and the call is never run again.",
    Status.FAILED: "The agent gets your text as an error, and the call is never run again.",
    Status.NOT_EXECUTED: "The place is free again: the agent may run the call, and its effect will happen then.",
}


# -------------------------------------------------------------------------------------------------------------- writing


def settle(typed: str, plan: Plan, verdict: Verdict, command: Sequence[str], now_ms: int) -> None:
    """Puts a decision on record. Raises Busy, JournalError, or ConsoleError if the row is not what it was."""
    files = Files(typed)
    with writing(typed) as database:
        records = Records(database)
        entry = _unchanged(records, database, plan)
        error = None
        if verdict.status is Status.FAILED:
            error = _error(files.path, command, entry._replace(status=Status.FAILED), verdict.text or "")
        result = verdict.result
        if result is not None and entry.is_modern:
            result = wire.with_result_type(result)
        with transaction(database, files.folder):
            database.execute(
                "INSERT INTO decisions (dispatch, status, decided_at, reason, result, error) VALUES (?, ?, ?, ?, ?, ?)",
                (entry.id, verdict.status, now_ms, verdict.reason, result, error),
            )
            # A row that a dead owner left open and no later one has taken over is not on record as doubt yet.
            if entry.status is Status.IN_DOUBT:
                database.execute(
                    "INSERT INTO doubts (dispatch, cause, noted_at, is_open) VALUES (?, ?, ?, 0)"
                    " ON CONFLICT DO UPDATE SET is_open = 0",
                    (entry.id, entry.cause or Cause.RELAY_LOST, now_ms),
                )
            else:
                database.execute("UPDATE doubts SET is_open = 0 WHERE dispatch = ?", (entry.id,))


def _unchanged(records: Records, database: sqlite3.Connection, plan: Plan) -> Entry:
    """The row of a plan, if nothing has happened to it since. The lock is ours: nothing will."""
    row = plan.row
    found = database.execute("SELECT 1 FROM dispatches WHERE id = ?", (row.id,)).fetchone()
    entry = records.by_id(row.id) if found else None
    attempts = database.execute(
        "SELECT count(*) FROM dispatches WHERE workflow_id = ? AND sequence = ?", (row.workflow_id, row.sequence)
    ).fetchone()[0]
    if entry is None or (entry.status, entry.attempt, attempts) != (row.status, row.attempt, plan.attempts):
        raise ConsoleError("the row has changed since it was looked at; nothing was changed, look again")
    return entry


def _error(path: str, command: Sequence[str], entry: Entry, text: str) -> bytes:
    """The error that the agent gets: a refusal of ours, with the operator's text."""
    line = Refusals(path, command, hides_arguments=True).line(b"null", Reason.RESOLVED_FAILED, entry=entry, why=text)
    return json.dumps(json.loads(line)["error"], separators=(",", ":")).encode()


def settled_line(plan: Plan, verdict: Verdict, now_ms: int, *, as_json: bool) -> str:
    """What was done."""
    row = plan.row
    if as_json:
        members = row_object(row._replace(status=verdict.status, cause=None, completed_at=now_ms, is_settled=True))
        return json_line({**members, "reason": verdict.reason})
    return (
        f"{clean(row.tool_name)}, sequence {row.sequence} of workflow {clean(row.workflow_id)}: settled as "
        f"{verdict.status}. {_MEANING[verdict.status]}"
    )
