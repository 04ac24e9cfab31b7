"""Where reports wait, seen from the command line: in a journal, or in the file of a SqliteOutbox; and their delivery.

A journal's lock is held while reports are claimed and while they are settled, never while anything is sent. The claim
is on disk: a due time that lies ahead, so that no other sweep and no relay takes the same report meanwhile.
"""

import contextlib
import json
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from reader import reading
from records import MAX_REPORT_DELAY_MS
from render import clean
from reporter import (
    APPLICATION_ID,
    DEFAULT_BASE_URL,
    REPORT_PATH,
    Answer,
    Failure,
    Fate,
    OutboxRecord,
    OutboxUnusable,
    SqliteOutbox,
    after,
    encode,
    start_exchange,
)
from storage import Files, JournalError
from writing import transaction, writing

CLAIM_MS: Final = 60_000
_AT_ONCE: Final = 4  # exchanges
_TIMEOUT_S: Final = 5.0
_BATCH: Final = 40  # claimed together: all are sent before their claim ends, if each takes as long as it may


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


class Claimed(NamedTuple):
    """A report that this process may send."""

    id: int
    tool_name: str
    base_url: str
    attempts: int
    body: bytes
    claim: int  # what tells our claim from a later one


class Tally(NamedTuple):
    """What a delivery came to."""

    delivered: int
    failed: int
    waiting: int
    dead: int


class Queue(Protocol):
    """Reports in a file."""

    def claim(self, limit: int, now_ms: int, *, ignores_due: bool) -> list[Claimed]:
        """Takes reports that are due, the longest first."""

    def settle(self, results: Sequence[tuple[Claimed, Answer | None]], now_ms: int) -> None:
        """Notes what became of each that was claimed; None: it was not tried."""

    def rows(self, now_ms: int) -> list[Waiting]:
        """All that wait, and then those that were given up; the oldest first."""

    def revive(self, now_ms: int) -> int:
        """Makes what was given up due again; how many."""


class JournalQueue:
    """The reports in a journal that no relay owns at the moment."""

    def __init__(self, typed: str) -> None:
        self._typed = typed
        self._folder = Files(typed).folder

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with writing(self._typed) as database, transaction(database, self._folder):
            yield database

    def claim(self, limit: int, now_ms: int, *, ignores_due: bool) -> list[Claimed]:
        """Raises Busy while a relay owns the journal: that relay delivers."""
        until = now_ms + CLAIM_MS
        with self._writing() as database:
            # A claim is a due time and an attempt under way, which no retry has: that one is left alone by --now too.
            query = (
                "SELECT id, tool_name, base_url, attempts, body, ?1 FROM reports WHERE due_at IS NOT NULL AND"
                " (due_at <= ?2 OR due_at > ?2 + ?3 OR (?4 AND NOT is_claimed)) ORDER BY due_at, id LIMIT ?5"
            )
            values = (until, now_ms, MAX_REPORT_DELAY_MS, ignores_due, limit)
            rows = database.execute(query, values).fetchall()
            for row in rows:
                database.execute("UPDATE reports SET due_at = ?, is_claimed = 1 WHERE id = ?", (until, row[0]))
        return [Claimed(*row) for row in rows]

    def settle(self, results: Sequence[tuple[Claimed, Answer | None]], now_ms: int) -> None:
        """A report whose claim has ended and that somebody else has, or has delivered, is left alone."""
        with self._writing() as database:
            for claimed, answer in results:
                ours = (claimed.id, claimed.claim)
                verdict = None if answer is None else after(answer, claimed.attempts, jitter=random.random())
                if verdict is not None and verdict.kind is Fate.DELIVERED:
                    database.execute("DELETE FROM reports WHERE id = ? AND due_at = ? AND is_claimed", ours)
                    continue
                attempts, due_at = claimed.attempts, now_ms
                if verdict is not None and verdict.kind is not Fate.UNREACHABLE:
                    attempts += 1
                    due_at += round(verdict.delay_s * 1000)
                is_dead = verdict is not None and verdict.kind is Fate.DEAD
                database.execute(
                    "UPDATE reports SET attempts = ?, due_at = ?, error = coalesce(?, error), is_claimed = 0"
                    " WHERE id = ? AND due_at = ? AND is_claimed",
                    (attempts, None if is_dead else due_at, answer and answer.error, *ours),
                )

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
            return database.execute(
                "UPDATE reports SET due_at = ?, attempts = 0 WHERE due_at IS NULL AND body IS NOT NULL", (now_ms,)
            ).rowcount


class OutboxQueue:
    """The reports in the file of a SqliteOutbox, which any number of processes may use at once."""

    def __init__(self, path: str) -> None:
        self._outbox = SqliteOutbox(path, visibility_timeout_s=CLAIM_MS / 1000)

    def claim(self, limit: int, now_ms: int, *, ignores_due: bool) -> list[Claimed]:
        with _outbox_errors():
            found = self._outbox.claim(limit, ignores_due=ignores_due)
        return [_claimed(record) for record in found]

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
            counts = self._outbox.counts()
            found = [*self._outbox.waiting(counts.waiting), *self._outbox.dead(counts.dead)]
        return [
            Waiting(
                row.id,
                row.tool_name,
                row.base_url or DEFAULT_BASE_URL,
                row.attempts,
                row.created_at,
                None if at >= counts.waiting else row.due_in_s,
                row.error,
            )
            for at, row in enumerate(found)
        ]

    def revive(self, now_ms: int) -> int:
        with _outbox_errors():
            return self._outbox.revive()


def _claimed(record: OutboxRecord) -> Claimed:
    base_url = record.base_url or DEFAULT_BASE_URL
    return Claimed(record.id, record.tool_name, base_url, record.attempts, encode(record.body), 0)


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
) -> Tally:
    """Sends what is due, each report to `base_url` or else to the endpoint that it was made for.

    After a fault of the connection nothing more is sent: what is behind would fare alike. Raises Busy while a relay
    owns the journal, also if one took it while reports were under way: what was delivered then is sent once more.
    """
    delivered = failed = 0
    is_reachable = True
    left = sum(row.due_in_s is not None for row in queue.rows(now_ms()))  # each is tried once at most
    if limit is not None:
        left = min(left, limit)
    while is_reachable and left and (claimed := queue.claim(min(left, _BATCH), now_ms(), ignores_due=ignores_due)):
        left -= len(claimed)
        results: list[tuple[Claimed, Answer | None]] = []
        try:
            while is_reachable and len(results) < len(claimed):
                group = claimed[len(results) : len(results) + _AT_ONCE]
                answers = _send(group, api_key, base_url)
                results += zip(group, answers, strict=True)
                is_reachable = all(answer.status is not None for answer in answers)
        finally:
            rest: list[tuple[Claimed, Answer | None]] = [(one, None) for one in claimed[len(results) :]]
            queue.settle([*results, *rest], now_ms())
        delivered += sum(answer is not None and answer.delivered for _, answer in results)
        failed += sum(answer is not None and not answer.delivered for _, answer in results)
    rows = queue.rows(now_ms())
    dead = sum(row.due_in_s is None for row in rows)
    return Tally(delivered, failed, len(rows) - dead, dead)


def _send(group: Sequence[Claimed], api_key: str, base_url: str | None) -> list[Answer]:
    """Sends reports side by side; gives the answers once all are there."""
    answers: list[Answer | None] = [None] * len(group)
    all_there = threading.Semaphore(0)

    def start(at: int, claimed: Claimed) -> None:
        def done(answer: Answer) -> None:
            answers[at] = answer
            all_there.release()

        url = (base_url or claimed.base_url).rstrip("/") + REPORT_PATH
        start_exchange(url, claimed.body, api_key=api_key, timeout_s=_TIMEOUT_S, done=done)

    for at, claimed in enumerate(group):
        start(at, claimed)
    for _ in group:
        all_there.acquire()
    return [answer for answer in answers if answer is not None]


def row_object(row: Waiting) -> str:
    """One report as a JSON line."""
    return json.dumps({"status": "dead" if row.due_in_s is None else "waiting", **row._asdict()}, ensure_ascii=False)


def row_line(row: Waiting) -> str:
    """One report for a person."""
    state = "dead" if row.due_in_s is None else f"due in {row.due_in_s:.0f} s" if row.due_in_s else "due"
    tries = f", answered {row.attempts} times" if row.attempts else ""
    error = f": {clean(row.error)}" if row.error else ""
    return f"{row.id:>6}  {clean(row.tool_name)}  {state}{tries}  {clean(row.base_url)}{error}"
