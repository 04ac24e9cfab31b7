#!/usr/bin/env python3
"""Feeds what Checkpoint reads from others with input that was damaged on purpose, and holds it to its promises.

    wire      a line of either peer: nothing is raised but WireError, no tools/call and no answer goes unseen, spans
              point where they say, one meaning has one signature, and what we splice in is all that changes
    redact    a text: a redacted one comes back unchanged, only secrets go, the work grows in step with the text
    file      a session checkpoint: read, or refused with a reason that quotes nothing; what was read can be written,
              read again and shown
    git       what git prints: read as it was meant, or a GitError
    paths     a path that an agent, a file or git names: inside the project, or refused

Inputs are valid ones, made up and then damaged. A finding is shortened and printed.

    scripts/fuzz.py --quick
    scripts/fuzz.py --target wire --target redact --seconds 120 --seed 7

Where atheris can be imported, it chooses inputs by the code that they reach; `--engine random` does without. The seed
decides what is tried, and with atheris the time does too. Exit codes: 0 nothing found, 1 something found, 2 usage,
3 a target broke off, 130 interrupted.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Never

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from json_model import (  # noqa: E402
    LAX,
    PIECES,
    SMALL,
    Node,
    Num,
    Obj,
    changed,
    is_key,
    meaning,
    read,
    some_line,
    spell,
)
from session_kit import handmade  # noqa: E402

import gitfacts  # noqa: E402
import wire  # noqa: E402
import worktree  # noqa: E402
from brief import HOOK_LIMIT, Brief, render, render_for_hook  # noqa: E402
from checkpointfile import MAIN, Damaged, Folder, Newer, Valid, decode, encode, is_own_file  # noqa: E402
from compose import scrubbed  # noqa: E402
from redact import redact  # noqa: E402

STUCK_S: Final = 20.0  # of processor time, for one input
MOST_BYTES: Final = 20_000  # of an input that the slow model reads


class Chance(random.Random):
    """Draws from bytes, so that an engine that changes bytes changes choices; zeros once they are used up."""

    def __init__(self, source: bytes) -> None:
        super().__init__()
        self._source, self._at = source, 0

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        piece = self._source[self._at : self._at + size]
        self._at += size
        return int.from_bytes(piece, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)


class Target(NamedTuple):
    """What is fuzzed: how an input is made up, and what must hold of any bytes whatever."""

    draw: Callable[[random.Random], bytes]
    check: Callable[[bytes], None]


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def to_text(content: bytes) -> str:
    """Any bytes as a text, invalid ones as lone surrogates."""
    return content.decode("utf-8", "surrogateescape")


def damaged(chance: random.Random, text: str, pieces: Iterable[str]) -> str:
    """A text after some cuts, repeats, moves and insertions; often after none."""
    pieces = tuple(pieces)
    for _ in range(chance.choice([0, 0, 1, 1, 2, 5])):
        start, length = chance.randrange(len(text) + 1), chance.choice([1, 1, 2, 5, 20])
        piece, rest = text[start : start + length], text[start + length :]
        match chance.randrange(6):
            case 0:
                piece = ""
            case 1:
                piece += piece
            case 2:
                piece *= chance.choice([3, 40, 600])
            case 3:
                piece = chance.choice(pieces) + piece
            case 4:
                piece = chance.choice(pieces)
            case 5:
                at = chance.randrange(len(rest) + 1)
                piece, rest = "", rest[:at] + piece + rest[at:]
        text = text[:start] + piece + rest
    return text


# ---------------------------------------------------------------------------------------------------------------- wire


def some_value(chance: random.Random, levels: int = 4) -> Any:
    """A value for `spell`."""
    match chance.randrange(8 if levels else 4):
        case 0:
            return chance.choice([True, False, None])
        case 1:
            digits = chance.choice([0, 1, -1, 10, 9007199254740993, 10 ** chance.randrange(700)])
            return Num(digits, chance.choice([0, 0, 1, -1, 30, -30]))
        case 2 | 3:
            return "".join(chance.choice(TEXT_PIECES) for _ in range(chance.randrange(4)))
        case 4 | 5:
            return [some_value(chance, levels - 1) for _ in range(chance.randrange(4))]
        case _:
            pairs = [(chance.choice(TEXT_PIECES), some_value(chance, levels - 1)) for _ in range(chance.randrange(4))]
            return Obj(tuple(pairs))


TEXT_PIECES: Final = (
    *("a", "B", " ", '"', "\\", "/", "\0", "\n", "\r", "\u2028", "é", "e\u0301", "☃", "🎉", "\ud800", "\udc00", "ſ"),
    *("tools/call", "method", "id", "result", "_meta", "name", "serverInfo", wire.META_SERVER_INFO, wire.META_VERSION),
)
NAMES: Final = (*("name", "arguments", "_meta", "task", "inputResponses", "requestState", "Name", "ARGUMENTS"), "x\0")


def draw_line(chance: random.Random) -> bytes:
    """A line of either peer, or some."""
    match chance.randrange(5):
        case 0:
            text = some_line(chance, SMALL)
        case 1:
            text = some_line(chance, LAX)
        case 2:
            params = [("name", "t"), ("arguments", some_value(chance))]
            params += [(chance.choice(NAMES), some_value(chance)) for _ in range(chance.choice([0, 0, 1, 2]))]
            call = [("jsonrpc", "2.0"), ("id", chance.choice([Num(7, 0), "7", some_value(chance, 0)]))]
            call += [("method", chance.choice(["tools/call", "tools/list", "ping"])), ("params", Obj(tuple(params)))]
            text = spell(Obj(tuple(call)), chance)
        case 3:
            result = Obj(tuple((chance.choice(TEXT_PIECES), some_value(chance)) for _ in range(chance.randrange(5))))
            answer = [("jsonrpc", "2.0"), ("id", Num(7, 0)), (chance.choice(["result", "error"]), result)]
            text = spell(Obj(tuple(answer)), chance)
        case _:
            levels = chance.choice([3, 100, 499, 500, 501, 5_000])
            opening = chance.choice(["[", '{"params":', '{"result":[', '{"a":1,"a":'])
            text = opening * levels + "1" + ("]" if opening == "[" else "}") * levels
            text = f'{{"name":"t","arguments":{{"a":{text}}}}}'
            text = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{text}}}'
    text = damaged(chance, text, PIECES)
    if chance.random() < 0.15:  # some readers end a line at each
        text = re.sub(r"[][{}:,]", lambda mark: mark[0] + chance.choice(["", "", "\r"]), text)
    text = chance.choice(["", "", "", "\ufeff", " "]) + text + chance.choice(["\n", "\n", "\r\n", ""])
    if chance.random() < 0.2:
        text += some_line(chance, SMALL) + "\n"
    content = to_bytes(text)
    if chance.random() < 0.1:
        at = chance.randrange(len(content) + 1)
        content = content[:at] + bytes([chance.randrange(256)]) + content[at:]
    return content


def check_lines(content: bytes) -> None:
    """All that must hold of what comes out of a pipe."""
    chance = random.Random(zlib.crc32(content))
    buffer, lines, at = wire.LineBuffer(), [], 0
    while at < len(content):
        space = buffer.space()
        count = min(len(space), len(content) - at, chance.choice([1, 7, 4096, 1 << 20]))
        space[:count] = content[at : at + count]
        at += count
        lines += buffer.take(count)
    assert b"".join(lines) + buffer.rest() == content, "a byte was lost"
    assert all(line.index(b"\n") == len(line) - 1 for line in lines), "not a line"
    for line in filter(None, (*lines, buffer.rest())):
        for is_first in (True, False):
            check_downstream(line, chance, is_first=is_first)
            check_upstream(line, is_first=is_first)


class Pairs(list[tuple[str, Any]]):
    """An object as some reader gives it, with every repeated member."""

    def get(self, key: str) -> list[Any]:
        return [value for name, value in self if name == key]


LENIENT: Final = json.JSONDecoder(
    object_pairs_hook=Pairs, parse_float=str, parse_int=lambda text: ("int", text), strict=False
)


def documents(text: str) -> Iterator[Any]:
    """What a reader takes from a text that stops where it understands no more."""
    at = 0
    with contextlib.suppress(ValueError, RecursionError):
        while at < len(text):
            at += len(text) - at - len(text[at:].lstrip(" \t\r\n"))
            value, at = LENIENT.raw_decode(text, at)
            yield value


def objects(value: Any) -> Iterator[Pairs]:
    """The messages in a document: it, or those in an array and in arrays in it."""
    if isinstance(value, Pairs):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from objects(item)


def texts_of(line: bytes, *, is_first: bool) -> list[str]:
    """What a reader may take for a whole text: the line, and where it holds carriage returns, what they cut it into."""
    text = to_text(line)
    text = text.removeprefix("\ufeff") if is_first else text
    return [text, *(text.split("\r") if "\r" in text.rstrip("\r\n") else ())]


def texts_of_odd_readers(line: bytes) -> Iterator[str]:
    """What C takes for a string, and what json.loads makes of bytes."""
    yield to_text(line).partition("\0")[0]
    with contextlib.suppress(ValueError):
        yield line.decode(json.detect_encoding(line))


def messages_in(texts: Iterable[str]) -> list[Pairs]:
    return [message for text in texts for document in documents(text) for message in objects(document)]


def is_call(message: Pairs) -> bool:
    methods = [value for key, value in message if is_key(key, "method") and isinstance(value, str)]
    return any(method.partition("\0")[0] == wire.TOOLS_CALL for method in methods)


def check_downstream(line: bytes, chance: random.Random, *, is_first: bool) -> None:
    """No call unseen, spans exact, one signature for one meaning."""
    try:
        message = wire.read_downstream(line, is_first=is_first)
    except wire.WireError as error:
        check_reply(error.reply)
        return
    seen = messages_in([*texts_of(line, is_first=is_first), *texts_of_odd_readers(line)])
    assert message.call or not any(map(is_call, seen)), "a tools/call was not seen"
    assert not (message.call and message.batch), "a tools/call was seen in an array"
    if message.batch:
        pieces = wire.parts(line)
        assert len(pieces) == len(message.batch), "an array has other parts than messages"
        assert [wire.read_downstream(piece) for piece in pieces] == list(message.batch), "a part reads differently"
    json.loads(wire.request_line("own", "tools/list", {"_meta": message.meta}), parse_constant=refuse_constant)
    if len(line) > MOST_BYTES or message.batch:
        return
    text = line.decode()
    with contextlib.suppress(RecursionError):  # the model's
        node = read(text.removeprefix("\ufeff") if is_first else text)
        assert node is not None, "what is no JSON was passed"
        check_spans(message, node, text.removeprefix("\ufeff") if is_first else text, chance)


def check_reply(reply: bytes | None) -> None:
    if reply is not None:
        assert reply.index(b"\n") == len(reply) - 1, "the reply is no line"
        replies = json.loads(reply)
        for each in replies if isinstance(replies, list) else [replies]:
            assert {"jsonrpc", "id", "error"} == set(each), "the reply is no error"


def refuse_constant(name: str) -> Never:
    raise AssertionError(f"we wrote {name}")


def check_spans(message: wire.Message, node: Node, text: str, chance: random.Random) -> None:
    def span(of: Node) -> bytes:
        return text[of.start : of.end].encode()

    ids = [each for each in node.named("id") if each.kind in ("string", "number")]
    assert message.id_bytes == (span(ids[0]) if ids else b"null"), "the id's bytes"
    if message.call is None:
        return
    (params,) = node.named("params")
    assert [each.content for each in params.named("name")] == [message.call.name], "the tool's name"
    arguments = params.named("arguments")
    assert [message.call.arguments] == ([span(arguments[0])] if arguments else [None]), "the arguments' bytes"
    if not arguments or arguments[0].kind != "object":
        return
    value = value_of(arguments[0])
    if value is None:
        return
    digest = wire.signature(message.call.name, wire.parse(message.call.arguments or b""))
    assert digest == message.call.signature, "the signature of the recorded arguments"
    for other, is_same in ((value, True), (changed(value, chance), None)):
        spelt = spell(other, chance)
        again = read(spelt)
        assert again is not None
        if again.kind == "object":
            equal = meaning(again) == meaning(arguments[0])
            assert equal or not is_same
            with contextlib.suppress(ValueError):  # an exponent of over 18 digits
                digest = wire.signature(message.call.name, wire.parse(spelt.encode()))
                assert (digest == message.call.signature) == equal, f"the signature of {spelt!r}"


def value_of(node: Node) -> Any:
    """A value for `spell`; None where some number in it would be endless."""

    class Endless(Exception):
        pass

    def convert(node: Node) -> Any:
        match node.kind:
            case "object":
                return Obj(tuple((key, convert(value)) for key, value in node.content))
            case "array":
                return [convert(item) for item in node.content]
            case "number":
                mantissa, _, power = node.content.lower().partition("e")
                whole, _, fraction = mantissa.partition(".")
                if len(node.content) > 600 or len(power) > 4:
                    raise Endless
                return Num(int(whole + fraction), int(power or "0") - len(fraction))
            case "word":
                return {"true": True, "false": False, "null": None}[node.content]
        return node.content

    try:
        return convert(node)
    except Endless:
        return None


def check_upstream(line: bytes, *, is_first: bool) -> None:
    """No answer unseen, spans exact, and parts that get smaller."""
    found = wire.read_upstream(line, is_first=is_first)
    seen = messages_in(texts_of(line, is_first=is_first))
    assert found or not seen, "an object was not seen"
    if found is None:
        return
    ids = {answer.id for answer in found.answers}
    for message in seen:
        if message.get("result") or message.get("error"):
            for value in (value for key, value in message if key.casefold() == "id"):
                identity = identity_of(value)
                assert identity is None or identity in ids, f"an answer to {identity} was not seen"
    for answer in found.answers:
        assert line[answer.start :].startswith(answer.body), "a body is not where it is said to be"
        check_splices(answer.body, is_error=answer.is_error)
    if found.objects > 1:
        pieces = wire.parts(line)
        assert pieces, "a line of several objects has no parts"
        read_again = [wire.read_upstream(piece) for piece in pieces]
        assert all(piece and piece.objects == 1 for piece in read_again), "a part has parts"
        assert ids <= {answer.id for piece in read_again if piece for answer in piece.answers}, "parts lost an answer"


def identity_of(value: Any) -> wire.Id | None:
    """A string or an integer as an id; other numbers are told apart by their spelling, which is not looked into."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", value):
        return wire.Id("string", value)
    if isinstance(value, tuple) and len(value[1]) < 600:
        return wire.Id("integer", int(value[1]))
    return None


def loaded(content: bytes) -> Any:
    """What a lenient client reads, in a form that can be compared; None where it reads nothing."""
    try:
        return json.loads(to_text(content), strict=False, parse_constant=str, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return None


def check_splices(body: bytes, *, is_error: bool) -> None:
    """What we write into a result is there, and nothing else changed."""
    replayed = wire.read_upstream(wire.replay_line(b"7", body, is_error=is_error))
    assert replayed is not None
    assert replayed.answers[0].body == body, "a replay holds other bytes"
    before = loaded(body)
    typed, marked = wire.with_result_type(body), wire.with_meta(body, "checkpoint", {"sequence": 7})
    hashed, named = wire.with_value(body, "requestState", "s"), wire.with_identity(body, "N", "V", is_handshake=True)
    assert wire.with_result_type(typed) == typed
    assert wire.with_meta(marked, "checkpoint", {"sequence": 7}) == marked, "a mark was set twice"
    assert wire.with_identity(named, "N", "V", is_handshake=True) == named
    if not isinstance(before, dict):
        return
    assert loaded(typed) == {"resultType": "complete", **before}, "resultType"
    assert loaded(hashed) == {**before, **({"requestState": "s"} if "requestState" in before else {})}, "requestState"
    meta = before.get("_meta", {})
    if isinstance(meta, dict):
        assert loaded(marked) == {**before, "_meta": {**meta, "checkpoint": {"sequence": "7"}}}, "our mark"
    else:
        assert marked == body, "a _meta that is no object was changed"
    assert loaded(named) is not None, "naming ourselves made no JSON of it"


# -------------------------------------------------------------------------------------------------------------- redact


@functools.cache
def redaction_cases() -> tuple[str, ...]:
    cases = json.loads((ROOT / "tests" / "redaction-cases.json").read_text("utf-8"))["cases"]
    return tuple(case["text"].replace("‖", "") for case in cases)


MARK: Final = "«redacted»"
GLUE: Final = ("", " ", "\n", "\t", '"', "'", "`", "\\", "\\n", "=", ":", "--", "@", "/", "«", MARK, "\ud800", "{", "}")


def draw_text(chance: random.Random) -> bytes:
    texts = [damaged(chance, chance.choice(redaction_cases()), GLUE) for _ in range(chance.choice([1, 1, 2, 4]))]
    text = chance.choice(GLUE).join(texts)
    if chance.random() < 0.1:
        at = chance.randrange(len(text) + 1)
        text = (text[at : at + chance.choice([3, 10, 50])] * 2_000)[:10_000]
    return to_bytes(text)


def check_redaction(content: bytes) -> None:
    text = to_text(content)
    began = time.process_time()
    once, count = redact(text)
    spent = time.process_time() - began
    assert spent < 1 + len(text) / 5_000, f"{spent:.1f} s for {len(text)} characters"
    assert (count > 0) == (once != text), "a count without a change, or a change without a count"
    assert redact(once) == (once, 0), "a redacted text was redacted again"
    if MARK not in text:
        at = 0
        for kept in once.split(MARK):
            at = text.find(kept, at)
            assert at >= 0, f"{kept[:200]!r} was not in the text"
            at += len(kept)


# ---------------------------------------------------------------------------------------------------------------- file

FILE_PIECES: Final = (*PIECES, "é", "\u200b", '"goal":', '"version":2,', '"secret-zq9"', "[[", "1e999", "\x00", "null,")
STRINGS: Final = (
    *("", "zq9 done", "## Goal", "- [ ] x", "```", "2026-10-08T02:23:55.477Z", "0001-01-01T00:00:00+23:59", "\ud800"),
    *("9999-12-31T23:59:59-23:59", "b2ef1b5919ee5d456ea146c9362a7abc92b1e556", "--help", "\u202e", "a" * 300, "../x"),
    *("token=zq9zq9zq9zq9", "src/a.ts", "M", "??", "pending", "done", "submodule", "\x1b[2J", "⚠ x", "`` ` ``"),
)
DEEP_OR_ODD: Final[tuple[Any, ...]] = (None, True, 0, -1, 1.5, 2**70, [], {}, [[[[[]]]]], {"a\u200b": 1}, "x")
MEMBERS: Final = (
    *("version", "id", "createdAt", "updatedAt", "generator", "project", "git", "goal", "summary", "nextSteps"),
    *("decisions", "modifiedFiles", "recentCommands", "meta", "team"),
)


def draw_file(chance: random.Random) -> bytes:
    def text() -> str:
        return chance.choice(STRINGS)

    def some(make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(chance.choice([0, 1, 3, 40]))]

    def member(**members: Any) -> dict[str, Any]:
        return {key: value for key, value in members.items() if chance.random() < 0.8}

    def task() -> dict[str, Any]:
        return {"description": text(), **member(status=text(), evidence=text())}

    whole = handmade(
        createdAt=text() or "2026-10-08T02:23:55.477Z",
        git=chance.choice([None, {"branch": text(), "head": STRINGS[9], "dirty": True}]),
        goal={"primary": text(), "tasks": some(task)},
        summary="\n".join(some(text)),
        nextSteps=some(text),
        decisions=some(text),
        modifiedFiles=some(lambda: {"path": text(), **member(status=text(), note=text(), hash=text(), kind=text())}),
        recentCommands=some(lambda: {"command": text(), **member(exitCode=1, note=text(), at=text())}),
    )
    for name in ("createdAt", "updatedAt"):
        whole[name] = chance.choice([STRINGS[5], STRINGS[6], STRINGS[8]])
    for _ in range(chance.choice([0, 0, 0, 1, 3])):
        whole[chance.choice(MEMBERS)] = chance.choice(DEEP_OR_ODD)
    written = json.dumps(whole, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 2]))
    return to_bytes(chance.choice(["", "", "\ufeff"]) + damaged(chance, written, FILE_PIECES))


# What a reason may say: a place, a field, a limit; never what the file holds.
_PLACE: Final = r"(?:[a-zA-Z]+(?:\[\d+\])?(?:\.[a-zA-Z]+(?:\[\d+\])?)*: )?"
reason: Final = re.compile(
    rf"{_PLACE}(?:must be [a-z0-9 ]+(?:from 1|ISO 8601)?|is missing)|larger than [\d,]+ bytes|more than [\d,]+ values"
    r"|not UTF-8 at byte \d+|not JSON at line \d+, column \d+|nested deeper than \d+ levels|an object repeats a key"
    r"|(?:NaN|-?Infinity) is not JSON|a number (?:of over 20 digits|that is out of range)"
).fullmatch


def check_file(content: bytes) -> None:
    try:
        found = decode(content)
    except ValueError as error:
        if not reason(str(error)):
            raise AssertionError("a reason that is none of ours") from error
        expected: Any = Damaged(str(error))
    else:
        expected = found if isinstance(found, Newer) else None
        assert not isinstance(found, Newer) or found.version > 1
    root = scratch()
    (root / MAIN).write_bytes(content)
    with Folder(str(root)) as folder:
        read_back = folder.read(MAIN)
    if expected is not None:
        assert read_back == expected, "the file reads differently from its bytes"
        return
    assert isinstance(read_back, Valid)
    checkpoint: Any = read_back.checkpoint
    for key in ("createdAt", "updatedAt"):
        checkpoint[key] = checkpoint[key] or STRINGS[5]  # as each save does
    written = encode(checkpoint)
    try:
        assert decode(written) == checkpoint, "what was read is not what is written and read again"
    except ValueError as error:  # what we fill in may lead over a limit, and a save then says so
        if not str(error).startswith(("larger than", "more than")):
            raise AssertionError("cannot be read again") from error
    brief = Brief(scrubbed(checkpoint), datetime(2026, 10, 8, tzinfo=UTC), None)
    for text in (render(brief), render_for_hook(brief)):
        text.encode()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202e]", text), "the brief hides something"
    assert len(render_for_hook(brief)) <= HOOK_LIMIT


@functools.cache
def scratch() -> Path:
    """A folder for the life of the process."""
    keeper = tempfile.TemporaryDirectory(prefix="checkpoint-fuzz-")
    _kept.append(keeper)
    return Path(keeper.name).resolve()


_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []

# ----------------------------------------------------------------------------------------------------------------- git

FILE_NAMES: Final = (
    *(b"a", b"sub/b", b"new name", b"-x", b"a\nb", b"? a", b"1 M", b"# branch.oid x", b"\xff", "é".encode(), b"sub/"),
    *(b".claude-checkpoint", b".claude-checkpoint.prev", b"sub/.claude-checkpoint", b"x" * 300, b"..", b"/etc/passwd"),
)
ZEROS: Final = b"0" * 40
SHA: Final = b"b2ef1b5919ee5d456ea146c9362a7abc92b1e556"
MODES: Final = (b"000000", b"100644", b"100755", b"120000", b"160000")


def draw_status(chance: random.Random) -> bytes:
    def letters() -> bytes:
        return bytes([chance.choice(b".MADRCTU"), chance.choice(b".MADRCTU")])

    def fields(modes: int, blobs: int) -> bytes:
        state = chance.choice([b"N...", b"N...", b"SC..", b"S.MU"])
        words = [letters(), state, *(chance.choice(MODES) for _ in range(modes))]
        return b" ".join([*words, *(chance.choice([ZEROS, SHA]) for _ in range(blobs))])

    records = [b"# branch.oid " + chance.choice([b"(initial)", SHA]), b"# branch.head " + chance.choice(FILE_NAMES)]
    for _ in range(chance.choice([0, 1, 4, 4, 120])):
        name = chance.choice(FILE_NAMES)
        match chance.randrange(6):
            case 0:
                records += [b"2 %b R%d %b" % (fields(3, 2), chance.randrange(101), name), chance.choice(FILE_NAMES)]
            case 1:
                records.append(b"u %b %b" % (fields(4, 3), name))
            case 2:
                records.append(b"? " + name)
            case 3:
                records.append(chance.choice([b"! " + name, b"# stash 3", b"# news"]))
            case _:
                records.append(b"1 %b %b" % (fields(3, 2), name))
    if chance.random() < 0.3:  # what diff-tree prints
        raw = b":%b %b %b %b %b" % (MODES[1], MODES[2], SHA, SHA, chance.choice([b"M", b"D", b"T"]))
        records = [part for name in FILE_NAMES[: chance.randrange(8)] for part in (raw, name)]
    content = b"".join(record + b"\0" for record in records)
    if chance.random() < 0.5:
        content = to_bytes(damaged(chance, content.decode("latin-1"), ("\0", " ", "\n", "1 ", "u ", "2 ", "? ", "# ")))
    return content


class Echo(gitfacts.Git):
    """A git that says one thing, whatever it is asked."""

    def __init__(self, root: str, output: bytes, code: int = 0) -> None:
        super().__init__(root, {"PATH": "/nowhere"})
        self._answer = gitfacts.Answer(code, output, "failed")

    def run(self, *_: str, is_last_try: bool = False) -> gitfacts.Answer:
        return self._answer

    def _run(self, *_: Any, **__: Any) -> gitfacts.Answer:
        return self._answer


_WORDS: Final = rb"[.A-Z]{2} [NS][.CMU]{3}"
_OID: Final = rb"(?:[0-9a-f]{40}|[0-9a-f]{64})"
# The records of git-status(1), with the name as the group.
well_formed: Final = re.compile(
    rb"# branch\.oid (?:\(initial\)|%b)(?=\0)|# (?!branch\.oid )[^\0]*|! [^\0]+|\? (?P<other>[^\0]+)"
    rb"|1 %b(?: [0-7]{6}){3}(?: %b){2} (?P<usual>[^\0]+)"
    rb"|2 %b(?: [0-7]{6}){3}(?: %b){2} [RC]\d{1,3} (?P<renamed>[^\0]+)\0(?P<origin>[^\0]+)"
    rb"|u %b(?: [0-7]{6}){4}(?: %b){3} (?P<unmerged>[^\0]+)" % (_OID, _WORDS, _OID, _WORDS, _OID, _WORDS, _OID)
).match


def names_in(output: bytes) -> tuple[list[bytes], list[bytes]] | None:
    """The names in a status, and those that renamed files had; None where it is not what git prints."""
    names, origins, at, has_head = [], [], 0, False
    while at < len(output):
        found = well_formed(output, at)
        if found is None or output[found.end() : found.end() + 1] != b"\0":
            return None
        groups = found.groupdict()
        has_head |= found[0].startswith(b"# branch.oid ")
        names += [name for kind, name in groups.items() if name is not None and kind != "origin"]
        origins += [groups["origin"]] if groups["origin"] else []
        at = found.end() + 1
    return (names, origins) if has_head else None


def check_status(content: bytes) -> None:
    root = str(tree())
    git = Echo(root, content)
    git.__dict__["place"] = ("", "sha1")
    expected = names_in(content)
    try:
        snapshot = gitfacts.take_snapshot(git)
    except gitfacts.GitError:
        assert expected is None, "what git prints was refused"
    else:
        if expected is not None:
            names, origins = ({os.fsdecode(name) for name in each} for each in expected)
            texts = [change.path for change in snapshot.changes]
            assert names.issuperset(texts), "a name that git did not print"
            assert len(texts) == len(set(texts)), "a path stands there twice"
            assert origins.issuperset(change.origin for change in snapshot.changes if change.origin), "an origin"
            assert not any(is_own_file(path) for path in texts), "our own file is listed"
        gitfacts.collapse(snapshot)
    for ask in (
        lambda: gitfacts.committed_since(git, SHA.decode()),
        lambda: gitfacts.history(git, SHA.decode()),
        lambda: gitfacts.history(Echo(root, content, 1), SHA.decode()),
        lambda: gitfacts.submodule_head(git, "sub"),
        lambda: gitfacts.tracked(git, ["a", "é"]),
        lambda: gitfacts.not_ignored(git, ["a", "é"]),
        lambda: Echo(root, content).place,
        lambda: gitfacts.Git.run(Echo(root, content), "status"),
    ):
        with contextlib.suppress(gitfacts.GitError):
            ask()


# --------------------------------------------------------------------------------------------------------------- paths

OUTSIDE: Final = b"what no answer may depend on\n"
PARTS: Final = (
    *("a", "A", "sub", "b", "..", "..", ".", "", ".git", ".GIT", "config", "out", "in", "loop", "up", "é", "e\u0301"),
    *("\0", "x" * 300, "~", " ", "\udcff", "\ud800", "secret", ".claude-checkpoint", "fifo", "git"),
)


@functools.cache
def tree() -> Path:
    """A project with links to everywhere; nothing in it is changed."""
    root = scratch() / "project"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (scratch() / "secret").write_bytes(OUTSIDE)
    for name in ("a", "sub/b", ".git/config", "é", "new name", "-x"):
        (root / name).write_text(name, "utf-8")
    links = {"out": "..", "in": "sub", "loop": "loop", "up": "sub/..", "git": ".git", "sub/out": "../.."}
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "fifo")
    return root


def draw_path(chance: random.Random) -> bytes:
    parts = [chance.choice(PARTS) for _ in range(chance.choice([1, 2, 3, 6]))]
    start = chance.choice(["", "", "", "/", f"{tree()}/", f"{scratch()}/"])
    return to_bytes(damaged(chance, start + "/".join(parts), ("/", "//", "/../", ".", "\0", "~")))


def check_path(content: bytes) -> None:
    path, root = to_text(content), str(tree())
    secret = worktree.Hasher(str(scratch())).state("secret").blob
    assert secret is not None
    for each in filter(None, (path, worktree.place_named(root, path))):
        for object_format in ("sha1", "sha256"):
            assert worktree.Hasher(root).state(each, object_format).blob != secret, "a file outside was read"
        worktree.changed_at_ms(root, each)
        worktree.is_same_file(root, each, "a")
        if worktree.is_inside(root, each):
            real = os.path.realpath(os.path.join(root, os.path.dirname(each.rstrip("/"))))
            assert worktree.is_below(real, root), "it leaves the project"
    place = worktree.place_named(root, path)
    if place is not None:
        place.encode()
        assert worktree.is_inside(root, place), "a place outside"
        assert not {part.lower() for part in place.split("/")} & {"", ".", "..", ".git"}, "a place in .git"
        assert worktree.place_named(root, place) == place, "a place that is another place"


# -------------------------------------------------------------------------------------------------------------- engine

TARGETS: Final = {
    "wire": Target(draw_line, check_lines),
    "redact": Target(draw_text, check_redaction),
    "file": Target(draw_file, check_file),
    "git": Target(draw_status, check_status),
    "paths": Target(draw_path, check_path),
}


class Stuck(Exception):
    """One input took too long."""


def fault_of(target: Target, content: bytes) -> BaseException | None:
    """What is wrong with the answer to an input."""
    signal.setitimer(signal.ITIMER_PROF, STUCK_S)
    try:
        target.check(content)
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def place_of(fault: BaseException) -> tuple[type, str, int]:
    """What tells one fault from another: its kind and the line of ours that raised it."""
    frames = traceback.extract_tb(fault.__traceback__)
    frame = next((each for each in reversed(frames) if each.filename.startswith(str(ROOT))), frames[-1])
    return type(fault), frame.filename, frame.lineno or 0


def shortened(target: Target, content: bytes, fault: BaseException, patience_s: float = 10.0) -> bytes:
    """An input that is as short as can be found in that time and has the same fault."""
    place, end = place_of(fault), time.monotonic() + patience_s
    size = len(content) // 2
    while size:
        at = 0
        while at < len(content) and time.monotonic() < end:
            shorter = content[:at] + content[at + size :]
            other = fault_of(target, shorter)
            if other is not None and place_of(other) == place:
                content = shorter
            else:
                at += size
        size //= 2
    return content


def told(target: Target, content: bytes, fault: BaseException) -> str:
    """A finding, for whoever mends it."""
    short = shortened(target, content, fault)
    fault = fault_of(target, short) or fault
    return f"{''.join(traceback.format_exception(fault)[-12:])}input: {short[:2_000]!r}"


def stop_when_stuck() -> None:
    def stop(*_: object) -> Never:
        raise Stuck(f"{STUCK_S:.0f} s for one input")

    signal.signal(signal.SIGPROF, stop)


class Found(NamedTuple):
    """What one target came to."""

    inputs: int
    seconds: float
    finding: str | None


def fuzz(name: str, seconds: float, seed: int, tick: Callable[[int], None]) -> Found:
    """Draws and checks until the time is over or something is found."""
    target, began, inputs = TARGETS[name], time.monotonic(), 0
    while time.monotonic() - began < seconds:
        content = target.draw(random.Random(f"{seed} {name} {inputs}"))
        inputs += 1
        if fault := fault_of(target, content):
            return Found(inputs, time.monotonic() - began, told(target, content, fault))
        if inputs % 64 == 0:
            tick(inputs)
    return Found(inputs, time.monotonic() - began, None)


# atheris counts the branches of modules that are imported under it, and its loop never returns: hence a process.
GUIDED: Final = """
import atheris, sys
with atheris.instrument_imports(include=["wire", "redact", "plaintext", "checkpointfile", "gitfacts", "worktree"]):
    import wire, redact, plaintext, checkpointfile, gitfacts, worktree
import fuzz
fuzz.guided(atheris, *sys.argv[1:])
"""


def guided(atheris: Any, name: str, seconds: str, seed: str) -> None:
    """The process that atheris drives: prints one JSON line, what it came to."""
    target, began, inputs = TARGETS[name], time.monotonic(), 0
    stop_when_stuck()

    def one(source: bytes) -> None:
        nonlocal inputs
        inputs += 1
        content = source[1:] if source[:1] == b"\0" else target.draw(Chance(source))
        fault = fault_of(target, content)
        if fault or time.monotonic() - began > float(seconds):
            finding = told(target, content, fault) if fault else None
            print(json.dumps(Found(inputs, time.monotonic() - began, finding)), flush=True)
            for keeper in _kept:
                keeper.cleanup()
            os._exit(0)

    atheris.Setup([name, f"-seed={int(seed) % (1 << 31) + 1}", "-timeout=0", "-verbosity=0", "-rss_limit_mb=0"], one)
    atheris.Fuzz()


def fuzz_with_atheris(name: str, seconds: float, seed: int, tick: Callable[[int], None]) -> Found:
    tick(0)
    paths = [str(ROOT / "scripts"), str(ROOT), str(ROOT / "tests")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{GUIDED}"
    words = [sys.executable, "-c", program, name, str(seconds), str(seed)]
    ended = subprocess.run(words, capture_output=True, check=False)
    try:
        return Found(*json.loads(ended.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        raise RuntimeError(f"atheris ended with {ended.returncode}\n{to_text(ended.stderr)[-2_000:]}") from None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="for each target (%(default)g)")
    parser.add_argument("--quick", action="store_true", help="2 seconds for each target")
    parser.add_argument("--seed", type=int, metavar="S", help="repeat the choices of an earlier run")
    parser.add_argument("--engine", choices=("auto", "atheris", "random"), default="auto", help="(%(default)s)")
    return parser


def main() -> int:
    """Runs and prints; the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    has_atheris = importlib.util.find_spec("atheris") is not None
    if args.engine == "atheris" and not has_atheris:
        parser.error("atheris cannot be imported: pip install atheris")
    engine = "atheris" if has_atheris and args.engine != "random" else "random"
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    seconds = 2.0 if args.quick else args.seconds
    print(f"seed {seed}, engine {engine}\n\n{'target':10}  {'inputs':>10}  {'seconds':>7}  found", flush=True)
    stop_when_stuck()
    findings, broken = 0, 0
    for name in args.target or TARGETS:

        def tick(inputs: int, name: str = name) -> None:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{name}: {inputs:,} inputs")
                sys.stderr.flush()

        try:
            found = (fuzz_with_atheris if engine == "atheris" else fuzz)(name, seconds, seed, tick)
        except RuntimeError as error:
            broken += 1
            print(f"fuzz.py: {name}: broken off (seed {seed}): {error}", file=sys.stderr)
            continue
        finally:
            if sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")
        verdict = "SOMETHING" if found.finding else "nothing"
        print(f"{name:10}  {found.inputs:>10,}  {found.seconds:>7.0f}  {verdict}", flush=True)
        if found.finding:
            findings += 1
            print(f"\n{found.finding}\n", flush=True)
    return 1 if findings else 3 if broken else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("fuzz.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
