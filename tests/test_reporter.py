"""The reporter: what the published package does by the vectors, and what it promises beyond them."""

import asyncio
import html
import inspect
import itertools
import json
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporter_endpoint import BACKENDS, KEY, Answer, Endpoint, drip, hang, refused, reply, run

import reporter
from reporter import (
    CheckpointReporter,
    Config,
    Delivery,
    Failure,
    Flush,
    MemoryOutbox,
    OutboxRecord,
    SqliteOutbox,
    build_detection_body,
    build_registration_body,
    create_checkpoint_reporter,
    encode,
)

VECTORS: Final = json.loads((Path(__file__).parent / "reporter_vectors.json").read_text())
WIRE: Final = {vector["name"]: vector for vector in VECTORS["wire"]}
CALL: Final[Any] = {"tool_name": "vault_read", "action": "permit", "reason": "capability-granted"}
FULL_CALL: Final[Any] = {
    **CALL,
    "capability": "vault:read",
    "agent_did": "did:key:z6MkAgent",
    "principal_did": "did:web:example.com:u:42",
    "stages": [{"name": "delegation_verify", "verdict": "pass", "latency_micros": 1500}],
    "context": {"user_agent": "agent/1", "ip_address": "192.0.2.7", "path": "/api/mcp", "method": "POST"},
}


def snake(value: Any) -> Any:
    """A report of the vectors as a Python caller writes it."""
    if isinstance(value, list):
        return [snake(each) for each in value]
    if isinstance(value, dict):
        return {"".join(f"_{c.lower()}" if c.isupper() else c for c in key): snake(each) for key, each in value.items()}
    return value


class Told(list[str]):
    """The warnings of a reporter."""

    def __call__(self, message: str) -> None:
        self.append(message)


def make(url: str, told: Callable[[str], None], **options: Any) -> CheckpointReporter:
    given = {
        "api_key": KEY,
        "server_did": "did:web:example.com",
        "server_url": "https://example.com/api/mcp",
        "display_name": "Example",
        "sdk": {"name": "example-mcp", "version": "1.0.0"},
        "base_url": url,
        "on_warn": told,
    }
    return create_checkpoint_reporter(**{**given, **options})


@pytest.fixture
def told() -> Told:
    return Told()


# ------------------------------------------------------------------------------------------------------ vectors: bodies


@pytest.mark.parametrize("vector", VECTORS["bodies"], ids=lambda vector: vector["name"])
def test_a_report_has_the_body_of_the_published_package(vector: dict[str, Any]) -> None:
    config = Config(**snake(vector["config"]))
    assert build_detection_body(config, snake(vector["report"])) == vector["body"]
    assert json.loads(encode(vector["body"])) == vector["body"]


@pytest.mark.parametrize("vector", VECTORS["base_urls"], ids=lambda vector: str(vector["input"]))
def test_a_base_url_is_trimmed(vector: dict[str, Any], told: Told) -> None:
    assert make(vector["input"], told).config.base_url == vector["output"]


def test_the_constants_are_those_of_the_published_package() -> None:
    expected = VECTORS["defaults"]
    assert expected == {
        "base_url": reporter.DEFAULT_BASE_URL,
        "timeout_ms": reporter.DEFAULT_TIMEOUT_S * 1000,
        "max_delivery_attempts": reporter.MAX_ATTEMPTS,
        "flush_limit": reporter.FLUSH_LIMIT,
        "register_path": reporter.REGISTER_PATH,
        "report_path": reporter.REPORT_PATH,
    }


# -------------------------------------------------------------------------------------------------------- vectors: wire


class BrokenOutbox(MemoryOutbox):
    """Raises where it is told to."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = set(broken)

    def _check(self, method: str) -> None:
        if method in self.broken:
            raise RuntimeError("db gone")

    async def enqueue(self, *, body: Mapping[str, Any], tool_name: str) -> str:
        self._check("enqueue")
        return await super().enqueue(body=body, tool_name=tool_name)

    async def mark_delivered(self, id: str) -> None:
        self._check("mark_delivered")
        await super().mark_delivered(id)

    async def mark_failed(self, id: str, error: str) -> None:
        self._check("mark_failed")
        await super().mark_failed(id, error)

    async def list_retryable(self, limit: int) -> list[OutboxRecord]:
        self._check("list_retryable")
        return await super().list_retryable(limit)


def as_vector(result: Any) -> Any:
    """A result of ours in the words of the vectors, which leave absent members out and keep the answer's JSON."""
    if isinstance(result, list):
        return [as_vector(each) for each in result]
    if isinstance(result, Flush):
        return result._asdict()
    if isinstance(result, Delivery):
        return {name: value for name, value in result._asdict().items() if value is not None}
    if result.registered:
        return {"registered": True, "created": result.created, "toolCount": result.tool_count}
    return {"registered": False, "reason": result.reason}


TOOLS: Final = [{"name": "vault_read", "description": "Read a file", "capability": "vault:read"}]
Steps = Callable[[CheckpointReporter, Endpoint], Any]


async def register_tools(it: CheckpointReporter, _: Endpoint) -> Any:
    return await it.register_server(TOOLS)


async def register(it: CheckpointReporter, _: Endpoint) -> Any:
    return await it.register_server()


async def register_none(it: CheckpointReporter, _: Endpoint) -> Any:
    return await it.register_server([])


async def report(it: CheckpointReporter, _: Endpoint) -> Any:
    return await it.report_tool_call(**FULL_CALL)


async def fail_then_flush(it: CheckpointReporter, endpoint: Endpoint) -> Any:
    first, second = await report(it, endpoint), await report(it, endpoint)
    endpoint.then(reply(200, "{}"))
    return [first, second, await it.flush(), await it.flush()]


async def eight_attempts(it: CheckpointReporter, endpoint: Endpoint) -> Any:
    return [await report(it, endpoint), *[await it.flush() for _ in range(10)]]


SCENES: Final[dict[str, tuple[Steps, Answer]]] = {
    "register_created": (register_tools, reply(201, '{"created":true}')),
    "register_existing_no_tools": (register, reply(200, '{"created":false}')),
    "register_empty_tools": (register_none, reply(200, '{"created":false}')),
    "register_401": (register, reply(401, '{"error":"bad key"}')),
    "report_200": (report, reply(200, '{"ok":true}')),
    "report_non_json_200": (report, reply(200, "OK")),
    "report_500_long_body": (report, reply(500, "x" * 1000)),
    "report_400_html": (report, reply(400, "<h1>no</h1>")),
    "report_timeout": (report, hang),
    "fail_then_flush": (fail_then_flush, reply(503, "{}")),
    "eight_attempts_then_dead": (eight_attempts, reply(500)),
    "enqueue_throws_direct_delivery": (report, reply(200, "{}")),
}


def test_every_vector_of_the_wire_has_a_scene() -> None:
    assert set(SCENES) | {"list_retryable_throws"} == set(WIRE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCENES)
def test_the_wire_shows_what_the_published_package_does(name: str, backend: str, told: Told) -> None:
    vector = WIRE[name]
    steps, answer = SCENES[name]
    outbox = BrokenOutbox("enqueue") if name == "enqueue_throws_direct_delivery" else MemoryOutbox()
    with Endpoint(answer) as endpoint:
        it = make(endpoint.url, told, outbox=outbox, timeout_s=0.3 if answer is hang else 5)
        result = as_vector(run(backend, lambda: steps(it, endpoint)))
        expected = vector["result"]
        if name == "fail_then_flush":
            expected = list(expected.values())
        elif isinstance(expected, dict):
            expected.pop("json", None)
        assert result == expected
        seen = [
            {
                "method": request.method,
                "path": request.target,
                "authorization": request.headers["authorization"],
                "content_type": request.headers["content-type"],
                "body": request.body,
            }
            for request in endpoint.requests
        ]
    assert seen == vector["requests"]
    assert len(told) == vector["warnings"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flush_whose_outbox_cannot_list_tells_so_and_raises_nothing(backend: str, told: Told) -> None:
    """Where the published package throws, see the vector list_retryable_throws."""
    with Endpoint(reply(200)) as endpoint:
        it = make(endpoint.url, told, outbox=BrokenOutbox("list_retryable"))
        assert run(backend, it.flush) == Flush(0, 0)
        assert not endpoint.requests
    assert len(told) == 1


@pytest.mark.parametrize("mark", ["mark_delivered", "mark_failed"])
def test_a_report_whose_mark_fails_is_sent_again(mark: str, told: Told) -> None:
    outbox = BrokenOutbox(mark)

    async def steps() -> Flush:
        await it.report_tool_call(**CALL)
        outbox.broken.clear()
        endpoint.then(reply(200))
        return await it.flush()

    with Endpoint(reply(200 if mark == "mark_delivered" else 500)) as endpoint:
        it = make(endpoint.url, told, outbox=outbox)
        assert run("asyncio", steps) == Flush(1, 0)
        assert endpoint.bodies[0] == endpoint.bodies[1]
    assert sum("db gone" in message for message in told) == 1


# ---------------------------------------------------------------------------------------------- nothing raises (RN)

CONFIG: Final = Config(api_key=KEY, server_did="did:web:example.com", server_url="https://example.com")


class Hostile:
    """A value whose every use raises."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")


class HostileText(Hostile):
    def __str__(self) -> str:
        return "\ud800".encode().decode()  # raises UnicodeEncodeError


class HostileClass:
    @property  # type: ignore[misc]  # that is what is hostile about it
    def __class__(self) -> Any:
        raise RuntimeError("no")


class HostileError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


class HostileMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["tool_name"])


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(alphabet=st.characters(categories=["Cs"])),
    st.binary(),
    st.builds(Hostile),
    st.builds(HostileMapping),
    st.builds(HostileText),
    st.builds(HostileClass),
    st.builds(object),
)
keys = st.sampled_from(["tool_name", "agent_did", "stages", "signals", "context", "latency_micros", "name"])
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | st.text() | st.integers(), inner, max_size=4),
    max_leaves=10,
)


def is_strict_json(content: bytes) -> bool:
    """Whether a parser that knows no NaN takes it; text that is no UTF-8 raises."""
    constants: list[str] = []
    json.loads(content.decode(), parse_constant=constants.append)
    return not constants


@given(anything)
def test_any_value_becomes_strict_json(value: object) -> None:
    """RN-07."""
    assert is_strict_json(encode(value))


@given(st.dictionaries(keys, anything), anything)
def test_a_body_is_built_from_any_arguments(report: dict[str, Any], tools: object) -> None:
    for body in (build_detection_body(CONFIG, report), build_registration_body(CONFIG, tools)):
        content = json.dumps(body, allow_nan=False).encode()  # as an outbox of somebody's own would store it
        assert json.loads(content) == body


@given(anything, anything, anything)
def test_a_config_is_made_of_any_values(key: Any, url: Any, timeout: Any) -> None:
    config = Config(
        api_key=key, server_did=key, server_url=url, display_name=key, sdk=url, base_url=url, timeout_s=timeout
    )
    assert 0 < config.timeout_s <= 3600
    assert is_strict_json(encode(build_detection_body(config, CALL)))


def test_values_that_contain_themselves_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    wide: Any = "x"
    for _ in range(60):
        wide = [wide, wide]
    report = {**CALL, "signals": [{"kind": "k", "value": endless}, {"kind": "k", "value": wide}]}
    assert is_strict_json(encode(build_detection_body(CONFIG, report)))
    assert is_strict_json(encode(endless))
    assert encode([10**5000]) == b"[null]"  # more digits than json.dumps writes


def test_numbers_that_are_none_and_halves_of_characters_are_made_harmless() -> None:
    """RN-07: such a value neither breaks the body nor keeps the report from its endpoint."""
    body = {"nan": float("nan"), "list": [float("-inf"), 1.5], "half": "a\ud800b", "pair": "\ud83d\ude00"}
    assert json.loads(encode(body)) == {"nan": None, "list": [None, 1.5], "half": "a\ufffdb", "pair": "\U0001f600"}


def test_half_a_catalog_is_not_published(told: Told) -> None:
    def failing() -> Iterator[dict[str, str]]:
        yield {"name": "a"}
        raise RuntimeError("no more")

    for tools in (failing(), 5, "abc", [{"name": "a"}, None], {"name": "a"}):
        assert "tools" not in build_registration_body(CONFIG, tools)
    assert build_registration_body(CONFIG, iter(()))["tools"] == []
    assert build_registration_body(
        CONFIG, ({"name": n, "input_schema": {"a_b": 1}, "description": None} for n in "ab")
    )["tools"] == [{"name": "a", "inputSchema": {"a_b": 1}}, {"name": "b", "inputSchema": {"a_b": 1}}]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else "deep"


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "a"}, {"name": None}],
        [{"name": "a"}, {"description": "b"}],
        [{"name": "a"}, {"name": " "}],
        [{"name": "a"}, {"name": 5}],
        [{"name": "a"}, HostileMapping()],
        [{"name": "a", "input_schema": nested(60)}],
        [{"name": "a", "input_schema": {"maximum": float("inf")}}],
        [{"name": "a", "input_schema": {"enum": ["x"] * 100_000}}],
        [{"name": "a", "input_schema": {f"k{number}": 1 for number in range(100_000)}}],
        [{"name": f"t{number}", "description": "d"} for number in range(50_000)],
        ({"name": "t"} for _ in itertools.count()),
    ],
    ids=["null", "none", "blank", "number", "hostile", "deep", "infinite", "long", "wide", "many", "endless"],
)
def test_a_catalog_that_cannot_be_said_whole_is_not_published(tools: Any, told: Told) -> None:
    with Endpoint(reply(200)) as endpoint:
        registration = run("asyncio", lambda: make(endpoint.url, told).register_server(tools))
        assert "tools" not in endpoint.bodies[0]
    assert (registration.registered, registration.tool_count) == (True, 0)
    assert len(told) == 1
    assert "the stored catalog stays" in told[0]


def test_a_large_catalog_is_published_whole() -> None:
    tools = [{"name": f"t{number}", "description": None} for number in range(49_000)]
    assert len(build_registration_body(CONFIG, tools)["tools"]) == 49_000


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_of_wrong_types_raise_nothing(backend: str) -> None:
    """RN-01."""

    async def steps() -> None:
        wrongs: list[Any] = [None, 5, b"x", object(), Hostile(), HostileMapping(), [Hostile()], float("nan")]
        wrongs += [HostileText(), HostileClass()]
        for wrong in wrongs:
            it: Any = create_checkpoint_reporter(
                api_key=wrong,
                server_did=wrong,
                server_url=wrong,
                display_name=wrong,
                sdk=wrong,
                base_url=wrong,
                timeout_s=wrong,
                outbox=wrong,
                on_warn=wrong,
            )
            assert not (await it.register_server(wrong)).registered
            assert not (
                await it.report_tool_call(tool_name=wrong, action=wrong, reason=wrong, stages=wrong, context=wrong)
            ).delivered
            assert (await it.flush(wrong)).delivered == 0
            assert repr(it.config)

    run(backend, steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_outbox_that_lists_what_is_no_record_keeps_no_other_back(backend: str, told: Told) -> None:
    class Listing(MemoryOutbox):
        async def list_retryable(self, limit: int) -> Any:
            plain = types.SimpleNamespace
            return [None, plain(id=1), plain(id=2, body={"n": 2}), plain(id=3, body={"n": 3}, tool_name=Hostile())]

    with Endpoint(reply(200)) as endpoint:
        it = make(endpoint.url, told, outbox=Listing())
        assert run(backend, it.flush) == Flush(2, 0)
        assert endpoint.bodies == [{"n": 2}, {"n": 3}]
    assert len(told) == 2


@pytest.mark.parametrize("broken", ["enqueue", "list_retryable", "mark_delivered"])
def test_an_exception_that_cannot_be_shown_is_told_by_its_name(broken: str, told: Told) -> None:
    class Broken(BrokenOutbox):
        def _check(self, method: str) -> None:
            if method in self.broken:
                raise HostileError

    async def steps() -> None:
        assert (await it.report_tool_call(**CALL)).delivered
        await it.flush()

    with Endpoint(reply(200)) as endpoint:
        it = make(endpoint.url, told, outbox=Broken(broken))
        run("asyncio", steps)
    assert "HostileError" in told[0]


def test_whatever_fails_inside_is_told_and_not_raised(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise LookupError("of ours")

    async def steps() -> None:
        assert not (await it.register_server()).registered
        assert not (await it.report_tool_call(**CALL)).delivered
        assert await it.flush() == Flush(0, 0)

    it = make("http://127.0.0.1:9", told)
    monkeypatch.setattr(reporter, "start_exchange", broken)
    run("asyncio", steps)
    assert len(told) == 3


@pytest.mark.parametrize("url", ["", "ftp://example.com", "http://[::1", "http://user:pass-word@x", "http://a b", "x"])
def test_a_url_that_cannot_be_used_is_told_once_and_reports_wait(url: str, told: Told) -> None:
    """RN-01."""
    outbox = MemoryOutbox()
    it = make(url, told, outbox=outbox)

    async def steps() -> None:
        for _ in range(3):
            assert not (await it.report_tool_call(**CALL)).delivered
        assert await it.flush(1) == Flush(0, 1)

    run("asyncio", steps)
    assert len(outbox) == 3
    assert len(told) == 1
    assert "base URL" in told[0]
    assert "pass-word" not in told[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fault_of_the_connection_is_no_attempt(backend: str, told: Told) -> None:
    """RN-01, RO-03: an outage uses nothing up."""

    async def steps() -> None:
        outbox = MemoryOutbox()
        it = make(url, told, outbox=outbox)
        assert (await it.report_tool_call(**CALL)).status is None
        for _ in range(10):
            assert await it.flush() == Flush(0, 1)
        assert [record.attempts for record in await outbox.list_retryable(9)] == [0]

    with refused() as url:
        run(backend, steps)


def test_reports_that_time_out_do_not_keep_others_back() -> None:
    """RO-01, in memory: what was tried goes behind what was not."""

    async def steps() -> None:
        outbox = MemoryOutbox()
        for name in ("bad", "worse", "good"):
            await outbox.enqueue(body={}, tool_name=name)
        for record in await outbox.list_retryable(2):
            await outbox.mark_failed(record.id, Failure("no answer"))
        assert [record.tool_name for record in await outbox.list_retryable(2)] == ["good", "bad"]

    run("asyncio", steps)


def test_a_full_memory_outbox_drops_the_oldest_and_says_so(told: Told) -> None:
    """RO-04, in memory."""

    async def steps() -> None:
        for number in range(23):
            await outbox.enqueue(body={"number": number}, tool_name="t")
        assert [record.body["number"] for record in await outbox.list_retryable(99)] == list(range(13, 23))

    outbox = MemoryOutbox(max_rows=10, on_warn=told)
    run("asyncio", steps)
    assert outbox.dropped == 13
    assert len(told) == 2  # of the first and the tenth: it must not flood


def test_a_callback_that_raises_does_not_make_an_outbox_fail_that_has_stored(told: Told) -> None:
    def failing(message: str) -> None:
        raise ValueError(message)

    async def steps() -> None:
        outbox = MemoryOutbox(max_rows=1, on_warn=failing)
        for number in range(2):
            await outbox.enqueue(body={"number": number}, tool_name="t")
        assert [record.body for record in await outbox.list_retryable(9)] == [{"number": 1}]

    run("asyncio", steps)


def test_the_memory_outbox_takes_what_the_issue_says() -> None:
    async def steps() -> None:
        for _ in range(10_001):
            await outbox.enqueue(body={}, tool_name="t")

    outbox = MemoryOutbox(on_warn=Told())
    run("asyncio", steps)
    assert (len(outbox), outbox.dropped) == (10_000, 1)


# -------------------------------------------------------------------------------------------------------- one at a time


class SlowOutbox(MemoryOutbox):
    """Lists, and only then lets the caller see it."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = anyio.Event()
        self.go_on = anyio.Event()

    async def list_retryable(self, limit: int) -> list[OutboxRecord]:
        records = await super().list_retryable(limit)
        self.listed.set()
        await self.go_on.wait()
        return records


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flush_skips_what_is_being_delivered(backend: str, told: Told) -> None:
    go_on = threading.Event()

    def late(connection: Any, closing: threading.Event) -> None:
        go_on.wait()
        connection.sendall(reply(200))

    async def steps() -> None:
        it = make(endpoint.url, told)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: it.report_tool_call(**CALL))
            await anyio.to_thread.run_sync(endpoint.arrived.acquire)
            assert await it.flush() == Flush(0, 0)
            go_on.set()

    with Endpoint(late) as endpoint:
        run(backend, steps)
        assert len(endpoint.requests) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flush_skips_what_was_delivered_while_it_was_listed(backend: str, told: Told) -> None:
    async def steps() -> None:
        outbox = SlowOutbox()
        it = make(endpoint.url, told, outbox=outbox)
        endpoint.then(reply(500), reply(200))
        await it.report_tool_call(**CALL)
        async with anyio.create_task_group() as group:
            results: list[Flush] = []

            async def flush() -> None:
                results.append(await it.flush())

            group.start_soon(flush)
            await outbox.listed.wait()
            group.start_soon(flush)
            outbox.go_on.set()
        assert sorted(results) == [Flush(0, 0), Flush(1, 0)]

    with Endpoint(reply(200)) as endpoint:
        run(backend, steps)
        assert len(endpoint.requests) == 2


def test_a_claim_that_ends_too_soon_keeps_a_row_from_being_sent(told: Told) -> None:
    class Claiming(MemoryOutbox):
        left_s = 0.0

        async def list_retryable(self, limit: int) -> list[OutboxRecord]:
            until = time.time() + self.left_s
            return [record._replace(claimed_until=until) for record in await super().list_retryable(limit)]

    async def steps() -> None:
        await outbox.enqueue(body={}, tool_name="t")
        outbox.left_s = 4.9
        assert await it.flush() == Flush(0, 0)
        outbox.left_s = 60
        assert await it.flush() == Flush(1, 0)

    outbox = Claiming()
    with Endpoint(reply(200)) as endpoint:
        it = make(endpoint.url, told, outbox=outbox)
        run("asyncio", steps)


# ------------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("answer", [hang, drip(b"HTTP/1.1 200 OK\r\nX: ")], ids=["silent", "dripping"])
def test_a_cancelled_caller_leaves_at_once(backend: str, answer: Answer, told: Told) -> None:
    """RN-04: the cancellation is neither swallowed nor delayed, and the row stays."""

    async def steps() -> None:
        it = make(endpoint.url, told, outbox=outbox, timeout_s=30)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: it.report_tool_call(**CALL))
            await anyio.to_thread.run_sync(endpoint.arrived.acquire)
            began = time.monotonic()
            group.cancel_scope.cancel()
        assert time.monotonic() - began < 1
        endpoint.then(reply(200))
        assert await it.flush() == Flush(1, 0)

    outbox = MemoryOutbox()
    with Endpoint(answer) as endpoint:
        run(backend, steps)


def test_a_cancelled_asyncio_task_is_cancelled(told: Told) -> None:
    async def steps() -> None:
        it = make(endpoint.url, told, timeout_s=30)
        task = asyncio.create_task(it.register_server())
        await anyio.to_thread.run_sync(endpoint.arrived.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    with Endpoint(hang) as endpoint:
        run("asyncio", steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_event_loop_goes_on_while_a_report_waits(backend: str, told: Told) -> None:
    """RS-01: many reports to a silent endpoint; nothing else waits for them."""

    async def steps() -> None:
        it = make(endpoint.url, told, timeout_s=30)
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(lambda: it.report_tool_call(**CALL))
            gaps = []
            for _ in range(20):
                await anyio.to_thread.run_sync(endpoint.arrived.acquire)
                began = time.monotonic()
                await anyio.lowlevel.checkpoint()
                gaps.append(time.monotonic() - began)
            group.cancel_scope.cancel()
        assert sorted(gaps)[10] < 0.1

    with Endpoint(hang) as endpoint:
        run(backend, steps)


# --------------------------------------------------------------------------------------------------- where the key goes


@pytest.mark.parametrize("key", ['sk-live-0123456789/+="', "k" * 4096], ids=["odd", "long"])
def test_the_key_is_in_the_request_and_nowhere_else(
    key: str, tmp_path: Path, told: Told, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """RC-04: against an endpoint that says what it was sent, in its status line and body, in any spelling."""
    caplog.set_level(logging.DEBUG)
    spelled = (key, json.dumps(key)[1:-1], quote(key, safe=""))
    echo = "".join(spelled) * (200_000 // len(key) // 3)

    async def steps() -> None:
        outbox = SqliteOutbox(tmp_path / "o.db")
        logged = make(endpoint.url, told, api_key=key, on_warn=None)
        it = make(endpoint.url, told, api_key=key, outbox=outbox)
        texts.extend(
            [await it.register_server(), await it.report_tool_call(**CALL), await logged.report_tool_call(**CALL)]
        )
        endpoint.then(f"SSH-2.0-{key}\r\n".encode())
        texts.extend([await it.report_tool_call(**CALL), it.config, it, outbox.waiting(), outbox.dead()])
        outbox.close()

    texts: list[Any] = []
    with Endpoint(reply(401, echo, phrase=f"No {key[:60]}")) as endpoint:
        run("asyncio", steps)
        assert endpoint.requests[0].headers["authorization"] == f"Bearer {key}"
        assert key not in endpoint.requests[0].content.decode()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    everything = f"{texts!r} {texts} {told} {caplog.text} {capfd.readouterr()}"
    assert "401" in everything
    assert any("not delivered" in record.getMessage() for record in caplog.records)
    for part in spelled:
        assert part not in everything
        assert part.encode() not in stored
    if len(key) > 100:
        assert key[:200] not in everything


ODD: Final = "abc/def+ghi&'=="


@pytest.mark.parametrize(
    "spelled",
    [
        ODD,
        ODD.replace("/", r"\/"),
        ODD.replace("/", r"\\\/"),
        ODD.replace("+", r"\u002B"),
        ODD.replace("+", r"\u002b"),
        ODD.replace("=", r"\\u003D"),
        "".join(f"\\u{ord(letter):04x}" for letter in ODD),
        "".join(f"%{ord(letter):02x}" for letter in ODD),
        quote(ODD),
        quote(ODD, safe="").lower(),
        html.escape(ODD),
        ODD.replace("+", "&#43;").replace("/", "&#x2F;"),
        json.dumps(json.dumps(ODD)),
    ],
)
def test_the_key_is_hidden_in_whatever_spelling_an_echo_has(spelled: str, told: Told) -> None:
    """RC-04."""
    with Endpoint(reply(401, f"{{'error':'bad key {spelled}'}}")) as endpoint:
        error = run("asyncio", make(endpoint.url, told, api_key=ODD).register_server).reason
    assert error is not None
    assert error.startswith("401 Unauthorized: {'error':'bad key ")
    assert "«redacted»" in error
    assert "def" not in error
    assert "%66" not in error


@pytest.mark.parametrize("letter", ["\\", "&", "%", "k", "&#0"])
def test_to_look_for_the_key_takes_no_time(letter: str) -> None:
    key = letter * 30 + "x"
    began = time.monotonic()
    reporter._plain(letter * 16_000, key)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("key", ["token-12345\n", "token-12345\u20ac", "", "token\x00-12345"])
def test_a_key_that_no_header_can_carry_is_told_once(key: str, told: Told) -> None:
    """RC-04: and neither shown nor sent."""

    async def steps() -> None:
        it = make(endpoint.url, told, api_key=key)
        for _ in range(2):
            outcome = await it.report_tool_call(**CALL)
            assert outcome.status is None
            assert "API key" in (outcome.error or "")

    with Endpoint(reply(200)) as endpoint:
        run("asyncio", steps)
        assert not endpoint.requests
    assert len(told) == 1
    assert "12345" not in told[0]


def test_warnings_are_logged_where_nobody_takes_them(caplog: pytest.LogCaptureFixture) -> None:
    with refused() as url:
        it = make(url, Told(), on_warn=None)
        run("asyncio", lambda: it.report_tool_call(**CALL))
    assert [record.name for record in caplog.records] == ["checkpoint.reporter"]


def test_a_callback_that_raises_is_survived(told: Told) -> None:
    def failing(message: str) -> None:
        raise RuntimeError(message)

    with refused() as url:
        it = make(url, failing)
        assert not run("asyncio", lambda: it.report_tool_call(**CALL)).delivered


def test_an_error_is_text_that_knows_what_the_endpoint_said(told: Told) -> None:
    class Plain(MemoryOutbox):
        """Somebody's own: takes the error for text."""

        async def mark_failed(self, id: str, error: str) -> None:
            errors.append(error)

    errors: list[Any] = []
    with Endpoint(reply(429, "slow down", "Retry-After: 7")) as endpoint:
        it = make(endpoint.url, told, outbox=Plain())
        run("asyncio", lambda: it.report_tool_call(**CALL))
    (error,) = errors
    assert error == "429 Too Many Requests: slow down"
    assert (error.status, error.retry_after) == (429, 7)


def test_a_report_of_a_call_holds_neither_its_arguments_nor_its_result() -> None:
    """RC-03: there is no way to hand them in."""
    names = inspect.signature(CheckpointReporter.report_tool_call).parameters
    assert not {"arguments", "result", "error"} & set(names)
    assert "hunter" not in str(build_detection_body(CONFIG, {**CALL, "arguments": {"password": "hunter"}}))
