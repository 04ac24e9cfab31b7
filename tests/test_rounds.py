"""Calls that upstream wants input for: legs, their chain, and what a restart makes of it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
from memory import Bench, call, cancel, failure, journal_path, line, lose_upstream, options, resolve, result, text_of

VISIT: Final = {"elicitations": [{"url": "https://x"}]}


@pytest.fixture
def bench() -> Iterator[Bench]:
    for path in journal_path():
        yield Bench(path)


def interim(number: Any, state: str | None = None) -> bytes:
    """Upstream wants input, and gives a state or none."""
    body: dict[str, Any] = {"resultType": "input_required", "inputRequests": {"k": {"method": "elicitation/create"}}}
    return line(
        {"jsonrpc": "2.0", "id": number, "result": {**body, **({} if state is None else {"requestState": state})}}
    )


def first(number: Any, tool: str = "order", **more: Any) -> bytes:
    return call(number, tool, is_modern=True, **more)


def leg(
    number: Any, state: str | None = None, tool: str = "order", answers: Mapping[str, Any] | None = None, **more: Any
) -> bytes:
    """A further leg, with what the client's person said."""
    members: dict[str, Any] = {} if state is None else {"requestState": state}
    return call(number, tool, is_modern=True, inputResponses={"k": answers or {"action": "accept"}}, **members, **more)


def final(number: Any, text: str = "done") -> bytes:
    return result(number, text, resultType="complete")


@pytest.mark.parametrize("pin", [None, 4])
def test_legs_are_attempts_at_one_place_and_the_chain_ends_as_one_call(bench: Bench, pin: int | None) -> None:
    place = pin or 1
    bench.call(first(1, seq=pin), interim(1, "s1"))
    bench.call(leg(2, "s1", seq=pin), interim(2, "s2"))
    bench.call(leg(3, "s2", seq=pin), final(3))
    assert bench.rows() == [(place, 1, "INPUT_REQUIRED"), (place, 2, "INPUT_REQUIRED"), (place, 3, "COMPLETED")]
    again = bench.restart()
    assert text_of(*again.ask(first(4, seq=place))) == "done", "the first leg is answered with the final result"
    assert text_of(*again.ask(leg(5, "s2"))) == "done", "and a leg that is sent again too"
    assert text_of(*again.ask(leg(6, "s1"))) == "done"


def test_interleaved_chains_of_one_tool_stay_apart_by_their_states(bench: Bench) -> None:
    bench.ask(first(1), first(2))
    bench.answer(interim(2, "B"), interim(1, "A"))
    bench.ask(leg(3, "B"), leg(4, "A"))
    bench.answer(interim(3, "B2"), final(4, "a"))
    bench.call(leg(5, "B2"), final(5, "b"))
    assert bench.rows() == [
        (1, 1, "INPUT_REQUIRED"), (2, 1, "INPUT_REQUIRED"), (2, 2, "INPUT_REQUIRED"), (1, 2, "COMPLETED"),
        (2, 3, "COMPLETED"),
    ]  # fmt: skip
    assert [text_of(*bench.ask(first(n, seq=n))) for n in (1, 2)] == ["a", "b"]


def test_without_a_state_a_leg_goes_to_the_oldest_chain_of_the_same_call(bench: Bench) -> None:
    bench.ask(first(1, "other"), first(2), first(3))
    bench.answer(interim(3), interim(1), interim(2))
    bench.ask(leg(4), leg(5))
    assert bench.places()[3:] == [("w", 2, 2, "order"), ("w", 3, 2, "order")]


def test_a_leg_that_is_sent_again_does_not_become_a_leg_of_another_chain(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    bench.call(leg(2, "A"), final(2, "a"))
    bench.call(first(3), interim(3, "B"))
    assert text_of(*bench.ask(leg(4, "A"))) == "a"
    assert text_of(*bench.restart().ask(leg(5, "A"))) == "a"


def test_a_leg_under_way_is_joined_by_its_repetition(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    assert bench.ask(leg(2, "A"), leg(3, "A")) == []
    assert len(bench.up.lines) == 2
    assert len(bench.answer(final(2))) == 2


def test_servers_that_give_every_call_the_same_state_are_told_apart_by_the_call(bench: Bench) -> None:
    for number, item in enumerate(("tea", "milk"), 1):
        bench.call(first(number, arguments={"item": item}), interim(number, "constant"))
    bench.call(leg(3, "constant", arguments={"item": "milk"}), final(3, "milk"))
    bench.call(leg(4, "constant", arguments={"item": "tea"}), final(4, "tea"))
    assert [place[1:3] for place in bench.places()] == [(1, 1), (2, 1), (2, 2), (1, 2)]


def test_a_leg_with_other_arguments_than_its_chain_has_diverged(bench: Bench) -> None:
    bench.call(first(1, arguments={"item": "tea"}), interim(1, "A"))
    assert bench.error(leg(2, "A", arguments={"item": "milk"}))["facts"]["reason"] == "diverged"


def test_a_chain_goes_on_after_a_restart(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    second = bench.restart()
    second.call(leg(2, "A"), interim(2, "A2"))
    third = second.restart()
    third.call(leg(3, "A2"), final(3))
    assert third.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "INPUT_REQUIRED"), (1, 3, "COMPLETED")]


def test_the_oldest_chain_is_the_oldest_after_a_restart_too(bench: Bench) -> None:
    bench.ask(first(1), first(2))
    bench.answer(interim(2), interim(1))
    again = bench.restart()
    again.call(leg(3), interim(3))
    assert again.places()[-1][1:3] == (1, 2)
    again.call(leg(4), final(4, "one"))
    assert again.places()[-1][1:3] == (1, 3), "it stays the oldest"
    again.call(leg(5), final(5, "two"))
    assert again.places()[-1][1:3] == (2, 2)


def test_the_first_leg_may_be_sent_afresh_at_its_own_place(bench: Bench) -> None:
    """The process that minted the state may be gone; nothing of a leg that asked for input was final."""
    first_life = bench.restart(options("ordered"))
    first_life.call(first(1), interim(1, "A"))
    again = first_life.restart()
    again.call(first(2), interim(2, "new"))
    again.call(leg(3, "new"), final(3))
    assert [place[1:3] for place in again.places()] == [(1, 1), (1, 2), (1, 3)]


def test_a_leg_that_died_under_way_is_in_doubt_and_a_person_settles_it(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    bench.ask(leg(2, "A"))
    again = bench.restart()
    for asked in (leg(3, "A"), first(4, seq=1), first(5, "other")):
        facts = again.error(asked)["facts"]
        assert (facts["reason"], facts["sequence"]) == ("in_doubt", 1)
    assert bench.path is not None
    again.end()
    resolve(bench.path, 1, "NOT_EXECUTED")
    third = again.restart()
    third.call(leg(6, "A"), final(6))
    assert third.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "NOT_EXECUTED"), (1, 3, "COMPLETED")]


def test_a_leg_that_was_not_sent_leaves_its_chain_open(bench: Bench) -> None:
    bench.call(first(1), interim(1))
    bench.ask(leg(2))
    bench.up.unread = len(leg(2))
    lose_upstream(bench)
    again = bench.restart()
    again.call(leg(3), final(3))
    assert again.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "NOT_SENT"), (1, 3, "COMPLETED")]


def test_a_leg_that_was_not_sent_leaves_its_chain_open_for_the_process_that_sent_it(bench: Bench) -> None:
    bench.call(first(1), interim(1))
    bench.up.is_full = True
    bench.ask(leg(2), cancel(2))
    assert bench.journal is not None
    before = bench.journal.rounds()
    lose_upstream(bench)
    assert before == []
    assert [one.sequence for one in bench.journal.rounds()] == [1]


def test_a_round_is_not_forgotten_if_its_leg_was_under_way_when_rounds_were_first_asked_for(bench: Bench) -> None:
    bench.call(first(1, seq=1), interim(1))
    bench.call(first(2, seq=2), interim(2))
    again = bench.restart()
    again.up.is_full = True
    for asked in (leg(3, seq=1), first(4, "look"), cancel(3)):
        again.ask(asked)
    lose_upstream(again)
    assert again.journal is not None
    assert [one.sequence for one in again.journal.rounds()] == [1, 2]


def test_a_round_stays_the_oldest_if_its_leg_was_under_way_when_rounds_were_first_asked_for(bench: Bench) -> None:
    bench.call(first(1, seq=1), interim(1))
    bench.call(first(2, seq=2), interim(2))
    again = bench.restart()
    again.ask(leg(3, seq=1))
    again.ask(first(4, "look"))
    again.answer(interim(3))
    again.call(leg(5), final(5))
    assert again.places()[-1][1:3] == (1, 3)


def test_what_a_person_said_is_never_stored_and_a_state_only_as_a_hash(bench: Bench) -> None:
    secret, state = "4111-1111-1111-1111", "state-with-a-secret"
    bench.call(first(1), interim(1, state))
    bench.call(leg(2, state, answers={"action": "accept", "content": {"card": secret}}), final(2))
    assert bench.path is not None
    bench.end()
    stored = bench.path.read_bytes()
    assert secret.encode() not in stored
    [(kept,)] = bench.select("SELECT request_state FROM outcomes WHERE request_state IS NOT NULL")
    assert len(kept) == 64
    assert state.encode() not in kept.encode()
    assert state.encode() not in stored


def test_a_call_equal_to_one_that_asked_for_a_visit_continues_it(bench: Bench) -> None:
    bench.call(call(1, "pay"), failure(1, -32042, "go there", VISIT))
    bench.call(call(2, "pay", {"n": 2}), result(2))
    bench.call(call(3, "pay"), failure(3, -32042, "go there", VISIT))
    again = bench.restart()
    again.call(call(4, "pay"), result(4, "paid"))
    assert [place[1:3] for place in again.places()] == [(1, 1), (2, 1), (1, 2), (1, 3)]
    again.call(call(5, "pay"), result(5))
    assert again.places()[-1][1:3] == (3, 1), "once it is closed, an equal call is a new one"


def test_a_modern_first_leg_that_is_sent_again_is_another_call(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    bench.call(first(2), interim(2, "B"))
    assert [place[1] for place in bench.places()] == [1, 2]


@pytest.mark.parametrize("way", ["visit", "no state", "constant state"])
def test_the_retry_of_a_finished_call_is_not_the_next_leg_of_another(bench: Bench, way: str) -> None:
    """An id that is on record is certain, an open round of an equal call only a guess."""
    bench = bench.restart(options(call_id_keys=("host/id",)))
    state = "constant" if way == "constant state" else None
    ids: dict[str, dict[str, Any]] = {"x": {"meta": {"host/id": "x"}}, "y": {"meta": {"host/id": "y"}}}
    if way == "visit":
        bench.call(call(1, "order", **ids["x"]), result(1, "done"))
        bench.call(call(2, "order", **ids["y"]), failure(2, -32042, "go there", VISIT))
        retry, other = call(3, "order", **ids["x"]), call(4, "order", **ids["y"])
    else:
        bench.call(first(0, **ids["x"]), interim(0, state))
        bench.call(leg(1, state, **ids["x"]), final(1))
        bench.call(first(2, **ids["y"]), interim(2, state))
        retry, other = leg(3, state, **ids["x"]), leg(4, state, **ids["y"])
    again = bench.restart()
    assert text_of(*again.ask(retry)) == "done"
    again.call(other, final(4, "other"))
    assert again.places()[-1][1:3] == (2, 2)


def test_an_open_round_stops_no_other_call(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    again = bench.restart()
    assert again.ask(first(2, "look")) == []


def test_a_leg_that_was_cancelled_and_answered_late_can_be_gone_on_with(bench: Bench) -> None:
    bench.call(first(1), interim(1, "A"))
    bench.ask(leg(2, "A"), cancel(2))
    assert bench.error(leg(3, "A"))["facts"]["cause"] == "cancelled"
    assert bench.answer(interim(2, "A2")) == []
    bench.call(leg(4, "A2"), final(4))
    assert bench.rows()[-1] == (1, 3, "COMPLETED")


def test_rounds_are_those_of_the_workflow_that_a_leg_names(bench: Bench) -> None:
    bench.call(first(1, workflow="v"), interim(1, "A"))
    bench.call(first(2), interim(2, "B"))
    bench.call(leg(3, workflow="v"), final(3))
    assert bench.places()[-1] == ("v", 1, 2, "order")


def test_an_operator_who_ends_a_round_by_force_closes_it(bench: Bench) -> None:
    bench.call(call(1, "pay"), failure(1, -32042, "go there", VISIT))
    bench.end()
    assert bench.path is not None
    resolve(bench.path, 1, "COMPLETED", "paid elsewhere")
    again = bench.restart()
    again.call(call(2, "pay"), result(2))
    assert again.places()[-1][1:3] == (2, 1)
    assert text_of(*again.ask(call(3, "pay", seq=1))) == "paid elsewhere"


@pytest.mark.parametrize("value", [7, None, {"a": 1}])
def test_a_state_that_is_no_text_tells_nothing(bench: Bench, value: Any) -> None:
    bench.call(first(1), interim(1, "A"))
    odd = json.loads(leg(2))
    odd["params"]["requestState"] = value
    bench.call(line(odd), final(2))
    assert bench.rows()[-1] == (1, 2, "COMPLETED")
