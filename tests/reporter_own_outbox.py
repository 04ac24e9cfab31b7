"""An outbox in a database of one's own, as the README shows it: one table, and claims for the sweepers."""

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any, Final

from reporter import MAX_ATTEMPTS, OutboxRecord

CLAIM_S: Final = 60  # must be above the reporter's timeout_s


class OwnOutbox:
    """Reports in a table of the service's own database. A real one would not block the event loop."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database  # isolation_level=None: each statement is a transaction
        database.execute(
            "CREATE TABLE IF NOT EXISTS reports (id INTEGER PRIMARY KEY, body TEXT, tool_name TEXT,"
            " attempts INTEGER DEFAULT 0, last_error TEXT, locked_until REAL)"
        )

    async def enqueue(self, *, body: Mapping[str, Any], tool_name: str) -> int | None:
        row = (json.dumps(body), tool_name, time.time() + CLAIM_S)  # whoever enqueues delivers, so the row is claimed
        sql = "INSERT INTO reports (body, tool_name, locked_until) VALUES (?, ?, ?)"
        return self._database.execute(sql, row).lastrowid

    async def mark_delivered(self, id: int) -> None:
        self._database.execute("DELETE FROM reports WHERE id = ?", (id,))

    async def mark_failed(self, id: int, error: str) -> None:
        # A fault of the connection (status None) is no attempt: an outage must not use them up.
        answered = getattr(error, "status", None) is not None
        sql = "UPDATE reports SET attempts = attempts + ?, last_error = ?, locked_until = 0 WHERE id = ?"
        self._database.execute(sql, (answered, str(error), id))

    async def list_retryable(self, limit: int) -> list[OutboxRecord]:
        now = time.time()
        rows = self._database.execute(  # one statement, so no second sweeper gets the same rows
            "UPDATE reports SET locked_until = ? WHERE id IN (SELECT id FROM reports"
            " WHERE attempts < ? AND locked_until < ? ORDER BY locked_until, id LIMIT ?)"
            " RETURNING id, body, tool_name, attempts, locked_until",
            (now + CLAIM_S, MAX_ATTEMPTS, now, limit),
        ).fetchall()
        return [OutboxRecord(id, json.loads(body), *rest) for id, body, *rest in rows]
