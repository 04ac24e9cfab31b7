"""What the endpoint of `--report-…` is told of each call: from what became of it to a report's bytes.

Does no I/O. An outcome's report goes on disk with the outcome; the others are given to `send`, and cost no call a sync.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import wire
from reporter import Config, build_detection_body, encode
from states import Answered, Cause, Doubted, Entry, ReportQueued, Status, status_of_answer, storable


class Told(NamedTuple):
    """What a report says of a call, and of the two stages it went through."""

    action: str
    reason: str
    journal: str  # verdict
    upstream: str | None  # verdict; None where upstream has no part in it


OF_STATUS: Final[Mapping[Status, Told]] = {
    Status.COMPLETED: Told("permit", "executed", "pass", "pass"),
    Status.FAILED: Told("permit", "executed", "pass", "fail"),
    Status.TASK: Told("permit", "executed", "pass", "pass"),
    Status.INPUT_REQUIRED: Told("permit", "input_required", "pass", "pass"),
    Status.NOT_SENT: Told("block", "upstream_lost", "pass", "skip"),
    Status.IN_DOUBT: Told("permit", "outcome_unknown", "pass", "fail"),
}
REPLAYED: Final = Told("permit", "replayed", "pass", None)
# What only its client knows to have ended is reported once it has: with an answer, or when an owner is gone.
_NOT_OVER: Final = (Cause.CANCELLED, Cause.TIMEOUT)


class Reports:
    """Makes the reports of one relay. Times are seconds on the loop's clock."""

    def __init__(
        self,
        config: Config,
        *,
        send: Callable[[ReportQueued], None],
        register: Callable[[Sequence[Mapping[str, str]] | None], None],
        hear: Callable[[], None],
        now_ms: Callable[[], int],
        time: Callable[[], float],
    ) -> None:
        self._config = config
        self._send = send
        self._register = register
        self._hear = hear
        self._has_begun = False  # registered, with tools or without
        self._now_ms = now_ms
        self._time = time
        self._agent: str | None = None  # of the handshake era, in which a client names itself once
        self._bypassed: dict[wire.Id, tuple[wire.Message, float]] = {}  # calls under way without a row

    def greeted(self, params: Mapping[str, Any]) -> None:
        """Takes the name of the client from the params of its `initialize`."""
        self._agent = _name_in(params.get("clientInfo"))

    def listed(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """Registers the server with a whole catalog, as upstream listed it."""
        self._has_begun = True
        self._register(_registered(tools))

    def called(self) -> None:
        """Registers the server before its first call, if that did not wait for a catalog."""
        if not self._has_begun:
            self._has_begun = True
            self._register(None)

    # ------------------------------------------------------------------------------------------- calls that have a row

    def of_outcome(
        self, fact: Answered | Doubted, request: wire.Message, *, read_at: float, left_at: float | None
    ) -> Sequence[ReportQueued]:
        """What goes on disk with the outcome of a dispatched call; nothing while upstream may still answer it."""
        if isinstance(fact, Doubted) and fact.cause in _NOT_OVER:
            return ()
        told = OF_STATUS[Status.IN_DOUBT if isinstance(fact, Doubted) else fact.status]
        now = self._time()
        left_at = now if left_at is None else left_at
        stages = _stages(told, left_at - read_at, now - left_at)
        return (self._report(told, fact.entry.tool_name, stages, self._agent_of(request), fact.entry.id),)

    def of_left_doubt(self, entry: Entry) -> ReportQueued:
        """What goes on disk when an earlier owner's call turns out to be in doubt. Whose agent it was is not known."""
        return self._report(OF_STATUS[Status.IN_DOUBT], entry.tool_name, (), None, entry.id)

    # ------------------------------------------------------------------------------------------ calls that have none

    def replayed(self, request: wire.Message, *, read_at: float) -> None:
        """A call that was answered from the journal, or with the answer to another call."""
        self._tell(request, REPLAYED, self._time() - read_at)

    def refused(self, request: wire.Message, reason: str, *, read_at: float | None = None) -> None:
        """A call that was refused before anything of it left."""
        elapsed = 0.0 if read_at is None else self._time() - read_at
        self._tell(request, Told("block", reason, "fail", None), elapsed)

    def bypassed(self, request: wire.Message) -> None:
        """A call that goes upstream without a row."""
        if request.id is not None and request.call is not None:
            self._bypassed[request.id] = request, self._time()

    def answered(self, answer: wire.Answer, *, is_stdin_closed: bool) -> None:
        """Upstream answered something, which may be a call without a row."""
        found = self._bypassed.pop(answer.id, None)
        if found is not None:
            request, left_at = found
            status = status_of_answer(
                answer.is_error, answer.members, is_modern=request.is_modern, is_stdin_closed=is_stdin_closed
            )
            self._tell_bypassed(request, left_at, status or Status.IN_DOUBT)

    def upstream_gone(self) -> None:
        """Calls without a row that upstream had not answered may have run."""
        for request, left_at in self._bypassed.values():
            self._tell_bypassed(request, left_at, Status.IN_DOUBT)
        self._bypassed.clear()

    def _tell_bypassed(self, request: wire.Message, left_at: float, status: Status) -> None:
        self._tell(request, OF_STATUS[status]._replace(journal="skip"), 0.0, self._time() - left_at)

    def _tell(self, request: wire.Message, told: Told, journal_s: float, upstream_s: float = 0.0) -> None:
        if request.call is not None:
            stages = _stages(told, journal_s, upstream_s)
            self._send(self._report(told, storable(request.call.name), stages, self._agent_of(request), None))

    def _agent_of(self, request: wire.Message) -> str | None:
        return _name_in(request.meta.get(wire.META_CLIENT_INFO)) if request.is_modern else self._agent

    def _report(
        self, told: Told, tool: str, stages: Iterable[Mapping[str, Any]], agent: str | None, dispatch: int | None
    ) -> ReportQueued:
        report = {
            "tool_name": tool,
            "action": told.action,
            "reason": told.reason,
            "agent_label": agent,
            "stages": tuple(stages),
        }
        body = encode(build_detection_body(self._config, report))
        self._hear()
        return ReportQueued(dispatch, self._config.base_url, tool, body, self._now_ms())


def _stages(told: Told, journal_s: float, upstream_s: float) -> Iterable[Mapping[str, Any]]:
    yield {"name": "journal", "verdict": told.journal, "latency_micros": round(journal_s * 1e6)}
    if told.upstream is not None:
        yield {"name": "upstream", "verdict": told.upstream, "latency_micros": round(upstream_s * 1e6)}


def _name_in(client_info: Any) -> str | None:
    """The name in a `clientInfo`, if it says anything: the endpoint takes no blank ones."""
    name = client_info.get("name") if isinstance(client_info, dict) else None
    if not isinstance(name, str):
        return None
    return storable(name.replace("\ufeff", " ").strip()) or None  # white space to the endpoint, but not to Python


def _registered(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The tools of `tools/list` results, as they are registered: name and description."""
    found = []
    for tool in tools:
        description = tool.get("description")
        more = {"description": storable(description)} if isinstance(description, str) else {}
        found.append({"name": storable(tool["name"]), **more})
    return found
