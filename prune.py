"""Takes whole families of workflows out of a journal when they are old and every row of them is final.

What stays of each is its name and its last sequence, so that its places are refused and never run again, and the
branches' names, so that none is given twice.
"""

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from branches import root_of
from render import clean, count, iso, size
from storage import Files
from writing import transaction, writing

# What a place may hold and be final. An attempt in doubt keeps its family, also where a later attempt decides.
_OPEN: Final = """
SELECT DISTINCT a.workflow_id FROM attempts AS a
WHERE a.status IN ('PENDING', 'IN_DOUBT')
    OR (
        (
            a.status = 'INPUT_REQUIRED'
            OR (a.status = 'TASK' AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.dispatch = a.id))
        )
        AND NOT EXISTS (
            SELECT 1 FROM attempts AS later
            WHERE later.workflow_id = a.workflow_id AND later.sequence = a.sequence AND later.attempt > a.attempt
                AND later.status NOT IN ('NOT_SENT', 'NOT_EXECUTED')
        )
    )
"""
_SIZES: Final = """
SELECT d.workflow_id, max(d.sequence), count(*), sum(length(d.arguments)),
    sum(coalesce(length(o.result), 0) + coalesce(length(o.error), 0)), max(d.started_at), max(o.completed_at)
FROM dispatches AS d LEFT JOIN outcomes AS o ON o.dispatch = d.id
GROUP BY d.workflow_id
"""
_LATER_FACTS: Final = (
    "SELECT d.workflow_id, max(e.decided_at) FROM decisions AS e JOIN dispatches AS d ON d.id = e.dispatch GROUP BY 1",
    "SELECT d.workflow_id, max(t.ended_at) FROM tasks AS t JOIN dispatches AS d ON d.id = t.dispatch GROUP BY 1",
    "SELECT branch, max(forked_at) FROM forks GROUP BY 1",
)
_CHILDREN: Final = ("deliveries", "tasks", "decisions", "doubts", "outcomes")
_ROW_BYTES: Final = 300  # a row with its keys, about, without what went over the wire


@dataclass(slots=True)
class Old:
    """A family, as far as pruning goes."""

    root: str
    members: dict[str, int] = field(default_factory=dict)  # by workflow, its last sequence
    rows: int = 0
    about_bytes: int = 0
    newest_at: int = 0
    is_final: bool = True


def old_families(database: sqlite3.Connection, before_ms: int) -> list[Old]:
    """The families that may go: every row final, and no fact about them newer than a time."""
    families: dict[str, Old] = {}
    for workflow_id, last, rows, arguments, answers, started_at, completed_at in database.execute(_SIZES):
        root = root_of(workflow_id)
        old = families.setdefault(root, Old(root))
        old.members[workflow_id] = last
        old.rows += rows
        old.about_bytes += rows * _ROW_BYTES + (arguments or 0) + (answers or 0)
        old.newest_at = max(old.newest_at, started_at, completed_at or 0)
    for query in _LATER_FACTS:
        for workflow_id, at in database.execute(query):
            if (found := families.get(root_of(workflow_id))) is not None:
                found.newest_at = max(found.newest_at, at)
    for (workflow_id,) in database.execute(_OPEN):
        families[root_of(workflow_id)].is_final = False
    return [old for old in families.values() if old.is_final and old.newest_at <= before_ms]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went, or would go."""

    families: Sequence[Old]
    is_dry: bool
    size_before: int = 0
    size_after: int = 0
    why_kept: str | None = None  # why its space did not go back to the system

    def lines(self) -> list[str]:
        """For a person."""
        if not self.families:
            return ["nothing to prune: no family of workflows is that old with every row final"]
        verb = "would go" if self.is_dry else "went"
        lines = []
        for old in self.families:
            branches = len(old.members) - (old.root in old.members)
            more = f" and {count(branches, 'branch', 'branches')}" if branches else ""
            lines.append(
                f"{clean(old.root)}{more}: {count(old.rows, 'row')} {verb}, the newest of {iso(old.newest_at)}"
            )
        total = f"{count(len(self.families), 'workflow')}, {count(self.rows, 'row')}"
        if self.is_dry:
            return [*lines, f"{total}, about {size(self.about_bytes)}; nothing was changed (--dry-run)"]
        sizes = f"the journal went from {size(self.size_before)} to {size(self.size_after)}"
        return [*lines, f"{total}: {sizes}{f' ({self.why_kept})' if self.why_kept else ''}"]

    @property
    def rows(self) -> int:
        return sum(old.rows for old in self.families)

    @property
    def about_bytes(self) -> int:
        return sum(old.about_bytes for old in self.families)

    def members(self) -> dict[str, Any]:
        """For a program."""
        return {
            "dry_run": self.is_dry,
            "families": [
                {"workflow_id": old.root, "members": old.members, "rows": old.rows, "newest_at": iso(old.newest_at)}
                for old in self.families
            ],
            "rows": self.rows,
            "size_before_bytes": self.size_before,
            "size_after_bytes": self.size_after,
        }


def prune(typed: str, before_ms: int, now_ms: int) -> Pruned:
    """Deletes, in one commit that is on disk on return, and gives the space back. Raises what `writing` does."""
    files = Files(typed)
    before = _size(files)
    why_kept = None
    with writing(typed) as database:
        with transaction(database, files.folder):
            families = old_families(database, before_ms)
            last_id = database.execute(
                "SELECT max(coalesce((SELECT max(id) FROM dispatches), 0),"
                " coalesce((SELECT max(last_id) FROM prunings), 0))"
            ).fetchone()[0]
            for old in families:
                for workflow_id, last in old.members.items():
                    _delete(database, workflow_id, last, last_id, now_ms)
        if families:
            why_kept = _shrink(database)
    return Pruned(families, False, before, _size(files), why_kept)


def _delete(database: sqlite3.Connection, workflow_id: str, last: int, last_id: int, now_ms: int) -> None:
    for child in _CHILDREN:
        database.execute(
            f"DELETE FROM {child} WHERE dispatch IN (SELECT id FROM dispatches WHERE workflow_id = ?)",  # noqa: S608  # ours
            (workflow_id,),
        )
    database.execute("DELETE FROM dispatches WHERE workflow_id = ?", (workflow_id,))
    database.execute(
        "INSERT INTO prunings (workflow_id, last_sequence, last_id, pruned_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET last_sequence = max(last_sequence, excluded.last_sequence),"
        " last_id = excluded.last_id, pruned_at = excluded.pruned_at",
        (workflow_id, last, last_id, now_ms),
    )


def _shrink(database: sqlite3.Connection) -> str | None:
    """Gives the space back to the system; why not, where that did not work. What was deleted stays deleted."""
    try:
        database.execute("VACUUM")  # keeps ids: they are INTEGER PRIMARY KEYs
        is_blocked = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.Error as error:
        return f"the space could not be given back: {clean(str(error))}; it is used for new rows"
    return "a reader holds the rest; it goes back when that ends and the journal is used again" if is_blocked else None


def _size(files: Files) -> int:
    """What the journal takes on disk, with its log."""
    total = 0
    for path in (files.path, files.wal):
        if os.path.exists(path):
            total += os.stat(path).st_size
    return total
