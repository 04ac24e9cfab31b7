"""Which place a request names: the hand check decides, jsonschema words the error, and the two agree."""

import sys
from typing import Any, Final

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wire
from places import META_SCHEMA, SEQUENCE_KEY, WORKFLOW_KEY, Pin, PinError, is_workflow_id, read_pin
from states import MAX_SEQUENCE

prop: Final = settings(derandomize=True, deadline=None, max_examples=200)
VALIDATOR: Final = jsonschema.Draft202012Validator(META_SCHEMA)


def is_read(meta: dict[str, Any]) -> bool:
    try:
        read_pin(meta)
    except PinError:
        return False
    return True


def meta_of(text: str) -> Any:
    """`_meta` as the relay gets it: numbers that are not plain integers are no Python numbers."""
    line = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t","_meta":%b}}\n' % text.encode()
    call = wire.read_downstream(line).call
    assert call is not None
    return call.meta


# ------------------------------------------------------------------------------------------------------------ the two

_near: Final = st.sampled_from([-1, 0, 1, 2, MAX_SEQUENCE - 1, MAX_SEQUENCE, MAX_SEQUENCE + 1, 2**63, 2**64])
_scalar: Final = st.none() | st.booleans() | _near | st.integers() | st.floats() | st.text(max_size=3)
_value: Final = _scalar | st.lists(_scalar, max_size=2) | st.dictionaries(st.text(max_size=2), _scalar, max_size=2)
_awkward: Final = st.sampled_from("a~019\n\r\t\0\x1f\x20\x7f\x9f\xa0\u2028é\ud800\udfff\U0001f600")
_name: Final = st.text(_awkward, max_size=6) | st.text(max_size=6) | st.sampled_from("a~\n").map(lambda c: c * 201)
_meta: Final = st.fixed_dictionaries(
    {}, optional={SEQUENCE_KEY: _value, WORKFLOW_KEY: _name | _value, "other": _value, "progressToken": _value}
)


@prop
@given(_meta)
@example({WORKFLOW_KEY: "a\n"})
@example({WORKFLOW_KEY: "a~1\n"})
@example({WORKFLOW_KEY: "a\n~1"})
@example({WORKFLOW_KEY: "~1"})
@example({WORKFLOW_KEY: "a~1b"})
@example({WORKFLOW_KEY: "a~\u0661"})
@example({WORKFLOW_KEY: "x" * 200})
@example({WORKFLOW_KEY: "\U0001f600" * 200})
@example({WORKFLOW_KEY: "x" * 201})
@example({SEQUENCE_KEY: True})
@example({SEQUENCE_KEY: None})
def test_the_hand_check_and_jsonschema_agree_but_for_whole_floats(meta: dict[str, Any]) -> None:
    if isinstance(meta.get(SEQUENCE_KEY), float):  # 1.0 is an integer for JSON Schema, and no pin
        assert not is_read(meta)
    else:
        assert is_read(meta) == VALIDATOR.is_valid(meta)


def test_a_whole_float_is_where_the_two_differ() -> None:
    assert VALIDATOR.is_valid({SEQUENCE_KEY: 1.0})
    with pytest.raises(PinError, match=r"^_meta\.checkpoint_seq: must be written as an integer, without fraction or"):
        read_pin({SEQUENCE_KEY: 1.0})


@prop
@given(_meta.filter(lambda meta: not is_read(meta)))
def test_what_is_wrong_is_told_in_a_short_line_that_names_the_key(meta: dict[str, Any]) -> None:
    with pytest.raises(PinError) as raised:
        read_pin(meta)
    message = str(raised.value)
    wrong = [key for key in (SEQUENCE_KEY, WORKFLOW_KEY) if key in meta and not is_read({key: meta[key]})]
    assert any(message.startswith(f"_meta.{key}: ") for key in wrong)
    assert len(message) < 250
    assert "\n" not in message


# ---------------------------------------------------------------------------------------------------------- as written


@pytest.mark.parametrize(
    ("written", "pin"),
    [
        ("{}", Pin(None, None)),
        ('{"progressToken":1,"checkpoint_sequence":2,"CHECKPOINT_SEQ":3}', Pin(None, None)),
        ('{"checkpoint_seq":1}', Pin(None, 1)),
        ('{"checkpoint_seq":9007199254740991}', Pin(None, MAX_SEQUENCE)),
        ('{"checkpoint_workflow":"a b/ü~x"}', Pin("a b/ü~x", None)),
        ('{"checkpoint_seq":7,"checkpoint_workflow":"w"}', Pin("w", 7)),
        ('{"checkpoint_workflow":"\\u0041"}', Pin("A", None)),
    ],
)
def test_a_pin_is_what_is_written(written: str, pin: Pin) -> None:
    assert read_pin(meta_of(written)) == pin


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ('{"checkpoint_seq":1.0}', "_meta.checkpoint_seq: "),
        ('{"checkpoint_seq":1e0}', "_meta.checkpoint_seq: "),
        ('{"checkpoint_seq":1E2}', "_meta.checkpoint_seq: "),
        ('{"checkpoint_seq":0}', "_meta.checkpoint_seq: 0 is less than the minimum of 1"),
        ('{"checkpoint_seq":-0}', "_meta.checkpoint_seq: 0 is less than the minimum of 1"),
        ('{"checkpoint_seq":-1}', "_meta.checkpoint_seq: -1 is less than the minimum of 1"),
        ('{"checkpoint_seq":9007199254740992}', "_meta.checkpoint_seq: 9007199254740992 is greater than the maximum"),
        ('{"checkpoint_seq":"1"}', "_meta.checkpoint_seq: '1' is not of type 'integer'"),
        ('{"checkpoint_seq":null}', "_meta.checkpoint_seq: None is not of type 'integer'"),
        ('{"checkpoint_seq":true}', "_meta.checkpoint_seq: True is not of type 'integer'"),
        ('{"checkpoint_seq":[1]}', "_meta.checkpoint_seq: [1] is not of type 'integer'"),
        ('{"checkpoint_workflow":""}', "_meta.checkpoint_workflow: "),
        ('{"checkpoint_workflow":null}', "_meta.checkpoint_workflow: None is not of type 'string'"),
        ('{"checkpoint_workflow":"a\\n"}', "_meta.checkpoint_workflow: "),
        ('{"checkpoint_workflow":"a\\u0000"}', "_meta.checkpoint_workflow: "),
        ('{"checkpoint_workflow":"\\ud800"}', "_meta.checkpoint_workflow: "),
        ('{"checkpoint_workflow":"a~12"}', "_meta.checkpoint_workflow: "),
        ('{"checkpoint_seq":1,"checkpoint_workflow":7}', "_meta.checkpoint_workflow: 7 is not of type 'string'"),
    ],
)
def test_a_pin_that_cannot_be_meant_is_refused_and_says_why(written: str, says: str) -> None:
    with pytest.raises(PinError) as raised:
        read_pin(meta_of(written))
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(
    "written", ["9" * 5_000, "-" + "9" * 5_000, "1e400", '"' + "9" * 5_000 + '"', "[" * 400 + "]" * 400]
)
def test_a_pin_of_any_size_is_refused_in_few_words(written: str) -> None:
    with pytest.raises(PinError, match=r"^_meta\.checkpoint_seq: ") as raised:
        read_pin(meta_of(f'{{"checkpoint_seq":{written}}}'))
    assert len(str(raised.value)) < 250


def test_the_reason_stands_in_the_message_however_long_the_value_is() -> None:
    with pytest.raises(PinError, match=r"^_meta\.checkpoint_workflow: 'xxx.* is too long$"):
        read_pin({WORKFLOW_KEY: "x" * 100_000})


def test_a_workflow_is_never_named_like_a_branch_or_over_two_lines() -> None:
    assert is_workflow_id("run~1a")
    assert is_workflow_id("run~")
    assert not any(map(is_workflow_id, ["run~1", "~0", "run~12", "a\nb", "a\x85b", "", "x" * 201]))


def test_a_sound_pin_costs_no_import_of_jsonschema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)  # an import would fail
    assert read_pin({SEQUENCE_KEY: 1, WORKFLOW_KEY: "w"}) == Pin("w", 1)
    with pytest.raises(ImportError):
        read_pin({SEQUENCE_KEY: 0})
