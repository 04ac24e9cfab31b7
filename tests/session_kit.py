"""What the tests of the session server share: a server as a real process, repositories, and calls without a process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, cast

import projectroot
import session
import sessiontools
import toolspec

SOURCES = Path(session.__file__).parent
SERVE = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(SOURCES)!r}); import session; sys.exit(session.serve())",
]
MODERN_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
SOME_HEAD = "b2ef1b5919ee5d456ea146c9362a7abc92b1e556"


class Server:
    """A session server as a child process, driven line by line."""

    def __init__(self, cwd: Path, environ: Mapping[str, str] = {}, capabilities: Mapping[str, Any] = {}) -> None:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("CLAUDE_", "CHECKPOINT_"))
        }
        self.process = subprocess.Popen(
            SERVE,
            cwd=cwd,
            env={**inherited, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._last_id = 0
        self._capabilities = capabilities

    def __enter__(self) -> Self:
        self.request(
            "initialize",
            {
                "protocolVersion": "2025-11-25",
                "capabilities": self._capabilities,
                "clientInfo": {"name": "test", "version": "1"},
            },
        )
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> tuple[bytes, bytes]:
        """Ends stdin and gives what was still written; fails if the server does not end by itself."""
        try:
            return self.process.communicate(timeout=30)
        finally:
            self.process.kill()

    def send(self, message: Any) -> None:
        line = message if isinstance(message, bytes) else json.dumps(message, ensure_ascii=False).encode()
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the server closed its output"
        return cast("dict[str, Any]", json.loads(line))

    def request(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": self._last_id, "method": method}
        self.send(message if params is None else message | {"params": params})
        answer = self.receive()
        assert answer["id"] == self._last_id, answer
        return answer

    def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", self.request("tools/call", {"name": tool, "arguments": arguments})["result"])

    def save(self, **arguments: Any) -> dict[str, Any]:
        return self.call(toolspec.SAVE, {"goal": "g", **arguments})

    def load(self, **arguments: Any) -> dict[str, Any]:
        return self.call(toolspec.LOAD, arguments)


class Project:
    """A project folder and the tools called on it in this process, at a time of one's choosing."""

    def __init__(self, root: Path, environ: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.environ = dict(os.environ if environ is None else environ)
        self.seen = sessiontools.Seen()
        self.later = timedelta()

    @property
    def file(self) -> Path:
        return self.root / ".claude-checkpoint"

    @property
    def backup(self) -> Path:
        return self.root / ".claude-checkpoint.prev"

    @property
    def checkpoint(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.file.read_bytes()))

    def now(self) -> datetime:
        return datetime.now(UTC) + self.later

    def save(self, goal: str = "g", **arguments: Any) -> dict[str, Any]:
        return sessiontools.save(
            {"goal": goal, **arguments},
            toolspec.SAVE_INPUT,
            self._find_root,
            environ=self.environ,
            seen=self.seen,
            generator={"name": "checkpoint", "version": "0.1.0"},
            now=self.now,
        )

    def load(self, *, is_full: bool = False) -> dict[str, Any]:
        root = self._find_root(None)
        loaded = sessiontools.load(root, environ=self.environ, seen=self.seen)
        return sessiontools.load_answer(root, loaded, is_full=is_full, now=self.now())

    def brief(self) -> str:
        return cast("str", self.load()["brief"])

    def entries(self) -> dict[str, dict[str, Any]]:
        return {entry["path"]: entry for entry in self.checkpoint["modifiedFiles"]}

    def statuses(self) -> dict[str, str]:
        return {path: entry["status"] for path, entry in self.entries().items()}

    def write(self, name: str, content: str | bytes = "x\n") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def plant(self, **members: Any) -> None:
        """Writes a checkpoint by hand, as an editor or a repository would."""
        self.file.write_text(json.dumps(handmade(**members), ensure_ascii=False), encoding="utf-8")

    def _find_root(self, argument: str | None) -> projectroot.Root:
        return projectroot.resolve_root(argument or str(self.root), self.environ, lambda: ())


class Repository(Project):
    """A project that is a git repository, isolated from the configuration of whoever runs the tests."""

    def __init__(self, root: Path, *, branch: str = "main", commits: bool = True) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root)
        self.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        self.git("init", "-q", "-b", branch)
        self.git("config", "user.name", "n")
        self.git("config", "user.email", "n@example.invalid")
        (root / ".git/info/exclude").write_text(".claude-checkpoint*\n")
        if commits:
            self.commit_file("README", "read me\n")

    def git(self, *arguments: str, cwd: Path | None = None, check: bool = True) -> str:
        done = subprocess.run(
            ["git", "-c", "protocol.file.allow=always", *arguments],
            cwd=cwd or self.root,
            env=self.environ,
            check=check,
            capture_output=True,
        )
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def commit_file(self, name: str, content: str | bytes = "x\n") -> None:
        self.write(name, content)
        self.commit(name)

    def commit(self, *names: str, message: str = "a commit") -> str:
        self.git("add", "-f", "--", *(names or (".",)))
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.head

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD")


def handmade(**members: Any) -> dict[str, Any]:
    """A whole checkpoint as a JSON value, with the given members in place of the usual ones."""
    return {
        "version": 1,
        "id": "ee5507c0-855e-44a5-85c1-d97b767537c9",
        "createdAt": "2026-10-08T02:23:55.477Z",
        "updatedAt": "2026-10-08T02:23:55.477Z",
        "generator": {"name": "checkpoint", "version": "0.1.0"},
        "project": {"name": "my-app"},
        "git": None,
        "goal": {"primary": "g", "tasks": []},
        "nextSteps": [],
        "decisions": [],
        "modifiedFiles": [],
        "recentCommands": [],
        "meta": {"redactions": 0, "truncated": False},
    } | members


def sections(brief: str) -> dict[str, str]:
    """The sections of a brief by title; the part above the first is under ""."""
    parts = ("\n" + brief).split("\n## ")
    return {"": parts[0].strip()} | {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts[1:]}


def names(root: Path) -> Sequence[str]:
    """What lies in a folder that belongs to a checkpoint."""
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".claude-checkpoint"))
