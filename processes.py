"""Whether processes and their groups still run. Asks the system and keeps nothing.

Numbers come from files that anybody may have written, so one that no process can have is no process.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

_MOST: Final = 2**31 - 1  # what a pid_t holds


def is_running(pid: int) -> bool:
    """Whether a process exists."""
    if not 0 < pid <= _MOST:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def may_be_group(group: int) -> bool:
    """Whether a number can be that of a process group that somebody made: 0 means our own, and 1 everybody's."""
    return 1 < group <= _MOST


def has_running(group: int, *, counts_others: bool) -> bool:
    """Whether a process group has a process that has not ended.

    `counts_others`: also one that we may not signal, another user's. macOS says so of those that have ended, too.
    """
    if not may_be_group(group):
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        if not counts_others:
            return False
    # In many containers process 1 reaps nobody, and an orphan that has ended stays in its group for ever.
    states = list(_states(group))
    # Without /proc, or where it hides other users' processes, what kill says has to do.
    return not states or any(state not in "ZX" for state in states)


def _states(group: int) -> Iterator[str]:
    """The state letters of a group's processes, as far as they can be seen."""
    with contextlib.suppress(FileNotFoundError):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
                state, _, its_group = file.read().rpartition(")")[2].split()[:3]
                if int(its_group) == group:
                    yield state
