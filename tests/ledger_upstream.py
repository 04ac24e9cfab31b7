"""A fake MCP server with a side effect: each call adds a line to a ledger, on disk before it is answered.

The ledger is the judge of every crash test: what stands there happened. Run as a script:
`python ledger_upstream.py LEDGER [MODE ...]`. Speaks both eras, as far as the tests need; a tool's name says how it
behaves:

    append   add a line, answer
    slow     add a line, answer once LEDGER.go exists
    silent   add a line, never answer
    die      add a line, exit with status 3
    fail     add a line, answer with a JSON-RPC error
    big      add a line, answer with `size` bytes of text
    torn     add a line, answer without a line feed, exit with status 0

and without an effect:

    echo     answer with the arguments' own bytes
    whoami   answer with argv, environment, working directory and process id
    stall    never answer
    ask      ask the client under `id`, answer with what it answers
    spawn    start `command`, which inherits our stdout, answer with its process id; with `status`, exit with it
    close    answer, close descriptor `fd` (0 or 1), live on
    flood    send `count` notifications of `size` bytes, numbered, then answer
    noise    write `size` bytes to stderr, then answer

Modes: `deaf` ignores SIGTERM, SIGINT and the end of input; `bye` writes LEDGER.bye some time after the end of input;
`chatty` sends a notification every 10 ms; `hear` adds each line that it reads to LEDGER.heard, behind its process id;
`shy` waits for LEDGER.go before it answers `initialize`, `rude` refuses that once LEDGER.go exists.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

_lock = threading.Lock()
_asked: dict[Any, Any] = {}  # by the id of a question to the client, the id of the call that asks


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
    view = memoryview(line.encode("ascii"))
    with _lock:
        while view:  # under PYTHONUNBUFFERED sys.stdout.buffer would drop what a write that is interrupted leaves over
            view = view[os.write(1, view) :]


def text(value: str) -> dict[str, Any]:
    """A tool result that holds a text."""
    return {"content": [{"type": "text", "text": value}], "isError": False}


def call(ledger: str, request: dict[str, Any]) -> None:
    """Runs a tool and answers."""
    params = request["params"]
    name, arguments = params["name"], params.get("arguments") or {}
    if name in _HARMLESS:
        harmless(request, name, arguments)
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
        case "torn":
            message = {"jsonrpc": "2.0", "id": request["id"], "result": text("torn")}
            os.write(1, json.dumps(message)[: arguments.get("bytes")].encode("ascii"))
            os._exit(0)
    with open(ledger, encoding="utf-8") as file:
        count = len(file.readlines())
    send({"jsonrpc": "2.0", "id": request["id"], "result": text(f"effect {count}")})


_HARMLESS = ("echo", "whoami", "stall", "ask", "spawn", "close", "flood", "noise")


def harmless(request: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    """Runs a tool that adds no line."""
    answer = {"jsonrpc": "2.0", "id": request["id"], "result": text(json.dumps(arguments))}
    match name:
        case "whoami":
            facts = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}
            answer["result"] = text(json.dumps(facts))
        case "stall":
            return
        case "ask":
            _asked[arguments["id"]] = request["id"]
            question = {"mode": "form", "message": "sure?", "requestedSchema": {"type": "object", "properties": {}}}
            send({"jsonrpc": "2.0", "id": arguments["id"], "method": "elicitation/create", "params": question})
            return
        case "spawn":
            command = ["sh", "-c", arguments["command"]]
            child = subprocess.Popen(command, start_new_session=bool(arguments.get("leaves_group")))
            answer["result"] = text(str(child.pid))
        case "flood":
            for number in range(arguments["count"]):
                note = {"n": number, "pad": "x" * arguments["size"]}
                send({"jsonrpc": "2.0", "method": "notifications/message", "params": note})
        case "noise":
            sys.stderr.write("noise\n" * (arguments["size"] // 6))
            sys.stderr.flush()
    send(answer)
    if name == "close":
        os.close(arguments["fd"])
        if arguments["fd"] == 0:  # there is nothing more to read, and we live on
            threading.Event().wait()
    elif "status" in arguments:
        os._exit(arguments["status"])


def chat() -> None:
    """Sends notifications for ever."""
    for number in range(1 << 30):
        send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"n": number}})
        time.sleep(0.01)


def main() -> None:
    """Reads requests until end of input."""
    ledger, *modes = sys.argv[1:]
    if "deaf" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "chatty" in modes:
        threading.Thread(target=chat, daemon=True).start()
    serve(ledger, modes)
    if "bye" in modes:
        time.sleep(0.4)
        record(ledger + ".bye", "bye")
    if "deaf" in modes:
        threading.Event().wait()


def serve(ledger: str, modes: list[str]) -> None:
    """Answers requests until end of input."""
    for line in sys.stdin.buffer:
        if "hear" in modes:
            record(ledger + ".heard", f"{os.getpid()} {line.decode().removesuffix(chr(10))}")
        request = json.loads(line)
        match request.get("method"):
            case None if request["id"] in _asked:
                answer = {"answer": request.get("result"), "error": request.get("error")}
                send({"jsonrpc": "2.0", "id": _asked.pop(request["id"]), "result": text(json.dumps(answer))})
            case "initialize" if "rude" in modes and os.path.exists(ledger + ".go"):
                send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32603, "message": "go away"}})
            case "initialize":
                while "shy" in modes and not os.path.exists(ledger + ".go"):
                    threading.Event().wait(0.01)
                info = {"name": "ledger", "version": "9.9"}
                result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
                send({"jsonrpc": "2.0", "id": request["id"], "result": result})
            case "server/discover":
                meta = {"io.modelcontextprotocol/serverInfo": {"name": "ledger", "version": "9.9"}}
                known: dict[str, Any] = {"resultType": "complete", "supportedVersions": ["2026-07-28"], "_meta": meta}
                known |= {"capabilities": {"tools": {}}, "ttlMs": 0, "cacheScope": "private"}
                send({"jsonrpc": "2.0", "id": request["id"], "result": known})
            case "ping":
                send({"jsonrpc": "2.0", "id": request["id"], "result": {}})
            case "tools/list":
                names = ("append", "slow", "silent", "die", "fail", "echo", "big", "torn", *_HARMLESS[1:])
                tools: list[dict[str, Any]] = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
                tools[5]["annotations"] = {"readOnlyHint": True}
                send({"jsonrpc": "2.0", "id": request["id"], "result": {"tools": tools}})
            case "tools/call" if request["params"]["name"] == "slow":
                threading.Thread(target=call, args=(ledger, request), daemon=True).start()
            case "tools/call":
                call(ledger, request)


if __name__ == "__main__":
    main()
