"""Places in the life of a relay: `--unpinned` in its four ways, host call ids, doubt in the way, pruned rows."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from memory import (
    Bench,
    FakeSink,
    call,
    cancel,
    database_held,
    error_of,
    failure,
    journal_path,
    lose_upstream,
    options,
    reasons,
    request,
    resolve,
    result,
    text_of,
)

from locate import Unpinned

ORDERED: Final = options("ordered")
MATCHED: Final = options("matched")
UNDELIVERED: Final = options("undelivered")
WITH_IDS: Final = options(call_id_keys=("host/id", "other/id"))


@pytest.fixture
def path() -> Iterator[Path]:
    yield from journal_path()


@pytest.fixture
def bench(path: Path) -> Bench:
    return Bench(path)


def run(bench: Bench, *tools: str) -> None:
    """Unpinned calls, answered each with its tool's name and its number."""
    for number, tool in enumerate(tools, 1):
        bench.call(call(number, tool), result(number, f"{tool}{number}"))


def replay(bench: Bench, *tools: str) -> list[str]:
    """The texts of unpinned calls that are all answered without upstream."""
    sent = len(bench.up.lines)
    texts = [text_of(*bench.ask(call(f"r{number}", tool))) for number, tool in enumerate(tools)]
    assert bench.up.lines[sent:] == []
    return texts


def with_id(number: Any, tool: str, host_id: str, **more: Any) -> bytes:
    return call(number, tool, meta={"host/id": host_id}, **more)


# ------------------------------------------------------------------------------------------------------------------ new


def test_without_a_pin_nothing_is_answered_from_the_journal(bench: Bench) -> None:
    """RM-01: the second intended, identical call is a second call."""
    run(bench, "now", "now")
    again = bench.restart()
    again.call(call(1, "now"), result(1))
    assert [place[1] for place in again.places()] == [1, 2, 3]


# -------------------------------------------------------------------------------------------------------------- ordered


def test_ordered_replays_a_whole_run_and_goes_on_where_it_ended(bench: Bench) -> None:
    """RM-01, RM-13."""
    first = bench.restart(ORDERED)
    run(first, "now", "now")
    again = first.restart()
    assert replay(again, "now", "now") == ["now1", "now2"]
    again.call(call(3, "now"), result(3, "now3"))
    third = again.restart()
    assert replay(third, "now") == ["now1"]
    assert [status for *_, status in third.rows()] == ["COMPLETED"] * 3, "who stops early leaves the rest as it was"


def test_ordered_keeps_the_order_of_requests_whatever_the_order_of_answers(bench: Bench) -> None:
    """RM-07: parallel calls, of which each took the next place when it was read."""
    first = bench.restart(ORDERED)
    assert first.ask(call(1, "a"), call(2, "b"), call(3, "c")) == []
    for number in (3, 1, 2):
        first.answer(result(number, "abc"[number - 1]))
    again = first.restart()
    got = again.ask(call(7, "a"), call(8, "b"), call(9, "c"))
    assert [text_of(line) for line in got] == ["a", "b", "c"]
    third = again.restart()
    assert third.error(call(1, "b"))["facts"]["expected"]["tool"] == "a"
    assert replay(third, "a", "b") == ["a", "b"], "a refused call moves nothing"


def test_ordered_waits_at_a_row_in_doubt_until_it_is_settled(bench: Bench, path: Path) -> None:
    first = bench.restart(ORDERED)
    run(first, "a")
    first.ask(call(2, "pay"), call(3, "c"))
    first.answer(result(3, "c3"))
    again = first.restart()
    assert replay(again, "a") == ["a1"]
    for tool in ("pay", "c"):
        facts = again.error(call(1, tool))["facts"]
        assert (facts["reason"], facts["sequence"]) == ("in_doubt", 2)
    again.end()
    resolve(path, 2, "COMPLETED", "paid")
    third = bench.restart()
    assert replay(third, "a", "pay", "c") == ["a1", "paid", "c3"]


def test_ordered_runs_what_did_not_run_at_its_own_place(bench: Bench, path: Path) -> None:
    first = bench.restart(ORDERED)
    first.ask(call(1, "pay"), call(2, "c"))
    first.answer(result(2, "c2"))
    first.end()
    resolve(path, 1, "NOT_EXECUTED")
    again = bench.restart()
    again.call(call(1, "pay"), result(1, "paid"))
    assert replay(again, "c") == ["c2"]
    assert again.rows() == [(1, 1, "NOT_EXECUTED"), (2, 1, "COMPLETED"), (1, 2, "COMPLETED")]


def test_ordered_passes_over_rows_that_pins_took(bench: Bench) -> None:
    first = bench.restart(ORDERED)
    first.call(call(1, "a", seq=1000), result(1, "a"))
    first.call(call(2, "b"), result(2, "b"))
    first.call(call(3, "c", seq=2000), result(3, "c"))
    first.call(call(4, "d"), result(4, "d"))
    assert [place[1] for place in first.places()] == [1000, 1001, 2000, 2001]
    again = first.restart()
    pinned = [call(1, "a", seq=1000), call(3, "c", seq=2000)]
    got = again.ask(pinned[0], call(2, "b"), pinned[1], call(4, "d"))
    assert [text_of(line) for line in got] == list("abcd")
    third = again.restart()
    assert [text_of(line) for line in third.ask(*pinned, call(2, "b"), call(4, "d"))] == list("acbd")


def test_ordered_takes_a_dropped_place_again(bench: Bench, path: Path) -> None:
    first = bench.restart(ORDERED)
    run(first, "a")
    with database_held(path):
        first.ask(call(2, "b"))
        first.ask(cancel(2))
    first.loop.advance(0.1)
    first.call(call(3, "c"), result(3))
    assert [place[1] for place in first.places()] == [1, 2]


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("way", ["busy", "cancel", "timeout"])
def test_a_call_that_was_refused_as_not_run_has_not_passed_its_place(
    bench: Bench, path: Path, way: str, forks: bool
) -> None:
    first = bench.restart(ORDERED)
    first.ask(*(call(number, tool) for number, tool in enumerate("abc", 1)))
    first.answer(result(1, "a"), result(3, "c"))
    first.end()
    resolve(path, 2, "NOT_EXECUTED")
    again = bench.restart(options("ordered", forks=forks, call_timeout_s=1 if way == "timeout" else None))
    assert replay(again, "a") == ["a"]
    with database_held(path):
        again.ask(call(2, "b"))
        again.loop.advance(1.1 if way == "timeout" else 0.1)
        if way == "cancel":
            again.ask(cancel(2))
        elif way == "busy":
            again.loop.advance(5)
    again.loop.advance(0.1)
    again.call(call(3, "b"), result(3, "b"))
    assert replay(again, "c") == ["c"]
    third = again.restart()
    assert replay(third, "a", "b", "c") == ["a", "b", "c"]
    assert {place[0] for place in third.places()} == {"w"}


def test_a_pin_that_was_refused_as_not_run_has_not_taken_its_place(bench: Bench, path: Path) -> None:
    first = bench.restart(options("ordered", forks=True))
    first.ask(call(1, "a"), call(2, "b"))
    first.answer(result(2, "b"))
    first.end()
    resolve(path, 1, "NOT_EXECUTED")
    again = bench.restart()
    with database_held(path):
        again.ask(call(1, "a", seq=1), call(2, "x", seq=9))
        again.loop.advance(5.1)
    again.loop.advance(0.1)
    again.call(call(3, "a"), result(3))
    assert replay(again, "b") == ["b"]
    assert again.places()[-1][:3] == ("w", 1, 2)


def test_what_another_process_did_after_a_refusal_is_found_on_record(bench: Bench, path: Path) -> None:
    run(bench, "a")
    first = bench.restart(ORDERED)
    assert replay(first, "a") == ["a1"]
    with database_held(path):
        first.ask(call(2, "pay"))
        first.loop.advance(5.1)
    first.loop.advance(0.1)
    other = Bench(path, ORDERED)
    assert text_of(*other.ask(call(1, "a"))) == "a1"
    other.call(call(2, "pay"), result(2, "paid"))
    other.end()
    assert replay(first, "pay") == ["paid"]


def interrupt(bench: Bench) -> None:
    """The server ends, and had read what the pipe took; another one begins."""
    bench.relay.upstream_interrupted()
    bench.loop.run()
    bench.up = FakeSink()
    bench.relay.upstream_started(bench.up, 77)
    bench.loop.run()


def test_the_retry_of_a_call_that_was_not_sent_is_an_attempt_at_its_place(bench: Bench) -> None:
    first = bench.restart(options("ordered", call_timeout_s=1, restarts_upstream=True))
    first.call(call(1, "a"), result(1, "a"))
    first.up.is_full = True
    first.ask(call(2, "pay"), call(3, "b"))
    first.loop.advance(1.1)
    interrupt(first)
    assert first.statuses() == ["COMPLETED", "NOT_SENT", "NOT_SENT"]
    first.call(call(4, "b"), result(4, "b"))
    first.call(call(5, "pay"), result(5, "paid"))
    first.call(call(6, "z"), result(6, "z"))
    again = first.restart()
    assert replay(again, "a", "pay", "b", "z") == ["a", "paid", "b", "z"]


def test_a_call_that_was_not_sent_and_does_not_come_again_holds_up_nobody(bench: Bench) -> None:
    """No command of an operator's could help: nothing of it is in doubt."""
    first = bench.restart(options("ordered", restarts_upstream=True))
    run(first, "a")
    first.up.is_full = True
    first.ask(call(2, "c"), cancel(2))
    interrupt(first)
    first.call(call(3, "d"), result(3, "d"))
    again = first.restart()
    assert replay(again, "a", "d") == ["a1", "d"]
    again.call(call(1, "c"), result(1, "c"))
    assert replay(again.restart(), "a", "c", "d") == ["a1", "c", "d"]


@pytest.mark.parametrize("way", ["cancel", "timeout", "handed over"])
def test_an_answer_that_nobody_got_is_the_next_equal_calls(bench: Bench, path: Path, way: str) -> None:
    first = bench.restart(options("ordered", call_timeout_s=1 if way == "timeout" else None))
    run(first, "a")
    first.ask(call(2, "pay"))
    if way == "cancel":
        first.ask(cancel(2))
    first.loop.advance(1.1)
    first.call(call(3, "b"), result(3, "b"))
    if way == "handed over":
        with database_held(path):
            first.answer(result(2, "paid"))
            first.loop.advance(5.1)
        first.loop.advance(0.1)
    else:
        first.answer(result(2, "paid"))
    assert replay(first, "pay") == ["paid"]
    assert replay(first.restart(), "a", "pay", "b") == ["a1", "paid", "b"]


def test_a_branch_that_was_not_written_leaves_the_place_as_it_was(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    again = bench.restart(options("ordered", forks=True))
    assert replay(again, "a") == ["a1"]
    with database_held(path):
        again.ask(call(1, "x"))
        again.loop.advance(5.1)
    again.loop.advance(0.1)
    assert replay(again, "b") == ["b2"]
    assert again.select("SELECT * FROM forks") == []


def test_what_was_only_drafted_is_nothing_that_a_history_went_on_to(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    again = bench.restart(options(forks=True))
    with database_held(path):
        again.ask(call(1, "c", seq=3), call(2, "d", seq=4))
        assert again.error(call(3, "x", seq=2))["facts"]["reason"] == "diverged", "as long as it may yet be written"
        again.loop.advance(5.1)
    again.loop.advance(0.1)
    again.call(call(4, "x", seq=2), result(4))
    assert again.places()[-1] == ("w~1", 2, 1, "x")


# -------------------------------------------------------------------------------------------------------------- matched


def test_matched_answers_from_earlier_processes_in_whatever_order_and_each_row_once(bench: Bench) -> None:
    run(bench, "a", "b", "a")
    again = bench.restart(MATCHED)
    assert replay(again, "b", "a", "a") == ["b2", "a1", "a3"]
    again.call(call(1, "a"), result(1, "new"))
    again.call(call(2, "a"), result(2, "newer"))
    third = again.restart()
    assert replay(third, "a", "a", "a", "a") == ["a1", "a3", "new", "newer"]


def test_matched_replays_failures_and_leaves_what_is_not_finished(bench: Bench, path: Path) -> None:
    bench.call(call(1, "a"), failure(1, 7, "no"))
    bench.ask(call(2, "b"))
    bench.up.unread = len(call(2, "b"))
    lose_upstream(bench)
    again = bench.restart(MATCHED)
    assert again.ask(call(3, "a")) == [failure(3, 7, "no")]
    again.call(call(4, "b"), result(4))
    assert again.rows()[-1] == (3, 1, "COMPLETED"), "what was not sent waits for its pin"


def test_matched_does_not_answer_from_a_row_in_doubt_and_does_not_run_it_either(bench: Bench) -> None:
    run(bench, "a")
    bench.ask(call(2, "pay"))
    again = bench.restart(MATCHED)
    assert again.error(call(1, "pay"))["facts"]["sequence"] == 2
    assert replay(again, "a") == ["a1"], "replays go on"


# ---------------------------------------------------------------------------------------------------------- undelivered


def test_undelivered_answers_only_what_the_client_had_not_read(bench: Bench) -> None:
    run(bench, "a")
    bench.ask(call(2, "b"))  # by now the answer to a was read: the mark rides in this commit
    bench.down.unread = 1
    bench.answer(result(2, "b2"))
    bench.call(call(3, "c", workflow="v"), result(3))
    assert bench.select("SELECT sequence, delivered FROM calls WHERE workflow_id = 'w'") == [(1, 1), (2, 0)]
    again = bench.restart(UNDELIVERED)
    assert replay(again, "b") == ["b2"]
    again.call(call(1, "a"), result(1, "again"))
    again.call(call(2, "b"), result(2, "again"))


def test_a_replay_that_was_read_is_delivered_too(bench: Bench) -> None:
    run(bench, "a")
    again = bench.restart(UNDELIVERED)
    assert again.select("SELECT delivered FROM calls") == [(0,)]
    assert replay(again, "a") == ["a1"]
    again.ask(call(1, "b"))
    assert again.select("SELECT delivered FROM calls") == [(1,), (0,)]
    third = again.restart()
    third.ask(call(1, "a", seq=9))
    assert len(third.up.lines) == 1


def test_an_answer_that_still_waits_for_its_turn_does_not_count_as_read(bench: Bench) -> None:
    """The mark would be on disk before the answer's first byte goes down."""
    run(bench, "a", "b")
    again = bench.restart(UNDELIVERED)
    again.call(call(1, "x"), result(1))
    again.ask(call(2, "y"))
    again.relay.from_upstream([result(2)])  # waits for the disk, and all behind it for its line
    again.relay.from_downstream([call(3, "b"), call(4, "z")])
    again.loop.run()
    assert again.select("SELECT delivered FROM calls WHERE tool_name = 'b'") == [(0,)]
    again.ask(call(5, "z"))
    assert again.select("SELECT delivered FROM calls WHERE tool_name = 'b'") == [(1,)]


@pytest.mark.parametrize("is_stuck", [True, False])
def test_where_the_system_does_not_tell_the_next_line_says_that_answers_were_read(bench: Bench, is_stuck: bool) -> None:
    bench.down.unread = None
    bench.down.is_full = is_stuck
    run(bench, "a")
    bench.ask(call(2, "b"))
    assert bench.select("SELECT delivered FROM calls ORDER BY sequence") == [(int(not is_stuck),), (0,)]


def test_what_was_read_is_recorded_at_the_end_but_a_process_that_only_replayed_writes_nothing(bench: Bench) -> None:
    run(bench, "a")
    bench.relay.commit_riders()
    assert bench.select("SELECT delivered FROM calls") == [(1,)]
    run(bench, "b")
    again = bench.restart()
    again.ask(call(1, "b", seq=2))
    again.relay.commit_riders()
    assert again.select("SELECT delivered FROM calls ORDER BY sequence") == [(1,), (0,)]


def test_a_late_answer_that_nobody_waited_for_was_not_delivered(bench: Bench) -> None:
    bench.ask(call(1, "a"), cancel(1))
    bench.answer(result(1, "late"))
    bench.ask(call(2, "b"))
    again = bench.restart(UNDELIVERED)
    assert replay(again, "a") == ["late"]


def test_a_mark_for_a_row_that_was_pruned_meanwhile_is_dropped(bench: Bench, path: Path) -> None:
    run(bench, "a")
    again = bench.restart()
    assert len(again.ask(call(1, "a", seq=1))) == 1
    prune(path, "w", 1)
    again.call(call(2, "b"), result(2))
    assert again.rows() == [(2, 1, "COMPLETED")]


def test_a_row_that_an_operator_settled_is_not_delivered(bench: Bench, path: Path) -> None:
    bench.ask(call(1, "pay"))
    bench.end()
    resolve(path, 1, "COMPLETED", "paid")
    assert replay(bench.restart(UNDELIVERED), "pay") == ["paid"]


# ------------------------------------------------------------------------------------------------------------- call ids


def test_a_host_that_sends_an_id_again_gets_the_answer_that_is_on_record(bench: Bench) -> None:
    first = bench.restart(WITH_IDS)
    first.call(with_id(1, "pay", "x"), result(1, "paid"))
    assert text_of(*first.ask(with_id(2, "pay", "x"))) == "paid"
    again = first.restart()
    assert text_of(*again.ask(with_id(3, "pay", "x"))) == "paid"
    assert text_of(*again.ask(call(4, "pay", meta={"other/id": "x"}))) == "paid", "whichever key it stands under"
    again.call(with_id(5, "pay", "y"), result(5))
    assert again.select("SELECT sequence, call_id FROM calls") == [(1, "x"), (2, "y")]


@pytest.mark.parametrize("value", [None, 7, "", "x" * 201, ["x"]])
def test_what_cannot_be_an_id_is_none(bench: Bench, value: Any) -> None:
    first = bench.restart(WITH_IDS)
    first.call(call(1, "pay", meta={"host/id": value}), result(1))
    first.call(call(2, "pay", meta={"host/id": value}), result(2))


def test_the_same_id_with_another_call_has_diverged(bench: Bench) -> None:
    first = bench.restart(WITH_IDS)
    first.call(with_id(1, "pay", "x", arguments={"n": 1}), result(1))
    facts = first.error(with_id(2, "pay", "x", arguments={"n": 2}))["facts"]
    assert (facts["reason"], facts["sequence"], facts["differs"]) == ("diverged", 1, ["/n"])


def test_a_retry_under_the_same_id_joins_the_call_under_way(bench: Bench) -> None:
    first = bench.restart(WITH_IDS)
    first.ask(with_id(1, "pay", "x"), with_id(2, "pay", "x"))
    assert len(first.up.lines) == 1
    assert len(first.answer(result(1))) == 2


def test_a_retry_of_a_call_in_doubt_is_refused_and_other_calls_look_at_their_own_rows(bench: Bench) -> None:
    first = bench.restart(WITH_IDS)
    first.call(with_id(1, "a", "done"), result(1, "a1"))
    first.ask(with_id(2, "pay", "x"))
    again = first.restart()
    assert again.error(with_id(3, "pay", "x"))["facts"]["sequence"] == 2
    assert text_of(*again.ask(with_id(4, "a", "done"))) == "a1"


def test_a_call_that_was_answered_from_anothers_row_keeps_it_under_its_own_id(bench: Bench) -> None:
    run(bench, "now", "now")
    again = bench.restart(options("matched", call_id_keys=("host/id",)))
    asked = [with_id(n, "now", host_id) for n, host_id in enumerate("xyxy")]
    assert [text_of(*again.ask(one)) for one in asked] == ["now1", "now2", "now1", "now2"]


@pytest.mark.parametrize("first_end", ["not sent", "input", "not executed"])
def test_an_id_means_what_its_place_holds_now_and_not_the_attempt_that_carried_it(
    bench: Bench, path: Path, first_end: str
) -> None:
    first = bench.restart(WITH_IDS)
    first.ask(with_id(1, "pay", "x"))
    if first_end == "input":
        first.answer(failure(1, -32042, "go", {"elicitations": []}))
    elif first_end == "not sent":
        first.up.unread = first.up.taken_bytes
        lose_upstream(first)
    else:
        first.end()
        resolve(path, 1, "NOT_EXECUTED")
    second = bench.restart()
    second.call(call(2, "pay", seq=1), result(2, "paid"))
    assert text_of(*second.ask(with_id(3, "pay", "x"))) == "paid"
    third = second.restart()
    assert text_of(*third.ask(with_id(4, "pay", "x"))) == "paid"
    assert third.ask(call(5)) == [], "and the journal is well"


def test_a_call_that_joined_one_that_was_never_sent_is_free_to_come_again(bench: Bench, path: Path) -> None:
    first = bench.restart(WITH_IDS)
    run(first, "a")
    with database_held(path):
        first.ask(with_id(2, "pay", "x", seq=2), with_id(3, "pay", "y", seq=2))
        first.loop.advance(5.1)
    first.loop.advance(0.1)
    first.call(call(4, "other"), result(4))
    first.call(with_id(5, "pay", "y"), result(5, "paid"))
    assert [place[1:] for place in first.places()[1:]] == [(2, 1, "other"), (3, 1, "pay")]


# ---------------------------------------------------------------------------------------------------- doubt in the way


@pytest.mark.parametrize("unpinned", Unpinned)
def test_while_a_workflow_has_a_row_in_doubt_no_new_call_without_a_pin_runs(bench: Bench, unpinned: Unpinned) -> None:
    first = bench.restart(options(unpinned))
    first.ask(call(1, "pay", seq=5), call(2, "mail", seq=3))
    again = first.restart()
    facts = again.error(call(3, "look"))["facts"]
    assert (facts["reason"], facts["sequence"]) == ("in_doubt", 3), "the lowest"
    assert again.ask(call(4, "look", seq=9), call(5, "look", workflow="v")) == []


def times_out(bench: Bench, line: bytes) -> None:
    """A call that the server has got and does not answer in time."""
    assert bench.ask(line) == []
    bench.loop.advance(1.1)
    assert error_of(bench.down.lines[-1])["facts"]["cause"] == "timeout"


@pytest.mark.parametrize("forks", [False, True])
def test_a_call_that_timed_out_is_not_made_again_at_the_next_place_in_order(
    bench: Bench, path: Path, forks: bool
) -> None:
    first = bench.restart(ORDERED)
    first.ask(call(1, "pay"), call(2, "look" if forks else "pay"))
    if forks:
        first.answer(result(2))
    first.end()
    for sequence in (1,) if forks else (1, 2):
        resolve(path, sequence, "NOT_EXECUTED")
    again = bench.restart(options("ordered", forks=forks, call_timeout_s=1))
    times_out(again, call(1, "pay"))
    facts = again.error(call(2, "pay"))["facts"]
    assert (facts["reason"], facts["workflow_id"], facts["sequence"]) == ("in_doubt", "w", 1)
    assert len(again.up.lines) == 1
    again.answer(result(1, "late"))
    assert replay(again, "pay") == ["late"]


def test_a_leg_that_timed_out_is_not_made_again_in_another_open_round(bench: Bench) -> None:
    visit: dict[str, list[str]] = {"elicitations": []}
    first = bench.restart(options(call_timeout_s=1))
    first.ask(call(1, "pay"), call(2, "pay"))
    first.answer(failure(1, -32042, "go", visit), failure(2, -32042, "go", visit))
    times_out(first, call(3, "pay"))
    assert first.error(call(4, "pay"))["facts"]["sequence"] == 1


def test_a_call_that_timed_out_is_not_made_again_under_the_id_of_one_that_did_not_run(bench: Bench, path: Path) -> None:
    first = bench.restart(WITH_IDS)
    first.ask(with_id(1, "pay", "x"))
    first.end()
    resolve(path, 1, "NOT_EXECUTED")
    again = bench.restart(options(call_id_keys=("host/id",), call_timeout_s=1))
    times_out(again, with_id(1, "pay", "y"))
    facts = again.error(with_id(2, "pay", "x"))["facts"]
    assert (facts["reason"], facts["sequence"]) == ("in_doubt", 2)
    again.answer(result(1, "late"))
    again.call(with_id(3, "pay", "x"), result(3))
    assert again.rows()[-1] == (1, 2, "COMPLETED"), "once that is over, its own place is free"


def test_a_pinned_call_looks_at_no_call_that_timed_out_elsewhere(bench: Bench) -> None:
    first = bench.restart(options(call_timeout_s=1))
    times_out(first, call(1, "pay"))
    assert first.ask(call(2, "pay", seq=7)) == []


def test_a_call_that_was_lost_with_its_server_is_not_made_again_at_another_place(bench: Bench, path: Path) -> None:
    first = bench.restart(ORDERED)
    first.ask(call(1, "pay"), call(2, "pay"))
    first.end()
    for sequence in (1, 2):
        resolve(path, sequence, "NOT_EXECUTED")
    again = bench.restart(options("ordered", restarts_upstream=True))
    again.ask(call(1, "pay"))
    interrupt(again)
    facts = again.error(call(2, "pay"))["facts"]
    assert (facts["reason"], facts["sequence"]) == ("in_doubt", 1)


def test_an_answer_that_could_only_be_handed_over_is_in_doubt_until_it_is_recorded(bench: Bench, path: Path) -> None:
    bench.ask(call(1, "pay"))
    with database_held(path):
        bench.answer(result(1, "paid"))
        bench.loop.advance(5.1)
        assert error_of(bench.down.lines[-1])["facts"]["status"] == "IN_DOUBT"
        for tool in ("pay", "mail"):
            facts = bench.error(call(2, tool))["facts"]
            assert (facts["reason"], facts["sequence"], facts["cause"]) == ("in_doubt", 1, "journal_unavailable")
    bench.loop.advance(0.1)
    bench.call(call(3, "mail"), result(3))
    assert bench.statuses() == ["COMPLETED", "COMPLETED"]


def test_doubt_of_our_own_stops_new_calls_as_an_earlier_owners_does(bench: Bench) -> None:
    bench.ask(call(1, "pay"))
    bench.answer(failure(1, -32000, "Connection closed"))
    assert bench.error(call(2, "look"))["facts"]["cause"] == "upstream_lost"


def test_a_lost_task_is_doubt_like_any_other(bench: Bench) -> None:
    bench.call(call(1, "t", task={}), json_result(1, {"task": {"taskId": "x"}}))
    bench.ask(request("tasks/get", 2, taskId="x"))
    bench.answer(failure(2, -32602, "unknown task"))
    assert bench.error(call(3, "look"))["facts"]["sequence"] == 1
    assert bench.restart().error(call(4, "look"))["facts"]["sequence"] == 1


def json_result(number: int, body: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": body}).encode() + b"\n"


def test_once_an_operator_has_settled_it_new_calls_run_again(bench: Bench, path: Path) -> None:
    bench.ask(call(1, "pay"))
    watcher = bench.restart()
    assert watcher.error(call(2, "look"))["code"] == 31001
    resolve(path, 1, "FAILED", "it did not")
    assert watcher.ask(call(3, "look")) == [], "the same process, which had given the journal back"
    error = watcher.error(call(4, "pay", seq=1))
    assert (error["code"], error["message"]) == (31007, "it did not")


def test_an_attempt_that_was_not_sent_does_not_settle_one_before_it(bench: Bench, path: Path) -> None:
    """Which only a trusted hint can bring about: without it, what may have run does not run again."""
    bench.ask(call(1, "set", seq=1))
    again = bench.restart()
    add_attempt(path, "NOT_SENT")
    for asked in (call(2, "set", seq=1), call(3, "look")):
        facts = again.error(asked)["facts"]
        assert (facts["reason"], facts["sequence"], facts["status"]) == ("in_doubt", 1, "IN_DOUBT")
    assert again.up.lines == []


def add_attempt(path: Path, status: str) -> None:
    """A second attempt at the first place, that ended so."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("INSERT INTO owners VALUES (2, 1, NULL, 1)")
        database.execute("INSERT INTO doubts VALUES (1, 'relay_lost', 1, 1)")
        database.execute(
            "INSERT INTO dispatches SELECT 2, workflow_id, sequence, 2, 2, 2, tool_name, call_signature, call_id, era,"
            " started_at, arguments FROM dispatches"
        )
        database.execute("INSERT INTO outcomes (dispatch, status, completed_at) VALUES (2, ?, 1)", (status,))


# ---------------------------------------------------------------------------------------------------------- pruned rows


def prune(path: Path, workflow_id: str, last: int) -> None:
    """What `journal prune` leaves of a workflow."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for table in ("deliveries", "doubts", "outcomes"):
            database.execute(f"DELETE FROM {table}")  # noqa: S608
        database.execute("DELETE FROM dispatches")
        database.execute("INSERT INTO prunings VALUES (?, ?, ?, 1)", (workflow_id, last, last))


@pytest.mark.parametrize("unpinned", Unpinned)
def test_a_pruned_place_is_refused_and_what_comes_behind_it_is_new(
    bench: Bench, path: Path, unpinned: Unpinned
) -> None:
    first = bench.restart(options(unpinned, forks=True))
    run(first, "a", "b")
    first.end()
    prune(path, "w", 2)
    again = bench.restart()
    for sequence in (1, 2):
        error = again.error(call(1, "a", seq=sequence))
        assert (error["facts"]["reason"], error["facts"]["status"]) == ("diverged", "PRUNED")
        assert "pruned" in error["message"]
    again.call(call(2, "c", seq=3), result(2))
    assert again.select("SELECT count(*) FROM forks") == [(0,)]


def test_ordered_calls_are_refused_at_the_first_pruned_row(bench: Bench, path: Path) -> None:
    first = bench.restart(ORDERED)
    run(first, "a", "b")
    first.end()
    prune(path, "w", 2)
    again = bench.restart()
    assert error_of(*again.ask(call(1, "a")))["facts"]["status"] == "PRUNED"
    assert again.up.lines == []


def test_new_calls_of_a_pruned_workflow_take_no_place_that_was_pruned(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    bench.end()
    prune(path, "w", 2)
    again = bench.restart()
    again.call(call(1, "c"), result(1))
    assert again.rows() == [(3, 1, "COMPLETED")]


def test_replays_are_the_same_bytes_under_the_same_flags(bench: Bench) -> None:
    said = b'{"jsonrpc":"2.0","id":1,"result":{"content":[ ],"n":1E400,"u":"\\u00e9"}}\n'
    for unpinned in ("ordered", "matched", "undelivered"):
        first = Bench(bench.path, options(unpinned, annotates=True), workflow_id=unpinned)
        first.ask(call(1))
        first.answer(said)
        replays = []
        for _ in range(3):
            first = first.restart(workflow_id=unpinned)
            replays += first.ask(call(1))
        first.end()
        assert len(set(replays)) == 1
        assert reasons(replays) == [(1, None)] * 3
        assert b'"n":1E400,"u":"\\u00e9"' in replays[0]
