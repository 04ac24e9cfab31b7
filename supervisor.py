"""The life of a relay process: descriptors, signals, the upstream process, and the order in which things end.

Clients close our stdin, send SIGTERM two seconds later and SIGKILL two seconds after that. Until then
every call under way should be answered and on disk, and nothing of upstream may be left behind.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import wire
from eventloop import EventLoop
from journal import Journal
from refusals import Refusals
from relay import Relay
from settings import Settings
from states import Cause
from streams import Reader, Send, Writer, nonblocking
from turn import WAIT_S, CrashDrill
from upstream import Upstream, UpstreamError

if TYPE_CHECKING:
    from courier import Courier
    from reporter import Config
    from reports import Reports

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
_REPORTS_S: Final = 1.0  # for reports that are on their way at the end
_HURRIED_REPORTS_S: Final = 0.2


class _Link:
    """An upstream process and our ends of its pipes: what a restart replaces.

    `on_change` is called when `is_gone` may have become true.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        process: Upstream,
        *,
        on_lines: Callable[[list[bytes]], None],
        on_written: Callable[[], None],
        on_mute: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self.process = process
        self.is_mute = False  # its stdout ended, or its stdin takes no more
        self._on_lines = on_lines
        self._on_mute = on_mute
        self._on_change = on_change
        self._is_closed = False
        self.writer = Writer(
            loop,
            process.stdin,
            partial(os.write, process.stdin),
            on_drained=on_written,
            on_broken=self._fall_silent,
        )
        self.reader = Reader(loop, process.stdout, on_lines, self._ended)
        self.exited = loop.create_task(process.wait())
        self.exited.add_done_callback(lambda _: on_change())

    @property
    def is_gone(self) -> bool:
        return self.exited.done() or self.is_mute

    def _ended(self, rest: bytes) -> None:
        if rest and wire.read_upstream(rest) is not None:
            self._on_lines([rest + b"\n"])
        elif rest:
            _log.warning("upstream ended in the middle of a line; %d bytes were dropped", len(rest))
        self._fall_silent()

    def _fall_silent(self) -> None:
        self.is_mute = True
        self._on_mute()
        self._on_change()

    async def end(self, grace_s: float) -> bool:
        """Ends the process and its group; whether nothing is left of them. What it has not read can be counted then."""
        is_ended = await self.process.end(grace_s)
        if self.writer.has_reader():  # who left the group may still read what is in the pipe
            self.writer.close()
        return is_ended

    def close(self) -> None:
        """Closes our ends."""
        self.reader.close()
        self.writer.close()
        if not self._is_closed:
            self._is_closed = True
            os.close(self.process.stdout)


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
        restarts: int = 0,
        report_to: "Config | None" = None,
    ) -> None:
        self._loop = EventLoop.running()
        self._restarts_left = restarts
        self._is_restarting = False
        self._signals = upstream.signals
        self._journal = journal
        self._drain_timeout_s = drain_timeout_s
        self._changed = asyncio.Event()
        self._is_serving = False  # nobody waits for what a line changes: to wake up for each would cost as much as it
        self._is_downstream_gone = False
        self._grace_s = _GRACE_S
        self._deadline = float("inf")  # for answers, once the end has begun
        self._error: BaseException | None = None

        stdout, send = _private_stdout()
        self._to_downstream = Writer(
            self._loop, stdout, send, on_drained=self._written, on_broken=self._downstream_gone
        )
        self._link = self._linked(upstream)
        self._courier: Courier | None = None
        reports: Reports | None = None
        if report_to is not None:
            self._courier, reports = self._reporting(report_to)
        self._relay = Relay(
            settings,
            journal,
            refusals,
            to_upstream=self._link.writer,
            to_downstream=self._to_downstream,
            loop=self._loop,
            now_ms=_now_ms,
            on_change=self._regulate,
            crash_drill=crash_drill,
            reports=reports,
            riders=self._courier,
        )
        self._from_downstream = Reader(self._loop, 0, self._relay.from_downstream, self._downstream_ended)

    def _reporting(self, config: "Config") -> "tuple[Courier, Reports]":
        from courier import Courier
        from reports import Reports

        courier = Courier(
            config,
            self._journal,
            loop=self._loop,
            call_home=self._loop.call_soon_threadsafe,
            now_ms=_now_ms,
            commit=lambda: self._relay.commit_riders(),
            on_change=self._changed.set,
        )
        reports = Reports(
            config,
            send=courier.take,
            register=courier.register,
            hear=courier.hear,
            now_ms=_now_ms,
            time=self._loop.time,
        )
        if self._journal is not None:
            self._journal.report_doubt = reports.of_left_doubt
        return courier, reports

    def _linked(self, upstream: Upstream) -> _Link:
        return _Link(
            self._loop,
            upstream,
            on_lines=lambda lines: self._relay.from_upstream(lines),
            on_written=self._written,
            on_mute=lambda: self._relay.upstream_is_mute(),
            on_change=self._changed.set,
        )

    async def run(self) -> int:
        """Relays until one side is gone, ends in order, and gives the exit code. Leaves nothing of upstream behind."""
        self._loop.set_exception_handler(self._went_wrong)
        self._signals.on_signal = self._signalled
        try:
            if self._signals.count:
                self._signalled()
            self._link.reader.start()
            self._from_downstream.start()
            while not self._is_ending:
                self._is_serving = True
                await self._until(lambda: self._is_ending or self._is_upstream_gone)
                self._is_serving = False
                if not (self._is_ending or await self._replaces()):
                    return await self._lost()
            return await self._drain()
        finally:
            self._link.process.kill()
            await asyncio.wait([self._link.exited], timeout=_GRACE_S)

    # --------------------------------------------------------------------------------------------------- what happens

    @property
    def _is_ending(self) -> bool:
        return self._is_downstream_gone or self._signals.count > 0

    @property
    def _is_upstream_gone(self) -> bool:
        return self._link.is_gone or self._relay.is_handshake_refused

    def _regulate(self) -> None:
        """Reads a side only while there is room for what it says."""
        for reader, may_read in (
            (self._from_downstream, self._relay.may_read_downstream and not self._is_restarting),
            (self._link.reader, self._relay.may_read_upstream),
        ):
            if reader.is_paused is may_read:
                (reader.resume if may_read else reader.pause)()
        if not self._is_serving or self._relay.is_handshake_refused:
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

    def _signalled(self) -> None:
        self._relay.stop_admitting()
        if self._is_downstream_gone or self._is_upstream_gone:
            self._deadline = min(self._deadline, self._loop.time() + _HURRIED_ANSWERS_S)
            self._grace_s = _HURRIED_GRACE_S
        if self._signals.count > 1:
            self._link.process.kill()
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

    # ---------------------------------------------------------------------------------- another upstream, two endings

    async def _replaces(self) -> bool:
        """Ends what is left of an upstream that is gone; whether another runs in its place, or we are to end anyway."""
        self._is_restarting = self._restarts_left > 0
        self._regulate()
        try:
            await self._until(self._link.exited.done, timeout_s=_GRACE_S)
            has_exited = self._link.exited.done()
            is_ended = await self._link.end(self._grace_s)
            _log.error("upstream %r %s", self._link.process.name, self._how_it_ended(has_exited))
            return self._restarts_left > 0 and is_ended and await self._restart()
        finally:
            self._is_restarting = False
            self._regulate()

    def _how_it_ended(self, by_itself: bool) -> str:
        if not by_itself:
            what = "refused the handshake" if self._relay.is_handshake_refused else "closed its stdin or stdout"
            return f"{what}, and was ended"
        status = self._link.exited.result()
        return f"ended by itself ({f'killed by signal {-status}' if status < 0 else f'exit status {status}'})"

    async def _restart(self) -> bool:
        self._link.reader.read_rest()
        self._relay.upstream_interrupted()
        self._link.close()
        while self._restarts_left and not self._is_ending:
            self._restarts_left -= 1
            try:
                self._link = self._linked(await self._link.process.start_another())
            except UpstreamError as error:
                _log.error("%s", error)
                continue
            _log.warning("upstream was started again; %d restarts are left", self._restarts_left)
            self._relay.upstream_started(self._link.writer, self._link.process.pid)
            self._link.reader.start()
            return True
        return self._is_ending

    async def _lost(self) -> int:
        """Upstream went first: tells downstream what became of its requests."""
        self._deadline = self._loop.time() + self._drain_timeout_s
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
        if self._link.is_mute:  # its stdout ends a moment before it does
            await self._until(self._link.exited.done, timeout_s=self._grace_s)
        if not self._link.exited.done():  # else the kernel can still count what it has not read
            self._relay.is_upstream_stdin_closed = True
            self._link.writer.close()
        if self._journal is None and not self._signals.count:
            # What is in flight is not known here, so upstream gets the time that calls would get.
            await self._until_deadline(self._link.exited.done)
        await self._until(self._link.exited.done, timeout_s=self._grace_s)
        await self._link.end(self._grace_s)
        await self._settle(cause)
        if self._signals.count > 1:
            return INTERRUPTED
        return LEFT_IN_DOUBT if self._relay.has_left_doubt else DONE

    async def _settle(self, cause: Cause) -> None:
        """Takes what upstream still said, puts the rest in doubt, and lets downstream read it all."""
        self._from_downstream.close()  # a call that came now would wait for nobody
        self._link.reader.read_rest()
        self._relay.upstream_gone(cause)
        self._link.writer.close()
        await self._until(lambda: self._relay.is_idle, timeout_s=WAIT_S + _GRACE_S)
        self._deadline = max(self._deadline, self._loop.time() + self._grace_s)
        await self._until_deadline(lambda: self._to_downstream.queued_bytes == 0)
        self._relay.commit_riders()  # before reports take their time, in which we may be killed
        if self._courier is not None:
            await self._deliver(self._courier)
            self._relay.commit_riders()
        if self._journal is not None:
            self._journal.close()

    async def _deliver(self, courier: "Courier") -> None:
        """Lets reports that are on their way arrive, unless somebody waits for our end."""
        courier.hurry()
        await self._until(lambda: courier.is_idle, timeout_s=_HURRIED_REPORTS_S if self._signals.count else _REPORTS_S)
        courier.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _private_stdout() -> tuple[int, Send]:
    """The real stdout on a descriptor of our own; 1 becomes stderr, so that no stray print is protocol."""
    own = nonblocking(1)
    os.dup2(2, 1)
    return own
