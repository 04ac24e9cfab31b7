"""The `reports` table of a journal: each statement that changes it, for its owner and for `report flush` alike.

Every function is part of a transaction that its caller began, and raises sqlite3.Error. What a relay reads of the table
is in records.py.
"""

import sqlite3
from typing import Final, NamedTuple

from records import MAX_REPORT_DELAY_MS
from states import ReportQueued

# A claim is a due time that lies ahead, and an attempt under way, which no retry has. A time that is further away than
# any that is given is of a clock that was set back.
_FREE: Final = (
    "due_at IS NOT NULL AND (due_at <= :now OR due_at > :now + :longest OR (:ignores_due AND NOT is_claimed))"
)


class Claim(NamedTuple):
    """A report that `report flush` may send until `until` (epoch ms), and how it waited before."""

    id: int
    until: int
    tool_name: str
    base_url: str
    body: bytes
    attempts: int
    due_at: int
    error: str | None


def queue(database: sqlite3.Connection, report: ReportQueued) -> None:
    """Adds a report, due at once if it says nothing else; nothing if its dispatch has one already."""
    database.execute(
        "INSERT OR IGNORE INTO reports (id, base_url, tool_name, queued_at, attempts, due_at, body)"
        " VALUES (coalesce(?1, (SELECT min(0, coalesce(min(id), 0)) - 1 FROM reports)), ?2, ?3, ?4, ?5,"
        " coalesce(?6, ?4), ?7)",
        (
            report.dispatch, report.base_url, report.tool_name, report.at_ms, report.attempts, report.due_at,
            report.body,
        ),
    )  # fmt: skip


def mark_delivered(database: sqlite3.Connection, id: int) -> None:
    """Deletes a report; while its dispatch is in doubt what is left of it keeps owners from making another."""
    database.execute(
        "DELETE FROM reports WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM doubts WHERE dispatch = ?1 AND is_open)", (id,)
    )
    database.execute("UPDATE reports SET body = NULL, due_at = NULL, is_claimed = 0 WHERE id = ?", (id,))


def mark_failed(database: sqlite3.Connection, id: int, attempts: int, due_at: int | None, error: str | None) -> None:
    """Notes how a report waits from now on, claimed by nobody. `due_at` None: it was given up."""
    database.execute(
        "UPDATE reports SET attempts = ?, due_at = ?, error = ?, is_claimed = 0 WHERE id = ? AND body IS NOT NULL",
        (attempts, due_at, error, id),
    )


def forget_delivered(database: sqlite3.Connection) -> None:
    """Deletes what is left of delivered reports: an owner has settled what they were kept for."""
    database.execute("DELETE FROM reports WHERE due_at IS NULL AND body IS NULL")


def free(database: sqlite3.Connection, now_ms: int, *, ignores_due: bool) -> list[tuple[int, str]]:
    """Id and base URL of the reports that may be claimed, the longest due first. `ignores_due`: of retries as well."""
    query = f"SELECT id, base_url FROM reports WHERE {_FREE} ORDER BY due_at, id"  # noqa: S608 (a constant)
    return database.execute(query, _values(now_ms, ignores_due)).fetchall()


def claim(database: sqlite3.Connection, id: int, now_ms: int, until: int, *, ignores_due: bool) -> Claim | None:
    """Claims a report; None if it cannot be any more."""
    query = (
        "SELECT id, :until, tool_name, base_url, body, attempts, due_at, error FROM reports"  # noqa: S608 (a constant)
        f" WHERE id = :id AND {_FREE}"
    )
    row = database.execute(query, {"id": id, "until": until, **_values(now_ms, ignores_due)}).fetchone()
    if row is None:
        return None
    database.execute("UPDATE reports SET due_at = ?, is_claimed = 1 WHERE id = ?", (until, id))
    return Claim(*row)


def holds(database: sqlite3.Connection, claim: Claim) -> bool:
    """Whether a claim still stands: else it ran out, and somebody else has the report, or has delivered it."""
    query = "SELECT 1 FROM reports WHERE id = ? AND due_at = ? AND is_claimed"
    return database.execute(query, (claim.id, claim.until)).fetchone() is not None


def give_back(database: sqlite3.Connection, claim: Claim) -> None:
    """Lets a report that was not tried wait as it did before."""
    mark_failed(database, claim.id, claim.attempts, claim.due_at, claim.error)


def put_behind(database: sqlite3.Connection, claim: Claim, now_ms: int, error: str | None) -> None:
    """Gives back a report that nobody answered, behind those that are due: it may be what its endpoint chokes on.

    It comes no sooner than it was to, and what an endpoint said of it is worth more than that none was there.
    """
    is_ahead = now_ms < claim.due_at <= now_ms + MAX_REPORT_DELAY_MS
    due_at = claim.due_at if is_ahead else now_ms
    mark_failed(database, claim.id, claim.attempts, due_at, claim.error if claim.attempts else error)


def revive(database: sqlite3.Connection, now_ms: int) -> int:
    """Makes what was given up due again, with all attempts before it; how many."""
    query = "UPDATE reports SET due_at = ?, attempts = 0 WHERE due_at IS NULL AND body IS NOT NULL"
    return database.execute(query, (now_ms,)).rowcount


def _values(now_ms: int, ignores_due: bool) -> dict[str, int]:
    return {"now": now_ms, "longest": MAX_REPORT_DELAY_MS, "ignores_due": ignores_due}
