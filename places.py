"""Which place a call means: the workflow and sequence that a request names itself. Pure.

The hand check decides, since it must be exact and cheap on every call; jsonschema words the error. A test proves that
the two agree, but for 1.0, which JSON Schema takes for an integer and a pin does not.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from states import MAX_SEQUENCE

SEQUENCE_KEY: Final = "checkpoint_seq"
WORKFLOW_KEY: Final = "checkpoint_workflow"

WORKFLOW_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    # No control characters, which would forge lines of a listing, and no lone surrogates, which no file can hold.
    # (?![\\s\\S]) is the end: Python's $ also matches before a last line feed.
    "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f\\ud800-\\udfff]*(?![\\s\\S])",
    "not": {"pattern": "~[0-9]+(?![\\s\\S])"},  # the names of branches
}
META_SCHEMA: Final[Mapping[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        SEQUENCE_KEY: {"type": "integer", "minimum": 1, "maximum": MAX_SEQUENCE},
        WORKFLOW_KEY: WORKFLOW_SCHEMA,
    },
}

_is_clean: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,200}").fullmatch
_is_of_branch: Final = re.compile(r"~[0-9]+\Z").search


class PinError(ValueError):
    """What a request says of its place in `_meta` cannot be meant."""


class Pin(NamedTuple):
    """The place that a request names; None for what it leaves open."""

    workflow_id: str | None
    sequence: int | None


_MAX_MESSAGE_CHARS: Final = 200
_NO_PIN: Final = Pin(None, None)


def is_workflow_id(text: str) -> bool:
    """Whether a text may name a workflow: 1 to 200 characters, no control characters, not the name of a branch."""
    return _is_clean(text) is not None and _is_of_branch(text) is None


def read_pin(meta: Mapping[str, Any]) -> Pin:
    """The place that `_meta` names.

    Raises PinError for a pin that is not one: to run the call as a new one could repeat it.
    """
    if SEQUENCE_KEY not in meta and WORKFLOW_KEY not in meta:
        return _NO_PIN
    sequence, workflow_id = meta.get(SEQUENCE_KEY), meta.get(WORKFLOW_KEY)
    is_sound = (SEQUENCE_KEY not in meta or (type(sequence) is int and 1 <= sequence <= MAX_SEQUENCE)) and (
        WORKFLOW_KEY not in meta or (isinstance(workflow_id, str) and is_workflow_id(workflow_id))
    )
    if not is_sound:
        raise PinError(_explain(meta))
    return Pin(workflow_id, sequence)


def _explain(meta: Mapping[str, Any]) -> str:
    import jsonschema  # 80 ms: only for those who made a mistake

    ours = {key: meta[key] for key in (SEQUENCE_KEY, WORKFLOW_KEY) if key in meta}
    errors = jsonschema.Draft202012Validator(META_SCHEMA).iter_errors(ours)
    for error in sorted(errors, key=lambda error: list(error.path)):
        return f"_meta.{error.path[0]}: {_cut(error.message)}"
    return f"_meta.{SEQUENCE_KEY}: must be written as an integer, without fraction or exponent"


def _cut(message: str) -> str:
    """A message that quotes a value of any length; what is wrong with it stands at the end."""
    return message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:80]} … {message[-100:]}"
