"""Journals as operators meet them: made through `journal.Journal`, closed or owned by another process, then looked at.

While a journal is open in this process nothing here looks at it in another way; see storage_helpers.py.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import wire
from branches import Fork
from checkpoint import main
from journal import Journal
from states import Answered, Cause, Dispatched, Doubted, Entry, Forked, Status, TaskEnded
from storage import Files

ROOT: Final = Path(__file__).resolve().parent.parent
NOW_MS: Final = 1_790_000_000_000  # 2026-09-21T14:13:20Z
RESULT: Final = b'{"content":[{"type":"text","text":"done"}]}'
IS_ERROR: Final = b'{"content":[],"isError":true}'
HANDLE: Final = b'{"task":{"taskId":"t1","status":"working"}}'
DEADLINE_S: Final = 30.0


class Life:
    """One owner of a journal, whose clock stands still. Its rows are left as they are when it ends."""

    def __init__(self, path: Path, *, now_ms: int = NOW_MS, upstream_pid: int | None = None) -> None:
        files = Files(str(path))
        self.now_ms = now_ms
        self.journal = Journal(files, exists=files.exists(), workflow_id="run", now_ms=lambda: self.now_ms)
        self.journal.upstream_pid = upstream_pid
        assert self.journal.take()

    def begin(
        self,
        sequence: int,
        *,
        workflow_id: str = "run",
        tool: str = "charge",
        arguments: bytes | None = b'{"who":"Ada"}',
        attempt: int = 1,
        fork_from: str | None = None,
        stored: bytes | None = None,
        **more: Any,
    ) -> Entry:
        """Puts a call on record; with `fork_from` as the first of a branch."""
        facts: list[Any] = []
        if fork_from is not None:
            fork = Fork(workflow_id, fork_from, sequence)
            self.journal.draft_fork(fork)
            facts.append(Forked(fork, self.now_ms))
        signature = wire.signature(tool, None if arguments is None else wire.parse(arguments))
        entry = self.journal.draft(
            workflow_id, sequence, attempt, tool, signature, stored or arguments, started_at=self.now_ms, **more
        )
        self.journal.append([*facts, Dispatched(entry)])
        return entry

    def end(self, entry: Entry, status: Status = Status.COMPLETED, body: bytes | None = RESULT) -> None:
        """Puts upstream's answer on record."""
        is_error = status is Status.FAILED
        bodies: dict[str, Any] = {} if status is Status.NOT_SENT else {"error" if is_error else "result": body}
        task_id = "t1" if status is Status.TASK else None
        self.journal.append([Answered(entry, status, self.now_ms + 5, task_id=task_id, **bodies)])

    def call(self, sequence: int, status: Status = Status.COMPLETED, body: bytes | None = RESULT, **more: Any) -> Entry:
        """Puts a whole call on record."""
        entry = self.begin(sequence, **more)
        if status is Status.IN_DOUBT:
            self.doubt(entry)
        else:
            self.end(entry, status, body)
        return entry

    def doubt(self, entry: Entry, cause: Cause = Cause.UPSTREAM_LOST) -> None:
        self.journal.append([Doubted(entry, cause, self.now_ms + 5)])

    def end_task(self, entry: Entry) -> None:
        self.journal.append([TaskEnded(entry, "tasks/get", self.now_ms + 9, result=b'{"status":"completed"}')])


@contextlib.contextmanager
def life(path: Path, **how: Any) -> Iterator[Life]:
    """An owner that has given the journal up at the end of the block."""
    owner = Life(path, **how)
    try:
        yield owner
    finally:
        owner.journal.close()


def cli(*words: object) -> int:
    """The command line in this process; its exit code."""
    return main(["journal", *map(str, words)])


def run_cli(*words: object, **how: Any) -> "subprocess.CompletedProcess[str]":
    """The command line as a process of its own, without a terminal of any kind."""
    options = {"capture_output": True, "text": True, "timeout": DEADLINE_S, "check": False, "start_new_session": True}
    return subprocess.run(cli_words(*words), **{**options, **how})


def cli_words(*words: object) -> list[str]:
    return [sys.executable, str(ROOT), "journal", *map(str, words)]


class Says:
    """What the command line says in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *words: object, code: int = 0) -> str:
        """Its stdout, which is all it says when all is well."""
        out, _ = self.both(*words, code=code)
        return out

    def both(self, *words: object, code: int = 0) -> tuple[str, str]:
        """Its stdout and its stderr."""
        return self.any_of(*words, codes=(code,))

    def any_of(self, *words: object, codes: Collection[int]) -> tuple[str, str]:
        """The same, where it may end in one of several ways."""
        self._capfd.readouterr()
        ended = cli(*words)
        out, err = self._capfd.readouterr()
        assert ended in codes, err or out
        return out, err

    def objects(self, *words: object, code: int = 0) -> list[dict[str, Any]]:
        """Its JSON Lines."""
        out = self(*words, code=code)
        assert out.isascii()
        return [json.loads(line) for line in out.splitlines()]

    def refusal(self, *words: object, code: int = 1) -> str:
        """Its one line on stderr; nothing on stdout."""
        out, err = self.both(*words, code=code)
        assert out == ""
        assert err.startswith("checkpoint: ")
        assert err.count("\n") == 1, err
        return err


@contextlib.contextmanager
def stopped_group() -> Iterator[int]:
    """A process group of its own that lives, as an upstream's does."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def on_terminal(words: Sequence[str], *answers: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs a command on a terminal of its own, answers each question that ends in "] ", and gives what it showed."""
    main_side, terminal = os.openpty()
    begin = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", begin, *words], stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, env={**os.environ, "TERM": "xterm", **(env or {})},
    )  # fmt: skip
    os.close(terminal)
    shown, left = b"", list(answers)
    with process:
        try:
            while piece := _read(main_side):
                shown += piece
                if left and shown.endswith(b"] "):
                    os.write(main_side, left.pop(0).encode())
            code = process.wait(DEADLINE_S)
        finally:
            process.kill()
            os.close(main_side)
    return code, shown.decode().replace("\r\n", "\n")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # the other side is gone
        return b""
