#!/usr/bin/env python3
"""A Checkpoint endpoint for your own machine: takes registrations and reports, and answers as it is told to.

    scripts/fake_endpoint.py --port 8700 --log received.jsonl
    scripts/fake_endpoint.py --status 200,500,429,close,hang

Prints its base URL as its first line. Each request is one line of the log, on disk before it is answered: `path`,
`status` (null where no answer follows), `at` (epoch seconds), `at_once` (requests under way, this one included) and
`body`.
"""

import argparse
import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, BinaryIO, Final

REGISTER_PATH: Final = "/api/v1/kya-os/servers"
REPORT_PATH: Final = "/api/v1/log-detection"
RETRY_AFTER_S: Final = 1  # said with each 429


class Endpoint(ThreadingHTTPServer):
    """Answers POSTs by a pattern of statuses that begins anew at its end; registrations always get 200."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, pattern: Sequence[str], log: BinaryIO | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self._statuses = cycle(pattern)
        self._log = log
        self._lock = threading.Lock()
        self._at_once = 0
        self._known: set[str] = set()

    def begin(self, path: str, body: Any) -> tuple[str, dict[str, Any]]:
        """Decides on an answer and notes the request; returns a status or a word, and the answer's body."""
        with self._lock:
            self._at_once += 1
            status, answer = "404", {}
            if path == REGISTER_PATH:
                did = str(body.get("serverDid")) if isinstance(body, dict) else ""
                status, answer = "200", {"created": did not in self._known}
                self._known.add(did)
            elif path == REPORT_PATH:
                status = next(self._statuses)
            if self._log is not None:
                answered = int(status) if status.isdecimal() else None
                line = {"path": path, "status": answered, "at": time.time(), "at_once": self._at_once, "body": body}
                self._log.write(json.dumps(line).encode() + b"\n")
                self._log.flush()
                os.fsync(self._log.fileno())
            return status, answer

    def end(self) -> None:
        with self._lock:
            self._at_once -= 1


class Handler(BaseHTTPRequestHandler):
    """One request; never writes the Authorization header anywhere."""

    server: Endpoint

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(content)
        except ValueError:
            self.send_error(400)
            return
        status, answer = self.server.begin(self.path, body)
        try:
            if status == "hang":
                self.rfile.read(1)  # until the client has had enough
            if status in ("hang", "close"):
                return
            content = json.dumps(answer).encode()
            self.send_response(int(status))
            if status == "429":
                self.send_header("Retry-After", str(RETRY_AFTER_S))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            pass  # the client had enough
        finally:
            self.server.end()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: the log has it."""


def pattern(text: str) -> list[str]:
    """`200,500,close` as a list; an argparse type."""
    words = text.split(",")
    for word in words:
        if word not in ("close", "hang") and not (word.isdecimal() and 200 <= int(word) <= 599):
            raise argparse.ArgumentTypeError(f"{word!r} is neither a status nor close nor hang")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description="A Checkpoint endpoint for your own machine.")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one")
    parser.add_argument(
        "--status", type=pattern, default=["200"], help="answers to reports, in turn: 200,500,close,hang"
    )
    parser.add_argument("--log", type=argparse.FileType("ab"), help="append what was received, one JSON object a line")
    args = parser.parse_args()
    endpoint = Endpoint(args.port, args.status, args.log)
    print(f"http://127.0.0.1:{endpoint.server_port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        endpoint.serve_forever()


if __name__ == "__main__":
    main()
