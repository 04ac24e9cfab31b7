"""The subcommands of `checkpoint journal`: their arguments, and what each opens, calls and says.

Gives text to whoever prints, and exit codes. What it needs is imported where it is needed: help costs nothing.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from settle import Verdict
    from verify import Remark

_DONE: Final = 0
_FAILED: Final = 1
_FOUND: Final = 6
_LIST_LIMIT: Final = 50
_BLOCK_CHARS: Final = 1 << 16  # said at once

_STATUSES: Final = (
    "PENDING", "IN_DOUBT", "COMPLETED", "FAILED", "INPUT_REQUIRED", "TASK", "NOT_SENT", "NOT_EXECUTED",
)  # fmt: skip

_DESCRIPTION: Final = """\
Looks into a journal, and settles what only a person can. Reading works while a
relay runs, takes no lock and writes nothing. resolve and prune write: they need
the journal for themselves, and name the process that has it if they fail.

Times are ISO 8601 in UTC, here and in what is printed."""

_EPILOG: Final = """\
examples:
  checkpoint journal list git.db --status IN_DOUBT
  checkpoint journal show git.db 4
  checkpoint journal resolve git.db 4 --not-executed --reason 'no such charge at the bank'
  checkpoint journal export git.db > git.jsonl
  checkpoint journal prune git.db --older-than 30d --dry-run"""


class ArgumentsError(Exception):
    """The arguments do not go together."""


@dataclass(frozen=True, slots=True)
class Context:
    """How this process was started, and how it says things."""

    say: Callable[[str], bool]  # to stdout; whether anybody still reads
    note: Callable[[str], None]  # to stderr
    command: Sequence[str]  # starts this program the way this process was started


# ---------------------------------------------------------------------------------------------------------- arguments


def add_to(commands: Any, run: str) -> None:
    """Adds `journal` and its subcommands. `run` is the name of this command; what each of its own does is in `act`."""
    parser = commands.add_parser(
        "journal", help="look into a journal, settle what is in doubt, prune", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.set_defaults(run=run, act=None)
    acts = parser.add_subparsers(title="commands", metavar="COMMAND", prog="checkpoint journal", required=True)

    def command(name: str, act: Callable[[argparse.Namespace, Context], int], text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = acts.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        added.set_defaults(act=act)
        added.add_argument("journal", metavar="JOURNAL", help="the path of the journal")
        return added

    add = command("list", _list, "list calls, the newest last").add_argument
    _add_workflow_option(add, default="all")
    add("--status", metavar="STATUS", action="append", type=_status, help="only this status; repeatable")
    add("--tool", metavar="NAME", help="only calls of this tool")
    add("--since", metavar="TIME", type=_moment, help="only calls from this time on, or of the last 12h, 30d")
    add("--limit", metavar="N", type=_limit, default=_LIST_LIMIT, help="the newest N (%(default)s); 0 for all")
    _add_json_option(add, "one object a line")

    add = command("show", _show, "show all that is on record about one call, and how to settle it").add_argument
    _add_sequence(add)
    _add_workflow_option(add)
    _add_json_option(add, "one object")

    _add_resolve(command("resolve", _resolve, "settle a call in doubt, once you know what became of it"))

    text = "write the journal as JSON Lines: every attempt, owners, forks, prunings"
    add = command("export", _export, text).add_argument
    _add_workflow_option(add, default="all")
    _add_json_option(add, "one object a line, as without it")

    add = command("stats", _stats, "tell the journal in numbers").add_argument
    _add_json_option(add, "one object")

    add = command("verify", _verify, "check the journal; exit code 6 if something is wrong, which stays").add_argument
    _add_json_option(add, "one object a line")

    text = "delete old families of workflows; their places stay refused, and their space goes back to the system"
    add = command("prune", _prune, text).add_argument
    add(
        "--older-than", metavar="AGE", type=_span, required=True,
        help="whole families only, with every row final and the newest older than this: 30d, 12h, 2w",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="say what would go, and change nothing")
    _add_json_option(add, "one object")


def _add_resolve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_sequence(add)
    _add_workflow_option(add)
    verdict = parser.add_mutually_exclusive_group(required=True).add_argument
    verdict("--completed", metavar="FILE", help="it ran: the agent gets the tool result in FILE (- for stdin)")
    verdict("--failed", metavar="TEXT", help="it ran and failed: the agent gets TEXT as an error")
    verdict("--not-executed", action="store_true", help="it did not run and cannot any more: the place is free again")
    add("--reason", metavar="TEXT", default="", help="what you saw; kept on record")
    add("--yes", action="store_true", help="do not ask on the terminal")
    add(
        "--force", action="store_true",
        help="--not-executed although the server's processes still live; with --reason, also settle what has an "
        "answer: INPUT_REQUIRED, TASK, FAILED, a result with isError, and an earlier --not-executed",
    )  # fmt: skip
    add("--attempt", metavar="N", type=_sequence, help="an earlier attempt that is in doubt (default: the newest)")
    _add_json_option(add, "one object")


def _add_sequence(add: Callable[..., object]) -> None:
    add("sequence", metavar="SEQ", type=_sequence, help="the call's place in its workflow")


def _add_workflow_option(add: Callable[..., object], *, default: str = "the journal's own workflow") -> None:
    add("--workflow-id", metavar="ID", help=f"exactly this workflow or branch (default: {default})")


def _add_json_option(add: Callable[..., object], how: str) -> None:
    add("--json", action="store_true", help=f"for programs: {how}")


def _sequence(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) < 2**53):
        raise argparse.ArgumentTypeError(f"a whole number from 1 on: {text[:40]!r}")
    return int(text)


def _limit(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise argparse.ArgumentTypeError(f"a whole number: {text[:40]!r}")
    return int(text) or None


def _status(text: str) -> str:
    if text.upper() not in _STATUSES:
        raise argparse.ArgumentTypeError(f"one of {', '.join(_STATUSES)}: {text[:40]!r}")
    return text.upper()


def _moment(text: str) -> int:
    from render import moment_ms

    try:
        return moment_ms(text, _now_ms())
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{error}: {text[:40]!r}") from None


def _span(text: str) -> int:
    from render import duration_ms

    try:
        return duration_ms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text[:40]!r}") from None


def _workflow_id(args: argparse.Namespace) -> str | None:
    from states import storable

    return None if args.workflow_id is None else storable(args.workflow_id)


# ------------------------------------------------------------------------------------------------------------ reading


def _list(args: argparse.Namespace, context: Context) -> int:
    from console import json_line, list_lines, row_object
    from reader import Filter, reading
    from render import count
    from states import storable

    tool = None if args.tool is None else storable(args.tool)
    one_more = None if args.limit is None else args.limit + 1  # which tells whether there are more
    wanted = Filter(_workflow_id(args), args.status or (), tool, args.since, one_more)
    with reading(args.journal) as reader, reader.snapshot():
        rows = reader.listed(wanted)
    is_cut = len(rows) == one_more
    rows = rows[1:] if is_cut else rows
    if args.json:
        _say_all(context, (json_line(row_object(row)) for row in rows))
    elif rows:
        _say_all(context, list_lines(rows, in_colour=_in_colour()))
    else:
        context.note("no such rows" if wanted != Filter(limit=one_more) else "no rows")
    if is_cut and not args.json:
        context.note(f"the newest {count(len(rows), 'row')} that fit; --limit 0 lists all")
    return _DONE


def _show(args: argparse.Namespace, context: Context) -> int:
    from console import look, show_lines, show_object
    from reader import reading

    with reading(args.journal) as reader, reader.snapshot():
        shown = look(reader, args.sequence, _workflow_id(args))
        if args.json:
            lines = [show_object(shown, reader, context.command)]
        else:
            lines = list(show_lines(shown, reader, context.command, now_ms=_now_ms(), in_colour=_in_colour()))
    _say_all(context, lines)
    return _DONE


def _export(args: argparse.Namespace, context: Context) -> int:
    from console import export_lines
    from reader import Filter, reading
    from render import clean

    workflow_id = _workflow_id(args)
    with reading(args.journal) as reader:
        _say_all(context, export_lines(reader, workflow_id))
        is_known = reader.listed(Filter(workflow_id, limit=1)) or reader.prunings(workflow_id)
    if workflow_id is not None and not is_known:
        context.note(f"nothing is on record of workflow {clean(workflow_id)}")
    return _DONE


def _stats(args: argparse.Namespace, context: Context) -> int:
    from console import json_line, stats, stats_lines
    from reader import reading

    with reading(args.journal) as reader, reader.snapshot():
        found = stats(reader, _now_ms())
    _say_all(context, [json_line(found)] if args.json else stats_lines(found, in_colour=_in_colour()))
    return _DONE


def _verify(args: argparse.Namespace, context: Context) -> int:
    from console import json_line
    from reader import reading
    from render import count
    from verify import verified

    def line(remark: "Remark") -> str:
        if args.json:
            return json_line({"kind": "finding" if remark.is_finding else "note", "text": remark.text})
        return remark.text if remark.is_finding else f"note: {remark.text}"

    with reading(args.journal) as reader:
        progress = _Progress()
        try:
            remarks = list(verified(reader, progress.show))
        finally:
            progress.end()
    _say_all(context, map(line, remarks))
    findings = sum(remark.is_finding for remark in remarks)
    if not args.json:
        context.say(f"{count(findings, 'finding')}; nothing was repaired" if findings else "nothing is wrong with it")
    return _FOUND if findings else _DONE


class _Progress:
    """A word on stderr that is written over, if that is a terminal."""

    def __init__(self) -> None:
        self._is_shown = os.isatty(2)

    def show(self, text: str) -> None:
        if self._is_shown:
            os.write(2, f"\r\x1b[K{text} ...".encode())

    def end(self) -> None:
        if self._is_shown:
            os.write(2, b"\r\x1b[K")


# ------------------------------------------------------------------------------------------------------------ writing


def _resolve(args: argparse.Namespace, context: Context) -> int:
    from reader import reading
    from settle import plan, question, settle, settled_line

    verdict = _verdict(args)
    with reading(args.journal) as reader, reader.snapshot():
        planned = plan(reader, args.sequence, _workflow_id(args), args.attempt, verdict)
    if not args.yes and not _agrees(question(planned, verdict)):
        context.note("nothing was changed")
        return _FAILED
    now_ms = _now_ms()
    settle(args.journal, planned, verdict, context.command, now_ms)
    context.say(settled_line(planned, verdict, now_ms, as_json=args.json))
    return _DONE


def _verdict(args: argparse.Namespace) -> "Verdict":
    from settle import Verdict, read_result
    from states import Status, storable

    common = {"reason": storable(args.reason), "is_forced": args.force}
    if args.not_executed:
        return Verdict(Status.NOT_EXECUTED, **common)
    if args.failed is not None:
        if not args.failed.strip():
            raise ArgumentsError("--failed: the text is empty; the agent is told nothing else")
        return Verdict(Status.FAILED, text=storable(args.failed), **common)
    return Verdict(Status.COMPLETED, result=read_result(_content(args.completed)), **common)


def _content(path: str) -> bytes:
    from console import ConsoleError

    try:
        if path == "-":
            return sys.stdin.buffer.read() if sys.stdin is not None else b""  # started with a closed stdin
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConsoleError(f"--completed {path}: {error.strerror}") from error


def _agrees(lines: Sequence[str]) -> bool:
    """Whether a person at the controlling terminal says yes. Stdin may be a pipe, and an agent's."""
    from console import ConsoleError

    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        raise ConsoleError("there is no terminal to ask on; --yes settles it without a question") from None
    try:
        os.write(terminal, ("\n".join(lines) + " [y/N] ").encode("utf-8", "backslashreplace"))
        answer = b""
        while not answer.endswith(b"\n") and (piece := os.read(terminal, 1024)):
            answer += piece
        return answer.strip().lower() in (b"y", b"yes")
    except OSError as error:
        raise ConsoleError(f"the terminal cannot be asked: {error.strerror}; --yes settles it without") from error
    finally:
        os.close(terminal)


def _prune(args: argparse.Namespace, context: Context) -> int:
    from console import json_line
    from prune import Pruned, old_families, prune
    from reader import reading

    now_ms = _now_ms()
    before_ms = now_ms - args.older_than
    if args.dry_run:
        with reading(args.journal) as reader, reader.snapshot():
            pruned = Pruned.of(old_families(reader.database, before_ms, reader.open_status), reader.files.path)
    else:
        pruned = prune(args.journal, before_ms, now_ms)
    _say_all(context, [json_line(pruned.members())] if args.json else pruned.lines(context.command))
    return _DONE


# ------------------------------------------------------------------------------------------------------------- helpers


def _say_all(context: Context, lines: Iterable[str]) -> None:
    """Says lines in blocks, as long as anybody reads."""
    block: list[str] = []
    chars = 0
    for line in lines:
        block.append(line)
        chars += len(line)
        if chars > _BLOCK_CHARS:
            if not context.say("\n".join(block)):
                return
            block, chars = [], 0
    if block:
        context.say("\n".join(block))


def _in_colour() -> bool:
    return os.isatty(1) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
