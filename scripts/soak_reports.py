#!/usr/bin/env python3
"""Reports under fire: thousands of calls, relays that are killed, an endpoint that fails; then every report is counted.

    scripts/soak_reports.py --calls 5000
    scripts/soak_reports.py --quick --seed 7

Each call has a tool name of its own, so that a report can be told from every other. In the end what the endpoint took
and what was given up must be exactly what was dispatched, and all of it must arrive once the endpoint is mended and the
given up are sent again. What arrived twice must have a kill behind it, which took the mark of the first time: an answer
that was never given is none that was taken. Exit code 1 if anything is missing, was invented or was sent twice for no
reason.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
ENDPOINT: Final = Path(__file__).resolve().parent / "fake_endpoint.py"
REPORT_PATH: Final = "/api/v1/log-detection"
FLAPPING: Final = "200,200,500,200,429,200,close,200,400,200,503,200,200,200,408,200,200"
HANGING: Final = ",".join([FLAPPING] * 20 + ["hang"])  # one in some three hundred is never answered
UNMARKED_S: Final = 10.0  # what was taken is marked on disk about a second later; more, while the machine is busy
SERVER: Final = """
import sys, json
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"content": []}}), flush=True)
"""


@contextlib.contextmanager
def endpoint(answers: str, log: Path, port: int = 0) -> Iterator[str]:
    """An endpoint that runs as long as the block; its base URL."""
    words = [sys.executable, str(ENDPOINT), "--port", str(port), "--status", answers, "--log", str(log)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class Soak:
    """One journal, one endpoint, many relays."""

    def __init__(self, folder: Path, rng: random.Random, calls: int, most_calls_a_life: int) -> None:
        self.journal = folder / "j.db"
        self.log = folder / "received.jsonl"
        self._rng = rng
        self._calls = calls
        self._most_calls_a_life = most_calls_a_life
        self._environment = {**os.environ, "CHECKPOINT_API_KEY": "a-key-of-the-soak", "no_proxy": "127.0.0.1"}
        self.killed_at: list[float] = []  # epoch seconds

    def run_relays(self, base_url: str) -> None:
        """Makes all calls; each relay is killed after some of them, in the middle of one or in a pause."""
        number = 0
        while number < self._calls:
            last = min(number + self._rng.randint(1, self._most_calls_a_life), self._calls)
            number = self._life(base_url, number, last)
            self._show(f"{number} of {self._calls} calls, {len(self.killed_at)} relays killed")

    def _life(self, base_url: str, number: int, last: int) -> int:
        server = ["--report-server-did", "did:web:soak", "--report-server-url", "https://soak.example/mcp"]
        flags = ["--journal", str(self.journal), "--log-level", "error", *server, "--report-base-url", base_url]
        words = [sys.executable, str(ROOT), *flags, "--", sys.executable, "-c", SERVER]
        relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment)
        assert relay.stdin is not None
        assert relay.stdout is not None
        while number < last:
            number += 1
            params = {"name": f"call-{number}", "arguments": {}, "_meta": {"checkpoint_seq": number}}
            call = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
            relay.stdin.write(json.dumps(call).encode() + b"\n")
            relay.stdin.flush()
            if number == last and self._rng.random() < 0.5:
                break  # it is killed somewhere in this call
            relay.stdout.readline()
        time.sleep(self._rng.choice([0.0, 0.0, 0.001, 0.002, 0.3, 1.0]))
        if number < self._calls:
            relay.kill()
            relay.wait()
            self.killed_at.append(time.time())
        else:
            relay.stdin.close()
            relay.wait()
        for pipe in (relay.stdin, relay.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return number

    def report(self, *words: str) -> tuple[int, str]:
        """Exit code and output of a `checkpoint report` command."""
        command = [sys.executable, str(ROOT), "report", words[0], str(self.journal), *words[1:]]
        done = subprocess.run(command, env=self._environment, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout

    def flush(self) -> dict[str, int]:
        """Flushes until nothing waits."""
        while True:
            code, said = self.report("flush", "--now", "--json")
            if code not in (0, 1):
                raise SystemExit(f"report flush ended with {code}")
            tally: dict[str, int] = json.loads(said) if said else {"waiting": 1}
            self._show(f"{tally['waiting']} waiting")
            if not tally["waiting"]:
                return tally

    def dispatched(self) -> set[str]:
        """The tools that the journal has calls of; one that was killed before its row was on disk is not among them."""
        with contextlib.closing(sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True)) as database:
            return {tool for (tool,) in database.execute("SELECT tool_name FROM dispatches")}

    def received(self) -> tuple[dict[str, list[float]], int]:
        """When a report of each tool was taken, in order, and how many requests were under way at most."""
        taken: dict[str, list[float]] = {}
        most = 0
        for line in self.log.read_text().splitlines():
            request: dict[str, Any] = json.loads(line)
            most = max(most, request["at_once"])
            if request["path"] == REPORT_PATH and request["status"] == 200:
                tool = request["body"]["detection"]["reasons"][0].removeprefix("tool:")
                taken.setdefault(tool, []).append(request["at"])
        return taken, most

    def unexplained(self, taken: dict[str, list[float]]) -> list[str]:
        """The tools whose report was taken once more, though no relay was killed soon after it was taken."""
        return [
            tool
            for tool, times in taken.items()
            for first, second in pairwise(times)
            if not any(first <= killed_at <= second and killed_at - first < UNMARKED_S for killed_at in self.killed_at)
        ]

    def dead(self) -> set[str]:
        """The tools whose report was given up."""
        return {json.loads(line)["tool_name"] for line in self.report("dead", "--json")[1].splitlines()}

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Prints what was counted; 1 if it does not add up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000, help="how many (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="300 calls, and no exchange that is never answered")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="checkpoint-soak-") as folder:
        size = (300, 60) if args.quick else (args.calls, 200)
        soak = Soak(Path(folder), random.Random(seed), *size)
        with endpoint(FLAPPING if args.quick else HANGING, soak.log) as base_url:
            soak.run_relays(base_url)
            soak.flush()
            taken, most = soak.received()
            dispatched, dead = soak.dispatched(), soak.dead()
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        with endpoint("200", soak.log, int(base_url.rpartition(":")[2])):
            soak.report("dead", "--retry")
            soak.flush()
            finally_taken, _ = soak.received()
    twice, unexplained = sum(len(times) - 1 for times in finally_taken.values()), soak.unexplained(finally_taken)
    missing, invented = dispatched - taken.keys() - dead, taken.keys() - dispatched
    print(f"dispatched {len(dispatched)}, relays killed {len(soak.killed_at)}, {time.monotonic() - began:.0f} s")
    print(f"taken {len(taken)}, given up {len(dead)}, missing {len(missing)}, invented {len(invented)}")
    print(f"after report dead --retry: taken {len(finally_taken)}; at once {most} at most")
    print(f"taken more than once {twice}, without a kill that explains it {len(unexplained)}")
    is_sound = not (missing or invented or unexplained) and finally_taken.keys() == dispatched and most <= 4
    return 0 if is_sound else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
