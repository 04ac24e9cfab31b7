"""Crashes of real processes with real SIGKILLs. The judge is the upstream's own fsynced ledger, never our journal."""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from support import (
    TESTS,
    Client,
    body_of,
    children_of,
    is_running,
    ledger_lines,
    refusal_of,
    relay,
    relay_words,
    rows,
    text_of,
    until,
    upstream_words,
)

POINTS: Final = ("before_reserve", "after_reserve", "mid_upstream", "before_complete", "after_complete")


def verdict_of(answer: bytes) -> str:
    """What a start says of a call that an earlier one may have run."""
    if b'"result"' in answer:
        return "answers"
    return str(refusal_of(answer)["reason"])


# ------------------------------------------------------------------------------------------------------ the guarantee


def test_a_completed_side_effect_is_never_run_again(journal: Path, ledger: Path) -> None:
    """The promise itself: all kinds of outcomes, SIGKILL, a new process, the same pins (CW-01, CW-06)."""
    calls: list[tuple[str, dict[str, Any]]] = [
        *(("append", {"n": n, "text": f"ü{n}", "deep": [[{"x": None}]]}) for n in range(40)),
        ("append", {"n": 0, "text": "ü0", "deep": [[{"x": None}]]}),  # equal to the first, and yet another call
        ("fail", {"n": 1}),
        ("big", {"size": 300_000}),
        ("append", {"big": "y" * 300_000}),
    ]
    with relay(journal, ledger) as first:
        ids = [first.start_call(tool, arguments, seq=n) for n, (tool, arguments) in enumerate(calls, 1)]
        answers = [first.answer(request_id) for request_id in ids]
        first.kill()
    effects = ledger_lines(ledger)
    assert len(effects) == len(calls)
    for _ in range(2):  # a replay is as good as the answer it repeats
        with relay(journal, ledger) as later:
            for n, (tool, arguments) in enumerate(calls, 1):
                request_id = later.start_call(tool, arguments, seq=n)
                assert body_of(later.answer(request_id)) == body_of(answers[n - 1])
            later.kill()
        assert ledger_lines(ledger) == effects
    with relay(journal, ledger) as last:  # the same places with other arguments are refused, and not run either
        for n in (1, 41, 44):
            assert refusal_of(last.call("append", {"n": "other"}, seq=n))["reason"] == "diverged"
        assert last.finish() == 0
    assert ledger_lines(ledger) == effects


def test_a_replay_without_other_traffic_is_byte_identical(journal: Path, ledger: Path) -> None:
    """The whole line, id included: the client cannot tell a replay from the answer."""
    with relay(journal, ledger) as first:
        answer = first.call("append", {"n": 1}, seq=1)
        first.kill()
    with relay(journal, ledger) as second:
        assert second.call("append", {"n": 1}, seq=1) == answer
    assert len(ledger_lines(ledger)) == 1


def test_a_kill_in_the_middle_of_a_call_leaves_it_in_doubt(journal: Path, ledger: Path) -> None:
    """CW-01, SH-09: effect done, answer not yet there, the relay dies; upstream lives on and sees end of input."""
    with relay(journal, ledger) as first:
        assert text_of(first.call("append", {"n": 1}, seq=1)) == "effect 1"
        upstream = first.upstream_pid()
        first.start_call("slow", {"n": 2}, seq=2)
        until(lambda: len(ledger_lines(ledger)) == 2, "the effect")
        first.kill()
    with relay(journal, ledger) as second:
        facts = refusal_of(second.call("slow", {"n": 2}, seq=2))
        assert (facts["reason"], facts["cause"], facts["code"]) == ("in_doubt", "relay_lost", 31001)
        assert (facts["sequence"], facts["tool"], facts["status"]) == (2, "slow", "IN_DOUBT")
        unpinned = refusal_of(second.call("append", {"n": 3}))
        assert (unpinned["reason"], unpinned["sequence"]) == ("in_doubt", 2)
        assert text_of(second.call("append", {"n": 1}, seq=1)) == "effect 1"
        assert text_of(second.call("append", {"n": 3}, seq=3)) == "effect 3"  # a pinned new call is not blocked
        assert second.finish() == 0
    until(lambda: not is_running(upstream), "the first upstream ends at the end of its input")
    assert [line.split()[0] for line in ledger_lines(ledger)] == ["append", "slow", "append"]


def test_the_row_is_on_disk_when_the_call_arrives_upstream(journal: Path, ledger: Path) -> None:
    """CW-03: who looks into the journal from upstream's side finds the call PENDING."""
    with relay(journal, ledger) as client:
        request_id = client.start_call("slow", {"n": 1}, seq=1)
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        assert [row["status"] for row in rows(journal)] == ["PENDING"]
        Path(f"{ledger}.go").touch()
        client.answer(request_id)
        assert [row["status"] for row in rows(journal)] == ["COMPLETED"]


# --------------------------------------------------------------------------------------------------- the crash matrix


class Cell(NamedTuple):
    """What a crash at a point leaves behind: effects of the call before the next start, and what that start says."""

    effects: int
    verdict: str  # runs: it was not run, and is now; replays; in_doubt

    def __str__(self) -> str:
        return f"{self.effects} effects, then {self.verdict}"


MATRIX: Final = {
    ("before_reserve", "relay"): Cell(0, "runs"),
    ("after_reserve", "relay"): Cell(0, "in_doubt"),
    ("mid_upstream", "relay"): Cell(1, "in_doubt"),
    ("before_complete", "relay"): Cell(1, "in_doubt"),
    ("after_complete", "relay"): Cell(1, "replays"),
    # A call that a dead upstream left unread in its pipe was not sent, and one that it answered in time is answered.
    ("before_reserve", "upstream"): Cell(0, "runs"),
    ("after_reserve", "upstream"): Cell(0, "runs"),
    ("mid_upstream", "upstream"): Cell(1, "in_doubt"),
    ("before_complete", "upstream"): Cell(1, "replays"),
    ("after_complete", "upstream"): Cell(1, "replays"),
    # A call of an agent that died is taken: it is awaited and kept for the agent that comes next.
    **{(point, "agent"): Cell(1, "replays") for point in POINTS},
}
FIRST_ANSWERS: Final = {  # to a client that saw upstream die
    "before_reserve": "upstream_lost",
    "after_reserve": "upstream_lost",
    "mid_upstream": "in_doubt",
    "before_complete": "answers",
    "after_complete": "answers",
}


@pytest.mark.parametrize("sequence", [None, 3])
@pytest.mark.parametrize(("point", "victim"), MATRIX)
def test_the_crash_matrix(journal: Path, ledger: Path, point: str, victim: str, sequence: int | None) -> None:
    """Whoever dies, at whichever point: never two effects, and the next start says what is true."""
    expected = MATRIX[point, victim]
    target = sequence or 1
    # One that answers at once could have answered before it is killed in mid-call.
    tool = "silent" if (point, victim) == ("mid_upstream", "upstream") else "append"
    crash_at = point if sequence is None else f"{point}@{sequence}"
    flags = ["--journal", str(journal), "--crash-at", crash_at]
    words = relay_words(*flags, upstream=upstream_words(ledger))
    if victim != "relay":
        words = [sys.executable, str(TESTS / "drill_relay.py"), victim, str(ledger), *words[2:]]
    agent = [sys.executable, str(TESTS / "agent.py")] if victim == "agent" else []

    with Client([*agent, *words]) as client:
        client.shake_hands()
        relay_pid = children_of(client.pid)[0] if victim == "agent" else client.pid
        upstream_pid = children_of(relay_pid)[0]
        earlier = [client.call("append", {"n": n}, seq=n) for n in range(1, target)]
        request_id = client.start_call(tool, {"n": target}, seq=target)
        if victim == "upstream":
            assert verdict_of(client.answer(request_id)) == FIRST_ANSWERS[point]
            assert client.wait() == 5
            assert "killed by signal 9" in client.stderr_text()
        else:
            assert client.wait() == -signal.SIGKILL
        until(lambda: not is_running(relay_pid), "the relay ends")
        until(lambda: not is_running(upstream_pid), "upstream ends")
        if victim == "agent":
            until(Path(f"{ledger}.exit").exists, "the relay has left its exit code")
            assert Path(f"{ledger}.exit").read_text("utf-8") == "0"
    effects = ledger_lines(ledger)
    assert len(effects) == target - 1 + expected.effects

    with relay(journal, ledger) as next_one:
        for n, answer in enumerate(earlier, 1):
            assert next_one.call("append", {"n": n}, seq=n) == answer
        answer = next_one.call(tool, {"n": target}, seq=target) if expected.verdict != "runs" else b""
        if expected.verdict == "in_doubt":
            assert verdict_of(answer) == "in_doubt"
        elif expected.verdict == "replays":
            assert text_of(answer) == f"effect {target}"
        else:
            assert text_of(next_one.call("append", {"n": target}, seq=target)) == f"effect {target}"
        assert next_one.finish() == 0
    assert ledger_lines(ledger) == effects + ([f'append {{"n": {target}}}'] if expected.verdict == "runs" else [])


def test_a_crash_at_a_sequence_spares_all_others(journal: Path, ledger: Path) -> None:
    """`--crash-at POINT@SEQ` waits for its call, also when others are around it in one turn."""
    with relay(journal, ledger, "--crash-at", "after_complete@2") as client:
        assert text_of(client.call("append", {"n": 3}, seq=3)) == "effect 1"
        assert text_of(client.call("append", {"n": 1}, seq=1)) == "effect 2"
        client.start_call("append", {"n": 2}, seq=2)
        assert client.wait() == -signal.SIGKILL
        assert not any(b"effect 3" in line for line in client.lines())
    with relay(journal, ledger) as client:
        assert text_of(client.call("append", {"n": 2}, seq=2)) == "effect 3"
    assert len(ledger_lines(ledger)) == 3


def test_kills_at_random_instants_never_make_two_effects(journal: Path, ledger: Path) -> None:
    """A walk through one journal: kill whenever, start again, send the same; the ledger has each call at most once."""
    seed = int(os.environ.get("CHECKPOINT_SEED", 20261130))  # another one by hand
    print(f"seed {seed}")
    chance = random.Random(seed)
    answers: dict[int, bytes] = {}
    doubtful: set[int] = set()
    at = 1
    for _ in range(20):
        patience = chance.randrange(8)
        with relay(journal, ledger) as client:
            killer = threading.Timer(chance.uniform(0, 0.02), client.kill)
            first = max(1, at - chance.randrange(4))  # the agent resumes somewhere before
            for n in itertools.count(first):
                if n == first + patience:
                    killer.start()
                try:
                    answer = client.call("append", {"n": n}, seq=n)
                except (AssertionError, BrokenPipeError):
                    break
                if n in answers:
                    assert body_of(answer) == body_of(answers[n])
                elif verdict_of(answer) == "answers":
                    assert n not in doubtful
                    answers[n] = answer
                else:
                    assert verdict_of(answer) == "in_doubt"
                    doubtful.add(n)
                at = max(at, n)
            killer.join()
            assert client.wait() == -signal.SIGKILL
    effects = ledger_lines(ledger)
    assert len(effects) == len(set(effects))
    assert {f'append {{"n": {n}}}' for n in answers} <= set(effects)
    assert len(answers) > 20


# ----------------------------------------------------------------------------------------------- the order on disk


def strace(tmp_path: Path, *options: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: the order of syncs and writes was not looked at")
    return ["strace", "-ff", "-y", "-s", "4096", "-o", str(tmp_path / "trace"), *options]


def trace_of(tmp_path: Path, pid: int) -> list[str]:
    """The system calls of one process, in order."""
    return (tmp_path / f"trace.{pid}").read_text("utf-8", "replace").splitlines()


def index_of(trace: list[str], pattern: str, start: int = 0) -> int:
    found = next((i for i in range(start, len(trace)) if re.search(pattern, trace[i])), None)
    assert found is not None, f"{pattern} is not in the trace after line {start}:\n" + "\n".join(trace[start:])
    return found


def test_the_journal_is_synced_between_reading_and_writing(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """CW-06: the order that the whole promise rests on, as the kernel saw it, for a first and a later call."""
    calls = "trace=read,readv,write,writev,pwrite64,fdatasync,fsync"
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client([*strace(tmp_path, "-e", calls), *words]) as client:
        client.shake_hands()
        tracee = children_of(client.pid)[0]
        for n in (1, 2):
            assert text_of(client.call("append", {"mark": f"call-{n}"}, seq=n)) == f"effect {n}"
        assert client.finish() == 0
    trace = trace_of(tmp_path, tracee)
    synced = r"^fdatasync\(\d+<[^>]*/j\.db-wal>\) += 0"
    for n in (1, 2):
        read_call = index_of(trace, rf"^readv?\(0<.*call-{n}")
        write_call = index_of(trace, rf"^write\(\d+<pipe:.*call-{n}", read_call)
        read_answer = index_of(trace, rf"^readv?\(\d+<pipe:.*effect {n}", write_call)
        write_answer = index_of(trace, rf"^write\(\d+<pipe:.*effect {n}", read_answer)
        written = index_of(trace, rf"^pwrite64\(\d+<[^>]*/j\.db-wal>.*call-{n}", read_call)
        assert read_call < written < index_of(trace, synced, written) < write_call
        assert read_answer < index_of(trace, synced, read_answer) < write_answer
        for before, after in ((written, write_call), (read_answer, write_answer)):
            last_write = max((i for i in range(before, after) if trace[i].startswith("pwrite64")), default=before)
            assert index_of(trace, synced, last_write) < after  # what was written last is synced as well
        assert not any("call-" in line for line in trace[read_call + 1 : write_call] if line.startswith("write("))


def syncs_per_call(journal: Path, ledger: Path, tmp_path: Path) -> tuple[int, int]:
    """How many fdatasyncs the relay makes before a call leaves, and before its answer does, on a used journal."""
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client([*strace(tmp_path, "-e", "trace=write,fdatasync"), *words]) as client:
        client.shake_hands()
        tracee = children_of(client.pid)[0]
        client.call("append", {"mark": "probe"}, seq=2)
        os.kill(tracee, signal.SIGKILL)
        client.wait()  # strace: all it saw is written
    trace = trace_of(tmp_path, tracee)
    write_call = index_of(trace, r"^write\(.*probe")
    write_answer = index_of(trace, r"^write\(.*effect 2", write_call)
    counts = [sum(line.startswith("fdatasync") for line in trace[:end]) for end in (write_call, write_answer)]
    assert 0 < counts[0] < counts[1]
    return counts[0], counts[1]


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_call_whose_row_cannot_be_synced_is_not_sent(journal: Path, ledger: Path, tmp_path: Path, error: str) -> None:
    """JF-03: no effect without a row, and nothing is dispatched after that until the next start."""
    with relay(journal, ledger) as client:
        kept = client.call("append", {"n": 1}, seq=1)
        client.kill()
    inject = strace(tmp_path, "-e", "trace=fdatasync", "-e", f"inject=fdatasync:error={error}:when=1+")
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client([*inject, *words]) as client:
        client.shake_hands()
        for n in (2, 3):
            facts = refusal_of(client.call("append", {"n": n}, seq=n))
            assert (facts["reason"], facts["code"]) == ("journal_unavailable", 31004)
        assert body_of(client.call("append", {"n": 1}, seq=1)) == body_of(kept)  # what is there is still replayed
        assert client.finish() == 0
    assert len(ledger_lines(ledger)) == 1
    with relay(journal, ledger) as client:
        # The row of the failed batch may be found or not: then the call is in doubt, or it runs.
        verdicts = [verdict_of(client.call("append", {"n": n}, seq=n)) for n in (2, 3)]
        assert verdicts[0] in ("in_doubt", "answers")
        assert verdicts[1] == "answers"
    assert len(ledger_lines(ledger)) == 1 + verdicts.count("answers")


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_an_answer_that_cannot_be_synced_is_handed_over(
    journal: Path, ledger: Path, tmp_path: Path, error: str
) -> None:
    """JF-03: the effect is in the world, the client is told what upstream said, and nothing runs it again."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        client.kill()
    for name in ("j.db", "j.db-wal"):
        shutil.copy(tmp_path / name, tmp_path / f"probe-{name}")
    shutil.copy(ledger, tmp_path / "probe-ledger")
    first, _ = syncs_per_call(tmp_path / "probe-j.db", tmp_path / "probe-ledger", tmp_path)
    inject = strace(tmp_path, "-e", "trace=fdatasync", "-e", f"inject=fdatasync:error={error}:when={first + 1}+")
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client([*inject, *words]) as client:
        client.shake_hands()
        facts = refusal_of(client.call("append", {"n": 2}, seq=2))
        assert facts["reason"] == "journal_unavailable"
        assert facts["answer"] == {"result": {"content": [{"type": "text", "text": "effect 2"}], "isError": False}}
        assert refusal_of(client.call("append", {"n": 3}, seq=3))["reason"] == "journal_unavailable"
        client.finish()
    assert len(ledger_lines(ledger)) == 2
    with relay(journal, ledger) as client:
        answer = client.call("append", {"n": 2}, seq=2)
        assert verdict_of(answer) in ("in_doubt", "answers")
        if verdict_of(answer) == "answers":
            assert text_of(answer) == "effect 2"
    assert len(ledger_lines(ledger)) == 2


@pytest.mark.parametrize("limit", [150_000, 170_000])
def test_a_full_disk_never_lets_an_effect_go_unrecorded(journal: Path, ledger: Path, limit: int) -> None:
    """JF-03: under RLIMIT_FSIZE calls go on until the journal is full, then none leaves; nothing runs twice."""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed: the full disk was not tried")
    arguments = {n: {"n": n, "pad": "p" * 2000} for n in range(1, 61)}
    answers = {}
    words = relay_words("--journal", journal, upstream=upstream_words(ledger))
    with Client(["prlimit", f"--fsize={limit}", *words]) as client:
        client.shake_hands()
        for n in arguments:
            answers[n] = client.call("append", arguments[n], seq=n)
        client.finish()
    effects = ledger_lines(ledger)
    refused = [n for n, answer in answers.items() if verdict_of(answer) != "answers"]
    assert 0 < len(effects) < len(arguments)
    assert refused == list(range(refused[0], 61))  # once full, full until the next start
    assert all(refusal_of(answers[n])["reason"] == "journal_unavailable" for n in refused)
    handed_over = [n for n in refused if "answer" in refusal_of(answers[n])]
    assert len(effects) == len(arguments) - len(refused) + len(handed_over)

    with relay(journal, ledger) as client:  # on a disk with room: never rerun, what was not sent may run
        for n in arguments:
            verdict = verdict_of(client.call("append", arguments[n], seq=n))
            assert verdict == "answers" or (n in refused[:2] and verdict == "in_doubt")
    again = ledger_lines(ledger)
    assert len(again) == len(set(again))
    assert again[: len(effects)] == effects


# ------------------------------------------------------------------------------------------------ whose journal it is


@pytest.mark.parametrize("kind", ["path", "symlink"])
def test_two_processes_do_not_share_a_journal(journal: Path, ledger: Path, tmp_path: Path, kind: str) -> None:
    """JL-01: the second relays the rest, waits with its call, is told who owns the journal, and takes over later."""
    other = journal
    if kind == "symlink":
        (tmp_path / "folder").mkdir()
        other = tmp_path / "folder" / "link.db"
        other.symlink_to(journal)
    with relay(journal, ledger) as first, relay(other, ledger) as second:
        answer = first.call("append", {"n": 1}, seq=1)
        begun = time.monotonic()
        request_id = second.start_call("append", {"n": 2}, seq=2)
        second.answer(second.request("tools/list"))
        facts = refusal_of(second.answer(request_id))
        assert time.monotonic() - begun > 4
        assert (facts["reason"], facts["code"]) == ("busy", 31003)
        assert str(first.pid) in facts["message"]
        assert len(ledger_lines(ledger)) == 1
        first.kill()
        assert body_of(second.call("append", {"n": 1}, seq=1)) == body_of(answer)
        assert text_of(second.call("append", {"n": 2}, seq=2)) == "effect 2"
        assert second.finish() == 0
    assert [row["status"] for row in rows(journal)] == ["COMPLETED", "COMPLETED"]


def test_a_call_that_waits_gets_the_journal_when_its_owner_dies(journal: Path, ledger: Path) -> None:
    """Takeover inside the wait: no error, no second effect."""
    with relay(journal, ledger) as first, relay(journal, ledger) as second:
        first.call("append", {"n": 1}, seq=1)
        first.start_call("silent", {"n": 2}, seq=2)
        until(lambda: len(ledger_lines(ledger)) == 2, "the effect")
        ids = [second.start_call(tool, {"n": n}, seq=n) for n, tool in ((1, "append"), (2, "silent"), (3, "append"))]
        second.answer(second.request("tools/list"))
        first.kill()
        verdicts = [verdict_of(second.answer(request_id)) for request_id in ids]
        assert verdicts == ["answers", "in_doubt", "answers"]
    assert len(ledger_lines(ledger)) == 3


def test_a_process_that_only_replayed_lets_others_in(journal: Path, ledger: Path) -> None:
    """Nobody owns a journal for having read it; who reads again after others wrote sees what they wrote."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
    with relay(journal, ledger) as reader, relay(journal, ledger) as writer:
        assert text_of(reader.call("append", {"n": 1}, seq=1)) == "effect 1"
        assert refusal_of(reader.call("append", {"n": 0}, seq=1))["reason"] == "diverged"
        assert text_of(writer.call("append", {"n": 2}, seq=2)) == "effect 2"
        writer.kill()
        assert text_of(reader.call("append", {"n": 2}, seq=2)) == "effect 2"
        assert text_of(reader.call("append", {"n": 3})) == "effect 3"
    assert [row["sequence"] for row in rows(journal)] == [1, 2, 3]


def test_a_copy_of_a_journal_is_a_journal_of_its_own(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """A copy is not locked by the original's owner; it knows what it holds, and has forgotten what came later."""
    copy = tmp_path / "copy.db"
    with relay(journal, ledger) as first:
        answer = first.call("append", {"n": 1}, seq=1)
        for suffix in ("", "-wal"):
            shutil.copy(f"{journal}{suffix}", f"{copy}{suffix}")
        first.call("append", {"n": 2}, seq=2)
        with relay(copy, ledger) as second:
            assert body_of(second.call("append", {"n": 1}, seq=1)) == body_of(answer)
            assert text_of(second.call("append", {"n": 2}, seq=2)) == "effect 3"
        assert text_of(first.call("append", {"n": 3}, seq=3)) == "effect 4"
        assert first.finish() == 0
    assert {row["workflow_id"] for row in rows(copy)} == {str(journal)}  # it keeps its identity


def test_a_journal_with_a_second_name_is_refused(journal: Path, ledger: Path, tmp_path: Path) -> None:
    """SQLite keeps a log per name, so two names of one file would be two journals that damage each other."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
    os.link(journal, tmp_path / "hard.db")
    before = journal.read_bytes()
    with relay(tmp_path / "hard.db", ledger, handshake=False) as client:
        assert client.wait() == 4
        assert "hard links" in client.stderr_text()
    assert journal.read_bytes() == before


# ------------------------------------------------------------------------------------- the journal while it is in use


def _move(journal: Path) -> None:
    journal.rename(journal.with_name("elsewhere.db"))


def _delete(journal: Path) -> None:
    journal.unlink()


def _delete_all(journal: Path) -> None:
    for path in journal.parent.glob("j.db*"):
        path.unlink()


def _replace(journal: Path) -> None:
    copy = journal.with_name("copy.db")
    shutil.copy(journal, copy)
    copy.replace(journal)


def _delete_log(journal: Path) -> None:
    journal.with_name("j.db-wal").unlink()


def _delete_lock(journal: Path) -> None:
    journal.with_name("j.db.lock").unlink()


@pytest.mark.parametrize("harm", [_move, _delete, _delete_all, _replace, _delete_log, _delete_lock])
def test_a_journal_that_is_taken_away_stops_all_dispatch(
    journal: Path, ledger: Path, harm: Callable[[Path], None]
) -> None:
    """JF-06, JF-07: what would be written to nowhere is refused, and upstream sees nothing of it."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        harm(journal)
        for n in (2, 3):
            facts = refusal_of(client.call("append", {"n": n}, seq=n))
            assert (facts["reason"], facts["code"]) == ("journal_unavailable", 31004)
            assert str(journal) in facts["message"]
        client.answer(client.request("tools/list"))  # the rest is still relayed
        assert client.finish() == 0
    assert len(ledger_lines(ledger)) == 1


def test_an_answer_for_a_journal_that_was_taken_away_is_handed_over(journal: Path, ledger: Path) -> None:
    """JF-07: the call has run by then; its client learns what upstream said, and that it is not on record."""
    with relay(journal, ledger) as client:
        request_id = client.start_call("slow", {"n": 1}, seq=1)
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        _move(journal)
        Path(f"{ledger}.go").touch()
        facts = refusal_of(client.answer(request_id))
        assert facts["reason"] == "journal_unavailable"
        assert facts["answer"]["result"]["content"][0]["text"] == "effect 1"
        client.finish()


def test_a_log_without_its_journal_is_refused(journal: Path, ledger: Path) -> None:
    """JF-06: the newest rows may be in it, and a new journal beside it would swallow or damage them."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        client.kill()
    log = journal.with_name("j.db-wal").read_bytes()
    journal.unlink()
    with relay(journal, ledger, handshake=False) as client:
        assert client.wait() == 4
        assert "j.db-wal" in client.stderr_text()
    assert journal.with_name("j.db-wal").read_bytes() == log
    assert not journal.exists()
    assert len(ledger_lines(ledger)) == 1


def test_a_database_held_by_another_program_is_busy_and_not_broken(journal: Path, ledger: Path) -> None:
    """JL-03: bounded time, upstream untouched, and all is well again once the other program lets go."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        other = sqlite3.connect(journal, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            begun = time.monotonic()
            request_id = client.start_call("append", {"n": 2}, seq=2)
            client.answer(client.request("tools/list"))  # other traffic flows meanwhile
            assert refusal_of(client.answer(request_id))["reason"] == "busy"
            assert 4 < time.monotonic() - begun < 20
            assert len(ledger_lines(ledger)) == 1
            late = client.start_call("append", {"n": 3}, seq=3)
            client.answer(client.request("tools/list"))
            other.execute("ROLLBACK")
            assert text_of(client.answer(late)) == "effect 2"
        finally:
            other.close()
        assert text_of(client.call("append", {"n": 2}, seq=2)) == "effect 3"
        assert client.finish() == 0
    assert [row["status"] for row in rows(journal)] == ["COMPLETED"] * 3


def test_a_reader_that_never_ends_stops_nothing(journal: Path, ledger: Path) -> None:
    """JL-04: a long read transaction keeps the log from starting over; calls go on, and the end is clean."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM calls").fetchone() == (1,)
            for n in range(2, 302):
                assert text_of(client.call("append", {"n": n}, seq=n)) == f"effect {n}"
            assert reader.execute("SELECT count(*) FROM calls").fetchone() == (1,)
            assert client.finish() == 0
    assert len(rows(journal)) == 301


def test_a_call_is_not_sent_again_when_its_client_lost_patience(journal: Path, ledger: Path) -> None:
    """CW-07: cancelled, unanswered, and then the same call anew: refused, and the late answer settles the first."""
    with relay(journal, ledger) as client:
        request_id = client.start_call("slow", {"k": "a"})
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": request_id}})
        facts = refusal_of(client.call("slow", {"k": "a"}))
        assert (facts["reason"], facts["cause"], facts["sequence"]) == ("in_doubt", "cancelled", 1)
        Path(f"{ledger}.go").touch()
        until(lambda: rows(journal)[0]["status"] == "COMPLETED", "the late answer is journaled")
        assert json.loads(rows(journal)[0]["result"])["content"][0]["text"] == "effect 1"
    assert len(ledger_lines(ledger)) == 1
