"""One turn of the loop: what became ready in it is committed together, and only then let out, in order.

This is where the promise is kept. Lines that wait for the disk are held with the facts they wait for; `Turn` appends
all facts of a turn in one commit and then fills the lines in. Nothing else writes a held line.
"""

import logging
import math
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from journal import Answered, Dispatched, Entry, Fact, Journal, JournalBusy, JournalFailed
from storage import JournalError

_log = logging.getLogger("checkpoint.turn")

WAIT_S: Final = 5.0  # how long a call waits for the journal's lock, or for another program that holds the database
RETRY_S: Final = 0.02  # nothing tells when a lock becomes free, so it is tried again


class Sink(Protocol):
    """Where lines go; `queued_bytes` were not taken yet, `taken_bytes` were."""

    queued_bytes: int
    taken_bytes: int

    def writelines(self, lines: Sequence[bytes], /) -> None:
        """Writes lines in order, without waiting."""


class Scheduler(Protocol):
    """What the relay needs of an event loop."""

    def time(self) -> float:
        """Seconds on a clock that never goes back."""

    def call_soon(self, callback: Callable[[], None], /) -> Any:
        """Runs `callback` in the next turn."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Any:
        """Runs `callback` in `delay` seconds."""


class CrashDrill:
    """Kills this process at a named point of a call's life, to test what comes after (`--crash-at`)."""

    POINTS: Final = ("before_reserve", "after_reserve", "mid_upstream", "before_complete", "after_complete")

    def __init__(self, point: str | None = None, sequence: int | None = None) -> None:
        self._point = point
        self._sequence = sequence

    def is_at(self, point: str, entries: Iterable[Entry]) -> bool:
        """Whether the drill is for this point of one of these calls."""
        return self._point == point and any(self._sequence in (None, entry.sequence) for entry in entries)

    def reach(self, point: str, entries: Iterable[Entry]) -> None:
        """Ends the process if the drill is for this point of one of these calls."""
        if self.is_at(point, entries):
            self.kill()

    def kill(self) -> None:
        """Ends the process the way a power cut or the OOM killer does."""
        os.kill(os.getpid(), signal.SIGKILL)


class Slot:
    """A place in a direction's order for lines that are not known yet."""

    __slots__ = ("is_open", "lines", "position")

    def __init__(self) -> None:
        self.is_open = True
        self.lines: list[bytes] = []
        self.position: int | None = None  # of its first byte in the stream, once it is on its way


class Lane:
    """One direction, in order: what waits for the disk keeps its place until the end of the turn.

    A slot that is still empty then (another program holds the database) is overtaken; its lines go out when they come.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: list[bytes | Slot] = []

    def send(self, line: bytes) -> None:
        """Writes a line behind all that was sent or held before it."""
        if self._waiting:
            self._waiting.append(line)
        else:
            self._sink.writelines((line,))

    def hold(self) -> Slot:
        """Keeps a place for lines to come."""
        slot = Slot()
        self._waiting.append(slot)
        return slot

    def fill(self, slot: Slot, line: bytes) -> None:
        """Puts a line in a place that was kept."""
        if slot.is_open:
            slot.lines.append(line)
        else:
            slot.position = self._sink.taken_bytes + self._sink.queued_bytes
            self._sink.writelines((line,))

    def flush(self) -> None:
        """Writes all that waits; places that are still empty are given up."""
        position = self._sink.taken_bytes + self._sink.queued_bytes
        lines: list[bytes] = []
        for item in self._waiting:
            if isinstance(item, bytes):
                lines.append(item)
                position += len(item)
                continue
            item.is_open = False
            if item.lines:
                item.position = position
                lines += item.lines
                position += sum(map(len, item.lines))
        self._waiting.clear()
        if lines:
            self._sink.writelines(lines)


@dataclass(slots=True, eq=False)
class _Held:
    """Facts that must be on disk before their lines go out."""

    facts: Sequence[Fact]
    when_on_disk: Callable[[], None]
    when_refused: Callable[[JournalError], None]
    deadline: float
    size: int  # bytes of the line that waits


class Turn:
    """Both directions of a relay, and the commit between them.

    `on_change` is called when more may be read, or when nothing waits any more.
    """

    def __init__(
        self,
        journal: Journal | None,
        to_upstream: Sink,
        to_downstream: Sink,
        loop: Scheduler,
        crash_drill: CrashDrill,
        on_change: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._to_upstream = to_upstream
        self.up = Lane(to_upstream)
        self.down = Lane(to_downstream)
        self._loop = loop
        self._crash_drill = crash_drill
        self._on_change = on_change
        self._held: list[_Held] = []
        self._is_due = False
        self.is_crashing = False  # at mid_upstream: what upstream says now must not be read

    @property
    def waiting_bytes(self) -> int:
        """The size of the lines that wait for the disk."""
        return sum(held.size for held in self._held)

    def __bool__(self) -> bool:
        """Whether anything waits for the disk."""
        return bool(self._held)

    def hold(
        self,
        facts: Sequence[Fact],
        when_on_disk: Callable[[], None],
        when_refused: Callable[[JournalError], None],
        size: int,
    ) -> None:
        """Leaves facts for the commit at the end of this turn; exactly one of the two is called then, or later."""
        self._held.append(_Held(facts, when_on_disk, when_refused, self._loop.time() + WAIT_S, size))
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.end)

    def withdraw(self, entry: Entry) -> None:
        """Takes back the facts of a call that is not to be dispatched any more; neither callback is called."""
        self._held = [held for held in self._held if not any(fact.entry is entry for fact in held.facts)]

    def end(self) -> None:
        """Commits what became ready, then lets out what waited for it."""
        self._is_due = False
        facts = [fact for held in self._held for fact in held.facts]
        dispatched = [fact.entry for fact in facts if isinstance(fact, Dispatched)]
        answered = [fact.entry for fact in facts if isinstance(fact, Answered)]
        self._crash_drill.reach("before_reserve", dispatched)
        self._crash_drill.reach("before_complete", answered)
        try:
            if facts and self._journal is not None:
                self._journal.append(facts)
        except JournalBusy as error:
            self._wait_for_database(error)
        except JournalFailed as error:
            _log.error("%s; calls are refused until the next start", error)
            for held in self._take_held():
                held.when_refused(error)
        else:
            self._crash_drill.reach("after_reserve", dispatched)
            self._crash_drill.reach("after_complete", answered)
            for held in self._take_held():
                held.when_on_disk()
        self.up.flush()
        self.down.flush()
        self.is_crashing |= self._crash_drill.is_at("mid_upstream", dispatched)
        self.crash_if_written()
        self._tidy()
        self._on_change()

    def _take_held(self) -> list[_Held]:
        held, self._held = self._held, []
        return held

    def _wait_for_database(self, error: JournalBusy) -> None:
        """Another program holds the database: what has waited too long is refused, the rest is tried again."""
        now = self._loop.time()
        for held in self._take_held():
            if now < held.deadline:
                self._held.append(held)
                continue
            held.when_refused(error)
            kept = [fact for fact in held.facts if not isinstance(fact, Dispatched)]
            if kept:  # what upstream said stays true after its client was told otherwise, so it is still recorded
                self._held.append(_Held(kept, lambda: None, lambda error: None, math.inf, 0))
        if self._held and not self._is_due:
            self._is_due = True
            self._loop.call_later(RETRY_S, self.end)

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

    def crash_if_written(self) -> None:
        """The drill at mid_upstream: the call has left us whole."""
        if self.is_crashing and not self._to_upstream.queued_bytes:
            self._crash_drill.kill()
