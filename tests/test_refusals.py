"""What downstream is told instead of an answer: codes, sentences and facts."""

import json
import shlex
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import CODES, Reason, Refusals
from states import Cause, Entry, Status

prop: Final = settings(derandomize=True, deadline=None, max_examples=200)

PATH: Final = "/srv/my journals/j.db"
COMMAND: Final = ["/usr/bin/python3", "/opt/check point"]
ENTRY: Final = Entry(
    id=4,
    workflow_id="run $(7)",
    sequence=3,
    attempt=1,
    tool_name="pay",
    signature="s",
    arguments=b'{"to":"a","sum":1}',
    status=Status.IN_DOUBT,
    started_at=1_700_000_000_000,
    cause=Cause.RELAY_LOST,
)
FACTS: Final = ("reason", "workflow_id", "sequence", "tool", "status", "started_at", "next_action")


def refusals(*, hides_arguments: bool = False, path: str | None = PATH) -> Refusals:
    return Refusals(path, COMMAND, hides_arguments=hides_arguments)


def error_of(line: bytes) -> dict[str, Any]:
    """The error in a line, which must be one line of JSON that any parser takes."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    message = json.loads(line, parse_constant=refuse)
    assert message["jsonrpc"] == "2.0"
    assert message["id"] == 9
    error = message["error"]
    assert isinstance(error, dict)
    return error


def facts_of(line: bytes) -> dict[str, Any]:
    facts = error_of(line)["data"]["checkpoint"]
    assert isinstance(facts, dict)
    return facts


def with_arguments(arguments: bytes | None) -> Entry:
    return Entry(1, "w", 1, 1, "t", "s", arguments, Status.COMPLETED)


def diverged(recorded: bytes | None, given_now: bytes | None, *, hides_arguments: bool = False) -> dict[str, Any]:
    entry = with_arguments(recorded)
    return facts_of(refusals(hides_arguments=hides_arguments).diverged(b"9", entry, "t", given_now))


# --------------------------------------------------------------------------------------------------------------- facts


def test_the_codes_are_those_of_the_contract_and_outside_of_what_json_rpc_reserves() -> None:
    assert {reason.value: code for reason, code in CODES.items()} == {
        "in_doubt": 31001,
        "diverged": 31002,
        "busy": 31003,
        "journal_unavailable": 31004,
        "upstream_lost": 31005,
        "shutting_down": 31006,
        "resolved_failed": 31007,
        "invalid_meta": -32602,
    }


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("entry", [ENTRY, None])
def test_every_refusal_is_one_sentence_to_a_model_and_facts_for_a_program(reason: Reason, entry: Entry | None) -> None:
    error = error_of(refusals().line(b"9", reason, tool="pay", workflow_id="run $(7)", entry=entry, why="because"))
    assert error["code"] == CODES[reason]
    message = error["message"]
    assert message.endswith(" (because); do not repeat or rephrase it, and ask your operator.")
    assert message.count(". ") == 0
    assert "pay" in message
    facts = error["data"]["checkpoint"]
    assert tuple(facts)[: len(FACTS)] == FACTS
    assert facts["reason"] == reason.value
    assert (facts["workflow_id"], facts["tool"]) == ("run $(7)", "pay")
    if entry is None:
        assert [facts[name] for name in ("sequence", "status", "started_at", "next_action")] == [None] * 4
    else:
        assert "sequence 3 of workflow run $(7)" in message
        assert (facts["sequence"], facts["status"]) == (3, "IN_DOUBT")
        assert facts["started_at"] == 1_700_000_000_000


@pytest.mark.parametrize("cause", Cause)
def test_a_doubt_names_its_cause_and_nothing_else_does(cause: Cause) -> None:
    entry = Entry(1, "w", 1, 1, "t", "s", None, Status.IN_DOUBT, cause=cause)
    assert facts_of(refusals().line(b"9", Reason.IN_DOUBT, entry=entry))["cause"] == cause.value
    assert "cause" not in facts_of(refusals().line(b"9", Reason.BUSY, entry=entry))


def test_a_doubt_about_another_tool_says_which_call_was_not_run() -> None:
    message = error_of(refusals().line(b"9", Reason.IN_DOUBT, tool="read", entry=ENTRY))["message"]
    assert "whether the call pay (sequence 3 of workflow run $(7)) ran, so read was not run; do not repeat" in message
    assert "not run" not in error_of(refusals().line(b"9", Reason.IN_DOUBT, tool="pay", entry=ENTRY))["message"]


def test_the_next_action_only_shows_and_survives_a_shell() -> None:
    action = facts_of(refusals().line(b"9", Reason.IN_DOUBT, entry=ENTRY))["next_action"]
    assert shlex.split(action) == [*COMMAND, "journal", "show", PATH, "3", "--workflow-id", "run $(7)"]


@pytest.mark.parametrize("reason", Reason)
def test_no_refusal_says_how_to_settle_a_doubt(reason: Reason) -> None:
    """An agent with a shell would paste it."""
    line = refusals().line(b"9", reason, entry=ENTRY) + refusals().diverged(b"9", ENTRY, "pay", None)
    for word in (b"journal resolve", b"--not-executed", b"--completed", b"--force", b"--yes", b"delete"):
        assert word not in line


def test_without_a_journal_there_is_nothing_to_show() -> None:
    assert facts_of(refusals(path=None).line(b"9", Reason.UPSTREAM_LOST, tool="ping"))["next_action"] is None


@pytest.mark.parametrize("name", ["t\ud800", 'a "quoted" {name}', "line\nfeed", "%s", "{what}"])
def test_a_name_of_any_kind_is_quoted_and_not_read(name: str) -> None:
    entry = Entry(1, name, 1, 1, name, "s", None, Status.IN_DOUBT)
    error = error_of(refusals().line(b"9", Reason.IN_DOUBT, tool=name, workflow_id=name, entry=entry))
    assert f"the call {name} (sequence 1 of workflow {name})" in error["message"]
    assert error["data"]["checkpoint"]["tool"] == name


# ------------------------------------------------------------------------------------------------- a handed-over answer


@pytest.mark.parametrize(
    "body", [b'{"content":[{"text":"\xc3\xa9"}],"n":1.50}', b'{"answer":null}', b"null", b'"\\u0000"', b"1e400"]
)
@pytest.mark.parametrize("is_error", [True, False])
def test_an_answer_that_could_not_be_recorded_is_handed_over_to_the_letter(body: bytes, is_error: bool) -> None:
    line = refusals().line(
        b"9",
        Reason.JOURNAL_UNAVAILABLE,
        entry=ENTRY,
        why='"answer":null',
        extra={"x": '"answer":null'},
        answer=(is_error, body),
    )
    member = "error" if is_error else "result"
    assert facts_of(line)["answer"] == {member: json.loads(body)}
    assert b'"%b":%b}' % (member.encode(), body) in line


# ----------------------------------------------------------------------------------------------------------- divergence


def test_a_divergence_shows_both_sides_and_where_they_differ() -> None:
    facts = facts_of(refusals().diverged(b"9", ENTRY, "refund", b'{"to":"b","sum":1,"at":null}'))
    assert facts["expected"] == {"tool": "pay", "arguments": {"to": "a", "sum": 1}}
    assert facts["received"] == {"tool": "refund", "arguments": {"to": "b", "sum": 1, "at": None}}
    assert facts["differs"] == ["/at", "/to"]


def test_with_redaction_only_the_tools_are_shown() -> None:
    line = refusals(hides_arguments=True).diverged(b"9", ENTRY, "pay", b'{"to":"secret"}')
    facts = facts_of(line)
    assert (facts["expected"], facts["received"]) == ({"tool": "pay"}, {"tool": "pay"})
    assert "differs" not in facts
    assert b"secret" not in line


@pytest.mark.parametrize(
    ("recorded", "given_now", "differs"),
    [
        (b'{"a":1}', b'{"a":2}', ["/a"]),
        (b'{"a":1}', b'{"a":1,"b":null}', ["/b"]),
        (b'{"a":[1,2,{"b":3}]}', b'{"a":[1,2,{"b":4},5]}', ["/a/2/b", "/a/3"]),
        (b'{"a":{"b":1}}', b'{"a":[1]}', ["/a"]),
        (b'{"a/b":1,"c~d":1,"":1}', b'{"a/b":2,"c~d":2,"":2}', ["/", "/a~1b", "/c~0d"]),
        (b'{"a":9007199254740993}', b'{"a":9007199254740992}', ["/a"]),
        (b'{"a":1e400}', b'{"a":1e401}', ["/a"]),
        (b'{"a":true}', b'{"a":1}', ["/a"]),
        (b'{"a":[],"b":{}}', b'{"a":{},"b":[]}', ["/a", "/b"]),
        (b'{"a":1.0,"b":2}', b'{"b":3,"a":1}', ["/b"]),
        (b'{"a":"\\u00e9"}', '{"a":"é"}'.encode(), []),
        (b'{"a":"\\u00e9"}', b'{"a":"e\\u0301"}', ["/a"]),
        (b'{"a":{"x":1,"x":2}}', b'{"a":{"x":2,"x":1}}', ["/a"]),
        (b'{"x":1,"x":2}', b'{"x":1}', [""]),
        (None, b'{"a":1}', ["/a"]),
        (b"null", b'{"a":1}', ["/a"]),
        (b'{"a":1}', None, ["/a"]),
        (b'{"a":1}', b"null", ["/a"]),
        (b'{"a":null}', b'{"a":0}', ["/a"]),
    ],
)
def test_pointers_name_what_differs_and_only_that(
    recorded: bytes | None, given_now: bytes | None, differs: list[str]
) -> None:
    assert diverged(recorded, given_now)["differs"] == differs


def test_values_and_pointers_are_cut_to_what_a_person_reads() -> None:
    recorded = {f"k{at:03}": "x" * 300 for at in range(100)} | {"a": [1] * 300}
    facts = diverged(json.dumps(recorded).encode(), b"{}")
    assert len(facts["differs"]) == 20
    shown = facts["expected"]["arguments"]
    assert len(shown) == 20
    assert set(map(len, shown.values())) == {200}
    assert shown["k000"] == "x" * 199 + "…"
    listed = diverged(json.dumps({"a": [1] * 300}).encode(), b"{}")["expected"]["arguments"]["a"]
    assert listed == json.dumps([1] * 300)[:199] + "…"


def test_a_long_key_or_a_deep_value_makes_no_long_line_and_no_broken_pointer() -> None:
    key = "k" * 5_000
    facts = diverged(json.dumps({"top": {key: 1, key + "2": 2}}).encode(), b'{"top":{}}')
    assert facts["differs"] == ["/top"]
    deep = b'{"a":' * 480 + b"1" + b"}" * 480
    line = refusals().diverged(b"9", with_arguments(deep), "t", deep.replace(b"1", b"2"))
    assert facts_of(line)["differs"] == ["/a" * 100]
    assert len(line) < 3_000


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"1.5", 1.5),
        (b"1.50", "1.50"),
        (b"1e400", "1e400"),
        (b"9007199254740993", 9007199254740993),
        (b"9007199254740993.0", "9007199254740993.0"),
        (b"-0", 0),
        (b"[1.5,1e400,null,true]", [1.5, "1e400", None, True]),
        (b'{"x":1,"x":2}', "(an object that repeats a key)"),
        (b'[{"x":1,"x":2}]', "(an object that repeats a key)"),
        (b'"\\ud800"', "\ud800"),
    ],
)
def test_a_value_is_shown_as_it_was_written_or_as_text(written: bytes, shown: Any) -> None:
    value = diverged(b'{"a":%b}' % written, b"{}")["expected"]["arguments"]["a"]
    assert (value, type(value)) == (shown, type(shown))


def test_arguments_that_repeat_a_key_can_diverge_too() -> None:
    facts = diverged(b'{"x":1,"x":2}', b"{}")
    assert facts["expected"]["arguments"] == "(an object that repeats a key)"


_json: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def resolve(value: Any, pointer: str) -> Any:
    """What a JSON pointer names (RFC 6901); LookupError where it names nothing."""
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@prop
@given(st.dictionaries(st.text(max_size=4), _json, max_size=4), st.dictionaries(st.text(max_size=4), _json, max_size=4))
def test_every_pointer_names_a_difference_and_equal_arguments_have_none(recorded: Any, given_now: Any) -> None:
    differs = diverged(json.dumps(recorded).encode(), json.dumps(given_now).encode())["differs"]
    assert bool(differs) == (json.dumps(recorded, sort_keys=True) != json.dumps(given_now, sort_keys=True))
    for pointer in differs:
        sides = []
        for side in (recorded, given_now):
            try:
                sides.append(json.dumps(resolve(side, pointer), sort_keys=True))
            except LookupError:
                sides.append("absent")
        assert sides[0] != sides[1]


def test_a_refusal_for_a_pruned_place_says_so_and_names_the_call_that_came() -> None:
    entry = Entry(0, "w", 3, 0, "", "", None, Status.PRUNED)
    line = Refusals("/j.db", ["checkpoint"], hides_arguments=False).line(b"1", Reason.DIVERGED, tool="t", entry=entry)
    error = json.loads(line)["error"]
    facts = error["data"]["checkpoint"]
    assert (facts["cause"], facts["status"], facts["tool"], facts["started_at"]) == ("pruned", "PRUNED", "t", None)
    assert "t (sequence 3 of workflow w)" in error["message"]


def test_a_row_whose_arguments_somebody_has_edited_is_refused_like_any_other() -> None:
    entry = Entry(1, "w", 1, 1, "t", "s", b"not json", Status.COMPLETED, result=b"{}")
    line = Refusals("/j.db", ["checkpoint"], hides_arguments=False).diverged(b"1", entry, "t", b'{"a":1}')
    assert json.loads(line)["error"]["data"]["checkpoint"]["expected"] == {"tool": "t", "arguments": None}
