"""Reports the calls of an MCP server to a KYA-OS Checkpoint endpoint, through an outbox. It raises nothing.

A library: it imports none of our modules, only the standard library, and anyio where it waits, so that it runs under
asyncio and trio. The first half is pure: configuration, bodies, what an answer means for a row. The second does I/O:
one HTTP exchange in a thread, the reporter, two outboxes. What costs time to import is imported where it is used.

The API key is in the request and nowhere else: no repr, row, warning, log or error text of ours holds it.
"""

import contextlib
import json
import logging
import math
import os
import random
import re
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import sqlite3
    import ssl

T = TypeVar("T")

DEFAULT_BASE_URL: Final = "https://kya.vouched.id"
DEFAULT_TIMEOUT_S: Final = 5.0
REGISTER_PATH: Final = "/api/v1/kya-os/servers"
REPORT_PATH: Final = "/api/v1/log-detection"
MAX_ATTEMPTS: Final = 8  # answered failures; a fault of the connection is none
FLUSH_LIMIT: Final = 25

_MAX_TIMEOUT_S: Final = 3600.0
_MAX_DEPTH: Final = 50  # of values from the caller; the JSON encoder recurses
_MAX_VALUES: Final = 100_000  # in one body: lists that share their items can be small and endless at once
_MAX_INT_BITS: Final = 1024  # json.dumps refuses what has more than 4,300 digits

# What the wire calls the host of these reports; the endpoint keys on it.
_ENGINE: Final = {
    "name": "kya-os-mcp-host",
    "version": "1",
    "rulesetHash": "sha256:host-synthesized",
    "rulesetVersion": "host-synthesized",
}
_CONTEXT: Final = ("userAgent", "ipAddress", "path", "url", "method")

# ------------------------------------------------------------------------------------------------------ configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Who reports what where. Values of a wrong type become text, or the default; nothing raises.

    `sdk` has the keys `name`, `version` and, optionally, `runtime`. The endpoint knows the runtimes node, edge and
    dotnet and no Python, so the default is the wire reference's `node`. `base_url` loses its trailing slashes.
    """

    api_key: str = field(repr=False)
    server_did: str
    server_url: str
    display_name: str | None = None
    sdk: Mapping[str, str] | None = None
    base_url: str = DEFAULT_BASE_URL
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("api_key", "server_did", "server_url"):
            put(name, _text(getattr(self, name)))
        put("display_name", _text(self.display_name) or None)
        sdk = {name: _text(value) for name, value in _camel_keys(self.sdk).items() if value is not None}
        put("sdk", {name: sdk[name] for name in ("name", "version", "runtime") if name in sdk} or None)
        base_url: object = self.base_url
        put("base_url", DEFAULT_BASE_URL if base_url is None else _text(base_url).rstrip("/"))
        put("timeout_s", _seconds(self.timeout_s))


def _seconds(value: object, default: float = DEFAULT_TIMEOUT_S) -> float:
    """A time limit that a timer can take: the default for what is none, at most an hour."""
    with contextlib.suppress(Exception):  # of a caller's number
        if isinstance(value, (int, float)) and value > 0:  # false for nan
            return float(min(value, _MAX_TIMEOUT_S))
    return default


# ------------------------------------------------------------------------------------------------------------- bodies


def build_registration_body(config: Config, tools: object = None) -> dict[str, Any]:
    """The body that claims the server's DID and, with `tools`, publishes its catalog.

    `tools` is an iterable of mappings with `name` and, optionally, `description` and `capability`. None leaves the
    stored catalog as it is, an empty one says that the server offers nothing. What is no such iterable counts as None,
    and so does one that cannot be said whole, for want of a name, of room or of JSON for a value. A catalog that lacks
    a tool marks it stale: half a list is worse than no list.
    """
    body: dict[str, Any] = {"serverDid": config.server_did, "url": config.server_url}
    if config.display_name:
        body["displayName"] = config.display_name
    room = _Room()
    catalog = None if tools is None else _mappings(tools, room)
    if catalog is not None:
        published = [_clean({k: v for k, v in tool.items() if v is not None}, room) for tool in catalog]
        if not room.is_cut and all(_is_name(tool.get("name")) for tool in catalog):
            body["tools"] = published
    return body


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(_text(value).strip())


def build_detection_body(config: Config, report: Mapping[str, Any]) -> dict[str, Any]:
    """The body that reports one call; `report` holds the arguments of `report_tool_call`. Always plain JSON."""
    given = _camel_keys(report)
    text = {
        name: _text(given.get(name))
        for name in ("toolName", "action", "reason", "capability", "agentDid", "agentLabel", "principalDid")
    }
    capability, context = text["capability"], _camel_keys(given.get("context"))
    agent = {wire: text[name] for wire, name in (("did", "agentDid"), ("clientInfoName", "agentLabel")) if text[name]}
    identity: dict[str, Any] = {"agent": agent} if agent else {}
    if text["principalDid"]:
        identity["principal"] = {"did": text["principalDid"]}
    if capability and text["action"] == "permit":
        identity["delegation"] = {"result": "verified", "verifiedBy": "reporter"}
    reasons = [f"tool:{text['toolName']}"]
    signals: list[Any] = [{"kind": "tool", "value": text["toolName"]}, {"kind": "audience", "value": config.server_did}]
    if capability:
        reasons.append(f"capability:{capability}")
        signals.insert(0, {"kind": "capability", "value": capability})
    room = _Room()
    signals += [_clean(signal, room) for signal in _mappings(given.get("signals"), room) or ()]
    body: dict[str, Any] = {
        "detection": {
            "isAgent": True,
            "confidence": 100,
            "detectionClass": "ai_agent",
            "verificationMethod": "delegation-verified" if text["agentDid"] else "delegation-asserted",
            **({"agentName": text["agentLabel"]} if text["agentLabel"] else {}),
            "reasons": reasons,
        },
        "context": {name: _text(context[name]) for name in _CONTEXT if context.get(name) is not None},
        "source": "middleware",
        "enforcement": {"action": text["action"], "reason": text["reason"], "signals": signals},
        "identity": identity,
        "engine": dict(_ENGINE),
        "server": {"did": config.server_did},
    }
    if config.sdk:
        body["sdk"] = {"runtime": "node", **config.sdk}
    stages = _mappings(given.get("stages"), _Room())
    if stages:
        body["engineSteps"] = [
            {
                "name": _text(stage.get("name")),
                "verdict": _text(stage.get("verdict")),
                "latencyMicros": _micros(stage.get("latencyMicros")),
            }
            for stage in stages
        ]
    return body


def encode(body: object) -> bytes:
    """Strict JSON in UTF-8, compact. NaN and infinities become null, lone surrogates U+FFFD; never raises."""
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return dump(body).encode()
    except Exception:  # what is no JSON, and whatever a caller's mapping does
        return dump(_clean(body, _Room())).encode()


def _text(value: object) -> str:
    """A value as text that UTF-8 can carry; "" for None and for what cannot be written."""
    if value is None:
        return ""
    try:
        text = str.__str__(value if isinstance(value, str) else str(value))
    except Exception:  # a caller's __str__; reporting must not depend on it
        return ""
    try:
        text.encode()
    except UnicodeEncodeError:
        # Halves of one character find each other again, single ones become U+FFFD.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _camel_keys(value: object) -> dict[str, Any]:
    """A mapping with its keys as the wire spells them (`user_agent` -> `userAgent`); empty for what is no mapping."""
    try:
        if not isinstance(value, Mapping):
            return {}
        return {re.sub(r"(?<=[^_])_+(.)", lambda m: m[1].upper(), _text(key)): each for key, each in value.items()}
    except Exception:  # a caller's mapping
        return {}


@dataclass(slots=True)
class _Room:
    """How many values a body still takes, and whether any was left out or became null for want of room or of JSON."""

    left: int = _MAX_VALUES
    is_cut: bool = False


def _mappings(value: object, room: _Room) -> list[dict[str, Any]] | None:
    """An iterable of mappings as a list, None for anything else."""
    try:
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            return None
        items = list(islice(value, room.left + 1))
        if not all(isinstance(item, Mapping) for item in items):
            return None
    except Exception:  # a caller's generator
        return None
    if len(items) > room.left:
        room.is_cut = True
    return [_camel_keys(item) for item in items[: room.left]]


def _micros(value: object) -> int:
    with contextlib.suppress(Exception):  # of a caller's number
        if isinstance(value, (int, float)) and 0 < value < 2**53:  # false for nan
            return int(value)
    return 0


def _clean(value: object, room: _Room, depth: int = 0) -> Any:
    """A value as plain, finite JSON; null for what is too deep, too much or none."""
    cleaned = None
    if room.left > 0 and depth <= _MAX_DEPTH:
        room.left -= 1
        with contextlib.suppress(Exception):  # of a caller's container
            cleaned = _cleaned(value, room, depth)
    room.is_cut = room.is_cut or (cleaned is None and value is not None)
    return cleaned


def _cleaned(value: object, room: _Room, depth: int) -> Any:
    """The same for one that there is room for."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_INT_BITS else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_text(key): _clean(each, room, depth + 1) for key, each in islice(value.items(), room.left + 1)}
    if isinstance(value, (list, tuple)):
        return [_clean(each, room, depth + 1) for each in value[: room.left + 1]]
    return _text(value)


# ------------------------------------------------------------------------------------------------- what an answer means

_FIRST_DELAY_S: Final = 30.0
_MAX_DELAY_S: Final = 3600.0
PAUSE_S: Final = 30.0  # of a sweeper, when the endpoint cannot be reached

TIMED_OUT: Final = "The operation was aborted due to timeout"


class Answer(NamedTuple):
    """How one exchange ended. What stands in `error` is printable, at most some 400 characters, and free of the key."""

    status: int | None  # None: no HTTP answer
    error: str | None = None  # None: delivered
    retry_after: float | None = None  # seconds, at most an hour
    body: bytes = b""  # of a 2xx, its first 64 KiB

    @property
    def delivered(self) -> bool:
        """Any 2xx, whatever its body: an empty one, HTML or half of one too."""
        return self.status is not None and 200 <= self.status < 300

    def __repr__(self) -> str:
        return f"Answer(status={self.status}, error={self.error!r}, retry_after={self.retry_after})"


class Failure(str):
    """The error that an outbox is told: its text, with what the endpoint said. A plain outbox takes it for a str."""

    status: int | None  # None: a fault of the connection, which should not count as an attempt
    retry_after: float | None  # seconds

    def __new__(cls, text: str = "", status: int | None = None, retry_after: float | None = None) -> "Failure":
        failure = super().__new__(cls, text)
        failure.status = status
        failure.retry_after = retry_after
        return failure


class Fate(StrEnum):
    """What becomes of a report after an exchange."""

    DELIVERED = "delivered"
    DEAD = "dead"
    RETRY = "retry"
    UNREACHABLE = "unreachable"  # no answer: the row stays as it was, the sweeper pauses


class Verdict(NamedTuple):
    """A fate, and how long to wait: with RETRY before the row is due, with UNREACHABLE before the next sweep."""

    kind: Fate
    delay_s: float = 0.0


# By status, else by its first digit, else RETRY. A redirect is dead: it would stay one, and the key goes nowhere else.
_FATES: Final[Mapping[int | None, Fate]] = {
    None: Fate.UNREACHABLE,
    2: Fate.DELIVERED,
    3: Fate.DEAD,
    4: Fate.DEAD,
    408: Fate.RETRY,
    429: Fate.RETRY,
    5: Fate.RETRY,
}


def after(answer: Answer, attempts: int, *, jitter: float) -> Verdict:
    """What an answer means for a row with so many answered failures before it; `jitter` in [0, 1).

    The delay begins at 30 s and doubles up to an hour, each time by up to a fifth more or less; never sooner than the
    endpoint asked.
    """
    status = answer.status
    kind = _FATES.get(status) or _FATES.get(status // 100 if status else None, Fate.RETRY)
    if kind is Fate.UNREACHABLE:
        return Verdict(kind, PAUSE_S)
    if kind is not Fate.RETRY:
        return Verdict(kind)
    if attempts + 1 >= MAX_ATTEMPTS:
        return Verdict(Fate.DEAD)
    delay_s = _FIRST_DELAY_S * 2 ** max(attempts, 0) * (0.8 + 0.4 * jitter)
    return Verdict(kind, min(max(delay_s, answer.retry_after or 0.0), _MAX_DELAY_S))


def retry_after(values: Sequence[str], now: float) -> float | None:
    """The seconds that Retry-After headers ask for, at most an hour; None where none makes sense. `now`: epoch seconds.

    Source: RFC 9110, section 10.2.3: a number of seconds or a date.
    """
    found = [seconds for seconds in (_delay(value.strip(), now) for value in values) if seconds is not None]
    return min(max(found), _MAX_DELAY_S) if found else None


def _delay(value: str, now: float) -> float | None:
    if re.fullmatch(r"[0-9]{1,20}", value):
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        seconds = parsedate_to_datetime(value).timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return seconds if seconds > 0 else None


_HIDDEN: Final = "«redacted»"
_ESCAPES: Final = frozenset("\\%&")  # one of these is in every spelling but the plain one
_MIN_HIDDEN: Final = 8  # a shorter key would be found in words that are none


def _plain(text: str, api_key: str) -> str:
    """A stranger's text on one line, printable and without the key, in any spelling that JSON or a URL gives it."""
    text = _hidden(text, api_key)
    return _hidden("".join(letter if letter.isprintable() else " " for letter in text), api_key)


def _hidden(text: str, api_key: str) -> str:
    if len(api_key) < _MIN_HIDDEN:
        return text
    text = text.replace(api_key, _HIDDEN)
    return text if _ESCAPES.isdisjoint(text) else _spellings(api_key).sub(_HIDDEN, text)


@lru_cache(maxsize=8)
def _spellings(api_key: str) -> re.Pattern[str]:
    """Matches the key with any of its characters escaped, as JSON (also in JSON), URLs and HTML do it."""
    from html import escape
    from urllib.parse import quote

    # Bounded and atomic: what a hostile endpoint writes must not make this slow.
    def spelled(letter: str) -> str:
        code = ord(letter)
        number = rf"(?i:\\{{1,4}}u{code:04x}|%{code:02x}|&\#0{{0,5}}{code};|&\#x0{{0,5}}{code:x};)"
        named = [re.escape(text) for text in {escape(letter), quote(letter, safe="")} - {letter}]
        escaped = r"\\{1,2}" if letter == "\\" else r"\\{0,4}" + re.escape(letter)
        return f"(?>{'|'.join([number, *named, escaped])})"

    return re.compile("".join(map(spelled, api_key)))


def url_problem(url: str) -> str | None:
    """Why a base URL cannot be used, None where it can. Does not repeat it: it may hold a password."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or re.fullmatch(r"[\x21-\x7e]+", url) is None:
        return "the base URL is not usable: give http:// or https://, a host in ASCII and, if need be, a path"
    if "@" in parts.netloc:
        return "the base URL is not usable: it holds a user name or a password"
    return None


def _unusable(url: str, api_key: str) -> str | None:
    """Why nothing can be sent with these, None where it can. Tells neither of them: both may be secret."""
    if not api_key:
        return "no API key is given"
    if re.fullmatch(r"[\x20-\x7e\xa0-\xff]+", api_key) is None or api_key != api_key.strip():
        return (
            "the API key is not usable: it holds a line break, an outer space or a character that no header can carry"
        )
    return url_problem(url)


# ----------------------------------------------------------------------------------------------------- one exchange

_MAX_BODY_BYTES: Final = 65_536  # read of a 2xx
_MAX_ERROR_BYTES: Final = 16_384  # read of any other answer
_MAX_ERROR: Final = 300  # characters of an answer in an error
_MAX_PHRASE: Final = 80  # of a status line
_MAX_ESCAPE: Final = 8  # characters that may stand for one of the key


class Exchange:
    """One POST in a daemon thread of its own. A second one holds the time limit: no socket option bounds the whole.

    `finished` turns true when the first thread is through with its socket. After a time-out or a cancel that is at once
    but for one case: a name resolver that hangs cannot be interrupted, and its thread ends when it returns.
    """

    def __init__(self, done: Callable[[Answer], None], timeout_s: float) -> None:
        self.finished = False
        self._done = done
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._is_settled = False
        self._head: Answer | None = None
        self._handle: socket.socket | None = None
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.daemon = True

    def cancel(self) -> None:
        """Abandons it: hangs up at once, and `done` is not called any more, if its call has not begun already."""
        with self._lock:
            self._is_settled = True
        self._timer.cancel()
        self._hang_up()

    def _begin(self, post: Callable[["Exchange"], Answer]) -> None:
        def run() -> None:
            try:
                answer = post(self)
            finally:
                self._forget()
                self.finished = True
            self._settle(answer)

        try:
            self._timer.start()
            threading.Thread(target=run, name="checkpoint-report", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self.finished = True
            self._settle(Answer(None, f"not sent: {error}"))

    def _expire(self) -> None:
        self._settle(self._head or Answer(None, TIMED_OUT))

    def _settle(self, answer: Answer) -> None:
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
        self._timer.cancel()
        self._hang_up()
        try:
            self._done(answer)
        except Exception as error:  # a caller's; a thread has nobody to raise it to
            logging.getLogger("checkpoint.reporter").error("a callback raised %s", type(error).__name__)

    def _hang_up(self) -> None:
        with self._lock:
            if self._handle is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    self._handle.shutdown(socket.SHUT_RDWR)

    def _forget(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                self._handle = None

    def heard(self, head: Answer) -> None:
        """Notes the status line: from here on it is the answer, even when the body takes for ever."""
        self._head = head

    def connect(self, address: tuple[str, int], timeout: object = None, source: object = None) -> socket.socket:
        """A connection within what is left of the time, in the shape of socket.create_connection."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        error: OSError = OSError("the name has no address")
        for index, (family, kind, protocol, _, where) in enumerate(found):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection = socket.socket(family, kind, protocol)
            try:
                self._watch(connection)
                connection.settimeout(left_s / (len(found) - index))  # a dead address leaves time for the next one
                connection.connect(where)
                connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
                self._check()  # again: what was not connected could not be hung up
            except OSError as fault:
                connection.close()
                error = fault
            else:
                return connection
        raise error

    def _watch(self, connection: socket.socket) -> None:
        # A duplicate, because TLS takes the descriptor over while it is still shaking hands, and because its number
        # cannot become another file's while we hold it.
        self._forget()
        handle = connection.dup()
        with self._lock:
            self._handle = handle
        self._check()

    def _check(self) -> None:
        with self._lock:
            if self._is_settled:
                raise TimeoutError


def start_exchange(
    url: str, body: bytes, *, api_key: str, timeout_s: float, done: Callable[[Answer], None]
) -> Exchange:
    """POSTs a JSON body; calls `done` once, from some thread, at most `timeout_s` later. Never raises.

    The time limit is for the whole: name, proxy, connection, TLS, headers and body. A redirect is an answer like any
    other and never followed. `http_proxy`, `https_proxy` and `no_proxy` are honoured.
    """
    exchange = Exchange(done, _seconds(timeout_s))
    exchange._begin(partial(_post, url, body, api_key))
    return exchange


def _post(url: str, body: bytes, api_key: str, exchange: Exchange) -> Answer:
    problem = _unusable(url, api_key)
    if problem is not None:
        return Answer(None, problem)
    import urllib.request

    headers = {
        "Authorization": f"Bearer {api_key}",
        "Content-Type": "application/json",
        "User-Agent": "checkpoint-reporter",
    }
    try:
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        with _opener(exchange).open(request, timeout=_MAX_TIMEOUT_S) as response:
            status: int = response.status
            phrase = _plain(f"{status} {response.reason}", api_key)[:_MAX_PHRASE]
            delay_s = retry_after(response.headers.get_all("Retry-After", []), time.time())
            if 200 <= status < 300:
                exchange.heard(Answer(status))
                return Answer(status, body=response.read(_MAX_BODY_BYTES))
            exchange.heard(Answer(status, f"{phrase}: (response body unreadable)", delay_s))
            return Answer(status, f"{phrase}: {_excerpt(response.read(_MAX_ERROR_BYTES), api_key)}", delay_s)
    except Exception as error:  # one delivery: whatever urllib, http.client or ssl make of a stranger's bytes
        return exchange._head or Answer(None, _plain(_fault(error), api_key)[:_MAX_ERROR])


def _excerpt(body: bytes, api_key: str) -> str:
    text = _plain(body.decode("utf-8", "replace"), api_key)
    if len(body) == _MAX_ERROR_BYTES:
        text = text[: -_MAX_ESCAPE * len(api_key)]  # where reading stopped, a part of the key may stand
    return text[:_MAX_ERROR]


def _fault(error: BaseException) -> str:
    """One line on why there is no HTTP answer."""
    reason = getattr(error, "reason", None)  # of a URLError
    if isinstance(reason, BaseException):
        error = reason
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"no answer: {text}"


def _opener(exchange: Exchange) -> Any:
    """urllib's own proxy handling over our connections. No handler for redirects, errors, cookies or passwords."""
    import http.client
    import urllib.request

    def build(kind: Any, host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connection._create_connection = exchange.connect
        return connection

    class Handler(urllib.request.AbstractHTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(partial(build, http.client.HTTPConnection), request)

        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(partial(build, http.client.HTTPSConnection), request, context=_tls())

        def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
            return self.do_request_(request)

        https_request = http_request

    opener = urllib.request.OpenerDirector()
    # Debug level 0 whatever http.client is set to: at 1 it prints the headers.
    for handler in (urllib.request.ProxyHandler(), Handler(debuglevel=0), urllib.request.UnknownHandler()):
        opener.add_handler(handler)
    return opener


@cache
def _tls() -> "ssl.SSLContext":
    import ssl

    context = ssl.create_default_context()  # reads the machine's certificates, which takes long
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    """Runs what blocks beside the event loop. A cancelled caller leaves at once; the function then ends unwatched."""
    import anyio
    import anyio.to_thread

    # A limiter of its own: the host's is for the host's threads.
    return await anyio.to_thread.run_sync(
        partial(function, *args), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
    )


# ------------------------------------------------------------------------------------------------------------ an outbox


class OutboxRecord(NamedTuple):
    """A report that waits. `claimed_until`: epoch seconds until which nobody else is given it; None: no such claim."""

    id: Any
    body: Any
    tool_name: str
    attempts: int
    claimed_until: float | None = None
    base_url: str | None = None  # which the report was made for, where the outbox keeps it


def _record(listed: Any) -> OutboxRecord:
    """What somebody's outbox lists, with what a record need not have. Raises what is raised in there."""
    claimed_until, attempts = getattr(listed, "claimed_until", None), getattr(listed, "attempts", 0)
    return OutboxRecord(listed.id, listed.body, _text(getattr(listed, "tool_name", "")), attempts, claimed_until)


class Outbox(Protocol):
    """Where reports wait. Every call is guarded: one that raises costs no report, but may cost a second delivery."""

    async def enqueue(self, *, body: Mapping[str, Any], tool_name: str) -> Any:
        """Stores a report and returns its id. When it returns, the report should be as safe as the store is."""

    async def mark_delivered(self, id: Any) -> None:
        """The endpoint has it."""

    async def mark_failed(self, id: Any, error: str) -> None:
        """It was not delivered. `error` is a Failure: it knows the `status` and `retry_after` as well.

        `status` None is a fault of the connection; count the others, and give up after MAX_ATTEMPTS.
        """

    async def list_retryable(self, limit: int) -> Sequence[OutboxRecord]:
        """At most `limit` reports to try now, those tried least recently first. Best claims what it returns."""


Warn = Callable[[str], None]


def _tell(on_warn: Warn | None, message: str) -> None:
    """Hands a warning to whoever wants it, else to the log; never raises. A callback may be any object, falsy too."""
    try:
        if on_warn is not None:
            on_warn(message)
        else:
            logging.getLogger("checkpoint.reporter").warning("%s", message)
    except Exception:  # a caller's callback, or a log that is closed
        pass


# --------------------------------------------------------------------------------------------------------- reporter


class Registration(NamedTuple):
    """What became of a registration; `tool_count` is how many tools were published with it."""

    registered: bool
    created: bool = False  # the endpoint did not know the server before
    tool_count: int = 0
    reason: str | None = None  # why it is not registered


class Delivery(NamedTuple):
    """What became of a report now; one that is not delivered waits in the outbox, if that could take it."""

    delivered: bool
    status: int | None = None
    error: str | None = None


class Flush(NamedTuple):
    """How many waiting reports were delivered and how many were tried in vain."""

    delivered: int
    failed: int


class CheckpointReporter:
    """Registers one MCP server and reports its calls. Nothing raises but the caller's own cancellation."""

    def __init__(self, config: Config, outbox: Outbox, on_warn: Warn | None) -> None:
        self.config = config
        self._outbox = outbox
        self._on_warn = on_warn
        self._problem = _unusable(config.base_url, config.api_key)
        self._is_outbox_lost = False
        self._pid = os.getpid()
        self._under_way: set[str] = set()  # ids of rows that are being delivered
        self._listings = 0  # under way
        # Ids whose delivery ended while a listing was under way, which may still show them.
        self._ended: set[str] = set()

    async def register_server(self, tools: Iterable[Mapping[str, Any]] | None = None) -> Registration:
        """Claims the server's DID and publishes `tools`, unless None; see `build_registration_body`. Idempotent."""
        try:
            return await self._register(tools)
        except Exception as error:  # none is known; but nothing raises here
            return Registration(False, reason=self._told("not registered", error))

    async def _register(self, tools: object) -> Registration:
        body = build_registration_body(self.config, tools)
        if tools is not None and "tools" not in body:
            self._warn("tools is no list of mappings, each with a name, that JSON can hold; the stored catalog stays")
        answer = await self._send(REGISTER_PATH, body)
        if not answer.delivered:
            self._warn_undelivered("registration failed", answer)
            return Registration(False, reason=answer.error)
        try:
            created = json.loads(answer.body)["created"] is True
        except (ValueError, TypeError, LookupError, RecursionError):
            created = False
        return Registration(True, created, len(body.get("tools", ())))

    async def report_tool_call(
        self,
        *,
        tool_name: str,
        action: str,
        reason: str,
        capability: str | None = None,
        agent_did: str | None = None,
        agent_label: str | None = None,
        principal_did: str | None = None,
        stages: Iterable[Mapping[str, Any]] = (),
        signals: Iterable[Mapping[str, Any]] = (),
        context: Mapping[str, Any] | None = None,
    ) -> Delivery:
        """Stores a report and tries to deliver it once. Never a call's arguments or results: nobody asks for them.

        `action` is permit, challenge or block. A stage has `name`, `verdict` (pass, fail or skip) and `latency_micros`,
        a signal `kind` and `value`, the context `user_agent`, `ip_address`, `path`, `url` and `method`. An outbox that
        fails makes this a direct delivery.
        """
        report = {
            "tool_name": tool_name,
            "action": action,
            "reason": reason,
            "capability": capability,
            "agent_did": agent_did,
            "agent_label": agent_label,
            "principal_did": principal_did,
            "stages": stages,
            "signals": signals,
            "context": context,
        }
        try:
            return await self._report(build_detection_body(self.config, report), _text(tool_name))
        except Exception as error:  # none is known; but nothing raises here
            return Delivery(False, None, self._told("not reported", error))

    async def _report(self, body: dict[str, Any], name: str) -> Delivery:
        outbox, began = self._outbox, time.monotonic()
        deadline = began + outbox.visibility_timeout_s if isinstance(outbox, SqliteOutbox) else math.inf
        try:
            if isinstance(outbox, SqliteOutbox):
                row_id: Any = await outbox.enqueue(body=body, tool_name=name, base_url=self.config.base_url)
            else:
                row_id = await outbox.enqueue(body=body, tool_name=name)
            key = repr(row_id)
        except Exception as error:  # somebody's outbox
            if not self._is_outbox_lost:
                self._told("outbox enqueue failed, delivering directly", error)
            self._is_outbox_lost = isinstance(outbox, SqliteOutbox)  # said once, until it works again
            answer = await self._send(REPORT_PATH, body)
            return Delivery(answer.delivered, answer.status, answer.error)
        self._is_outbox_lost = False
        if key in self._own():
            return Delivery(False, None, "a flush is delivering it")
        if deadline - time.monotonic() < self.config.timeout_s:
            return Delivery(False, None, "waiting: its claim leaves less than timeout_s")
        self._under_way.add(key)
        try:
            answer = await self._deliver(row_id, body, name)
        finally:
            self._end(key)
        return Delivery(answer.delivered, answer.status, answer.error)

    async def flush(self, limit: int = FLUSH_LIMIT) -> Flush:
        """Tries the reports that the outbox lists, at once and one after the other; skips those under way here.

        None is sent with less than `timeout_s` of its claim left. Where rows are claimed, a fault of the connection
        ends the sweep, and so does an endpoint that asks for time: the rows behind would fare alike, and meanwhile
        their claims would run out.
        """
        try:
            return await self._flush(limit if isinstance(limit, int) and limit >= 0 else FLUSH_LIMIT)
        except Exception as error:  # none is known; but nothing raises here
            self._told("flush failed", error)
            return Flush(0, 0)

    async def _flush(self, limit: int) -> Flush:
        delivered = failed = 0
        waiting = await self._list(limit)
        try:
            while waiting:
                key, (record, deadline) = next(iter(waiting.items()))
                if deadline - time.monotonic() < self.config.timeout_s:
                    break
                try:
                    answer = await self._deliver(record.id, record.body, record.tool_name)
                finally:
                    del waiting[key]
                    self._end(key)
                delivered += answer.delivered
                failed += not answer.delivered
                if deadline < math.inf and (answer.status is None or answer.retry_after is not None):
                    break
            if waiting and isinstance(self._outbox, SqliteOutbox):
                with contextlib.suppress(Exception):  # the claims end anyway
                    await self._outbox.release([record.id for record, _ in waiting.values()])
        finally:
            for key in waiting:
                self._end(key)
        return Flush(delivered, failed)

    async def _list(self, limit: int) -> dict[str, tuple[OutboxRecord, float]]:
        """What the outbox lists, by key, but for what is under way here; now marked as such; with the claim's end."""
        self._own()
        self._listings += 1
        waiting: dict[str, tuple[OutboxRecord, float]] = {}
        try:
            for listed in await self._outbox.list_retryable(limit):
                try:
                    record = _record(listed)
                    key, until = repr(record.id), record.claimed_until
                except Exception as error:  # somebody's record; the others are none the worse for it
                    self._told("outbox listed what is no record", error)
                    continue
                left_s = until - time.time() if isinstance(until, (int, float)) else math.inf
                if key not in self._under_way and key not in self._ended:
                    waiting[key] = record, time.monotonic() + left_s
        except Exception as error:  # somebody's outbox
            self._told("outbox list_retryable failed", error)
        finally:
            self._listings -= 1
            if not self._listings:
                self._ended.clear()
        self._under_way.update(waiting)
        return waiting

    def _own(self) -> set[str]:
        """The keys under way in this process: after a fork none of the parent's are."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._under_way, self._ended, self._listings = set(), set(), 0
        return self._under_way

    def _end(self, key: str) -> None:
        self._under_way.discard(key)
        if self._listings:
            self._ended.add(key)

    async def _deliver(self, row_id: Any, body: Any, tool_name: str) -> Answer:
        answer = await self._send(REPORT_PATH, body)
        mark = "mark_delivered" if answer.delivered else "mark_failed"
        try:
            if answer.delivered:
                await self._outbox.mark_delivered(row_id)
            else:
                await self._outbox.mark_failed(row_id, Failure(answer.error or "", answer.status, answer.retry_after))
        except Exception as error:  # somebody's outbox; a report that is sent twice is better than none
            self._told(f"outbox {mark} failed, the report stays to be sent", error)
        if not answer.delivered:
            self._warn_undelivered(f'report for "{tool_name}" not delivered', answer)
        return answer

    async def _send(self, path: str, body: object) -> Answer:
        if self._problem is not None:
            return Answer(None, self._problem)
        answers: list[Answer] = []
        is_answered = threading.Event()

        def done(answer: Answer) -> None:
            answers.append(answer)
            is_answered.set()

        config, content = self.config, body if isinstance(body, bytes) else encode(body)
        exchange = start_exchange(
            config.base_url + path, content, api_key=config.api_key, timeout_s=config.timeout_s, done=done
        )
        try:
            await _in_thread(is_answered.wait)
        finally:
            exchange.cancel()
            is_answered.set()  # the thread that waits is abandoned, not ended, when we are cancelled
        return answers[0]

    def _warn_undelivered(self, what: str, answer: Answer) -> None:
        if self._problem is None:  # which was told when the reporter was made
            self._warn(f"{what}: {answer.error}")

    def _told(self, what: str, error: Exception) -> str:
        """What went wrong and how, once it was warned of."""
        try:
            shown = repr(error)
        except Exception:  # somebody's exception
            shown = type(error).__name__
        message = _plain(f"{what}: {shown}", self.config.api_key)
        self._warn(message)
        return message

    def _warn(self, message: str) -> None:
        _tell(self._on_warn, f"checkpoint reporter: {_plain(message, self.config.api_key)}")


def create_checkpoint_reporter(
    *,
    api_key: str,
    server_did: str,
    server_url: str,
    display_name: str | None = None,
    sdk: Mapping[str, str] | None = None,
    base_url: str | None = DEFAULT_BASE_URL,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    outbox: Outbox | None = None,
    on_warn: Warn | None = None,
) -> CheckpointReporter:
    """A reporter for one MCP server; see Config for the values. Never raises: what is not usable is warned of.

    `on_warn` gets one line per trouble, from the event loop's thread or one of ours; without it they are logged by
    `checkpoint.reporter`. Without an outbox reports wait in memory.
    """
    config = Config(
        api_key=api_key,
        server_did=server_did,
        server_url=server_url,
        display_name=display_name,
        sdk=sdk,
        base_url=base_url,  # type: ignore[arg-type]  # None is the default there too
        timeout_s=timeout_s,
    )
    store = MemoryOutbox() if outbox is None else outbox
    reporter = CheckpointReporter(config, store, on_warn if callable(on_warn) else None)
    if reporter._problem is not None:
        reporter._warn(f"nothing will be sent: {reporter._problem}")
    with contextlib.suppress(Exception):  # of somebody's outbox, asked for its class
        if isinstance(store, (MemoryOutbox, SqliteOutbox)) and store.on_warn is None:
            store.on_warn = reporter._warn
        if isinstance(store, SqliteOutbox) and store.visibility_timeout_s <= config.timeout_s:
            reporter._warn("nothing will be sent: the outbox's visibility_timeout_s is not above timeout_s")
    return reporter


# --------------------------------------------------------------------------------------------------------- outboxes


def _tell_dropped(on_warn: Warn | None, before: int, dropped: int) -> None:
    """Warns at the first, the tenth, the hundredth ... report dropped: a full outbox must not flood the log."""
    if dropped and (not before or len(str(dropped)) > len(str(before))):
        _tell(on_warn, f"the outbox is full: {dropped} of the oldest reports dropped so far")


class MemoryOutbox:
    """Reports of this process, lost with it. At most `max_rows`; then the oldest is dropped, counted and warned of."""

    def __init__(self, *, max_rows: int = 10_000, on_warn: Warn | None = None) -> None:
        self.dropped = 0
        self.on_warn = on_warn
        self._max_rows = max(max_rows, 1)
        self._rows: dict[str, tuple[OutboxRecord, int]] = {}  # with how often it was tried, answered or not
        self._count = 0
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._own_rows())

    def _own_rows(self) -> dict[str, tuple[OutboxRecord, int]]:
        if self._pid != os.getpid():  # after a fork the rows are the parent's, which will send them
            self._pid = os.getpid()
            self._rows = {}
        return self._rows

    async def enqueue(self, *, body: Mapping[str, Any], tool_name: str) -> str:
        """Keeps a report, at the price of the oldest one when it is full."""
        rows = self._own_rows()
        self._count += 1
        row_id = f"mem-{self._count}"
        rows[row_id] = OutboxRecord(row_id, body, tool_name, 0), 0
        if len(rows) > self._max_rows:
            del rows[next(iter(rows))]
            self.dropped += 1
            _tell_dropped(self.on_warn, self.dropped - 1, self.dropped)
        return row_id

    async def mark_delivered(self, id: str) -> None:
        """Forgets it."""
        self._own_rows().pop(id, None)

    async def mark_failed(self, id: str, error: str) -> None:
        """Counts an answered failure."""
        row = self._own_rows().get(id)
        if row is not None:
            record, tries = row
            is_answered = getattr(error, "status", 0) is not None
            self._rows[id] = record._replace(attempts=record.attempts + is_answered), tries + 1

    async def list_retryable(self, limit: int) -> list[OutboxRecord]:
        """Those with attempts left, least tried first. No due times here: what is listed may be sent at once."""
        rows = [row for row in self._own_rows().values() if row[0].attempts < MAX_ATTEMPTS]
        return [record for record, _ in sorted(rows, key=lambda row: row[1])[: max(limit, 0)]]


APPLICATION_ID: Final = 0x43484B4F  # "CHKO"; a journal has another one
FORMAT: Final = 1  # user_version

# One row per report, for all its attempts. A row is held from-until, by a claim or for a retry; whoever looks at a time
# outside of that may have it. Both ends are milliseconds of the machine's monotonic clock, which all its processes
# share: a wall clock that jumps neither frees a claim nor keeps a report for hours, and after a restart of the machine
# the old times mean nothing, or at worst a wait no longer than the one that was meant. Times for people are epoch ms.
_DDL: Final = """
CREATE TABLE reports (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tool_name TEXT NOT NULL,
    body BLOB,
    base_url TEXT,
    created_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    held_from INTEGER NOT NULL,
    held_until INTEGER NOT NULL,
    is_claimed INTEGER NOT NULL CHECK (is_claimed IN (0, 1)),
    status INTEGER,
    error TEXT,
    delivered_at INTEGER,
    dead_at INTEGER,
    CHECK (delivered_at IS NULL OR dead_at IS NULL),
    CHECK ((body IS NULL) = (delivered_at IS NOT NULL))
) STRICT;
CREATE INDEX waiting ON reports (held_until, id, held_from) WHERE delivered_at IS NULL AND dead_at IS NULL;
CREATE INDEX delivered ON reports (delivered_at) WHERE delivered_at IS NOT NULL;
CREATE INDEX dead ON reports (dead_at) WHERE dead_at IS NOT NULL;
CREATE TABLE store (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    dropped INTEGER NOT NULL,
    paused_from INTEGER NOT NULL,
    paused_until INTEGER NOT NULL
) STRICT;
INSERT INTO store VALUES (1, 0, 0, 0);
"""
_WAITING: Final = "delivered_at IS NULL AND dead_at IS NULL"
_CLAIMABLE: Final = f"{_WAITING} AND (held_until <= :now OR held_from > :now OR (:ignores_due AND NOT is_claimed))"
_BUSY_S: Final = 5.0  # to wait for another process's transaction
_KEPT_MS: Final = 86_400_000  # a delivered row, without its body


class OutboxUnusable(Exception):
    """The outbox file cannot be used; the message names it and says what to do."""


class StoredReport(NamedTuple):
    """A row for people to read, without its body."""

    id: int
    tool_name: str
    base_url: str | None
    attempts: int
    created_at: int  # epoch ms
    due_in_s: float  # 0: now
    is_claimed: bool
    is_dead: bool
    status: int | None  # of the last answer
    error: str | None


class Counts(NamedTuple):
    """How many rows are in which state; `dropped`: how many a full store ever gave up."""

    waiting: int
    dead: int
    delivered: int
    dropped: int


class _Claim(NamedTuple):
    """A claim of this process: until when, and how the row was held before."""

    until: int
    held_from: int
    held_until: int


class SqliteOutbox:
    """Reports in a SQLite file of its own, for any number of processes of one machine; opened when first used.

    What `enqueue` returned for is on disk. Enqueue and listing claim a row for `visibility_timeout_s`, and a reporter
    sends none whose claim ends within its `timeout_s`: so several sweepers send nothing twice, and with a visibility of
    at most `timeout_s` nothing is sent at all. The database stays below `max_bytes`, beyond which the oldest rows are
    dropped (delivered ones first, then dead ones), counted and warned of; its write-ahead log takes some MB more.
    Delivered rows lose their body at once and go after a day.

    The methods that are not async block for a moment and raise OutboxUnusable or sqlite3.Error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        visibility_timeout_s: float = 60,
        max_bytes: int = 64_000_000,
        on_warn: Warn | None = None,
    ) -> None:
        self.path = path
        self.visibility_timeout_s = _seconds(visibility_timeout_s, 60.0) if visibility_timeout_s else 0.0
        self.on_warn = on_warn
        self._max_bytes = max_bytes
        self._database: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._claims: dict[int, _Claim] = {}
        _outboxes.add(self)

    # -- the protocol

    async def enqueue(self, *, body: Mapping[str, Any], tool_name: str, base_url: str | None = None) -> int:
        """Stores a report, claimed for whoever enqueued it."""
        return await _in_thread(self.add, body, tool_name, base_url)

    async def mark_delivered(self, id: int) -> None:
        """Notes that the endpoint has it."""
        await _in_thread(self.settle, id, None)

    async def mark_failed(self, id: int, error: str) -> None:
        """Notes an attempt: see `settle`."""
        await _in_thread(self.settle, id, error)

    async def list_retryable(self, limit: int) -> list[OutboxRecord]:
        """Claims due rows: see `claim`."""
        return await _in_thread(self.claim, limit)

    async def release(self, ids: Sequence[int]) -> None:
        """Gives claimed rows back that were not tried."""
        await _in_thread(self.give_back, ids)

    # -- the same, and more, for whoever may block

    def add(self, body: Mapping[str, Any], tool_name: str, base_url: str | None = None) -> int:
        """Stores a report, claimed; on disk when it returns."""
        content = encode(body)
        with self._transaction() as database:
            before, dropped = self._make_room(database, len(content))
            now = _monotonic_ms()
            until = now + int(self.visibility_timeout_s * 1000)
            row_id: int = database.execute(
                "INSERT INTO reports (tool_name, body, base_url, created_at, held_from, held_until, is_claimed)"
                " VALUES (?, ?, ?, ?, ?, ?, 1) RETURNING id",
                (_text(tool_name), content, base_url, _epoch_ms(), now, until),
            ).fetchone()[0]
            self._claims[row_id] = _Claim(until, now, now)
        _tell_dropped(self.on_warn, before, dropped)
        return row_id

    def claim(self, limit: int = FLUSH_LIMIT, *, ignores_due: bool = False) -> list[OutboxRecord]:
        """Claims rows that are due, longest due first. None while the endpoint asked for quiet.

        `ignores_due` takes those that wait for a retry as well; never what another has claimed.
        """
        condition = f"{_CLAIMABLE} ORDER BY held_until, id LIMIT :limit"
        with self._transaction() as database:
            if _is_quiet(database) and not ignores_due:
                return []
            found = self._claim_where(database, condition, ignores_due, [{"limit": max(min(limit, 2**31), 0)}])
        return [record._replace(body=_decoded(record.body)) for record in found]

    def claim_these(self, ids: Iterable[int], *, ignores_due: bool = False) -> list[OutboxRecord]:
        """Claims those of these rows that `due` would list, quiet or not. Each `body` is the bytes that are stored."""
        with self._transaction() as database:
            return self._claim_where(database, f"{_CLAIMABLE} AND id = :id", ignores_due, [{"id": id} for id in ids])

    def _claim_where(
        self, database: "sqlite3.Connection", condition: str, ignores_due: bool, queries: Iterable[dict[str, int]]
    ) -> list[OutboxRecord]:
        now = _monotonic_ms()
        until = now + int(self.visibility_timeout_s * 1000)
        select = (
            "SELECT id, body, tool_name, attempts, base_url, held_from, held_until"  # noqa: S608 (constants of ours)
            f" FROM reports WHERE {condition}"
        )
        rows = [
            row
            for values in queries
            for row in database.execute(select, {"now": now, "ignores_due": ignores_due, **values}).fetchall()
        ]
        database.executemany(
            "UPDATE reports SET held_from = ?, held_until = ?, is_claimed = 1 WHERE id = ?",
            [(now, until, row[0]) for row in rows],
        )
        self._claims = {row_id: claim for row_id, claim in self._claims.items() if claim.until > now}
        self._claims.update((row[0], _Claim(until, *row[5:])) for row in rows)
        claimed_until = time.time() + (until - _monotonic_ms()) / 1000
        return [
            OutboxRecord(row_id, body, tool_name, attempts, claimed_until, base_url)
            for row_id, body, tool_name, attempts, base_url, *_ in rows
        ]

    def settle(self, row_id: int, error: str | None) -> None:
        """Notes how an attempt ended; `error` None: delivered. A row that is delivered or dead stays so.

        A Failure decides by `after`; a plain str counts as a fault of the connection, which brings a row behind those
        that are due, but leaves the time that it waits for and what an endpoint said. Where the endpoint asked for
        time, the whole store is quiet for so long.
        """
        with self._transaction() as database:
            claim = self._claims.pop(row_id, None)
            if error is None:
                database.execute(
                    "UPDATE reports SET delivered_at = ?, dead_at = NULL, body = NULL, error = NULL, is_claimed = 0"
                    " WHERE id = ? AND delivered_at IS NULL",
                    (_epoch_ms(), row_id),
                )
                database.execute("DELETE FROM reports WHERE delivered_at < ?", (_epoch_ms() - _KEPT_MS,))
            else:
                answer = Answer(getattr(error, "status", None), _text(error), getattr(error, "retry_after", None))
                self._settle_failed(database, row_id, answer, claim)

    @staticmethod
    def _settle_failed(database: "sqlite3.Connection", row_id: int, answer: Answer, claim: _Claim | None) -> None:
        row = database.execute(
            "SELECT attempts, held_from, held_until, is_claimed, status, error FROM reports"  # noqa: S608
            f" WHERE id = ? AND {_WAITING}",
            (row_id,),
        ).fetchone()
        if row is None:
            return
        now = _monotonic_ms()
        attempts, *held, is_claimed, status, error = row
        verdict = after(answer, attempts, jitter=random.random())
        is_ours = claim is not None and held[1] == claim.until
        if is_ours or not (is_claimed and held[0] <= now < held[1]):
            held = _held_after(verdict, now, held if claim is None or not is_ours else claim[1:])
            is_claimed = 0
        # Else our claim ran out and somebody else has one, which stays.
        if verdict.kind is not Fate.UNREACHABLE or status is None:
            status, error = answer.status, answer.error
        database.execute(
            "UPDATE reports SET attempts = ?, held_from = ?, held_until = ?, is_claimed = ?, status = ?, error = ?,"
            " dead_at = ? WHERE id = ?",
            (
                *(attempts + (verdict.kind is not Fate.UNREACHABLE), *held, is_claimed),
                *(status, error, _epoch_ms() if verdict.kind is Fate.DEAD else None, row_id),
            ),
        )
        if verdict.kind is Fate.RETRY and answer.retry_after:
            database.execute(
                "UPDATE store SET paused_from = ?, paused_until = ?", (now, now + int(answer.retry_after * 1000))
            )

    def give_back(self, ids: Sequence[int]) -> None:
        """Ends our claims on rows that were not tried, which wait as before."""
        ours = [(row_id, self._claims[row_id]) for row_id in ids if row_id in self._claims]
        with self._transaction() as database:
            database.executemany(
                "UPDATE reports SET held_from = ?, held_until = ?, is_claimed = 0"
                " WHERE id = ? AND held_until = ? AND is_claimed",
                [(claim.held_from, claim.held_until, row_id, claim.until) for row_id, claim in ours],
            )
        for row_id, _ in ours:
            self._claims.pop(row_id, None)

    def counts(self) -> Counts:
        """How many rows are in which state."""
        with _files:
            row = self._open().execute(
                "SELECT count(*) FILTER (WHERE delivered_at IS NULL AND dead_at IS NULL), count(dead_at),"
                " count(delivered_at), (SELECT dropped FROM store) FROM reports"
            )
            return Counts(*row.fetchone())

    def due(self, limit: int = FLUSH_LIMIT, *, ignores_due: bool = False) -> list[StoredReport]:
        """Rows that `claim` would take, which it leaves as they are. A limit below 0 is none, here and below."""
        with _files:
            if _is_quiet(self._open()) and not ignores_due:
                return []
        return self._rows(f"{_CLAIMABLE} ORDER BY held_until, id", limit, ignores_due)

    def waiting(self, limit: int = FLUSH_LIMIT) -> list[StoredReport]:
        """Rows to be delivered, due or not, oldest first."""
        return self._rows(f"{_WAITING} ORDER BY id", limit)

    def dead(self, limit: int = FLUSH_LIMIT) -> list[StoredReport]:
        """Rows that were given up, with the reason, oldest first."""
        return self._rows("dead_at IS NOT NULL ORDER BY id", limit)

    def undelivered(self, limit: int = -1) -> list[StoredReport]:
        """Both, as they are at one moment."""
        return self._rows("delivered_at IS NULL ORDER BY dead_at IS NOT NULL, id", limit)

    def _rows(self, condition: str, limit: int, ignores_due: bool = False) -> list[StoredReport]:
        with _files:
            rows = self._open().execute(
                "SELECT id, tool_name, base_url, attempts, created_at,"  # noqa: S608 (constants of ours)
                " CASE WHEN held_from <= :now THEN max(held_until - :now, 0) / 1000.0 ELSE 0.0 END,"
                f" is_claimed, dead_at IS NOT NULL, status, error FROM reports WHERE {condition} LIMIT :limit",
                {"now": _monotonic_ms(), "limit": limit, "ignores_due": ignores_due},
            )
            return [StoredReport._make((*row[:6], bool(row[6]), bool(row[7]), *row[8:])) for row in rows]

    def revive(self, ids: Iterable[int] | None = None) -> int:
        """Makes dead rows due, all of them or these, with all attempts before them; returns how many."""
        with self._transaction() as database:
            now, revived = _monotonic_ms(), 0
            wanted = (row_id for (row_id,) in database.execute("SELECT id FROM reports WHERE dead_at IS NOT NULL"))
            for row_id in list(wanted) if ids is None else list(ids):
                revived += database.execute(
                    "UPDATE reports SET dead_at = NULL, attempts = 0, held_from = ?, held_until = ?, is_claimed = 0"
                    " WHERE id = ? AND dead_at IS NOT NULL",
                    (now, now, row_id),
                ).rowcount
            return revived

    def prune(self, *, older_than_s: float = 0.0, dead: bool = False) -> int:
        """Deletes delivered rows, and dead ones where asked to, that ended so long ago; returns how many."""
        limit = _epoch_ms() - int(older_than_s * 1000)
        with self._transaction() as database:
            deleted = database.execute("DELETE FROM reports WHERE delivered_at <= ?", (limit,)).rowcount
            if dead:
                deleted += database.execute("DELETE FROM reports WHERE dead_at <= ?", (limit,)).rowcount
            return deleted

    def close(self) -> None:
        """Gives the file back; the next use opens it again."""
        with _files:
            self._close()

    def _make_room(self, database: "sqlite3.Connection", size_bytes: int) -> tuple[int, int]:
        """Deletes the oldest rows until a body fits; returns how many undelivered ones went ever, before and now."""
        if size_bytes > self._max_bytes // 2:
            raise OutboxUnusable(f"outbox {self.path}: a report of {size_bytes} bytes is too large for it")
        if self._used_bytes(database) + size_bytes <= self._max_bytes:
            return 0, 0
        before: int = database.execute("SELECT dropped FROM store").fetchone()[0]
        dropped = before
        while self._used_bytes(database) + size_bytes > self._max_bytes:
            rows = database.execute(
                "DELETE FROM reports WHERE id IN (SELECT id FROM reports"
                " ORDER BY delivered_at IS NULL, dead_at IS NULL, id LIMIT 8) RETURNING delivered_at"
            ).fetchall()
            if not rows:
                break
            dropped += sum(delivered_at is None for (delivered_at,) in rows)
        database.execute("UPDATE store SET dropped = ?", (dropped,))
        return before, dropped

    @staticmethod
    def _used_bytes(database: "sqlite3.Connection") -> int:
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator["sqlite3.Connection"]:
        """One write transaction; on disk when it ends without an exception, without a trace when with one."""
        import sqlite3

        with _files:
            database = self._open()
            try:
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            except BaseException as error:
                try:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                except sqlite3.Error:
                    self._close()  # the first error is the one to tell; SQLite rolls back when it opens the file again
                if isinstance(error, sqlite3.Error) and error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    self._close()  # a disk that was full or lost is looked at afresh
                raise

    def _open(self) -> "sqlite3.Connection":
        import sqlite3

        path = os.path.realpath(os.fsdecode(self.path))
        inode = self._inode_of(path)
        if self._database is not None and inode == self._inode:
            return self._database
        self._close()  # somebody put another file in its place
        try:
            if inode is None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            raise OutboxUnusable(f"outbox {path}: {error.strerror}; give another path") from error
        self._refuse_strangers(path)
        self._database = database = _connect(path, "mode=rw")
        try:
            for pragma in (
                "trusted_schema = OFF",
                "synchronous = FULL",
                "fullfsync = ON",
                "journal_size_limit = 4000000",
            ):
                database.execute(f"PRAGMA {pragma}")
            database.execute("BEGIN IMMEDIATE")
            if database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
                # Stamped before WAL is switched on: a database in WAL mode with no stamp would be a stranger's.
                for statement in (*_DDL.split(";"), f"PRAGMA application_id = {APPLICATION_ID}"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {FORMAT}")
            database.execute("COMMIT")
            self._refuse(path, database)
            database.execute("PRAGMA journal_mode = WAL")
        except (sqlite3.Error, OutboxUnusable):
            self._close()
            raise
        self._inode = self._inode_of(path)
        return database

    @staticmethod
    def _inode_of(path: str) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutboxUnusable(f"outbox {path}: {error.strerror}; give another path") from error
        if not stat.S_ISREG(found.st_mode):
            raise OutboxUnusable(f"outbox {path}: not a regular file; give the path of a file")
        return found.st_dev, found.st_ino

    def _refuse_strangers(self, path: str) -> None:
        """Raises OutboxUnusable for a file that is neither empty nor ours, and leaves it as it is.

        SQLite looks at it as at something that cannot change: no lock, no recovery. We do not open it ourselves, for
        closing it would take this process's locks off it.
        """
        import sqlite3

        if os.path.getsize(path) == 0:
            return
        try:
            with contextlib.closing(_connect(path, "mode=ro&immutable=1")) as database:
                self._refuse(path, database)
        except sqlite3.DatabaseError as error:
            if not os.path.exists(path + "-journal"):  # else it may be ours, and its maker was killed half-way
                raise OutboxUnusable(f"outbox {path}: not a Checkpoint outbox; give another path") from error

    @staticmethod
    def _refuse(path: str, database: "sqlite3.Connection") -> None:
        if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise OutboxUnusable(f"outbox {path}: a database of another program; give another path")
        written_by = database.execute("PRAGMA user_version").fetchone()[0]
        if written_by != FORMAT:
            raise OutboxUnusable(f"outbox {path}: has format {written_by}, this version reads {FORMAT}")

    def _close(self) -> None:
        import sqlite3

        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()


def _is_quiet(database: "sqlite3.Connection") -> bool:
    """Whether the endpoint asked for time that is not over."""
    paused_from, paused_until = database.execute("SELECT paused_from, paused_until FROM store").fetchone()
    return bool(paused_from <= _monotonic_ms() < paused_until)


def _held_after(verdict: Verdict, now: int, before: Sequence[int]) -> list[int]:
    """From when until when a row is held once an attempt has failed."""
    if verdict.kind is Fate.RETRY:
        return [now, now + int(verdict.delay_s * 1000)]
    if verdict.kind is Fate.UNREACHABLE and before[0] <= now < before[1]:
        return list(before)
    return [now, now]


def _decoded(body: bytes) -> Any:
    """A stored body; what is no JSON stays as it is, and the endpoint may say so."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def _connect(path: str, options: str) -> "sqlite3.Connection":
    import sqlite3
    from urllib.parse import quote

    return sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?{options}",
        uri=True,
        isolation_level=None,
        timeout=_BUSY_S,
        check_same_thread=False,  # one lock keeps the threads apart
    )


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _epoch_ms() -> int:
    return time.time_ns() // 1_000_000


# One lock for all outboxes of the process, so that a fork finds none of them half-way: a connection must not cross one,
# and a lock that another thread holds would never be released in the child.
_files: Final = threading.Lock()
_outboxes: Final["weakref.WeakSet[SqliteOutbox]"] = weakref.WeakSet()


def _before_fork() -> None:
    _files.acquire()
    for outbox in list(_outboxes):
        outbox._close()


os.register_at_fork(before=_before_fork, after_in_parent=_files.release, after_in_child=_files.release)
