"""An endpoint for tests, close to the socket: it answers by a script, can drip and hang, and keeps each request."""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.client import responses
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import anyio

BACKENDS: Final = ("asyncio", "trio")
KEY: Final = "test-key"  # as the vectors have it
LIMIT_S: Final = 10  # for what a test waits for; never reached

T = TypeVar("T")


class Request(NamedTuple):
    """A request as it came over the wire; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content, parse_constant=lambda name: _fail(name))


def _fail(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


Answer = bytes | Callable[[socket.socket, threading.Event], None]


def reply(status: int, body: bytes | str = b"", *headers: str, phrase: str | None = None) -> bytes:
    """A whole HTTP answer."""
    content = body.encode() if isinstance(body, str) else body
    head = [f"HTTP/1.1 {status} {responses.get(status, '') if phrase is None else phrase}", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode("latin-1") + content


def hang(connection: socket.socket, closing: threading.Event) -> None:
    """Never answers."""
    closing.wait()


def hang_up(connection: socket.socket, closing: threading.Event) -> None:
    """Closes without an answer."""


def drip(head: bytes) -> Answer:
    """Writes `head` and then a byte at a time, for ever: each read succeeds, the whole never ends."""

    def answer(connection: socket.socket, closing: threading.Event) -> None:
        connection.sendall(head)
        while not closing.wait(0.02):
            connection.sendall(b"x")

    return answer


class Endpoint:
    """Listens on 127.0.0.1; gives the answers in turn, the last one for ever."""

    def __init__(self, *answers: Answer, tls: Path | None = None) -> None:
        self.requests: list[Request] = []
        self.arrived = threading.Semaphore(0)  # once per request, when it is whole
        self._answers = list(answers)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._tls: ssl.SSLContext | None = None
        if tls is not None:  # a file with certificate and key
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(tls)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)
        self._listener.close()

    def then(self, *answers: Answer) -> None:
        """Answers like this from now on."""
        with self._lock:
            self._answers = list(answers)

    @property
    def bodies(self) -> list[Any]:
        return [request.body for request in self.requests]

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
            request = _read(connection)
            if request is None:
                return
            with self._lock:
                self.requests.append(request)
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            self.arrived.release()
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                answer(connection, self._closing)


def _read(connection: socket.socket) -> Request | None:
    with connection.makefile("rb") as stream:
        line = stream.readline().decode("latin-1")
        if not line:
            return None
        headers = {}
        while (header := stream.readline().decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        method, target, *_ = [*line.split(" "), ""]  # what is no HTTP is a request without a target
        return Request(method, target, headers, stream.read(int(headers.get("content-length", 0))))


@contextlib.contextmanager
def refused() -> Iterator[str]:
    """A base URL where nobody listens: the port is taken, but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """A base URL where connecting takes for ever, as when a firewall drops packets: the backlog is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def run(backend: str, function: Callable[[], Awaitable[T]]) -> T:
    """Runs a coroutine function under asyncio or trio, not for ever."""

    async def bounded() -> T:
        with anyio.fail_after(LIMIT_S):
            return await function()

    return anyio.run(bounded, backend=backend)
