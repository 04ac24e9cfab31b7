"""What is learnt of upstream's tools, and how it is asked for. How calls wait for it is test_relay's."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

import wire
from catalog import _MAX_PAGES, Catalog


class Asker:
    """A catalog that is trusted, and the questions that it sent."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.catalog = Catalog(self.lines.append, is_trusted=True)

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def answer(self, members: Mapping[str, Any], *, which: int = -1, is_error: bool = False) -> bool:
        own_id = wire.Id("string", json.loads(self.lines[which])["id"])
        return self.catalog.take_own(wire.Answer(own_id, is_error, b"", members, 0))


def tool(name: str, **annotations: Any) -> dict[str, Any]:
    return {"name": name, "annotations": annotations}


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_nothing_is_known_or_asked_before_the_client_was_answered(asker: Asker) -> None:
    assert asker.catalog.is_read_only("t") is False
    asker.catalog.list_changed()
    assert asker.lines == []


def test_upstream_is_asked_once_and_a_tool_is_awaited_until_it_answers(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    asker.catalog.client_is_ready({})
    assert [(one["method"], one["params"]) for one in asker.asked] == [("tools/list", {})]
    assert asker.catalog.is_read_only("t") is None
    assert asker.answer({"tools": [tool("t", readOnlyHint=True), tool("u", readOnlyHint=False)]})
    assert [asker.catalog.is_read_only(name) for name in "tuv"] == [True, False, False]


@pytest.mark.parametrize(
    "tools",
    [
        None,
        {},
        [7, None, {"annotations": {"readOnlyHint": True}}],
        [{"name": "t"}],
        [{"name": "t", "annotations": None}],
        [{"name": "t", "annotations": {"readOnlyHint": 1}}],
        [{"name": "t", "annotations": {"readOnlyHint": "true"}}],
        [{"name": "T", "annotations": {"readOnlyHint": True}}],
        [{"name": "t", "annotations": {"idempotentHint": True, "destructiveHint": False}}],
        [{"name": ["t"], "annotations": {"readOnlyHint": True}}],
    ],
)
def test_only_a_plain_true_is_believed(asker: Asker, tools: Any) -> None:
    asker.catalog.client_is_ready({})
    asker.answer({"tools": tools})
    assert asker.catalog.is_read_only("t") is False


def test_all_pages_are_asked_for_with_the_same_meta(asker: Asker) -> None:
    """An empty cursor is a cursor: only absence ends."""
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "progressToken": 1, "x": 2}
    asker.catalog.client_is_ready(meta)
    asker.answer({"tools": [tool("a", readOnlyHint=True)], "nextCursor": ""})
    assert (asker.catalog.is_read_only("a"), asker.catalog.is_read_only("b")) == (True, None)
    asker.answer({"tools": [tool("b", readOnlyHint=True)], "nextCursor": "c"})
    asker.answer({"tools": []})
    kept = {"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}}
    assert [one["params"] for one in asker.asked] == [kept, {**kept, "cursor": ""}, {**kept, "cursor": "c"}]
    assert [asker.catalog.is_read_only(name) for name in "abc"] == [True, True, False]


def test_a_server_that_always_has_a_next_page_is_not_asked_for_ever(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    for _ in range(2):
        before = len(asker.lines)
        while asker.catalog.is_read_only("t") is None:
            asker.answer({"nextCursor": "again"})
        assert len(asker.lines) - before == _MAX_PAGES - 1
        asker.catalog.list_changed()
    assert len(asker.lines) == 2 * _MAX_PAGES + 1


@pytest.mark.parametrize("members", [{"code": -32601, "message": "no", "nextCursor": "x"}])
def test_an_error_ends_the_waiting(asker: Asker, members: dict[str, Any]) -> None:
    asker.catalog.client_is_ready({})
    assert asker.answer(members, is_error=True)
    assert asker.catalog.is_read_only("t") is False
    assert len(asker.lines) == 1


def test_a_late_answer_still_counts_after_the_waiting_was_given_up(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    asker.catalog.give_up()
    assert asker.catalog.is_read_only("t") is False
    assert asker.answer({"tools": [tool("t", readOnlyHint=True)]})
    assert asker.catalog.is_read_only("t") is True


def test_a_changed_list_is_forgotten_and_asked_for_again(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    asker.answer({"tools": [tool("t", readOnlyHint=True)]})
    asker.catalog.list_changed()
    assert asker.catalog.is_read_only("t") is None
    asker.answer({"tools": [tool("t")]})
    assert asker.catalog.is_read_only("t") is False


def test_an_answer_from_before_a_change_is_taken_and_not_believed(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    asker.catalog.list_changed()
    assert asker.answer({"tools": [tool("t", readOnlyHint=True)], "nextCursor": "x"}, which=0)
    assert asker.catalog.is_read_only("t") is None, "the newer answer is awaited"
    assert len(asker.lines) == 2
    assert asker.answer({"tools": [tool("t")]}, which=1)
    assert asker.catalog.is_read_only("t") is False


def test_answers_to_others_are_not_taken(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    for identity in (wire.Id("integer", 1), wire.Id("string", "checkpoint-1")):
        assert not asker.catalog.take_own(wire.Answer(identity, False, b"", {"tools": []}, 0))
    assert asker.answer({"tools": []})
    assert not asker.answer({"tools": []}), "nor a second one"


def test_our_ids_cannot_be_those_of_another_run(asker: Asker) -> None:
    asker.catalog.client_is_ready({})
    other = Asker()
    other.catalog.client_is_ready({})
    [mine], [theirs] = asker.asked, other.asked
    assert mine["id"] != theirs["id"]
    assert mine["id"].startswith("checkpoint-")
    assert mine["id"].endswith("-1")


def test_what_the_client_lists_itself_counts(asker: Asker) -> None:
    asker.catalog.learn(None, {"tools": [tool("t", readOnlyHint=True)]})
    assert asker.catalog.is_read_only("t") is True
