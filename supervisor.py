"""The life of a relay process: descriptors, signals, the upstream process, and the order in which things end.

Downstream's clients close our stdin, send SIGTERM two seconds later and SIGKILL two seconds after that. Until then
every call under way should be answered and on disk, and nothing of upstream may be left behind.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

import wire
from journal import Cause, Journal
from refusals import Refusals
from relay import Relay, Settings
from streams import Reader, Send, Writer, nonblocking
from turn import WAIT_S, CrashDrill
from upstream import Upstream

_log = logging.getLogger("checkpoint.supervisor")

DONE: Final = 0
UPSTREAM_LOST: Final = 5
LEFT_IN_DOUBT: Final = 6
INTERRUPTED: Final = 130

_GRACE_S: Final = 1.0  # for each step of ending: stdin closed, SIGTERM, SIGKILL
# SIGTERM after EOF comes two seconds before SIGKILL: answers get one second, the steps of ending a quarter each.
_HURRIED_ANSWERS_S: Final = 1.0
_HURRIED_GRACE_S: Final = 0.25
# Clients that only probed send SIGTERM, and SIGKILL after one second: an upstream that is deaf to the end of its input
# must have had its signals by then.
_IDLE_GRACE_S: Final = 0.4


class Supervisor:
    """Runs one relay from its first byte to its exit code."""

    def __init__(
        self,
        settings: Settings,
        upstream: Upstream,
        journal: Journal | None,
        refusals: Refusals,
        *,
        drain_timeout_s: float,
        crash_drill: CrashDrill,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._upstream = upstream
        self._signals = upstream.signals
        self._journal = journal
        self._drain_timeout_s = drain_timeout_s
        self._changed = asyncio.Event()
        self._is_downstream_gone = False
        self._is_upstream_mute = False  # its stdout ended, or its stdin takes no more
        self._grace_s = _GRACE_S
        self._deadline = float("inf")  # for answers, once the end has begun
        self._error: BaseException | None = None

        stdout, send = _private_stdout()
        self._to_downstream = Writer(
            self._loop, stdout, send, on_drained=self._written, on_broken=self._downstream_gone
        )
        self._to_upstream = Writer(
            self._loop,
            upstream.stdin,
            lambda piece: os.write(upstream.stdin, piece),
            on_drained=self._written,
            on_broken=self._upstream_mute,
        )
        self._relay = Relay(
            settings,
            journal,
            refusals,
            to_upstream=self._to_upstream,
            to_downstream=self._to_downstream,
            loop=self._loop,
            now_ms=lambda: time.time_ns() // 1_000_000,
            on_change=self._regulate,
            unread_upstream_bytes=self._unread_upstream_bytes,
            crash_drill=crash_drill,
        )
        self._from_downstream = Reader(self._loop, 0, self._relay.from_downstream, self._downstream_ended)
        self._from_upstream = Reader(self._loop, upstream.stdout, self._relay.from_upstream, self._upstream_ended)
        self._exited = self._loop.create_task(upstream.wait())
        self._exited.add_done_callback(lambda _: self._changed.set())

    async def run(self) -> int:
        """Relays until one side is gone, ends in order, and gives the exit code. Leaves nothing of upstream behind."""
        self._loop.set_exception_handler(self._went_wrong)
        self._signals.on_signal = self._signalled
        try:
            if self._signals.count:
                self._signalled()
            self._from_upstream.start()
            self._from_downstream.start()
            await self._until(lambda: self._is_ending or self._is_upstream_gone)
            return await (self._drain() if self._is_ending else self._lost())
        finally:
            self._upstream.kill()

    # --------------------------------------------------------------------------------------------------- what happens

    @property
    def _is_ending(self) -> bool:
        return self._is_downstream_gone or self._signals.count > 0

    @property
    def _is_upstream_gone(self) -> bool:
        return self._exited.done() or self._is_upstream_mute

    def _regulate(self) -> None:
        """Reads a side only while there is room for what it says."""
        for reader, may_read in (
            (self._from_downstream, self._relay.may_read_downstream),
            (self._from_upstream, self._relay.may_read_upstream),
        ):
            if may_read:
                reader.resume()
            else:
                reader.pause()
        if self._is_ending or self._is_upstream_gone:  # until then nobody waits for a line, and waking costs as much
            self._changed.set()

    def _written(self) -> None:
        self._relay.when_written()

    def _downstream_ended(self, rest: bytes) -> None:
        if rest:
            _log.warning("downstream ended in the middle of a line; %d bytes were dropped", len(rest))
        self._downstream_gone()

    def _downstream_gone(self) -> None:
        self._is_downstream_gone = True
        self._changed.set()

    def _upstream_ended(self, rest: bytes) -> None:
        if rest and wire.read_upstream(rest) is not None:
            self._relay.from_upstream([rest + b"\n"])
        elif rest:
            _log.warning("upstream ended in the middle of a line; %d bytes were dropped", len(rest))
        self._upstream_mute()

    def _upstream_mute(self) -> None:
        self._is_upstream_mute = True
        self._relay.upstream_is_mute()
        self._changed.set()

    def _unread_upstream_bytes(self) -> int | None:
        """What upstream never read; unknown as long as a process that left its group may still read it."""
        return None if self._to_upstream.has_reader() else self._to_upstream.unread_bytes()

    def _signalled(self) -> None:
        self._relay.stop_admitting()
        if self._is_downstream_gone or self._is_upstream_gone:
            self._deadline = min(self._deadline, self._loop.time() + _HURRIED_ANSWERS_S)
            self._grace_s = _HURRIED_GRACE_S
        if self._signals.count > 1:
            self._upstream.kill()
        self._changed.set()

    def _went_wrong(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of ours raised: what it was about to do is not done, so nothing may go on as if it were."""
        self._error = self._error or context.get("exception")
        if self._error is None:
            _log.error("%s", context["message"])
        self._changed.set()

    async def _until(self, is_so: Callable[[], bool], *, timeout_s: float | None = None) -> None:
        """Waits until something is so, the time is over, or a second signal cuts everything short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (is_so() or self._signals.count > 1 or self._error):
                    self._changed.clear()
                    await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def _until_deadline(self, is_so: Callable[[], bool]) -> None:
        """Waits until something is so or the time for answers is over; a signal after EOF shortens that time."""
        while not is_so() and self._signals.count < 2 and (left := self._deadline - self._loop.time()) > 0:
            deadline = self._deadline
            await self._until(lambda: is_so() or self._deadline != deadline, timeout_s=left)  # noqa: B023  # awaited here

    # ----------------------------------------------------------------------------------------------------- two endings

    async def _lost(self) -> int:
        """Upstream went first: tells downstream what became of its requests."""
        self._deadline = self._loop.time() + self._drain_timeout_s
        await self._until(self._exited.done, timeout_s=_GRACE_S)
        is_alive = not self._exited.done()
        await self._upstream.end(self._grace_s)
        if is_alive:
            _log.error("upstream %r closed its stdin or stdout, and was ended", self._upstream.name)
        else:
            status = self._exited.result()
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            _log.error("upstream %r ended by itself (%s)", self._upstream.name, how)
        await self._settle(Cause.UPSTREAM_LOST)
        return INTERRUPTED if self._signals.count > 1 else UPSTREAM_LOST

    async def _drain(self) -> int:
        """Downstream went first, or we are told to end: answers are awaited, journaled, and then upstream is ended."""
        self._deadline = min(self._deadline, self._loop.time() + self._drain_timeout_s)
        if self._signals.count and self._relay.is_idle:
            self._grace_s = min(self._grace_s, _IDLE_GRACE_S)
        await self._until_deadline(lambda: self._relay.is_idle or self._is_upstream_gone)
        await self._until(
            lambda: not self._relay.has_open_requests or self._is_upstream_gone,
            timeout_s=min(self._grace_s, max(0.0, self._deadline - self._loop.time())),
        )
        cause = Cause.UPSTREAM_LOST if self._is_upstream_gone else Cause.RELAY_LOST
        if self._is_upstream_mute:  # its stdout ends a moment before it does
            await self._until(self._exited.done, timeout_s=self._grace_s)
        if not self._exited.done():  # else the kernel can still count what it has not read
            self._relay.is_upstream_stdin_closed = True
            self._to_upstream.close()
        if self._journal is None and not self._signals.count:
            # What is in flight is not known here, so upstream gets the time that calls would get.
            await self._until_deadline(self._exited.done)
        await self._until(self._exited.done, timeout_s=self._grace_s)
        await self._upstream.end(self._grace_s)
        await self._settle(cause)
        if self._signals.count > 1:
            return INTERRUPTED
        return LEFT_IN_DOUBT if self._relay.has_left_doubt else DONE

    async def _settle(self, cause: Cause) -> None:
        """Takes what upstream still said, puts the rest in doubt, and lets downstream read it all."""
        self._from_downstream.close()  # a call that came now would wait for nobody
        self._from_upstream.read_rest()
        self._relay.upstream_gone(cause)
        self._to_upstream.close()
        await self._until(lambda: self._relay.is_idle, timeout_s=WAIT_S + _GRACE_S)
        self._deadline = max(self._deadline, self._loop.time() + self._grace_s)
        await self._until_deadline(lambda: self._to_downstream.queued_bytes == 0)
        if self._journal is not None:
            self._journal.close()


def _private_stdout() -> tuple[int, Send]:
    """The real stdout on a descriptor of our own; 1 becomes stderr, so that no stray print is protocol."""
    own = nonblocking(1)
    os.dup2(2, 1)
    return own
