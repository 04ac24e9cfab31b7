"""What options change in the life of a call: how long it may take, whose hints are trusted, what results carry."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from memory import (
    Bench,
    call,
    cancel,
    database_held,
    error_of,
    failure,
    journal_path,
    line,
    lose_upstream,
    options,
    reasons,
    request,
    resolve,
    result,
    spoil,
    text_of,
)

PATIENT: Final = options(call_timeout_s=10)
TRUSTING: Final = options(trusts_annotations=True)
IDEMPOTENT: Final = {"idempotentHint": True}


@pytest.fixture
def path() -> Iterator[Path]:
    yield from journal_path()


# -------------------------------------------------------------------------------------------------------- call timeout


@pytest.fixture
def patient(path: Path) -> Bench:
    return Bench(path, PATIENT)


def test_a_call_that_takes_too_long_is_answered_in_doubt_and_upstream_is_told_nothing(patient: Bench) -> None:
    patient.ask(call(1, "pay", seq=1), call(2, "pay", seq=1))
    patient.loop.advance(9.9)
    assert patient.down.lines == []
    patient.loop.advance(0.2)
    assert reasons(patient.down.lines) == [(1, "in_doubt"), (2, "in_doubt")]
    facts = error_of(patient.down.lines[0])["facts"]
    assert (facts["cause"], facts["status"], facts["sequence"]) == ("timeout", "IN_DOUBT", 1)
    assert patient.select("SELECT status, cause FROM calls") == [("IN_DOUBT", "timeout")]
    assert patient.up.lines == [call(1, "pay", seq=1)]
    assert not patient.relay.is_idle, "nobody waits, but it may be answered yet"


@pytest.mark.parametrize("is_modern", [True, False])
def test_a_late_answer_is_journaled_and_not_passed_down(patient: Bench, is_modern: bool) -> None:
    patient.ask(call(1, "pay", seq=1, is_modern=is_modern))
    patient.loop.advance(11)
    assert patient.answer(result(1, "late")) == []
    assert patient.statuses() == ["COMPLETED"]
    assert text_of(*patient.ask(call(2, "pay", seq=1))) == "late"
    assert text_of(*patient.restart().ask(call(3, "pay", seq=1))) == "late"


def test_until_upstream_answers_only_the_same_call_is_refused(patient: Bench) -> None:
    """CW-07: the client timed out, and the model repeats itself."""
    patient.ask(call(1, "create", {"k": "a"}))
    patient.loop.advance(11)
    assert patient.error(call(2, "create", {"k": "a"}))["facts"]["sequence"] == 1
    assert patient.ask(call(3, "create", {"k": "b"}), call(4, "look")) == []
    patient.answer(result(1, "late"))
    assert patient.ask(call(5, "create", {"k": "a"})) == [], "now it is known what became of the first"


def test_a_timed_out_call_that_was_lost_stops_calls_of_its_tool(patient: Bench) -> None:
    patient.ask(call(1, "create", {"k": "a"}))
    patient.loop.advance(11)
    again = patient.restart()
    assert again.error(call(2, "create", {"k": "b"}))["facts"]["cause"] == "timeout"
    assert again.ask(call(3, "look")) == []


def test_a_pinned_repetition_of_a_timed_out_call_is_in_doubt_at_once(patient: Bench) -> None:
    patient.ask(call(1, "pay", seq=1))
    patient.loop.advance(11)
    assert patient.error(call(2, "pay", seq=1))["facts"]["cause"] == "timeout"


def test_an_answer_in_time_stops_the_clock(patient: Bench) -> None:
    patient.ask(call(1, seq=1))
    patient.loop.advance(9)
    patient.answer(result(1))
    assert patient.loop.waiting == 0, "and its line need not be kept for it"
    patient.ask(call(1, seq=2))
    patient.loop.advance(9)
    assert patient.statuses() == ["COMPLETED", "PENDING"], "another call under the same id has its own time"


@pytest.mark.parametrize("is_answer_first", [True, False])
def test_an_answer_in_the_very_turn_in_which_time_is_over_counts(patient: Bench, is_answer_first: bool) -> None:
    patient.ask(call(1, seq=1), call(2, seq=1))
    [timer] = [timer for timer in patient.loop._timers if not timer.is_cancelled]
    patient.loop.now = timer.at
    if is_answer_first:
        patient.relay.from_upstream([result(1)])
    timer.callback()
    if not is_answer_first:
        patient.relay.from_upstream([result(1)])
    patient.loop.run()
    assert sorted(reasons(patient.down.lines)) == [(1, None), (2, None)]
    assert patient.statuses() == ["COMPLETED"]
    assert patient.relay.is_idle


def test_a_cancel_in_the_very_turn_in_which_time_is_over_only_detaches(patient: Bench) -> None:
    patient.ask(call(1, seq=1), call(2, seq=1))
    [timer] = [timer for timer in patient.loop._timers if not timer.is_cancelled]
    timer.callback()
    patient.relay.from_downstream([cancel(1), cancel(2)])
    patient.loop.run()
    assert patient.down.lines == []
    assert patient.up.lines == [call(1, seq=1)]
    assert patient.select("SELECT cause FROM calls") == [("timeout",)]
    assert not patient.relay.is_idle


def test_a_cancel_after_time_was_over_goes_nowhere(patient: Bench) -> None:
    patient.ask(call(1))
    patient.loop.advance(11)
    patient.ask(cancel(1))
    assert patient.up.lines == [call(1)]


def test_a_cancelled_call_is_not_timed_out_too(patient: Bench) -> None:
    patient.ask(call(1), cancel(1))
    patient.loop.advance(11)
    assert patient.down.lines == []
    assert patient.select("SELECT cause FROM calls") == [("cancelled",)]


def test_a_call_that_could_not_leave_in_time_never_leaves(path: Path) -> None:
    patient = Bench(path, options(call_timeout_s=2))
    patient.call(call(1, seq=1), result(1))
    with database_held(path):
        patient.ask(call(2, seq=2))
        patient.loop.advance(2.1)
        assert reasons(patient.down.lines[1:]) == [(2, "busy")]
    patient.loop.advance(1)
    assert patient.up.lines == [call(1, seq=1)]
    assert patient.statuses() == ["COMPLETED"]
    patient.call(call(3, seq=2), result(3))


@pytest.mark.parametrize("way", ["held", "spoilt"])
def test_whoever_waits_is_told_though_the_doubt_cannot_be_written(patient: Bench, path: Path, way: str) -> None:
    patient.ask(call(1, seq=1))
    if way == "held":
        with database_held(path):
            patient.loop.advance(15.1)
            assert reasons(patient.down.lines) == [(1, "in_doubt")]
        patient.loop.advance(0.1)
        assert patient.select("SELECT cause FROM calls") == [("timeout",)]
    else:
        spoil(path)
        patient.loop.advance(11)
        assert reasons(patient.down.lines) == [(1, "in_doubt")]
    assert not patient.relay.is_idle


def test_when_upstream_is_lost_in_the_very_turn_in_which_time_is_over_each_is_told_once(patient: Bench) -> None:
    patient.ask(call(1, seq=1))
    [timer] = [timer for timer in patient.loop._timers if not timer.is_cancelled]
    timer.callback()
    assert reasons(lose_upstream(patient)) == [(1, "in_doubt")]
    assert patient.select("SELECT cause FROM calls") == [("timeout",)], "the first cause stands"
    assert patient.relay.has_left_doubt


def test_a_call_that_timed_out_and_was_never_read_was_not_sent(patient: Bench) -> None:
    patient.up.is_full = True
    patient.ask(call(1))
    patient.loop.advance(11)
    lose_upstream(patient)
    assert patient.statuses() == ["NOT_SENT"]
    assert patient.restart().ask(call(2)) == []


# ------------------------------------------------------------------------------------------------------- trusted hints


def trusting(path: Path, hints: Mapping[str, bool] | None = None, *, unpinned: str = "new") -> Bench:
    """A relay that trusts, and has learnt these hints of tool `set`; of `look`, that it only reads."""
    bench = Bench(path, options(unpinned, trusts_annotations=True))
    learn(bench, hints or {})
    return bench


def learn(bench: Bench, hints: Mapping[str, bool]) -> None:
    bench.ask(request("tools/list", "list"))
    tools = [{"name": "set", "annotations": hints}, {"name": "look", "annotations": {"readOnlyHint": True}}]
    bench.answer(line({"jsonrpc": "2.0", "id": "list", "result": {"tools": tools}}))


def in_doubt(path: Path, *asked: bytes) -> None:
    """Leaves these calls in doubt."""
    bench = Bench(path)
    bench.ask(*asked)
    bench.end()


@pytest.mark.parametrize("hints", [{"idempotentHint": True}, {"idempotentHint": True, "destructiveHint": True}])
def test_a_call_in_doubt_runs_again_at_its_own_place_if_its_server_says_that_this_changes_nothing(
    path: Path, hints: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    in_doubt(path, call(1, "set", seq=1))
    bench = trusting(path, hints)
    bench.call(call(2, "set", seq=1), result(2, "set"))
    assert bench.rows() == [(1, 1, "IN_DOUBT"), (1, 2, "COMPLETED")]
    assert bench.select("SELECT attempt, status FROM calls") == [(2, "COMPLETED")], "and is counted"
    assert "workflow w, sequence 1: in doubt, and runs again" in caplog.text
    assert text_of(*bench.ask(call(3, "set", seq=1))) == "set"


@pytest.mark.parametrize("hints", [{}, {"idempotentHint": False}, {"destructiveHint": False}])
def test_without_such_a_hint_it_is_refused(path: Path, hints: dict[str, bool]) -> None:
    in_doubt(path, call(1, "set", seq=1))
    assert trusting(path, hints).error(call(2, "set", seq=1))["code"] == 31001


def test_without_trust_it_is_refused(path: Path) -> None:
    in_doubt(path, call(1, "set", seq=1))
    bench = Bench(path)
    learn(bench, IDEMPOTENT)
    assert bench.error(call(2, "set", seq=1))["code"] == 31001


def test_only_the_very_same_call_runs_again(path: Path) -> None:
    in_doubt(path, call(1, "set", {"n": 1}, seq=1))
    bench = trusting(path, IDEMPOTENT)
    assert bench.error(call(2, "set", {"n": 2}, seq=1))["code"] == 31001


def test_a_call_without_a_place_of_its_own_does_not_pass_a_doubt_and_once_it_is_run_again_others_do(path: Path) -> None:
    in_doubt(path, call(1, "set"))
    bench = trusting(path, IDEMPOTENT)
    assert bench.error(call(2, "set"))["code"] == 31001, "it may be meant as a second one"
    bench.call(call(3, "set", seq=1), result(3))
    again = bench.restart(options())
    assert again.ask(call(4, "other")) == [], "the doubt is over, also for later processes"


@pytest.mark.parametrize("unpinned", ["ordered", "new"])
def test_it_may_be_found_by_order_or_host_id_as_well(path: Path, unpinned: str) -> None:
    settings = options(unpinned, trusts_annotations=True, call_id_keys=("id",))
    meta = {"id": "x"} if unpinned == "new" else {}
    first = Bench(path, settings)
    first.ask(call(1, "set", meta=meta))
    again = first.restart()
    learn(again, IDEMPOTENT)
    again.call(call(2, "set", meta=meta), result(2))
    assert again.rows()[-1] == (1, 2, "COMPLETED")


def test_while_upstream_may_still_answer_it_does_not_run_again(path: Path) -> None:
    bench = trusting(path, IDEMPOTENT)
    bench.ask(call(1, "set", seq=1), cancel(1))
    assert bench.error(call(2, "set", seq=1))["facts"]["cause"] == "cancelled"
    bench.answer(failure(1, -32001, "Request timed out"))
    assert bench.ask(call(3, "set", seq=1)) == []
    assert bench.up.lines[-1] == call(3, "set", seq=1)


def test_a_second_attempt_that_was_not_sent_leaves_the_first_in_doubt(path: Path) -> None:
    in_doubt(path, call(1, "set", seq=1))
    bench = trusting(path, IDEMPOTENT)
    bench.up.is_full = True
    bench.ask(call(2, "set", seq=1))
    lose_upstream(bench)
    assert bench.rows() == [(1, 1, "IN_DOUBT"), (1, 2, "NOT_SENT")]
    again = bench.restart(options())
    assert again.error(call(3, "set", seq=1))["facts"]["status"] == "IN_DOUBT"
    assert again.error(call(4, "other"))["facts"]["sequence"] == 1
    third = again.restart(TRUSTING)
    learn(third, IDEMPOTENT)
    third.call(call(5, "set", seq=1), result(5))
    assert third.rows()[-1] == (1, 3, "COMPLETED")


def test_a_second_attempt_may_be_in_doubt_as_well_and_settles_like_the_first(path: Path) -> None:
    in_doubt(path, call(1, "set", seq=1))
    bench = trusting(path, IDEMPOTENT)
    bench.ask(call(2, "set", seq=1))
    again = bench.restart(options())
    assert again.error(call(3, "set", seq=1))["code"] == 31001
    again.end()
    resolve(path, 1, "COMPLETED", "it is set")
    third = again.restart()
    assert text_of(*third.ask(call(4, "set", seq=1))) == "it is set"
    assert third.ask(call(5, "other")) == []


def test_a_read_that_differs_from_the_next_row_passes_and_the_cursor_stays(path: Path) -> None:
    first = Bench(path, options("ordered"))
    for number, tool in enumerate(("look", "set", "look"), 1):
        first.call(call(number, tool, {"n": number}), result(number, f"recorded {number}"))
    first.end()
    bench = trusting(path, unpinned="ordered")
    assert bench.call(call(1, "look", {"n": 9}), result(1, "live")) == [result(1, "live")]
    assert text_of(*bench.ask(call(2, "look", {"n": 1}))) == "recorded 1", "one that is next is answered from its row"
    assert bench.call(call(3, "look", {"n": 8}), result(3, "live")) == [result(3, "live")]
    assert text_of(*bench.ask(call(4, "set", {"n": 2}))) == "recorded 2"
    assert text_of(*bench.ask(call(5, "look", {"n": 3}))) == "recorded 3"
    assert bench.ask(call(6, "look", {"n": 3})) == [], "past the end it leaves no row"
    assert len(bench.rows()) == 3


def test_a_read_in_doubt_runs_again_at_its_place_in_order(path: Path) -> None:
    first = Bench(path, options("ordered"))
    first.ask(call(1, "look"))
    first.end()
    bench = trusting(path, unpinned="ordered")
    bench.call(call(2, "look"), result(2))
    assert bench.rows() == [(1, 1, "IN_DOUBT"), (1, 2, "COMPLETED")]


# ------------------------------------------------------------------------------------------------------------ annotate


def place_in(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer)["result"]["_meta"]["checkpoint"]
    return found


def test_results_carry_their_place_and_whether_they_were_replayed(path: Path) -> None:
    bench = Bench(path, options(annotates=True))
    [answer] = bench.call(call(1, "t", workflow="v"), result(1))
    assert place_in(answer) == {"workflow_id": "v", "sequence": 1, "replayed": False}
    assert bench.select("SELECT result FROM calls") == [
        (json.dumps(json.loads(result(1))["result"], separators=(",", ":")),)
    ]
    again = bench.restart()
    [first, second] = again.ask(call(2, seq=1, workflow="v"), call(2, seq=1, workflow="v"))
    assert place_in(first) == {"workflow_id": "v", "sequence": 1, "replayed": True}
    assert first == second, "the same bytes each time"


def test_what_upstream_says_in_meta_stays_beside_it(path: Path) -> None:
    bench = Bench(path, options(annotates=True))
    said = result(1, "x", _meta={"a": 1, "checkpoint": "theirs"})
    [answer] = bench.call(call(1), said)
    assert json.loads(answer)["result"]["_meta"]["a"] == 1
    assert place_in(answer)["sequence"] == 1


def test_a_branch_names_itself_in_results(path: Path) -> None:
    bench = Bench(path, options(annotates=True, forks=True))
    bench.call(call(1, "a", seq=1), result(1))
    again = bench.restart()
    [answer] = again.call(call(1, "b", seq=1), result(1))
    assert place_in(answer)["workflow_id"] == "w~1"


def test_errors_and_results_of_other_requests_carry_no_place(path: Path) -> None:
    bench = Bench(path, options(annotates=True))
    bench.call(call(1, seq=1), failure(1, 5, "no"))
    assert bench.down.lines == [failure(1, 5, "no")]
    assert bench.ask(call(2, seq=1)) == [failure(2, 5, "no")]
    bench.ask(request("prompts/get", 3))
    assert bench.answer(result(3)) == [result(3)]


def test_without_the_option_results_are_upstreams_bytes(path: Path) -> None:
    bench = Bench(path)
    assert bench.call(call(1, seq=1), result(1)) == [result(1)]
    assert bench.ask(call(2, seq=1)) == [result(2)]
