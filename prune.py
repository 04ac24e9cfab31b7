"""Takes whole families of workflows out of a journal when they are old and every row of them is final.

What stays of each is its name and its last sequence, so that its places are refused and never run again, and the
branches' names, so that none is given twice.
"""

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from branches import root_of
from records import Records
from render import clean, count, iso, quoted, size
from states import VOID_SQL, Status
from storage import Files
from writing import transaction, writing

# What keeps a family: an attempt in doubt does also where a later attempt decides.
_OPEN: Final = """
SELECT a.workflow_id, a.sequence, a.attempt, a.tool_name, CASE a.status WHEN 'PENDING' THEN ?1 ELSE a.status END
FROM attempts AS a
WHERE a.status IN ('PENDING', 'IN_DOUBT')
    OR (
        (
            a.status = 'INPUT_REQUIRED'
            OR (a.status = 'TASK' AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.dispatch = a.id))
        )
        AND NOT EXISTS (
            SELECT 1 FROM attempts AS later
            WHERE later.workflow_id = a.workflow_id AND later.sequence = a.sequence AND later.attempt > a.attempt
                AND later.status NOT IN VOID
        )
    )
ORDER BY a.id
""".replace("VOID", VOID_SQL)
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
_NAMED: Final = 20  # families that stay; the rest is counted
_ROW_BYTES: Final = 300  # a row with its keys, about, without what went over the wire


class Open(NamedTuple):
    """An attempt that is not final."""

    workflow_id: str
    sequence: int
    attempt: int
    tool_name: str
    status: str


@dataclass(slots=True)
class Family:
    """A root workflow and its branches, as far as pruning goes."""

    root: str
    members: dict[str, int] = field(default_factory=dict)  # by workflow, its last sequence
    rows: int = 0
    about_bytes: int = 0
    newest_at: int = 0
    open: list[Open] = field(default_factory=list)


def old_families(database: sqlite3.Connection, before_ms: int, open_status: Status) -> list[Family]:
    """The families of which no fact is newer than a time. Those may go of which no row is open.

    `open_status` is what a row is that has no outcome.
    """
    families: dict[str, Family] = {}
    for workflow_id, last, rows, arguments, answers, started_at, completed_at in database.execute(_SIZES):
        root = root_of(workflow_id)
        family = families.setdefault(root, Family(root))
        family.members[workflow_id] = last
        family.rows += rows
        family.about_bytes += rows * _ROW_BYTES + (arguments or 0) + (answers or 0)
        family.newest_at = max(family.newest_at, started_at, completed_at or 0)
    for query in _LATER_FACTS:
        for workflow_id, at in database.execute(query):
            if (found := families.get(root_of(workflow_id))) is not None:
                found.newest_at = max(found.newest_at, at)
    for each in map(Open._make, database.execute(_OPEN, (open_status,))):
        families[root_of(each.workflow_id)].open.append(each)
    return [family for family in families.values() if family.newest_at <= before_ms]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went, or would go, and what stays although it is old."""

    families: Sequence[Family]
    kept: Sequence[Family]
    path: str
    sizes: tuple[int, int] | None = None  # of the journal before and after; None where nothing was to be changed
    why_not_shrunk: str | None = None  # why its space did not go back to the system

    @classmethod
    def of(cls, old: Sequence[Family], path: str, **more: Any) -> "Pruned":
        """What may go of old families goes."""
        return cls([each for each in old if not each.open], [each for each in old if each.open], path, **more)

    def lines(self, command: Sequence[str]) -> list[str]:
        """For a person. `command` starts this program the way this process was started."""
        verb = "would go" if self.sizes is None else "went"
        lines = []
        for family in self.families:
            branches = len(family.members) - (family.root in family.members)
            more = f" and {count(branches, 'branch', 'branches')}" if branches else ""
            rows = f"{count(family.rows, 'row')} {verb}, the newest of {iso(family.newest_at)}"
            lines.append(f"{clean(family.root)}{more}: {rows}")
        for family in self.kept[:_NAMED]:
            first, *others = family.open
            more = f", and {count(len(others), 'more attempt')}" if others else ""
            place = f"attempt {first.attempt} at sequence {first.sequence} of {clean(first.workflow_id)}"
            words = ["journal", "show", self.path, str(first.sequence), f"--workflow-id={first.workflow_id}"]
            lines.append(
                f"{clean(family.root)} is old and stays: {clean(first.tool_name)}, {place}, is {first.status}{more}"
            )
            lines.append(f"  {quoted([*command, *words])}")
        if len(self.kept) > _NAMED:
            lines.append(f"{len(self.kept) - _NAMED:,} more are old and stay")
        return [*lines, self._total()]

    def _total(self) -> str:
        total = f"{count(len(self.families), 'workflow')}, {count(self.rows, 'row')}"
        if not self.families:
            total = "nothing to prune: no family of workflows is that old with every row final"
        if self.sizes is None:
            about = f", about {size(self.about_bytes)}" if self.families else ""
            return f"{total}{about}; nothing was changed (--dry-run)"
        before, after = map(size, self.sizes)
        if not self.families and before == after and not self.why_not_shrunk:
            return total
        why = f" ({self.why_not_shrunk})" if self.why_not_shrunk else ""
        return f"{total}: the journal went from {before} to {after}{why}"

    @property
    def rows(self) -> int:
        return sum(family.rows for family in self.families)

    @property
    def about_bytes(self) -> int:
        return sum(family.about_bytes for family in self.families)

    def members(self) -> dict[str, Any]:
        """For a program. Null is what is not known: nothing was changed."""
        before, after = self.sizes or (None, None)
        return {
            "dry_run": self.sizes is None,
            "families": [
                {
                    "workflow_id": family.root,
                    "members": family.members,
                    "rows": family.rows,
                    "about_bytes": family.about_bytes,
                    "newest_at": iso(family.newest_at),
                }
                for family in self.families
            ],
            "kept": [
                {"workflow_id": family.root, "open": [each._asdict() for each in family.open]} for family in self.kept
            ],
            "rows": self.rows,
            "about_bytes": self.about_bytes,
            "size_before_bytes": before,
            "size_after_bytes": after,
            "why_not_shrunk": self.why_not_shrunk,
        }


def prune(typed: str, before_ms: int, now_ms: int) -> Pruned:
    """Deletes, in one commit that is on disk on return, and gives the space back. Raises what `writing` does."""
    files = Files(typed)
    size_before = _size(files)
    why = None
    with writing(typed) as database:
        with transaction(database, files.folder):
            old = old_families(database, before_ms, Status.IN_DOUBT)
            last_id = Records(database).last_id()
            for family in old:
                for workflow_id, last in family.members.items() if not family.open else ():
                    _delete(database, workflow_id, last, last_id, now_ms)
        # Free pages may be those of an earlier time, when the disk was too full to shrink.
        if database.execute("PRAGMA freelist_count").fetchone()[0]:
            why = _shrink(database)
    return Pruned.of(old, files.path, sizes=(size_before, _size(files)), why_not_shrunk=why)


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
        return f"the space could not be given back: {clean(str(error))}; new rows use it, and another prune tries again"
    return "a reader holds the rest; it goes back when that ends and the journal is used again" if is_blocked else None


def _size(files: Files) -> int:
    """What the journal takes on disk, with its log."""
    total = 0
    for path in (files.path, files.wal):
        if os.path.exists(path):
            total += os.stat(path).st_size
    return total
