"""Which place a call means, by what it says of itself, what is on record, and where this process is. No disk."""

from collections.abc import Iterable
from typing import Final

import pytest

from branches import Family, Fork
from locate import Ask, Bound, Place, Progress, Unpinned, Via, locate
from states import Entry, Round, Status


def entry(sequence: int, signature: str = "a", status: Status = Status.COMPLETED, workflow_id: str = "w") -> Entry:
    return Entry(sequence, workflow_id, sequence, 1, "t", signature, b"{}", status)


class Shelf:
    """What is on record, as plain entries; `undelivered` names those whose answer was not read."""

    def __init__(self, *entries: Entry, undelivered: Iterable[int] = (), states: dict[str, int] | None = None) -> None:
        self.entries = {found.place: found for found in entries}
        self.undelivered = undelivered
        self.states = states or {}

    def entry(self, workflow_id: str, sequence: int) -> Entry | None:
        return self.entries.get((workflow_id, sequence))

    def _of(self, workflow_id: str, after: int, below: int | None) -> list[int]:
        places = sorted(sequence for owner, sequence in self.entries if owner == workflow_id)
        return [sequence for sequence in places if sequence > after and (below is None or sequence < below)]

    def next_sequence(self, workflow_id: str, after: int, below: int | None) -> int | None:
        return next(iter(self._of(workflow_id, after, below)), None)

    def last_sequence(self, workflow_id: str) -> int:
        return max(self._of(workflow_id, 0, None), default=0)

    def with_call_id(self, call_id: str) -> list[tuple[str, int]]:
        return [found.place for found in reversed(self.entries.values()) if found.call_id == call_id]

    def with_signature(
        self, workflow_id: str, signature: str, after: int, below: int | None, *, is_undelivered: bool
    ) -> list[int]:
        return [
            sequence
            for sequence in self._of(workflow_id, after, below)
            if self.entries[workflow_id, sequence].signature == signature
            and (not is_undelivered or sequence in self.undelivered)
        ]

    def rounds(self) -> list[Round]:
        return [
            Round(*found.place, found.signature, found.call_id, found.error is not None, found.id)
            for found in self.entries.values()
            if found.status is Status.INPUT_REQUIRED
        ]

    def with_state(self, state: str, signature: str) -> list[tuple[str, int]]:
        return [
            found.place
            for found in self.entries.values()
            if self.states.get(state) == found.sequence and found.signature == signature
        ]


def waiting(sequence: int, signature: str = "a", state: str | None = None, *, is_visit: bool = False) -> Entry:
    """A row that waits for input; the shelf keeps its state as its call id."""
    found = entry(sequence, signature, Status.INPUT_REQUIRED)._replace(call_id=state)
    return found._replace(error=b"{}") if is_visit else found


def walk(shelf: Shelf, progress: Progress, *asks: Ask) -> list[tuple[str, int]]:
    """The places of calls that are all answered."""
    places: list[tuple[str, int]] = []
    for ask in asks:
        place = locate(ask, progress, shelf)
        progress.passed(place, ask)
        progress.bind(place, ask)
        places.append((place.via, place.sequence))
    return places


A: Final = Ask("t", "a")
B: Final = Ask("t", "b")
ROOT: Final = Family("w")
FORKED: Final = Family("w", [Fork("w~1", "w", 3)])


def fresh(unpinned: Unpinned = Unpinned.NEW, family: Family = ROOT, branch: str | None = None) -> Progress:
    return Progress(family, branch or family.newest, unpinned)


# ----------------------------------------------------------------------------------------------------------- the order


def test_the_first_of_six_answers_that_applies_is_taken() -> None:
    shelf = Shelf(
        entry(1, "z"),
        waiting(2, "a", "s"),
        entry(3, "a")._replace(call_id="c"),
        entry(4, "a"),
        waiting(5, "b", is_visit=True),
    )
    everything = Ask("t", "a", sequence=4, call_id="c", request_state="s", is_next_leg=True)
    steps = [
        (everything, (Via.PIN, 4)),
        (everything._replace(sequence=None), (Via.ROUND, 2)),
        (everything._replace(sequence=None, request_state="unknown"), (Via.CALL_ID, 3)),
        (everything._replace(sequence=None, request_state=None), (Via.CALL_ID, 3)),
        (Ask("t", "a", is_next_leg=True), (Via.ROUND, 2)),
        (Ask("t", "b", call_id="c"), (Via.CALL_ID, 3)),
        (Ask("t", "b", call_id="unknown"), (Via.ROUND, 5)),
        (Ask("t", "a"), (Via.ORDERED, 1)),
    ]
    for ask, expected in steps:
        place = locate(ask, fresh(Unpinned.ORDERED), shelf)
        assert (place.via, place.sequence) == expected
        assert place.entry == shelf.entry("w", place.sequence)


@pytest.mark.parametrize("unpinned", Unpinned)
def test_with_nothing_on_record_every_call_is_new(unpinned: Unpinned) -> None:
    asks = [A, Ask("t", "a", call_id="c"), Ask("t", "a", request_state="s", is_next_leg=True)]
    for ask in asks:
        assert locate(ask, fresh(unpinned), Shelf()) == Place("w", 1, None, Via.NEW)


def test_a_new_call_is_behind_the_last_row_and_equal_ones_are_distinct() -> None:
    shelf = Shelf(entry(1), entry(7))
    assert locate(A, fresh(), shelf) == Place("w", 8, None, Via.NEW)


# ---------------------------------------------------------------------------------------------------------------- pins


def test_a_pin_means_the_row_that_the_current_branch_sees() -> None:
    shelf = Shelf(entry(2), entry(3), entry(3, "b", workflow_id="w~1"))
    progress = fresh(family=FORKED)
    assert locate(Ask("t", "a", 2), progress, shelf) == Place("w", 2, shelf.entry("w", 2), Via.PIN)
    assert locate(Ask("t", "a", 3), progress, shelf) == Place("w~1", 3, shelf.entry("w~1", 3), Via.PIN)
    assert locate(Ask("t", "a", 1), progress, shelf) == Place("w", 1, None, Via.PIN), "the ancestor's, also when empty"
    assert locate(Ask("t", "a", 3), fresh(family=FORKED, branch="w"), shelf).workflow_id == "w"


# --------------------------------------------------------------------------------------------------------------- rounds


def test_a_leg_continues_the_round_whose_state_it_brings() -> None:
    shelf = Shelf(waiting(1, "a", "s1"), waiting(2, "a", "s2"))
    assert locate(Ask("t", "a", request_state="s2", is_next_leg=True), fresh(), shelf).sequence == 2


def test_a_leg_without_a_known_state_continues_the_oldest_round_of_its_signature() -> None:
    shelf = Shelf(waiting(1, "b", "s1"), waiting(2, "a", "s2"), waiting(3, "a", "s3"))
    for state in (None, "unknown"):
        assert locate(Ask("t", "a", request_state=state, is_next_leg=True), fresh(), shelf).sequence == 2


def test_of_two_rounds_with_one_state_the_one_of_the_same_call_is_meant() -> None:
    shelf = Shelf(waiting(1, "b", "s"), waiting(2, "a", "s"))
    assert locate(Ask("t", "a", request_state="s", is_next_leg=True), fresh(), shelf).sequence == 2
    assert locate(Ask("t", "c", request_state="s", is_next_leg=True), fresh(), shelf).sequence == 1, "which diverges"


def test_a_leg_that_is_sent_again_belongs_to_its_closed_round_and_not_to_another_of_the_same_call() -> None:
    shelf = Shelf(entry(1, "a"), waiting(2, "a", "s2"), states={"s1": 1})
    assert locate(Ask("t", "a", request_state="s1", is_next_leg=True), fresh(), shelf).sequence == 1


def test_of_several_calls_that_gave_one_state_the_hosts_id_tells_which_is_meant() -> None:
    closed = entry(1, "a")._replace(call_id="x")
    shelf = Shelf(closed, waiting(2, "a", "s"), states={"s": 1})
    leg = Ask("t", "a", request_state="s", is_next_leg=True)
    assert locate(leg, fresh(), shelf).sequence == 2
    assert locate(leg._replace(call_id="x"), fresh(), shelf).sequence == 1
    assert locate(leg._replace(call_id="y"), fresh(), shelf).sequence == 2
    shelf.states = {}
    assert locate(leg._replace(call_id="x"), fresh(), shelf).sequence == 2, "a state is more than an id"


def test_the_very_same_call_continues_a_round_only_after_the_error_that_says_so() -> None:
    assert locate(A, fresh(), Shelf(waiting(1, "a", "s"))).via is Via.NEW
    assert locate(B, fresh(), Shelf(waiting(1, "a", is_visit=True))).via is Via.NEW
    assert locate(A, fresh(), Shelf(waiting(1, "a"), waiting(2, "a", is_visit=True))).sequence == 2


def test_rounds_of_another_branch_are_not_continued() -> None:
    shelf = Shelf(waiting(3, "a", "s"), states={"s": 3})
    ask = Ask("t", "a", request_state="s", is_next_leg=True)
    assert locate(ask, fresh(family=FORKED), shelf).via is Via.NEW
    assert locate(ask, fresh(family=FORKED, branch="w"), shelf).sequence == 3


# ------------------------------------------------------------------------------------------------------------ call ids


def test_a_host_id_means_its_row_on_whatever_branch_of_the_family() -> None:
    shelf = Shelf(
        entry(5, "a")._replace(call_id="c"), entry(9, "a", workflow_id="other")._replace(call_id="d"), entry(1)
    )
    found = locate(Ask("t", "b", call_id="c"), fresh(family=FORKED), shelf)
    assert found == Place("w", 5, shelf.entry("w", 5), Via.CALL_ID)
    assert locate(Ask("t", "a", call_id="d"), fresh(family=FORKED), shelf).via is Via.NEW


def test_the_id_of_a_call_that_was_answered_from_anothers_row_is_bound_to_it() -> None:
    shelf, progress = Shelf(entry(1)._replace(call_id="old"), entry(2)), fresh(Unpinned.MATCHED)
    ask = Ask("t", "a", call_id="new")
    assert walk(shelf, progress, ask, ask) == [(Via.MATCHED, 1), (Via.CALL_ID, 1)]
    assert locate(Ask("t", "a", call_id="old"), progress, shelf).via is Via.CALL_ID
    assert locate(Ask("t", "a", call_id="new"), fresh(), shelf).via is Via.NEW, "not for longer than the process lives"


def test_an_id_is_bound_to_no_draft_that_was_withdrawn() -> None:
    progress = fresh()
    progress.bind(Place("w", 4, entry(4), Via.PIN), Ask("t", "a", call_id="c"))
    progress.bind(Place("w", 5, entry(5), Via.PIN), Ask("t", "a", call_id="d"))
    progress.unbind(entry(4))
    assert set(progress.bound) == {"d"}


def test_an_id_is_not_bound_to_a_row_that_was_never_written() -> None:
    progress = fresh()
    progress.bound["c"] = Bound("w", 4, "a")
    assert locate(Ask("t", "a", call_id="c"), progress, Shelf()).via is Via.NEW
    assert locate(Ask("t", "a", call_id="c"), progress, Shelf(entry(4, "b"))).via is Via.NEW, "another took its place"
    assert locate(Ask("t", "b", call_id="c"), progress, Shelf(entry(4, "a"))).via is Via.CALL_ID, "which diverges"


def test_ids_whose_row_carries_them_are_not_remembered_too() -> None:
    progress = fresh()
    walk(Shelf(entry(1)._replace(call_id="c")), progress, Ask("t", "a", call_id="c"), Ask("t", "a", call_id="d"))
    assert progress.bound == {}


# -------------------------------------------------------------------------------------------------------------- ordered


def test_ordered_walks_from_the_first_row_and_past_the_end_calls_are_new() -> None:
    shelf, progress = Shelf(entry(1), entry(4, "b")), fresh(Unpinned.ORDERED)
    assert walk(shelf, progress, A, B) == [(Via.ORDERED, 1), (Via.ORDERED, 4)]
    assert walk(shelf, progress, A) == [(Via.NEW, 5)]


def test_ordered_stays_at_a_row_that_was_refused() -> None:
    shelf, progress = Shelf(entry(1, "x"), entry(2)), fresh(Unpinned.ORDERED)
    assert locate(A, progress, shelf).sequence == 1
    assert locate(A, progress, shelf).sequence == 1


def test_a_draft_takes_its_place_from_nobody_for_good() -> None:
    """A place counts when its row is on disk: a draft that is withdrawn leaves all as it was."""
    shelf, progress = Shelf(entry(1), entry(2, "b", Status.PENDING), entry(3)), fresh(Unpinned.ORDERED)
    assert walk(shelf, progress, A) == [(Via.ORDERED, 1)]
    assert locate(A, progress, shelf).sequence == 3, "another call is on its way at 2"
    shelf.entries["w", 2] = entry(2, "b", Status.NOT_EXECUTED)
    assert walk(shelf, progress, B, A) == [(Via.ORDERED, 2), (Via.ORDERED, 3)]


@pytest.mark.parametrize("status", [Status.NOT_SENT, Status.NOT_EXECUTED])
def test_a_row_of_which_nothing_is_in_the_world_holds_up_nobody_and_waits_for_its_own_call(status: Status) -> None:
    shelf, progress = Shelf(entry(1, "c", status), entry(2, "a"), entry(3, "b")), fresh(Unpinned.ORDERED)
    assert walk(shelf, progress, A, B) == [(Via.ORDERED, 2), (Via.ORDERED, 3)]
    assert walk(shelf, progress, A) == [(Via.NEW, 4)]
    c = Ask("t", "c")
    assert walk(shelf, progress, c) == [(Via.ORDERED, 1)]
    assert locate(c, progress, shelf).via is Via.NEW, "once"


def test_who_got_no_answer_from_a_place_means_it_again_and_nobody_else_does() -> None:
    shelf, progress = Shelf(entry(1), entry(2, "b"), entry(3)), fresh(Unpinned.ORDERED)
    walk(shelf, progress, A, B, A)
    progress.released(entry(2, "b"))
    assert locate(A, progress, shelf).via is Via.NEW
    assert walk(shelf, progress, B) == [(Via.ORDERED, 2)]
    assert locate(B, progress, shelf).via is Via.NEW
    progress.released(entry(2, "b"))
    assert locate(B, fresh(Unpinned.NEW), shelf).via is Via.NEW


def test_a_place_whose_row_was_not_written_is_filled_by_the_call_that_it_was_for() -> None:
    """Behind it others went on: at the end it would be out of order in the next life."""
    shelf, progress = Shelf(entry(1), entry(3, "b")), fresh(Unpinned.ORDERED)
    walk(shelf, progress, A, B)
    progress.released(entry(2, "c"))
    assert locate(A, progress, shelf).sequence == 4
    assert locate(Ask("t", "c"), progress, shelf) == Place("w", 2, None, Via.ORDERED)


def test_a_pin_that_got_no_answer_leaves_its_row_to_whoever_is_next() -> None:
    shelf, progress = Shelf(entry(1, status=Status.NOT_SENT), entry(2, "b")), fresh(Unpinned.ORDERED)
    walk(shelf, progress, Ask("t", "a", 1))
    progress.released(entry(1))
    assert walk(shelf, progress, A, B) == [(Via.ORDERED, 1), (Via.ORDERED, 2)]


def test_what_was_left_on_another_branch_is_not_meant() -> None:
    shelf, progress = Shelf(entry(3, workflow_id="w~1")), fresh(Unpinned.ORDERED, FORKED)
    progress.released(entry(3))
    assert locate(A, progress, shelf) == Place("w~1", 3, shelf.entry("w~1", 3), Via.ORDERED)


def test_ordered_walks_the_line_of_the_branch() -> None:
    shelf = Shelf(entry(1), entry(2), entry(3), entry(3, "b", workflow_id="w~1"), entry(4, workflow_id="w~1"))
    progress = fresh(Unpinned.ORDERED, FORKED)
    places = []
    for _ in range(4):
        place = locate(A, progress, shelf)
        progress.passed(place, A)
        places.append((place.workflow_id, place.sequence))
    assert places == [("w", 1), ("w", 2), ("w~1", 3), ("w~1", 4)]


def test_rows_that_pins_took_are_passed_over_and_pins_move_no_cursor() -> None:
    shelf, progress = Shelf(entry(1), entry(2), entry(3)), fresh(Unpinned.ORDERED)
    assert walk(shelf, progress, Ask("t", "a", 3), Ask("t", "a", 1), A) == [
        (Via.PIN, 3),
        (Via.PIN, 1),
        (Via.ORDERED, 2),
    ]
    assert locate(A, progress, shelf).via is Via.NEW


# -------------------------------------------------------------------------------------------------------------- matched


def test_matched_takes_the_earliest_finished_row_of_the_same_call_and_each_once() -> None:
    shelf, progress = Shelf(entry(1, "b"), entry(2), entry(3, "b"), entry(4)), fresh(Unpinned.MATCHED)
    assert walk(shelf, progress, A, B, A, B) == [(Via.MATCHED, 2), (Via.MATCHED, 1), (Via.MATCHED, 4), (Via.MATCHED, 3)]
    assert locate(A, progress, shelf) == Place("w", 5, None, Via.NEW)


@pytest.mark.parametrize("status", Status)
def test_matched_takes_no_row_that_is_not_finished(status: Status) -> None:
    is_finished = status in (Status.COMPLETED, Status.FAILED, Status.TASK)
    found = locate(A, fresh(Unpinned.MATCHED), Shelf(entry(1, status=status), entry(2)))
    assert found.sequence == (1 if is_finished else 2)


def test_matched_does_not_take_a_row_that_a_pin_took() -> None:
    shelf, progress = Shelf(entry(1), entry(2)), fresh(Unpinned.MATCHED)
    assert walk(shelf, progress, Ask("t", "a", 1), A) == [(Via.PIN, 1), (Via.MATCHED, 2)]


def test_matched_does_not_look_again_at_what_it_has_used() -> None:
    shelf, progress = Shelf(*map(entry, range(1, 50))), fresh(Unpinned.MATCHED)
    looked: list[int] = []
    with_signature = shelf.with_signature
    shelf.with_signature = lambda *values, **more: (looked.append(values[2]), with_signature(*values, **more))[1]  # type: ignore[method-assign,func-returns-value]
    walk(shelf, progress, *[A] * 49)
    assert looked == list(range(49))


def test_matched_looks_along_the_line_of_the_branch() -> None:
    shelf = Shelf(entry(2), entry(3), entry(4, workflow_id="w~1"))
    assert walk(shelf, fresh(Unpinned.MATCHED, FORKED), A, A, A) == [(Via.MATCHED, 2), (Via.MATCHED, 4), (Via.NEW, 5)]


def test_a_row_that_an_operator_settled_meanwhile_is_matched_after_all() -> None:
    shelf, progress = Shelf(entry(1, status=Status.IN_DOUBT), entry(2)), fresh(Unpinned.MATCHED)
    assert walk(shelf, progress, A) == [(Via.MATCHED, 2)]
    shelf.entries["w", 1] = entry(1)
    progress.follow(Family("w"))  # the journal was read again
    assert walk(shelf, progress, A, A) == [(Via.MATCHED, 1), (Via.NEW, 3)]


def test_undelivered_takes_only_rows_whose_answer_was_not_read() -> None:
    shelf = Shelf(entry(1), entry(2), entry(3), undelivered=[2])
    assert walk(shelf, fresh(Unpinned.UNDELIVERED), A, A) == [(Via.MATCHED, 2), (Via.NEW, 4)]


# ------------------------------------------------------------------------------------------------------------- progress


def test_only_what_this_history_holds_counts_as_reached() -> None:
    progress = fresh(family=FORKED)
    progress.passed(Place("w", 9, None, Via.CALL_ID), A)
    assert progress.reached == 0
    progress.passed(Place("w~1", 4, None, Via.PIN), A)
    progress.passed(Place("w", 2, None, Via.PIN), A)
    assert progress.reached == 4


def test_what_is_not_needed_is_not_remembered() -> None:
    progress = fresh()
    walk(Shelf(entry(1)), progress, Ask("t", "a", 1), Ask("t", "a", 2, call_id="c"), A)
    assert (progress.used, progress.bound, progress.matched) == (set(), {}, {})
