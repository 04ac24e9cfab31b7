#!/usr/bin/env python3
"""Keeps relays busy for minutes, kills what can be killed, and watches whether anything grows or happens twice.

Some relays live for the whole soak, each with clients of another kind: with pins, with a host's call ids, with neither,
of both protocol eras, without a journal, and one beside another on the same journal. Calls come alone and in bursts,
small and large, and some are cancelled; their servers are killed and started again. Meanwhile other relays come and go:
relay, server or agent is killed at random instants, as `scripts/prove.py` does it, at times with two relays on one
journal, and the next one is asked for the same calls.

Memory, open descriptors, threads and children of each long-lived relay are read from /proc (Linux only). The first
tenth of the time is warm-up. A value has grown when its median over the last tenth is above its median over the second
tenth: memory by more than 10 % and 4 MiB (32 MiB in less than five minutes, which are too few large calls to tell), the
others at all. Relays are started with a malloc that gives large blocks back at once, so that what is seen is what is
kept. The judge of effects is the servers' own fsynced ledger.

    scripts/soak.py --quick                        twenty seconds
    scripts/soak.py --minutes 10 --seed 7

The seed decides what is tried, not how your machine times it. Exit codes: 0 nothing found, 1 something grew, ran twice
or was lost, 2 usage, 3 the run itself broke off, 130 interrupted.
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import prove
from prove import BrokenOff, Call, Row, Talk, World

ROOT: Final = Path(__file__).resolve().parent.parent
VICTIMS: Final = ("relay", "upstream", "agent", "all")
MODERN: Final = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "soak", "version": "0"},
}
KEPT: Final = 400  # answered calls of one relay that may be asked for again
SLACK_MIB: Final = 4.0
SHORT_SLACK_MIB: Final = 32.0
SHORT_S: Final = 300.0
MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc's; else no harm
SAMPLES: Final = 300  # in a whole soak, at most ten a second
VALUES: Final = ("memory, MiB", "descriptors", "threads", "children")
PICTURE: Final = "{:35}  {:>8}  {:>8}  {:>7}  {:>14}  {:>11}  {:>8}  {:>8}"
HEADER: Final = (
    ("from the second to the last tenth:", "", "of them", "servers", *VALUES),
    ("relay, alive all the time", "answers", "replayed", "killed", "", "", "", ""),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process held at one moment, in the order of VALUES."""

    at_s: float
    values: tuple[float, ...]


def sample_of(pid: int, at_s: float) -> Sample | None:
    """What /proc says of a process; None where it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        facts = dict(line.split(":", 1) for line in (folder / "status").read_text("utf-8", "replace").splitlines())
        memory = int(facts["VmRSS"].split()[0]) / 1024
        return Sample(at_s, (memory, len(os.listdir(folder / "fd")), int(facts["Threads"]), len(children_of(pid))))
    except (OSError, KeyError):
        return None


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, zombies included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text("ascii").split())
    return found


class Resident:
    """A relay that lives for the whole soak, with its server, its client and what the client was told."""

    def __init__(self, soak: "Soak", name: str, way: str, *flags: str, is_modern: bool, journal: Path | None) -> None:
        self.name, self.way, self._is_modern, self.journal = name, way, is_modern, journal
        self._soak, self._rng = soak, random.Random(f"{soak.seed} {name}")
        self.ledger = soak.folder / f"{way}-{len(soak.residents)}.ledger"
        self._flags, self.calls = flags, dict[int, Call]()
        self.answered: list[int] = []
        self._number = self._workflow = 0
        self.answers = self.replayed = self.restarts = 0
        self.cancelled: set[int] = set()  # an answer may still be on its way
        self.doubted: set[int] = set()
        self.lost: set[int] = set()
        self.samples: list[Sample] = []
        self._rests_until_s = 0.0
        self.talk = self._start()

    def _start(self) -> Talk:
        journal = [] if self.journal is None else ["--journal", str(self.journal)]
        server = [sys.executable, "-I", "-S", "-c", prove.SERVER, str(self.ledger), os.devnull]
        words = [*self._soak.prover.relay, *journal, "--log-level", "error", *self._flags, "--", *server]
        return Talk(words, self.calls, self._hear)

    # ---------------------------------------------------------------------------------------------------- the client

    def _draft(self) -> int:
        """Makes up a new call."""
        rng = self._rng
        self._number += 1
        sizes = rng.choices((0, 200, 2_000, 70_000, 700_000), (40, 40, 10, 4, 1), k=2)
        waits = rng.choices((0, 1, 4, 30), k=2)
        plan = {"pin": self._number, "before_ms": waits[0], "after_ms": waits[1], "answer_bytes": sizes[0]}
        meta: dict[str, Any] = dict(MODERN) if self._is_modern else {}
        if self.way == "pins":
            meta["checkpoint_seq"] = self._number
        elif self.journal is not None:
            meta["checkpoint_workflow"] = f"w{self._workflow}"
        if self.way == "ids":
            meta["claudecode/toolUseId"] = f"toolu_{self._number}"
        params = {"name": rng.choices(("charge", "refuse"), (5, 1))[0], "arguments": {**plan, "text": "y" * sizes[1]}}
        message = {"jsonrpc": "2.0", "id": self._number, "method": "tools/call", "params": {**params, "_meta": meta}}
        self.calls[self._number] = Call(self._number, json.dumps(message).encode("ascii") + b"\n")
        return self._number

    def step(self) -> None:
        """Does some of what a client does, without waiting."""
        talk, rng = self.talk, self._rng
        if talk.is_ended:
            raise BrokenOff(f"{self.name}: ended with exit code {talk.process.wait()}\n{talk.log()}")
        talk.pump(0.0)
        if talk.waiting:
            if rng.random() < 0.003:
                self._cancel(rng.choice(sorted(talk.waiting)))
            if "--restart-upstream" in self._flags and rng.random() < 0.002:
                self._kill_server()
        elif time.monotonic() > self._rests_until_s:
            talk.ask(self._draft() for _ in range(rng.choices((1, 3, 16, 64), (12, 4, 2, 1))[0]))
            if self.way in ("pins", "ids") and self.answered and rng.random() < 0.3:
                talk.ask({rng.choice(self.answered) for _ in range(3)})
            self._rests_until_s = time.monotonic() + rng.expovariate(1 / 0.05)

    def _cancel(self, pin: int) -> None:
        """Gives a call up; whether an answer still comes is the server's business."""
        params = {"requestId": pin}
        self.talk.say(
            json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).encode() + b"\n"
        )
        self.talk.waiting.discard(pin)
        self.cancelled.add(pin)

    def _kill_server(self) -> None:
        for pid in children_of(self.talk.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.restarts += 1

    def _hear(self, talk: Talk, call: Call, line: bytes) -> None:
        refusal = prove.refusal_of(line)
        if refusal is None:
            body = prove.body_of(line)
            self.answers += 1
            if call.answer is None:
                call.answer = body
                self._keep(call.pin)
            elif call.answer != body:
                self._lose(call, f"{body[:80]!r}, but {call.answer[:80]!r} was read before")
            else:
                self.replayed += 1
            return
        if refusal["reason"] == "in_doubt":
            self.doubted.add(call.pin)
            self._workflow += 1  # without pins nothing new runs in this one until a person has settled it
            if call.answer is not None:
                self._lose(call, "in doubt, after an answer")
        elif refusal["reason"] != "upstream_lost" or call.answer is not None:
            raise BrokenOff(f"{self.name}: call {call.pin} was refused: {line[:600]!r}")

    def _keep(self, pin: int) -> None:
        """Remembers a call, and forgets another where there are many: older ones stay as likely as new ones."""
        self.answered.append(pin)
        if len(self.answered) > KEPT:
            forgotten = self.answered.pop(self._rng.randrange(KEPT))
            if forgotten not in self.talk.waiting and forgotten not in self.cancelled:
                del self.calls[forgotten]

    def _lose(self, call: Call, why: str) -> None:
        self.lost.add(call.pin)
        self._soak.tell(f"{self.name}: call {call.pin} is lost: {why}")

    # ------------------------------------------------------------------------------------------------------ the judge

    def watch(self, at_s: float) -> None:
        if (sample := sample_of(self.talk.process.pid, at_s)) is not None:
            self.samples.append(sample)

    def end(self) -> None:
        """Hears out what is under way and lets the relay end."""
        code = self.talk.finish()
        if code not in (0, 6):
            raise BrokenOff(f"{self.name}: ended with exit code {code}\n{self.talk.log()}")

    def check(self) -> None:
        """Asks a new relay for what the old one answered."""
        if self.way not in ("pins", "ids"):
            return
        self.talk.close()
        before, pins = self.replayed, [pin for pin in self.answered if pin in self.calls]
        self.talk = self._start()
        self.talk.ask(pins)
        self.talk.settle()
        self.end()
        if self.replayed - before < len(pins) and not self.lost:
            raise BrokenOff(f"{self.name}: {len(pins)} calls were asked for again, {self.replayed - before} replayed")

    def effects_run_twice(self) -> int:
        lines = self.ledger.read_text("ascii").splitlines() if self.ledger.exists() else []
        counts = Counter(line.split()[0] for line in lines)
        return sum(counts.values()) - len(counts)

    def medians(self, seconds: float) -> list[tuple[float, float]]:
        """Of each value, over the second tenth and over the last tenth of the soak."""

        def over(begin: float, end: float) -> list[float]:
            chosen = [sample.values for sample in self.samples if begin * seconds <= sample.at_s < end * seconds]
            return [statistics.median(values) for values in zip(*chosen, strict=True)]

        early, late = over(0.1, 0.2), over(0.9, 9.9)
        if not (early and late):
            raise BrokenOff(f"{self.name}: was seen {len(self.samples)} times only")
        return list(zip(early, late, strict=True))

    def grown(self, seconds: float) -> list[str]:
        """The values that have grown."""
        slack = SLACK_MIB if seconds >= SHORT_S else SHORT_SLACK_MIB
        (small, large), *others = self.medians(seconds)
        limits = [small + max(0.1 * small, slack), *(early for early, _ in others)]
        lates = [large, *(late for _, late in others)]
        return [value for value, late, limit in zip(VALUES, lates, limits, strict=True) if late > limit]

    def row(self, seconds: float) -> str:
        pairs = self.medians(seconds)
        shown = [f"{early:.1f} -> {late:.1f}" for early, late in pairs[:1]]
        shown += [f"{early:g} -> {late:g}" for early, late in pairs[1:]]
        line = PICTURE.format(self.name, f"{self.answers:,}", f"{self.replayed:,}", self.restarts, *shown)
        grown = self.grown(seconds)
        return f"{line}  GREW: {', '.join(grown)}" if grown else line


class Guest(Resident):
    """A relay beside the owner of a journal: it asks for what the owner answered, and is told that it is busy."""

    def __init__(self, soak: "Soak", name: str, owner: Resident) -> None:
        super().__init__(soak, name, "guest", is_modern=False, journal=owner.journal)
        self._owner = owner

    def step(self) -> None:
        self.talk.pump(0.0)
        if not self.talk.waiting and self._owner.answered:
            pin = self._rng.choice(self._owner.answered)
            known = self._owner.calls[pin]
            self.calls[pin] = Call(pin, known.line, known.answer)
            self.talk.ask([pin])

    def end(self) -> None:
        """The owner is gone: now it must be answered from the journal."""
        self.talk.settle()
        super().end()


def two_at_once(world: World, rng: random.Random) -> None:
    """Two relays on one journal; the one that is killed leaves it to the other."""
    known, expected = list(world.calls), world.answered()
    first = world.start()
    new = world.draft(rng, rng.randint(2, 8))
    trigger = prove.draw_trigger(rng, len(new))
    first.ask(new)
    second = world.start()
    second.ask([*known, *world.draft(rng, 2)])
    prove.wait_for(world, first, trigger)
    world.kill("relay", first, rng)
    world.tell(f"killed the first of two after {trigger}")
    first.finish()
    second.settle()
    world.expect_replays(second, expected)
    second.finish()


class Quietly(prove.Prover):
    """A prover whose progress is ours to show."""

    def progress(self, row: Row, total: int) -> None:
        pass


@dataclass
class Soak:
    """Everything that runs, and what was found."""

    folder: Path
    prover: prove.Prover
    seed: int
    seconds: float
    residents: list[Resident] = field(default_factory=list)
    stories: list[str] = field(default_factory=list)
    visitors: Row = field(default_factory=lambda: Row("relays that came and went"))

    def tell(self, what: str) -> None:
        self.stories.append(what)

    def run(self, show: Callable[[str], None]) -> None:
        """The whole soak. Raises BrokenOff."""
        restarts = ("--restart-upstream", "1000000")
        for number, (name, way, flags, is_modern, has_journal) in enumerate(
            (
                ("pins, handshake era", "pins", restarts, False, True),
                ("pins, modern era", "pins", (), True, True),
                ("host's call ids, modern era", "ids", restarts, True, True),
                ("no pins, handshake era", "none", restarts, False, True),
                ("no journal, modern era", "none", (), True, False),
            )
        ):
            journal = self.folder / f"{number}.db" if has_journal else None
            self.residents.append(Resident(self, name, way, *flags, is_modern=is_modern, journal=journal))
        self.residents.append(Guest(self, "second on the first one's journal", self.residents[0]))
        began_s = time.monotonic()
        failures: list[BaseException] = []

        def is_over() -> bool:
            return time.monotonic() - began_s >= self.seconds or bool(failures)

        def visit() -> None:
            try:
                self._visit(is_over)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=visit)
        thread.start()
        try:
            self._live(began_s, is_over, show)
        except BaseException as error:
            failures.append(error)
        thread.join()
        for failure in failures:
            raise failure
        for resident in self.residents:
            resident.end()
        for resident in self.residents:
            resident.check()

    def _live(self, began_s: float, is_over: Callable[[], bool], show: Callable[[str], None]) -> None:
        pause_s, next_s = max(0.1, self.seconds / SAMPLES), 0.0
        while not is_over():
            at_s = time.monotonic() - began_s
            for resident in self.residents:
                resident.step()
            if at_s >= next_s:
                next_s += pause_s
                for resident in self.residents:
                    resident.watch(at_s)
                answers = sum(resident.answers for resident in self.residents)
                show(f"{at_s:.0f} of {self.seconds:.0f} s, {answers:,} answers, {self.visitors.cases} kills")
            time.sleep(0.005)

    def _visit(self, is_over: Callable[[], bool]) -> None:
        """Relays that do not live long."""
        rng = random.Random(f"{self.seed} visitors")
        while not is_over():
            with World(self.prover, self.visitors, "visit") as world:
                for _ in range(rng.randint(2, 6)):
                    if rng.random() < 0.25:
                        two_at_once(world, rng)
                    else:
                        prove.kill_once(world, rng.choice(VICTIMS), rng)
                    self.visitors.cases += 1
                    if is_over() or world.is_bad():
                        break
                world.check()

    def report(self) -> bool:
        """Prints the table; whether something was found."""
        for line in HEADER:
            print(PICTURE.format(*line).rstrip())
        for resident in self.residents:
            print(resident.row(self.seconds))
        row = self.visitors
        twice = sum(resident.effects_run_twice() for resident in self.residents if resident.way in ("pins", "ids"))
        lost = sum(len(resident.lost) for resident in self.residents)
        doubts = sum(len(resident.doubted) for resident in self.residents)
        print(
            f"\n{row.cases} kills of relays that came and went; {row.calls_replayed:,} calls replayed by the next one"
        )
        print(f"{'effects run twice':24}{twice + row.effects_run_twice:>8}")
        print(f"{'recorded outcomes lost':24}{lost + row.recorded_outcomes_lost:>8}")
        print(f"{'doubts reported':24}{doubts + row.doubts_reported:>8}")
        for story in (*self.stories[:10], *(f"evidence: {path}/story.txt" for path in row.evidence)):
            print(f"    {story}")
        return bool(twice or lost or row.is_bad() or any(resident.grown(self.seconds) for resident in self.residents))


def shown(text: str) -> None:
    """Overwrites one line on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="how long (%(default)g)")
    parser.add_argument("--quick", action="store_true", help="a third of a minute")
    parser.add_argument("--seed", type=int, metavar="S", help="repeat the choices of an earlier run")
    parser.add_argument("--dir", type=Path, default=None, metavar="DIR", help="where journals lie (a temporary folder)")
    parser.add_argument("--relay", help=argparse.SUPPRESS)  # another relay, to see that the judge sees
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    seconds = 20.0 if args.quick else args.minutes * 60
    if sys.platform != "linux":
        parser.error("memory, descriptors, threads and children are read from /proc: only on Linux")
    if not 5 <= seconds < 1e6 or (args.dir is not None and not args.dir.is_dir()):
        parser.error("--minutes is at least 0.1, and --dir a folder")
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.environ |= MALLOC
    prove.adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-soak-", dir=args.dir and args.dir.resolve()))
    relay = shlex.split(args.relay) if args.relay else [sys.executable, str(ROOT)]
    print(f"seed {seed}, {seconds:.0f} s\n", flush=True)
    soak = Soak(folder, Quietly(folder, relay), seed, seconds)
    try:
        soak.run(shown)
        shown("")
        return 1 if soak.report() else 0
    except KeyboardInterrupt:
        shown("")
        print(f"soak.py: interrupted (seed {seed})", file=sys.stderr)
        return 130
    except BrokenOff as error:
        shown("")
        print(f"soak.py: broken off (seed {seed}): {error}", file=sys.stderr)
        return 3
    except Exception:  # a fault of ours must not look like a finding
        shown("")
        traceback.print_exc()
        return 3
    finally:
        prove.end_children()
        clean(folder, keeps=bool(soak.visitors.evidence))


def clean(folder: Path, *, keeps: bool) -> None:
    """Removes what a soak leaves, but for the evidence."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    if not keeps:
        with contextlib.suppress(OSError):
            folder.rmdir()


if __name__ == "__main__":
    raise SystemExit(main())
