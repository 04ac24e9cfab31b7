"""What wire.py promises: nothing that could be a `tools/call` slips by, no answer goes unseen, no byte is changed.

The property tests compare it with a slow, obvious JSON reader, which stands in json_model.py.
"""

import hashlib
import json
import sys
import tracemalloc
from fractions import Fraction
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_model import (
    ALPHABET,
    LAX,
    PIECES,
    SMALL,
    Num,
    Obj,
    changed,
    is_key,
    meaning,
    messages,
    read,
    some_line,
    spell,
)

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


def with_params(params: str) -> str:
    return f'{{"jsonrpc":"2.0","id":"x","method":"tools/call","params":{params}}}'


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


# ------------------------------------------------------------------------------------------------- values and spelling


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


# --------------------------------------------------------------------------------------------------------- LineBuffer


def feed(buffer: LineBuffer, data: bytes, size: int) -> list[bytes]:
    """The lines that come out when no read brings more than `size` bytes."""
    lines = []
    while data:
        space = buffer.space()
        count = min(size, len(space), len(data))
        assert count
        space[:count] = data[:count]
        data = data[count:]
        lines += buffer.take(count)
    return lines


STREAM: Final = b'{"a":1}\r\n\n  \n\xff\xfe\0\r\r\n"\xe2\x80\xa8\xc2\x85\x0b\x0c\x1c"\n{"last":"\xc3\xa9"'


@pytest.mark.parametrize("split", range(len(STREAM) + 1))
def test_a_line_ends_at_its_newline_wherever_the_reads_are_split(split: int) -> None:
    """FR-06, FR-10: and at nothing else that some readers split at, or that is half a character."""
    buffer = LineBuffer()
    lines = feed(buffer, STREAM[:split], len(STREAM)) + feed(buffer, STREAM[split:], len(STREAM))
    assert lines == [part + b"\n" for part in STREAM.split(b"\n")[:-1]]
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
    """FR-03."""
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
    *(
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b"[NaN]",
        b'{"params":{"a":NaN}}',
        b'{"params":[{"a":NaN}]}',
    ),
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
    """BJ-06."""
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


@pytest.mark.parametrize(
    "text", ["\\r", "\u2028", "\u2029", "\x85", "\x7f", "\\u000d\\u000a", "\\u0000", "\ufeff", "🎉"]
)
def test_what_some_line_readers_split_at_is_only_text_inside_a_string(text: str) -> None:
    """FR-06."""
    arguments = f'{{"s":"{text}"}}'.encode()
    assert accepted_call(call(arguments)).arguments == arguments


# ------------------------------------------------------------------------------------------------- downstream: nesting


def tower(levels: int, chance: Random) -> str:
    """A value nested that deep, with brackets in its strings and shallow neighbours all the way down."""
    text = "[1]"
    for _ in range(levels - 1):
        noise = spell("".join(chance.choices('[]{}"\\x', k=3)), chance)
        forms = [f"[{text}]", f"[[],{noise},{text},{{}}]", f"{{{noise}:{text}}}", f'{{"":{noise},"":{text}}}']
        text = chance.choice(forms)
    return text


@pytest.mark.parametrize("seed", range(30))
def test_500_levels_pass_and_501_do_not(seed: int) -> None:
    chance = Random(seed)
    assert accepted_call(call(f'{{"x":{tower(497, chance)}}}')).signature
    assert refusal(call(f'{{"x":{tower(498, chance)}}}')) == (INVALID_REQUEST, None)
    assert wire.read_downstream(f"[{tower(499, chance)}]".encode()).call is None
    assert refusal(f"[{tower(500, chance)}]".encode()) == (INVALID_REQUEST, None)


def test_objects_that_repeat_a_key_may_be_nested_as_deep_as_any() -> None:
    assert accepted_call(call('{"a":1,"a":' * 498 + "1" + "}" * 498)).signature


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_100000_levels_from_downstream_are_refused(opening: str, closing: str) -> None:
    for core in ("1", "", '"'):
        line = opening * DEEP + core + closing * DEEP
        assert refusal(line.encode()) == (INVALID_REQUEST, None)
        assert refusal(call(f'{{"a":{line}}}')) == (INVALID_REQUEST, None)


# -------------------------------------------------------------------------------------------- downstream: doubtful keys

ENVELOPE: Final = ["jsonrpc", "id", "method", "params", "result", "error"]
CALL_PARAMS: Final = ["name", "arguments", "_meta", "task", "inputResponses", "requestState"]


def doubtful(names: list[str]) -> list[tuple[str, str]]:
    """Each name with JSON texts of keys that some parser takes for it, in a second member or in place of it."""
    pairs = set()
    for name in names:
        cases = [
            name,
            name.upper(),
            name.capitalize(),
            name.swapcase(),
            name.replace("s", "ſ"),
            name.replace("k", "\u212a"),
        ]
        for key in (*cases, f"{name}\0", f"{name.upper()}\0x"):
            pairs |= {(name, json.dumps(key)), (name, f'"\\u{ord(key[0]):04x}{json.dumps(key)[2:]}')}
            pairs |= {(name, json.dumps(key, ensure_ascii=False))}
    return sorted(pairs)


@pytest.mark.parametrize(("name", "key"), doubtful(ENVELOPE))
def test_an_envelope_that_two_parsers_read_differently_is_refused(name: str, key: str) -> None:
    """BJ-09: the first and the last of two keys, or of two that differ in case only, can be meant."""
    sound = {"jsonrpc": '"2.0"', "id": "7", "method": '"ping"', "params": "{}", "result": "{}", "error": "{}"}
    members = [f'"{own}":{value}' for own, value in sound.items()]
    wire.read_downstream(f"{{{','.join(members)}}}".encode())
    expected = INVALID_REQUEST, None if json.loads(key).casefold() == "id" else 7
    assert refusal(f"{{{','.join([*members, key + ':1'])}}}".encode()) == expected
    assert refusal(f"{{{','.join([key + ':1', *members])}}}".encode()) == expected
    if json.loads(key) != name:
        members[ENVELOPE.index(name)] = f"{key}:1"
        assert refusal(f"{{{','.join(members)}}}".encode())[0] == INVALID_REQUEST


@pytest.mark.parametrize(("name", "key"), doubtful(CALL_PARAMS))
def test_params_of_a_call_that_two_parsers_read_differently_are_refused(name: str, key: str) -> None:
    """BJ-09."""
    members = [f'"{own}":{{}}' for own in {name} - {"name"}] + ['"name":"t"']
    assert accepted_call(with_params(f"{{{','.join(members)}}}").encode())
    for parts in ([*members, f"{key}:{{}}"], [f"{key}:{{}}", *members]):
        assert refusal(with_params(f"{{{','.join(parts)}}}").encode()) == (INVALID_REQUEST, "x")
    if name != "name" and json.loads(key) != name:
        assert refusal(with_params(f'{{"name":"t",{key}:{{}}}}').encode()) == (INVALID_REQUEST, "x")


def test_other_keys_may_be_repeated_and_spelt_at_will() -> None:
    line = call('{"a":1,"a":2,"A":3,"id":1,"ID":2}', rest=',"X":1,"x":2,"x":3').replace(
        b'"jsonrpc"', b'"x":1,"x":2,"jsonrpc"'
    )
    assert accepted_call(line).name == "t"
    same = b'{"id":1,"method":"m","params":{"name":1,"Name":2,"name":3,"_meta":1,"_meta":2}}'
    assert wire.read_downstream(same).method == "m"


@pytest.mark.parametrize(
    "method", ["tools\\/call", "\\u0074ools/call", "\\u0074\\u006f\\u006f\\u006c\\u0073\\u002F\\u0063all"]
)
def test_a_method_is_known_through_its_escapes(method: str) -> None:
    for key in ("method", "\\u006dethod", "metho\\u0064"):
        line = call().replace(b'"method":"tools/call"', f'"{key}":"{method}"'.encode())
        assert accepted_call(line).name == "t"


@pytest.mark.parametrize("method", ["tools/call ", "Tools/Call", "tools/calls", "tools/list", "", "tools/cal\\u0000l"])
def test_another_method_is_another_method(method: str) -> None:
    line = call().replace(b"tools/call", method.encode())
    assert wire.read_downstream(line)._replace(params={}) == Message(json.loads(f'"{method}"'), Id("integer", 1), b"1")


def test_a_method_that_is_a_call_up_to_its_nul_is_refused() -> None:
    assert refusal(call().replace(b"tools/call", b"tools/call\\u0000x")) == (INVALID_REQUEST, 1)


# -------------------------------------------------------------------------------------------------- downstream: calls


@pytest.mark.parametrize(
    ("line", "code", "request_id"),
    [
        *[
            (call(request_id=bad).decode(), INVALID_REQUEST, None)
            for bad in ("null", "true", "[]", "{}", "1.0", "1e0", "-0.5")
        ],
        (call().decode().replace('"2.0"', '"1.0"'), INVALID_REQUEST, 1),
        (call().decode().replace('"2.0"', "2.0"), INVALID_REQUEST, 1),
        (call().decode().replace('"jsonrpc":"2.0",', ""), INVALID_REQUEST, 1),
        (call(request_id='"a\\"\\ud800"').decode().replace('"2.0"', "null"), INVALID_REQUEST, 'a"\ud800'),
        ('{"jsonrpc":"2.0","id":"x","method":"tools/call"}', INVALID_PARAMS, "x"),
        *[(with_params(bad), INVALID_PARAMS, "x") for bad in ("null", "[]", '"t"', '["t",{}]', "1")],
        *[(with_params(bad), INVALID_PARAMS, "x") for bad in ("{}", '{"name":null}', '{"name":1}', '{"name":["t"]}')],
        *[
            (call(bad, '"x"').decode(), INVALID_PARAMS, "x")
            for bad in ("[]", '"{}"', "1", "1.5", "true", "false", '[["a",1]]')
        ],
        *[(with_params(f'{{"name":"t","_meta":{bad}}}'), INVALID_PARAMS, "x") for bad in ("null", "[]", "1", '""')],
        (with_params('{"name":"t","_meta":{"checkpoint_seq":1,"checkpoint_seq":2}}'), INVALID_PARAMS, "x"),
        (call('{"a":1e1000000000000000000}').decode(), INVALID_REQUEST, 1),
        (call('{"a":[{"b":-0.5E-0000000000000000001}]}').decode(), INVALID_REQUEST, 1),
        (call('{"a":1,"a":1e+1000000000000000000}').decode(), INVALID_REQUEST, 1),
    ],
)
def test_an_unsound_call_is_refused(line: str, code: int, request_id: Any) -> None:
    assert refusal(line.encode()) == (code, request_id)


def test_a_call_without_an_id_is_dropped_without_an_answer() -> None:
    for line in (call().replace(b'"id":1,', b""), b'{"method":"tools/call"}', b'{"method":"tools/call","params":[]}'):
        with pytest.raises(WireError) as raised:
            wire.read_downstream(line)
        assert raised.value.reply is None


def test_a_call_that_no_journal_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line = call('{"a":"0123456789"}')
    monkeypatch.setattr(wire, "MAX_CALL_BYTES", len(line))
    assert accepted_call(line)
    monkeypatch.setattr(wire, "MAX_CALL_BYTES", len(line) - 1)
    assert refusal(line) == (INVALID_REQUEST, 1)
    assert wire.read_downstream(line.replace(b"tools/call", b"tools/xxxx")).method == "tools/xxxx"


def test_a_call_is_read_with_all_that_matters() -> None:
    meta = '{"checkpoint_seq":3,"io.modelcontextprotocol/protocolVersion":"2026-07-28"}'
    arguments = '{"é" : [1.50, "\\u00e9"]}'
    line = call(arguments, '"\\u0061"', f',"_meta":{meta},"task":{{}},"requestState":"s","inputResponses":{{}}')
    assert wire.read_downstream(line) == Message(
        method="tools/call",
        id=Id("string", "a"),
        id_bytes=b'"\\u0061"',
        is_modern=True,
        meta=json.loads(meta),
        call=wire.ToolCall(
            name="t",
            arguments=arguments.encode(),
            signature=wire.signature("t", wire.parse(arguments.encode())),
            meta=json.loads(meta),
            request_state="s",
            is_next_leg=True,
            wants_task=True,
        ),
    )


@pytest.mark.parametrize(
    ("rest", "state", "is_next_leg", "wants_task"),
    [
        ("", None, False, False),
        (',"task":null', None, False, False),
        (',"task":{"ttl":1}', None, False, True),
        (',"requestState":"s"', "s", True, False),
        (',"requestState":""', "", True, False),
        (',"requestState":7', None, True, False),
        (',"inputResponses":{}', None, True, False),
    ],
)
def test_rounds_and_tasks_are_seen(rest: str, state: str | None, is_next_leg: bool, wants_task: bool) -> None:
    found = accepted_call(call(rest=rest))
    assert (found.request_state, found.is_next_leg, found.wants_task) == (state, is_next_leg, wants_task)


@pytest.mark.parametrize(
    "arguments", ["{}", "null", "{ }", '{"a":1,"a":2}', '{"a":"\\ud800"}', '{"\\u0000":"\\u0000"}']
)
def test_arguments_are_kept_to_the_byte(arguments: str) -> None:
    assert accepted_call(call(arguments)).arguments == arguments.encode()


def test_absent_arguments_are_told_from_null() -> None:
    found = accepted_call(with_params('{"name":"t"}').encode())
    assert found.arguments is None
    assert found.signature == accepted_call(call("null")).signature == accepted_call(call("{}")).signature


@pytest.mark.parametrize("fill", ["x" * 1000, "é" * 1000, "🎉", "\\u00e9" * 100])
def test_spans_are_exact_on_either_side_of_other_characters(fill: str) -> None:
    arguments = f'{{"é":"{fill}"}}'
    for rest in ("", f',"title":"{fill}☃"', f',"title":"{fill * 3}"'):
        assert accepted_call(call(arguments, f'"{fill}"', rest)).arguments == arguments.encode()
        assert wire.read_downstream(call(arguments, f'"{fill}"', rest)).id_bytes == f'"{fill}"'.encode()


@pytest.mark.parametrize("era", ['"2026-07-28"', "null", '"1999"'])
def test_a_request_is_modern_exactly_when_its_meta_names_a_version(era: str) -> None:
    meta = f'{{"io.modelcontextprotocol/protocolVersion":{era}}}'
    for method in ("ping", "tools/call"):
        line = f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{{"name":"t","_meta":%s}}}}'
        assert wire.read_downstream((line % meta).encode()).is_modern
        assert not wire.read_downstream(
            (line % '{"x":{"io.modelcontextprotocol/protocolVersion":1}}').encode()
        ).is_modern
    assert not wire.read_downstream(f'{{"id":1,"method":"ping","_meta":{meta}}}'.encode()).is_modern
    assert not wire.read_downstream(f'{{"id":1,"method":"ping","params":[{{"_meta":{meta}}}]}}'.encode()).is_modern


def test_a_pin_stays_an_integer_beside_an_endless_one() -> None:
    found = accepted_call(call('{"n":' + "7" * 5000 + "}", rest=',"_meta":{"checkpoint_seq":3}'))
    assert found.meta == {"checkpoint_seq": 3}
    assert type(found.meta["checkpoint_seq"]) is int


@pytest.mark.parametrize("literal", ["1.0", "1e0", "10e-1", "1" * 641])
def test_a_pin_that_is_no_plain_integer_does_not_look_like_one(literal: str) -> None:
    pin = accepted_call(call(rest=f',"_meta":{{"checkpoint_seq":{literal}}}')).meta["checkpoint_seq"]
    assert not isinstance(pin, int | float)
    assert repr(pin) == literal


# ---------------------------------------------------------------------------------------------------- downstream: ids


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("1", Id("integer", 1)),
        ("0", Id("integer", 0)),
        ("-0", Id("integer", 0)),
        ("-7", Id("integer", -7)),
        ("9007199254740993", Id("integer", 2**53 + 1)),
        ("1" + "0" * 639, Id("integer", 10**639)),
        ("-1" + "0" * 639, Id("integer", -(10**639))),
        ("1" + "0" * 640, Id("integer", "1e640")),
        ("7" * LONG, Id("integer", "7" * LONG + "e0")),
        ('"1"', Id("string", "1")),
        ('""', Id("string", "")),
        ('"é"', Id("string", "é")),
        ('"\\u00e9"', Id("string", "é")),
        ('"\\ud800"', Id("string", "\ud800")),
        (f'"{"x" * LONG}"', Id("string", "x" * LONG)),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_id_is_known_by_type_and_value_and_kept_by_its_bytes(literal: str, expected: Id) -> None:
    message = wire.read_downstream(call(request_id=literal))
    assert (message.id, message.id_bytes) == (expected, literal.encode())
    assert refusal(call("1", request_id=literal.replace("7" * LONG, "7"))) == (
        INVALID_PARAMS,
        json.loads(literal.replace("7" * LONG, "7")),
    )
    answer = wire.read_upstream(f'{{"id":{literal},"result":{{}}}}'.encode())
    assert answer is not None
    assert [each.id for each in answer.answers] == [expected]


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("1.0", Id("integer", 1)),
        ("10e-1", Id("integer", 1)),
        ("1.5", Id("fraction", "15e-1")),
        ("0.15E1", Id("fraction", "15e-1")),
        ("1e640", Id("integer", "1e640")),
        ("1e9999999999999999999", Id("fraction", "1e9999999999999999999")),
        ("null", None),
        ("true", None),
        ("[1]", None),
        ("{}", None),
    ],
)
def test_other_requests_may_have_any_id(literal: str, expected: Id | None) -> None:
    message = wire.read_downstream(f'{{"id":{literal},"method":"ping"}}'.encode())
    assert message == Message("ping", expected, literal.encode() if expected else b"null")


def test_answers_and_notifications_from_downstream_are_told_apart() -> None:
    assert wire.read_downstream(b'{"id":1,"result":{}}') == Message(None, Id("integer", 1), b"1")
    assert wire.read_downstream(b'{"method":"x"}') == Message("x")
    assert wire.read_downstream(b'{"id":1,"method":7}') == Message(None, Id("integer", 1), b"1")
    assert wire.read_downstream(b"{}") == Message()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ('{"requestId":1}', Id("integer", 1)),
        ('{"requestId":"1","reason":"x"}', Id("string", "1")),
        ('{"requestId":1.0}', Id("integer", 1)),
        ('{"requestId":null}', None),
        ('{"id":1}', None),
        ("[1]", None),
    ],
)
def test_a_cancel_names_the_request_it_means(params: str, expected: Id | None) -> None:
    line = f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}'
    assert wire.read_downstream(line.encode()).cancels == expected
    assert wire.read_downstream(line.replace("cancelled", "other").encode()).cancels is None


# ------------------------------------------------------------------------------------------------- downstream: arrays

CALL: Final = call().decode().strip()


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        (f"[{CALL}]", [1]),
        (f' [ {CALL} , 7 , {{"id":"x","method":"ping"}} , {{"method":"note"}} , {{"id":9,"result":{{}}}} ] ', [1, "x"]),
        (f'[{{"id":"x","method":"ping"}},7,{CALL}]', ["x", 1]),
        (f"[[{CALL}]]", [1]),
        (f'[[],[[{{"id":2.5,"method":"ping"}},{CALL}],1]]', [2.5, 1]),
        ('[{"id":null,"method":"tools/call"},{"id":1,"method":"tools/call"}]', [None, 1]),
        ('[{"id":1,"Method":"tools/call"}]', [1]),
        ('[{"ID":1,"method":"tools/call"}]', [1]),
        ('[{"id":1,"id":2,"method":"tools/call"}]', [None]),
        ('[{"id":1,"method":"ping","method":"tools/call"},{"id":2,"method":"x"}]', [1, 2]),
        ('[{"id":1,"method":"tools/call\\u0000"}]', [1]),
        ('[{"id":1,"m\\u0065thod":"tools\\/call"}]', [1]),
    ],
)
def test_an_array_with_a_call_is_answered_request_by_request(line: str, ids: list[Any]) -> None:
    with pytest.raises(WireError) as raised:
        wire.read_downstream(line.encode())
    assert raised.value.reply is not None
    assert raised.value.reply.endswith(b"]\n")
    replies = [error_of(json.dumps(each).encode() + b"\n") for each in json.loads(raised.value.reply)]
    assert replies == [(INVALID_REQUEST, each) for each in ids]


def test_an_array_with_a_call_and_nobody_to_answer_is_dropped() -> None:
    with pytest.raises(WireError) as raised:
        wire.read_downstream(b'[{"jsonrpc":"2.0","method":"tools/call","params":{"name":"t"}},{"id":1,"result":{}}]')
    assert raised.value.reply is None


@pytest.mark.parametrize("line", ["[]", " [ ] ", "[1]", '["tools/call"]', "[[],[[]]]", '[["method","tools/call"]]'])
def test_an_array_without_a_message_passes(line: str) -> None:
    assert wire.read_downstream(line.encode()) == Message()


def test_the_messages_of_an_array_that_passes_are_known() -> None:
    inner = '{"method":"notifications/cancelled","params":{"requestId":3}}'
    line = f'[{{"id":1.0,"method":"ping"}},[2,{inner}],{{"id":"x","result":{{"method":"tools/call"}}}}]'
    assert wire.read_downstream(line.encode()) == Message(
        batch=(
            Message("ping", Id("integer", 1), b"1.0"),
            Message("notifications/cancelled", cancels=Id("integer", 3)),
            Message(None, Id("string", "x"), b'"x"'),
        )
    )


# ----------------------------------------------------------------------------------------------------------- signature

BIG: Final = "9" * 700
SAME: Final = [  # arguments that are equal within a line, and different from those of every other line
    ["{}", " { } ", "null"],
    ['{"a":1}', '{"a":1.0}', '{"a":1e0}', '{"a":10E-1}', '{"a":0.01e+02}', '{ "\\u0061" : 1.000 }', '{"a":1e00}'],
    ['{"a":-1}', '{"a":-1.0}'],
    ['{"a":0}', '{"a":-0}', '{"a":0.0}', '{"a":-0.0e5}', '{"a":0e-99}', '{"a":0e999999999999999999}'],
    ['{"a":100}', '{"a":1e2}', '{"a":1000e-1}'],
    ['{"a":0.1}', '{"a":1e-1}', '{"a":0.10}'],
    ['{"a":-0.1}'],
    ['{"a":0.1000000000000000055511151231257827}'],
    ['{"a":9007199254740992}', '{"a":9007199254740992.0}'],
    ['{"a":9007199254740993}', '{"a":9.007199254740993E15}'],
    ['{"a":1e400}', '{"a":1' + "0" * 400 + "}", '{"a":10e399}'],
    ['{"a":1e401}'],
    ['{"a":-1e400}'],
    ['{"a":1e-400}', '{"a":0.' + "0" * 399 + "1}"],
    ['{"a":1e639}', '{"a":1' + "0" * 639 + "}"],
    ['{"a":1e640}', '{"a":1' + "0" * 640 + "}", '{"a":0.1e641}'],
    [f'{{"a":{BIG}}}', f'{{"a":{BIG}.0}}', f'{{"a":{BIG}0e-1}}', f'{{"a":0.{BIG}e700}}'],
    [f'{{"a":{BIG[1:]}8}}'],
    [f'{{"a":{BIG}.5}}'],
    ['{"a":1e999999999999999999}', '{"a":10e999999999999999998}', '{"a":1E+999999999999999999}'],
    ['{"a":1e-999999999999999999}'],
    ['{"a":"1"}', '{"a":"\\u0031"}'],
    ['{"a":"1.0"}'],
    ['{"a":true}'],
    ['{"a":false}'],
    ['{"a":null}'],
    ['{"a":"null"}'],
    ['{"a":{}}'],
    ['{"a":[]}', '{"a":[ ]}'],
    ['{"a":[1]}'],
    ['{"a":[[1]]}'],
    ['{"a":[1,2]}'],
    ['{"a":[2,1]}'],
    ['{"a":"é"}', '{"a":"\\u00e9"}', '{"a":"\\u00E9"}'],
    ['{"a":"e\u0301"}', '{"a":"e\\u0301"}'],
    ['{"a":"/"}', '{"a":"\\/"}', '{"a":"\\u002f"}'],
    ['{"a":"😀"}', '{"a":"\\ud83d\\ude00"}'],
    ['{"a":"\\ud83d"}', '{"a":"\\uD83D"}'],
    ['{"a":"\\ude00"}'],
    ['{"a":"\\ude00\\ud83d"}'],
    ['{"a":"\\u0000one"}'],
    ['{"a":"\\u0000two"}'],
    ['{"a\\u0000":1}'],
    ['{"A":1}'],
    ['{"a":1,"b":2}', '{"b":2,"a":1}', '\t{\t"b" :2.0,\n"a":\n1}'],
    ['{"a":2,"b":1}'],
    ['{"a":1,"a":1}', '{"a":1.0,"\\u0061":1}'],
    ['{"a":1,"a":2}', '{"a":1,"a":2e0}'],
    ['{"a":2,"a":1}'],
    ['{"a":1,"b":0,"a":2}', '{"b":0,"a":1,"a":2}', '{"a":1,"a":2,"b":0}'],
    ['{"a":{"b":1,"b":2}}'],
    ['{"a":["b",1,"b",2]}'],
    ['{"a":["b",1,"b",1.5]}'],
    ['{"a":[{"b":1,"b":1},["b",1,"b",1]]}'],
    ['{"a":[["b",1,"b",1],{"b":1,"b":1}]}'],
    ['{"a":1.5}', '{"a":15e-1}'],
    ['{"a":"15e-1"}'],
    ['{"a":["15e-1"]}'],
    ['{"a":["NaN","15e-1"]}'],
    ['{"a":[null,"15e-1"]}'],
    ['{"a":[1.5,2.5]}'],
    ['{"a":[2.5,1.5]}'],
]


def test_signatures_are_equal_exactly_where_the_contract_says_so() -> None:
    """BJ-04, BJ-09 (keys that are repeated), BJ-12, RM-03, RM-06: a row of SAME for each meaning."""
    found: dict[str, set[int]] = {}
    for at, spellings in enumerate(SAME):
        for spelling in spellings:
            found.setdefault(accepted_call(call(spelling)).signature, set()).add(at)
    assert sorted(found.values(), key=min) == [{at} for at in range(len(SAME))]


def test_the_tool_is_part_of_the_signature_and_the_rest_of_the_request_is_not() -> None:
    base = accepted_call(call('{"a":1}')).signature
    rest = ',"_meta":{"progressToken":1},"task":{},"requestState":"s","inputResponses":{},"other":1'
    assert accepted_call(call('{"a":1}', '"z"', rest)).signature == base
    assert accepted_call(call('{"a":1}').replace(b'"t"', b'"\\u0074"')).signature == base
    assert accepted_call(call('{"a":1}').replace(b'"t"', b'"T"')).signature != base
    assert wire.signature('t",{}', {}) != wire.signature("t", {})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{}", "{}"),
        ('{"b":[true,null,"é\\u0000"],"a":-0}', '{"a":0,"b":[true,null,"é\\u0000"]}'),
        ('{"a":1.50,"b":1e700}', '{"a":[NaN,"15e-1"],"b":[NaN,"1e700"]}'),
        ('{"b":1,"a":{"y":1,"x":2,"x":3}}', '{"a":[Infinity,"x",2,"x",3,"y",1],"b":1}'),
        ('{"a":"\\ud83d","b":"\\ud83d\\ude00"}', '{"a":"\ud83d","b":"\U0001f600"}'),
    ],
)
def test_the_form_that_is_hashed_never_changes(arguments: str, text: str) -> None:
    """Journals hold these digests: another form would make every row on disk diverge."""
    assert wire.canonical(wire.parse(arguments.encode())) == text
    assert accepted_call(call(arguments)).signature == sha256(f'["t",{text}]')


def test_the_digests_on_disk_never_change() -> None:
    """Should one of these have to, `storage.FORMAT` must too."""
    arguments = '{"b":[true,null,"é\\u0000"],"a":-0,"c":1e700,"d":{"x":2,"x":3},"e":"\\ud83d","f":"%s"}' % ("x" * 4097)
    digest = "eb37bbb0ae0421c26a79e860aa462d09572da97ec93bf3dc093b98a4e515e11c"
    assert accepted_call(call(arguments)).signature == digest


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@pytest.mark.parametrize("mark", ["x", "é", "\U0001f600", "\ud83d", "\n"])
@pytest.mark.parametrize("over", [0, 1, (1 << 18) - 4096, 1_000_000])
def test_a_long_text_is_hashed_apart(mark: str, over: int) -> None:
    text = mark * (4096 + over)
    given = {"z": 1, "long": text, "a": {"long": text}, "b": [text]}
    stands = [float("-inf"), sha256(text)] if over else text
    form = json.dumps({**given, "long": stands}, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    assert wire.signature("t", given) == sha256(f'["t",{form}]')
    assert given["long"] is text
    assert accepted_call(call(json.dumps(given))).signature == wire.signature("t", given)


def test_long_texts_are_told_apart_and_from_all_else() -> None:
    text = "é" * 5000
    digest = sha256(text)
    forms = [
        *({"a": text}, {"b": text}, {"a": text + "\0"}, {"a": "e\u0301" * 5000}, {"a": text, "b": text}),
        *({"a": "\ud83d\ude00" * 5000}, {"a": "\U0001f600" * 5000}, {"a": "\ude00\ud83d" * 5000}),
        *({"a": digest}, {"a": [digest]}, {"a": ["-Infinity", digest]}, {"a": [None, digest]}, {"a": [text]}),
    ]
    assert len({wire.signature("t", form) for form in forms}) == len(forms)
    assert accepted_call(call(json.dumps({"a": text}))).signature == accepted_call(call(f'{{"a":"{text}"}}')).signature
    twice = [
        accepted_call(call(f'{{"a":{one},"a":{other}}}')) for one, other in ((f'"{text}"', "1"), ("1", f'"{text}"'))
    ]
    assert twice[0].signature != twice[1].signature


def test_a_million_digits_are_compared_as_digits() -> None:
    digits = "7" * LONG
    one, same, other = (accepted_call(call(f'{{"a":{n}}}')) for n in (digits, f"0.{digits}e{LONG}", digits[1:] + "8"))
    assert one.signature == same.signature != other.signature
    assert one.arguments == f'{{"a":{digits}}}'.encode()
    many = accepted_call(call(f'{{"a":[{",".join(["7" * 640] * 1000)},"{"1" * LONG}x"]}}'))
    assert many.signature


@pytest.mark.parametrize("limit", [640, 0])
def test_python_s_own_limit_on_digits_changes_nothing(limit: int) -> None:
    """BJ-10."""
    lines = [call(spelling) for spellings in SAME for spelling in spellings]
    usual = [wire.read_downstream(line) for line in lines]
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        assert [wire.read_downstream(line) for line in lines] == usual
    finally:
        sys.set_int_max_str_digits(before)


# ------------------------------------------------------------------------------------------------------------ upstream


def upstream(line: str | bytes) -> wire.Upstream:
    found = wire.read_upstream(line.encode() if isinstance(line, str) else line)
    assert found is not None
    return found


def answers(line: str | bytes) -> list[tuple[int | str, str, bytes]]:
    """The answers in a line, in short; each body stands where it says it does."""
    data = line.encode() if isinstance(line, str) else line
    found = upstream(data).answers
    for each in found:
        assert data[each.start : each.start + len(each.body)] == each.body
    return [(each.id.value, "error" if each.is_error else "result", each.body) for each in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"jsonrpc":"2.0","id":1,"result":{}}', [(1, "result", b"{}")]),
        (' {"result" : { "a" : 1 } , "id" : "1"} \r\n', [("1", "result", b'{ "a" : 1 }')]),
        ('{"id":1,"error":{"code":1}}', [(1, "error", b'{"code":1}')]),
        ('{"id":1,"error":null,"result":[]}', [(1, "result", b"[]")]),
        ('{"id":1,"error":null}', [(1, "error", b"null")]),
        ('{"id":1,"result":null}', [(1, "result", b"null")]),
        ('{"id":1,"result":null,"error":{}}', [(1, "error", b"{}")]),
        ('{"id":1,"result":{},"error":{}}', [(1, "error", b"{}")]),
        ('{"id":1,"method":"x","result":{}}', [(1, "result", b"{}")]),
        ('{"ID":1,"Result":{}}', [(1, "result", b"{}")]),
        ('{"id":1,"reſult":{}}', [(1, "result", b"{}")]),
        ('{"i\\u0064":1,"\\u0045rror":{}}', [(1, "error", b"{}")]),
        (
            '{"id":1,"id":"2","Id":3,"id":null,"result":{}}',
            [(1, "result", b"{}"), ("2", "result", b"{}"), (3, "result", b"{}")],
        ),
        ('{"id":1,"result":1,"result":2}', [(1, "result", b"2")]),
        ('{"id":null,"error":{}}', []),
        ('{"id":true,"result":{}}', []),
        ('{"result":{}}', []),
        ('{"id":1}', []),
        ('{"a":{"id":1,"result":{}}}', []),
        ('[{"id":1,"result":{}},{"id":2,"error":{}}]', [(1, "result", b"{}"), (2, "error", b"{}")]),
        ('[[7,[{"id":1,"result":{}}]],{"id":2,"result":3}]', [(1, "result", b"{}"), (2, "result", b"3")]),
        ('{"id":1,"result":{"a":NaN,"b":-Infinity,"c":1e400}}', [(1, "result", b'{"a":NaN,"b":-Infinity,"c":1e400}')]),
        ('{"id":1,"result":"\t\0"}', [(1, "result", b'"\t\0"')]),
        ('{"\t":1,"id":1,"result":"\\ud83d"}', [(1, "result", b'"\\ud83d"')]),
        ('{"id":1,"result":{"é":"\u2028"}}', [(1, "result", '{"é":"\u2028"}'.encode())]),
        (b'{"id":1,"result":{"t":"\xc3\x28\xff"}}', [(1, "result", b'{"t":"\xc3\x28\xff"}')]),
        (b'{"\xff":"\xc3\xa9\xff","result":"\xff\xfe","id":"\xe9"}', [("\udce9", "result", b'"\xff\xfe"')]),
        (b'{"id":1,"result":' + b"7" * LONG + b"}", [(1, "result", b"7" * LONG)]),
        ('{"id":1,"result":{}} {"id":2,"result":{}}', [(1, "result", b"{}"), (2, "result", b"{}")]),
        ('{"id":1,"result":{}}}', [(1, "result", b"{}")]),
        ('{"id":1,"result":{}} (took 3 ms)', [(1, "result", b"{}")]),
        ('[{"id":1,"result":{}},{"id":2,"resu', [(1, "result", b"{}")]),
        ('200 {"id":1,"result":{}}', [(1, "result", b"{}")]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_answer_that_a_client_could_see_is_seen(line: str | bytes, expected: list[Any]) -> None:
    assert answers(line) == expected


def test_equal_ids_are_equal_in_both_directions() -> None:
    for literal in ("1", "1.0", "-0", "1.5e3", '"\\u0061"', "1" * 5000, "1e700", "7e999999999999999999"):
        asked = wire.read_downstream(f'{{"id":{literal},"method":"m"}}'.encode()).id
        assert [each.id for each in upstream(f'{{"id":{literal},"result":1}}').answers] == [asked]
    ids = [upstream(f'{{"id":{literal},"result":1}}').answers[0].id for literal in ("1", '"1"', "1.5", '"15e-1"', "-1")]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "line",
    ["", " \r\n", "null", "1", "Listening on 3000", "x{}", "{", "[", '{"id":1,"result":}', "[]", '"{}"', "\ufeff{}"],
)
def test_a_line_without_an_object_is_none_of_ours(line: str) -> None:
    assert wire.read_upstream(line.encode()) is None


def test_bytes_that_are_no_text_are_none_of_ours() -> None:
    assert wire.read_upstream(b"\xff\xfeA\n") is None


def test_upstream_s_byte_order_mark_may_come_first() -> None:
    line = BOM + '{"é":1,"id":1,"result":{}}'.encode()
    found = wire.read_upstream(line, is_first=True)
    assert found is not None
    assert line[found.answers[0].start :] == b"{}}"
    assert wire.read_upstream(line) is None


def test_requests_and_notifications_of_upstream_are_seen() -> None:
    requests = '{"id":1,"method":"ping"},{"method":"note","params":{"id":2}},{"id":null,"Method":"x"},{"method":4}'
    found = upstream(f'[{requests},{{"id":3,"result":{{}}}}]')
    assert found.methods == (("ping", Id("integer", 1)), ("note", None), ("x", None))
    assert [each.id.value for each in found.answers] == [3]


def test_the_members_of_a_body_are_given_as_values() -> None:
    line = '{"id":1,"error":{"code":-32000,"n":%s,"data":{"a":[1]},"code":-32001}}' % ("1" * 5000)
    members = upstream(line).answers[0].members
    assert members["code"] == -32001
    assert type(members["code"]) is int
    assert members["data"] == {"a": [1]}
    assert repr(members["n"]) == "1" * 5000
    for body in ("[]", "1", "null", '"x"', nested_array(DEEP)):
        assert upstream(f'{{"id":1,"result":{body}}}').answers[0].members == {}


def nested_array(levels: int, core: str = "") -> str:
    return "[" * levels + core + "]" * levels


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"a":', "}"), ('[{"a" : [1,"]", ', "] } ] "), ('{"\\"":{},"b":[{"c":', "}]}")],
)
def test_an_answer_of_any_depth_is_seen(opening: str, closing: str) -> None:
    deep = opening * DEEP + "0" + (closing * DEEP).rstrip()
    assert answers(f'{{"x":{deep},"id":1,"result":{deep}}}') == [(1, "result", deep.encode())]
    found = upstream(f'{{"id":1,"result":{{"resultType":"task","structuredContent":{deep},"taskId":"x"}}}}').answers[0]
    assert found.members == {"resultType": "task", "structuredContent": wire.TOO_DEEP, "taskId": "x"}
    assert answers(f'{{"id":{deep},"result":1}}') == []
    assert wire.read_upstream(f'{{"id":1,"result":{deep[:-1]}'.encode()) is None


def test_an_answer_is_seen_under_any_number_of_arrays() -> None:
    assert answers(nested_array(DEEP, '{"id":1,"result":{}}')) == [(1, "result", b"{}")]


WHOLE: Final = (
    r'1 | -0.5e+3 | NaN | -Infinity | true |  null  | "\"]" | [] | [ ] | {} | { } | [1,2] | [[],{}] | {"a":1}'
    r' | {"a":{"b":[1,{"c":null}]},"d":""} | {"a":1,"a":2} | { "a" : [ ] , "b" : { } }'
)
BROKEN: Final = (
    r"""1, | ,1 | , | 1 2 | 01 | 1. | - | tru | Nan | 'a' | " | "\" | ] | [ | { | } | [} | {] | [1} | : | {"a"}"""
    r' | {"a":} | {"a":1,} | {,"a":1} | {1:2} | {"a":1 "b":2} | {"a" 1} | {"a":1:2} | ["a":1] | {"a",1} | [1,] | [,]'
)


@pytest.mark.parametrize("core", ["", '"\0"', *WHOLE.split(" | ")])
def test_a_deep_value_is_skipped_as_a_whole(core: str) -> None:
    deep = nested_array(5000, core)
    assert answers(f'{{"id":1,"result":{deep}}}') == [(1, "result", deep.encode())]


@pytest.mark.parametrize("core", BROKEN.split(" | "))
def test_a_deep_value_that_is_not_json_is_no_answer(core: str) -> None:
    assert wire.read_upstream(f'{{"id":1,"result":{nested_array(5000, core)}}}'.encode()) is None


# ------------------------------------------------------------------------------------------------------- what we write


def test_an_error_line_is_one_line_of_ascii() -> None:
    assert wire.error_line(b'"\xc3\xa9"', -32600, "a\n\u2028é") == (
        b'{"jsonrpc":"2.0","id":"\xc3\xa9","error":{"code":-32600,"message":"a\\n\\u2028\\u00e9"}}\n'
    )
    assert wire.error_line(b"null", 31001, "x", {"checkpoint": {"tool": "\ud800"}}) == (
        b'{"jsonrpc":"2.0","id":null,"error":{"code":31001,"message":"x","data":{"checkpoint":{"tool":"\\ud800"}}}}\n'
    )


@pytest.mark.parametrize("body", [b"{}", b'{"a":NaN,"b":-0,"c":1e400}', b'"\xff\xfe%b%"', b"null"])
def test_a_replay_line_holds_the_recorded_bytes(body: bytes) -> None:
    assert wire.replay_line(b"1.0", body, is_error=False) == b'{"jsonrpc":"2.0","id":1.0,"result":' + body + b"}\n"
    assert wire.replay_line(b'"%b"', body, is_error=True) == b'{"jsonrpc":"2.0","id":"%b","error":' + body + b"}\n"


def test_our_own_requests_and_cancels_are_lines_that_we_would_pass() -> None:
    meta = wire.read_downstream(call(rest=',"_meta":{"a":1.5,"b":"\u2028"}')).meta
    line = wire.request_line("checkpoint-1", "tools/list", {"_meta": meta})
    assert json.loads(line)["params"] == {"_meta": {"a": 1.5, "b": "\u2028"}}
    read = wire.read_downstream(line)
    assert read.params.keys() == {"_meta"}
    assert read._replace(meta={}, params={}) == Message("tools/list", Id("string", "checkpoint-1"), b'"checkpoint-1"')


@pytest.mark.parametrize(("method", "is_kept"), [("initialize", True), ("tools/list", True), ("resources/list", False)])
def test_params_are_kept_where_somebody_reads_them(method: str, is_kept: bool) -> None:
    line = wire.request_line("1", method, {"cursor": "2"})
    assert wire.read_downstream(line).params == ({"cursor": "2"} if is_kept else {})
    assert wire.read_downstream(wire.cancel_line(b"1.0")).cancels == Id("integer", 1)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (b"{}", b'{"resultType":"complete"}'),
        (b"{ }", b'{"resultType":"complete" }'),
        (b'{"a":NaN}', b'{"resultType":"complete","a":NaN}'),
        (b'{"a":{"resultType":"x"}}', b'{"resultType":"complete","a":{"resultType":"x"}}'),
        (b'{"t":"\xff\xc3\xa9"}', b'{"resultType":"complete","t":"\xff\xc3\xa9"}'),
        (b'{"a":1,"resultType":"task"}', b'{"a":1,"resultType":"task"}'),
        (b'{"result\\u0054ype":null}', b'{"result\\u0054ype":null}'),
        (b"[]", b"[]"),
        (b"null", b"null"),
        (
            b'{"a":' + nested_array(DEEP).encode() + b"}",
            b'{"resultType":"complete","a":' + nested_array(DEEP).encode() + b"}",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_result_gets_its_type_once(result: bytes, expected: bytes) -> None:
    assert wire.with_result_type(result) == expected
    assert wire.with_result_type(expected) == expected


SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"


@pytest.mark.parametrize(
    ("result", "handshake", "other"),
    [
        ('{"serverInfo":{"name":"a","version":"b"}}', '{"serverInfo":{"name":"N","version":"V"}}', None),
        ('{"serverInfo":{"version":1,"title":"x"}}', '{"serverInfo":{"version":"V","title":"x"}}', None),
        ('{ "serverInfo" : { "name" : "a" } , "é":1.0}', '{ "serverInfo" : { "name" : "N" } , "é":1.0}', None),
        ('{"server\\u0049nfo":{"n\\u0061me":[1]}}', '{"server\\u0049nfo":{"n\\u0061me":"N"}}', None),
        (
            '{"serverInfo":{"name":"a","name":"b"},"serverInfo":{"name":"c"}}',
            '{"serverInfo":{"name":"N","name":"N"},"serverInfo":{"name":"N"}}',
            None,
        ),
        ('{"serverInfo":{"Name":"a","x":{"name":"b"}}}', None, None),
        ('{"serverInfo":[{"name":"a"}],"ServerInfo":{"name":"b"}}', None, None),
        ('{"serverInfo":null,"a":{"serverInfo":{"name":"x"}}}', None, None),
        ('[{"serverInfo":{"name":"a"}}]', None, None),
        ('{"name":"a","version":"b","text":"serverInfo \\u0041"}', None, None),
        ('{"_meta":{"serverInfo":{"name":"a"}}}', None, None),
        (
            '{"_meta":{"X":{"name":"a"}},"X":{"name":"a"}}',
            '{"_meta":{"X":{"name":"N"}},"X":{"name":"a"}}',
            '{"_meta":{"X":{"name":"N"}},"X":{"name":"a"}}',
        ),
        (
            '{"_meta":{"x":NaN,"X":{"version":"b","name":"a"}}}',
            '{"_meta":{"x":NaN,"X":{"version":"V","name":"N"}}}',
            '{"_meta":{"x":NaN,"X":{"version":"V","name":"N"}}}',
        ),
        (
            '{"serverInfo":{"name":"a"},"_meta":{"X":{"name":"a"}}}',
            '{"serverInfo":{"name":"N"},"_meta":{"X":{"name":"N"}}}',
            '{"serverInfo":{"name":"a"},"_meta":{"X":{"name":"N"}}}',
        ),
        ("null", None, None),
    ],
)
def test_our_name_stands_where_upstream_s_stood(result: str, handshake: str | None, other: str | None) -> None:
    given = result.replace('"X"', f'"{SERVER_INFO}"').encode()
    for is_handshake, expected in ((True, handshake), (False, other)):
        named = wire.with_identity(given, "N", "V", is_handshake=is_handshake)
        if expected is None:
            assert named is given
        else:
            assert named == expected.replace('"X"', f'"{SERVER_INFO}"').encode()
        assert wire.with_identity(given, "", "", is_handshake=is_handshake) is given


@prop
@given(st.sampled_from(["initialize", "server/discover", "serverInfo", SERVER_INFO]), seeds, st.binary(max_size=4))
def test_no_spelling_of_what_names_a_server_is_missed(word: str, chance: Random, noise: bytes) -> None:
    may_hold = wire.may_name_server if word.endswith("serverInfo") else wire.may_greet
    for _ in range(20):
        written = spell(word, chance)
        assert json.loads(written) == word
        assert may_hold(noise + written.encode() + noise)


@pytest.mark.parametrize("may_hold", [wire.may_greet, wire.may_name_server])
def test_few_other_lines_look_as_if_they_named_a_server(may_hold: Any) -> None:
    for text in ("notifications/initialized", "serverInformation", "C:\\new\\under", "\\u4e2d", "a\nb"):
        assert not may_hold(f'{{"method":"x","params":{{"text":"{text}"}}}}'.encode())


def test_an_empty_name_or_version_leaves_upstream_s_own() -> None:
    result = b'{"serverInfo":{"name":"a","version":"b"},"x":"\xff"}'
    assert wire.with_identity(result, "N", "", is_handshake=True) == result.replace(b'"a"', b'"N"')
    assert wire.with_identity(result, "", 'V"é', is_handshake=True) == result.replace(b'"b"', b'"V\\"\\u00e9"')


def test_a_name_is_replaced_beside_a_value_of_any_depth() -> None:
    result = f'{{"a":{nested_array(DEEP)},"serverInfo":{{"name":"a","x":{nested_array(DEEP)}}}}}'
    assert (
        wire.with_identity(result.encode(), "N", "", is_handshake=True) == result.replace('"a","x"', '"N","x"').encode()
    )


# ---------------------------------------------------------------------------------------------------------- properties


@prop
@given(values, values, st.integers(-3, 10**30) | texts, seeds)
def test_spans_are_the_bytes_of_the_line(value: Any, other: Any, request_id: Any, chance: Random) -> None:
    own_id = Num(request_id, 0) if isinstance(request_id, int) else request_id
    params = Obj((("arguments", Obj((("v", value),))), ("name", "t"), ("other", other)))
    id_text = str(request_id) if isinstance(request_id, int) else spell(own_id, chance)
    members = [f'"id" :\t{id_text}', f'"params":{spell(params, chance)}', '"method":"tools/call"', '"jsonrpc":"2.0"']
    chance.shuffle(members)
    text = "{ " + " , ".join(members) + " }"
    node = read(text)
    assert node is not None
    message = wire.read_downstream(text.encode())
    assert message.call is not None
    (arguments,) = node.named("params")[0].named("arguments")
    assert message.call.arguments == text[arguments.start : arguments.end].encode()
    assert message.id_bytes == id_text.encode()
    assert message.id is not None
    assert message.id.value == request_id


@prop
@given(values, values, seeds)
def test_two_spellings_have_one_signature_exactly_when_they_mean_the_same(
    value: Any, other: Any, chance: Random
) -> None:
    def spelt(each: Any) -> tuple[str, Any]:
        text = spell(Obj((("v", each),)), chance)
        node = read(text)
        assert node is not None
        return accepted_call(call(text)).signature, meaning(node)

    first, again, near, far = spelt(value), spelt(value), spelt(changed(value, chance)), spelt(other)
    assert again == first
    assert (near[0] == first[0]) == (near[1] == first[1])
    assert (far[0] == first[0]) == (far[1] == first[1])


@prop
@given(seeds)
def test_whatever_passes_holds_no_call_that_we_did_not_see(chance: Random) -> None:
    for _ in range(20):
        text = some_line(chance, SMALL)
        node = read(text)
        assert node is not None
        methods = [
            value.content.partition("\0")[0]
            for message in messages(node)
            for key, value in message.content
            if is_key(key, "method") and value.kind == "string"
        ]
        try:
            message = wire.read_downstream(text.encode())
        except WireError:
            continue
        assert (message.call is not None) == ("tools/call" in methods)
        assert message.call is None or (node.kind == "object" and len(methods) == 1)


@prop
@given(seeds)
def test_every_answer_that_the_model_finds_is_found(chance: Random) -> None:
    for _ in range(20):
        text = some_line(chance, LAX)
        node = read(text, lenient=True)
        assert node is not None
        expected = []
        for message in messages(node):
            ids = [value for key, value in message.content if is_key(key, "id")]
            keys = {key for key, _ in message.content}
            is_body = is_key if keys.isdisjoint({"result", "error"}) else str.__eq__
            bodies = {
                name: [value for key, value in message.content if is_body(key, name)] for name in ("result", "error")
            }
            kind = "error" if bodies["error"] else "result"
            if bodies["result"] and bodies["error"] and bodies["error"][-1].content == "null":
                kind = "result"
            for each in ids if bodies[kind] else ():
                if each.kind in ("string", "number"):
                    body = bodies[kind][-1]
                    expected.append((each.kind, each.content, kind, text[body.start : body.end]))
        data = text.encode("utf-8", "surrogateescape")
        found = wire.read_upstream(data)
        assert (found is not None) == bool(messages(node))
        seen = [] if found is None else list(found.answers)
        assert len(seen) == len(expected)
        for answer, (id_kind, content, kind, body_text) in zip(seen, expected, strict=True):
            if id_kind == "string":
                assert answer.id == Id("string", content)
            elif Fraction(content).denominator == 1:
                assert answer.id == Id("integer", int(Fraction(content)))
            else:
                assert answer.id.kind == "fraction"
            assert answer.is_error == (kind == "error")
            assert answer.body == body_text.encode("utf-8", "surrogateescape")
            assert data[answer.start :].startswith(answer.body)


@prop
@given(values, seeds)
def test_a_line_is_called_no_json_exactly_when_it_is_none(value: Any, chance: Random) -> None:
    for _ in range(10):
        text = spell(chance.choice([value, [value], Obj((("method", "x"), ("params", value)))]), chance)
        for _ in range(chance.choice([0, 1, 1, 2])):
            at = chance.randrange(len(text) + 1)
            text = text[:at] + chance.choice([*PIECES, ""]) + text[at + chance.choice([0, 0, 1]) :]
        node = read(text)
        try:
            wire.read_downstream(text.encode())
            code = None
        except WireError as error:
            code = (
                json.loads(error.reply)["error"]["code"] if error.reply and error.reply[:1] == b"{" else INVALID_REQUEST
            )
        assert (code == PARSE_ERROR) == (node is None or node.kind not in ("object", "array"))


@prop
@given(st.lists(st.binary(max_size=8), max_size=3), seeds)
def test_bytes_that_are_not_utf_8_never_pass(noise: list[bytes], chance: Random) -> None:
    line = call('{"a":"' + "x" * 20 + '"}')
    for part in noise:
        at = chance.randrange(len(line))
        line = line[:at] + part + line[at:]
    try:
        line.decode()
    except UnicodeDecodeError:
        assert refusal(line) == (PARSE_ERROR, None)
    wire.read_upstream(line)


@prop
@given(values, seeds)
def test_naming_ourselves_changes_nothing_but_the_named_spans(value: Any, chance: Random) -> None:
    keys = ["serverInfo", "_meta", SERVER_INFO, "name", "version", "title", "serverInfo"]

    def some(levels: int) -> Any:
        if levels == 0 or chance.random() < 0.1:
            return chance.choice([value, "x", Num(1, 0)])
        return Obj(tuple((chance.choice(keys), some(levels - 1)) for _ in range(chance.randrange(5))))

    for _ in range(5):
        text, is_handshake = spell(some(3), chance), chance.random() < 0.5
        node = read(text)
        assert node is not None
        infos = [each for meta in node.named("_meta") for each in meta.named(SERVER_INFO)]
        infos += node.named("serverInfo") if is_handshake else []
        ours = {"name": '"N"', "version": '"V\\u00e9"'}
        spans = [
            (each.start, each.end, mine) for info in infos for key, mine in ours.items() for each in info.named(key)
        ]
        expected = text
        for start, end, mine in sorted(spans, reverse=True):
            expected = expected[:start] + mine + expected[end:]
        assert wire.with_identity(text.encode(), "N", "Vé", is_handshake=is_handshake) == expected.encode()


@prop
@given(values, seeds)
def test_a_short_line_reads_as_it_does_in_a_long_one(value: Any, chance: Random) -> None:
    """Integers of a short line are read by int() itself."""
    text = spell(Obj((("v", value), ("n", Num(chance.randrange(-(10**20), 10**20), 0)))), chance)
    short, long = call(text), call(text, rest=f',"_":"{"x" * 640}"')
    assert accepted_call(short)._replace(meta={}) == accepted_call(long)._replace(meta={})
    short, long = (line.replace(b'"params"', b'"result"') for line in (short, long))
    arguments = [upstream(line).answers[0].members["arguments"] for line in (short, long)]
    assert repr(arguments[0]) == repr(arguments[1])


# ------------------------------------------------------------------------------------------------------------ resources


@pytest.mark.parametrize("read_line", [wire.read_downstream, wire.read_upstream])
@pytest.mark.parametrize(("fill", "copies"), [(b"x", 4), (b"\xc3\xa9", 3)])
def test_a_long_line_takes_memory_for_a_few_copies(read_line: Any, fill: bytes, copies: int) -> None:
    line = call(b'{"a":"' + fill * (2_000_000 // len(fill)) + b'"}')
    line = line if read_line is wire.read_downstream else line.replace(b'"params"', b'"result"')
    tracemalloc.start()
    try:
        assert read_line(line) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < copies * len(line)


# ------------------------------------------------------------------------------------- what clients read differently


def test_an_answer_behind_a_bare_carriage_return_is_seen() -> None:
    """Clients that read with universal newlines take what it cuts off for lines."""
    line = b'downloading 50%\rdownloading 100%\r{"jsonrpc":"2.0","id":1,"result":{"ok":"\xc3\xa9"}}\n'
    read = wire.read_upstream(line)
    assert read is not None
    (answer,) = read.answers
    assert answer.id == Id("integer", 1)
    assert line[answer.start :].startswith(answer.body)
    assert answer.body == b'{"ok":"\xc3\xa9"}'


def test_an_answer_inside_another_message_is_seen_where_carriage_returns_cut_it_out() -> None:
    line = b'{"method":"x","params":\r{"id":7,"result":{}}\r}\n'
    read = wire.read_upstream(line)
    assert read is not None
    assert [answer.id for answer in read.answers] == [Id("integer", 7)]
    assert read.methods[0] == ("x", None)


def test_a_line_end_of_two_bytes_is_no_second_line() -> None:
    read = wire.read_upstream(b'{"id":1,"result":{}}\r\n')
    assert read is not None
    assert len(read.answers) == read.objects == 1


@pytest.mark.parametrize(
    ("line", "is_error", "body"),
    [
        (b'{"id":1,"result":1,"Result":2}', False, b"1"),
        (b'{"id":1,"Result":2,"result":1}', False, b"1"),
        (b'{"id":1,"result":1,"Error":{}}', False, b"1"),
        (b'{"id":1,"error":{},"Result":1}', True, b"{}"),
        (b'{"id":1,"RESULT":1}', False, b"1"),
    ],
)
def test_a_body_in_its_own_spelling_counts(line: bytes, is_error: bool, body: bytes) -> None:
    read = wire.read_upstream(line)
    assert read is not None
    assert (read.answers[0].is_error, read.answers[0].body) == (is_error, body)


@pytest.mark.parametrize("escape", [b"\\x", b"\\u12", b"\\"])
def test_a_bad_escape_at_any_depth_is_no_json_and_raises_nothing(escape: bytes) -> None:
    deep = b"[" * 20_000 + b"]" * 20_000
    line = b'{"id":1,"result":{"deep":' + deep + b',"bad":"' + escape + b'"}}\n'
    assert wire.read_upstream(line) is None
    result = line.strip()[len(b'{"id":1,"result":') : -1]
    assert wire.with_result_type(result).startswith(b'{"resultType":"complete"')
    assert wire.with_identity(result, "n", "v", is_handshake=True) == result


@pytest.mark.parametrize(
    ("identity", "other"),
    [
        (Id("integer", 7), Id("string", "7")),
        (Id("integer", -1), Id("string", "-1")),
        (Id("string", "7"), Id("integer", 7)),
        (Id("string", "0"), Id("integer", 0)),
        (Id("string", "07"), None),
        (Id("string", "-0"), None),
        (Id("string", "1.0"), None),
        (Id("string", "\u0661"), None),
        (Id("string", ""), None),
        (Id("fraction", "15e-1"), None),
    ],
)
def test_clients_take_a_number_and_its_digits_for_one_id(identity: Id, other: Id | None) -> None:
    assert wire.other_spelling(identity) == other


def test_the_parts_of_an_array_are_lines_of_their_own() -> None:
    line = b' [{"id":1, "result":{"a":"\xc3\xa9"}},[{"method":"x"}],7, {}]\r\n'
    assert wire.parts(line) == [b'{"id":1, "result":{"a":"\xc3\xa9"}}\n', b'{"method":"x"}\n', b"{}\n"]
    assert wire.parts(b'{"a":1} {"b":2}\n') == [b'{"a":1}\n', b'{"b":2}\n']
    assert wire.parts(b"[1,\n") == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":1,"result":{"a":\r[{},{}]\r}}\n',
        b'x\r[{"id":1,"result":{}},{}]\r\n',
        b'[{},{}\r{"id":1,"result":{}}\n',
        b'[{},{}\r{"id":1,"result":{}}\r{}\n',
    ],
)
def test_what_carriage_returns_cut_out_is_no_part_of_a_line(line: bytes) -> None:
    """Whoever splits a line that holds several objects into parts must get something smaller."""
    found = upstream(line)
    assert [answer.id for answer in found.answers] == [Id("integer", 1)]
    assert found.objects == 1


@pytest.mark.parametrize("value", ["1e999", '{"a":1,"a":2}', "9" * 700])
def test_what_only_its_own_bytes_can_say_is_not_in_a_request_of_ours(value: str) -> None:
    line = f'{{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{{"_meta":{{"x":{value}}},"cursor":"c"}}}}'
    params = wire.read_downstream(line.encode()).params
    assert json.loads(wire.request_line("own", "tools/list", params))["params"] == {"cursor": "c"}


@pytest.mark.parametrize("value", [b"", b" {}", b"{} junk", b"{}{}", b"not json", b"\xff"])
def test_what_is_no_single_value_is_not_parsed(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # which of them is of no matter
        wire.parse(value)
