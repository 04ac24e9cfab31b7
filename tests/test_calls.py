"""The life of a call: its place, its row, its answer, and what happens when any of that is in the way."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import memory
import pytest
from memory import (
    Bench,
    call,
    cancel,
    database_held,
    error_of,
    failure,
    line,
    lose_upstream,
    notification,
    options,
    read_only,
    reasons,
    request,
    result,
    spoil,
)

from journal import Journal, JournalBusy
from settings import Settings
from states import MAX_SEQUENCE, Cause, Entry, Status
from storage import Files, Lock
from turn import RETRY_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "j.db"


@pytest.fixture
def bench(path: Path) -> Bench:
    return Bench(path)


def texts(lines: list[bytes]) -> list[tuple[Any, str]]:
    """Id and text of results."""
    answers = [json.loads(one) for one in lines]
    return [(answer["id"], answer["result"]["content"][0]["text"]) for answer in answers]


# ---------------------------------------------------------------------------------------------------- guarantee, replay


def test_a_finished_call_is_replayed_under_the_id_of_the_asker_and_never_runs_again(bench: Bench) -> None:
    """RM-09: neither the request's id nor other `_meta` takes part in the comparison. RM-13, VR-04."""
    said = b'{"result" : {"n":1E5, "u":"\\u00e9","content":[]} ,"id":1,"jsonrpc":"2.0"}\n'
    bench.call(call(1, arguments={"n": 1}, seq=1, meta={"progressToken": 101}), said)
    again = bench.restart()
    asked = call("z", arguments={"n": 1.0}, seq=1, meta={"progressToken": "other"})
    replay = b'{"jsonrpc":"2.0","id":"z","result":{"n":1E5, "u":"\\u00e9","content":[]}}\n'
    assert again.ask(asked, asked.replace(b'"z"', b'"y"')) == [replay, replay.replace(b'"z"', b'"y"')]
    assert again.up.lines == []
    assert again.rows() == [(1, 1, "COMPLETED")]
    again.call(call(2, seq=2), result(2))
    assert again.rows() == [(1, 1, "COMPLETED"), (2, 1, "COMPLETED")]


@pytest.mark.parametrize(
    "said",
    [
        b'{"jsonrpc":"2.0","id":1,"result":{"content":[],"more":\r[{},{}]\r}}\n',
        b'[{"method":"x"},{"method":"y"}\r{"jsonrpc":"2.0","id":1,"result":{"content":[]}}\n',
    ],
)
def test_an_answer_that_carriage_returns_cut_is_passed_on_whole(said: bytes, bench: Bench) -> None:
    assert bench.call(call(1, seq=1), said) == [said]
    assert bench.rows() == [(1, 1, "COMPLETED")]


def test_an_error_is_replayed_as_the_error_that_it_was(bench: Bench) -> None:
    """RM-10."""
    said = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"busy","data":{"big":12345678901234567890 }}}\n'
    bench.call(call(1, seq=1), said)
    assert bench.statuses() == ["FAILED"]
    assert bench.restart().ask(call(1, seq=1)) == [said]


def test_a_result_that_says_it_is_an_error_is_an_outcome(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1, "no", isError=True))
    assert bench.statuses() == ["COMPLETED"]
    assert bench.ask(call(1, seq=1)) == [line(json.loads(result(1, "no", isError=True)))]


def test_an_answer_of_the_handshake_era_gets_its_type_in_a_modern_request(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.call(call(2, "u", seq=2), failure(2, 5, "no"))
    [modern, error, plain] = bench.ask(
        call(3, seq=1, is_modern=True), call(4, "u", seq=2, is_modern=True), call(5, seq=1)
    )
    assert modern.startswith(b'{"jsonrpc":"2.0","id":3,"result":{"resultType":"complete","content"')
    assert error == failure(4, 5, "no")
    assert plain == result(5)


def test_who_joins_from_the_modern_era_gets_a_result_with_its_type(bench: Bench) -> None:
    bench.ask(call(1, seq=1), call(2, seq=1, is_modern=True))
    got = {json.loads(one)["id"]: json.loads(one)["result"] for one in bench.answer(result(1))}
    assert got[2].pop("resultType") == "complete"
    assert got[1] == got[2]


def test_identical_calls_without_a_pin_are_distinct_calls(bench: Bench) -> None:
    """RM-01, RM-04 (absent, null and {} reach upstream as they are), CW-07 (the first one is still open)."""
    forms = [call(1), call(2).replace(b'"arguments":{}', b'"arguments":null'), call(3).replace(b',"arguments":{}', b"")]
    bench.ask(*forms)
    assert bench.up.lines == forms
    bench.answer(result(2, "two"), result(1, "one"), result(3, "three"))
    assert bench.rows() == [(n, 1, "COMPLETED") for n in (1, 2, 3)]
    again = bench.restart()
    assert texts(again.ask(call(1, seq=1), call(2, seq=2), call(3, seq=3))) == [(1, "one"), (2, "two"), (3, "three")]


def test_places_are_in_the_order_of_requests_and_not_of_answers(bench: Bench) -> None:
    """RM-07, RM-12."""
    bench.ask(call(1, "a"), call(2, "b"), call(3, "c"))
    bench.answer(result(3, "C"))
    bench.answer(result(1, "A"))
    bench.answer(result(2, "B"))
    again = bench.restart()
    asked = [call(9, "b", seq=2), call(8, "a", seq=1), call(7, "c", seq=3)]
    assert texts(again.ask(*asked)) == [(9, "B"), (8, "A"), (7, "C")]


def test_a_clock_that_is_set_back_changes_no_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """RM-12: neither within a call, nor between calls, nor between two starts."""
    hours = iter(memory.NOW_MS - 3_600_000 * number for number in range(1, 9))

    def set_back() -> None:
        monkeypatch.setattr(memory, "NOW_MS", next(hours))

    for number, tool in enumerate("abc", 1):
        assert bench.ask(call(number, tool)) == []
        set_back()
        bench.answer(result(number, tool.upper()))
        set_back()
    assert bench.select("SELECT sequence FROM calls ORDER BY started_at") == [(3,), (2,), (1,)]
    again = bench.restart(options("ordered"))
    assert texts(again.ask(call(7, "a"), call(8, "b"), call(9, "c"))) == [(7, "A"), (8, "B"), (9, "C")]
    again.call(call(10, "d"), result(10))
    assert again.rows() == [(n, 1, "COMPLETED") for n in (1, 2, 3, 4)]


def test_the_end_of_its_line_is_no_part_of_a_call(bench: Bench) -> None:
    """FR-07: a client that ends its lines in CR LF, and in LF after the restart, makes the same call."""
    plain = call(1, arguments={"k": "v"}, seq=1)
    odd = plain.replace(b"\n", b"\r\n")
    assert bench.call(odd, result(1)) == [result(1)]
    assert bench.select("SELECT arguments FROM calls") == [('{"k":"v"}',)]
    again = bench.restart()
    assert again.ask(plain, odd) == [result(1), result(1)]
    assert again.up.lines == []


def test_a_pin_may_name_another_workflow_and_places_are_counted_in_each(bench: Bench, path: Path) -> None:
    bench.ask(call(1), call(2, workflow="x"), call(3, workflow="x", seq=7), call(4, workflow="x"))
    with read_only(path) as database:
        rows = database.execute("SELECT workflow_id, sequence FROM attempts ORDER BY id").fetchall()
    assert rows == [("w", 1), ("x", 1), ("x", 7), ("x", 8)]


@pytest.mark.parametrize("wants_task", [True, False])
def test_who_joins_a_call_gets_no_shape_that_it_did_not_ask_for(bench: Bench, wants_task: bool) -> None:
    def asked(number: int, *, wants_task: bool) -> bytes:
        more: dict[str, Any] = {"task": {"ttl": 1}} if wants_task else {}
        return call(number, seq=1, **more)

    handle = line({"jsonrpc": "2.0", "id": 1, "result": {"task": {"taskId": "x", "status": "working"}}})
    other = not wants_task
    bench.ask(asked(1, wants_task=wants_task), asked(2, wants_task=other), asked(3, wants_task=wants_task))
    got = bench.answer(handle if wants_task else result(1))
    assert sorted(reasons(got)) == [(1, None), (2, "diverged"), (3, None)]
    assert reasons(bench.ask(asked(4, wants_task=other))) == [(4, "diverged")], "as for a replay"


def test_who_joins_a_call_of_the_newer_era_is_not_asked_for_input_in_a_way_that_it_does_not_know(bench: Bench) -> None:
    bench.ask(call(1, seq=1, is_modern=True), call(2, seq=1), call(3, seq=1, is_modern=True))
    interim = {"resultType": "input_required", "inputRequests": {"k": {"method": "elicitation/create"}}}
    got = bench.answer(line({"jsonrpc": "2.0", "id": 1, "result": interim}))
    assert sorted(reasons(got)) == [(1, None), (2, "diverged"), (3, None)]


def test_an_answer_that_is_missing_in_a_journal_that_was_edited_is_refused(bench: Bench, path: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.end()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        database.execute("UPDATE outcomes SET result = NULL")
        database.commit()
    again = bench.restart()
    error = again.error(call(2, seq=1))
    assert (error["facts"]["reason"], error["facts"]["sequence"]) == ("journal_unavailable", 1)
    assert "its answer is missing" in error["message"]
    assert again.up.lines == []


def test_a_tool_whose_name_no_file_can_hold_is_still_the_same_tool(bench: Bench) -> None:
    name = "t\ud800"
    first = bench.restart(Settings(name="", version="", call_id_keys=("host/id",)))
    first.ask(call(1, name, meta={"host/id": "c\udfff"}), cancel(1))
    assert first.select("SELECT tool_name, call_id FROM calls") == [("t\\ud800", "c\\udfff")]
    again = first.restart()
    assert again.error(call(2, name, {"n": 2}))["facts"]["cause"] == "cancelled"


def test_a_new_call_behind_the_highest_sequence_is_refused(bench: Bench) -> None:
    bench.call(call(1, seq=MAX_SEQUENCE), result(1))
    error = bench.error(call(2))
    assert error["facts"]["reason"] == "journal_unavailable", "its pin is not at fault: it has none"
    assert f"no place after {MAX_SEQUENCE}; use another workflow" in error["message"]
    bench.call(call(3, seq=5), result(3))
    assert bench.relay.is_idle


@pytest.mark.parametrize("is_redacted", [False, True])
def test_redaction_keeps_arguments_out_of_the_journal_and_out_of_refusals(path: Path, is_redacted: bool) -> None:
    bench = Bench(path, Settings(name="", version="", redacts_arguments=is_redacted))
    bench.call(call(1, arguments={"secret": "s3cret"}, seq=1), result(1))
    bench.call(call(2, seq=2).replace(b',"arguments":{}', b""), result(2))
    refusal = bench.ask(call(3, arguments={"secret": "other"}, seq=1))[0]
    with read_only(path) as database:
        kept = [row[0] for row in database.execute("SELECT arguments FROM calls ORDER BY sequence").fetchall()]
    assert (b"s3cret" in refusal, "s3cret" in kept[0]) == (not is_redacted, not is_redacted)
    assert kept[1] is None
    assert len(bench.ask(call(4, arguments={"secret": "s3cret"}, seq=1))) == 1, "the signature stays"


def test_a_tool_name_that_no_utf8_can_hold_is_journaled_and_told_apart(bench: Bench) -> None:
    bench.call(call(1, "\ud800", seq=1), result(1))
    assert texts(bench.ask(call(2, "\ud800", seq=1))) == [(2, "ok")]
    assert bench.error(call(3, "\ud801", seq=1))["facts"]["reason"] == "diverged"


@pytest.mark.parametrize(
    ("written", "respelt", "other"),
    [
        (rb'"\udad0"', rb'"\uDAD0"', rb'"\udad1"'),
        (rb'"\ud83e\udd80"', '"🦀"'.encode(), rb'"\udd80\ud83e"'),
        (rb'"left\u0000one"', rb'"l\u0065ft\u0000one"', rb'"left\u0000two"'),
        ('"\u2029\x85"'.encode(), rb'"\u2029\u0085"', rb'"\u2029\n"'),
        (b"3" * 6000, b"3" * 6000 + b".0", b"3" * 5999 + b"4"),
        (b"1e400", b"10E399", b"1e401"),
    ],
    ids=["half a character", "two halves", "NUL", "separators", "digits", "beyond doubles"],
)
def test_odd_arguments_leave_as_they_came_and_are_known_again(
    bench: Bench, written: bytes, respelt: bytes, other: bytes
) -> None:
    """BJ-04, BJ-12, FR-06, BJ-10, BJ-07: also what no UTF-8, C string or double can hold."""

    def asked(request_id: int, value: bytes) -> bytes:
        return call(request_id, seq=1).replace(b'"arguments":{}', b'"arguments":{"x":%b}' % value)

    assert bench.call(asked(1, written), result(1)) == [result(1)]
    again = bench.restart()
    assert texts(again.ask(asked(2, written), asked(3, respelt))) == [(2, "ok"), (3, "ok")]
    assert again.error(asked(4, other))["facts"]["reason"] == "diverged"
    assert again.up.lines == []


# ----------------------------------------------------------------------------------------------------------- divergence


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"id": 9007199254740993, "f": 1.0}, {"id": 9007199254740992, "f": 1.0}),
        ({"p": "é"}, {"p": "e\u0301"}),
        ({"a": None, "b": 1}, {"b": 1}),
    ],
)
def test_another_call_at_a_place_is_refused_with_what_differs(bench: Bench, first: Any, second: Any) -> None:
    """RM-03 (beyond doubles), RM-06 (composed or not), VR-06 (null or absent): nothing is taken for something else."""
    bench.call(call(1, arguments=first, seq=1), result(1))
    facts = bench.error(call(2, arguments=second, seq=1))["facts"]
    assert (facts["reason"], facts["sequence"], facts["status"]) == ("diverged", 1, "COMPLETED")
    assert facts["expected"] == {"tool": "t", "arguments": first}
    assert facts["received"] == {"tool": "t", "arguments": second}
    assert bench.up.lines == [call(1, arguments=first, seq=1)]
    assert bench.relay.is_idle


@pytest.mark.parametrize("end", ["pending", "failed", "not sent", "input", "task"])
def test_another_call_diverges_from_whatever_is_on_record(bench: Bench, end: str) -> None:
    bench.ask(call(1, seq=1))
    if end == "failed":
        bench.answer(failure(1, 1, "no"))
    elif end == "not sent":
        bench.up.unread = bench.up.taken_bytes
        lose_upstream(bench)
        bench = bench.restart()
    elif end == "input":
        bench.answer(failure(1, -32042, "go", {"elicitations": []}))
    elif end == "task":
        bench.answer(line({"jsonrpc": "2.0", "id": 1, "result": {"task": {"taskId": "x"}}}))
    error = bench.error(call(2, "other", seq=1))
    assert (error["code"], error["facts"]["received"]["tool"]) == (31002, "other")


def test_a_place_whose_row_was_pruned_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = Entry(1, "w", 1, 1, "t", "s", None, Status.PRUNED)
    monkeypatch.setattr(Journal, "entry", lambda *_: pruned)
    error = bench.error(call(1, seq=1))
    assert error["facts"]["reason"] == "diverged"
    assert "pruned" in error["message"]


# --------------------------------------------------------------------------------------------------------- group commit


def test_all_that_is_ready_in_a_turn_is_one_commit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = []
    append = Journal.append

    def counted(journal: Journal, facts: Any) -> None:
        commits.append(len(facts))
        append(journal, facts)

    monkeypatch.setattr(Journal, "append", counted)
    bench.ask(*(call(n) for n in range(4)))
    bench.relay.from_downstream([call(n) for n in range(4, 6)])
    bench.relay.from_upstream([result(n) for n in range(3)])
    bench.loop.run()
    assert commits == [4, 5]
    assert bench.up.writes[1] == [call(4), call(5)], "and one write"
    assert bench.down.writes == [[result(0), result(1), result(2)]]
    bench.ask(notification("x"))
    assert commits == [4, 5]


# ---------------------------------------------------------------------------------------------------------------- joins


def test_calls_at_one_place_share_one_upstream_call_and_its_bytes(bench: Bench) -> None:
    bench.ask(call(1, seq=1), call("1", seq=1))
    bench.ask(call(2, seq=1))
    assert bench.up.lines == [call(1, seq=1)]
    said = b'{"jsonrpc":"2.0","id":1,"result":{"content":[ ],"n":1.0}}\n'
    body = b'"result":{"content":[ ],"n":1.0}}\n'
    got = bench.answer(said)
    assert sorted(got) == sorted([said, b'{"jsonrpc":"2.0","id":"1",' + body, b'{"jsonrpc":"2.0","id":2,' + body])
    assert bench.rows() == [(1, 1, "COMPLETED")]


def test_a_call_joins_one_whose_answer_is_on_its_way_to_disk(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    bench.relay.from_upstream([result(1)])
    bench.relay.from_downstream([call(2, seq=1)])
    bench.loop.run()
    assert sorted(texts(bench.down.lines)) == [(1, "ok"), (2, "ok")]
    assert len(bench.up.lines) == 1


def test_another_signature_diverges_while_the_first_is_pending(bench: Bench) -> None:
    bench.ask(call(1, seq=1))
    assert bench.error(call(2, arguments={"n": 1}, seq=1))["facts"]["status"] == "PENDING"


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_large_arguments_of_a_call_under_way_are_kept_on_disk_alone(is_on_disk: bool, bench: Bench) -> None:
    large = call(1, arguments={"n": 0, "text": "x" * 100_000}, seq=1)
    other = call(2, arguments={"n": 1}, seq=1)
    if is_on_disk:
        bench.ask(large)
        assert bench.journal is not None
        assert [entry.arguments for entry in bench.journal.unanswered()] == [None]
        refused = bench.error(other)
    else:
        refused = bench.error(large, other)
    assert refused["facts"]["expected"]["arguments"]["n"] == 0
    assert sorted(refused["facts"]["differs"]) == ["/n", "/text"]
    assert texts(bench.answer(result(1))) == [(1, "ok")]
    assert texts(bench.restart().ask(large.replace(b'"id":1', b'"id":3'))) == [(3, "ok")]


def test_a_divergence_that_cannot_be_shown_yet_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ask(call(1, arguments={"text": "x" * 100_000}, seq=1))
    assert bench.journal is not None

    def busy(entry: Entry) -> None:
        raise JournalBusy("locked")

    with monkeypatch.context() as patch:
        patch.setattr(bench.journal, "arguments", busy)
        assert bench.ask(call(2, arguments={"n": 1}, seq=1)) == []
    bench.loop.advance(RETRY_S)
    assert reasons(bench.down.lines) == [(2, "diverged")]


# -------------------------------------------------------------------------------------------------------------- cancels


@pytest.mark.parametrize("is_same_turn", [True, False])
def test_a_cancel_of_a_call_passes_unchanged_behind_it_and_puts_it_in_doubt(bench: Bench, is_same_turn: bool) -> None:
    """CA-04."""
    odd = cancel(1).replace(b":1}", b" : 1 }")
    if is_same_turn:
        bench.ask(call(1, seq=1), request("ping", 5), odd)
    else:
        bench.ask(call(1, seq=1), request("ping", 5))
        bench.ask(odd)
    assert bench.up.lines == [call(1, seq=1), request("ping", 5), odd]
    assert bench.statuses() == ["IN_DOUBT"]
    facts = bench.error(call(2, seq=1))["facts"]
    assert (facts["reason"], facts["cause"], facts["status"]) == ("in_doubt", "cancelled", "IN_DOUBT")
    assert not bench.relay.is_idle, "nobody waits for it, but it may be answered yet"
    bench.answer(result(1))
    assert bench.relay.is_idle
    assert bench.statuses() == ["COMPLETED"]


def test_the_end_does_not_wait_for_a_cancelled_call_of_the_modern_era(bench: Bench) -> None:
    """There a server says nothing more of it."""
    bench.ask(call(1, is_modern=True), cancel(1))
    assert bench.relay.is_idle
    assert bench.statuses() == ["IN_DOUBT"]


@pytest.mark.parametrize("who", [1, 2])
def test_a_cancel_of_one_of_several_only_detaches_it(bench: Bench, who: int) -> None:
    """Also of the first, whose id upstream knows."""
    bench.ask(call(1, seq=1), call(2, seq=1), call(3, seq=1))
    assert bench.ask(cancel(who)) == []
    assert bench.up.lines == [call(1, seq=1)]
    assert bench.statuses() == ["PENDING"]
    ids = {json.loads(one)["id"] for one in bench.answer(result(1))}
    assert ids == {1, 2, 3} if who == 1 else {1, 3}, "late answers pass in the handshake era"


def test_a_modern_client_that_cancelled_the_first_of_several_hears_no_more_of_it(bench: Bench) -> None:
    bench.ask(call(1, seq=1, is_modern=True), call(2, seq=1, is_modern=True), cancel(1))
    assert [json.loads(one)["id"] for one in bench.answer(result(1))] == [2]


def test_the_last_to_cancel_cancels_under_the_id_that_upstream_knows(bench: Bench) -> None:
    bench.ask(call("a", seq=1), call(2, seq=1))
    bench.ask(cancel("a"), cancel(2))
    assert bench.up.lines == [call("a", seq=1), cancel("a")]
    assert bench.statuses() == ["IN_DOUBT"]


def test_a_cancel_of_what_the_journal_answered_or_nobody_asked_goes_nowhere(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, seq=1), cancel(2))
    bench.ask(cancel(2), cancel(1), cancel(99), cancel("1"))
    assert bench.up.lines == [call(1, seq=1)]


def test_a_pinned_duplicate_of_a_call_that_was_cancelled_in_the_same_turn_is_in_doubt_at_once(bench: Bench) -> None:
    got = bench.ask(call(1, seq=1), cancel(1), call(2, seq=1))
    facts = error_of(*got)["facts"]
    assert (facts["reason"], facts["cause"], facts["status"]) == ("in_doubt", "cancelled", "IN_DOUBT")


def test_a_second_cancel_goes_nowhere(bench: Bench) -> None:
    bench.ask(call(1), cancel(1), cancel(1))
    bench.ask(cancel(1))
    assert bench.up.lines == [call(1), cancel(1)]


def test_a_cancel_of_another_request_passes(bench: Bench) -> None:
    bench.ask(call(1), request("prompts/get", 2))
    odd = cancel(2).replace(b"}}", b',"reason":"x"}}')
    bench.ask(odd, notification("notifications/cancelled", reason="no id"))
    assert bench.up.lines[2:] == [odd, notification("notifications/cancelled", reason="no id")]
    assert bench.statuses() == ["PENDING"]


@pytest.mark.parametrize(("is_modern", "passes"), [(False, True), (True, False)])
def test_a_late_answer_is_journaled_and_passed_on_in_the_handshake_era_only(
    bench: Bench, is_modern: bool, passes: bool
) -> None:
    """CA-01."""
    bench.ask(call(1, seq=1, is_modern=is_modern))
    bench.ask(cancel(1))
    assert bench.answer(result(1, "late")) == ([result(1, "late")] if passes else [])
    assert bench.statuses() == ["COMPLETED"]
    assert texts(bench.restart().ask(call(2, seq=1, is_modern=is_modern))) == [(2, "late")]


@pytest.mark.parametrize("is_answer_first", [True, False])
def test_a_cancel_that_crosses_the_answer_leaves_no_doubt(bench: Bench, is_answer_first: bool) -> None:
    bench.ask(call(1, seq=1))
    if is_answer_first:
        bench.relay.from_upstream([result(1)])
    bench.relay.from_downstream([cancel(1)])
    if not is_answer_first:
        bench.relay.from_upstream([result(1)])
    bench.loop.run()
    assert bench.down.lines == [result(1)]
    assert bench.up.lines == [call(1, seq=1)]
    again = bench.restart()
    again.ask(call(2))
    assert again.rows() == [(1, 1, "COMPLETED"), (2, 1, "PENDING")]


def test_the_same_call_again_after_a_cancel_is_refused_and_other_calls_are_not(bench: Bench) -> None:
    """CA-03: the client timed out, the model repeats itself."""
    bench.ask(call(1, "pay", {"n": 1}), cancel(1), call(2, "pay", {"n": 1}))
    refused = error_of(*bench.down.lines)
    assert (refused["id"], refused["facts"]["cause"], refused["facts"]["status"]) == (2, "cancelled", "IN_DOUBT")
    assert bench.error(call(3, "pay", {"n": 1}))["facts"]["sequence"] == 1
    assert bench.ask(call(4, "pay", {"n": 2}), call(5, "look"), call(6, "pay", {"n": 1}, workflow="other")) == []
    assert len(bench.up.lines) == 5
    bench.answer(result(1))
    assert bench.ask(call(7, "pay", {"n": 1})) == [], "it is answered, so this is a new call"


@pytest.mark.parametrize("way", ["restart", "upstream lost"])
def test_a_cancelled_call_that_was_lost_stops_only_calls_of_its_tool(bench: Bench, way: str) -> None:
    """CA-03: and it is not run again at its own place either."""
    bench.ask(call(1, "pay", {"n": 1}), cancel(1))
    if way == "upstream lost":
        assert lose_upstream(bench) == []
        assert bench.relay.has_left_doubt
    again = bench.restart()
    assert again.error(call(2, "pay", {"n": 2}))["facts"]["cause"] == "cancelled"
    assert again.error(call(2, "pay", {"n": 1}, seq=1))["facts"]["reason"] == "in_doubt"
    assert again.ask(call(3, "look")) == []
    assert again.up.lines == [call(3, "look")]


# --------------------------------------------------------------------------------------------------- doubts left behind


def test_a_call_that_was_under_way_when_the_relay_died_is_in_doubt_and_never_runs_by_itself(bench: Bench) -> None:
    """CW-01: the refusal names tool and row."""
    bench.ask(call(1, "pay", seq=1))
    again = bench.restart()
    for asked in (call(2, "pay", seq=1), call(3, "pay", {"n": 2}, seq=1), call(4, "pay"), call(5, "look")):
        error = again.error(asked)
        assert (error["code"], error["facts"]["sequence"], error["facts"]["tool"]) == (31001, 1, "pay")
        assert error["facts"]["cause"] == "relay_lost"
    assert again.up.lines == []
    assert again.ask(call(6, seq=2), call(7, workflow="other")) == [], "a pin looks at its own row only"
    assert again.up.lines == [call(6, seq=2), call(7, workflow="other")]


def test_the_lowest_row_in_doubt_is_the_one_that_is_named(bench: Bench) -> None:
    bench.ask(call(1, seq=5), call(2, seq=3), call(3, seq=4))
    bench.answer(result(2))
    assert bench.restart().error(call(4))["facts"]["sequence"] == 4


def test_replays_go_on_while_others_are_in_doubt(bench: Bench) -> None:
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, seq=2))
    assert texts(bench.restart().ask(call(3, seq=1))) == [(3, "ok")]


def test_calls_in_flight_block_nothing(bench: Bench) -> None:
    bench.ask(call(1, "a"), call(2, "b"), call(3, "a"))
    assert len(bench.up.lines) == 3


# ------------------------------------------------------------------------------------------ answers that are no outcome

INTERIM: Final = {"resultType": "input_required", "inputRequests": {"k": {}}, "requestState": "s"}


def test_a_modern_result_that_wants_input_is_no_outcome_and_the_next_leg_is_another_attempt(bench: Bench) -> None:
    interim = line({"jsonrpc": "2.0", "id": 1, "result": INTERIM})
    assert bench.call(call(1, seq=1, is_modern=True), interim) == [interim]
    assert bench.statuses() == ["INPUT_REQUIRED"]
    leg = call(2, seq=1, is_modern=True, requestState="s", inputResponses={"k": {}})
    bench.call(leg, result(2, "final", resultType="complete"))
    assert bench.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "COMPLETED")]
    again = bench.restart()
    assert texts(again.ask(call(3, seq=1, is_modern=True), leg)) == [(3, "final"), (2, "final")]


def test_the_same_result_in_the_handshake_era_is_an_outcome(bench: Bench) -> None:
    bench.call(call(1), line({"jsonrpc": "2.0", "id": 1, "result": INTERIM}))
    assert bench.statuses() == ["COMPLETED"]


@pytest.mark.parametrize("data", [{"elicitations": [{"url": "x"}]}, {"elicitations": []}])
def test_an_error_that_asks_for_a_visit_is_no_outcome(bench: Bench, data: Any) -> None:
    said = failure(1, -32042, "go there", data)
    assert bench.call(call(1, seq=1), said) == [said]
    assert bench.statuses() == ["INPUT_REQUIRED"]
    bench.call(call(2, seq=1), result(2))
    assert bench.rows() == [(1, 1, "INPUT_REQUIRED"), (1, 2, "COMPLETED")]


def test_the_same_error_without_elicitations_is_an_outcome(bench: Bench) -> None:
    bench.call(call(1), failure(1, -32042, "go there", {"elicitations": {}}))
    assert bench.statuses() == ["FAILED"]


HANDSHAKE_TASK: Final = line({"jsonrpc": "2.0", "id": 1, "result": {"task": {"taskId": "x", "status": "working"}}})
MODERN_TASK: Final = line({"jsonrpc": "2.0", "id": 1, "result": {"resultType": "task", "taskId": "x"}})


@pytest.mark.parametrize(
    ("asked", "handle"),
    [(call(1, seq=1, task={"ttl": 1}), HANDSHAKE_TASK), (call(1, seq=1, is_modern=True), MODERN_TASK)],
)
def test_the_handle_of_a_task_is_no_outcome_and_is_replayed(bench: Bench, asked: bytes, handle: bytes) -> None:
    assert bench.call(asked, handle) == [handle]
    assert bench.statuses() == ["TASK"]
    again = bench.restart()
    assert [json.loads(one) for one in again.ask(asked)] == [json.loads(handle)]
    assert again.up.lines == []


@pytest.mark.parametrize(
    ("first", "answer", "second"),
    [
        (call(1, seq=1, task={}), HANDSHAKE_TASK, call(2, seq=1)),
        (call(1, seq=1, task={}), HANDSHAKE_TASK, call(2, seq=1, is_modern=True)),
        (call(1, seq=1, is_modern=True), MODERN_TASK, call(2, seq=1, task={})),
        (call(1, seq=1), result(1), call(2, seq=1, task={})),
    ],
)
def test_an_answer_of_another_shape_than_asked_for_is_not_replayed(
    bench: Bench, first: bytes, answer: bytes, second: bytes
) -> None:
    bench.call(first, answer)
    assert bench.error(second)["facts"]["reason"] == "diverged"
    assert len(bench.up.lines) == 1


def test_an_error_fits_every_request(bench: Bench) -> None:
    bench.call(call(1, seq=1), failure(1, 1, "no"))
    assert bench.ask(call(2, seq=1, task={}), call(3, seq=1, is_modern=True)) == [
        failure(2, 1, "no"),
        failure(3, 1, "no"),
    ]


@pytest.mark.parametrize(
    "said",
    [
        failure(1, -32000, "Connection closed"),
        failure(1, -32001, "Request timed out"),
        failure(1, 31001, "x", {"checkpoint": {"reason": "in_doubt"}}),
    ],
)
def test_an_error_of_a_bridge_leaves_doubt_and_the_client_is_told_so(bench: Bench, said: bytes) -> None:
    bench.ask(call(1, seq=1), call(2, seq=1))
    got = bench.answer(said)
    assert sorted(reasons(got)) == [(1, "in_doubt"), (2, "in_doubt")]
    assert error_of(got[0])["facts"]["cause"] == "upstream_lost"
    assert bench.statuses() == ["IN_DOUBT"]
    assert bench.relay.has_left_doubt
    assert bench.error(call(3, seq=1))["code"] == 31001
    assert bench.restart().error(call(4, "other"))["code"] == 31001


@pytest.mark.parametrize(("is_closed", "status"), [(False, "FAILED"), (True, "IN_DOUBT")])
def test_an_error_that_may_only_say_that_stdin_is_closed_leaves_doubt(
    bench: Bench, is_closed: bool, status: str
) -> None:
    bench.ask(call(1))
    bench.relay.is_upstream_stdin_closed = is_closed
    bench.answer(failure(1, -32000, "bye"))
    assert bench.statuses() == [status]
    assert bench.relay.has_left_doubt is is_closed


def test_a_cancelled_call_that_a_bridge_gave_up_keeps_its_cause(bench: Bench) -> None:
    bench.ask(call(1, seq=1), cancel(1))
    assert bench.answer(failure(1, -32001, "Request timed out")) == []
    assert bench.error(call(2, seq=1))["facts"]["cause"] == "cancelled"


# ------------------------------------------------------------------------------------ waiting for the lock, giving back


def test_a_call_waits_five_seconds_for_the_lock_and_is_then_refused_with_the_owners_pid(
    bench: Bench, path: Path
) -> None:
    lock = Lock(Files(str(path)).lock)
    assert lock.take()
    bench.ask(call(1), request("ping", 2))
    bench.loop.advance(2)
    bench.ask(call(3))
    assert bench.loop.waiting == 1, "one timer for all"
    assert bench.up.lines == [request("ping", 2)]
    assert bench.answer(result(2)) == [result(2)], "the rest flows"
    bench.loop.advance(2.9)
    assert len(bench.down.lines) == 1
    bench.loop.advance(0.2)
    error = error_of(*bench.down.lines[1:])
    assert (error["code"], error["id"], error["facts"]["reason"]) == (31003, 1, "busy")
    assert f"process {os.getpid()}" in error["message"]
    bench.loop.advance(2)
    assert reasons(bench.down.lines[2:]) == [(3, "busy")]
    assert bench.relay.is_idle
    assert bench.loop.waiting == 0
    assert not path.exists(), "nothing is created without the lock"


def test_calls_that_wait_for_the_lock_go_in_order_once_it_is_free(bench: Bench, path: Path) -> None:
    lock = Lock(Files(str(path)).lock)
    assert lock.take()
    bench.ask(call(1), call(2), cancel(2), call(3))
    lock.give_back()
    bench.loop.advance(0.1)
    assert bench.up.lines == [call(1), call(3)], "a cancel of one that waits takes it out"
    assert bench.rows() == [(1, 1, "PENDING"), (2, 1, "PENDING")]


def test_the_journal_is_given_back_after_a_replay_or_a_refusal_and_kept_after_a_dispatch(
    bench: Bench, path: Path
) -> None:
    bench.call(call(1, seq=1), result(1))
    lock = Lock(Files(str(path)).lock)
    assert not lock.take()
    again = bench.restart()
    for asked in (call(2, seq=1), call(3, "other", seq=1)):
        assert len(again.ask(asked)) == 1
        assert lock.take()
        lock.give_back()
    again.ask(call(4))
    assert not lock.take()


def test_two_relays_take_turns_on_one_journal(bench: Bench, path: Path) -> None:
    """RM-13: each sees what the other has written."""
    other = Bench(path, loop=bench.loop)
    bench.call(call(1, seq=1), result(1))
    assert other.ask(call(2, seq=1)) == []
    bench.end()
    other.loop.advance(0.1)
    assert texts(other.down.lines) == [(2, "ok")]
    other.ask(call(3))
    assert other.rows() == [(1, 1, "COMPLETED"), (2, 1, "PENDING")]


# ------------------------------------------------------------------------------------------ the database is held, fails


def test_a_call_waits_for_the_database_while_other_traffic_flows(bench: Bench, path: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    with database_held(path):
        bench.ask(call(2, seq=2), request("ping", 3))
        assert bench.up.lines[1:] == [request("ping", 3)]
        assert bench.answer(result(3)) == [result(3)]
        assert len(bench.ask(call(4, seq=1))) == 1, "replays too"
        bench.loop.advance(3)
    bench.loop.advance(0.1)
    assert bench.up.lines[-1] == call(2, seq=2)
    assert bench.statuses() == ["COMPLETED", "PENDING"]


def test_a_call_that_waits_too_long_for_the_database_is_refused_and_was_not_sent(bench: Bench, path: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    with database_held(path):
        bench.ask(call(2, seq=2), call(3, seq=2))
        bench.loop.advance(5.1)
        assert reasons(bench.down.lines[1:]) == [(2, "busy"), (3, "busy")]
    bench.loop.advance(1)
    assert bench.statuses() == ["COMPLETED"]
    assert bench.up.lines == [call(1, seq=1)]
    assert bench.relay.is_idle
    assert bench.call(call(4, seq=2), result(4)) == [result(4)], "the place is free"
    assert not bench.relay.has_left_doubt


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_cancel_in_the_turn_of_a_call_that_waits_for_the_database_stays_behind_it(
    bench: Bench, path: Path, is_refused: bool
) -> None:
    bench.call(call(1, seq=1), result(1))
    with database_held(path):
        bench.ask(call(2, seq=2), cancel(2))
        bench.loop.now += 0.001
        bench.loop.advance(6 if is_refused else 1)
    bench.loop.advance(0.1)
    assert bench.up.lines[1:] == ([] if is_refused else [call(2, seq=2), cancel(2)])
    assert bench.statuses() == (["COMPLETED"] if is_refused else ["COMPLETED", "IN_DOUBT"])
    assert len(bench.down.lines) == 1
    assert bench.relay.is_idle is is_refused
    assert bench.journal is not None
    assert bench.journal.failure is None


def test_a_call_that_is_cancelled_while_it_waits_for_the_database_never_leaves(bench: Bench, path: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    with database_held(path):
        bench.ask(call(2, seq=2))
        bench.ask(cancel(2))
    bench.loop.advance(1)
    assert bench.up.lines == [call(1, seq=1)]
    assert bench.statuses() == ["COMPLETED"]
    assert bench.ask(call(2, "other", seq=2)) == [], "place and id are free"


def test_an_answer_that_cannot_be_stored_is_handed_over_and_recorded_later(bench: Bench, path: Path) -> None:
    """JL-03: the client is told that the call ran, and that it is not on record yet."""
    bench.ask(call(1, seq=1), call(2, seq=1))
    said = b'{"jsonrpc":"2.0","id":1,"result":{"n":1E5 ,"content":[]}}\n'
    with database_held(path):
        assert bench.answer(said) == []
        bench.loop.advance(5.1)
        assert sorted(reasons(bench.down.lines)) == [(n, "journal_unavailable") for n in (1, 2)]
        assert all(b'"answer":{"result":{"n":1E5 ,"content":[]}}' in one for one in bench.down.lines)
        facts = bench.error(call(3, seq=1))["facts"]
        assert (facts["reason"], facts["cause"]) == ("in_doubt", "journal_unavailable")
        assert not bench.relay.is_idle
        assert bench.relay.has_left_doubt
    bench.loop.advance(0.1)
    assert bench.statuses() == ["COMPLETED"]
    assert bench.relay.is_idle
    assert not bench.relay.has_left_doubt
    assert bench.ask(call(4, seq=1)) == [b'{"jsonrpc":"2.0","id":4,"result":{"n":1E5 ,"content":[]}}\n']


def test_a_second_answer_does_not_overtake_a_first_that_waits_for_the_database(bench: Bench, path: Path) -> None:
    bench.ask(call(1, seq=1))
    with database_held(path):
        assert bench.answer(result(1, "FIRST")) == []
        assert bench.answer(result(1, "SECOND")) == []
        bench.answer(notification("n"))
        bench.loop.advance(1)
        assert bench.down.lines == [notification("n")], "other traffic does not wait"
    bench.loop.advance(0.1)
    assert bench.down.lines[1:] == [result(1, "FIRST"), result(1, "SECOND")]
    assert b"FIRST" in bench.ask(call(2, seq=1))[0]


def test_an_old_second_answer_does_not_touch_a_later_call_under_its_id(bench: Bench, path: Path) -> None:
    bench.ask(call(1, seq=1))
    with database_held(path):
        bench.answer(result(1, "FIRST"))
        bench.loop.advance(2)
        bench.answer(result(1, "SECOND"))
        bench.loop.advance(3.1)
        assert reasons(bench.down.lines) == [(1, "journal_unavailable")]
        bench.ask(call(1, seq=2))
        bench.loop.advance(1)
    bench.loop.advance(0.1)
    assert bench.rows() == [(1, 1, "COMPLETED"), (2, 1, "PENDING")]
    assert bench.answer(result(1, "THIRD"))[-1] == result(1, "THIRD")
    assert bench.rows() == [(1, 1, "COMPLETED"), (2, 1, "COMPLETED")]


def test_a_doubt_that_cannot_be_stored_is_told_all_the_same(bench: Bench, path: Path) -> None:
    bench.ask(call(1, seq=1))
    with database_held(path):
        bench.answer(failure(1, -32000, "Connection closed"))
        bench.loop.advance(5.1)
        assert reasons(bench.down.lines) == [(1, "in_doubt")]
    bench.loop.advance(0.1)
    assert bench.statuses() == ["IN_DOUBT"]


def test_after_a_failed_write_nothing_is_dispatched_and_replays_go_on(bench: Bench, path: Path) -> None:
    bench.call(call(1, seq=1), result(1, "kept"))
    bench.ask(call(2, seq=2), call(3, seq=3), cancel(3))
    spoil(path)
    got = bench.answer(result(2, "lost"))
    error = error_of(*got)
    assert (error["code"], error["facts"]["status"]) == (31004, "IN_DOUBT")
    assert error["facts"]["answer"] == {"result": json.loads(result(2, "lost"))["result"]}
    sent = list(bench.up.lines)
    for asked in (call(4, seq=4), call(5, workflow="x")):
        assert bench.error(asked)["facts"]["reason"] == "journal_unavailable"
    assert bench.error(call(6, seq=2))["facts"]["cause"] == "journal_unavailable"
    assert texts(bench.ask(call(7, seq=1))) == [(7, "kept")]
    assert bench.ask(request("ping", 8)) == []
    assert bench.up.lines == [*sent, request("ping", 8)]
    assert bench.relay.has_left_doubt
    bench.answer(result(3))
    assert bench.relay.is_idle


def test_a_call_whose_row_cannot_be_written_is_refused_and_not_sent(bench: Bench, path: Path) -> None:
    bench.call(call(1, seq=1), result(1))
    spoil(path)
    got = bench.ask(call(2, seq=2), call(3, seq=2), call(4, seq=3), cancel(4))
    assert sorted(reasons(got)) == [(2, "journal_unavailable"), (3, "journal_unavailable")]
    assert bench.up.lines == [call(1, seq=1)]
    assert bench.relay.is_idle


def test_a_cancel_passes_though_its_doubt_cannot_be_written(bench: Bench, path: Path) -> None:
    bench.ask(call(1))
    spoil(path)
    bench.ask(cancel(1))
    assert bench.up.lines == [call(1), cancel(1)]


def test_a_journal_that_cannot_be_opened_refuses_calls_and_the_rest_flows(bench: Bench, path: Path) -> None:
    path.write_bytes(b"not a database")
    assert bench.error(call(1))["facts"]["reason"] == "journal_unavailable"
    assert bench.ask(request("ping", 2)) == []
    assert bench.up.lines == [request("ping", 2)]
    assert path.read_bytes() == b"not a database"


# ------------------------------------------------------------------------------------------------------- upstream's end


def test_calls_are_in_doubt_or_not_sent_by_what_upstream_has_read(bench: Bench) -> None:
    """CW-04: nothing is sent again."""
    bench.call(call(1, seq=1), result(1))
    bench.ask(call(2, seq=2), call(3, seq=3))
    bench.ask(call(4, seq=4))
    bench.up.unread = len(call(4, seq=4)) + len(call(3, seq=3)) - 1
    assert reasons(lose_upstream(bench)) == [(2, "in_doubt"), (3, "in_doubt"), (4, "upstream_lost")]
    assert bench.rows() == [(1, 1, "COMPLETED"), (2, 1, "IN_DOUBT"), (3, 1, "IN_DOUBT"), (4, 1, "NOT_SENT")]
    assert bench.relay.has_left_doubt
    assert bench.relay.is_idle
    again = bench.restart()
    assert again.error(call(5, seq=2))["facts"]["cause"] == "upstream_lost"
    again.call(call(6, seq=4), result(6))
    assert again.rows()[-1] == (4, 2, "COMPLETED")


def test_what_never_left_our_queue_was_not_sent(bench: Bench) -> None:
    bench.up.is_full = True
    bench.ask(call(1), call(2))
    bench.up.unread = None  # the system does not tell
    assert reasons(lose_upstream(bench)) == [(1, "upstream_lost"), (2, "upstream_lost")]
    assert bench.statuses() == ["NOT_SENT", "NOT_SENT"]
    assert not bench.relay.has_left_doubt


def test_where_the_system_does_not_tell_what_was_read_all_that_left_is_in_doubt(bench: Bench) -> None:
    bench.ask(call(1))
    bench.up.unread = None
    assert reasons(lose_upstream(bench, Cause.RELAY_LOST)) == [(1, "in_doubt")]
    assert bench.statuses() == ["IN_DOUBT"]


def test_at_upstreams_end_answers_count_that_were_read_and_calls_that_wait_are_not_sent(
    bench: Bench, path: Path
) -> None:
    bench.ask(call(1, seq=1), call(2, seq=2), call(3, seq=2))
    bench.relay.from_upstream([result(1)])
    bench.relay.from_downstream([call(4, seq=4), call(5, seq=4)])
    got = lose_upstream(bench)
    assert got[0] == result(1)
    assert sorted(reasons(got[1:])) == [(2, "in_doubt"), (3, "in_doubt"), (4, "upstream_lost"), (5, "upstream_lost")]
    assert bench.statuses() == ["COMPLETED", "IN_DOUBT"], "the last was not even dispatched"
    assert bench.up.lines == [call(1, seq=1), call(2, seq=2)]


def test_at_upstreams_end_the_queue_is_refused(bench: Bench, path: Path) -> None:
    lock = Lock(Files(str(path)).lock)
    assert lock.take()
    bench.ask(call(1), call(2))
    assert reasons(lose_upstream(bench)) == [(1, "upstream_lost"), (2, "upstream_lost")]
    lock.give_back()
    bench.loop.advance(10)
    assert bench.up.lines == []
    assert not path.exists()


@pytest.mark.parametrize("is_held_long", [False, True])
def test_at_upstreams_end_doubts_wait_for_the_database(bench: Bench, path: Path, is_held_long: bool) -> None:
    bench.ask(call(1))
    with database_held(path):
        assert lose_upstream(bench) == []
        bench.ask()
        bench.loop.advance(6 if is_held_long else 1)
        assert reasons(bench.down.lines) == ([(1, "in_doubt")] if is_held_long else [])
    bench.loop.advance(0.1)
    assert reasons(bench.down.lines) == [(1, "in_doubt")]
    assert bench.statuses() == ["IN_DOUBT"]
    assert bench.loop.waiting == 0


def test_doubts_that_cannot_be_written_at_upstreams_end_are_told(bench: Bench, path: Path) -> None:
    bench.ask(call(1))
    bench.ask(call(2))
    bench.up.unread = len(call(2))
    spoil(path)
    assert reasons(lose_upstream(bench)) == [(1, "in_doubt"), (2, "upstream_lost")]
    assert bench.relay.has_left_doubt


def test_a_cancelled_call_that_upstream_has_not_read_was_not_sent(bench: Bench) -> None:
    bench.up.is_full = True
    bench.ask(call(1), cancel(1))
    assert lose_upstream(bench) == []
    assert bench.statuses() == ["NOT_SENT"]
    assert not bench.relay.has_left_doubt
    assert bench.restart().ask(call(2)) == []
