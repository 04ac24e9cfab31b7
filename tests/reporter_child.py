"""Processes for the outbox tests: what has to be killed, forked or kept from writing. argv: scene, outbox, base URL."""

import json
import os
import resource
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import anyio

import reporter
from reporter import CheckpointReporter, Failure, SqliteOutbox, create_checkpoint_reporter


def tell(*words: object) -> None:
    """One line to the test, at once."""
    os.write(1, (json.dumps(words) + "\n").encode())


def reporter_on(outbox: SqliteOutbox, url: str, warnings: list[str] | None = None) -> CheckpointReporter:
    return create_checkpoint_reporter(
        api_key="test-key",
        server_did="did:web:example.com",
        server_url="https://example.com",
        base_url=url,
        outbox=outbox,
        on_warn=(warnings if warnings is not None else []).append,
    )


def write_for_ever(path: str, url: str) -> None:
    """Adds reports, and settles each third as delivered and each fifth as dead; tells what is done."""
    outbox = SqliteOutbox(path)
    for number in count():
        row_id = outbox.add({"number": number}, f"tool {number}")
        tell("added", row_id, number)
        if number % 3 == 0:
            outbox.settle(row_id, None)
            tell("delivered", row_id)
        elif number % 5 == 0:
            outbox.settle(row_id, Failure("400 Bad Request: no", 400))
            tell("dead", row_id)


def write_and_leave(path: str, url: str) -> None:
    """Adds twenty reports whose claims are over at once, and exits."""
    outbox = SqliteOutbox(path, visibility_timeout_s=0)
    for number in range(20):
        outbox.add({"number": number}, f"tool {number}")
    outbox.close()


def sweep(path: str, url: str) -> None:
    """Flushes when told to, by a line on stdin, until nothing is left."""

    async def steps() -> None:
        it = reporter_on(outbox, url)
        tell("ready")
        sys.stdin.readline()
        while (flushed := await it.flush(5)).delivered:
            tell(*flushed)

    outbox = SqliteOutbox(path)
    anyio.run(steps)
    outbox.close()


def die_everywhere(path: str, url: str) -> None:
    """Creates an outbox and uses it, and is killed before its first, second, third ... statement; then looks at it."""
    connect = reporter._connect
    for deadly in count(1):
        file = f"{path}.{deadly}"
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            left = count(deadly, -1)

            def trace(statement: str, left: Any = left) -> None:
                if next(left) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            def traced(path: str, options: str, trace: Callable[[str], None] = trace) -> sqlite3.Connection:
                connection = connect(path, options)
                connection.set_trace_callback(trace)
                return connection

            reporter._connect = traced
            outbox = SqliteOutbox(file)
            for number in range(2):
                row_id = outbox.add({"number": number}, "t")
                os.write(write_fd, b"+")
            outbox.settle(row_id, None)
            os.write(write_fd, b"-")
            os._exit(0)
        os.close(write_fd)
        _, status = os.waitpid(child, 0)
        done = os.read(read_fd, 9)
        os.close(read_fd)
        outbox = SqliteOutbox(file)
        counts = outbox.counts()
        outbox.add({}, "t")  # usable again
        tell(deadly, done.count(b"+"), done.count(b"-"), *counts, outbox.counts().waiting - counts.waiting)
        outbox.close()
        if status == 0:
            return


def fork(path: str, url: str) -> None:
    """Reports, forks while a thread writes, and reports in both."""

    async def steps(name: str) -> None:
        for number in range(5):
            outcome = await it.report_tool_call(tool_name=f"{name} {number}", action="permit", reason="r")
            assert outcome.delivered, outcome
        assert await it.flush() == (0, 0)

    def write() -> None:
        while not stop.is_set():
            busy.add({}, "busy")

    outbox, busy = SqliteOutbox(path), SqliteOutbox(path + ".busy")
    it = reporter_on(outbox, url)
    anyio.run(steps, "before")
    stop = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    child = os.fork()
    anyio.run(steps, "parent" if child else "child")
    if child == 0:
        os._exit(0)
    stop.set()
    writer.join()
    tell("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *outbox.counts())


def full_disk(path: str, url: str) -> None:
    """Reports while no file can grow, and when it can again."""

    async def steps(calls: int) -> None:
        for _ in range(calls):
            outcome = await it.report_tool_call(tool_name="t", action="permit", reason="r")
            tell("delivered", outcome.delivered, len(warnings))

    warnings: list[str] = []
    outbox = SqliteOutbox(path)
    it = reporter_on(outbox, url, warnings)
    anyio.run(steps, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(os.path.getsize(path), os.path.getsize(path + "-wal")), hard))
    anyio.run(steps, 5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    anyio.run(steps, 3)
    tell("counts", *outbox.counts())
    tell("warnings", *warnings)


SCENES = (write_for_ever, write_and_leave, sweep, die_everywhere, fork, full_disk)

if __name__ == "__main__":
    {scene.__name__: scene for scene in SCENES}[sys.argv[1]](*sys.argv[2:])
