"""What the endpoint of `--report-…` is told, when, and what is on disk at each moment. The exchange is a fake."""

import json
from pathlib import Path
from typing import Any

import pytest
from memory import (
    NOW_MS,
    Bench,
    FakeEndpoint,
    call,
    cancel,
    database_held,
    failure,
    line,
    lose_upstream,
    notification,
    options,
    reasons,
    request,
    resolve,
    result,
)

from reports import OF_STATUS, REPLAYED
from states import Cause, Status


@pytest.fixture
def endpoint() -> FakeEndpoint:
    return FakeEndpoint()


@pytest.fixture
def bench(journal: Path, endpoint: FakeEndpoint) -> Bench:
    return Bench(journal, endpoint=endpoint)


def queued(bench: Bench) -> list[tuple[Any, ...]]:
    """The reports on disk: what each is about, how often it was tried, and when it is due, in seconds from now."""
    found = bench.select("SELECT id, tool_name, attempts, due_at FROM reports ORDER BY abs(id)")
    return [(at, tool, tries, None if due is None else (due - NOW_MS) // 1000) for at, tool, tries, due in found]


def sent(bench: Bench, seconds: float = 2.0) -> list[tuple[str, str, str]]:
    """Tool, action and reason of what is sent while some time passes."""
    assert bench.endpoint is not None
    before = len(bench.endpoint.reports)
    bench.loop.advance(seconds)
    return bench.endpoint.reports[before:]


# ------------------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (result(1), ("t", "permit", "executed")),
        (result(1, isError=True), ("t", "permit", "executed")),
        (failure(1, -5, "no"), ("t", "permit", "executed")),
        (failure(1, -32000, "Connection closed"), ("t", "permit", "outcome_unknown")),
        (failure(1, -32042, "ask", {"elicitations": []}), ("t", "permit", "input_required")),
    ],
)
def test_an_answer_is_reported_once_it_is_on_disk(bench: Bench, answer: bytes, told: tuple[str, str, str]) -> None:
    bench.ask(call(1))
    assert sent(bench) == []
    bench.answer(answer)
    assert queued(bench) == [(1, "t", 0, 0)]
    assert sent(bench) == [told]
    assert sent(bench, 4000) == []


def test_every_status_that_an_outcome_can_have_is_told() -> None:
    known = {Status.PENDING, Status.NOT_EXECUTED, Status.PRUNED} | OF_STATUS.keys()
    assert known == set(Status)
    assert {told.action for told in (*OF_STATUS.values(), REPLAYED)} == {"permit", "block"}


def test_a_replay_and_a_shared_answer_are_replays(bench: Bench) -> None:
    bench.ask(call(1, seq=1), call(2, seq=1))
    bench.answer(result(1))
    bench.ask(call(3, seq=1))
    assert sorted(sent(bench)) == [("t", "permit", "executed"), *[("t", "permit", "replayed")] * 2]


def test_refusals_are_blocks_with_their_reason(bench: Bench, journal: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, "u", seq=1))
    bench.ask(call(4, "w", seq=0))  # its own fault, which no code of ours says
    bench.relay.stop_admitting()
    bench.ask(call(3, "v", seq=2))
    assert set(sent(bench)) == {
        ("t", "permit", "executed"),
        ("u", "block", "diverged"),
        ("v", "block", "shutting_down"),
    }


def test_what_an_operator_settled_as_failed_is_a_block(bench: Bench, journal: Path) -> None:
    bench.ask(call(1, seq=1))
    last = bench.restart()
    last.end()
    resolve(journal, 1, "FAILED")
    after = last.restart()
    after.ask(call(1, seq=1))
    assert sent(after) == [("t", "block", "resolved_failed")]


def test_a_lost_upstream_leaves_unknown_outcomes_and_calls_that_were_not_sent(bench: Bench) -> None:
    bench.ask(call(1, "read"))
    bench.up.unread = 0
    bench.ask(call(2, "unread"))
    bench.up.unread = len(bench.up.lines[-1])
    told = reasons(lose_upstream(bench))
    assert told == [(1, "in_doubt"), (2, "upstream_lost")]
    bench.ask(call(3, "late"))
    assert sorted(sent(bench)) == [
        ("late", "block", "upstream_lost"),
        ("read", "permit", "outcome_unknown"),
        ("unread", "block", "upstream_lost"),
    ]


def test_a_cancelled_call_is_reported_when_it_is_over(bench: Bench) -> None:
    bench.ask(call(1))
    bench.ask(cancel(1))
    assert sent(bench) == []
    bench.answer(result(1))
    assert sent(bench) == [("t", "permit", "executed")]


def test_a_call_that_timed_out_and_was_lost_is_reported_once(journal: Path, endpoint: FakeEndpoint) -> None:
    bench = Bench(journal, options(call_timeout_s=1.0), endpoint=endpoint)
    bench.ask(call(1))
    bench.loop.advance(1)
    assert sent(bench) == []
    lose_upstream(bench, Cause.RELAY_LOST)
    assert sent(bench) == [("t", "permit", "outcome_unknown")]
    bench.relay.commit_riders()
    following = bench.restart()
    following.call(call(1, "other", workflow="v"), result(1))
    assert sent(following) == [("other", "permit", "executed")]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_takeover_reports_what_it_turns_in_doubt_in_that_transaction(bench: Bench, is_cancelled: bool) -> None:
    bench.ask(call(1, "lost"))
    if is_cancelled:
        bench.ask(cancel(1))
    following = bench.restart()
    following.ask(call(1, "next", workflow="v"))
    assert queued(following) == [(1, "lost", 0, 0)]
    assert sent(following) == [("lost", "permit", "outcome_unknown")]
    following.answer(result(1))
    assert sent(following) == [("next", "permit", "executed")]
    third = following.restart()
    third.call(call(1, "last", workflow="v"), result(1))
    assert sent(third) == [("last", "permit", "executed")]


def test_a_report_carries_the_clients_name_and_both_stages_and_claims_no_delegation(bench: Bench) -> None:
    bench.ask(request("initialize", 0, clientInfo={"name": "an-agent", "version": "1"}))
    bench.ask(call(1))
    bench.loop.advance(0.25)
    bench.answer(result(1))
    bench.loop.advance(1)
    assert bench.endpoint is not None
    body = bench.endpoint.exchanges[-1].body
    assert body["identity"] == {"agent": {"clientInfoName": "an-agent"}}
    assert body["engineSteps"] == [
        {"name": "journal", "verdict": "pass", "latencyMicros": 0},
        {"name": "upstream", "verdict": "pass", "latencyMicros": 250_000},
    ]
    assert "sdk" not in body


@pytest.mark.parametrize(("name", "label"), [("modern", "modern"), (" ", None), (7, None)])
def test_a_modern_call_names_its_own_client(bench: Bench, name: Any, label: str | None) -> None:
    bench.ask(request("initialize", 0, clientInfo={"name": "older"}))
    info = {"io.modelcontextprotocol/clientInfo": {"name": name}}
    bench.call(call(1, is_modern=True, meta=info), result(1, resultType="complete"))
    bench.loop.advance(1)
    assert bench.endpoint is not None
    assert bench.endpoint.exchanges[-1].body["identity"] == ({"agent": {"clientInfoName": label}} if label else {})


# ------------------------------------------------------------------------------------------------------ what is on disk


def test_report_and_outcome_are_one_transaction(bench: Bench, journal: Path) -> None:
    bench.ask(call(1))
    with database_held(journal):
        bench.answer(result(1))
        assert queued(bench) == []
    bench.loop.advance(0.05)
    assert bench.statuses() == ["COMPLETED"]
    assert queued(bench) == [(1, "t", 0, 0)]


def test_marks_ride_in_the_next_commit(bench: Bench) -> None:
    bench.call(call(1), result(1))
    assert sent(bench, 0.5) == [("t", "permit", "executed")]
    assert queued(bench) == [(1, "t", 0, 0)]
    bench.ask(call(2))
    assert queued(bench) == []


def test_marks_get_a_commit_of_their_own_when_there_is_no_other(bench: Bench) -> None:
    bench.call(call(1), result(1))
    assert sent(bench, 3) == [("t", "permit", "executed")]
    assert queued(bench) == []


def test_what_was_not_delivered_is_sent_by_the_next_owner(bench: Bench, endpoint: FakeEndpoint) -> None:
    bench.call(call(1), result(1))
    following = bench.restart()
    following.call(call(2, "u"), result(2))
    assert sorted(sent(following)) == [("t", "permit", "executed"), ("u", "permit", "executed")]


def test_reports_of_replays_ride_along_and_cost_no_commit(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = None  # the endpoint is slow
    bench.call(call(1, seq=1), result(1))
    for number in range(2, 8):
        bench.ask(call(number, seq=1))
    assert queued(bench) == [(1, "t", 0, 0)]
    bench.ask(call(9, "u", seq=2))
    assert {at for at, *_ in queued(bench)} == {1, -1, -2, -3, -4, -5, -6}


def test_a_process_that_only_replays_reports_from_memory_and_keeps_no_lock(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1))
    assert sent(bench, 3) == [("t", "permit", "executed")]
    following = bench.restart()
    following.ask(call(2, seq=1))
    assert sent(following) == [("t", "permit", "replayed")]
    assert queued(following) == []
    assert following.journal is not None
    assert not following.journal.is_open


def test_no_journal_is_created_by_a_refusal(bench: Bench, journal: Path) -> None:
    bench.relay.stop_admitting()
    bench.ask(call(1))
    assert sent(bench) == [("t", "block", "shutting_down")]
    assert not journal.exists()


# --------------------------------------------------------------------------------------------------------- the endpoint


def test_a_failing_endpoint_is_asked_again_later_and_given_up_in_the_end(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = endpoint.said(503)
    bench.call(call(1), result(1))
    delays = []
    while (rows := queued(bench))[0][3] is not None:
        delays.append(rows[0][3])
        bench.loop.advance(1800)
    assert len(endpoint.reports) == 8
    assert rows == [(1, "t", 8, None)]
    assert bench.select("SELECT error, body IS NOT NULL FROM reports") == [("503", 1)]


def test_another_refusal_of_the_endpoint_is_final_and_holds_up_nobody(bench: Bench, endpoint: FakeEndpoint) -> None:
    """RP-01, RO-01: what is hopeless is parked with its reason, and the rows behind it go."""
    endpoint.answer = endpoint.said(400)
    for number in range(1, 40):
        bench.call(call(number, "bad"), result(number))
    bench.loop.advance(60)
    assert {due for *_, due in queued(bench)} == {None}
    endpoint.answer = endpoint.said(200)
    bench.call(call(50, "good"), result(50))
    assert sent(bench) == [("good", "permit", "executed")]


def test_an_endpoint_that_cannot_be_reached_is_left_alone_for_a_while(bench: Bench, endpoint: FakeEndpoint) -> None:
    """RO-03: an outage uses up no attempts."""
    endpoint.answer = endpoint.said(None)
    bench.call(call(1), result(1))
    bench.loop.advance(1000)
    assert 20 < len(endpoint.reports) < 40
    assert queued(bench) == [(1, "t", 0, 0)]
    endpoint.answer = endpoint.said(200)
    assert sent(bench, 31) == [("t", "permit", "executed")]


def test_the_endpoint_says_when_it_wants_to_hear_more(bench: Bench, endpoint: FakeEndpoint) -> None:
    """RP-03: it means the whole endpoint and not one row."""
    bench.call(call(0, "v"), result(0))
    assert sent(bench) == [("v", "permit", "executed")]
    endpoint.answer = endpoint.said(429, retry_after=100.0)
    bench.call(call(1), result(1))
    assert len(sent(bench)) == 1
    endpoint.answer = endpoint.said(200)
    bench.call(call(2, "u"), result(2))
    assert sent(bench, 97) == []
    assert sorted(sent(bench, 5)) == [("t", "permit", "executed"), ("u", "permit", "executed")]


def test_few_are_on_their_way_at_once(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = None
    for number in range(1, 10):
        bench.call(call(number), result(number))
    bench.loop.advance(60)
    assert len(endpoint.open) == 4


def test_what_is_on_its_way_is_not_sent_again(bench: Bench, endpoint: FakeEndpoint) -> None:
    """RD-01: the endpoint takes longer than calls are apart, and nothing fails."""
    endpoint.answer = None
    for number in range(1, 20):
        bench.call(call(number, f"t{number}"), result(number))
        bench.loop.advance(0.3)
        if number % 3 == 0:
            endpoint.open.pop(0).done(endpoint.said(200))
    while endpoint.open:
        endpoint.open.pop(0).done(endpoint.said(200))
        bench.loop.advance(0.3)
    assert sorted(tool for tool, *_ in endpoint.reports) == sorted(f"t{number}" for number in range(1, 20))


def test_a_report_that_waits_for_another_attempt_holds_up_no_new_one(bench: Bench, endpoint: FakeEndpoint) -> None:
    """RO-01."""
    bench.call(call(0, "first"), result(0))
    assert len(sent(bench)) == 1
    endpoint.answer = endpoint.said(503)
    bench.call(call(1, "failed"), result(1))
    bench.loop.advance(4)
    endpoint.answer = endpoint.said(200)
    bench.call(call(2, "second"), result(2))
    assert sent(bench, 1.0) == [("second", "permit", "executed")]
    assert sent(bench, 60) == [("failed", "permit", "executed")]


def test_a_registration_that_is_put_off_holds_up_no_report(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = endpoint.said(503)
    bench.ask(request("tools/list", 1))
    answer_list(bench, 1, "a")
    endpoint.answer = endpoint.said(200)
    bench.call(call(2), result(2))
    assert sent(bench, 1.0) == [("t", "permit", "executed")]
    assert len(endpoint.registrations) == 1
    bench.loop.advance(60)
    assert len(endpoint.registrations) == 2


def test_a_clock_that_was_set_back_does_not_hold_reports_up(bench: Bench, endpoint: FakeEndpoint) -> None:
    """RO-06."""
    bench.call(call(1), result(1))
    assert bench.journal is not None
    assert [row.id for row in bench.journal.due_reports(endpoint.config.base_url, NOW_MS - 86_400_000, 5)] == [1]


def test_rows_for_another_endpoint_are_left_alone(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = None
    bench.call(call(1), result(1))
    elsewhere = FakeEndpoint()
    object.__setattr__(elsewhere.config, "base_url", "https://elsewhere.example")
    bench.endpoint = elsewhere
    following = bench.restart()
    following.call(call(2, "u"), result(2))
    assert sent(following) == [("u", "permit", "executed")]


# --------------------------------------------------------------------------------------------------------- registration


def test_nothing_is_sent_before_the_first_list_or_call(bench: Bench, endpoint: FakeEndpoint) -> None:
    bench.ask(request("initialize", 0, clientInfo={"name": "a"}))
    bench.ask(notification("notifications/initialized"))
    bench.loop.advance(10_000)
    assert endpoint.exchanges == []


def answer_list(bench: Bench, request_id: Any, *names: str, **more: Any) -> None:
    tools = [{"name": name, "description": f"does {name}", "inputSchema": {}} for name in names]
    bench.answer(result_of(request_id, tools=tools, **more))
    bench.loop.advance(1)


def result_of(request_id: Any, **members: Any) -> bytes:
    return line({"jsonrpc": "2.0", "id": request_id, "result": members})


def test_a_catalog_is_registered_when_it_is_whole(bench: Bench, endpoint: FakeEndpoint) -> None:
    bench.ask(request("tools/list", 1))
    answer_list(bench, 1, "a", nextCursor="2")
    assert endpoint.registrations == []
    bench.ask(request("tools/list", 2, cursor="2"))
    answer_list(bench, 2, "b")
    [body] = endpoint.registrations
    assert body["tools"] == [{"name": "a", "description": "does a"}, {"name": "b", "description": "does b"}]


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"tools": None},
        {"resultType": "input_required"},
        {"tools": [{"name": "a"}], "nextCursor": 5},
        {"tools": [{"name": "a"}, {"description": "no name"}]},
        {"tools": [{"name": "a"}, 7]},
    ],
)
def test_no_part_of_a_catalog_is_taken_for_the_whole(
    bench: Bench, endpoint: FakeEndpoint, members: dict[str, Any]
) -> None:
    bench.ask(request("tools/list", 1))
    bench.answer(result_of(1, **members))
    bench.loop.advance(60)
    assert endpoint.registrations == []


def test_pages_of_two_catalogs_are_no_catalog(bench: Bench, endpoint: FakeEndpoint) -> None:
    bench.ask(request("tools/list", 1))
    answer_list(bench, 1, "old", nextCursor="2")
    bench.answer(notification("notifications/tools/list_changed"))
    bench.ask(request("tools/list", 2, cursor="2"))
    answer_list(bench, 2, "new")
    assert endpoint.registrations == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (result(5, resultType="input_required"), "input_required"),
        (failure(5, -32000, "Connection closed"), "outcome_unknown"),
        (failure(5, -1, "no"), "executed"),
    ],
)
def test_calls_without_a_row_are_told_apart_like_those_that_have_one(
    endpoint: FakeEndpoint, answer: bytes, told: str
) -> None:
    bench = Bench(None, endpoint=endpoint)
    bench.ask(call(5, is_modern=True))
    bench.answer(answer)
    assert sent(bench) == [("t", "permit", told)]


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_call_that_comes_first_registers_without_tools_and_upstream_is_asked_once(
    journal: Path, endpoint: FakeEndpoint, has_journal: bool
) -> None:
    bench = Bench(journal if has_journal else None, endpoint=endpoint)
    bench.ask(request("initialize", 0, clientInfo={"name": "a"}), notification("notifications/initialized"))
    bench.ask(call(1))
    bench.loop.advance(1)
    assert [body.get("tools") for body in endpoint.registrations] == [None]
    [own] = [each for each in bench.up.lines if b"tools/list" in each]
    assert bench.answer(result_of(json.loads(own)["id"], tools=[{"name": "t"}])) == []
    bench.loop.advance(1)
    assert [body.get("tools") for body in endpoint.registrations] == [None, [{"name": "t"}]]
    bench.answer(result(1))
    bench.ask(call(2))
    assert len([each for each in bench.up.lines if b"tools/list" in each]) == 1


def test_a_changed_catalog_is_asked_for_and_registered_again(bench: Bench, endpoint: FakeEndpoint) -> None:
    bench.ask(request("initialize", 0), notification("notifications/initialized"), request("tools/list", 1))
    answer_list(bench, 1, "a")
    bench.answer(notification("notifications/tools/list_changed"))
    own = json.loads(bench.up.lines[-1])
    assert own["method"] == "tools/list"
    answer_list(bench, own["id"], "a", "b")
    assert [len(body["tools"]) for body in endpoint.registrations] == [1, 2]


def test_a_registration_that_fails_is_tried_again(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = endpoint.said(None)
    bench.ask(request("tools/list", 1))
    answer_list(bench, 1, "a")
    endpoint.answer = endpoint.said(200)
    bench.loop.advance(60)
    assert len(endpoint.registrations) == 2


# ------------------------------------------------------------------------------------------------- calls without a row


def test_an_answer_under_another_spelling_of_the_id_is_an_answer(endpoint: FakeEndpoint, journal: Path) -> None:
    """Some servers give each id back as text, which the official clients take."""
    bench = Bench(journal, options(trusts_annotations=True), endpoint=endpoint)
    bench.ask(request("initialize", 0, clientInfo={"name": "a"}), notification("notifications/initialized"))
    bench.ask(request("tools/list", 1))
    bench.answer(result_of("1", tools=[{"name": "t", "annotations": {"readOnlyHint": True}}]))
    bench.ask(call(5))
    bench.answer(result("5"))
    lose_upstream(bench)
    assert sent(bench) == [("t", "permit", "executed")]


@pytest.mark.parametrize("has_journal", [True, False])
def test_calls_that_bypass_the_journal_are_reported(journal: Path, endpoint: FakeEndpoint, has_journal: bool) -> None:
    bench = Bench(journal if has_journal else None, options(trusts_annotations=has_journal), endpoint=endpoint)
    bench.ask(request("initialize", 0, clientInfo={"name": "a"}), notification("notifications/initialized"))
    bench.ask(request("tools/list", 1))
    tools = [{"name": name, "annotations": {"readOnlyHint": True}} for name in ("t", "u")]
    bench.answer(result_of(1, tools=tools))
    for own in [each for each in bench.up.lines if b"checkpoint-" in each]:
        bench.answer(result_of(json.loads(own)["id"], tools=tools))
    bench.ask(call(5), call(6, "u"))
    bench.answer(result(5))
    lose_upstream(bench)
    assert sorted(sent(bench)) == [("t", "permit", "executed"), ("u", "permit", "outcome_unknown")]
    assert not journal.exists()


def test_memory_is_bounded_and_the_oldest_goes(bench: Bench, endpoint: FakeEndpoint, monkeypatch: Any) -> None:
    monkeypatch.setattr("courier.MAX_IN_MEMORY", 3)
    endpoint.answer = endpoint.said(None)
    bench.relay.stop_admitting()
    for number in range(10):
        bench.ask(call(number, f"t{number}"))
    endpoint.answer = endpoint.said(200)
    bench.loop.advance(60)
    assert {tool for tool, *_ in endpoint.reports} >= {"t7", "t8", "t9"}
    assert {tool for tool, *_ in endpoint.reports} <= {"t0", "t7", "t8", "t9"}


def test_memory_is_bounded_with_what_waits_for_another_attempt(
    bench: Bench, endpoint: FakeEndpoint, monkeypatch: Any
) -> None:
    monkeypatch.setattr("courier.MAX_IN_MEMORY", 5)
    endpoint.answer = endpoint.said(503)
    bench.relay.stop_admitting()
    for number in range(40):
        bench.ask(call(number, f"t{number}"))
        bench.loop.advance(1)
    assert bench.courier is not None
    assert len(bench.courier.facts()) <= 5


def test_what_waits_in_memory_for_another_attempt_rides_along_too(bench: Bench, endpoint: FakeEndpoint) -> None:
    bench.call(call(1, seq=1), result(1))
    assert len(sent(bench)) == 1
    endpoint.answer = endpoint.said(503)
    bench.ask(call(2, seq=1))
    assert sent(bench) == [("t", "permit", "replayed")]
    bench.ask(call(3, "u", seq=2))
    assert [(at, tries) for at, _, tries, due in queued(bench) if due and due > 20] == [(-1, 1)]


def test_the_end_does_not_wait_for_what_is_due_later(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = endpoint.said(503)
    bench.call(call(1), result(1))
    bench.loop.advance(5)
    assert bench.courier is not None
    bench.courier.hurry()
    assert bench.courier.is_idle


def test_the_end_sends_what_it_can_and_gives_the_rest_to_the_next(bench: Bench, endpoint: FakeEndpoint) -> None:
    endpoint.answer = None
    for number in range(1, 8):
        bench.call(call(number), result(number))
    assert bench.courier is not None
    bench.courier.hurry()
    assert not bench.courier.is_idle
    registration, *first = endpoint.open[:3]
    for exchange in (registration, *first):
        exchange.done(endpoint.said(200))
    bench.loop.run()
    bench.courier.close()
    bench.relay.commit_riders()
    assert len(queued(bench)) == 7 - len(first)
    assert all(exchange.is_cancelled for exchange in endpoint.open[3:])


def test_a_process_that_only_records_a_tasks_end_keeps_its_reports_to_itself(bench: Bench) -> None:
    """It owns no journal, so nobody would send what it left there before the next owner comes."""
    bench.ask(call(1, seq=1, task={"ttl": 1}))
    bench.answer(result_of(1, task={"taskId": "t1", "status": "working"}))
    assert sent(bench, 3) == [("t", "permit", "executed")]
    following = bench.restart()
    following.ask(call(2, seq=1, task={"ttl": 1}))
    following.ask(request("tasks/result", 3, taskId="t1"))
    following.answer(result(3))
    assert queued(following) == []
    assert sent(following) == [("t", "permit", "replayed")]
