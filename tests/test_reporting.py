"""Reporting with real processes and an endpoint that listens: flags, key, the end of a relay, `checkpoint report`."""

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reporter_endpoint import Endpoint, drip, hang, refused, reply
from support import ROOT, Client, relay_words, rows, until, upstream_words

import queues
from checkpoint import main
from queues import queue_at
from reporter import REGISTER_PATH, REPORT_PATH, Config, SqliteOutbox, build_detection_body
from storage import Lock

KEY = "a-key-of-some-length"
OK = reply(200, "{}")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(OK) as listening:
        yield listening


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_API_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def reporting(url: str) -> list[str]:
    server = ["--report-server-did", "did:web:s.example", "--report-server-url", "https://s.example/mcp"]
    return [*server, "--report-base-url", url]


def reported(endpoint: Endpoint) -> list[tuple[str, str, str]]:
    """Tool, action and reason of what arrived."""
    bodies = [request.body for request in endpoint.requests if request.target == REPORT_PATH]
    return [
        (body["detection"]["reasons"][0][5:], body["enforcement"]["action"], body["enforcement"]["reason"])
        for body in bodies
    ]


def waiting(capfd: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    """What `report list --json` says."""
    assert main(["report", "list", str(path), "--json"]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def flush(capfd: pytest.CaptureFixture[str], path: Path, *flags: str, code: int = 0) -> dict[str, int]:
    """What `report flush --json` says."""
    assert main(["report", "flush", str(path), "--json", *flags]) == code
    tally: dict[str, int] = json.loads(capfd.readouterr().out)
    return tally


# ---------------------------------------------------------------------------------------------------------- the relay


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_relay_registers_and_reports(endpoint: Endpoint, journal: Path, ledger: Path, has_journal: bool) -> None:
    flags = [*(["--journal", str(journal)] if has_journal else []), *reporting(endpoint.url)]
    with Client(relay_words(*flags, upstream=upstream_words(ledger))) as client:
        client.shake_hands()
        client.call("charge", {"n": 1})
        until(lambda: reported(endpoint) == [("charge", "permit", "executed")], "a report")
        assert client.finish() == 0
    registered = [request.body for request in endpoint.requests if request.target == REGISTER_PATH]
    assert registered[0]["serverDid"] == "did:web:s.example"
    assert {request.headers["authorization"] for request in endpoint.requests} == {f"Bearer {KEY}"}
    body = next(request.body for request in endpoint.requests if request.target == REPORT_PATH)
    assert body["identity"] == {"agent": {"clientInfoName": "t"}}


def test_the_last_report_arrives_before_the_end(endpoint: Endpoint, journal: Path, ledger: Path) -> None:
    words = relay_words("--journal", journal, *reporting(endpoint.url), upstream=upstream_words(ledger))
    with Client(words) as client:
        client.call("charge", {})
        assert client.finish() == 0
    assert reported(endpoint) == [("charge", "permit", "executed")]


@pytest.mark.parametrize("answer", [hang, drip(b"HTTP/1.1 200 OK\r\n")], ids=["silent", "dripping"])
def test_a_hostile_endpoint_delays_no_call_and_holds_up_no_end(answer: Any, journal: Path, ledger: Path) -> None:
    """RS-01, RS-03, RS-04."""
    with Endpoint(answer) as endpoint:
        words = relay_words("--journal", journal, *reporting(endpoint.url), upstream=upstream_words(ledger))
        with Client(words) as client:
            for number in range(20):
                client.call("charge", {"n": number})
            until(lambda: len(endpoint.requests) > 0, "an exchange that does not end")
            assert client.finish(deadline_s=5.0) == 0
        assert len(rows(journal)) == 20


def test_what_the_client_read_is_on_disk_before_the_last_reports_take_their_time(journal: Path, ledger: Path) -> None:
    is_given_up = threading.Event()

    def never(connection: socket.socket, _: threading.Event) -> None:
        connection.recv(1)  # until the relay hangs up
        is_given_up.set()

    with Endpoint(never) as endpoint:
        words = relay_words("--journal", journal, *reporting(endpoint.url), upstream=upstream_words(ledger))
        with Client(words) as client:
            client.call("charge", {"n": 1})
            client.close_stdin()
            until(lambda: rows(journal)[0]["delivered"] == 1, "a mark")
            assert not is_given_up.is_set()
            assert client.wait() == 0


def test_a_killed_relay_leaves_its_reports_to_the_next(
    endpoint: Endpoint, journal: Path, ledger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with refused() as nowhere:
        words = relay_words("--journal", journal, *reporting(nowhere), upstream=upstream_words(ledger))
        with Client(words) as client:
            client.call("charge", {"n": 1})
            client.call("charge", {"n": 2})
            client.kill()
        assert [row["status"] for row in waiting(capfd, journal)] == ["waiting"] * 2
        assert flush(capfd, journal, "--limit", "1", code=1) == {"delivered": 0, "failed": 1, "waiting": 2, "dead": 0}
    assert flush(capfd, journal, "--base-url", endpoint.url) == {"delivered": 2, "failed": 0, "waiting": 0, "dead": 0}
    assert reported(endpoint) == [("charge", "permit", "executed")] * 2
    assert len(rows(journal)) == 2


def test_upstream_does_not_get_the_key(endpoint: Endpoint, journal: Path, tmp_path: Path) -> None:
    upstream = ["sh", "-c", f"env > {tmp_path}/env; cat > /dev/null"]
    with Client(relay_words("--journal", journal, *reporting(endpoint.url), upstream=upstream)) as client:
        until(lambda: (tmp_path / "env").exists() and "PATH" in (tmp_path / "env").read_text(), "its environment")
        client.finish()
        assert KEY not in client.stderr_text()
    assert KEY not in (tmp_path / "env").read_text()


def test_upstream_keeps_a_key_that_is_not_ours(journal: Path, tmp_path: Path) -> None:
    upstream = ["sh", "-c", f"env > {tmp_path}/env; cat > /dev/null"]
    with Client(relay_words("--journal", journal, upstream=upstream)) as client:
        until(lambda: (tmp_path / "env").exists() and "PATH" in (tmp_path / "env").read_text(), "its environment")
        client.finish()
    assert KEY in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--report-server-did", "did:web:s"], "needs both"),
        (["--report-server-url", "https://s"], "needs both"),
        (["--report-display-name", "S"], "needs both"),
        (["--report-server-did", "d", "--report-server-url", "u", "--report-base-url", "ftp://x"], "is not usable"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--", "true"]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("given", [None, "", " ", "schlüssel"])
def test_a_key_that_is_missing_or_unusable(
    given: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHECKPOINT_API_KEY")
    if given is not None:
        monkeypatch.setenv("CHECKPOINT_API_KEY", given)
    assert main([*reporting("http://127.0.0.1:9"), "--", "true"]) == 2
    err = capfd.readouterr().err
    assert "CHECKPOINT_API_KEY" in err
    assert err.count("\n") == 1


def test_nothing_is_lost_or_invented_when_relays_are_killed_and_the_endpoint_flaps() -> None:
    """RO-01, RO-03, RD-03, RD-07."""
    soak = [sys.executable, str(ROOT / "scripts" / "soak_reports.py"), "--quick", "--seed", "7"]
    done = subprocess.run(soak, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing 0, invented 0" in done.stdout


# -------------------------------------------------------------------------------------------------- checkpoint report


@pytest.fixture(params=["journal", "outbox"])
def queue(request: pytest.FixtureRequest, endpoint: Endpoint, tmp_path: Path, ledger: Path) -> Path:
    """Three reports that wait for the endpoint, in either kind of file."""
    path = tmp_path / str(request.param)
    if request.param == "journal":
        endpoint.then(hang)
        words = relay_words("--journal", path, *reporting(endpoint.url), upstream=upstream_words(ledger))
        with Client(words) as client:
            for number in range(3):
                client.call(f"charge{number}", {})
            client.kill()
        endpoint.then(OK)
        endpoint.requests.clear()
    else:
        config = Config(api_key=KEY, server_did="d", server_url="u", base_url=endpoint.url)
        outbox = SqliteOutbox(path)
        for number in range(3):
            body = build_detection_body(
                config, {"tool_name": f"charge{number}", "action": "permit", "reason": "executed"}
            )
            row = outbox.add(body, f"charge{number}", endpoint.url)
            outbox.give_back([row])
        outbox.close()
    return path


def test_flush_sends_each_once_and_then_has_nothing_to_do(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    assert flush(capfd, queue) == {"delivered": 3, "failed": 0, "waiting": 0, "dead": 0}
    assert flush(capfd, queue) == {"delivered": 0, "failed": 0, "waiting": 0, "dead": 0}
    assert sorted(reported(endpoint)) == [(f"charge{number}", "permit", "executed") for number in range(3)]


def test_flush_puts_off_what_failed_and_now_does_not(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint.then(reply(503, "later"))
    assert flush(capfd, queue, code=1) == {"delivered": 0, "failed": 3, "waiting": 3, "dead": 0}
    endpoint.then(OK)
    assert flush(capfd, queue)["delivered"] == 0
    assert all(20 < row["due_in_s"] < 40 and "503" in row["error"] for row in waiting(capfd, queue))
    assert flush(capfd, queue, "--now", "--limit", "2") == {"delivered": 2, "failed": 0, "waiting": 1, "dead": 0}


def test_the_dead_are_listed_with_their_reason_and_can_be_sent_again(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint.then(reply(400, "no such server"))
    assert flush(capfd, queue, code=1) == {"delivered": 0, "failed": 3, "waiting": 0, "dead": 3}
    assert main(["report", "dead", str(queue)]) == 0
    assert capfd.readouterr().out.count("no such server") == 3
    assert main(["report", "dead", str(queue), "--retry"]) == 0
    assert capfd.readouterr().out == "3 are due again\n"
    endpoint.then(OK)
    assert flush(capfd, queue)["delivered"] == 3


@pytest.mark.parametrize("queue", ["journal"], indirect=True)
def test_flush_is_busy_while_a_relay_owns_the_journal(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    lock = Lock(f"{queue}.lock")
    assert lock.take()
    assert main(["report", "flush", str(queue)]) == 1
    err = capfd.readouterr().err
    assert err.startswith("checkpoint: busy: ")
    assert "a relay delivers by itself" in err
    assert "kill" not in err
    assert len(waiting(capfd, queue)) == 3
    lock.give_back()
    assert endpoint.requests == []


def test_flush_claims_so_that_nobody_else_sends_the_same(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    there, now = queue_at(str(queue)), time.time_ns() // 1_000_000
    ids = [one.id for one in there.free(now, ignores_due=False)]
    assert len(there.claim(ids[:2], now, ignores_due=False)) == 2
    assert there.claim(ids[:2], now, ignores_due=True) == []
    assert flush(capfd, queue, "--now") == {"delivered": 1, "failed": 0, "waiting": 2, "dead": 0}


def put(queue: Path, tool: str, base_url: str, due_in_s: float = 0.0, attempts: int = 0) -> None:
    """One more report that waits; with attempts before it, the endpoint was there and said 503."""
    error = ("503 Service Unavailable: ", 503) if attempts else (None, None)
    if queue.name == "journal":
        with contextlib.closing(sqlite3.connect(queue, isolation_level=None)) as database:
            database.execute(
                "INSERT INTO reports (id, base_url, tool_name, queued_at, due_at, attempts, error, body)"
                " SELECT max(id) + 1, ?, ?, 0, ?, ?, ?, x'7b7d' FROM reports",
                (base_url, tool, round((time.time() + due_in_s) * 1000), attempts, error[0]),
            )
        return
    with contextlib.closing(SqliteOutbox(queue)) as outbox:
        row = outbox.add({}, tool, base_url)
        now = time.monotonic_ns() // 1_000_000
        held = (now - 1_000_000, now + round(due_in_s * 1000))
        outbox._open().execute(
            "UPDATE reports SET held_from = ?, held_until = ?, is_claimed = 0, attempts = ?, error = ?, status = ?"
            " WHERE id = ?",
            (*held, attempts, *error, row),
        )


def test_a_dead_endpoint_does_not_keep_reports_from_a_good_one(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    with refused() as dead:
        for number in range(50):
            put(queue, f"lost{number}", dead, due_in_s=-600 + number)
        assert flush(capfd, queue, "--limit", "5", code=1) == {"delivered": 1, "failed": 4, "waiting": 52, "dead": 0}
        assert flush(capfd, queue, code=1) == {"delivered": 2, "failed": 4, "waiting": 50, "dead": 0}
    assert len(endpoint.requests) == 3
    tried = [row for row in waiting(capfd, queue) if row["error"]]
    assert len(tried) == 8  # what was tried went behind the others
    assert all("no answer" in row["error"] and row["attempts"] == 0 for row in tried)


def test_an_outage_takes_neither_due_times_nor_reasons(queue: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with refused() as dead:
        for number in range(6):
            put(queue, f"asked{number}", dead, due_in_s=1800, attempts=6)
        before = waiting(capfd, queue)
        flush(capfd, queue, "--now", "--base-url", dead, code=1)
    for old, new in zip(before, waiting(capfd, queue), strict=True):
        if old["attempts"]:
            assert 0 <= old["due_in_s"] - new["due_in_s"] < 60
            assert new["error"] == old["error"]
        assert new["attempts"] == old["attempts"]


def test_now_tries_each_report_once(queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(50):
        put(queue, f"due{number}", endpoint.url)
    for number in range(10):
        put(queue, f"late{number}", endpoint.url, due_in_s=3000)
    endpoint.then(reply(503))
    assert flush(capfd, queue, "--now", code=1) == {"delivered": 0, "failed": 63, "waiting": 63, "dead": 0}
    assert [row["attempts"] for row in waiting(capfd, queue)] == [1] * 63


def test_an_endpoint_that_asks_for_time_gets_no_more_and_others_do(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    with Endpoint(reply(429, "", "Retry-After: 3600")) as busy:
        for number in range(60):
            put(queue, f"more{number}", busy.url, due_in_s=-600)
        assert flush(capfd, queue, code=1) == {"delivered": 3, "failed": 4, "waiting": 60, "dead": 0}
        assert len(busy.requests) == 4
    left = [row for row in waiting(capfd, queue) if not row["attempts"]]
    assert len(left) == 56
    assert all(row["due_in_s"] == 0 and row["error"] is None for row in left)


def test_nothing_is_sent_on_a_claim_that_is_about_to_end(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped finds that its claim ended; what it had not tried yet is claimed anew."""

    def late(connection: socket.socket, closing: threading.Event) -> None:
        time.sleep(0.5)
        connection.sendall(OK)

    for number in range(9):
        put(queue, f"more{number}", endpoint.url)
    endpoint.then(late)
    monkeypatch.setattr(queues, "CLAIM_MS", 5_400)  # less than timeout_s and one answer
    kind: Any = type(queue_at(str(queue)))
    claim, asked = kind.claim, []

    def claim_and_tell(self: Any, ids: Sequence[int], *args: Any, **options: Any) -> Any:
        asked.append(len(ids))
        return claim(self, ids, *args, **options)

    monkeypatch.setattr(kind, "claim", claim_and_tell)
    assert flush(capfd, queue) == {"delivered": 12, "failed": 0, "waiting": 0, "dead": 0}
    assert asked == [12, 8, 4]
    assert len(endpoint.requests) == 12


@pytest.mark.parametrize("queue", ["journal"], indirect=True)
def test_marks_that_a_relay_kept_from_being_written_are_told(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    lock = Lock(f"{queue}.lock")
    taken = threading.Event()

    def take(connection: socket.socket, closing: threading.Event) -> None:
        if not taken.is_set():
            taken.set()
            assert lock.take()
        connection.sendall(OK)

    put(queue, "fourth", endpoint.url)
    endpoint.then(take)
    assert main(["report", "flush", str(queue)]) == 1
    err = capfd.readouterr().err
    lock.give_back()
    assert "busy" in err
    assert "4 reports that arrived just now could not be marked, and are sent once more" in err
    assert err.count("\n") == 1


def test_a_flush_that_failed_says_why(queue: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with refused() as dead:
        assert main(["report", "flush", str(queue), "--limit", "1", "--base-url", dead + "/"]) == 1
    assert capfd.readouterr().out == (
        f"0 delivered, 1 failed; 3 wait, 0 are dead\nlast failure: {dead}: no answer: Connection refused\n"
    )


def test_one_report_is_one_report(queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]) -> None:
    flush(capfd, queue, "--limit", "1")
    endpoint.then(reply(400, "no"))
    assert main(["report", "flush", str(queue), "--limit", "1"]) == 1
    assert capfd.readouterr().out.startswith("0 delivered, 1 failed; 1 waits, 1 is dead\n")
    assert main(["report", "dead", str(queue)]) == 0
    assert "dead, answered 1 time  " in capfd.readouterr().out
    assert main(["report", "dead", str(queue), "--retry"]) == 0
    assert capfd.readouterr().out == "1 is due again\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8832", "ftp://x", "http://", "http://user:secret@x", "", "http://a b"])
def test_a_base_url_that_cannot_be_used_is_wrong_usage(
    queue: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "flush", str(queue), "--base-url", url]) == 2
    err = capfd.readouterr().err
    assert "--base-url: the base URL is not usable" in err
    assert "secret" not in err


@pytest.mark.parametrize("queue", ["outbox"], indirect=True)
def test_a_stored_body_that_is_no_json_is_sent_as_it_is(
    queue: Path, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(SqliteOutbox(queue)) as outbox:
        outbox._open().execute("UPDATE reports SET body = ? WHERE id = 1", (b"{not json",))
    assert flush(capfd, queue)["delivered"] == 3
    assert b"{not json" in [request.content for request in endpoint.requests]


@pytest.mark.parametrize("queue", ["journal"], indirect=True)
def test_flush_leaves_no_owner_behind(queue: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = rows(queue)
    flush(capfd, queue)
    assert rows(queue) == before


@pytest.mark.parametrize("words", [["list"], ["dead", "--retry"], ["flush"]])
def test_a_pipe_is_no_queue_and_is_not_waited_for(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, str(ROOT), "report", words[0], str(tmp_path / "pipe"), *words[1:]]
    done = subprocess.run(command, timeout=20, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert "not a regular file" in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"no database"])
def test_what_is_neither_journal_nor_outbox_is_left_alone(
    content: bytes | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    before = sorted(os.listdir(tmp_path))
    assert main(["report", "flush", str(path)]) == 4
    assert capfd.readouterr().err.startswith("checkpoint: ")
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_on_record_need_not_fit_the_terminal(tmp_path: Path) -> None:
    outbox = SqliteOutbox(tmp_path / "o")
    outbox.add({}, "näme", "http://127.0.0.1:9")
    outbox.close()
    words = [sys.executable, str(ROOT), "report", "list", str(tmp_path / "o")]
    done = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"n\xe4me" in done.stdout
