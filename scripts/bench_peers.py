"""What scripts/bench.py compares: an echo server, everything that may stand before it, and the bare disk.

Run as a program, with the path of a database, it commits whenever it is told to: see `PacedCommits`.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from journal import Journal  # noqa: E402  # the path comes first
from states import Answered, Dispatched, Status  # noqa: E402
from storage import Files, connect_owner  # noqa: E402
from wire import signature  # noqa: E402

DIRECT: Final = "direct"
COPY: Final = "C two-pipe copy"
SDK: Final = "SDK transports"
FASTMCP: Final = "fastmcp proxy"
PASS: Final = "pass-through"
JOURNALED: Final = "journaled"
BARE: Final = "bare asyncio, sqlite3"
BACK_TO_BACK: Final = "two commits, back to back"
PACED: Final = "two commits, paced"

FASTMCP_VENV: Final = ROOT / ".venv" / "bench"
# What the smallest relay cannot do without.
BARE_PYTHON: Final = [sys.executable, "-c", "import asyncio, sqlite3"]
_RELAY: Final = [sys.executable, str(ROOT)]
_FIRST_NUMBER: Final = 1_000_000  # above every place that a prepared journal has
_WAIT_S: Final = 10.0  # for a process that should end at once
_QUIET_S: Final = 0.25  # longer than the relay waits for a pause to send reports in

# Raw Python on bytes, so that as little as can be is its own. A call's answer is the text that came with it.
_SERVER: Final = r"""
import os, re
identity = re.compile(rb'"id":\s*([^,}\s]+)').search
answers = {
    b'"initialize"': b'"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},'
                     b'"serverInfo":{"name":"echo","version":"1"}}',
    b'"tools/list"': b'"result":{"tools":[%b]}' % b",".join(
        b'{"name":"echo%d","inputSchema":{"type":"object"}}' % number for number in range(4)),
    b'"ping"': b'"result":{}',
    b"": b'"error":{"code":-32601,"message":"Method not found"}',
}
for line in open(0, "rb", 65536, closefd=False):
    found = identity(line)
    if found is None:
        continue
    if b'"tools/call"' in line:
        begin = line.index(b'"text":"') + 8
        text = line[begin : line.index(b'"', begin)]
        answer = b'"result":{"content":[{"type":"text","text":"%b"}],"isError":false}' % text
    else:
        answer = next(answer for method, answer in answers.items() if method in line)
    os.write(1, b'{"jsonrpc":"2.0","id":%b,%b}\n' % (found[1], answer))
"""
_SERVER_COMMAND: Final = [sys.executable, "-c", _SERVER]

# It blocks in each write, so it stands still for ever once both directions are full: nothing may be that large here.
_COPY_SOURCE: Final = r"""
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>
static void copy(int from, int to) {
    static char buffer[65536];
    ssize_t n = read(from, buffer, sizeof buffer);
    if (n <= 0) exit(0);
    for (ssize_t done = 0; done < n;) {
        ssize_t m = write(to, buffer + done, n - done);
        if (m <= 0) exit(1);
        done += m;
    }
}
int main(int argc, char **argv) {
    int down[2], up[2];
    if (argc < 2 || pipe(down) || pipe(up)) return 2;
    if (fork() == 0) {
        dup2(down[0], 0); dup2(up[1], 1);
        close(down[0]); close(down[1]); close(up[0]); close(up[1]);
        execvp(argv[1], argv + 1);
        _exit(127);
    }
    close(down[0]); close(up[1]);
    struct pollfd fds[2] = {{0, POLLIN, 0}, {up[0], POLLIN, 0}};
    while (poll(fds, 2, -1) > 0) {
        if (fds[0].revents) copy(0, down[1]);
        if (fds[1].revents) copy(up[0], 1);
    }
    return 0;
}
"""

_SDK_RELAY: Final = """
import sys
import anyio
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server.stdio import stdio_server

async def pump(source, sink, scope):
    async with source, sink:
        async for message in source:
            await sink.send(message)
    scope.cancel()

async def main():
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:])
    async with stdio_client(server) as up, stdio_server() as down, anyio.create_task_group() as group:
        group.start_soon(pump, down[0], up[1], group.cancel_scope)
        group.start_soon(pump, up[0], down[1], group.cancel_scope)

anyio.run(main)
"""

_FASTMCP_PROXY: Final = """
import sys
from fastmcp.client.transports import StdioTransport
from fastmcp.server import create_proxy

create_proxy(StdioTransport(sys.argv[1], sys.argv[2:])).run(transport="stdio", show_banner=False)
"""


class PeerEnded(Exception):
    """A process that is measured did not answer; the message has its last words."""


# ------------------------------------------------------------------------------------------------------------- clients


class Peer:
    """A running process with the server behind it, greeted, and a client on bytes that costs as little as it can."""

    def __init__(self, name: str, command: list[str], stderr: Path, environment: dict[str, str] | None = None) -> None:
        self._name, self._stderr = name, stderr
        began = time.perf_counter()
        with stderr.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0, env=environment
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._number = _FIRST_NUMBER
        # Into one buffer: to allocate a large one for each read would cost more than the read.
        self._buffer = bytearray(1 << 20)
        self._exchange(
            b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18",'
            b'"capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}\n'
        )
        self.first_reply_s = time.perf_counter() - began
        self._write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it by closing its input; kills it if that is not enough."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self, size_bytes: int, tool: int = 0) -> bytes:
        """A `tools/call` of that size, pinned to a place of its own."""
        self._number += 1
        head = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"echo%d","arguments":{"text":"'
        head, tail = head % (self._number, tool), b'"},"_meta":{"checkpoint_seq":%d}}}\n' % self._number
        return head + b"x" * max(1, size_bytes - len(head) - len(tail)) + tail

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._in, view) :]

    def _read(self) -> int:
        """Reads what there is, and how much that is."""
        count = os.readv(self._out, [self._buffer])
        if not count:
            said = self._stderr.read_text("utf-8", "replace").strip().rpartition("\n")[2]
            raise PeerEnded(f"{self._name} ended: {said or 'it said nothing'}")
        return count

    def _exchange(self, line: bytes) -> int:
        """Writes a line and reads until its answer ends; how long that was."""
        self._write(line)
        total = 0
        while True:
            count = self._read()
            total += count
            if self._buffer[count - 1] == 10:
                return total

    def calls(self, size_bytes: int, count: int) -> list[float]:
        """Makes calls one after another; the seconds of each, from its first byte to the last of its answer."""
        seconds = []
        for _ in range(count):
            line = self._line(size_bytes)
            began = time.perf_counter()
            answered_bytes = self._exchange(line)
            seconds.append(time.perf_counter() - began)
            self._check(answered_bytes, size_bytes)
        return seconds

    def flood(self, size_bytes: int, count: int, in_flight: int, tools: int) -> float:
        """Makes calls with that many under way, of several tools in turn; calls per second."""
        lines = [self._line(size_bytes, number % tools) for number in range(count)]
        sent, answered, answered_bytes = in_flight, 0, 0
        began = time.perf_counter()
        self._write(b"".join(lines[:sent]))
        while answered < count:
            read = self._read()
            ended = self._buffer.count(b"\n", 0, read)
            answered, answered_bytes = answered + ended, answered_bytes + read
            self._write(b"".join(lines[sent : sent + ended]))
            sent += ended
        rate = count / (time.perf_counter() - began)
        self._check(answered_bytes, count * size_bytes)
        return rate

    def _check(self, answered_bytes: int, asked_bytes: int) -> None:
        """An answer repeats the text of its call; one that is much shorter is an error."""
        if answered_bytes < asked_bytes // 2:
            raise PeerEnded(f"{self._name} answered with an error: {bytes(self._buffer[:300])!r}")

    # ------------------------------------------------------------------------- what it costs, as far as the system says

    def cpu_s(self) -> float | None:
        """User and system time of its process so far, without its children's. Source: clock_getcpuclockid(3)."""
        if sys.platform != "linux":
            return None
        return time.clock_gettime((~self.pid << 3) | 2)

    def wait_until_idle(self) -> None:
        """Waits until it has done nothing for a moment, or for as long as that may take."""
        for _ in range(round(_WAIT_S / _QUIET_S)):
            before = self.cpu_s()
            time.sleep(_QUIET_S)
            after = self.cpu_s()
            if before is None or after is None or after - before < 0.002:
                return

    def memory_bytes(self, field: str = "VmRSS") -> float | None:
        """Memory now, or at most so far for `VmHWM`."""
        return memory_bytes(self.pid, field)

    def forget_peak(self) -> None:
        """Lets `VmHWM` begin again from what is used now. Source: proc(5)."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5", "ascii")


def memory_bytes(pid: int, field: str) -> float | None:
    """A field of /proc/PID/status; None on systems without it."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith(field)).split()[1])
    return None


def bare_memory_bytes() -> float | None:
    """What a process has that has only imported what we cannot do without."""
    command = [*BARE_PYTHON[:2], f"{BARE_PYTHON[2]}, sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found = memory_bytes(process.pid, "VmRSS")
        process.stdin.close()
    return found


class Stand:
    """Starts what is compared, each time with files of its own; `left_out` says what cannot be compared here."""

    def __init__(self, folder: Path, *, without: Collection[str], is_full: bool) -> None:
        self._folder = folder
        self._files = 0
        self.left_out = dict.fromkeys(without, "--without")
        self._commands = {
            DIRECT: [],
            COPY: self._compile(),
            SDK: [sys.executable, "-c", _SDK_RELAY],
            FASTMCP: [str(FASTMCP_VENV / "bin" / "python"), "-c", _FASTMCP_PROXY],
            PASS: [*_RELAY, "--"],
        }
        if SDK not in without and importlib.util.find_spec("mcp") is None:
            self.left_out[SDK] = "this Python has no mcp; scripts/install test, then start with .venv/bin/python"
        if FASTMCP not in without and (why := _fastmcp_is_missing(is_wanted=is_full)):
            self.left_out[FASTMCP] = why

    def _compile(self) -> list[str]:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.left_out.setdefault(COPY, "there is no C compiler")
            return []
        source, program = self._folder / "copy.c", self._folder / "copy"
        source.write_text(_COPY_SOURCE, "ascii")
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        return [str(program)]

    def new_file(self) -> Path:
        """The path of a journal or database that is not there yet."""
        self._files += 1
        return self._folder / f"{self._files}.db"

    def start(self, name: str) -> Peer:
        """One of the subjects, with a new journal if it is one that has any."""
        if name == JOURNALED:
            return self.start_journaled(name, self.new_file())
        return Peer(name, [*self._commands[name], *_SERVER_COMMAND], self._folder / "stderr")

    def start_journaled(self, name: str, journal: Path, report_to: str | None = None) -> Peer:
        """A relay with this journal, that reports to an endpoint if one is given."""
        flags, environment = ["--journal", str(journal)], None
        if report_to is not None:
            flags += ["--report-server-did", "did:web:bench.example", "--report-server-url", "https://bench.example/"]
            flags += ["--report-base-url", report_to]
            environment = {**os.environ, "CHECKPOINT_API_KEY": "a-key-of-the-bench", "no_proxy": "127.0.0.1"}
        return Peer(name, [*_RELAY, *flags, "--", *_SERVER_COMMAND], self._folder / "stderr", environment)


def _fastmcp_is_missing(*, is_wanted: bool) -> str:
    """Why there is no fastmcp, or ""; installs it first."""
    if not is_wanted:
        return "it takes its time; --full measures it"
    stamp = FASTMCP_VENV / "installed"
    if stamp.exists():
        return ""
    print("bench.py: pip installs fastmcp into .venv/bench", file=sys.stderr, flush=True)
    python = str(FASTMCP_VENV / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(FASTMCP_VENV)],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "fastmcp"],
    ):
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            return f"pip could not install it: {ended.stderr.strip().rpartition(chr(10))[2]}"
    stamp.touch()
    return ""


# ----------------------------------------------------------------------------------------------------------- endpoints


@contextlib.contextmanager
def good_endpoint() -> Iterator[str]:
    """The base URL of an endpoint that takes every report, while the block runs."""
    command = [sys.executable, str(ROOT / "scripts" / "fake_endpoint.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextlib.contextmanager
def dead_endpoint() -> Iterator[str]:
    """The base URL of an endpoint that refuses each connection; the port is kept, so that nobody else takes it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


# ------------------------------------------------------------------------------------------------------------ the disk


class Commits:
    """Bare durable commits as a journal makes them: same PRAGMAs, same recycled log, no work around them."""

    _LOG_PAGES: Final = 256  # as the journal has it

    def __init__(self, path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB)")
        self._database = connect_owner(str(path))
        self._pages = 0
        self.commit(self._LOG_PAGES * 4096)  # from here on the log is written over, and does not grow
        self.tidy()

    def close(self) -> None:
        self._database.close()

    def commit(self, size_bytes: int) -> float:
        """One row of that size; the seconds until it is on disk."""
        body = b"x" * size_bytes
        began = time.perf_counter()
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("INSERT INTO bodies (body) VALUES (?)", (body,))
        self._database.execute("COMMIT")
        seconds = time.perf_counter() - began
        self._pages += 2 + size_bytes // 4096
        return seconds

    def tidy(self) -> None:
        """Lets the log start over once it is full; a relay does that after an answer, so nobody waits for it."""
        if self._pages >= self._LOG_PAGES:
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._pages = 0

    def pairs(self, size_bytes: int, count: int) -> list[float]:
        """The seconds of two commits in a row, so many times: what one journaled call cannot do without."""
        seconds = []
        for _ in range(count):
            seconds.append(self.commit(size_bytes) + self.commit(size_bytes))
            self.tidy()
        return seconds


class PacedCommits:
    """The same in a process that is woken through a pipe for each commit, as a relay is.

    On many machines a commit costs more after a moment of rest. The wake-up itself does not count.
    """

    def __init__(self, path: Path) -> None:
        command = [sys.executable, __file__, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def close(self) -> None:
        self._process.communicate(timeout=_WAIT_S)

    def _commit(self, size_bytes: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(struct.pack("q", size_bytes))
        [seconds] = struct.unpack("d", self._process.stdout.read(8))
        return float(seconds)

    def pairs(self, size_bytes: int, count: int) -> list[float]:
        """The seconds of two commits, so many times."""
        return [self._commit(size_bytes) + self._commit(size_bytes) for _ in range(count)]


def _commit_when_told(path: Path) -> None:
    """The other end of `PacedCommits`."""
    commits = Commits(path)
    while told := os.read(0, 8):
        os.write(1, struct.pack("d", commits.commit(struct.unpack("q", told)[0])))
        commits.tidy()


def leave_journal(path: Path, rows: int, text_bytes: int, show: Callable[[str], None]) -> None:
    """Makes a journal that a relay could have left: so many calls, each answered with the text that it came with."""
    now_ms = time.time_ns() // 1_000_000
    journal = Journal(Files(str(path)), exists=False, workflow_id=str(path), now_ms=lambda: now_ms)
    journal.take()
    text = "x" * text_bytes
    arguments = f'{{"text":"{text}"}}'.encode()
    result = f'{{"content":[{{"type":"text","text":"{text}"}}],"isError":false}}'.encode()
    digest = signature("echo0", {"text": text})
    batch = max(1, min(1000, (4 << 20) // text_bytes))
    for first in range(1, rows + 1, batch):
        show(f"{first - 1} of {rows} calls of {text_bytes} B are in a journal")
        numbers = range(first, min(first + batch, rows + 1))
        entries = [journal.draft(str(path), n, 1, "echo0", digest, arguments, started_at=now_ms) for n in numbers]
        journal.append([Dispatched(entry) for entry in entries])
        journal.append([Answered(entry, Status.COMPLETED, now_ms, result) for entry in entries])
        journal.tidy()
    journal.close()


if __name__ == "__main__":
    _commit_when_told(Path(sys.argv[1]))
