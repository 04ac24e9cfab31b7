"""What may stand on the command line: the argparse tree, its help, its types. Knows nothing of what is done then."""

import argparse
from collections.abc import Sequence
from typing import Any, Final, NoReturn

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
  checkpoint journal list git.db --status IN_DOUBT
  checkpoint report flush git.db
  checkpoint session doctor
  checkpoint demo

exit codes:
""" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in EXIT_CODES.items())


class UsageError(Exception):
    """The command line asks for what cannot be; one line, exit code 2. `command` is whose help says more."""

    def __init__(self, message: str, command: str = "checkpoint") -> None:
        super().__init__(message)
        self.command = command


class HelpWanted(Exception):
    """The command line asks for help, which is the message."""


class _Parser(argparse.ArgumentParser):
    """argparse that neither guesses nor prints, and that never asks how wide the terminal is, which costs 4 ms."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=80),
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.prog)

    def print_help(self, file: object = None) -> None:
        raise HelpWanted(self.format_help().rstrip())


def build_parser(*, has_commands: bool = True) -> argparse.ArgumentParser:
    """The argparse tree of the whole program; without commands, of the relay alone.

    A relay's command line is read without them: a misspelt flag's value would be taken for a command.
    """
    parser = _Parser(prog="checkpoint", usage=_SYNOPSIS, description=_DESCRIPTION, epilog=_EPILOG)
    parser.set_defaults(run="relay")
    if has_commands:
        commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="checkpoint")
        demo = commands.add_parser(
            "demo",
            help="watch a crash and a resumption, with nothing but this program",
            description="Charges five cards through the relay, kills everything in the middle of the\nfourth, starts "
            "again, and counts in the server's own ledger what happened twice.\nWrites to a temporary folder only.",
        )
        demo.set_defaults(run="demo")
        _add_session_commands(commands)
        import commands as journal_commands
        import reporting

        journal_commands.add_to(commands, "journal")
        reporting.add_to(commands, "report")
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
    session.set_defaults(run="session serve")
    own = session.add_subparsers(title="commands", metavar="COMMAND", prog="checkpoint session")
    serve = own.add_parser("serve", help="the server (default)", description="Serves MCP on stdin and stdout.")
    serve.set_defaults(run="session serve")
    brief = own.add_parser(
        "brief",
        help="print what the next session reads",
        description="Prints what load_session_checkpoint answers; one line if there is nothing to resume.",
    )
    brief.set_defaults(run="session brief")
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
    save.set_defaults(run="session save")
    save.add_argument("--json", metavar="FILE", required=True, help="the arguments as a JSON object; - for stdin")
    doctor = own.add_parser(
        "doctor",
        help="say what the server would see",
        description="Root and why, the state of checkpoint, backup and git, and what a client gets.",
    )
    doctor.set_defaults(run="session doctor")
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
        help="a key of _meta in which the host sends its own id of a call, 1 to 200 characters, unique for ever; "
        "repeatable, '' for none "
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
        help="believe the server: tools with readOnlyHint skip the journal, and one with that or idempotentHint may "
        "run again at its own place when it is in doubt",
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
        "Registers the server with a KYA-OS Checkpoint endpoint, and reports every call to\nit. The key is taken from "
        "the environment variable CHECKPOINT_API_KEY, out of which\nthe server does not get it.",
    )
    add = group.add_argument
    add("--report-server-did", metavar="DID", help="the DID of the server; it and the URL switch reporting on")
    add("--report-server-url", metavar="URL", help="where the server is found")
    add("--report-base-url", metavar="URL", help="the endpoint (https://kya.vouched.id)")
    add("--report-display-name", metavar="NAME", help="what the endpoint calls the server")


NEED_JOURNAL: Final = (
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


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


_count.__name__ = "number"


def _joined(argv: Sequence[str]) -> list[str]:
    """The words, but for those of `journal`: there a workflow's name may begin with dashes, as refusals print it."""
    words = list(argv)
    if words[:1] == ["journal"] and "--workflow-id" in words[:-1]:
        at = words.index("--workflow-id")
        words[at : at + 2] = [f"--workflow-id={words[at + 1]}"]
    return words


def parse(argv: Sequence[str]) -> argparse.Namespace:
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
