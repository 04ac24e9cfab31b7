"""What wire.py promises: nothing that could be a `tools/call` slips by, no answer goes unseen, no byte is changed.

The property tests compare it with a slow, obvious JSON reader, which stands in this file.
"""

import hashlib
import json
import re
import sys
import tracemalloc
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wire
from wire import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, Id, LineBuffer, Message, WireError

DEEP: Final = 100_000
LONG: Final = 1_000_000
BOM: Final = b"\xef\xbb\xbf"
prop: Final = settings(derandomize=True, deadline=None, max_examples=250)


def call(arguments: str | bytes = "{}", request_id: str = "1", rest: str = "") -> bytes:
    given = arguments if isinstance(arguments, bytes) else arguments.encode()
    head = f'{{"jsonrpc":"2.0","id":{request_id},"method":"tools/call","params":{{"name":"t"{rest},"arguments":'
    return head.encode() + given + b"}}\n"


def accepted_call(line: bytes) -> wire.ToolCall:
    found = wire.read_downstream(line).call
    assert found is not None
    return found


def refusal(line: bytes, *, is_first: bool = False) -> tuple[int, Any]:
    """Code and id of the one error that a refused line is answered with."""
    with pytest.raises(WireError) as raised:
        wire.read_downstream(line, is_first=is_first)
    assert raised.value.reply is not None
    return error_of(raised.value.reply)


def error_of(reply: bytes) -> tuple[int, Any]:
    assert reply.index(b"\n") == len(reply) - 1
    answer = json.loads(reply)
    assert set(answer) == {"jsonrpc", "id", "error"}
    assert answer["jsonrpc"] == "2.0"
    assert isinstance(answer["error"]["message"], str)
    return answer["error"]["code"], answer["id"]


# ----------------------------------------------------------------------------------------------------------- the model


class Node(NamedTuple):
    """A value as the model reads it; the content of an object is a list of (key, node)."""

    kind: str
    content: Any
    start: int
    end: int

    def named(self, key: str) -> "list[Node]":
        return [node for name, node in self.content if name == key] if self.kind == "object" else []


class NotJson(Exception):
    pass


class Reader:
    """Recursive descent, one character after the other: slow and obvious. `lenient` reads what our client may read."""

    NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
    ESCAPES: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

    def __init__(self, text: str, *, lenient: bool = False) -> None:
        self.text, self.at, self.lenient = text, 0, lenient

    def whole(self) -> Node:
        node = self.value()
        self.space()
        if self.at != len(self.text):
            raise NotJson
        return node

    def space(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t", "\n", "\r"):
            self.at += 1

    def takes(self, mark: str) -> bool:
        self.space()
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def needs(self, mark: str) -> None:
        if not self.takes(mark):
            raise NotJson

    def value(self) -> Node:
        self.space()
        start = self.at
        if self.takes("{"):
            return Node("object", list(self.series("}", self.member)), start, self.at)
        if self.takes("["):
            return Node("array", list(self.series("]", self.value)), start, self.at)
        if self.text.startswith('"', start):
            return Node("string", self.string(), start, self.at)
        for word in ("true", "false", "null", *(("NaN", "Infinity", "-Infinity") if self.lenient else ())):
            if self.takes(word):
                return Node("word", word, start, self.at)
        number = self.NUMBER.match(self.text, start)
        if number is None:
            raise NotJson
        self.at = number.end()
        return Node("number", number[0], start, self.at)

    def series(self, end: str, item: Any) -> Iterator[Any]:
        if self.takes(end):
            return
        yield item()
        while not self.takes(end):
            self.needs(",")
            yield item()

    def member(self) -> tuple[str, Node]:
        self.space()
        key = self.string()
        self.needs(":")
        return key, self.value()

    def string(self) -> str:
        self.needs('"')
        units = []  # UTF-16, so that two escapes may make one character
        while not self.text.startswith('"', self.at):
            mark = self.text[self.at : self.at + 1]
            self.at += 1
            if mark == "" or (mark < " " and not self.lenient):
                raise NotJson
            if mark == "\\":
                mark = self.text[self.at : self.at + 1]
                self.at += 1
                if mark == "u":
                    digits = self.text[self.at : self.at + 4]
                    if not re.fullmatch("[0-9a-fA-F]{4}", digits):
                        raise NotJson
                    self.at += 4
                    mark = chr(int(digits, 16))
                elif mark in self.ESCAPES:
                    mark = self.ESCAPES[mark]
                else:
                    raise NotJson
            units.append(mark)
        self.at += 1
        text = "".join(units)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass") if joins(text) else text


def joins(text: str) -> bool:
    return re.search("[\ud800-\udbff][\udc00-\udfff]", text) is not None


def read(text: str, *, lenient: bool = False) -> Node | None:
    try:
        return Reader(text, lenient=lenient).whole()
    except NotJson:
        return None


def messages(node: Node) -> list[Node]:
    """The objects of a line: itself, or those in an array and in arrays in it."""
    if node.kind == "array":
        return [inner for item in node.content for inner in messages(item)]
    return [node] if node.kind == "object" else []


def meaning(node: Node) -> Any:
    """What the contract compares: no key order, no spelling, but every repeated key and every digit."""
    if node.kind == "object":
        keys = sorted({key for key, _ in node.content})
        return "object", tuple((key, tuple(meaning(value) for value in node.named(key))) for key in keys)
    if node.kind == "array":
        return "array", tuple(meaning(item) for item in node.content)
    return node.kind, Fraction(node.content) if node.kind == "number" else node.content


# ------------------------------------------------------------------------------------------------- values and spelling


@dataclass(frozen=True)
class Num:
    digits: int
    power: int


@dataclass(frozen=True)
class Obj:
    members: tuple[tuple[str, Any], ...]


ALPHABET: Final = 'aB1 "\\/\b\n\t\0\x7fé\u0301\u2028ſ☃🎉\ud800'
texts: Final = st.text(ALPHABET, max_size=5)
numbers: Final = st.builds(Num, st.integers() | st.integers(-12, 12), st.integers(-30, 30) | st.just(0))
leaves: Final = st.none() | st.booleans() | numbers | texts
values: Final = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.builds(Obj, st.lists(st.tuples(texts, inner), max_size=4).map(tuple))
    ),
    max_leaves=10,
)
seeds: Final = st.integers(0, 2**32).map(Random)


def spell(value: Any, chance: Random) -> str:
    """One of the many ways to write a value."""

    def space() -> str:
        return chance.choice(["", "", "", " ", "\t "])

    if isinstance(value, Num):
        return spell_number(value, chance)
    if isinstance(value, str):
        return '"' + "".join(spell_character(mark, chance) for mark in value) + '"'
    if isinstance(value, list):
        items = [space() + spell(item, chance) + space() for item in value]
        return "[" + (",".join(items) or space()) + "]"
    if isinstance(value, Obj):
        keys = [key for key, _ in value.members]
        chance.shuffle(keys)
        left = {key: [member for name, member in value.members if name == key] for key in keys}
        pairs = [spell(key, chance) + space() + ":" + space() + spell(left[key].pop(0), chance) for key in keys]
        return "{" + (",".join(space() + pair + space() for pair in pairs) or space()) + "}"
    return json.dumps(value)


def spell_number(number: Num, chance: Random) -> str:
    sign = "-" if number.digits < 0 or (number.digits == 0 and chance.random() < 0.3) else ""
    zeros = chance.choice([0, 0, 1, 3])
    digits, power = str(abs(number.digits)) + "0" * zeros, number.power - zeros
    if number.digits == 0:
        digits, power = "0", chance.choice([0, 5, -5])
    elif chance.random() < 0.4:
        cut = chance.randrange(len(digits))
        power += len(digits) - cut
        digits = f"{digits[:cut] or '0'}.{digits[cut:]}"
    elif power >= 0 and chance.random() < 0.5:
        digits, power = digits + "0" * power, 0
    if power == 0 and chance.random() < 0.7:
        return sign + digits
    return f"{sign}{digits}{chance.choice('eE')}{power:{chance.choice(['', '+', '+03'])}}"


def spell_character(mark: str, chance: Random) -> str:
    short = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\n": "\\n", "\t": "\\t"}
    if mark >= " " and mark not in '"\\\ud800' and chance.random() < 0.6:
        return mark
    if mark in short and chance.random() < 0.5:
        return short[mark]
    units = mark.encode("utf-16-be", "surrogatepass")
    style = chance.choice(["\\u{:02x}{:02x}", "\\u{:02X}{:02X}"])
    return "".join(style.format(*units[at : at + 2]) for at in range(0, len(units), 2))


def changed(value: Any, chance: Random) -> Any:
    """A neighbour of a value; now and then it is the same after all."""
    if isinstance(value, Num):
        return chance.choice([Num(value.digits * 10 + 1, value.power - 1), Num(-value.digits, value.power), str(value)])
    if isinstance(value, str):
        return chance.choice([value + "x", value[1:], unicodedata.normalize("NFC", value), None])
    if isinstance(value, list):
        at = chance.randrange(len(value) + 1)
        middle = [changed(item, chance) for item in value[at : at + 1]]
        return chance.choice([value[:at] + middle + value[at + 1 :], value[::-1], [value], Obj((("", value),))])
    if isinstance(value, Obj):
        at = chance.randrange(len(value.members) + 1)
        before, here, after = value.members[:at], value.members[at : at + 1], value.members[at + 1 :]
        other = tuple((key, changed(member, chance)) for key, member in here)
        moved = tuple((key + "x", member) for key, member in here)
        return Obj(before + chance.choice([other, moved, here + here, other + here, ()]) + after)
    return chance.choice([True, False, None, Num(0, 0), "null"])


# --------------------------------------------------------------------------------------------------------- LineBuffer


def feed(buffer: LineBuffer, data: bytes, size: int) -> list[bytes]:
    """The lines that come out when no read brings more than `size` bytes."""
    lines = []
    while data:
        with buffer.space() as space:
            count = min(size, len(space), len(data))
            assert count
            space[:count] = data[:count]
        data = data[count:]
        lines += buffer.take(count)
    return lines


STREAM: Final = b'{"a":1}\r\n\n  \n\xff\xfe\0\r\r\n"\xe2\x80\xa8\xc2\x85\x0b\x0c\x1c"\n{"last":"\xc3\xa9"'


@pytest.mark.parametrize("split", range(len(STREAM) + 1))
def test_a_line_ends_at_its_newline_wherever_the_reads_are_split(split: int) -> None:
    buffer = LineBuffer()
    lines = feed(buffer, STREAM[:split], len(STREAM)) + feed(buffer, STREAM[split:], len(STREAM))
    assert lines == STREAM.splitlines(keepends=True)[:0] + [part + b"\n" for part in STREAM.split(b"\n")[:-1]]
    assert buffer.rest() == STREAM.split(b"\n")[-1]
    assert len(buffer) == len(buffer.rest())


def test_lines_may_come_one_byte_at_a_time() -> None:
    buffer = LineBuffer()
    assert feed(buffer, STREAM, 1) == [part + b"\n" for part in STREAM.split(b"\n")[:-1]]
    assert buffer.rest() == STREAM.split(b"\n")[-1]


@prop
@given(st.lists(st.integers(0, 200_000), max_size=5), st.sampled_from([1000, 4096, 65535, 65536, 65537, 1 << 20]))
def test_lines_of_any_length_come_out_whole_and_in_order(lengths: list[int], size: int) -> None:
    data = b"".join(b"%d" % (at % 10) * length + b"\n" for at, length in enumerate(lengths))
    buffer = LineBuffer()
    assert b"".join(lines := feed(buffer, data + b"rest", size)) == data
    assert [len(line) for line in lines] == [length + 1 for length in lengths]
    assert buffer.rest() == b"rest"


@pytest.mark.parametrize("around", [65536, 131072, 2 << 20])
def test_lines_around_the_size_of_the_buffer_are_not_merged(around: int) -> None:
    lines = [b"x" * (around + more - 1) + b"\n" for more in (-1, 0, 1)]
    assert feed(LineBuffer(), b"".join(lines), 1 << 30) == lines


def test_the_memory_of_a_very_long_line_is_given_back() -> None:
    buffer = LineBuffer()
    usual = len(buffer.space())
    assert feed(buffer, b"x" * 5_000_000, 1 << 20) == []
    assert len(buffer.space()) > usual
    assert feed(buffer, b"x\nrest", 1 << 20) == [b"x" * 5_000_001 + b"\n"]
    assert len(buffer.space()) == usual - len(b"rest")
    assert buffer.rest() == b"rest"


# ------------------------------------------------------------------------------------------- downstream: what is JSON

NOT_JSON: Final = [
    *(b"", b" ", b"\r\n", b"1", b"null", b'"x"', b"true", b"x", b"{", b"[", b"}", b"]", b"[}", b"{]"),
    *(b"[1,]", b"[,1]", b"[1 2]", b"[1]]", b"[1][2]", b"[[1]", b"[,]"),
    *(b'{"a":1,}', b'{,"a":1}', b'{"a"}', b'{"a":}', b'{"a":1 "b":2}', b'{"a",1}', b"{1:2}", b"{'a':1}", b"{a:1}"),
    *(b'{"a":1}{"b":2}', b'{"a":1} x', b'{"a":1}\0', b'x{"a":1}', b'{"a":1}//', b'{"a":/**/1}'),
    *(b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b"[NaN]", b'{"params":{"a":NaN}}', b'{"params":[{"a":NaN}]}'),
    *(b'{"a":01}', b'{"a":-}', b'{"a":+1}', b'{"a":.5}', b'{"a":1.}', b'{"a":1e}', b'{"a":0x1}', b'{"a":True}'),
    *(b'{"a":"\\x"}', b'{"a":"\\u12"}', b'{"a":"\\u12g4"}', b'{"a":"x}', b'{"a":"\\"}', b'{"a":"\\', b'{"a\\x":1}'),
    *(b'{"a":"\0"}', b'{"a":"\t"}', b'{"a":"\x1f"}', b'{"a\t":1}', b'{"a\0":1}', b'{"a":"\r"}'),
    *(b'{"a":\xc2\xa01}', b'{"a":\xe2\x80\xa81}', b'{"a":\x0c1}', b'{"a":\x0b1}', b"\xe2\x80\xa8{}", b"{}\xc2\x85"),
    *(b'{"a":"\xff"}', b'{"a":"\xc3\x28"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\xc0\xaf"}', b'{"a":"\xc3"}', b"\xfe{}"),
    *(BOM + b"{}", b"\xff\xfe{\0}\0", b"{\0}\0", b"+AHs-"),
    *(call('{"a":NaN}'), call('{"a":1,}'), call('{"a":"\t"}'), call('{"a":01}'), call(b'{"a":"\xff"}')),
]


@pytest.mark.parametrize("line", NOT_JSON)
def test_a_line_that_is_not_json_is_answered_with_a_parse_error(line: bytes) -> None:
    assert refusal(line) == (PARSE_ERROR, None)


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":"' + b'\\"' * 2_500_000,
        b'{"a":"' + b"\\" * 5_000_001 + b'"}',
        b'{"' + b"a" * 5_000_000,
        b'{"a":' + b" " * 5_000_000,
        b'{"a":1' + b"0" * 5_000_000,
        b'{"a":"' + b"\xc3\xa9" * 2_500_000,
        b'{"a":[' + b'"",' * 1_600_000,
        b"[" + b" " * 5_000_000 + b"}",
    ],
    ids=["escaped quotes", "backslashes", "key", "space", "number", "text", "items", "array"],
)
def test_five_megabytes_that_never_end_are_refused(line: bytes) -> None:
    assert refusal(line) == (PARSE_ERROR, None)


@pytest.mark.parametrize("line", [b'["' * 2_500_000, b'[{"' * DEEP, b'{"":' * DEEP, b"[" * 5_000_000, b"[{" * DEEP])
def test_endless_openings_are_refused(line: bytes) -> None:
    assert refusal(line)[1] is None


def test_a_byte_order_mark_may_come_first_and_nowhere_else() -> None:
    line = BOM + call('{"é":1}'.encode())
    found = wire.read_downstream(line, is_first=True).call
    assert found is not None
    assert found.arguments == '{"é":1}'.encode()
    assert refusal(line) == (PARSE_ERROR, None)
    assert refusal(BOM + line, is_first=True) == (PARSE_ERROR, None)
    assert refusal(b" " + line, is_first=True) == (PARSE_ERROR, None)
    assert wire.read_downstream(call(), is_first=True).call is not None


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"", b" \t\r\n", b"\r\r\n"])
def test_the_end_of_a_line_is_not_part_of_anything(end: bytes) -> None:
    line = call('{"k":"v"}').removesuffix(b"\n")
    assert wire.read_downstream(b" \t" + line + end) == wire.read_downstream(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":\r{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}\r}\n',
        call().replace(b",", b",\r", 1),
        b'[\r{"jsonrpc":"2.0","id":1,"method":"tools/call"}\r]',
        b'{\r"a":1}',
        b'{"a":1\r}\r\n',
    ],
)
def test_a_carriage_return_between_tokens_is_refused(line: bytes) -> None:
    assert refusal(line) == (INVALID_REQUEST, None)


@pytest.mark.parametrize("text", ["\\r", "\u2028", "\u2029", "\x85", "\x7f", "\\u000d\\u000a", "\\u0000", "\ufeff", "🎉"])
def test_what_some_line_readers_split_at_is_only_text_inside_a_string(text: str) -> None:
    arguments = f'{{"s":"{text}"}}'.encode()
    assert accepted_call(call(arguments)).arguments == arguments


# ------------------------------------------------------------------------------------------------- downstream: nesting


def nested(levels: int, core: str = "") -> str:
    return "[" * levels + core + "]" * levels


@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"a":1,"a":', "}"), ('[{"[{":', "}]"), ('["\\"[",', "]")]
)
def test_500_levels_pass_and_501_do_not(opening: str, closing: str) -> None:
    levels = 500 // (1 + opening.count("[{"[0:1] + "{") * 0 + (opening == '[{"[{":'))
    inside = opening * levels + "1" + closing * levels
    outside = f'{{"x":{inside}}}'
    assert wire.read_downstream(inside.encode()).call is None
    assert refusal(outside.encode()) == (INVALID_REQUEST, None)
