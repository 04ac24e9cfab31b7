"""JSON-RPC lines as bytes: split, scanned, compared and written. Knows no file, clock or event loop.

Two readers share one scanner. `read_downstream` is strict: a line that some parser upstream could take for a
`tools/call` which we did not see must not pass, so whatever two parsers could read differently is refused.
`read_upstream` is lenient: whatever some client could take for an answer must be seen, so it accepts more than JSON.

Spans are kept as the exact bytes of the line. Values are looked at, never written back: numbers, key order, escapes and
invalid UTF-8 of a peer survive because nothing is ever re-encoded.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

# Source: https://www.jsonrpc.org/specification#error_object
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
# Answers of upstream that are no outcome. Source: MCP 2025-11-25 (-32042), the official SDKs (-32000, -32001).
URL_ELICITATION_REQUIRED: Final = -32042
CONNECTION_CLOSED: Final = -32000
REQUEST_TIMED_OUT: Final = -32001

TOOLS_CALL: Final = "tools/call"
CANCELLED: Final = "notifications/cancelled"
META_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
META_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"

MAX_DEPTH: Final = 500  # the C scanner and encoder recurse; the default recursion limit is 1,000
MAX_CALL_BYTES: Final = 900_000_000  # SQLite's limit for one value is 10^9
MAX_EXPONENT_DIGITS: Final = 18  # an exponent is compared as an integer
_MAX_INT_DIGITS: Final = 640  # int() takes this many under every setting of sys.set_int_max_str_digits

_BOM: Final = b"\xef\xbb\xbf"
_ENVELOPE: Final = {name.casefold(): name for name in ("jsonrpc", "id", "method", "params", "result", "error")}
_CALL_PARAMS: Final = {
    name.casefold(): name for name in ("name", "arguments", "_meta", "task", "inputResponses", "requestState")
}


class WireError(Exception):
    """A line from downstream that is not passed on; `reply` is the line that answers it, None where nothing may."""

    def __init__(self, message: str, reply: bytes | None) -> None:
        super().__init__(message)
        self.reply = reply


class Id(NamedTuple):
    """A JSON-RPC id by JSON type and value, so that 1 and "1" differ and 1 and 1.0 do not."""

    kind: str  # "integer", "string", or "fraction" for any other number
    value: int | str


class ToolCall(NamedTuple):
    """What a `tools/call` asks for."""

    name: str
    arguments: bytes | None  # the member's bytes, None where it is absent
    signature: str  # SHA-256, hexadecimal
    meta: Mapping[str, Any]
    request_state: str | None
    is_next_leg: bool  # it brings requestState or inputResponses
    wants_task: bool


class Message(NamedTuple):
    """One line from downstream, as far as the relay looks into it. An array has none of these."""

    method: str | None = None
    id: Id | None = None
    id_bytes: bytes = b"null"
    is_modern: bool = False  # of the 2026-07-28 era
    meta: Mapping[str, Any] = {}
    call: ToolCall | None = None
    cancels: Id | None = None


class Answer(NamedTuple):
    """What one object in a line from upstream says about one id."""

    id: Id
    is_error: bool
    body: bytes  # the bytes of `result` or `error`
    members: Mapping[str, Any]  # the values in it where it is an object, TOO_DEEP for one that was only skipped


class Upstream(NamedTuple):
    """One line from upstream: its answers, and the requests and notifications in it as (method, id)."""

    answers: tuple[Answer, ...] = ()
    methods: tuple[tuple[str, Id | None], ...] = ()


# --------------------------------------------------------------------------------------------------------------- lines


class LineBuffer:
    """Turns reads of any size into whole lines, split on byte 0x0A and on nothing else.

    Read into `space()`, then `take(n)` gives the lines that the n new bytes complete, each with its 0x0A. The memory is
    one bytearray that grows to the longest line and shrinks again; a read never allocates.
    """

    _USUAL: Final = 65536  # a default pipe; larger reads cost an mmap each
    _KEPT: Final = 2 << 20  # a buffer up to this size is kept for the next long line

    def __init__(self) -> None:
        self._memory = bytearray(self._USUAL)
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def space(self) -> memoryview:
        """Memory to read into; release it before `take`."""
        if self._filled == len(self._memory):
            larger = bytearray(2 * len(self._memory))
            larger[: self._filled] = self._memory
            self._memory = larger
        return memoryview(self._memory)[self._filled :]

    def take(self, count: int) -> list[bytes]:
        """Lines completed by the `count` bytes that were just read into `space()`."""
        searched, self._filled = self._filled, self._filled + count
        end = self._memory.find(b"\n", searched, self._filled)
        if end < 0:
            return []
        lines, start = [], 0
        with memoryview(self._memory) as view:
            while end >= 0:
                lines.append(bytes(view[start : end + 1]))
                start = end + 1
                end = self._memory.find(b"\n", start, self._filled)
            rest = bytes(view[start : self._filled])
        if len(self._memory) > self._KEPT and len(rest) < self._USUAL:
            self._memory = bytearray(self._USUAL)
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


class _Pairs:
    """An object that repeats a key: no dict can hold it, and it must not look like one that does not."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _object(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    return members if len(members) == len(pairs) else _Pairs(pairs)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


TOO_DEEP: Final = object()

_Scan = Callable[[str, int], tuple[Any, int]]


_STRICT: Final[Mapping[str, Any]] = {
    "object_pairs_hook": _object,
    "parse_float": _Number,
    "parse_constant": _refuse_constant,
}
_LENIENT: Final[Mapping[str, Any]] = {"strict": False, "parse_float": _Number}
# Each reads the value at an index and gives it with its end; the second of a pair is for lines with very long integers.
_strict_scan: Final[_Scan] = json.JSONDecoder(**_STRICT).raw_decode
_strict_scan_long: Final[_Scan] = json.JSONDecoder(**_STRICT, parse_int=_Number).raw_decode
_lenient_scan: Final[_Scan] = json.JSONDecoder(**_LENIENT).raw_decode
_lenient_scan_long: Final[_Scan] = json.JSONDecoder(**_LENIENT, parse_int=_Number).raw_decode

# The pattern matches everywhere, so there always is a match.
_space: Final = cast("Callable[[str, int], re.Match[str]]", re.compile(r"[ \t\n\r]*").match)
_long_number: Final = re.compile(rf"[0-9]{{{_MAX_INT_DIGITS + 1}}}").search
# Strings are matched whole, also an unterminated one, so that no bracket in a string counts and no text is read twice.
_nesting: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL).finditer
_token: Final = re.compile(
    r"[ \t\n\r]*+(?:(?P<open>[\[{])|(?P<close>[\]}])|(?P<comma>,)|(?P<colon>:)"
    r'|(?P<string>"(?:[^"\\]++|\\.)*+")'
    r"|(?P<scalar>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null|NaN|-?Infinity))",
    re.DOTALL,
).match


class _Member(NamedTuple):
    key: str
    value: Any
    start: int
    end: int


def _skip(text: str, index: int) -> int:
    """The end of the value at `index`, nested to any depth, without recursion. Raises ValueError if there is none."""
    closers: list[str] = []
    expects, may_close = "value", False
    while True:
        token = _token(text, index)
        kind = token.lastgroup if token else None
        if token is None or kind is None:
            raise ValueError("no JSON value")
        index = token.end()
        if kind == "open" and expects == "value":
            closers.append("]" if text[index - 1] == "[" else "}")
            expects, may_close = ("value" if closers[-1] == "]" else "key"), True
            continue
        if kind == "close" and may_close and text[index - 1] == closers[-1]:
            closers.pop()
        elif kind == "string" and expects == "key":
            expects, may_close = "colon", False
            continue
        elif kind == "colon" and expects == "colon":
            expects, may_close = "value", False
            continue
        elif kind == "comma" and expects == "comma":
            expects, may_close = ("value" if closers[-1] == "]" else "key"), False
            continue
        elif not (kind in ("string", "scalar") and expects == "value"):
            raise ValueError("no JSON value")
        if not closers:
            return index
        expects, may_close = "comma", True


def _value(text: str, index: int, scan: _Scan) -> tuple[Any, int]:
    """The value at `index` and its end; `TOO_DEEP` for one that is nested deeper than the C scanner recurses."""
    try:
        return scan(text, index)
    except RecursionError:
        return TOO_DEEP, _skip(text, index)


def _members(text: str, index: int, scan: _Scan, walked: frozenset[str]) -> tuple[list[_Member], int]:
    """The members of the object that opens at `index`, and its end.

    Objects under a key in `walked` are given as their own lists of members, so that spans are known inside them.
    """
    members: list[_Member] = []
    index = _space(text, index + 1).end()
    if text[index : index + 1] == "}":
        return members, index + 1
    while True:
        if text[index : index + 1] != '"':
            raise ValueError("no key")
        key, index = scan(text, index)
        index = _space(text, index).end()
        if text[index : index + 1] != ":":
            raise ValueError("no colon")
        start = _space(text, index + 1).end()
        value: Any
        if text[start : start + 1] == "{" and key.casefold() in walked:
            value, end = _members(text, start, scan, frozenset())
            value = _Walked(value)
        else:
            value, end = _value(text, start, scan)
        members.append(_Member(key, value, start, end))
        index = _space(text, end).end()
        mark = text[index : index + 1]
        if mark == "}":
            return members, index + 1
        if mark != ",":
            raise ValueError("no comma")
        index = _space(text, index + 1).end()


class _Walked(list[_Member]):
    """An object given as its members."""

    def named(self) -> dict[str, Any]:
        return {member.key: member.value for member in self}


def _encode(text: str) -> bytes:
    """The bytes that a span of a decoded line came from."""
    return text.encode("utf-8", "surrogateescape")


def _is_deeper(text: str, limit: int) -> bool:
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    for match in _nesting(text):
        mark = text[match.start()]
        if mark in "[{":
            depth += 1
            if depth > limit:
                return True
        elif mark in "]}":
            depth -= 1
    return False


# ------------------------------------------------------------------------------------------- numbers, canonical form


_literal: Final = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?)([0-9]+))?").fullmatch


def _normal(literal: str) -> int | str:
    """One form for all spellings of a number: an int of up to 640 digits, else `digits e exponent`.

    Raises ValueError for an exponent of over 18 digits. Only digit strings are handled: int() of a million digits takes
    seconds, and a float would make 9007199254740993 equal to 9007199254740992.
    """
    match = _literal(literal)
    if match is None:
        raise ValueError("no number")
    sign, whole, fraction, exponent_sign, exponent_digits = match.groups(default="")
    if len(exponent_digits) > MAX_EXPONENT_DIGITS:
        raise ValueError(f"an exponent of over {MAX_EXPONENT_DIGITS} digits")
    written = (whole + fraction).lstrip("0")
    digits = written.rstrip("0")
    if not digits:
        return 0
    exponent = int(exponent_sign + (exponent_digits or "0")) - len(fraction) + len(written) - len(digits)
    if exponent >= 0 and len(digits) + exponent <= _MAX_INT_DIGITS:
        return int(sign + digits + "0" * exponent)
    return f"{sign}{digits}e{exponent}"


def canonical(value: Any) -> str:
    """One ASCII text for all spellings of a parsed value: keys sorted, no white space, one form for each number.

    What Python's encoder cannot say is written as NaN, which no value from downstream holds, and said in order of
    appearance behind the text. Raises ValueError for an exponent of over 18 digits.
    """
    asides: list[str] = []

    def aside(special: Any) -> Any:
        if isinstance(special, _Pairs):
            asides.append("pairs")
            # The sort is stable: the order of keys does not count, that of one key's values does.
            return [float("nan"), *sorted(special.pairs, key=lambda pair: pair[0])]
        number = _normal(special.literal)
        if isinstance(number, int):
            return number
        asides.append(number)
        return float("nan")

    text = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False, default=aside).encode(value)
    return "\n".join([text, *asides])


def signature(tool: str, arguments: Any) -> str:
    """SHA-256 over tool name and canonical arguments; absent, null and {} are one."""
    text = json.dumps(tool) + "\n" + ("{}" if arguments is None else canonical(arguments))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# ---------------------------------------------------------------------------------------------------------- downstream


def read_downstream(line: bytes, *, is_first: bool = False) -> Message:
    """What one line from downstream is. Raises WireError for a line that must not go upstream."""
    body = line.strip(b" \t\r\n")
    if is_first:
        body = body.removeprefix(_BOM)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise _refused(PARSE_ERROR, "Parse error: a line must be valid UTF-8") from None
    if _is_deeper(text, MAX_DEPTH):
        raise _refused(INVALID_REQUEST, f"Invalid request: nested deeper than {MAX_DEPTH} levels")
    scan = _strict_scan_long if _long_number(text) else _strict_scan
    try:
        objects, is_array = _objects(text, scan, _PARAMS)
    except ValueError:
        raise _refused(PARSE_ERROR, "Parse error: a line must hold one JSON object or array") from None
    if "\r" in text:
        # Servers that read with universal newlines split here, and a fragment could be a tools/call of its own.
        raise _refused(INVALID_REQUEST, "Invalid request: a carriage return inside a line")
    if is_array:
        return _read_array(text, objects)
    members = objects[0]
    named = members.named()
    identity = _read_id(text, members)
    id_bytes = identity[1] if identity else b"null"
    if _has_doubtful_keys(members, _ENVELOPE):
        raise _refused(INVALID_REQUEST, "Invalid request: a member of the envelope is repeated or misspelt", id_bytes)
    method = named.get("method")
    if method == TOOLS_CALL:
        call, meta = _read_call(text, members, id_bytes if identity else None, len(line))
    else:
        call, meta = None, _meta(named.get("params"))
    return Message(
        method=method if isinstance(method, str) else None,
        id=identity[0] if identity else None,
        id_bytes=id_bytes,
        is_modern=META_VERSION in meta,
        meta=meta,
        call=call,
        cancels=_cancelled_id(text, named) if method == CANCELLED else None,
    )


_PARAMS: Final = frozenset({"params"})


def _objects(text: str, scan: _Scan, walked: frozenset[str]) -> tuple[list[_Walked], bool]:
    """The objects of a line, and whether they stood in an array. Raises ValueError where the line is not JSON."""
    if text[:1] == "{":
        members, end = _members(text, 0, scan, walked)
        if _space(text, end).end() != len(text):
            raise ValueError("more than one value")
        return [_Walked(members)], False
    if text[:1] != "[":
        raise ValueError("neither object nor array")
    objects: list[_Walked] = []
    index = _space(text, 1).end()
    while text[index : index + 1] != "]" or objects:
        if text[index : index + 1] == "{":
            members, index = _members(text, index, scan, walked)
            objects.append(_Walked(members))
        else:
            _, index = _value(text, index, scan)
            objects.append(_Walked())  # stands for whatever is no object
        index = _space(text, index).end()
        if text[index : index + 1] == "]":
            break
        if text[index : index + 1] != ",":
            raise ValueError("no comma")
        index = _space(text, index + 1).end()
    if _space(text, index + 1).end() != len(text):
        raise ValueError("more than one value")
    return objects, True


def _has_doubtful_keys(members: list[_Member], names: Mapping[str, str]) -> bool:
    """Whether two parsers could read one of `names` differently: Go matches keys regardless of case, and the last of
    two equal keys wins in some parsers, the first in others."""
    found = set()
    for member in members:
        name = names.get(member.key.casefold())
        if name is not None:
            if name != member.key or name in found:
                return True
            found.add(name)
    return False


def _read_id(text: str, members: list[_Member]) -> tuple[Id, bytes] | None:
    """The last `id` by value and bytes; None where it is absent or neither string nor number."""
    for member in reversed(members):
        if member.key.casefold() == "id":
            value = member.value
            if isinstance(value, str):
                return Id("string", value), _encode(text[member.start : member.end])
            if isinstance(value, int | _Number) and not isinstance(value, bool):
                return _number_id(value), _encode(text[member.start : member.end])
            return None
    return None


def _number_id(number: int | _Number) -> Id:
    if isinstance(number, int):
        return Id("integer", number)
    try:
        value = _normal(number.literal)
    except ValueError:
        return Id("fraction", number.literal)  # an endless exponent: told apart by its spelling
    return Id("integer" if isinstance(value, int) or "e-" not in value else "fraction", value)


def _meta(params: Any) -> Mapping[str, Any]:
    if isinstance(params, _Walked):
        meta = params.named().get("_meta")
        if isinstance(meta, dict):
            return meta
    return {}


def _cancelled_id(text: str, named: Mapping[str, Any]) -> Id | None:
    params = named.get("params")
    if not isinstance(params, _Walked):
        return None
    found = [member._replace(key="id") for member in params if member.key == "requestId"]
    identity = _read_id(text, found)
    return identity[0] if identity else None


def _read_call(text: str, members: _Walked, id_bytes: bytes | None, length: int) -> tuple[ToolCall, Mapping[str, Any]]:
    """The `tools/call` in an object whose envelope is sound. Raises WireError for a call that is not."""
    named = members.named()
    if "id" not in named:
        raise WireError("a tools/call without an id was dropped: nobody could be answered", None)
    if id_bytes is None or not _integer_or_string(id_bytes):
        raise _refused(INVALID_REQUEST, "Invalid request: the id of a tools/call must be a string or an integer")

    def refuse(code: int, why: str) -> WireError:
        return _refused(code, why, id_bytes)

    if named.get("jsonrpc") != "2.0":
        raise refuse(INVALID_REQUEST, 'Invalid request: jsonrpc must be "2.0"')
    if length > MAX_CALL_BYTES:
        raise refuse(INVALID_REQUEST, f"Invalid request: a tools/call of over {MAX_CALL_BYTES} bytes")
    params = named.get("params")
    if not isinstance(params, _Walked):
        raise refuse(INVALID_PARAMS, "Invalid params: params must be an object")
    if _has_doubtful_keys(params, _CALL_PARAMS):
        raise refuse(INVALID_REQUEST, "Invalid request: a member of params is repeated or misspelt")
    member = params.named()
    name, meta, state = member.get("name"), member.get("_meta", {}), member.get("requestState")
    if not isinstance(name, str):
        raise refuse(INVALID_PARAMS, "Invalid params: name must be a string")
    arguments = next((item for item in params if item.key == "arguments"), None)
    if arguments and not isinstance(arguments.value, dict | _Pairs | None):
        raise refuse(INVALID_PARAMS, "Invalid params: arguments must be an object")
    if not isinstance(meta, dict):
        raise refuse(INVALID_PARAMS, "Invalid params: _meta must be an object without repeated keys")
    try:
        digest = signature(name, arguments.value if arguments else None)
    except ValueError as error:
        raise refuse(INVALID_REQUEST, f"Invalid request: {error}") from None
    call = ToolCall(
        name=name,
        arguments=_encode(text[arguments.start : arguments.end]) if arguments else None,
        signature=digest,
        meta=meta,
        request_state=state if isinstance(state, str) else None,
        is_next_leg="requestState" in member or "inputResponses" in member,
        wants_task=member.get("task") is not None,
    )
    return call, meta


_integer_or_string: Final = re.compile(rb'-?[0-9]+|".*"', re.DOTALL).fullmatch


def _read_array(text: str, objects: list[_Walked]) -> Message:
    """An array passes unless it holds a `tools/call`, or a member that some parser could read as one."""
    if not any(
        members.named().get("method") == TOOLS_CALL or _has_doubtful_keys(members, _ENVELOPE) for members in objects
    ):
        return Message()
    replies = []
    for members in objects:
        if "method" in members.named() and "id" in members.named():
            identity = _read_id(text, members)
            why = "Invalid request: a tools/call must be a line of its own"
            replies.append(_error(identity[1] if identity else b"null", INVALID_REQUEST, why, None))
    reply = b"[" + b",".join(replies) + b"]\n" if replies else None
    raise WireError("an array with a tools/call was refused", reply)


def _refused(code: int, message: str, id_bytes: bytes = b"null") -> WireError:
    return WireError(message, error_line(id_bytes, code, message))


# ------------------------------------------------------------------------------------------------------------ upstream


_BODIES: Final = frozenset({"result", "error"})


def read_upstream(line: bytes, *, is_first: bool = False) -> Upstream | None:
    """What one line from upstream answers and asks; None where it is not JSON by any reading."""
    text = line.strip(b" \t\r\n").decode("utf-8", "surrogateescape")
    if is_first:
        text = text.removeprefix("\ufeff")
    scan = _lenient_scan_long if _long_number(text) else _lenient_scan
    try:
        objects, _ = _objects(text, scan, _BODIES)
    except ValueError:
        return None
    answers: list[Answer] = []
    methods: list[tuple[str, Id | None]] = []
    for members in objects:
        named = {member.key.casefold(): member for member in members}
        identity = _read_id(text, members)
        method = named.get("method")
        body = named.get("error") or named.get("result")
        if "result" in named and "error" in named and named["error"].value is None:
            body = named["result"]  # "error": null beside a result is how some servers spell success
        if identity and body:
            answers.extend(_answers(text, members, body))
        elif method and isinstance(method.value, str):
            methods.append((method.value, identity[0] if identity else None))
    return Upstream(tuple(answers), tuple(methods))


def _answers(text: str, members: _Walked, body: _Member) -> Iterator[Answer]:
    """One answer for each `id` of the object: which of two repeated ids counts is the client's parser's choice."""
    value = body.value
    named = value.named() if isinstance(value, _Walked) else {}
    span = _encode(text[body.start : body.end])
    for member in members:
        identity = _read_id(text, [member])
        if identity:
            yield Answer(identity[0], body.key.casefold() == "error", span, named)


# --------------------------------------------------------------------------------------------------- what we write


def _error(id_bytes: bytes, code: int, message: str, data: Mapping[str, Any] | None) -> bytes:
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


def with_result_type(result: bytes) -> bytes:
    """A result as the 2026-07-28 era wants it: with `resultType`, which earlier eras do not have."""
    members = _result_members(result)
    if members is None or any(member.key == "resultType" for member in members):
        return result
    separator = b"," if members else b""
    return b'{"resultType":"complete"' + separator + result[1:]


def with_identity(result: bytes, name: str, version: str, *, is_handshake: bool) -> bytes:
    """A result with our name and version in place of upstream's, all other bytes kept; an empty one keeps upstream's.

    `is_handshake`: it answers `initialize` or `server/discover`, whose result names the server at its top.
    """
    if b"erverInfo" not in result and b"\\u" not in result:
        return result
    members = _result_members(result)
    text = result.decode("utf-8", "surrogateescape")
    infos: list[_Member] = []
    for member in members or ():
        if member.key == "serverInfo" and is_handshake:
            infos.append(member)
        elif member.key == "_meta":
            infos += [inner for inner in _inside(text, member) if inner.key == META_SERVER_INFO]
    ours = {"name": name, "version": version}
    spans = [item for info in infos for item in _inside(text, info) if ours.get(item.key)]
    for item in sorted(spans, key=lambda item: item.start, reverse=True):
        text = text[: item.start] + json.dumps(ours[item.key]) + text[item.end :]
    return _encode(text)


def _result_members(result: bytes) -> list[_Member] | None:
    text = result.decode("utf-8", "surrogateescape")
    return _members(text, 0, _lenient_scan_long, frozenset())[0] if text[:1] == "{" else None


def _inside(text: str, member: _Member) -> list[_Member]:
    """The members of an object that is a member, with their spans; none where it is no object."""
    if text[member.start : member.start + 1] != "{":
        return []
    return _members(text, member.start, _lenient_scan_long, frozenset())[0]
