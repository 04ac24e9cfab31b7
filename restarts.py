"""What outlives an upstream process: the way to it, the handshake, and questions that nobody has answered yet. Pure.

A new process knows nothing of the old one's conversation. Downstream must see nothing of that, and the new process must
get nothing that was meant for the old one.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import wire
from turn import Sink


class _Way(Enum):
    """What the way to upstream is like."""

    OPEN = auto()
    MUTE = auto()  # the process is there and will not answer any more
    GONE = auto()  # there is no process
    GREETED = auto()  # there is one, and its handshake is under way


class Gate:
    """The way to upstream, whichever process that is: a sink that holds lines while none is ready for them.

    Bytes are counted from the first line that waits for a process. What goes ahead of that is not counted: what waits
    has its place before that leaves.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink
        self._way = _Way.OPEN
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._uncounted_bytes = 0

    @property
    def queued_bytes(self) -> int:
        return self._held_bytes + (self._sink.queued_bytes if self._sink else 0)

    @property
    def taken_bytes(self) -> int:
        return self._sink.taken_bytes - self._uncounted_bytes if self._sink else 0

    @property
    def tells_unread(self) -> bool:
        return self._sink is None or self._sink.tells_unread

    def unread_bytes(self) -> int | None:
        return self._sink.unread_bytes() if self._sink else 0

    def writelines(self, lines: Sequence[bytes], /) -> None:
        if self._way is _Way.OPEN and self._sink is not None:
            self._sink.writelines(lines)
        else:
            self._held += lines
            self._held_bytes += sum(map(len, lines))

    def lets_by(self, message: wire.Message, line: bytes) -> bool:
        """Writes a line ahead of all that is held if it only answers a process that is being greeted; whether it did.

        A server may ask before it answers the handshake, and wait for that. To be asked before a line gets its place:
        one that goes ahead has none.
        """
        parts = message.batch or (message,)
        is_answer = all(part.method is None and part.id is not None for part in parts)
        if self._way is _Way.GREETED and is_answer:
            self._write_uncounted(line)
            return True
        return False

    def hold(self) -> None:
        """Holds all lines from now on: the process will not answer any more."""
        self._way = _Way.MUTE

    def shut(self) -> None:
        """Holds all lines from now on: the process is gone, and what it was to get is dropped, held lines included."""
        self._way = _Way.GONE
        self._held, self._held_bytes = [], 0
        self._sink, self._uncounted_bytes = None, 0

    def attach(self, sink: Sink, greeting: bytes) -> None:
        """Leads to another process, and greets it; lines are still held."""
        self._sink, self._way = sink, _Way.GREETED
        self._write_uncounted(greeting)

    def open(self, first: bytes) -> None:
        """Lets lines out, `first` before those that were held."""
        self._way = _Way.OPEN
        self._write_uncounted(first)
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            self.writelines(held)

    def _write_uncounted(self, line: bytes) -> None:
        if line and self._sink is not None:
            self._uncounted_bytes += len(line)
            self._sink.writelines((line,))


class Handshake:
    """The handshake that downstream had with upstream, kept to be had again with the next process.

    Eras from 2026-07-28 on have none.
    """

    def __init__(self) -> None:
        self._asked: tuple[wire.Id, bytes] | None = None  # not answered yet
        self._had: tuple[wire.Id, bytes] | None = None
        self._is_due = False  # with the next process, or under way with it
        self.confirmation = b""

    def reads(self, message: wire.Message, line: bytes) -> bool:
        """Learns from a line on its way to upstream; whether it is kept here until the handshake is had again."""
        if message.method == wire.INITIALIZE and message.id is not None:
            self._asked = message.id, line
        elif message.method == wire.INITIALIZED:
            self.confirmation = line
            return self._is_due
        return False

    def answered(self, answer: wire.Answer) -> None:
        """Learns from the answer to a request."""
        if self._asked is not None and self._asked[0] == answer.id:
            if not answer.is_error:
                self._had, self.confirmation = self._asked, b""
            self._asked = None

    def process_gone(self) -> None:
        """To be called when upstream is gone."""
        self._asked = None
        self._is_due = self._had is not None

    def begin_again(self) -> bytes:
        """The line that begins a handshake with a new process; empty if there is none to be had."""
        return self._had[1] if self._had else b""

    def takes(self, answer: wire.Answer) -> bool:
        """Whether an answer is to the handshake that is repeated, so that it must not go downstream."""
        if not self._is_due or self._had is None:
            return False
        if answer.id not in (self._had[0], wire.other_spelling(self._had[0])):
            return False
        self._is_due = False
        return True


class Questions:
    """What upstream asked and downstream has not answered: an answer must not reach a process that did not ask."""

    def __init__(self) -> None:
        self._open: set[wire.Id] = set()
        self._lost: set[wire.Id] = set()  # of processes that are gone

    def may_ask(self, ids: Iterable[wire.Id]) -> bool:
        """Whether upstream may ask under these ids; then they are open."""
        if not self._lost.isdisjoint(ids):
            return False
        self._open.update(ids)
        return True

    def withdrawn(self, ids: Iterable[wire.Id]) -> None:
        """Notes that upstream does not want some answers any more; downstream is told so and gives none."""
        self._open.difference_update(ids)

    def is_to_lost(self, message: wire.Message) -> bool:
        """Whether a message of downstream's answers a process that is gone."""
        return message.method is None and message.id in self._lost

    def answered(self, message: wire.Message) -> None:
        """Notes a message of downstream's, if it is an answer."""
        if message.method is None and message.id is not None:
            self._open.discard(message.id)
            self._lost.discard(message.id)

    def process_gone(self) -> None:
        """To be called when upstream is gone."""
        self._lost |= self._open
        self._open.clear()
