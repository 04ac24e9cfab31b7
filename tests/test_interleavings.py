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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory import Bench, call, cancel, failure, read_only, result

from journal import Cause

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
        self.bench.unread = min(unread, self.bench.up.taken_bytes)
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
