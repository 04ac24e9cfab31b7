"""The session server: a stdio MCP server with two tools, and the same on the command line.

Written on `wire.py` and the standard library: a client waits for the first reply, and importing an SDK would take
longer than all the rest. Both protocol eras are served, message by message: a request is of the 2026-07-28 era exactly
when its `_meta` says so. The main thread reads and answers at once; one worker runs the tool calls in their order.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import wire
from toolspec import INSTRUCTIONS, LOAD, LOAD_INPUT, SAVE, SAVE_INPUT, TOOLS
from toolspec import SessionError as SessionError

if TYPE_CHECKING:
    from datetime import datetime
    from logging import Logger

    from projectroot import Root
    from sessiontools import Seen

VERSION: Final = "0.1.0"
NAME: Final = "checkpoint"
MODERN_VERSIONS: Final = ("2026-07-28",)
LEGACY_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
ROOTS_WAIT_S: Final = 2.0

_UNSUPPORTED_VERSION: Final = -32022
_CLIENT_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
_ROOTS_ID: Final = "checkpoint-roots-"
_NO_MORE: Final = ""  # stands for the id of an answer once the input has ended
_LIST_TTL_MS: Final = 3_600_000

# ------------------------------------------------------------------------------------------------------- the server


class _Call(NamedTuple):
    """A tool call that waits for its turn."""

    id: wire.Id
    id_bytes: bytes
    tool: str
    arguments: bytes
    is_modern: bool


class Server:
    """One connection: lines in, lines out through `write`. `receive` never blocks; `work` runs what it queued."""

    def __init__(self, write: Callable[[bytes], None], environ: Mapping[str, str]) -> None:
        self._write = write
        self._environ = environ
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows, between reader and worker
        self._cancelled: set[wire.Id] = set()
        self._open: list[wire.Id] = []
        self._client_has_roots = False
        self._is_client_silent = False
        self._roots_asked = 0
        self._roots_answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._is_first_line = True
        self._seen: Seen | None = None

    # -- the reader's side

    def receive(self, line: bytes) -> None:
        """Answers one line, or queues it where it is a tool call. What cannot be answered is dropped."""
        if not line.strip():
            return
        is_first, self._is_first_line = self._is_first_line, False
        try:
            message = wire.read_downstream(line, is_first=is_first)
        except wire.WireError as error:
            _logger().info("%s", error)
            if error.reply:
                self._write(error.reply)
            return
        if message.method is None:
            self._receive_other(line, message)
        elif message.id is None:
            self._receive_notification(message)
        elif message.is_modern and (fault := _fault_of_meta(message.meta)):
            self._write(wire.error_line(message.id_bytes, *fault))
        elif message.call is not None:
            self._queue(message, message.call)
        else:
            self._answer(line, message)

    def _receive_other(self, line: bytes, message: wire.Message) -> None:
        if message.id is None:
            self._write(
                wire.error_line(
                    b"null", wire.INVALID_REQUEST, "Invalid request: a line must be one request of a method"
                )
            )
        elif message.id.kind == "string":
            self._roots_answers.put((str(message.id.value), _parse(line)))

    def _receive_notification(self, message: wire.Message) -> None:
        with self._lock:
            if message.cancels is not None and message.cancels in self._open:
                self._cancelled.add(message.cancels)
            elif message.method == "notifications/roots/list_changed":
                self._is_client_silent = False

    def _queue(self, message: wire.Message, call: wire.ToolCall) -> None:
        assert message.id is not None
        if call.wants_task and not message.is_modern:
            self._write(wire.error_line(message.id_bytes, wire.METHOD_NOT_FOUND, "These tools do not run as tasks"))
            return
        if call.name not in (SAVE, LOAD):
            self._write(wire.error_line(message.id_bytes, wire.INVALID_PARAMS, f"Unknown tool: {call.name[:100]}"))
            return
        with self._lock:
            self._open.append(message.id)
        self._calls.put(_Call(message.id, message.id_bytes, call.name, call.arguments or b"null", message.is_modern))

    def _answer(self, line: bytes, message: wire.Message) -> None:
        method, result = message.method, None
        if method == "initialize" and not message.is_modern:
            result = self._initialize(_parse(line).get("params"))
        elif method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "ping" and not message.is_modern:
            result = {}
        elif method == "server/discover":
            if not message.is_modern:
                why = f"Invalid params: _meta must name {wire.META_VERSION}"
                self._write(wire.error_line(message.id_bytes, wire.INVALID_PARAMS, why))
                return
            result = {
                "supportedVersions": list(MODERN_VERSIONS),
                "capabilities": {"tools": {}},
                "instructions": INSTRUCTIONS,
            }
        if result is None:
            self._write(wire.error_line(message.id_bytes, wire.METHOD_NOT_FOUND, "Method not found"))
            return
        if message.is_modern:
            result |= {"ttlMs": _LIST_TTL_MS, "cacheScope": "public"}
        self._write(_result_line(message.id_bytes, result, is_modern=message.is_modern))

    def _initialize(self, params: Any) -> dict[str, Any]:
        params = params if isinstance(params, dict) else {}
        capabilities, version = params.get("capabilities"), params.get("protocolVersion")
        with self._lock:
            self._client_has_roots = isinstance(capabilities, dict) and isinstance(capabilities.get("roots"), dict)
        return {
            "protocolVersion": version if version in LEGACY_VERSIONS else LEGACY_VERSIONS[-1],
            "capabilities": {"tools": {}},
            "serverInfo": _server_info(),
            "instructions": INSTRUCTIONS,
        }

    def end(self) -> None:
        """Lets `work` return once it has answered what was queued. No answer of the client can come any more."""
        with self._lock:
            self._is_client_silent = True
        self._roots_answers.put((_NO_MORE, None))
        self._calls.put(None)

    # -- the worker's side

    def work(self) -> None:
        """Runs queued calls one after the other until `end`."""
        while (call := self._calls.get()) is not None:
            answer = self._run(call)
            with self._lock:
                self._open.remove(call.id)
                is_cancelled = call.id in self._cancelled and call.id not in self._open
                self._cancelled.discard(call.id)
            if not is_cancelled:
                self._write(answer)

    def _run(self, call: _Call) -> bytes:
        try:
            structured, texts = self._call_tool(call)
        except SessionError as error:
            _logger().info("%s: %s", call.tool, error)
            result: dict[str, Any] = {"content": [{"type": "text", "text": str(error)}], "isError": True}
        except Exception:
            _logger().exception("%s failed", call.tool)
            return wire.error_line(call.id_bytes, wire.INTERNAL_ERROR, "Internal error; the server's log has the cause")
        else:
            content = [{"type": "text", "text": text} for text in texts if text]
            result = {"content": content, "structuredContent": structured, "isError": False}
        return _result_line(call.id_bytes, result, is_modern=call.is_modern)

    def _call_tool(self, call: _Call) -> tuple[dict[str, Any], Sequence[str]]:
        import projectroot
        import sessiontools

        if self._seen is None:
            self._seen = sessiontools.Seen()
        arguments = _parse(call.arguments) or {}

        def find_root(argument: str | None) -> "Root":
            return projectroot.resolve_root(argument, self._environ, lambda: self._ask_roots(is_modern=call.is_modern))

        if call.tool == SAVE:
            structured = sessiontools.save(
                arguments,
                SAVE_INPUT,
                find_root,
                environ=self._environ,
                seen=self._seen,
                generator={"name": NAME, "version": VERSION},
                now=_now,
            )
            return structured, [structured["message"]]
        named_root, is_full = sessiontools.read_load_input(arguments, LOAD_INPUT)
        root = find_root(named_root)
        loaded = sessiontools.load(root, environ=self._environ, seen=self._seen)
        structured = sessiontools.load_answer(root, loaded, is_full=is_full, now=_now())
        texts = sessiontools.load_texts(structured)
        return structured, [texts.before, texts.main, texts.after]

    def _ask_roots(self, *, is_modern: bool) -> list[str]:
        """The client's roots; none where it does not offer them, refuses, or is silent for two seconds.

        The 2026-07-28 era has no requests to clients. Roots are not kept: they may change between two calls.
        """
        with self._lock:
            if is_modern or not self._client_has_roots or self._is_client_silent:
                return []
            self._roots_asked += 1
            request = f"{_ROOTS_ID}{self._roots_asked}"
        self._write(_line({"jsonrpc": "2.0", "id": request, "method": "roots/list"}))
        try:
            answered = None
            while answered not in (request, _NO_MORE):
                answered, answer = self._roots_answers.get(timeout=ROOTS_WAIT_S)
            roots = answer["result"]["roots"]
            return [root["uri"] for root in roots if isinstance(root["uri"], str)]
        except queue.Empty:
            with self._lock:
                self._is_client_silent = True  # it would not answer the next time either
        except (KeyError, TypeError):
            _logger().info("the client listed no roots")
        return []


def _fault_of_meta(meta: Mapping[str, Any]) -> tuple[int, str] | tuple[int, str, dict[str, Any]] | None:
    """What is wrong with the `_meta` of a request of the 2026-07-28 era, as the arguments of an error."""
    version = meta.get(wire.META_VERSION)
    if not isinstance(version, str) or not isinstance(meta.get(_CLIENT_CAPABILITIES), dict):
        return wire.INVALID_PARAMS, f"Invalid params: _meta must hold {wire.META_VERSION} and {_CLIENT_CAPABILITIES}"
    if version not in MODERN_VERSIONS:
        supported = {"supported": list(MODERN_VERSIONS), "requested": version}
        return _UNSUPPORTED_VERSION, "Unsupported protocol version", supported
    return None


def _server_info() -> dict[str, str]:
    return {"name": NAME, "title": "Checkpoint session", "version": VERSION}


def _result_line(id_bytes: bytes, result: dict[str, Any], *, is_modern: bool) -> bytes:
    if is_modern:
        result = {**result, "resultType": "complete", "_meta": {wire.META_SERVER_INFO: _server_info()}}
    return wire.replay_line(id_bytes, _encode(result), is_error=False)


def _encode(value: Any) -> bytes:
    # A folder's name may hold bytes that are no text: half a surrogate pair for Python, a question mark for a client.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _line(message: Any) -> bytes:
    return _encode(message) + b"\n"


def _parse(line: bytes) -> Any:
    """The JSON value of a line that wire.py let pass; numbers too long for an integer become floats."""
    return json.loads(line.strip().removeprefix(b"\xef\xbb\xbf"), parse_int=_integer)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


def _logger() -> "Logger":
    """The logger, imported when there is something to say: the first reply does not wait for it."""
    from logging import getLogger

    return getLogger("checkpoint.session")


def _now() -> "datetime":
    from datetime import UTC, datetime

    return datetime.now(UTC)


# ------------------------------------------------------------------------------------------------------ on stdio


class _Stop(BaseException):
    """A signal asked this process to end."""


class _Reader:
    """Reads stdin until it ends or a signal comes; a signal interrupts waiting, never the handling of a line."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._is_waiting = False
        self._is_stopped = False

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """The handler for SIGTERM and SIGINT."""
        if self._is_stopped:  # the second one: nothing is waited for, and the file on disk is whole at every moment
            os._exit(130)
        self._is_stopped = True
        if self._is_waiting:
            raise _Stop

    def run(self) -> None:
        buffer = wire.LineBuffer()
        while count := self._read(buffer):
            for line in buffer.take(count):
                self._receive(line)
        if rest := buffer.rest():
            self._receive(rest)

    def _read(self, buffer: wire.LineBuffer) -> int:
        space = buffer.space()
        try:
            self._is_waiting = True
            return 0 if self._is_stopped else os.readv(0, [space])
        except _Stop:
            return 0
        except OSError as error:
            _logger().warning("stdin cannot be read: %s", error.strerror)
            return 0
        finally:
            self._is_waiting = False


def serve() -> int:
    """Serves stdin and stdout until stdin ends or a SIGTERM or SIGINT comes; calls that were read are answered first.

    No flags. Returns the exit code, 0. Raises SessionError if a standard stream is closed.
    """
    try:
        os.set_blocking(0, True)  # first: where stdin is closed, a copy of stdout would take its place
        os.set_blocking(1, True)
        output = os.dup(1)
        os.dup2(2, 1)  # whatever else prints must not reach the protocol
    except OSError as error:
        raise SessionError(f"stdin, stdout and stderr must be open: {error.strerror}") from error
    lock = threading.Lock()

    def write(line: bytes) -> None:
        rest = memoryview(line)
        with lock:
            try:
                while rest:
                    rest = rest[os.write(output, rest) :]
            except OSError as error:
                _logger().info("an answer was dropped: %s", error.strerror)

    server = Server(write, os.environ)
    reader = _Reader(server.receive)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, reader.stop)
    worker = threading.Thread(target=server.work, name="tools")
    worker.start()
    try:
        reader.run()
    finally:
        server.end()
        worker.join()
    return 0


def main() -> int:
    """`serve` as a whole program: an expected failure is one line on stderr and exit code 1."""
    try:
        return serve()
    except SessionError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"checkpoint: {error}\n".encode())
        return 1


# -------------------------------------------------------------------------------------------------- command line


def brief(
    project_root: str | None = None,
    *,
    is_full: bool = False,
    is_hook: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """The text of `checkpoint session brief`: what load answers, or one line where there is nothing to resume.

    `--project-root DIR` (relative to the working directory), `--format brief|full` and `--hook`: for a SessionStart
    hook, at most 9,500 characters, and empty (print nothing) for a checkpoint that git tracks. `say` gets what belongs
    to a full one, which is JSON alone. Raises SessionError.
    """
    import sessiontools

    root = _command_line_root(project_root)
    loaded = sessiontools.load(root, environ=os.environ, seen=sessiontools.Seen())
    if is_hook:
        return sessiontools.hook_text(loaded, _now())
    texts = sessiontools.load_texts(sessiontools.load_answer(root, loaded, is_full=is_full, now=_now()))
    for text in filter(None, (texts.before, texts.after)):
        say(text)
    return texts.main


def save(source: str, project_root: str | None = None) -> str:
    """The text of `checkpoint session save`: saves the arguments of the tool, a JSON object, and gives its answer.

    `--json FILE` (or `-` for stdin), required, and `--project-root DIR`, which wins over a `projectRoot` in the object.
    Raises SessionError, also for what the tool would refuse.
    """
    import sessiontools

    try:
        if source == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(source, "rb") as file:
                content = file.read()
        arguments = json.loads(content, parse_int=_integer)
    except OSError as error:
        raise SessionError(f"{source}: {error.strerror}") from error
    except RecursionError:
        raise SessionError(f"{source}: nested too deeply") from None
    except ValueError as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise SessionError(f"{source}: is not JSON in UTF-8{where}") from None
    if not isinstance(arguments, dict):
        raise SessionError(f"{source}: must hold one JSON object, the arguments of {SAVE}")

    def find_root(argument: str | None) -> "Root":
        return _command_line_root(project_root, argument)

    answer = sessiontools.save(
        arguments,
        SAVE_INPUT,
        find_root,
        environ=os.environ,
        seen=sessiontools.Seen(),
        generator={"name": NAME, "version": VERSION},
        now=_now,
    )
    return str(answer["message"])


def doctor(project_root: str | None = None, *, as_json: bool = False) -> str:
    """The text of `checkpoint session doctor`: root and why, git, ignored or tracked, the files, what a client sees.

    `--project-root DIR` and `--json`. Raises SessionError where there is no root to look at.
    """
    import sessiontools

    root = _command_line_root(project_root)
    world = sessiontools.look(root.path, os.environ)
    findings = {"root": sessiontools.describe_root(root)}
    findings["checkpoint"], findings["backup"] = sessiontools.describe_files(root)
    findings["git"] = sessiontools.describe_git(world)
    findings["ignored"] = sessiontools.describe_ignored(world)
    findings["input check"] = _describe_jsonschema()
    findings["client"] = (
        f"instructions {len(INSTRUCTIONS):,} of 2,048 characters; "
        + "; ".join(f"{tool['name']} {len(tool['description']):,}" for tool in TOOLS)
        + f"; protocol {', '.join((*LEGACY_VERSIONS, *MODERN_VERSIONS))}"
    )
    try:
        loaded = sessiontools.load(root, environ=os.environ, seen=sessiontools.Seen())
        answer = sessiontools.load_answer(root, loaded, is_full=False, now=_now())
        first = str(answer["brief"]).partition("\n")[0]
        findings["load answers"] = f"{first} [{len(answer['brief']):,} characters]" if answer["found"] else first
    except SessionError as error:
        findings["load answers"] = f"error: {error}"
    if as_json:
        return json.dumps(findings, ensure_ascii=False, indent=2)
    return "\n".join(f"{name + ':':<14}{value}" for name, value in findings.items())


def _command_line_root(option: str | None, argument: str | None = None) -> "Root":
    """The root for a command: the option (a shell's `.` is fine), the argument, else as for a server with no client."""
    import projectroot

    named = os.path.abspath(option) if option else option
    return projectroot.resolve_root(argument if named is None else named, os.environ, lambda: ())


def _describe_jsonschema() -> str:
    try:
        from importlib.metadata import version

        import jsonschema  # noqa: F401 (installed is not yet importable)

        return f"jsonschema {version('jsonschema')}"
    except ImportError as error:
        return f"unusable: {error}; install jsonschema for {sys.executable}"
