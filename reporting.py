"""The subcommands of `checkpoint report`: their arguments, and what each says."""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, Final

_DONE: Final = 0
_FAILED: Final = 1

_DESCRIPTION: Final = """\
What waits for the endpoint of --report-..., in a journal or in the file of a
SqliteOutbox. A relay that owns a journal delivers by itself; flush is for what
was left when none runs, from cron for instance. It takes the key from
CHECKPOINT_API_KEY."""

_EPILOG: Final = """\
examples:
  checkpoint report flush git.db
  checkpoint report list git.db
  checkpoint report dead git.db --retry"""


def add_to(commands: Any, run: str) -> None:
    """Adds `report` and its subcommands. `run` is the name of this command; what each of its own does is in `act`."""
    parser = commands.add_parser(
        "report", help="deliver reports, see what waits or was given up", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.set_defaults(run=run, act=None)
    acts = parser.add_subparsers(title="commands", metavar="COMMAND", prog="checkpoint report", required=True)

    def command(name: str, act: Callable[..., int], text: str) -> Callable[..., object]:
        added: argparse.ArgumentParser = acts.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        added.set_defaults(act=act)
        added.add_argument("queue", metavar="JOURNAL|OUTBOX", help="the path of a journal or of an outbox")
        added.add_argument("--json", action="store_true", help="as JSON")
        return added.add_argument

    add = command("flush", _flush, "send every report that is due, each to the endpoint that it was made for")
    add("--limit", metavar="N", type=_limit, help="at most so many")
    add("--base-url", metavar="URL", type=_url, help="send them to this endpoint")
    add("--now", action="store_true", help="those that wait for another attempt as well")
    command("list", _list, "list what was not delivered, given up or not")
    add = command("dead", _dead, "list what was given up, with the reason")
    add("--retry", action="store_true", help="make it due again, with all attempts before it")


def _limit(text: str) -> int:
    value = int(text)
    if not 0 < value < 1e9:
        raise ValueError
    return value


_limit.__name__ = "number from 1 on"  # argparse puts it into its message


def _url(text: str) -> str:
    from reporter import url_problem

    if (problem := url_problem(text)) is not None:
        raise argparse.ArgumentTypeError(problem)
    return text


def _flush(args: argparse.Namespace, api_key: Callable[[], str], say: Callable[[str], bool]) -> int:
    from queues import deliver, queue_at
    from render import clean

    tally, last_failure = deliver(
        queue_at(args.queue),
        api_key(),
        limit=args.limit,
        base_url=args.base_url,
        ignores_due=args.now,
        now_ms=_now_ms,
    )
    if args.json:
        say(json.dumps(tally._asdict()))
    else:
        waits, dead = "waits" if tally.waiting == 1 else "wait", "is" if tally.dead == 1 else "are"
        say(f"{tally.delivered} delivered, {tally.failed} failed; {tally.waiting} {waits}, {tally.dead} {dead} dead")
        if last_failure is not None:
            say(f"last failure: {clean(last_failure)}")
    return _FAILED if tally.failed else _DONE


def _list(args: argparse.Namespace, _: object, say: Callable[[str], bool]) -> int:
    return _say_rows(args, say, only_dead=False)


def _dead(args: argparse.Namespace, _: object, say: Callable[[str], bool]) -> int:
    from queues import queue_at

    if not args.retry:
        return _say_rows(args, say, only_dead=True)
    revived = queue_at(args.queue).revive(_now_ms())
    say(json.dumps({"revived": revived}) if args.json else f"{revived} {'is' if revived == 1 else 'are'} due again")
    return _DONE


def _say_rows(args: argparse.Namespace, say: Callable[[str], bool], *, only_dead: bool) -> int:
    from queues import queue_at, row_line, row_object

    rows = [row for row in queue_at(args.queue).rows(_now_ms()) if row.due_in_s is None or not only_dead]
    lines = [row_object(row) if args.json else row_line(row) for row in rows]
    if lines:
        say("\n".join(lines))
    elif not args.json:
        say("nothing was given up" if only_dead else "nothing waits")
    return _DONE


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
