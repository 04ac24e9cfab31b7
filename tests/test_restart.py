"""An upstream that dies and is started again (`--restart-upstream`): what the client sees, and what nobody may see.

The first half is without processes, on a real journal; the second half kills real ones, and their ledger is the judge.
"""

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import (
    MODERN,
    Bench,
    FakeSink,
    call,
    cancel,
    database_held,
    failure,
    line,
    notification,
    read_only,
    reasons,
    request,
    result,
)
from support import (
    TESTS,
    Client,
    call_line,
    descendants_of,
    group_of,
    is_running,
    ledger_lines,
    line_of,
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

import wire
from restarts import Gate, Questions
from settings import Settings
from states import Cause

RESTARTING: Final = Settings(name="", version="", restarts_upstream=True)
INITIALIZE: Final = b'{"jsonrpc":"2.0", "id":"i",  "method":"initialize","params":{"protocolVersion":"2025-11-25"}}\r\n'
GREETED: Final = line({"jsonrpc": "2.0", "id": "i", "result": {"serverInfo": {"name": "u", "version": "1"}}})
INITIALIZED: Final = b'{"method":"notifications/initialized" ,"jsonrpc":"2.0"}\n'


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A relay whose client has shaken hands."""
    bench = Bench(tmp_path / "j.db", RESTARTING)
    bench.ask(INITIALIZE)
    bench.answer(GREETED)
    bench.ask(INITIALIZED)
    return bench


def interrupt(bench: Bench, *, read: int = 0) -> list[bytes]:
    """Upstream is gone and has read all but the last `read`-th lines; gives what was written downstream of it."""
    before = len(bench.down.lines)
    bench.up.unread = sum(map(len, bench.up.lines[len(bench.up.lines) - read :]))
    bench.relay.upstream_interrupted()
    bench.loop.run()
    return bench.down.lines[before:]


def start(bench: Bench, pid: int = 4711) -> FakeSink:
    """Another upstream runs; gives what leads to it."""
    bench.up = FakeSink()
    bench.relay.upstream_started(bench.up, pid)
    bench.loop.run()
    return bench.up


def revive(bench: Bench) -> FakeSink:
    """Another upstream runs, and has answered the handshake."""
    up = start(bench)
    assert bench.answer(GREETED) == []
    return up


# ------------------------------------------------------------------------------------------------------- the handshake


def test_the_handshake_is_repeated_to_the_letter_and_its_answer_is_swallowed(bench: Bench) -> None:
    assert interrupt(bench) == []
    up = start(bench)
    assert up.lines == [INITIALIZE]
    bench.ask(request("ping", 7), call(8, seq=1))
    assert up.lines == [INITIALIZE], "nothing overtakes it"
    assert not bench.relay.is_idle
    assert bench.answer(GREETED) == []
    assert up.lines == [INITIALIZE, INITIALIZED, request("ping", 7), call(8, seq=1)]
    assert bench.answer(result(7), result(8)) == [result(7), result(8)]
    assert bench.answer(GREETED) == [GREETED], "only one answer is ours"
    assert bench.relay.is_idle


def test_a_second_handshake_of_the_client_is_the_one_that_is_repeated(bench: Bench) -> None:
    again = INITIALIZE.replace(b'"i"', b'"j"')
    bench.ask(again)
    bench.answer(GREETED.replace(b'"i"', b'"j"'))
    interrupt(bench)
    up = start(bench)
    assert up.lines == [again]
    bench.answer(GREETED.replace(b'"i"', b'"j"'))
    assert up.lines == [again], "it was not confirmed yet"
    bench.ask(INITIALIZED)
    assert up.lines == [again, INITIALIZED]


@pytest.mark.parametrize("end", ["unanswered", "refused"])
def test_a_handshake_that_was_not_had_is_not_repeated(tmp_path: Path, end: str) -> None:
    """The client was told that its request is lost, and begins again by itself."""
    bench = Bench(tmp_path / "j.db", RESTARTING)
    bench.ask(INITIALIZE)
    if end == "refused":
        bench.answer(failure("i", -32602, "no"))
    assert reasons(interrupt(bench)) == ([("i", "upstream_lost")] if end == "unanswered" else [])
    up = start(bench)
    assert up.lines == []
    bench.ask(INITIALIZE)
    assert bench.answer(GREETED) == [GREETED]
    bench.ask(INITIALIZED)
    assert up.lines == [INITIALIZE, INITIALIZED]


@pytest.mark.parametrize("at", ["dead", "greeted", "dead again"])
def test_a_confirmation_that_comes_while_no_upstream_is_ready_is_sent_once(tmp_path: Path, at: str) -> None:
    bench = Bench(tmp_path / "j.db", RESTARTING)
    bench.ask(INITIALIZE)
    bench.answer(GREETED)
    interrupt(bench)
    if at == "dead":
        bench.ask(request("ping", 1), INITIALIZED)
    start(bench)
    if at == "greeted":
        bench.ask(request("ping", 1), INITIALIZED)
    interrupt(bench)  # and that process dies too
    if at == "dead again":
        bench.ask(INITIALIZED)
    bench.ask(request("ping", 2))
    up = revive(bench)
    assert up.lines == [INITIALIZE, INITIALIZED, request("ping", 2)]


def test_an_answer_to_another_request_under_its_id_is_no_handshake(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db", RESTARTING)
    bench.ask(INITIALIZE)
    interrupt(bench)
    start(bench)
    bench.ask(request("ping", "i"))
    assert bench.answer(result("i")) == [result("i")]
    interrupt(bench)
    assert start(bench).lines == []


def test_a_handshake_that_is_refused_the_second_time_is_swallowed_and_told_to_the_edges(bench: Bench) -> None:
    interrupt(bench)
    bench.ask(call(1, seq=1))
    up = start(bench)
    assert not bench.relay.is_handshake_refused
    assert bench.answer(failure("i", -32603, "no")) == []
    assert bench.relay.is_handshake_refused
    assert up.lines == [INITIALIZE]
    interrupt(bench)
    up = revive(bench)
    assert not bench.relay.is_handshake_refused
    assert up.lines == [INITIALIZE, INITIALIZED, call(1, seq=1)]


def test_the_modern_era_has_no_handshake_to_repeat(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db", RESTARTING)
    bench.ask(request("server/discover", 1, _meta=MODERN))
    bench.answer(result(1, resultType="complete"))
    interrupt(bench)
    up = start(bench)
    assert up.lines == []
    bench.call(call(2, is_modern=True), result(2))
    assert up.lines == [call(2, is_modern=True)]


def test_a_new_process_may_begin_with_a_byte_order_mark(bench: Bench) -> None:
    interrupt(bench)
    up = start(bench)
    assert bench.answer(b"\xef\xbb\xbf" + GREETED) == []
    assert up.lines == [INITIALIZE, INITIALIZED]


def test_what_stands_in_an_array_with_the_swallowed_answer_still_comes(bench: Bench) -> None:
    interrupt(bench)
    start(bench)
    both = b"[%b,%b]\n" % (GREETED.rstrip(), result(5).rstrip())
    assert bench.answer(both) == [result(5)], "only our own is swallowed"
    bench.ask(call(6, seq=1))
    assert bench.answer(result(6)) == [result(6)]


def test_a_server_that_asks_before_it_answers_the_handshake_is_answered(bench: Bench) -> None:
    bench.answer(question("lost"))
    bench.ask(call(1, seq=1))
    interrupt(bench, read=1)
    up = start(bench)
    assert bench.answer(question("new")) == [question("new")]
    bench.ask(request("ping", 7), result("new"), result("lost"), call(8, "u", seq=2))
    assert up.lines == [INITIALIZE, result("new")]
    bench.answer(GREETED)
    assert up.lines[2:] == [INITIALIZED, call(1, seq=1), request("ping", 7), call(8, "u", seq=2)]
    assert interrupt(bench, read=1) != []
    assert bench.statuses() == ["IN_DOUBT", "PENDING"], "the answer shifted nothing that is counted"


def test_a_server_that_spells_ids_as_text_is_greeted_again(tmp_path: Path) -> None:
    initialize, greeted = INITIALIZE.replace(b'"id":"i"', b'"id":0'), GREETED.replace(b'"i"', b'"0"')
    bench = Bench(tmp_path / "j.db", RESTARTING)
    bench.ask(initialize)
    assert bench.answer(greeted) != []
    bench.ask(INITIALIZED)
    assert interrupt(bench) == [], "nothing is open"
    up = start(bench)
    assert bench.answer(greeted) == []
    assert up.lines == [initialize, INITIALIZED]


def to_wire(line: bytes) -> tuple[wire.Message, bytes]:
    return wire.read_downstream(line), line


def test_the_gate_lets_answers_by_while_a_process_is_greeted_and_never_else() -> None:
    """And they shift nothing that is counted: what waits was given its place without them."""
    first, second = FakeSink(), FakeSink()
    gate = Gate(first)
    answers = result(0), b"[%b,%b]\n" % (result(1).rstrip(), failure(2, 1, "no").rstrip())
    others = request("ping", 3), notification("x"), b"[%b,%b]\n" % (result(1).rstrip(), request("ping", 4).rstrip())
    assert not any(gate.lets_by(*to_wire(one)) for one in (*answers, *others)), "open: it has its place in the order"
    gate.hold()
    assert not any(gate.lets_by(*to_wire(one)) for one in answers), "mute: it would move what is counted"
    gate.shut()
    assert not any(gate.lets_by(*to_wire(one)) for one in answers), "there is nobody to get it"
    gate.attach(second, INITIALIZE)
    gate.writelines((call(8, seq=1),))
    assert not any(gate.lets_by(*to_wire(one)) for one in others)
    assert all(gate.lets_by(*to_wire(one)) for one in answers)
    assert second.lines == [INITIALIZE, *answers]
    assert gate.taken_bytes == 0
    assert gate.queued_bytes == len(call(8, seq=1))
    gate.open(INITIALIZED)
    assert second.lines == [INITIALIZE, *answers, INITIALIZED, call(8, seq=1)]
    assert gate.taken_bytes == len(call(8, seq=1))
    gate.hold()
    gate.writelines((request("ping", 9),))
    assert not any(gate.lets_by(*to_wire(one)) for one in answers)


# --------------------------------------------------------------------------------------------------------------- calls


def test_a_call_that_left_is_in_doubt_and_is_never_sent_again(bench: Bench) -> None:
    bench.ask(call(1, seq=1), call(2, "u", seq=2), request("resources/list", 3))
    assert bench.answer(result(2)) == [result(2)]
    assert reasons(interrupt(bench)) == [(3, "upstream_lost"), (1, "in_doubt")]
    up = revive(bench)
    assert up.lines == [INITIALIZE, INITIALIZED]
    assert bench.error(call(4, seq=1))["facts"]["cause"] == "upstream_lost"
    assert bench.ask(call(5, "u", seq=2)) == [result(5)]
    assert bench.rows() == [(1, 1, "IN_DOUBT"), (2, 1, "COMPLETED")]


def test_calls_that_were_not_read_go_to_the_next_process_in_order_and_under_their_rows(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    bench.ask(call(2, seq=2))
    bench.ask(call(3, seq=3), request("resources/list", 4))
    assert reasons(interrupt(bench, read=3)) == [(4, "upstream_lost"), (1, "in_doubt")]
    up = start(bench)
    assert up.lines == [INITIALIZE]
    bench.answer(GREETED)
    assert up.lines == [INITIALIZE, INITIALIZED, call(2, seq=2), call(3, seq=3)]
    assert bench.answer(result(3), result(2)) == [result(3), result(2)]
    assert bench.rows() == [(1, 1, "IN_DOUBT"), (2, 1, "COMPLETED"), (3, 1, "COMPLETED")]


def test_a_call_of_which_a_part_was_read_is_in_doubt(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    bench.up.unread = len(call(1, seq=1)) - 1
    bench.relay.upstream_interrupted()
    bench.loop.run()
    assert bench.rows() == [(1, 1, "IN_DOUBT")]
    assert revive(bench).lines == [INITIALIZE, INITIALIZED]


def test_a_call_that_is_still_in_our_queue_goes_to_the_next_process(bench: Bench) -> None:
    bench.up.is_full = True
    bench.ask(call(1, seq=1))
    assert interrupt(bench) == []
    assert revive(bench).lines[2:] == [call(1, seq=1)]


def test_calls_survive_a_process_that_dies_before_it_is_ready(bench: Bench) -> None:
    """Neither the handshake nor what waits behind it may shift what is counted."""
    bench.ask(call(1, seq=1))
    assert interrupt(bench, read=1) == []
    for unread in (0, 1):
        start(bench)
        bench.ask(call(2 + unread, "u", seq=2 + unread))
        assert interrupt(bench, read=unread) == []
    up = revive(bench)
    assert up.lines == [INITIALIZE, INITIALIZED, call(1, seq=1), call(2, "u", seq=2), call(3, "u", seq=3)]
    assert interrupt(bench, read=2) != []  # the first of the three was read
    assert revive(bench).lines[2:] == [call(2, "u", seq=2), call(3, "u", seq=3)]
    assert bench.statuses() == ["IN_DOUBT", "PENDING", "PENDING"]


def test_a_call_that_comes_while_there_is_no_upstream_waits_for_one(bench: Bench) -> None:
    interrupt(bench)
    assert bench.ask(call(1, seq=1), call(2, seq=1)) == []
    assert bench.statuses() == ["PENDING"]
    assert revive(bench).lines[2:] == [call(1, seq=1)]
    assert bench.answer(result(1)) == [result(2), result(1)]


def test_a_call_that_waits_for_the_database_goes_to_the_next_process(bench: Bench, tmp_path: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    with database_held(tmp_path / "j.db"):
        bench.ask(call(2, seq=2))
        assert interrupt(bench) == []
        up = revive(bench)
        assert up.lines == [INITIALIZE, INITIALIZED]
    bench.loop.advance(1)
    assert up.lines == [INITIALIZE, INITIALIZED, call(2, seq=2)]
    assert bench.answer(result(2)) == [result(2)]


def test_what_was_about_to_leave_when_upstream_died_is_sent_or_refused_and_never_both(bench: Bench) -> None:
    """The rest of the turn in which it dies: a call waits for its commit, and a request behind the call."""
    bench.up.is_full = True
    bench.relay.from_downstream([call(1, seq=1), request("ping", 2), INITIALIZED])
    assert reasons(interrupt(bench)) == [(2, "upstream_lost")]
    assert revive(bench).lines == [INITIALIZE, INITIALIZED, call(1, seq=1)]


def test_a_call_that_was_cancelled_and_not_read_is_not_sent(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    bench.ask(cancel(1))
    assert interrupt(bench, read=2) == []
    assert bench.statuses() == ["NOT_SENT"]
    assert revive(bench).lines[2:] == []
    bench.call(call(2, seq=1), result(2))


def test_a_call_that_is_cancelled_while_it_waits_is_cancelled_at_the_next_process(bench: Bench) -> None:
    interrupt(bench)
    bench.ask(call(1, seq=1))
    bench.ask(cancel(1))
    assert revive(bench).lines[2:] == [call(1, seq=1), cancel(1)]


def test_a_cancel_of_what_the_dead_process_had_goes_nowhere(bench: Bench) -> None:
    bench.ask(call(1, seq=1), request("resources/list", 2))
    interrupt(bench)
    up = revive(bench)
    bench.ask(cancel(1), cancel(2))
    assert up.lines == [INITIALIZE, INITIALIZED]


def test_when_no_upstream_comes_any_more_what_waits_was_not_sent(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    interrupt(bench, read=1)
    start(bench)
    bench.ask(call(2, seq=2), request("ping", 3))
    bench.up.unread = len(INITIALIZE)
    before = len(bench.down.lines)
    bench.relay.upstream_gone(Cause.UPSTREAM_LOST)
    bench.loop.run()
    assert sorted(reasons(bench.down.lines[before:])) == [(n, "upstream_lost") for n in (1, 2, 3)]
    assert bench.statuses() == ["NOT_SENT", "NOT_SENT"]
    assert not bench.relay.has_left_doubt


def test_lines_that_wait_for_an_upstream_count_against_the_reading_of_downstream(bench: Bench) -> None:
    interrupt(bench)
    assert bench.relay.may_read_downstream
    bench.ask(call(1, arguments={"pad": "x" * 300_000}, seq=1))
    assert not bench.relay.may_read_downstream
    start(bench)
    assert not bench.relay.may_read_downstream
    bench.answer(GREETED)
    assert bench.relay.may_read_downstream


def test_the_journal_knows_which_process_gets_the_calls(bench: Bench, tmp_path: Path) -> None:
    """`journal resolve --not-executed` asks whether that process group still lives."""

    def pids() -> list[Any]:
        with read_only(tmp_path / "j.db") as database:
            return [row[0] for row in database.execute("SELECT upstream_pid FROM owners ORDER BY epoch")]

    interrupt(bench)
    start(bench, 11)
    assert not (tmp_path / "j.db").exists(), "a process that dies before the first call leaves no trace"
    bench.answer(GREETED)
    bench.ask(call(1, seq=1))
    assert pids() == [11]
    interrupt(bench, read=1)
    start(bench, 12)
    assert pids() == [12]


def test_upstream_is_asked_for_its_hints_again(tmp_path: Path) -> None:
    """It may be another version of the server; until it has said so, a call waits."""
    trusting = Settings(name="", version="", trusts_annotations=True, restarts_upstream=True)
    bench = Bench(tmp_path / "j.db", trusting)
    bench.ask(INITIALIZE)
    bench.answer(GREETED)
    bench.ask(INITIALIZED)

    def tell(read_only_hint: bool) -> None:
        asked = json.loads(bench.up.lines[-1])
        assert asked["method"] == "tools/list"
        tool = {"name": "t", "annotations": {"readOnlyHint": read_only_hint}}
        assert bench.answer(line({"jsonrpc": "2.0", "id": asked["id"], "result": {"tools": [tool]}})) == []

    tell(True)
    bench.ask(call(1))
    assert not (tmp_path / "j.db").exists()
    assert reasons(interrupt(bench)) == [(1, "upstream_lost")]
    up = revive(bench)
    assert len(up.lines) == 3
    bench.ask(call(2))
    assert len(up.lines) == 3
    tell(False)
    assert bench.statuses() == ["PENDING"]


# ----------------------------------------------------------------------------------------------------------- questions


def question(request_id: Any) -> bytes:
    return request("elicitation/create", request_id, message="sure?")


@pytest.mark.parametrize("request_id", [0, "0", 1.5, "\ud800", 10**30])
def test_an_answer_to_a_dead_process_is_swallowed_and_its_id_is_not_used_again_before(
    bench: Bench, request_id: Any
) -> None:
    assert bench.answer(question(request_id)) == [question(request_id)]
    interrupt(bench)
    up = revive(bench)
    assert bench.answer(question(request_id)) == []
    refusal = json.loads(up.lines[-1])
    assert (refusal["id"], refusal["error"]["code"]) == (request_id, -32603)
    assert bench.answer(question("other")) == [question("other")]
    bench.ask(result(request_id))
    assert len(up.lines) == 3, "it was meant for another process"
    assert bench.answer(question(request_id)) == [question(request_id)]
    bench.ask(result("other"), failure(request_id, 1, "no"))
    assert up.lines[3:] == [result("other"), failure(request_id, 1, "no")]


def test_questions_of_all_processes_that_are_gone_stay_open(bench: Bench) -> None:
    for request_id in (0, 1):
        bench.answer(question(request_id))
        interrupt(bench)
        up = revive(bench)
    assert bench.answer(question(0), question(1), question(2)) == [question(2)]
    bench.ask(result(0), result(1), result(2))
    assert up.lines[4:] == [result(2)]


def test_a_question_that_was_answered_in_time_leaves_its_id_free(bench: Bench) -> None:
    bench.answer(question(0))
    bench.ask(result(0))
    interrupt(bench)
    revive(bench)
    assert bench.answer(question(0)) == [question(0)]


def test_a_question_that_was_withdrawn_leaves_its_id_free_and_one_of_a_dead_process_does_not() -> None:
    withdrawn, lost = wire.Id("integer", 0), wire.Id("integer", 1)
    questions = Questions()
    assert questions.may_ask([withdrawn, lost])
    questions.withdrawn([withdrawn])
    questions.process_gone()
    assert questions.may_ask([withdrawn])
    questions.withdrawn([lost])  # by another process, whose question it is not
    assert not questions.may_ask([lost])


def test_a_question_that_its_server_cancelled_leaves_its_id_free(bench: Bench) -> None:
    assert bench.answer(question(0), cancel(0)) == [question(0), cancel(0)]
    interrupt(bench)
    up = revive(bench)
    assert bench.answer(question(0)) == [question(0)]
    bench.ask(result(0))
    assert up.lines[2:] == [result(0)]


def test_questions_and_requests_of_one_id_are_told_apart(bench: Bench) -> None:
    """A request of the client's under the id of a lost question is no answer to it."""
    bench.answer(question(5))
    interrupt(bench)
    up = revive(bench)
    bench.ask(request("ping", 5))
    assert up.lines[2:] == [request("ping", 5)]
    assert bench.answer(result(5)) == [result(5)]
    bench.ask(result(5))
    assert up.lines[2:] == [request("ping", 5)]


def test_an_array_with_an_answer_to_a_dead_process_does_not_pass(bench: Bench) -> None:
    bench.answer(question(0), question(1))
    interrupt(bench)
    up = revive(bench)
    array = b"[%b,%b]\n" % (result(0).rstrip(), request("ping", 3).rstrip())
    assert bench.ask(array) == []
    assert up.lines == [INITIALIZE, INITIALIZED, request("ping", 3)], "the rest of it does"
    bench.ask(b"[%b]\n" % result(7).rstrip())
    assert up.lines[3:] == [b"[%b]\n" % result(7).rstrip()]
    assert bench.answer(question(0)) == [question(0)], "the array has answered it"
    assert bench.answer(question(1)) == []


def test_what_stands_in_an_array_with_a_refused_question_is_refused_or_delivered(bench: Bench) -> None:
    bench.answer(question(0))
    interrupt(bench)
    up = revive(bench)
    bench.ask(call(9, seq=1), request("ping", 8))
    parts = [question(0), question(1), result(9), result(8), notification("x")]
    others = [question(1), result(8), notification("x"), result(9)]
    assert sorted(bench.answer(b"[%b]\n" % b",".join(part.rstrip() for part in parts))) == sorted(others)
    assert [json.loads(one)["id"] for one in up.lines[4:]] == [0]
    assert bench.statuses() == ["COMPLETED"]


def test_without_restarts_questions_are_not_followed(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db")
    said = b'{"id":0,"method":"ping"} garbage\n'
    assert bench.answer(said, said) == [said, said]


# ------------------------------------------------------------------------------------------------------ random lives

STEP: Final = st.sampled_from(
    ["call", "call", "cancel", "ping", "read", "read", "answer", "answer", "fill", "die", "greet"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_no_order_of_deaths_runs_a_call_twice_or_leaves_a_request_without_an_answer(steps: list[str]) -> None:
    """The judge is what upstreams have read: a call whose first byte was read once is never read again."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        bench = Bench(Path(folder) / "j.db", RESTARTING)
        numbers = itertools.count(1)
        asked: list[int] = []
        cancelled: set[int] = set()
        touched: list[int] = []  # calls of which a byte was read, by whatever process
        unanswered: list[Any] = []  # ids that the running process has read
        read_lines = 0
        bench.ask(INITIALIZE)
        bench.answer(GREETED)
        bench.ask(INITIALIZED)

        def read(limit: int | None = None, *, part: bool = False) -> None:
            nonlocal read_lines
            taken = bench.up.taken_bytes
            while read_lines < len(bench.up.lines) and limit != 0:
                end = sum(map(len, bench.up.lines[: read_lines + 1]))
                if end > taken:
                    return
                message = json.loads(bench.up.lines[read_lines])
                is_call = message["method"] == "tools/call"
                if is_call:
                    touched.append(message["id"])
                read_lines += 1
                bench.up.unread = taken - end
                if part and is_call:
                    bench.up.unread += 1  # all but its last byte
                    return
                if "id" in message:
                    unanswered.append(message["id"])
                limit = None if limit is None else limit - 1

        def die(*, part: bool = False) -> None:
            nonlocal read_lines
            if part:
                read(part=True)
            bench.up.unread = (
                bench.up.taken_bytes
                - sum(map(len, bench.up.lines[:read_lines]))
                + (1 if part and read_lines and b"tools/call" in bench.up.lines[read_lines - 1] else 0)
            )
            bench.relay.upstream_interrupted()
            bench.loop.run()
            unanswered.clear()
            read_lines = 0
            start(bench)

        for step in steps:
            match step:
                case "call" | "ping":
                    asked.append(next(numbers))
                    of = call(asked[-1], seq=asked[-1]) if step == "call" else request("ping", asked[-1])
                    bench.ask(of)
                case "cancel" if asked:
                    cancelled.add(asked[-1])
                    bench.ask(cancel(asked[-1]))
                case "read":
                    bench.up.take()
                    read(1)
                case "answer" if unanswered:
                    bench.answer(GREETED if unanswered[0] == "i" else result(unanswered[0]))
                    del unanswered[0]
                case "fill":
                    bench.up.is_full = True
                case "die":
                    die(part=len(asked) % 2 == 0)
        for _ in range(3):  # then all goes well
            bench.up.take()
            read()
            while unanswered:
                first = unanswered.pop(0)
                bench.answer(GREETED if first == "i" else result(first))
        assert len(touched) == len(set(touched)), "a call ran twice"
        answers = [json.loads(one)["id"] for one in bench.down.lines if b'"id":"i"' not in one]
        assert sorted(set(answers)) == sorted(answers), "a request was answered twice"
        assert set(asked) - cancelled <= set(answers), "a request was not answered"
        assert len({sequence for sequence, _, _ in bench.rows()}) == len(bench.rows()) if asked and touched else True
        bench.end()


# ------------------------------------------------------------------------------------------------------ real processes


def statuses(journal: Path) -> list[str]:
    return [row["status"] for row in rows(journal)]


def heard(ledger: Path) -> list[tuple[int, bytes]]:
    """What upstream processes have read, in order: who, and the line."""
    path = Path(f"{ledger}.heard")
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [(int(pid), said + b"\n") for pid, _, said in (one.partition(b" ") for one in lines)]


def kill_upstream(client: Client) -> int:
    """SIGKILL to the upstream that runs now; its process id. Until it is dead it may take bytes out of its pipe."""
    upstream = client.upstream_pid()
    os.kill(upstream, signal.SIGKILL)
    until(lambda: not is_running(upstream), "upstream is dead")
    return upstream


def stop_upstream(client: Client) -> int:
    """SIGSTOP to the upstream that runs now, so that it reads no more; its process id."""
    upstream = client.upstream_pid()
    os.kill(upstream, signal.SIGSTOP)
    until(lambda: process_state(upstream) == "T", "upstream is stopped, and not still in a read")
    return upstream


def is_shutting_down(client: Client) -> bool:
    """Whether the relay admits no calls any more; asked with one that has no place, so that it cannot run."""
    return bool(refusal_of(client.call("echo", {}, workflow="\0"))["reason"] == "shutting_down")


def test_the_client_of_a_dead_upstream_goes_on_with_another_and_sees_no_second_handshake(
    journal: Path, ledger: Path
) -> None:
    with relay(journal, ledger, "--restart-upstream", "2", modes=["hear"]) as client:
        assert text_of(client.call("append", {"n": 1}, seq=1)) == "effect 1"
        first = kill_upstream(client)
        assert text_of(client.call("append", {"n": 2}, seq=2)) == "effect 2"
        second = client.upstream_pid()
        said = {pid: [line for who, line in heard(ledger) if who == pid] for pid in (first, second)}
        assert said[second][:2] == said[first][:2]
        assert [json.loads(line)["method"] for line in said[second]] == [
            "initialize",
            "notifications/initialized",
            "tools/call",
        ]
        assert client.finish() == 0
        assert [json.loads(line)["id"] for line in client.lines()] == [1, 2, 3]
        assert process_state(second) == ""
    assert statuses(journal) == ["COMPLETED", "COMPLETED"]


def test_what_left_for_the_dead_upstream_is_in_doubt_and_what_it_has_not_read_runs_once(
    journal: Path, ledger: Path
) -> None:
    with relay(journal, ledger, "--restart-upstream", "1") as client:
        left = client.start_call("silent", {"n": 1}, seq=1)
        until(lambda: len(ledger_lines(ledger)) == 1, "the first effect")
        stop_upstream(client)
        unread = [client.start_call("append", {"n": n}, seq=n) for n in (2, 3)]
        other = client.request("resources/list")
        until(lambda: len(rows(journal)) == 3, "the rows are on disk")
        kill_upstream(client)
        facts = refusal_of(client.answer(left))
        assert (facts["reason"], facts["cause"], facts["sequence"]) == ("in_doubt", "upstream_lost", 1)
        assert refusal_of(client.answer(other))["code"] == 31005
        assert [text_of(client.answer(request_id)) for request_id in unread] == ["effect 2", "effect 3"]
        assert refusal_of(client.call("silent", {"n": 1}, seq=1))["reason"] == "in_doubt"
        assert client.finish() == 6
    assert [(row["status"], row["attempt"]) for row in rows(journal)] == [
        ("IN_DOUBT", 1),
        ("COMPLETED", 1),
        ("COMPLETED", 1),
    ]
    assert ledger_lines(ledger) == ['silent {"n": 1}', 'append {"n": 2}', 'append {"n": 3}']


def test_after_as_many_restarts_as_were_allowed_the_end_is_exit_5(journal: Path, ledger: Path) -> None:
    with relay(journal, ledger, "--restart-upstream", "2") as client:
        for n in (1, 2, 3):
            facts = refusal_of(client.call("die", {"n": n}, seq=n))
            assert (facts["reason"], facts["cause"]) == ("in_doubt", "upstream_lost")
        assert client.wait(10) == 5
        assert client.stderr_text().count("started again") == 2
        assert client.stderr_text().count("exit status 3") == 3
    assert len(ledger_lines(ledger)) == 3
    assert statuses(journal) == ["IN_DOUBT"] * 3


def test_a_command_that_cannot_be_started_again_costs_the_restarts_that_are_left(
    journal: Path, ledger: Path, tmp_path: Path
) -> None:
    """A program that was uninstalled in between: bounded, and what waited was not sent."""
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\nexec {' '.join(upstream_words(ledger))}\n", encoding="utf-8")
    program.chmod(0o755)
    with Client(relay_words("--journal", journal, "--restart-upstream", "3", upstream=[str(program)])) as client:
        client.shake_hands()
        program.unlink()
        stop_upstream(client)
        request_id = client.start_call("append", {"n": 1}, seq=1)
        until(lambda: journal.exists() and len(rows(journal)) == 1, "the row is on disk")
        kill_upstream(client)
        assert refusal_of(client.answer(request_id))["reason"] == "upstream_lost"
        assert client.wait(10) == 5
        assert client.stderr_text().count("could not be started") == 3
        assert "Traceback" not in client.stderr_text()
    assert statuses(journal) == ["NOT_SENT"]


def test_an_upstream_that_dies_whenever_it_is_started_again_is_exit_5(journal: Path, ledger: Path) -> None:
    """A call that none of them has read was not sent, whatever became of the handshakes."""
    born = f"{ledger}.born"
    script = f'if [ -e {born} ]; then exit 7; fi; touch {born}; exec "$@"'
    words = relay_words(
        "--journal", journal, "--restart-upstream", "3", upstream=["sh", "-c", script, "sh", *upstream_words(ledger)]
    )
    with Client(words) as client:
        client.shake_hands()
        client.call("append", {"n": 1}, seq=1)
        stop_upstream(client)
        request_id = client.start_call("append", {"n": 2}, seq=2)
        until(lambda: len(rows(journal)) == 2, "the row is on disk")
        kill_upstream(client)
        assert refusal_of(client.answer(request_id))["reason"] == "upstream_lost"
        assert client.wait(10) == 5
        assert client.stderr_text().count("exit status 7") == 3
    assert statuses(journal) == ["COMPLETED", "NOT_SENT"]
    assert len(ledger_lines(ledger)) == 1


def test_an_upstream_that_refuses_the_handshake_is_ended(journal: Path, ledger: Path) -> None:
    with relay(journal, ledger, "--restart-upstream", "1", modes=["rude"]) as client:
        Path(f"{ledger}.go").touch()
        kill_upstream(client)
        facts = refusal_of(client.call("append", {"n": 1}, seq=1))
        assert facts["reason"] == "upstream_lost"
        assert client.wait(10) == 5
        assert "refused the handshake" in client.stderr_text()
        assert [json.loads(line)["id"] for line in client.lines()] == [1, 2]
    assert ledger_lines(ledger) == []


def test_a_client_that_goes_while_the_handshake_is_under_way_is_not_waited_for_for_ever(
    journal: Path, ledger: Path
) -> None:
    """What waited behind the handshake was not sent: no doubt, exit 0."""
    script = f'if [ -e {ledger}.born ]; then exec sleep 60; fi; touch {ledger}.born; exec "$@"'
    words = ["sh", "-c", script, "sh", *upstream_words(ledger)]
    flags = ("--journal", journal, "--restart-upstream", "1", "--drain-timeout", "0.3")
    with Client(relay_words(*flags, upstream=words)) as client:
        client.shake_hands()
        kill_upstream(client)
        request_id = client.start_call("append", {"n": 1}, seq=1)
        until(lambda: journal.exists() and len(rows(journal)) == 1, "the row is on disk")
        assert client.finish(10) == 0
        assert refusal_of(client.answer(request_id))["reason"] == "upstream_lost"
    assert statuses(journal) == ["NOT_SENT"]
    assert ledger_lines(ledger) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_no_upstream_is_started_for_a_client_that_is_gone(
    journal: Path, ledger: Path, number: signal.Signals | None
) -> None:
    """It dies during the drain: exit 6, since a call is in doubt, and restarts are left."""
    with relay(journal, ledger, "--restart-upstream", "5") as client:
        upstream = client.upstream_pid()
        client.start_call("silent", {"n": 1}, seq=1)
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        if number is None:
            client.close_stdin()
            until(lambda: not watches_stdin(client.pid), "the end of input is noticed")
        else:
            client.signal(number)
            until(lambda: is_shutting_down(client), "the signal is heard")
        os.kill(upstream, signal.SIGKILL)
        assert client.wait(10) == 6
        assert "started again" not in client.stderr_text()
    assert statuses(journal) == ["IN_DOUBT"]


def test_a_dead_upstreams_group_is_ended_before_another_is_started(journal: Path, ledger: Path) -> None:
    """Two of its processes at one data file would do what nobody can know."""
    script = f'echo start >>{ledger}.order; exec "$@"'
    words = ["sh", "-c", script, "sh", *upstream_words(ledger)]
    with Client(relay_words("--journal", journal, "--restart-upstream", "1", upstream=words)) as client:
        client.shake_hands()
        command = (
            f"trap 'sleep 0.2; echo end >>{ledger}.order; exit' TERM; echo ready >>{ledger}.order; sleep 60 & wait"
        )
        client.call("spawn", {"command": command})
        order = Path(f"{ledger}.order")
        until(lambda: order.read_text("utf-8").split() == ["start", "ready"], "the grandchild is ready")
        first = kill_upstream(client)
        client.call("append", {"n": 1})
        assert order.read_text("utf-8").split() == ["start", "ready", "end", "start"]
        assert group_of(first) == []
        assert client.finish() == 0


def test_a_pipe_that_somebody_else_still_reads_leaves_doubt(journal: Path, ledger: Path) -> None:
    """A child that left the group has upstream's stdin: what is in it may be read, so it is sent to nobody else."""
    with relay(journal, ledger, "--restart-upstream", "1") as client:
        grandchild = int(text_of(client.call("spawn", {"command": "exec sleep 60", "leaves_group": True})))
        try:
            stop_upstream(client)
            request_id = client.start_call("append", {"n": 1}, seq=2)
            until(lambda: len(rows(journal)) == 2, "the row is on disk")
            kill_upstream(client)
            assert refusal_of(client.answer(request_id))["reason"] == "in_doubt"
            assert text_of(client.call("append", {"n": 2}, seq=3)) == "effect 1"
        finally:
            os.kill(grandchild, signal.SIGKILL)
        assert client.finish() == 6
    assert ledger_lines(ledger) == ['append {"n": 2}']


@pytest.mark.parametrize("fd", [0, 1])
def test_an_upstream_that_closes_its_stdin_or_stdout_is_ended_and_started_again(
    journal: Path, ledger: Path, fd: int
) -> None:
    with relay(journal, ledger, "--restart-upstream", "1") as client:
        upstream = client.upstream_pid()
        client.call("close", {"fd": fd}, seq=1)
        until(lambda: not os.path.lexists(f"/proc/{upstream}/fd/{fd}"), "it is closed")
        for n in (2, 3):
            assert text_of(client.call("append", {"n": n}, seq=n)) == f"effect {n - 1}"
        assert process_state(upstream) == ""
        assert client.finish() == 0
    assert statuses(journal) == ["COMPLETED"] * 3
    assert len(ledger_lines(ledger)) == 2


def test_what_upstream_said_last_counts_before_another_is_started(journal: Path, ledger: Path) -> None:
    """With a grandchild at its pipe there is no end of output, and its last answer has no line feed."""
    with relay(journal, ledger, "--restart-upstream", "1") as client:
        grandchild = int(text_of(client.call("spawn", {"command": "exec sleep 60", "leaves_group": True})))
        try:
            assert text_of(client.call("torn", {"n": 1}, seq=2)) == "torn"
            assert text_of(client.call("append", {"n": 2}, seq=3)) == "effect 2"
        finally:
            os.kill(grandchild, signal.SIGKILL)
        assert client.finish() == 0
    assert statuses(journal) == ["COMPLETED"] * 3


def test_answers_to_a_dead_upstream_and_its_ids_do_not_reach_the_next(journal: Path, ledger: Path) -> None:
    def sure(client: Client, request_id: int, content: dict[str, Any]) -> None:
        client.send(line_of({"jsonrpc": "2.0", "id": request_id, "result": {"action": "accept", "content": content}}))

    def asked(client: Client) -> int:
        return sum(b"elicitation/create" in line for line in client.lines())

    with relay(journal, ledger, "--restart-upstream", "1", modes=["hear"]) as client:
        first = client.start_call("ask", {"id": 0}, seq=1)
        until(lambda: asked(client) == 1, "the question")
        kill_upstream(client)
        assert refusal_of(client.answer(first))["reason"] == "in_doubt"
        refused = json.loads(text_of(client.call("ask", {"id": 0}, seq=2)))
        assert refused["error"]["code"] == -32603
        assert asked(client) == 1
        sure(client, 0, {"for": "the dead"})
        third = client.start_call("ask", {"id": 0}, seq=3)
        until(lambda: asked(client) == 2, "the question comes")
        sure(client, 0, {"for": "the living"})
        assert json.loads(text_of(client.answer(third)))["answer"]["content"] == {"for": "the living"}
        assert not any(b"the dead" in line for _, line in heard(ledger))
        assert client.finish() == 6


def test_a_modern_session_goes_on_without_a_handshake(journal: Path, ledger: Path) -> None:
    with relay(journal, ledger, "--restart-upstream", "1", modes=["hear"], handshake=False) as client:
        ask = {"jsonrpc": "2.0", "method": "server/discover", "params": {"_meta": MODERN}}
        client.send(line_of({**ask, "id": "d"}))
        client.answer("d")
        first = kill_upstream(client)
        client.send(call_line("append", {"n": 1}, request_id=1, seq=1, meta=MODERN))
        assert text_of(client.answer(1)) == "effect 1"
        assert [json.loads(line)["method"] for pid, line in heard(ledger) if pid != first] == ["tools/call"]
        assert client.finish() == 0


def test_a_journal_serves_a_relay_that_restarted_its_upstream_and_was_killed(journal: Path, ledger: Path) -> None:
    with relay(journal, ledger, "--restart-upstream", "1") as client:
        client.call("append", {"n": 1}, seq=1)
        kill_upstream(client)
        client.call("append", {"n": 2}, seq=2)
        client.start_call("silent", {"n": 3}, seq=3)
        until(lambda: len(ledger_lines(ledger)) == 3, "the effect")
        upstream = client.upstream_pid()
        client.kill()
        until(lambda: not is_running(upstream), "upstream sees the end of its input")
    with relay(journal, ledger) as client:
        assert [text_of(client.call("append", {"n": n}, seq=n)) for n in (1, 2)] == ["effect 1", "effect 2"]
        assert refusal_of(client.call("silent", {"n": 3}, seq=3))["cause"] == "relay_lost"
        assert client.finish() == 0
    assert len(ledger_lines(ledger)) == 3


# ------------------------------------------------------------------------------- a parent's death, and a second start


def test_when_the_agent_is_killed_its_call_is_finished_and_nothing_is_left_behind(journal: Path, ledger: Path) -> None:
    """SIGKILL to our parent alone: we see the end of input, journal what still comes, and take upstream with us."""
    words = relay_words("--journal", journal, "--restart-upstream", "3", upstream=upstream_words(ledger, "deaf"))
    with Client([sys.executable, str(TESTS / "agent.py"), *words]) as agent:
        agent.shake_hands()
        agent.start_call("slow", {"n": 1}, seq=1)
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        family = descendants_of(agent.pid)
        assert len(family) == 2
        agent.kill()
        assert all(is_running(pid) for pid in family)
        Path(f"{ledger}.go").touch()
        until(lambda: not any(is_running(pid) for pid in family), "relay and upstream are gone")
    assert statuses(journal) == ["COMPLETED"]
    with relay(journal, ledger) as client:
        assert text_of(client.call("slow", {"n": 1}, seq=1)) == "effect 1"
    assert len(ledger_lines(ledger)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_that_starts_the_command_twice_and_kills_the_first_finds_all_as_it_was(
    journal: Path, ledger: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Also with rows in the journal that the probe could have taken over: it has written nothing and holds nothing."""
    with relay(journal, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        client.kill()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith("-shm")}
    words = relay_words("--journal", journal, "--restart-upstream", "3", upstream=upstream_words(ledger))
    with Client(words) as probe, Client(words) as session:
        upstream = probe.upstream_pid()
        probe.send(line_of({"jsonrpc": "2.0", "id": "probe", "method": "server/discover", "params": {"_meta": MODERN}}))
        probe.answer("probe")
        probe.signal(number)
        begun = time.monotonic()
        assert probe.wait() == (0 if number is signal.SIGTERM else -number)
        until(lambda: not is_running(upstream), "the probe's upstream is gone")
        assert time.monotonic() - begun < 4
        after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith("-shm")}
        assert {name: after[name] for name in before} == before
        session.shake_hands()
        assert text_of(session.call("append", {"n": 1}, seq=1)) == "effect 1"
        assert text_of(session.call("append", {"n": 2}, seq=2)) == "effect 2"
        assert session.finish() == 0
    assert statuses(journal) == ["COMPLETED", "COMPLETED"]
