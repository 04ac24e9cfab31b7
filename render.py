"""What an operator reads: times, tables, colours, JSON laid out. Pure: takes values, gives text.

What is shown comes from a client or a server, so it is never shown raw: a control character or a change of writing
direction could make a terminal say what is not on record.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from unicodedata import combining, east_asian_width

_PIECE_CHARS: Final = 4096  # a text is looked at in pieces: a list of all its characters takes many times its memory
_MAX_INDENT: Final = 40  # levels; deeper ones are still told apart by their brackets
_MAX_MS: Final = 253402300799999  # the end of the year 9999, the last that ISO 8601 and datetime can write

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_duration: Final = re.compile(r"([0-9]{1,9})([smhdw])").fullmatch
# Colours of a terminal; what needs a person stands out.
_COLOURS: Final = {
    "COMPLETED": "32",
    "FAILED": "31",
    "IN_DOUBT": "1;33",
    "PENDING": "36",
    "INPUT_REQUIRED": "35",
    "TASK": "35",
    "NOT_SENT": "2",
    "NOT_EXECUTED": "2",
    "PRUNED": "2",
}
# Possessive: what a string has taken it never gives back, so nothing has to be remembered for each character of it.
_token: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{},:]|[^][{},:"\s]+', re.DOTALL).finditer


def iso(at_ms: int | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond."""
    if at_ms is None:
        return None
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=max(0, min(at_ms, _MAX_MS)))
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration_ms(text: str) -> int:
    """A span of time such as 90s, 45m, 12h, 30d or 2w. Raises ValueError."""
    found = _duration(text)
    if found is None:
        raise ValueError("a number and s, m, h, d or w, as in 30d")
    return int(found[1]) * _UNITS[found[2]] * 1000


def moment_ms(text: str, now_ms: int) -> int:
    """A time in ISO 8601, of UTC where it names no other zone, or a span that ends now. Raises ValueError."""
    if _duration(text):
        return now_ms - duration_ms(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("a time as in 2026-11-30T09:00:00Z, or a span as in 12h") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def span(ms: int) -> str:
    """How long something took or is ago, in the largest unit that says enough."""
    if ms < 0:
        return "-"
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    if ms < 2 * 3_600_000:
        return f"{ms // 60_000} min"
    if ms < 48 * 3_600_000:
        return f"{ms // 3_600_000} h"
    return f"{ms // 86_400_000} days"


def size(count: int) -> str:
    """A number of bytes for a person."""
    if count < 1024:
        return f"{count} bytes"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def clean(text: str) -> str:
    """A text on one line that does nothing to a terminal: what does not print stands as an escape."""
    if text.isprintable():
        return text
    pieces = (text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS))
    return "".join(piece if piece.isprintable() else "".join(map(_visible, piece)) for piece in pieces)


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def quoted(words: Iterable[str]) -> str:
    """Words as a shell takes them, for a terminal: what does not print stands as bytes in $'...'."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def _escaped(word: str) -> str:
    parts = []
    for character in word:
        if character in "\\'":
            parts.append("\\" + character)
        elif character.isprintable():
            parts.append(character)
        else:  # octal, of which a shell takes three digits and no more
            parts += [f"\\{byte:03o}" for byte in os.fsencode(character)]
    return "".join(parts)


def cut(text: str, limit: int) -> str:
    """A text of at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def painted(status: str, *, in_colour: bool) -> str:
    """A status, coloured on a terminal."""
    colour = _COLOURS.get(status)
    return f"\x1b[{colour}m{status}\x1b[0m" if in_colour and colour else status


def bold(text: str, *, in_colour: bool) -> str:
    """A heading."""
    return f"\x1b[1m{text}\x1b[0m" if in_colour else text


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, in_colour: bool, right: Iterable[int] = ()
) -> Iterator[str]:
    """Lines of columns that stand under each other; those in `right` end there. A status gets its colour."""
    cells = [header, *rows]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(header))]
    ends = frozenset(right)
    for number, row in enumerate(cells):
        line = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - _width(cell))
            shown = bold(cell, in_colour=in_colour) if number == 0 else painted(cell, in_colour=in_colour)
            line.append(padding + shown if column in ends else shown + padding)
        yield "  ".join(line).rstrip()


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(character) else 1 + (east_asian_width(character) in "WF") for character in text)


def pairs(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names and what they are, under each other."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return (f"{name:{width}}  {value}".rstrip() for name, value in rows)


def decoded(value: bytes) -> str:
    """Bytes off the wire as text: what is no UTF-8 stands as an escape."""
    return value.decode("utf-8", "backslashreplace")


def laid_out(value: bytes) -> Iterator[str]:
    """JSON over several lines, every string and number spelt as on the wire; other text as well as that goes.

    Works on tokens, not on values: a value of any depth, with repeated keys or 400 digits, is shown as it is.
    """
    line, depth, is_open = "", 0, False  # is_open: right behind a bracket that was opened
    for match in _token(decoded(value)):
        token = match[0]
        if token in ("]", "}"):
            depth -= 1
            if not is_open:
                yield line
                line = _indent(depth)
            line, is_open = line + token, False
            continue
        if is_open:
            yield line
            line = _indent(depth)
        is_open = token in ("[", "{")
        if is_open:
            depth += 1
        if token == ",":
            yield line + ","
            line = _indent(depth)
        elif token == ":":
            line += ": "
        else:
            line += clean(token)
    yield line


def _indent(depth: int) -> str:
    return "  " * max(0, min(depth, _MAX_INDENT))


def compact(text: str) -> bytes:
    """JSON on one line, without the white space between its tokens and with every token as it was."""
    return "".join(match[0] for match in _token(text)).encode("utf-8")
