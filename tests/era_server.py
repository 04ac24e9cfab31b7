"""A server on the official SDK that asks for input, with a ledger of what it did. `python era_server.py LEDGER [KEY]`.

With KEY the states that it hands out outlive its process; without, as is the SDK's default, they do not. Tools:

    order    asks for a size, then adds a line
    trip     asks for a place, then for a day, then adds a line
    open     wants a visit to a URL (-32042) until LEDGER.visited exists, then adds a line
    append   adds a line
    stuck    adds a line, ends when it is cancelled
"""

import sys
from pathlib import Path
from typing import Final

import anyio
from ledger_upstream import record
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.request_state import RequestStateSecurity
from mcp.shared.exceptions import UrlElicitationRequiredError
from mcp_types import (
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    InputRequiredResult,
    TextContent,
)

LEDGER: Final = sys.argv[1]
SECURITY: Final = RequestStateSecurity(keys=[sys.argv[2]]) if len(sys.argv) > 2 else None
server: Final = MCPServer("era", request_state_security=SECURITY)

Answer = CallToolResult | InputRequiredResult


def done(line: str) -> CallToolResult:
    """Adds a line to the ledger; the answer that says so."""
    record(LEDGER, line)
    return CallToolResult(content=[TextContent(type="text", text=f"done: {line}")])


def ask(key: str, state: str) -> InputRequiredResult:
    """The interim answer that asks for one thing."""
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    params = ElicitRequestFormParams(message=f"{key}?", requested_schema=schema)
    return InputRequiredResult(input_requests={key: ElicitRequest(params=params)}, request_state=state)


def given(context: Context, key: str) -> str | None:
    """What the client brings as an answer to the last question."""
    answer = (context.input_responses or {}).get(key)
    return str((answer.content or {})[key]) if isinstance(answer, ElicitResult) else None


@server.tool()
def order(item: str, context: Context) -> Answer:
    """Orders an item of a size."""
    size = given(context, "size")
    return ask("size", item) if size is None else done(f"order {item} {size}")


@server.tool()
def trip(context: Context) -> Answer:
    """Books a trip."""
    place, day = given(context, "place"), given(context, "day")
    if day is not None:
        return done(f"trip {context.request_state} {day}")
    return ask("place", "-") if place is None else ask("day", place)


@server.tool(name="open")
def open_account(name: str) -> CallToolResult:
    """Opens an account, after a visit."""
    if not Path(f"{LEDGER}.visited").exists():
        url = ElicitRequestURLParams(message="log in", url="https://example.invalid/login", elicitation_id="e1")
        raise UrlElicitationRequiredError([url])
    return done(f"open {name}")


@server.tool()
def append(n: int) -> CallToolResult:
    """Adds a line."""
    return done(f"append {n}")


@server.tool()
async def stuck(n: int) -> CallToolResult:
    """Adds a line and does not come back."""
    record(LEDGER, f"stuck {n}")
    await anyio.sleep_forever()
    raise AssertionError


if __name__ == "__main__":
    server.run("stdio")
