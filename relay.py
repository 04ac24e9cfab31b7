"""The relay: lines in, lines out, and between them the journal.

`Relay` is told what arrived and writes to two sinks. It holds no descriptor, process or signal, so its tests need none;
supervisor.py joins it to those.

The promise is an order on disk: a call is committed before its first byte goes upstream, an answer before its first
byte goes downstream. All that became ready in one turn of the loop shares one commit.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

import wire
from hints import LIST_CHANGED, TOOLS_LIST, Hints
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
    Status,
    blocking_doubt,
    decide,
    status_of_answer,
)
from places import Pin, PinError, read_pin
from refusals import Reason, Refusals
from storage import JournalError
from turn import RETRY_S, WAIT_S, CrashDrill, Scheduler, Sink, Slot, Turn

_log = logging.getLogger("checkpoint.relay")

HIGH_WATER_BYTES: Final = 1 << 18  # above this much unwritten or waiting, the side that it comes from is not read
REDACTED_ARGUMENTS: Final = b'{"checkpoint_redacted":true}'
_NAMES_SERVER: Final = ("initialize", "server/discover")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to relay. An empty name or version leaves upstream's own."""

    name: str = "checkpoint"
    version: str = "0.0.0"
    trusts_annotations: bool = False
    redacts_arguments: bool = False


# --------------------------------------------------------------------------------------------------- calls under way


@dataclass(slots=True, eq=False)
class _Request:
    """A `tools/call` of downstream's that has had no answer."""

    line: bytes
    id: wire.Id
    id_bytes: bytes
    is_modern: bool
    call: wire.ToolCall
    pin: Pin
    deadline: float  # of the wait until its place is known


@dataclass(slots=True, eq=False)
class _Flight:
    """One dispatched call, and the requests that wait for its answer.

    It is in flight until upstream has answered or is gone, whatever downstream was told: after a cancel, nobody waits.
    """

    entry: Entry
    upstream_id: wire.Id  # the id that upstream knows: that of the request that was first
    upstream_id_bytes: bytes
    requests: list[_Request]
    slot: Slot
    is_cancelled: bool = False
    is_settled: bool = False  # its answer was read and is on its way to disk


# ------------------------------------------------------------------------------------------------------------ the relay


class Relay:
    """Passes lines both ways; every `tools/call` goes through the journal, where there is one.

    `call_soon` and `call_later` are the loop's. `on_change` is called when what `may_read_…` or `is_idle` say may have
    changed. `unread_upstream_bytes` tells how much upstream has not read of what was written to it.
    """

    def __init__(
        self,
        settings: Settings,
        journal: Journal | None,
        refusals: Refusals,
        *,
        to_upstream: Sink,
        to_downstream: Sink,
        loop: Scheduler,
        now_ms: Callable[[], int],
        on_change: Callable[[], None],
        unread_upstream_bytes: Callable[[], int | None],
        crash_drill: CrashDrill,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._refusals = refusals
        self._to_upstream = to_upstream
        self._to_downstream = to_downstream
        self._turn = Turn(journal, to_upstream, to_downstream, loop, crash_drill, self._turned)
        self._up, self._down = self._turn.up, self._turn.down
        self._loop = loop
        self._now_ms = now_ms
        self._on_change = on_change
        self._unread_upstream_bytes = unread_upstream_bytes
        self._is_first_down = self._is_first_up = True
        self._is_admitting = True
        self._owes_downstream = False
        self.is_upstream_stdin_closed = False
        self.has_left_doubt = False  # calls left for upstream and were never answered
        self._queue: deque[_Request] = deque()  # their place is not known yet
        self._requests: dict[wire.Id, _Request] = {}  # all that wait for an answer
        self._flights: dict[wire.Id, _Flight] = {}  # by the id that upstream knows
        self._flight_of: dict[int, _Flight] = {}  # by the id of their entry
        self._open: dict[wire.Id, wire.Message] = {}  # downstream's other requests
        self._is_retry_due = False
        self._hints = Hints(self._up.send) if settings.trusts_annotations else None

    # ------------------------------------------------------------------------------------------------- for the edges

    @property
    def may_read_downstream(self) -> bool:
        """Whether there is room for more from downstream; our own answers count as much as upstream's slowness."""
        is_stuck = self._owes_downstream and self._to_downstream.queued_bytes > HIGH_WATER_BYTES
        return not is_stuck and self._to_upstream.queued_bytes <= HIGH_WATER_BYTES >= self._waiting_bytes()

    @property
    def may_read_upstream(self) -> bool:
        """Whether there is room for more from upstream."""
        if self._turn.is_crashing:
            return False
        return self._to_downstream.queued_bytes <= HIGH_WATER_BYTES >= self._waiting_bytes()

    def _waiting_bytes(self) -> int:
        return self._turn.waiting_bytes + sum(len(request.line) for request in self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether every call that somebody waits for is answered, and all is on disk and on its way."""
        return not (self._requests or self._turn or self._to_upstream.queued_bytes)

    @property
    def has_open_requests(self) -> bool:
        """Whether requests other than calls wait for upstream, as far as they are followed."""
        return bool(self._open)

    def stop_admitting(self) -> None:
        """Refuses calls from now on; the rest is still relayed."""
        self._is_admitting = False

    def from_downstream(self, lines: Iterable[bytes]) -> None:
        """Lines that downstream wrote, each with its line feed."""
        for line in lines:
            if not line.isspace():
                self._read_downstream(line)
        self._on_change()

    def from_upstream(self, lines: Iterable[bytes]) -> None:
        """Lines that upstream wrote, each with its line feed."""
        for line in lines:
            if not line.isspace():
                self._read_upstream(line)
        self._on_change()

    def when_written(self) -> None:
        """To be called when a sink has taken all that was queued."""
        if not self._to_downstream.queued_bytes:
            self._owes_downstream = False
        self._turn.crash_if_written()
        self._on_change()

    # ------------------------------------------------------------------------------------------------ from downstream

    def _read_downstream(self, line: bytes) -> None:
        is_first, self._is_first_down = self._is_first_down, False
        if self._journal is None:
            self._pass_unguarded(line, is_first)
            return
        try:
            message = wire.read_downstream(line, is_first=is_first)
        except wire.WireError as error:
            _log.warning("a line from downstream was not passed on: %s", error)
            if error.reply is not None:
                self._answer(error.reply)
            return
        if message.id is not None and message.method is not None and self._is_in_flight(message):
            _log.warning("a request that shares its id with one in flight was refused")
            reply = "Invalid request: this id belongs to a request that is still open"
            self._answer(wire.error_line(message.id_bytes, wire.INVALID_REQUEST, reply))
        elif message.call is not None and message.id is not None:
            self._read_call(line, message, message.id, message.call)
        elif message.cancels is not None:
            self._read_cancel(line, message.cancels)
        else:
            self._forward(line, message)

    def _pass_unguarded(self, line: bytes, is_first: bool) -> None:
        """Without a journal a line is only looked at where its answer will name the server."""
        if b"initialize" in line or b"discover" in line or b"\\u" in line:
            try:
                message = wire.read_downstream(line, is_first=is_first)
            except wire.WireError:
                message = wire.Message()
            if message.method in _NAMES_SERVER and message.id is not None:
                self._open[message.id] = message
        self._up.send(line)

    def _is_in_flight(self, message: wire.Message) -> bool:
        known = message.id in self._requests or message.id in self._flights
        return known or (message.call is not None and message.id in self._open)

    def _forward(self, line: bytes, message: wire.Message) -> None:
        if message.method is not None and message.id is not None:
            self._open[message.id] = message
        self._up.send(line)
        if self._hints is not None and message.method == "notifications/initialized":
            self._hints.client_is_ready({})

    def _read_call(self, line: bytes, message: wire.Message, request_id: wire.Id, call: wire.ToolCall) -> None:
        if not self._is_admitting:
            self._answer(self._refusals.line(message.id_bytes, Reason.SHUTTING_DOWN, tool=call.name))
            return
        try:
            pin = read_pin(call.meta)
        except PinError as error:
            self._answer(self._refusals.line(message.id_bytes, Reason.INVALID_META, tool=call.name, why=str(error)))
            return
        deadline = self._loop.time() + WAIT_S
        request = _Request(line, request_id, message.id_bytes, message.is_modern, call, pin, deadline)
        self._requests[request_id] = request
        self._queue.append(request)
        self._admit()

    def _admit(self) -> None:
        """Gives the requests in the queue their places, in order, as far as nothing is in the way."""
        while self._queue:
            request = self._queue[0]
            is_late = self._loop.time() >= request.deadline
            if self._hints is not None:
                is_read_only = self._hints.is_read_only(request.call.name)
                if is_read_only is None and not is_late:
                    break
                if is_read_only is None:
                    self._hints.give_up()
                if is_read_only:
                    self._queue.popleft()
                    self._bypass(request)
                    continue
            if not self._is_placed(request, is_late):
                break
            self._queue.popleft()
        if self._queue:
            self._retry_later()
        else:
            self._give_back()

    def _bypass(self, request: _Request) -> None:
        """A call that its server says only reads: no journal, no place."""
        del self._requests[request.id]
        self._forward(request.line, wire.Message("tools/call", request.id, request.id_bytes, request.is_modern))

    def _is_placed(self, request: _Request, is_late: bool) -> bool:
        """Whether a request found its place, or its refusal; False while another process or program is in the way."""
        journal = self._journal
        assert journal is not None  # calls are queued only where there is one
        try:
            if journal.take():
                self._place(journal, request)
                return True
            busy = f"process {journal.owner_pid() or 'unknown'} owns {journal.path}"
        except JournalBusy as error:
            busy = str(error)
        except JournalError as error:
            self._refuse(request, Reason.JOURNAL_UNAVAILABLE, why=str(error))
            return True
        if is_late:
            self._refuse(request, Reason.BUSY, why=busy)
        return is_late

    def _place(self, journal: Journal, request: _Request) -> None:
        """The one way of a call: its place, what is on record there, and what the table says to that."""
        call = request.call
        workflow_id = request.pin.workflow_id or journal.workflow_id
        entry: Entry | None
        if request.pin.sequence is None:
            doubts = [*journal.doubts(workflow_id), *self._cancelled(workflow_id)]
            entry = blocking_doubt(doubts, call.name, call.signature, self._flight_of)
            if entry is not None:
                self._refuse(request, Reason.IN_DOUBT, entry=entry)
                return
            sequence = journal.last_sequence(workflow_id) + 1
        else:
            sequence = request.pin.sequence
            entry = journal.entry(workflow_id, sequence)
        action = decide(entry, call.signature)
        if action is Action.PROCEED:
            self._dispatch(journal, request, workflow_id, sequence, entry.attempt + 1 if entry else 1)
            return
        assert entry is not None  # every other action speaks of a row
        match action:
            case Action.JOIN:
                self._join(request, entry)
            case Action.REPLAY:
                self._replay(request, entry)
            case Action.REFUSE_IN_DOUBT:
                self._refuse(request, Reason.IN_DOUBT, entry=entry)
            case Action.REFUSE_PRUNED:
                self._refuse(request, Reason.DIVERGED, entry=entry, why="the row was pruned")
            case Action.DIVERGE:
                _log.warning("workflow %s, sequence %d: diverged", *entry.place)
                del self._requests[request.id]
                self._answer(self._refusals.diverged(request.id_bytes, entry, call.name, call.arguments))
            case _:
                assert_never(action)

    def _join(self, request: _Request, entry: Entry) -> None:
        """Waits for the answer to a call that is under way, if it is still awaited."""
        flight = self._flight_of.get(entry.id)
        if flight is not None and not flight.is_cancelled:
            flight.requests.append(request)
            return
        cause = Cause.CANCELLED if flight else Cause.JOURNAL_UNAVAILABLE
        self._refuse(request, Reason.IN_DOUBT, entry=replace(entry, status=Status.IN_DOUBT, cause=cause))

    def _cancelled(self, workflow_id: str) -> list[Entry]:
        """Calls that were cancelled in this turn: their doubt is not on disk yet."""
        flights = (held for held in self._flights.values() if held.is_cancelled)
        return [flight.entry for flight in flights if flight.entry.workflow_id == workflow_id]

    def _dispatch(self, journal: Journal, request: _Request, workflow_id: str, sequence: int, attempt: int) -> None:
        call = request.call
        is_hidden = self._settings.redacts_arguments and call.arguments is not None
        entry = journal.draft(
            Entry(
                id=0,
                workflow_id=workflow_id,
                sequence=sequence,
                attempt=attempt,
                # SQLite's text has no lone surrogates; the signature tells such names apart.
                tool_name=call.name.encode("utf-8", "backslashreplace").decode(),
                signature=call.signature,
                arguments=REDACTED_ARGUMENTS if is_hidden else call.arguments,
                status=Status.PENDING,
                started_at=self._now_ms(),
                is_modern=request.is_modern,
            )
        )
        flight = _Flight(entry, request.id, request.id_bytes, [request], self._up.hold())
        self._flights[request.id] = self._flight_of[entry.id] = flight
        self._turn.hold(
            [Dispatched(entry)],
            lambda: self._up.fill(flight.slot, request.line),
            lambda error: self._abandon(flight, _reason(error), str(error)),
            len(request.line),
        )

    def _abandon(self, flight: _Flight, reason: Reason, why: str) -> None:
        """Refuses a call that was not dispatched, since its row could not be written."""
        self._forget(flight)
        assert self._journal is not None
        self._journal.withdraw(flight.entry)
        for request in flight.requests:
            self._refuse(request, reason, entry=replace(flight.entry, status=Status.NOT_SENT), why=why)

    def _read_cancel(self, line: bytes, cancelled: wire.Id) -> None:
        if cancelled in self._open:
            self._up.send(line)
            return
        request = self._requests.pop(cancelled, None)
        if request is None:
            return  # answered, or never asked: upstream does not know it
        if request in self._queue:
            self._queue.remove(request)
            return
        flight = next(flight for flight in self._flights.values() if request in flight.requests)
        flight.requests.remove(request)
        if flight.requests or flight.is_settled:
            return
        flight.is_cancelled = True
        if cancelled != flight.upstream_id:
            line = wire.cancel_line(flight.upstream_id_bytes)
        self._up.send(line)
        _log.info("workflow %s, sequence %d: cancelled, unanswered", *flight.entry.place)
        doubt = Doubted(flight.entry, Cause.CANCELLED, self._now_ms())
        self._turn.hold([doubt], lambda: None, lambda error: None, 0)

    # -------------------------------------------------------------------------------------------------- from upstream

    def _read_upstream(self, line: bytes) -> None:
        is_first, self._is_first_up = self._is_first_up, False
        is_followed = self._flights or self._open or self._hints is not None
        if not is_followed and not self._may_name_server(line):
            self._down.send(line)
            return
        read = wire.read_upstream(line, is_first=is_first)
        if read is None:
            _log.warning("upstream wrote a line that is not JSON; it is passed on")
            self._down.send(line)
            return
        if self._hints is not None and self._hints.take_own(read.answers):
            self._admit()
            return
        settled: list[tuple[_Flight, wire.Answer]] = []
        for answer in reversed(read.answers):  # from the end, so that a span that is replaced moves no other
            request = self._open.pop(answer.id, None)
            if not answer.is_error:
                line = self._named(line, answer, request)
            if request is not None and not answer.is_error:
                self._learn_from(request, answer)
            if answer.id in self._flights:
                settled.append((self._flights[answer.id], answer))
        if settled:
            self._settle(line, settled)
        else:
            self._down.send(line)
        if self._hints is not None and any(method == LIST_CHANGED for method, _ in read.methods):
            self._hints.list_changed()

    def _learn_from(self, request: wire.Message, answer: wire.Answer) -> None:
        if self._hints is None:
            return
        if request.method == TOOLS_LIST:
            self._hints.learn(answer.members)
        if request.is_modern:
            self._hints.client_is_ready(request.meta)

    def _may_name_server(self, line: bytes) -> bool:
        return bool(self._settings.name or self._settings.version) and (b"erverInfo" in line or b"\\u" in line)

    def _named(self, line: bytes, answer: wire.Answer, request: wire.Message | None) -> bytes:
        is_handshake = request is not None and request.method in _NAMES_SERVER
        body = self._with_our_name(answer.body, is_handshake=is_handshake)
        if body is answer.body:
            return line
        return line[: answer.start] + body + line[answer.start + len(answer.body) :]

    def _with_our_name(self, result: bytes, *, is_handshake: bool = False) -> bytes:
        return wire.with_identity(result, self._settings.name, self._settings.version, is_handshake=is_handshake)

    def _settle(self, line: bytes, settled: Sequence[tuple[_Flight, wire.Answer]]) -> None:
        """Puts upstream's word on disk, and only then lets its line go down."""
        facts: list[Fact] = []
        for flight, answer in settled:
            if not flight.is_settled:  # a second answer changes nothing: it only may not overtake the first
                flight.is_settled = True
                facts.append(self._fact(flight, answer))
        slot = self._down.hold()

        def deliver() -> None:
            is_due = False
            for flight, answer in settled:
                is_due |= self._deliver(slot, flight, answer, facts)
            if is_due:
                self._down.fill(slot, line)

        def hand_over(error: JournalError) -> None:
            for flight, answer in settled:
                self._forget(flight)
                entry = replace(flight.entry, status=Status.IN_DOUBT)
                for request in flight.requests:
                    self._requests.pop(request.id, None)
                    said = (answer.is_error, answer.body)
                    refusal = self._refusals.line(
                        request.id_bytes, Reason.JOURNAL_UNAVAILABLE, entry=entry, why=str(error), answer=said
                    )
                    self._down.fill(slot, refusal)

        self._turn.hold(facts, deliver, hand_over, len(line))

    def _fact(self, flight: _Flight, answer: wire.Answer) -> Fact:
        status = status_of_answer(
            answer.is_error,
            answer.members,
            is_modern=flight.entry.is_modern,
            is_stdin_closed=self.is_upstream_stdin_closed,
        )
        if status is None:
            return Doubted(flight.entry, Cause.UPSTREAM_LOST, self._now_ms())
        bodies = {"error" if answer.is_error else "result": answer.body}
        return Answered(flight.entry, status, self._now_ms(), **bodies)

    def _deliver(self, slot: Slot, flight: _Flight, answer: wire.Answer, facts: Sequence[Fact]) -> bool:
        """Answers whoever waits for a call that is settled on disk; whether upstream's own line is due as well."""
        is_due = not flight.entry.is_modern  # a late answer is for a client of the handshake era only
        doubt = next((fact for fact in facts if isinstance(fact, Doubted) and fact.entry is flight.entry), None)
        self._forget(flight)
        for request in flight.requests:
            self._requests.pop(request.id, None)
            if doubt is not None:
                entry = replace(flight.entry, status=Status.IN_DOUBT, cause=doubt.cause)
                self._down.fill(slot, self._refusals.line(request.id_bytes, Reason.IN_DOUBT, entry=entry))
            elif request.id != flight.upstream_id:
                self._down.fill(slot, self._replayed(request, flight.entry, answer.body, is_error=answer.is_error))
        return doubt is None and (is_due or any(request.id == flight.upstream_id for request in flight.requests))

    def _forget(self, flight: _Flight) -> None:
        self._flights.pop(flight.upstream_id, None)
        self._flight_of.pop(flight.entry.id, None)

    def upstream_gone(self, cause: Cause) -> None:
        """Settles what upstream will never answer: what it cannot have read was not sent, the rest is in doubt."""
        written, unread = self._to_upstream.taken_bytes, self._unread_upstream_bytes()
        read_bytes = written if unread is None else written - unread
        for flight in [flight for flight in self._flights.values() if not flight.is_settled]:
            position = flight.slot.position
            if position is None:
                self._drop_undispatched(flight)
            else:
                self._lose(flight, cause, is_unread=position >= read_bytes)
        for message in self._open.values():
            self._answer(self._refusals.line(message.id_bytes, Reason.UPSTREAM_LOST, tool=message.method))
        self._open.clear()
        while self._queue:
            self._refuse(self._queue.popleft(), Reason.UPSTREAM_LOST)
        self._turn.end()

    def _drop_undispatched(self, flight: _Flight) -> None:
        self._turn.withdraw(flight.entry)
        self._abandon(flight, Reason.UPSTREAM_LOST, "it was not sent")

    def _lose(self, flight: _Flight, cause: Cause, *, is_unread: bool) -> None:
        fact: Fact
        if is_unread:
            fact = Answered(flight.entry, Status.NOT_SENT, self._now_ms())
            reason, entry = Reason.UPSTREAM_LOST, replace(flight.entry, status=Status.NOT_SENT)
        else:
            self.has_left_doubt = True
            fact = Doubted(flight.entry, cause, self._now_ms())
            reason, entry = Reason.IN_DOUBT, replace(flight.entry, status=Status.IN_DOUBT, cause=cause)
        _log.warning("workflow %s, sequence %d: %s", *entry.place, entry.status)
        flight.is_settled = True
        slot = self._down.hold()

        def answer(_: JournalError | None = None) -> None:
            self._forget(flight)
            for request in flight.requests:
                self._requests.pop(request.id, None)
                self._down.fill(slot, self._refusals.line(request.id_bytes, reason, entry=entry))

        self._turn.hold([fact], answer, answer, 0)

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(self, line: bytes) -> None:
        self._owes_downstream = True
        self._down.send(line)

    def _refuse(self, request: _Request, reason: Reason, *, entry: Entry | None = None, why: str | None = None) -> None:
        self._requests.pop(request.id, None)
        if entry is not None:
            _log.warning("workflow %s, sequence %d: refused, %s", *entry.place, reason)
        else:
            _log.warning("a call was refused, %s", reason)
        workflow_id = request.pin.workflow_id or (self._journal.workflow_id if self._journal else None)
        self._answer(
            self._refusals.line(
                request.id_bytes, reason, tool=request.call.name, workflow_id=workflow_id, entry=entry, why=why
            )
        )

    def _replay(self, request: _Request, entry: Entry) -> None:
        _log.info("workflow %s, sequence %d: replayed", *entry.place)
        self._requests.pop(request.id, None)
        is_error = entry.error is not None
        body = entry.error if entry.error is not None else entry.result
        self._answer(self._replayed(request, entry, body or b"null", is_error=is_error))

    def _replayed(self, request: _Request, entry: Entry, body: bytes, *, is_error: bool) -> bytes:
        if not is_error:
            body = self._with_our_name(body)
            if request.is_modern and not entry.is_modern:
                body = wire.with_result_type(body)
        return wire.replay_line(request.id_bytes, body, is_error=is_error)

    # ------------------------------------------------------------------------------------------------------- waiting

    def _turned(self) -> None:
        self._give_back()
        self._on_change()

    def _give_back(self) -> None:
        """Lets other processes have the journal, if this one has only read it."""
        if self._journal is not None and not self._turn and not self._queue:
            self._journal.give_back()

    def _retry_later(self) -> None:
        if not self._is_retry_due:
            self._is_retry_due = True
            self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._is_retry_due = False
        self._admit()
        self._on_change()


def _reason(error: JournalError) -> Reason:
    return Reason.BUSY if isinstance(error, JournalBusy) else Reason.JOURNAL_UNAVAILABLE
