"""One report per dispatch, whoever delivers it: a relay, or `report flush` between two of them."""

import time
from pathlib import Path
from typing import Final

import pytest
from memory import NOW_MS, Bench, FakeEndpoint, call, cancel, failure, line, lose_upstream, request, result
from reporter_endpoint import Endpoint, reply

import reportrows
from queues import deliver, queue_at

KEY: Final = "a-key-of-some-length"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def bench(journal: Path) -> Bench:
    return Bench(journal, endpoint=FakeEndpoint(None))  # nobody answers this relay


def told(bench: Bench) -> list[tuple[str, str, str]]:
    """Tool, action and reason of what the next owner sends, once it has taken the journal over."""
    bench.endpoint = endpoint = FakeEndpoint()
    following = bench.restart()
    following.call(call(1, "next", workflow="v"), result(1))
    following.loop.advance(2)
    return endpoint.reports


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_call_in_doubt_is_reported_once_though_flush_delivers_in_between(bench: Bench, is_flushed: bool) -> None:
    bench.ask(call(1, "lost"))
    bench.ask(cancel(1))
    lose_upstream(bench)
    bench.relay.commit_riders()
    bench.end()
    if is_flushed:
        with Endpoint(reply(200)) as listening:
            queue = queue_at(str(bench.path))
            tally, _ = deliver(
                queue, KEY, limit=None, base_url=listening.url, ignores_due=False, now_ms=lambda: int(time.time() * 1e3)
            )
            assert tally == (1, 0, 0, 0)
            assert queue.rows(NOW_MS) == []
    lost = [] if is_flushed else [("lost", "permit", "outcome_unknown")]
    assert told(bench) == [*lost, ("next", "permit", "executed")]


def test_a_cancelled_call_that_became_a_task_is_reported_once_though_the_task_is_lost(journal: Path) -> None:
    endpoint = FakeEndpoint()
    bench = Bench(journal, endpoint=endpoint)
    bench.ask(call(1, "slow", task={}))
    bench.ask(cancel(1))
    bench.answer(line({"jsonrpc": "2.0", "id": 1, "result": {"task": {"taskId": "x", "status": "working"}}}))
    bench.loop.advance(2)
    bench.ask(request("tasks/get", 2, taskId="x"))
    bench.answer(failure(2, -32602, "no such task"))
    bench.loop.advance(2)
    bench.relay.commit_riders()
    assert bench.statuses() == ["IN_DOUBT"]
    assert endpoint.reports == [("slow", "permit", "executed")]
    assert told(bench) == [("next", "permit", "executed")]


def test_a_mark_that_comes_late_does_not_wake_a_delivered_report(journal: Path) -> None:
    bench = Bench(journal, endpoint=FakeEndpoint(None))
    bench.ask(call(1, "lost"))
    bench.ask(cancel(1))
    lose_upstream(bench)
    assert bench.journal is not None
    with bench.journal._transaction as database:
        reportrows.mark_delivered(database, 1)
        reportrows.mark_failed(database, 1, 1, NOW_MS, "503")
    assert bench.select("SELECT body, due_at FROM reports WHERE id = 1") == [(None, None)]
