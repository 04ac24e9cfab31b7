"""One turn of the loop: what became ready in it is committed together, and only then let out, in order.

This is where the promise is kept. Lines that wait for the disk are held with the facts they wait for; `Turn` appends
all facts of a turn in one commit and then fills the lines in. Nothing else writes a held line.
"""

import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from journal import Journal, JournalBusy, JournalFailed
from states import Answered, Delivered, Dispatched, Doubted, Entry, Fact, TaskEnded
from storage import JournalError

_log = logging.getLogger("checkpoint.turn")

WAIT_S: Final = 5.0  # how long a call waits for the journal's lock, or for another program that holds the database
RETRY_S: Final = 0.02  # nothing tells when a lock becomes free, so it is tried again


class Sink(Protocol):
    """Where lines go."""

    @property
    def queued_bytes(self) -> int:
        """How much was not taken yet."""

    @property
    def taken_bytes(self) -> int:
        """How much was taken."""

    def writelines(self, lines: Sequence[bytes], /) -> None:
        """Writes lines in order, without waiting."""

    def unread_bytes(self) -> int | None:
        """How much of what was taken its reader has not read; None where the system does not tell."""

    @property
    def tells_unread(self) -> bool:
        """Whether `unread_bytes` is known, which costs nothing to ask."""


class Handle(Protocol):
    """A callback that is due."""

    def cancel(self) -> None:
        """Lets it be."""


class Scheduler(Protocol):
    """What the relay needs of an event loop."""

    def time(self) -> float:
        """Seconds on a clock that never goes back."""

    def at_turn_end(self, callback: Callable[[], None], /) -> None:
        """Runs `callback` once all that is ready now was handed out."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Handle:
        """Runs `callback` in `delay` seconds."""


class Riders(Protocol):
    """Facts that are worth no commit of their own: they go along with the next one."""

    def facts(self) -> Sequence[Fact]:
        """Those that are not on disk."""

    def are_on_disk(self) -> None:
        """To be called once those that `facts` gave last are."""


class CrashDrill:
    """Kills this process at a named point of a call's life, to test what comes after (`--crash-at`)."""

    POINTS: Final[Mapping[str, type[Dispatched | Answered]]] = {  # and which facts are put on record there
        "before_reserve": Dispatched,
        "after_reserve": Dispatched,
        "mid_upstream": Dispatched,
        "before_complete": Answered,
        "after_complete": Answered,
    }

    def __init__(self, point: str | None = None, sequence: int | None = None) -> None:
        self._point = point
        self._sequence = sequence

    def __bool__(self) -> bool:
        """Whether there is a drill at all."""
        return self._point is not None

    def is_at(self, point: str, facts: Iterable[Fact]) -> bool:
        """Whether the drill is for this point of a call that one of the facts is about."""
        return self._point == point and any(
            isinstance(fact, self.POINTS[point]) and self._sequence in (None, fact.entry.sequence) for fact in facts
        )

    def reach(self, points: Iterable[str], facts: Iterable[Fact]) -> None:
        """Ends the process if the drill is for one of these points."""
        if any(self.is_at(point, facts) for point in points):
            self.kill()

    def kill(self) -> None:
        """Ends the process the way a power cut or the OOM killer does."""
        os.kill(os.getpid(), signal.SIGKILL)


class Slot:
    """A place in a direction's order for lines that are not known yet."""

    __slots__ = ("_lane", "is_open", "lines", "position")

    def __init__(self, lane: "Lane") -> None:
        self._lane = lane
        self.is_open = True
        self.lines: list[bytes] = []
        self.position: int | None = None  # of its first byte in the stream, once it is on its way

    @property
    def is_filled(self) -> bool:
        """Whether a line is on its way."""
        return bool(self.lines) or self.position is not None

    def fill(self, line: bytes) -> None:
        """Puts a line in this place, behind those that are in it; once the place is given up, at the end."""
        if self.is_open:
            self.lines.append(line)
            return
        if self.position is None:
            self.position = self._lane.position
        self._lane.send_late(line)

    def refill(self, line: bytes) -> None:
        """Sends a line once more, at the end; the first time nobody can have read it."""
        self.position = None
        self.fill(line)


class Lane:
    """One direction, in order: what waits for the disk keeps its place until the end of the turn.

    A slot that is still empty then (another program holds the database) is overtaken; its lines go out when they come.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: list[bytes | Slot] = []

    @property
    def position(self) -> int:
        """How many bytes went this way, those included that the sink still holds."""
        return self._sink.taken_bytes + self._sink.queued_bytes

    @property
    def is_clear(self) -> bool:
        """Whether nothing waits here for the disk or for the end of the turn."""
        return not self._waiting

    def send(self, line: bytes) -> None:
        """Writes a line behind all that was sent or held before it."""
        if self._waiting:
            self._waiting.append(line)
        else:
            self._sink.writelines((line,))

    def send_late(self, line: bytes) -> None:
        """Writes a line that is older than all that waits."""
        self._sink.writelines((line,))

    def hold(self) -> Slot:
        """Keeps a place for lines to come."""
        slot = Slot(self)
        self._waiting.append(slot)
        return slot

    def flush(self) -> None:
        """Writes all that waits; places that are still empty are given up."""
        if not self._waiting:
            return
        position = self.position
        lines: list[bytes] = []
        for item in self._waiting:
            if isinstance(item, bytes):
                added = [item]
            else:
                item.is_open = False
                added, item.lines = item.lines, []
                if added:
                    item.position = position
            lines += added
            position += sum(map(len, added))
        self._waiting.clear()
        if lines:
            self._sink.writelines(lines)


_OF_AN_ATTEMPT: Final = (Dispatched, Answered, Doubted, TaskEnded)

WhenOnDisk = Callable[[Slot], None]
WhenRefused = Callable[[Slot, JournalError], None]


class _Held(NamedTuple):
    """Facts that must be on disk before the lines of a slot go out."""

    slot: Slot
    facts: Sequence[Fact]
    when_on_disk: WhenOnDisk
    when_refused: WhenRefused
    deadline: float
    lane: Lane
    size: int  # bytes of the line that waits

    def speaks_of(self, dispatches: Collection[int]) -> bool:
        """Whether it holds a fact about one of these attempts."""
        return any(isinstance(fact, _OF_AN_ATTEMPT) and fact.entry.id in dispatches for fact in self.facts)


class Turn:
    """Both directions of a relay, and the commit between them.

    `on_change` is called at the end of each turn: more may be read then, and maybe nothing waits any more.
    """

    def __init__(
        self,
        journal: Journal | None,
        to_upstream: Sink,
        to_downstream: Sink,
        loop: Scheduler,
        crash_drill: CrashDrill,
        on_change: Callable[[], None],
        riders: Riders | None = None,
    ) -> None:
        self._journal = journal
        self._riders = riders
        self._to_upstream = to_upstream
        self._to_downstream = to_downstream
        self.up = Lane(to_upstream)
        self.down = Lane(to_downstream)
        self._loop = loop
        self._drill = crash_drill or None  # most often there is none, and it would be asked in the life of every call
        self._on_change = on_change
        self._held: list[_Held] = []
        self._leaving: list[int] = []  # dispatches whose answers are written by the end of this turn
        self._unread: list[int] = []  # their answers were written, and are not read yet
        self._read: list[int] = []  # their answers were read; the next commit says so
        self.is_due = False  # whether anything waits for the disk or for the end of the turn
        self._retry: Handle | None = None  # another program holds the database
        self.owes_replies = False  # lines of our own making may be stuck on their way down
        self.is_crashing = False  # at mid_upstream: what upstream says now must not be read

    @property
    def ends_soon(self) -> bool:
        """Whether its end comes with that of what is ready now, and not once another program lets the database go."""
        return self.is_due and self._retry is None

    def waiting_bytes(self, lane: Lane) -> int:
        """The size of the lines for one direction that wait for the disk."""
        return sum(held.size for held in self._held if held.lane is lane)

    def hold(
        self, lane: Lane, facts: Sequence[Fact], size: int, when_on_disk: WhenOnDisk, when_refused: WhenRefused
    ) -> Slot:
        """Keeps a place for lines, and leaves what must be on disk before them for the commit at the end of this turn.

        One of the two is called then, or later, to fill the place.
        """
        held = _Held(lane.hold(), facts, when_on_disk, when_refused, self._loop.time() + WAIT_S, lane, size)
        self._held.append(held)
        if not self.is_due:
            self.is_due = True
            self._loop.at_turn_end(self.end)
        return held.slot

    def record(self, facts: Sequence[Fact]) -> None:
        """Leaves facts that no line waits for to the commit at the end of this turn."""
        self.hold(self.up, facts, 0, _let_be, _let_be)

    def reply(self, line: bytes) -> None:
        """Sends a line of our own making downstream."""
        self.owes_replies = True
        self.down.send(line)
        self.when_written()

    def answered(self, entry: Entry) -> None:
        """Notes that the answer to a call is on its way down. Once it was read, a mark rides in the next commit."""
        (self._unread if self.down.is_clear else self._leaving).append(entry.id)

    def heard_from_downstream(self) -> None:
        """To be called when downstream says something: where the system does not tell, that is how we know it reads."""
        if self._unread and not self._to_downstream.tells_unread:
            self._see_read()

    def _see_read(self) -> None:
        """Counts what was written as read, if all of it is taken and the system does not say that some is unread."""
        sink = self._to_downstream
        if not sink.queued_bytes and not sink.unread_bytes():
            self._read += self._unread
            self._unread.clear()

    def _append(self, journal: Journal, facts: Sequence[Fact]) -> None:
        """Commits facts, and along with them what is worth no commit of its own."""
        if self._unread and self._to_downstream.tells_unread:
            self._see_read()
        riders = self._riders
        if riders is not None and not (journal.has_dispatched or any(isinstance(fact, Dispatched) for fact in facts)):
            riders = None  # who owns no journal sends nothing from it: what rode there would wait for the next owner
        riding = riders.facts() if riders is not None else ()
        if not (facts or self._read or riding):
            return
        journal.append([*facts, *map(Delivered, self._read), *riding])
        self._read.clear()
        if riders is not None:
            riders.are_on_disk()

    def commit_riders(self) -> None:
        """Records what waits for the next commit, for once with one of its own; for when nobody waits for that."""
        if self._journal is not None and self._journal.has_dispatched:
            with contextlib.suppress(JournalError):  # one replay more or one report twice, if it is missing
                self._append(self._journal, ())

    def withdraw(self, entry: Entry) -> None:
        """Takes back the facts about a call that is not to be dispatched any more; their places stay empty."""
        if self._held:
            self._held = [held for held in self._held if not held.speaks_of((entry.id,))]

    def end(self) -> None:
        """Commits what became ready, then lets out what waited for it. To be called early, or in vain, does no harm."""
        self.is_due = False
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._commit()
        self.up.flush()
        self.down.flush()
        self._unread += self._leaving
        self._leaving.clear()
        self.when_written()
        self._tidy()
        self._on_change()

    def _commit(self) -> None:
        facts = [fact for held in self._held for fact in held.facts]
        drill = self._drill
        if drill is not None:
            drill.reach(("before_reserve", "before_complete"), facts)
        try:
            if facts and self._journal is not None:
                self._append(self._journal, facts)
        except JournalBusy as error:
            self._wait_for_database(error)
            return
        except JournalFailed as error:
            _log.error("%s; calls are refused until the next start", error)
            for held in self._take_held():
                held.when_refused(held.slot, error)
            return
        if drill is not None:
            drill.reach(("after_reserve", "after_complete"), facts)
            self.is_crashing |= drill.is_at("mid_upstream", facts)
        for held in self._take_held():
            held.when_on_disk(held.slot)

    def _take_held(self) -> list[_Held]:
        held, self._held = self._held, []
        return held

    def _wait_for_database(self, error: JournalBusy) -> None:
        """Another program holds the database: what has waited too long is refused, the rest is tried again."""
        now = self._loop.time()
        late = [held for held in self._held if held.deadline <= now]
        kept = [held for held in self._held if held.deadline > now]
        for held in late:
            held.when_refused(held.slot, error)
            if held.facts:  # what upstream said stays true after its client was told otherwise: it is still recorded
                kept.append(held._replace(when_on_disk=_let_be, when_refused=_let_be, deadline=math.inf, size=0))
        refused = {fact.entry.id for held in late for fact in held.facts if isinstance(fact, Dispatched)}
        self._held = [held for held in kept if not held.speaks_of(refused)]  # never dispatched, so without any facts
        if self._held:
            self.is_due = True
            self._retry = self._loop.call_later(RETRY_S, self.end)

    def _tidy(self) -> None:
        """The journal's housekeeping, once what waited for the commit is on its way."""
        if self._journal is None:
            return
        try:
            self._journal.tidy()
        except JournalBusy:
            return  # a reader is in the way; after the next commit it is tried again
        except JournalFailed as error:
            _log.error("%s; calls are refused until the next start", error)

    def when_written(self) -> None:
        """To be called when a sink may have taken all that was queued."""
        if not self._to_downstream.queued_bytes and not self.is_due:
            self.owes_replies = False
        if self._drill is not None and self.is_crashing and not self._to_upstream.queued_bytes:
            self._drill.kill()  # at mid_upstream: the call has left us whole


def _let_be(*_: object) -> None:
    """For facts whose line went out otherwise."""
