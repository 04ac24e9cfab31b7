"""The life of each `tools/call` on its way through the relay: place, row, answer; or a refusal.

A call waits in a queue until its place is known, is in flight from its row to upstream's answer, and is forgotten once
that is on disk. What leaves for a peer goes through the turn, so that nothing overtakes the commit that it waits for.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, assert_never

import wire
from branches import Fork
from catalog import Catalog
from journal import Journal, JournalBusy, JournalFailed
from locate import Ask, Place, Unpinned
from places import Pin, PinError, read_pin
from refusals import Reason, Refusals, is_resolved_failed
from settings import Settings
from states import (
    REDACTED_ARGUMENTS,
    Action,
    Answered,
    Cause,
    Dispatched,
    Doubted,
    Entry,
    Fact,
    Forked,
    Status,
    status_of_answer,
    storable,
)
from storage import JournalError
from turn import RETRY_S, WAIT_S, Handle, Scheduler, Slot, Turn
from workflows import Decision, Workflows

if TYPE_CHECKING:
    from reports import Reports  # and with it the reporter, which is not needed to relay

_log = logging.getLogger("checkpoint.calls")

MAX_CALL_ID: Final = 200  # characters
_LARGE_BYTES: Final = 1 << 16
_OTHER_SHAPE: Final = "its answer on record is of another shape"


class _Request:
    """A `tools/call` of downstream's that has had no answer."""

    __slots__ = ("call", "call_id", "flight", "id", "is_read_only", "line", "message", "pin", "read_at")

    def __init__(
        self,
        line: bytes,
        message: wire.Message,
        request_id: wire.Id,
        call: wire.ToolCall,
        pin: Pin,
        call_id: str | None,
        read_at: float,
    ) -> None:
        self.line = line
        self.message = message
        self.id = request_id
        self.call = call
        self.pin = pin
        self.call_id = call_id  # its host's own id of it
        self.read_at = read_at
        self.is_read_only = False  # as its server says
        self.flight: _Flight | None = None  # what it waits for, once its place is known

    @property
    def deadline(self) -> float:
        """Of the wait until its place is known."""
        return self.read_at + WAIT_S


class _Flight:
    """One dispatched call, and the requests that wait for its answer.

    It is in flight until upstream has answered or is gone, whatever downstream was told: after a cancel, nobody waits.
    """

    __slots__ = ("entry", "fact", "first", "fork", "left_at", "requests", "said", "slot", "timer")

    def __init__(self, entry: Entry, first: _Request, slot: Slot, fork: Fork | None) -> None:
        self.entry = entry
        self.first = first  # the one whose line goes upstream, so that upstream knows its id
        self.slot = slot  # of that line
        self.requests = [first]
        self.fork = fork  # the branch that begins with it
        self.left_at: float | None = None  # for upstream
        self.timer: Handle | None = None  # for how long it may take
        self.said: tuple[bool, bytes] | None = None  # upstream's first word on it: whether an error, and its body
        self.fact: Answered | Doubted | None = None  # what became of it, on its way to disk

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits any more: it was cancelled, or took too long."""
        return self.entry.cause is not None

    @property
    def is_held_up(self) -> bool:
        """Whether its row could not be written yet, since another program holds the database."""
        return not (self.slot.is_open or self.slot.is_filled)


class Calls:
    """All calls of one relay, between its two directions.

    `named` gives a result our name, `bypass` passes a call on that its server says only reads.
    """

    def __init__(
        self,
        journal: Journal,
        refusals: Refusals,
        turn: Turn,
        catalog: Catalog | None,
        reports: "Reports | None",
        settings: Settings,
        *,
        loop: Scheduler,
        now_ms: Callable[[], int],
        named: Callable[[bytes], bytes],
        bypass: Callable[[bytes, wire.Message], None],
    ) -> None:
        self._journal = journal
        self._refusals = refusals
        self._turn = turn
        self._catalog = catalog
        self._reports = reports
        self._settings = settings
        self._workflows = Workflows(journal, settings.unpinned, forks=settings.forks)
        self._loop = loop
        self._now_ms = now_ms
        self._named = named
        self._bypass = bypass
        self._is_retry_due = False
        self._has_left_doubt = False
        self._queue: deque[_Request] = deque()  # their place is not known yet
        self._requests: dict[wire.Id, _Request] = {}  # all that wait for an answer
        self._flights: dict[wire.Id, _Flight] = {}  # by the id that upstream knows
        self._beginning: _Flight | None = None  # its row begins a branch, and is not on disk yet

    def __contains__(self, identity: wire.Id | None) -> bool:
        """Whether downstream waits for a call under this id, or upstream may still answer one."""
        return identity in self._requests or identity in self._flights

    def annotated(self, identity: wire.Id, result: bytes) -> bytes:
        """A result with the place of the call under way that it answers, where that is wanted."""
        flight = self._flights.get(identity)
        return result if flight is None else self._settings.annotated(result, flight.entry, is_replayed=False)

    @property
    def are_under_way(self) -> bool:
        """Whether upstream may answer any of them, or downstream waits for one."""
        return bool(self._requests or self._flights)

    @property
    def are_expected(self) -> bool:
        """Whether any of them will be answered yet: all but those that were cancelled in the 2026-07-28 era, in which a
        server says nothing more of them."""
        return bool(self._requests) or any(
            not (flight.entry.is_modern and flight.entry.cause is Cause.CANCELLED) for flight in self._flights.values()
        )

    @property
    def queued_bytes(self) -> int:
        """The size of the calls whose place is not known yet."""
        return sum(len(request.line) for request in self._queue) if self._queue else 0

    @property
    def has_left_doubt(self) -> bool:
        """Whether rows are in doubt that left for upstream, or would be if all ended now."""
        return self._has_left_doubt or self._turn.is_due

    # ----------------------------------------------------------------------------------------------- a place for a call

    def read(self, line: bytes, message: wire.Message, request_id: wire.Id, call: wire.ToolCall) -> None:
        """Takes a call from downstream; its id must not be in use."""
        try:
            pin = read_pin(call.meta)
        except PinError as error:
            refusal = self._refusals.line(message.id_bytes, Reason.INVALID_META, tool=call.name, why=str(error))
            self._turn.reply(refusal)
            return
        request = _Request(line, message, request_id, call, pin, self._call_id(call), self._loop.time())
        self._requests[request_id] = request
        self._queue.append(request)
        self.admit()

    def _call_id(self, call: wire.ToolCall) -> str | None:
        """The id under which the host knows this call, if it is one of the keys that hosts use."""
        for key in self._settings.call_id_keys:
            name = call.meta.get(key)
            if isinstance(name, str) and 0 < len(name) <= MAX_CALL_ID:
                return storable(name)
            if name is not None:
                _log.warning(
                    "a call's id under %s is no text of 1 to %d characters; it counts as none", key, MAX_CALL_ID
                )
        return None

    def admit(self) -> None:
        """Gives the requests in the queue their places, in order, as far as nothing is in the way.

        To be called at the end of each turn too.
        """
        while self._queue and self._admits(self._queue[0]):
            self._queue.popleft()
        if not self._queue:
            if not self._turn.is_due:  # what waits for the commit needs it
                self._journal.give_back()  # others may have it, if this process has only read it
        elif not self._is_retry_due:
            self._is_retry_due = True
            self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._is_retry_due = False
        self._turn.end()  # which admits, like the end of every turn

    def _admits(self, request: _Request) -> bool:
        """Whether a request goes its way, or was refused; False while it has to wait."""
        is_late = self._loop.time() >= request.deadline
        is_read_only = self._is_read_only(request, is_late=is_late)
        if is_read_only is None:
            return False
        if is_read_only and not (self._settings.unpinned is Unpinned.ORDERED and request.pin.sequence is None):
            self._pass_by(request)
            return True
        request.is_read_only = is_read_only
        return self._places(request, is_late=is_late)

    def _pass_by(self, request: _Request) -> None:
        """Lets a call that its server says only reads go upstream without a row."""
        del self._requests[request.id]
        self._bypass(request.line, request.message)

    def _is_read_only(self, request: _Request, *, is_late: bool) -> bool | None:
        if self._catalog is None:
            return False
        if is_late:
            self._catalog.give_up()
        return self._catalog.is_read_only(request.call.name)

    def _places(self, request: _Request, *, is_late: bool) -> bool:
        """Whether a request found its place, or its refusal; False while another process or program is in the way."""
        try:
            if self._beginning is not None:  # should its row fail, there is no branch, and no place on it
                busy = f"another program holds {self._journal.path}"
            elif self._journal.take():
                self._place(request)
                return True
            else:
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
        """Does what follows for a call from what it says of itself and what is on record."""
        ask = self._ask(request)
        workflow_id = request.pin.workflow_id or self._journal.workflow_id
        if request.is_read_only and not self._workflows.expects(ask, workflow_id):
            self._pass_by(request)  # and the cursor stays
            return
        decision = self._workflows.decide(ask, workflow_id, self._in_flight, self._may_repeat)
        if decision.action is Action.PROCEED:
            self._dispatch(request, ask, decision)  # it happens when its row is on disk
        else:
            self._workflows.happened(ask, decision, is_refused=not self._act(request, decision))

    def _in_flight(self) -> dict[int, Entry]:
        """The calls that upstream may still answer, by the ids of their rows."""
        return {flight.entry.id: flight.entry for flight in self._flights.values()}

    def _ask(self, request: _Request) -> Ask:
        call, state = request.call, request.call.request_state
        return Ask(
            tool_name=storable(call.name),
            signature=call.signature,
            sequence=request.pin.sequence,
            call_id=request.call_id,
            request_state=None if state is None else _hashed(state),
            is_next_leg=call.is_next_leg,
        )

    def _may_repeat(self, doubt: Entry) -> bool:
        """Whether a call in doubt may run again, since its server says that this changes nothing."""
        is_over = all(flight.entry.id != doubt.id for flight in self._flights.values())
        return is_over and self._catalog is not None and self._catalog.is_repeatable(doubt.tool_name)

    # ---------------------------------------------------------------------------------------------- what a place means

    def _act(self, request: _Request, decision: Decision) -> bool:
        """Answers a call from the journal, or refuses it; whether it is answered then, or will be."""
        entry = decision.blocked_by or decision.place.entry
        assert entry is not None  # every other action speaks of a row
        match decision.action:
            case Action.JOIN:
                return self._join(request, entry)
            case Action.REPLAY if not _fits(entry, request):
                self._refuse(request, Reason.DIVERGED, entry=entry, why=_OTHER_SHAPE)
            case Action.REPLAY if entry.result is None and entry.error is None:  # somebody has edited the journal
                self._refuse(request, Reason.JOURNAL_UNAVAILABLE, entry=entry, why="its answer is missing there")
            case Action.REPLAY:
                self._replay(request, entry)
                return True
            case Action.REFUSE_IN_DOUBT:
                self._refuse(request, Reason.IN_DOUBT, entry=entry)
            case Action.REFUSE_PRUNED:
                self._refuse(request, Reason.DIVERGED, entry=entry, why="its row was pruned")
            case Action.DIVERGE if decision.blocked_by is not None:
                why = (
                    "it is on record there, and no call has shown yet which branch is meant: send the pins in order, or"
                    " start with the branch as --workflow-id"
                )
                self._refuse(request, Reason.DIVERGED, entry=entry, why=why)
            case Action.DIVERGE:
                self._diverge(request, entry)
            case Action.PROCEED:
                raise AssertionError("a call that proceeds is dispatched")
            case _:
                assert_never(decision.action)
        return False

    def _dispatch(self, request: _Request, ask: Ask, decision: Decision) -> None:
        """Lets a call go upstream as soon as its row is on disk, and the branch that begins with it."""
        before = decision.place.entry
        if before is not None and before.status is Status.IN_DOUBT:
            _log.warning(
                "workflow %s, sequence %d: in doubt, and runs again as its server's hints allow", *before.place
            )
        fork = decision.move and decision.move.fork
        entry = self._draft(request, ask, decision.place)
        facts: list[Fact] = [Dispatched(entry)]
        if fork is not None:
            self._journal.draft_fork(fork)
            facts.insert(0, Forked(fork, self._now_ms()))

        def refuse(_: Slot, error: JournalError) -> None:
            is_busy = isinstance(error, JournalBusy)
            self._drop(flight, Reason.BUSY if is_busy else Reason.JOURNAL_UNAVAILABLE, str(error))

        def leave(slot: Slot) -> None:
            if flight is self._beginning:
                self._beginning = None
            self._workflows.happened(ask, decision)
            slot.fill(request.line)
            flight.left_at = self._loop.time()
            if len(request.line) > _LARGE_BYTES and not self._settings.restarts_upstream:
                self._let_go(flight)

        slot = self._turn.hold(self._turn.up, facts, len(request.line), leave, refuse)
        flight = request.flight = self._flights[request.id] = _Flight(entry, request, slot, fork)
        if fork is not None:
            self._beginning = flight
        if self._settings.call_timeout_s is not None:
            flight.timer = self._loop.call_later(self._settings.call_timeout_s, lambda: self._time_out(flight))

    def _let_go(self, flight: _Flight) -> None:
        """Drops the line and the arguments of a call that has left: its answer may be far away."""
        request = flight.first
        request.line = b""
        request.call = request.call._replace(arguments=None)
        request.message = request.message._replace(call=request.call)
        flight.entry = self._journal.let_go_of_arguments(flight.entry)

    def _draft(self, request: _Request, ask: Ask, place: Place) -> Entry:
        """The row of a call that is about to leave."""
        arguments = request.call.arguments
        return self._journal.draft(
            place.workflow_id,
            place.sequence,
            1 if place.entry is None else self._journal.next_attempt(place.workflow_id, place.sequence),
            ask.tool_name,
            ask.signature,
            REDACTED_ARGUMENTS if self._settings.redacts_arguments and arguments is not None else arguments,
            started_at=self._now_ms(),
            call_id=ask.call_id,
            is_modern=request.message.is_modern,
        )

    def _join(self, request: _Request, entry: Entry) -> bool:
        """Waits for the answer to a call that is under way, if it is still awaited."""
        flight = next((flight for flight in self._flights.values() if flight.entry.id == entry.id), None)
        if flight is not None and not flight.is_given_up:
            request.flight = flight
            flight.requests.append(request)
            return True
        # Without a flight, upstream has answered and the journal could not keep it.
        cause = flight.entry.cause if flight else Cause.JOURNAL_UNAVAILABLE
        self._refuse(request, Reason.IN_DOUBT, entry=entry._replace(status=Status.IN_DOUBT, cause=cause))
        return False

    def _replay(self, request: _Request, entry: Entry) -> None:
        _log.info("workflow %s, sequence %d: replayed", *entry.place)
        del self._requests[request.id]
        is_error = entry.error is not None
        body = entry.error if entry.error is not None else entry.result
        assert body is not None  # else it was refused
        self._turn.reply(self._replayed(request, entry, body, is_error=is_error))
        self._turn.answered(entry)
        if is_error and is_resolved_failed(body):
            self._report_refused(request, Reason.RESOLVED_FAILED)
        elif self._reports is not None:
            self._reports.replayed(request.message, read_at=request.read_at)

    def _replayed(self, request: _Request, entry: Entry, body: bytes, *, is_error: bool) -> bytes:
        if not is_error:
            body = self._settings.annotated(self._named(body), entry, is_replayed=True)
            if request.message.is_modern and not entry.is_modern:
                body = wire.with_result_type(body)
        return wire.replay_line(request.message.id_bytes, body, is_error=is_error)

    def _diverge(self, request: _Request, entry: Entry) -> None:
        if entry.status is Status.PENDING and entry.arguments is None:  # they may have been let go of
            entry = entry._replace(arguments=self._journal.arguments(entry))
        _log.warning("workflow %s, sequence %d: diverged", *entry.place)
        del self._requests[request.id]
        call, id_bytes = request.call, request.message.id_bytes
        self._turn.reply(self._refusals.diverged(id_bytes, entry, call.name, call.arguments))
        self._report_refused(request, Reason.DIVERGED)

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
        self._report_refused(request, reason)

    def _report_refused(self, request: _Request, reason: Reason) -> None:
        if self._reports is not None and reason is not Reason.INVALID_META:
            self._reports.refused(request.message, reason, read_at=request.read_at)

    def _drop(self, flight: _Flight, reason: Reason = Reason.UPSTREAM_LOST, why: str = "it was not sent") -> None:
        """Forgets a call that was not dispatched, and refuses it to whoever waits."""
        self._turn.withdraw(flight.entry)
        self._journal.withdraw(flight.entry)
        self._workflows.withdrawn(flight.entry)
        if flight.fork is not None:
            self._beginning = None
            self._journal.withdraw_fork(flight.fork)
        for request in self._release(flight):
            self._refuse(request, reason, entry=flight.entry._replace(status=Status.NOT_SENT), why=why)

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
        if not flight.requests and flight.fact is None and not flight.is_given_up:
            is_named = line is not None and request is flight.first
            self._cancel(flight, line if line and is_named else wire.cancel_line(flight.first.message.id_bytes))

    def _cancel(self, flight: _Flight, line: bytes) -> None:
        if flight.is_held_up:  # it need not leave at all
            self._drop(flight)
            return
        _log.info("workflow %s, sequence %d: cancelled, unanswered", *flight.entry.place)
        flight.entry = flight.entry._replace(status=Status.IN_DOUBT, cause=Cause.CANCELLED)

        def pass_on(slot: Slot, _: JournalError | None = None) -> None:
            if flight.slot.is_filled:  # else its row could not be written
                slot.fill(line)

        doubt = Doubted(flight.entry, Cause.CANCELLED, self._now_ms())
        self._turn.hold(self._turn.up, [doubt], len(line), pass_on, pass_on)

    def _time_out(self, flight: _Flight) -> None:
        """Tells whoever waits that a call took too long; upstream is told nothing, and its answer is still recorded."""
        if flight.fact is not None or flight.is_given_up:
            return
        if flight.is_held_up:
            self._drop(flight, Reason.BUSY, f"another program holds {self._journal.path}")
            return
        flight.entry = flight.entry._replace(status=Status.IN_DOUBT, cause=Cause.TIMEOUT)
        _log.warning("workflow %s, sequence %d: no answer in time", *flight.entry.place)

        def tell(slot: Slot, _: JournalError | None = None) -> None:
            for request in self._detach(flight):
                slot.fill(self._refusals.line(request.message.id_bytes, Reason.IN_DOUBT, entry=flight.entry))

        doubt = Doubted(flight.entry, Cause.TIMEOUT, self._now_ms())
        self._turn.hold(self._turn.down, [doubt], 0, tell, tell)

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
                flight.said = answer.is_error, answer.body
                facts += self._conclude(flight, self._fact(flight.entry, answer, is_stdin_closed))
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
        state = answer.members.get("requestState") if status is Status.INPUT_REQUIRED else None
        digest = _hashed(state) if isinstance(state, str) else None
        body = answer.body
        if status is Status.INPUT_REQUIRED:  # it is never replayed, and what it holds may be the server's secret
            body = wire.with_value(body, "requestState", digest and f"sha256:{digest}")
        return Answered(
            entry,
            status,
            now,
            result=body,
            request_state=digest,
            task_id=_task_id(answer.members) if status is Status.TASK else None,
        )

    def _conclude(self, flight: _Flight, fact: Answered | Doubted) -> list[Fact]:
        """What goes on disk when it is known what became of a call; nothing changes it after that."""
        flight.fact = fact
        if isinstance(fact, Answered) and flight.is_given_up:
            self._turn.withdraw(flight.entry)  # the doubt, if it still waits: nothing is doubtful any more
        if self._reports is None:
            return [fact]
        first = flight.first
        return [fact, *self._reports.of_outcome(fact, first.message, read_at=first.read_at, left_at=flight.left_at)]

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
        waiting = self._release(flight)
        if flight.said is None or not isinstance(flight.fact, Answered):
            self._workflows.released(flight.entry)
            self._tell(flight, waiting, slot)
            return False
        joined = [request for request in waiting if request is not flight.first]
        served = [request for request in joined if self._serve(request, flight, flight.fact, flight.said, slot)]
        if served or len(joined) < len(waiting):
            self._turn.answered(flight.entry)
        else:
            self._workflows.released(flight.entry)
        if self._catalog is not None and flight.entry.is_modern and flight.fact.error is None:
            self._catalog.client_is_ready(flight.first.call.meta)
        # A late answer is for clients of the handshake era, and for none that was told not to wait for it.
        return flight.first in waiting or not (flight.entry.is_modern or flight.entry.cause is Cause.TIMEOUT)

    def _serve(self, request: _Request, flight: _Flight, fact: Answered, said: tuple[bool, bytes], slot: Slot) -> bool:
        """Answers a request that joined a call; whether the answer fits it, else it is refused."""
        is_error, body = said
        recorded = flight.entry._replace(status=fact.status, error=body if is_error else None)
        if not _fits(recorded, request):
            self._refuse(request, Reason.DIVERGED, entry=recorded, why=_OTHER_SHAPE)
            return False
        slot.fill(self._replayed(request, flight.entry, body, is_error=is_error))
        if self._reports is not None:
            self._reports.replayed(request.message, read_at=request.read_at)
        return True

    def _tell(self, flight: _Flight, waiting: list[_Request], slot: Slot) -> None:
        """Says that a call was not sent, or may have run."""
        if isinstance(flight.fact, Doubted):
            self._has_left_doubt = True
            reason, entry = Reason.IN_DOUBT, flight.entry._replace(status=Status.IN_DOUBT, cause=flight.fact.cause)
        else:
            reason, entry = Reason.UPSTREAM_LOST, flight.entry._replace(status=Status.NOT_SENT)
        _log.warning("workflow %s, sequence %d: %s", *entry.place, entry.status)
        for request in waiting:
            slot.fill(self._refusals.line(request.message.id_bytes, reason, entry=entry))
            if request is not flight.first:  # whose report is on disk with the fact
                self._report_refused(request, reason)

    def _hand_over(self, flight: _Flight, slot: Slot, error: JournalError) -> None:
        """Gives whoever waits for a call what upstream said and the journal could not keep."""
        self._has_left_doubt |= isinstance(error, JournalFailed)  # else it is recorded once the database is free
        if flight.said is None or isinstance(flight.fact, Doubted):
            self._land(flight, slot)
            return
        entry = flight.entry._replace(status=Status.IN_DOUBT, cause=Cause.JOURNAL_UNAVAILABLE)
        self._workflows.released(flight.entry)
        for request in self._release(flight):
            id_bytes, reason = request.message.id_bytes, Reason.JOURNAL_UNAVAILABLE
            slot.fill(self._refusals.line(id_bytes, reason, entry=entry, why=str(error), answer=flight.said))

    def _release(self, flight: _Flight) -> list[_Request]:
        """The requests that waited for a call which is in flight no more."""
        if self._flights.get(flight.first.id) is flight:  # else its id is in use again
            del self._flights[flight.first.id]
        if flight.timer is not None:
            flight.timer.cancel()  # which also lets go of its line
        flight.first.flight = None  # in a circle, they would keep what may be large until it is looked for
        return self._detach(flight)

    def _detach(self, flight: _Flight) -> list[_Request]:
        """The requests that waited for a call, and do so no more."""
        waiting, flight.requests = flight.requests, []
        for request in waiting:
            request.flight = None
            del self._requests[request.id]
        return waiting

    # --------------------------------------------------------------------------------------------------- upstream's end

    def upstream_gone(self, cause: Cause, read_bytes: int, *, is_last: bool) -> None:
        """Settles what upstream will never answer; it has read that many bytes of what was written to it.

        Unless it was the last, calls that are awaited and that it cannot have read go to the next, under their rows.
        """
        unread: list[tuple[int, _Flight]] = []
        for flight in [flight for flight in self._flights.values() if flight.fact is None]:
            position = flight.slot.position
            if position is None:
                if is_last:
                    self._drop(flight)
            elif position >= read_bytes and flight.requests and not is_last:
                unread.append((position, flight))
            else:
                self._lose(flight, cause, is_unread=position >= read_bytes)
        for _, flight in sorted(unread, key=lambda item: item[0]):
            _log.info("workflow %s, sequence %d: waits for the next upstream", *flight.entry.place)
            flight.slot.refill(flight.first.line)
        while self._queue and is_last:
            self._refuse(self._queue.popleft(), Reason.UPSTREAM_LOST)

    def _lose(self, flight: _Flight, cause: Cause, *, is_unread: bool) -> None:
        entry, now = flight.entry, self._now_ms()
        not_sent, in_doubt = Answered(entry, Status.NOT_SENT, now), Doubted(entry, cause, now)
        facts = self._conclude(flight, not_sent if is_unread else in_doubt)

        def tell(slot: Slot) -> None:
            self._land(flight, slot)

        def tell_anyway(slot: Slot, error: JournalError) -> None:
            self._hand_over(flight, slot, error)

        self._turn.hold(self._turn.down, facts, 0, tell, tell_anyway)


def _fits(entry: Entry, request: _Request) -> bool:
    """Whether a recorded answer is of the shape that a request asks for: a result, or the handle of a task.

    In the 2026-07-28 era the server chooses; before, the request does, with `task`. Errors have one shape, and a result
    that asks for input is of that era only.
    """
    if entry.status is Status.INPUT_REQUIRED and entry.error is None:
        return request.message.is_modern
    is_handle = entry.status is Status.TASK
    if request.message.is_modern:
        return entry.is_modern or not is_handle
    if is_handle:
        return request.call.wants_task and not entry.is_modern
    return entry.error is not None or not request.call.wants_task


def _hashed(state: str) -> str:
    """A `requestState` as it is kept: it may hold a server's secrets, and is only ever compared."""
    return wire.sha256(state)


def _task_id(members: Mapping[str, Any]) -> str | None:
    """The id in the handle of a task, which is flat in one era and not in the other."""
    task = members.get("task")
    found = (task if isinstance(task, dict) else members).get("taskId")
    return storable(found) if isinstance(found, str) else None
