"""A relay without processes: sinks in memory, a clock that is set by hand, and a real journal on disk."""

import contextlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from courier import Courier
from journal import Journal
from locate import Unpinned
from refusals import Refusals
from relay import Relay
from reporter import REGISTER_PATH, REPORT_PATH, Answer, Config
from reports import Reports
from settings import Settings
from states import Cause
from storage import Files, Lock
from turn import CrashDrill

MODERN: Final = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
HANDSHAKE_NAMES: Final = Settings(name="", version="")  # leaves upstream's identity
NOW_MS: Final = 1_700_000_000_000


def options(unpinned: str = "new", **more: Any) -> Settings:
    """How to relay, with upstream's identity left as it is."""
    return Settings(name="", version="", unpinned=Unpinned(unpinned), **more)


def journal_path() -> Iterator[Path]:
    """A path in a folder of its own, in memory where there is such a place: what a disk promises is not the point."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "j.db"


class Timer:
    """A callback that is due at a time."""

    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """The part of an event loop that the relay uses; time passes only in `advance`."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        self.call_later(0, callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self.now + delay, callback))
        return self._timers[-1]

    def run(self) -> None:
        """Runs what is due now, in order, and what becomes due by that."""
        while due := [timer for timer in self._timers if timer.at <= self.now]:
            first = min(due, key=lambda timer: timer.at)
            self._timers.remove(first)
            if not first.is_cancelled:
                first.callback()

    def advance(self, seconds: float) -> None:
        """Lets time pass, timer by timer."""
        end = self.now + seconds
        self.run()
        while coming := [timer.at for timer in self._timers if timer.at <= end]:
            self.now = min(coming)
            self.run()
        self.now = end

    @property
    def waiting(self) -> int:
        """How many callbacks are due, now or later."""
        return sum(not timer.is_cancelled for timer in self._timers)


class FakeSink:
    """Takes lines at once, or only counts them while `is_full`; `on_write` sees each before anything else does."""

    def __init__(self, on_write: Callable[[bytes], None] = lambda line: None) -> None:
        self.lines: list[bytes] = []
        self.writes: list[list[bytes]] = []
        self.queued_bytes = 0
        self.taken_bytes = 0
        self.unread: int | None = 0
        self.is_full = False
        self.on_write = on_write

    def writelines(self, lines: Sequence[bytes], /) -> None:
        self.writes.append(list(lines))
        for line in lines:
            self.on_write(line)
            self.lines.append(line)
            if self.is_full:
                self.queued_bytes += len(line)
            else:
                self.taken_bytes += len(line)

    @property
    def tells_unread(self) -> bool:
        return self.unread is not None

    def unread_bytes(self) -> int | None:
        return self.unread

    def take(self) -> None:
        """The other side reads what is queued."""
        self.taken_bytes += self.queued_bytes
        self.queued_bytes = 0
        self.is_full = False


class Killed(BaseException):
    """The crash drill's SIGKILL."""


class FakeDrill(CrashDrill):
    """Raises instead of killing the process that runs the tests."""

    def kill(self) -> None:
        raise Killed


@dataclass(eq=False)
class FakeExchange:
    """One POST, answered when the test says so."""

    url: str
    body: dict[str, Any]
    done: Callable[[Answer], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeEndpoint:
    """Takes what a relay has to report. Answers at once with `status`, or leaves exchanges open where that is None."""

    def __init__(self, status: int | None = 200) -> None:
        self.config = Config(api_key="a-secret-key", server_did="did:web:s", server_url="https://s.example/mcp")
        self.answer = None if status is None else self.said(status)
        self.exchanges: list[FakeExchange] = []
        self.open: list[FakeExchange] = []

    @staticmethod
    def said(status: int | None, *, retry_after: float | None = None) -> Answer:
        is_taken = status is not None and 200 <= status < 300
        return Answer(status, None if is_taken else f"{status}", retry_after)

    def courier_of(self, bench: "Bench") -> Courier:
        return Courier(
            self.config,
            bench.journal,
            loop=bench.loop,
            call_home=lambda callback: bench.loop.at_turn_end(callback),
            now_ms=lambda: NOW_MS + round((bench.loop.now - 100) * 1000),
            commit=lambda: bench.relay.commit_riders(),
            on_change=lambda: None,
            start_exchange=self._start,
            jitter=lambda: 0.5,
        )

    def reports_of(self, bench: "Bench") -> Reports:
        assert bench.courier is not None
        reports = Reports(
            self.config,
            send=bench.courier.take,
            register=bench.courier.register,
            hear=bench.courier.hear,
            now_ms=lambda: NOW_MS,
            time=bench.loop.time,
        )
        if bench.journal is not None:
            bench.journal.report_doubt = reports.of_left_doubt
        return reports

    def _start(
        self, url: str, body: bytes, *, api_key: str, timeout_s: float, done: Callable[[Answer], None]
    ) -> FakeExchange:
        assert api_key == self.config.api_key
        exchange = FakeExchange(url, json.loads(body), done)
        self.exchanges.append(exchange)
        if self.answer is None:
            self.open.append(exchange)
        else:
            done(self.answer)
        return exchange

    @property
    def registrations(self) -> list[dict[str, Any]]:
        return [one.body for one in self.exchanges if one.url.endswith(REGISTER_PATH)]

    @property
    def reports(self) -> list[tuple[str, str, str]]:
        """Tool, action and reason of each report that was sent, in the order of sending."""
        sent = [one.body for one in self.exchanges if one.url.endswith(REPORT_PATH)]
        return [
            (body["detection"]["reasons"][0][5:], body["enforcement"]["action"], body["enforcement"]["reason"])
            for body in sent
        ]


class Bench:
    """One relay between two sinks, and the ways to talk to it.

    `ask` and `answer` are lines from downstream and from upstream, each followed by the end of the turn.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Settings = HANDSHAKE_NAMES,
        *,
        drill: CrashDrill | None = None,
        loop: FakeLoop | None = None,
        workflow_id: str | None = "w",
        on_up: Callable[[bytes], None] = lambda line: None,
        on_down: Callable[[bytes], None] = lambda line: None,
        endpoint: "FakeEndpoint | None" = None,
    ) -> None:
        self.path = path
        self.endpoint = endpoint
        self.settings = settings
        self._lives = [self]  # of this journal, one after the other
        self.loop = loop or FakeLoop()
        self.up = FakeSink(on_up)
        self.down = FakeSink(on_down)
        self.changes = 0
        self.journal: Journal | None = None
        if path is not None:
            files = Files(str(path))
            self.journal = Journal(files, exists=files.exists(), workflow_id=workflow_id, now_ms=lambda: NOW_MS)
        self.courier = endpoint.courier_of(self) if endpoint is not None else None
        refusals = Refusals(str(path) if path else None, ["checkpoint"], hides_arguments=settings.redacts_arguments)
        self.relay = Relay(
            settings,
            self.journal,
            refusals,
            to_upstream=self.up,
            to_downstream=self.down,
            loop=self.loop,
            now_ms=lambda: NOW_MS,
            on_change=self._changed,
            crash_drill=drill or FakeDrill(),
            reports=endpoint.reports_of(self) if endpoint is not None else None,
            riders=self.courier,
        )

    def _changed(self) -> None:
        self.changes += 1

    def ask(self, *lines: bytes) -> list[bytes]:
        """Lines from downstream in one turn; gives what was written downstream by its end."""
        before = len(self.down.lines)
        self.relay.from_downstream(lines)
        self.loop.run()
        return self.down.lines[before:]

    def answer(self, *lines: bytes) -> list[bytes]:
        """Lines from upstream in one turn; gives what was written downstream by its end."""
        before = len(self.down.lines)
        self.relay.from_upstream(lines)
        self.loop.run()
        return self.down.lines[before:]

    def error(self, *lines: bytes) -> dict[str, Any]:
        """The one error that lines from downstream are answered with."""
        return error_of(*self.ask(*lines))

    def call(self, line: bytes, answer: bytes) -> list[bytes]:
        """A call that goes upstream and is answered."""
        sent = len(self.up.lines)
        assert self.ask(line) == []
        assert self.up.lines[sent:] == [line]
        return self.answer(answer)

    def end(self) -> None:
        """Ends the process, for the journal: what is not on disk is lost."""
        if self.journal is not None:
            self.journal.close()
            self.journal._lock.give_back()  # after a failure only the end of a process does that

    def restart(self, settings: Settings | None = None, *, workflow_id: str | None = "w") -> "Bench":
        """Ends the last relay at once, with nothing said to either side, and gives one on the same journal."""
        self._lives[-1].end()
        settings = settings or self._lives[-1].settings
        self._lives.append(Bench(self.path, settings, workflow_id=workflow_id, endpoint=self.endpoint))
        self._lives[-1]._lives = self._lives
        return self._lives[-1]

    def rows(self) -> list[tuple[Any, ...]]:
        """Sequence, attempt and status of every attempt, as any program can read them."""
        assert self.path is not None
        with read_only(self.path) as database:
            query = "SELECT sequence, attempt, status FROM attempts ORDER BY id"
            return database.execute(query).fetchall()

    def statuses(self) -> list[str]:
        return [status for _, _, status in self.rows()]

    def places(self) -> list[tuple[Any, ...]]:
        """Workflow, sequence, attempt and tool of every attempt."""
        return self.select("SELECT workflow_id, sequence, attempt, tool_name FROM attempts ORDER BY id")

    def select(self, query: str) -> list[tuple[Any, ...]]:
        """What any program reads from the journal."""
        assert self.path is not None
        with read_only(self.path) as database:
            return database.execute(query).fetchall()


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        yield database


@contextlib.contextmanager
def database_held(path: Path) -> Iterator[None]:
    """Another program is in the middle of a transaction that writes."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def resolve(
    path: Path,
    sequence: int,
    status: str,
    text: str = "settled",
    *,
    workflow_id: str = "w",
    attempt: int | None = None,
) -> None:
    """What `journal resolve` puts on record for an attempt, else for the newest; nobody may own the journal then."""
    lock = Lock(Files(str(path)).lock)
    assert lock.take()
    bodies = {
        "COMPLETED": (_json({"content": [{"type": "text", "text": text}]}), None),
        "FAILED": (
            None,
            _json({"code": 31007, "message": text, "data": {"checkpoint": {"reason": "resolved_failed"}}}),
        ),
        "NOT_EXECUTED": (None, None),
    }
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        query = "SELECT max(id) FROM dispatches WHERE workflow_id = ? AND sequence = ? AND ? IN (attempt, 0)"
        [dispatch] = database.execute(query, (workflow_id, sequence, attempt or 0)).fetchone()
        database.execute(
            "INSERT INTO decisions (dispatch, status, decided_at, reason, result, error) VALUES (?, ?, ?, '', ?, ?)",
            (dispatch, status, NOW_MS, *bodies[status]),
        )
        database.execute(
            "INSERT INTO doubts (dispatch, cause, noted_at, is_open) VALUES (?, 'relay_lost', ?, 0)"
            " ON CONFLICT DO UPDATE SET is_open = 0",
            (dispatch, NOW_MS),
        )
        database.execute("COMMIT")
    lock.give_back()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def spoil(path: Path) -> None:
    """Makes the next write fail: the journal's file is another one now."""
    path.rename(path.with_suffix(".away"))


def line(message: Any) -> bytes:
    return _json(message) + b"\n"


def call(
    request_id: Any = 1,
    tool: str = "t",
    arguments: Any = None,
    *,
    seq: int | None = None,
    workflow: str | None = None,
    is_modern: bool = False,
    meta: Mapping[str, Any] | None = None,
    **more: Any,
) -> bytes:
    """A `tools/call`."""
    pins = {"checkpoint_seq": seq, "checkpoint_workflow": workflow}
    whole = {**(MODERN if is_modern else {}), **(meta or {}), **{k: v for k, v in pins.items() if v is not None}}
    params = {"name": tool, "arguments": {} if arguments is None else arguments, **more}
    return request("tools/call", request_id, **params, **({"_meta": whole} if whole else {}))


def request(method: str, request_id: Any, **params: Any) -> bytes:
    return line({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def notification(method: str, **params: Any) -> bytes:
    return line({"jsonrpc": "2.0", "method": method, "params": params})


def cancel(request_id: Any) -> bytes:
    return notification("notifications/cancelled", requestId=request_id)


def result(request_id: Any = 1, text: str = "ok", **more: Any) -> bytes:
    body = {"content": [{"type": "text", "text": text}], **more}
    return line({"jsonrpc": "2.0", "id": request_id, "result": body})


def failure(request_id: Any, code: int, message: str, data: Any = None) -> bytes:
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return line({"jsonrpc": "2.0", "id": request_id, "error": error})


def text_of(*lines: bytes) -> str:
    """The text of the one result that was answered."""
    assert len(lines) == 1, lines
    text: str = json.loads(lines[0])["result"]["content"][0]["text"]
    return text


def error_of(*lines: bytes) -> dict[str, Any]:
    """The error in one answer, with its facts and its id as members `facts` and `id`."""
    assert len(lines) == 1, lines
    answer = json.loads(lines[0])
    error: dict[str, Any] = answer["error"]
    return {**error, "id": answer["id"], "facts": (error.get("data") or {}).get("checkpoint", {})}


def reasons(lines: Iterable[bytes]) -> list[tuple[Any, str | None]]:
    """Id and refusal's reason of each answer; None for an answer that is no refusal."""
    answers = [json.loads(one) for one in lines]
    return [(a["id"], ((a.get("error") or {}).get("data") or {}).get("checkpoint", {}).get("reason")) for a in answers]


def lose_upstream(bench: Bench, cause: Cause = Cause.UPSTREAM_LOST) -> list[bytes]:
    """Upstream is gone; gives what was written downstream by the end of the turn."""
    before = len(bench.down.lines)
    bench.relay.upstream_gone(cause)
    bench.loop.run()
    return bench.down.lines[before:]
