"""Branches of a workflow: who owns which place, and who shares a past. Pure.

A branch reads its parent's rows below the place where it left, and has its own from there on. So seen from one branch a
place belongs to exactly one workflow, and no row is ever copied.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_branch_name: Final = re.compile(r"(.+)~([0-9]+)", re.DOTALL).fullmatch


class Fork(NamedTuple):
    """Where a branch left its parent: from `sequence` on it has rows of its own."""

    branch: str
    parent: str
    sequence: int


class Stretch(NamedTuple):
    """Places of a history that one workflow owns: from `start` on, before `below` where it has an end."""

    owner: str
    start: int
    below: int | None


class Family:
    """A root workflow and its branches, in the order in which they were made."""

    def __init__(self, root: str, forks: Sequence[Fork] = ()) -> None:
        self.root = root
        self._forks = {fork.branch: fork for fork in forks}
        self.members: Final = (root, *self._forks)  # oldest first
        self.partings: Final = frozenset(fork.sequence for fork in forks)  # the first places of branches

    @property
    def newest(self) -> str:
        """The branch that a start follows which names none."""
        return self.members[-1]

    def fork(self, branch: str) -> Fork | None:
        """Where a branch left its parent; None for the root."""
        return self._forks.get(branch)

    def owner(self, branch: str, sequence: int) -> str:
        """The workflow whose row stands at a place, seen from `branch`."""
        while branch in self._forks and sequence < self._forks[branch].sequence:
            branch = self._forks[branch].parent
        return branch

    def line(self, branch: str) -> list[Stretch]:
        """The history that `branch` sees, oldest stretch first."""
        stretches: list[Stretch] = []
        below: int | None = None
        while (fork := self._forks.get(branch)) is not None:
            if below is None or fork.sequence < below:
                stretches.append(Stretch(branch, fork.sequence, below))
                below = fork.sequence
            branch = fork.parent
        if below is None or below > 1:
            stretches.append(Stretch(branch, 1, below))
        return stretches[::-1]

    def sharing(self, branch: str, sequence: int) -> list[str]:
        """Other members that see the very same rows below `sequence`, newest first."""
        past = self._past(branch, sequence)
        others = (member for member in reversed(self.members) if member != branch)
        return [member for member in others if self._past(member, sequence) == past]

    def parting(self, branch: str, other: str) -> int | None:
        """The first place that two members do not share; None for one and itself."""
        for mine, theirs in zip(self.line(branch), self.line(other), strict=False):
            if mine != theirs:
                is_one = mine.owner == theirs.owner
                return min(end for end in (mine.below, theirs.below) if end is not None) if is_one else mine.start
        return None

    def _past(self, branch: str, sequence: int) -> list[Stretch]:
        """The history below a sequence."""
        return [
            Stretch(owner, start, sequence if below is None else min(sequence, below))
            for owner, start, below in self.line(branch)
            if start < sequence
        ]

    def next_name(self) -> str:
        """A name for one more branch."""
        taken = [int(match[2]) for name in self._forks if (match := _branch_name(name))]
        return f"{self.root}~{max(taken, default=0) + 1}"

    def with_fork(self, fork: Fork) -> "Family":
        """The family with one more branch."""
        return Family(self.root, [*self._forks.values(), fork])


def root_of(workflow_id: str) -> str:
    """The root of a workflow by its name; a user's own id never ends like a branch's."""
    match = _branch_name(workflow_id) if "~" in workflow_id else None
    return match[1] if match else workflow_id
