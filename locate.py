"""Which place a call means. Pure, but for the records that it asks.

The first of five answers that applies: the call's own pin, the open round that it goes on with, the id under which its
host knows it, what `--unpinned` says, and else a new place. Only this module knows the order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Final, NamedTuple, Protocol

from branches import Family
from states import Entry, Round, Status

_FINISHED: Final = (Status.COMPLETED, Status.FAILED, Status.TASK)


class Unpinned(StrEnum):
    """Which calls without a pin the journal may answer (`--unpinned`)."""

    NEW = "new"  # none
    ORDERED = "ordered"  # the next row, if it is this call
    MATCHED = "matched"  # the earliest row of an earlier process that is this call, each once
    UNDELIVERED = "undelivered"  # likewise, if its answer was not read


class Via(StrEnum):
    """How a call found its place."""

    PIN = "pin"
    ROUND = "round"
    CALL_ID = "call id"
    ORDERED = "ordered"
    MATCHED = "matched"
    NEW = "new"


class Ask(NamedTuple):
    """What a call says of itself."""

    tool_name: str
    signature: str
    sequence: int | None = None  # its pin
    call_id: str | None = None  # its host's own id of it
    request_state: str | None = None  # as a hash
    is_next_leg: bool = False


class Place(NamedTuple):
    """Where a call belongs, and what is on record there."""

    workflow_id: str  # the one that owns the place
    sequence: int
    entry: Entry | None
    via: Via


class Bound(NamedTuple):
    """The row that answered a call whose host knows it by an id that the row does not carry."""

    workflow_id: str
    sequence: int
    signature: str


class Records(Protocol):
    """What is on record, of any branch. A place is a workflow and a sequence in it."""

    def entry(self, workflow_id: str, sequence: int) -> Entry | None:
        """What a place holds."""

    def next_sequence(self, workflow_id: str, after: int, below: int | None) -> int | None:
        """The first row's sequence behind `after` and before `below`."""

    def last_sequence(self, workflow_id: str) -> int:
        """The last row's sequence; 0 where there is none."""

    def with_call_id(self, call_id: str) -> Iterable[tuple[str, int]]:
        """The places that a host knows by an id, the last that it gave it to first."""

    def with_signature(
        self, workflow_id: str, signature: str, after: int, below: int | None, *, is_undelivered: bool
    ) -> Iterable[int]:
        """Where earlier processes made a call, behind `after` and before `below`, in order."""

    def rounds(self) -> Iterable[Round]:
        """The calls that wait for input, the oldest first."""

    def with_state(self, state: str, signature: str) -> Iterable[tuple[str, int]]:
        """The places of a call that ever gave a state, the last to do so first."""


@dataclass(slots=True)
class Progress:
    """How far this process is in one root workflow. Changed only by `follow` and `passed`."""

    family: Family
    branch: str  # the current one
    unpinned: Unpinned = Unpinned.NEW
    reached: int = 0  # the highest place of this history that was replayed or dispatched
    cursor: int = 0  # for `ordered`: the last place that an unpinned call took
    used: set[tuple[str, int]] = field(default_factory=set)  # places that other calls took; not needed for `new`
    matched: dict[str, int] = field(default_factory=dict)  # for `matched`: by signature, the last place that was used
    bound: dict[str, Bound] = field(default_factory=dict)  # host ids that were answered from another's row

    def sees(self, place: tuple[str, int]) -> bool:
        """Whether a place is part of the current branch's history."""
        workflow_id, sequence = place
        return self.family.owner(self.branch, sequence) == workflow_id

    def follow(self, family: Family) -> None:
        """Takes the family as it is now: while another process had the journal, it may have added and settled rows."""
        if family is not self.family:
            self.family = family
            self.matched.clear()

    def passed(self, place: Place, ask: Ask) -> None:
        """Notes that a call was answered from, joined to, or dispatched at a place."""
        at, via = (place.workflow_id, place.sequence), place.via
        if self.sees(at):
            self.reached = max(self.reached, place.sequence)
        if via in (Via.ORDERED, Via.NEW):
            self.cursor = max(self.cursor, place.sequence)
        elif self.unpinned is not Unpinned.NEW:
            self.used.add(at)
        if via is Via.MATCHED:
            self.matched[ask.signature] = place.sequence
        is_anothers = place.entry is not None and place.entry.call_id != ask.call_id
        if ask.call_id is not None and via is not Via.CALL_ID and is_anothers:
            self.bound[ask.call_id] = Bound(*at, ask.signature)


def locate(ask: Ask, progress: Progress, records: Records) -> Place:
    """The place that a call means; a new one, with no row, where nothing on record is meant."""
    return (
        _by_pin(ask, progress, records)
        or _by_round(ask, progress, records)
        or _by_call_id(ask, progress, records)
        or _by_order(progress, records)
        or _by_match(ask, progress, records)
        or Place(progress.branch, records.last_sequence(progress.branch) + 1, None, Via.NEW)
    )


def _by_pin(ask: Ask, progress: Progress, records: Records) -> Place | None:
    if ask.sequence is None:
        return None
    return _at(records, progress.family.owner(progress.branch, ask.sequence), ask.sequence, Via.PIN)


def _by_round(ask: Ask, progress: Progress, records: Records) -> Place | None:
    """The call that this one goes on with, which upstream wanted input for."""
    rounds = [one for one in records.rounds() if progress.sees(one.place)]
    if ask.is_next_leg:
        found = _by_state(ask, progress, records, rounds)
        return _at(records, *found, Via.ROUND) if found else None
    # After -32042 the very same call is sent again, with nothing in it that says so.
    same = next((one for one in rounds if one.is_repeated and one.signature == ask.signature), None)
    return _at(records, *same.place, Via.ROUND) if same else None


def _by_state(ask: Ask, progress: Progress, records: Records, rounds: Iterable[Round]) -> tuple[str, int] | None:
    """Where a further leg belongs: to the state that it brings back, else to the oldest round of its signature.

    A state that another round of the same call gave, open or closed, is not taken for one of this: it was used there.
    """
    state, same = ask.request_state, [one for one in rounds if one.signature == ask.signature]
    given: Iterable[tuple[str, int]] = ()
    if state is not None:
        given = chain(
            (one.place for one in same if one.state == state),
            filter(progress.sees, records.with_state(state, ask.signature)),
            (one.place for one in rounds if one.state == state),
        )
    return next(chain(given, (one.place for one in same)), None)


def _by_call_id(ask: Ask, progress: Progress, records: Records) -> Place | None:
    """A host that sends an id again is retrying; what it was answered from then is what it means now."""
    if ask.call_id is None:
        return None
    bound = progress.bound.get(ask.call_id)
    if bound is not None:
        place = _at(records, bound.workflow_id, bound.sequence, Via.CALL_ID)
        if place.entry is not None and place.entry.signature == bound.signature:  # else that row was never written
            return place
    known = (place for place in records.with_call_id(ask.call_id) if place[0] in progress.family.members)
    found = next(known, None)
    return _at(records, *found, Via.CALL_ID) if found else None


def _by_order(progress: Progress, records: Records) -> Place | None:
    """The next row on record that no pinned call took."""
    if progress.unpinned is not Unpinned.ORDERED:
        return None
    after = progress.cursor
    while (following := _next_place(progress, records, after)) is not None:
        sequence, owner = following
        if (owner, sequence) not in progress.used:
            return _at(records, owner, sequence, Via.ORDERED)
        after = sequence
    return None


def _next_place(progress: Progress, records: Records, after: int) -> tuple[int, str] | None:
    """The first row of the current history behind a sequence: its own, and whose it is."""
    for owner, start, below in progress.family.line(progress.branch):
        sequence = records.next_sequence(owner, max(after, start - 1), below)
        if sequence is not None:
            return sequence, owner
    return None


def _by_match(ask: Ask, progress: Progress, records: Records) -> Place | None:
    """The earliest finished row of an earlier process that is this call and answered no other."""
    for owner, sequence in _matching(ask, progress, records):
        if (owner, sequence) not in progress.used:
            place = _at(records, owner, sequence, Via.MATCHED)
            if place.entry is not None and place.entry.status in _FINISHED:
                return place
    return None


def _matching(ask: Ask, progress: Progress, records: Records) -> Iterator[tuple[str, int]]:
    """Where earlier processes made this call, in order."""
    if progress.unpinned not in (Unpinned.MATCHED, Unpinned.UNDELIVERED):
        return
    is_undelivered = progress.unpinned is Unpinned.UNDELIVERED
    used_up = progress.matched.get(ask.signature, 0)
    for owner, start, below in progress.family.line(progress.branch):
        after = max(used_up, start - 1)
        for sequence in records.with_signature(owner, ask.signature, after, below, is_undelivered=is_undelivered):
            yield owner, sequence


def _at(records: Records, workflow_id: str, sequence: int, via: Via) -> Place:
    return Place(workflow_id, sequence, records.entry(workflow_id, sequence), via)
