"""The order of lines, the commit between them, and the points where the crash drill strikes."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import (
    HANDSHAKE_NAMES,
    Bench,
    FakeDrill,
    FakeLoop,
    FakeSink,
    Killed,
    call,
    cancel,
    database_held,
    failure,
    read_only,
    result,
)

from journal import Journal, JournalFailed
from states import Answered, Cause, Delivered, Dispatched, Doubted, Entry, Fact, Status
from storage import Files, JournalError
from turn import RETRY_S, WAIT_S, CrashDrill, Lane, Slot, Turn

prop: Final = settings(derandomize=True, deadline=None, max_examples=200)


# ------------------------------------------------------------------------------------------------------------ the lane


def test_a_lane_without_a_held_place_writes_at_once() -> None:
    sink = FakeSink()
    lane = Lane(sink)
    lane.send(b"a\n")
    assert sink.lines == [b"a\n"]
    lane.flush()
    assert sink.writes == [[b"a\n"]], "nothing waits, so nothing is written"


def test_a_held_place_keeps_what_comes_behind_it_until_the_turn_ends() -> None:
    sink = FakeSink()
    lane = Lane(sink)
    lane.send(b"first\n")
    slot = lane.hold()
    lane.send(b"last\n")
    assert sink.lines == [b"first\n"]
    slot.fill(b"held\n")
    slot.fill(b"twice\n")
    assert slot.is_filled
    lane.flush()
    assert sink.writes[1:] == [[b"held\n", b"twice\n", b"last\n"]], "one write"
    assert slot.position == len(b"first\n")
    assert not slot.is_open


def test_a_place_that_is_empty_at_the_end_of_the_turn_is_overtaken_and_filled_before_what_is_younger() -> None:
    sink = FakeSink()
    lane = Lane(sink)
    late = lane.hold()
    lane.send(b"a\n")
    lane.flush()
    assert (sink.lines, late.is_filled, late.position) == ([b"a\n"], False, None)
    younger = lane.hold()
    late.fill(b"late\n")
    younger.fill(b"younger\n")
    late.fill(b"more\n")
    lane.flush()
    assert sink.lines == [b"a\n", b"late\n", b"more\n", b"younger\n"]
    assert (late.position, younger.position) == (2, 12)


@given(st.lists(st.sampled_from(["send", "hold", "fill", "flush", "full", "take"]), max_size=40))
@prop
def test_a_slot_knows_where_its_first_byte_stands_and_order_holds_within_a_turn(steps: list[str]) -> None:
    sink, numbers = FakeSink(), itertools.count()
    lane = Lane(sink)
    slots: list[tuple[Slot, bytes]] = []
    for step in steps:
        line = b"%d" % next(numbers) * 3 + b"\n"
        match step:
            case "send":
                lane.send(line)
            case "hold":
                slots.append((lane.hold(), line))
            case "fill" if any(not slot.is_filled for slot, _ in slots):
                slot, held = next(pair for pair in slots if not pair[0].is_filled)
                slot.fill(held)
            case "flush":
                lane.flush()
            case "full":
                sink.is_full = True
            case "take":
                sink.take()
    lane.flush()
    stream = b"".join(sink.lines)
    for slot, held in slots:
        assert slot.is_filled == (slot.position is not None)
        if slot.position is not None:
            assert stream[slot.position :].startswith(held)
    assert lane.position == len(stream)


# ------------------------------------------------------------------------------------------------------------ the turn


class Desk:
    """A turn over a real journal that already owns its file, and what its callbacks were told."""

    def __init__(self, path: Path) -> None:
        files = Files(str(path))
        self.journal = Journal(files, exists=files.exists(), workflow_id="w", now_ms=lambda: 1)
        assert self.journal.take()
        self.loop, self.up, self.down = FakeLoop(), FakeSink(), FakeSink()
        self.told: list[tuple[str, str | None]] = []
        self.changes = 0
        self.turn = Turn(self.journal, self.up, self.down, self.loop, FakeDrill(), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def draft(self, sequence: int) -> Entry:
        return self.journal.draft("w", sequence, 1, "t", "s", None, started_at=0)

    def hold(self, name: str, facts: Sequence[Fact], *, is_up: bool = True) -> Slot:
        def on_disk(slot: Slot) -> None:
            self.told.append((name, None))
            slot.fill(name.encode())

        def refused(slot: Slot, error: JournalError) -> None:
            self.told.append((name, type(error).__name__))

        return self.turn.hold(self.turn.up if is_up else self.turn.down, facts, 10, on_disk, refused)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "j.db"


@pytest.fixture
def desk(path: Path) -> Desk:
    return Desk(path)


def test_both_directions_share_a_commit_and_are_told_after_it(desk: Desk, path: Path) -> None:
    first = desk.draft(1)
    desk.hold("a", [Dispatched(first)])
    desk.loop.run()
    second = desk.draft(2)
    desk.hold("b", [Answered(first, Status.COMPLETED, 1, result=b"{}")], is_up=False)
    desk.hold("c", [Dispatched(second)])
    assert (desk.turn.waiting_bytes(desk.turn.up), desk.turn.waiting_bytes(desk.turn.down)) == (10, 10)
    assert (desk.told, desk.changes) == ([("a", None)], 1)
    assert desk.turn.is_due
    desk.loop.run()
    assert desk.told == [("a", None), ("b", None), ("c", None)]
    assert (desk.up.lines, desk.down.lines, desk.changes) == ([b"a", b"c"], [b"b"], 2)
    assert (desk.turn.waiting_bytes(desk.turn.up), desk.turn.waiting_bytes(desk.turn.down)) == (0, 0)
    assert not desk.turn.is_due
    with read_only(path) as database:
        assert database.execute("SELECT status FROM calls ORDER BY sequence").fetchall() == [
            ("COMPLETED",),
            ("PENDING",),
        ]


def test_a_turn_that_was_ended_by_hand_ends_once_more_in_vain(desk: Desk, path: Path) -> None:
    desk.hold("a", [Dispatched(desk.draft(1))])
    desk.turn.end()
    assert desk.loop.waiting == 1
    desk.loop.run()
    assert (desk.told, desk.up.lines, desk.changes) == ([("a", None)], [b"a"], 2)
    with read_only(path) as database:
        assert database.execute("SELECT count(*) FROM dispatches").fetchone() == (1,)


def test_a_busy_database_is_tried_again_by_one_timer_until_each_has_waited_long_enough(desk: Desk, path: Path) -> None:
    early, late = desk.draft(1), desk.draft(2)
    with database_held(path):
        desk.hold("early", [Dispatched(early)])
        desk.loop.advance(1)
        desk.hold("late", [Dispatched(late)])
        desk.turn.end()
        desk.loop.run()
        assert desk.loop.waiting == 1
        desk.loop.advance(WAIT_S - 1 - RETRY_S)
        assert desk.told == []
        desk.loop.advance(2 * RETRY_S)
        assert desk.told == [("early", "JournalBusy")]
        assert desk.turn.is_due
    desk.loop.advance(RETRY_S)
    assert desk.told == [("early", "JournalBusy"), ("late", None)]
    assert desk.up.lines == [b"late"]
    assert desk.loop.waiting == 0


def test_what_upstream_said_is_recorded_even_after_its_client_was_refused(desk: Desk, path: Path) -> None:
    entry = desk.draft(1)
    desk.hold("call", [Dispatched(entry)])
    desk.loop.run()
    with database_held(path):
        desk.hold("answer", [Answered(entry, Status.COMPLETED, 1, result=b"{}")], is_up=False)
        desk.loop.advance(60)
        assert desk.told[1:] == [("answer", "JournalBusy")]
        assert desk.turn.waiting_bytes(desk.turn.down) == 0
    desk.loop.advance(RETRY_S)
    assert desk.told[2:] == []
    entry_now = desk.journal.entry("w", 1)
    assert entry_now is not None
    assert entry_now.status is Status.COMPLETED


def test_nothing_is_recorded_of_a_call_that_was_refused(desk: Desk, path: Path) -> None:
    entry = desk.draft(1)
    with database_held(path):
        desk.hold("call", [Dispatched(entry)])
        desk.hold("cancel", [Doubted(entry, Cause.CANCELLED, 1)])
        desk.loop.advance(60)
    desk.loop.advance(RETRY_S)
    assert desk.told == [("call", "JournalBusy"), ("cancel", "JournalBusy")]
    assert not desk.turn.is_due
    with read_only(path) as database:
        assert database.execute("SELECT count(*) FROM doubts").fetchall() == [(0,)]


def test_a_hold_without_facts_waits_with_the_rest(desk: Desk, path: Path) -> None:
    desk.hold("call", [Dispatched(desk.draft(1))])
    desk.hold("second answer", [], is_up=False)
    with database_held(path):
        desk.loop.advance(1)
        assert desk.told == []
    desk.loop.advance(RETRY_S)
    assert desk.told == [("call", None), ("second answer", None)]


def test_what_is_withdrawn_is_neither_written_nor_told(desk: Desk, path: Path) -> None:
    gone, kept = desk.draft(1), desk.draft(2)
    desk.hold("gone", [Dispatched(gone)])
    desk.hold("kept", [Dispatched(kept)])
    desk.turn.withdraw(gone)
    desk.loop.run()
    assert desk.told == [("kept", None)]
    assert desk.up.lines == [b"kept"]
    with read_only(path) as database:
        assert database.execute("SELECT sequence FROM attempts").fetchall() == [(2,)]


def test_a_failed_commit_refuses_all_that_waited_for_it(desk: Desk, path: Path) -> None:
    desk.hold("a", [Dispatched(desk.draft(1))])
    desk.loop.run()
    path.rename(path.with_suffix(".away"))
    desk.hold("b", [Dispatched(desk.draft(2))])
    desk.hold("c", [Dispatched(desk.draft(3))])
    desk.turn.up.send(b"behind")
    desk.loop.run()
    assert desk.told[1:] == [("b", "JournalFailed"), ("c", "JournalFailed")]
    assert desk.up.lines == [b"a", b"behind"]
    assert not desk.turn.is_due


def test_housekeeping_runs_after_the_lines_are_out_and_its_failure_stops_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bytes]] = []

    def tidy(_: Journal) -> None:
        seen.append(list(desk.up.lines))
        raise JournalFailed("full")

    monkeypatch.setattr(Journal, "tidy", tidy)
    desk.hold("a", [Dispatched(desk.draft(1))])
    desk.loop.run()
    assert seen == [[b"a"]]
    assert desk.changes == 1


# ----------------------------------------------------------------------------------------------------- the crash drill


def strike(path: Path, point: str, sequence: int | None = None) -> Bench:
    return Bench(path, HANDSHAKE_NAMES, drill=FakeDrill(point, sequence))


def test_the_drill_before_reserve_leaves_nothing(path: Path) -> None:
    bench = strike(path, "before_reserve")
    with pytest.raises(Killed):
        bench.ask(call(1))
    assert (bench.up.lines, bench.statuses()) == ([], [])


def test_the_drill_after_reserve_leaves_a_row_and_no_byte_upstream(path: Path) -> None:
    bench = strike(path, "after_reserve")
    with pytest.raises(Killed):
        bench.ask(call(1))
    assert (bench.up.lines, bench.statuses()) == ([], ["PENDING"])


def test_the_drill_at_mid_upstream_waits_until_the_call_is_written_and_no_answer_is_read(path: Path) -> None:
    bench = strike(path, "mid_upstream", 1)
    bench.up.is_full = True
    bench.ask(call(1))
    assert (bench.up.lines, bench.statuses()) == ([call(1)], ["PENDING"])
    bench.ask(call(2))
    assert not bench.relay.may_read_upstream
    bench.relay.when_written()
    bench.up.take()
    with pytest.raises(Killed):
        bench.relay.when_written()


def test_the_drill_at_mid_upstream_does_not_strike_before_the_row_is_on_disk(path: Path) -> None:
    bench = strike(path, "mid_upstream", 2)
    bench.call(call(1), result(1))
    with database_held(path):
        bench.ask(call(2))
        bench.loop.advance(1)
    with pytest.raises(Killed):
        bench.loop.advance(1)
    assert (bench.up.lines[1:], bench.statuses()) == ([call(2)], ["COMPLETED", "PENDING"])


def test_the_drill_before_complete_leaves_the_row_open(path: Path) -> None:
    bench = strike(path, "before_complete")
    bench.ask(call(1))
    with pytest.raises(Killed):
        bench.answer(result(1))
    assert (bench.down.lines, bench.statuses()) == ([], ["PENDING"])


def test_the_drill_after_complete_leaves_the_outcome_and_no_byte_downstream(path: Path) -> None:
    bench = strike(path, "after_complete")
    bench.ask(call(1))
    with pytest.raises(Killed):
        bench.answer(result(1))
    assert (bench.down.lines, bench.statuses()) == ([], ["COMPLETED"])


def test_the_drill_strikes_at_the_sequence_that_it_is_given(path: Path) -> None:
    bench = strike(path, "after_complete", 2)
    bench.call(call(1), result(1))
    bench.ask(call(2), call(3))
    bench.answer(result(3))
    bench.ask(cancel(2))
    with pytest.raises(Killed):
        bench.answer(failure(2, 1, "no"))


def test_without_a_point_the_drill_never_strikes() -> None:
    entry = Entry(1, "w", 1, 1, "t", "s", None, Status.PENDING)
    facts: list[Fact] = [Dispatched(entry), Answered(entry, Status.COMPLETED, 0)]
    assert not any(CrashDrill().is_at(point, facts) for point in CrashDrill.POINTS)
    assert not CrashDrill()


def test_a_mark_rides_in_one_commit_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path / "j.db", HANDSHAKE_NAMES)
    assert bench.journal is not None
    commits: list[list[Fact]] = []
    append = bench.journal.append

    def watched(facts: Sequence[Fact]) -> None:
        commits.append([*facts])
        append(facts)

    monkeypatch.setattr(bench.journal, "append", watched)
    for number in (1, 2, 3):
        bench.call(call(number), result(number))
    marks = [[fact.dispatch for fact in facts if isinstance(fact, Delivered)] for facts in commits]
    assert marks == [[], [], [1], [], [2], []]
