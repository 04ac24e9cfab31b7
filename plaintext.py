"""Text that neither hides nor forges anything: cleaned on its way to the disk and on its way out of it. Pure.

A checkpoint may have been written by anybody (a repository can carry one along), and what it says is shown to a model.
So nothing invisible survives, a field of one line stays one line, and no line of a longer text looks like one of ours.
"""

import re
from typing import Final

from redact import redact

# Bidirectional controls, zero-width characters, invisible operators, fillers, tags: drawn as nothing, read by a model.
# U+200C and U+200D stay, since Persian and emoji need them.
_HIDDEN: Final = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff"
    "\uffa0\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_hidden: Final = re.compile(f"[{_HIDDEN}]")
_control: Final = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")  # without tab and what ends a line
_line_end: Final = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_escape_sequence: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erasing
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC and other strings
    r"|\x1b[ -/]*[0-~]"
)
# Joiners and variation selectors in a row say nothing, and are used to smuggle text.
_joiner_run: Final = re.compile(
    "([\u200c\u200d])[\u200c\u200d]+|([\ufe00-\ufe0f\U000e0100-\U000e01ef])[\ufe00-\ufe0f\U000e0100-\U000e01ef]+"
)
_surrogate: Final = re.compile("[\ud800-\udfff]")
_shown_escaped: Final = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029{_HIDDEN}\u200c\u200d]")
_back_quotes: Final = re.compile("`+")
_white_space: Final = re.compile(r"\s+")

# What Markdown takes for structure, in a list or a quotation too. Two lines, the second of dashes, are a heading.
_UNDERLINE: Final = r"[-=]++[ \t]*+$"
_MARK: Final = r"(?:(?:[-*+>]|\d{1,9}[.)])\s*+)"
_MARKUP: Final = r"#|```|~~~|⚠|</?[A-Za-z]|<[!?]"
# What our own lines begin with.
_OURS: Final = (
    r"Goal|Tasks|Where things stand|Next steps|Decisions & gotchas|Files touched|Recent commands|Since this checkpoint"
    r"|Resuming:|Branch `|Detached HEAD|Notes recorded by|Measured by|Read from /"
    r"|- (?:\d+ new commit|HEAD moved|Branch changed:|Also changed, not|Nothing changed:|Not checked:)"
)
_forged: Final = re.compile(rf"\s*+(?:{_UNDERLINE}|{_MARK}*+(?:{_MARKUP})|{_MARK}++\[|{_OURS})", re.IGNORECASE)
_forged_item: Final = re.compile(rf"{_UNDERLINE}|{_MARK}*+(?:{_MARKUP}|\[)")


def without_surrogates(text: str) -> str:
    """The text as UTF-8 can hold it: half a surrogate pair becomes U+FFFD."""
    return _surrogate.sub("\ufffd", text)


def clean(text: str) -> str:
    """The text without anything invisible; every kind of line end becomes a newline."""
    if text.isascii() and text.isprintable():
        return text
    text = _escape_sequence.sub("", without_surrogates(text))
    text = _control.sub("", _line_end.sub("\n", text))
    return _joiner_run.sub(lambda run: run[1] or run[2], _hidden.sub("", text))


def scrub(text: str) -> tuple[str, int]:
    """The text cleaned and then redacted, with the number of values redacted.

    In this order: a zero-width character inside a token would keep the patterns from seeing it.
    """
    return redact(clean(text))


def safe_path(path: str) -> str:
    """The path as it is, or redacted where it holds a secret: cleaning it would make it another path."""
    redacted, count = scrub(path)
    return redacted if count else path


def one_line(text: str) -> str:
    """The text with every white space run as one blank."""
    return _white_space.sub(" ", text).strip()


def cut(text: str, limit: int) -> str:
    """The text in at most `limit` characters, with an ellipsis where something is missing."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def paragraph(text: str) -> str:
    """A text of many lines none of which can be taken for a heading, a task, a fence or a line of ours."""
    lines = text.strip("\n").split("\n")
    return "\n".join("    " + line.lstrip() if _forged.match(line) else line.rstrip() for line in lines)


def item(text: str) -> str:
    """A text of one line that, behind a list mark, is neither a heading nor a task nor a warning of ours."""
    return f"\\{text}" if _forged_item.match(text) else text


def shown(path: str) -> str:
    """A path on one line: control and invisible characters are written as `\\u202e`."""
    return _shown_escaped.sub(_escaped, path)


def visible(path: str) -> str:
    """A path for a JSON answer: only what JSON would pass on raw and nobody would see is written as `\\u202e`."""
    return _hidden.sub(_escaped, without_surrogates(path))


def code_span(text: str) -> str:
    """Text in back-quotes, with a longer fence where it holds some itself."""
    runs = _back_quotes.findall(text)
    if not runs:
        return f"`{text}`"
    fence = "`" * (max(map(len, runs)) + 1)
    return f"{fence} {text} {fence}" if "`" in (text[0], text[-1]) else f"{fence}{text}{fence}"


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
