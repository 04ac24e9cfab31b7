"""Real relay processes, driven over pipes the way a client drives them.

Nothing here sleeps to let something happen: every wait is for a condition and ends at a deadline, with what the
process said on stderr in the message.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = Path(__file__).resolve().parent
LEDGER_UPSTREAM: Final = TESTS / "ledger_upstream.py"

DEADLINE_S: Final = 30.0  # for whatever should take no time; generous, since the machine may be busy
_POLL_S: Final = 0.005

_Source = int | IO[bytes]


def until(is_so: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Waits until something is so; fails, saying `what` was awaited, at the deadline."""
    end = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end, f"waited {deadline_s} s in vain: {what}"
        time.sleep(_POLL_S)


def upstream_words(ledger: Path, *modes: str) -> list[str]:
    """The command of the ledger-keeping upstream."""
    return [sys.executable, str(LEDGER_UPSTREAM), str(ledger), *modes]


def relay_words(*flags: str | Path, upstream: Sequence[str]) -> list[str]:
    """The command of a relay in front of an upstream, started as users start a checkout."""
    return [sys.executable, str(ROOT), *map(str, flags), "--", *upstream]


def node_server(name: str) -> list[str]:
    """The command of one of the reference servers, `@modelcontextprotocol/server-…`; skips the test without it."""
    node = shutil.which("node")
    modules = Path(os.environ.get("CHECKPOINT_NODE_MODULES") or ROOT / "node_modules")
    program = modules / ".bin" / f"mcp-server-{name}"
    if node is None:
        pytest.skip("node is not installed")
    if not program.exists():
        pytest.skip(f"@modelcontextprotocol/server-{name} is not in {modules}; .ci/run installs it")
    return [node, str(program)]


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def call_line(
    tool: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    request_id: int | str,
    seq: int | None = None,
    workflow: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> bytes:
    """A `tools/call` as a line; `seq` and `workflow` pin it to a place."""
    pins = {"checkpoint_seq": seq, "checkpoint_workflow": workflow}
    whole_meta = {**(meta or {}), **{key: value for key, value in pins.items() if value is not None}}
    params: dict[str, Any] = {"name": tool, "arguments": arguments or {}}
    if whole_meta:
        params["_meta"] = whole_meta
    return line_of({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params})


def body_of(line: bytes) -> bytes:
    """The bytes of an answer's result or error, without the envelope: what a replay must give again."""
    for member in (b'"result":', b'"error":'):
        _, found, rest = line.partition(member)
        if found:
            return rest.removesuffix(b"\n").removesuffix(b"}")
    raise AssertionError(f"not an answer: {line[:200]!r}")


def text_of(line: bytes) -> str:
    """The text of a tool's result."""
    return str(json.loads(line)["result"]["content"][0]["text"])


def refusal_of(line: bytes) -> dict[str, Any]:
    """The facts of a refusal of ours, `error.data.checkpoint`, and its `code` and `message`."""
    error = json.loads(line)["error"]
    return {**error["data"]["checkpoint"], "code": error["code"], "message": error["message"]}


def ledger_lines(ledger: Path) -> list[str]:
    """What really happened."""
    return ledger.read_text("utf-8").splitlines() if ledger.exists() else []


def rows(journal: Path) -> list[dict[str, Any]]:
    """The view `calls` in order, as any SQLite tool reads it."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM calls ORDER BY workflow_id, sequence")]


def process_state(pid: int) -> str:
    """The state letter of a process; "" for none, "Z" for one that ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended. Where process 1 reaps nobody, zombies stay for ever."""
    return process_state(pid) not in ("", "Z", "X")


def watches_stdin(pid: int) -> bool:
    """Whether a process polls its descriptor 0."""
    return any(
        "tfd:        0 " in (Path(f"/proc/{pid}/fdinfo") / fd).read_text("utf-8")
        for fd in os.listdir(f"/proc/{pid}/fdinfo")
    )


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, zombies included."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{entry}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if int(stat[1]) == pid:
                    children.append(int(entry))
    return children


def cpu_seconds(pid: int) -> float:
    """How much processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(pid: int) -> int:
    """The most memory that a process has ever held."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def descendants_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    children = children_of(pid)
    return children + [grandchild for child in children for grandchild in descendants_of(child)]


def group_of(pgid: int) -> list[int]:
    """The running processes of a process group."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and is_running(int(entry)):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry)) == pgid:
                    members.append(int(entry))
    return members


class Client:
    """A client of one process that speaks JSON-RPC lines; by default a thread reads all it says at once.

    `stdin`, `stdout`, `stderr` take a descriptor or file instead of our pipe; what is given is closed here once the
    process has it, and `writes_to`, `reads_from` are then our ends of it. With `reads=False` nothing is read before
    `start_reading`. A context manager: the process and all it started are gone at the end, whatever happened.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: _Source | None = None,
        stdout: _Source | None = None,
        stderr: _Source | None = None,
        writes_to: int | None = None,
        reads_from: int | None = None,
        reads: bool = True,
    ) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the client
        self._process = subprocess.Popen(
            list(map(str, words)),
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=self._stderr if stderr is None else stderr,
            bufsize=0,
            start_new_session=True,  # as the Python SDK's client does
        )
        for given in {stdin, stdout, stderr}:
            if isinstance(given, int) and given > 2:
                os.close(given)
            elif given is not None and not isinstance(given, int):
                given.close()
        self._sink = writes_to if self._process.stdin is None else os.dup(self._process.stdin.fileno())
        self._source = reads_from if self._process.stdout is None else os.dup(self._process.stdout.fileno())
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._rest = b""
        self._is_ended = False
        self._reader: threading.Thread | None = None
        if reads and self._source is not None:
            self.start_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        others = descendants_of(self.pid)
        if self._process.poll() is None:
            self.kill()
        for pid in others:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        self.close_stdin()
        if error is not None:
            print(f"--- stderr of {self.pid}\n{self.stderr_text()}")
        if self._reader is not None:
            self._reader.join(1.0)  # a process that inherited the pipe may hold it still
        if not (self._reader and self._reader.is_alive()):
            self.close_stdout()
        self._stderr.close()

    # ------------------------------------------------------------------------------------------------- what we say

    def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Writes a message, or bytes as they are; waits while the pipe is full."""
        data = message if isinstance(message, bytes) else line_of(message)
        assert self._sink is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]

    def request(self, method: str, params: Mapping[str, Any] | None = None) -> int:
        """Sends a request of any method; its id."""
        request_id = next(self._ids)
        self.send({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}})
        return request_id

    def start_call(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        seq: int | None = None,
        workflow: str | None = None,
    ) -> int:
        """Sends a `tools/call`; its id."""
        request_id = next(self._ids)
        self.send(call_line(tool, arguments, request_id=request_id, seq=seq, workflow=workflow))
        return request_id

    def call(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        seq: int | None = None,
        workflow: str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> bytes:
        """Sends a `tools/call`; the line that answers it."""
        return self.answer(self.start_call(tool, arguments, seq=seq, workflow=workflow), deadline_s=deadline_s)

    def shake_hands(self) -> bytes:
        """The handshake of the eras before 2026-07-28; the answer to `initialize`."""
        info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
        answer = self.answer(self.request("initialize", info))
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return answer

    # ------------------------------------------------------------------------------------------------ what it says

    def start_reading(self) -> None:
        """Reads all that comes from now on."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._source is not None
        source = self._source
        pieces: list[bytes] = []
        while True:
            try:
                piece = os.read(source, 1 << 20)
            except OSError:  # a terminal whose other side is gone
                piece = b""
            *lines, rest = piece.split(b"\n")
            with self._changed:
                for line in lines:
                    self._lines.append(b"".join((*pieces, line, b"\n")))
                    pieces = []
                if rest:
                    pieces.append(rest)
                if not piece:
                    self._rest = b"".join(pieces)
                    self._is_ended = True
                self._changed.notify_all()
            if not piece:
                return

    def lines(self) -> list[bytes]:
        """All whole lines so far, each with its line feed."""
        with self._changed:
            return list(self._lines)

    def answer(self, request_id: int | str, *, deadline_s: float = DEADLINE_S) -> bytes:
        """The line that answers a request; fails at the deadline, or when the process will say nothing more."""
        end = time.monotonic() + deadline_s
        seen = 0
        with self._changed:
            while True:
                for line in itertools.islice(self._lines, seen, None):
                    if _answers(line, request_id):
                        return line
                seen = len(self._lines)
                left = end - time.monotonic()
                if self._is_ended or left <= 0:
                    why = "end of output" if self._is_ended else f"nothing in {deadline_s} s"
                    raise AssertionError(f"no answer to {request_id!r}: {why}\n{self.stderr_text()}")
                self._changed.wait(left)

    def rest(self, *, deadline_s: float = DEADLINE_S) -> bytes:
        """Waits for the end of its output; what stood behind the last line feed."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_ended, deadline_s), "its output did not end"
            return self._rest

    def stderr_text(self) -> str:
        """All that was written to stderr so far, by it and by what it started."""
        return os.pread(self._stderr.fileno(), 1 << 24, 0).decode("utf-8", "replace")

    # ----------------------------------------------------------------------------------------------- life and death

    @property
    def pid(self) -> int:
        return self._process.pid

    def upstream_pid(self) -> int:
        """Its one running child: the upstream of a relay."""
        until(lambda: len(self._running_children()) == 1, "one child runs")
        return self._running_children()[0]

    def _running_children(self) -> list[int]:
        return [child for child in children_of(self.pid) if is_running(child)]

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close_stdin(self) -> None:
        if self._sink is not None:
            os.close(self._sink)
            self._sink = None

    def close_stdout(self) -> None:
        """Goes away as a reader; only where no thread reads."""
        assert self._reader is None or not self._reader.is_alive()
        if self._source is not None:
            os.close(self._source)
            self._source = None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to this one process; returns when it is dead."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code, negative for a signal."""
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {deadline_s} s\n{self.stderr_text()}") from None

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Closes its stdin; its exit code."""
        self.close_stdin()
        return self.wait(deadline_s)


def _answers(line: bytes, request_id: int | str) -> bool:
    try:
        message = json.loads(line)
    except ValueError:
        return False
    return (
        isinstance(message, dict)
        and "method" not in message
        and type(message.get("id")) is type(request_id)
        and message["id"] == request_id
    )


@contextlib.contextmanager
def relay(
    journal: Path | None,
    ledger: Path,
    *flags: str | Path,
    modes: Sequence[str] = (),
    cwd: Path | None = None,
    handshake: bool = True,
) -> Iterator[Client]:
    """A relay in front of the ledger-keeping upstream, spoken to by a client that has shaken hands."""
    journaled = () if journal is None else ("--journal", journal)
    with Client(relay_words(*journaled, *flags, upstream=upstream_words(ledger, *modes)), cwd=cwd) as client:
        if handshake:
            client.shake_hands()
        yield client
