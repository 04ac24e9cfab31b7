"""Which processes and groups run, and that no number is taken for a process that cannot be one."""

import os
import subprocess
from pathlib import Path

import pytest

from processes import has_running, is_running
from reader import holder_of


def test_a_group_of_which_only_the_dead_are_left_runs_nothing() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        assert has_running(process.pid, counts_others=True)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for: a zombie
        assert not has_running(process.pid, counts_others=True)
    assert not has_running(process.pid, counts_others=True)


def test_a_group_that_may_not_be_signalled_counts_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_group: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    assert has_running(os.getpgid(0), counts_others=True)
    assert not has_running(os.getpgid(0), counts_others=False)


@pytest.mark.parametrize("number", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_a_number_that_none_can_have_is_no_process(number: int) -> None:
    assert not is_running(number)
    assert not has_running(number, counts_others=True)


@pytest.mark.parametrize("number", [2**31, -1, 10**18])
def test_a_lock_that_names_no_process_has_no_holder_where_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    lock = tmp_path / "j.db.lock"
    lock.write_text(f"{number}\n")
    monkeypatch.setattr("reader.open", _no_locks, raising=False)
    assert holder_of(str(lock)) is None


def _no_locks(*_: object, **__: object) -> None:
    raise FileNotFoundError
