"""The event loop, and the end of each of its turns.

What is found ready at once is one turn, and what becomes of it is committed together (turn.py). So somebody has to say
when a turn is over. `call_soon` would, but only after one more look for what is ready: twice in the life of a call.
"""

import asyncio
import os
import selectors
import time
from collections.abc import Callable


class _Selector(selectors.DefaultSelector):
    """Gives one more descriptor, behind those that are ready."""

    last: selectors.SelectorKey | None = None
    is_in_turn = False  # until that one is heard of

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(timeout)
        if events and self.last is not None:
            events.append((self.last, selectors.EVENT_READ))
            self.is_in_turn = True
        return events


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, which also tells when all that was ready at once has been handed out."""

    def __init__(self) -> None:
        self._turns = _Selector()
        super().__init__(self._turns)
        self._at_end: list[Callable[[], object]] = []
        self._pipe = os.pipe()  # nothing is ever written to it: the selector says that it is ready

    @staticmethod
    def running() -> "EventLoop":
        """The loop that runs, which is one of these."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, EventLoop)
        return loop

    time = staticmethod(time.monotonic)  # as in the base class, without a call in between

    def at_turn_end(self, callback: Callable[[], object]) -> None:
        """Runs `callback` once all that is ready now was handed out."""
        if not (self._at_end or self._turns.is_in_turn):  # a timer asks, say, or nobody has asked before
            self.call_soon(self._run_callbacks)
            if self._turns.last is None:  # from now on, the end of a turn is one more event in it
                self.add_reader(self._pipe[0], self._end_turn)
                self._turns.last = self._turns.get_key(self._pipe[0])
        self._at_end.append(callback)

    def _end_turn(self) -> None:
        self._turns.is_in_turn = False
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        callbacks, self._at_end = self._at_end, []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        if not self.is_closed():
            self.remove_reader(self._pipe[0])
            for fd in self._pipe:
                os.close(fd)
        super().close()
