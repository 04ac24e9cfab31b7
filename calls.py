"""The life of each `tools/call` on its way through the relay: place, row, answer; or a refusal.

A call waits in a queue until its place is known, is in flight from its row to upstream's answer, and is forgotten once
that is on disk. What leaves for a peer goes through the turn, so that nothing overtakes the commit that it waits for.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, assert_never

import wire
from hints import Hints
from journal import (
    Action,
    Answered,
    Cause,
    Dispatched,
    Doubted,
    Entry,
    Fact,
    Journal,
    JournalBusy,
    JournalFailed,
    Status,
    blocking_doubt,
    decide,
    status_of_answer,
)
from places import MAX_SEQUENCE, Pin, PinError, read_pin
from refusals import Reason, Refusals
from storage import JournalError
from turn import RETRY_S, WAIT_S, Scheduler, Slot, Turn

_log = logging.getLogger("checkpoint.calls")

REDACTED_ARGUMENTS: Final = b'{"checkpoint_redacted":true}'


@dataclass(slots=True, eq=False)
class _Request:
    """A `tools/call` of downstream's that has had no answer."""

    line: bytes
    message: wire.Message
    id: wire.Id
    call: wire.ToolCall
    pin: Pin
    deadline: float  # of the wait until its place is known
    flight: "_Flight | None" = None  # what it waits for, once its place is known

    @property
    def is_unpinned_leg(self) -> bool:
        """Whether it goes on with a call that wants input, and does not say with which."""
        return self.call.is_next_leg and self.pin.sequence is None


@dataclass(slots=True, eq=False)
class _Flight:
    """One dispatched call, and the requests that wait for its answer.

    It is in flight until upstream has answered or is gone, whatever downstream was told: after a cancel, nobody waits.
    """

    entry: Entry
    first: _Request  # the one whose line goes upstream, so that upstream knows its id
    slot: Slot  # of that line
    requests: list[_Request]
    answer: wire.Answer | None = None  # upstream's first word on it
    fact: Answered | Doubted | None = None  # what became of it, on its way to disk

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits any more, and upstream was told so."""
        return self.entry.cause is Cause.CANCELLED


class Calls:
    """All calls of one relay, between its two directions.

    `named` gives a result our name, `bypass` passes a call on that its server says only reads.
    """

    def __init__(
        self,
        journal: Journal,
        refusals: Refusals,
        turn: Turn,
        hints: Hints | None,
        *,
        redacts_arguments: bool,
        loop: Scheduler,
        now_ms: Callable[[], int],
        named: Callable[[bytes], bytes],
        bypass: Callable[[bytes, wire.Message], None],
    ) -> None:
        self._journal = journal
        self._refusals = refusals
        self._turn = turn
        self._hints = hints
        self._redacts_arguments = redacts_arguments
        self._loop = loop
        self._now_ms = now_ms
        self._named = named
        self._bypass = bypass
        self._is_retry_due = False
        self._has_left_doubt = False
        self._queue: deque[_Request] = deque()  # their place is not known yet
        self._requests: dict[wire.Id, _Request] = {}  # all that wait for an answer
        self._flights: dict[wire.Id, _Flight] = {}  # by the id that upstream knows

    def __contains__(self, identity: wire.Id | None) -> bool:
        """Whether downstream waits for a call under this id, or upstream may still answer one."""
        return identity in self._requests or identity in self._flights

    @property
    def are_under_way(self) -> bool:
        """Whether upstream may answer any of them, or downstream waits for one."""
        return bool(self._requests or self._flights)

    @property
    def are_expected(self) -> bool:
        """Whether any of them will be answered yet: all but those that were cancelled in the 2026-07-28 era, in which a
        server says nothing more of them."""
        return bool(self._requests) or any(
            not (flight.is_cancelled and flight.entry.is_modern) for flight in self._flights.values()
        )

    @property
    def queued_bytes(self) -> int:
        """The size of the calls whose place is not known yet."""
        return sum(len(request.line) for request in self._queue)

    @property
    def has_left_doubt(self) -> bool:
        """Whether rows are in doubt that left for upstream, or would be if all ended now."""
        return self._has_left_doubt or bool(self._turn)

    # ----------------------------------------------------------------------------------------------- a place for a call

    def read(self, line: bytes, message: wire.Message, request_id: wire.Id, call: wire.ToolCall) -> None:
        """Takes a call from downstream; its id must not be in use."""
        try:
            pin = read_pin(call.meta)
        except PinError as error:
            refusal = self._refusals.line(message.id_bytes, Reason.INVALID_META, tool=call.name, why=str(error))
            self._turn.reply(refusal)
            return
        request = _Request(line, message, request_id, call, pin, self._loop.time() + WAIT_S)
        self._requests[request_id] = request
        self._queue.append(request)
        self.admit()

    def admit(self) -> None:
        """Gives the requests in the queue their places, in order, as far as nothing is in the way.

        To be called at the end of each turn too.
        """
        while self._queue and self._is_admitted(self._queue[0]):
            self._queue.popleft()
        if not self._queue:
            self._journal.give_back()  # others may have it, if this process has only read it
        elif not self._is_retry_due:
            self._is_retry_due = True
            self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._is_retry_due = False
        self._turn.end()  # which admits, like the end of every turn

    def _is_admitted(self, request: _Request) -> bool:
        """Whether a request goes its way, or was refused; False while it has to wait."""
        is_late = self._loop.time() >= request.deadline
        is_read_only = self._is_read_only(request, is_late=is_late)
        if is_read_only is None:
            return False
        if is_read_only:
            del self._requests[request.id]
            self._bypass(request.line, request.message)
            return True
        if request.is_unpinned_leg:
            why = "a further leg needs _meta.checkpoint_seq in this version"
            self._refuse(request, Reason.INVALID_META, why=why)
            return True
        return self._is_placed(request, is_late=is_late)

    def _is_read_only(self, request: _Request, *, is_late: bool) -> bool | None:
        if self._hints is None:
            return False
        if is_late:
            self._hints.give_up()
        return self._hints.is_read_only(request.call.name)

    def _is_placed(self, request: _Request, *, is_late: bool) -> bool:
        """Whether a request found its place, or its refusal; False while another process or program is in the way."""
        try:
            if self._journal.take():
                self._place(request)
                return True
            busy = f"process {self._journal.owner_pid() or 'unknown'} owns {self._journal.path}"
        except JournalBusy as error:
            busy = str(error)
        except JournalError as error:
            self._refuse(request, Reason.JOURNAL_UNAVAILABLE, why=str(error))
            return True
        if is_late:
            self._refuse(request, Reason.BUSY, why=busy)
        return is_late

    def _place(self, request: _Request) -> None:
        """Finds the one place of a call: the one that it names, else the next, if no doubt is in the way."""
        workflow_id, sequence = request.pin.workflow_id or self._journal.workflow_id, request.pin.sequence
        if sequence is not None:
            self._act(request, workflow_id, sequence, self._journal.entry(workflow_id, sequence))
            return
        doubt = self._doubt_before(request, workflow_id)
        sequence = self._journal.last_sequence(workflow_id) + 1
        if doubt is not None:
            self._refuse(request, Reason.IN_DOUBT, entry=doubt)
        elif sequence > MAX_SEQUENCE:
            self._refuse(request, Reason.INVALID_META, why="the workflow's last row has the highest sequence there is")
        else:
            self._act(request, workflow_id, sequence, None)

    def _doubt_before(self, request: _Request, workflow_id: str) -> Entry | None:
        """The row in doubt that stops a new call, which might be the same deed again."""
        flights = self._flights.values()
        # What was cancelled in this turn is not in doubt on disk yet.
        cancelled = [f.entry for f in flights if f.is_cancelled and f.entry.workflow_id == workflow_id]
        doubts = [*cancelled, *self._journal.doubts(workflow_id)]
        in_flight = {flight.entry.id for flight in flights} if doubts else ()
        return blocking_doubt(doubts, request.call.name, request.call.signature, in_flight)

    # ---------------------------------------------------------------------------------------------- what a place means

    def _act(self, request: _Request, workflow_id: str, sequence: int, entry: Entry | None) -> None:
        """Does what the table says to what is on record at a place."""
        action = decide(entry, request.call.signature)
        if action is Action.PROCEED:
            self._dispatch(request, workflow_id, sequence, entry.attempt + 1 if entry else 1)
            return
        assert entry is not None  # every other action speaks of a row
        match action:
            case Action.JOIN:
                self._join(request, entry)
            case Action.REPLAY if not _fits(entry, request):
                self._refuse(request, Reason.DIVERGED, entry=entry, why="its answer on record is of another shape")
            case Action.REPLAY:
                self._replay(request, entry)
            case Action.REFUSE_IN_DOUBT:
                self._refuse(request, Reason.IN_DOUBT, entry=entry)
            case Action.REFUSE_PRUNED:
                self._refuse(request, Reason.DIVERGED, entry=entry, why="the row was pruned")
            case Action.DIVERGE:
                self._diverge(request, entry)
            case _:
                assert_never(action)

    def _dispatch(self, request: _Request, workflow_id: str, sequence: int, attempt: int) -> None:
        """Lets a call go upstream as soon as its row is on disk."""
        arguments = request.call.arguments
        draft = Entry(
            id=0,
            workflow_id=workflow_id,
            sequence=sequence,
            attempt=attempt,
            tool_name=request.call.name,
            signature=request.call.signature,
            arguments=REDACTED_ARGUMENTS if self._redacts_arguments and arguments is not None else arguments,
            status=Status.PENDING,
            started_at=self._now_ms(),
            is_modern=request.message.is_modern,
        )
        entry = self._journal.draft(draft)

        def refuse(_: Slot, error: JournalError) -> None:
            is_busy = isinstance(error, JournalBusy)
            self._drop(flight, Reason.BUSY if is_busy else Reason.JOURNAL_UNAVAILABLE, str(error))

        def leave(slot: Slot) -> None:
            slot.fill(request.line)
            request.line = b""  # it may be large, and its answer far away

        slot = self._turn.hold(self._turn.up, [Dispatched(entry)], len(request.line), leave, refuse)
        flight = request.flight = self._flights[request.id] = _Flight(entry, request, slot, [request])

    def _join(self, request: _Request, entry: Entry) -> None:
        """Waits for the answer to a call that is under way, if it is still awaited."""
        flight = next((flight for flight in self._flights.values() if flight.entry.id == entry.id), None)
        if flight is not None and not flight.is_cancelled:
            request.flight = flight
            flight.requests.append(request)
            return
        # Without a flight, upstream has answered and the journal could not keep it.
        cause = Cause.CANCELLED if flight else Cause.JOURNAL_UNAVAILABLE
        self._refuse(request, Reason.IN_DOUBT, entry=replace(entry, status=Status.IN_DOUBT, cause=cause))

    def _replay(self, request: _Request, entry: Entry) -> None:
        _log.info("workflow %s, sequence %d: replayed", *entry.place)
        del self._requests[request.id]
        is_error = entry.error is not None
        body = entry.error if entry.error is not None else entry.result
        assert body is not None  # the journal's CHECK constraints say so of every row that is replayed
        self._turn.reply(self._replayed(request, entry, body, is_error=is_error))

    def _replayed(self, request: _Request, entry: Entry, body: bytes, *, is_error: bool) -> bytes:
        if not is_error:
            body = self._named(body)
            if request.message.is_modern and not entry.is_modern:
                body = wire.with_result_type(body)
        return wire.replay_line(request.message.id_bytes, body, is_error=is_error)

    def _diverge(self, request: _Request, entry: Entry) -> None:
        _log.warning("workflow %s, sequence %d: diverged", *entry.place)
        del self._requests[request.id]
        call, id_bytes = request.call, request.message.id_bytes
        self._turn.reply(self._refusals.diverged(id_bytes, entry, call.name, call.arguments))

    def _refuse(self, request: _Request, reason: Reason, *, entry: Entry | None = None, why: str | None = None) -> None:
        self._requests.pop(request.id, None)
        if entry is not None:
            _log.warning("workflow %s, sequence %d: refused, %s", *entry.place, reason)
        else:
            _log.warning("a call was refused, %s", reason)
        refusal = self._refusals.line(
            request.message.id_bytes,
            reason,
            tool=request.call.name,
            workflow_id=request.pin.workflow_id or self._journal.workflow_id,
            entry=entry,
            why=why,
        )
        self._turn.reply(refusal)

    def _drop(self, flight: _Flight, reason: Reason = Reason.UPSTREAM_LOST, why: str = "it was not sent") -> None:
        """Forgets a call that was not dispatched, and refuses it to whoever waits."""
        self._turn.withdraw(flight.entry)
        self._journal.withdraw(flight.entry)
        for request in self._release(flight):
            self._refuse(request, reason, entry=replace(flight.entry, status=Status.NOT_SENT), why=why)

    # --------------------------------------------------------------------------------------------------------- cancels

    def cancel(self, cancelled: wire.Id, line: bytes | None = None) -> None:
        """Detaches a request from its call; the last one takes the cancel upstream, as `line` where that fits.

        A cancel of what was answered, or refused, or never asked for goes nowhere: upstream does not know the id, or
        others wait for its answer.
        """
        request = self._requests.pop(cancelled, None)
        if request is None:
            return
        flight = request.flight
        if flight is None:
            self._queue.remove(request)
            return
        flight.requests.remove(request)
        if not flight.requests and flight.fact is None:
            is_named = line is not None and request is flight.first
            self._cancel(flight, line if line and is_named else wire.cancel_line(flight.first.message.id_bytes))

    def _cancel(self, flight: _Flight, line: bytes) -> None:
        if not (flight.slot.is_open or flight.slot.is_filled):  # it waits for the database, and need not leave at all
            self._drop(flight)
            return
        _log.info("workflow %s, sequence %d: cancelled, unanswered", *flight.entry.place)
        flight.entry = replace(flight.entry, status=Status.IN_DOUBT, cause=Cause.CANCELLED)

        def pass_on(slot: Slot, _: JournalError | None = None) -> None:
            if flight.slot.is_filled:  # else its row could not be written
                slot.fill(line)

        doubt = Doubted(flight.entry, Cause.CANCELLED, self._now_ms())
        self._turn.hold(self._turn.up, [doubt], len(line), pass_on, pass_on)

    # -------------------------------------------------------------------------------------------------------- outcomes

    def read_answers(self, line: bytes, answers: Iterable[wire.Answer], *, is_stdin_closed: bool) -> None:
        """Takes a line with answers to calls under way, and nothing else: it goes down when they are on disk."""
        flights: list[_Flight] = []
        facts: list[Fact] = []
        for answer in answers:
            flight = self._flights.get(answer.id)
            if flight is None or not flight.slot.is_filled:
                continue  # upstream cannot mean a call that it has not got under this id
            flights.append(flight)
            if flight.fact is None:  # a second answer changes nothing: it only may not overtake the first
                flight.answer = answer
                facts.append(self._conclude(flight, self._fact(flight.entry, answer, is_stdin_closed)))
        if flights:
            self._hold_back(line, facts, flights)
        else:
            _log.warning("upstream answered a call that it has not got; the line was dropped")

    def _fact(self, entry: Entry, answer: wire.Answer, is_stdin_closed: bool) -> Answered | Doubted:
        """What upstream's first word on a call amounts to."""
        now = self._now_ms()
        status = status_of_answer(
            answer.is_error, answer.members, is_modern=entry.is_modern, is_stdin_closed=is_stdin_closed
        )
        if status is None:
            return Doubted(entry, Cause.UPSTREAM_LOST, now)
        if answer.is_error:
            return Answered(entry, status, now, error=answer.body)
        return Answered(entry, status, now, result=answer.body)

    def _conclude(self, flight: _Flight, fact: Answered | Doubted) -> Fact:
        flight.fact = fact
        if isinstance(fact, Answered):
            self._turn.withdraw(flight.entry)  # a cancel that waits is too late: nothing is doubtful any more
        return fact

    def _hold_back(self, line: bytes, facts: list[Fact], flights: list[_Flight]) -> None:
        def deliver(slot: Slot) -> None:
            may_pass = [self._land(flight, slot) for flight in flights]
            if any(may_pass):
                slot.fill(line)

        def hand_over(slot: Slot, error: JournalError) -> None:
            for flight in flights:
                self._hand_over(flight, slot, error)

        self._turn.hold(self._turn.down, facts, len(line), deliver, hand_over)

    def _land(self, flight: _Flight, slot: Slot) -> bool:
        """Answers whoever waits for a call that is over, as its fact says; whether upstream's own line may pass too."""
        waiting, answer = self._release(flight), flight.answer
        if answer is None or isinstance(flight.fact, Doubted):
            self._tell(flight, waiting, slot)
            return False
        for request in waiting:
            if request is not flight.first:
                slot.fill(self._replayed(request, flight.entry, answer.body, is_error=answer.is_error))
        if self._hints is not None and flight.entry.is_modern and not answer.is_error:
            self._hints.client_is_ready(flight.first.call.meta)
        return flight.first in waiting or not flight.entry.is_modern  # late answers are for the handshake era only

    def _tell(self, flight: _Flight, waiting: list[_Request], slot: Slot) -> None:
        """Says that a call was not sent, or may have run."""
        if isinstance(flight.fact, Doubted):
            self._has_left_doubt = True
            reason, entry = Reason.IN_DOUBT, replace(flight.entry, status=Status.IN_DOUBT, cause=flight.fact.cause)
        else:
            reason, entry = Reason.UPSTREAM_LOST, replace(flight.entry, status=Status.NOT_SENT)
        _log.warning("workflow %s, sequence %d: %s", *entry.place, entry.status)
        for request in waiting:
            slot.fill(self._refusals.line(request.message.id_bytes, reason, entry=entry))

    def _hand_over(self, flight: _Flight, slot: Slot, error: JournalError) -> None:
        """Gives whoever waits for a call what upstream said and the journal could not keep."""
        self._has_left_doubt |= isinstance(error, JournalFailed)  # else it is recorded once the database is free
        answer = flight.answer
        if answer is None or isinstance(flight.fact, Doubted):
            self._land(flight, slot)
            return
        said = answer.is_error, answer.body
        entry = replace(flight.entry, status=Status.IN_DOUBT, cause=Cause.JOURNAL_UNAVAILABLE)
        for request in self._release(flight):
            id_bytes, reason = request.message.id_bytes, Reason.JOURNAL_UNAVAILABLE
            slot.fill(self._refusals.line(id_bytes, reason, entry=entry, why=str(error), answer=said))

    def _release(self, flight: _Flight) -> list[_Request]:
        """The requests that waited for a call which is in flight no more."""
        if self._flights.get(flight.first.id) is flight:  # else its id is in use again
            del self._flights[flight.first.id]
        waiting, flight.requests = flight.requests, []
        for request in waiting:
            del self._requests[request.id]
        return waiting

    # --------------------------------------------------------------------------------------------------- upstream's end

    def upstream_gone(self, cause: Cause, read_bytes: int) -> None:
        """Settles what upstream will never answer; it has read that many bytes of what was written to it."""
        for flight in [flight for flight in self._flights.values() if flight.fact is None]:
            position = flight.slot.position
            if position is None:
                self._drop(flight)
            else:
                self._lose(flight, cause, is_unread=position >= read_bytes)
        while self._queue:
            self._refuse(self._queue.popleft(), Reason.UPSTREAM_LOST)

    def _lose(self, flight: _Flight, cause: Cause, *, is_unread: bool) -> None:
        entry, now = flight.entry, self._now_ms()
        not_sent, in_doubt = Answered(entry, Status.NOT_SENT, now), Doubted(entry, cause, now)
        fact = self._conclude(flight, not_sent if is_unread else in_doubt)

        def tell(slot: Slot) -> None:
            self._land(flight, slot)

        def tell_anyway(slot: Slot, error: JournalError) -> None:
            self._hand_over(flight, slot, error)

        self._turn.hold(self._turn.down, [fact], 0, tell, tell_anyway)


def _fits(entry: Entry, request: _Request) -> bool:
    """Whether a recorded answer is of the shape that a request asks for: a result, or the handle of a task.

    In the 2026-07-28 era the server chooses; before, the request does, with `task`. Errors have one shape.
    """
    is_handle = entry.status is Status.TASK
    if request.message.is_modern:
        return entry.is_modern or not is_handle
    if is_handle:
        return request.call.wants_task and not entry.is_modern
    return entry.error is not None or not request.call.wants_task
