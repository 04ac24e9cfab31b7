"""The program: what each command does, logging, wiring, exit codes.

Imports everything and is imported by nothing. Upstream is started as soon as the command line is understood; what that
does not need is imported afterwards, so that our start hides behind upstream's.
"""

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from arguments import EXIT_CODES, NEED_JOURNAL, HelpWanted, UsageError, build_parser, parse

if TYPE_CHECKING:
    from journal import Journal
    from reporter import Config
    from supervisor import Supervisor
    from turn import CrashDrill
    from upstream import Upstream

__all__ = ["EXIT_CODES", "VERSION", "build_parser", "main"]

VERSION: Final = "0.1.0"

_DONE: Final = 0
_FAILED: Final = 1
_USAGE: Final = 2
_UNEXPECTED: Final = 3
_JOURNAL: Final = 4
_UPSTREAM: Final = 5
_INTERRUPTED: Final = 130

_CALL_ID_KEYS: Final = ("claudecode/toolUseId",)
API_KEY: Final = "CHECKPOINT_API_KEY"


class OutputError(Exception):
    """An answer could not be written to stdout; one line, exit code 1."""


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

    from eventloop import EventLoop

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(_relay(args, words, open_journal, crash_drill, report_to))


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
    for flag in NEED_JOURNAL:
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
    from reporter import DEFAULT_BASE_URL, Config, url_problem

    key = _api_key()
    del os.environ[API_KEY]
    base_url = args.report_base_url or DEFAULT_BASE_URL
    if (problem := url_problem(base_url)) is not None:
        raise UsageError(f"--report-base-url: {problem}")
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
    try:
        code: int = args.act(args, Context(_shown, _say, _own_command()))
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
        code: int = args.act(args, _api_key, _shown)
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
    _shown(text)


def _shown(text: str) -> bool:
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


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "relay": _cmd_relay,
    "demo": _cmd_demo,
    "journal": _cmd_journal,
    "report": _cmd_report,
    "session serve": _cmd_session_serve,
    "session brief": _cmd_session_brief,
    "session save": _cmd_session_save,
    "session doctor": _cmd_session_doctor,
}


def _run(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        _show(f"checkpoint {VERSION}")
        return _DONE
    args = parse(argv)
    return _COMMANDS[args.run](args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit code; see EXIT_CODES."""
    if os.name != "posix":
        print("checkpoint: this version runs on Linux and macOS only", file=sys.stderr)
        return _FAILED
    _open_standard_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what is shown need not fit the terminal's encoding
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except HelpWanted as wanted:
        _show(str(wanted))
        return _DONE
    except UsageError as error:
        _say(f"checkpoint: {error} (see {error.command} --help)")
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
