"""A fake MCP server with a side effect: each call adds a line to a ledger, on disk before it is answered.

The ledger is the judge of every crash test: what stands there happened. Run as a script:
`python ledger_upstream.py LEDGER`. Speaks both eras, as far as the tests need; a tool's name says how it behaves:

    append   add a line, answer
    slow     add a line, answer once LEDGER.go exists
    silent   add a line, never answer
    die      add a line, exit with status 3
    fail     add a line, answer with a JSON-RPC error
    echo     answer with the arguments' own bytes, no effect
    big      add a line, answer with `size` bytes of text
"""

import json
import os
import sys
import threading
from typing import Any

_lock = threading.Lock()


def record(ledger: str, line: str) -> None:
    """Adds a line to the ledger; it is on disk when this returns."""
    fd = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, (line + "\n").encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def send(message: dict[str, Any]) -> None:
    """Writes one line to the client, whole."""
    line = json.dumps(message, separators=(",", ":")) + "\n"
    with _lock:
        sys.stdout.buffer.write(line.encode("ascii"))
        sys.stdout.buffer.flush()


def text(value: str) -> dict[str, Any]:
    """A tool result that holds a text."""
    return {"content": [{"type": "text", "text": value}], "isError": False}


def call(ledger: str, request: dict[str, Any]) -> None:
    """Runs a tool and answers."""
    params = request["params"]
    name, arguments = params["name"], params.get("arguments") or {}
    if name == "echo":
        send({"jsonrpc": "2.0", "id": request["id"], "result": text(json.dumps(arguments))})
        return
    record(ledger, f"{name} {json.dumps(arguments, sort_keys=True)}")
    match name:
        case "die":
            os._exit(3)
        case "silent":
            return
        case "fail":
            error = {"code": 1001, "message": "no", "data": {"big": 12345678901234567890}}
            send({"jsonrpc": "2.0", "id": request["id"], "error": error})
            return
        case "slow":
            while not os.path.exists(ledger + ".go"):
                threading.Event().wait(0.01)
        case "big":
            send({"jsonrpc": "2.0", "id": request["id"], "result": text("x" * arguments["size"])})
            return
    with open(ledger, encoding="utf-8") as file:
        count = len(file.readlines())
    send({"jsonrpc": "2.0", "id": request["id"], "result": text(f"effect {count}")})


def main() -> None:
    """Reads requests until end of input."""
    ledger = sys.argv[1]
    for line in sys.stdin.buffer:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                info = {"name": "ledger", "version": "9.9"}
                result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
                send({"jsonrpc": "2.0", "id": request["id"], "result": result})
            case "ping":
                send({"jsonrpc": "2.0", "id": request["id"], "result": {}})
            case "tools/list":
                names = ("append", "slow", "silent", "die", "fail", "echo", "big")
                tools: list[dict[str, Any]] = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
                tools[5]["annotations"] = {"readOnlyHint": True}
                send({"jsonrpc": "2.0", "id": request["id"], "result": {"tools": tools}})
            case "tools/call" if request["params"]["name"] == "slow":
                threading.Thread(target=call, args=(ledger, request), daemon=True).start()
            case "tools/call":
                call(ledger, request)


if __name__ == "__main__":
    main()
