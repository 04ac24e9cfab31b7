"""What an operator is told about a call in doubt: what is known, what to look for, and the commands that settle it.

Pure. Stands only where a person reads: no refusal carries any of it, since an agent with a shell would paste it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from reader import Owner, Row
from render import clean, iso, quoted
from states import Cause

_WHY: Final[Mapping[str, str]] = {
    Cause.RELAY_LOST: "The relay ended before an answer was on record. The server may have got the call or not, and "
    "may have run it or not.",
    Cause.UPSTREAM_LOST: "The server ended, or lost the task, before it gave its final answer. It may have run the "
    "call before that.",
    Cause.TIMEOUT: "No answer had come when --call-timeout was over. The server may have got the call or not, and may "
    "have run it or not.",
    Cause.CANCELLED: "The client cancelled the call before an answer came. If the server got the call, it may have run "
    "it before it heard of that, or in spite of it.",
    Cause.JOURNAL_UNAVAILABLE: "The server answered, and the journal could not keep the answer. It most likely ran; "
    "the client was handed the answer in data.checkpoint.answer of its refusal.",
}


class Advice:
    """About one attempt that is in doubt. Where a later one stands, it no longer decides what the place holds."""

    def __init__(self, row: Row, *, owner: Owner | None, path: str) -> None:
        self._row = row
        self._owner = owner
        self._path = path

    def sections(self, command: Sequence[str], *, holder: int | None) -> Iterator[tuple[str, list[str]]]:
        """Headings and what stands below them."""
        which = "" if self._row.stands else f", attempt {self._row.attempt}"
        yield f"in doubt{which}: what is known", self.known()
        yield "what to check at the provider", self.checks()
        lines: list[str] = []
        if holder is not None:
            name = f"process {holder}" if holder else "a process"
            lines += [f"First end {name}, which owns the journal: until then these fail as busy.", ""]
        for meaning, line in self.commands(command):
            lines += [meaning, f"  {line}"]
        yield "how to settle it, once you know", lines

    def known(self) -> list[str]:
        """What is on record, in sentences."""
        row = self._row
        known = [
            f"The call was on disk at {iso(row.started_at)}, before any byte of it left for the server.",
            _WHY[row.cause or Cause.RELAY_LOST],
        ]
        if self._owner is not None and self._owner.upstream_pid is not None:
            known.append(f"The server's process was {self._owner.upstream_pid}, started by process {self._owner.pid}.")
        return known

    def checks(self) -> list[str]:
        """What to look for outside of here, in sentences."""
        row = self._row
        key = f" The host's id of the call was {clean(row.call_id)}." if row.call_id else ""
        return [
            f"Look where {clean(row.tool_name)} leaves its traces: the service's own list, log, outbox or statement.",
            f"Is there one effect with the arguments above, at or after {iso(row.started_at)}?{key}",
            "If you find none: can it still come (a queue, a server that is still running)? Then wait and look again.",
        ]

    def commands(self, command: Sequence[str]) -> list[tuple[str, str]]:
        """For each way to settle it, what it means and what to type."""
        row = self._row
        words = [*command, "journal", "resolve", self._path, str(row.sequence), f"--workflow-id={row.workflow_id}"]
        if not row.stands:
            words.append(f"--attempt={row.attempt}")
        base, reason = quoted(words), "--reason 'WHAT YOU SAW'"
        return [
            (
                "It ran: the agent gets this tool result, a JSON file such as "
                '{"content":[{"type":"text","text":"..."}]}',
                f"{base} --completed RESULT.json {reason}",
            ),
            (
                "It ran and failed, or must count as failed: the agent gets this text",
                f"{base} --failed 'TEXT' {reason}",
            ),
            ("It did not run, and cannot any more: the agent may run it again", f"{base} --not-executed {reason}"),
        ]
