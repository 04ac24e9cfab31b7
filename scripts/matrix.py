#!/usr/bin/env python3
"""Real clients and real servers, direct and through Checkpoint: whether anybody can tell, and whether they resume.

For each pair of an official client and a server that people use:

    direct     the client learns who the server is, lists its tools, and calls some; one call fails
    relayed    the same through a relay with a journal. All that the client hands to its caller must be equal, but
               for one thing: where the server gives its name and version, the relay gives its own
    killed     in the middle of one more call: the server is stopped, the call is on record and has no outcome, and the
               relay gets SIGKILL. Then the server may run on and end
    resumed    the client starts again and makes the same calls, with pins. What had an answer gets that answer again,
               the failure too; the call that was cut off is refused as in doubt; a new one runs
    ledger     what the server keeps (commits, rows, files) is after the resume what it was before it

A second table holds everything else that a protocol era has, one client each: server-everything with npm's sdk 1.x,
and scripts/matrix_server.py with npm's client 2.x in the era of 2026-07-28, which server-everything does not know.
Answers, and what the server sends or asks meanwhile, must equal those of a direct session; every call is on record.

    scripts/matrix.py --quick                      two cells in half a minute, nothing to install
    scripts/matrix.py                              installs what it needs into .venv/matrix first
    scripts/matrix.py --only inspector             cells whose client or server contains this

Exit codes: 0 all is well, 1 a cell failed, 2 usage, 3 the run itself broke off, 130 interrupted.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from prove import adopt_orphans, end_children

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPTS: Final = ROOT / "scripts"
CACHE: Final = ROOT / ".venv" / "matrix"
INSTALL_S: Final = 600.0
CELL_S: Final = 180.0  # for what takes ten seconds, on a machine that may be busy
SERVER_ENDS_S: Final = 3.0  # for a server whose client is gone; some never end by themselves
MODERN: Final = "2026-07-28"
RELAY_IDENTITY: Final = {"name": "checkpoint", "version": "0.0.0"}
IN_DOUBT: Final = 31001


class Wrong(Exception):
    """A finding: something is not as it is without the relay, or not as promised."""


class BrokenOff(Exception):
    """No finding about the relay: something hangs, or fails without it too."""


# ------------------------------------------------------------------------------------------------- what is installed


@dataclass(frozen=True)
class Environment:
    """Packages that are installed together, apart from all others."""

    name: str
    kind: str  # pip or npm
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def modules(self) -> Path:
        return self.folder / "node_modules"

    def install(self) -> str:
        """Installs what is missing; why that failed, or ""."""
        if self.kind == "npm" and not (shutil.which("node") and shutil.which("npm")):
            return "node or npm is not installed"
        stamp, wanted = self.folder / "installed", "\n".join(self.packages)
        if stamp.exists() and stamp.read_text("utf-8") == wanted:
            return ""
        where = self.folder.relative_to(ROOT)
        print(f"matrix.py: {self.kind} installs {' '.join(self.packages)} into {where}", file=sys.stderr, flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for words in self.commands():
            try:
                subprocess.run(
                    words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=INSTALL_S
                )
            except subprocess.TimeoutExpired:
                return f"{self.kind} did not install {' '.join(self.packages)} within {INSTALL_S:.0f} s"
            except subprocess.CalledProcessError as error:
                said = " ".join(line for line in error.stderr.splitlines() if "error" in line.lower())
                return f"{self.kind} could not install {' '.join(self.packages)}: {textwrap.shorten(said, 200)}"
        stamp.write_text(wanted, "utf-8")
        return ""

    def commands(self) -> list[list[str]]:
        if self.kind == "npm":
            flags = ["--no-save", "--no-package-lock", "--ignore-scripts", "--engine-strict", "--loglevel=error"]
            return [["npm", "install", "--prefix", str(self.folder), *flags, *self.packages]]
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return [[sys.executable, "-m", "venv", str(self.folder)], [*pip, *self.packages]]

    def version(self, package: str) -> str:
        """The version of one of its packages."""
        if self.kind == "npm":
            return str(json.loads((self.modules / package / "package.json").read_text("utf-8"))["version"])
        if self is OURS:
            return importlib.metadata.version(package)
        [found] = self.folder.glob(f"lib/*/site-packages/{package.replace('-', '_')}-[0-9]*.dist-info")
        return found.name.removesuffix(".dist-info").rpartition("-")[2]


OURS: Final = Environment("..", "pip", ("mcp>=2.3,<3", "mcp-server-git", "mcp-server-time"))  # scripts/install test
FIRST: Final = Environment("mcp1", "pip", ("mcp<2", "mcp-server-sqlite"))
SECOND: Final = Environment("mcp2", "pip", ("fastmcp", "mcp-server-fetch"))
SCOPE: Final = "@modelcontextprotocol"
NODE: Final = Environment(
    "node",
    "npm",
    tuple(
        f"{SCOPE}/{name}"
        for name in ("client@2", "sdk@1", *(f"server-{n}" for n in ("everything", "filesystem", "memory")))
    ),
)
INSPECTOR: Final = Environment("inspector", "npm", (f"{SCOPE}/inspector@0.15.0",))  # the last that runs on Node 20


# ----------------------------------------------------------------------------------------------------------- clients


INSPECTOR_NOTE: Final = (
    "Each step is a process of its own and sends no _meta. So it resumes under --unpinned matched, where a new call is "
    "refused while another is in doubt, and what kills the relay is --crash-at mid_upstream."
)


@dataclass(frozen=True)
class Client:
    """One way in which a client is used."""

    name: str
    package: str
    mode: str
    home: Environment
    is_quick: bool = False
    note: str = ""  # what must be said of its cells

    @property
    def can_pin(self) -> bool:
        return self.home is not INSPECTOR

    def words(self, command: Sequence[str], env: Mapping[str, str], *, in_depth: bool = False) -> list[str]:
        """The command of a driver that connects this client to a server."""
        plan: dict[str, Any] = {"command": list(command), "env": dict(env), "mode": self.mode}
        if self.home.kind == "pip":
            python = sys.executable if self.home is OURS else self.home.python
            return [python, str(SCRIPTS / "matrix_client.py"), json.dumps(plan)]
        sdk = self.package.removeprefix(f"{SCOPE}/")
        plan |= {"modules": str(self.home.modules), "sdk": sdk, "inDepth": in_depth}
        return ["node", str(SCRIPTS / "matrix_client.mjs"), json.dumps(plan)]


CLIENTS: Final = (
    Client("python mcp 2, auto", "mcp", "auto", OURS, is_quick=True),
    Client("python mcp 2, legacy", "mcp", "legacy", OURS, is_quick=True),
    Client(f"python mcp 2, {MODERN}", "mcp", MODERN, OURS),
    Client("python mcp 1", "mcp", "", FIRST),
    Client("npm client 2, auto", f"{SCOPE}/client", "auto", NODE),  # starts the command twice
    Client("npm client 2, legacy", f"{SCOPE}/client", "legacy", NODE),
    Client(f"npm client 2, {MODERN}", f"{SCOPE}/client", MODERN, NODE),
    Client("npm sdk 1", f"{SCOPE}/sdk", "", NODE),
    Client("npm inspector 0.15", f"{SCOPE}/inspector", "", INSPECTOR, note=INSPECTOR_NOTE),
)


# ----------------------------------------------------------------------------------------------------------- servers

Call = tuple[str, dict[str, Any]]

FASTMCP_SERVER: Final = """
import sys
from fastmcp import FastMCP

server = FastMCP("fastmcp", version="1")

@server.tool
def append(n: int) -> int:
    with open(sys.argv[1], "a") as ledger:
        return ledger.write(f"{n}\\n")

@server.tool
def lines() -> list[str]:
    with open(sys.argv[1]) as ledger:
        return ledger.read().splitlines()

server.run("stdio", show_banner=False)
"""


# Two commits of the same are the same commit.
DATES: Final = tuple((f"GIT_{who}_DATE", "1767312000 +0000") for who in ("AUTHOR", "COMMITTER"))


def git(folder: Path, *words: str) -> str:
    """Runs git; what it says."""
    env = {**os.environ, **dict(DATES)}
    return subprocess.run(["git", *words], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def make_repository(folder: Path) -> None:
    """One commit, and one file that the next will hold."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    for key, value in (("user.name", "Ada"), ("user.email", "ada@example.invalid"), ("commit.gpgsign", "false")):
        git(folder, "config", key, value)
    for name in ("old.txt", "new.txt"):
        (folder / name).write_text(f"{name}\n", "utf-8")
        git(folder, "add", name)
        if name == "old.txt":
            git(folder, "commit", "--quiet", "--message", "The first one")


def make_files(folder: Path) -> None:
    (folder / "a.txt").write_text("one\n", "utf-8")


def make_rows(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "rows.db")) as database:
        database.execute("CREATE TABLE charges (who TEXT, amount INTEGER)")


def commits(folder: Path) -> Any:
    return git(folder, "log", "--all", "--format=%H %s"), git(folder, "branch", "--format=%(refname)")


def files(folder: Path) -> Any:
    """Names, contents, and when each was written."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.name, path.read_text("utf-8"), path.stat().st_mtime_ns) for path in found]


def rows(folder: Path) -> Any:
    with contextlib.closing(sqlite3.connect(folder / "rows.db")) as database:
        return database.execute("SELECT * FROM charges").fetchall()


@dataclass(frozen=True)
class Server:
    """A server and calls of it. `@folder` is its own folder, `@python` and `@bin` are its environment's.

    `effect` has one that its ledger shows, `look` has none, and `doubtful` is the call in which the relay is killed.
    """

    name: str
    home: Environment
    words: tuple[str, ...]
    effect: Call | None = None
    look: Call | None = None
    doubtful: Call | None = None
    prepare: Callable[[Path], None] = lambda folder: None
    ledger: Callable[[Path], Any] | None = None
    keeps: str = "-"  # what the ledger is
    env: tuple[tuple[str, str], ...] = ()
    is_legacy: bool = False  # knows no era but those with a handshake
    is_quick: bool = False
    volatile: str = "(?!)"  # what of its answers differs between two calls

    def placed(self, value: Any, folder: Path) -> Any:
        """A value of this table with its names filled in."""
        python = sys.executable if self.home is OURS else self.home.python
        text = json.dumps(value)
        for name, meant in (("@folder", folder), ("@python", python), ("@bin", self.home.modules / ".bin")):
            text = text.replace(name, str(meant))
        return json.loads(text)


UTC: Final = {"timezone": "UTC"}
NOON: Final = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}

SERVERS: Final = (
    Server(
        "mcp-server-git",
        OURS,
        ("@python", "-m", "mcp_server_git", "--repository", "@folder"),
        effect=("git_commit", {"repo_path": "@folder", "message": "The second one"}),
        look=("git_log", {"repo_path": "@folder"}),
        doubtful=("git_create_branch", {"repo_path": "@folder", "branch_name": "doubtful"}),
        prepare=make_repository,
        ledger=commits,
        keeps="commits",
        env=DATES,
        is_quick=True,
    ),
    Server(
        "mcp-server-time",
        OURS,
        ("@python", "-m", "mcp_server_time", "--local-timezone=UTC"),
        effect=("get_current_time", UTC),
        look=("convert_time", NOON),
        doubtful=("get_current_time", {"timezone": "Asia/Tokyo"}),
        keeps="the clock",  # a replay says when the first call was made
        volatile=r"\d\d:\d\d:\d\d",
    ),
    Server("mcp-server-fetch", SECOND, ("@python", "-m", "mcp_server_fetch")),
    Server(
        "mcp-server-sqlite",
        FIRST,
        ("@python", "-c", "import mcp_server_sqlite as s; s.main()", "--db-path", "@folder/rows.db"),
        effect=("write_query", {"query": "INSERT INTO charges VALUES ('Ada', 10)"}),
        look=("read_query", {"query": "SELECT * FROM charges"}),
        doubtful=("write_query", {"query": "INSERT INTO charges VALUES ('Ben', 20)"}),
        prepare=make_rows,
        ledger=rows,
        keeps="rows",
        is_legacy=True,
    ),
    Server(
        "server-everything",
        NODE,
        ("node", "@bin/mcp-server-everything"),
        effect=("echo", {"message": "ünïcode \U0001f600"}),
        look=("get-structured-content", {"location": "Chicago"}),
        doubtful=("get-sum", {"a": 1, "b": 2}),
        is_legacy=True,
    ),
    Server(
        "server-filesystem",
        NODE,
        ("node", "@bin/mcp-server-filesystem", "@folder"),
        effect=("edit_file", {"path": "@folder/a.txt", "edits": [{"oldText": "one", "newText": "one\none"}]}),
        look=("read_text_file", {"path": "@folder/a.txt"}),
        doubtful=("write_file", {"path": "@folder/b.txt", "content": "two\n"}),
        prepare=make_files,
        ledger=files,
        keeps="files",
        is_legacy=True,
    ),
    Server(
        "server-memory",
        NODE,
        ("node", "@bin/mcp-server-memory"),
        effect=("create_entities", {"entities": [{"name": "Ada", "entityType": "person", "observations": ["first"]}]}),
        look=("read_graph", {}),
        doubtful=("add_observations", {"observations": [{"entityName": "Ada", "contents": ["second"]}]}),
        ledger=files,
        keeps="memory file",
        env=(("MEMORY_FILE_PATH", "@folder/memory.jsonl"),),
        is_legacy=True,
    ),
    Server(
        "fastmcp",
        SECOND,
        ("@python", "-c", FASTMCP_SERVER, "@folder/lines"),
        effect=("append", {"n": 1}),
        look=("lines", {}),
        doubtful=("append", {"n": 2}),
        ledger=files,
        keeps="a file",
    ),
)
NO_SUCH: Final[Call] = ("no_such_tool", {})
NEVER_CALLED: Final[Call] = ("another_tool", {})


# ------------------------------------------------------------------------------------------------------ conversations


class Talk:
    """A driver at work: one answer to each step. A context manager; the client is closed properly at the end."""

    def __init__(self, cell: "Cell", words: Sequence[str]) -> None:
        self._cell, self._rest = cell, b""
        with cell.log.open("ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._cell.left_s())
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def say(self, *step: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(step).encode("ascii") + b"\n")

    def hear(self) -> Any:
        """The next answer: `{"answer": ...}` or `{"error": ...}`."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], self._cell.left_s())[0]:
                raise BrokenOff(f"no answer within {CELL_S:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise BrokenOff("the client ended without an answer")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def ask(self, *step: Any) -> Any:
        self.say(*step)
        return self.hear()


class Inspections:
    """The same with the MCP Inspector, whose every step is a process of its own, and which cannot pin."""

    def __init__(self, cell: "Cell", command: Sequence[str], env: Mapping[str, str]) -> None:
        self._cell, self._config = cell, cell.folder / "inspector.json"
        entry = {"command": command[0], "args": list(command[1:]), "env": dict(env)}
        self._config.write_text(json.dumps({"mcpServers": {"it": entry}}), "utf-8")

    def __enter__(self) -> "Inspections":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, *step: Any) -> Any:
        program = INSPECTOR.modules / ".bin" / "mcp-inspector"
        words = ["node", str(program), "--cli", "--config", str(self._config), "--server", "it", "--method"]
        if step[0] == "list":
            words += ["tools/list"]
        else:
            _, tool, arguments, *_ = step
            words += ["tools/call", "--tool-name", tool]
            for key, value in arguments.items():
                words += ["--tool-arg", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        try:
            ended = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._cell.left_s(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokenOff(f"no answer within {CELL_S:.0f} s") from None
        with self._cell.log.open("a", encoding="utf-8") as log:
            log.write(ended.stderr)
        if ended.returncode == 0:
            return {"answer": json.loads(ended.stdout)}
        told = re.search(r"MCP error (-?\d+): (.*)", ended.stderr)
        return {"error": {"code": int(told[1]), "message": told[2]} if told else {"message": ended.stderr}}


# -------------------------------------------------------------------------------------------------------------- cells


@dataclass
class Result:
    """A cell of a table."""

    table: str
    row: str
    column: str
    outcome: str = ""  # ok, list, no era, n/a, FAILED or BROKEN
    note: str = ""
    seconds: float = 0.0
    cut_off_ran: bool | None = None  # whether the call that was cut off had its effect, where a ledger shows that


class Cell:
    """Where one pair meets: a folder, a journal, a deadline."""

    def __init__(self, folder: Path, relay: Sequence[str]) -> None:
        self.folder, self.relay = folder, relay
        self.world, self.journal, self.log = folder / "world", folder / "j.db", folder / "stderr"
        self.log.touch()
        self._ends_s = time.monotonic() + CELL_S

    def left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    def make_world(self, server: Server) -> None:
        """The server's folder as it is at first, under the same name each time, since answers contain it."""
        shutil.rmtree(self.world, ignore_errors=True)
        self.world.mkdir()
        server.prepare(self.world)

    def connect(self, client: Client, server: Server, flags: Sequence[str] | None = None) -> Talk | Inspections:
        """A client of the server, or with flags of a relay in front of it."""
        command: list[str] = server.placed(server.words, self.world)
        env = dict(server.placed(server.env, self.world))
        if flags is not None:
            upstream = ["--upstream-cmd", shlex.join(command)]
            command = [*self.relay, "--journal", str(self.journal), *flags, *upstream]
        if client.home is INSPECTOR:
            return Inspections(self, command, env)
        return Talk(self, client.words(command, env))

    def rows(self, what: str = "sequence, attempt, status FROM calls ORDER BY sequence") -> list[tuple[Any, ...]]:
        """What the journal holds, as any SQLite tool reads it."""
        if not self.journal.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True)) as database:
            return database.execute(f"SELECT {what}").fetchall()  # words of ours

    def owner(self) -> tuple[int, int]:
        """The relay that owns the journal, and its upstream."""
        owners: list[tuple[int, int]] = self.rows("pid, upstream_pid FROM owners ORDER BY epoch DESC LIMIT 1")
        if not owners:
            raise Wrong("calls were answered that are not on record")
        return owners[0]

    def wait_for_row(self, row: tuple[Any, ...]) -> None:
        while row not in self.rows():
            if not self.left_s():
                raise BrokenOff(f"waited in vain for {row} in the journal")
            time.sleep(0.005)


def as_relayed(value: Any) -> Any:
    """What the relay should make of it: the same, with its own name and version where the server gives its."""
    if isinstance(value, list):
        return [as_relayed(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {key: as_relayed(one) for key, one in value.items()}
    for key in ("serverInfo", "io.modelcontextprotocol/serverInfo"):
        if isinstance(made.get(key), dict):
            made[key] = {**made[key], **RELAY_IDENTITY}
    return made


def masked(value: Any, volatile: str) -> Any:
    return json.loads(re.sub(volatile, "~", json.dumps(value)))


def expect_equal(what: str, expected: Any, got: Any) -> None:
    """Raises with the first place where they differ."""
    if expected == got:
        return
    one, other = json.dumps(expected, sort_keys=True), json.dumps(got, sort_keys=True)
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, at - 60)
    raise Wrong(f"{what}: expected ...{one[begin : at + 120]}, got ...{other[begin : at + 120]}")


def session(talk: Talk | Inspections, calls: Sequence[Call], *, pins: bool) -> list[Any]:
    """Everything that a client learns, and the answers to its calls."""
    learned = [talk.hear()] if isinstance(talk, Talk) else []
    if learned and "error" in learned[0]:
        return learned
    learned.append(talk.ask("list"))
    return learned + [talk.ask("call", *call, pin if pins else None) for pin, call in enumerate(calls, start=1)]


class Pair:
    """A client and a server that meet in a cell."""

    def __init__(self, cell: Cell, client: Client, server: Server) -> None:
        self.cell, self.client, self.server = cell, client, server
        self.calls: list[Call] = [
            server.placed(call, cell.world) for call in (server.effect, server.look, NO_SUCH, server.doubtful) if call
        ]
        self.flags = () if client.can_pin else ("--unpinned", "matched")
        self.cut_off_ran: bool | None = None  # see Result

    def ledger(self) -> Any:
        """What the server has kept, or None where it keeps nothing."""
        return self.server.ledger(self.cell.world) if self.server.ledger else None

    def learn(self, calls: Sequence[Call], *, is_direct: bool) -> list[Any]:
        """All of a session."""
        with self.cell.connect(self.client, self.server, None if is_direct else self.flags) as talk:
            return session(talk, calls, pins=self.client.can_pin and not is_direct)

    def try_it(self, result: Result) -> None:
        """One cell of the first table."""
        is_refused = self.server.is_legacy and self.client.mode == MODERN
        is_in_full = len(self.calls) > 1 and not is_refused
        calls = self.calls[:-1] if is_in_full else self.calls
        self.cell.make_world(self.server)
        untouched = self.ledger()
        direct = self.learn(calls, is_direct=True)
        if is_in_full:
            self.check_direct(direct, has_effect=self.ledger() != untouched)
        elif is_refused and not any("error" in one for one in direct):
            raise BrokenOff(f"a server that is said to know no {MODERN} served it")
        self.cell.make_world(self.server)
        if is_in_full:
            self.resume(self.cut_off(direct))
            result.outcome, result.note, result.cut_off_ran = "ok", self.client.note, self.cut_off_ran
        else:
            expect_equal("relayed", as_relayed(direct), self.learn(calls, is_direct=False))
            result.outcome = "no era" if is_refused else "list"

    def check_direct(self, direct: Sequence[Any], *, has_effect: bool) -> None:
        """Raises if there is nothing to compare with: all but the last call must work."""
        for one in direct[:-1]:
            if one.get("answer", {"isError": True}).get("isError"):
                raise BrokenOff(f"fails without the relay too: {one}")
        if self.server.ledger and not has_effect:
            raise BrokenOff("the call that should have an effect has none")

    def cut_off(self, direct: Sequence[Any]) -> list[Any]:
        """A session with a relay that is killed in the middle of the last call; what was learned before that."""
        *calls, doubtful = self.calls
        with self.cell.connect(self.client, self.server, self.flags) as talk:
            learned = session(talk, calls, pins=self.client.can_pin)
            volatile = self.server.volatile
            expect_equal("relayed", masked(as_relayed(direct), volatile), masked(learned, volatile))
            effects = self.ledger()
            if isinstance(talk, Talk):
                upstream, heard = self.kill_outside(talk, doubtful)
        if isinstance(talk, Inspections):
            upstream, heard = self.kill_inside(doubtful)
        if "error" not in heard:
            raise Wrong(f"a call was answered though the relay died: {heard}")
        end_group(upstream)
        if self.server.ledger:
            self.cut_off_ran = self.ledger() != effects
        return learned

    def kill_outside(self, talk: Talk, doubtful: Call) -> tuple[int, Any]:
        """SIGKILL to the relay while its server is stopped; the server, and what the client hears of its call."""
        relay, upstream = self.cell.owner()
        os.killpg(upstream, signal.SIGSTOP)
        talk.say("call", *doubtful, len(self.calls))
        self.cell.wait_for_row((len(self.calls), 1, "PENDING"))
        os.kill(relay, signal.SIGKILL)
        os.killpg(upstream, signal.SIGCONT)
        return upstream, talk.hear()

    def kill_inside(self, doubtful: Call) -> tuple[int, Any]:
        """The same where nobody can come in between, since one process starts the server and makes the call."""
        with self.cell.connect(self.client, self.server, (*self.flags, "--crash-at", "mid_upstream")) as talk:
            heard = talk.ask("call", *doubtful)
        return self.cell.owner()[1], heard

    def resume(self, before: Sequence[Any]) -> None:
        """A second session with the same journal: replays, one doubt, and one new call."""
        effects, count = self.ledger(), len(self.calls)
        with self.cell.connect(self.client, self.server, self.flags) as talk:
            *after, doubtful = session(talk, self.calls, pins=self.client.can_pin)
            # What was called before is new at another place; without places only what never was.
            new = talk.ask("call", *(self.calls[1] if self.client.can_pin else NEVER_CALLED), count + 1)
        expect_equal("replayed", before, after)
        refused = doubtful.get("error", {})
        reason = (refused.get("data") or {}).get("checkpoint", {}).get("reason")  # the Inspector does not show it
        expect_equal("cut off", [IN_DOUBT, "in_doubt" if self.client.can_pin else None], [refused.get("code"), reason])
        # Where nothing new could be called, no relay has taken the journal over and put on record that the first died.
        statuses = ["COMPLETED" if "answer" in one else "FAILED" for one in after[1 - count :]]
        statuses += ["IN_DOUBT", "COMPLETED"] if self.client.can_pin else ["PENDING"]
        expect_equal("a new call", None if self.client.can_pin else IN_DOUBT, new.get("error", {}).get("code"))
        expect_equal("the journal", [(n, 1, status) for n, status in enumerate(statuses, start=1)], self.cell.rows())
        expect_equal("the ledger", effects, self.ledger())


def end_group(pgid: int) -> None:
    """Waits until the server whose relay was killed has ended, and sees to it if it does not."""
    ends_s = time.monotonic() + SERVER_ENDS_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < ends_s:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pgid, os.WNOHANG)  # on Linux it is ours now
            os.killpg(pgid, 0)
            time.sleep(0.01)
        os.killpg(pgid, signal.SIGKILL)


# -------------------------------------------------------------------------------------------------------------- depth


@dataclass(frozen=True)
class Era:
    """A client and a server that have all of an era, and what is tried: steps of scripts/matrix_client.mjs."""

    name: str
    client: Client
    server: Server
    features: Mapping[str, Sequence[list[Any]]]
    missing: Mapping[str, str] = field(default_factory=dict)  # features that nothing there has, and why


def call(tool: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> list[Any]:
    return ["call", tool, arguments or {}, None, options]


def request(method: str, **params: Any) -> list[Any]:
    return ["request", method, params]


TEXT: Final = "demo://resource/dynamic/text/1"
TOKEN: Final = {"progressToken": "p"}
RESEARCH: Final = {"topic": "python", "ambiguous": True}

HANDSHAKE_FEATURES: Final[dict[str, Sequence[list[Any]]]] = {
    # The first wait is for what this server sends of its own accord when a client comes.
    "roots": [["heard", 6], call("get-roots-list"), ["notify", "notifications/roots/list_changed"], ["heard", 2]],
    "progress": [call("trigger-long-running-operation", {"duration": 0.3, "steps": 3}, meta=TOKEN), ["heard", 3]],
    "logging": [
        request("logging/setLevel", level="debug"),
        call("toggle-simulated-logging"),
        ["heard", 1],
        call("toggle-simulated-logging"),
    ],
    "sampling": [call("trigger-sampling-request", {"prompt": "Hello", "maxTokens": 10}), ["heard", 1]],
    "elicitation": [call("trigger-elicitation-request"), ["heard", 1]],
    "resources": [
        request("resources/list"),
        request("resources/templates/list"),
        request("resources/read", uri=TEXT),
        request("resources/read", uri="demo://resource/none"),
        call("get-resource-links", {"count": 3}),
    ],
    "subscriptions": [
        request("resources/subscribe", uri=TEXT),
        call("toggle-subscriber-updates"),
        ["heard", 2],
        call("toggle-subscriber-updates"),
        request("resources/unsubscribe", uri=TEXT),
        ["heard", 1],
    ],
    "prompts": [
        request("prompts/list"),
        request("prompts/get", name="args-prompt", arguments={"city": "Rome"}),
        request("prompts/get", name="none"),
    ],
    "completion": [
        request(
            "completion/complete",
            ref={"type": "ref/prompt", "name": "completable-prompt"},
            argument={"name": "name", "value": "A"},
            context={"arguments": {"department": "Engineering"}},
        ),
    ],
    "tasks": [
        request("tools/call", name="simulate-research-query", arguments=RESEARCH, task={"ttl": 60000}),
        request("tasks/result", taskId="@task"),
        request("tasks/get", taskId="@task"),
        request("tasks/list"),
        request("tools/call", name="simulate-research-query", arguments=RESEARCH, task={"ttl": 60000}),
        request("tasks/cancel", taskId="@task"),
        request("tasks/get", taskId="@task"),
        request("tasks/get", taskId="none"),
        ["heard", 8],
    ],
    "cancel": [
        call("trigger-long-running-operation", {"duration": 2, "steps": 8}, meta=TOKEN, cancelAt=2),
        call("echo", {"message": "goes on"}),
    ],
}

MODERN_FEATURES: Final[dict[str, Sequence[list[Any]]]] = {
    "roots": [call("ask", {"what": "roots"}), ["heard", 1]],
    "progress": [call("work", {"steps": 3, "seconds": 0.3}, meta=TOKEN), ["heard", 3]],
    "logging": [call("log", meta={"io.modelcontextprotocol/logLevel": "info"}), ["heard", 1]],
    "sampling": [call("ask", {"what": "sample"}), ["heard", 1]],
    "elicitation": [call("ask", {"what": "elicit"}), ["heard", 1]],
    "resources": [
        request("resources/list"),
        request("resources/templates/list"),
        request("resources/read", uri="note://of/Ada"),
        request("resources/read", uri="note:none"),
    ],
    "subscriptions": [
        ["listen", {"toolsListChanged": True, "resourceSubscriptions": ["note://a"]}],
        call("touch"),
        ["heard", 2],
        ["unlisten"],
    ],
    "prompts": [
        request("prompts/list"),
        request("prompts/get", name="greet", arguments={"name": "Ada"}),
        request("prompts/get", name="none"),
    ],
    "completion": [
        request(
            "completion/complete",
            ref={"type": "ref/prompt", "name": "greet"},
            argument={"name": "name", "value": "Ad"},
        ),
    ],
    "cancel": [
        call("work", {"steps": 8, "seconds": 2}, meta=TOKEN, cancelAt=2),
        call("ask", {"what": "roots"}),
    ],
}

SDK1, NPM_MODERN = CLIENTS[7], CLIENTS[6]
EVERYTHING: Final = SERVERS[4]
MODERN_SERVER: Final = Server("matrix_server.py", OURS, ("@python", str(SCRIPTS / "matrix_server.py")))
ERAS: Final = (
    Era("2025-11-25", SDK1, EVERYTHING, HANDSHAKE_FEATURES),
    Era(
        MODERN,
        NPM_MODERN,
        MODERN_SERVER,
        MODERN_FEATURES,
        {"tasks": "the tasks extension is in neither official SDK's server"},
    ),
)
# Names of tasks, times, and a log message of a level that the server draws.
DEPTH_VOLATILE: Final = "|".join(
    (
        r"[0-9a-f]{32}",
        r"\d{4}-\d\d-\d\dT[\d:.]+Z",
        r"\d+:\d\d:\d\d [AP]M",
        r'(?<="level": ")\w+(?=", "data": "\w+[- ]level[- ]message")',
        r"\w+[- ]level[- ]message",
    )
)


ON_RECORD: Final = "every call on record"


def try_features(cell: Cell, era: Era, wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Feature by feature, in one session direct and one relayed: its name, and what differs or ""."""
    cell.make_world(era.server)
    words: list[str] = era.server.placed(era.server.words, cell.world)
    relayed = [*cell.relay, "--journal", str(cell.journal), "--upstream-cmd", shlex.join(words)]
    with (
        Talk(cell, era.client.words(words, {}, in_depth=True)) as one,
        Talk(cell, era.client.words(relayed, {}, in_depth=True)) as other,
    ):
        expect_equal("hello", as_relayed(one.hear()), other.hear())
        for name in wanted:
            pairs = [(step, as_relayed(one.ask(*step)), other.ask(*step)) for step in era.features[name]]
            try:
                for step, expected, got in pairs:
                    expect_equal(" ".join(map(str, step[:2])), settled(expected), settled(got))
                yield name, ""
            except Wrong as error:
                yield name, str(error)
    made = sum("tools/call" in step or step[0] == "call" for name in wanted for step in era.features[name])
    recorded = len(cell.rows())
    yield ON_RECORD, "" if made == recorded else f"{made} calls were made, {recorded} are in the journal"


def settled(value: Any) -> Any:
    """A value without what differs between any two sessions. Messages of different methods have no order."""
    value = masked(value, DEPTH_VOLATILE)
    if isinstance(value.get("answer"), list):
        value["answer"].sort(key=lambda message: message["method"])
    return value


# ---------------------------------------------------------------------------------------------------------- the whole


class Matrix:
    """The run: which cells, what became of each, and the line that shows how far we are."""

    def __init__(self, folder: Path, relay: Sequence[str], only: str, *, is_quick: bool) -> None:
        self.folder, self.relay, self.only, self.is_quick = folder, relay, only, is_quick
        self.results: list[Result] = []
        self._why_missing: dict[str, str] = {}
        self._shows_progress = sys.stderr.isatty()

    def pairs(self) -> list[tuple[Client, Server]]:
        return [
            (client, server)
            for client in CLIENTS
            for server in SERVERS
            if (client.is_quick and server.is_quick) or not self.is_quick
            if self.is_wanted(f"{client.name} {server.name}")
        ]

    def features(self, era: Era) -> list[str]:
        return [name for name in HANDSHAKE_FEATURES if not self.is_quick if self.is_wanted(f"{era.name} {name}")]

    def is_wanted(self, name: str) -> bool:
        return self.only in name

    def missing(self, *homes: Environment) -> str:
        """Why one of them is not there, or "". Installs what is needed for the first time."""
        for home in homes:
            if home is not OURS and home.name not in self._why_missing:
                self._why_missing[home.name] = home.install()
        return next((why for home in homes if (why := self._why_missing.get(home.name, ""))), "")

    def run(self) -> None:
        for client, server in self.pairs():
            result = Result("pairs", client.name, server.name)
            with self.cell(result, client.home, server.home) as cell:
                if cell:
                    Pair(cell, client, server).try_it(result)
        for era in ERAS:
            if wanted := self.features(era):
                self.run_depth(era, wanted)

    def run_depth(self, era: Era, wanted: Sequence[str]) -> None:
        tried = [name for name in wanted if name in era.features]
        found: dict[str, str] = {}
        whole = Result("depth", "all", era.name)
        with self.cell(whole, era.client.home, era.server.home, keep=False) as cell:
            if cell:
                found.update(try_features(cell, era, tried))
        for name in (*wanted, ON_RECORD):
            result = Result("depth", name, era.name, whole.outcome, whole.note)
            if name in found:
                result.outcome, result.note = ("FAILED", found[name]) if found[name] else ("ok", "")
            elif name in era.missing:
                result.outcome, result.note = "n/a", era.missing[name]
            self.results.append(result)

    @contextlib.contextmanager
    def cell(self, result: Result, *homes: Environment, keep: bool = True) -> Iterator[Cell | None]:
        """A place to try something, or none with the reason in the result; what goes wrong there goes into it too."""
        if keep:
            self.results.append(result)
        began_s = time.monotonic()
        if why := self.missing(*homes):
            result.outcome, result.note = "n/a", why
            yield None
            return
        self.progress(result)
        folder = Path(tempfile.mkdtemp(prefix="cell-", dir=self.folder))
        try:
            yield Cell(folder, self.relay)
        except (Wrong, BrokenOff) as error:
            result.outcome = "FAILED" if isinstance(error, Wrong) else "BROKEN"
            result.note = f"{error}\n{tail(folder / 'stderr')}".rstrip()
        finally:
            end_children()
            shutil.rmtree(folder, ignore_errors=True)
            result.seconds = round(time.monotonic() - began_s, 1)
            self.clear_progress()

    def progress(self, result: Result) -> None:
        """Overwrites one line on a terminal."""
        if self._shows_progress:
            total = len(self.pairs()) + sum(len(self.features(era)) + 1 for era in ERAS if self.features(era))
            sys.stderr.write(f"\r\x1b[K{len(self.results)} of {total}: {result.row}, {result.column}")
            sys.stderr.flush()

    def clear_progress(self) -> None:
        if self._shows_progress:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def tail(path: Path) -> str:
    """The last lines of what the processes of a cell said on stderr."""
    return "\n".join(f"    {line}" for line in path.read_text("utf-8", "replace").splitlines()[-4:])


# ---------------------------------------------------------------------------------------------------------- the table


class Notes:
    """Footnotes: equal ones share a number."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def mark(self, result: Result) -> str:
        if not result.note:
            return result.outcome
        if result.note not in self._notes:
            self._notes.append(result.note)
        return f"{result.outcome} [{self._notes.index(result.note) + 1}]"

    def numbered(self) -> list[tuple[str, str]]:
        return [(f"[{n}]", note) for n, note in enumerate(self._notes, start=1)]


def table(results: Sequence[Result], corner: str, second: Mapping[str, str], notes: Notes) -> list[str]:
    """Rows against columns; the second line of the head comes from `second`."""
    columns, heads = (list(dict.fromkeys(names)) for names in zip(*((r.column, r.row) for r in results), strict=True))
    cells = {(one.row, one.column): notes.mark(one) for one in results}
    lines = [[corner, *columns], ["", *(second.get(column, "") for column in columns)]]
    lines += [[head, *(cells.get((head, column), "") for column in columns)] for head in heads]
    lines = [[text.removeprefix("mcp-server-").removeprefix("server-") for text in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


LEGEND: Final = {
    "ok": "list and calls are equal, direct and relayed. After SIGKILL to the relay in the middle of a call every "
    "answer is replayed, that call is refused as in doubt, and the server's ledger stays as it is",
    "list": "identity, list and a call that fails are equal; its other calls need a network",
    "no era": "the server does not know the era that the client insists on: refused alike, direct and relayed",
    "n/a": "not tried",
    "FAILED": "differs from what it is without the relay, or from what was promised",
    "BROKEN": "could not be tried: hangs, or fails without the relay too",
}


def show(matrix: Matrix, seconds: float) -> None:
    """Prints what was found."""
    notes, results = Notes(), matrix.results
    for name, corner, second in (
        ("pairs", "client, how it connects", {server.name: server.keeps for server in SERVERS}),
        ("depth", "through the relay as direct", {era.name: era.server.name for era in ERAS}),
    ):
        if found := [result for result in results if result.table == name]:
            print("\n".join(table(found, corner, second, notes)), end="\n\n")
    counts = Counter(result.outcome for result in results)
    for mark, meaning in [*notes.numbered(), *(item for item in LEGEND.items() if item[0] in counts)]:
        folded = "\n".join(textwrap.fill(line, 112) for line in meaning.splitlines())
        print(f"{mark:8}{textwrap.indent(folded, ' ' * 8).lstrip()}")
    cut = [one.cut_off_ran for one in results if one.cut_off_ran is not None]
    if cut:
        print(f"\nOf {len(cut)} calls that were cut off and that a ledger shows, {sum(cut)} had run all the same.")
    print(f"\n{len(results)} cells in {seconds:.0f} s: " + ", ".join(f"{n} {name}" for name, n in counts.items()))


def versions(matrix: Matrix) -> str:
    """What was tried, for the head of the table."""
    pairs = matrix.pairs()
    clients = {(client.home, client.package) for client, _ in pairs}
    servers = {(server.home, f"{SCOPE}/" * (server.home.kind == "npm") + server.name) for _, server in pairs}
    found = [
        f"{package.removeprefix(f'{SCOPE}/')} {home.version(package)}"
        for home, package in (*sorted(clients, key=str), *sorted(servers, key=str))
        if not matrix.missing(home)
    ]
    return textwrap.fill(", ".join([f"Python {platform.python_version()}", *found]), 120, break_on_hyphens=False)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the Python client with one server, in half a minute")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose row or column contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--relay", help=argparse.SUPPRESS)  # another relay, to see that the judge sees
    return parser


def main() -> int:
    """Runs and prints; the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if importlib.util.find_spec("mcp") is None:  # not started with the Python that has the test packages
        subprocess.run([str(SCRIPTS / "install"), "test"], check=True)
        os.execv(ROOT / ".venv" / "bin" / "python", ["python", __file__, *sys.argv[1:]])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    adopt_orphans()
    relay = shlex.split(args.relay) if args.relay else [sys.executable, str(ROOT)]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="checkpoint-matrix-") as folder:
        matrix = Matrix(Path(folder).resolve(), relay, args.only, is_quick=args.quick)
        if not matrix.pairs() and not any(map(matrix.features, ERAS)):
            parser.error(f"no cell contains {args.only!r}")
        try:
            matrix.run()
        except KeyboardInterrupt:
            matrix.clear_progress()
            print("matrix.py: interrupted", file=sys.stderr)
            return 130
        except Exception:  # a fault of ours must not look like a finding
            matrix.clear_progress()
            traceback.print_exc()
            return 3
        finally:
            end_children()
    seconds = round(time.monotonic() - began_s, 1)
    is_bad = any(result.outcome in ("FAILED", "BROKEN") for result in matrix.results)
    if args.json:
        cells = [asdict(result) for result in matrix.results]
        facts = {"versions": versions(matrix), "seconds": seconds, "is_bad": is_bad, "cells": cells}
        print(json.dumps(facts, indent=2))
    else:
        print(f"{versions(matrix)}\n")
        show(matrix, seconds)
    return 1 if is_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
