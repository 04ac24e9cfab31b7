"""Which place a call means. Pure, but for the records that it asks.

The first of six answers that applies: the call's own pin, the very state that it brings back, the id under which its
host knows it, the open round that it seems to go on with, what `--unpinned` says, and else a new place. Only this
module knows the order: what is certain comes before what is guessed.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from heapq import merge
from itertools import chain
from typing import Final, NamedTuple, Protocol

from branches import Family
from states import VOID, Entry, Round, Status

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
    """What a call says of itself, its texts as SQLite can hold them."""

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
    passed_over: tuple[Entry, ...] = ()  # for `ordered`: rows before it of which nothing is in the world


class Bound(NamedTuple):
    """The row that answered a call whose host knows it by an id that the row does not carry."""

    workflow_id: str
    sequence: int
    signature: str


class OnRecord(Protocol):
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


class Progress:
    """How far this process is in one root workflow.

    A place counts once it has answered a call or its row is on disk, and never for a draft: what is refused before that
    leaves nothing behind to be undone. Changed only by the methods.
    """

    __slots__ = ("bound", "branch", "cursor", "family", "left", "matched", "parted", "reached", "unpinned", "used")

    def __init__(self, family: Family, branch: str, unpinned: Unpinned = Unpinned.NEW) -> None:
        self.family = family
        self.branch = branch  # the current one
        self.unpinned = unpinned
        self.reached = 0  # the highest place of this history that was replayed, or whose row is on disk
        self.cursor = 0  # for `ordered`: the last place that an unpinned call took
        self.left: dict[tuple[str, int], str] = {}  # for `ordered`: free for a call of this signature
        self.used: set[tuple[str, int]] = set()  # places that other calls took; not needed for `new`
        self.matched: dict[str, int] = {}  # for `matched`: by signature, the last place that was used
        self.parted: set[tuple[str, int]] = set()  # places that branches do not share, of those that count
        self.bound: dict[str, Bound] = {}  # host ids that were answered from another's row

    def sees(self, place: tuple[str, int]) -> bool:
        """Whether a place is part of the current branch's history."""
        workflow_id, sequence = place
        return self.family.owner(self.branch, sequence) == workflow_id

    def is_apart(self, other: str) -> bool:
        """Whether a place that counts shows that this process is on another history than a branch's."""
        parting = self.family.parting(self.branch, other)
        return parting is not None and (self.family.owner(self.branch, parting), parting) in self.parted

    def follow(self, family: Family) -> None:
        """Takes the family as it is now: while another process had the journal, it may have added and settled rows."""
        if family is not self.family:
            self.family = family
            self.matched.clear()

    def passed(self, place: Place, ask: Ask) -> None:
        """Notes that a call was answered from a place, or dispatched there and is on disk."""
        at, via = (place.workflow_id, place.sequence), place.via
        if self.sees(at):
            self.reached = max(self.reached, place.sequence)
        if place.sequence in self.family.partings:
            self.parted.add(at)
        if self.unpinned is Unpinned.ORDERED:
            self.left.pop(at, None)
            self.left.update((entry.place, entry.signature) for entry in place.passed_over)
        if via in (Via.ORDERED, Via.NEW):
            self.cursor = max(self.cursor, place.sequence)
        elif self.unpinned is not Unpinned.NEW:
            self.used.add(at)
        if via is Via.MATCHED:
            self.matched[ask.signature] = place.sequence

    def bind(self, place: Place, ask: Ask) -> None:
        """Notes under which id a host knows a row that answers its call, or will, and that another call made."""
        is_anothers = place.entry is not None and place.entry.call_id != ask.call_id
        if ask.call_id is not None and place.via is not Via.CALL_ID and is_anothers:
            self.bound[ask.call_id] = Bound(place.workflow_id, place.sequence, ask.signature)

    def released(self, entry: Entry) -> None:
        """Notes that a call which had a place got no answer from it: the same call means that place again.

        Else it would run a second time, now or in the next life, at another place: the cursor would be past this one.
        """
        if self.unpinned is Unpinned.ORDERED:
            self.used.discard(entry.place)
            self.left[entry.place] = entry.signature

    def unbind(self, entry: Entry) -> None:
        """Forgets which ids are bound to a row that was not written: another call may take its place."""
        self.bound = {call_id: bound for call_id, bound in self.bound.items() if bound[:2] != entry.place}


def locate(ask: Ask, progress: Progress, records: OnRecord) -> Place:
    """The place that a call means; a new one, with no row, where nothing on record is meant."""
    return (
        _by_pin(ask, progress, records)
        or _by_state(ask, progress, records)
        or _by_call_id(ask, progress, records)
        or _by_round(ask, progress, records)
        or _by_order(ask, progress, records)
        or _by_match(ask, progress, records)
        or _new(progress, records)
    )


def _by_pin(ask: Ask, progress: Progress, records: OnRecord) -> Place | None:
    if ask.sequence is None:
        return None
    return _at(records, progress.family.owner(progress.branch, ask.sequence), ask.sequence, Via.PIN)


def _by_state(ask: Ask, progress: Progress, records: OnRecord) -> Place | None:
    """The call that gave the state which this one brings back.

    A state that another round of the same call gave, open or closed, is not taken for one of this: it was used there.
    Where several gave the same, the host's own id tells which is meant.
    """
    state = ask.request_state
    if not ask.is_next_leg or state is None:
        return None
    rounds = [one for one in _rounds(progress, records) if one.state == state]
    given = chain(
        (one.place for one in rounds if one.signature == ask.signature),
        filter(progress.sees, records.with_state(state, ask.signature)),
        (one.place for one in rounds),
    )
    found = next(given, None)
    if found is None:
        return None
    known = _known(ask, progress, records)
    return _at(records, *(known if known is not None and known in given else found), Via.ROUND)


def _by_call_id(ask: Ask, progress: Progress, records: OnRecord) -> Place | None:
    """A host that sends an id again is retrying."""
    known = _known(ask, progress, records)
    return None if known is None else _at(records, *known, Via.CALL_ID)


def _known(ask: Ask, progress: Progress, records: OnRecord) -> tuple[str, int] | None:
    """The place that a host knows by an id: what its call was answered from then is what it means now."""
    if ask.call_id is None:
        return None
    bound = progress.bound.get(ask.call_id)
    if bound is not None:
        entry = records.entry(bound.workflow_id, bound.sequence)
        if entry is not None and entry.signature == bound.signature:  # else that row was never written
            return bound.workflow_id, bound.sequence
    return next((place for place in records.with_call_id(ask.call_id) if place[0] in progress.family.members), None)


def _by_round(ask: Ask, progress: Progress, records: OnRecord) -> Place | None:
    """The oldest open round of the same call, for one that brings input, or the round's next leg by itself.

    After -32042 the very same call is sent again, with nothing in it that says so.
    """
    same = (one for one in _rounds(progress, records) if one.signature == ask.signature)
    found = next((one for one in same if ask.is_next_leg or one.is_repeated), None)
    return None if found is None else _at(records, *found.place, Via.ROUND)


def _rounds(progress: Progress, records: OnRecord) -> Iterator[Round]:
    return (one for one in records.rounds() if progress.sees(one.place))


def _by_order(ask: Ask, progress: Progress, records: OnRecord) -> Place | None:
    """The next row that no other call took or is on its way with, whatever it is; past the last one a new place.

    A row of which nothing is in the world holds nobody up, but the call that it was made for.
    """
    if progress.unpinned is not Unpinned.ORDERED:
        return None
    passed_over: list[Entry] = []
    for owner, sequence in _in_turn(ask, progress, records):
        entry = records.entry(owner, sequence)
        if (owner, sequence) in progress.used or (entry is not None and entry.status is Status.PENDING):
            continue
        if entry is None or entry.signature == ask.signature or entry.status not in VOID:
            return Place(owner, sequence, entry, Via.ORDERED, tuple(passed_over))
        passed_over.append(entry)
    return _new(progress, records)._replace(passed_over=tuple(passed_over))


def _in_turn(ask: Ask, progress: Progress, records: OnRecord) -> Iterator[tuple[str, int]]:
    """The places that are next in order: those behind the cursor, and those before it that were left for this call."""
    left = (place for place, signature in progress.left.items() if signature == ask.signature and progress.sees(place))
    behind = rows_behind(progress.cursor, progress, records)
    return merge(sorted(left, key=_sequence_of), behind, key=_sequence_of)


def _sequence_of(place: tuple[str, int]) -> int:
    return place[1]


def rows_behind(after: int, progress: Progress, records: OnRecord) -> Iterator[tuple[str, int]]:
    """The places behind a sequence that have rows in the current history, in order."""
    for owner, start, below in progress.family.line(progress.branch):
        last = max(after, start - 1)
        while (following := records.next_sequence(owner, last, below)) is not None:
            last = following
            yield owner, following


def _new(progress: Progress, records: OnRecord) -> Place:
    return Place(progress.branch, records.last_sequence(progress.branch) + 1, None, Via.NEW)


def _by_match(ask: Ask, progress: Progress, records: OnRecord) -> Place | None:
    """The earliest finished row of an earlier process that is this call and answered no other."""
    for owner, sequence in _matching(ask, progress, records):
        if (owner, sequence) not in progress.used:
            place = _at(records, owner, sequence, Via.MATCHED)
            if place.entry is not None and place.entry.status in _FINISHED:
                return place
    return None


def _matching(ask: Ask, progress: Progress, records: OnRecord) -> Iterator[tuple[str, int]]:
    """Where earlier processes made this call, in order."""
    if progress.unpinned not in (Unpinned.MATCHED, Unpinned.UNDELIVERED):
        return
    is_undelivered = progress.unpinned is Unpinned.UNDELIVERED
    used_up = progress.matched.get(ask.signature, 0)
    for owner, start, below in progress.family.line(progress.branch):
        after = max(used_up, start - 1)
        for sequence in records.with_signature(owner, ask.signature, after, below, is_undelivered=is_undelivered):
            yield owner, sequence


def _at(records: OnRecord, workflow_id: str, sequence: int, via: Via) -> Place:
    return Place(workflow_id, sequence, records.entry(workflow_id, sequence), via)
