"""What upstream says of its own tools: hints, believed only under `--trust-annotations`.

They are learnt from `tools/list` answers that pass by. Many clients never list, or list from a cache, so we ask too:
once the client has been answered in an era, and the way it talks in that era.
"""

import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import wire

TOOLS_LIST: Final = "tools/list"
LIST_CHANGED: Final = "notifications/tools/list_changed"
_PROTOCOL_META: Final = tuple(
    f"io.modelcontextprotocol/{name}" for name in ("protocolVersion", "clientCapabilities", "clientInfo")
)
_MAX_PAGES: Final = 1000  # a server that always has a next page is not asked for ever


class Hints:
    """Which tools are said to only read. `send` writes a line to upstream."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._is_read_only: dict[str, bool] = {}
        self._asked: dict[wire.Id, Mapping[str, Any]] = {}  # our requests, with the _meta they carried
        self._meta: Mapping[str, Any] | None = None  # None until the client was answered once
        self._is_complete = False
        self._prefix = f"checkpoint-{secrets.token_hex(8)}-"
        self._numbers = itertools.count(1)
        self._pages = itertools.count(1)

    def is_read_only(self, tool: str) -> bool | None:
        """What is known of a tool; None while an answer is awaited that may tell. Unknown means no."""
        known = self._is_read_only.get(tool)
        is_awaited = self._meta is not None and not self._is_complete
        return known if known is not None or is_awaited else False

    def give_up(self) -> None:
        """Waits no longer for what upstream has not said."""
        self._is_complete = True

    def client_is_ready(self, meta: Mapping[str, Any]) -> None:
        """Asks upstream, once, as a client does that sends this `_meta`."""
        if self._meta is None:
            self._meta = {key: meta[key] for key in _PROTOCOL_META if key in meta}
            self._ask(self._meta, None)

    def list_changed(self) -> None:
        """Forgets what was said and asks again."""
        self._is_read_only.clear()
        if self._meta is not None:
            self._is_complete = False
            self._ask(self._meta, None)

    def learn(self, members: Mapping[str, Any]) -> None:
        """Takes the tools of one `tools/list` result."""
        tools = members.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                hints = tool.get("annotations")
                self._is_read_only[tool["name"]] = isinstance(hints, dict) and hints.get("readOnlyHint") is True

    def take_own(self, answers: Iterable[wire.Answer]) -> bool:
        """Takes the answers to our own requests; whether there was one, which then must not go downstream."""
        is_ours = False
        for answer in answers:
            meta = self._asked.pop(answer.id, None)
            if meta is None:
                continue
            is_ours = True
            cursor = None if answer.is_error else answer.members.get("nextCursor")
            if not answer.is_error:
                self.learn(answer.members)
            if isinstance(cursor, str) and next(self._pages) < _MAX_PAGES:
                self._ask(meta, cursor)
            else:
                self._is_complete = True
        return is_ours

    def _ask(self, meta: Mapping[str, Any], cursor: str | None) -> None:
        own_id = f"{self._prefix}{next(self._numbers)}"
        self._asked[wire.Id("string", own_id)] = meta
        params: dict[str, Any] = {"_meta": meta} if meta else {}
        if cursor is not None:
            params["cursor"] = cursor
        self._send(wire.request_line(own_id, TOOLS_LIST, params))
