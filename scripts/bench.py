#!/usr/bin/env python3
"""How fast a call is through Checkpoint, as ratios inside one run.

Every subject is a pair of pipes with an echo server behind it; the client is raw Python on bytes. Blocks of calls are
taken from the subjects in random turn, so that a noisy minute hits all of them, and medians are compared. Microseconds
differ between machines and minutes; ratios in one table do not.

    scripts/bench.py            200 B and 10 KB, a minute
    scripts/bench.py --calls N  more calls per subject
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from storage import connect_owner  # noqa: E402  # the path comes first

ECHO: Final = r"""
import os, sys
head, tail = b'{"jsonrpc":"2.0","id":', b',"result":{"content":[{"type":"text","text":"ok"}],"isError":false}}\n'
rest = b""
while data := os.read(0, 1 << 20):
    *lines, rest = (rest + data).split(b"\n")
    for line in lines:
        begin = line.index(b'"id":') + 5
        os.write(1, head + line[begin : line.index(b",", begin)] + tail)
"""

COPY: Final = r"""
#include <poll.h>
#include <stdlib.h>
#include <sys/wait.h>
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


class Peer:
    """A running subject and a call to it."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._number = 0

    def call(self, size: int) -> None:
        """One `tools/call` with about `size` bytes of arguments, and its answer."""
        self._number += 1
        arguments = {"text": "x" * max(0, size - 120)}
        params = {"name": "echo", "arguments": arguments, "_meta": {"checkpoint_seq": self._number}}
        line = json.dumps({"jsonrpc": "2.0", "id": self._number, "method": "tools/call", "params": params}) + "\n"
        self.send(line.encode())

    def send(self, line: bytes) -> None:
        """Writes a line and reads until its answer ends."""
        view = memoryview(line)
        while view:
            view = view[os.write(self._in, view) :]
        while not os.read(self._out, 1 << 20).endswith(b"\n"):
            pass

    def stop(self) -> None:
        """Ends it by closing its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def c_copy(folder: Path) -> str | None:
    """A compiled two-pipe copy; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source = folder / "copy.c"
    source.write_text(COPY)
    subprocess.run([compiler, "-O2", "-o", str(folder / "copy"), str(source)], check=True)
    return str(folder / "copy")


def two_commits(folder: Path) -> Callable[[int], None]:
    """Two bare durable commits with the journal's own PRAGMAs: what one journaled call cannot do without."""
    path = folder / "floor.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, body BLOB)")
    database = connect_owner(str(path))
    pages = 0

    def commit(size: int) -> None:
        nonlocal pages
        for body in (b"x" * size, b"y" * 80):
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO t (body) VALUES (?)", (body,))
            database.execute("COMMIT")
            pages += 2 + len(body) // 4096
        if pages > 256:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            pages = 0

    return commit


@contextlib.contextmanager
def subjects(folder: Path) -> Iterator[dict[str, Callable[[int], None]]]:
    """What is compared, by name."""
    server = [sys.executable, "-c", ECHO]
    relay = [sys.executable, str(ROOT)]
    copy = c_copy(folder)
    peers = {"direct": Peer(server)}
    if copy:
        peers["C two-pipe copy"] = Peer([copy, *server])
    peers["checkpoint, no journal"] = Peer([*relay, "--", *server])
    peers["checkpoint, journaled"] = Peer([*relay, "--journal", str(folder / "j.db"), "--", *server])
    try:
        yield {**{name: peer.call for name, peer in peers.items()}, "two bare commits": two_commits(folder)}
    finally:
        for peer in peers.values():
            peer.stop()


def measure(calls: dict[str, Callable[[int], None]], size: int, count: int) -> dict[str, list[float]]:
    """Seconds per call, the subjects taken in random turn, ten calls a turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(count // 10 + 5):
        random.shuffle(names)
        for name in names:
            for _ in range(10):
                begin = time.perf_counter()
                calls[name](size)
                if turn >= 5:
                    times[name].append(time.perf_counter() - begin)
    return times


def starts(count: int) -> dict[str, float]:
    """Median seconds to a first relayed reply, against a bare interpreter with what we cannot do without."""
    server = [sys.executable, "-c", ECHO]
    line = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}\n'
    times: dict[str, list[float]] = {"bare": [], "reply": []}
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import asyncio, sqlite3"], check=True)
        times["bare"].append(time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            peer = Peer([sys.executable, str(ROOT), "--journal", f"{folder}/j.db", "--", *server])
            peer.send(line)
            times["reply"].append(time.perf_counter() - begin)
            peer.stop()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000, help="calls per subject and size (%(default)s)")
    parser.add_argument("--starts", type=int, default=15, help="starts to compare (%(default)s)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores\n")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name, subjects(Path(name)) as calls:
        for size in (200, 10_000):
            times = measure(calls, size, args.calls)
            median = {subject: statistics.median(values) for subject, values in times.items()}
            floor = median["direct"] + median["two bare commits"]
            print(f"{size:,} B of arguments".ljust(28) + "p50 us   p99 us  / direct  / C copy  / direct + two commits")
            for subject, values in times.items():
                p50, p99 = median[subject], statistics.quantiles(values, n=100)[98]
                against_copy = f"{p50 / median['C two-pipe copy']:9.2f}" if "C two-pipe copy" in median else " " * 9
                print(
                    f"  {subject:25} {p50 * 1e6:7.0f} {p99 * 1e6:8.0f} {p50 / median['direct']:9.2f} {against_copy}"
                    f" {p50 / floor:9.2f}"
                )
            print()
    median = starts(args.starts)
    print(
        f"first relayed reply {median['reply'] * 1e3:.0f} ms, python -c 'import asyncio, sqlite3' "
        f"{median['bare'] * 1e3:.0f} ms: {median['reply'] / median['bare']:.2f}"
    )


if __name__ == "__main__":
    main()
