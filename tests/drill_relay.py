"""A relay whose `--crash-at` kills its upstream or its agent instead of itself, at the very same instant.

`python drill_relay.py upstream|agent LEDGER RELAY-FLAGS...`; LEDGER.exit gets the exit code, since a killed agent
cannot tell it.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from support import ROOT, is_running, ledger_lines, until


def main() -> None:
    """Runs the relay."""
    victim, ledger, *words = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    sys.path.insert(0, str(ROOT))
    import turn
    import upstream

    pids: dict[str, int] = {"agent": os.getppid()}
    struck: list[int] = []
    begin, is_at = upstream.Upstream.__init__, turn.CrashDrill.is_at

    def remember(self: Any, process: Any, *rest: Any) -> None:
        begin(self, process, *rest)
        pids["upstream"] = process.pid

    def strike(self: Any) -> None:
        if not struck:
            pid = pids[victim]
            if victim == "upstream" and point == "mid_upstream":
                until(lambda: len(ledger_lines(ledger)) == int(sequence or 1), "the call has its effect")
            os.kill(pid, signal.SIGKILL)
            until(lambda: not is_running(pid), "the victim dies")
            struck.append(pid)

    def is_at_once(self: Any, point: str, facts: Any) -> bool:
        return not struck and is_at(self, point, facts)

    # We live on after mid_upstream, so what upstream says must be read again.
    is_crashing = property(
        lambda self: not struck and vars(self).get("crashing", False),
        lambda self, value: vars(self).update(crashing=value),
    )
    point, _, sequence = words[words.index("--crash-at") + 1].partition("@")
    with (
        mock.patch.object(upstream.Upstream, "__init__", remember),
        mock.patch.object(turn.CrashDrill, "kill", strike),
        mock.patch.object(turn.CrashDrill, "is_at", is_at_once),
        mock.patch.object(turn.Turn, "is_crashing", is_crashing, create=True),
    ):
        sys.argv = [str(ROOT), *words]
        code: Any = 0
        try:
            runpy.run_path(str(ROOT), run_name="__main__")
        except SystemExit as end:
            code = end.code
        Path(f"{ledger}.exit").write_text(str(code), "utf-8")
        sys.exit(code)


if __name__ == "__main__":
    main()
