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
from collections.abc import Callable, Mapping, Sequence
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
    """What is to be sent."""

    path: str
    tool_name: str
    body: bytes
    at_ms: int
    id: int | None = None  # of its row in the journal
    attempts: int = 0


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
        self._fresh: deque[_Item] = deque()  # not on disk, never answered
        self._postponed: list[tuple[float, int, _Item]] = []  # not on disk, by when they are due
        self._rows: deque[_Item] = deque()  # read from the journal
        self._may_find_rows = True
        self._sending: dict[_Item, Sending] = {}
        self._marks: dict[int, ReportDelivered | ReportFailed] = {}  # by row, not on disk
        self._riding: tuple[list[_Item], list[int]] = ([], [])
        self._numbers = itertools.count()
        self._paused_until = 0.0
        self._news_at = 0.0  # when a call last left us something to report
        self._timer: Handle | None = None
        self._is_ending = False
        self._problem: str | None = None

    # ---------------------------------------------------------------------------------------------- what is to be sent

    def take(self, report: ReportQueued) -> None:
        """Takes a report that no outcome carries to disk."""
        if len(self._fresh) >= MAX_IN_MEMORY:
            dropped = self._fresh.popleft()
            _log.warning("a report of %s was dropped: %d wait in memory already", dropped.tool_name, MAX_IN_MEMORY)
        self._fresh.append(_Item(REPORT_PATH, report.tool_name, report.body, report.at_ms))
        self._hear_news()

    def register(self, tools: Sequence[Mapping[str, str]] | None) -> None:
        """Registers the server, with a catalog or without one; what was to be registered before is out of date."""
        body = encode(build_registration_body(self._config, tools))
        self._registration = _Item(REGISTER_PATH, "", body, self._now_ms())
        self._hear_news()

    def facts(self) -> Sequence[Fact]:
        """What is worth no commit of its own."""
        self._riding = list(self._fresh), list(self._marks)
        base_url = self._config.base_url
        queued = [ReportQueued(None, base_url, item.tool_name, item.body, item.at_ms) for item in self._fresh]
        return [*queued, *self._marks.values()]

    def are_on_disk(self) -> None:
        """To be called once a commit was made, with what `facts` gave."""
        items, marks = self._riding
        for _ in items:
            self._fresh.popleft()
        for row in marks:
            del self._marks[row]
        self._riding = ([], [])
        self._may_find_rows = True
        self._hear_news()

    def _hear_news(self) -> None:
        self._news_at = self._loop.time()
        self._arm(_QUIET_S)

    # --------------------------------------------------------------------------------------------------------- the end

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nothing could be."""
        if self._sending:
            return False
        return self._is_paused or not (self._registration or self._fresh or self._rows or self._may_find_rows)

    def hurry(self) -> None:
        """Sends what there is, at once: this process is about to end."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._sweep()

    def close(self) -> None:
        """Gives up what is on its way; whatever is in the journal, or will be in a moment, is sent another time."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        for item, exchange in self._sending.items():
            exchange.cancel()
            self._put_back(item)
        self._sending.clear()
        can_keep = self._journal is not None and self._journal.has_dispatched
        if lost := len(self._postponed) + (0 if can_keep else len(self._fresh)):
            _log.warning("%d reports were in memory only, and are lost", lost)

    # ----------------------------------------------------------------------------------------------------------- sweeps

    @property
    def _is_paused(self) -> bool:
        return self._loop.time() < self._paused_until

    def _arm(self, delay_s: float) -> None:
        if self._timer is None and not self._is_ending:
            self._timer = self._loop.call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        if self._is_paused:
            self._arm(self._paused_until - self._loop.time())
        else:
            quiet_s = self._loop.time() - self._news_at
            is_free = self._is_ending or quiet_s >= _QUIET_S
            while len(self._sending) < (_AT_ONCE if is_free else 1) and (item := self._next()) is not None:
                self._send(item)
            if not is_free:
                self._arm(_QUIET_S)
            elif not self._sending:
                self._wait(quiet_s)
        self._on_change()

    def _next(self) -> _Item | None:
        if self._registration is not None and self._registration not in self._sending:
            return self._registration
        if self._fresh:
            return self._fresh.popleft()
        if self._postponed and self._postponed[0][0] <= self._loop.time():
            return heapq.heappop(self._postponed)[2]
        if not self._rows and self._may_find_rows:
            self._read_rows()
        return self._rows.popleft() if self._rows else None

    def _read_rows(self) -> None:
        """Reads what is due, once all that was sent before is marked as such."""
        if self._journal is None or not self._journal.has_dispatched:
            self._may_find_rows = False
            return
        self._commit_marks()
        if not self._marks:
            self._may_find_rows = False
            with contextlib.suppress(JournalError):  # calls are told; what is on disk stays there
                due = self._journal.due_reports(self._config.base_url, self._now_ms(), _BATCH)
                self._rows.extend(_Item(REPORT_PATH, row.tool_name, row.body, 0, row.id, row.attempts) for row in due)
                self._may_find_rows = len(due) == _BATCH

    def _commit_marks(self) -> None:
        if self._marks:
            news_at = self._news_at
            self._commit()
            self._news_at = news_at  # that was no news of a call

    def _wait(self, quiet_s: float) -> None:
        """Arms the timer for what there is to do later, if anything is."""
        if quiet_s >= _MARKS_WAIT_S:
            self._commit_marks()
        if self._marks:
            self._arm(_MARKS_WAIT_S)
            return
        delays = [due - self._loop.time() for due, _, _ in self._postponed[:1]]
        if self._journal is not None and self._journal.has_dispatched:
            with contextlib.suppress(JournalError):
                due_at = self._journal.next_report_at(self._config.base_url)
                if due_at is not None:
                    self._may_find_rows = True
                    delays.append((due_at - self._now_ms()) / 1000)
        if delays:
            self._arm(max(_PACE_S, min(delays)))

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
        self._note(answer)
        if verdict.kind is Fate.UNREACHABLE:
            self._paused_until = self._loop.time() + verdict.delay_s
            self._put_back(item)
        else:
            item.attempts += 1
            if answer.retry_after is not None:  # it speaks for the whole endpoint
                self._paused_until = max(self._paused_until, self._loop.time() + answer.retry_after)
            self._settle(item, verdict, answer.error or "")
        is_free = self._is_ending or self._loop.time() - self._news_at >= _QUIET_S
        if is_free:
            self._sweep()
        else:
            self._arm(_PACE_S)

    def _put_back(self, item: _Item) -> None:
        if item is self._registration:
            return
        if item.id is not None:
            self._rows.appendleft(item)
        elif item.attempts:
            self._postpone(item, 0.0)
        else:
            self._fresh.appendleft(item)

    def _postpone(self, item: _Item, delay_s: float) -> None:
        heapq.heappush(self._postponed, (self._loop.time() + delay_s, next(self._numbers), item))

    def _settle(self, item: _Item, verdict: Verdict, error: str) -> None:
        """The endpoint has answered."""
        fate, delay_s = verdict
        is_over = fate is not Fate.RETRY
        if item.id is not None and fate is Fate.DELIVERED:
            self._marks[item.id] = ReportDelivered(item.id)
        elif item.id is not None:
            due_at = None if is_over else self._now_ms() + round(delay_s * 1000)
            self._marks[item.id] = ReportFailed(item.id, item.attempts, due_at, error)
        elif item is self._registration:
            if is_over:
                self._registration = None
            else:
                self._paused_until = max(self._paused_until, self._loop.time() + delay_s)
        elif item.path == REPORT_PATH and not is_over:
            self._postpone(item, delay_s)

    def _note(self, answer: Answer) -> None:
        """Says when the endpoint begins or ceases to take reports, and not with every one."""
        problem = None if answer.delivered else str(answer.status)
        if problem is not None and problem != self._problem:
            _log.warning("the report endpoint did not take a report: %s", answer.error)
        elif problem is None and self._problem is not None:
            _log.info("the report endpoint takes reports again")
        self._problem = problem
