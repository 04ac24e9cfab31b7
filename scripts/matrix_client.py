"""A client on the official Python SDK, of either generation, that does what it is told; scripts/matrix.py starts it.

Its one argument is JSON: `command` (the words of the server), `env`, and `mode` (`auto`, `legacy` or a protocol
version; the first generation knows but one way and ignores it). It connects and says what it learned of the server,
then answers each line of stdin with one line of stdout: `["list"]`, or `["call", tool, arguments, pin or null]`.
"""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

mcp: Final[Any] = importlib.import_module("mcp")  # which generation it is depends on the interpreter


@asynccontextmanager
async def connected(command: list[str], env: dict[str, str], mode: str) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """A client, and what its server said of itself."""
    server = mcp.StdioServerParameters(command=command[0], args=command[1:], env=env)
    if hasattr(mcp, "Client"):
        async with mcp.Client(server, mode=mode) as client:
            yield (
                client,
                {
                    "protocolVersion": client.protocol_version,
                    "serverInfo": dumped(client.server_info),
                    "capabilities": dumped(client.server_capabilities),
                    "instructions": client.instructions,
                },
            )
    else:
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            yield session, dumped(await session.initialize())


def dumped(model: Any) -> Any:
    """A model of the SDK as JSON with the names of the wire."""
    return model if model is None else model.model_dump(mode="json", by_alias=True)


async def do(client: Any, step: list[Any]) -> Any:
    """The answer to one step."""
    if step[0] == "list":
        return dumped(await client.list_tools())
    _, tool, arguments, pin = step
    return dumped(await client.call_tool(tool, arguments, meta=None if pin is None else {"checkpoint_seq": pin}))


async def outcome(of: Callable[[], Any]) -> dict[str, Any]:
    """An answer or an error, as the line that reports it."""
    try:
        return {"answer": await of()}
    except Exception as error:
        return {"error": told(error)}


def told(error: BaseException) -> Any:
    """The error that the server sent, or what the SDK says went wrong."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if hasattr(error, "error"):
        return dumped(error.error)
    return {"kind": type(error).__name__, "message": str(error)}


def say(report: dict[str, Any]) -> None:
    print(json.dumps(report), flush=True)


async def main(command: list[str], env: dict[str, str], mode: str) -> None:
    try:
        async with connected(command, env, mode) as (client, hello):
            say({"answer": hello})
            while line := await asyncio.to_thread(sys.stdin.readline):
                step = json.loads(line)
                say(await outcome(lambda: do(client, step)))  # noqa: B023  # awaited before the next turn
    except Exception as error:  # it could not connect, or a server that was killed could not be closed
        say({"error": told(error)})


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
