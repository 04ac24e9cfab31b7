"""Bytes in and out of descriptors on the event loop. Knows lines, but not what they say.

One loop, no thread per stream: a hop between threads costs more than the disk sync of a call. Reads go into one fixed
buffer; writes never block, since a relay that blocks on a full pipe while its peer blocks on another one stands still
for ever.
"""

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from wire import LineBuffer

Send = Callable[[bytes | memoryview], int]

_USUAL_PIPE_BYTES: Final = 65536
_LARGE_PIPE_BYTES: Final = 1 << 20
_SET_PIPE_SIZE: Final = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux only


def _enlarge(fd: int) -> None:
    """Lets a long line through in few process switches; a pipe that may not grow (the quota is per user) stays."""
    if _SET_PIPE_SIZE is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _SET_PIPE_SIZE, _LARGE_PIPE_BYTES)


def nonblocking(fd: int) -> tuple[int, Send]:
    """A descriptor of our own for what `fd` writes to, and a send that raises BlockingIOError instead of waiting.

    O_NONBLOCK belongs to the open file description, which others share (under `2>&1`, upstream's stderr does): setting
    it on `fd` itself would make their writes fail. So a pipe or terminal is opened again, a socket is asked per send.
    """
    mode = os.fstat(fd).st_mode
    own = os.dup(fd)
    if stat.S_ISSOCK(mode):
        peer = socket.socket(fileno=own)
        return own, lambda piece: peer.send(piece, socket.MSG_DONTWAIT)
    if stat.S_ISREG(mode):  # a file never makes a write wait, and opened again it would start at its beginning
        return own, lambda piece: _write_whole(own, piece)
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # no /proc (macOS), or one that may not be opened: then the description stays shared
        os.set_blocking(own, False)
        return own, partial(os.write, own)
    os.close(own)
    return again, partial(os.write, again)


def _write_whole(fd: int, piece: bytes | memoryview) -> int:
    """A file takes part of a piece only where its disk or limit ends; the next write then says so."""
    taken = 0
    while taken < len(piece):
        taken += os.write(fd, memoryview(piece)[taken:])
    return taken


def _ignore(*_: object) -> None:
    """For what is over."""


def _readable_bytes(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])


class Reader:
    """Hands whole lines from a descriptor to `on_lines`, and the unterminated rest to `on_end` at end of input."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        on_lines: Callable[[list[bytes]], None],
        on_end: Callable[[bytes], None],
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_lines = on_lines
        self._on_end = on_end
        self._buffer = LineBuffer()
        self._may_read = threading.Event()  # only for the thread of a descriptor that cannot be polled
        self._is_polled = True
        self._is_enlarged = False
        self.is_paused = True
        self.is_ended = False

    def start(self) -> None:
        self.is_paused = False
        try:
            self._loop.add_reader(self._fd, self._read)
        except PermissionError:  # a regular file or /dev/null: epoll refuses them, and a read of them may block
            self._is_polled = False
            self._may_read.set()
            threading.Thread(target=self._feed, name="checkpoint-stdin", daemon=True).start()

    def pause(self) -> None:
        if not self.is_paused and not self.is_ended:
            self.is_paused = True
            if self._is_polled:
                self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if self.is_paused and not self.is_ended:
            self.is_paused = False
            if self._is_polled:
                self._loop.add_reader(self._fd, self._read)
            else:
                self._may_read.set()

    def read_rest(self) -> None:
        """Reads what is there now, without waiting, and counts that as the end.

        For a writer that is gone: others may hold its pipe open, and write to it for ever.
        """
        self.pause()
        with contextlib.suppress(OSError):
            left = 0 if self.is_ended else _readable_bytes(self._fd)
            while left > 0 and (count := self._read()):
                left -= count
        if not self.is_ended:
            self._received(0)

    def close(self) -> None:
        self.pause()
        self.is_ended = True
        self._on_lines = self._on_end = _ignore  # whoever they lead to leads here: a circle, with a large buffer in it

    def _read(self) -> int:
        """One read; how many bytes it gave."""
        try:
            count = os.readv(self._fd, (self._buffer.space(),))
        except BlockingIOError:
            return 0
        except OSError:  # a terminal that hung up, a socket that was reset: nothing more will come
            count = 0
        self._received(count)
        return count

    def _received(self, count: int) -> None:
        if count == 0:
            self.pause()
            self.is_ended = True
            self._on_end(self._buffer.rest())
            return
        if lines := self._buffer.take(count):
            self._on_lines(lines)
        elif not self._is_enlarged and len(self._buffer) >= _USUAL_PIPE_BYTES:
            self._is_enlarged = True
            _enlarge(self._fd)

    def _feed(self) -> None:
        """The thread of a descriptor that cannot be polled: one read at a time, handed to the loop and waited for."""
        while not self.is_ended:
            self._may_read.wait()
            self._may_read.clear()
            try:
                piece = os.read(self._fd, _USUAL_PIPE_BYTES)
            except OSError:
                piece = b""
            with contextlib.suppress(RuntimeError):  # the loop is closed: the program ends
                self._loop.call_soon_threadsafe(self._fed, piece)

    def _fed(self, piece: bytes) -> None:
        if self.is_ended:
            return
        space = self._buffer.space()
        fits = len(space)
        space[: min(fits, len(piece))] = piece[:fits]
        self._received(min(fits, len(piece)))
        if len(piece) > fits:
            self._fed(piece[fits:])
        elif not self.is_paused:
            self._may_read.set()


class Writer:
    """Writes to a descriptor that may be full, in order, without waiting; counts what the kernel took.

    `on_drained` runs each time the queue empties, `on_broken` once, when nobody will read any more. After that
    everything written is dropped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        send: Send,
        *,
        on_drained: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._send = send
        self._queue: deque[memoryview] = deque()
        self._on_drained = on_drained
        self._on_broken = on_broken
        self._is_enlarged = False
        self._is_closed = False
        # Linux tells it of pipes; asked the same, other descriptors and systems tell what there is for *us* to read.
        self.tells_unread = sys.platform.startswith("linux") and stat.S_ISFIFO(os.fstat(fd).st_mode)
        self.queued_bytes = 0
        self.taken_bytes = 0
        self.is_broken = False

    def writelines(self, lines: Sequence[bytes]) -> None:
        """Writes short lines in one call: each write may wake the reader."""
        if len(lines) > 1 and sum(map(len, lines)) <= _USUAL_PIPE_BYTES:
            lines = (b"".join(lines),)
        for line in lines:
            self.write(line)

    def write(self, line: bytes) -> None:
        if self.is_broken:
            return
        if len(line) > _USUAL_PIPE_BYTES and not self._is_enlarged:
            self._is_enlarged = True
            _enlarge(self._fd)
        taken = 0 if self._queue else self._try(line)
        if taken < len(line) and not self.is_broken:
            if not self._queue:
                self._loop.add_writer(self._fd, self._flush)
            self._queue.append(memoryview(line)[taken:])
            self.queued_bytes += len(line) - taken

    def unread_bytes(self) -> int | None:
        """How much of `taken_bytes` the reader has not read; None where the system does not tell."""
        return _readable_bytes(self._fd) if self.tells_unread else None

    def has_reader(self) -> bool:
        """Whether somebody holds the other end of the pipe, and may read what is in it."""
        if self._is_closed:
            return False
        poll = select.poll()
        poll.register(self._fd, 0)
        return not any(events & select.POLLERR for _, events in poll.poll(0))

    def close(self) -> None:
        """Closes the descriptor; what is queued is dropped."""
        if not self._is_closed:
            self._is_closed, self.tells_unread = True, False
            self._drop()
            self._on_broken = self._on_drained = _ignore
            os.close(self._fd)

    def _try(self, piece: bytes | memoryview) -> int:
        try:
            taken = self._send(piece)
        except BlockingIOError:
            return 0
        except OSError:
            self._drop()
            self._on_broken()
            return 0
        self.taken_bytes += taken
        return taken

    def _flush(self) -> None:
        while self._queue:
            piece = self._queue[0]
            taken = self._try(piece)
            if self.is_broken:
                return
            self.queued_bytes -= taken
            if taken < len(piece):
                self._queue[0] = piece[taken:]
                return
            self._queue.popleft()
        self._loop.remove_writer(self._fd)
        self._on_drained()

    def _drop(self) -> None:
        if self._queue:
            self._loop.remove_writer(self._fd)
        self._queue.clear()
        self.queued_bytes = 0
        self.is_broken = True
