"""What upstream says of its own tools: its catalog, and in that hints, believed only under `--trust-annotations`.

It is learnt from `tools/list` answers that pass by. Many clients never list, or list from a cache, so we ask too: once
the client has been answered in an era, and the way it talks in that era.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import wire

_PROTOCOL_META: Final = tuple(
    f"io.modelcontextprotocol/{name}" for name in ("protocolVersion", "clientCapabilities", "clientInfo")
)
_READ_ONLY: Final = "readOnlyHint"
_REPEATABLE: Final = frozenset({_READ_ONLY, "idempotentHint"})
_MAX_PAGES: Final = 1000  # a server that always has a next page is not asked for ever


class Listing:
    """The pages of one catalog, as somebody asks for one after the other."""

    def __init__(self) -> None:
        self._tools: list[Mapping[str, Any]] | None = None  # None: a part is missing, or was not understood
        self._next: object = None  # the cursor that continues what was read

    def page(self, cursor: object, members: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Takes the answer to one request; all tools once this was the last page of a listing read from its start."""
        before = [] if cursor is None else self._tools if cursor == self._next else None
        page, self._next = _named_tools(members.get("tools")), members.get("nextCursor")  # an empty one is a cursor too
        self._tools = None if before is None or page is None else [*before, *page]
        return self._tools if self._next is None else None


def _named_tools(tools: object) -> list[Mapping[str, Any]] | None:
    """The tools of one page; None if any of it is no tool."""
    if not isinstance(tools, list):
        return None
    named: list[Mapping[str, Any]] = [
        tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)
    ]
    return named if len(named) == len(tools) else None


class Catalog:
    """The tools of upstream, as far as it said. `send` writes a line to upstream.

    `is_trusted` says whether its hints count. `on_tools` takes each catalog that is known as a whole.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        *,
        is_trusted: bool,
        on_tools: Callable[[Sequence[Mapping[str, Any]]], None] = lambda tools: None,
    ) -> None:
        self._send = send
        self._is_trusted = is_trusted
        self._on_tools = on_tools
        self._is_wanted = is_trusted  # else only what passes by is read, until somebody wants it
        self._is_known = False  # as a whole
        self._hints: dict[str, frozenset[str]] = {}  # by tool, those that are true
        self._meta: Mapping[str, Any] | None = None  # what our requests carry; None until the client was answered once
        self._asked: set[wire.Id] = set()
        self._newest: wire.Id | None = None  # answers to earlier requests of ours may be out of date
        self._cursor: str | None = None  # that our newest request carries
        self._is_awaited = False
        self._pages = 0
        self._own, self._theirs = Listing(), Listing()
        self._prefix = f"checkpoint-{os.urandom(8).hex()}-"
        self._numbers = itertools.count(1)

    def is_read_only(self, tool: str) -> bool | None:
        """Whether a tool is said, and believed, to only read; None while an answer is awaited. Unknown means no."""
        if not self._is_trusted:
            return False
        if tool in self._hints:
            return _READ_ONLY in self._hints[tool]
        return None if self._is_awaited else False

    def is_repeatable(self, tool: str) -> bool:
        """Whether a tool is said, and believed, to do no more when it runs again."""
        return self._is_trusted and not _REPEATABLE.isdisjoint(self._hints.get(tool, ()))

    def give_up(self) -> None:
        """Waits no longer for what upstream has not said."""
        self._is_awaited = False

    def client_is_ready(self, meta: Mapping[str, Any]) -> None:
        """We may ask from now on, as a client does that sends this `_meta`."""
        if self._meta is None:
            self._meta = {key: meta[key] for key in _PROTOCOL_META if key in meta}
            if self._is_wanted:
                self._ask_again()

    def want(self) -> None:
        """Asks upstream, once, unless its tools are known or asked for."""
        if not (self._is_wanted or self._is_known):
            self._is_wanted = True
            if self._meta is not None:
                self._ask_again()

    def list_changed(self) -> None:
        """Forgets what was said and asks again."""
        self._hints.clear()
        self._theirs = Listing()  # what they go on with is of another catalog
        self._is_wanted |= self._is_known
        self._is_known = False
        if self._meta is not None and self._is_wanted:
            self._ask_again()

    def learn(self, cursor: object, members: Mapping[str, Any]) -> None:
        """Takes the answer to a `tools/list` of the client's."""
        self._read(self._theirs, cursor, members)

    def has_asked(self, identity: wire.Id) -> bool:
        """Whether a request of ours waits for an answer under this id."""
        return identity in self._asked

    def take_own(self, answer: wire.Answer) -> bool:
        """Takes an answer if it is one to a request of ours, which then must not go downstream; whether it is."""
        if not self.has_asked(answer.id):
            return False
        self._asked.remove(answer.id)
        if answer.id == self._newest:
            self._read_own({} if answer.is_error else answer.members)
        return True

    def _read_own(self, members: Mapping[str, Any]) -> None:
        if isinstance(members.get("tools"), list):
            self._read(self._own, self._cursor, members)
        following = members.get("nextCursor")
        if isinstance(following, str) and self._pages < _MAX_PAGES:
            self._ask(following)
        else:
            self._is_awaited = False

    def _read(self, listing: Listing, cursor: object, members: Mapping[str, Any]) -> None:
        tools = members.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                hints = tool.get("annotations")
                hints = hints if isinstance(hints, dict) else {}
                self._hints[tool["name"]] = frozenset(name for name, value in hints.items() if value is True)
        if (whole := listing.page(cursor, members)) is not None:
            self._is_known = True
            self._on_tools(whole)

    def _ask_again(self) -> None:
        self._is_awaited = True
        self._pages = 0
        self._ask(None)

    def _ask(self, cursor: str | None) -> None:
        own_id = f"{self._prefix}{next(self._numbers)}"
        self._newest, self._cursor = wire.Id("string", own_id), cursor
        self._asked.add(self._newest)
        self._pages += 1
        meta = {"_meta": self._meta} if self._meta else {}
        self._send(
            wire.request_line(own_id, wire.TOOLS_LIST, {**meta, **({} if cursor is None else {"cursor": cursor})})
        )
