"""Tasks of both kinds: handles are replayed, `tasks/*` goes upstream, and what upstream said last outlives it.

Without processes first; then @modelcontextprotocol/server-everything (npm, on Node), which hosts tasks of 2025-11-25.
It is looked for in $CHECKPOINT_NODE_MODULES, else in node_modules here; its tests are skipped where it is missing.
"""

import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from memory import (
    HANDSHAKE_NAMES,
    MODERN,
    Bench,
    call,
    database_held,
    failure,
    line,
    lose_upstream,
    read_only,
    reasons,
    request,
    result,
)
from support import Client, node_server, refusal_of, relay_words, rows, until

from journal import Journal
from settings import Settings
from states import Cause
from storage import Files, Lock

UNKNOWN: Final = -32602


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "j.db"


@pytest.fixture
def bench(path: Path) -> Bench:
    return Bench(path)


@pytest.fixture(params=[False, True], ids=["2025-11-25", "extension"])
def is_modern(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def begin(bench: Bench, is_modern: bool, *, seq: int = 1, request_id: int = 1, task_id: str = "x") -> bytes:
    """A call that upstream answers with a handle; the handle's line."""
    state = {"taskId": task_id, "status": "working"}
    body = {"resultType": "task", **state} if is_modern else {"task": state}
    handle = line({"jsonrpc": "2.0", "id": request_id, "result": body})
    assert bench.call(make(request_id, is_modern, seq=seq), handle) == [handle]
    return handle


def make(request_id: int, is_modern: bool, *, seq: int | None = 1) -> bytes:
    """A call that wants a task."""
    more: dict[str, Any] = {} if is_modern else {"task": {"ttl": 1}}
    return call(request_id, seq=seq, is_modern=is_modern, **more)


def ask(bench: Bench, is_modern: bool, method: str, request_id: int, answer: bytes, task_id: str = "x") -> list[bytes]:
    """A `tasks/*` request, which must go upstream unchanged, and its answer; what comes down."""
    meta = {"_meta": MODERN} if is_modern else {}
    asked = request(method, request_id, taskId=task_id, **meta)
    assert bench.ask(asked) == []
    assert bench.up.lines[-1] == asked
    return bench.answer(answer)


def state(request_id: int, status: str, **more: Any) -> bytes:
    """A task's state, as `tasks/get` gives it."""
    return line({"jsonrpc": "2.0", "id": request_id, "result": {"taskId": "x", "status": status, **more}})


def lost(request_id: int) -> bytes:
    return failure(request_id, UNKNOWN, "Task not found")


def kept(path: Path) -> list[tuple[Any, ...]]:
    """What is on record of tasks: the row's sequence, the method, the answer."""
    with read_only(path) as database:
        query = (
            "SELECT d.sequence, t.method, coalesce(t.result, t.error) FROM tasks AS t JOIN dispatches AS d"
            " ON d.id = t.dispatch ORDER BY t.rowid"
        )
        return database.execute(query).fetchall()


# ----------------------------------------------------------------------------------------------------- the last answer


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_the_last_word_is_kept_and_given_when_upstream_has_forgotten_the_task(
    bench: Bench, path: Path, is_modern: bool, status: str
) -> None:
    handle = begin(bench, is_modern)
    assert ask(bench, is_modern, "tasks/get", 2, state(2, "working")) == [state(2, "working")]
    assert kept(path) == []
    said = state(3, status, result={"content": []})
    assert ask(bench, is_modern, "tasks/get", 3, said) == [said]
    assert bench.statuses() == ["TASK"], "a handle is no outcome, whatever became of the task"
    bench = bench.restart()
    assert bench.ask(make(4, is_modern)) == [handle.replace(b'"id":1', b'"id":4')]
    assert ask(bench, is_modern, "tasks/get", 5, lost(5)) == [state(5, status, result={"content": []})]
    assert ask(bench, is_modern, "tasks/get", 6, state(6, "working")) == [state(6, "working")], "upstream knows better"
    assert bench.statuses() == ["TASK"]


def test_each_method_has_a_last_word_of_its_own(bench: Bench, path: Path) -> None:
    begin(bench, False)
    done = result(2, "the very result")
    assert ask(bench, False, "tasks/result", 2, done) == [done]
    assert ask(bench, False, "tasks/get", 3, lost(3)) == [lost(3)], "nothing was said to that"
    assert ask(bench, False, "tasks/result", 4, lost(4)) == [result(4, "the very result")]
    newer = result(5, "a newer one")
    ask(bench, False, "tasks/result", 5, newer)
    assert ask(bench, False, "tasks/result", 6, lost(6)) == [result(6, "a newer one")]
    assert bench.statuses() == ["TASK"], "it was seen finished"
    assert [(sequence, method) for sequence, method, _ in kept(path)] == [(1, "tasks/result")]


def test_the_answer_is_on_disk_before_it_goes_down(path: Path) -> None:
    seen: list[int] = []
    bench = Bench(path, on_down=lambda said: seen.append(len(kept(path))) if b"completed" in said else None)
    begin(bench, False)
    ask(bench, False, "tasks/get", 2, state(2, "completed"))
    assert seen == [1]


def test_an_answer_that_is_known_is_not_written_again(
    bench: Bench, is_modern: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bench, is_modern)
    ask(bench, is_modern, "tasks/get", 2, state(2, "completed"))
    monkeypatch.delattr(Journal, "append")
    assert ask(bench, is_modern, "tasks/get", 3, state(3, "completed")) == [state(3, "completed")]


def test_our_name_stands_in_what_is_given_and_upstreams_in_what_is_kept(path: Path) -> None:
    bench = Bench(path, Settings(name="ours", version=""))
    begin(bench, True)
    info = {"_meta": {"io.modelcontextprotocol/serverInfo": {"name": "theirs", "version": "1"}}}
    assert b'"name":"ours"' in ask(bench, True, "tasks/get", 2, state(2, "failed", **info))[0]
    assert b"theirs" in kept(path)[0][2]
    again = ask(bench.restart(Settings(name="ours", version="")), True, "tasks/get", 3, lost(3))
    assert again == [state(3, "failed", **info).replace(b"theirs", b"ours")]


@pytest.mark.parametrize(
    ("method", "said", "is_final"),
    [
        ("tasks/result", failure(2, 1001, "the call's own error"), True),
        ("tasks/result", failure(2, -32603, "the tool raised"), True),
        ("tasks/result", failure(2, -32601, "no such method"), False),
        ("tasks/result", failure(2, -32600, "task required"), False),
        ("tasks/result", failure(2, -32021, "undeclared"), False),
        ("tasks/result", failure(2, -32042, "go", {"elicitations": []}), False),
        ("tasks/result", failure(2, -32000, "Connection closed"), False),
        ("tasks/result", failure(2, -32001, "Request timed out"), False),
        ("tasks/get", failure(2, 1001, "no"), False),
        ("tasks/get", state(2, "input_required"), False),
        ("tasks/cancel", state(2, "cancelled"), True),
        ("tasks/cancel", result(2), False),
        ("tasks/update", state(2, "completed"), False),
        ("tasks/list", state(2, "completed"), False),
    ],
)
def test_what_counts_as_a_last_word(bench: Bench, path: Path, method: str, said: bytes, is_final: bool) -> None:
    begin(bench, False)
    assert ask(bench, False, method, 2, said) == [said]
    assert len(kept(path)) == is_final
    ask(bench, False, "tasks/get", 3, lost(3))
    assert bench.statuses() == ["TASK" if is_final else "IN_DOUBT"]


def test_an_error_that_may_only_say_that_stdin_is_closed_is_no_last_word(bench: Bench, path: Path) -> None:
    begin(bench, False)
    bench.relay.is_upstream_stdin_closed = True
    ask(bench, False, "tasks/result", 2, failure(2, -32000, "closing"))
    assert kept(path) == []


# ------------------------------------------------------------------------------------------------------------ the loss


def test_a_task_that_upstream_forgot_unfinished_is_in_doubt(bench: Bench, path: Path, is_modern: bool) -> None:
    begin(bench, is_modern)
    bench = bench.restart()
    assert ask(bench, is_modern, "tasks/get", 2, lost(2)) == [lost(2)]
    for asked in (make(3, is_modern), make(3, is_modern, seq=None)):
        facts = bench.error(asked)["facts"]
        assert (facts["reason"], facts["cause"], facts["sequence"]) == ("in_doubt", "upstream_lost", 1)
    assert bench.statuses() == ["IN_DOUBT"]
    assert bench.restart().error(make(4, is_modern))["facts"]["reason"] == "in_doubt"


def test_a_loss_is_recorded_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(bench, False)
    ask(bench, False, "tasks/result", 2, lost(2))
    monkeypatch.delattr(Journal, "append")
    assert ask(bench, False, "tasks/get", 3, lost(3)) == [lost(3)]


@pytest.mark.parametrize("method", ["tasks/cancel", "tasks/update"])
def test_only_who_asks_for_a_task_learns_that_it_is_lost(bench: Bench, is_modern: bool, method: str) -> None:
    """Servers say -32602 too to a cancel of what has ended, and to input that does not fit."""
    begin(bench, is_modern)
    assert ask(bench, is_modern, method, 2, lost(2)) == [lost(2)]
    assert bench.statuses() == ["TASK"]


def test_a_task_that_is_found_again_finished_is_in_doubt_no_more(bench: Bench, is_modern: bool) -> None:
    """A server may read its tasks from a disk that was away."""
    begin(bench, is_modern)
    ask(bench, is_modern, "tasks/get", 2, lost(2))
    ask(bench, is_modern, "tasks/get", 3, state(3, "working"))
    assert bench.statuses() == ["IN_DOUBT"]
    ask(bench, is_modern, "tasks/get", 4, state(4, "completed"))
    assert bench.statuses() == ["TASK"]
    assert len(bench.ask(make(5, is_modern))) == 1
    assert bench.ask(call(6, "other", is_modern=is_modern)) == [], "and blocks nothing"
    assert bench.restart().ask(make(7, is_modern))[0].startswith(b'{"jsonrpc":"2.0","id":7,"result"')


def test_a_row_that_an_operator_has_settled_does_not_become_doubtful(bench: Bench, path: Path) -> None:
    begin(bench, False)
    bench.end()
    with contextlib.closing(sqlite3.connect(path)) as database:
        columns = "INSERT INTO decisions (dispatch, status, decided_at, reason, result)"
        database.execute(f"{columns} VALUES (1, 'COMPLETED', 1, 'looked', ?)", (b'{"content":[]}',))
        database.commit()
    bench = Bench(path)
    assert ask(bench, False, "tasks/get", 2, lost(2)) == [lost(2)]
    assert bench.statuses() == ["COMPLETED"]
    bench.call(call(3, "other"), result(3))


def test_a_task_id_means_the_newest_row_that_carries_it(bench: Bench, path: Path) -> None:
    """Servers count from 1 in each of their lives."""
    begin(bench, False, seq=1, request_id=1)
    begin(bench, False, seq=2, request_id=2)
    begin(bench, False, seq=3, request_id=3, task_id="y")
    ask(bench, False, "tasks/get", 4, state(4, "completed"))
    assert [sequence for sequence, _, _ in kept(path)] == [2]
    ask(bench, False, "tasks/get", 5, lost(5), task_id="y")
    assert bench.statuses() == ["TASK", "TASK", "IN_DOUBT"]


@pytest.mark.parametrize("method", ["tasks/get", "tasks/result"])
def test_what_is_said_of_a_task_of_the_other_era_is_none_of_its_rows_business(
    bench: Bench, path: Path, is_modern: bool, method: str
) -> None:
    begin(bench, is_modern)
    assert ask(bench, not is_modern, "tasks/get", 2, state(2, "completed")) == [state(2, "completed")]
    assert ask(bench, not is_modern, method, 3, lost(3)) == [lost(3)]
    assert (kept(path), bench.statuses()) == ([], ["TASK"])


def test_tasks_that_no_row_knows_pass(bench: Bench, path: Path) -> None:
    for request_id, task_id in ((1, "z"), (2, "\ud800")):
        assert ask(bench, False, "tasks/get", request_id, lost(request_id), task_id) == [lost(request_id)]
        assert ask(bench, False, "tasks/get", request_id, state(request_id, "completed"), task_id) != []
    assert not path.exists(), "a question makes no journal"
    begin(bench, False)
    ask(bench, False, "tasks/get", 3, lost(3), "z")
    assert bench.statuses() == ["TASK"]


def test_upstreams_end_leaves_a_task_what_it_was(bench: Bench) -> None:
    begin(bench, False)
    bench.ask(request("tasks/result", 2, taskId="x"))
    assert reasons(lose_upstream(bench, Cause.UPSTREAM_LOST)) == [(2, "upstream_lost")]
    assert bench.statuses() == ["TASK"]


# ---------------------------------------------------------------------------------------------- the journal in the way


def test_a_process_that_only_asks_leaves_the_journal_to_others(bench: Bench, path: Path, is_modern: bool) -> None:
    begin(bench, is_modern)
    bench = bench.restart()
    assert bench.journal is not None
    ask(bench, is_modern, "tasks/get", 2, state(2, "working"))
    assert not bench.journal.is_open
    ask(bench, is_modern, "tasks/cancel", 3, lost(3))
    ask(bench, is_modern, "tasks/get", 4, state(4, "completed"), "z")
    assert not bench.journal.is_open
    ask(bench, is_modern, "tasks/get", 5, state(5, "completed"))
    bench = bench.restart()
    assert bench.journal is not None
    ask(bench, is_modern, "tasks/get", 6, lost(6))
    assert not bench.journal.is_open


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_process_that_only_records_what_became_of_a_task_leaves_the_journal_to_others(
    bench: Bench, path: Path, is_modern: bool, is_lost: bool
) -> None:
    begin(bench, is_modern)
    again = bench.restart()
    ask(again, is_modern, "tasks/get", 2, lost(2) if is_lost else state(2, "completed"))
    assert again.statuses() == ["IN_DOUBT" if is_lost else "TASK"]
    assert len(kept(path)) == (0 if is_lost else 1)
    assert again.journal is not None
    assert not again.journal.is_open
    other = Bench(path)
    other.call(call(3, "t2", seq=2), result(3))


def test_a_replay_in_the_same_turn_does_not_give_the_journal_away(bench: Bench, path: Path) -> None:
    """The answer to the one waits for its commit when the other has nothing more to do with the journal."""
    begin(bench, False)
    bench = bench.restart()
    bench.ask(request("tasks/get", 2, taskId="x"))
    bench.relay.from_upstream([state(2, "completed")])
    bench.relay.from_downstream([make(3, False)])
    bench.loop.run()
    assert [json.loads(one)["id"] for one in bench.down.lines] == [2, 3]
    assert len(kept(path)) == 1


def test_while_another_process_owns_the_journal_answers_pass(bench: Bench, path: Path) -> None:
    begin(bench, False)
    bench = bench.restart()
    other = Lock(Files(str(path)).lock)
    assert other.take()
    assert ask(bench, False, "tasks/get", 2, state(2, "completed")) == [state(2, "completed")]
    assert ask(bench, False, "tasks/get", 3, lost(3)) == [lost(3)]
    other.give_back()
    assert (kept(path), bench.statuses()) == ([], ["TASK"])


def test_an_answer_that_cannot_be_kept_goes_down_late(bench: Bench, path: Path) -> None:
    begin(bench, False)
    with database_held(path):
        assert ask(bench, False, "tasks/get", 2, state(2, "completed")) == []
        bench.loop.advance(6)
        assert bench.down.lines[-1] == state(2, "completed")
    bench.loop.advance(1)
    assert len(kept(path)) == 1, "it is recorded all the same"


def test_after_a_failure_of_the_journal_answers_pass(bench: Bench, path: Path) -> None:
    begin(bench, False)
    path.rename(path.with_suffix(".away"))
    assert ask(bench, False, "tasks/get", 2, state(2, "completed")) == [state(2, "completed")]
    bench.ask(call(3, seq=9))
    assert ask(bench, False, "tasks/get", 4, lost(4)) == [lost(4)]


def test_an_array_passes_as_it_is(bench: Bench, path: Path) -> None:
    begin(bench, False)
    bench.ask(request("tasks/get", 2, taskId="x"), request("ping", 3))
    array = b"[%b,%b]\n" % (lost(2).rstrip(), result(3).rstrip())
    assert bench.answer(array) == [array]


def test_without_a_journal_tasks_are_none_of_our_business() -> None:
    bench = Bench(None, HANDSHAKE_NAMES)
    assert ask(bench, False, "tasks/get", 2, lost(2)) == [lost(2)]


# -------------------------------------------------------------------------------------------------- server-everything


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Client]:
    words = relay_words(
        *("--journal", tmp_path / "j.db", "--restart-upstream", "1"), upstream=[*node_server("everything"), "stdio"]
    )
    with Client(words) as client:
        shake_hands(client)
        yield client


def shake_hands(client: Client) -> None:
    params = {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tasks": {}},
        "clientInfo": {"name": "t", "version": "0"},
    }
    client.answer(client.request("initialize", params))
    client.send(line({"jsonrpc": "2.0", "method": "notifications/initialized"}))


def replace_upstream(client: Client) -> None:
    """SIGKILL to the server; returns when another runs."""
    os.kill(client.upstream_pid(), signal.SIGKILL)
    until(lambda: "started again" in client.stderr_text(), "another server is started")


def research(client: Client) -> dict[str, Any]:
    """Starts the server's one task, pinned; its handle, or the refusal."""
    params = {
        "name": "simulate-research-query",
        "arguments": {"topic": "tea", "ambiguous": False},
        "task": {"ttl": 60_000},
        "_meta": {"checkpoint_seq": 1},
    }
    answer: dict[str, Any] = json.loads(client.answer(client.request("tools/call", params)))
    return answer


def about(client: Client, method: str, handle: dict[str, Any]) -> dict[str, Any]:
    """What is said of the task; without the envelope."""
    asked = client.request(method, {"taskId": handle["result"]["task"]["taskId"]})
    answer = json.loads(client.answer(asked))
    return {key: answer[key] for key in ("result", "error") if key in answer}


def test_a_task_of_server_everything_outlives_its_server(session: Client, tmp_path: Path) -> None:
    """Its tasks live in memory: after a death only the journal knows what the task said last."""
    handle = research(session)
    done = about(session, "tasks/result", handle)
    state = about(session, "tasks/get", handle)
    assert state["result"]["status"] == "completed"
    assert about(session, "tasks/cancel", handle)["error"]["code"] == UNKNOWN
    replace_upstream(session)
    for _ in range(2):
        assert research(session)["result"] == handle["result"]
        assert about(session, "tasks/result", handle) == done
        assert about(session, "tasks/get", handle) == state
    session.kill()
    with Client(relay_words("--journal", tmp_path / "j.db", upstream=[*node_server("everything"), "stdio"])) as client:
        shake_hands(client)
        assert research(client)["result"] == handle["result"]
        assert about(client, "tasks/result", handle) == done
        client.finish()
    assert [row["status"] for row in rows(tmp_path / "j.db")] == ["TASK"]


def test_a_task_that_server_everything_lost_is_in_doubt(session: Client, tmp_path: Path) -> None:
    handle = research(session)
    assert about(session, "tasks/get", handle)["result"]["status"] == "working"
    replace_upstream(session)
    assert about(session, "tasks/get", handle)["error"]["code"] == UNKNOWN
    assert research(session)["error"]["code"] == 31001
    assert [row["status"] for row in rows(tmp_path / "j.db")] == ["IN_DOUBT"]
    session.finish()


def test_server_everything_is_not_asked_for_what_does_not_fit(session: Client, tmp_path: Path) -> None:
    """A recorded handle answers no request without `task`, and a recorded result none with it."""
    handle = research(session)
    assert "task" in handle["result"]
    plain = {"name": "simulate-research-query", "arguments": {"topic": "tea", "ambiguous": False}}
    answer = session.answer(session.request("tools/call", {**plain, "_meta": {"checkpoint_seq": 1}}))
    assert refusal_of(answer)["reason"] == "diverged"
    total = {"name": "get-sum", "arguments": {"a": 2, "b": 3}, "_meta": {"checkpoint_seq": 2}}
    assert "5" in json.loads(session.answer(session.request("tools/call", total)))["result"]["content"][0]["text"]
    answer = session.answer(session.request("tools/call", {**total, "task": {}}))
    assert refusal_of(answer)["reason"] == "diverged"
    session.finish()
