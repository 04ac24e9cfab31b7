"""Where reports wait, seen from the command line: in a journal, or in the file of a SqliteOutbox; and their delivery.

A journal's lock is held while reports are claimed and while they are settled, never while anything is sent. The claim
is on disk: a due time that lies ahead, so that no other sweep and no relay takes the same report meanwhile.
"""

import contextlib
import json
import os
import random
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Final, NamedTuple, Protocol

import reportrows
from reader import Busy, holder_of, reading
from render import clean, count
from reporter import (
    APPLICATION_ID,
    DEFAULT_BASE_URL,
    REPORT_PATH,
    Answer,
    Failure,
    Fate,
    OutboxUnusable,
    SqliteOutbox,
    after,
    start_exchange,
)
from storage import Files, JournalError
from writing import transaction, writing

CLAIM_MS: Final = 60_000
_AT_ONCE: Final = 4  # exchanges
_TIMEOUT_S: Final = 5.0
_BATCH: Final = 40  # claimed together: all can be sent before their claim ends, if each takes as long as it may


class QueueError(Exception):
    """A queue cannot be used; the message names the file and says what to do next."""


class Waiting(NamedTuple):
    """A report that was not delivered. `due_in_s` None: it was given up."""

    id: int
    tool_name: str
    base_url: str
    attempts: int
    queued_at: int  # epoch ms
    due_in_s: float | None
    error: str | None


class Free(NamedTuple):
    """A report that may be claimed."""

    id: int
    base_url: str


class Claimed(NamedTuple):
    """A report that this process may send."""

    id: int
    tool_name: str
    base_url: str
    attempts: int
    body: bytes
    claim: reportrows.Claim | None  # where the queue needs it to settle


class Tally(NamedTuple):
    """What a delivery came to."""

    delivered: int
    failed: int
    waiting: int
    dead: int


class Queue(Protocol):
    """Reports in a file."""

    def free(self, now_ms: int, *, ignores_due: bool) -> list[Free]:
        """What may be claimed now, the longest due first; with `ignores_due` what waits for another attempt too."""

    def claim(self, ids: Sequence[int], now_ms: int, *, ignores_due: bool) -> list[Claimed]:
        """Takes these reports for CLAIM_MS, but for those that may not be claimed any more."""

    def settle(self, results: Sequence[tuple[Claimed, Answer | None]], now_ms: int) -> None:
        """Notes what became of each that was claimed; None: it was not tried, and waits as it did before."""

    def rows(self, now_ms: int) -> list[Waiting]:
        """All that wait, and then those that were given up; the oldest first."""

    def revive(self, now_ms: int) -> int:
        """Makes what was given up due again; how many."""


class JournalQueue:
    """The reports in a journal that no relay owns at the moment."""

    def __init__(self, typed: str) -> None:
        self._typed = typed
        self._files = Files(typed)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Raises Busy while a relay owns the journal: that relay delivers."""
        try:
            with writing(self._typed) as database, transaction(database, self._files.folder):
                yield database
        except Busy as error:
            owner = holder_of(self._files.lock)
            if owner is None:
                raise
            name = f"process {owner}" if owner else "another process"
            raise Busy(
                f"busy: {name} owns {self._typed}; a relay delivers by itself, after anything else try again"
            ) from error

    def free(self, now_ms: int, *, ignores_due: bool) -> list[Free]:
        """Raises Busy while a relay owns the journal."""
        with self._writing() as database:
            return [Free(*row) for row in reportrows.free(database, now_ms, ignores_due=ignores_due)]

    def claim(self, ids: Sequence[int], now_ms: int, *, ignores_due: bool) -> list[Claimed]:
        """Raises Busy while a relay owns the journal."""
        until = now_ms + CLAIM_MS
        with self._writing() as database:
            found = [reportrows.claim(database, id, now_ms, until, ignores_due=ignores_due) for id in ids]
        return [
            Claimed(one.id, one.tool_name, one.base_url, one.attempts, one.body, one)
            for one in found
            if one is not None
        ]

    def settle(self, results: Sequence[tuple[Claimed, Answer | None]], now_ms: int) -> None:
        """A report whose claim has ended and that somebody else has, or has delivered, is left alone."""
        with self._writing() as database:
            for claimed, answer in results:
                claim = claimed.claim
                if claim is None or not reportrows.holds(database, claim):
                    continue
                if answer is None:
                    reportrows.give_back(database, claim)
                    continue
                kind, delay_s = after(answer, claim.attempts, jitter=random.random())
                if kind is Fate.DELIVERED:
                    reportrows.mark_delivered(database, claim.id)
                elif kind is Fate.UNREACHABLE:
                    reportrows.put_behind(database, claim, now_ms, answer.error)
                else:
                    due_at = None if kind is Fate.DEAD else now_ms + round(delay_s * 1000)
                    reportrows.mark_failed(database, claim.id, claim.attempts + 1, due_at, answer.error)

    def rows(self, now_ms: int) -> list[Waiting]:
        """Reads only, and while a relay owns the journal too."""
        query = (
            "SELECT id, tool_name, base_url, attempts, queued_at, due_at, error FROM reports WHERE body IS NOT NULL"
            " ORDER BY due_at IS NULL, queued_at, id"
        )
        with reading(self._typed) as reader:
            return [
                Waiting(id, tool, url, tries, queued, None if due is None else max(0.0, (due - now_ms) / 1000), error)
                for id, tool, url, tries, queued, due, error in reader.database.execute(query)
            ]

    def revive(self, now_ms: int) -> int:
        """Raises Busy while a relay owns the journal."""
        with self._writing() as database:
            return reportrows.revive(database, now_ms)


class OutboxQueue:
    """The reports in the file of a SqliteOutbox, which any number of processes may use at once."""

    def __init__(self, path: str) -> None:
        self._outbox = SqliteOutbox(path, visibility_timeout_s=CLAIM_MS / 1000)

    def free(self, now_ms: int, *, ignores_due: bool) -> list[Free]:
        with _outbox_errors():
            found = self._outbox.due(-1, ignores_due=ignores_due)
        return [Free(row.id, row.base_url or DEFAULT_BASE_URL) for row in found]

    def claim(self, ids: Sequence[int], now_ms: int, *, ignores_due: bool) -> list[Claimed]:
        with _outbox_errors():
            found = self._outbox.claim_these(ids, ignores_due=ignores_due)
        return [
            Claimed(row.id, row.tool_name, row.base_url or DEFAULT_BASE_URL, row.attempts, row.body, None)
            for row in found
        ]

    def settle(self, results: Sequence[tuple[Claimed, Answer | None]], now_ms: int) -> None:
        with _outbox_errors():
            for claimed, answer in results:
                if answer is None:
                    self._outbox.give_back([claimed.id])
                elif answer.delivered:
                    self._outbox.settle(claimed.id, None)
                else:
                    error = Failure(answer.error or "", answer.status, answer.retry_after)
                    self._outbox.settle(claimed.id, error)

    def rows(self, now_ms: int) -> list[Waiting]:
        with _outbox_errors():
            found = self._outbox.undelivered()
        return [
            Waiting(
                row.id,
                row.tool_name,
                row.base_url or DEFAULT_BASE_URL,
                row.attempts,
                row.created_at,
                None if row.is_dead else row.due_in_s,
                row.error,
            )
            for row in found
        ]

    def revive(self, now_ms: int) -> int:
        with _outbox_errors():
            return self._outbox.revive()


@contextlib.contextmanager
def _outbox_errors() -> Iterator[None]:
    try:
        yield
    except OutboxUnusable as error:
        raise QueueError(str(error)) from error
    except sqlite3.Error as error:
        raise QueueError(f"outbox: {error}; see to the disk, then try again") from error


def queue_at(typed: str) -> Queue:
    """What a path holds. Raises JournalError or QueueError for what is neither a journal nor an outbox."""
    if is_outbox(typed):
        return OutboxQueue(typed)
    if not Files(typed).exists(for_reading=True):
        raise JournalError(f"{typed}: there is neither a journal nor an outbox, or it is empty; give the path of one")
    return JournalQueue(typed)


def is_outbox(path: str) -> bool:
    """Whether a file says that it is a SqliteOutbox's."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe waits for whoever writes into it
            return False
        with open(path, "rb") as file:
            return int.from_bytes(file.read(72)[68:], "big") == APPLICATION_ID
    except OSError:
        return False


# ----------------------------------------------------------------------------------------------------------- delivery


def deliver(
    queue: Queue,
    api_key: str,
    *,
    limit: int | None,
    base_url: str | None,
    ignores_due: bool,
    now_ms: Callable[[], int],
) -> tuple[Tally, str | None]:
    """Sends what is due, each report once, to `base_url` or else to the endpoint that it was made for.

    An endpoint that cannot be reached, or that asks for time, gets nothing more; the others do. Gives the last failure
    as well, for people to read. Raises Busy while a relay owns the journal, also if one took it while reports were
    under way.
    """
    sweep = _Sweep(queue, api_key, base_url, ignores_due=ignores_due, now_ms=now_ms)
    sweep.run(limit)
    rows = queue.rows(now_ms())
    dead = sum(row.due_in_s is None for row in rows)
    return Tally(sweep.delivered, sweep.failed, len(rows) - dead, dead), sweep.last_failure


class _Sweep:
    """One delivery of what is free at its beginning."""

    def __init__(
        self, queue: Queue, api_key: str, base_url: str | None, *, ignores_due: bool, now_ms: Callable[[], int]
    ) -> None:
        self.delivered = 0
        self.failed = 0
        self.last_failure: str | None = None
        self._queue = queue
        self._api_key = api_key
        self._base_url = base_url
        self._ignores_due = ignores_due
        self._now_ms = now_ms
        self._closed: set[str] = set()  # endpoints that get nothing more

    def run(self, limit: int | None) -> None:
        # Chosen once: what fails is due again before all were tried, and with --now it always is.
        free = deque(self._queue.free(self._now_ms(), ignores_due=self._ignores_due))
        left = len(free) if limit is None else limit
        while left and (batch := self._next(free, min(left, _BATCH))):
            began = time.monotonic()  # before the claim, which so ends no sooner than we think
            claimed = self._queue.claim([one.id for one in batch], self._now_ms(), ignores_due=self._ignores_due)
            untried = self._send_claimed(claimed, began + CLAIM_MS / 1000)
            left -= len(claimed) - len(untried)
            free.extendleft(Free(one.id, one.base_url) for one in reversed(untried))

    def _next(self, free: deque[Free], limit: int) -> list[Free]:
        batch: list[Free] = []
        while free and len(batch) < limit:
            one = free.popleft()
            if self._target(one.base_url) not in self._closed:
                batch.append(one)
        return batch

    def _send_claimed(self, claimed: Sequence[Claimed], deadline: float) -> Sequence[Claimed]:
        """Sends what was claimed, side by side, and settles it; gives what it did not try, which is claimed no more."""
        untried = claimed
        try:
            while deadline - time.monotonic() >= _TIMEOUT_S:  # else somebody else may claim it while we send it
                is_open = [self._target(one.base_url) not in self._closed for one in untried]
                group = list(compress(untried, is_open))[:_AT_ONCE]
                if not group:
                    break
                untried = [one for one in untried if one not in group]
                self._settle(list(zip(group, self._send(group), strict=True)))
        finally:
            if untried:
                with contextlib.suppress(Busy, JournalError, QueueError):  # their claims end anyway
                    self._queue.settle([(one, None) for one in untried], self._now_ms())
        return untried

    def _send(self, group: Sequence[Claimed]) -> list[Answer]:
        answers = _exchange([(self._target(one.base_url), one.body) for one in group], self._api_key)
        for one, answer in zip(group, answers, strict=True):
            target = self._target(one.base_url)
            if answer.delivered:
                self.delivered += 1
            else:
                self.failed += 1
                self.last_failure = f"{target}: {answer.error}"
            if answer.status is None or answer.retry_after is not None:
                self._closed.add(target)
        return answers

    def _settle(self, results: Sequence[tuple[Claimed, Answer]]) -> None:
        try:
            self._queue.settle(results, self._now_ms())
        except (Busy, JournalError, QueueError) as error:
            arrived = sum(answer.delivered for _, answer in results)
            if not arrived:
                raise
            raise type(error)(
                f"{error}; {count(arrived, 'report')} that arrived just now could not be marked, and"
                f" {'is' if arrived == 1 else 'are'} sent once more"
            ) from error

    def _target(self, base_url: str) -> str:
        return (self._base_url or base_url).rstrip("/")


def _exchange(requests: Sequence[tuple[str, bytes]], api_key: str) -> list[Answer]:
    """Sends bodies to base URLs, side by side; gives the answers once all are there."""
    answers: list[Answer | None] = [None] * len(requests)
    all_there = threading.Semaphore(0)

    def start(at: int, base_url: str, body: bytes) -> None:
        def done(answer: Answer) -> None:
            answers[at] = answer
            all_there.release()

        start_exchange(base_url + REPORT_PATH, body, api_key=api_key, timeout_s=_TIMEOUT_S, done=done)

    for at, request in enumerate(requests):
        start(at, *request)
    for _ in requests:
        all_there.acquire()
    return [answer for answer in answers if answer is not None]


def row_object(row: Waiting) -> str:
    """One report as a JSON line."""
    return json.dumps({"status": "dead" if row.due_in_s is None else "waiting", **row._asdict()}, ensure_ascii=False)


def row_line(row: Waiting) -> str:
    """One report for a person."""
    state = "dead" if row.due_in_s is None else f"due in {row.due_in_s:.0f} s" if row.due_in_s else "due"
    tries = f", answered {count(row.attempts, 'time')}" if row.attempts else ""
    error = f": {clean(row.error)}" if row.error else ""
    return f"{row.id:>6}  {clean(row.tool_name)}  {state}{tries}  {clean(row.base_url)}{error}"
