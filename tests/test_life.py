"""How a relay process starts, lives beside its peers, and ends: exit codes, signals, pipes, children.

A client closes our stdin, sends SIGTERM two seconds later and SIGKILL two seconds after that: the limits here.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from storage_helpers import powerless
from support import (
    ROOT,
    TESTS,
    Client,
    body_of,
    call_line,
    children_of,
    cpu_seconds,
    group_of,
    is_running,
    ledger_lines,
    line_of,
    peak_memory_bytes,
    process_state,
    refusal_of,
    relay,
    relay_words,
    rows,
    text_of,
    until,
    upstream_words,
    watches_stdin,
)

from storage import kind_if_not_local

# What a client gives us after it closed our stdin and before it kills us; the machine may be busy, so tests that count
# time count it against the kill.
CLIENT_PATIENCE_S: Final = 4.0


def go(ledger: Path) -> None:
    """Lets the calls of the tool `slow` answer."""
    Path(f"{ledger}.go").touch()


def statuses(journal: Path) -> list[str]:
    return [row["status"] for row in rows(journal)]


# ---------------------------------------------------------------------------------------------------------- exit codes


def test_the_end_of_an_idle_session_is_exit_0_and_quick(journal: Path, ledger: Path) -> None:
    """SH-06: upstream is reaped by us, and not left to a process 1 that may reap nobody."""
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        begun = time.monotonic()
        assert client.finish() == 0
        assert time.monotonic() - begun < CLIENT_PATIENCE_S / 2
        assert process_state(upstream) == ""


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--upstream-cmd", ""],
        ["--upstream-cmd", "   "],
        ["--"],
        ["--", ""],
        ["--upstream-cmd", "cat", "--", "cat"],
        ["--upstream-cmd", "'unfinished"],
        ["--nonsense", "--", "cat"],
        ["--crash-at", "lunch", "--journal", "j.db", "--", "cat"],
        ["--drain-timeout", "soon", "--", "cat"],
    ],
)
def test_a_wrong_command_line_is_exit_2_in_one_line(words: list[str], tmp_path: Path) -> None:
    """EN-03: among them an empty upstream command."""
    with Client([sys.executable, ROOT, *words], cwd=tmp_path) as client:
        assert client.wait() == 2
        assert len(client.stderr_text().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_ours_is_exit_3_and_leaves_nothing_behind(journal: Path, ledger: Path) -> None:
    """A callback that raises has not done its work, so nothing goes on as if it had."""
    broken = (
        "import sys, runpy; sys.path.insert(0, sys.argv[1]); import relay\n"
        "def broken(self, lines): raise ZeroDivisionError('a bug of ours')\n"
        "relay.Relay.from_downstream = broken; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = relay_words("--journal", journal, upstream=upstream_words(ledger, "deaf"))
    with Client([sys.executable, "-c", broken, *words[1:]]) as client:
        upstream = client.upstream_pid()
        client.request("ping")
        assert client.wait() == 3
        assert "a bug of ours" in client.stderr_text()
        until(lambda: not is_running(upstream), "upstream is gone")


@pytest.mark.parametrize("kind", ["text", "foreign", "zeros", "damaged", "folder", "no parent"])
def test_a_journal_that_is_not_ours_is_exit_4_and_stays_as_it_is(ledger: Path, tmp_path: Path, kind: str) -> None:
    """JF-01, JF-09: one line that names the file; upstream is told nothing."""
    path = tmp_path / "j.db"
    if kind == "text":
        path.write_bytes(b"A" * 4096)
    elif kind == "foreign":
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE meta (k, v)")
    elif kind == "zeros":
        path.write_bytes(bytes(8192))
    elif kind == "damaged":
        with relay(path, ledger) as client:
            client.call("append")
            assert client.finish() == 0
        content = bytearray(path.read_bytes())
        content[4096:] = bytes(len(content) - 4096)
        path.write_bytes(content)
    elif kind == "folder":
        path.mkdir()
    else:
        path = tmp_path / "nowhere" / "j.db"
    before = path.read_bytes() if path.is_file() else None
    effects = ledger_lines(ledger)
    with relay(path, ledger, handshake=False) as client:
        with contextlib.suppress(BrokenPipeError):  # it may be gone by now
            client.send(call_line("append", request_id=1))
        assert client.wait() == 4
        said = client.stderr_text()
        assert str(path) in said
        assert len(said.splitlines()) == 1
        assert client.lines() == []
    assert (path.read_bytes() if path.is_file() else None) == before
    assert ledger_lines(ledger) == effects


@pytest.mark.parametrize("kept", ["journal", "folder"])
def test_a_journal_that_cannot_be_written_is_exit_4_before_upstream_hears_anything(
    journal: Path, ledger: Path, tmp_path: Path, kept: str
) -> None:
    """JF-04: it is not mistaken for a new one, and nothing is relayed without a record."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        assert client.finish() == 0
    before = journal.read_bytes()
    place, mode = (journal, 0o444) if kept == "journal" else (tmp_path, 0o555)
    place.chmod(mode)
    words = relay_words("--journal", journal, upstream=upstream_words(ledger, "hear"))
    try:
        with Client([*powerless(), *words]) as client:
            assert client.wait() == 4
            assert f"{place} is not writable" in client.stderr_text()
            assert len(client.stderr_text().splitlines()) == 1
            assert client.lines() == []
    finally:
        place.chmod(0o755)
    assert journal.read_bytes() == before
    assert not Path(f"{ledger}.heard").exists()


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A folder that is another one, seen through FUSE."""
    (tmp_path / "behind").mkdir()
    (tmp_path / "fuse").mkdir()
    words = ["bindfs", str(tmp_path / "behind"), str(tmp_path / "fuse")]
    if shutil.which("bindfs") is None or subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("bindfs is not installed or may not mount: a journal behind FUSE was not tried")
    yield tmp_path / "fuse"
    unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount", "-u", "-z"]
    subprocess.run([*unmount, tmp_path / "fuse"], check=True)


def test_a_journal_behind_fuse_is_warned_of_and_whole_after_a_kill(fuse: Path, ledger: Path) -> None:
    """JF-10: whether such a file system keeps what it was told to sync is not ours to know."""
    journal = fuse / "j.db"
    with relay(journal, ledger) as client:
        assert f"{fuse}, which is mounted as fuse" in client.stderr_text()
        for n in range(1, 101):
            client.call("append", {"n": n}, seq=n)
        client.kill()
    with relay(journal, ledger) as client:
        assert [text_of(client.call("append", {"n": n}, seq=n)) for n in (1, 100)] == ["effect 1", "effect 100"]
        assert client.finish() == 0
    with contextlib.closing(sqlite3.connect(journal)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(ledger_lines(ledger)) == 100


def test_a_journal_on_a_local_disk_is_not_warned_of(journal: Path, ledger: Path) -> None:
    if kind_if_not_local(str(journal.parent)) is not None:
        pytest.skip("the tests run on a disk that is not local")
    with relay(journal, ledger) as client:
        assert client.finish() == 0
        assert client.stderr_text() == ""


def test_an_upstream_that_cannot_be_started_is_exit_5_and_named(tmp_path: Path) -> None:
    no_program = tmp_path / "text"
    no_program.write_text("no program")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fnot a program")
    garbage.chmod(0o755)
    for command in (tmp_path / "missing", no_program, garbage, tmp_path):
        with Client(relay_words("--journal", tmp_path / "j.db", upstream=[str(command), "x"])) as client:
            assert client.wait() == 5
            assert str(command) in client.stderr_text()
            assert len(client.stderr_text().splitlines()) == 1
    assert not (tmp_path / "j.db").exists()


def test_an_upstream_that_ends_at_once_is_exit_5_and_named(journal: Path) -> None:
    """The client's first request is answered, so that it need not wait for the end of a pipe."""
    with Client(relay_words("--journal", journal, upstream=["sh", "-c", "read line; exit 7"])) as client:
        answer = client.answer(client.request("initialize"))
        assert refusal_of(answer)["reason"] == "upstream_lost"
        assert client.wait() == 5
        assert "exit status 7" in client.stderr_text()
        assert "'sh'" in client.stderr_text()


def test_a_drain_that_runs_out_is_exit_6_and_leaves_doubt(journal: Path, ledger: Path) -> None:
    """UD-03: an answer that never comes does not keep us for ever, and other requests are answered meanwhile."""
    with relay(journal, ledger, "--drain-timeout", "0.3") as client:
        request_id = client.start_call("silent", {"n": 1})
        client.answer(client.request("ping"))
        assert client.finish(10) == 6
        facts = refusal_of(client.answer(request_id))
        assert (facts["reason"], facts["sequence"]) == ("in_doubt", 1)
    assert statuses(journal) == ["IN_DOUBT"]


def test_a_second_signal_is_exit_130_at_once(journal: Path, ledger: Path) -> None:
    with relay(journal, ledger, modes=["deaf"]) as client:
        upstream = client.upstream_pid()
        client.start_call("silent", {"n": 1})
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.signal(signal.SIGTERM)
        until(lambda: refused_by_now(client), "the first signal is heard")
        client.signal(signal.SIGINT)
        assert client.wait(CLIENT_PATIENCE_S) == 130
        assert process_state(upstream) == ""
    assert statuses(journal) == ["IN_DOUBT"]


def refused_by_now(client: Client) -> bool:
    """Whether the relay admits no calls any more; asked with a call that has no place, so that it cannot run."""
    answer = client.call("echo", {}, workflow="\0")
    return bool(refusal_of(answer)["reason"] == "shutting_down")


# --------------------------------------------------------------------------------------------------------- the drain


def test_calls_under_way_are_answered_after_the_client_closed_our_stdin(journal: Path, ledger: Path) -> None:
    """SH-01: upstream's input stays open until it has answered."""
    with relay(journal, ledger) as client:
        ids = [client.start_call("slow", {"n": n}) for n in (1, 2)]
        until(lambda: len(ledger_lines(ledger)) == 2, "the effects")
        client.close_stdin()
        go(ledger)
        for request_id in ids:
            assert "effect" in text_of(client.answer(request_id))
        assert client.wait() == 0
    assert statuses(journal) == ["COMPLETED", "COMPLETED"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_calls_under_way_finish_and_new_ones_not_begin(
    journal: Path, ledger: Path, number: signal.Signals
) -> None:
    with relay(journal, ledger) as client:
        request_id = client.start_call("slow", {"n": 1})
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.signal(number)
        until(lambda: refused_by_now(client), "the signal is heard")
        client.answer(client.request("ping"))  # all else is still relayed
        go(ledger)
        assert text_of(client.answer(request_id)) == "effect 1"
        assert client.wait() == 0
    assert statuses(journal) == ["COMPLETED"]
    assert len(ledger_lines(ledger)) == 1


def test_a_signal_while_we_start_leaves_no_upstream_behind(journal: Path) -> None:
    """Upstream is started before the rest of us is imported; dying of a signal then would leave it alone."""
    for _ in range(3):
        with Client(relay_words("--journal", journal, upstream=["sleep", "60"])) as client:
            while not (children := children_of(client.pid)):
                assert client.is_alive()
            client.signal(signal.SIGTERM)
            assert client.wait(10) == 0
            assert process_state(children[0]) == ""


@pytest.mark.parametrize("modes", [[], ["deaf"]])
def test_sigterm_after_the_end_of_input_ends_before_sigkill_comes(
    journal: Path, ledger: Path, modes: list[str]
) -> None:
    """The client's own sequence: end of input, SIGTERM, and SIGKILL two seconds after that."""
    took = []
    for n in range(3):
        with relay(journal, ledger, modes=modes) as client:
            upstream = client.upstream_pid()
            client.start_call("silent", {"n": n}, seq=n + 1)
            until(lambda n=n: len(ledger_lines(ledger)) == n + 1, "the effect")  # type: ignore[misc]
            client.close_stdin()
            until(lambda client=client: not watches_stdin(client.pid), "the end is noticed")  # type: ignore[misc]
            begun = time.monotonic()
            client.signal(signal.SIGTERM)
            assert client.wait() == 6
            took.append(time.monotonic() - begun)
            assert process_state(upstream) == ""
        assert statuses(journal) == ["IN_DOUBT"] * (n + 1)
        if took[-1] < 2.0:
            break
    assert min(took) > 0.9  # answers get a second
    assert min(took) < 2.0  # of three, since the machine may be busy


def test_an_upstream_that_ignores_everything_is_killed(journal: Path, ledger: Path) -> None:
    """SH-03: end of input, SIGTERM, SIGKILL, all inside the client's patience."""
    with relay(journal, ledger, modes=["deaf"]) as client:
        upstream = client.upstream_pid()
        client.call("append", {"n": 1})
        begun = time.monotonic()
        assert client.finish() == 0
        assert 1.9 < time.monotonic() - begun < CLIENT_PATIENCE_S
        assert process_state(upstream) == ""
    assert statuses(journal) == ["COMPLETED"]


def test_upstream_has_time_to_save_its_work(journal: Path, ledger: Path) -> None:
    """SH-04: its input is closed first, signals come later."""
    with relay(journal, ledger, modes=["bye"]) as client:
        assert client.finish() == 0
    assert ledger_lines(Path(f"{ledger}.bye")) == ["bye"]


def test_without_a_journal_all_that_was_written_arrives(ledger: Path) -> None:
    """SH-01: more than the pipes hold, and the end of input right behind it."""
    requests = b"".join(call_line("echo", {"pad": "x" * 100_000, "n": n}, request_id=n) for n in range(30))
    with Client(relay_words(upstream=upstream_words(ledger))) as client:
        client.send(requests + call_line("append", {}, request_id="last"))
        client.close_stdin()
        assert text_of(client.answer("last")) == "effect 1"
        assert [json.loads(line)["id"] for line in client.lines()] == [*range(30), "last"]
        assert client.wait() == 0


def test_a_reader_who_is_late_gets_the_last_answers_whole(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """`checkpoint < requests | slow-reader`: upstream is long gone, and the answers still wait in our queue."""
    requests = tmp_path / "requests"
    requests.write_bytes(b"".join(call_line("echo", {"pad": "x" * 10_000, "n": n}, request_id=n) for n in range(28)))
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(words, stdin=requests.open("rb"), reads=False) as client:
        upstream = client.upstream_pid()
        until(lambda: not is_running(upstream), "upstream has answered all and is gone")
        end = time.monotonic() + 1.5
        until(lambda: time.monotonic() > end or not client.is_alive(), "the reader comes late")
        client.start_reading()
        assert client.rest() == b""
        assert [json.loads(line)["id"] for line in client.lines()] == list(range(28))
        assert client.wait() == 0


def test_an_agent_that_is_gone_costs_no_processor_time(journal: Path, ledger: Path) -> None:
    """SH-07: stdin and stdout have no other end, a call is still awaited, and upstream goes on talking."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger, "chatty"))
    with Client(words, reads=False) as client:
        client.start_call("slow", {"n": 1})
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.close_stdin()
        client.close_stdout()
        before, end = cpu_seconds(client.pid), time.monotonic() + 1
        until(lambda: time.monotonic() > end, "a second passes")
        assert cpu_seconds(client.pid) - before < 0.3
        go(ledger)
        assert client.wait() == 0
        assert "Traceback" not in client.stderr_text()
    assert statuses(journal) == ["COMPLETED"]


def test_a_client_that_is_gone_as_a_reader_ends_us(journal: Path, ledger: Path) -> None:
    """SH-07: its side of our stdin is still open; the answer that it never read is on record."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger, "chatty"))
    with Client(words, reads=False) as client:
        client.start_call("slow", {"n": 1})
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.close_stdout()
        go(ledger)
        assert client.wait(CLIENT_PATIENCE_S) == 0
        assert "Traceback" not in client.stderr_text()
    assert statuses(journal) == ["COMPLETED"]


# ------------------------------------------------------------------------------------------------- upstream's children


@pytest.mark.parametrize("command", ["sleep 60", "trap '' TERM; sleep 60; sleep 60"])
@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_nothing_of_upstreams_group_is_left(journal: Path, ledger: Path, command: str, ends_by_itself: bool) -> None:
    """UD-04: upstream's exit counts, although a grandchild holds its stdout; then the grandchild goes too."""
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        arguments = {"command": command} | ({"status": 0} if ends_by_itself else {})
        grandchild = int(text_of(client.call("spawn", arguments)))
        if ends_by_itself:
            assert client.wait(10) == 5
            assert "exit status 0" in client.stderr_text()
        else:
            assert client.finish(10) == 0
        assert group_of(upstream) == []
        assert not is_running(grandchild)
    assert statuses(journal) == ["COMPLETED"]


def test_a_grandchild_that_has_ended_is_not_waited_for(journal: Path, ledger: Path) -> None:
    """Where process 1 reaps nobody it stays in the group as a zombie; no step of ending may take its full time."""
    took = []
    for _ in range(3):
        with relay(journal, ledger) as client:
            grandchild = int(text_of(client.call("spawn", {"command": "sleep 60"})))
            begun = time.monotonic()
            assert client.finish() == 0
            took.append(time.monotonic() - begun)
            assert not is_running(grandchild)
    assert min(took) < 0.9  # of three, since the machine may be busy


def test_a_grandchild_that_left_the_group_and_floods_does_not_keep_us(journal: Path, ledger: Path) -> None:
    """It holds upstream's stdout and writes for ever: what is there when upstream is gone is read, and no more."""
    with relay(journal, ledger) as client:
        arguments = {"command": "exec yes", "leaves_group": True, "status": 0}
        grandchild = int(text_of(client.call("spawn", arguments)))
        try:
            assert client.wait(10) == 5
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert statuses(journal) == ["COMPLETED"]


# ----------------------------------------------------------------------------------------------------- upstream's death


def test_upstreams_death_in_the_middle_of_a_call_is_told_at_once(journal: Path, ledger: Path) -> None:
    """UD-01, CW-04: the call is in doubt and is not tried again; every open request is answered."""
    with relay(journal, ledger) as client:
        slow = client.start_call("slow", {"n": 1}, seq=1)
        until(lambda: len(ledger_lines(ledger)) == 1, "the first effect")
        other = client.request("no/such/method")
        dying = client.start_call("die", {"n": 2}, seq=2)
        for request_id, sequence in ((slow, 1), (dying, 2)):
            facts = refusal_of(client.answer(request_id))
            assert (facts["reason"], facts["cause"], facts["sequence"]) == ("in_doubt", "upstream_lost", sequence)
        assert refusal_of(client.answer(other))["reason"] == "upstream_lost"
        assert client.wait(10) == 5
        assert "exit status 3" in client.stderr_text()
    assert statuses(journal) == ["IN_DOUBT", "IN_DOUBT"]
    assert len(ledger_lines(ledger)) == 2


def test_an_upstream_that_ended_is_reaped_while_we_live_on(journal: Path, ledger: Path) -> None:
    """SH-06: a client that holds our stdin open for days collects no zombies."""
    with relay(journal, ledger, "--restart-upstream", "3") as client:
        for n in (1, 2, 3):
            ending = client.upstream_pid()
            client.call("spawn", {"command": "true", "status": 0})
            assert text_of(client.call("append", {"n": n})) == f"effect {n}"
            assert process_state(ending) == ""
        assert len(children_of(client.pid)) == 1
        assert client.finish() == 0


def test_upstreams_death_during_the_drain_is_exit_6(journal: Path, ledger: Path) -> None:
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        request_id = client.start_call("silent", {"n": 1})
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.close_stdin()
        until(lambda: not watches_stdin(client.pid), "the end of input is noticed")
        os.kill(upstream, signal.SIGKILL)
        facts = refusal_of(client.answer(request_id))
        assert (facts["reason"], facts["cause"]) == ("in_doubt", "upstream_lost")
        assert client.wait(10) == 6


def test_a_call_that_a_dead_upstream_left_unread_was_not_sent(journal: Path, ledger: Path) -> None:
    """Its bytes are still in the pipe, which the kernel counts: no doubt, and the next start runs it."""
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        client.call("append", {"n": 1}, seq=1)
        os.kill(upstream, signal.SIGSTOP)
        until(lambda: process_state(upstream) == "T", "upstream is stopped, and not still in a read")
        ids = [client.start_call("append", {"n": n}, seq=n) for n in (2, 3)]
        until(lambda: len(rows(journal)) == 3, "the rows are on disk")
        os.kill(upstream, signal.SIGKILL)
        for request_id in ids:
            assert refusal_of(client.answer(request_id))["reason"] == "upstream_lost"
        assert client.wait(10) == 5
    assert statuses(journal) == ["COMPLETED", "NOT_SENT", "NOT_SENT"]
    with relay(journal, ledger) as client:
        assert text_of(client.call("append", {"n": 2}, seq=2)) == "effect 2"
    assert len(ledger_lines(ledger)) == 2


# Starts a child in a session of its own that reads on from the same pipe once FILE.go exists, and exits.
LEAVES_A_READER = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.01)
line = sys.stdin.buffer.readline()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.write(fd, b"append\\n" if b"tools/call" in line else b"nothing\\n")
"""


def test_a_call_that_somebody_may_still_read_is_in_doubt(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """A process that left upstream's group holds its stdin: what is unread now may be run later."""
    (tmp_path / "leaves.py").write_text(LEAVES_A_READER, "utf-8")
    words = [sys.executable, str(tmp_path / "leaves.py"), str(ledger)]
    with Client(relay_words("--journal", journal, upstream=words)) as client:
        assert refusal_of(client.answer(client.start_call("append", {"n": 1}, seq=1)))["reason"] in (
            "in_doubt",
            "upstream_lost",
        )
        assert client.wait(10) == 5
    ledger.with_suffix(ledger.suffix + ".go").touch()
    until(lambda: bool(ledger_lines(ledger)), "whoever was left has read what there was")
    effects = ledger_lines(ledger).count("append")
    with relay(journal, ledger) as client:
        verdict = client.call("append", {"n": 1}, seq=1)
        client.finish()
    assert ledger_lines(ledger).count("append") + sum(line.startswith("append {") for line in ledger_lines(ledger)) == 1
    assert effects == 0 or b"in_doubt" in verdict


def test_a_call_left_unread_during_the_drain_was_not_sent_either(journal: Path, ledger: Path) -> None:
    """Upstream dies before we close its pipe, so what it has not read can still be counted: exit 0, no doubt."""
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        os.kill(upstream, signal.SIGSTOP)
        until(lambda: process_state(upstream) == "T", "upstream is stopped, and not still in a read")
        request_id = client.start_call("append", {"n": 1}, seq=1)
        until(lambda: journal.exists() and len(rows(journal)) == 1, "the row is on disk")
        client.close_stdin()
        until(lambda: not watches_stdin(client.pid), "the end of input is noticed")
        os.kill(upstream, signal.SIGKILL)
        assert refusal_of(client.answer(request_id))["reason"] == "upstream_lost"
        assert client.wait(10) == 0
    assert statuses(journal) == ["NOT_SENT"]


@pytest.mark.parametrize("size", [10, 200_000])
def test_an_upstream_that_closes_its_stdin_is_ended(journal: Path, ledger: Path, size: int) -> None:
    """UD-06: it lives on, but it can be told nothing; bounded, without a traceback, and nothing is in doubt."""
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        client.call("close", {"fd": 0}, seq=1)
        until(lambda: not holds(upstream, 0), "its stdin is closed")
        answer = client.call("append", {"x": "D" * size}, seq=2, deadline_s=10)
        assert refusal_of(answer)["reason"] == "upstream_lost"
        assert client.wait(10) == 5
        assert "Traceback" not in client.stderr_text()
        assert "closed its stdin or stdout" in client.stderr_text()
        assert process_state(upstream) == ""
    assert statuses(journal) == ["COMPLETED", "NOT_SENT"]


def holds(pid: int, fd: int) -> bool:
    """Whether a process has a descriptor open."""
    return os.path.lexists(f"/proc/{pid}/fd/{fd}")


def test_an_upstream_that_closes_its_stdout_is_ended(journal: Path, ledger: Path) -> None:
    """It lives on, but it will never answer."""
    with relay(journal, ledger) as client:
        upstream = client.upstream_pid()
        silent = client.start_call("silent", {"n": 1}, seq=1)
        client.call("close", {"fd": 1}, seq=2)
        facts = refusal_of(client.answer(silent, deadline_s=10))
        assert (facts["reason"], facts["cause"]) == ("in_doubt", "upstream_lost")
        assert client.wait(10) == 5
        assert process_state(upstream) == ""


# ------------------------------------------------------------------------------------------------------ the last line


@pytest.mark.parametrize("is_held_open", [False, True])
def test_a_whole_last_line_of_upstreams_counts(journal: Path, ledger: Path, is_held_open: bool) -> None:
    """FR-12: it has no line feed, and with a grandchild at the pipe there is not even an end of output."""
    with relay(journal, ledger) as client:
        if is_held_open:
            client.call("spawn", {"command": "sleep 60", "leaves_group": True})
        answer = client.call("torn", {"n": 1})
        assert text_of(answer) == "torn"
        assert client.wait(10) == 5
    assert statuses(journal)[-1] == "COMPLETED"


def test_half_a_last_line_of_upstreams_is_dropped(journal: Path, ledger: Path) -> None:
    """It is nobody's answer: the call is in doubt, and the client sees whole lines only."""
    with relay(journal, ledger) as client:
        facts = refusal_of(client.call("torn", {"bytes": 30}))
        assert facts["reason"] == "in_doubt"
        assert client.wait(10) == 5
        assert "middle of a line" in client.stderr_text()
        assert all(json.loads(line) for line in client.lines())


def test_half_a_last_line_of_the_clients_is_dropped(journal: Path, ledger: Path) -> None:
    """FR-12: without its line feed nobody can know that the call is whole; it does not run, and says so in the log."""
    with relay(journal, ledger) as client:
        client.send(call_line("append", {"n": 1}, request_id=9).removesuffix(b"\n"))
        assert client.finish() == 0
        assert "middle of a line" in client.stderr_text()
    assert not journal.exists()
    assert ledger_lines(ledger) == []


# -------------------------------------------------------------------------------------- what stdin, stdout, stderr are


def requests(count: int) -> bytes:
    """Some calls, and a ping behind each."""
    return b"".join(
        call_line("append", {"n": n}, request_id=n) + line_of({"jsonrpc": "2.0", "id": f"p{n}", "method": "ping"})
        for n in range(count)
    )


@pytest.mark.parametrize("sink", ["pipe", "file"])
def test_stdin_from_a_file(journal: Path, ledger: Path, tmp_path: Path, sink: str) -> None:
    """A file cannot be polled; its calls are taken as any others, and stdout may be a file as well."""
    (tmp_path / "in").write_bytes(requests(600))
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    out = (tmp_path / "out").open("wb") if sink == "file" else None
    with Client(words, stdin=(tmp_path / "in").open("rb"), stdout=out) as client:
        assert client.wait() == 0
        if sink == "pipe":
            assert client.rest() == b""
        said = client.lines() if sink == "pipe" else (tmp_path / "out").read_bytes().splitlines()
    answers = [json.loads(line) for line in said]
    assert [answer["id"] for answer in answers] == [name for n in range(600) for name in (n, f"p{n}")]
    assert len(ledger_lines(ledger)) == len(rows(journal)) == 600


def test_stdout_to_a_file_goes_on_where_the_file_is(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """`>> out` and what others wrote before: nothing is overwritten."""
    out = tmp_path / "out"
    with out.open("wb", buffering=0) as file:
        file.write(b"earlier\n")
        words = relay_words("--journal", journal, upstream=upstream_words(ledger))
        with Client(words, stdout=os.dup(file.fileno())) as client:
            client.send(requests(1))
            assert client.finish() == 0
        file.write(b"later\n")
    lines = out.read_bytes().splitlines()
    assert (lines[0], lines[-1], len(lines)) == (b"earlier", b"later", 4)


@pytest.mark.parametrize("redirection", ["<&-", "</dev/null"])
def test_stdin_that_gives_nothing(journal: Path, ledger: Path, redirection: str) -> None:
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(["sh", "-c", f'exec "$@" {redirection}', "sh", *words]) as client:
        assert client.wait() == 0
    assert not journal.exists()


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_stdout_or_stderr_that_take_nothing(journal: Path, ledger: Path, redirection: str) -> None:
    """The call is taken, runs once and is on record; no descriptor of ours is mistaken for a closed standard one."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(["sh", "-c", f'exec "$@" {redirection}', "sh", *words]) as client:
        diverging = call_line("append", {"n": 2}, request_id=2, seq=1)  # which is logged
        client.send(call_line("append", {"n": 1}, request_id=1, seq=1) + diverging)
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        assert client.finish() == 0
    assert statuses(journal) == ["COMPLETED"]


def test_socketpairs_as_node_gives_them(journal: Path, ledger: Path) -> None:
    """Large lines both ways through sockets, which have no pipe's size and no /proc to be opened again through."""
    ours_in, their_in = socket.socketpair()
    ours_out, their_out = socket.socketpair()
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    theirs, ours = (their_in.detach(), their_out.detach()), (ours_in.detach(), ours_out.detach())
    with Client(words, stdin=theirs[0], stdout=theirs[1], writes_to=ours[0], reads_from=ours[1]) as client:
        client.shake_hands()
        for n in (1, 2, 3):
            assert json.loads(text_of(client.call("echo", {"pad": "y" * 1_000_000}, seq=n)))["pad"] == "y" * 1_000_000
        assert client.finish() == 0
        assert client.rest() == b""


@pytest.mark.parametrize("ending", ["end of file", "hang-up"])
def test_a_terminal(journal: Path, ledger: Path, ending: str) -> None:
    """Typed by hand: one device for stdin and stdout."""
    master, slave = os.openpty()
    mode = termios.tcgetattr(slave)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(words, stdin=slave, stdout=slave, writes_to=os.dup(master), reads_from=master, reads=False) as client:
        client.send(call_line("append", {"n": 1}, request_id=1))
        said = b""
        while not said.endswith(b"\n"):
            said += os.read(master, 4096)
        assert text_of(said) == "effect 1"
        if ending == "end of file":
            client.send(b"\x04")
        else:
            client.close_stdin()
            client.close_stdout()
        assert client.wait() == 0


def test_stdout_and_stderr_on_one_pipe_with_a_noisy_upstream(journal: Path, ledger: Path) -> None:
    """BP-01: `2>&1` shares one open file description, and upstream must be able to wait on its stderr as before."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(words, stderr=subprocess.STDOUT) as client:
        client.send(call_line("noise", {"size": 1_200_000}, request_id=1))
        client.send(call_line("append", {"n": 1}, request_id=2))
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        assert client.finish() == 0
        assert client.rest() == b""
        said = b"".join(client.lines())
    for n in (1, 2):
        assert said.count(b'{"jsonrpc":"2.0","id":%d,"result":' % n) == 1
    assert said.count(b"noise\n") + 2 >= 200_000  # a line of ours may stand within a line of its noise
    assert b"Traceback" not in said


def test_a_noisy_upstream_is_heard_on_our_stderr(journal: Path, ledger: Path) -> None:
    """BP-01: it inherits ours, so that nothing of ours stands between it and whoever reads."""
    with relay(journal, ledger) as client:
        client.call("noise", {"size": 1_200_000})
        assert client.stderr_text().count("noise\n") == 200_000


@pytest.mark.parametrize("ending", ["finish", "die"])
def test_a_full_stderr_that_nobody_reads_stops_nothing(journal: Path, ledger: Path, ending: str) -> None:
    """Log lines are dropped; calls, refusals and the exit go on."""
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x")
    os.set_blocking(full, True)
    words = relay_words("--journal", journal, "--log-level", "debug", upstream=upstream_words(ledger))
    try:
        with Client(words, stderr=full) as client:
            client.shake_hands()
            client.call("append", {"n": 1}, seq=1)
            for _ in range(100):
                assert refusal_of(client.call("append", {"n": 2}, seq=1))["reason"] == "diverged"
            if ending == "die":
                client.start_call("die", seq=2)
                assert client.wait(10) == 5
            else:
                assert client.finish(10) == 0
    finally:
        os.close(unread)


# -------------------------------------------------------------------------------------------------------- back-pressure


def test_a_client_that_is_stopped_stops_upstream_and_not_our_memory(ledger: Path, journal: Path) -> None:
    """BP-04: a real SIGSTOP; what upstream cannot be rid of stays with it, and comes in order afterwards."""
    count, size = 1600, 65_536
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client([sys.executable, str(TESTS / "agent.py"), *words]) as client:
        client.shake_hands()
        relay_pid = children_of(client.pid)[0]
        upstream = children_of(relay_pid)[0]
        baseline = peak_memory_bytes(relay_pid)
        request_id = client.start_call("flood", {"count": count, "size": size})
        until(lambda: len(client.lines()) > 1, "the flood begins")
        client.signal(signal.SIGSTOP)
        until(lambda: is_at_rest(relay_pid) and is_at_rest(upstream), "all wait for the client")
        assert len(client.lines()) < count
        client.signal(signal.SIGCONT)
        client.answer(request_id, deadline_s=60)
        numbers = [json.loads(line)["params"]["n"] for line in client.lines()[1:-1]]
        assert numbers == list(range(count))
        assert peak_memory_bytes(relay_pid) - baseline < 50 << 20
        assert client.finish() == 0


def is_at_rest(pid: int) -> bool:
    """Whether a process has used no processor time for a while."""
    before, end = cpu_seconds(pid), time.monotonic() + 0.3
    until(lambda: time.monotonic() > end, "a moment passes")
    return cpu_seconds(pid) == before


def test_many_calls_in_flight_and_a_slow_reader_do_not_deadlock(journal: Path, ledger: Path) -> None:
    """64 calls of 10 KB at once, answers of 10 KB each, taken a kilobyte at a time."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    calls = b"".join(call_line("echo", {"pad": "z" * 10_000, "n": n}, request_id=n) for n in range(64))
    reading, writing = os.pipe()
    with Client(words, stdout=writing) as client:
        sender = threading.Thread(target=client.send, args=(calls,))
        sender.start()
        said = b""
        while said.count(b"\n") < 64:
            piece = os.read(reading, 1024)
            assert piece != b""
            said += piece
        sender.join()
        assert client.finish() == 0
    os.close(reading)
    answers = [json.loads(line) for line in said.splitlines()]
    assert [answer["id"] for answer in answers] == list(range(64))
    assert len(rows(journal)) == 64


def test_big_questions_and_big_answers_do_not_wait_for_each_other(journal: Path, ledger: Path) -> None:
    """BP-03: a server with one thread writes an answer while the next question is on its way."""
    with relay(journal, ledger) as client:
        ids = [client.start_call("echo", {"pad": letter * 1_000_000}) for letter in "EFG"]
        for request_id, letter in zip(ids, "EFG", strict=True):
            assert json.loads(text_of(client.answer(request_id)))["pad"] == letter * 1_000_000
        assert client.finish() == 0


def test_a_line_of_64_mib_passes_both_ways_and_is_replayed(journal: Path, ledger: Path) -> None:
    """FR-01, FR-04: of any length, in bounded memory, and the same bytes after a crash; what is behind gets through."""
    arguments = {"pad": "C" * (64 << 20)}
    with relay(journal, ledger) as client:
        idle = peak_memory_bytes(client.pid)
        answer = client.call("echo", arguments, seq=1, deadline_s=120)
        assert len(answer) > 64 << 20
        client.answer(client.request("ping"))
        assert peak_memory_bytes(client.pid) - idle < 9 * len(answer)
        client.kill()
    with relay(journal, ledger) as client:
        assert body_of(client.call("echo", arguments, seq=1, deadline_s=120)) == body_of(answer)
        assert client.finish() == 0


# ------------------------------------------------------------------------------------------------------- how it starts


def test_upstream_gets_our_environment_directory_and_its_own_arguments(ledger: Path, tmp_path: Path) -> None:
    """EN-01, EN-03, EN-04: nothing added, nothing taken away, nothing eaten by our own parser."""
    folder = tmp_path / "sp ace é"
    folder.mkdir()
    env = {"PATH": os.environ["PATH"], "DEMO_TOKEN": "abc", "EMPTY": "", "LANG": "C.UTF-8"}
    words = relay_words("--journal", "j.db", upstream=[*upstream_words(ledger), "--", "-y", "--journal", "x", "--help"])
    with Client(words, cwd=folder, env=env) as client:
        facts = json.loads(text_of(client.call("whoami")))
        assert facts["argv"] == [str(ledger), "--", "-y", "--journal", "x", "--help"]
        assert facts["cwd"] == str(folder)
        assert facts["env"] == env
        assert client.finish() == 0
    assert (folder / "j.db").exists()


def ignored_signals(pid: int) -> set[int]:
    """The signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def test_upstream_ignores_no_signal_because_we_do(journal: Path) -> None:
    """Python ignores SIGPIPE; a child that inherits that, such as `yes | head`, never ends."""
    with Client(relay_words("--journal", journal, upstream=["sleep", "60"])) as client:
        upstream = client.upstream_pid()
        assert signal.SIGPIPE in ignored_signals(client.pid)
        # A child is there a moment before it is the program that it is to be.
        until(lambda: ignored_signals(upstream) == set(), "no signal that upstream ignores")
        client.signal(signal.SIGTERM)
        assert client.wait() == 0


def test_a_signal_that_we_were_started_to_ignore_is_ignored(journal: Path, ledger: Path) -> None:
    """`nohup`, and shells that put us into the background, mean it."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh", *words]) as client:
        client.shake_hands()
        for number in (signal.SIGHUP, signal.SIGINT):
            assert number in ignored_signals(client.pid)
            client.signal(number)
        assert text_of(client.call("append", {"n": 1})) == "effect 1"
        assert client.finish() == 0


def test_upstream_has_no_descriptor_of_ours(journal: Path, ledger: Path) -> None:
    """A lock, a log or a pipe's end in its children's hands would outlive us."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1})
        assert sorted(os.listdir(f"/proc/{client.upstream_pid()}/fd")) == ["0", "1", "2"]
        assert client.finish() == 0


def test_a_session_that_only_probed_writes_nothing(journal: Path, ledger: Path, tmp_path: Path) -> None:
    with relay(journal, ledger) as client:
        client.answer(client.request("tools/list"))
        client.answer(client.request("ping"))
        assert client.finish() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_session_that_only_probed_leaves_a_journal_as_it_is(journal: Path, ledger: Path, tmp_path: Path) -> None:
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1})
        client.kill()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("j.db*") if not path.name.endswith("-shm")}
    with relay(journal, ledger) as client:
        client.answer(client.request("tools/list"))
        assert client.finish() == 0
    after = {path.name: path.read_bytes() for path in tmp_path.glob("j.db*") if not path.name.endswith("-shm")}
    assert after == before


def test_a_double_launch_leaves_no_trace_of_the_first(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """Some clients start the command twice, ask the first for `server/discover`, and kill it with SIGTERM."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(words) as probe, Client(words) as session:
        discover = {"jsonrpc": "2.0", "id": "server-discover-probe-1", "method": "server/discover", "params": {}}
        probe.send(discover)
        assert b"supportedVersions" in probe.answer("server-discover-probe-1")
        probe.signal(signal.SIGTERM)
        assert probe.wait(CLIENT_PATIENCE_S / 2) == 0
        assert list(tmp_path.iterdir()) == []
        session.shake_hands()
        assert text_of(session.call("append", {"n": 1})) == "effect 1"
        assert session.finish() == 0
    assert statuses(journal) == ["COMPLETED"]


def test_a_probe_that_is_killed_after_a_second_leaves_no_deaf_upstream(journal: Path, ledger: Path) -> None:
    """Clients send SIGKILL one second after SIGTERM, and some servers hear neither that nor the end of their input."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger, "deaf"))
    with Client(words) as probe:
        probe.shake_hands()
        upstream, begun = probe.upstream_pid(), time.monotonic()
        probe.signal(signal.SIGTERM)
        until(lambda: not is_running(upstream), "the deaf upstream is gone")
        assert time.monotonic() - begun < 1.8  # 0.8 s on an idle machine, 2 s if each step took its second
        assert probe.wait(CLIENT_PATIENCE_S) == 0
