#!/usr/bin/env python3
"""How fast a call is through Checkpoint, beside what else it could go through, as ratios inside one run.

Each part of the run takes its subjects block by block and in random turn, so that a noisy moment hits all of them, and
compares medians. Behind every subject is the same echo server, before it the same client, both raw Python on bytes.
Microseconds differ between machines and minutes; a ratio in one table does so much less, and its spread is beside it:
the middle half of the same ratio in each block alone.

    scripts/bench.py                            every part in less than a minute
    scripts/bench.py --full                     what the README shows; ten minutes, installs a peer first
    scripts/bench.py --only "200 B" --seed 7    parts whose name contains this, in the turns of an earlier run
    scripts/bench.py --full --svg docs/bench.svg

Exit codes: 0 all was measured, whatever it was; 2 usage; 3 the run itself broke off; 130 interrupted.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.bench_peers import (  # noqa: E402  # the path comes first
    BACK_TO_BACK,
    BARE,
    BARE_PYTHON,
    COPY,
    DIRECT,
    FASTMCP,
    JOURNALED,
    PACED,
    PASS,
    SDK,
    Commits,
    PacedCommits,
    Peer,
    PeerEnded,
    Stand,
    bare_memory_bytes,
    dead_endpoint,
    good_endpoint,
    leave_journal,
)

SUBJECTS: Final = (DIRECT, COPY, SDK, FASTMCP, PASS, JOURNALED)
SIZES: Final = {"200 B": 200, "10 KB": 10_000, "1 MB": 1_000_000}
SMALL_BYTES: Final = SIZES["200 B"]
IN_FLIGHT: Final = 64
LARGE_BYTES: Final = 10_000_000
CPU: Final = " (CPU)"  # behind the name of a subject: what its process used for a call

# What one turn of a subject gave, by what is put behind its name; `{"": seconds}` mostly.
Block = Mapping[str, Sequence[float]]


class Many(NamedTuple):
    """How much of something: so many blocks, and in each so many calls of every subject."""

    blocks: int
    calls: int


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    small: Many
    large: Many
    in_flight: Many
    new: Many
    grown: Many
    reporting: Many
    starts: int
    memory: int
    rows: int
    large_rows: int


PLANS: Final = {
    "quick": Plan(
        small=Many(30, 10), large=Many(8, 4), in_flight=Many(6, 256), new=Many(6, 50), grown=Many(30, 10),
        reporting=Many(4, 400), starts=6, memory=2, rows=50_000, large_rows=250,
    ),
    "full": Plan(
        small=Many(150, 10), large=Many(50, 4), in_flight=Many(20, 256), new=Many(30, 50), grown=Many(150, 10),
        reporting=Many(15, 600), starts=15, memory=5, rows=50_000, large_rows=250,
    ),
    "tiny": Plan(
        small=Many(1, 3), large=Many(1, 1), in_flight=Many(1, 80), new=Many(1, 3), grown=Many(1, 3),
        reporting=Many(1, 5), starts=1, memory=1, rows=20, large_rows=2,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """What a ratio of medians is to be at most (or, where more is better, at least).

    `above` and `below` name samples, "part: subject"; several of them are summed. Source: the project's design, its
    table of targets; for reporting, what was promised when it came in.
    """

    name: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    target: float
    stretch: float | None
    is_least: bool = False

    def verdict(self, value: float | None) -> str:
        """One word on a measured value."""
        if value is None:
            return "not measured"
        sign = -1 if self.is_least else 1
        if self.stretch is not None and sign * value <= sign * self.stretch:
            return "stretch met"
        return "met" if sign * value <= sign * self.target else "NOT MET"


def _targets() -> Iterator[Target]:
    for size in ("200 B", "10 KB"):
        for commits in (BACK_TO_BACK, PACED):
            below = (f"{size}: {DIRECT}", f"{size}: {commits}")
            yield Target(f"journaled {size}, to direct + {commits}", (f"{size}: {JOURNALED}",), below, 1.8, 1.55)
    for size in ("200 B", "10 KB"):
        yield Target(f"pass-through {size}, to a C copy", (f"{size}: {PASS}",), (f"{size}: {COPY}",), 1.35, 1.2)
    for size in ("200 B", "10 KB"):
        yield Target(
            f"pass-through {size}, to the SDK's transports", (f"{size}: {PASS}",), (f"{size}: {SDK}",), 0.25, 0.18
        )
    for name, target, stretch in ((PASS, 1.3, 1.1), (JOURNALED, 4, 2.8)):
        yield Target(f"{name} 1 MB, to direct", (f"1 MB: {name}",), (f"1 MB: {DIRECT}",), target, stretch)
    many, one = f"in flight: {JOURNALED}, {IN_FLIGHT} of 4 tools", f"in flight: {JOURNALED}, one at a time"
    yield Target("journaled calls/s, 64 in flight over 4 tools, to one at a time", (many,), (one,), 8, 15, True)
    yield Target(
        "first 50 calls of a new journal, to steady", ("new journal: new",), ("new journal: steady",), 1.25, 1.1
    )
    for name in ("50,000 rows", "500 MB"):
        yield Target(
            f"{name} in the journal, to an empty one", (f"grown journal: {name}",), ("grown journal: empty",), 1.1, 1.0
        )
    for name in ("good", "dead"):
        on = f"reporting: on, {name} endpoint"
        yield Target(f"reporting to a {name} endpoint, to none", (on,), ("reporting: off",), 1.25, None)
    yield Target(
        "first relayed reply, to the bare process", (f"first reply: {JOURNALED}",), (f"first reply: {BARE}",), 1.1, 1.0
    )
    yield Target("idle memory, to the bare process", (f"memory: {JOURNALED}",), (f"memory: {BARE}",), 1.4, 1.25)
    peak, message = f"memory: {JOURNALED}, peak above idle", "memory: the 10 MB message"
    yield Target("peak above idle for one 10 MB call, in messages", (peak,), (message,), 7, 5)


TARGETS: Final = tuple(_targets())


# ------------------------------------------------------------------------------------------------------------- samples


class Ratio(NamedTuple):
    """A ratio of medians, and the middle half of what it was in each block."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


class Samples:
    """What was measured, block by block, by part and subject."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[Sequence[float]]] = {}

    def __contains__(self, key: str) -> bool:
        return bool(self._blocks.get(key))

    def announce(self, key: str) -> None:
        """Gives it its place in the table, whenever its turn comes."""
        self._blocks[key] = []

    def add(self, key: str, values: Sequence[float]) -> None:
        self._blocks.setdefault(key, []).append(values)

    def subjects(self, part: str) -> list[str]:
        """What was measured in a part."""
        return [key.removeprefix(f"{part}: ") for key in self._blocks if key.startswith(f"{part}: ") and key in self]

    def all(self, key: str) -> list[float]:
        return [value for block in self._blocks[key] for value in block]

    def ratio(self, above: Sequence[str], below: Sequence[str]) -> Ratio | None:
        """How one sum of medians compares with another; None where something of it was not measured."""
        if not all(key in self for key in (*above, *below)):
            return None

        def sums(keys: Sequence[str]) -> list[float]:
            in_blocks = zip(*(map(statistics.median, self._blocks[key]) for key in keys), strict=True)
            return [sum(statistics.median(self.all(key)) for key in keys), *map(sum, in_blocks)]

        value, *in_blocks = (a / b for a, b in zip(sums(above), sums(below), strict=True))
        if len(in_blocks) == 1:
            return Ratio(value, in_blocks[0], in_blocks[0])
        low, _, high = statistics.quantiles(in_blocks, n=4, method="inclusive")
        return Ratio(value, low, high)


class Run:
    """One run: what it starts, its turns, and what it has measured."""

    def __init__(self, stand: Stand, plan: Plan, seed: int) -> None:
        self.stand, self.plan = stand, plan
        self.samples = Samples()
        self._rng = random.Random(seed)

    def interleave(self, part: str, blocks: int, subjects: Mapping[str, Callable[[], Block]]) -> None:
        """Takes every subject once in each block; a sixth as many blocks before that only warm up."""
        for subject in subjects:
            self.samples.announce(f"{part}: {subject}")
        names = list(subjects)
        warm_up = blocks // 6
        for number in range(blocks + warm_up):
            self.show(f"{part}: block {number + 1} of {blocks + warm_up}")
            self._rng.shuffle(names)
            for name in names:
                for suffix, values in subjects[name]().items():
                    if number >= warm_up:
                        self.samples.add(f"{part}: {name}{suffix}", values)

    @contextlib.contextmanager
    def peers(self, names: Sequence[str] = SUBJECTS) -> Iterator[dict[str, Peer]]:
        """Those of the subjects that there are, running."""
        with contextlib.ExitStack() as stack:
            there = [name for name in names if name not in self.stand.left_out]
            yield {name: stack.enter_context(self.stand.start(name)) for name in there}

    def show(self, text: str) -> None:
        """One line that tells a terminal how far it is."""
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------- parts


def _calls(peer: Peer, size_bytes: int, count: int) -> Block:
    before = peer.cpu_s()
    seconds = peer.calls(size_bytes, count)
    after = peer.cpu_s()
    return {"": seconds} if before is None or after is None else {"": seconds, CPU: [(after - before) / count]}


def _commits(commits: Commits | PacedCommits, size_bytes: int, count: int) -> Block:
    return {"": commits.pairs(size_bytes, count)}


def measure_size(run: Run, part: str) -> None:
    """Calls one after another, and the two commits that a journaled one cannot do without."""
    size_bytes = SIZES[part]
    many = run.plan.large if size_bytes > 100_000 else run.plan.small
    with run.peers() as peers, contextlib.ExitStack() as stack:
        subjects: dict[str, Callable[[], Block]] = {
            name: partial(_calls, peer, size_bytes, many.calls) for name, peer in peers.items()
        }
        for name, kind in ((BACK_TO_BACK, Commits), (PACED, PacedCommits)):
            commits = stack.enter_context(contextlib.closing(kind(run.stand.new_file())))
            subjects[name] = partial(_commits, commits, size_bytes, many.calls)
        run.interleave(part, many.blocks, subjects)


def measure_in_flight(run: Run, part: str) -> None:
    """Calls per second, one at a time and with many under way."""
    many = run.plan.in_flight

    def flood(peer: Peer, in_flight: int, tools: int) -> Block:
        return {"": [peer.flood(SMALL_BYTES, many.calls, in_flight, tools)]}

    ways = {
        "one at a time": (1, 1),
        f"{IN_FLIGHT} of 1 tool": (IN_FLIGHT, 1),
        f"{IN_FLIGHT} of 4 tools": (IN_FLIGHT, 4),
    }
    with run.peers() as peers:
        run.interleave(
            part,
            many.blocks,
            {f"{name}, {way}": partial(flood, peer, *how) for name, peer in peers.items() for way, how in ways.items()},
        )


def measure_new(run: Run, part: str) -> None:
    """The first calls of a relay whose journal is new, beside one that has run for a while."""
    many = run.plan.new

    def begin() -> Block:
        with run.stand.start(JOURNALED) as fresh:
            return {"": fresh.calls(SMALL_BYTES, many.calls)}

    with run.stand.start(JOURNALED) as steady:
        steady.calls(SMALL_BYTES, 4 * many.calls)
        run.interleave(part, many.blocks, {"steady": lambda: {"": steady.calls(SMALL_BYTES, many.calls)}, "new": begin})


def measure_grown(run: Run, part: str) -> None:
    """Calls with much in the journal. Each large row has 1 MB in its arguments and as much in its result."""
    plan, journals = run.plan, {"empty": run.stand.new_file()}
    for name, rows, text_bytes in (("50,000 rows", plan.rows, 100), ("500 MB", plan.large_rows, 1_000_000)):
        journals[name] = run.stand.new_file()
        leave_journal(journals[name], rows, text_bytes, run.show)
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(run.stand.start_journaled(name, path)) for name, path in journals.items()}
        run.interleave(
            part,
            plan.grown.blocks,
            {name: partial(_calls, peer, SMALL_BYTES, plan.grown.calls) for name, peer in peers.items()},
        )


def measure_reporting(run: Run, part: str) -> None:
    """Calls with reports on their way, in blocks that last long enough for reports to be sent in the middle.

    What is left goes out in the pause after them, and must not fall into somebody else's block.
    """
    many, stand = run.plan.reporting, run.stand

    def calls(peer: Peer) -> Block:
        block = _calls(peer, SMALL_BYTES, many.calls)
        peer.wait_until_idle()
        return block

    with good_endpoint() as good, dead_endpoint() as dead, contextlib.ExitStack() as stack:
        endpoints = {"off": None, "on, good endpoint": good, "on, dead endpoint": dead}
        peers = {
            name: stack.enter_context(stand.start_journaled(name, stand.new_file(), endpoint))
            for name, endpoint in endpoints.items()
        }
        run.interleave(part, many.blocks, {name: partial(calls, peer) for name, peer in peers.items()})


def measure_starts(run: Run, part: str) -> None:
    """Seconds from the start of a process to its first relayed reply; of the bare one, to its end."""

    def bare() -> Block:
        began = time.perf_counter()
        subprocess.run(BARE_PYTHON, check=True)
        return {"": [time.perf_counter() - began]}

    def start(name: str) -> Block:
        with run.stand.start(name) as peer:
            return {"": [peer.first_reply_s]}

    there = [name for name in SUBJECTS if name not in run.stand.left_out]
    run.interleave(part, run.plan.starts, {BARE: bare, **{name: partial(start, name) for name in there}})


def measure_memory(run: Run, part: str) -> None:
    """Memory of the process alone: at rest after some calls, and how much more it had at most for a large one."""

    def bare() -> Block:
        return _known({"": bare_memory_bytes()})

    def rest_and_peak(name: str) -> Block:
        with run.stand.start(name) as peer:
            peer.calls(SMALL_BYTES, 10)
            peer.wait_until_idle()
            idle = peer.memory_bytes()
            peer.forget_peak()
            peer.calls(LARGE_BYTES, 1)
            peak = peer.memory_bytes("VmHWM")
        above = None if idle is None or peak is None else peak - idle
        return _known({"": idle, ", peak above idle": above})

    there = [name for name in (PASS, JOURNALED, SDK, FASTMCP) if name not in run.stand.left_out]
    message: Block = {"": [LARGE_BYTES]}
    subjects = {BARE: bare, "the 10 MB message": lambda: message}
    run.interleave(part, run.plan.memory, subjects | {name: partial(rest_and_peak, name) for name in there})


def _known(values: Mapping[str, float | None]) -> Block:
    return {suffix: [value] for suffix, value in values.items() if value is not None}


class Unit(NamedTuple):
    name: str
    factor: float
    digits: int = 0


@dataclass(frozen=True)
class Part:
    """A table of the run. `base` is the subject that the others are compared with; {} stands for their first word."""

    measure: Callable[[Run, str], None]
    unit: Unit
    base: str


MICROSECONDS: Final = Unit("us", 1e6)
MIB: Final = Unit("MiB", 1 / (1 << 20), 1)
PARTS: Final = {
    **{size: Part(measure_size, MICROSECONDS, DIRECT) for size in SIZES},
    "in flight": Part(measure_in_flight, Unit("calls/s", 1), "{}, one at a time"),
    "new journal": Part(measure_new, MICROSECONDS, "steady"),
    "grown journal": Part(measure_grown, MICROSECONDS, "empty"),
    "reporting": Part(measure_reporting, MICROSECONDS, "off"),
    "first reply": Part(measure_starts, Unit("ms", 1e3, 1), BARE),
    "memory": Part(measure_memory, MIB, BARE),
}


# -------------------------------------------------------------------------------------------------------------- output


def subject_rows(samples: Samples, name: str, part: Part) -> Iterator[dict[str, Any]]:
    """What a part has found, a row for each of its subjects; numbers in the part's unit, CPU in microseconds."""
    for subject in samples.subjects(name):
        if subject.endswith(CPU):
            continue
        key, cpu_key = f"{name}: {subject}", f"{name}: {subject}{CPU}"
        values = samples.all(key)
        base = part.base.format(subject.partition(",")[0])
        yield {
            "subject": subject,
            "p50": statistics.median(values) * part.unit.factor,
            "p99": statistics.quantiles(values, n=100)[98] * part.unit.factor if len(values) >= 100 else None,
            "ratio": samples.ratio([key], [f"{name}: {base}"]),
            "cpu_us": statistics.median(samples.all(cpu_key)) * 1e6 if cpu_key in samples else None,
        }


def target_rows(samples: Samples) -> Iterator[dict[str, Any]]:
    """Every target, with what was measured."""
    for target in TARGETS:
        ratio = samples.ratio(target.above, target.below)
        verdict = target.verdict(None if ratio is None else ratio.value)
        yield {**asdict(target), "measured": ratio, "verdict": verdict}


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that is one in Markdown too."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    ruler = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for cells in (head, ruler, *rows):
        first, *others = zip(cells, widths, strict=True)
        print("|", " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]), "|")
    print()


def print_part(samples: Samples, name: str, part: Part) -> None:
    """A part's table; columns in which nothing is known are left out."""
    rows = list(subject_rows(samples, name, part))
    unit = part.unit

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    columns: dict[str, list[str]] = {
        name: [row["subject"] for row in rows],
        f"p50 {unit.name}": [number(row["p50"], unit.digits) for row in rows],
        f"p99 {unit.name}": [number(row["p99"], unit.digits) for row in rows],
        f"to {part.base.replace('{}, ', '')}": [str(row["ratio"] or "") for row in rows],
        "CPU us per call": [number(row["cpu_us"], 0) for row in rows],
    }
    kept = {head: cells for head, cells in columns.items() if any(cells)}
    print_table(list(kept), list(zip(*kept.values(), strict=True)))


def print_targets(samples: Samples) -> None:
    """The last table: what was to be reached, and whether it was."""

    def bound(value: float | None, row: dict[str, Any]) -> str:
        return "" if value is None else f"{'>=' if row['is_least'] else '<='} {value:g}"

    rows = [
        (
            row["name"],
            str(row["measured"] or ""),
            bound(row["target"], row),
            bound(row["stretch"], row),
            row["verdict"],
        )
        for row in target_rows(samples)
    ]
    print_table(("target", "measured", "target", "stretch", "verdict"), rows)


def machine(folder: Path) -> str:
    """What this was measured on."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        processor = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{processor}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()} {platform.release()}, journals on "
        f"{file_system_of(folder)}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"load {os.getloadavg()[0]:.1f} before"
    )


def file_system_of(folder: Path) -> str:
    """The kind of disk that a folder is on, where the system says it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mounts").read_text("utf-8").splitlines()
        mounts = {line.split()[1]: line.split()[2] for line in lines}
        return max((place, kind) for place, kind in mounts.items() if folder.is_relative_to(place))[1]
    return "an unknown file system"


_SVG: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" aria-label="{title}">
<style>
text {{ font: 13px system-ui, sans-serif; fill: #1f2328 }}
rect {{ fill: #8c959f }}
.own {{ fill: #0969da }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} rect {{ fill: #6e7681 }} .own {{ fill: #2f81f7 }} }}
</style>
<text x="8" y="20">{title}</text>
{bars}
</svg>
"""


def svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each subject, as long as its median."""
    longest = max(row["p50"] for row in rows)
    bars = []
    for number, row in enumerate(rows):
        y, width, kind = (
            34 + 26 * number,
            440 * row["p50"] / longest,
            "own" if row["subject"] in (PASS, JOURNALED) else "",
        )
        bars.append(f'<text x="8" y="{y + 14}">{escape(row["subject"])}</text>')
        bars.append(f'<rect class="{kind}" x="190" y="{y}" width="{width:.1f}" height="18" rx="2"/>')
        bars.append(f'<text x="{196 + width:.1f}" y="{y + 14}">{row["p50"]:,.0f}</text>')
    title = "One call of 200 B and its answer: median in microseconds, less is better"
    return _SVG.format(height=44 + 26 * len(rows), title=title, bars="\n".join(bars))


# ----------------------------------------------------------------------------------------------------------------- run


def compile_bytes() -> None:
    """Compiles what the relay imports: where Python may not do so itself, that would be a quarter of each start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-l", "."], cwd=ROOT, env=environment, check=True)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", dest="plan", action="store_const", const="full", default="quick", help="more of all")
    parser.add_argument("--tiny", dest="plan", action="store_const", const="tiny", help=argparse.SUPPRESS)  # for a test
    parser.add_argument("--only", default="", metavar="PATTERN", help="only parts whose name contains this")
    parser.add_argument("--seed", type=int, metavar="S", help="take the turns of an earlier run")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="a folder on the disk to try (here)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the medians of the part 200 B as well")
    return parser


def print_all(run: Run, parts: Mapping[str, Part]) -> None:
    for name, part in parts.items():
        print_part(run.samples, name, part)
    for name, why in run.stand.left_out.items():
        print(f"Left out: {name} ({why}).")
    if run.stand.left_out:
        print()
    print_targets(run.samples)


def print_json(run: Run, parts: Mapping[str, Part], facts: dict[str, Any]) -> None:
    """Everything as one object; a ratio is [value, low, high]."""
    found = {
        name: {"unit": part.unit.name, "subjects": list(subject_rows(run.samples, name, part))}
        for name, part in parts.items()
    }
    facts |= {"left_out": run.stand.left_out, "parts": found, "targets": list(target_rows(run.samples))}
    print(json.dumps(facts, indent=2))


def measure(run: Run, parts: Mapping[str, Part]) -> int:
    """Measures everything; an exit code."""
    try:
        for name, part in parts.items():
            part.measure(run, name)
    except KeyboardInterrupt:
        run.show("")
        print("bench.py: interrupted", file=sys.stderr)
        return 130
    except (PeerEnded, OSError, subprocess.SubprocessError) as error:
        run.show("")
        print(f"bench.py: broken off: {error}", file=sys.stderr)
        return 3
    run.show("")
    return 0


def main() -> int:
    """Measures and prints; the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    parts = {name: part for name, part in PARTS.items() if args.only in name}
    if not parts:
        parser.error(f"no part contains {args.only!r}; there is {', '.join(PARTS)}")
    if not args.dir.is_dir():
        parser.error(f"{args.dir} is not a folder")
    if args.svg and "200 B" not in parts:
        parser.error("--svg draws the part 200 B, which --only leaves out")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    compile_bytes()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-", dir=args.dir.resolve()) as name:
        facts: dict[str, Any] = {"plan": args.plan, "seed": seed, "machine": machine(Path(name))}
        if not args.json:
            print(f"{args.plan} run, seed {seed}\n{facts['machine']}\n", flush=True)
        run = Run(Stand(Path(name), installs=args.plan == "full"), PLANS[args.plan], seed)
        if code := measure(run, parts):
            return code
    facts["seconds"] = round(time.monotonic() - began_s, 1)
    if args.json:
        print_json(run, parts, facts)
    else:
        print_all(run, parts)
    if args.svg:
        args.svg.write_text(svg(list(subject_rows(run.samples, "200 B", PARTS["200 B"]))), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
