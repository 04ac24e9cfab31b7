"""Random lives of a relay against a plain model: whatever is asked, answered, cancelled, lost or killed, in any order.

The judge of what happened is the upstream of the test, which sees each line as it leaves, and the file, read by a
second program at that moment.
"""

import contextlib
import itertools
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory import (
    Bench,
    FakeLoop,
    FakeSink,
    Timer,
    call,
    cancel,
    error_of,
    failure,
    line,
    options,
    read_only,
    request,
    resolve,
    result,
)

from locate import Unpinned
from settings import Settings
from states import Cause
from storage import Files, Lock

FINAL: Final = ("COMPLETED", "FAILED", "TASK")
FREE: Final = ("NOT_SENT", "INPUT_REQUIRED")  # after these, a place may see another attempt
MEMORY: Final = "/dev/shm" if os.path.isdir("/dev/shm") else None  # the disk's own promises are not the point here

Row = list[Any]  # signature, status, result, error
Step = tuple[Any, ...]


@dataclass
class Asked:
    """A request of the client's."""

    line: bytes
    place: int | None
    is_blocked: bool  # when it was asked, the file held what forbids it
    is_cancelled: bool = False
    is_answered: bool = False


class Life:
    """One journal, the relays that own it one after the other, and all that was seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.numbers = itertools.count(1)
        self.rows: dict[tuple[int, int], Row] = {}
        self.sent_at: dict[int, int] = {}  # by pinned place
        self.sent = 0
        self.holder: sqlite3.Connection | None = None
        self.start()

    def start(self) -> None:
        self.asked: dict[Any, Asked] = {}
        self.at_upstream: list[Any] = []  # ids of calls that it got
        self.bench = Bench(self.path, on_up=self.saw_upstream, on_down=self.saw_downstream)

    # -------------------------------------------------------------------------------------------------- what is seen

    def on_disk(self) -> dict[tuple[int, int], Row]:
        if not self.path.exists():
            return {}
        with read_only(self.path) as database:
            query = "SELECT sequence, attempt, call_signature, status, result, error FROM attempts"
            return {(sequence, attempt): row for sequence, attempt, *row in map(list, database.execute(query))}

    def newest(self, place: int) -> Row | None:
        attempts = [(key, row) for key, row in self.on_disk().items() if key[0] == place]
        return max(attempts)[1] if attempts else None

    def check_disk(self) -> None:
        """Finished rows never change, and a place is tried again only where it is known that nothing ran."""
        rows = self.on_disk()
        for key, row in self.rows.items():
            assert key in rows, "a row was lost"
            assert row[1] not in (*FINAL, *FREE) or rows[key] == row, "a finished row changed"
        for sequence, attempt in rows:
            if attempt > 1:
                assert rows[sequence, attempt - 1][1] in FREE, "a place ran again that had an outcome or a doubt"
        self.rows = rows

    def saw_upstream(self, line: bytes) -> None:
        message = json.loads(line)
        if message["method"] != "tools/call":
            assert message["params"]["requestId"] in self.at_upstream, "a cancel came before its call"
            return
        asked = self.asked[message["id"]]
        assert line == asked.line
        assert not asked.is_blocked, "a call left that the file forbade"
        self.at_upstream.append(message["id"])
        self.sent += 1
        rows = self.on_disk()
        assert self.sent <= len(rows), "a call left without a row of its own"
        if asked.place is not None:
            self.sent_at[asked.place] = self.sent_at.get(asked.place, 0) + 1
            assert self.sent_at[asked.place] <= sum(key[0] == asked.place for key in rows)
            row = self.newest(asked.place)
            assert row is not None
            assert row[1] in ("PENDING", "IN_DOUBT"), "cancelled in the same turn at most"

    def saw_downstream(self, line: bytes) -> None:
        message = json.loads(line)
        asked = self.asked[message["id"]]
        if asked.is_answered or asked.is_cancelled:
            return  # a late answer, or a second one
        asked.is_answered = True
        is_refusal = "checkpoint" in message.get("error", {}).get("data", {})
        if is_refusal or asked.place is None:
            return
        row = self.newest(asked.place)
        assert row is not None
        _, status, kept, error = row
        assert status in (*FINAL, "INPUT_REQUIRED"), "an answer came down before it was on disk"
        member, body = (b"result", kept) if kept is not None else (b"error", error)
        assert line == b'{"jsonrpc":"2.0","id":%d,"%b":%b}\n' % (message["id"], member, body)

    # ------------------------------------------------------------------------------------------------- what happens

    def ask(self, place: int | None, letter: str) -> None:
        number = next(self.numbers)
        line = call(number, "t", {"x": letter}, seq=place)
        rows = self.on_disk()
        row = self.newest(place) if place else None
        if place is None:
            is_blocked = any(row[1] == "IN_DOUBT" for row in rows.values()) and self.has_hard_doubt()
        else:
            is_blocked = row is not None and row[1] in (*FINAL, "IN_DOUBT")
        self.asked[number] = Asked(line, place, is_blocked)
        self.bench.relay.from_downstream([line])

    def has_hard_doubt(self) -> bool:
        with read_only(self.path) as database:
            query = "SELECT 1 FROM attempts WHERE status = 'IN_DOUBT' AND coalesce(cause, '') <> 'cancelled'"
            return database.execute(query).fetchone() is not None

    def answer(self, which: int, kind: str) -> None:
        if not self.at_upstream:
            return
        number = self.at_upstream[which % len(self.at_upstream)]
        unique = f"answer {next(self.numbers)}"
        lines = {
            "ok": result(number, unique),
            "error": failure(number, 7, unique),
            "bridge": failure(number, -32000, "Connection closed"),
            "visit": failure(number, -32042, unique, {"elicitations": []}),
            "task": result(number, unique, task={}),
        }
        self.bench.relay.from_upstream([lines[kind]])

    def cancel(self, which: int) -> None:
        if self.asked:
            number = list(self.asked)[which % len(self.asked)]
            self.asked[number].is_cancelled = True
            self.bench.relay.from_downstream([cancel(number)])

    def hold(self) -> None:
        if self.holder is None and self.path.exists():
            self.holder = sqlite3.connect(self.path, isolation_level=None)
            with contextlib.suppress(sqlite3.OperationalError):
                self.holder.execute("BEGIN IMMEDIATE")

    def free(self) -> None:
        if self.holder is not None:
            self.holder.close()
            self.holder = None

    def lose(self, unread: int) -> None:
        self.bench.up.unread = min(unread, self.bench.up.taken_bytes)
        self.bench.relay.upstream_gone(Cause.UPSTREAM_LOST)
        self.close()
        self.kill()

    def close(self) -> None:
        """Everybody gets an answer in the end."""
        self.free()
        self.bench.loop.advance(12)
        assert self.bench.relay.is_idle
        for number, asked in self.asked.items():
            assert asked.is_answered or asked.is_cancelled, f"{number} was never answered"
        self.check_disk()

    def kill(self) -> None:
        self.free()
        self.bench.end()
        self.start()

    def do(self, step: Step) -> None:
        match step:
            case ("ask", place, letter):
                self.ask(place, letter)
            case ("answer", which, kind):
                self.answer(which, kind)
            case ("cancel", which):
                self.cancel(which)
            case ("time", seconds):
                self.bench.loop.advance(seconds)
            case ("hold",):
                self.hold()
            case ("free",):
                self.free()
            case ("lose", unread):
                self.lose(unread)
            case ("kill",):
                self.kill()
        self.check_disk()


STEPS: Final = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([None, 1, 2, 3]), st.sampled_from("aab")),
    st.tuples(st.just("ask"), st.sampled_from([None, 1, 2, 3]), st.sampled_from("aab")),
    st.tuples(st.just("answer"), st.integers(0, 5), st.sampled_from(["ok", "ok", "error", "bridge", "visit", "task"])),
    st.tuples(st.just("answer"), st.integers(0, 5), st.sampled_from(["ok", "ok", "error", "bridge", "visit", "task"])),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("time"), st.sampled_from([0, 0, 0, 0, 0.5, 6])),
    st.tuples(st.just("time"), st.sampled_from([0, 0, 0, 0, 0.5, 6])),
    st.tuples(st.just("hold")),
    st.tuples(st.just("free")),
    st.tuples(st.just("lose"), st.sampled_from([0, 50, 130, 10_000])),
    st.tuples(st.just("kill")),
)


@given(st.lists(STEPS, min_size=4, max_size=30))
@example([("ask", 1, "a"), ("time", 0), ("kill",), ("ask", 1, "a"), ("ask", None, "a"), ("time", 0)])
@example([("ask", 1, "a"), ("time", 0), ("answer", 0, "ok"), ("kill",), ("ask", 1, "a"), ("time", 0)])
@example([("ask", 1, "a"), ("ask", 1, "a"), ("cancel", 0), ("time", 0), ("answer", 0, "ok"), ("ask", 1, "b")])
@settings(derandomize=True, deadline=None, max_examples=int(os.environ.get("CHECKPOINT_EXAMPLES", "120")))
def test_no_order_of_events_runs_a_place_twice_or_changes_what_is_on_record(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        life = Life(Path(folder) / "j.db")
        try:
            for step in steps:
                life.do(step)
            life.lose(0)
        finally:
            life.free()
            life.bench.end()


# ------------------------------------------------------------------------------- branches, operators, a second process

VOID: Final = ("NOT_SENT", "NOT_EXECUTED")
WHICH: Final = st.sampled_from([0, 0, 0, 1])
PROCESSES: Final = st.builds(
    options,
    st.sampled_from(list(Unpinned)),
    forks=st.booleans(),
    trusts_annotations=st.sampled_from([False, False, True]),
    annotates=st.just(True),
    call_id_keys=st.just(("host/id",)),
    call_timeout_s=st.sampled_from([None, 3]),
    restarts_upstream=st.booleans(),
)
FREE_AGAIN: Final = (*FREE, "NOT_EXECUTED")
DONE: Final = ("COMPLETED", "FAILED")
IDEMPOTENT: Final = "set"  # the tool of which trusting processes believe that it may run again
HOST_ID: Final = "host/id"
PROGRAM: Final = ("p1", "p2", "p3", "p4", "p5")  # the steps of an agent that makes the same calls in the same order
PROGRAMS: Final = "o"  # the workflow that only such agents use


class Attempt(NamedTuple):
    """A row of `attempts`, as any program reads it."""

    id: int
    workflow_id: str
    sequence: int
    attempt: int
    tool_name: str
    signature: str
    status: str
    cause: str | None
    result: bytes | None
    error: bytes | None
    delivered: int

    @property
    def place(self) -> tuple[str, int]:
        return self.workflow_id, self.sequence


class Model:
    """What the file says, put together in the plainest way: every branch as a copy of its parent's places."""

    def __init__(self, path: Path) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.forks: list[tuple[str, str, int]] = []
        if path.exists():
            with read_only(path) as database:
                query = (
                    "SELECT id, workflow_id, sequence, attempt, tool_name, call_signature, status, cause, result,"
                    " error, delivered FROM attempts ORDER BY id"
                )
                self.attempts = {row[0]: Attempt(*row) for row in database.execute(query)}
                self.forks = database.execute("SELECT branch, parent, sequence FROM forks ORDER BY id").fetchall()
        self.owns: dict[str, Callable[[int], str]] = {}
        for branch, parent, start in self.forks:
            self.owns[branch] = lambda at, branch=branch, parent=parent, start=start: (  # type: ignore[misc]
                branch if at >= start else self.owner(parent, at)
            )

    def owner(self, branch: str, sequence: int) -> str:
        return self.owns[branch](sequence) if branch in self.owns else branch

    def at(self, place: tuple[str, int]) -> list[Attempt]:
        return [row for row in self.attempts.values() if row.place == place]

    def standing(self, place: tuple[str, int]) -> Attempt | None:
        """The newest attempt that may have left something in the world, else the newest."""
        rows = self.at(place)
        return next((row for row in reversed(rows) if row.status not in VOID), rows[-1] if rows else None)

    def doubts(self, branch: str) -> list[Attempt]:
        """What is in doubt in the history of a branch."""
        rows = [row for row in self.attempts.values() if row.status == "IN_DOUBT"]
        return [row for row in rows if self.standing(row.place) == row and self.sees(branch, row)]

    def sees(self, branch: str, row: Attempt) -> bool:
        return self.owner(branch, row.sequence) == row.workflow_id

    def past(self, branch: str, sequence: int) -> set[tuple[str, int]]:
        """The places with rows that a branch sees below a sequence."""
        return {row.place for row in self.attempts.values() if row.sequence < sequence and self.sees(branch, row)}

    def relatives(self, workflow_id: str) -> list[str]:
        root = workflow_id.partition("~")[0]
        return [root, *(branch for branch, _, _ in self.forks if branch.partition("~")[0] == root)]


@dataclass
class Wish:
    """A request of a client's, and what became of it."""

    line: bytes
    workflow_id: str
    place: int | None
    host_id: str | None
    doubts: set[int] = field(default_factory=set)  # what the file held when it was asked
    is_cancelled: bool = False
    answers: int = 0
    has_outcome: bool = False  # and no refusal


class OwnLoop(FakeLoop):
    """The part of a common loop that ends with its process."""

    def __init__(self, common: FakeLoop) -> None:
        super().__init__()
        self.common = common
        self.mine: list[Timer] = []

    def time(self) -> float:
        return self.common.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.mine.append(self.common.call_later(delay, callback))
        return self.mine[-1]

    def run(self) -> None:
        self.common.run()

    def end(self) -> None:
        for timer in self.mine:
            timer.cancel()


class Process:
    """One relay with a client and an upstream of its own, and what each of the two has seen."""

    def __init__(self, world: "World", settings: Settings) -> None:
        self.world = world
        self.settings = settings
        self.wishes: dict[Any, Wish] = {}
        self.at_upstream: list[Any] = []
        self.rows: dict[Any, int] = {}  # by the id of a call that left, its row
        self.flying: set[int] = set()  # rows that upstream may still answer
        self.landing: set[int] = set()
        self.matched: set[tuple[str, int]] = set()
        self.unread: set[Any] = set()  # ids of calls that the last server cannot have read
        self.done: set[str] = set()  # steps of the program
        self.loop = OwnLoop(world.loop)
        self.bench = Bench(world.path, settings, loop=self.loop, on_up=self.saw_upstream, on_down=self.saw_downstream)
        if settings.trusts_annotations:
            self.bench.ask(request("tools/list", "hints"))
            tools = [{"name": IDEMPOTENT, "annotations": {"idempotentHint": True}}]
            self.bench.answer(line({"jsonrpc": "2.0", "id": "hints", "result": {"tools": tools}}))

    # ---------------------------------------------------------------------------------------------- what is seen

    def saw_upstream(self, sent: bytes) -> None:
        message = json.loads(sent)
        if message["method"] != "tools/call":
            return
        wish, now = self.wishes[message["id"]], Model(self.world.path)
        assert sent == wish.line
        if message["id"] in self.rows:
            self.is_sent_again(message["id"], wish, now)
            return
        row = next(row for row in now.attempts.values() if row.id not in self.world.sent)
        assert row.tool_name == message["params"]["name"], "a call left without a row of its own"
        self.world.sent.add(row.id)
        self.at_upstream.append(message["id"])
        self.rows[message["id"]] = row.id
        self.flying.add(row.id)
        self.may_run(row, now)
        if wish.place is None:
            self.is_not_given_up(row, wish, now)
        if wish.workflow_id == PROGRAMS and not self.world.is_over:
            self.is_not_finished(row, now)
        if row.attempt > 1:
            return
        self.is_nowhere_on_record(row, now)
        if wish.place is None:
            self.passes_no_doubt(row, wish, now)

    def is_sent_again(self, number: Any, wish: Wish, now: Model) -> None:
        """To another server, under its row: nobody read it before, and somebody waits for it."""
        assert number in self.unread
        assert not wish.is_cancelled
        assert now.attempts[self.rows[number]].status == "PENDING"
        self.unread.discard(number)
        self.at_upstream.append(number)
        self.flying.add(self.rows[number])

    def is_not_given_up(self, row: Attempt, wish: Wish, now: Model) -> None:
        """A call without a pin is not one that this process has sent, that nobody waits for and that has no outcome."""
        for doubt in now.doubts(row.workflow_id):
            if doubt.id in wish.doubts and doubt.id in self.world.doubts and doubt.id in self.rows.values():
                assert doubt.signature != row.signature, f"{row.place} is what was given up at {doubt.place}"

    def is_not_finished(self, row: Attempt, now: Model) -> None:
        """A step of the program that has an outcome on record does not run again, whatever was refused before."""
        for other in now.attempts.values():
            is_relative = other.workflow_id in now.relatives(row.workflow_id)
            if is_relative and other.signature == row.signature and other.id != row.id:
                assert other.status not in (*DONE, "TASK"), f"{row.tool_name} ran again at {row.place}"

    def may_run(self, row: Attempt, now: Model) -> None:
        """A place runs again only if nothing ran there before, or an operator or a trusted hint allows it."""
        for earlier in now.at(row.place):
            if earlier.id < row.id:
                assert earlier.signature == row.signature
                is_trusted = self.settings.trusts_annotations and row.tool_name == IDEMPOTENT
                allowed = (*FREE_AGAIN, "IN_DOUBT") if is_trusted else FREE_AGAIN
                assert earlier.status in allowed, f"{row.place} ran again after {earlier.status}"

    def is_nowhere_on_record(self, row: Attempt, now: Model) -> None:
        """What another branch with the same past has on record here is not run on this one."""
        past = now.past(row.workflow_id, row.sequence)
        for other in now.relatives(row.workflow_id):
            there = now.standing((now.owner(other, row.sequence), row.sequence))
            if there is None or there.id >= row.id or there.signature != row.signature:
                continue
            assert now.past(other, row.sequence) != past, f"{other} has this call at {row.sequence}: {there.status}"

    def passes_no_doubt(self, row: Attempt, wish: Wish, now: Model) -> None:
        """A new call without a pin does not pass what was in doubt when it was asked, and still is."""
        for doubt in now.doubts(row.workflow_id):
            if doubt.id in wish.doubts and doubt.id in self.world.doubts:
                if doubt.id in self.flying | self.landing:
                    assert doubt.signature != row.signature, "the call that nobody waits for was made again"
                else:
                    assert doubt.cause in ("cancelled", "timeout"), f"{row.place} passed the doubt at {doubt.place}"
                    assert doubt.tool_name != row.tool_name

    def saw_downstream(self, said: bytes) -> None:
        message = json.loads(said)
        if message["id"] == "hints":
            return
        wish = self.wishes[message["id"]]
        wish.answers += 1
        reason = (message.get("error", {}).get("data") or {}).get("checkpoint", {}).get("reason")
        is_visit = message.get("error", {}).get("code") == -32042
        wish.has_outcome = not is_visit and reason in (None, "resolved_failed")
        assert wish.workflow_id != PROGRAMS or reason != "diverged" or self.world.is_over
        place = message.get("result", {}).get("_meta", {}).get("checkpoint")
        if place is None:
            return
        key, now = (place["workflow_id"], place["sequence"]), Model(self.world.path)
        row = now.standing(key)
        assert row is not None
        assert row.status in (*DONE, "TASK", "INPUT_REQUIRED"), "an answer came down before it was on disk"
        assert row.result is not None
        kept = json.loads(row.result)
        assert kept["content"] == message["result"]["content"], "another answer than the one on record"
        if place["replayed"]:
            bare = said.replace(b'"id":%d' % message["id"], b'"id":0')
            assert self.world.replays.setdefault((row.id, row.result), bare) == bare, "replays differ"
            if wish.place is None and wish.host_id is None and row.status != "INPUT_REQUIRED":
                self.was_matched(key, row)

    def was_matched(self, key: tuple[str, int], row: Attempt) -> None:
        """An unpinned call was answered from the journal."""
        unpinned = self.settings.unpinned
        assert unpinned is not Unpinned.NEW
        assert key not in self.matched, "one row answered two unpinned calls"
        self.matched.add(key)
        if unpinned is Unpinned.UNDELIVERED:
            assert not row.delivered, "the client had read this answer"
        if unpinned is Unpinned.ORDERED:
            assert key[1] >= max((sequence for owner, sequence in self.matched if owner[0] == key[0][0]), default=0)

    # --------------------------------------------------------------------------------------------- what happens

    def ask(self, number: int, workflow_id: str, place: int | None, tool: str, host_id: str | None) -> None:
        meta = {} if host_id is None else {HOST_ID: host_id}
        asked = call(number, tool, seq=place, workflow=workflow_id, meta=meta)
        self.wishes[number] = Wish(asked, workflow_id, place, host_id, set(self.world.doubts))
        self.bench.relay.from_downstream([asked])

    def end(self) -> None:
        self.loop.end()
        self.bench.end()


class World(RuleBasedStateMachine):
    """One journal, two processes that want it, and a person with `journal resolve`."""

    processes: list[Process]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = Path(self.folder.name) / "j.db"
        self.loop = FakeLoop()
        self.numbers = itertools.count(1)
        self.sent: set[int] = set()
        self.doubts: set[int] = set()  # as of the last step
        self.replays: dict[Any, bytes] = {}
        self.seen: dict[int, Attempt] = {}
        self.holder: sqlite3.Connection | None = None
        self.processes = []
        self.is_over = False

    @initialize(first=PROCESSES, second=PROCESSES)
    def start(self, first: Settings, second: Settings) -> None:
        self.processes = [Process(self, first), Process(self, second)]

    @rule(
        which=WHICH, place=st.sampled_from([None, None, 1, 2, 3]), tool=st.sampled_from(["a", "a", "b", IDEMPOTENT]),
        workflow_id=st.sampled_from("wwwv"), host_id=st.sampled_from([None, None, None, *"xy"]), is_turn=st.booleans(),
    )  # fmt: skip
    def ask(
        self, which: int, place: int | None, tool: str, workflow_id: str, host_id: str | None, is_turn: bool
    ) -> None:
        self.processes[which].ask(next(self.numbers), workflow_id, place, tool, host_id)
        if is_turn:
            self.turn()

    @rule(which=WHICH, tools=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def walk(self, which: int, tools: list[str]) -> None:
        """A small run without pins, each call answered before the next."""
        process = self.processes[which]
        for tool in tools:
            number = next(self.numbers)
            process.ask(number, "w", None, tool, None)
            self.turn()
            if number in process.at_upstream:
                self.say(process, number, "ok")
                self.turn()

    @rule(
        which=WHICH, steps=st.integers(1, 4), is_pair=st.booleans(),
        fault=st.sampled_from(["none", "none", "busy", "cancel", "late", "not sent", "handed over", "error", "bridge"]),
    )  # fmt: skip
    def run_program(self, which: int, steps: int, is_pair: bool, fault: str) -> None:
        """An agent goes on with its program; it tries a step again until that has an outcome, and skips none."""
        process = self.processes[which]
        if process.settings.unpinned is not Unpinned.ORDERED:
            return
        todo = [step for step in PROGRAM if step not in process.done][:steps]
        if is_pair and fault != "cancel":  # of two that race, the second may get the place of the first
            self.try_steps(process, todo[:2], fault)
        for step in todo:
            for tried in (fault, "none", "none"):
                if step not in process.done:
                    self.try_steps(process, [step], tried)
                fault = "none"
            if step not in process.done:
                return

    def try_steps(self, process: Process, steps: list[str], fault: str) -> None:
        """Asks for steps at once, and lets something be in the way."""
        asked = {next(self.numbers): step for step in steps}
        if fault in ("busy", "cancel"):
            self.hold()
        if fault == "not sent":
            process.bench.up.is_full = True
        for number, step in asked.items():
            process.ask(number, PROGRAMS, None, step, None)
        self.turn()
        if fault in ("cancel", "not sent"):
            for number in asked:
                self.give_up(process, number)
            self.loop.advance(0.1)
        if fault == "not sent":
            self.change_server(process, 0)
            process.bench.up.is_full = False
        if fault == "late":
            self.loop.advance(4)
        if fault == "handed over":
            self.hold()
        for number in [number for number in process.at_upstream if number in asked]:
            self.say(process, number, fault if fault in ("error", "bridge") else "ok")
        if fault in ("busy", "handed over"):
            self.loop.advance(6)
        self.free()
        self.loop.advance(0.1)
        self.settle_turn()
        process.done |= {step for number, step in asked.items() if process.wishes[number].has_outcome}
        self.nothing_that_is_finished_changes()

    def give_up(self, process: Process, number: Any) -> None:
        process.wishes[number].is_cancelled = True
        process.bench.relay.from_downstream([cancel(number)])

    @rule(which=WHICH, unread=st.sampled_from([0, 90, 10_000]))
    def change_servers(self, which: int, unread: int) -> None:
        self.change_server(self.processes[which], unread)

    def change_server(self, process: Process, unread: int) -> None:
        """The server of a process ends, and had not read that much of what was written to it; another one begins."""
        if not process.settings.restarts_upstream or process.settings.trusts_annotations:
            return
        self.turn()  # what is ready is written to the server that is there
        sink = process.bench.up
        sink.unread = min(unread, sink.taken_bytes)
        at, read = 0, sink.taken_bytes - sink.unread
        process.unread.clear()
        for sent in sink.lines:
            if at >= read:
                process.unread.add(json.loads(sent).get("id"))
            at += len(sent)
        process.at_upstream.clear()
        process.flying.clear()
        process.bench.relay.upstream_interrupted()
        self.turn()
        process.bench.up = FakeSink(process.saw_upstream)
        process.bench.relay.upstream_started(process.bench.up, 77)
        self.turn()

    @rule(
        which=WHICH, at=st.integers(0, 5), kind=st.sampled_from(["ok", "ok", "ok", "error", "bridge", "visit", "task"])
    )
    def answer(self, which: int, at: int, kind: str) -> None:
        process = self.processes[which]
        if process.at_upstream:
            self.say(process, process.at_upstream[at % len(process.at_upstream)], kind)

    def say(self, process: Process, number: Any, kind: str) -> None:
        unique = f"answer {next(self.numbers)}"
        lines = {
            "ok": result(number, unique),
            "error": failure(number, 7, unique),
            "bridge": failure(number, -32000, "Connection closed"),
            "visit": failure(number, -32042, unique, {"elicitations": []}),
            "task": result(number, unique, task={"taskId": unique}),
        }
        process.at_upstream.remove(number)
        process.landing.add(process.rows[number])
        process.flying.discard(process.rows[number])
        process.bench.relay.from_upstream([lines[kind]])

    @rule(which=WHICH, at=st.integers(0, 5))
    def cancel(self, which: int, at: int) -> None:
        wishes = self.processes[which].wishes
        if wishes:
            self.give_up(self.processes[which], list(wishes)[at % len(wishes)])

    @rule(seconds=st.sampled_from([0, 0, 0.5, 4, 6]))
    def time(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self.settle_turn()

    def turn(self) -> None:
        self.loop.run()
        self.settle_turn()

    def settle_turn(self) -> None:
        if self.holder is None:
            for process in self.processes:
                process.landing.clear()

    @rule(which=WHICH)
    def read(self, which: int) -> None:
        """The client has or has not read what was written to it."""
        sink = self.processes[which].bench.down
        sink.unread = 0 if sink.unread else 1

    @rule()
    def hold(self) -> None:
        if self.holder is None and self.path.exists():
            self.holder = sqlite3.connect(self.path, isolation_level=None)
            with contextlib.suppress(sqlite3.OperationalError):
                self.holder.execute("BEGIN IMMEDIATE")

    @rule()
    def free(self) -> None:
        if self.holder is not None:
            self.holder.close()
            self.holder = None

    @rule(which=WHICH, settings=PROCESSES, is_killed=st.booleans(), unread=st.sampled_from([0, 90, 10_000]))
    def end(self, which: int, settings: Settings, is_killed: bool, unread: int) -> None:
        """A process ends at once, or its upstream does and then it; another begins."""
        process = self.processes[which]
        self.free()
        if not is_killed:
            process.bench.up.unread = min(unread, process.bench.up.taken_bytes)
            process.bench.relay.upstream_gone(Cause.UPSTREAM_LOST)
            self.loop.advance(12)
            assert process.bench.relay.is_idle
            for number, wish in process.wishes.items():
                assert wish.answers or wish.is_cancelled, f"{number} was never answered"
        process.end()
        self.processes[which] = Process(self, settings)

    @rule(at=st.integers(0, 5), status=st.sampled_from(["COMPLETED", "FAILED", "NOT_EXECUTED"]))
    def operator(self, at: int, status: str) -> None:
        """A person settles a doubt, if nobody owns the journal."""
        doubts = sorted(self.doubts)
        lock = Lock(Files(str(self.path)).lock)
        if not doubts or self.holder is not None or not lock.take():
            return
        lock.give_back()
        row = Model(self.path).attempts[doubts[at % len(doubts)]]
        resolve(self.path, row.sequence, status, f"settled {row.id}", workflow_id=row.workflow_id, attempt=row.attempt)

    @invariant()
    def nothing_that_is_finished_changes(self) -> None:
        now = Model(self.path)
        for number, before in self.seen.items():
            after = now.attempts[number]
            is_settled = before.status in (*DONE, "NOT_SENT", "NOT_EXECUTED", "INPUT_REQUIRED", "TASK")
            if is_settled:
                assert after._replace(delivered=0, cause=None) == before._replace(delivered=0, cause=None)
            assert after.delivered >= before.delivered
        if not any(process.settings.forks for process in self.processes) and not self.seen:
            assert now.forks == []
        for branch, _, start in now.forks:
            assert now.at((branch, start)), "a branch without its first row"
        self.seen = now.attempts
        owners = [
            process for process in self.processes if process.bench.journal and process.bench.journal.has_dispatched
        ]
        assert len(owners) <= 1
        rows = (row for row in now.attempts.values() if row.status == "IN_DOUBT" and now.standing(row.place) == row)
        self.doubts = {row.id for row in rows}

    def teardown(self) -> None:
        try:
            self.free()
            self.is_over = True
            if self.processes:
                self.nobody_is_stuck()
        finally:
            self.free()
            for process in self.processes:
                process.end()
            self.folder.cleanup()

    def nobody_is_stuck(self) -> None:
        """Whatever was asked can be asked again, and is answered once a person has done what the refusals say."""
        wishes = [wish for process in self.processes for wish in process.wishes.values()]
        for process in self.processes:
            process.end()
        for wish in wishes[-6:]:
            for _ in range(1 + len(Model(self.path).attempts)):
                last = Process(self, options("ordered", forks=True, annotates=True, call_id_keys=(HOST_ID,)))
                self.processes = [last]
                number = next(self.numbers)
                last.wishes[number] = Wish(line(json.loads(wish.line) | {"id": number}), "w", 0, None)
                said = last.bench.ask(last.wishes[number].line)
                last.end()
                facts = error_of(said[0])["facts"] if said and b'"error"' in said[0] else {}
                if facts.get("reason") != "in_doubt":
                    assert facts.get("reason") in (None, "diverged", "resolved_failed")
                    break
                model = Model(self.path)
                doubt = model.standing((facts["workflow_id"], facts["sequence"]))
                assert doubt is not None
                assert doubt.status in ("IN_DOUBT", "PENDING"), "the row that was named is not the one in doubt"
                resolve(self.path, doubt.sequence, "COMPLETED", workflow_id=doubt.workflow_id, attempt=doubt.attempt)
            else:
                raise AssertionError("no decision of a person's lets this call through")


World.TestCase.settings = settings(
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("CHECKPOINT_EXAMPLES", "300")),
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
TestManyLives = World.TestCase


# Two walks through the same world that come more often to where its rules meet.

IN_ORDER: Final = st.builds(
    options,
    st.just("ordered"),
    forks=st.booleans(),
    annotates=st.just(True),
    call_timeout_s=st.sampled_from([None, 3]),
    restarts_upstream=st.just(True),
)
FAULTS: Final = st.sampled_from(["none", "busy", "cancel", "late", "not sent", "handed over", "error", "bridge"])
RUNS: Final = st.lists(st.tuples(st.integers(1, 3), st.booleans(), FAULTS), min_size=1, max_size=3)
LIVES: Final = st.lists(st.tuples(IN_ORDER, RUNS, st.booleans()), min_size=2, max_size=4)


@given(lives=LIVES, statuses=st.lists(st.sampled_from(["COMPLETED", "NOT_EXECUTED"]), min_size=4, max_size=4))
@settings(derandomize=True, deadline=None, max_examples=int(os.environ.get("CHECKPOINT_EXAMPLES", "60")))
def test_no_retry_of_a_step_makes_a_finished_one_run_again(lives: list[Any], statuses: list[str]) -> None:
    world = World()
    try:
        world.start(lives[0][0], lives[0][0])
        for (process, runs, is_killed), status in zip(lives, statuses, strict=False):
            world.end(0, process, is_killed, 0)
            for steps, is_pair, fault in runs:
                world.run_program(0, steps, is_pair, fault)
            world.end(0, process, is_killed, 0)
            world.nothing_that_is_finished_changes()
            for at in range(len(world.doubts)):
                world.operator(at, status)
            world.nothing_that_is_finished_changes()
    finally:
        world.teardown()


MOVES: Final = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([None, None, "x", "y"])),
        st.tuples(st.just("ask"), st.sampled_from([None, None, "x", "y"])),
        st.tuples(st.just("answer"), st.integers(0, 3), st.sampled_from(["ok", "visit", "visit"])),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("void")),
    ),
    min_size=4,
    max_size=14,
)


ASK: Final = ("ask", None)


@given(process=PROCESSES, moves=MOVES)
@example(options("ordered"), [ASK, ASK, ("void",), ASK, ("cancel", 0), ASK])
@example(options(), [ASK, ASK, ("answer", 0, "visit"), ("answer", 0, "visit"), ASK, ("cancel", 2), ASK])
@example(options(call_id_keys=(HOST_ID,)), [("ask", "x"), ("void",), ("ask", "y"), ("cancel", 0), ("ask", "x")])
@settings(derandomize=True, deadline=None, max_examples=int(os.environ.get("CHECKPOINT_EXAMPLES", "100")))
def test_a_call_that_was_given_up_is_not_made_again_wherever_it_would_belong(
    process: Settings, moves: list[Any]
) -> None:
    world = World()
    try:
        world.start(process, process)
        for move in moves:
            match move:
                case ("ask", host_id):
                    world.ask(0, None, "a", "w", host_id, True)
                case ("answer", at, kind):
                    world.answer(0, at, kind)
                    world.turn()
                case ("cancel", at):
                    world.cancel(0, at)
                    world.turn()
                case ("void",):  # a person finds that nothing of what was under way was done
                    world.end(0, process, True, 0)
                    world.nothing_that_is_finished_changes()
                    while world.doubts:
                        world.operator(0, "NOT_EXECUTED")
                        world.nothing_that_is_finished_changes()
            world.nothing_that_is_finished_changes()
    finally:
        world.teardown()
