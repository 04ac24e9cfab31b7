"""Prints every kind of body that the relay can report, one a line, for scripts/identity_schema/check.mjs.

PYTHONPATH=. python tests/report_bodies.py | node scripts/identity_schema/check.mjs
"""

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import wire
from refusals import CODES
from reporter import Config
from reports import OF_STATUS, Reports
from states import Answered, Cause, Doubted, Entry, ReportQueued, Status

CLIENT_NAMES: Final[tuple[Any, ...]] = (
    None,
    "",
    " ",
    "an-agent",
    " padded ",
    "é\u2028",
    "\ufeff",
    "\ud800",
    "x" * 5000,
    7,
    ["list"],
    {},
)
ENTRY: Final = Entry(1, "w", 1, 1, "t", "signature", None, Status.PENDING)


def bodies() -> Iterator[bytes]:
    """All outcomes, refusals and replays, for clients of both eras with all kinds of names."""
    for name, is_modern in product(CLIENT_NAMES, (False, True)):
        made: list[ReportQueued] = []
        reports = reports_to(made)
        info: dict[str, Any] = {"name": name}
        reports.greeted({"clientInfo": info})
        call = wire.ToolCall("t", None, "signature", {}, None, False, False)
        meta = {"io.modelcontextprotocol/clientInfo": info} if is_modern else {}
        request = wire.Message("tools/call", wire.Id("integer", 1), b"1", is_modern, meta, call)
        for status in OF_STATUS:
            fact = Doubted(ENTRY, Cause.UPSTREAM_LOST, 0) if status is Status.IN_DOUBT else Answered(ENTRY, status, 0)
            made += reports.of_outcome(fact, request, read_at=0.0, left_at=0.5)
        made.append(reports.of_left_doubt(ENTRY))
        reports.replayed(request, read_at=0.0)
        for reason in CODES:
            reports.refused(request, reason)
        for is_error in (False, True):
            reports.bypassed(request)
            reports.answered(wire.Answer(wire.Id("integer", 1), is_error, b"", {}, 0), is_stdin_closed=False)
        reports.bypassed(request)
        reports.upstream_gone()
        yield from (report.body for report in made)


def reports_to(made: list[ReportQueued]) -> Reports:
    config = Config(api_key="a-key", server_did="did:web:s.example", server_url="https://s.example/mcp")
    return Reports(
        config, send=made.append, register=lambda tools: None, hear=lambda: None, now_ms=lambda: 0, time=lambda: 1.0
    )


if __name__ == "__main__":
    for body in bodies():
        sys.stdout.buffer.write(body + b"\n")
