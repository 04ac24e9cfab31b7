"""The official SDK's client through the relay, in front of servers that people use, in both eras.

Servers: mcp-server-git and mcp-server-time (PyPI), @modelcontextprotocol/server-filesystem (npm, on Node). The last is
looked for in $CHECKPOINT_NODE_MODULES, else in node_modules here; its tests are skipped where it is not installed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import RequestParamsMeta
from support import ROOT, node_server, rows

DEADLINE_S: Final = 60
AS_THE_SERVER: Final = ("--name", "", "--version", "")  # the only thing that differs from a direct connection

Call = tuple[str, dict[str, Any]]


@asynccontextmanager
async def connected(words: Sequence[str], mode: str) -> AsyncIterator[Client]:
    """A client that has started `words` and is ready to call."""
    with anyio.fail_after(DEADLINE_S):
        async with Client(StdioServerParameters(command=words[0], args=list(words[1:])), mode=mode) as client:
            yield client


def pin(seq: int) -> RequestParamsMeta:
    """The place of a call, as an agent names it."""
    return cast(RequestParamsMeta, {"checkpoint_seq": seq})


async def ask(client: Client, call: Call, seq: int | None = None) -> dict[str, Any]:
    """The answer to one call, be it a result or an error."""
    try:
        answer = await client.call_tool(*call, meta=pin(seq) if seq is not None else None)
    except MCPError as error:
        return {"error": error.error.model_dump(mode="json")}
    return answer.model_dump(mode="json")


def relayed(journal: Path, server: Sequence[str], *flags: str) -> list[str]:
    """The command of the relay in front of a server."""
    return [sys.executable, str(ROOT), "--journal", str(journal), *flags, "--", *server]


def kill_relay(journal: Path) -> None:
    """SIGKILL to the process that owns a journal."""
    os.kill(int(Path(f"{journal}.lock").read_text("ascii")), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- servers


def git(folder: Path, *words: str) -> str:
    """Runs git; what it says."""
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and one file that is in none."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    for key, value in (("user.name", "Ada"), ("user.email", "ada@example.invalid"), ("commit.gpgsign", "false")):
        git(folder, "config", key, value)
    (folder / "old.txt").write_text("old\n", encoding="utf-8")
    git(folder, "add", "old.txt")
    git(folder, "commit", "--quiet", "--message", "The first one")
    (folder / "new.txt").write_text("new\n", encoding="utf-8")
    return folder


def git_server(repository: Path) -> list[str]:
    return [sys.executable, "-m", "mcp_server_git", "--repository", str(repository)]


def time_server() -> list[str]:
    return [sys.executable, "-m", "mcp_server_time", "--local-timezone=UTC"]


def filesystem_server(folder: Path) -> list[str]:
    return [*node_server("filesystem"), str(folder)]


# -------------------------------------------------------------------------------------------------------- transparency


def check_equal_to_direct(server: Sequence[str], mode: str, journal: Path, calls: Sequence[Call]) -> None:
    """The same session, direct and through the relay: what the client learns must not differ."""

    async def hold(words: Sequence[str]) -> list[Any]:
        async with connected(words, mode) as client:
            identity = (client.protocol_version, client.server_info, client.server_capabilities, client.instructions)
            tools = await client.list_tools()
            return [identity, tools, *[await ask(client, call) for call in calls]]

    direct = anyio.run(hold, server)
    assert anyio.run(hold, relayed(journal, server, *AS_THE_SERVER)) == direct
    assert [row["tool_name"] for row in rows(journal)] == [name for name, _ in calls]


@pytest.mark.parametrize("mode", ["auto", "legacy", "2026-07-28"])
def test_a_session_with_git_is_the_same_through_the_relay(mode: str, repository: Path, tmp_path: Path) -> None:
    path = str(repository)
    calls: list[Call] = [
        ("git_status", {"repo_path": path}),
        ("git_log", {"repo_path": path, "max_count": 5}),
        ("git_show", {"repo_path": path, "revision": "nonexistent"}),
        ("git_log", {"repo_path": 5}),
        ("no_such_tool", {}),
    ]
    check_equal_to_direct(git_server(repository), mode, tmp_path / "j.db", calls)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_session_with_the_clock_is_the_same_through_the_relay(mode: str, tmp_path: Path) -> None:
    # Only calls whose answer does not depend on the day.
    nowhere = {"timezone": "Nowhere/Atlantis"}
    never = {"source_timezone": "UTC", "time": "25:99", "target_timezone": "Europe/Berlin"}
    calls: list[Call] = [("get_current_time", nowhere), ("convert_time", never)]
    check_equal_to_direct(time_server(), mode, tmp_path / "j.db", calls)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_session_with_the_file_system_is_the_same_through_the_relay(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.txt").write_text("ünïcode \U0001f600\n", encoding="utf-8")
    calls: list[Call] = [
        ("list_allowed_directories", {}),
        ("read_text_file", {"path": str(folder / "a.txt")}),
        ("read_text_file", {"path": "/etc/passwd"}),
        ("list_directory", {"path": str(folder)}),
    ]
    check_equal_to_direct(filesystem_server(folder), mode, tmp_path / "j.db", calls)


# ---------------------------------------------------------------------------------------------------------- resumption


async def run_until_killed(words: Sequence[str], mode: str, journal: Path, calls: Sequence[Call]) -> list[Any]:
    """An agent that pins its calls; once the last one is answered the relay is killed, and the agent learns of it."""
    async with connected(words, mode) as client:
        answers = [await ask(client, call, seq) for seq, call in enumerate(calls, start=1)]
        kill_relay(journal)
        with pytest.raises(MCPError):
            await client.call_tool(*calls[-1], meta=pin(len(calls)))
    return answers


async def run_to_the_end(words: Sequence[str], mode: str, calls: Sequence[Call]) -> list[Any]:
    async with connected(words, mode) as client:
        await client.list_tools()
        return [await ask(client, call, seq) for seq, call in enumerate(calls, start=1)]


@pytest.mark.parametrize(
    ("first_mode", "second_mode"),
    [
        ("auto", "auto"),
        ("legacy", "legacy"),
        ("2026-07-28", "2026-07-28"),
        ("legacy", "2026-07-28"),
        ("2026-07-28", "legacy"),
    ],
)
def test_an_agent_of_the_sdk_resumes_and_commits_once(
    first_mode: str, second_mode: str, repository: Path, tmp_path: Path
) -> None:
    path = str(repository)
    calls: list[Call] = [
        ("git_add", {"repo_path": path, "files": ["new.txt"]}),
        ("git_commit", {"repo_path": path, "message": "The second one"}),
        ("git_create_branch", {"repo_path": path, "branch_name": "feature"}),
        ("git_log", {"repo_path": path}),
    ]
    journal = tmp_path / "j.db"
    words = relayed(journal, git_server(repository))
    before = anyio.run(run_until_killed, words, first_mode, journal, calls[:3])
    after = anyio.run(run_to_the_end, words, second_mode, calls)
    assert not any("error" in answer or answer["is_error"] for answer in after)
    if first_mode == second_mode:
        assert after[:3] == before
    else:  # who answers is said in another place in each era
        assert [answer["content"] for answer in after[:3]] == [answer["content"] for answer in before]
    # The server would have committed again: it makes a commit even of nothing.
    assert git(repository, "log", "--format=%s").splitlines() == ["The second one", "The first one"]
    assert git(repository, "branch", "--format=%(refname:short)").splitlines() == ["feature", "main"]
    assert after[3]["content"][0]["text"].count("Message:") == 2


def test_an_agent_of_the_sdk_resumes_and_writes_once(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "b.txt").write_text("one\n", encoding="utf-8")
    calls: list[Call] = [
        ("write_file", {"path": str(folder / "a.txt"), "content": "written by the agent\n"}),
        ("edit_file", {"path": str(folder / "b.txt"), "edits": [{"oldText": "one\n", "newText": "one\ntwo\n"}]}),
        ("read_text_file", {"path": str(folder / "b.txt")}),
        ("list_directory", {"path": str(folder)}),
    ]
    journal = tmp_path / "j.db"
    words = relayed(journal, filesystem_server(folder))
    before = anyio.run(run_until_killed, words, "legacy", journal, calls[:3])
    # A second write would undo what somebody else has done since.
    (folder / "a.txt").write_text("written by somebody else\n", encoding="utf-8")
    after = anyio.run(run_to_the_end, words, "legacy", calls)
    assert after[:3] == before
    assert not any("error" in answer or answer["is_error"] for answer in after)
    assert (folder / "a.txt").read_text("utf-8") == "written by somebody else\n"
    assert (folder / "b.txt").read_text("utf-8") == "one\ntwo\n"
    assert "[FILE] a.txt" in after[3]["content"][0]["text"]
