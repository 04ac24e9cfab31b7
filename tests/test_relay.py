"""Lines through the relay: what passes, what is refused, and in which order. Real processes are test_life's."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from memory import (
    HANDSHAKE_NAMES,
    MODERN,
    Bench,
    call,
    cancel,
    database_held,
    error_of,
    failure,
    line,
    lose_upstream,
    notification,
    read_only,
    reasons,
    request,
    result,
)

from relay import HIGH_WATER_BYTES
from settings import Settings
from states import Cause

ODD_DOWNSTREAM: Final = [
    b'{ "jsonrpc" : "2.0" ,"id": 1.50e1, "method":"x/unknown","params":{"n":1E400,"m":-0.0,"z":9007199254740993}}\n',
    b'{"method":"notifications/odd","params":{"\\u0061":"\\/","a":"\xc3\xa9"},"jsonrpc":"2.0","extra":[{}]}\r\n',
    b'{"jsonrpc":"2.0","id":9,"result":{"role":"user","deep":[[[[1]]]]}}\n',
    b'{"jsonrpc":"2.0","id":77,"error":{"code":-1,"message":"user said no","data":{"k":[1, 2]}}}\n',
    b'{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"cursor":"c-17"}}\n',
    b'[{"jsonrpc":"2.0","id":3,"method":"ping"}, {"jsonrpc":"2.0","method":"notifications/x"}]\n',
    b"[]\n",
    b"{}\n",
]
ODD_UPSTREAM: Final = [
    b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"\xff\xfe"}}\n',
    b'{ "result" : {"n":1E5,"i":1234567890123456788,"f":0.1000000000000000055} , "id":3,"jsonrpc":"2.0"}\r\n',
    b"Listening on port 3000\n",
    b"\xfe\x80 \xc1\n",
    b'{"jsonrpc":"2.0","id":4,"result":NaN}\n',
    b'{"jsonrpc":"2.0","id":1,"method":"sampling/createMessage","params":{}}\n',
    b'[{"jsonrpc":"2.0","id":8,"result":{}},7]\n',
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"boom"}}\n',
    b"\xef\xbb\xbf{}\n",
]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "j.db")


# ------------------------------------------------------------------------------------------------------------- verbatim


def test_lines_from_downstream_pass_byte_for_byte_and_in_order(bench: Bench) -> None:
    """VR-01 (a cursor arrives), SI-03 (an error given to an elicitation), VR-06 (nothing is normalised)."""
    assert bench.ask(*ODD_DOWNSTREAM) == []
    assert bench.up.lines == ODD_DOWNSTREAM


@pytest.mark.parametrize("is_call_open", [False, True])
def test_lines_from_upstream_pass_byte_for_byte_and_in_order(bench: Bench, is_call_open: bool) -> None:
    """VR-04 (spelling of numbers), BJ-01 (noise), ID-13 (an error without an id says nothing of any call)."""
    if is_call_open:
        bench.ask(call("open"))
    assert bench.answer(*ODD_UPSTREAM) == ODD_UPSTREAM
    assert bench.rows() == [(1, 1, "PENDING")] if is_call_open else not bench.path or not bench.path.exists()


@pytest.mark.parametrize(
    "body",
    [
        b'{"content":[{"type":"text","text":"\xc3\x28 \xf0\x9f"}]}',
        rb'{"content":[],"t":"half of one: \udb40"}',
        b'{"content":[],"structuredContent":{"a":NaN,"b":-0,"c":1e400,"d":-Infinity}}',
        rb'{"content":[], "i":1234567890123456788,"f":0.1000000000000000055,"g":1E5,"u":"\u00E9"}',
    ],
    ids=["bad bytes", "half a character", "NaN", "digits"],
)
def test_an_answer_keeps_its_bytes_live_and_in_a_replay(bench: Bench, body: bytes) -> None:
    """BJ-01, BJ-03, BJ-07, VR-04: what no strict parser takes is an outcome too, and is not mended."""
    said = b'{"jsonrpc":"2.0","id":1,"result":%b}\n' % body
    assert bench.call(call(1, seq=1), said) == [said]
    assert bench.statuses() == ["COMPLETED"]
    assert bench.restart().ask(call(1, seq=1)) == [said]


def test_blank_lines_are_dropped_both_ways(bench: Bench) -> None:
    """FR-13: before, between and behind what counts."""
    assert bench.ask(b"\n", b"\r\n", call(1), b" \t\n") == []
    assert bench.up.lines == [call(1)]
    assert bench.answer(b"\n", b"\t \r\n", result(1), b"  \n") == [result(1)]
    assert bench.rows() == [(1, 1, "COMPLETED")]


def test_a_byte_order_mark_before_the_first_line_passes(tmp_path: Path) -> None:
    first = b"\xef\xbb\xbf" + request("ping", 1)
    bench = Bench(tmp_path / "j.db")
    assert bench.ask(first) == []
    assert bench.up.lines == [first]
    assert bench.error(first)["code"] == -32700, "a mark is a mark on the first line only"


def test_a_call_on_a_first_line_with_a_byte_order_mark_is_seen(bench: Bench) -> None:
    """FR-09: nor is the session over."""
    bench.ask(b"\xef\xbb\xbf" + call(1))
    assert bench.statuses() == ["PENDING"]
    answer = b"\xef\xbb\xbf" + result(1)
    assert bench.answer(answer) == [answer]
    assert bench.statuses() == ["COMPLETED"]


def test_what_is_refused_leaves_the_lines_around_it_as_they_are(bench: Bench) -> None:
    """BJ-06: one bad line costs nobody else anything, and has no row."""
    before, after = request("ping", 1), call(2)
    broken = (b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":NaN}\n', b"\xff\n", b'{"id":6,"meth\n', b"hey\n")
    replies = bench.ask(before, *broken, after)
    assert [error_of(reply)["code"] for reply in replies] == [-32700] * 4
    assert bench.up.lines == [before, after]
    assert bench.rows() == [(1, 1, "PENDING")]


def test_progress_comes_before_its_answer_and_a_line_behind_a_held_answer_stays_behind_it(bench: Bench) -> None:
    """SI-04."""
    bench.ask(call(4, meta={"progressToken": "p-4"}))
    progress = notification("notifications/progress", progressToken="p-4", progress=1)
    log = notification("notifications/message", level="info", data="done")
    assert bench.answer(progress, result(4), log) == [progress, result(4), log]


def test_lines_around_a_held_call_keep_their_order(bench: Bench) -> None:
    before, behind = request("ping", "a"), notification("notifications/roots/list_changed")
    bench.ask(before, call(1), behind, call(2), request("ping", "b"))
    assert bench.up.lines == [before, call(1), behind, call(2), request("ping", "b")]


def test_a_reply_of_our_own_stays_behind_an_answer_that_is_held(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, seq=2))
    bench.relay.from_upstream([result(2)])
    bench.relay.from_downstream([call(3, seq=1)])
    bench.loop.run()
    assert [json.loads(one)["id"] for one in bench.down.lines] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------------- identity


def test_our_identity_is_spliced_into_the_handshake_and_nothing_else_changes(tmp_path: Path) -> None:
    """VR-03: unknown members, capabilities and versions stay."""
    bench = Bench(tmp_path / "j.db", Settings(name="ours", version="1.2"))
    bench.ask(request("initialize", "init", protocolVersion="2031-01-01"))
    theirs = (
        b'{"id":"init", "result":{"protocolVersion":"2031-01-01","instructions":"\\u00e9","serverInfo":'
        b'{"title":"T","name" : "them" ,"version":"9"},"capabilities":{"experimental":{}}},"jsonrpc":"2.0"}\n'
    )
    assert bench.answer(theirs) == [theirs.replace(b'"them"', b'"ours"').replace(b'"9"', b'"1.2"')]


def test_server_info_is_left_alone_outside_the_handshake(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db", Settings())
    bench.ask(request("x", 1))
    other = line({"jsonrpc": "2.0", "id": 1, "result": {"serverInfo": {"name": "them", "version": "9"}}})
    assert bench.answer(other) == [other]


@pytest.mark.parametrize(("name", "version"), [("", "1.2"), ("ours", ""), ("", "")])
def test_an_empty_name_or_version_keeps_upstreams(tmp_path: Path, name: str, version: str) -> None:
    bench = Bench(tmp_path / "j.db", Settings(name=name, version=version))
    bench.ask(request("initialize", 0))
    said = {"jsonrpc": "2.0", "id": 0, "result": {"serverInfo": {"name": "them", "version": "9"}}}
    [got] = bench.answer(line(said))
    assert json.loads(got)["result"]["serverInfo"] == {"name": name or "them", "version": version or "9"}


def named(text: str, name: str) -> dict[str, Any]:
    info = {"io.modelcontextprotocol/serverInfo": {"name": name, "version": "9"}}
    return {"content": [{"type": "text", "text": text}], "resultType": "complete", "_meta": info}


def test_our_identity_is_spliced_into_modern_results_and_the_row_keeps_upstreams_bytes(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j.db", Settings(name="ours", version="9"))
    theirs, ours = (line({"jsonrpc": "2.0", "id": 1, "result": named("r", name)}) for name in ("them", "ours"))
    assert bench.call(call(1, seq=1, is_modern=True), theirs) == [ours]
    assert bench.path is not None
    with read_only(bench.path) as database:
        [(kept,)] = database.execute("SELECT result FROM attempts").fetchall()
    assert json.loads(kept) == named("r", "them")
    assert json.loads(bench.ask(call(1, seq=1, is_modern=True))[0])["result"] == named("r", "ours")


def test_each_answer_of_an_array_is_named_once(tmp_path: Path) -> None:
    """Also where one object answers two ids, which some parsers read as one and some as the other."""
    bench = Bench(tmp_path / "j.db", Settings(name="a-longer-name", version="9"))
    bench.ask(call(1), call(2))
    bodies = [json.dumps(named(text, "them")).encode() for text in ("x", "y")]
    array = b'[{"id":1,"ID":2,"result":%b},{"id":7,"result":%b}]\n' % (bodies[0], bodies[1])
    assert (
        b"".join(bench.answer(array)) == array[1:-2].replace(b"},{", b"}\n{").replace(b"them", b"a-longer-name") + b"\n"
    )


def test_without_a_journal_calls_and_broken_lines_pass_and_only_identity_is_touched() -> None:
    bench = Bench(None, Settings(name="ours", version="1.2"))
    odd = [call(1), call(1), cancel(1), b"no json\n", b'[{"id":1,"method":"tools/call"}]\n', b"\xff\xfe\n"]
    assert bench.ask(*odd, request("initialize", 0)) == []
    assert bench.up.lines == [*odd, request("initialize", 0)]
    info = line({"jsonrpc": "2.0", "id": 0, "result": {"serverInfo": {"name": "them", "version": "9"}}})
    lines = [result(1), result(1), b"junk\n", info]
    assert bench.answer(*lines) == [*lines[:3], info.replace(b"them", b"ours").replace(b'"9"', b'"1.2"')]
    assert not bench.relay.has_left_doubt
    assert bench.relay.is_idle


def test_without_a_journal_upstreams_end_leaves_no_doubt() -> None:
    bench = Bench(None)
    bench.ask(call(1, arguments={"how": "initialize"}), request("initialize", 0))
    assert reasons(lose_upstream(bench)) == [(0, "upstream_lost")]
    assert not bench.relay.has_left_doubt


# ---------------------------------------------------------------------------------------------- nothing slips by unseen


@pytest.mark.parametrize(
    "refused",
    [
        b'[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}]\n',
        b'[{"method":"notifications/x"},7,{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"pay"}}]\n',
        b'{"jsonrpc":"2.0","id":null,"method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","id":1.5,"method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","id":1.0,"method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"look","name":"pay","arguments":{}}}\n',
        b'{"jsonrpc":"1.0","id":1,"method":"tools/call","params":{"name":"t"}}\n',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t","arguments":[]}}\n',
        call(1, meta={"checkpoint_seq": 0}),
        call(1, meta={"checkpoint_seq": "1"}),
        call(1).replace(b'"arguments":{}', b'"arguments":{},"_meta":{"checkpoint_seq":1.0}'),
        call(1, meta={"checkpoint_workflow": "w~1"}),
        call(1, meta={"checkpoint_seq": None}),
    ],
)
def test_what_could_be_a_call_and_is_none_reaches_neither_upstream_nor_the_journal(
    bench: Bench, refused: bytes
) -> None:
    """ID-04 (no id, or null), ID-07 (fractions), BA-01, BA-04 (a call in an array), BJ-09 (two names for one thing)."""
    bench.ask(refused)
    assert bench.up.lines == []
    assert bench.path is not None
    assert not bench.path.exists()
    assert bench.relay.is_idle


def test_an_invalid_pin_is_refused_with_its_reason(bench: Bench) -> None:
    error = bench.error(call(1, meta={"checkpoint_seq": 0}))
    assert (error["code"], error["id"], error["facts"]["reason"]) == (-32602, 1, "invalid_meta")


def test_the_row_is_on_disk_when_the_call_leaves_and_the_outcome_when_the_answer_does(tmp_path: Path) -> None:
    """CW-03."""
    path, seen = tmp_path / "j.db", []

    def look(direction: str) -> Callable[[bytes], None]:
        def on_write(one: bytes) -> None:
            message = json.loads(one)
            if message.get("method") == "tools/call" or "result" in message:
                with read_only(path) as database:
                    seen.append((direction, message["id"], *database.execute("SELECT status FROM calls").fetchall()))

        return on_write

    bench = Bench(path, on_up=look("up"), on_down=look("down"))
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, seq=1), call(3, seq=2), call(4, seq=2))
    bench.answer(result(3))
    done, open_ = ("COMPLETED",), ("PENDING",)
    assert seen == [
        ("up", 1, open_),
        ("down", 1, done),
        ("down", 2, done),
        ("up", 3, done, open_),
        ("down", 4, done, done),
        ("down", 3, done, done),
    ]


# ------------------------------------------------------------------------------------------------------------------ ids


def test_a_number_and_its_text_are_two_ids(bench: Bench) -> None:
    """ID-01."""
    bench.ask(call(1, "a", seq=1), call("1", "b", seq=2))
    assert bench.answer(result("1", "B"), result(1, "A")) == [result("1", "B"), result(1, "A")]
    texts = [
        json.loads(one)["result"]["content"][0]["text"] for one in bench.ask(call(5, "a", seq=1), call(6, "b", seq=2))
    ]
    assert texts == ["A", "B"]


@pytest.mark.parametrize("request_id", [0, "", 2**63, 10**40, -1, "é", int("9" * 700)])
def test_any_id_is_answered_as_it_was_written(bench: Bench, request_id: Any) -> None:
    """ID-03 (an empty string), ID-06 (beyond 64 bits)."""
    written = "9" * 700 if isinstance(request_id, int) and request_id > 10**640 else json.dumps(request_id)
    asked = call(12345, seq=1).replace(b"12345", written.encode())
    answer = result(12345).replace(b"12345", written.encode())
    assert bench.call(asked, answer) == [answer]
    assert bench.statuses() == ["COMPLETED"]
    assert bench.ask(asked)[0].startswith(b'{"jsonrpc":"2.0","id":%b,' % written.encode())


def test_one_number_spelt_twice_is_one_id(bench: Bench) -> None:
    bench.ask(request("ping", 0).replace(b":0", b":10e-1"))
    assert bench.error(call(1))["code"] == -32600
    bench.ask(call(7))
    assert bench.answer(result(7).replace(b":7", b":7.0")) == [result(7).replace(b":7", b":7.0")]
    assert bench.statuses() == ["COMPLETED"]


def test_a_question_of_upstreams_under_the_id_of_a_call_settles_nothing(bench: Bench) -> None:
    """SI-01."""
    bench.ask(call(1))
    question = request("sampling/createMessage", 1, messages=[])
    assert bench.answer(question) == [question]
    said = line({"jsonrpc": "2.0", "id": 1, "result": {"role": "assistant"}})
    assert bench.ask(said) == []
    assert bench.up.lines[-1] == said
    assert bench.statuses() == ["PENDING"]
    assert bench.answer(result(1, "T")) == [result(1, "T")]
    assert bench.statuses() == ["COMPLETED"]


@pytest.mark.parametrize(("asked", "answered"), [(7, "7"), ("7", 7)])
def test_an_answer_under_another_spelling_of_the_id_is_on_disk_before_its_client_takes_it(
    bench: Bench, asked: Any, answered: Any
) -> None:
    """ID-10: the official clients take "7" for 7."""
    bench.ask(call(asked))
    assert bench.answer(result(answered)) == [result(answered)]
    assert bench.statuses() == ["COMPLETED"]
    assert bench.relay.is_idle


def test_an_id_in_its_own_spelling_comes_first(bench: Bench) -> None:
    bench.ask(call(7, seq=1), call("7", seq=2), request("ping", "8"), call(8, seq=3))
    assert bench.answer(result("7", "b"), result(7, "a"), result("8")) == [
        result("7", "b"),
        result(7, "a"),
        result("8"),
    ]
    assert bench.statuses() == ["COMPLETED", "COMPLETED", "PENDING"]
    assert [json.loads(one)["result"]["content"][0]["text"] for one in bench.ask(call(9, seq=2))] == ["b"]


@pytest.mark.parametrize("second", [call(1, "other"), request("ping", 1), request("tools/list", 1)])
def test_a_request_under_the_id_of_a_call_in_flight_is_refused(bench: Bench, second: bytes) -> None:
    bench.ask(call(1))
    error = bench.error(second)
    assert (error["code"], error["id"]) == (-32600, 1)
    assert bench.up.lines == [call(1)]


def test_an_id_stays_in_flight_after_a_cancel(bench: Bench) -> None:
    bench.ask(call(1), cancel(1))
    assert bench.error(request("ping", 1))["code"] == -32600


def test_a_call_under_the_id_of_another_open_request_is_refused(bench: Bench) -> None:
    bench.ask(request("ping", 1), b'[{"jsonrpc":"2.0","id":2,"method":"ping"}]\n')
    assert [error_of(one)["code"] for one in bench.ask(call(1), call(2))] == [-32600, -32600]
    assert bench.answer(result(1)) == [result(1)]
    bench.ask(call(1))
    assert bench.up.lines[-1] == call(1)


def test_an_id_may_be_used_again_once_it_is_answered(bench: Bench) -> None:
    """ID-09: a client used id 1 for every request."""
    assert bench.call(call(1, arguments={"n": 1}), result(1, "a")) == [result(1, "a")]
    assert bench.call(call(1, arguments={"n": 2}), result(1, "b")) == [result(1, "b")]
    assert bench.rows() == [(1, 1, "COMPLETED"), (2, 1, "COMPLETED")]


def test_a_request_in_an_array_may_not_share_its_id_with_a_call(bench: Bench) -> None:
    """Its answer would be taken for the call's."""
    bench.ask(call(1))
    array = b'[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","id":2,"method":"ping"},{"method":"n"}]\n'
    [reply] = bench.ask(array)
    assert (error_of(reply)["id"], error_of(reply)["code"]) == (1, -32600)
    assert bench.up.lines == [call(1), b'{"jsonrpc":"2.0","id":2,"method":"ping"}\n', b'{"method":"n"}\n']


# -------------------------------------------------------------------------------------------------------------- answers


def test_answers_in_an_array_settle_each_call_and_pass_as_lines_of_their_own(bench: Bench) -> None:
    """BA-03: each waits for its own row, and what is no answer waits for none."""
    bench.ask(call(1, seq=1), call(2, seq=2))
    array = b"[" + result(1, "a").rstrip() + b", " + result(2, "b").rstrip() + b',{"method":"x"}]\n'
    assert bench.answer(array) == [result(1, "a"), result(2, "b"), b'{"method":"x"}\n']
    assert bench.relay.is_idle
    replays = bench.ask(call(3, seq=1), call(4, seq=2))
    assert [json.loads(one)["result"]["content"][0]["text"] for one in replays] == ["a", "b"]


def test_an_answer_that_also_has_a_method_settles_its_call(bench: Bench) -> None:
    bench.ask(call(1))
    odd = line({"jsonrpc": "2.0", "id": 1, "method": "x", "result": {"content": []}})
    assert bench.answer(odd) == [odd]
    assert bench.statuses() == ["COMPLETED"]


def test_the_first_of_two_answers_counts_and_stays_first(bench: Bench) -> None:
    """ID-12."""
    bench.ask(call(1, seq=1))
    first, second = result(1, "FIRST"), result(1, "SECOND")
    assert bench.answer(first, second) == [first, second]
    assert bench.answer(second) == [second]
    [replay] = bench.ask(call(1, seq=1))
    assert b"FIRST" in replay


def test_the_first_of_two_answers_in_one_array_counts(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    array = b"[%b,%b]\n" % (result(1, "FIRST").rstrip(), result(1, "SECOND").rstrip())
    assert bench.answer(array) == [result(1, "FIRST"), result(1, "SECOND")]
    assert b"FIRST" in bench.ask(call(1, seq=1))[0]


def test_a_second_answer_does_not_answer_those_who_joined(bench: Bench) -> None:
    bench.ask(call(1, seq=1), call(2, seq=1))
    got = bench.answer(result(1, "FIRST"), result(1, "SECOND"))
    assert [json.loads(one)["id"] for one in got] == [2, 1, 1]
    assert b"FIRST" in got[0]


@pytest.mark.parametrize("is_same_turn", [True, False])
def test_an_answer_that_is_older_than_the_call_does_not_settle_it(bench: Bench, is_same_turn: bool) -> None:
    """ID-12: upstream answered the id twice, and the second time it was in use again."""
    bench.call(call(1, seq=1), result(1, "FIRST"))
    bench.relay.from_downstream([call(1, seq=2), call(2, seq=2)])
    if not is_same_turn:
        bench.loop.run()
        assert bench.answer(result(2, "SECOND")) == [], "upstream does not know the id of who joined"
    else:
        assert bench.answer(result(1, "SECOND")) == [], "the call has not left"
    assert bench.rows() == [(1, 1, "COMPLETED"), (2, 1, "PENDING")]
    assert len(bench.answer(result(1, "THIRD"))) == 2
    assert b"THIRD" in bench.ask(call(5, seq=2))[0]


def test_an_array_with_a_late_answer_still_brings_its_others(bench: Bench) -> None:
    bench.ask(call(1, is_modern=True), request("ping", 7), cancel(1))
    array = b"[%b,%b]\n" % (result(1).rstrip(), result(7).rstrip())
    assert bench.answer(array) == [result(7)]
    assert bench.statuses() == ["COMPLETED"]


def test_an_array_with_an_answer_that_is_too_old_still_brings_its_others(bench: Bench) -> None:
    bench.ask(request("ping", 7))
    bench.relay.from_downstream([call(1)])
    array = b"[%b,%b]\n" % (result(1).rstrip(), result(7).rstrip())
    bench.relay.from_upstream([array])
    bench.loop.run()
    assert bench.down.lines == [result(7)], "the call has not left, so this is no answer to it"
    assert bench.statuses() == ["PENDING"]


# -------------------------------------------------------------------------------------------------- cancels in an array


def test_a_cancel_in_an_array_cancels_the_call(bench: Bench) -> None:
    bench.ask(call(1))
    array = (
        b'[{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}},{"id":9,"method":"ping"}]\n'
    )
    assert bench.ask(array) == []
    assert bench.up.lines == [call(1), cancel(1), b'{"id":9,"method":"ping"}\n']
    assert bench.statuses() == ["IN_DOUBT"]


def test_a_cancel_in_an_array_does_not_reach_a_call_that_others_wait_for(bench: Bench) -> None:
    bench.ask(call(1, seq=1), call(2, seq=1), b"[%b]\n" % cancel(1).rstrip(), b"[%b]\n" % cancel(1).rstrip())
    assert bench.up.lines == [call(1, seq=1)]
    assert bench.statuses() == ["PENDING"]


def test_a_cancel_in_an_array_of_a_call_that_the_journal_answered_goes_nowhere(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, seq=1))
    array = b'[%b,{"jsonrpc":"2.0","id":9,"method":"ping"}]\n' % cancel(2).rstrip()
    assert bench.ask(array) == []
    assert bench.up.lines == [call(1, seq=1), b'{"jsonrpc":"2.0","id":9,"method":"ping"}\n']


def test_other_cancels_in_an_array_pass(bench: Bench) -> None:
    bench.ask(request("ping", 5), call(1))
    array = b"[%b]\n" % cancel(5).rstrip()
    assert bench.ask(array) == []
    assert bench.up.lines[-1] == array


# -------------------------------------------------------------------------------------------------------- back-pressure

BIG: Final = notification("notifications/message", data="x" * HIGH_WATER_BYTES)


def may_read(bench: Bench) -> tuple[bool, bool]:
    return bench.relay.may_read_downstream, bench.relay.may_read_upstream


def test_a_slow_upstream_stops_the_reading_of_downstream_alone(bench: Bench) -> None:
    assert may_read(bench) == (True, True)
    bench.up.is_full = True
    bench.ask(BIG)
    assert may_read(bench) == (False, True)
    bench.up.take()
    bench.relay.when_written()
    assert may_read(bench) == (True, True)


def test_a_flood_from_upstream_stops_the_reading_of_upstream_alone(bench: Bench) -> None:
    """BP-03 and BP-04: a client that writes before it reads must get rid of what it writes."""
    bench.ask(b"\xff\n")  # a reply of our own, which was taken at once
    bench.down.is_full = True
    bench.answer(BIG)
    assert may_read(bench) == (True, False)


def test_a_flood_after_a_reply_that_waited_for_the_disk_stops_the_reading_of_upstream_alone(bench: Bench) -> None:
    bench.ask(call(1), b"\xff\n")
    bench.relay.from_upstream([result(1)])
    bench.relay.from_downstream([b"\xff\n"])
    bench.loop.run()
    bench.down.is_full = True
    bench.answer(BIG)
    assert may_read(bench) == (True, False)


def test_replies_of_our_own_that_nobody_reads_stop_the_reading_of_downstream(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1, "x" * HIGH_WATER_BYTES))
    bench.down.is_full = True
    bench.ask(call(2, seq=1))
    assert may_read(bench) == (False, False)
    bench.down.take()
    bench.relay.when_written()
    assert may_read(bench) == (True, True)


def test_what_waits_for_the_disk_counts_on_the_side_that_it_comes_from(bench: Bench) -> None:
    bench.relay.from_downstream([call(1, arguments={"x": "x" * HIGH_WATER_BYTES})])
    assert may_read(bench) == (False, True)
    bench.loop.run()
    assert may_read(bench) == (True, True)
    bench.relay.from_upstream([result(1, "x" * HIGH_WATER_BYTES)])
    assert may_read(bench) == (True, False)
    bench.loop.run()
    assert may_read(bench) == (True, True)


def test_a_line_of_exactly_the_bound_is_room_enough(bench: Bench) -> None:
    bench.up.is_full = True
    padded = notification("x", p="").replace(
        b'""', b'"%b"' % (b"p" * (HIGH_WATER_BYTES - len(notification("x", p=""))))
    )
    bench.ask(padded)
    assert bench.up.queued_bytes == HIGH_WATER_BYTES
    assert may_read(bench) == (True, True)
    bench.ask(notification("y"))
    assert may_read(bench) == (False, True)


def test_the_edges_are_told_of_every_change(bench: Bench) -> None:
    counts: list[int] = []
    steps: list[Callable[[], object]] = [
        lambda: bench.ask(call(1)),
        lambda: bench.answer(result(1)),
        lambda: bench.relay.from_downstream([request("ping", "p")]),
        lambda: bench.relay.from_upstream([result("p")]),
        bench.relay.when_written,
        lambda: bench.relay.upstream_gone(Cause.UPSTREAM_LOST),
    ]
    for step in steps:
        step()
        counts.append(bench.changes)
    assert all(later > earlier for earlier, later in itertools.pairwise(counts))


def test_the_edges_are_told_of_each_line_while_another_program_holds_the_database(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    bench = Bench(path, HANDSHAKE_NAMES)
    bench.call(call(1), result(1))
    with database_held(path):
        bench.ask(call(2))
        for say, line in ((bench.relay.from_downstream, notification("n")), (bench.relay.from_upstream, result(9))):
            before = bench.changes
            say([line])
            assert bench.changes > before


# --------------------------------------------------------------------------------------------------------- the two ends


def test_the_relay_is_idle_when_nothing_is_awaited_unwritten_or_off_the_disk(bench: Bench) -> None:
    assert bench.relay.is_idle
    bench.relay.from_downstream([call(1)])
    assert not bench.relay.is_idle
    bench.loop.run()
    assert not bench.relay.is_idle, "its answer is awaited"
    bench.relay.from_upstream([result(1)])
    assert not bench.relay.is_idle, "its answer is not on disk"
    bench.loop.run()
    assert bench.relay.is_idle
    bench.up.is_full = True
    bench.ask(notification("x"))
    assert not bench.relay.is_idle
    bench.relay.upstream_gone(Cause.UPSTREAM_LOST)
    assert bench.relay.is_idle, "nobody will take what is queued"


def test_open_requests_are_followed_until_they_are_answered(bench: Bench) -> None:
    bench.ask(request("ping", 1), b'[{"jsonrpc":"2.0","id":2,"method":"ping"}]\n')
    assert bench.relay.has_open_requests
    bench.answer(result(1), failure(2, -32601, "no"))
    assert not bench.relay.has_open_requests


def test_once_admission_stops_calls_are_refused_and_the_rest_is_relayed(bench: Bench) -> None:
    bench.ask(call(1))
    bench.relay.stop_admitting()
    assert bench.error(call(2))["code"] == 31006
    assert bench.ask(request("ping", 3)) == []
    assert bench.up.lines == [call(1), request("ping", 3)]
    assert bench.answer(result(1)) == [result(1)]


def test_after_upstreams_end_every_request_is_refused_and_nothing_is_journaled(bench: Bench) -> None:
    bench.call(call(1), result(1))
    lose_upstream(bench)
    replies = bench.ask(call(2), request("ping", 3), notification("n"), b'[{"id":4,"method":"ping"}]\n')
    assert reasons(replies) == [(2, "upstream_lost"), (3, "upstream_lost"), (4, "upstream_lost")]
    assert bench.statuses() == ["COMPLETED"]
    assert bench.relay.is_idle


def test_open_requests_are_told_that_upstream_is_lost(bench: Bench) -> None:
    bench.ask(request("ping", 1), request("prompts/get", "2"), b'[{"id":3,"method":"x"},{"id":4,"method":"y"}]\n')
    bench.answer(result(4))
    lines = lose_upstream(bench)
    assert reasons(lines) == [(1, "upstream_lost"), ("2", "upstream_lost"), (3, "upstream_lost")]
    assert [error_of(one)["code"] for one in lines] == [31005] * 3
    assert not bench.relay.has_left_doubt
    assert not bench.relay.has_open_requests


# ---------------------------------------------------------------------------------------------------------- annotations

TRUSTING: Final = Settings(name="", version="", trusts_annotations=True)
READS: Final = {"name": "read", "annotations": {"readOnlyHint": True}}
INITIALIZED: Final = notification("notifications/initialized")


@pytest.fixture
def trusting(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "j.db", TRUSTING)


def own_request(bench: Bench) -> dict[str, Any]:
    """The newest line that went upstream, which is one of ours."""
    message: dict[str, Any] = json.loads(bench.up.lines[-1])
    assert message["method"] == "tools/list"
    return message


def tell(bench: Bench, *tools: Any, **more: Any) -> list[bytes]:
    said = {"jsonrpc": "2.0", "id": own_request(bench)["id"], "result": {"tools": list(tools), **more}}
    return bench.answer(line(said))


def test_a_read_only_tool_skips_the_journal(trusting: Bench) -> None:
    trusting.ask(INITIALIZED)
    assert tell(trusting, READS, {"name": "write"}) == [], "our own question's answer never shows downstream"
    assert trusting.call(call(1, "read"), result(1)) == [result(1)]
    assert trusting.path is not None
    assert not trusting.path.exists()
    trusting.ask(call(2, "write"))
    assert trusting.statuses() == ["PENDING"]


def test_a_bypassed_call_ends_like_any_other_request(trusting: Bench) -> None:
    trusting.ask(INITIALIZED)
    tell(trusting, READS)
    trusting.ask(call(1, "read"), call(2, "read"), cancel(2))
    assert trusting.up.lines[-1] == cancel(2)
    assert [error_of(one)["code"] for one in trusting.ask(call(1, "read"), request("ping", 1))] == [-32600, -32600]
    assert reasons(lose_upstream(trusting)) == [(1, "upstream_lost"), (2, "upstream_lost")]
    assert not trusting.relay.has_left_doubt


def test_calls_wait_in_order_for_the_hints_and_no_longer_than_five_seconds(trusting: Bench) -> None:
    trusting.ask(INITIALIZED, call(1, "read"), call(2, "write"))
    trusting.loop.advance(4.9)
    assert trusting.up.lines[:1] == [INITIALIZED]
    assert len(trusting.up.lines) == 2
    trusting.loop.advance(0.2)
    assert trusting.up.lines[2:] == [call(1, "read"), call(2, "write")]
    assert trusting.statuses() == ["PENDING", "PENDING"], "unknown is not trusted"


def test_a_call_that_waits_for_the_hints_does_not_stop_what_brings_them(trusting: Bench) -> None:
    trusting.ask(INITIALIZED, call(1, "read", {"x": "x" * HIGH_WATER_BYTES}))
    assert may_read(trusting) == (False, True)
    tell(trusting, READS)
    assert len(trusting.up.lines) == 3
    assert may_read(trusting) == (True, True)


def test_without_an_answered_request_a_call_does_not_wait(trusting: Bench) -> None:
    trusting.ask(call(1, "read"))
    assert trusting.statuses() == ["PENDING"]


def test_upstream_is_asked_in_the_era_in_which_the_client_was_answered(trusting: Bench) -> None:
    meta = {**MODERN, "progressToken": 7, "io.modelcontextprotocol/clientInfo": {"name": "c", "version": "0"}}
    discover = request("server/discover", 1, _meta=meta)
    trusting.ask(discover)
    assert trusting.up.lines == [discover]
    trusting.answer(failure(1, -32601, "Method not found"))
    assert trusting.up.lines == [discover], "a refusal is no answer in that era"
    trusting.ask(discover)
    trusting.answer(result(1))
    del meta["progressToken"]
    assert own_request(trusting)["params"] == {"_meta": meta}


def test_a_client_that_only_calls_is_answered_once_before_upstream_is_asked(trusting: Bench) -> None:
    trusting.call(call(1, "read", is_modern=True), result(1))
    assert own_request(trusting)["params"]["_meta"] == MODERN
    tell(trusting, READS)
    trusting.call(call(2, "read", is_modern=True), result(2))
    assert trusting.statuses() == ["COMPLETED"]


def test_the_clients_own_lists_teach_and_pass_unchanged(trusting: Bench) -> None:
    trusting.ask(request("tools/list", 1))
    listed = line({"jsonrpc": "2.0", "id": 1, "result": {"tools": [READS], "nextCursor": "more"}})
    assert trusting.answer(listed) == [listed]
    trusting.ask(call(2, "read"))
    assert trusting.path is not None
    assert not trusting.path.exists()


def test_a_change_of_the_list_is_passed_on_and_asked_for(trusting: Bench) -> None:
    trusting.ask(INITIALIZED)
    tell(trusting, READS)
    changed = notification("notifications/tools/list_changed")
    assert trusting.answer(changed) == [changed]
    trusting.ask(call(1, "read"))
    assert own_request(trusting), "the call waits for the new list"
    tell(trusting, {"name": "read"})
    assert trusting.statuses() == ["PENDING"]


def test_an_array_of_our_answer_and_others_brings_the_others_alone(trusting: Bench) -> None:
    trusting.ask(call(1, "write", seq=1), request("ping", 2), INITIALIZED)
    own = line({"jsonrpc": "2.0", "id": own_request(trusting)["id"], "result": {"tools": [READS]}})
    array = b"[%b,%b,%b]\n" % (own.rstrip(), result(1).rstrip(), result(2).rstrip())
    assert trusting.answer(array) == [result(1), result(2)]
    assert trusting.statuses() == ["COMPLETED"]


def test_without_trust_nothing_is_asked_and_hints_count_for_nothing(bench: Bench) -> None:
    bench.ask(INITIALIZED, request("tools/list", 1))
    bench.answer(line({"jsonrpc": "2.0", "id": 1, "result": {"tools": [READS]}}))
    bench.ask(call(2, "read"))
    assert bench.up.lines == [INITIALIZED, request("tools/list", 1), call(2, "read")]
    assert bench.statuses() == ["PENDING"]


def test_the_default_settings_are_the_documented_ones() -> None:
    assert Settings() == Settings("checkpoint", "0.0.0", trusts_annotations=False, redacts_arguments=False)
    assert Settings("", "") == HANDSHAKE_NAMES


def test_nothing_is_sent_to_an_upstream_that_closed_one_of_its_pipes(bench: Bench) -> None:
    bench.ask(call(1))
    bench.relay.upstream_is_mute()
    assert bench.ask(call(2, seq=2), request("ping", 3)) == []
    assert bench.up.lines == [call(1)]
    assert reasons(lose_upstream(bench)) == [(3, "upstream_lost"), (1, "in_doubt"), (2, "upstream_lost")]
    assert bench.statuses() == ["IN_DOUBT", "NOT_SENT"]
