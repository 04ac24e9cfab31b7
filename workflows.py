"""Where this process is in each workflow, and what that makes of a call: its place, what the table says, a branch.

One decision per call, made before anything is written and changing nothing: `went` says that it was carried out. What
changes here (the current branch, what was used) holds for the life of the process; what changes on disk is left to
whoever acts.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from branches import Fork, root_of
from journal import Journal
from locate import Ask, Place, Progress, Unpinned, Via, locate
from states import VOID, Action, Entry, Status, blocking_doubt, decide

_log = logging.getLogger("checkpoint.workflows")

_NAMED_EFFECTS: Final = 20  # of a branch that is left, in the log


class Move(NamedTuple):
    """To another branch, which begins with this call where there is a fork."""

    branch: str
    sequence: int  # where it differs from the one that is left
    effects: Sequence[str]  # of the one that is left, which stay in the world
    fork: Fork | None = None


class Decision(NamedTuple):
    """What is to be done with a call, and where."""

    action: Action
    place: Place
    move: Move | None = None


class Workflows:
    """All workflows of one process. Needs the journal's lock for every question."""

    def __init__(self, journal: Journal, unpinned: Unpinned, *, forks: bool) -> None:
        self._journal = journal
        self._unpinned = unpinned
        self._forks = forks
        self._progress: dict[str, Progress] = {}  # by root

    def decide(self, ask: Ask, workflow_id: str, given_up: Callable[[], Sequence[Entry]]) -> Decision:
        """What to do with a call that names a workflow.

        `given_up` tells which calls upstream may still answer though nobody waits any more.
        """
        progress = self._progress_in(workflow_id)
        place = locate(ask, progress, self._journal)
        if place.via is Via.NEW:
            doubt = self._doubt(ask, progress, given_up())
            if doubt is not None:
                return Decision(Action.REFUSE_IN_DOUBT, Place(*doubt.place, doubt, Via.NEW))
        action = decide(place.entry, ask.signature)
        if action is Action.DIVERGE and self._may_leave(progress, place):
            return self._elsewhere(ask, progress, place)
        return Decision(action, place)

    def expects(self, ask: Ask, workflow_id: str) -> bool:
        """Whether the place that a call means has this very call on record."""
        entry = locate(ask, self._progress_in(workflow_id), self._journal).entry
        return entry is not None and entry.signature == ask.signature

    def went(self, ask: Ask, workflow_id: str, decision: Decision, *, is_taken: bool) -> None:
        """Notes that a decision was carried out. `is_taken`: the call is answered or under way, and not refused."""
        progress = self._progress_in(workflow_id)
        if decision.move is not None:
            self._tell(progress, decision.move)
            progress.branch = decision.move.branch
        if is_taken:
            progress.passed(decision.place, ask)

    def withdraw(self, fork: Fork) -> None:
        """Goes back to where a branch left whose first row was not written."""
        self._progress[root_of(fork.branch)].branch = fork.parent

    def _progress_in(self, workflow_id: str) -> Progress:
        """The progress of a workflow's whole family, since a process is on one branch of it at a time."""
        root = root_of(workflow_id)
        family = self._journal.family(root)
        progress = self._progress.get(root)
        if progress is None:
            named = self._journal.workflow_id  # only who starts the process can name a branch
            branch = named if named != root and named in family.members else family.newest
            progress = self._progress[root] = Progress(family, branch, self._unpinned)
        progress.follow(family)
        return progress

    def _doubt(self, ask: Ask, progress: Progress, given_up: Sequence[Entry]) -> Entry | None:
        """The row in doubt that a new call without a pin may not pass, in the history that it goes on with."""
        doubts = [entry for entry in (*given_up, *self._journal.doubts()) if progress.sees(entry.place)]
        if not doubts:
            return None
        return blocking_doubt(doubts, ask.tool_name, ask.signature, {entry.id for entry in given_up})

    # ------------------------------------------------------------------------------------------------------- branches

    def _may_leave(self, progress: Progress, place: Place) -> bool:
        """Whether a divergence is a new branch, and not a mistake.

        A host that sends an id again means that call; and a history that went on past a place cannot be left there.
        """
        return self._forks and place.via is not Via.CALL_ID and progress.reached <= place.sequence

    def _elsewhere(self, ask: Ask, progress: Progress, place: Place) -> Decision:
        """What to do with a call that diverges: on the branch that has it on record here, or on one that begins."""
        effects = list(self._effects(progress, place.sequence))
        for member in progress.family.sharing(progress.branch, place.sequence):
            owner = progress.family.owner(member, place.sequence)
            entry = self._journal.entry(owner, place.sequence)
            if entry is not None and entry.signature == ask.signature:
                there = place._replace(workflow_id=owner, entry=entry)
                return Decision(decide(entry, ask.signature), there, Move(member, place.sequence, effects))
        fork = Fork(progress.family.next_name(), progress.branch, place.sequence)
        there = place._replace(workflow_id=fork.branch, entry=None)
        return Decision(Action.PROCEED, there, Move(fork.branch, place.sequence, effects, fork))

    def _effects(self, progress: Progress, sequence: int) -> Iterator[str]:
        """What the current branch may have left in the world, from a place on; of many, the first."""
        named = 0
        for entry in self._entries_from(progress, sequence):
            if entry.status in VOID or entry.status is Status.PRUNED:
                continue
            if named == _NAMED_EFFECTS:
                yield "and more"
                return
            yield f"{entry.tool_name} at {entry.sequence} ({entry.status})"
            named += 1

    def _entries_from(self, progress: Progress, sequence: int) -> Iterator[Entry]:
        """What the current branch sees from a place on."""
        for owner, start, below in progress.family.line(progress.branch):
            after: int | None = max(sequence, start) - 1
            while after is not None and (after := self._journal.next_sequence(owner, after, below)) is not None:
                entry = self._journal.entry(owner, after)
                if entry is not None:
                    yield entry

    def _tell(self, progress: Progress, move: Move) -> None:
        _log.warning(
            "workflow %s: leaves branch %s at sequence %d for %s; what stays in the world: %s",
            progress.family.root,
            progress.branch,
            move.sequence,
            move.branch,
            ", ".join(move.effects) or "nothing",
        )
