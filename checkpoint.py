"""The command line: arguments, logging, wiring, exit codes.

Imports everything and is imported by nothing. Upstream is started as soon as the command line is understood; what that
does not need is imported afterwards, so that our start hides behind upstream's.
"""

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from journal import Journal
    from reporter import Config
    from supervisor import Supervisor
    from turn import CrashDrill
    from upstream import Upstream

VERSION: Final = "0.1.0"

EXIT_CODES: Final = {
    0: "done",
    1: "an expected failure, told in one line",
    2: "the command line is wrong",
    3: "an unexpected failure, with a traceback",
    4: "the journal cannot be used: not ours, newer, corrupt, not writable",
    5: "upstream could not be started, or ended by itself",
    6: "calls were left in doubt when the time to wait for answers was over, or journal verify found something",
    130: "a second signal cut the wait for answers short",
}
_DONE: Final = 0
_FAILED: Final = 1
_USAGE: Final = 2
_UNEXPECTED: Final = 3
_JOURNAL: Final = 4
_UPSTREAM: Final = 5
_INTERRUPTED: Final = 130

_SYNOPSIS: Final = """\
checkpoint --upstream-cmd CMD [--journal PATH] [flags]
       checkpoint [--journal PATH] [flags] -- CMD [ARG ...]
       checkpoint COMMAND"""

_DESCRIPTION: Final = """\
Relays MCP over stdio between an agent and one server, and journals every
tools/call: on disk before the server sees it, its outcome on disk before the
agent sees it. After a crash, finished calls are answered from the journal,
calls that differ are refused, and calls that nobody can know about are refused
as in doubt."""

_EPILOG: Final = """\
examples:
  checkpoint --upstream-cmd "mcp-server-git --repository ." --journal git.db
  checkpoint --journal 'state/{workflow}.db' --workflow-id env:RUN_ID -- npx -y @acme/server --flag
  checkpoint --upstream-cmd ./server --journal ci.db --crash-at after_complete@3
  checkpoint demo

exit codes:
""" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in EXIT_CODES.items())

_CALL_ID_KEYS: Final = ("claudecode/toolUseId",)
API_KEY: Final = "CHECKPOINT_API_KEY"


class UsageError(Exception):
    """The command line asks for what cannot be; one line, exit code 2."""


class OutputError(Exception):
    """An answer could not be written to stdout; one line, exit code 1."""


# ---------------------------------------------------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """argparse that neither guesses nor prints, and that never asks how wide the terminal is, which costs 4 ms."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=80),
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: object = None) -> None:
        _show(self.format_help().rstrip())


def build_parser(*, has_commands: bool = True) -> argparse.ArgumentParser:
    """The argparse tree of the whole program; without commands, of the relay alone.

    A relay's command line is read without them: a misspelt flag's value would be taken for a command.
    """
    parser = _Parser(prog="checkpoint", usage=_SYNOPSIS, description=_DESCRIPTION, epilog=_EPILOG)
    parser.set_defaults(run=_cmd_relay)
    if has_commands:
        commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="checkpoint")
        demo = commands.add_parser(
            "demo",
            help="watch a crash and a resumption, with nothing but this program",
            description="Calls tools through the relay, kills it in the middle of a call, starts it\nagain, and "
            "compares what the journal says with what the server really did.\nWrites to a temporary folder only.",
        )
        demo.set_defaults(run=_cmd_demo)
        _add_session_commands(commands)
        import commands as journal_commands
        import reporting

        journal_commands.add_to(commands, _cmd_journal)
        reporting.add_to(commands, _cmd_report)
    _add_relay_options(parser)
    _add_journal_options(parser)
    _add_report_options(parser)
    return parser


def _add_session_commands(commands: Any) -> None:
    session = commands.add_parser(
        "session",
        help="the session server, and what it does on the command line",
        description="An MCP server on stdio that saves where a coding session stands and hands it to the\nnext one. "
        "Without a command of its own: serve.",
    )
    session.set_defaults(run=_cmd_session_serve)
    own = session.add_subparsers(title="commands", metavar="COMMAND", prog="checkpoint session")
    serve = own.add_parser("serve", help="the server (default)", description="Serves MCP on stdin and stdout.")
    serve.set_defaults(run=_cmd_session_serve)
    brief = own.add_parser(
        "brief",
        help="print what the next session reads",
        description="Prints what load_session_checkpoint answers; one line if there is nothing to resume.",
    )
    brief.set_defaults(run=_cmd_session_brief)
    brief.add_argument("--format", choices=("brief", "full"), default="brief", help="how much (%(default)s)")
    brief.add_argument(
        "--hook",
        action="store_true",
        help="for a SessionStart hook: capped, and silent for a checkpoint that git tracks",
    )
    save = own.add_parser(
        "save",
        help="save a checkpoint",
        description="Does what save_session_checkpoint does, with the same JSON as its arguments.",
    )
    save.set_defaults(run=_cmd_session_save)
    save.add_argument("--json", metavar="FILE", required=True, help="the arguments as a JSON object; - for stdin")
    doctor = own.add_parser(
        "doctor",
        help="say what the server would see",
        description="Root and why, the state of checkpoint, backup and git, and what a client gets.",
    )
    doctor.set_defaults(run=_cmd_session_doctor)
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    for command in (brief, save, doctor):
        command.add_argument("--project-root", metavar="DIR", help="the project (default: found from here)")


def _add_relay_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("relay").add_argument
    add(
        "--upstream-cmd",
        metavar="CMD",
        help="the server, split into words as a shell does it, but run without one; or give it after --",
    )
    add("--name", default="checkpoint", help="server name shown to the agent (%(default)s); '' keeps the server's own")
    add(
        "--version",
        default="0.0.0",
        help="server version shown to the agent (%(default)s); '' keeps the server's own. As the only argument: print "
        "the version of this program",
    )
    add(
        "--drain-timeout",
        metavar="S",
        type=_seconds,
        default=30.0,
        help="how many seconds to wait for answers once the agent is gone (30)",
    )
    add(
        "--log-level",
        metavar="LEVEL",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what goes to stderr: debug, info, warning or error (%(default)s)",
    )


def _add_journal_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("journal", "Without --journal lines are only relayed; the others here need it.")
    add = group.add_argument
    add("--journal", metavar="PATH", help="the journal, made at the first call; {workflow} becomes the workflow id")
    add(
        "--workflow-id",
        metavar="ID",
        help="which run the calls belong to; env:NAME takes it from the environment (default: the id that the journal "
        "was made with, which is its path as it was typed then)",
    )
    add(
        "--on-divergence",
        metavar="MODE",
        choices=("strict", "fork"),
        help="what becomes of a call that differs from the one on record at its place: strict refuses it (default), "
        "fork begins a branch with it",
    )
    add(
        "--unpinned",
        metavar="MODE",
        choices=("new", "ordered", "matched", "undelivered"),
        help="which calls without _meta.checkpoint_seq the journal may answer: new, none (default); ordered, the next "
        "row if it is this call; matched, the earliest equal row of an earlier process, each once; undelivered, "
        "likewise if the agent had not read its answer",
    )
    add(
        "--call-id-key",
        metavar="KEY",
        action="append",
        help="a key of _meta in which the host sends its own id of a call, unique for ever; repeatable, '' for none "
        "(claudecode/toolUseId)",
    )
    add(
        "--call-timeout",
        metavar="S",
        type=_seconds,
        help="answer that a call is in doubt after so many seconds; its late answer is still recorded",
    )
    add(
        "--restart-upstream",
        metavar="N",
        type=_count,
        help="start a server that ended by itself again, up to N times (0); nothing that left for it is sent twice",
    )
    add(
        "--annotate-results",
        action="store_true",
        default=None,
        help="add _meta.checkpoint to tool results: workflow_id, sequence, replayed",
    )
    add(
        "--trust-annotations",
        action="store_true",
        default=None,
        help="believe the server: tools with readOnlyHint skip the journal, and one with idempotentHint may run again "
        "at its own place when it is in doubt",
    )
    add(
        "--redact-args-in-journal",
        action="store_true",
        default=None,
        help="store a stub in place of arguments; calls are still compared",
    )
    add(
        "--crash-at",
        metavar="POINT[@SEQ]",
        help="SIGKILL this process at a point of a call's life, to test how your agent resumes: before_reserve, "
        "after_reserve, mid_upstream, before_complete or after_complete; of the call at SEQ, else of the first",
    )


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "report",
        "Registers the server with a KYA-OS Checkpoint endpoint, and reports every call to it. The key is taken from "
        f"the environment variable {API_KEY}, out of which the server does not get it.",
    )
    add = group.add_argument
    add("--report-server-did", metavar="DID", help="the DID of the server; it and the URL switch reporting on")
    add("--report-server-url", metavar="URL", help="where the server is found")
    add("--report-base-url", metavar="URL", help="the endpoint (https://kya.vouched.id)")
    add("--report-display-name", metavar="NAME", help="what the endpoint calls the server")


_NEED_JOURNAL: Final = (
    "--workflow-id",
    "--on-divergence",
    "--unpinned",
    "--call-id-key",
    "--call-timeout",
    "--restart-upstream",
    "--annotate-results",
    "--trust-annotations",
    "--redact-args-in-journal",
    "--crash-at",
)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # argparse puts it into its message


def _joined(argv: Sequence[str]) -> list[str]:
    """The words, but for those of `journal`: there a workflow's name may begin with dashes, as refusals print it."""
    words = list(argv)
    if words[:1] == ["journal"] and "--workflow-id" in words[:-1]:
        at = words.index("--workflow-id")
        words[at : at + 2] = [f"--workflow-id={words[at + 1]}"]
    return words


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


_count.__name__ = "number"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Our own words, and behind the first `--` upstream's, which no parser of ours may touch."""
    words, upstream = _joined(argv), None
    if "--" in words:
        at = words.index("--")
        words, upstream = words[:at], words[at + 1 :]
    names_command = bool(words) and not words[0].startswith("-")
    wants_help = not {"-h", "--help"}.isdisjoint(words)
    args = build_parser(has_commands=names_command or wants_help).parse_args(words)
    args.upstream = upstream
    return args


# -------------------------------------------------------------------------------------------------------------- relay


def _cmd_relay(args: argparse.Namespace) -> int:
    from storage import JournalError

    words = _upstream_words(args)
    _check_needs(args)
    crash_drill = _crash_drill(args.crash_at)
    report_to = _report_to(args)
    try:
        open_journal = _find_journal(args)
    except JournalError as error:
        return _fail(_JOURNAL, error)
    gc.disable()  # what a start makes stays, so looking for garbage is a tenth of it in vain
    _import_asyncio()
    import asyncio

    return asyncio.run(_relay(args, words, open_journal, crash_drill, report_to))


def _import_asyncio() -> None:
    """Imports asyncio without ssl, a seventh of our start: nobody here speaks TLS through it."""
    if "ssl" not in sys.modules:
        sys.modules["ssl"] = None  # type: ignore[assignment]  # the documented way to make an import fail
        import asyncio  # noqa: F401  # for its effect

        del sys.modules["ssl"]


def _leave_at_once(code: int) -> NoReturn:
    """Ends the process without closing the journal, and tells what is being raised, if anything is.

    A clean exit would close the database: SQLite would write its log back to a disk that has just failed, and delete
    the log if that disk says yes. What is on disk now is what the next start should find.
    """
    if sys.exc_info()[0] is not None:
        import traceback

        _say(traceback.format_exc())
    os._exit(code)


async def _relay(
    args: argparse.Namespace,
    words: Sequence[str],
    open_journal: "Callable[[int], Journal] | None",
    crash_drill: "CrashDrill | None",
    report_to: "Config | None",
) -> int:
    from storage import JournalError
    from upstream import Upstream, UpstreamError

    try:
        upstream = await Upstream.start(words)
    except UpstreamError as error:
        return _fail(_UPSTREAM, error)
    try:
        # From here on upstream is starting too: what is imported now costs nobody time.
        journal = open_journal(upstream.pid) if open_journal else None
        supervisor = _supervisor(args, upstream, journal, crash_drill, report_to)
        gc.freeze()
        gc.enable()
        code = _UNEXPECTED
        try:
            code = await supervisor.run()
        finally:
            if journal is not None and journal.failure is not None:
                _leave_at_once(code)
        return code
    except JournalError as error:
        return _fail(_JOURNAL, error)
    finally:
        upstream.kill()
        await upstream.wait()


def _supervisor(
    args: argparse.Namespace,
    upstream: "Upstream",
    journal: "Journal | None",
    crash_drill: "CrashDrill | None",
    report_to: "Config | None",
) -> "Supervisor":
    from locate import Unpinned
    from refusals import Refusals
    from settings import Settings
    from supervisor import Supervisor
    from turn import CrashDrill

    _set_up_logging(args.log_level)
    if journal is not None:
        _warn_if_not_local(journal.path)
    settings = Settings(
        name=args.name,
        version=args.version,
        trusts_annotations=bool(args.trust_annotations),
        redacts_arguments=bool(args.redact_args_in_journal),
        unpinned=Unpinned(args.unpinned or Unpinned.NEW),
        forks=args.on_divergence == "fork",
        call_id_keys=tuple(key for key in args.call_id_key or _CALL_ID_KEYS if key),
        call_timeout_s=args.call_timeout,
        annotates=bool(args.annotate_results),
        restarts_upstream=bool(args.restart_upstream),
    )
    return Supervisor(
        settings,
        upstream,
        journal,
        Refusals(
            os.path.realpath(journal.path) if journal else None,
            _own_command(),
            hides_arguments=settings.redacts_arguments,
        ),
        drain_timeout_s=args.drain_timeout,
        crash_drill=crash_drill or CrashDrill(),
        restarts=args.restart_upstream or 0,
        report_to=report_to,
    )


def _warn_if_not_local(journal_path: str) -> None:
    from storage import kind_if_not_local

    folder = os.path.dirname(os.path.realpath(journal_path))
    kind = kind_if_not_local(folder)
    if kind is not None:
        import logging

        logging.getLogger("checkpoint").warning(
            "the journal is in %s, which is mounted as %s: a file system like that can lose or damage it, and with it "
            "the promise that nothing runs twice; put it on a local disk",
            folder,
            kind,
        )


def _upstream_words(args: argparse.Namespace) -> list[str]:
    import shlex

    if (args.upstream_cmd is None) == (args.upstream is None):
        raise UsageError("name the server once: with --upstream-cmd CMD, or as -- CMD ARG... at the end")
    words: list[str] = args.upstream
    if args.upstream is None:
        try:
            words = shlex.split(args.upstream_cmd)
        except ValueError as error:
            raise UsageError(f"--upstream-cmd: {error}") from error
    if not words or not words[0]:
        raise UsageError("the server's command is empty")
    return words


def _check_needs(args: argparse.Namespace) -> None:
    for flag in _NEED_JOURNAL:
        if args.journal is None and getattr(args, flag.strip("-").replace("-", "_")) is not None:
            raise UsageError(f"{flag} needs --journal")


def _crash_drill(text: str | None) -> "CrashDrill | None":
    if text is None:
        return None
    from turn import CrashDrill

    point, at, sequence = text.partition("@")
    is_sequence = sequence.isascii() and sequence.isdigit() and len(sequence) <= 16 and int(sequence) > 0
    if point not in CrashDrill.POINTS or bool(at) != is_sequence:
        raise UsageError(f"--crash-at: POINT or POINT@SEQ, with POINT out of {', '.join(CrashDrill.POINTS)}: {text!r}")
    return CrashDrill(point, int(sequence) if at else None)


def _report_to(args: argparse.Namespace) -> "Config | None":
    """Where to report to, if anywhere. The key is ours from here on: upstream inherits what is left."""
    did, url = args.report_server_did, args.report_server_url
    given = (did, url, args.report_base_url, args.report_display_name)
    if all(value is None for value in given):
        return None
    if not (did and url):
        raise UsageError("reporting needs both --report-server-did and --report-server-url")
    from reporter import DEFAULT_BASE_URL, Config

    key = _api_key()
    del os.environ[API_KEY]
    base_url = args.report_base_url or DEFAULT_BASE_URL
    if not base_url.startswith(("http://", "https://")):
        raise UsageError(f"--report-base-url: {base_url!r} is no http or https URL")
    return Config(
        api_key=key, server_did=did, server_url=url, display_name=args.report_display_name or None, base_url=base_url
    )


def _api_key() -> str:
    """The key to the endpoint."""
    key = os.environ.get(API_KEY, "").strip()
    if not key:
        raise UsageError(f"reporting needs a key in the environment variable {API_KEY}, which is unset or empty")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"the environment variable {API_KEY} holds a character that no HTTP header can")
    return key


def _find_journal(args: argparse.Namespace) -> "Callable[[int], Journal] | None":
    """Looks at the journal as far as that goes before SQLite is imported; gives what opens it, once upstream runs.

    Raises JournalError for a journal that cannot be used; what is given does so too.
    """
    from storage import Files

    if args.journal is None:
        return None
    workflow_id = _workflow_id(args.workflow_id)
    files = Files(_journal_path(args.journal, workflow_id))
    exists = files.exists()
    if not exists and workflow_id is None:
        _check_workflow_id(args.journal, "the journal's path; give --workflow-id too")

    def open_journal(upstream_pid: int) -> "Journal":
        import time

        from journal import Journal

        journal = Journal(files, exists=exists, workflow_id=workflow_id, now_ms=lambda: time.time_ns() // 1_000_000)
        journal.upstream_pid = upstream_pid
        journal.probe()
        return journal

    return open_journal


def _workflow_id(given: str | None) -> str | None:
    if given is None:
        return None
    source = "--workflow-id"
    if given.startswith("env:"):
        variable = given.removeprefix("env:")
        source = f"--workflow-id: the environment variable {variable!r}"
        given = os.environ.get(variable, "")
        if not given:
            raise UsageError(f"{source} is unset or empty")
    from branches import root_of

    _check_workflow_id(root_of(given), source)  # it may name a branch; whether there is one, the journal knows
    return given


def _check_workflow_id(text: str, source: str) -> None:
    from places import is_workflow_id

    if not is_workflow_id(text):
        raise UsageError(
            f"{text[:80]!r} cannot name a workflow ({source}): 1 to 200 characters, no control characters, no ~ and "
            "digits at the end"
        )


def _journal_path(path: str, workflow_id: str | None) -> str:
    if not path:
        raise UsageError("--journal: the path is empty")
    if "{workflow}" not in path:
        return path
    if workflow_id is None:
        raise UsageError("--journal: {workflow} needs --workflow-id")
    from urllib.parse import quote

    from branches import root_of

    name = quote(root_of(workflow_id), safe="")  # the branches of a workflow share its file
    # A dot needs no escape by the rules of percent-encoding, but a workflow named .. must stay in its folder.
    return path.replace("{workflow}", name if name.strip(".") else name.replace(".", "%2E"))


def _own_command() -> list[str]:
    """The words that start this program the way this process was started, from any directory."""
    script = os.path.abspath(sys.argv[0])
    if os.path.basename(script) == "checkpoint" and os.path.isfile(script) and os.access(script, os.X_OK):
        return [script]
    return [sys.executable, os.path.dirname(os.path.abspath(__file__))]


def _set_up_logging(level: str) -> None:
    import logging

    from streams import nonblocking

    _, send = nonblocking(2)

    class Handler(logging.Handler):
        """Writes to stderr without waiting: a full pipe loses lines, it must not stop the relay."""

        def emit(self, record: logging.LogRecord) -> None:
            try:
                send((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
            except OSError:
                pass

    handler = Handler()
    handler.setFormatter(logging.Formatter("checkpoint: %(levelname)s: %(message)s"))
    logger = logging.getLogger("checkpoint")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


# ------------------------------------------------------------------------------------------------------------ the rest


def _cmd_demo(args: argparse.Namespace) -> int:
    if args.upstream is not None:
        raise UsageError("demo brings its own server")
    from demo import DemoError, run

    try:
        return run(_own_command(), _show)
    except DemoError as error:
        return _fail(_FAILED, error)


def _cmd_session_serve(args: argparse.Namespace) -> int:
    from session import main as serve

    _refuse_upstream(args)
    return serve()


def _cmd_session_brief(args: argparse.Namespace) -> int:
    from session import brief

    return _answer(args, lambda: brief(args.project_root, is_full=args.format == "full", is_hook=args.hook, say=_say))


def _cmd_session_save(args: argparse.Namespace) -> int:
    from session import save

    return _answer(args, lambda: save(args.json, args.project_root))


def _cmd_session_doctor(args: argparse.Namespace) -> int:
    from session import doctor

    return _answer(args, lambda: doctor(args.project_root, as_json=args.json))


def _answer(args: argparse.Namespace, ask: Callable[[], str]) -> int:
    """Prints what a session command answers, if it answers anything."""
    from session import SessionError

    _refuse_upstream(args)
    try:
        text = ask()
    except SessionError as error:
        return _fail(_FAILED, error)
    if text:
        _show(text)
    return _DONE


def _cmd_journal(args: argparse.Namespace) -> int:
    from commands import ArgumentsError, Context
    from console import ConsoleError
    from reader import Busy
    from storage import JournalError

    if args.upstream is not None:
        raise UsageError("journal starts no server; nothing may follow --")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what is on record need not fit the terminal's encoding
    try:
        code: int = args.act(args, Context(_is_read, _say, _own_command()))
    except ArgumentsError as error:
        raise UsageError(str(error)) from error
    except JournalError as error:
        return _fail(_JOURNAL, error)
    except (ConsoleError, Busy) as error:
        return _fail(_FAILED, error)
    return code


def _cmd_report(args: argparse.Namespace) -> int:
    from queues import QueueError
    from reader import Busy
    from storage import JournalError

    if args.upstream is not None:
        raise UsageError("report starts no server; nothing may follow --")
    try:
        code: int = args.act(args, _api_key, _is_read)
    except (JournalError, QueueError) as error:
        return _fail(_JOURNAL, error)
    except Busy as error:
        return _fail(_FAILED, error)
    return code


def _refuse_upstream(args: argparse.Namespace) -> None:
    if args.upstream is not None:
        raise UsageError(f"session takes nothing behind --: {' '.join(args.upstream)}")


def _show(text: str) -> None:
    """Prints an answer. Whoever reads no further (`| head`) has read enough, which is no failure."""
    _is_read(text)


def _is_read(text: str) -> bool:
    """Prints an answer; whether anybody still reads. Raises OutputError where it cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still in the buffer has to go somewhere
        if isinstance(error, BrokenPipeError):
            return False
        raise OutputError(f"stdout: {error.strerror}; the output is not whole, but what was done is done") from error
    return True


def _say(text: str) -> None:
    """Writes a message to stderr, unless that would have to be waited for."""
    import select

    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, (text + "\n").encode("utf-8", "backslashreplace"))


def _fail(code: int, error: BaseException) -> int:
    _say(f"checkpoint: {error}")
    return code


def _open_standard_descriptors() -> None:
    """Closed ones would be given to the next file that is opened, and protocol or logs would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one


def _run(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        _show(f"checkpoint {VERSION}")
        return _DONE
    args = _parse(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit code; see EXIT_CODES."""
    if os.name != "posix":
        print("checkpoint: this version runs on Linux and macOS only", file=sys.stderr)
        return _FAILED
    _open_standard_descriptors()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except SystemExit:  # argparse, once it has shown its help
        return _DONE
    except UsageError as error:
        _say(f"checkpoint: {error} (see checkpoint --help)")
        return _USAGE
    except OutputError as error:
        return _fail(_FAILED, error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception:  # the last one who can say anything
        import traceback

        _say(traceback.format_exc())
        return _UNEXPECTED


if __name__ == "__main__":
    raise SystemExit(main())
