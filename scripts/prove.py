#!/usr/bin/env python3
"""Kills Checkpoint in every way it promises to survive, on your own disk, and counts what went wrong.

A server that keeps a ledger (one fsynced line per effect) stands behind a real relay with a real journal. Processes
are killed at random instants, system calls fail, and logs are torn as a power cut would tear them; then a new relay is
asked for the same calls again. The judge is the ledger, and what the agent had read, never the journal:

    effects run twice          lines of the ledger for one call, beyond the first
    recorded outcomes lost     calls whose answer had been read, and that a restart does not replay to the byte
    doubts reported            calls that were refused as in doubt: allowed, since nobody can know
    calls replayed             calls that a restart answered without the server

The first two must be 0. Where there is strace (Linux), it makes the disk fail; else those rows say that they were
skipped.

    scripts/prove.py --quick                       half a minute
    scripts/prove.py --dir /var/lib/me --kills 1000
    scripts/prove.py --seed 7 --only upstream      one part again, with the same choices

The seed decides what is tried, not how your machine times it. Exit codes: 0 nothing found, 1 something found (its
folder is kept and named), 2 usage, 3 the run itself broke off, 130 interrupted.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import random
import re
import select
import shlex
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

ROOT: Final = Path(__file__).resolve().parent.parent
DEADLINE_S: Final = 60.0  # for what takes milliseconds, on a machine that may be busy
LEDGER_LINE: Final = 20  # bytes
PICTURE: Final = "{:30}  {:>5}  {:>9}  {:>13}  {:>8}  {:>8}  {}"  # a line of the table
NEEDS_STRACE: Final = ("fdatasync", "EIO", "ENOSPC", "unsynced lost")  # so the names of such rows end
HEADER: Final = (
    ("", "", "effects", "recorded", "doubts", "calls", ""),
    ("", "cases", "run twice", "outcomes lost", "reported", "replayed", ""),
)
INVERTED: Final = bytes(255 - byte for byte in range(256))  # for bytes.translate: no byte stays what it was

# The server. It announces its process, and writes an effect into the ledger before it answers. Calls run side by side,
# and those that were read are run to their end though nobody may be there to hear the answer.
SERVER: Final = r"""
import json, os, sys, threading, time
ledger, pids = sys.argv[1:]
lock = threading.Lock()

def append(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, text.encode())
    if path == ledger:
        os.fsync(fd)
    os.close(fd)

def send(message):
    view = memoryview((json.dumps(message, separators=(",", ":")) + "\n").encode())
    with lock:
        try:
            while view:
                view = view[os.write(1, view):]
        except OSError:
            pass

def call(request_id, tool, plan):
    time.sleep(plan["before_ms"] / 1000)
    append(ledger, "%9d %9d\n" % (plan["pin"], os.getpid()))
    text = os.urandom(8).hex() + "x" * plan["answer_bytes"]
    time.sleep(plan["after_ms"] / 1000)
    if tool == "refuse":
        error = {"code": 1001, "message": text, "data": {"big": 12345678901234567890}}
        send({"jsonrpc": "2.0", "id": request_id, "error": error})
    else:
        send({"jsonrpc": "2.0", "id": request_id, "result": {"content": [{"type": "text", "text": text}]}})

append(pids, "%d %d\n" % (os.getpid(), os.getppid()))
for line in sys.stdin.buffer:
    message = json.loads(line)
    if message["method"] == "initialize":
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                  "serverInfo": {"name": "ledger", "version": "1"}}
        send({"jsonrpc": "2.0", "id": message["id"], "result": result})
    elif message["method"] == "tools/call":
        params = message["params"]
        threading.Thread(target=call, args=(message["id"], params["name"], params["arguments"])).start()
"""

# The agent: a process between us and the relay, that can be killed. What it passed on, it had read.
AGENT: Final = r"""
import os, subprocess, sys, threading
relay = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
with open(sys.argv[1], "a") as pids:
    pids.write("%d %d\n" % (relay.pid, os.getpid()))

def copy(source, sink):
    try:
        while piece := os.read(source, 65536):
            while piece:
                piece = piece[os.write(sink, piece):]
    except OSError:
        pass
    os.close(sink)

threading.Thread(target=copy, args=(0, relay.stdin.fileno()), daemon=True).start()
copy(relay.stdout.fileno(), 1)
os._exit(relay.wait() & 255)
"""

HELLO: Final = (
    b'{"jsonrpc":"2.0","id":"hello","method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},'
    b'"clientInfo":{"name":"prove","version":"0"}}}\n{"jsonrpc":"2.0","method":"notifications/initialized"}\n'
)
# Refusals that say something about the moment, not about the call.
PASSING: Final = ("busy", "journal_unavailable", "upstream_lost", "shutting_down")


class BrokenOff(Exception):
    """The run itself went wrong: something hangs, or answers what no rule allows."""


@dataclass(slots=True)
class Row:
    """A row of the table."""

    row: str
    cases: int = 0
    effects_run_twice: int = 0
    recorded_outcomes_lost: int = 0
    doubts_reported: int = 0
    calls_replayed: int = 0
    images_refused: int = 0
    skipped: str | None = None
    broken_off: str | None = None
    evidence: list[str] = field(default_factory=list)

    def is_bad(self) -> bool:
        return bool(self.effects_run_twice or self.recorded_outcomes_lost)

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.row:30}  skipped: {self.skipped}"
        counts = (self.cases, self.effects_run_twice, self.recorded_outcomes_lost)
        note = f"{self.images_refused} refused" if self.images_refused else ""
        note = "BROKEN OFF" if self.broken_off else note
        return PICTURE.format(self.row, *counts, self.doubts_reported, self.calls_replayed, note).rstrip()


@dataclass(slots=True)
class Call:
    """A call at a place: its line, and what the agent has read of it."""

    pin: int
    line: bytes
    answer: bytes | None = None  # the bytes of its result or error
    handed_over: Any = None  # what a refusal of a journal that failed brought along instead
    is_doubted: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Trigger:
    """The instant of a kill: a little after the n-th of something."""

    kind: str  # ms since the start; bytes sent; effects; bytes heard; answers
    n: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.n} {self.kind} and {self.delay_s * 1000:.2f} ms"


def body_of(line: bytes) -> bytes:
    """The bytes of an answer's result or error, without the envelope."""
    for member in (b'"result":', b'"error":'):
        _, found, rest = line.partition(member)
        if found:
            return rest.removesuffix(b"\n").removesuffix(b"}")
    raise BrokenOff(f"not an answer: {line[:200]!r}")


def refusal_of(line: bytes) -> dict[str, Any] | None:
    """What Checkpoint says of a call that it refuses; None for what the server said."""
    try:
        facts = json.loads(line)["error"]["data"]["checkpoint"]
    except (KeyError, TypeError):
        return None
    return facts if isinstance(facts, dict) else None


class Talk:
    """One life of a relay: what we say to it and hear from it, without ever waiting on one for the other."""

    def __init__(
        self, words: Sequence[str], calls: dict[int, Call], hear: Callable[["Talk", Call, bytes], None]
    ) -> None:
        self.began_s = time.monotonic()
        self._calls, self._hear = calls, hear
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the talk
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0, start_new_session=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._sink, self._source = self.process.stdin, self.process.stdout
        for pipe in (self._sink, self._source):
            os.set_blocking(pipe.fileno(), False)
        self._unsent, self._rest = bytearray(HELLO), b""
        self.waiting: set[int] = set()
        self.refused: set[str] = set()  # for which reasons
        self.replayed: set[int] = set()  # the calls whose answer was read before, and came again
        self.sent = self.heard = self.answers = 0
        self.is_ended = False

    def ask(self, pins: Iterable[int]) -> None:
        """Queues calls."""
        for pin in pins:
            self.say(self._calls[pin].line)
            self.waiting.add(pin)

    def say(self, line: bytes) -> None:
        """Queues a line that nobody answers."""
        self._unsent += line

    def pump(self, wait_s: float = 0.05, write: int = 65536, read: int = 65536) -> None:
        """Moves some bytes, at most so many."""
        wants_to_write = self._unsent and write > 0 and not self._sink.closed
        sinks = [self._sink] if wants_to_write else []
        ready, writable, _ = select.select([] if self.is_ended else [self._source], sinks, [], wait_s)
        if writable:
            try:
                count = os.write(self._sink.fileno(), self._unsent[:write])
                del self._unsent[:count]
                self.sent += count
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._unsent.clear()
                self._sink.close()
        if ready:
            piece = os.read(self._source.fileno(), max(1, read))
            self.heard += len(piece)
            self.is_ended = not piece
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            pin = json.loads(line).get("id")
        except ValueError as error:
            raise BrokenOff(f"the relay said {line[:200]!r}") from error
        if not isinstance(pin, int):
            return
        refusal = refusal_of(line)
        if refusal and refusal["reason"] == "busy" and not self._sink.closed:
            self.ask([pin])  # the relay before this one has not ended yet
            return
        self.waiting.discard(pin)
        self.answers += 1
        self._hear(self, self._calls[pin], line)

    def settle(self) -> None:
        """Waits until all is answered, or the relay says no more."""
        end = time.monotonic() + DEADLINE_S
        while self.waiting and not self.is_ended:
            if time.monotonic() > end:
                raise BrokenOff(f"no answer in {DEADLINE_S:.0f} s to {sorted(self.waiting)}\n{self.log()}")
            self.pump()

    def finish(self) -> int:
        """Closes the relay's input, hears it out; its exit code."""
        if not self._sink.closed:
            self._sink.close()
        end = time.monotonic() + DEADLINE_S
        while not self.is_ended and time.monotonic() < end:
            self.pump()
        try:
            code = self.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise BrokenOff(f"did not end in {DEADLINE_S:.0f} s after its input\n{self.log()}") from None
        if code in (2, 3):
            raise BrokenOff(f"the relay ended with exit code {code}\n{self.log()}")
        return code

    def log(self) -> str:
        """What was written to stderr."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    def close(self) -> str:
        """Ends the process that we started, and lets go of its pipes; what was written to stderr."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        log = self.log()
        for file in (self._sink, self._source, self._log):
            file.close()
        return log


class World:
    """A journal, its ledger, the calls made so far and every process that had to do with them; and the judge."""

    def __init__(self, prover: "Prover", row: Row, name: str) -> None:
        self.prover, self.row = prover, row
        prover.worlds += 1
        self.folder = prover.folder / f"{prover.worlds}-{name}"
        self.folder.mkdir()
        self.journal, self.ledger, self._pids = (self.folder / part for part in ("j.db", "ledger", "pids"))
        self.calls: dict[int, Call] = {}
        self._talks: list[Talk] = []
        self._gone: set[int] = set()
        self._before: Counter[int] = Counter()
        self._story: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._await_processes(10.0)
        logs = [talk.close() for talk in self._talks]
        for pid in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._await_processes(5.0)
        if kind is None or issubclass(kind, Exception):
            twice = {pin: count for pin, count in self.effects().items() if count > 1}
            self.row.effects_run_twice += sum(twice.values()) - len(twice)
            for pin, count in sorted(twice.items()):
                self.tell(f"call {pin} HAS {count} EFFECTS in the ledger")
            lost = [call.pin for call in self.calls.values() if call.is_lost]
            if twice or lost or kind:
                self._keep(logs)
                return
        shutil.rmtree(self.folder)

    def _keep(self, logs: Sequence[str]) -> None:
        story = [*self._story, *(f"--- stderr of life {n}\n{log}" for n, log in enumerate(logs, 1))]
        (self.folder / "story.txt").write_text("\n".join(story) + "\n", "utf-8")
        self.row.evidence.append(str(self.folder))

    # ------------------------------------------------------------------------------------------------- processes

    def start(self, *flags: str, under: Sequence[str] = (), has_agent: bool = False) -> Talk:
        """Starts a relay on the journal: its next life."""
        self._before = self.effects()
        server = [sys.executable, "-I", "-S", "-c", SERVER, str(self.ledger), str(self._pids)]
        words = [*under, *self.prover.relay, "--journal", str(self.journal), *flags, "--", *server]
        if has_agent:
            words = [sys.executable, "-I", "-S", "-c", AGENT, str(self._pids), *words]
        talk = Talk(words, self.calls, self._hear)
        self._talks.append(talk)
        self.tell(f"life {len(self._talks)}: {shlex.join([*under, *flags])}")
        return talk

    def child_of(self, parent: int | None) -> int | None:
        """The newest process of those that announced themselves and their parent."""
        found = [pid for pid, its_parent in self._announced() if its_parent == parent]
        return found[-1] if found else None

    def parent_of_server(self) -> int:
        """The relay, where something stands between it and us."""
        return self._announced()[-1][1]

    def _announced(self) -> list[tuple[int, int]]:
        if not self._pids.exists():
            return []
        lines = [line.split() for line in self._pids.read_text("ascii").splitlines(keepends=True) if line[-1] == "\n"]
        return [(int(pid), int(parent)) for pid, parent in lines]

    def _others(self) -> set[int]:
        """The processes that we know of and did not start ourselves."""
        strangers = {os.getpid(), os.getppid(), 1}  # whose children are orphans
        return {pid for pair in self._announced() for pid in pair} - strangers - {t.process.pid for t in self._talks}

    def kill(self, victim: str, talk: Talk, rng: random.Random) -> None:
        """SIGKILL to a relay, a server, an agent or all three."""
        relay = self.child_of(talk.process.pid) if victim == "all" else talk.process.pid
        server = self.child_of(relay)
        end = time.monotonic() + DEADLINE_S
        while victim == "upstream" and (server is None or server in self._gone):  # it is still starting
            if time.monotonic() > end or talk.is_ended:
                break
            talk.pump(0.001)
            server = self.child_of(relay)
        targets = {"relay": [relay], "upstream": [server], "agent": [relay], "all": [talk.process.pid, relay, server]}
        chosen = [pid for pid in targets[victim] if pid is not None and pid not in self._gone]
        rng.shuffle(chosen)
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        """Collects orphans that have ended; on Linux they are our children."""
        for pid in self._others() - self._gone:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    self._gone.add(pid)
            except ChildProcessError:  # its parent is alive, or has collected it, or we cannot be its parent
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    self._gone.add(pid)

    def _running(self) -> list[int]:
        self._reap()
        return sorted(self._others() - self._gone)

    def _await_processes(self, patience_s: float) -> None:
        """Waits for processes that end by themselves, since their input has ended."""
        end = time.monotonic() + patience_s
        while self._running() and time.monotonic() < end:
            time.sleep(0.002)

    # ----------------------------------------------------------------------------------------------------- judge

    def effects(self) -> Counter[int]:
        """How often each call has had its effect."""
        if not self.ledger.exists():
            return Counter()
        return Counter(int(line.split()[0]) for line in self.ledger.read_text("ascii").splitlines())

    def ledger_bytes(self) -> int:
        try:
            return os.stat(self.ledger).st_size
        except FileNotFoundError:
            return 0

    def tell(self, what: str) -> None:
        """A line for whoever reads the evidence."""
        self._story.append(f"{time.time():.4f} {what}")

    def _hear(self, talk: Talk, call: Call, line: bytes) -> None:
        """An answer was read."""
        refusal = refusal_of(line)
        if refusal is None:
            body = body_of(line)
            if call.answer is not None or self._before[call.pin]:
                self.row.calls_replayed += 1
            if call.answer is None:
                call.answer = body
                handed_over = call.handed_over or {}
                if handed_over and json.loads(line) != {"jsonrpc": "2.0", "id": call.pin, **handed_over}:
                    self.lose(call, "another answer than was handed over before")
            elif call.answer != body:
                self.lose(call, f"{body[:80]!r}, but {call.answer[:80]!r} was read before")
            else:
                talk.replayed.add(call.pin)
            return
        reason = refusal["reason"]
        talk.refused.add(reason)
        if reason == "in_doubt" and not call.is_doubted:
            call.is_doubted = True
            self.row.doubts_reported += 1
        if reason in PASSING:
            call.handed_over = refusal.get("answer") or call.handed_over
        elif call.answer is not None:
            self.lose(call, f"refused as {reason}, but an answer was read before")
        elif reason != "in_doubt":
            raise BrokenOff(f"call {call.pin} was refused as {reason}: {line[:400]!r}")
        self.tell(f"call {call.pin}: {reason}")

    def lose(self, call: Call, why: str) -> None:
        """A recorded outcome was lost."""
        self.row.recorded_outcomes_lost += not call.is_lost
        call.is_lost = True
        self.tell(f"call {call.pin} IS LOST: {why}")

    def expect_replays(self, talk: Talk, pins: Iterable[int]) -> None:
        """All of these, whose answers were read before this life, must have come again.

        A relay that refuses the journal has lost them; one that ends for another reason says nothing about them.
        """
        missing = [pin for pin in pins if pin not in talk.replayed]
        if missing and talk.is_ended and (code := talk.finish()) != 4:
            raise BrokenOff(f"a healthy relay ended with exit code {code}\n{talk.log()}")
        for pin in missing:
            self.lose(self.calls[pin], "not replayed by a healthy relay")

    def answered(self) -> list[int]:
        return [pin for pin, call in self.calls.items() if call.answer is not None]

    def is_bad(self) -> bool:
        return any(call.is_lost for call in self.calls.values()) or any(n > 1 for n in self.effects().values())

    # ----------------------------------------------------------------------------------------------------- calls

    def draft(self, rng: random.Random, count: int, **plan: Any) -> list[int]:
        """Makes up new calls at the next places."""
        pins = range(len(self.calls) + 1, len(self.calls) + 1 + count)
        for pin in pins:
            sizes = (0, 200, 2_000, 12_000, 70_000)
            drawn = {
                "pin": pin,
                "before_ms": rng.choice((0, 0, 1, 4)),
                "after_ms": rng.choice((0, 0, 1, 4)),
                "answer_bytes": rng.choices(sizes, (8, 8, 4, 2, 1))[0],
                "text": "y" * rng.choices(sizes, (8, 8, 4, 2, 1))[0],
            }
            params = {
                "name": rng.choices(("charge", "refuse"), (5, 1))[0],
                "arguments": {**drawn, **plan},
                "_meta": {"checkpoint_seq": pin},
            }
            line = json.dumps({"jsonrpc": "2.0", "id": pin, "method": "tools/call", "params": params}) + "\n"
            self.calls[pin] = Call(pin, line.encode("ascii"))
        return list(pins)

    def check(self) -> None:
        """A last life, in which nothing is harmed: every call is asked for again."""
        expected = self.answered()
        talk = self.start()
        talk.ask(self.calls)
        talk.settle()
        self.expect_replays(talk, expected)
        unanswered, code = sorted(talk.waiting), talk.finish()
        self.tell(f"exit code {code}")
        if (unanswered or code) and not self.is_bad():
            raise BrokenOff(
                f"a healthy relay ended with exit code {code}, without answers to {unanswered}\n{talk.log()}"
            )


# ------------------------------------------------------------------------------------------------------ random kills


def draw_trigger(rng: random.Random, calls: int) -> Trigger:
    """When to kill."""
    delay_s = rng.choice((0.0, rng.expovariate(1 / 0.0003), rng.expovariate(1 / 0.003)))
    kind = rng.choices(("ms since the start", "bytes sent", "effects", "bytes heard", "answers"), (2, 2, 4, 4, 3))[0]
    most = {"ms since the start": 300, "bytes sent": 400 * calls, "bytes heard": 250 * calls}.get(kind, calls)
    return Trigger(kind, rng.randint(0 if kind == "ms since the start" else 1, most), delay_s)


def wait_for(world: World, talk: Talk, trigger: Trigger) -> None:
    """Talks until the instant has come, or nothing more will."""
    first_byte = world.ledger_bytes()
    talk.sent = talk.heard = talk.answers = 0
    end = time.monotonic() + DEADLINE_S
    while not talk.is_ended and time.monotonic() < end:
        counts = {
            "ms since the start": int((time.monotonic() - talk.began_s) * 1000),
            "bytes sent": talk.sent,
            "effects": (world.ledger_bytes() - first_byte) // LEDGER_LINE,
            "bytes heard": talk.heard,
            "answers": talk.answers,
        }
        left = trigger.n - counts[trigger.kind]
        if left <= 0 or (not talk.waiting and trigger.kind != "ms since the start"):
            break
        limit = {"bytes sent": "write", "bytes heard": "read"}.get(trigger.kind)
        talk.pump(0.0003, **({limit: left} if limit else {}))
    until_s = time.perf_counter() + trigger.delay_s
    while time.perf_counter() < until_s:
        pass


def kill_once(world: World, victim: str, rng: random.Random) -> None:
    """One life with a violent end, on a journal that may have seen several."""
    restarts = victim == "upstream" and rng.random() < 0.5 and world.prover.can_restart
    expected, known = world.answered(), list(world.calls)
    new = world.draft(rng, rng.randint(1, 8))
    trigger = draw_trigger(rng, len(new))
    talk = world.start(*(("--restart-upstream", "5") if restarts else ()), has_agent=victim in ("agent", "all"))
    rng.shuffle(known)
    talk.ask(known)
    if trigger.kind != "ms since the start":
        talk.settle()
        world.expect_replays(talk, expected)
    talk.ask(new)
    wait_for(world, talk, trigger)
    world.kill(victim, talk, rng)
    world.tell(f"killed {victim} after {trigger}")
    if restarts:
        talk.settle()
        talk.ask(world.draft(rng, 2))
        talk.settle()
    end = time.monotonic() + DEADLINE_S
    while not talk.is_ended and not restarts:
        if time.monotonic() > end:
            raise BrokenOff(f"goes on after {victim} was killed\n{talk.log()}")
        talk.pump()
    talk.finish()


def random_kills(prover: "Prover", row: Row, rng: random.Random, victim: str, count: int) -> None:
    """Many kills, several to a journal, each followed by a new relay."""
    while row.cases < count:
        with World(prover, row, f"{victim}-{row.cases + 1}") as world:
            for _ in range(min(rng.randint(2, 6), count - row.cases)):
                kill_once(world, victim, rng)
                row.cases += 1
                prover.progress(row, count)
                if world.is_bad():
                    break
            world.check()


# ------------------------------------------------------------------------------------------------------ failing disks


def work(world: World, talk: Talk, rng: random.Random) -> None:
    """New calls, alone and together, with enough bytes that the log is written back once."""
    for count in (1, 1, 3, 1, 2, 1):
        if not talk.is_ended:
            talk.ask(world.draft(rng, count, before_ms=0, after_ms=0, text="y" * rng.choice((100, 120_000))))
            talk.settle()


def count_of(prover: "Prover", row: Row, call: str) -> int:
    """How many such system calls an undisturbed life makes."""
    with World(prover, row, f"count-{call}") as world:
        trace = world.folder / "trace"
        talk = world.start(under=["strace", "-e", f"trace={call}", "-o", str(trace)])
        work(world, talk, random.Random(0))
        talk.finish()
        return trace.read_text("utf-8", "replace").count(f"{call}(")


def failing_calls(prover: "Prover", row: Row, rng: random.Random, call: str, fault: str, most: int) -> None:
    """Lives in which the n-th system call is the last, or fails; two to a journal, then a healthy one."""
    total = count_of(prover, row, call)
    if not total:
        raise BrokenOff(f"the relay never calls {call}")
    early = list(range(1, 1 + min(3, most // 2)))  # while the journal is made, and its first commits
    later = range(len(early) + 1, total + 1)
    wanted = sorted([*early, *rng.sample(later, min(most - len(early), len(later)))])
    for first in wanted:
        with World(prover, row, f"{call}-{fault.partition('=')[2]}-{first}") as world:
            for n in (first, rng.randint(1, total)):
                known = list(world.calls)
                when = f"{n}+" if "error" in fault and rng.random() < 0.5 else str(n)
                inject = ["-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={when}"]
                fast = prover.fast_filter if "error" in fault else []  # the filter cannot inject signals
                talk = world.start(under=["strace", *fast, "-o", os.devnull, *inject])
                talk.ask(known)
                talk.settle()
                work(world, talk, rng)
                world.tell(f"exit code {talk.finish()}")
                row.cases += 1
                prover.progress(row, 2 * len(wanted))
                if world.is_bad():
                    break
            world.check()


# ------------------------------------------------------------------------------------------------------ crash images


def committed(log: bytes) -> list[tuple[int, int]]:
    """The frames of a write-ahead log up to its last commit: page number, and the offset where the frame ends.

    Source: https://sqlite.org/fileformat2.html#the_write_ahead_log
    """
    if len(log) < 32:
        return []
    magic, _, page_bytes, _, salt = struct.unpack(">4I8s", log[:24])
    words = f"{'>' if magic & 1 else '<'}{(8 + page_bytes) // 4}I"
    one, two = _checksum(struct.unpack(words[0] + "6I", log[:24]), 0, 0)
    frames: list[tuple[int, int]] = []
    last_commit, offset, size = 0, 32, 24 + page_bytes
    while offset + size <= len(log):
        page, pages_after, frame_salt, *sums = struct.unpack(">2I8s2I", log[offset : offset + 24])
        content = log[offset : offset + 8] + log[offset + 24 : offset + size]
        one, two = _checksum(struct.unpack(words, content), one, two)
        if frame_salt != salt or sums != [one, two]:
            break
        offset += size
        frames.append((page, offset))
        last_commit = len(frames) if pages_after else last_commit
    return frames[:last_commit]


def _checksum(words: Sequence[int], one: int, two: int) -> tuple[int, int]:
    for even, odd in zip(words[::2], words[1::2], strict=True):
        one = (one + even + two) & 0xFFFFFFFF
        two = (two + odd + one) & 0xFFFFFFFF
    return one, two


@dataclass(slots=True)
class Original:
    """A journal at the instant of a kill, and how much of its log was there when each call left and was answered."""

    database: bytes
    log: bytes
    calls: dict[int, Call]
    dispatched: dict[int, int]
    answered: dict[int, int]


def make_original(prover: "Prover", row: Row, rng: random.Random, *, is_written_back: bool) -> Original:
    """Makes calls one at a time, kills all during the last; the log may have started over."""
    with World(prover, row, "original") as world:
        log = Path(f"{world.journal}-wal")
        talk = world.start()

        def log_end() -> int:
            frames = committed(log.read_bytes()) if log.exists() else []
            return frames[-1][1] if frames else 0

        if is_written_back:
            talk.ask(world.draft(rng, 1))
            talk.settle()
            head = log.read_bytes()[:32]
            while log.read_bytes()[:32] == head:
                talk.ask(world.draft(rng, 1, text="y" * 100_000))
                talk.settle()
        dispatched, answered = dict.fromkeys(world.calls, 0), dict.fromkeys(world.calls, 0)  # in the database by now
        if is_written_back:  # the call with which the log started over
            dispatched[len(world.calls)] = answered[len(world.calls)] = log_end()
        for is_last in (False,) * 6 + (True,):
            base = world.ledger_bytes()
            plan = {"before_ms": 0, "after_ms": 150 if is_last else 25, "answer_bytes": rng.choice((9, 9_000))}
            (pin,) = world.draft(rng, 1, **plan)
            talk.ask([pin])
            wait_for(world, talk, Trigger("effects", 1, 0.0))
            if world.ledger_bytes() == base:
                raise BrokenOff(f"no effect of call {pin}\n{talk.log()}")
            dispatched[pin] = log_end()
            if not is_last:
                talk.settle()
                answered[pin] = log_end()
        world.kill("relay", talk, rng)
        talk.finish()
        server = world.child_of(talk.process.pid)
        if server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
        if not log.exists():
            raise BrokenOff(f"the relay keeps no log beside {world.journal}")
        return Original(world.journal.read_bytes(), log.read_bytes(), world.calls, dispatched, answered)


@dataclass(frozen=True, slots=True)
class Image:
    """What a power cut could have left of a journal: `intact` bytes of the log are what they were."""

    what: str
    original: Original
    intact: int
    make: Callable[[], tuple[bytes, bytes]]  # database and log


def log_images(original: Original, rng: random.Random, kind: str) -> Iterator[Image]:
    """The log cut, or garbled from there on or for a sector, at each frame boundary and a byte before and behind it."""
    database, log = original.database, original.log

    def garbled(at: int, until: int) -> tuple[bytes, bytes]:
        return database, log[:at] + log[at:until].translate(INVERTED) + log[until:]

    for boundary in (0, 32, *(end for _, end in committed(log))):
        for at in (boundary - 1, boundary, boundary + 1):
            if at < 0:
                continue
            what = f"log {kind} at {boundary}{at - boundary:+}"
            if kind == "cut":
                yield Image(what, original, at, partial(cut, original, at))
            else:
                yield Image(what, original, at, partial(garbled, at, at + 512 if rng.random() < 0.5 else len(log)))


def database_images(original: Original, rng: random.Random) -> Iterator[Image]:
    """The database torn while the log is written back: up to a page it is new, that page half, the rest not yet."""
    size = struct.unpack(">I", original.log[8:12])[0]
    newest = {page: original.log[end - size : end] for page, end in committed(original.log)}

    def torn(last: int, tear: int) -> tuple[bytes, bytes]:
        database = bytearray(original.database)
        for page in sorted(newest):
            new = newest[page] if page < last else newest[page][:tear] + newest[page][tear:].translate(INVERTED)
            if page <= last:
                database[(page - 1) * size : page * size] = new
        return bytes(database), original.log

    for page in sorted(newest):
        for tear in (0, 1, rng.randrange(2, size - 1), size - 1):
            yield Image(f"page {page} torn at {tear}", original, len(original.log), partial(torn, page, tear))


def power_cuts(prover: "Prover", row: Row, rng: random.Random) -> Iterator[Image]:
    """The log as it was on disk for certain when a call left, or its answer did: what was not synced by then is gone.

    The kernel's own record of writes and syncs says what that is.
    """
    with World(prover, row, "traced") as world:
        trace, log = world.folder / "trace", Path(f"{world.journal}-wal")
        seen = "trace=write,writev,pwrite64,fdatasync,fsync"
        talk = world.start(under=["strace", "-y", "-s", "60", "-e", seen, "-o", str(trace)])
        for _ in range(8):
            talk.ask(world.draft(rng, 1, answer_bytes=rng.choice((9, 9_000)), text=""))
            talk.settle()
        os.kill(world.parent_of_server(), signal.SIGKILL)
        talk.finish()
        content = log.read_bytes()
        lines = trace.read_text("utf-8", "replace").splitlines()
        original = Original(world.journal.read_bytes(), content, world.calls, {}, {})
    # Offsets of writes since the last sync, at each line: bytes below all later ones were on disk by then.
    writes: list[tuple[int, int]] = []
    syncs: list[int] = []
    moments: list[tuple[int, int, bool]] = []
    for n, line in enumerate(lines):
        if found := re.match(r"pwrite64\(\d+<[^>]*-wal>.*, \d+, (\d+)\) += \d+$", line):
            writes.append((n, int(found[1])))
        elif re.match(r"fdatasync\(\d+<[^>]*-wal>\) += 0$", line):
            syncs.append(n)
        elif found := re.match(r'writev?\(.*"\{\\"jsonrpc\\":( ?)\\"2\.0\\", ?\\"id\\": ?(\d+),', line):
            moments.append((n, int(found[2]), not found[1]))  # our calls are written with blanks, answers without
    for n, pin, is_answer in moments:
        last_sync = max((sync for sync in syncs if sync < n), default=0)
        intact = min((offset for written, offset in writes if written > last_sync), default=len(content))
        (original.answered if is_answer else original.dispatched)[pin] = intact
    if sorted(original.dispatched) != sorted(world.calls) or sorted(original.answered) != sorted(world.calls):
        raise BrokenOff(f"the trace shows {len(moments)} lines of {len(world.calls)} calls and answers")
    for pin in world.calls:
        for what, at in (("left", original.dispatched[pin]), ("was answered", original.answered[pin])):
            yield Image(f"power cut when call {pin} {what}", original, at, partial(cut, original, at))


def cut(original: Original, at: int) -> tuple[bytes, bytes]:
    """A journal whose log ends early."""
    return original.database, original.log[:at]


def reopen(prover: "Prover", row: Row, image: Image, name: str) -> None:
    """What a relay makes of an image: a prefix that holds every acknowledged row, or a refusal."""
    original = image.original
    with World(prover, row, name) as world:
        world.tell(image.what)
        database, log = image.make()
        world.journal.write_bytes(database)
        Path(f"{world.journal}-wal").write_bytes(log)
        done = [pin for pin, end in original.dispatched.items() if end <= image.intact]  # ran, for all one can know
        world.ledger.write_text("".join(f"{pin:9d} {0:9d}\n" for pin in done), "ascii")
        read = [pin for pin, end in original.answered.items() if end <= image.intact]
        for pin, call in original.calls.items():
            world.calls[pin] = Call(pin, call.line, call.answer if pin in read else None)
        talk = world.start()
        talk.ask(world.calls)
        talk.settle()
        heard = {pin: call.answer for pin, call in world.calls.items()}
        if (code := talk.finish()) == 4 or "journal_unavailable" in talk.refused:
            row.images_refused += 1
        elif talk.waiting:
            raise BrokenOff(f"ended with exit code {code}\n{talk.log()}")
        else:
            world.expect_replays(talk, read)
        is_there = [heard[pin] is not None and heard[pin] == original.calls[pin].answer for pin in sorted(heard)]
        if True in is_there[is_there.index(False) :] if False in is_there else False:
            world.lose(world.calls[is_there.index(False) + 1], "later calls are there: not a prefix")
        row.cases += 1


def crash_images(prover: "Prover", row: Row, rng: random.Random, kind: str, most: int) -> None:
    """Images of two journals, one whose log has not started over yet and one whose log has."""
    images: list[Image] = list(power_cuts(prover, row, rng)) if kind == "unsynced" else []
    for is_written_back in (False, True) if kind != "unsynced" else ():
        original = make_original(prover, row, rng, is_written_back=is_written_back)
        made = database_images(original, rng) if kind == "torn" else log_images(original, rng, kind)
        images += made
    for image in rng.sample(images, min(most, len(images))):
        reopen(prover, row, image, f"{kind}-{row.cases + 1}")
        prover.progress(row, min(most, len(images)))


# --------------------------------------------------------------------------------------------------------- the whole


class Prover:
    """What all rows share: where, with which relay, and the line that shows how far we are."""

    def __init__(self, folder: Path, relay: Sequence[str]) -> None:
        self.folder, self.relay, self.worlds = folder, relay, 0
        self.fast_filter = ["-f", "--seccomp-bpf"] if can_trace("-f", "--seccomp-bpf") else []
        # Not every version has it; without a call no journal is made.
        probe = [*relay, "--journal", str(folder / "none"), "--restart-upstream", "1", "--", "true"]
        self.can_restart = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True).returncode != 2
        self._shows_progress = sys.stderr.isatty()

    def progress(self, row: Row, total: int) -> None:
        """Overwrites one line on a terminal."""
        if self._shows_progress:
            found = f"{row.effects_run_twice} twice, {row.recorded_outcomes_lost} lost"
            sys.stderr.write(f"\r\x1b[K{row.row}: {row.cases} of {total}, {found}")
            sys.stderr.flush()

    def clear_progress(self) -> None:
        if self._shows_progress:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def can_trace(*options: str) -> bool:
    """Whether strace is there and may look at processes."""
    if shutil.which("strace") is None:
        return False
    words = ["strace", *options, "-e", "trace=fdatasync", "-o", os.devnull, "true"]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def adopt_orphans() -> None:
    """Makes us the parent of what our dead children leave behind, so that it can be waited for (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_children() -> None:
    """Kills and collects every process that is left (Linux; elsewhere they end with their input)."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists() and (pids := children.read_text("ascii").split()):
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def file_system_of(folder: Path) -> str:
    """The kind of file system that a folder is on; "" where that cannot be told."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return ""
    around = {str(folder), *map(str, folder.parents)}
    return max(((len(mount[1]), mount[2]) for mount in mounts if mount[1] in around), default=(0, ""))[1]


Part = Callable[[Prover, Row, random.Random], None]


def parts(kills: int, faults: int, images: int) -> dict[str, Part]:
    """The rows: what each is called, and what it does."""
    made: dict[str, Part] = {}
    for n, victim in enumerate(("relay", "upstream", "agent", "all")):
        name = f"kill {victim}{' at once' if victim == 'all' else ''}, at random"
        made[name] = partial(random_kills, victim=victim, count=(kills + 3 - n) // 4)
    for name, call, fault in (
        ("kill relay at n-th fdatasync", "fdatasync", "signal=SIGKILL"),
        ("n-th fdatasync fails: EIO", "fdatasync", "error=EIO"),
        ("n-th fdatasync fails: ENOSPC", "fdatasync", "error=ENOSPC"),
        ("n-th pwrite64 fails: EIO", "pwrite64", "error=EIO"),
        ("n-th pwrite64 fails: ENOSPC", "pwrite64", "error=ENOSPC"),
    ):
        made[name] = partial(failing_calls, call=call, fault=fault, most=faults)
    for name, kind in (
        ("log cut", "cut"),
        ("log garbled", "garbled"),
        ("database torn", "torn"),
        ("unsynced lost", "unsynced"),
    ):
        made[f"crash image: {name}"] = partial(crash_images, kind=kind, most=images)
    return made


def prove(prover: Prover, seed: int, wanted: dict[str, Part], show: Callable[[Row], None]) -> list[Row]:
    """Runs the parts, one after the other; each draws from a generator of its own, so that one can be run alone."""
    rows: list[Row] = []
    for name, part in wanted.items():
        row = Row(name)
        rows.append(row)
        if name.endswith(NEEDS_STRACE) and not can_trace():
            row.skipped = "strace is not installed, or may not trace here"
        else:
            try:
                part(prover, row, random.Random(f"{seed} {name}"))
            except BrokenOff as error:
                row.broken_off = str(error)
        prover.clear_progress()
        show(row)
    return rows


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="a folder on the disk to try (here)")
    parser.add_argument("--quick", action="store_true", help="few cases of each kind, in less than 45 s")
    parser.add_argument("--kills", type=int, metavar="N", help="random kills, other cases in proportion (100)")
    parser.add_argument("--seed", type=int, metavar="S", help="repeat the choices of an earlier run")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--relay", help=argparse.SUPPRESS)  # another relay, to see that the judge sees
    return parser


def main() -> int:
    """Runs and prints; the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    kills = args.kills if args.kills is not None else 16 if args.quick else 100
    faults, images = (2, 6) if args.quick else (max(2, kills // 8), max(4, kills))
    wanted = {name: part for name, part in parts(kills, faults, images).items() if args.only in name}
    if kills < 1 or not wanted:
        parser.error("--kills is at least 1" if wanted else f"no row contains {args.only!r}")
    if not args.dir.is_dir():
        parser.error(f"{args.dir} is not a folder")
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    adopt_orphans()
    try:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-prove-", dir=args.dir.resolve()))
    except OSError as error:
        parser.error(f"{args.dir}: {error.strerror}")
    try:
        return report(args, folder, wanted, seed, kills)
    except KeyboardInterrupt:
        say(f"interrupted (seed {seed})")
        return 130
    except BrokenPipeError:  # nobody reads the table any more
        return 3
    except OSError as error:
        say(f"{error} (seed {seed})")
        return 3
    except Exception:  # a fault of ours must not look like a finding
        say(traceback.format_exc())
        return 3
    finally:
        end_children()
        with contextlib.suppress(OSError):  # what is kept as evidence
            folder.rmdir()
        try:
            sys.stdout.flush()
        except OSError:  # what could not be printed must not be tried again when Python ends: that has an exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def say(text: str) -> None:
    """Tells of what went wrong, on a line of its own."""
    with contextlib.suppress(OSError):
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}prove.py: {text}", file=sys.stderr, flush=True)


def report(args: argparse.Namespace, folder: Path, wanted: dict[str, Part], seed: int, kills: int) -> int:
    """Runs the parts and prints what they found; the exit code."""
    prover = Prover(folder, shlex.split(args.relay) if args.relay else [sys.executable, str(ROOT)])
    began_s = time.monotonic()

    def show(row: Row) -> None:
        if not args.json:
            print(row, flush=True)
            for path in row.evidence:
                print(f"    evidence: {path}/story.txt", flush=True)
        if row.broken_off:
            say(f"{row.row}: broken off (seed {seed}): {row.broken_off}")

    if not args.json:
        python, sqlite = platform.python_version(), sqlite3.sqlite_version
        print(f"seed {seed}; Python {python}, SQLite {sqlite}, {file_system_of(folder)} at {folder.parent}\n")
        for line in HEADER:
            print(PICTURE.format(*line).rstrip(), flush=True)
    rows = prove(prover, seed, wanted, show)
    is_bad = any(row.is_bad() for row in rows)
    seconds = round(time.monotonic() - began_s, 1)
    if args.json:
        facts = {"seed": seed, "kills": kills, "seconds": seconds, "is_bad": is_bad, "rows": [asdict(r) for r in rows]}
        print(json.dumps(facts, indent=2), flush=True)
    else:
        cases = sum(row.cases for row in rows)
        verdict = "no effect ran twice, no outcome was lost" if cases else "nothing was tried"
        verdict = "FOUND SOMETHING: the evidence is kept" if is_bad else verdict
        print(f"\n{cases} cases in {seconds:.0f} s: {verdict}", flush=True)
    if is_bad:
        return 1
    return 3 if any(row.broken_off for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
