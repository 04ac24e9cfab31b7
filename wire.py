"""JSON-RPC lines as bytes: split, scanned, compared and written. Knows no file, clock or event loop.

Two readers share one scanner. `read_downstream` is strict: a line that some parser upstream could take for a
`tools/call` which we did not see must not pass, so whatever two parsers could read differently is refused.
`read_upstream` is lenient: whatever some client could take for an answer must be seen, so it accepts more than JSON.

Spans are kept as the exact bytes of the line. Values are looked at, never written back: numbers, key order, escapes and
invalid UTF-8 of a peer survive because nothing is ever re-encoded.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import accumulate
from json.scanner import make_scanner
from operator import methodcaller
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:
    from _hashlib import HASH

# Source: https://www.jsonrpc.org/specification#error_object
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

INITIALIZE: Final = "initialize"
INITIALIZED: Final = "notifications/initialized"
LIST_CHANGED: Final = "notifications/tools/list_changed"
TOOLS_CALL: Final = "tools/call"
TOOLS_LIST: Final = "tools/list"
CANCELLED: Final = "notifications/cancelled"
META_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
META_CLIENT_INFO: Final = "io.modelcontextprotocol/clientInfo"
META_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"

MAX_DEPTH: Final = 500  # the C scanner and encoder recurse; the default recursion limit is 1,000
MAX_CALL_BYTES: Final = 900_000_000  # SQLite's limit for one value is 10^9
MAX_EXPONENT_DIGITS: Final = 18  # an exponent is compared as an integer
_MAX_INT_DIGITS: Final = 640  # int() takes this many under every setting of sys.set_int_max_str_digits

_BOM: Final = "\ufeff"
_ENVELOPE: Final = frozenset({"jsonrpc", "id", "method", "params", "result", "error"})
_CALL_PARAMS: Final = frozenset({"name", "arguments", "_meta", "task", "inputResponses", "requestState"})


class WireError(Exception):
    """A line from downstream that is not passed on; `reply` is the line that answers it, None where nothing may."""

    def __init__(self, message: str, reply: bytes | None) -> None:
        super().__init__(message)
        self.reply = reply


class Id(NamedTuple):
    """A JSON-RPC id by JSON type and value, so that 1 and "1" differ and 1 and 1.0 do not."""

    kind: str  # "integer", "string", or "fraction" for any other number
    value: int | str

    def as_json(self) -> bytes:
        """One spelling of it."""
        return (json.dumps(self.value) if self.kind == "string" else str(self.value)).encode("ascii")


class ToolCall(NamedTuple):
    """What a `tools/call` asks for."""

    name: str  # may hold a lone surrogate, which no UTF-8 can
    arguments: bytes | None  # the member's bytes, None where it is absent
    signature: str  # SHA-256, hexadecimal
    meta: Mapping[str, Any]
    request_state: str | None
    is_next_leg: bool  # it brings requestState or inputResponses
    wants_task: bool


class Message(NamedTuple):
    """One message from downstream, as far as the relay looks into it. An array has nothing but its `batch`."""

    method: str | None = None
    id: Id | None = None
    id_bytes: bytes = b"null"
    is_modern: bool = False  # of the 2026-07-28 era
    meta: Mapping[str, Any] = {}
    call: ToolCall | None = None
    cancels: Id | None = None
    task_id: str | None = None  # of a tasks/* request
    params: Mapping[str, Any] = {}  # of initialize and tools/list
    batch: tuple["Message", ...] = ()  # the objects in an array


class Answer(NamedTuple):
    """What one object in a line from upstream says about one id."""

    id: Id
    is_error: bool
    body: bytes  # the bytes of `result` or `error`
    members: Mapping[str, Any]  # the values in it where it is an object, TOO_DEEP for one that was only skipped
    start: int  # where `body` begins in the line


class Upstream(NamedTuple):
    """One line from upstream: its answers, and the requests and notifications in it as (method, id)."""

    answers: tuple[Answer, ...] = ()
    methods: tuple[tuple[str, Id | None], ...] = ()
    objects: int = 1  # how many objects it holds, on its own or in arrays; where there are several, `parts` gives each
    cancels: tuple[Id, ...] = ()  # questions of its own that it takes back


# --------------------------------------------------------------------------------------------------------------- lines


class LineBuffer:
    """Turns reads of any size into whole lines, split on byte 0x0A and on nothing else.

    Read into `space()`, then `take(n)` gives the lines that the n new bytes complete, each with its 0x0A. The memory is
    one bytearray, replaced by a larger one for a longer line and by a small one after it; a read never allocates.
    """

    _USUAL: Final = 65536  # a default pipe; larger reads cost an mmap each
    _KEPT: Final = 2 << 20  # a buffer up to this size is kept for the next long line

    def __init__(self) -> None:
        self._replace(self._USUAL)
        self._filled = 0

    def _replace(self, size: int) -> None:
        self._memory = bytearray(size)
        self._view = memoryview(self._memory)

    def __len__(self) -> int:
        return self._filled

    def space(self) -> memoryview:
        """Memory to read into, until `take`."""
        if not self._filled:
            return self._view
        if self._filled == len(self._memory):
            full = self._memory
            self._replace(2 * len(full))
            self._memory[: self._filled] = full
        return self._view[self._filled :]

    def take(self, count: int) -> list[bytes]:
        """Lines completed by the `count` bytes that were just read into `space()`."""
        searched, self._filled = self._filled, self._filled + count
        end = self._memory.find(b"\n", searched, self._filled)
        if end < 0:
            return []
        lines, start = [], 0
        while end >= 0:
            lines.append(bytes(self._view[start : end + 1]))
            start = end + 1
            end = self._memory.find(b"\n", start, self._filled)
        rest = bytes(self._view[start : self._filled])
        if len(self._memory) > self._KEPT and len(rest) < self._USUAL:
            self._replace(self._USUAL)
        if rest:
            self._memory[: len(rest)] = rest
        self._filled = len(rest)
        return lines

    def rest(self) -> bytes:
        """The unterminated last line at the end of input."""
        return bytes(self._memory[: self._filled])


# ------------------------------------------------------------------------------------------------------------- scanner


class _Number:
    """A number that Python's int does not hold exactly and cheaply: a fraction, an exponent, over 640 digits."""

    __slots__ = ("literal",)

    def __init__(self, literal: str) -> None:
        self.literal = literal

    def __repr__(self) -> str:
        return self.literal


class _Pairs(list[Any]):
    """An object that repeats a key, which no dict can hold, as keys and values in turn.

    The order of keys does not count, that of one key's values does. Infinity stands first: it marks the list, as no
    value from downstream holds it.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__([math.inf])
        for pair in sorted(pairs, key=lambda pair: pair[0]):
            self.extend(pair)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Pairs:
    members = dict(pairs)
    return members if len(members) == len(pairs) else _Pairs(pairs)


def _integer(literal: str) -> int | _Number:
    return int(literal) if len(literal) <= _MAX_INT_DIGITS else _Number(literal)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_Scan = Callable[[str, int], tuple[Any, int]]


def _scanner(**hooks: Any) -> _Scan:
    """Reads the value at an index, gives it with its end, and raises StopIteration where there is none."""
    decoder: Any = json.JSONDecoder(parse_float=_Number, **hooks)
    return make_scanner(decoder)


_strict: Final = _scanner(parse_int=_integer, object_pairs_hook=_object, parse_constant=_refuse_constant)
_lenient: Final = _scanner(parse_int=_integer, strict=False)
# A text of up to _MAX_INT_DIGITS characters holds no longer integer: C reads all of them, without a call of ours.
_strict_short: Final = _scanner(parse_int=int, object_pairs_hook=_object, parse_constant=_refuse_constant)
_lenient_short: Final = _scanner(parse_int=int, strict=False)
TOO_DEEP: Final = object()


def _matcher(pattern: str) -> Callable[[str, int], re.Match[str] | None]:
    return re.compile(pattern, re.DOTALL).match


_SPACE: Final = r"[ \t\n\r]*+"
_STRING: Final = r'"(?:[^"\\]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_SCALAR: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null|NaN|-?Infinity"
# The groups are the key as it is written, and again where that is also how it reads.
_KEY: Final = rf'("([^"\\\x00-\x1f]*+)"|{_STRING}){_SPACE}:{_SPACE}'

_space: Final = cast("Callable[[str, int], re.Match[str]]", _matcher(_SPACE))  # it matches everywhere
_first_member: Final = _matcher(rf"\{{{_SPACE}(?:\}}|{_KEY})")
_next_member: Final = _matcher(rf"{_SPACE}(?:\}}|,{_SPACE}{_KEY})")
_next_item: Final = _matcher(rf"{_SPACE}(?:\]|(,))")
# A whole value; or else, as the group, an opening with what comes before the first value in it.
_begin: Final = _matcher(rf"{_SPACE}(?:{_STRING}|{_SCALAR}|\[{_SPACE}\]|\{{{_SPACE}\}}|(\[|\{{{_SPACE}{_KEY}))")


def _skip(text: str, index: int, each: Callable[[int], int] | None = None) -> int:
    """The end of the value at `index`, nested to any depth, without recursion. Raises ValueError if there is none.

    `each` takes the index of a value that is no array and gives its end, so that only arrays are read here.
    """
    outer = []  # for each array and object that is open, what matches behind a value in it
    while True:
        index = _space(text, index).end()
        if each and not text.startswith("[", index):
            index = each(index)
        else:
            found = _begin(text, index)
            if found is None:
                raise ValueError("no JSON value")
            index = found.end()
            if found[1]:
                outer.append(_next_item if found[1] == "[" else _next_member)
                continue
        while outer:  # up to a comma, whatever ends here
            found = outer[-1](text, index)
            if found is None:
                raise ValueError("neither comma nor end")
            index = found.end()
            if found[1]:
                break
            outer.pop()
        else:
            return index


_Field = tuple[Any, int, int]  # a member's value, and its span in the text
_ABSENT: Final[_Field] = (None, 0, 0)


class _Object(list[tuple[str, _Field]]):
    """An object as its members, repeated ones included."""

    def by_key(self) -> dict[str, Any]:
        return {key: value for key, (value, _, _) in self}


def _members(text: str, index: int, scan: _Scan, walked: str = "") -> tuple[_Object, int]:
    """The object that opens at `index`, and its end. An object under the key `walked` is given as its members too.

    A value is `TOO_DEEP` where it is nested deeper than the C scanner recurses.
    """
    members = _Object()
    found = _first_member(text, index)
    while found:
        key, start = found[2], found.end()
        if key is None and found[1] is None:
            return members, start
        if key is None:  # it holds an escape, or what only some parsers take
            key, _ = scan(text, found.start(1))
        value: Any
        if key == walked and text.startswith("{", start):
            value, end = _members(text, start, scan)
        else:
            try:
                value, end = scan(text, start)
            except StopIteration:
                raise ValueError("no JSON value") from None
            except RecursionError:
                value, end = TOO_DEEP, _skip(text, start)
        members.append((key, (value, start, end)))
        found = _next_member(text, end)
    raise ValueError("neither member nor end")


def _collect(text: str, index: int, scan: _Scan, objects: list[_Object], walked: str = "") -> int:
    """The end of the value at `index`. Adds it to `objects` if it is one, or those that it holds if it is an array.

    Arrays in arrays count: a peer that handles an array by calling itself for each element looks into them.
    """
    if text.startswith("[", index):
        return _skip(text, index, lambda start: _collect(text, start, scan, objects, walked))
    if not text.startswith("{", index):
        try:
            return scan(text, index)[1]
        except StopIteration:
            raise ValueError("no JSON value") from None
    members, end = _members(text, index, scan, walked)
    objects.append(members)
    return end


def _span(line: bytes, text: str, field: _Field) -> bytes:
    """The bytes of the line that a value was read from."""
    _, start, end = field
    if text.isascii():
        return line[start:end]
    if 2 * (end - start) < len(text):
        return _encode(text[start:end])
    # A long value is cut out of the line: to encode it takes up to eight times its size.
    return line[len(_encode(text[:start])) : len(line) - len(_encode(text[end:]))]


_encode: Final[Callable[[str], bytes]] = methodcaller("encode", "utf-8", "surrogateescape")
_decode: Final[Callable[[bytes], str]] = methodcaller("decode", "utf-8", "surrogateescape")


_NO_MARK: Final = bytes(set(range(256)) - set(b'"[]{}'))
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def _is_deeper(line: bytes, limit: int) -> bool:
    """Whether arrays and objects are nested deeper than `limit`, without parsing. Means nothing where it is no JSON."""
    # What is left without them tells how many there are: bytes.replace hops to them, bytes.count looks at each byte.
    if len(line) - len(line.replace(b"[", b"", limit + 1).replace(b"{", b"", limit + 1)) <= limit:
        return False
    # Escaped quotes go first, so that each one left begins or ends a string; then empty strings, which are most.
    if b"\\" in line:
        line = line.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = line.translate(None, _NO_MARK).replace(b'""', b"")
    brackets = b"".join(marks.split(b'"')[::2])
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > limit


# --------------------------------------------------------------------------------------------- numbers, canonical form


def _normal(number: _Number) -> int | str:
    """One form for all spellings of a number: an int of up to 640 digits, else `digits e exponent`.

    Raises ValueError for an exponent of over 18 digits. Only digit strings are handled: int() of a million digits takes
    seconds, and a float would make 9007199254740993 equal to 9007199254740992.
    """
    mantissa, _, power = number.literal.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    if len(power.lstrip("+-")) > MAX_EXPONENT_DIGITS:
        raise ValueError(f"an exponent of over {MAX_EXPONENT_DIGITS} digits")
    written = (whole + fraction).lstrip("-0")
    digits = written.rstrip("0")
    if not digits:
        return 0
    sign = "-" if whole.startswith("-") else ""
    exponent = int(power or "0") - len(fraction) + len(written) - len(digits)
    if exponent >= 0 and len(digits) + exponent <= _MAX_INT_DIGITS:
        return int(sign + digits + "0" * exponent)
    return f"{sign}{digits}e{exponent}"


def _plain(number: _Number) -> int | list[Any]:
    """A number as Python's encoder can write it; NaN marks the list, which no value from downstream holds."""
    normal = _normal(number)
    return normal if isinstance(normal, int) else [math.nan, normal]


_encoder: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_plain
)
_LONG_TEXT: Final = 4096  # characters
_HASHED_AT_ONCE: Final = 1 << 18  # characters


def canonical(value: Any) -> str:
    """One text for all spellings of a parsed value: keys sorted, no white space, one form for each number.

    Raises ValueError for an exponent of over 18 digits.
    """
    return _encoder.encode(value)


def parse(value: bytes) -> Any:
    """The value of bytes that came from downstream, as `canonical` takes it. Raises ValueError where they are none."""
    text = value.decode()
    try:
        parsed, end = _strict(text, 0)
    except StopIteration:
        raise ValueError("no JSON value") from None
    if end != len(text):
        raise ValueError("more than one value")
    return parsed


def signature(tool: str, arguments: Any) -> str:
    """SHA-256 over tool name and canonical arguments; absent, null and {} are one.

    A long text among the arguments, say a file, stands there by a hash of its own: to write it as JSON would take four
    times as long as to hash it, and memory for two copies. -Infinity marks it, which no value from downstream holds.
    """
    if isinstance(arguments, dict):
        arguments = {key: [-math.inf, sha256(value)] if _is_long(value) else value for key, value in arguments.items()}
    return sha256(canonical([tool, {} if arguments is None else arguments]))


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) > _LONG_TEXT


@cache
def _new_sha256() -> "HASH":
    import hashlib  # not before the first call: clients wait for our start

    return hashlib.sha256()


def sha256(text: str) -> str:
    """The SHA-256 of a text in UTF-8, lone surrogates included, hexadecimal."""
    digest = _new_sha256().copy()  # OpenSSL looks the algorithm up for each one that is no copy
    for start in range(0, len(text), _HASHED_AT_ONCE):  # a long one need not be in memory twice
        digest.update(text[start : start + _HASHED_AT_ONCE].encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- downstream


def read_downstream(line: bytes, *, is_first: bool = False) -> Message:
    """What one line from downstream is. Raises WireError for a line that must not go upstream."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise _refused(PARSE_ERROR, "Parse error: a line must be valid UTF-8") from None
    if len(line) > MAX_DEPTH and _is_deeper(line, MAX_DEPTH):
        raise _refused(INVALID_REQUEST, f"Invalid request: nested deeper than {MAX_DEPTH} levels")
    start = 0 if text.startswith("{") else _begin_of(text, is_first)
    scan = _strict if len(text) > _MAX_INT_DIGITS else _strict_short
    objects: list[_Object] = []
    try:
        if is_array := text.startswith("[", start):
            end = _collect(text, start, scan, objects, "params")
        else:
            members, end = _members(text, start, scan, "params")
        if _space(text, end).end() != len(text):
            raise ValueError("more than one value")
    except ValueError:
        raise _refused(PARSE_ERROR, "Parse error: a line must hold one JSON object or array") from None
    if text.find("\r", start, end) >= 0:
        # Servers that read with universal newlines split here, and a fragment could be a tools/call of its own.
        raise _refused(INVALID_REQUEST, "Invalid request: a carriage return inside a line")
    return _read_array(line, text, objects) if is_array else _read_message(line, text, members)


def _begin_of(text: str, is_first: bool) -> int:
    """Where a line's value begins: white space may stand before it, and on the first line a byte order mark."""
    return _space(text, len(_BOM) if is_first and text.startswith(_BOM) else 0).end()


def _read_message(line: bytes, text: str, members: _Object) -> Message:
    """What one object is. Raises WireError for one that must not go upstream."""
    fields = dict(members)
    if _has_doubtful_keys(members, fields, _ENVELOPE):
        _, id_bytes = _read_id(line, text, members)
        raise _refused(INVALID_REQUEST, "Invalid request: a member of the envelope is repeated or misspelt", id_bytes)
    identity = _identity(fields.get("id", _ABSENT)[0])
    id_bytes = _span(line, text, fields["id"]) if identity else b"null"
    method, params = fields.get("method", _ABSENT)[0], fields.get("params", _ABSENT)[0]
    if not isinstance(method, str):
        method = None
    elif method.startswith(TOOLS_CALL + "\0"):
        raise _refused(INVALID_REQUEST, "Invalid request: some parsers end this method at its NUL", id_bytes)
    param = dict(params) if isinstance(params, _Object) else {}
    call = _read_call(line, text, fields, param, identity, id_bytes) if method == TOOLS_CALL else None
    meta, task_id = param.get("_meta", _ABSENT)[0], param.get("taskId", _ABSENT)[0]
    if not isinstance(meta, dict):
        meta = {}
    return Message(
        method=method,
        id=identity,
        id_bytes=id_bytes,
        is_modern=META_VERSION in meta,
        meta=meta,
        call=call,
        cancels=_identity(param.get("requestId", _ABSENT)[0]) if method == CANCELLED else None,
        task_id=task_id if method and method.startswith("tasks/") and isinstance(task_id, str) else None,
        params=params.by_key() if param and method in (INITIALIZE, TOOLS_LIST) else {},
    )


def _read_array(line: bytes, text: str, objects: list[_Object]) -> Message:
    """An array passes unless it holds a `tools/call`, or what some parser could read as one."""
    with suppress(WireError):
        batch = tuple(_read_message(line, text, members) for members in objects)
        if not any(message.call for message in batch):
            return Message(batch=batch)
    why = "Invalid request: a tools/call must be a line of its own"
    requests = [members for members in objects if _spelt(members, "method") and _spelt(members, "id")]
    replies = [_error(_read_id(line, text, members)[1], INVALID_REQUEST, why) for members in requests]
    raise WireError("an array with a tools/call was refused", b"[%b]\n" % b",".join(replies) if replies else None)


_ARGUMENTS: Final = (dict, _Pairs, NoneType)


def _read_call(
    line: bytes,
    text: str,
    fields: Mapping[str, _Field],
    param: Mapping[str, _Field],
    identity: Id | None,
    id_bytes: bytes,
) -> ToolCall:
    """The `tools/call` in an object whose envelope is sound. Raises WireError for a call that is not."""
    if "id" not in fields:
        raise WireError("a tools/call without an id was dropped: nobody could be answered", None)
    if identity is None or (identity.kind != "string" and id_bytes.strip(b"-0123456789")):
        raise _refused(INVALID_REQUEST, "Invalid request: the id of a tools/call must be a string or an integer")

    def refuse(code: int, why: str) -> WireError:
        return _refused(code, why, id_bytes)

    if fields.get("jsonrpc", _ABSENT)[0] != "2.0":
        raise refuse(INVALID_REQUEST, 'Invalid request: jsonrpc must be "2.0"')
    if len(line) > MAX_CALL_BYTES:
        raise refuse(INVALID_REQUEST, f"Invalid request: a tools/call of over {MAX_CALL_BYTES} bytes")
    params = fields.get("params", _ABSENT)[0]
    if not isinstance(params, _Object):
        raise refuse(INVALID_PARAMS, "Invalid params: params must be an object")
    if _has_doubtful_keys(params, param, _CALL_PARAMS):
        raise refuse(INVALID_REQUEST, "Invalid request: a member of params is repeated or misspelt")
    name, arguments = param.get("name", _ABSENT)[0], param.get("arguments", _ABSENT)[0]
    meta = param["_meta"][0] if "_meta" in param else {}
    if not isinstance(name, str):
        raise refuse(INVALID_PARAMS, "Invalid params: name must be a string")
    if not isinstance(arguments, _ARGUMENTS):
        raise refuse(INVALID_PARAMS, "Invalid params: arguments must be an object")
    if not isinstance(meta, dict):
        raise refuse(INVALID_PARAMS, "Invalid params: _meta must be an object without repeated keys")
    try:
        digest = signature(name, arguments)
    except ValueError as error:
        raise refuse(INVALID_REQUEST, f"Invalid request: {error}") from None
    state = param.get("requestState", _ABSENT)[0]
    return ToolCall(
        name=name,
        arguments=_span(line, text, param["arguments"]) if "arguments" in param else None,
        signature=digest,
        meta=meta,
        request_state=state if isinstance(state, str) else None,
        is_next_leg="requestState" in param or "inputResponses" in param,
        wants_task=param.get("task", _ABSENT)[0] is not None,
    )


def _has_doubtful_keys(members: _Object, fields: Mapping[str, _Field], names: frozenset[str]) -> bool:
    """Whether two parsers could read one of `names` differently: Go matches keys regardless of case, C ends them at a
    NUL, and the last of two equal keys wins in some parsers, the first in others. `fields` are the members by key."""
    # Each name may be there once, in its own spelling. Most objects have no other keys, which is quick to see.
    if len(fields) == len(members) and fields.keys() <= names:
        return False
    spellings = [key.partition("\0")[0].casefold() for key, _ in members]
    return any(spellings.count(name.casefold()) > (name in fields) for name in names)


def _spelt(members: _Object, name: str) -> list[_Field]:
    """The members that some parser takes for `name`."""
    return [field for key, field in members if key == name or key.casefold() == name]


def _read_id(line: bytes, text: str, members: _Object) -> tuple[Id | None, bytes]:
    """The `id` and its bytes; None and null unless there is one, and it is a string or a number."""
    fields = _spelt(members, "id")
    identity = _identity(fields[0][0]) if len(fields) == 1 else None
    return (identity, _span(line, text, fields[0])) if identity else (None, b"null")


def _identity(value: Any) -> Id | None:
    if isinstance(value, str):
        return Id("string", value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Id("integer", value)
    if isinstance(value, _Number):
        try:
            normal = _normal(value)
        except ValueError:
            return Id("fraction", value.literal)  # an endless exponent: told apart by its spelling
        return Id("fraction" if isinstance(normal, str) and "e-" in normal else "integer", normal)
    return None


def _refused(code: int, message: str, id_bytes: bytes = b"null") -> WireError:
    return WireError(message, error_line(id_bytes, code, message))


# ------------------------------------------------------------------------------------------------------------ upstream


def read_upstream(line: bytes, *, is_first: bool = False) -> Upstream | None:
    """What one line from upstream answers and asks; None where no JSON object is found in it.

    A bare carriage return ends a line for clients that read with universal newlines, so what it cuts off counts too.
    """
    read = _read_upstream(line, is_first=is_first)
    if b"\r" in line and b"\r" in line.rstrip(b"\r\n"):  # few have any, and the second look copies the line
        start = 0
        for fragment in line.split(b"\r"):
            more = _read_upstream(fragment, start=start)
            answers = [answer for answer in more.answers if answer not in read.answers]
            # Fragments make no parts, so with an answer that is only in them the whole line counts as one.
            objects = 1 if answers else read.objects or min(more.objects, 1)
            methods, cancels = read.methods + more.methods, read.cancels + more.cancels
            read = Upstream((*read.answers, *answers), methods, objects, cancels)
            start += len(fragment) + 1
    return read if read.objects else None


def _read_upstream(line: bytes, *, start: int = 0, is_first: bool = False) -> Upstream:
    """Reads as far as it can: to some parsers, what follows the first value is nothing, to others the next message."""
    text = _decode(line)
    index = 0 if text.startswith("{") else _begin_of(text, is_first)
    scan = _lenient if len(text) > _MAX_INT_DIGITS else _lenient_short
    objects: list[_Object] = []
    try:
        while index < len(text):
            index = _space(text, _collect(text, index, scan, objects)).end()
    except ValueError:
        pass
    answers: list[Answer] = []
    methods: list[tuple[str, Id | None]] = []
    cancels: list[Id] = []
    for members in objects:
        named = dict(members)
        if len(named) == len(members) and named.keys() <= _ENVELOPE:  # each once, and in its own spelling
            spelt = [named["id"]] if "id" in named else []
        else:
            spelt = _spelt(members, "id")
            # A body in its own spelling counts before one that only parsers without regard to case see.
            if not named.keys() & {"result", "error"}:
                named = {key.casefold(): field for key, field in members}
        # Which of two ids counts is the client's parser's choice: each is answered.
        ids = [identity for value, _, _ in spelt if (identity := _identity(value))]
        method, _, _ = named.get("method", _ABSENT)
        result, error = named.get("result"), named.get("error")
        is_error = error is not None and not (result and error[0] is None)  # a null beside a result spells success
        body = error if is_error else result
        if ids and body:
            at = start + (body[1] if text.isascii() else len(_encode(text[: body[1]])))
            span, inner = _span(line, text, body), _inner(text, body)
            for identity in ids:
                answers.append(Answer(identity, is_error, span, inner, at))
        elif isinstance(method, str):
            methods.append((method, ids[-1] if ids else None))
            if method == CANCELLED:
                cancelled = _identity(_inner(text, named.get("params", _ABSENT)).get("requestId"))
                cancels += [cancelled] if cancelled is not None else []
    return Upstream(tuple(answers), tuple(methods), len(objects), tuple(cancels))


def other_spelling(identity: Id) -> Id | None:
    """The id that clients take for the same one, since some servers echo 7 as "7"; None where there is none."""
    if identity.kind == "integer":
        return Id("string", str(identity.value))
    if identity.kind == "string" and isinstance(identity.value, str) and _canonical_integer(identity.value):
        return Id("integer", int(identity.value))
    return None


_canonical_integer: Final = re.compile(r"(?:0|-?[1-9][0-9]{0,17})", re.ASCII).fullmatch


def parts(line: bytes) -> list[bytes]:
    """The objects in a line that holds an array, or several values, each as a line of its own."""
    text = _decode(line)
    spans: list[tuple[int, int]] = []

    def each(start: int) -> int:
        end = _skip(text, start)
        if text.startswith("{", start):
            spans.append((start, end))
        return end

    index = _begin_of(text, is_first=True)
    with suppress(ValueError):
        while index < len(text):
            index = _space(text, _skip(text, index, each)).end()
    return [_encode(text[start:end]) + b"\n" for start, end in spans]


def _inner(text: str, field: _Field) -> Mapping[str, Any]:
    """The values in an object that is a member, also in one that is too deep as a whole; none if it is no object."""
    value, start, _ = field
    if value is TOO_DEEP:
        return _object_at(text, start).by_key()
    return value if isinstance(value, dict) else {}


# --------------------------------------------------------------------------------------------------- what we write


def _error(id_bytes: bytes, code: int, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (id_bytes, json.dumps(error, separators=(",", ":")).encode())


def error_line(id_bytes: bytes, code: int, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    """An error answer of ours."""
    return _error(id_bytes, code, message, data) + b"\n"


def replay_line(id_bytes: bytes, body: bytes, *, is_error: bool) -> bytes:
    """An answer with the recorded bytes of `result` or `error` under the id of the request that is answered now."""
    return b'{"jsonrpc":"2.0","id":%b,"%b":%b}\n' % (id_bytes, b"error" if is_error else b"result", body)


_request_encoder: Final = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, default=lambda number: float(number.literal)
)


def request_line(own_id: str, method: str, params: Mapping[str, Any]) -> bytes:
    """A request of ours to upstream. Its params may hold what came from downstream.

    A `_meta` with a repeated key, or a number that no float holds, is left out: only its own bytes could say it.
    """

    def written(params: Mapping[str, Any]) -> bytes:
        request = {"jsonrpc": "2.0", "id": own_id, "method": method, "params": params}
        return _request_encoder.encode(request).encode("ascii") + b"\n"

    try:
        return written(params)
    except ValueError:
        return written({key: value for key, value in params.items() if key != "_meta"})


def cancel_line(id_bytes: bytes) -> bytes:
    """A notification to upstream that the request with this id is no longer wanted."""
    return b'{"jsonrpc":"2.0","method":"%b","params":{"requestId":%b}}\n' % (CANCELLED.encode(), id_bytes)


def with_result_type(result: bytes) -> bytes:
    """A result as the 2026-07-28 era wants it: with `resultType`, which earlier eras do not have."""
    if not result.startswith(b"{"):
        return result
    members = _object_at(_decode(result), 0)
    if any(key == "resultType" for key, _ in members):
        return result
    return b'{"resultType":"complete"' + (b"," if members else b"") + result[1:]


def with_meta(result: bytes, key: str, value: Mapping[str, Any]) -> bytes:
    """A result with this member in its `_meta`; itself where it is no object, or has a `_meta` that is none."""
    text = _decode(result)
    if not text.startswith("{"):
        return result
    members = _object_at(text, 0)
    written = json.dumps(value, separators=(",", ":"))
    added = f"{json.dumps(key)}:{written}"
    start = dict(members).get("_meta", _ABSENT)[1]
    if start:
        if not text.startswith("{", start):
            return result
        meta = _object_at(text, start)
        spans = [(begin, end) for name, (_, begin, end) in meta if name == key]
        for begin, end in reversed(spans):  # one that is there, say of a relay behind us, is not repeated
            text = text[:begin] + written + text[end:]
        if spans:
            return _encode(text)
        comma = "," if meta else ""
        return _encode(f"{text[: start + 1]}{added}{comma}{text[start + 1 :]}")
    comma = "," if members else ""
    return _encode(f'{{"_meta":{{{added}}}{comma}{text[1:]}')


def with_value(result: bytes, key: str, value: str | None) -> bytes:
    """A result with another value wherever it has this member, all other bytes kept."""
    text = _decode(result)
    for name, (_, start, end) in reversed(_object_at(text, 0)):
        if name == key:
            text = text[:start] + json.dumps(value) + text[end:]
    return _encode(text)


def with_identity(result: bytes, name: str, version: str, *, is_handshake: bool) -> bytes:
    """A result with our name and version in place of upstream's, all other bytes kept; an empty one keeps upstream's.

    Gives `result` itself where there is nothing to replace, which `may_name_server` says faster.
    `is_handshake`: it answers `initialize` or `server/discover`, whose result names the server at its top.
    """
    text = _decode(result)
    infos: list[int] = []
    for key, (_, start, _) in _object_at(text, 0):
        if key == "serverInfo" and is_handshake:
            infos.append(start)
        elif key == "_meta":
            infos += [inner for nested, (_, inner, _) in _object_at(text, start) if nested == META_SERVER_INFO]
    ours = {"name": name, "version": version}
    spans = [(key, start, end) for info in infos for key, (_, start, end) in _object_at(text, info) if ours.get(key)]
    for key, start, end in reversed(spans):
        text = text[:start] + json.dumps(ours[key]) + text[end:]
    return _encode(text) if spans else result


# Words that may be written with escapes: `\u00` and two digits, as their letters are ASCII, and `\/`. One byte is found
# a hundred times as fast as several, so a backslash is looked for first.


def may_greet(line: bytes) -> bool:
    """Whether a line could be a request of `initialize` or `server/discover`, which name the server in their answer."""
    return b'"initialize"' in line or b'discover"' in line or (b"\\" in line and b"\\u00" in line)


def may_name_server(line: bytes) -> bool:
    """Whether a line could hold a member `serverInfo` or META_SERVER_INFO."""
    return b'serverInfo"' in line or (b"\\" in line and b"\\u00" in line)


def _object_at(text: str, index: int) -> _Object:
    """The object that opens at `index`; an empty one where it is no object, or one that only `_skip` can read."""
    with suppress(ValueError):
        if text.startswith("{", index):
            return _members(text, index, _lenient)[0]
    return _Object()
