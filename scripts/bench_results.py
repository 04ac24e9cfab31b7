"""What scripts/bench.py makes of its samples: ratios, verdicts on targets, tables and a plot. Measures nothing."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from scripts.bench_peers import BACK_TO_BACK, BARE, COPY, DIRECT, JOURNALED, PACED, PASS, SDK

IN_FLIGHT: Final = 64
CPU: Final = " (CPU)"  # behind the name of a subject: what its process used for a call


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


# -------------------------------------------------------------------------------------------------------------- tables


class Unit(NamedTuple):
    name: str
    factor: float
    digits: int = 0


@dataclass(frozen=True)
class Table:
    """How a part is shown. `base` is what its subjects are compared with; {} stands for their own first word."""

    unit: Unit
    base: str


MICROSECONDS: Final = Unit("us", 1e6)
TABLES: Final = {
    **dict.fromkeys(("200 B", "10 KB", "1 MB"), Table(MICROSECONDS, DIRECT)),
    "in flight": Table(Unit("calls/s", 1), "{}, one at a time"),
    "new journal": Table(MICROSECONDS, "steady"),
    "grown journal": Table(MICROSECONDS, "empty"),
    "reporting": Table(MICROSECONDS, "off"),
    "first reply": Table(Unit("ms", 1e3, 1), BARE),
    "memory": Table(Unit("MiB", 1 / (1 << 20), 1), BARE),
}


def subject_rows(samples: Samples, part: str) -> Iterator[dict[str, Any]]:
    """What a part has found, a row for each of its subjects; numbers in its unit, CPU in microseconds."""
    unit, table_base = TABLES[part].unit, TABLES[part].base
    for subject in samples.subjects(part):
        if subject.endswith(CPU):
            continue
        key, cpu_key = f"{part}: {subject}", f"{part}: {subject}{CPU}"
        values = samples.all(key)
        base = table_base.format(subject.partition(",")[0])
        yield {
            "subject": subject,
            "p50": statistics.median(values) * unit.factor,
            "p99": statistics.quantiles(values, n=100)[98] * unit.factor if len(values) >= 100 else None,
            "ratio": samples.ratio([key], [f"{part}: {base}"]),
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


def print_part(samples: Samples, part: str) -> None:
    """A part's table; columns in which nothing is known are left out."""
    rows = list(subject_rows(samples, part))
    unit, base = TABLES[part].unit, TABLES[part].base.removeprefix("{}, ")

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    columns: dict[str, list[str]] = {
        part: [row["subject"] for row in rows],
        f"p50 {unit.name}": [number(row["p50"], unit.digits) for row in rows],
        f"p99 {unit.name}": [number(row["p99"], unit.digits) for row in rows],
        f"to {base}": [str(row["ratio"] or "") for row in rows],
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


# ---------------------------------------------------------------------------------------------------------------- plot


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
