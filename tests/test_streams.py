"""Readers and writers over real descriptors, on a real loop, in this process."""

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streams import Reader, Send, Writer, nonblocking

Body = Callable[[], Awaitable[None]]
Pair = tuple[int, int]  # (to read from, to write to)
DEADLINE_S = 20.0

_kept: list[Send] = []


def let_go(fd: int, send: Send) -> None:
    """Ends the use of what `nonblocking` gave; a socket goes with the process, and complains of any other end."""
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        _kept.append(send)
    else:
        os.close(fd)


def run(body: Body) -> None:
    """Runs a test's body on a loop of its own; an exception in a callback fails it."""
    errors: list[Any] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with asyncio.timeout(DEADLINE_S):
            await body()

    asyncio.run(guarded())
    assert errors == []


def never() -> None:
    """A callback that is not to be called."""
    raise AssertionError("called")


@contextlib.contextmanager
def closing(*fds: int) -> Iterator[None]:
    try:
        yield
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def pipe() -> Pair:
    return os.pipe()


def socketpair() -> Pair:
    reading, writing = socket.socketpair()
    return reading.detach(), writing.detach()


def terminal() -> Pair:
    master, slave = os.openpty()
    mode = termios.tcgetattr(slave)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    return slave, master


class Heard:
    """What a reader has said."""

    def __init__(self, fd: int) -> None:
        self.lines: list[bytes] = []
        self.rest: bytes | None = None
        self.changed = asyncio.Event()
        self.reader = Reader(asyncio.get_running_loop(), fd, self._on_lines, self._on_end)

    def _on_lines(self, lines: list[bytes]) -> None:
        self.lines += lines
        self.changed.set()

    def _on_end(self, rest: bytes) -> None:
        assert self.rest is None, "the end came twice"
        self.rest = rest
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()

    async def until_end(self) -> None:
        await self.until(lambda: self.rest is not None)


class Wrote:
    """A writer to a descriptor, and what it has said."""

    def __init__(self, fd: int) -> None:
        self.drained = 0
        self.broken = 0
        self.changed = asyncio.Event()
        self.fd, self.send = nonblocking(fd)
        self.writer = Writer(
            asyncio.get_running_loop(), self.fd, self.send, on_drained=self._on_drained, on_broken=self._on_broken
        )

    def _on_drained(self) -> None:
        self.drained += 1
        self.changed.set()

    def _on_broken(self) -> None:
        self.broken += 1
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()


async def turns(count: int = 5) -> AsyncIterator[int]:
    """Lets the loop turn a few times."""
    for turn in range(count):
        await asyncio.sleep(0)
        yield turn


# -------------------------------------------------------------------------------------------------------------- reader


@pytest.mark.parametrize("kind", [pipe, socketpair])
def test_lines_come_whole_and_the_rest_at_the_end(kind: Callable[[], Pair]) -> None:
    """FR-03, FR-10: however the bytes are cut, down to one at a time and lines as long as the buffer."""

    async def body() -> None:
        reading, writing = kind()
        with closing(reading, writing):
            heard = Heard(reading)
            heard.reader.start()
            for byte in b'{"a":"\xe2\x9c\x85"}\r\n\n':
                os.write(writing, bytes([byte]))
                await asyncio.sleep(0)
            await heard.until(lambda: len(heard.lines) == 2)
            assert heard.lines == [b'{"a":"\xe2\x9c\x85"}\r\n', b"\n"]
            for size in (65535, 65536, 65537):
                line = b"x" * (size - 1) + b"\n"
                sender = asyncio.get_running_loop().run_in_executor(None, os.write, writing, line)
                await heard.until(lambda line=line: heard.lines[-1] == line)  # type: ignore[misc]
                await sender
            os.write(writing, b"rest")
            os.close(writing)
            await heard.until_end()
            assert heard.rest == b"rest"
            assert heard.reader.is_ended

    run(body)


def test_a_reader_that_is_paused_leaves_bytes_where_they_are() -> None:
    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            heard = Heard(reading)
            heard.reader.start()
            os.write(writing, b"1\n")
            await heard.until(lambda: heard.lines == [b"1\n"])
            heard.reader.pause()
            heard.reader.pause()
            os.write(writing, b"2\n")
            async for _ in turns():
                assert heard.lines == [b"1\n"]
            heard.reader.resume()
            heard.reader.resume()
            await heard.until(lambda: heard.lines == [b"1\n", b"2\n"])
            heard.reader.close()
            heard.reader.resume()
            os.write(writing, b"3\n")
            async for _ in turns():
                assert heard.lines == [b"1\n", b"2\n"]
            assert heard.rest is None

    run(body)


def test_a_reader_may_be_paused_by_the_lines_it_brings() -> None:
    """Which is what back-pressure does."""

    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            heard = Heard(reading)
            on_lines = heard._on_lines

            def pausing(lines: list[bytes]) -> None:
                on_lines(lines)
                heard.reader.pause()

            heard.reader._on_lines = pausing
            heard.reader.start()
            for n in range(3):
                os.write(writing, b"%d\n" % n)
                await heard.until(lambda n=n: len(heard.lines) == n + 1)  # type: ignore[misc]
                os.write(writing, b"")
                heard.reader.resume()
            os.close(writing)
            await heard.until_end()
            assert heard.lines == [b"0\n", b"1\n", b"2\n"]

    run(body)


@pytest.mark.parametrize("content", [b"", b"1\n2\n", b"1\nrest", b"x" * 300_000 + b"\n" + b"y\n" * 100_000])
def test_a_file_is_read_by_a_thread(tmp_path: Path, content: bytes) -> None:
    async def body() -> None:
        (tmp_path / "file").write_bytes(content)
        with (tmp_path / "file").open("rb") as file:
            heard = Heard(file.fileno())
            heard.reader.start()
            await heard.until_end()
        assert heard.rest is not None
        assert b"".join(heard.lines) + heard.rest == content
        assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in heard.lines)

    run(body)


def test_a_file_is_not_read_while_paused(tmp_path: Path) -> None:
    """Else a slow upstream and a long file would fill our memory."""

    async def body() -> None:
        (tmp_path / "file").write_bytes(b"z" * 999 + b"\n" + b"line\n" * 500_000)
        with (tmp_path / "file").open("rb") as file:
            heard = Heard(file.fileno())
            heard.reader.start()
            await heard.until(lambda: bool(heard.lines))
            for _ in range(50):  # a resumption gives no more than one read
                heard.reader.pause()
                heard.reader.resume()
            heard.reader.pause()
            await asyncio.sleep(0.2)  # time enough for what must not happen
            assert os.lseek(file.fileno(), 0, os.SEEK_CUR) < 1_000_000
            heard.reader.resume()
            await heard.until_end()
            assert len(heard.lines) == 500_001

    run(body)


def test_dev_null_is_an_end() -> None:
    async def body() -> None:
        fd = os.open(os.devnull, os.O_RDONLY)
        with closing(fd):
            heard = Heard(fd)
            heard.reader.start()
            await heard.until_end()
            assert (heard.lines, heard.rest) == ([], b"")

    run(body)


def test_a_terminal_that_hangs_up_is_an_end() -> None:
    async def body() -> None:
        reading, writing = terminal()
        with closing(reading, writing):
            heard = Heard(reading)
            heard.reader.start()
            os.write(writing, b"1\n")
            await heard.until(lambda: heard.lines == [b"1\n"])
            os.close(writing)
            await heard.until_end()

    run(body)


def test_a_socket_that_is_reset_is_an_end() -> None:
    async def body() -> None:
        reading, writing = socket.socketpair()
        with reading, writing:
            heard = Heard(reading.fileno())
            heard.reader.start()
            reading.send(b"unread by the peer, so that its close resets")
            writing.send(b"1\nrest")
            await heard.until(lambda: heard.lines == [b"1\n"])
            writing.close()
            await heard.until_end()
            assert heard.rest == b"rest"

    run(body)


def test_the_rest_is_what_is_there_although_others_hold_the_pipe() -> None:
    """UD-04, FR-12: the process is gone and its grandchild has the pipe's end: there is no end of file to wait for."""

    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            heard = Heard(reading)
            heard.reader.start()
            os.write(writing, b"1\n2\nrest")
            heard.reader.read_rest()
            assert (heard.lines, heard.rest) == ([b"1\n", b"2\n"], b"rest")
            heard.reader.read_rest()  # which it may be asked for after the end
            heard.reader.resume()
            os.write(writing, b"3\n")
            async for _ in turns():
                assert heard.lines == [b"1\n", b"2\n"]

    run(body)


def test_the_rest_of_one_who_never_stops_has_an_end() -> None:
    """Each line that is read makes room for the next, as a flooding grandchild would; only what was there counts."""

    async def body() -> None:
        reading, writing = pipe()
        os.set_blocking(writing, False)
        with closing(reading, writing):

            def refill() -> None:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(writing, b"y\n" * 2048)

            heard = Heard(reading)
            on_lines = heard._on_lines

            def refilling(lines: list[bytes]) -> None:
                on_lines(lines)
                assert len(heard.lines) < 1_000_000, "it reads for ever"
                refill()

            heard.reader._on_lines = refilling
            refill()
            heard.reader.read_rest()
            assert 0 < len(heard.lines) < 200_000
            assert heard.reader.is_ended

    run(body)


def test_a_pipe_is_enlarged_for_a_long_line_only() -> None:
    """The kernel's quota for larger pipes is per user."""
    size = getattr(fcntl, "F_GETPIPE_SZ", None)
    if size is None:
        pytest.skip("pipes do not tell their size here")

    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            usual = fcntl.fcntl(reading, size)
            heard = Heard(reading)
            heard.reader.start()
            os.write(writing, b"short\n" * 1000)
            await heard.until(lambda: len(heard.lines) == 1000)
            assert fcntl.fcntl(reading, size) == usual
            sender = asyncio.get_running_loop().run_in_executor(None, os.write, writing, b"x" * 300_000 + b"\n")
            await heard.until(lambda: len(heard.lines) == 1001)
            await sender
            assert fcntl.fcntl(reading, size) > usual

    run(body)


# -------------------------------------------------------------------------------------------------------------- writer


@pytest.mark.parametrize("kind", [pipe, socketpair])
def test_a_writer_never_waits_and_keeps_the_order(kind: Callable[[], Pair]) -> None:
    async def body() -> None:
        reading, writing = kind()
        with closing(reading, writing):
            wrote = Wrote(writing)
            lines = [b"%d " % n + b"x" * 50_000 + b"\n" for n in range(40)]
            for line in lines[:20]:
                wrote.writer.write(line)
            wrote.writer.writelines(lines[20:])
            total = sum(map(len, lines))
            assert wrote.writer.queued_bytes > 0
            assert wrote.writer.taken_bytes + wrote.writer.queued_bytes == total
            heard = Heard(reading)
            heard.reader.start()
            await heard.until(lambda: len(heard.lines) == 40)
            assert heard.lines == lines
            await wrote.until(lambda: wrote.drained == 1)
            assert (wrote.writer.queued_bytes, wrote.writer.taken_bytes) == (0, total)
            wrote.writer.write(b"after\n")
            await heard.until(lambda: heard.lines[-1] == b"after\n")
            assert wrote.drained == 1  # it never waited in the queue
            heard.reader.close()
            let_go(wrote.fd, wrote.send)

    run(body)


def test_short_lines_share_a_write() -> None:
    """Each write may wake the reader."""

    async def body() -> None:
        taken: list[bytes] = []

        def send(piece: bytes | memoryview) -> int:
            taken.append(bytes(piece))
            return len(piece)

        reading, writing = pipe()
        with closing(reading, writing):
            writer = Writer(asyncio.get_running_loop(), writing, send, on_drained=never, on_broken=never)
            writer.writelines([b"1\n", b"2\n", b"3\n"])
            assert taken == [b"1\n2\n3\n"]
            long = b"x" * 70_000 + b"\n"
            writer.writelines([b"4\n", long])
            assert taken[1:] == [b"4\n", long]

    run(body)


def test_a_broken_pipe_is_told_once_and_swallows_the_rest() -> None:
    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            wrote = Wrote(writing)
            os.close(reading)
            for _ in range(3):
                wrote.writer.write(b"x" * 200_000 + b"\n")
            assert (wrote.broken, wrote.drained) == (1, 0)
            assert wrote.writer.is_broken
            assert (wrote.writer.queued_bytes, wrote.writer.taken_bytes) == (0, 0)
            wrote.writer.close()

    run(body)


def test_a_pipe_that_breaks_while_we_wait_is_noticed() -> None:
    """SH-07: without a further write, and without turning the loop at full speed."""

    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            wrote = Wrote(writing)
            wrote.writer.write(b"x" * 3_000_000 + b"\n")
            assert wrote.writer.queued_bytes > 0
            os.close(reading)
            await wrote.until(lambda: wrote.broken == 1)
            assert wrote.writer.queued_bytes == 0
            assert wrote.drained == 0
            wrote.writer.close()

    run(body)


def test_the_kernel_counts_what_a_pipes_reader_has_not_read() -> None:
    async def body() -> None:
        reading, writing = pipe()
        with closing(reading, writing):
            wrote = Wrote(writing)
            wrote.writer.write(b"12345\n")
            assert wrote.writer.unread_bytes() == 6
            os.read(reading, 4)
            assert wrote.writer.unread_bytes() == 2
            os.close(reading)
            assert wrote.writer.unread_bytes() == 2  # it died and left them
            wrote.writer.close()
            stranger = os.open(__file__, os.O_RDONLY)  # gets the number of the descriptor that was closed
            with closing(stranger):
                assert stranger in (wrote.fd, reading)
                assert wrote.writer.unread_bytes() is None
                wrote.writer.close()  # and is not closed in its place
                os.fstat(stranger)

    run(body)


@pytest.mark.parametrize("kind", [socketpair, terminal])
def test_where_unread_bytes_are_not_told_nobody_guesses(kind: Callable[[], Pair]) -> None:
    """Asked the same, a socket or a terminal tells how much *we* could read."""

    async def body() -> None:
        reading, writing = kind()
        with closing(reading, writing):
            writer = Writer(asyncio.get_running_loop(), writing, lambda piece: 0, on_drained=never, on_broken=never)
            assert writer.unread_bytes() is None

    run(body)


# --------------------------------------------------------------------------------------------------------- nonblocking


@pytest.mark.parametrize("kind", [pipe, socketpair, terminal])
def test_a_send_never_waits_and_leaves_the_shared_description_alone(kind: Callable[[], Pair]) -> None:
    """Under `2>&1` upstream's stderr is the same open file description: its writes must go on waiting."""
    reading, writing = kind()
    own, send = nonblocking(writing)
    with closing(reading, writing):
        assert own != writing
        with contextlib.suppress(BlockingIOError):
            for _ in range(100_000):
                send(b"x" * 4096)
            pytest.fail("it took 400 MB, and nobody reads")
        assert os.get_blocking(writing)
    let_go(own, send)


def test_a_file_is_written_where_it_is_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb", buffering=0) as file:
        file.write(b"before\n")
        own, send = nonblocking(file.fileno())
        assert send(b"x" * 1_000_000) == 1_000_000
        file.write(b"after\n")
        os.close(own)
    assert path.read_bytes() == b"before\n" + b"x" * 1_000_000 + b"after\n"


def test_a_full_disk_breaks_a_writer_to_a_file(tmp_path: Path) -> None:
    """It takes half a line and then nothing; a file cannot be waited for, so that is the end of it."""
    import resource
    import signal

    async def body() -> None:
        with (tmp_path / "out").open("wb", buffering=0) as file:
            wrote = Wrote(file.fileno())
            wrote.writer.write(b"x" * 5000 + b"\n")
            wrote.writer.write(b"y" * 5000 + b"\n")
            assert wrote.broken == 1
            assert wrote.writer.queued_bytes == 0
            wrote.writer.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    try:
        run(body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "out").stat().st_size == 8000
