#!/usr/bin/env python3
"""How fast a call is through Checkpoint, beside what else it could go through, as ratios inside one run.

Each part of the run takes its subjects block by block and in random turn, so that a noisy moment hits all of them, and
compares medians. Behind every subject is the same echo server, before it the same client, both raw Python on bytes.
Microseconds differ between machines and minutes; a ratio in one table does so much less, and its spread is beside it:
the middle half of the same ratio in each block alone.

    scripts/bench.py                            every part in less than a minute
    scripts/bench.py --full                     what the README shows; four minutes, installs a peer first
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_peers import (  # noqa: E402  # the path comes first
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
from bench_results import (  # noqa: E402
    CPU,
    IN_FLIGHT,
    TABLES,
    Samples,
    print_part,
    print_targets,
    subject_rows,
    svg,
    target_rows,
)

SUBJECTS: Final = (DIRECT, COPY, SDK, FASTMCP, PASS, JOURNALED)
SIZES: Final = {"200 B": 200, "10 KB": 10_000, "1 MB": 1_000_000}
SMALL_BYTES: Final = SIZES["200 B"]
LARGE_BYTES: Final = 10_000_000
WARM_UP: Final = 4  # a block begins with a quarter as many calls that do not count: others have just had the caches

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
        small=Many(10, 30), large=Many(8, 4), in_flight=Many(6, 256), new=Many(6, 50), grown=Many(10, 30),
        reporting=Many(4, 400), starts=6, memory=2, rows=50_000, large_rows=250,
    ),
    "full": Plan(
        small=Many(40, 40), large=Many(50, 4), in_flight=Many(20, 256), new=Many(30, 50), grown=Many(40, 40),
        reporting=Many(15, 600), starts=15, memory=5, rows=50_000, large_rows=250,
    ),
    "tiny": Plan(
        small=Many(1, 3), large=Many(1, 1), in_flight=Many(1, 80), new=Many(1, 3), grown=Many(1, 3),
        reporting=Many(1, 5), starts=1, memory=1, rows=20, large_rows=2,
    ),
}  # fmt: skip


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
            show(f"{part}: block {number + 1} of {blocks + warm_up}")
            self._rng.shuffle(names)
            for name in names:
                for suffix, values in subjects[name]().items():
                    if number >= warm_up:
                        self.samples.add(f"{part}: {name}{suffix}", values)

    def there(self, names: Sequence[str] = SUBJECTS) -> list[str]:
        """Those of the subjects that there are."""
        return [name for name in names if name not in self.stand.left_out]

    @contextlib.contextmanager
    def peers(self) -> Iterator[dict[str, Peer]]:
        """All of them, running."""
        with contextlib.ExitStack() as stack:
            yield {name: stack.enter_context(self.stand.start(name)) for name in self.there()}


def show(text: str) -> None:
    """One line that tells a terminal how far it is; the next one takes its place."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------- parts


def _calls(peer: Peer, size_bytes: int, count: int) -> Block:
    peer.calls(size_bytes, count // WARM_UP)
    before = peer.cpu_s()
    seconds = peer.calls(size_bytes, count)
    after = peer.cpu_s()
    return {"": seconds} if before is None or after is None else {"": seconds, CPU: [(after - before) / count]}


def _commits(commits: Commits | PacedCommits, size_bytes: int, count: int) -> Block:
    commits.pairs(size_bytes, count // WARM_UP)
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
        leave_journal(journals[name], rows, text_bytes, show)
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

    run.interleave(part, run.plan.starts, {BARE: bare, **{name: partial(start, name) for name in run.there()}})


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

    there = run.there((PASS, JOURNALED, SDK, FASTMCP))
    message: Block = {"": [LARGE_BYTES]}
    subjects = {BARE: bare, "the 10 MB message": lambda: message}
    run.interleave(part, run.plan.memory, subjects | {name: partial(rest_and_peak, name) for name in there})


def _known(values: Mapping[str, float | None]) -> Block:
    return {suffix: [value] for suffix, value in values.items() if value is not None}


PARTS: Final[Mapping[str, Callable[[Run, str], None]]] = {
    **dict.fromkeys(SIZES, measure_size),
    "in flight": measure_in_flight,
    "new journal": measure_new,
    "grown journal": measure_grown,
    "reporting": measure_reporting,
    "first reply": measure_starts,
    "memory": measure_memory,
}


# ------------------------------------------------------------------------------------------------------- the whole run


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


def compile_bytes() -> None:
    """Compiles what the relay imports: where Python may not do so itself, that would be a quarter of each start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-l", "."], cwd=ROOT, env=environment, check=True)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", dest="plan", action="store_const", const="full", default="quick", help="more of all")
    parser.add_argument("--tiny", dest="plan", action="store_const", const="tiny", help=argparse.SUPPRESS)  # for a test
    parser.add_argument("--only", default="", metavar="TEXT", help="only parts whose name contains this")
    optional = (COPY, SDK, FASTMCP)
    parser.add_argument("--without", action="append", default=[], choices=optional, help="leave a subject out")
    parser.add_argument("--seed", type=int, metavar="S", help="take the turns of an earlier run")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="a folder on the disk to try (here)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the medians of the part 200 B as well")
    return parser


def print_all(run: Run, parts: Sequence[str]) -> None:
    """The tables, those of the targets last."""
    for part in parts:
        print_part(run.samples, part)
    for name, why in run.stand.left_out.items():
        print(f"Left out: {name} ({why}).")
    if run.stand.left_out:
        print()
    print_targets(run.samples, parts)


def print_json(run: Run, parts: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Everything as one object; a ratio is [value, low, high]."""
    found: dict[str, Any] = {
        "left_out": run.stand.left_out,
        "parts": {
            part: {"unit": TABLES[part].unit.name, "subjects": list(subject_rows(run.samples, part))} for part in parts
        },
        "targets": list(target_rows(run.samples, parts)),
    }
    print(json.dumps({**facts, **found}, indent=2))


def bench(args: argparse.Namespace, parts: Sequence[str]) -> None:
    """Measures, prints and draws."""
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    began_s = time.monotonic()
    compile_bytes()
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-", dir=args.dir.resolve()) as name:
        described = machine(Path(name))
        if not args.json:
            print(f"{args.plan} run, seed {seed}\n{described}\n", flush=True)
        stand = Stand(Path(name), without=args.without, is_full=args.plan == "full")
        run = Run(stand, PLANS[args.plan], seed)
        for part in parts:
            PARTS[part](run, part)
    show("")
    seconds = round(time.monotonic() - began_s, 1)
    if args.json:
        print_json(run, parts, {"plan": args.plan, "seed": seed, "machine": described, "seconds": seconds})
    else:
        print_all(run, parts)
    if args.svg:
        args.svg.write_text(svg(list(subject_rows(run.samples, "200 B"))), "utf-8")


def main() -> int:
    """Runs; the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    parts = [name for name in PARTS if args.only in name]
    if not parts:
        parser.error(f"no part contains {args.only!r}; there is {', '.join(PARTS)}")
    if not args.dir.is_dir():
        parser.error(f"{args.dir} is not a folder")
    if args.svg and "200 B" not in parts:
        parser.error("--svg draws the part 200 B, which --only leaves out")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        bench(args, parts)
    except KeyboardInterrupt:
        show("")
        print("bench.py: interrupted", file=sys.stderr)
        return 130
    except (PeerEnded, OSError, subprocess.SubprocessError) as error:
        show("")
        print(f"bench.py: broken off: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
