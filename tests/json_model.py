"""JSON read slowly and obviously, and values with the many ways to write them: the model that wire.py is held to."""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any, Final, NamedTuple

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
        return "".join(units).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


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
    if mark >= " " and mark not in '"\\' and not "\ud800" <= mark <= "\udfff" and chance.random() < 0.6:
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


# --------------------------------------------------------------------------------------------------- odd messages

KEYS: Final = [
    "id",
    "id",
    "method",
    "params",
    "result",
    "error",
    "jsonrpc",
    "Id",
    "METHOD",
    "Result",
    "reſult",
    "eRRor",
    "x",
]
SMALL: Final = [
    "1",
    "2",
    "1.0",
    '"1"',
    "null",
    "{}",
    "[]",
    '"tools/call"',
    '"tools\\/call"',
    '"tools/call\\u0000"',
    '"ping"',
    '"2.0"',
    '{"name":"t"}',
]
LAX: Final = [
    *SMALL,
    "NaN",
    "-Infinity",
    '"\t"',
    '"\udcff"',
    '{"\udcff":1,"a":2,"a":3}',
    "[[]]",
    '{"id":1,"result":{}}',
    "1.5",
    "true",
]


def some_message(chance: Random, scalars: list[str]) -> str:
    keys = [f'"{chance.choice(KEYS)}"' for _ in range(chance.choice([1, 3, 4, 5]))]
    keys = [key.replace("e", "\\u0065") if chance.random() < 0.1 else key for key in keys]
    return "{" + ",".join(f"{key}:{chance.choice(scalars)}" for key in keys) + "}"


def some_line(chance: Random, scalars: list[str]) -> str:
    choice = chance.random()
    if choice < 0.6:
        return some_message(chance, scalars)
    if choice < 0.7:
        return chance.choice(scalars)
    return "[" + ",".join(some_line(chance, scalars) for _ in range(chance.randrange(4))) + "]"


def is_key(key: str, name: str) -> bool:
    return key.partition("\0")[0].casefold() == name


# What turns JSON into other JSON, or into none.
PIECES: Final = [
    *'{}[],:"\\ \t\n\r\0x-.e01é\u2028',
    "NaN",
    '""',
    '"a":',
    "\\u0000",
    "\\ud800",
    "\ufeff",
    "1e5",
    "null",
    "//",
]
