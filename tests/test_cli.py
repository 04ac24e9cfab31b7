"""The command line: flags, usage errors, exit codes, help, and what upstream gets of ours."""

import contextlib
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import ROOT, Client, call_line, is_running, ledger_lines, relay_words, rows, until, upstream_words

import arguments
import checkpoint
from checkpoint import EXIT_CODES, VERSION, build_parser, main

SERVER = ("--", "server")
JOURNAL = ("--journal", "j.db")

# Answers each tools/call with what it was started with.
MIRROR = """\
import json, os, sys

for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "tools/call":
        seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "environ": dict(os.environ)}
        result = {"content": [], "structuredContent": seen}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


def relay(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    lines: bytes = call_line("look", request_id=1),
) -> "subprocess.CompletedProcess[bytes]":
    """Runs a relay on one call, to its end."""
    words = [sys.executable, str(ROOT), *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, env=env, input=lines, capture_output=True, timeout=60, check=False)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    path = tmp_path / "mirror.py"
    path.write_text(MIRROR, encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------- usage errors


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "name the server once"),
        (["--journal", "j.db"], "name the server once"),
        (["--upstream-cmd", "server", *SERVER], "name the server once"),
        (["--"], "command is empty"),
        (["--", ""], "command is empty"),
        (["--upstream-cmd", ""], "command is empty"),
        (["--upstream-cmd", "  "], "command is empty"),
        (["--upstream-cmd", "'' x"], "command is empty"),
        (["--upstream-cmd", "server 'x"], "--upstream-cmd: No closing quotation"),
        (["--upstream-cmd"], "--upstream-cmd: expected one argument"),
        (["--jornal", "j.db", *SERVER], "--jornal"),
        (["--journ", "j.db", *SERVER], "--journ"),
        (["--journal", "j.db", "npx", "-y", "server"], "npx"),
        (["npx", "-y", "server"], "npx"),
        ([*JOURNAL, "demo"], "demo"),
        (["demo", "--journal", "j.db"], "--journal"),
        (["demo", *SERVER], "demo"),
        (["--journal", "", *SERVER], "--journal: the path is empty"),
        (["--journal", "{workflow}.db", *SERVER], "{workflow} needs --workflow-id"),
        ([*JOURNAL, "--workflow-id", "", *SERVER], "--workflow-id"),
        ([*JOURNAL, "--workflow-id", "a\nb", *SERVER], "--workflow-id"),
        ([*JOURNAL, "--workflow-id", "run~2~1", *SERVER], "--workflow-id"),
        ([*JOURNAL, "--workflow-id", "x" * 201, *SERVER], "--workflow-id"),
        ([*JOURNAL, "--workflow-id", "env:", *SERVER], "''"),
        ([*JOURNAL, "--workflow-id", "env:CHECKPOINT_TEST_UNSET", *SERVER], "CHECKPOINT_TEST_UNSET"),
        ([*JOURNAL, "--workflow-id", "env:CHECKPOINT_TEST_EMPTY", *SERVER], "CHECKPOINT_TEST_EMPTY"),
        (["--journal", "j" * 201, *SERVER], "give --workflow-id"),
        ([*JOURNAL, "--on-divergence", "loose", *SERVER], "--on-divergence"),
        ([*JOURNAL, "--unpinned", "old", *SERVER], "--unpinned"),
        ([*JOURNAL, "--trust-annotations=yes", *SERVER], "--trust-annotations"),
        (["--drain-timeout", "soon", *SERVER], "--drain-timeout"),
        (["--drain-timeout", "-1", *SERVER], "--drain-timeout"),
        (["--drain-timeout", "nan", *SERVER], "--drain-timeout"),
        (["--drain-timeout", "inf", *SERVER], "--drain-timeout"),
        ([*JOURNAL, "--call-timeout", "soon", *SERVER], "--call-timeout"),
        ([*JOURNAL, "--restart-upstream", "-1", *SERVER], "--restart-upstream"),
        ([*JOURNAL, "--restart-upstream", "1.5", *SERVER], "--restart-upstream"),
        (["--log-level", "loud", *SERVER], "--log-level"),
        (["--version", *SERVER], "--version: expected one argument"),
        ([*JOURNAL, "--crash-at", "lunch", *SERVER], "--crash-at"),
        ([*JOURNAL, "--crash-at", "after_reserve@", *SERVER], "--crash-at"),
        ([*JOURNAL, "--crash-at", "after_reserve@0", *SERVER], "--crash-at"),
        ([*JOURNAL, "--crash-at", "after_reserve@-1", *SERVER], "--crash-at"),
        ([*JOURNAL, "--crash-at", "after_reserve@x", *SERVER], "--crash-at"),
        ([*JOURNAL, "--crash-at", "after_reserve@٣", *SERVER], "--crash-at"),
        ([*JOURNAL, "--crash-at", "@3", *SERVER], "--crash-at"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_told_in_one_line(
    argv: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKPOINT_TEST_EMPTY", "")
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("checkpoint: ")
    assert err.endswith(" (see checkpoint --help)\n")
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_not_taken_for_a_command(tmp_path: Path) -> None:
    argv = ["--name", "session", "--journal", "journal", "--workflow-id", "report", "--", "/nonexistent/server"]
    ended = relay(argv, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (5, b"")


@pytest.mark.parametrize(
    "argv",
    [
        ["--workflow-id", "run"],
        ["--on-divergence", "strict"],
        ["--unpinned", "new"],
        ["--trust-annotations"],
        ["--redact-args-in-journal"],
        ["--crash-at", "after_reserve"],
        ["--call-id-key", ""],
        ["--call-timeout", "5"],
        ["--restart-upstream", "0"],
        ["--annotate-results"],
    ],
    ids=" ".join,
)
def test_what_is_about_the_journal_needs_one(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, *SERVER]) == 2
    assert f"{argv[0]} needs --journal" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------- help and exit codes


def test_the_help_names_every_flag_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for action in build_parser()._actions:
        for option in action.option_strings:
            assert option in text
    assert "demo" in text
    for code, meaning in EXIT_CODES.items():
        assert f"  {code:<4} {meaning}" in text


def test_the_help_is_the_same_wherever_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main(["--journal", "j.db", "-h", "--", "server", "--help"]) == 0
    assert capsys.readouterr().out == text
    assert main(["demo", "--help"]) == 0
    assert "temporary folder" in capsys.readouterr().out


def test_the_examples_of_the_help_are_right() -> None:
    lines = [line for line in (build_parser().epilog or "").splitlines() if line.startswith("  checkpoint ")]
    assert len(lines) >= 3
    for line in lines:
        args = arguments.parse(shlex.split(line)[1:])
        assert args.run != "relay" or checkpoint._upstream_words(args)


def test_exit_codes_are_those_of_the_contract() -> None:
    assert list(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 6, 130]


@pytest.mark.parametrize("argv", ["--help", "demo --help", "--version"])
def test_a_reader_that_has_read_enough_is_no_failure(argv: str) -> None:
    # `true` has usually ended before anything is written, and has read nothing in any case.
    script = f'{{ "$0" "$1" {argv}; echo $? >&2; }} | true'
    ended = subprocess.run(["sh", "-c", script, sys.executable, ROOT], capture_output=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == (b"", b"0\n")


def test_the_version_alone_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"checkpoint {VERSION}\n"
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == VERSION


def test_what_nobody_foresaw_is_told_with_a_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: Sequence[str]) -> int:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(checkpoint, "parse", fail)
    assert main(["demo"]) == 3
    assert "ZeroDivisionError: unforeseen" in capfd.readouterr().err


def test_a_demonstration_that_cannot_go_on_is_told_in_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import demo

    def fail(*_: object) -> int:
        raise demo.DemoError("no")

    monkeypatch.setattr(demo, "run", fail)
    assert main(["demo"]) == 1
    assert capfd.readouterr().err == "checkpoint: no\n"


def test_an_upstream_that_cannot_be_started_is_told_in_one_line(tmp_path: Path) -> None:
    ended = relay(["--journal", "j.db", "--upstream-cmd", "./nowhere --flag"], cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (5, b"")
    assert b"./nowhere" in ended.stderr
    assert ended.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_upstream_that_ends_by_itself_is_exit_code_5(tmp_path: Path) -> None:
    # Its exit counts, not ours: downstream is still there.
    with Client(relay_words(upstream=["sh", "-c", "exit 7"])) as client:
        assert client.wait() == 5
        assert "exit status 7" in client.stderr_text()


def test_a_journal_that_is_not_ours_is_exit_code_4_and_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("dear diary\n" * 20, encoding="utf-8")
    canary = tmp_path / "started"
    ended = relay(["--journal", notes, "--", "touch", canary])
    assert (ended.returncode, ended.stdout) == (4, b"")
    assert b"notes.txt" in ended.stderr
    assert ended.stderr.count(b"\n") == 1
    assert notes.read_text("utf-8") == "dear diary\n" * 20
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --------------------------------------------------------------------------------------------------- what upstream gets


@pytest.mark.parametrize("is_quoted", [True, False])
def test_every_word_of_upstreams_reaches_it_untouched(is_quoted: bool, mirror: Path, tmp_path: Path) -> None:
    # https://github.com/punkpeye/mcp-proxy/issues/22
    words = ["--", "-y", "--journal", "x", "--help", "two words", "", "$HOME", "*", "é"]
    if is_quoted:
        quoted = f"'{sys.executable}' mirror.py -- -y --journal x --help 'two words' \"\" '$HOME' * \\é"
        argv = ["--journal", "j.db", "--upstream-cmd", quoted]
    else:
        argv = ["--journal", "j.db", "--", sys.executable, "mirror.py", *words]
    ended = relay(argv, cwd=tmp_path)
    assert json.loads(ended.stdout)["result"]["structuredContent"]["argv"] == words
    assert ended.returncode == 0
    assert (tmp_path / "j.db").exists()
    assert not (tmp_path / "x").exists()


def test_upstream_runs_in_our_directory_and_environment(mirror: Path, tmp_path: Path) -> None:
    # https://github.com/mcp-router/mcp-router/issues/210
    # https://github.com/modelcontextprotocol/typescript-sdk/issues/216
    folder = tmp_path / "sp ace é"
    folder.mkdir()
    env = {**os.environ, "DEMO_TOKEN": "abc", "LANG": "C.UTF-8", "PYTHONSAFEPATH": "1"}
    ended = relay(["--journal", "j.db", "--", sys.executable, mirror], cwd=folder, env=env)
    seen = json.loads(ended.stdout)["result"]["structuredContent"]
    assert seen["cwd"] == str(folder)
    assert {key: value for key, value in seen["environ"].items() if key != "LC_CTYPE"} == {
        key: value for key, value in env.items() if key != "LC_CTYPE"
    }
    assert (folder / "j.db").exists()


# ----------------------------------------------------------------------------------------------------- names and places


@pytest.mark.parametrize(
    ("workflow_id", "name"),
    [
        ("run 1/é", "run%201%2F%C3%A9"),
        ("v1.2~x", "v1.2~x"),
        ("../../etc", "..%2F..%2Fetc"),
        ("..", "%2E%2E"),
        ("%2E", "%252E"),
        ("{workflow}", "%7Bworkflow%7D"),
    ],
)
def test_the_workflow_id_in_the_path_is_percent_encoded(workflow_id: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    template = tmp_path / "{workflow}" / "{workflow}.db"
    env = {**os.environ, "RUN_ID": workflow_id}
    upstream = upstream_words(tmp_path / "ledger")
    lines = call_line("append", {"n": 1}, request_id=1)
    ended = relay(["--journal", template, "--workflow-id", "env:RUN_ID", "--", *upstream], env=env, lines=lines)
    assert ended.returncode == 0, ended.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / name / f"{name}.db")) as database:
        assert database.execute("SELECT workflow_id FROM calls").fetchall() == [(workflow_id,)]


def test_a_moved_journal_keeps_its_name_whatever_its_new_path(tmp_path: Path) -> None:
    upstream = upstream_words(tmp_path / "ledger")
    line = call_line("append", {"n": 1}, request_id=1, seq=1)
    first = relay(["--journal", "j.db", "--", *upstream], cwd=tmp_path, lines=line)
    far = tmp_path / ("f" * 150) / ("g" * 150)
    far.mkdir(parents=True)
    (tmp_path / "j.db").rename(far / "run~1")
    again = relay(["--journal", far / "run~1", "--", *upstream], lines=line)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert ledger_lines(tmp_path / "ledger") == ['append {"n": 1}']
    assert [row["workflow_id"] for row in rows(far / "run~1")] == ["j.db"]


# --------------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("closed", ["2>&-", "<&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_descriptor_is_not_mistaken_for_another_file(closed: str, mirror: Path, tmp_path: Path) -> None:
    # Upstream writes to its own stderr; a journal that had got descriptor 2 would hold that.
    noisy = f"import sys; sys.stderr.write('noise' * 999); exec(open({str(mirror)!r}).read())"
    script = f'"$0" "$@" {closed}'
    words = [sys.executable, str(ROOT), "--journal", "j.db", "--", sys.executable, "-c", noisy]
    ended = subprocess.run(
        ["sh", "-c", script, *words],
        cwd=tmp_path,
        input=call_line("look", request_id=1),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr
    has_called = "<&-" not in closed
    assert (tmp_path / "j.db").exists() == has_called
    assert bool(ended.stdout) == (has_called and ">&-" not in closed.replace("2>&-", ""))
    if has_called:
        assert b"noise" not in (tmp_path / "j.db").read_bytes()
        assert [row["status"] for row in rows(tmp_path / "j.db")] == ["COMPLETED"]


@pytest.mark.parametrize(("level", "is_told"), [("info", True), ("warning", True), ("error", False)])
def test_the_log_level_decides_what_goes_to_stderr(level: str, is_told: bool, mirror: Path, tmp_path: Path) -> None:
    argv = ["--log-level", level, "--journal", str(tmp_path / "j.db"), "--", sys.executable, str(mirror)]
    ended = relay(argv, lines=b"not json\n")
    assert ended.returncode == 0
    assert (b"checkpoint: WARNING: " in ended.stderr) == is_told


# --------------------------------------------------------------------------------------------------------------- start


def test_a_signal_at_the_start_leaves_nothing_of_upstream_behind(tmp_path: Path) -> None:
    # Upstream is there within a millisecond, our own imports take many: the signal comes before anybody listens.
    pid_file = tmp_path / "pid"
    upstream = ["sh", "-c", f"echo $$ > '{pid_file}'; exec sleep 600"]
    with Client(relay_words("--journal", tmp_path / "j.db", upstream=upstream)) as client:
        until(lambda: pid_file.exists() and pid_file.read_text("utf-8").endswith("\n"), "upstream runs")
        client.signal(signal.SIGTERM)
        assert client.wait() == 0
        assert not is_running(int(pid_file.read_text("utf-8")))


def test_a_start_imports_nothing_that_it_does_not_need(mirror: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    upstream = ["env", "-u", "PYTHONPROFILEIMPORTTIME", sys.executable, str(mirror)]
    ended = relay(["--journal", str(tmp_path / "j.db"), "--", *upstream], env=env)
    imported = {line.rpartition(b"|")[2].strip().decode() for line in ended.stderr.splitlines()}
    assert {"asyncio", "sqlite3", "relay", "supervisor"} <= imported
    heavy = {"anyio", "email", "http", "importlib.metadata", "jsonschema", "multiprocessing", "pathlib", "shutil"}
    assert not imported & (heavy | {"_ssl", "tempfile", "urllib.request", "demo"})


def test_session_commands_answer_from_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "save.json").write_text('{"goal": "ship it"}', "utf-8")
    assert main(["session", "brief"]) == 0
    assert capfd.readouterr().out.startswith("Nothing to resume")
    assert main(["session", "save", "--json", "save.json"]) == 0
    assert f"Checkpoint saved to {tmp_path}/.claude-checkpoint" in capfd.readouterr().out
    assert main(["session", "brief", "--project-root", str(tmp_path)]) == 0
    assert "## Goal\nship it" in capfd.readouterr().out
    assert main(["session", "doctor", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["root"]


def test_a_session_command_that_fails_says_so_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["session", "save", "--json", "missing.json"]) == 1
    assert capfd.readouterr().err == "checkpoint: missing.json: No such file or directory\n"
    assert main(["session", "save"]) == 2
    assert "--json" in capfd.readouterr().err


def test_a_message_is_dropped_rather_than_waited_for(tmp_path: Path) -> None:
    unread, full = os.pipe()
    try:
        os.set_blocking(full, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(full, b"x" * 4096)
        os.set_blocking(full, True)
        for argv, code in (
            (["--nonsense"], 2),
            (["--", "/missing/server"], 5),
            (["--journal", "/no/j.db", *SERVER], 4),
        ):
            assert subprocess.run([sys.executable, ROOT, *argv], stderr=full, timeout=30).returncode == code
    finally:
        os.close(unread)
        os.close(full)


def test_a_branch_is_named_where_it_is_there(tmp_path: Path) -> None:
    """A new id may not look like a branch's; an old one is followed, in the file of its workflow."""
    ledger = tmp_path / "ledger"
    words = ["--journal", str(tmp_path / "{workflow}.db"), "--on-divergence", "fork", "--workflow-id"]
    with Client(relay_words(*words, "run", upstream=upstream_words(ledger))) as client:
        for n in (1, 2):
            client.call("append", {"n": n}, seq=n)
    with Client(relay_words(*words, "run~1", upstream=upstream_words(ledger))) as client:
        assert client.wait(10) == 4
    with Client(relay_words(*words, "run", upstream=upstream_words(ledger))) as client:
        client.call("append", {"n": 3}, seq=2)
    with Client(relay_words(*words, "run~1", upstream=upstream_words(ledger))) as client:
        client.call("append", {"n": 3}, seq=2)
    assert [path.name for path in tmp_path.glob("*.db")] == ["run.db"]
    assert len(ledger_lines(ledger)) == 3
