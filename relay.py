"""The relay: lines in, lines out, and between them the journal.

`Relay` is told what arrived and writes to two sinks. It holds no descriptor, process or signal, so its tests need none;
supervisor.py joins it to those.

The promise is an order on disk: a call is committed before its first byte goes upstream, an answer before its first
byte goes downstream. calls.py says what is due, turn.py keeps the order; here lines are told apart.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import wire
from calls import Calls
from catalog import Catalog
from journal import Journal
from refusals import Reason, Refusals
from restarts import Gate, Handshake, Questions
from settings import Settings
from states import Cause, UpstreamStarted
from tasks import Tasks
from turn import CrashDrill, Riders, Scheduler, Sink, Turn

if TYPE_CHECKING:
    from reports import Reports  # and with it the reporter, which is not needed to relay

_log = logging.getLogger("checkpoint.relay")

HIGH_WATER_BYTES: Final = 1 << 18  # above this much unwritten or waiting, the side that it comes from is not read
_NAMES_SERVER: Final = (wire.INITIALIZE, "server/discover")


class Relay:
    """Passes lines both ways; every `tools/call` goes through the journal, where there is one.

    `on_change` is called when what `may_read_…` or `is_idle` say may have changed.
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
        crash_drill: CrashDrill,
        reports: "Reports | None" = None,
        riders: Riders | None = None,
    ) -> None:
        self._settings = settings
        self._reports = reports
        self._journal = journal
        self._refusals = refusals
        self._to_upstream = Gate(to_upstream)
        self._to_downstream = to_downstream
        self._on_change = on_change
        self._turn = Turn(journal, self._to_upstream, to_downstream, loop, crash_drill, self._turned, riders)
        self._up, self._down = self._turn.up, self._turn.down
        self._catalog = self._new_catalog(settings, reports)
        self._open: dict[wire.Id, wire.Message] = {}  # downstream's requests that are no calls, or bypass the journal
        self._handshake = Handshake()
        self._questions = Questions()
        self._calls: Calls | None = None
        self._tasks = Tasks(journal, self._turn, settings, now_ms) if journal is not None else None
        if journal is not None:
            self._calls = Calls(
                journal,
                refusals,
                self._turn,
                self._catalog,
                reports,
                settings,
                loop=loop,
                now_ms=now_ms,
                named=settings.named,
                bypass=self._forward,
            )
        # Whether each line of upstream's has to be looked at.
        self._follows_all = self._catalog is not None or settings.restarts_upstream
        self._is_first_down = self._is_first_up = True
        self._is_admitting = True
        self._is_upstream_gone = False
        self.is_upstream_stdin_closed = False  # to be set then: errors of upstream's may say just that
        self.is_handshake_refused = False  # by an upstream that was started again: it is of no use

    def _new_catalog(self, settings: Settings, reports: "Reports | None") -> Catalog | None:
        if reports is not None:
            return Catalog(self._up.send, is_trusted=settings.trusts_annotations, on_tools=reports.listed)
        return Catalog(self._up.send, is_trusted=True) if settings.trusts_annotations else None

    # ------------------------------------------------------------------------------------------------- for the edges

    @property
    def may_read_downstream(self) -> bool:
        """Whether there is room for more from downstream; our own replies count as much as upstream's slowness."""
        if self._turn.owes_replies and self._to_downstream.queued_bytes > HIGH_WATER_BYTES:
            return False
        waiting = self._turn.waiting_bytes(self._up) if self._turn.is_due else 0
        if self._calls is not None:
            waiting += self._calls.queued_bytes
        return waiting <= HIGH_WATER_BYTES and self._to_upstream.queued_bytes <= HIGH_WATER_BYTES

    @property
    def may_read_upstream(self) -> bool:
        """Whether there is room for more from upstream."""
        waiting = self._turn.waiting_bytes(self._down) if self._turn.is_due else 0
        is_full = max(self._to_downstream.queued_bytes, waiting) > HIGH_WATER_BYTES
        return not (is_full or self._turn.is_crashing)

    @property
    def is_idle(self) -> bool:
        """Whether every call that somebody waits for is answered, and all is on disk and on its way."""
        is_written = self._is_upstream_gone or not self._to_upstream.queued_bytes
        return is_written and not self._turn.is_due and not (self._calls is not None and self._calls.are_expected)

    @property
    def has_open_requests(self) -> bool:
        """Whether requests other than calls wait for upstream, as far as they are followed."""
        return bool(self._open)

    @property
    def has_left_doubt(self) -> bool:
        """Whether rows are in doubt that left for upstream, or would be if all ended now."""
        return self._calls is not None and self._calls.has_left_doubt

    def stop_admitting(self) -> None:
        """Refuses calls from now on; the rest is still relayed."""
        self._is_admitting = False

    def from_downstream(self, lines: Iterable[bytes]) -> None:
        """Lines that downstream wrote, each with its line feed."""
        self._turn.heard_from_downstream()
        for line in lines:
            if not line.isspace():
                self._read_downstream(line)
        if not self._turn.ends_soon:  # at its end that is said anyway
            self._on_change()

    def from_upstream(self, lines: Iterable[bytes]) -> None:
        """Lines that upstream wrote, each with its line feed."""
        for line in lines:
            if not line.isspace():
                self._read_upstream(line)
        if not self._turn.ends_soon:
            self._on_change()

    def when_written(self) -> None:
        """To be called when a sink has taken all that was queued."""
        self._turn.when_written()
        self._on_change()

    def upstream_is_mute(self) -> None:
        """Sends nothing more: upstream has closed one of its pipes, so what it got now would never be answered."""
        self._to_upstream.hold()

    def upstream_gone(self, cause: Cause) -> None:
        """Settles what upstream will never answer: what it cannot have read was not sent, the rest is in doubt."""
        self._is_upstream_gone = True
        self._settle_lost(cause, is_last=True)

    def upstream_interrupted(self) -> None:
        """Settles what upstream will never answer; calls that it cannot have read wait for the next one."""
        self._turn.end()  # what was on its way was on its way to the process that is gone
        self._questions.process_gone()
        self._handshake.process_gone()
        self._settle_lost(Cause.UPSTREAM_LOST, is_last=False)

    def upstream_started(self, to_upstream: Sink, pid: int) -> None:
        """Another process runs: it is greeted as downstream greeted the first, and then gets what waits for it."""
        if self._journal is not None:
            self._journal.upstream_pid = pid
            if self._journal.has_dispatched:
                self._turn.record([UpstreamStarted(pid)])
                self._turn.end()
        self._is_first_up = True
        self.is_handshake_refused = False
        greeting = self._handshake.begin_again()
        self._to_upstream.attach(to_upstream, greeting)
        if not greeting:
            self._go_on()

    def _settle_lost(self, cause: Cause, *, is_last: bool) -> None:
        self._refuse_lost(self._open.values())
        self._open.clear()
        if self._reports is not None:
            self._reports.upstream_gone()
        read_bytes = self._to_upstream.taken_bytes - (self._to_upstream.unread_bytes() or 0)
        self._to_upstream.shut()
        if self._calls is not None:
            self._calls.upstream_gone(cause, read_bytes, is_last=is_last)
        self._turn.end()

    def _go_on(self) -> None:
        """The process is ready for what waits for it."""
        self._to_upstream.open(self._handshake.confirmation)
        if self._catalog is not None:
            self._catalog.list_changed()  # it may be another version of the server
        self._on_change()

    def commit_riders(self) -> None:
        """Records what is worth no commit of its own while there is work."""
        self._turn.commit_riders()

    def _turned(self) -> None:
        if self._calls is not None:
            self._calls.admit()
        self._on_change()

    # ------------------------------------------------------------------------------------------------ from downstream

    def _read_downstream(self, line: bytes) -> None:
        is_first, self._is_first_down = self._is_first_down, False
        if self._calls is None:
            self._pass_unguarded(line, is_first)
            return
        try:
            message = wire.read_downstream(line, is_first=is_first)
        except wire.WireError as error:
            _log.warning("a line from downstream was not passed on: %s", error)
            if error.reply is not None:
                self._turn.reply(error.reply)
        else:
            self._read_message(self._calls, line, message)

    def _pass_unguarded(self, line: bytes, is_first: bool) -> None:
        """Without a journal a line is only looked at where its answer will name the server, or is reported."""
        if self._reports is None and not wire.may_greet(line):
            self._up.send(line)
            return
        message = wire.Message()
        with suppress(wire.WireError):
            message = wire.read_downstream(line, is_first=is_first)
        is_listing = self._reports is not None and message.method == wire.TOOLS_LIST
        if (is_listing or message.method in _NAMES_SERVER) and message.id is not None:
            self._open[message.id] = message
        self._up.send(line)
        self._follow(message)

    def _read_message(self, calls: Calls, line: bytes, message: wire.Message) -> None:
        if self._is_upstream_gone and message.call is not None:
            self._refuse_call(message, Reason.UPSTREAM_LOST)
        elif self._is_upstream_gone:
            self._refuse_lost([message, *message.batch])
        elif message.batch:
            self._read_batch(calls, line, message)
        elif self._shares_id(calls, message):
            self._turn.reply(_id_taken(message))
        elif message.call is not None and message.id is not None:
            self._read_call(calls, line, message, message.id, message.call)
        elif message.cancels is not None and message.cancels not in self._open:
            calls.cancel(message.cancels, line)
        elif self._questions.is_to_lost(message):
            self._questions.answered(message)
            _log.info("an answer to an upstream that is gone was dropped")
        else:
            self._forward(line, message)

    def _read_call(
        self, calls: Calls, line: bytes, message: wire.Message, request_id: wire.Id, call: wire.ToolCall
    ) -> None:
        if self._is_admitting:
            calls.read(line, message, request_id, call)
            self._note_call()
        else:
            self._refuse_call(message, Reason.SHUTTING_DOWN)

    def _shares_id(self, calls: Calls, message: wire.Message) -> bool:
        """Whether it is a request under the id of a call in flight, or a call under that of any request."""
        if message.method is None or message.id is None:
            return False
        other = self._open.get(message.id)
        is_either_call = other is not None and wire.TOOLS_CALL in (message.method, other.method)
        return is_either_call or message.id in calls

    def _read_batch(self, calls: Calls, line: bytes, message: wire.Message) -> None:
        """An array without a call passes, unless something in it may cancel one, shares its id or answers who is gone.

        Then its parts do apart.
        """
        is_touched = any(
            (part.cancels is not None and part.cancels not in self._open)
            or self._shares_id(calls, part)
            or self._questions.is_to_lost(part)
            for part in message.batch
        )
        if not is_touched:
            self._forward(line, message)
            return
        for piece, part in zip(wire.parts(line), message.batch, strict=True):
            self._read_message(calls, piece, part)

    def _follow(self, message: wire.Message) -> None:
        """What a message that went upstream means for what we ask there ourselves, and for reports."""
        if self._reports is not None:
            if message.method == wire.INITIALIZE:
                self._reports.greeted(message.params)
            elif message.call is not None:
                self._reports.bypassed(message)
                self._note_call()
        if self._catalog is not None and message.method == wire.INITIALIZED:
            self._catalog.client_is_ready({})

    def _note_call(self) -> None:
        if self._reports is not None and self._catalog is not None:
            self._reports.called()
            self._catalog.want()

    def _forward(self, line: bytes, message: wire.Message) -> None:
        for part in (message, *message.batch):
            self._questions.answered(part)
            if part.method is not None and part.id is not None:
                self._open[part.id] = part
        if not (self._to_upstream.lets_by(message, line) or self._handshake.reads(message, line)):
            self._up.send(line)
        self._follow(message)

    def _refuse_call(self, message: wire.Message, reason: Reason) -> None:
        """Refuses a call of which nothing is on record."""
        if message.call is not None and message.id is not None:
            self._turn.reply(self._refusals.line(message.id_bytes, reason, tool=message.call.name))
            if self._reports is not None:
                self._reports.refused(message, reason)

    def _refuse_lost(self, messages: Iterable[wire.Message]) -> None:
        """Answers the requests among some messages that an upstream which is gone will not."""
        for message in messages:
            if message.method is not None and message.id is not None:
                what = message.call.name if message.call else message.method
                self._turn.reply(self._refusals.line(message.id_bytes, Reason.UPSTREAM_LOST, tool=what))

    # -------------------------------------------------------------------------------------------------- from upstream

    def _read_upstream(self, line: bytes) -> None:
        is_first, self._is_first_up = self._is_first_up, False
        if not self._may_concern_us(line):
            self._down.send(line)
            return
        read = wire.read_upstream(line, is_first=is_first)
        if read is None:
            _log.warning("upstream wrote a line that is not JSON; it is passed on")
            self._down.send(line)
        elif read.objects > 1 and (self._follows_all or any(self._is_for_us(answer) for answer in read.answers)):
            for piece in wire.parts(line):  # each waits for its own row, and the others need not wait
                self._read_upstream(piece)
        elif not (self._follows_all and (self._refuses(read) or self._takes(read))):
            answers = tuple(map(self._meant, read.answers))
            self._read_answers(self._named(line, answers), answers)

    def _is_for_us(self, answer: wire.Answer) -> bool:
        """Whether a call in flight waits for an answer."""
        return self._calls is not None and self._meant(answer).id in self._calls

    def _meant(self, answer: wire.Answer) -> wire.Answer:
        """An answer under the id that its client takes it for: 7 for "7", where nobody waits for "7"."""
        if self._is_awaited(answer.id):
            return answer
        other = wire.other_spelling(answer.id)
        return answer._replace(id=other) if other is not None and self._is_awaited(other) else answer

    def _is_awaited(self, identity: wire.Id) -> bool:
        """Whether downstream waits for an answer under this id."""
        return identity in self._open or (self._calls is not None and identity in self._calls)

    def _may_concern_us(self, line: bytes) -> bool:
        if self._open or self._follows_all or (self._calls is not None and self._calls.are_under_way):
            return True
        return bool(self._settings.name or self._settings.version) and wire.may_name_server(line)

    def _refuses(self, read: wire.Upstream) -> bool:
        """Whether a line asks under an id that downstream may still answer to a process that is gone: it is refused."""
        if not self._settings.restarts_upstream:
            return False
        ids = [identity for _, identity in read.methods if identity is not None]
        if self._questions.may_ask(ids):
            self._questions.withdrawn(read.cancels)
            return False
        _log.warning("a question of upstream's was refused: its id is that of an open one of an upstream that is gone")
        for identity in ids:
            why = "Internal error: this id belongs to a question of an earlier process that is still open"
            self._up.send(wire.error_line(identity.as_json(), wire.INTERNAL_ERROR, why))
        return True

    def _takes(self, read: wire.Upstream) -> bool:
        """Whether a line answers what we asked, so that it must not go down; learns from it."""
        if self._catalog is not None and any(method == wire.LIST_CHANGED for method, _ in read.methods):
            self._catalog.list_changed()
        taken = [self._takes_own(answer) for answer in read.answers]
        if not any(taken):
            return False
        if self._calls is not None:
            self._calls.admit()
        return True

    def _takes_own(self, answer: wire.Answer) -> bool:
        if self._handshake.takes(answer):
            if answer.is_error:
                self.is_handshake_refused = True
                self._on_change()
            else:
                self._go_on()
            return True
        return self._catalog is not None and self._catalog.take_own(answer)

    def _named(self, line: bytes, answers: Sequence[wire.Answer]) -> bytes:
        """A line with our name for upstream's, and with the place of a call where that is wanted."""
        if len(answers) > 1:  # from the end, so that a span that grows moves no other; two ids may have one span
            answers = [one for _, one in sorted({answer.start: answer for answer in answers}.items(), reverse=True)]
        for answer in answers:
            if answer.is_error:
                continue
            request = self._open.get(answer.id)
            is_handshake = request is not None and request.method in _NAMES_SERVER
            body = answer.body
            if is_handshake or "_meta" in answer.members:  # nowhere else is a server named, and bodies may be large
                body = self._settings.named(body, is_handshake=is_handshake)
            if self._settings.annotates and self._calls is not None:
                body = self._calls.annotated(answer.id, body)
            if body is not answer.body:
                line = line[: answer.start] + body + line[answer.start + len(answer.body) :]
        return line

    def _read_answers(self, line: bytes, answers: tuple[wire.Answer, ...]) -> None:
        to_calls = [answer for answer in answers if self._calls is not None and answer.id in self._calls]
        is_taken = False
        for answer in answers:
            if self._reports is not None:
                self._reports.answered(answer, is_stdin_closed=self.is_upstream_stdin_closed)
            if (request := self._open.pop(answer.id, None)) is not None:
                self._handshake.answered(answer)
                self._learn(request, answer)
                if self._tasks is not None and len(answers) == 1:
                    is_closed = self.is_upstream_stdin_closed
                    is_taken = self._tasks.takes(request, answer, line, is_stdin_closed=is_closed)
        if is_taken:
            return
        if to_calls and self._calls is not None:
            self._calls.read_answers(line, to_calls, is_stdin_closed=self.is_upstream_stdin_closed)
        else:
            self._down.send(line)

    def _learn(self, request: wire.Message, answer: wire.Answer) -> None:
        if self._catalog is None or answer.is_error:
            return
        if request.method == wire.TOOLS_LIST:
            self._catalog.learn(request.params.get("cursor"), answer.members)
        if request.is_modern:
            self._catalog.client_is_ready(request.meta)


def _id_taken(request: wire.Message) -> bytes:
    _log.warning("a request that shares its id with one in flight was refused")
    why = "Invalid request: this id belongs to a request that is still open"
    return wire.error_line(request.id_bytes, wire.INVALID_REQUEST, why)
