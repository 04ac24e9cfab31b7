"""The outbox in SQLite: what it promises of a row, whoever is killed, forked or refused. And one of somebody's own."""

import contextlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest
import reporter_child
from reporter_endpoint import BACKENDS, KEY, Endpoint, refused, reply, run
from reporter_own_outbox import OwnOutbox

import reporter
from reporter import (
    MAX_ATTEMPTS,
    CheckpointReporter,
    Counts,
    Failure,
    Flush,
    OutboxUnusable,
    SqliteOutbox,
    create_checkpoint_reporter,
    encode,
)
from storage import Files

CHILD: Final = Path(reporter_child.__file__)
CALL: Final[Any] = {"tool_name": "t", "action": "permit", "reason": "r"}
BAD: Final = Failure("500 Internal Server Error: ", 500)
NO: Final = Failure("400 Bad Request: no", 400)
LOST: Final = Failure("no answer: Connection refused")


class Clock:
    """The monotonic clock, moved on; the wall clock stays as it is."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._real = reporter._monotonic_ms

    def __call__(self) -> int:
        return self._real() + int(self.ahead_s * 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reporter, "_monotonic_ms", clock)
    return clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture
def outbox(path: Path) -> Iterator[SqliteOutbox]:
    with contextlib.closing(SqliteOutbox(path)) as outbox:
        yield outbox


@pytest.fixture
def told() -> list[str]:
    return []


def make(url: str, outbox: reporter.Outbox, told: list[str], **options: Any) -> CheckpointReporter:
    return create_checkpoint_reporter(
        api_key=KEY,
        server_did="did:web:example.com",
        server_url="https://example.com",
        base_url=url,
        outbox=outbox,
        on_warn=told.append,
        **options,
    )


def tools(outbox: SqliteOutbox, limit: int = 25) -> list[str]:
    return [record.tool_name for record in outbox.claim(limit)]


@contextlib.contextmanager
def child(scene: Any, path: Path, url: str = "") -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, str(CHILD), scene.__name__, str(path), url]
    env = {**os.environ, "PYTHONPATH": str(CHILD.parent.parent)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def told_by(stream: IO[bytes] | None) -> list[list[Any]]:
    assert stream is not None
    return [json.loads(line) for line in stream]


# ------------------------------------------------------------------------------------------------------------ the file


def test_it_is_opened_when_it_is_used(path: Path, outbox: SqliteOutbox) -> None:
    make("http://127.0.0.1:1", outbox, [])
    assert not path.exists()
    outbox.add({}, "t")
    assert path.exists()


def test_its_files_are_its_owner_s_alone(path: Path, outbox: SqliteOutbox) -> None:
    """RC-03."""
    before = os.umask(0)
    try:
        outbox.add({}, "t")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    assert len(list(path.parent.iterdir())) == 3


def test_a_commit_is_on_disk(outbox: SqliteOutbox) -> None:
    outbox.counts()
    database = outbox._open()
    pragmas = ("journal_mode", "synchronous", "application_id", "user_version")
    found = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
    assert found == ["wal", 2, reporter.APPLICATION_ID, reporter.FORMAT]


def stranger(path: Path, kind: str) -> None:
    if kind == "journal":
        Files(str(path)).create("w", 0)
    elif kind == "text":
        path.write_text("a list of things to do\n" * 99)
    elif kind == "short":
        path.write_bytes(b"x")
    else:
        with contextlib.closing(sqlite3.connect(path)) as database:
            if kind == "newer":
                database.execute(f"PRAGMA application_id = {reporter.APPLICATION_ID}")
                database.execute("PRAGMA user_version = 99")
            if kind == "wal":
                database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE t (x)")


@pytest.mark.parametrize("kind", ["journal", "text", "short", "database", "wal", "newer"])
def test_a_file_that_is_not_ours_is_refused_and_left_alone(kind: str, path: Path, told: list[str]) -> None:
    stranger(path, kind)
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    with contextlib.closing(SqliteOutbox(path)) as outbox, Endpoint(reply(200)) as endpoint:
        with pytest.raises(OutboxUnusable, match=r"another path|this version"):
            outbox.counts()
        it = make(endpoint.url, outbox, told)
        for _ in range(3):  # and reports go directly
            assert run("asyncio", lambda: it.report_tool_call(**CALL)).delivered
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before
    assert len(told) == 1


@pytest.mark.parametrize("kind", ["folder", "no folder", "wrong type"])
def test_a_path_that_cannot_be_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    wrong: Any = {"folder": tmp_path, "no folder": tmp_path / "no" / "o.db", "wrong type": 5}[kind]
    with pytest.raises((OutboxUnusable, TypeError)):
        SqliteOutbox(wrong).counts()


def test_an_empty_file_is_a_new_outbox(path: Path, outbox: SqliteOutbox) -> None:
    path.touch(0o600)
    assert outbox.add({}, "t") == 1


def test_another_file_in_its_place_is_noticed(path: Path, outbox: SqliteOutbox) -> None:
    outbox.add({}, "t")
    for file in path.parent.iterdir():
        file.unlink()
    outbox.add({}, "t")
    with contextlib.closing(SqliteOutbox(path)) as other:
        assert other.counts().waiting == 1


# --------------------------------------------------------------------------------------------------------- claims, time


def test_a_row_is_claimed_by_whoever_enqueues_or_lists_it(outbox: SqliteOutbox, clock: Clock) -> None:
    outbox.add({"a": 1}, "t", "http://x")
    assert outbox.claim() == []
    clock.ahead_s += 61
    (record,) = outbox.claim()
    assert record[:4] == (1, {"a": 1}, "t", 0)
    assert record.base_url == "http://x"
    assert record.claimed_until is not None
    assert abs(record.claimed_until - time.time() - 60) < 1
    assert outbox.claim() == []
    outbox.give_back([1])
    assert len(outbox.claim()) == 1


def test_a_failure_after_the_claim_leaves_the_next_one_alone(path: Path, outbox: SqliteOutbox, clock: Clock) -> None:
    outbox.add({}, "t")
    clock.ahead_s += 61
    with contextlib.closing(SqliteOutbox(path)) as other:
        assert len(other.claim()) == 1
        outbox.settle(1, BAD)
        assert other.waiting()[0].attempts == 1
        clock.ahead_s += 50
        assert outbox.claim() == []


def test_a_row_with_too_little_of_its_claim_left_is_not_sent(path: Path, told: list[str]) -> None:
    async def steps() -> None:
        it = make(endpoint.url, outbox, told, timeout_s=5)
        assert not (await it.report_tool_call(**CALL)).delivered
        assert await it.flush() == Flush(0, 0)

    with contextlib.closing(SqliteOutbox(path, visibility_timeout_s=5)) as outbox, Endpoint(reply(200)) as endpoint:
        run("asyncio", steps)
        assert not endpoint.requests
        assert outbox.counts().waiting == 1
    assert len(told) == 1
    assert "visibility_timeout_s" in told[0]


def test_a_row_that_failed_is_due_later_and_keeps_its_id(path: Path, outbox: SqliteOutbox, clock: Clock) -> None:
    """RD-03: over attempts and restarts. Two calls that are equal are two rows."""
    assert [outbox.add({"n": 1}, "t"), outbox.add({"n": 1}, "t")] == [1, 2]
    outbox.settle(2, None)
    for attempt in range(MAX_ATTEMPTS - 1):
        outbox.settle(1, BAD)
        assert outbox.claim() == []
        assert outbox.due() == []
        (waiting,) = outbox.waiting()
        assert 24 * 2**attempt - 1 <= waiting.due_in_s <= 36 * 2**attempt
        clock.ahead_s += waiting.due_in_s + 0.01
        outbox.close()
        outbox = SqliteOutbox(path)
        assert [row.id for row in outbox.due()] == [1]
        ((row_id, body, _, attempts, _, _),) = outbox.claim()
        assert (row_id, body, attempts) == (1, {"n": 1}, attempt + 1)
    outbox.settle(1, BAD)
    (dead,) = outbox.dead()
    assert (dead.id, dead.attempts, dead.status, dead.error) == (1, 8, 500, "500 Internal Server Error: ")
    outbox.close()


def test_an_hour_set_back_keeps_nothing_waiting(
    outbox: SqliteOutbox, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RO-06: due times do not know the wall clock; a monotonic one that began anew does no harm."""
    outbox.add({}, "t")
    outbox.settle(1, BAD)
    real = time.time
    for wrong_s in (-3600, 3600):
        monkeypatch.setattr(time, "time", lambda wrong_s=wrong_s: real() + wrong_s)
        assert outbox.claim() == []
    clock.ahead_s += 37
    assert len(outbox.claim()) == 1
    outbox.settle(1, BAD)
    clock.ahead_s -= 100_000
    assert len(outbox.claim()) == 1


def test_a_store_that_was_asked_for_quiet_lists_nothing(outbox: SqliteOutbox, clock: Clock) -> None:
    """RP-03: the endpoint is meant, not one row. A person may insist."""
    for name in ("a", "b"):
        outbox.add({}, name)
    outbox.settle(1, Failure("429 Too Many Requests: ", 429, 90))
    clock.ahead_s += 61
    assert outbox.claim() == []
    clock.ahead_s += 28
    assert outbox.claim() == []
    assert [record.tool_name for record in outbox.claim(ignores_due=True)] == ["b", "a"]
    outbox.give_back([1, 2])
    clock.ahead_s += 1.1
    assert set(tools(outbox)) == {"a", "b"}


@pytest.mark.parametrize("is_tried", [False, True])
def test_a_row_that_waits_keeps_its_time_and_its_reason_through_an_outage(
    is_tried: bool, outbox: SqliteOutbox, clock: Clock
) -> None:
    outbox.settle(outbox.add({}, "t"), Failure("503 Service Unavailable: ", 503, 1800))
    (before,) = outbox.waiting()
    clock.ahead_s += 600
    assert len(outbox.claim(ignores_due=True)) == 1
    if is_tried:
        outbox.settle(1, LOST)
    else:
        outbox.give_back([1])
    (after,) = outbox.waiting()
    assert after._replace(due_in_s=0) == before._replace(due_in_s=0)
    assert abs(before.due_in_s - 600 - after.due_in_s) < 1
    outbox.settle(1, LOST)  # without any claim, too
    assert outbox.waiting()[0].due_in_s > 1000


def test_what_is_due_is_what_a_claim_would_take(outbox: SqliteOutbox, clock: Clock) -> None:
    for name in ("retry", "claimed", "quiet"):
        outbox.add({}, name)
    outbox.settle(1, BAD)
    outbox.give_back([3])
    assert [row.tool_name for row in outbox.due()] == ["quiet"]
    assert [row.tool_name for row in outbox.due(-1, ignores_due=True)] == ["quiet", "retry"]
    outbox.settle(3, Failure("429 Too Many Requests: ", 429, 90))
    clock.ahead_s += 61
    assert outbox.due() == []
    assert outbox.claim() == []
    assert [record.id for record in outbox.claim_these([1, 99, 2])] == [1, 2]  # quiet or not


def test_a_stored_body_that_is_no_json_keeps_no_other_back(outbox: SqliteOutbox, clock: Clock, told: list[str]) -> None:
    for number in range(2):
        outbox.add({"number": number}, "t")
    outbox._open().execute("UPDATE reports SET body = ? WHERE id = 1", (b"{not json",))
    clock.ahead_s += 61
    with Endpoint(reply(400, "no JSON"), reply(200)) as endpoint:
        assert run("asyncio", make(endpoint.url, outbox, told).flush) == Flush(1, 1)
        assert [request.content for request in endpoint.requests] == [b"{not json", b'{"number":1}']
    assert [(row.is_dead, row.error) for row in outbox.undelivered()] == [(True, "400 Bad Request: no JSON")]


def test_a_sweep_ends_when_the_endpoint_asks_for_time(outbox: SqliteOutbox, clock: Clock, told: list[str]) -> None:
    """RP-03: and the rows behind wait as they did."""
    for _ in range(3):
        outbox.add({}, "t")
    clock.ahead_s += 61
    with Endpoint(reply(429, "", "Retry-After: 90")) as endpoint:
        assert run("asyncio", make(endpoint.url, outbox, told).flush) == Flush(0, 1)
        assert len(endpoint.requests) == 1
    assert [row.attempts for row in outbox.waiting()] == [1, 0, 0]
    assert not any(row.is_claimed for row in outbox.waiting())


def test_a_callback_that_raises_does_not_make_a_full_store_fail(path: Path) -> None:
    def failing(message: str) -> None:
        raise ValueError(message)

    with contextlib.closing(SqliteOutbox(path, max_bytes=60_000, on_warn=failing)) as outbox:
        for number in range(30):
            assert outbox.add({"text": "x" * 4000}, "t") == number + 1


def test_a_fault_of_the_connection_gives_a_row_back_behind_the_others(outbox: SqliteOutbox, clock: Clock) -> None:
    """RO-01, RO-03."""
    for name in ("a", "b"):
        outbox.add({}, name)
    clock.ahead_s += 61
    assert tools(outbox, 1) == ["a"]
    outbox.settle(1, LOST)
    (first, _) = outbox.waiting()
    assert (first.attempts, first.due_in_s, first.error) == (0, 0, str(LOST))
    assert tools(outbox) == ["b", "a"]


def test_dead_rows_can_be_revived(outbox: SqliteOutbox) -> None:
    """RO-03."""
    for _ in range(3):
        outbox.settle(outbox.add({}, "t"), NO)
    assert outbox.counts() == Counts(waiting=0, dead=3, delivered=0, dropped=0)
    assert [(row.id, row.error) for row in outbox.dead(2)] == [(1, str(NO)), (2, str(NO))]
    assert outbox.revive([2, 99]) == 1
    assert [(record.id, record.attempts) for record in outbox.claim()] == [(2, 0)]
    assert outbox.revive() == 2
    assert outbox.counts().dead == 0


def test_a_delivered_row_loses_its_body_and_goes(outbox: SqliteOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox.settle(outbox.add({"private": 1}, "t"), None)
    outbox.settle(1, BAD)  # too late
    assert outbox._open().execute("SELECT body, attempts FROM reports").fetchall() == [(None, 0)]
    outbox.settle(outbox.add({}, "t"), NO)
    assert outbox.prune(older_than_s=3600) == 0
    assert outbox.prune() == 1
    assert outbox.counts() == Counts(0, 1, 0, 0)
    assert outbox.prune(dead=True) == 1
    outbox.settle(outbox.add({}, "t"), None)
    today = reporter._epoch_ms()
    monkeypatch.setattr(reporter, "_epoch_ms", lambda: today + 86_400_000 + 9999)
    outbox.settle(outbox.add({}, "t"), None)
    assert outbox.counts().delivered == 1


def test_a_full_store_drops_the_oldest_and_says_so(path: Path, told: list[str]) -> None:
    """RO-04."""
    with contextlib.closing(SqliteOutbox(path, max_bytes=300_000, on_warn=told.append)) as outbox:
        for number in range(250):
            outbox.add({"text": "x" * 2000, "number": number}, "t")
        counts = outbox.counts()
        assert counts.waiting + counts.dropped == 250
        assert counts.waiting > 50
        assert [row.id for row in outbox.waiting(999)] == list(range(counts.dropped + 1, 251))
        with pytest.raises(OutboxUnusable, match="too large"):
            outbox.add({"text": "x" * 200_000}, "t")
    assert path.stat().st_size < 320_000
    assert len(told) == 3  # at the first, and when ten and a hundred were reached: it must not flood


# --------------------------------------------------------------------------------------------------- through a reporter


@pytest.mark.parametrize("backend", BACKENDS)
def test_hopeless_reports_do_not_keep_others_back(
    backend: str, outbox: SqliteOutbox, clock: Clock, told: list[str]
) -> None:
    """RP-01, RP-06, RO-01: a 400 or 413 is dead at once, with its reason; a 500 waits."""

    def answer(connection: Any, closing: Any) -> None:
        name = endpoint.requests[-1].body["detection"]["reasons"][0].removeprefix("tool:")
        connection.sendall(reply(int(name)))

    async def steps() -> None:
        it = make(endpoint.url, outbox, told)
        clock.ahead_s += 61
        assert [await it.flush(10) for _ in range(4)] == [Flush(0, 10), Flush(0, 10), Flush(5, 4), Flush(0, 0)]

    for name in [*["500"] * 20, *["400", "413"] * 2, *["200"] * 5]:
        body = reporter.build_detection_body(make("http://x", outbox, told).config, {**CALL, "tool_name": name})
        outbox.add(body, name)
    with Endpoint(answer) as endpoint:
        run(backend, steps)
    assert outbox.counts() == Counts(waiting=20, dead=4, delivered=5, dropped=0)
    assert {(row.status, (row.error or "")[:4]) for row in outbox.dead()} == {(400, "400 "), (413, "413 ")}


def test_a_sweep_ends_at_a_fault_of_the_connection(outbox: SqliteOutbox, clock: Clock, told: list[str]) -> None:
    """RO-03, RN-01: what it did not try is free for the next one, which delivers it all."""

    async def steps() -> None:
        clock.ahead_s += 61
        assert await make(url, outbox, told).flush() == Flush(0, 1)
        assert await make(endpoint.url, outbox, told).flush() == Flush(3, 0)

    for _ in range(3):
        outbox.add({}, "t")
    with refused() as url, Endpoint(reply(200)) as endpoint:
        run("asyncio", steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_live_report_is_delivered_and_marked(backend: str, outbox: SqliteOutbox, told: list[str]) -> None:
    """RP-07: 503 with a delay, a reset in the middle, 408, at last 200."""

    async def steps() -> None:
        it = make(endpoint.url, outbox, told)
        outcomes = [await it.report_tool_call(**CALL) for _ in range(4)]
        assert [outcome.status for outcome in outcomes] == [503, None, 408, 200]

    with Endpoint(reply(503, "", "Retry-After: 2"), b"HTTP/1.1 2", reply(408), reply(200)) as endpoint:
        run(backend, steps)
        assert outbox.counts() == Counts(waiting=3, dead=0, delivered=1, dropped=0)
        assert [row.attempts for row in outbox.waiting()] == [1, 0, 1]
        assert {row.base_url for row in outbox.waiting()} == {endpoint.url}


def test_registrations_are_one_and_the_same(told: list[str], outbox: SqliteOutbox) -> None:
    """RD-06: by the server's DID, and none is stored."""
    with Endpoint(reply(200)) as endpoint:
        for _ in range(3):
            assert run("asyncio", make(endpoint.url, outbox, told).register_server).registered
        assert endpoint.bodies == [endpoint.bodies[0]] * 3
    assert outbox.counts() == Counts(0, 0, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_outbox_of_one_s_own_keeps_what_is_not_delivered(backend: str, told: list[str]) -> None:
    async def steps() -> None:
        it = make(endpoint.url, OwnOutbox(database), told)
        assert [(await it.report_tool_call(**CALL)).status for _ in range(2)] == [500, 200]
        assert await it.flush() == Flush(1, 0)
        assert await it.flush() == Flush(0, 0)

    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        with Endpoint(reply(500), reply(200)) as endpoint:
            run(backend, steps)
        assert database.execute("SELECT count(*) FROM reports").fetchone() == (0,)


# ------------------------------------------------------------------------------------------------------- real processes


def test_two_sweepers_send_nothing_twice(outbox: SqliteOutbox, path: Path, clock: Clock) -> None:
    """RD-01."""
    clock.ahead_s -= 61
    for number in range(60):
        outbox.add({"number": number}, "t")
    outbox.close()
    with Endpoint(reply(200)) as endpoint:
        with contextlib.ExitStack() as stack:
            one, two = (stack.enter_context(child(reporter_child.sweep, path, endpoint.url)) for _ in range(2))
            for process in (one, two):
                assert process.stdout is not None
                assert json.loads(process.stdout.readline()) == ["ready"]
            for process in (one, two):
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.close()
            sent = [sum(line[0] for line in told_by(process.stdout)) for process in (one, two)]
            assert (one.wait(), two.wait()) == (0, 0)
        assert sorted(body["number"] for body in endpoint.bodies) == list(range(60))
        assert sum(sent) == 60
    assert outbox.counts() == Counts(0, 0, 60, 0)


def test_what_another_process_left_is_delivered(outbox: SqliteOutbox, path: Path, told: list[str]) -> None:
    """RD-07: though we were sweeping while it wrote."""

    async def sweep() -> int:
        return (await make(endpoint.url, outbox, told).flush(5)).delivered

    with Endpoint(reply(200)) as endpoint:
        with child(reporter_child.write_and_leave, path) as process:
            while process.poll() is None:
                run("asyncio", sweep)
        while run("asyncio", sweep):
            pass
        assert sorted(body["number"] for body in endpoint.bodies) == list(range(20))


def test_processes_that_begin_at_once_make_one_outbox(outbox: SqliteOutbox, path: Path) -> None:
    """RD-06, of the file."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(child(reporter_child.write_and_leave, path)) for _ in range(4)]
        assert [writer.wait() for writer in writers] == [0] * 4
    assert outbox.counts().waiting == 80


@pytest.mark.parametrize("acknowledged", [1, 2, 9, 31])
def test_a_kill_loses_no_row_that_was_acknowledged(acknowledged: int, outbox: SqliteOutbox, path: Path) -> None:
    with child(reporter_child.write_for_ever, path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(acknowledged)]
        process.kill()
        lines += process.stdout.readlines()
    facts = [json.loads(line) for line in lines if line.endswith(b"\n")]
    database = outbox._open()
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    rows = {
        row_id: (body, delivered, dead)
        for row_id, body, delivered, dead in database.execute(
            "SELECT id, body, delivered_at IS NOT NULL, dead_at IS NOT NULL FROM reports"
        )
    }
    settled = {row_id: fact for fact, row_id, *_ in facts if fact != "added"}
    for fact, row_id, *number in facts:
        body, delivered, dead = rows[row_id]
        if fact == "delivered":
            assert delivered
        elif fact == "dead":
            assert dead
        elif row_id not in settled and not delivered:
            assert body == encode({"number": number[0]})
    added = sum(fact[0] == "added" for fact in facts)
    assert added <= len(rows) <= added + 1


def test_a_kill_at_any_statement_leaves_an_outbox_that_works(path: Path) -> None:
    """While it is created, written and read."""
    with child(reporter_child.die_everywhere, path) as process:
        scenes = told_by(process.stdout)
        assert process.wait() == 0
    assert len(scenes) > 20
    for _, added, settled, waiting, dead, delivered, dropped, grown in scenes:
        assert added <= waiting + delivered <= added + 1
        assert settled <= delivered <= settled + 1
        assert (dead, dropped, grown) == (0, 0, 1)
    assert scenes[-1][1:7] == [2, 1, 1, 0, 1, 0]


def test_a_fork_sends_nothing_twice_and_hangs_nowhere(path: Path) -> None:
    """RD-04: the child has a connection of its own, and no lock that a thread of the parent holds."""
    with Endpoint(reply(200)) as endpoint, child(reporter_child.fork, path, endpoint.url) as process:
        assert told_by(process.stdout) == [["child", 0, 0, 0, 15, 0]]
        assert process.wait() == 0
        names = [body["detection"]["reasons"][0] for body in endpoint.bodies]
    assert sorted(names) == sorted(f"tool:{name} {n}" for name in ("before", "parent", "child") for n in range(5))


def test_a_full_disk_makes_delivery_direct_and_is_told_once(path: Path) -> None:
    """RO-07: and the outbox recovers by itself."""
    with Endpoint(reply(200)) as endpoint, child(reporter_child.full_disk, path, endpoint.url) as process:
        *calls, counts, warnings = told_by(process.stdout)
        assert process.wait() == 0
        assert len(endpoint.requests) == 9
    assert calls == [["delivered", True, 0], *[["delivered", True, 1]] * 8]
    assert counts[0:3] == ["counts", 0, 0]
    assert counts[3] >= 4
    assert len(warnings) == 2
    assert "disk" in warnings[1]


def test_a_memory_outbox_stays_with_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """RD-04, in memory."""
    outbox = reporter.MemoryOutbox()
    run("asyncio", lambda: outbox.enqueue(body={}, tool_name="t"))
    assert len(outbox) == 1
    pid = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: pid)
    assert len(outbox) == 0


# ------------------------------------------------------------------------------------------------------- fake endpoint


def test_the_fake_endpoint_notes_what_it_received(tmp_path: Path, told: list[str]) -> None:
    log = tmp_path / "log"
    words = [str(CHILD.parent.parent / "scripts" / "fake_endpoint.py"), "--status", "200,500,close", "--log", str(log)]

    async def steps() -> None:
        it = make(url, reporter.MemoryOutbox(), told)
        assert [(await it.register_server()).created for _ in range(2)] == [True, False]
        assert [(await it.report_tool_call(**CALL)).status for _ in range(4)] == [200, 500, None, 200]

    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            run("asyncio", steps)
        finally:
            process.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 200, 500, None, 200]
    assert lines[2]["body"]["detection"]["isAgent"] is True
    assert {line["at_once"] for line in lines} == {1}
    assert KEY not in log.read_text()
