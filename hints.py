"""What upstream says of its own tools: hints, believed only under `--trust-annotations`.

They are learnt from `tools/list` answers that pass by. Many clients never list, or list from a cache, so we ask too:
once the client has been answered in an era, and the way it talks in that era.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import wire

TOOLS_LIST: Final = "tools/list"
LIST_CHANGED: Final = "notifications/tools/list_changed"
_PROTOCOL_META: Final = tuple(
    f"io.modelcontextprotocol/{name}" for name in ("protocolVersion", "clientCapabilities", "clientInfo")
)
_READ_ONLY: Final = "readOnlyHint"
_REPEATABLE: Final = frozenset({_READ_ONLY, "idempotentHint"})
_MAX_PAGES: Final = 1000  # a server that always has a next page is not asked for ever


class Hints:
    """Which tools are said to only read, or to change nothing when run again. `send` writes a line to upstream."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._tools: dict[str, frozenset[str]] = {}  # by name, the hints that are true
        self._meta: Mapping[str, Any] | None = None  # what our requests carry; None until the client was answered once
        self._asked: set[wire.Id] = set()
        self._newest: wire.Id | None = None  # answers to earlier requests of ours may be out of date
        self._is_awaited = False
        self._page = 0
        self._prefix = f"checkpoint-{os.urandom(8).hex()}-"
        self._numbers = itertools.count(1)

    def is_read_only(self, tool: str) -> bool | None:
        """What is known of a tool; None while an answer is awaited that may tell. Unknown means no."""
        if tool in self._tools:
            return _READ_ONLY in self._tools[tool]
        return None if self._is_awaited else False

    def is_repeatable(self, tool: str) -> bool:
        """Whether a tool is said to do no more when it runs again."""
        return not _REPEATABLE.isdisjoint(self._tools.get(tool, ()))

    def give_up(self) -> None:
        """Waits no longer for what upstream has not said."""
        self._is_awaited = False

    def client_is_ready(self, meta: Mapping[str, Any]) -> None:
        """Asks upstream, once, as a client does that sends this `_meta`."""
        if self._meta is None:
            self._meta = {key: meta[key] for key in _PROTOCOL_META if key in meta}
            self._ask_again()

    def list_changed(self) -> None:
        """Forgets what was said and asks again."""
        self._tools.clear()
        if self._meta is not None:
            self._ask_again()

    def learn(self, members: Mapping[str, Any]) -> None:
        """Takes the tools of one `tools/list` result."""
        tools = members.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                hints = tool.get("annotations")
                hints = hints if isinstance(hints, dict) else {}
                self._tools[tool["name"]] = frozenset(name for name, value in hints.items() if value is True)

    def has_asked(self, identity: wire.Id) -> bool:
        """Whether a request of ours waits for an answer under this id."""
        return identity in self._asked

    def take_own(self, answer: wire.Answer) -> bool:
        """Takes an answer if it is one to a request of ours, which then must not go downstream; whether it is."""
        if not self.has_asked(answer.id):
            return False
        self._asked.remove(answer.id)
        if answer.id == self._newest:
            self._read_page({} if answer.is_error else answer.members)
        return True

    def _read_page(self, members: Mapping[str, Any]) -> None:
        self.learn(members)
        cursor = members.get("nextCursor")
        if isinstance(cursor, str) and self._page < _MAX_PAGES:  # an empty one is a cursor too
            self._ask({"cursor": cursor})
        else:
            self._is_awaited = False

    def _ask_again(self) -> None:
        self._is_awaited = True
        self._page = 0
        self._ask({})

    def _ask(self, params: Mapping[str, Any]) -> None:
        own_id = f"{self._prefix}{next(self._numbers)}"
        self._newest = wire.Id("string", own_id)
        self._asked.add(self._newest)
        self._page += 1
        meta = {"_meta": self._meta} if self._meta else {}
        self._send(wire.request_line(own_id, TOOLS_LIST, {**meta, **params}))
