"""Tasks: calls that were answered with a handle, and what is said of them later.

A handle is no outcome. `tasks/*` requests always go upstream, since only there a task lives; what upstream says last is
kept, and is the answer when upstream has forgotten the task.
"""

import logging
from collections.abc import Callable
from typing import Final

import wire
from journal import Journal
from settings import Settings
from states import Cause, Doubted, Entry, Status, TaskEnded, status_of_answer, storable
from storage import JournalError
from turn import Slot, Turn

_log = logging.getLogger("checkpoint.tasks")

_GET: Final = "tasks/get"
_RESULT: Final = "tasks/result"
_CANCEL: Final = "tasks/cancel"
_FINAL: Final = ("completed", "failed", "cancelled")
# These speak of the request and not of the task; any other error may be what the call itself ended with.
_OF_THE_REQUEST: Final = (
    *(wire.PARSE_ERROR, wire.INVALID_REQUEST, wire.METHOD_NOT_FOUND, wire.INVALID_PARAMS),
    *range(-32099, -32019),  # what the protocol defines. Source: MCP 2026-07-28 basic/index#error-codes
)


class Tasks:
    """Reads the answers to `tasks/*` requests that pass by."""

    def __init__(self, journal: Journal, turn: Turn, settings: Settings, now_ms: Callable[[], int]) -> None:
        self._journal = journal
        self._turn = turn
        self._settings = settings
        self._now_ms = now_ms

    def takes(self, request: wire.Message, answer: wire.Answer, line: bytes, *, is_stdin_closed: bool) -> bool:
        """Whether an answer needs the journal before it goes down; then it is on its way there."""
        is_loss = _is_loss(request, answer)
        if not is_loss and not _is_final(request, answer, is_stdin_closed=is_stdin_closed):
            return False
        try:
            entry = self._entry(request)
            if entry is None:
                return False
            if is_loss:
                return self._takes_loss(entry, request, line)
            return not self._is_known(entry, request, answer) and self._takes_end(entry, request, answer, line)
        except JournalError as error:
            _log.warning("what upstream said of a task was not recorded: %s", error)
            return False
        finally:
            if not self._turn.is_due:  # nothing is on its way to disk
                self._journal.give_back()

    def _entry(self, request: wire.Message) -> Entry | None:
        """The newest row that was answered with this task, if the journal is ours to read and write."""
        if request.task_id is None or not self._journal.exists:
            return None
        if not self._journal.take():
            _log.warning("what upstream said of a task was not recorded: another process owns the journal")
            return None
        entry = self._journal.with_task(storable(request.task_id))
        return entry if entry is not None and entry.is_modern == request.is_modern else None

    def _is_known(self, entry: Entry, request: wire.Message, answer: wire.Answer) -> bool:
        """Whether this very answer is on record: some clients ask again and again."""
        assert request.method is not None
        said = (None, answer.body) if answer.is_error else (answer.body, None)
        return self._journal.task_answer(entry.id, request.method) == said

    def _takes_end(self, entry: Entry, request: wire.Message, answer: wire.Answer, line: bytes) -> bool:
        assert request.method is not None
        bodies = {"error" if answer.is_error else "result": answer.body}
        return self._hold(TaskEnded(entry, request.method, self._now_ms(), **bodies), line)

    def _takes_loss(self, entry: Entry, request: wire.Message, line: bytes) -> bool:
        """Upstream does not know the task: what it said last counts, and if it never did, the call is in doubt."""
        assert request.method is not None
        said = self._journal.task_answer(entry.id, request.method)
        if said is not None:
            result, error = said
            _log.info("workflow %s, sequence %d: upstream has lost its task; its last answer is given", *entry.place)
            if error is not None:
                self._turn.reply(wire.replay_line(request.id_bytes, error, is_error=True))
            elif result is not None:
                self._turn.reply(wire.replay_line(request.id_bytes, self._settings.named(result), is_error=False))
            return True
        if entry.status is not Status.TASK or self._journal.has_task_ended(entry.id):
            return False
        _log.warning("workflow %s, sequence %d: upstream has lost its task", *entry.place)
        return self._hold(Doubted(entry, Cause.UPSTREAM_LOST, self._now_ms()), line)

    def _hold(self, fact: Doubted | TaskEnded, line: bytes) -> bool:
        def pass_on(slot: Slot, _: JournalError | None = None) -> None:
            slot.fill(line)

        self._turn.hold(self._turn.down, [fact], len(line), pass_on, pass_on)
        return True


def _is_loss(request: wire.Message, answer: wire.Answer) -> bool:
    """Whether upstream says that it does not know a task.

    Of others than these two, the same error may say that a task has ended, or that its input does not fit.
    """
    is_lookup = request.method in (_GET, _RESULT)
    return is_lookup and answer.is_error and answer.members.get("code") == wire.INVALID_PARAMS


def _is_final(request: wire.Message, answer: wire.Answer, *, is_stdin_closed: bool) -> bool:
    """Whether an answer is the last word on a task. Source: MCP 2025-11-25 basic/utilities/tasks, ext-tasks."""
    if not answer.is_error:  # tasks/result waits for the end, and is the call's own answer
        is_state = request.method in (_GET, _CANCEL)
        return request.method == _RESULT or (is_state and answer.members.get("status") in _FINAL)
    status = status_of_answer(
        answer.is_error, answer.members, is_modern=request.is_modern, is_stdin_closed=is_stdin_closed
    )
    is_of_the_task = answer.members.get("code") not in _OF_THE_REQUEST
    return request.method == _RESULT and is_of_the_task and status is Status.FAILED
