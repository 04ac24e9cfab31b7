"""What scripts/bench.py makes of its samples: ratios, verdicts on targets, tables and a plot. Measures nothing."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from bench_peers import BARE, DIRECT, JOURNALED, PASS

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

    def ratio(self, above: str, below: str) -> Ratio | None:
        """How one sum of medians compares with another; None where something of it was not measured."""
        if not all(key in self for key in f"{above} + {below}".split(" + ")):
            return None

        def sums(terms: str) -> list[float]:
            keys = terms.split(" + ")
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

    `above` and `below` name samples, "part: subject"; those with a plus between them are summed.
    """

    name: str
    above: str
    below: str
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


# name; what is measured; what it is measured by; target, stretch
TARGETS: Final = (
    Target(
        "journaled 200 B, to direct + two commits, back to back",
        "200 B: journaled", "200 B: direct + 200 B: two commits, back to back", 1.8, 1.55,
    ),
    Target(
        "journaled 200 B, to direct + two commits, paced",
        "200 B: journaled", "200 B: direct + 200 B: two commits, paced", 1.8, 1.55,
    ),
    Target(
        "journaled 10 KB, to direct + two commits, back to back",
        "10 KB: journaled", "10 KB: direct + 10 KB: two commits, back to back", 1.8, 1.55,
    ),
    Target(
        "journaled 10 KB, to direct + two commits, paced",
        "10 KB: journaled", "10 KB: direct + 10 KB: two commits, paced", 1.8, 1.55,
    ),
    Target(
        "pass-through 200 B, to a C copy",
        "200 B: pass-through", "200 B: C two-pipe copy", 1.35, 1.2,
    ),
    Target(
        "pass-through 10 KB, to a C copy",
        "10 KB: pass-through", "10 KB: C two-pipe copy", 1.35, 1.2,
    ),
    Target(
        "pass-through 200 B, to the SDK's transports",
        "200 B: pass-through", "200 B: SDK transports", 0.25, 0.18,
    ),
    Target(
        "pass-through 10 KB, to the SDK's transports",
        "10 KB: pass-through", "10 KB: SDK transports", 0.25, 0.18,
    ),
    Target(
        "pass-through 1 MB, to direct",
        "1 MB: pass-through", "1 MB: direct", 1.3, 1.1,
    ),
    Target(
        "journaled 1 MB, to direct",
        "1 MB: journaled", "1 MB: direct", 4, 2.8,
    ),
    Target(
        "journaled calls/s, 64 in flight over 4 tools, to one at a time",
        "in flight: journaled, 64 of 4 tools", "in flight: journaled, one at a time", 8, 15, is_least=True,
    ),
    Target(
        "first 50 calls of a new journal, to steady",
        "new journal: new", "new journal: steady", 1.25, 1.1,
    ),
    Target(
        "50,000 rows in the journal, to an empty one",
        "grown journal: 50,000 rows", "grown journal: empty", 1.1, 1.0,
    ),
    Target(
        "500 MB in the journal, to an empty one",
        "grown journal: 500 MB", "grown journal: empty", 1.1, 1.0,
    ),
    Target(
        "reporting to a good endpoint, to none",
        "reporting: on, good endpoint", "reporting: off", 1.25, None,
    ),
    Target(
        "reporting to a dead endpoint, to none",
        "reporting: on, dead endpoint", "reporting: off", 1.25, None,
    ),
    Target(
        "first relayed reply, to the bare process",
        "first reply: journaled", "first reply: bare asyncio, sqlite3", 1.1, 1.0,
    ),
    Target(
        "idle memory, to the bare process",
        "memory: journaled", "memory: bare asyncio, sqlite3", 1.4, 1.25,
    ),
    Target(
        "peak above idle for one 10 MB call, in messages",
        "memory: journaled, peak above idle", "memory: the 10 MB message", 7, 5,
    ),
)  # fmt: skip


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
            "ratio": samples.ratio(key, f"{part}: {base}"),
            "cpu_us": statistics.median(samples.all(cpu_key)) * 1e6 if cpu_key in samples else None,
        }


def target_rows(samples: Samples, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The targets of these parts, with what was measured."""
    for target in TARGETS:
        if target.above.partition(":")[0] not in parts:
            continue
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


def print_targets(samples: Samples, parts: Sequence[str]) -> None:
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
        for row in target_rows(samples, parts)
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
