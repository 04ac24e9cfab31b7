"""Brings reports to the endpoint: beside the calls, never before them.

A report that was made with an outcome is in the journal already. The others wait in memory, and the next commit takes
them along; so do the marks of what was delivered. Where there is no journal, all of it is in memory.
"""

import contextlib
import heapq
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from journal import Journal
from reporter import (
    REGISTER_PATH,
    REPORT_PATH,
    Answer,
    Config,
    Fate,
    Verdict,
    after,
    build_registration_body,
    encode,
)
from reporter import start_exchange as start_on_thread
from states import Fact, ReportDelivered, ReportFailed, ReportQueued
from storage import JournalError
from turn import Handle, Scheduler

_log = logging.getLogger("checkpoint.courier")

MAX_IN_MEMORY: Final = 10_000  # reports; then the oldest goes
_AT_ONCE: Final = 4  # exchanges
_BATCH: Final = 32  # rows that are read from the journal together
# To send a report takes as much Python as a call does: while calls go on, reports go out one by one and not too often.
_QUIET_S: Final = 0.1
_PACE_S: Final = 0.05
_MARKS_WAIT_S: Final = 1.0  # for a commit to ride in; then they get one of their own


@dataclass(slots=True, eq=False)
class _Item:
    """What is to be sent: a registration, a report in memory, or one that has a row in the journal."""

    path: str
    tool_name: str
    body: bytes
    at_ms: int
    row: int | None = None
    attempts: int = 0
    due: float = 0.0  # on the loop's clock; counts for what has no row


class Sending(Protocol):
    """A report on its way."""

    def cancel(self) -> None:
        """Gives it up."""


class Courier:
    """Sends what one relay has to say, a few exchanges at a time.

    `call_home` runs a callback on the loop and may be called from any thread. `commit` brings what waits in `facts` to
    disk. `on_change` is called when `is_idle` may have changed.
    """

    def __init__(
        self,
        config: Config,
        journal: Journal | None,
        *,
        loop: Scheduler,
        call_home: Callable[[Callable[[], None]], object],
        now_ms: Callable[[], int],
        commit: Callable[[], None],
        on_change: Callable[[], None],
        start_exchange: Callable[..., Sending] = start_on_thread,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._journal = journal
        self._loop = loop
        self._call_home = call_home
        self._now_ms = now_ms
        self._commit = commit
        self._on_change = on_change
        self._start_exchange = start_exchange
        self._jitter = jitter
        self._registration: _Item | None = None  # the newest, until it was taken
        self._fresh: deque[_Item] = deque()  # in memory, never answered
        self._postponed: list[tuple[float, int, _Item]] = []  # in memory, by when they are due
        self._rows: deque[_Item] = deque()  # read from the journal
        self._may_find_rows = True
        self._sending: dict[_Item, Sending] = {}
        self._marks: dict[int, ReportDelivered | ReportFailed] = {}  # by row, not on disk
        self._riding: tuple[list[_Item], list[int]] = ([], [])
        self._numbers = itertools.count()
        self._silent_until = 0.0  # the endpoint cannot be reached, or asked for time
        self._call_at = 0.0  # when a call last left us something to report
        self._timer: tuple[float, Handle] | None = None
        self._is_ending = False
        self._problem: str | None = None

    # ---------------------------------------------------------------------------------------------- what is to be sent

    def hear(self) -> None:
        """To be called when there was something to report of a call: the loop has better to do for a moment."""
        self._call_at = self._loop.time()
        self._wake_in(_QUIET_S)

    def take(self, report: ReportQueued) -> None:
        """Takes a report that no outcome carries to disk."""
        if len(self._fresh) + len(self._postponed) >= MAX_IN_MEMORY:
            dropped = heapq.heappop(self._postponed)[2] if self._postponed else self._fresh.popleft()
            _log.warning("a report of %s was dropped: %d wait in memory already", dropped.tool_name, MAX_IN_MEMORY)
        self._fresh.append(_Item(REPORT_PATH, report.tool_name, report.body, report.at_ms))

    def register(self, tools: Sequence[Mapping[str, str]] | None) -> None:
        """Registers the server, with a catalog or without one; what was to be registered before is out of date."""
        body = build_registration_body(self._config, tools)
        if tools is not None and "tools" not in body:
            _log.warning("the catalog is too large to be registered; the one that the endpoint has stays as it is")
        self._registration = _Item(REGISTER_PATH, "", encode(body), self._now_ms())
        self.hear()

    def facts(self) -> Sequence[Fact]:
        """What is worth no commit of its own."""
        items = [*self._fresh, *(item for _, _, item in self._postponed)]
        self._riding = items, list(self._marks)
        return [*map(self._queued, items), *self._marks.values()]

    def _queued(self, item: _Item) -> ReportQueued:
        wait_ms = round(1000 * max(0.0, item.due - self._loop.time()))
        url, due_at = self._config.base_url, self._now_ms() + wait_ms
        return ReportQueued(None, url, item.tool_name, item.body, item.at_ms, item.attempts, due_at)

    def are_on_disk(self) -> None:
        """To be called once a commit was made, with what `facts` gave."""
        items, marks = self._riding
        if items:
            self._fresh.clear()
            self._postponed.clear()
        for row in marks:
            del self._marks[row]
        self._riding = ([], [])
        self._may_find_rows = True
        self._wake_in(_QUIET_S)

    # --------------------------------------------------------------------------------------------------------- the end

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nothing could be."""
        if self._sending:
            return False
        return self._is_silent or not (self._must_register or self._fresh or self._rows or self._may_find_rows)

    def hurry(self) -> None:
        """Sends what there is, at once: this process is about to end."""
        self._is_ending = True
        self._may_find_rows = True
        self._sweep()

    def close(self) -> None:
        """Gives up what is on its way; whatever is in the journal, or will be in a moment, is sent another time."""
        self._is_ending = True
        self._sleep()
        for item, exchange in self._sending.items():
            exchange.cancel()
            self._put_back(item)
        self._sending.clear()
        can_keep = self._journal is not None and self._journal.has_dispatched and self._journal.failure is None
        if lost := 0 if can_keep else len(self._postponed) + len(self._fresh):
            _log.warning("%s in memory only, and lost", "a report was" if lost == 1 else f"{lost} reports were")

    # ----------------------------------------------------------------------------------------------------------- sweeps

    @property
    def _must_register(self) -> bool:
        waiting = self._registration
        return waiting is not None and waiting not in self._sending and waiting.due <= self._loop.time()

    @property
    def _is_silent(self) -> bool:
        return self._loop.time() < self._silent_until

    @property
    def _quiet_s(self) -> float:
        return self._loop.time() - self._call_at

    def _wake_in(self, delay_s: float) -> None:
        """Sweeps in so many seconds, or before if that is due already."""
        at = self._loop.time() + delay_s
        if self._is_ending or (self._timer is not None and self._timer[0] <= at):
            return
        self._sleep()
        self._timer = at, self._loop.call_later(delay_s, self._sweep)

    def _sleep(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None

    def _sweep(self) -> None:
        """Sends what may be sent now, and sets the timer for the rest."""
        self._sleep()
        is_free = self._is_ending or self._quiet_s >= _QUIET_S
        at_once = 0 if self._is_silent else _AT_ONCE if is_free else 1
        while len(self._sending) < at_once and (item := self._next()) is not None:
            self._send(item)
        if not self._sending and self._quiet_s >= _MARKS_WAIT_S:
            self._commit_marks()
        if (delay_s := min(self._delays(is_free=is_free), default=None)) is not None:
            self._wake_in(max(_PACE_S, delay_s))
        self._on_change()

    def _next(self) -> _Item | None:
        if self._must_register:
            return self._registration
        if self._fresh:
            return self._fresh.popleft()
        if self._postponed and self._postponed[0][0] <= self._loop.time():
            return heapq.heappop(self._postponed)[2]
        if not self._rows and self._may_find_rows:
            self._read_rows()
        return self._rows.popleft() if self._rows else None

    def _read_rows(self) -> None:
        """Reads what is due, but for what is on its way; all that was sent before must be marked as such by then."""
        self._commit_marks()
        if self._marks:
            return  # the journal is busy, or takes no more
        self._may_find_rows = False
        if self._journal is not None and self._journal.has_dispatched:
            with contextlib.suppress(JournalError):  # calls are told; what is on disk stays there
                due = self._journal.due_reports(self._config.base_url, self._now_ms(), _BATCH)
                on_their_way = {item.row for item in self._sending}
                self._rows.extend(
                    _Item(REPORT_PATH, row.tool_name, row.body, 0, row.id, row.attempts)
                    for row in due
                    if row.id not in on_their_way
                )
                self._may_find_rows = len(due) == _BATCH

    def _commit_marks(self) -> None:
        if self._marks:
            self._commit()

    def _delays(self, *, is_free: bool) -> Iterator[float]:
        """In how many seconds there is something to do, for each reason that there is."""
        now = self._loop.time()
        if self._is_silent:
            yield self._silent_until - now
            return
        if not is_free:
            yield _QUIET_S
        if self._sending:
            return  # when they are done, we are called
        if self._marks:
            yield _MARKS_WAIT_S
        if self._registration is not None:
            yield self._registration.due - now
        yield from (due - now for due, _, _ in self._postponed[:1])
        if self._journal is not None and self._journal.has_dispatched and not self._marks:
            with contextlib.suppress(JournalError):
                if (due_at := self._journal.next_report_at(self._config.base_url)) is not None:
                    self._may_find_rows |= not self._is_ending
                    yield (due_at - self._now_ms()) / 1000

    # ------------------------------------------------------------------------------------------------------- exchanges

    def _send(self, item: _Item) -> None:
        def done(answer: Answer) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._call_home(lambda: self._sent(item, answer))

        self._sending[item] = self._start_exchange(
            self._config.base_url + item.path,
            item.body,
            api_key=self._config.api_key,
            timeout_s=self._config.timeout_s,
            done=done,
        )

    def _sent(self, item: _Item, answer: Answer) -> None:
        if self._sending.pop(item, None) is None:
            return
        verdict = after(answer, item.attempts, jitter=self._jitter())
        self._tell(answer, "registration" if item.path == REGISTER_PATH else "report")
        if verdict.kind is Fate.UNREACHABLE:
            self._silent_until = self._loop.time() + verdict.delay_s
            self._put_back(item)
        else:
            if answer.retry_after is not None:  # it speaks for the whole endpoint
                self._silent_until = self._loop.time() + answer.retry_after
            item.attempts += 1
            self._settle(item, verdict, answer.error or "")
        if self._is_ending or self._quiet_s >= _QUIET_S:
            self._sweep()
        else:
            self._wake_in(_PACE_S)

    def _put_back(self, item: _Item) -> None:
        """It is as if it had not been sent."""
        if item.row is not None:
            self._rows.appendleft(item)
        elif item.attempts:
            self._postpone(item)
        elif item.path == REPORT_PATH:
            self._fresh.appendleft(item)

    def _postpone(self, item: _Item) -> None:
        heapq.heappush(self._postponed, (item.due, next(self._numbers), item))

    def _settle(self, item: _Item, verdict: Verdict, error: str) -> None:
        """The endpoint has answered."""
        is_over = verdict.kind is not Fate.RETRY
        item.due = self._loop.time() + verdict.delay_s
        if item.row is not None and verdict.kind is Fate.DELIVERED:
            self._marks[item.row] = ReportDelivered(item.row)
        elif item.row is not None:
            due_at = None if is_over else self._now_ms() + round(verdict.delay_s * 1000)
            self._marks[item.row] = ReportFailed(item.row, item.attempts, due_at, error)
        elif item.path == REPORT_PATH and not is_over:
            self._postpone(item)
        elif item is self._registration and is_over:
            self._registration = None

    def _tell(self, answer: Answer, what: str) -> None:
        """Says when the endpoint begins or ceases to take what is sent, and not with everything."""
        problem = None if answer.delivered else str(answer.status)
        if problem is not None and problem != self._problem:
            _log.warning("the report endpoint did not take a %s: %s", what, answer.error)
        elif problem is None and self._problem is not None:
            _log.info("the report endpoint takes what is sent again")
        self._problem = problem
