"""Both protocol eras: rounds of input, visits, recordings of one era in the other, cancels.

Client and server are the official SDK's where a peer is the point; its server keeps a ledger, which is the judge.
"""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import CallToolResult, ElicitRequestParams, ElicitResult, InputRequiredResult, RequestParamsMeta
from memory import Bench, call, failure, line, read_only, reasons, result
from support import (
    ROOT,
    TESTS,
    call_line,
    children_of,
    is_running,
    ledger_lines,
    line_of,
    relay,
    rows,
    text_of,
    until,
)

from states import Cause

DEADLINE_S: Final = 60
MODERN: Final = "2026-07-28"
KEY: Final = "k" * 32  # with it the server's states outlive its process


def statuses(journal: Path) -> list[tuple[int, int, str]]:
    """Sequence, attempt and status of what each place holds."""
    return [(row["sequence"], row["attempt"], row["status"]) for row in rows(journal)]


# ------------------------------------------------------------------------------------------------- the SDK, both sides


def words(journal: Path, ledger: Path, *flags: str, key: str = KEY) -> list[str]:
    """The command of a relay in front of the SDK's server."""
    server = [sys.executable, str(TESTS / "era_server.py"), str(ledger), *([key] if key else [])]
    return [sys.executable, str(ROOT), "--journal", str(journal), *flags, "--", *server]


@asynccontextmanager
async def connected(
    command: Sequence[str], mode: str = MODERN, asked: list[str] | None = None, answers: str = "X"
) -> AsyncIterator[Client]:
    """A client; `asked` collects what it is asked, and each answer is the next letter."""
    letters = iter(answers * 20)

    async def answer(context: Any, params: ElicitRequestParams) -> ElicitResult:
        if asked is not None:
            asked.append(params.message)
        return ElicitResult(action="accept", content={params.message.removesuffix("?"): next(letters)})

    server = StdioServerParameters(command=command[0], args=list(command[1:]))
    with anyio.fail_after(DEADLINE_S):
        async with Client(server, mode=mode, elicitation_callback=answer) as client:
            yield client


def pin(seq: int | None) -> RequestParamsMeta | None:
    return None if seq is None else cast(RequestParamsMeta, {"checkpoint_seq": seq})


def text(answer: Any) -> str:
    """The text of a result."""
    return str(answer.content[0].text)


async def begin(client: Client, tool: str, arguments: dict[str, Any], seq: int | None) -> InputRequiredResult:
    """The first leg of a chain, driven by hand."""
    answer = await client.session.call_tool(tool, arguments, meta=pin(seq), allow_input_required=True)
    assert isinstance(answer, InputRequiredResult)
    return answer


async def go_on(
    client: Client, tool: str, arguments: dict[str, Any], seq: int | None, after: InputRequiredResult, **given: str
) -> CallToolResult | InputRequiredResult:
    """A further leg, with answers to what `after` asked."""
    responses = {key: ElicitResult(action="accept", content={key: value}) for key, value in given.items()}
    return await client.session.call_tool(
        tool,
        arguments,
        meta=pin(seq),
        input_responses=dict(responses),
        request_state=after.request_state,
        allow_input_required=True,
    )


async def refusal(of: Callable[[], Any]) -> dict[str, Any]:
    """The facts of the refusal that a call gets."""
    with pytest.raises(MCPError) as caught:
        await of()
    return cast(dict[str, Any], caught.value.error.data["checkpoint"])


def kill_relay(journal: Path) -> None:
    os.kill(int(Path(f"{journal}.lock").read_text("ascii")), signal.SIGKILL)


def replace_upstream(journal: Path) -> None:
    """SIGKILL to the upstream of the relay that owns a journal; returns when another runs.

    Until it is dead, which takes a while for a process with threads, it may still take bytes out of its pipe.
    """
    owner = int(Path(f"{journal}.lock").read_text("ascii"))

    def upstreams() -> list[int]:
        return [pid for pid in children_of(owner) if is_running(pid)]

    [first] = upstreams()
    os.kill(first, signal.SIGKILL)
    until(lambda: any(pid != first for pid in upstreams()), "another upstream runs")


# --------------------------------------------------------------------------------------------------- rounds of input


@pytest.mark.parametrize("seq", [1, None])
def test_a_chain_is_one_call_and_its_first_leg_is_answered_with_the_end_of_it(
    journal: Path, ledger: Path, seq: int | None
) -> None:
    flags = () if seq else ("--unpinned", "matched")
    asked: list[str] = []

    async def first() -> str:
        async with connected(words(journal, ledger, *flags), asked=asked) as client:
            answer = text(await client.call_tool("trip", {}, meta=pin(seq)))
            kill_relay(journal)
            return answer

    async def second() -> str:
        async with connected(words(journal, ledger, *flags), asked=asked) as client:
            return text(await client.call_tool("trip", {}, meta=pin(seq)))

    assert anyio.run(first) == "done: trip X X"
    assert anyio.run(second) == "done: trip X X"
    assert asked == ["place?", "day?"]
    assert ledger_lines(ledger) == ["trip X X"]
    assert statuses(journal) == [(1, 3, "COMPLETED")]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_interleaved_chains_of_one_tool_and_arguments_stay_apart(journal: Path, ledger: Path, is_pinned: bool) -> None:
    one, two = (1, 2) if is_pinned else (None, None)

    async def run() -> list[str]:
        async with connected(words(journal, ledger)) as client:
            tea = "order", {"item": "tea"}
            a, b = await begin(client, *tea, one), await begin(client, *tea, two)
            assert a.request_state != b.request_state
            last = await go_on(client, *tea, two, b, size="B")
            first = await go_on(client, *tea, one, a, size="A")
            again = await go_on(client, *tea, one, a, size="C")  # sent twice: the chain is over
            return [text(answer) for answer in (first, last, again)]

    assert anyio.run(run) == ["done: order tea A", "done: order tea B", "done: order tea A"]
    assert ledger_lines(ledger) == ["order tea B", "order tea A"]
    with read_only(journal) as database:
        kept = [str(body) for (body,) in database.execute("SELECT result FROM calls ORDER BY sequence")]
    assert "order tea A" in kept[0]
    assert "order tea B" in kept[1]


@pytest.mark.parametrize("seq", [1, None])
@pytest.mark.parametrize("who", ["relay", "upstream"])
def test_a_chain_goes_on_after_a_death_between_its_legs(journal: Path, ledger: Path, who: str, seq: int | None) -> None:
    """Where the server's states outlive it: the next leg finds its row, and the effect happens once."""
    trip: tuple[str, dict[str, Any]] = ("trip", {})

    async def run() -> None:
        command = words(journal, ledger, "--restart-upstream", "1")
        async with connected(command) as client:
            first = await begin(client, *trip, seq)
            second = await go_on(client, *trip, seq, first, place="Rome")
            assert isinstance(second, InputRequiredResult)
            if who == "upstream":
                replace_upstream(journal)
                assert text(await go_on(client, *trip, seq, second, day="Monday")) == "done: trip Rome Monday"
                return
            kill_relay(journal)
        async with connected(command) as client:
            assert text(await go_on(client, *trip, seq, second, day="Monday")) == "done: trip Rome Monday"

    anyio.run(run)
    assert ledger_lines(ledger) == ["trip Rome Monday"]
    assert statuses(journal) == [(1, 3, "COMPLETED")]


@pytest.mark.parametrize("who", ["relay", "upstream"])
def test_a_chain_whose_state_died_with_the_server_begins_again_at_its_place(
    journal: Path, ledger: Path, who: str
) -> None:
    """As the SDK's client does it: the first leg is sent afresh, since nothing of the chain had an effect."""
    asked: list[str] = []

    async def run() -> str:
        command = words(journal, ledger, "--restart-upstream", "1", key="")
        async with connected(command, asked=asked) as client:
            await begin(client, "order", {"item": "tea"}, 1)
            if who == "upstream":
                replace_upstream(journal)
                return text(await client.call_tool("order", {"item": "tea"}, meta=pin(1)))
            kill_relay(journal)
        async with connected(command, asked=asked) as client:
            return text(await client.call_tool("order", {"item": "tea"}, meta=pin(1)))

    assert anyio.run(run) == "done: order tea X"
    assert asked == ["size?"]
    assert ledger_lines(ledger) == ["order tea X"]
    assert statuses(journal) == [(1, 3, "COMPLETED")]


def test_a_state_that_the_server_does_not_know_any_more_fails_the_call(journal: Path, ledger: Path) -> None:
    """-32602 is an answer like any other: it is on record, and an operator may free the place."""

    async def run() -> list[int]:
        codes = []
        async with connected(words(journal, ledger, "--restart-upstream", "1", key="")) as client:
            first = await begin(client, "order", {"item": "tea"}, 1)
            replace_upstream(journal)
            for _ in range(2):
                with pytest.raises(MCPError) as caught:
                    await go_on(client, "order", {"item": "tea"}, 1, first, size="L")
                codes.append(caught.value.error.code)
        return codes

    assert anyio.run(run) == [-32602, -32602]
    assert ledger_lines(ledger) == []
    assert statuses(journal) == [(1, 2, "FAILED")]


def test_a_leg_that_was_under_way_when_the_relay_died_is_in_doubt(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db")
    bench.call(call(1, seq=1, is_modern=True), result(1, resultType="input_required", requestState="s"))
    bench.ask(call(2, seq=1, is_modern=True, requestState="s", inputResponses={"x": {"action": "accept"}}))
    bench = bench.restart()
    legs = [
        call(3, seq=1, is_modern=True),
        call(4, seq=1, is_modern=True, requestState="s", inputResponses={}),
        call(5, is_modern=True, requestState="s", inputResponses={}),
    ]
    assert reasons(bench.ask(*legs)) == [(3, "in_doubt"), (4, "in_doubt"), (5, "in_doubt")]
    assert bench.up.lines == []
    assert [attempt for _, attempt, _ in bench.rows()] == [1, 2]


def test_a_leg_that_a_dead_upstream_has_not_read_goes_to_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db")
    bench.call(call(1, seq=1, is_modern=True), result(1, resultType="input_required", requestState="s"))
    leg = call(2, is_modern=True, requestState="s")
    bench.ask(leg)
    bench.up.unread = len(leg)
    bench.relay.upstream_gone(Cause.UPSTREAM_LOST)
    bench.loop.run()
    bench = bench.restart()
    assert bench.call(leg, result(2, resultType="complete")) == [result(2, resultType="complete")]
    assert bench.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "NOT_SENT"), (1, 3, "COMPLETED")]


def test_what_the_client_gives_and_what_the_server_remembers_are_not_in_the_journal(tmp_path: Path) -> None:
    """Answers may hold passwords, states whatever a server seals in them; a state is kept as a hash."""
    bench = Bench(tmp_path / "j.db")
    interim = {
        "resultType": "input_required",
        "requestState": "st4te",
        "inputRequests": {"q": {"method": "roots/list"}},
    }
    said = line({"jsonrpc": "2.0", "id": 1, "result": interim})
    assert bench.call(call(1, seq=1, is_modern=True), said) == [said]
    responses = {"q": {"roots": [{"uri": "p4ssword"}]}}
    bench.call(call(2, is_modern=True, requestState="st4te", inputResponses=responses), result(2))
    bench.end()
    for path in tmp_path.iterdir():
        for secret in (b"st4te", b"p4ssword"):
            assert secret not in path.read_bytes()
    with read_only(tmp_path / "j.db") as database:
        [kept] = database.execute("SELECT result FROM attempts WHERE attempt = 1").fetchone()
    assert json.loads(kept)["inputRequests"] == interim["inputRequests"]


# ------------------------------------------------------------------------------------------------------------ a visit


@pytest.mark.parametrize(
    ("mode", "seq", "dies"),
    [
        ("legacy", None, "nobody"),
        ("legacy", None, "relay"),
        ("legacy", 1, "upstream"),
        (MODERN, 1, "relay"),
        (MODERN, None, "upstream"),
    ],
)
def test_a_call_that_wants_a_visit_goes_on_with_the_same_call(
    journal: Path, ledger: Path, mode: str, seq: int | None, dies: str
) -> None:
    """-32042 is no outcome; the call that comes after the visit is the same row, whoever died in between."""
    account = "open", {"name": "x"}

    async def ask(client: Client) -> int | str:
        try:
            return text(await client.call_tool(*account, meta=pin(seq)))
        except MCPError as error:
            return error.error.code

    async def run() -> list[int | str]:
        command = words(journal, ledger, "--restart-upstream", "1", "--unpinned", "matched")
        said: list[int | str] = []
        async with connected(command, mode) as client:
            said += [await ask(client), await ask(client)]
            ledger.with_name("ledger.visited").touch()
            if dies == "upstream":
                replace_upstream(journal)
            if dies != "relay":
                said.append(await ask(client))
            kill_relay(journal)
        async with connected(command, mode) as client:
            said += [await ask(client)]
        return said

    wants = [-32042, -32042]
    assert anyio.run(run) == [*wants, *["done: open x"] * (1 if dies == "relay" else 2)]
    assert ledger_lines(ledger) == ["open x"]
    assert statuses(journal) == [(1, 3, "COMPLETED")]


# --------------------------------------------------------------------------------------------- one era in the other


@pytest.mark.parametrize(("first", "second"), [("legacy", MODERN), (MODERN, "legacy"), ("auto", "legacy")])
def test_what_one_era_has_recorded_answers_the_other(journal: Path, ledger: Path, first: str, second: str) -> None:
    """The SDK refuses a modern result without `resultType`; a recorded error is the same in both."""

    async def ask(mode: str, number: int) -> list[Any]:
        async with connected(words(journal, ledger), mode) as client:
            answers: list[Any] = [text(await client.call_tool("append", {"n": 1}, meta=pin(1)))]
            try:
                answers.append(await client.call_tool("nonsense", {}, meta=pin(2)))
            except MCPError as error:
                answers.append(error.error)
            kill_relay(journal)
            return answers

    before = anyio.run(ask, first, 1)
    assert anyio.run(ask, second, 2) == before
    assert before[0] == "done: append 1"
    assert ledger_lines(ledger) == ["append 1"]
    assert [row["era"] for row in rows(journal)] == ["handshake" if first == "legacy" else "modern"] * 2


# ------------------------------------------------------------------------------------------------------------- cancels


@pytest.mark.parametrize("mode", ["legacy", MODERN])
def test_a_call_that_the_sdk_cancels_is_in_doubt_and_runs_once(journal: Path, ledger: Path, mode: str) -> None:
    """Its server ends the tool and says nothing; the effect is in the world. The cancel itself arrives."""

    async def run() -> None:
        async with connected(words(journal, ledger), mode) as client:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(lambda: client.call_tool("stuck", {"n": 1}, meta=pin(1)))
                    await anyio.to_thread.run_sync(until, lambda: bool(ledger_lines(ledger)), "the effect")
                    scope.cancel()
            same = await refusal(lambda: client.call_tool("stuck", {"n": 1}))  # a model repeats itself
            assert (same["reason"], same["cause"], same["sequence"]) == ("in_doubt", "cancelled", 1)
            assert text(await client.call_tool("append", {"n": 2})) == "done: append 2"
            kill_relay(journal)
        async with connected(words(journal, ledger), mode) as client:
            for seq in (1, None):
                again = await refusal(partial(client.call_tool, "stuck", {"n": 1}, meta=pin(seq)))
                assert (again["reason"], again["sequence"]) == ("in_doubt", 1)
            assert text(await client.call_tool("append", {"n": 3}, meta=pin(3))) == "done: append 3"

    anyio.run(run)
    assert ledger_lines(ledger) == ["stuck 1", "append 2", "append 3"]
    assert statuses(journal) == [(1, 1, "IN_DOUBT"), (2, 1, "COMPLETED"), (3, 1, "COMPLETED")]


@pytest.mark.parametrize("is_modern", [False, True])
def test_the_late_answer_of_a_cancelled_call_is_recorded_and_told_in_the_handshake_era_only(
    journal: Path, ledger: Path, is_modern: bool
) -> None:
    """Most servers run a cancelled tool to its end, and some answer then."""
    meta = {"io.modelcontextprotocol/protocolVersion": MODERN} if is_modern else None
    with relay(journal, ledger, handshake=not is_modern) as client:
        client.send(call_line("slow", {"n": 1}, request_id=7, seq=1, meta=meta))
        until(lambda: len(ledger_lines(ledger)) == 1, "the effect")
        client.send(line_of({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}))
        until(lambda: rows(journal)[0]["status"] == "IN_DOUBT", "the cancel is on record")
        Path(f"{ledger}.go").touch()
        until(lambda: rows(journal)[0]["status"] == "COMPLETED", "the late answer is on record")
        client.send(call_line("slow", {"n": 1}, request_id=8, seq=1, meta=meta))
        assert text_of(client.answer(8)) == "effect 1"
        assert [json.loads(one)["id"] for one in client.lines()] == ([8] if is_modern else [1, 7, 8])
        assert client.finish() == 0
    assert len(ledger_lines(ledger)) == 1


def test_a_cancel_of_one_leg_leaves_the_chain_in_doubt(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db")
    bench.call(call(1, seq=1, is_modern=True), result(1, resultType="input_required", requestState="s"))
    bench.ask(call(2, is_modern=True, requestState="s"))
    bench.ask(line({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}))
    assert reasons(bench.ask(call(3, is_modern=True, requestState="s"))) == [(3, "in_doubt")]
    assert bench.answer(result(2, resultType="complete")) == [], "a modern client wants no late answer"
    assert bench.ask(call(4, seq=1, is_modern=True)) == [result(4, resultType="complete")]


def test_an_error_in_a_round_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db")
    bench.call(call(1, seq=1, is_modern=True), result(1, resultType="input_required", requestState="s"))
    bench.call(call(2, is_modern=True, requestState="s"), failure(2, 5, "no"))
    assert bench.ask(call(3, seq=1, is_modern=True)) == [failure(3, 5, "no")]
    assert bench.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "FAILED")]
