"""The command line: arguments, logging, wiring, exit codes.

Imports everything and is imported by nothing. What is not needed before upstream is started is imported after that, so
that our start hides behind upstream's.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

VERSION: Final = "0.1.0"

EXIT_CODES: Final = {
    0: "done",
    1: "an expected failure, told in one line",
    2: "the command line is wrong",
    3: "an unexpected failure, with a traceback",
    4: "the journal cannot be used: not ours, newer, corrupt, not writable",
    5: "upstream could not be started, or ended by itself",
    6: "calls were left in doubt when the time to wait for answers was over",
    130: "a second signal cut the wait for answers short",
}
_USAGE: Final = 2
_UNEXPECTED: Final = 3
_JOURNAL: Final = 4
_UPSTREAM: Final = 5

_DESCRIPTION: Final = """\
Relays MCP over stdio between an agent and one server, and journals every tools/call: on disk before the server sees
it, its outcome on disk before the agent sees it. After a crash, finished calls are answered from the journal, calls
that differ are refused, and calls that nobody can know about are refused as in doubt.
"""

_EPILOG: Final = """\
examples:
  checkpoint --upstream-cmd "mcp-server-git --repository ." --journal git.db
  checkpoint --journal 'state/{workflow}.db' --workflow-id env:RUN_ID -- npx -y @acme/server --flag
  checkpoint --upstream-cmd ./server --journal j.db --crash-at after_complete@3
  checkpoint demo

exit codes:
""" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in EXIT_CODES.items())


class UsageError(Exception):
    """The command line asks for what cannot be; one line, exit code 2."""


# ---------------------------------------------------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def build_parser() -> argparse.ArgumentParser:
    """The argparse tree of the whole program."""
    parser = _Parser(
        prog="checkpoint",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="checkpoint --upstream-cmd CMD [--journal PATH] [flags]\n"
        "       checkpoint [--journal PATH] [flags] -- CMD [ARG ...]\n"
        "       checkpoint demo",
    )
    parser.set_defaults(run=_cmd_relay)
    _add_relay_options(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="watch a crash and a resumption, with nothing but this program",
        description="Calls tools through the relay, kills it in the middle of a call, starts it again, and compares "
        "what the journal says with what the server really did. Writes to a temporary folder only.",
        allow_abbrev=False,
    )
    demo.set_defaults(run=_cmd_demo)
    return parser


def _add_relay_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("relay flags").add_argument
    add(
        "--upstream-cmd",
        metavar="CMD",
        help="the server to start, split into words like a shell does but run without one; or give it after --",
    )
    add(
        "--journal",
        metavar="PATH",
        help="the journal file, made at the first call; without it the relay only relays. {workflow} in PATH is "
        "replaced by the workflow id",
    )
    add(
        "--workflow-id",
        metavar="ID",
        help="what the calls belong to; env:NAME takes it from the environment (default: the id that the journal was "
        "created with, which is the path as it was typed then)",
    )
    add(
        "--on-divergence",
        metavar="MODE",
        default="strict",
        help="strict: refuse a call that differs from the one on record at its place (default)",
    )
    add(
        "--unpinned",
        metavar="MODE",
        default="new",
        help="new: a call without _meta.checkpoint_seq is a new call (default)",
    )
    add(
        "--trust-annotations",
        action="store_true",
        help="believe the server's hints: tools with readOnlyHint skip the journal",
    )
    add(
        "--redact-args-in-journal",
        action="store_true",
        help="store a stub instead of arguments; calls are still compared by signature",
    )
    add("--name", default="checkpoint", help="server name shown downstream; empty keeps the server's own (%(default)s)")
    add(
        "--version",
        default="0.0.0",
        help="server version shown downstream; empty keeps the server's own (%(default)s). As the only argument: print "
        "this program's version",
    )
    add(
        "--drain-timeout",
        metavar="S",
        type=_seconds,
        default=30.0,
        help="how many seconds to wait for answers once the agent is gone (30)",
    )
    add(
        "--crash-at",
        metavar="POINT[@SEQ]",
        help="SIGKILL this process at a point of a call's life, to test how your agent resumes: before_reserve, "
        "after_reserve, mid_upstream, before_complete, after_complete; of the call at SEQ, else of the first",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what goes to stderr (%(default)s)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # argparse puts it into its message


_NOT_YET: Final = {
    "--on-divergence": {"fork"},
    "--unpinned": {"ordered", "matched", "undelivered"},
    "--call-id-key": None,
    "--call-timeout": None,
    "--restart-upstream": None,
    "--annotate-results": None,
    "journal": None,
    "session": None,
    "report": None,
}


def _split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our own words and, behind the first `--`, the upstream's."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _refuse_what_is_not_here(words: Sequence[str]) -> None:
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--report-") or (name in _NOT_YET and _NOT_YET[name] is None):
            raise UsageError(f"{name}: not in this version")
        if value in (_NOT_YET.get(name) or ()):
            raise UsageError(f"{name} {value}: not in this version")
    for name, value in itertools.pairwise(words):
        if value in (_NOT_YET.get(name) or ()):
            raise UsageError(f"{name} {value}: not in this version")


# -------------------------------------------------------------------------------------------------------------- relay


def _cmd_relay(args: argparse.Namespace) -> int:
    from storage import Files, JournalError

    words = _upstream_words(args)
    _check_modes(args)
    workflow_id = _workflow_id(args)
    crash = _crash_point(args.crash_at)
    files, exists = None, False
    if args.journal is not None:
        try:
            files = Files(_journal_path(args.journal, workflow_id))
            exists = files.exists()
        except JournalError as error:
            return _fail(_JOURNAL, error)
    code, journal_failed = asyncio.run(_relay(args, words, files, exists, workflow_id, crash))
    if journal_failed:
        # A clean exit would close the database: SQLite would write its log back to a disk that has just failed, and
        # delete the log if that disk says yes. What is on disk now is what the next start should find.
        os._exit(code)
    return code


async def _relay(
    args: argparse.Namespace,
    words: Sequence[str],
    files: Any,
    exists: bool,
    workflow_id: str | None,
    crash: tuple[str | None, int | None],
) -> tuple[int, bool]:
    """Relays; gives the exit code and whether the journal failed on the way."""
    from upstream import Upstream, UpstreamError

    try:
        upstream = await Upstream.start(words)
    except UpstreamError as error:
        return _fail(_UPSTREAM, error), False
    # From here on upstream is starting too: what we import now costs nobody time.
    import time

    from journal import Journal
    from refusals import Refusals
    from relay import Settings
    from storage import JournalError
    from supervisor import Supervisor
    from turn import CrashDrill

    _set_up_logging(args.log_level)
    journal = None
    if files is not None:
        journal = Journal(files, exists=exists, workflow_id=workflow_id, now_ms=lambda: time.time_ns() // 1_000_000)
        journal.upstream_pid = upstream.pid
        try:
            journal.probe()
        except JournalError as error:
            upstream.kill()
            await upstream.wait()
            return _fail(_JOURNAL, error), False
    settings = Settings(
        name=args.name,
        version=args.version,
        trusts_annotations=args.trust_annotations,
        redacts_arguments=args.redact_args_in_journal,
    )
    refusals = Refusals(files and files.path, _own_command(), hides_arguments=args.redact_args_in_journal)
    supervisor = Supervisor(
        settings,
        upstream,
        journal,
        refusals,
        drain_timeout_s=args.drain_timeout,
        crash_drill=CrashDrill(*crash),
    )
    code = await supervisor.run()
    if code == _UPSTREAM:
        _say(f"checkpoint: upstream is gone: {' '.join(words)}")
    return code, journal is not None and journal.failure is not None


def _upstream_words(args: argparse.Namespace) -> list[str]:
    import shlex

    if (args.upstream_cmd is None) == (args.upstream is None):
        raise UsageError("name the server once: with --upstream-cmd CMD, or as -- CMD ARG... at the end")
    if args.upstream is not None:
        words = list(args.upstream)
    else:
        try:
            words = shlex.split(args.upstream_cmd)
        except ValueError as error:
            raise UsageError(f"--upstream-cmd: {error}") from error
    if not words or not words[0]:
        raise UsageError("the server's command is empty")
    return words


def _check_modes(args: argparse.Namespace) -> None:
    if args.on_divergence != "strict":
        raise UsageError(f"--on-divergence: strict, not {args.on_divergence!r}")
    if args.unpinned != "new":
        raise UsageError(f"--unpinned: new, not {args.unpinned!r}")
    if args.journal is None:
        needing = {
            "--workflow-id": args.workflow_id is not None,
            "--trust-annotations": args.trust_annotations,
            "--redact-args-in-journal": args.redact_args_in_journal,
            "--crash-at": args.crash_at is not None,
        }
        for flag, is_given in needing.items():
            if is_given:
                raise UsageError(f"{flag} needs --journal")


def _workflow_id(args: argparse.Namespace) -> str | None:
    from places import is_workflow_id

    given = args.workflow_id
    if given is not None and given.startswith("env:"):
        variable = given.removeprefix("env:")
        given = os.environ.get(variable, "")
        if not given:
            raise UsageError(f"--workflow-id: the environment variable {variable} is unset or empty")
    name = given if given is not None else args.journal
    if name is not None and not is_workflow_id(name):
        raise UsageError(
            f"--workflow-id: {name[:80]!r} cannot name a workflow: 1 to 200 characters, no control characters, "
            "no ~ and digits at the end"
        )
    if given is None and args.journal is not None and "{workflow}" in args.journal:
        raise UsageError("--journal: {workflow} needs --workflow-id")
    return str(given) if given is not None else None


def _journal_path(path: str, workflow_id: str | None) -> str:
    from urllib.parse import quote

    # A dot needs no escape by the rules of percent-encoding, but a workflow named .. must stay in its folder.
    return path.replace("{workflow}", quote(workflow_id or "", safe="").replace(".", "%2E"))


def _crash_point(text: str | None) -> tuple[str | None, int | None]:
    if text is None:
        return None, None
    point, at, sequence = text.partition("@")
    points = ("before_reserve", "after_reserve", "mid_upstream", "before_complete", "after_complete")
    if point not in points or (at and not (sequence.isascii() and sequence.isdigit())):
        raise UsageError(f"--crash-at: POINT or POINT@SEQ with a POINT out of {', '.join(points)}, not {text!r}")
    return point, int(sequence) if at else None


def _own_command() -> list[str]:
    """The words that start this program the way this process was started, from any directory."""
    if os.path.basename(sys.argv[0]) == "checkpoint" and os.access(sys.argv[0], os.X_OK):
        return [os.path.abspath(sys.argv[0])]
    return [sys.executable, os.path.dirname(os.path.abspath(__file__))]


# ------------------------------------------------------------------------------------------------------------ the rest


def _cmd_demo(args: argparse.Namespace) -> int:
    from demo import run

    return run(_own_command(), print)


def _set_up_logging(level: str) -> None:
    from streams import nonblocking

    _, send = nonblocking(2)

    class Handler(logging.Handler):
        """Writes to stderr without waiting: a full pipe loses lines, it must not stop the relay."""

        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(OSError):
                send((self.format(record) + "\n").encode("utf-8", "backslashreplace"))

    handler = Handler()
    handler.setFormatter(logging.Formatter("checkpoint: %(levelname)s: %(message)s"))
    logger = logging.getLogger("checkpoint")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, (line + "\n").encode("utf-8", "backslashreplace"))


def _fail(code: int, error: BaseException) -> int:
    _say(f"checkpoint: {error}")
    return code


def _open_standard_descriptors() -> None:
    """Closed ones would be given to the next file that is opened, and protocol or logs would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit code; see EXIT_CODES."""
    if os.name != "posix":
        print("checkpoint: this version runs on Linux and macOS only", file=sys.stderr)
        return 1
    _open_standard_descriptors()
    words, upstream = _split(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"checkpoint {VERSION}")
        return 0
    try:
        _refuse_what_is_not_here(words)
        args = build_parser().parse_args(words)
        args.upstream = upstream
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except UsageError as error:
        _say(f"checkpoint: {error} (see checkpoint --help)")
        return _USAGE
    except KeyboardInterrupt:
        return 130
    except Exception:  # the last one who can say anything
        import traceback

        _say(traceback.format_exc())
        return _UNEXPECTED


if __name__ == "__main__":
    raise SystemExit(main())
