"""What an operator sees of a journal: the lines of `journal list`, `show`, `export` and `stats`.

Reads through a Reader and gives lines; prints nothing, takes no lock, writes nothing. What a person should do about a
call in doubt is in doubt.py.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import doubt
import wire
from branches import Family
from processes import is_running
from reader import Answer, Bodies, Doubt, Filter, Judgement, Owner, Reader, Row, TaskAnswer, standing
from render import bold, clean, count, cut, decoded, iso, laid_out, painted, pairs, quoted, size, span, table
from states import Status
from storage import FORMAT

_TOOL_CHARS: Final = 40  # of a tool's name in a listing
_EXPORT_BYTES: Final = 4 << 20  # read at once, between two short snapshots
_beyond_ascii: Final = re.compile(r"[^\x00-\x7e]+").sub


class ConsoleError(Exception):
    """What was asked for is not there, or may not be done; one line that says what to do instead."""


# ------------------------------------------------------------------------------------------------------------- as JSON


def row_object(row: Row) -> dict[str, Any]:
    """A row by its documented keys. Times are ISO 8601 in UTC."""
    return {
        "workflow_id": row.workflow_id,
        "sequence": row.sequence,
        "attempt": row.attempt,
        "tool_name": row.tool_name,
        "status": row.status,
        "cause": row.cause,
        "is_error": row.is_error,
        "started_at": iso(row.started_at),
        "completed_at": iso(row.completed_at),
        "call_id": row.call_id,
        "era": row.era,
        "owner_epoch": row.owner_epoch,
        "delivered": row.is_delivered,
        "settled": row.is_settled,
        "stands": row.stands,
        "call_signature": row.signature,
    }


def json_line(members: Mapping[str, Any]) -> str:
    """One object as one line of ASCII. Bytes went over the wire and keep their spelling, numbers of any size included.

    Bytes that are no JSON stand as a string under their key and `_text`, and the key itself is null.
    """
    parts = []
    for key, value in members.items():
        parts.append(f"{json.dumps(key)}:{_json(value)}")
        if isinstance(value, bytes) and _as_json(value) is None:
            parts.append(f"{json.dumps(key + '_text')}:{json.dumps(decoded(value))}")
    return f"{{{','.join(parts)}}}"


def _json(value: Any) -> str:
    if isinstance(value, bytes):
        return _as_json(value) or "null"
    if isinstance(value, Mapping):
        return json_line(value)
    if isinstance(value, list):
        return f"[{','.join(map(_json, value))}]"
    return json.dumps(value)


def _as_json(value: bytes) -> str | None:
    """Bytes off the wire as JSON in ASCII; None for what only a lenient parser takes."""
    try:
        wire.parse(value)
        text = value.decode()
    except (ValueError, RecursionError):
        return None
    return text if text.isascii() and "\x7f" not in text else _beyond_ascii(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f")


# ---------------------------------------------------------------------------------------------------------------- list


def list_lines(rows: Sequence[Row], *, in_colour: bool) -> Iterator[str]:
    """The table of `journal list`, one line a row."""
    header = ("SEQ", "TOOL", "STATUS", "STARTED", "TOOK", "NOTE", "WORKFLOW")
    cells = [
        (
            str(row.sequence),
            cut(clean(row.tool_name), _TOOL_CHARS),
            row.status,
            iso(row.started_at) or "",
            "-" if row.completed_at is None else span(row.completed_at - row.started_at),
            _note(row),
            clean(row.workflow_id),
        )
        for row in rows
    ]
    return table(header, cells, in_colour=in_colour, right=(0,))


def _note(row: Row) -> str:
    which = "" if row.stands else f"earlier attempt {row.attempt}"
    notes = [
        row.cause or "",
        "isError" if row.is_error else "",
        "settled" if row.is_settled else "",
        f"attempt {row.attempt}" if row.stands and row.attempt > 1 else which,
    ]
    return ", ".join(filter(None, notes)) or "-"


# ---------------------------------------------------------------------------------------------------------------- show


class Pruned(NamedTuple):
    """A place where something was on record once."""

    workflow_id: str
    sequence: int
    pruned_at: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, and all that is on record about it but its bodies."""

    row: Row
    owner: Owner | None
    answer: Answer | None  # of upstream's own, where an operator decided
    judgements: Sequence[Judgement]
    doubt: Doubt | None
    task_answers: Sequence[TaskAnswer]


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything on record about one place."""

    asked: str  # the workflow that was asked for
    family: Family
    attempts: Sequence[Attempt]
    standing: Attempt
    bodies: Bodies  # of the standing attempt
    elsewhere: Mapping[str, Status]  # by workflow of the family, what it has at the same sequence


def look(reader: Reader, sequence: int, workflow_id: str | None) -> Shown | Pruned:
    """Everything about one place, read in one snapshot. Raises ConsoleError for a place where nothing ever was."""
    asked = workflow_id if workflow_id is not None else reader.identity().workflow_id
    family = reader.family(asked)
    name = family.owner(asked, sequence)  # a branch has its parent's rows below the place where it left
    rows = reader.attempts(name, sequence)
    if not rows:
        left = reader.prunings(name)
        if left and sequence <= left[0].last_sequence:
            return Pruned(name, sequence, left[0].pruned_at)
        raise ConsoleError(no_row(reader, name, sequence))
    attempts = [_attempt(reader, row) for row in rows]
    found = {member: reader.attempts(member, sequence) for member in family.members}
    return Shown(
        asked=asked,
        family=family,
        attempts=attempts,
        standing=attempts[rows.index(standing(rows))],
        bodies=reader.bodies(standing(rows).id),
        elsewhere={member: standing(some).status for member, some in found.items() if some},
    )


def _attempt(reader: Reader, row: Row) -> Attempt:
    return Attempt(
        row=row,
        owner=reader.owner(row.owner_epoch),
        answer=reader.answer(row.id) if row.is_settled else None,
        judgements=reader.judgements(row.id),
        doubt=reader.doubt(row.id),
        task_answers=reader.task_answers(row.id),
    )


def no_row(reader: Reader, workflow_id: str, sequence: int) -> str:
    """That a workflow has no row of its own at a sequence, and where there is one."""
    owner = reader.family(workflow_id).owner(workflow_id, sequence)
    if owner != workflow_id and reader.attempts(owner, sequence):
        return (
            f"branch {clean(workflow_id)} has no row of its own at {sequence}; "
            f"the one it sees is --workflow-id {quoted([owner])}"
        )
    if any(sequence <= left.last_sequence for left in reader.prunings(workflow_id)):
        return f"sequence {sequence} of workflow {clean(workflow_id)} was pruned; there is nothing left to settle"
    where = [quoted([name]) for name in reader.places_of(sequence)]
    hint = f"; --workflow-id may be {', '.join(where)}" if where else ""
    return f"no row at sequence {sequence} of workflow {clean(workflow_id)}{hint}"


def show_lines(
    shown: Shown | Pruned, reader: Reader, command: Sequence[str], *, now_ms: int, in_colour: bool
) -> Iterator[str]:
    """All that `journal show` says. `command` starts this program the way this process was started."""
    if isinstance(shown, Pruned):
        yield f"{clean(shown.workflow_id)} {shown.sequence}  {painted(Status.PRUNED, in_colour=in_colour)}"
        yield ""
        yield f"It was pruned at {iso(shown.pruned_at)}: a call at this place is refused and never run again."
        return

    def heading(text: str) -> Iterator[str]:
        yield ""
        yield bold(text, in_colour=in_colour)

    yield from pairs(_facts(shown, reader, now_ms, in_colour=in_colour))
    for name, body in _bodies(shown):
        if body is not None:
            yield from heading(name)
            yield from (f"  {line}" for line in laid_out(body))
    if len(shown.attempts) > 1:
        yield from heading("attempts")
        rows = [
            (str(row.attempt), row.status, iso(row.started_at) or "", iso(row.completed_at) or "-", _note(row))
            for row in (each.row for each in shown.attempts)
        ]
        header = ("ATTEMPT", "STATUS", "STARTED", "COMPLETED", "NOTE")
        yield from (f"  {line}" for line in table(header, rows, in_colour=in_colour))
    judged = [(each.row.attempt, judgement) for each in shown.attempts for judgement in each.judgements]
    if judged:
        yield from heading("decisions")
        for attempt, judgement in judged:
            reason = f": {clean(judgement.reason)}" if judgement.reason else ", no reason given"
            yield f"  {iso(judgement.decided_at)}  attempt {attempt} settled as {judgement.status}{reason}"
    if len(shown.family.members) > 1:
        yield from heading("branches")
        yield from _branches(shown)
    for each in shown.attempts:
        if each.row.status is Status.IN_DOUBT:
            advice = doubt.Advice(each.row, owner=each.owner, path=reader.files.path)
            for name, lines in advice.sections(command, holder=reader.holder):
                yield from heading(name)
                yield from (f"  {line}" for line in lines)


def _facts(shown: Shown, reader: Reader, now_ms: int, *, in_colour: bool) -> Iterator[tuple[str, str]]:
    row, owner = shown.standing.row, shown.standing.owner
    seen_from = "" if shown.asked == row.workflow_id else f" (seen from its branch {clean(shown.asked)})"
    yield "workflow", clean(row.workflow_id) + seen_from
    yield "sequence", str(row.sequence)
    yield "tool", clean(row.tool_name)
    detail = f", {row.cause}" if row.cause else ", and its result says isError" if row.is_error else ""
    yield "status", painted(row.status, in_colour=in_colour) + detail
    yield "attempt", str(row.attempt)
    yield "started", f"{iso(row.started_at)}, {span(max(0, now_ms - row.started_at))} ago"
    if row.completed_at is not None:
        yield "completed", f"{iso(row.completed_at)}, after {span(row.completed_at - row.started_at)}"
    if row.call_id is not None:
        yield "host's id", clean(row.call_id)
    yield "era", row.era
    yield "delivered", "yes, the client has read the answer" if row.is_delivered else "not on record"
    yield "signature", clean(row.signature)
    yield "owner", f"epoch {row.owner_epoch}" + (f", {_owner(owner, reader)}" if owner else "")
    yield "journal", clean(reader.files.path)


def _owner(owner: Owner, reader: Reader) -> str:
    runs = reader.is_owned and reader.newest_epoch == owner.epoch
    state = "running" if runs else "gone"
    upstream = f", upstream's {owner.upstream_pid}" if owner.upstream_pid else ""
    return f"process {owner.pid} ({state}){upstream}, from {iso(owner.started_at)}"


def _bodies(shown: Shown) -> Iterator[tuple[str, bytes | None]]:
    """What went over the wire, and beside an operator's word what upstream had said."""
    yield "arguments", shown.bodies.arguments
    yield "result", shown.bodies.result
    yield "error", shown.bodies.error
    if (answer := shown.standing.answer) is not None:
        yield f"what upstream had answered ({answer.status})", answer.result or answer.error
    for each in shown.standing.task_answers:
        yield f"upstream's last answer to {clean(each.method)}, {iso(each.ended_at)}", each.result or each.error


def _branches(shown: Shown) -> Iterator[str]:
    sequence = shown.standing.row.sequence
    for member in shown.family.members:
        fork = shown.family.fork(member)
        origin = "the root" if fork is None else f"left {clean(fork.parent)} at {fork.sequence}"
        status = shown.elsewhere.get(member)
        here = f"{status} at {sequence}" if status else f"no row at {sequence}"
        yield f"  {clean(member)}  {origin}; {here}"


def show_object(shown: Shown | Pruned, reader: Reader, command: Sequence[str]) -> str:
    """All that `journal show` says, as one object on one line."""
    if isinstance(shown, Pruned):
        members = shown._asdict()
        return json_line({**members, "status": Status.PRUNED, "pruned_at": iso(shown.pruned_at)})
    about = [_about(each) for each in shown.attempts]
    standing = about[shown.attempts.index(shown.standing)]
    return json_line(
        {
            **row_object(shown.standing.row),
            **{key: standing[key] for key in ("owner", "answer", "task_answers")},
            **{key: [one for each in about for one in each[key]] for key in ("decisions", "doubts")},
            "attempts": [_attempt_object(each, reader, command) for each in shown.attempts],
            "branches": [fork._asdict() for fork in map(shown.family.fork, shown.family.members) if fork is not None],
            **_advice_object(shown.standing, reader, command),
            **shown.bodies._asdict(),
        }
    )


def _about(each: Attempt) -> dict[str, Any]:
    """What is on record about an attempt beside its row, by its documented keys."""
    attempt, owner, answer = each.row.attempt, each.owner, each.answer
    return {
        "owner": owner and {**owner._asdict(), "started_at": iso(owner.started_at)},
        "decisions": [
            {"attempt": attempt, **one._asdict(), "decided_at": iso(one.decided_at)} for one in each.judgements
        ],
        "doubts": [
            {"attempt": attempt, **one._asdict(), "noted_at": iso(one.noted_at)} for one in (each.doubt,) if one
        ],
        "answer": answer and {**answer._asdict(), "completed_at": iso(answer.completed_at)},
        "task_answers": [{**one._asdict(), "ended_at": iso(one.ended_at)} for one in each.task_answers],
    }


def _attempt_object(each: Attempt, reader: Reader, command: Sequence[str]) -> dict[str, Any]:
    return {**row_object(each.row), **_advice_object(each, reader, command)}


def _advice_object(each: Attempt, reader: Reader, command: Sequence[str]) -> dict[str, Any]:
    if each.row.status is not Status.IN_DOUBT:
        return {}
    advice = doubt.Advice(each.row, owner=each.owner, path=reader.files.path)
    commands = [line for _, line in advice.commands(command)]
    return {"doubt": {"known": advice.known(), "check": advice.checks(), "commands": commands}}


# -------------------------------------------------------------------------------------------------------------- export


def export_lines(reader: Reader, workflow_id: str | None) -> Iterator[str]:
    """The journal as JSON Lines: its header, every attempt in the order of their dispatch, owners, forks, prunings.

    A few megabytes are read at a time, and nothing is held meanwhile: however slowly the lines are taken, no owner
    waits. A row is as it was when its turn came.
    """
    with reader.snapshot():
        own = reader.identity()
    yield json_line({"type": "journal", "format": FORMAT, **own._asdict(), "created_at": iso(own.created_at)})
    last = 0
    while True:
        with reader.snapshot():
            found = reader.after(last, workflow_id, _EXPORT_BYTES)
            lines = [_export_line(reader, row, bodies) for row, bodies in found]
        if not found:
            break
        last = found[-1][0].id
        yield from lines
    with reader.snapshot():
        owners, forks, prunings = reader.owners(workflow_id), reader.forks(), reader.prunings(workflow_id)
    for owner in owners:
        yield json_line({"type": "owner", **owner._asdict(), "started_at": iso(owner.started_at)})
    for fork in forks:
        if workflow_id in (None, fork.branch):
            yield json_line({"type": "fork", **fork._asdict(), "forked_at": iso(fork.forked_at)})
    for pruning in prunings:
        yield json_line({"type": "pruning", **pruning._asdict(), "pruned_at": iso(pruning.pruned_at)})


def _export_line(reader: Reader, row: Row, bodies: Bodies) -> str:
    about = _about(_attempt(reader, row))
    del about["owner"]  # it has a line of its own
    return json_line({"type": "attempt", **row_object(row), **about, **bodies._asdict()})


# --------------------------------------------------------------------------------------------------------------- stats


def stats(reader: Reader, now_ms: int) -> dict[str, Any]:
    """The journal in numbers, by the documented keys of `journal stats --json`."""
    identity, totals, by_status = reader.identity(), reader.totals(), reader.by_status()
    in_doubt = reader.listed(Filter(statuses=(Status.IN_DOUBT,)))
    oldest = min(in_doubt, key=lambda row: row.started_at, default=None)
    names = {name for (name,) in reader.database.execute("SELECT DISTINCT workflow_id FROM dispatches")}
    forks = reader.forks()
    return {
        "path": reader.files.path,
        "format": FORMAT,
        "workflow_id": identity.workflow_id,
        "workflows": len(names - {fork.branch for fork in forks}),
        "branches": len(forks),
        "pruned_workflows": len(reader.prunings()),
        "rows": {status: by_status[status] for status in Status if status in by_status},
        "earlier_attempts_in_doubt": sum(not row.stands for row in in_doubt),
        "attempts": totals.attempts,
        "size_bytes": _bytes(reader.files.path),
        "log_bytes": _bytes(reader.files.wal),
        "oldest_doubt": oldest and {**row_object(oldest), "age_ms": max(0, now_ms - oldest.started_at)},
        "created_at": iso(identity.created_at),
        "age_ms": max(0, now_ms - identity.created_at),
        "newest_call_at": iso(totals.newest_at),
        "owner_pid": reader.holder or None,
        "is_owned": reader.holder is not None,
    }


def stats_lines(found: Mapping[str, Any], *, in_colour: bool) -> Iterable[str]:
    """The journal in numbers, for a person."""
    oldest = found["oldest_doubt"]
    rows: Mapping[str, int] = found["rows"]
    lines = [
        ("journal", clean(found["path"])),
        ("own workflow", clean(found["workflow_id"])),
        ("created", f"{found['created_at']}, {span(found['age_ms'])} ago"),
        ("newest call", found["newest_call_at"] or "none"),
        ("owner", _owned(found)),
        ("size", f"{size(found['size_bytes'])}, and {size(found['log_bytes'])} of log"),
        ("workflows", f"{found['workflows']:,}, and {count(found['branches'], 'branch', 'branches')}"),
        ("pruned", count(found["pruned_workflows"], "workflow")),
        ("rows", f"{sum(rows.values()):,} of {count(found['attempts'], 'attempt')}"),
    ]
    lines += [(f"  {painted(status, in_colour=in_colour)}", f"{number:,}") for status, number in rows.items()]
    if earlier := found["earlier_attempts_in_doubt"]:
        lines.append(("  IN_DOUBT", f"{count(earlier, 'earlier attempt')}, of a place that a later one decides"))
    doubted = "none"
    if oldest:
        place = f"{clean(oldest['tool_name'])}, sequence {oldest['sequence']} of {clean(oldest['workflow_id'])}"
        doubted = f"{place}: {oldest['cause']}, {span(oldest['age_ms'])} ago"
    return pairs([*lines, ("oldest doubt", doubted)])


def _owned(found: Mapping[str, Any]) -> str:
    if not found["is_owned"]:
        return "none is running"
    pid = found["owner_pid"]
    return f"process {pid}" if pid and is_running(pid) else "a process that cannot be named from here"


def _bytes(path: str) -> int:

    try:
        return os.stat(path).st_size
    except OSError:
        return 0
