"""What an operator sees of a journal: the lines of `journal list`, `show`, `export` and `stats`.

Reads through a Reader and gives lines; prints nothing, takes no lock, writes nothing. What a person should do about a
call in doubt is in doubt.py.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import doubt
import wire
from processes import is_running
from reader import Bodies, Filter, Owner, Reader, Row, standing
from render import bold, clean, count, cut, iso, laid_out, painted, pairs, size, span, table
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
        "call_signature": row.signature,
    }


def json_line(members: Mapping[str, Any], raw: Mapping[str, bytes | None] = {}) -> str:
    """One object as one line of ASCII. What is `raw` keeps its spelling: numbers of any size, repeated keys.

    A raw value that is no JSON stands as a string under its key and `_text`, and the key itself is null.
    """
    parts = [f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in members.items()]
    for key, value in raw.items():
        text = None if value is None else _as_json(value)
        parts.append(f"{json.dumps(key)}:{'null' if text is None else text}")
        if value is not None and text is None:
            parts.append(f"{json.dumps(key + '_text')}:{json.dumps(value.decode('utf-8', 'backslashreplace'))}")
    return f"{{{','.join(parts)}}}"


def _as_json(value: bytes) -> str | None:
    """Bytes off the wire as JSON in ASCII; None for what only a lenient parser takes."""
    try:
        wire.parse(value)
        text = value.decode()
    except (ValueError, StopIteration, RecursionError):
        return None
    return text if text.isascii() and "\x7f" not in text else _beyond_ascii(lambda found: _escaped(found[0]), text)


def _escaped(text: str) -> str:
    return "".join(json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f" for character in text)


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
    notes = [
        row.cause or "",
        "isError" if row.is_error else "",
        "settled" if row.is_settled else "",
        f"attempt {row.attempt}" if row.attempt > 1 else "",
    ]
    return ", ".join(filter(None, notes)) or "-"


# ---------------------------------------------------------------------------------------------------------------- show


class Shown:
    """Everything on record about one place, read in one snapshot."""

    def __init__(self, reader: Reader, sequence: int, workflow_id: str | None) -> None:
        """Raises ConsoleError for a place where nothing ever was."""
        asked = workflow_id if workflow_id is not None else reader.identity().workflow_id
        self.family = reader.family(asked)
        # A branch has its parent's rows below the place where it left.
        self.workflow_id = self.family.owner(asked, sequence)
        self.asked = asked
        self.sequence = sequence
        self.attempts = reader.attempts(self.workflow_id, sequence)
        self.pruned_at = None
        if not self.attempts:
            left = reader.prunings(self.workflow_id)
            if not left or sequence > left[0].last_sequence:
                raise ConsoleError(_missing(reader, sequence, self.workflow_id))
            self.pruned_at = left[0].pruned_at
            return
        self.row = standing(self.attempts)
        self.bodies = reader.bodies(self.row.id)
        self.answer = reader.answer(self.row.id)
        self.judgements = {row.attempt: reader.judgements(row.id) for row in self.attempts}
        self.doubts = {row.attempt: reader.doubt(row.id) for row in self.attempts}
        self.task_answers = reader.task_answers(self.row.id)
        self.owner = reader.owner(self.row.owner_epoch)
        self.elsewhere = [
            (member, standing(found).status)
            for member in self.family.members
            if member != self.workflow_id and (found := reader.attempts(member, sequence))
        ]


def _missing(reader: Reader, sequence: int, workflow_id: str) -> str:
    where = [clean(name) for name in reader.places_of(sequence)]
    hint = f"; --workflow-id may be {', '.join(where)}" if where else ""
    return f"no row at sequence {sequence} of workflow {clean(workflow_id)}{hint}"


def show_lines(shown: Shown, reader: Reader, command: Sequence[str], *, now_ms: int, in_colour: bool) -> Iterator[str]:
    """All that `journal show` says. `command` starts this program the way this process was started."""
    if shown.pruned_at is not None:
        yield f"{clean(shown.workflow_id)} {shown.sequence}  {painted(Status.PRUNED, in_colour=in_colour)}"
        yield ""
        yield f"It was pruned at {iso(shown.pruned_at)}: a call at this place is refused and never run again."
        return
    row = shown.row

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
            (str(each.attempt), each.status, iso(each.started_at) or "", iso(each.completed_at) or "-", _note(each))
            for each in shown.attempts
        ]
        header = ("ATTEMPT", "STATUS", "STARTED", "COMPLETED", "NOTE")
        yield from (f"  {line}" for line in table(header, rows, in_colour=in_colour))
    judged = [(attempt, each) for attempt, some in shown.judgements.items() for each in some]
    if judged:
        yield from heading("decisions")
        for attempt, each in judged:
            reason = f": {clean(each.reason)}" if each.reason else ", no reason given"
            yield f"  {iso(each.decided_at)}  attempt {attempt} settled as {each.status}{reason}"
    if len(shown.family.members) > 1:
        yield from heading("branches")
        yield from _branches(shown)
    for each_row in shown.attempts:
        if each_row.status == Status.IN_DOUBT:
            advice = doubt.Advice(each_row, decides=each_row is row, owner=shown.owner, path=reader.files.path)
            for name, lines in advice.sections(command, holder=reader.holder):
                yield from heading(name)
                yield from (f"  {line}" for line in lines)


def _facts(shown: Shown, reader: Reader, now_ms: int, *, in_colour: bool) -> Iterator[tuple[str, str]]:
    row, owner = shown.row, shown.owner
    seen_from = "" if shown.asked == shown.workflow_id else f" (seen from its branch {clean(shown.asked)})"
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
    runs = reader.is_owned and reader.database.execute("SELECT max(epoch) FROM owners").fetchone()[0] == owner.epoch
    state = "running" if runs else "gone"
    upstream = f", upstream's {owner.upstream_pid}" if owner.upstream_pid else ""
    return f"process {owner.pid} ({state}){upstream}, from {iso(owner.started_at)}"


def _bodies(shown: Shown) -> Iterator[tuple[str, bytes | None]]:
    """What went over the wire, and beside an operator's word what upstream had said."""
    yield "arguments", shown.bodies.arguments
    yield "result", shown.bodies.result
    yield "error", shown.bodies.error
    answer = shown.answer
    if answer is not None and shown.judgements[shown.row.attempt]:
        yield f"what upstream had answered ({answer.status})", answer.result or answer.error
    for each in shown.task_answers:
        yield f"upstream's last answer to {clean(each.method)}, {iso(each.ended_at)}", each.result or each.error


def _branches(shown: Shown) -> Iterator[str]:
    statuses = {shown.workflow_id: shown.row.status, **dict(shown.elsewhere)}
    for member in shown.family.members:
        fork = shown.family.fork(member)
        origin = "the root" if fork is None else f"left {clean(fork.parent)} at {fork.sequence}"
        here = f"{statuses[member]} at {shown.sequence}" if member in statuses else f"no row at {shown.sequence}"
        yield f"  {clean(member)}  {origin}; {here}"


def show_object(shown: Shown, reader: Reader, command: Sequence[str]) -> str:
    """All that `journal show` says, as one object on one line."""
    if shown.pruned_at is not None:
        return json_line(
            {
                "workflow_id": shown.workflow_id,
                "sequence": shown.sequence,
                "status": Status.PRUNED,
                "pruned_at": iso(shown.pruned_at),
            }
        )
    members = row_object(shown.row)
    members["attempts"] = [row_object(each) for each in shown.attempts]
    members["decisions"] = [
        _judgement_object(attempt, each) for attempt, some in shown.judgements.items() for each in some
    ]
    members["doubts"] = [
        {"attempt": attempt, "cause": each.cause, "noted_at": iso(each.noted_at), "is_open": each.is_open}
        for attempt, each in shown.doubts.items()
        if each is not None
    ]
    members["branches"] = [
        {"branch": fork.branch, "parent": fork.parent, "sequence": fork.sequence}
        for fork in map(shown.family.fork, shown.family.members)
        if fork is not None
    ]
    owner = shown.owner
    members["owner"] = owner and {**owner._asdict(), "started_at": iso(owner.started_at)}
    if shown.row.status == Status.IN_DOUBT:
        advice = doubt.Advice(shown.row, decides=True, owner=owner, path=reader.files.path)
        members["doubt"] = {
            "known": advice.known(),
            "check": advice.checks(),
            "commands": [line for _, line in advice.commands(command)],
        }
    return json_line(members, shown.bodies._asdict())


def _judgement_object(attempt: int, each: Any) -> dict[str, Any]:
    return {"attempt": attempt, **each._asdict(), "decided_at": iso(each.decided_at)}


# -------------------------------------------------------------------------------------------------------------- export


def export_lines(reader: Reader, workflow_id: str | None) -> Iterator[str]:
    """The journal as JSON Lines: its header, every attempt in the order of their dispatch, forks, prunings.

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
        forks, prunings = reader.forks(), reader.prunings(workflow_id)
    for fork in forks:
        if workflow_id in (None, fork.branch):
            yield json_line({"type": "fork", **fork._asdict(), "forked_at": iso(fork.forked_at)})
    for pruning in prunings:
        yield json_line({"type": "pruning", **pruning._asdict(), "pruned_at": iso(pruning.pruned_at)})


def _export_line(reader: Reader, row: Row, bodies: Bodies) -> str:
    judgements = [_judgement_object(row.attempt, each) for each in reader.judgements(row.id)]
    return json_line({"type": "attempt", **row_object(row), "decisions": judgements}, bodies._asdict())


# --------------------------------------------------------------------------------------------------------------- stats


def stats(reader: Reader, now_ms: int) -> dict[str, Any]:
    """The journal in numbers, by the documented keys of `journal stats --json`."""
    identity, totals, by_status = reader.identity(), reader.totals(), reader.by_status()
    in_doubt = reader.listed(Filter(statuses=(Status.IN_DOUBT,))) if Status.IN_DOUBT in by_status else []
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
    import os

    try:
        return os.stat(path).st_size
    except OSError:
        return 0
