"""Where this process is in each workflow, and what that makes of a call: its place, what the table says, a branch.

One decision per call, made before anything is written and changing nothing; `happened` says that it came about, for a
call that leaves once its row is on disk. What changes here (the current branch, what was used) holds for the life of
the process; what changes on disk is left to whoever acts.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from branches import Fork, root_of
from journal import Journal
from locate import Ask, Place, Progress, Unpinned, Via, locate, rows_behind
from states import VOID, Action, Cause, Entry, Status, blocking_doubt, decide

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
    blocked_by: Entry | None = None  # another place's row, because of which the call is refused


class Workflows:
    """All workflows of one process. Needs the journal's lock for every question."""

    def __init__(self, journal: Journal, unpinned: Unpinned, *, forks: bool) -> None:
        self._journal = journal
        self._unpinned = unpinned
        self._forks = forks
        self._progress: dict[str, Progress] = {}  # by root

    def decide(
        self,
        ask: Ask,
        workflow_id: str,
        in_flight: Callable[[], Mapping[int, Entry]],
        may_repeat: Callable[[Entry], bool],
    ) -> Decision:
        """What to do with a call that names a workflow.

        `in_flight` tells which calls upstream may still answer, by the ids of their rows; nobody waits for one with a
        cause. `may_repeat` tells whether a call in doubt may run again at its own place.
        """
        progress = self._progress_in(workflow_id)
        place = locate(ask, progress, self._journal)
        decision = Decision(self._action(ask, place.entry, may_repeat), place)
        if decision.action is Action.DIVERGE and self._may_leave(progress, place):
            decision = self._elsewhere(ask, progress, place, may_repeat)
        if decision.action is not Action.PROCEED:
            return decision
        if place.via is Via.PIN:  # no doubt but that of its own row is in its way
            stray = self._stray(ask, progress, decision.place)
            return decision if stray is None else Decision(Action.DIVERGE, place, blocked_by=stray)
        doubt = self._doubt(ask, progress, decision, in_flight())
        return decision if doubt is None else Decision(Action.REFUSE_IN_DOUBT, place, blocked_by=doubt)

    def _action(self, ask: Ask, entry: Entry | None, may_repeat: Callable[[Entry], bool]) -> Action:
        """What the table says, and a server that is trusted."""
        action = decide(entry, ask.signature)
        is_itself = entry is not None and entry.signature == ask.signature
        if action is Action.REFUSE_IN_DOUBT and entry is not None and is_itself and may_repeat(entry):
            return Action.PROCEED
        return action

    def expects(self, ask: Ask, workflow_id: str) -> bool:
        """Whether the place that a call means has this very call on record."""
        entry = locate(ask, self._progress_in(workflow_id), self._journal).entry
        return entry is not None and entry.signature == ask.signature

    def happened(self, ask: Ask, decision: Decision, *, is_refused: bool = False) -> None:
        """Notes that a call was refused or answered or joined as decided, or that it leaves and its row is on disk."""
        place, move = decision.place, decision.move
        progress = self._progress[root_of(place.workflow_id)]
        if move is not None:
            if move.fork is not None:
                progress.follow(self._journal.family(progress.family.root))
            self._tell(progress, move)
            progress.branch = move.branch
        if is_refused:
            return
        if decision.action is not Action.JOIN:  # else the call that it joined has the place
            progress.passed(place, ask)
        if decision.action is not Action.PROCEED:
            progress.bind(place, ask)

    def released(self, entry: Entry) -> None:
        """Notes that nobody got an answer from a call that had a place."""
        self._progress[root_of(entry.workflow_id)].released(entry)

    def withdrawn(self, entry: Entry) -> None:
        """Notes that the row of a call was not written."""
        progress = self._progress[root_of(entry.workflow_id)]
        progress.released(entry)
        progress.unbind(entry)

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

    def _doubt(self, ask: Ask, progress: Progress, decision: Decision, in_flight: Mapping[int, Entry]) -> Entry | None:
        """The row in doubt that a call without a pin may not pass, in the history that it goes on with.

        A new call passes none that it may be, in other words. One that has a place of its own passes all but those that
        this process left itself with the same signature: it may be the call that its client gave up, made again.
        """
        place = decision.place
        doubts = [entry for entry in self._given_up(in_flight) if entry.place != (place.workflow_id, place.sequence)]
        if place.entry is None and decision.move is None:
            doubts += self._journal.doubts()
        else:
            doubts = [entry for entry in doubts if entry.signature == ask.signature]
        owner, branches = progress.family.owner, {progress.branch, place.workflow_id}
        doubts = [
            doubt for doubt in doubts if doubt.workflow_id in {owner(branch, doubt.sequence) for branch in branches}
        ]
        return blocking_doubt(doubts, ask.tool_name, ask.signature, in_flight) if doubts else None

    def _given_up(self, in_flight: Mapping[int, Entry]) -> Iterator[Entry]:
        """The calls of this process that nobody waits for and whose outcome is not on disk, as rows in doubt."""
        for entry in self._journal.unanswered():
            flight = in_flight.get(entry.id)
            if flight is None:  # lost with its server, or its answer waits for another program that holds the database
                cause = entry.cause or Cause.JOURNAL_UNAVAILABLE
                yield entry._replace(status=Status.IN_DOUBT, cause=cause)
            elif flight.cause is not None:
                yield flight

    # ------------------------------------------------------------------------------------------------------- branches

    def _may_leave(self, progress: Progress, place: Place) -> bool:
        """Whether a divergence is a new branch, and not a mistake.

        A host that sends an id again means that call; and a history that went on past a place cannot be left there.
        """
        if not self._forks or place.via is Via.CALL_ID:
            return False
        drafted = (entry.sequence for entry in self._journal.unanswered() if progress.sees(entry.place))
        return max(progress.reached, *drafted, 0) <= place.sequence

    def _elsewhere(self, ask: Ask, progress: Progress, place: Place, may_repeat: Callable[[Entry], bool]) -> Decision:
        """What to do with a call that diverges: on the branch that has it on record here, or on one that begins."""
        effects = list(self._effects(progress, place.sequence))
        for member in progress.family.sharing(progress.branch, place.sequence):
            owner = progress.family.owner(member, place.sequence)
            entry = self._journal.entry(owner, place.sequence)
            if entry is not None and entry.signature == ask.signature:
                there = place._replace(workflow_id=owner, entry=entry)
                return Decision(self._action(ask, entry, may_repeat), there, Move(member, place.sequence, effects))
        fork = Fork(progress.family.next_name(), progress.branch, place.sequence)
        there = place._replace(workflow_id=fork.branch, entry=None)
        return Decision(Action.PROCEED, there, Move(fork.branch, place.sequence, effects, fork))

    def _stray(self, ask: Ask, progress: Progress, place: Place) -> Entry | None:
        """The row of another branch that a pin may mean, as long as no call has shown which branch the agent is on.

        Pins in order show it in time, at the place where the histories part. Who starts us may have named the branch.
        """
        family, entry = progress.family, place.entry
        if len(family.members) == 1:
            return None
        is_named = progress.branch != family.root and progress.branch == self._journal.workflow_id
        if is_named or (entry is not None and entry.status not in VOID):
            return None
        owners = {family.owner(member, place.sequence) for member in family.members if not progress.is_apart(member)}
        for owner in owners - {place.workflow_id}:
            there = self._journal.entry(owner, place.sequence)
            if there is not None and there.signature == ask.signature and there.status not in VOID:
                return there
        return None

    def _effects(self, progress: Progress, sequence: int) -> Iterator[str]:
        """What the current branch may have left in the world, from a place on; of many, the first."""
        named = 0
        for owner, at in rows_behind(sequence - 1, progress, self._journal):
            entry = self._journal.entry(owner, at)
            if entry is None or entry.status in VOID or entry.status is Status.PRUNED:
                continue
            if named == _NAMED_EFFECTS:
                yield "and more"
                return
            yield f"{entry.tool_name} at {entry.sequence} ({entry.status})"
            named += 1

    def _tell(self, progress: Progress, move: Move) -> None:
        _log.warning(
            "workflow %s: leaves branch %s at sequence %d for %s; what stays in the world: %s",
            progress.family.root,
            progress.branch,
            move.sequence,
            move.branch,
            ", ".join(move.effects) or "nothing",
        )
