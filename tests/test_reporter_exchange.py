"""One exchange: its end is certain, its answer is what the endpoint said. And what each answer means for a report."""

import itertools
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final

import pytest
from reporter_endpoint import KEY, Endpoint, black_hole, drip, hang, hang_up, refused, reply

import reporter
from reporter import MAX_ATTEMPTS, TIMED_OUT, Answer, Exchange, Fate, Verdict, after, retry_after, start_exchange

LIMIT_S: Final = 10.0  # for what a test waits for; never reached


class Post:
    """One exchange and what it was answered."""

    def __init__(self, url: str, *, key: str = KEY, timeout_s: float = 5.0) -> None:
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.began = time.monotonic()
        self.exchange: Exchange = start_exchange(
            url, b'{"n":1}', api_key=key, timeout_s=timeout_s, done=self.answers.put
        )

    def answer(self) -> Answer:
        return self.answers.get(timeout=LIMIT_S)

    def ends(self) -> None:
        """Its thread ends by itself, soon."""
        for thread in threading.enumerate():
            if thread.name == "checkpoint-report":
                thread.join(LIMIT_S)
        assert self.exchange.finished


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# ------------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (hang, TIMED_OUT),
        (drip(b""), TIMED_OUT),
        (drip(b"HTTP/1.1 200 OK\r\nX-Long: "), TIMED_OUT),
        (drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 9), TIMED_OUT),
        (drip(b"HTTP/1.1 503 Service Unavailable\r\n\r\n"), "503 Service Unavailable: (response body unreadable)"),
        (drip(b"HTTP/1.1 200 OK\r\n\r\n"), None),
        (drip(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nfff"), "500 No: (response body unreadable)"),
    ],
    ids=["silence", "status line", "headers", "continue", "body of a 503", "body of a 200", "chunk"],
)
def test_the_whole_exchange_is_bounded(behaviour: Any, expected: str | None) -> None:
    """RS-03: each byte comes in time, the end never would. RN-06: what came of a 2xx by then is delivered."""
    with Endpoint(behaviour) as endpoint:
        post = Post(endpoint.url, timeout_s=0.3)
        answer = post.answer()
        assert time.monotonic() - post.began < 1.5
        assert answer.error == expected
        assert answer.delivered is (expected is None)
        post.ends()
    assert post.answers.empty()


def test_a_connection_that_is_never_made_is_bounded() -> None:
    """RS-04."""
    with black_hole() as url:
        post = Post(url, timeout_s=0.3)
        assert post.answer() == Answer(None, TIMED_OUT)
        assert time.monotonic() - post.began < 1.5
        post.ends()


def test_a_resolver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """RS-04: only its own thread waits for it."""
    go_on = threading.Event()

    def getaddrinfo(*args: Any, **options: Any) -> list[Any]:
        go_on.wait(LIMIT_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    post = Post("http://example.invalid", timeout_s=0.1)
    assert post.answer() == Answer(None, TIMED_OUT)
    assert not post.exchange.finished
    go_on.set()
    post.ends()
    assert post.answers.empty()


def test_a_name_with_a_dead_address_is_reached_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with black_hole() as dead, Endpoint(reply(200)) as endpoint:
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))
            for port in (int(dead.rpartition(":")[2]), endpoint.port)
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
        assert Post("http://two.example", timeout_s=1).answer().delivered


@pytest.mark.parametrize("behaviour", [hang, drip(b"HTTP/1.1 200 OK\r\n\r\n")], ids=["silence", "body"])
def test_a_cancelled_exchange_hangs_up_and_calls_nobody(behaviour: Any) -> None:
    with Endpoint(behaviour) as endpoint:
        post = Post(endpoint.url, timeout_s=30)
        assert endpoint.arrived.acquire(timeout=LIMIT_S)
        post.exchange.cancel()
        post.ends()
    assert time.monotonic() - post.began < LIMIT_S
    assert post.answers.empty()


def test_nothing_is_sent_when_it_is_cancelled_while_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    connect = socket.socket.connect

    def cancelled_connect(connection: socket.socket, where: Any) -> None:
        assert begun.wait(LIMIT_S)
        post.exchange.cancel()  # too early for a hang-up: there is nothing to shut down yet
        connect(connection, where)

    with Endpoint(reply(200)) as endpoint:
        monkeypatch.setattr(socket.socket, "connect", cancelled_connect)
        post = Post(endpoint.url, timeout_s=30)
        begun.set()
        post.ends()
        assert not endpoint.requests


def test_a_callback_that_raises_ends_the_exchange_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def done(answer: Answer) -> None:
        called.set()
        raise RuntimeError(KEY)

    with Endpoint(reply(200)) as endpoint:
        exchange = start_exchange(endpoint.url, b"{}", api_key=KEY, timeout_s=5, done=done)
        assert called.wait(LIMIT_S)
        for thread in threading.enumerate():
            if thread.name == "checkpoint-report":
                thread.join(LIMIT_S)
        assert exchange.finished
    assert KEY not in caplog.text


def test_where_no_thread_can_be_started_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    post = Post("http://127.0.0.1:1")
    assert post.answer() == Answer(None, "not sent: can't start new thread")
    assert post.exchange.finished


# ---------------------------------------------------------------------------------------------------------- the answer


def test_a_request_has_the_headers_of_the_wire() -> None:
    with Endpoint(reply(200)) as endpoint:
        assert Post(f"{endpoint.url}/base/x").answer().delivered
        (request,) = endpoint.requests
    assert (request.method, request.target, request.content) == ("POST", "/base/x", b'{"n":1}')
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["host"] == f"127.0.0.1:{endpoint.port}"


@pytest.mark.parametrize(
    "answer",
    [
        reply(200),
        reply(204),
        reply(200, "OK"),
        reply(200, "<html>login</html>"),
        reply(299, "{"),
        reply(200, b"\0" * 10_000_000),
        reply(200, b"not gzip", "Content-Encoding: gzip"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.0 200\r\n\r\n",
    ],
)
def test_any_2xx_is_delivered_whatever_its_body(answer: bytes) -> None:
    """RN-06: of which no more than 64 KiB are read."""
    with Endpoint(answer) as endpoint:
        found = Post(endpoint.url).answer()
    assert found.delivered
    assert found.error is None
    assert len(found.body) <= 65_536


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_never_followed(status: int) -> None:
    """RC-01: the other host hears nothing, the key least of all."""
    with Endpoint(reply(200)) as other:
        with Endpoint(reply(status, "", f"Location: http://localhost:{other.port}/x")) as endpoint:
            answer = Post(endpoint.url).answer()
            assert len(endpoint.requests) == 1
        assert not other.requests
    assert (answer.status, answer.delivered) == (status, False)
    assert after(answer, 0, jitter=0) == Verdict(Fate.DEAD)


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (hang_up, "no answer: Remote end closed connection without response"),
        (b"SSH-2.0-OpenSSH\r\n", "no answer: SSH-2.0-OpenSSH"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "no answer: HTTP/1.1 2x0 OK"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", "no answer: got more than 100 headers"),
        (b"x" * 100_000, "no answer: got more than 65536 bytes when reading status line"),
    ],
)
def test_what_is_no_answer_is_a_fault_of_the_connection(behaviour: Any, expected: str) -> None:
    with Endpoint(behaviour) as endpoint:
        answer = Post(endpoint.url).answer()
    assert answer.status is None
    assert (answer.error or "").strip() == expected


def test_an_endpoint_that_is_not_there_is_a_fault_of_the_connection() -> None:
    """RN-01."""
    with refused() as url:
        assert Post(url).answer() == Answer(None, "no answer: Connection refused")


def test_an_error_is_one_printable_line() -> None:
    with Endpoint(reply(400, "a\n\x1b[31mb\u202ec\0" + "d" * 999, phrase="Bad\x07" + "p" * 9999)) as endpoint:
        error = Post(endpoint.url).answer().error or ""
    assert error.isprintable()
    assert len(error) <= 400
    assert "a  [31mb c dd" in error


@pytest.mark.parametrize(
    ("url", "key"),
    [(url, KEY) for url in ("", "x", "ftp://h", "http://", "http://[::1", "http://h:99999", "http://ü", "http://a\nb")]
    + [("http://u:secret-7@h", KEY), ("http://h", ""), ("http://h", "secret-7\n"), ("http://h", "secret-7€")],
)
def test_a_url_or_key_that_cannot_be_used_is_an_answer(url: str, key: str) -> None:
    """RN-01, RC-04."""
    answer = Post(url, key=key).answer()
    assert answer.status is None
    assert "secret-7" not in (answer.error or "")
    assert ("API key" if key != KEY else "base URL") in (answer.error or "")


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint(reply(200)) as proxy, Endpoint(reply(200)) as endpoint:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert Post("http://far.invalid/x").answer().delivered
        assert proxy.requests[0].target == "http://far.invalid/x"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert Post(f"{endpoint.url}/y").answer().delivered
        assert endpoint.requests[0].target == "/y"


def test_a_tunnel_shows_the_proxy_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint(reply(407)) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        answer = Post("https://far.invalid/x").answer()
        (request,) = proxy.requests
    assert (answer.status, answer.error) == (
        None,
        "no answer: Tunnel connection failed: 407 Proxy Authentication Required",
    )
    assert (request.method, request.target) == ("CONNECT", "far.invalid:443")
    assert "authorization" not in request.headers


def test_a_proxy_that_urllib_does_not_know_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    assert Post("http://far.invalid/x").answer().status is None


def test_a_handshake_that_never_ends_is_bounded() -> None:
    with Endpoint(reply(200)) as endpoint:
        post = Post(endpoint.url.replace("http", "https", 1), timeout_s=0.3)
        assert post.answer() == Answer(None, TIMED_OUT)
        post.ends()  # though TLS holds the socket


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A certificate for localhost with its key, trusted while the test runs."""
    file = tmp_path / "localhost.pem"
    words = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "2",
    ]
    words += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(file),
        "-out",
        f"{file}.crt",
    ]
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    reporter._tls.cache_clear()
    yield file
    reporter._tls.cache_clear()


def test_https_is_spoken_and_bounded(tls: Path) -> None:
    with Endpoint(reply(200), tls=tls) as endpoint:
        url = endpoint.url.replace("127.0.0.1", "localhost")
        assert Post(url).answer().delivered
        assert endpoint.requests[0].headers["authorization"] == f"Bearer {KEY}"
        endpoint.then(drip(b"HTTP/1.1 200 OK\r\nX-Long: "))
        post = Post(url, timeout_s=0.3)
        assert post.answer() == Answer(None, TIMED_OUT)
        post.ends()


def test_a_certificate_of_another_host_is_a_fault(tls: Path) -> None:
    with Endpoint(reply(200), tls=tls) as endpoint:
        answer = Post(endpoint.url).answer()
        assert answer.status is None
        assert "certificate" in (answer.error or "").lower()
        assert not endpoint.requests


def test_nothing_is_printed_when_http_client_debugs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """RC-04."""
    monkeypatch.setattr("http.client.HTTPConnection.debuglevel", 1)
    with Endpoint(reply(200)) as endpoint:
        assert Post(endpoint.url).answer().delivered
    assert KEY not in "".join(capfd.readouterr())


def test_an_answer_shows_no_body() -> None:
    assert KEY not in repr(Answer(200, body=KEY.encode()))


# ------------------------------------------------------------------------------------------------- what an answer means

STATUSES: Final = (None, *range(100, 1000))
JITTERS: Final = (0.0, 0.5, 0.999)
DELAYS: Final = (None, 0.5, 100.0, 3600.0)


def expected_kind(status: int | None, attempts: int) -> Fate:
    """The rule as the issue has it."""
    if status is None:
        return Fate.UNREACHABLE
    if 200 <= status < 300:
        return Fate.DELIVERED
    if 300 <= status < 500 and status not in (408, 429):
        return Fate.DEAD
    return Fate.RETRY if attempts + 1 < MAX_ATTEMPTS else Fate.DEAD


@pytest.mark.parametrize("attempts", range(10))
def test_each_answer_has_one_meaning(attempts: int) -> None:
    """RP-01, RP-06, RP-07: over all statuses, jitters and headers."""
    for status, jitter, wish in itertools.product(STATUSES, JITTERS, DELAYS):
        kind, delay_s = after(Answer(status, "", wish), attempts, jitter=jitter)
        assert kind is expected_kind(status, attempts)
        if kind is Fate.RETRY:
            assert max(24.0, wish or 0) <= delay_s <= 3600.0
            if wish is None:
                assert 0.8 * 30 * 2**attempts <= delay_s <= 1.2 * 30 * 2**attempts
        else:
            assert delay_s == (30.0 if kind is Fate.UNREACHABLE else 0)


NOW: Final = 1_800_000_000.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        (["3"], 3),
        ([" 3 "], 3),
        (["0"], 0),
        ([formatdate(NOW + 3, usegmt=True)], 3),
        ([formatdate(NOW - 3, usegmt=True)], None),
        (["-5"], None),
        (["abc"], None),
        (["1e9"], None),
        (["nan"], None),
        (["inf"], None),
        (["3.5"], None),
        (["٣"], None),
        ([""], None),
        (["99999999999"], 3600),
        (["9" * 10_000], None),
        (["Fri, 31 Dec 9999 23:59:59 GMT"], 3600),
        (["Fri, 99 Dec 2026 99:99:99 GMT"], None),
        (["2", "7"], 7),
        (["abc", "7"], 7),
    ],
)
def test_a_retry_after_header_is_read_if_it_makes_sense(values: list[str], expected: float | None) -> None:
    """RP-04."""
    assert retry_after(values, NOW) == expected


def test_an_answer_brings_its_retry_after() -> None:
    """RP-07: not of a 429 alone."""
    with Endpoint(reply(503, "", "Retry-After: 2"), reply(429, "", "Retry-After: 1e9")) as endpoint:
        assert Post(endpoint.url).answer().retry_after == 2
        assert Post(endpoint.url).answer().retry_after is None


def test_the_module_imports_no_http_before_it_is_needed() -> None:
    heavy = {"anyio", "asyncio", "email", "http", "sqlite3", "ssl", "urllib.request"}
    code = f"import sys, reporter; print({heavy!r} & set(sys.modules))"
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout == "set()\n"
