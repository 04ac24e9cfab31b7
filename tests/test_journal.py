"""What follows from what is on record: the decision table, doubt, and what an answer says. No disk."""

import itertools
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wire
from states import DECISIONS, Action, Cause, Entry, Status, blocking_doubt, decide, status_of_answer, storable

prop: Final = settings(derandomize=True, deadline=None, max_examples=150)

# The contract's table, as a person reads it: what is on record at the place, then what to do with a call of the same
# signature, then with another one.
CONTRACT: Final = """
    none            proceed                        proceed
    NOT_SENT        proceed                        diverge
    NOT_EXECUTED    proceed                        diverge
    PENDING         wait, then the same answer     diverge
    IN_DOUBT        refuse in_doubt                refuse in_doubt
    COMPLETED       replay                         diverge
    FAILED          replay                         diverge
    INPUT_REQUIRED  proceed                        diverge
    TASK            replay                         diverge
    PRUNED          refuse diverged, cause pruned  refuse diverged, cause pruned
"""


def contract() -> dict[tuple[Status | None, bool], Action]:
    table: dict[tuple[Status | None, bool], Action] = {}
    for line in CONTRACT.strip().splitlines():
        name, same, other = (cell.strip() for cell in line.strip().split("  ") if cell.strip())
        status = None if name == "none" else Status(name)
        table[status, True], table[status, False] = Action(same), Action(other)
    return table


def entry_of(
    status: Status, *, at: int = 1, tool: str = "t", signature: str = "s", cause: Cause | None = None
) -> Entry:
    return Entry(
        id=at,
        workflow_id="w",
        sequence=at,
        attempt=1,
        tool_name=tool,
        signature=signature,
        arguments=None,
        status=status,
        cause=cause,
    )


# ------------------------------------------------------------------------------------------------------ decision table


def test_the_table_has_a_row_for_every_status_and_both_kinds_of_signature_and_no_other() -> None:
    assert set(DECISIONS) == set(itertools.product([None, *Status], [True, False]))


@pytest.mark.parametrize(("status", "is_same"), list(itertools.product([None, *Status], [True, False])))
def test_what_is_decided_is_what_the_contract_says(status: Status | None, is_same: bool) -> None:
    entry = None if status is None else entry_of(status, signature="same")
    assert decide(entry, "same" if is_same else "other") is contract()[status, is_same]


def test_a_call_goes_upstream_only_where_no_effect_can_be_on_record() -> None:
    free = {None, Status.NOT_SENT, Status.NOT_EXECUTED, Status.INPUT_REQUIRED}
    assert {status for (status, _), action in DECISIONS.items() if action is Action.PROCEED} == free


def test_only_the_signature_tells_whether_a_call_is_the_one_on_record() -> None:
    entry = entry_of(Status.COMPLETED, tool="renamed", signature="same")
    assert decide(entry, "same") is Action.REPLAY


# --------------------------------------------------------------------------------------------------------------- doubt


@pytest.mark.parametrize("cause", [None, *Cause])
@pytest.mark.parametrize("is_in_flight", [True, False])
@pytest.mark.parametrize("is_same_tool", [True, False])
@pytest.mark.parametrize("is_same_signature", [True, False])
def test_a_doubt_stops_what_might_be_the_same_deed_again(
    cause: Cause | None, is_in_flight: bool, is_same_tool: bool, is_same_signature: bool
) -> None:
    if is_in_flight:  # upstream may still answer: the client gave up on it
        expected = is_same_signature
    elif cause in (Cause.TIMEOUT, Cause.CANCELLED):
        expected = is_same_tool
    else:
        expected = True
    doubted = entry_of(Status.IN_DOUBT, tool="t", signature="s", cause=cause)
    tool, signature = "t" if is_same_tool else "u", "s" if is_same_signature else "r"
    found = blocking_doubt([doubted], tool, signature, {doubted.id} if is_in_flight else ())
    assert found is (doubted if expected else None)


def test_without_doubts_nothing_is_stopped() -> None:
    assert blocking_doubt([], "t", "s", {1}) is None


def test_the_lowest_doubt_that_stops_a_call_is_named() -> None:
    other_tool = entry_of(Status.IN_DOUBT, at=2, tool="u", cause=Cause.CANCELLED)
    lost = entry_of(Status.IN_DOUBT, at=5, cause=Cause.RELAY_LOST)
    low = entry_of(Status.IN_DOUBT, at=3, cause=Cause.UPSTREAM_LOST)
    assert blocking_doubt([lost, other_tool, low], "t", "s", ()) is low


@prop
@given(st.text(st.characters(codec=None) | st.characters(categories=["Cs"])))
def test_every_text_can_be_made_storable_once(text: str) -> None:
    stored = storable(text)
    assert stored.encode().decode() == stored == storable(stored)
    assert (stored == text) == (not any("\ud800" <= character <= "\udfff" for character in text))


# -------------------------------------------------------------------------------------------------- what an answer says

RESULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {"content": []},
    "empty": {},
    "isError": {"content": [], "isError": True},
    "complete": {"resultType": "complete"},
    "input": {"resultType": "input_required", "requestState": "x"},
    "task of 2026": {"resultType": "task", "taskId": "1"},
    "task of 2025": {"task": {"taskId": "1"}},
    "task that is no object": {"task": "1"},
    "both": {"resultType": "task", "task": {"taskId": "1"}},
    "odd kind": {"resultType": ["task"]},
}
RESULT_STATUS: Final[Mapping[tuple[str, bool], Status]] = {  # (result, of the modern era?); all others: COMPLETED
    ("input", True): Status.INPUT_REQUIRED,
    ("task of 2026", True): Status.TASK,
    ("task of 2025", False): Status.TASK,
    ("both", True): Status.TASK,
    ("both", False): Status.TASK,
}
CLOSED: Final = {"code": -32000, "message": "Connection closed"}
TIMED_OUT: Final = {"code": -32001, "message": "Request timed out"}
ERRORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {"code": -32603, "message": "no"},
    "empty": {},
    "closed": CLOSED,
    "timed out": TIMED_OUT,
    "closed, data": {**CLOSED, "data": {"x": 1}},
    "closed, other words": {**CLOSED, "message": "connection closed"},
    "timed out, other words": {**TIMED_OUT, "message": "Request timed out."},
    "crossed": {"code": -32000, "message": "Request timed out"},
    "elicit": {"code": -32042, "message": "m", "data": {"elicitations": []}},
    "elicit nothing": {"code": -32042, "message": "m", "data": {"elicitations": {}}},
    "elicit without data": {"code": -32042, "message": "m"},
    "elicit by another code": {"code": -32043, "message": "m", "data": {"elicitations": []}},
    "refusal of ours": {"code": 31001, "message": "m", "data": {"checkpoint": {"reason": "in_doubt"}}},
    "refusal without reason": {"code": 31001, "message": "m", "data": {"checkpoint": {}}},
    "refusal that is no object": {"code": 31001, "message": "m", "data": {"checkpoint": "reason"}},
    "odd members": {"code": ["x"], "message": {"y": 1}, "data": ["checkpoint"]},
}
NO_OUTCOME: Final = {"closed", "timed out", "closed, data", "refusal of ours"}
NO_OUTCOME_AFTER_STDIN_CLOSED: Final = {"closed, other words", "crossed"}


@pytest.mark.parametrize(
    ("name", "is_modern", "is_closed"), list(itertools.product(RESULTS, [True, False], [True, False]))
)
def test_a_result_is_an_outcome_a_handle_or_a_question(name: str, is_modern: bool, is_closed: bool) -> None:
    status = status_of_answer(False, RESULTS[name], is_modern=is_modern, is_stdin_closed=is_closed)
    assert status is RESULT_STATUS.get((name, is_modern), Status.COMPLETED)


@pytest.mark.parametrize(
    ("name", "is_modern", "is_closed"), list(itertools.product(ERRORS, [True, False], [True, False]))
)
def test_an_error_is_a_failure_unless_nobody_can_know(name: str, is_modern: bool, is_closed: bool) -> None:
    expected: Status | None = Status.FAILED
    if name in NO_OUTCOME or (is_closed and name in NO_OUTCOME_AFTER_STDIN_CLOSED):
        expected = None
    elif name == "elicit":
        expected = Status.INPUT_REQUIRED
    assert status_of_answer(True, ERRORS[name], is_modern=is_modern, is_stdin_closed=is_closed) is expected


_json: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_telling: Final = st.fixed_dictionaries(
    {},
    optional={
        "code": st.sampled_from([-32000, -32001, -32042, 31001]) | _json,
        "message": st.sampled_from(["Connection closed", "Request timed out"]) | _json,
        "data": st.fixed_dictionaries({}, optional={"elicitations": _json, "checkpoint": _json}) | _json,
        "resultType": st.sampled_from(["input_required", "task", "complete"]) | _json,
        "task": _json,
    },
)


@prop
@given(st.booleans(), _telling, st.booleans(), st.booleans())
def test_whatever_upstream_says_a_result_never_fails_a_call_and_an_error_never_completes_one(
    is_error: bool, members: Mapping[str, Any], is_modern: bool, is_closed: bool
) -> None:
    status = status_of_answer(is_error, members, is_modern=is_modern, is_stdin_closed=is_closed)
    if is_error:
        assert status in (Status.FAILED, Status.INPUT_REQUIRED, None)
    else:
        assert status in (Status.COMPLETED, Status.INPUT_REQUIRED, Status.TASK)


def test_a_member_that_was_too_deep_to_read_settles_a_call_all_the_same() -> None:
    depth = 5_000
    line = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":%b1%b}}\n' % (b"[" * depth, b"]" * depth)
    read = wire.read_upstream(line)
    assert read is not None
    status = status_of_answer(True, read.answers[0].members, is_modern=False, is_stdin_closed=False)
    assert status is Status.FAILED
