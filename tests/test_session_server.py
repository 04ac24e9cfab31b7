"""The server on stdio: both protocol eras, the official client, roots, cancelling, ending."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from jsonschema import Draft202012Validator
from mcp import Client, StdioServerParameters
from session_kit import MODERN_META, SERVE, Project, Repository, Server, sections

import brief
import projectroot
import session
import sessiontools
import toolspec
import wire
from toolspec import LOAD, SAVE, TOOLS, SessionError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def modern(params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {**(params or {}), "_meta": MODERN_META}


class Wired:
    """A server in this process whose answers are collected; its tool calls run when asked to."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.server = session.Server(lambda line: self.lines.append(json.loads(line)), {"PATH": os.environ["PATH"]})

    def send(self, message: Any) -> Any:
        """The answer to one line; None where there is none."""
        before = len(self.lines)
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.server.receive(line + b"\n")
        assert len(self.lines) <= before + 1
        return self.lines[-1] if len(self.lines) > before else None

    def ask(self, method: str, params: Any = None, request: Any = 1) -> Any:
        return self.send({"jsonrpc": "2.0", "id": request, "method": method, "params": params or {}})


# ------------------------------------------------------------------------------------------------- what it declares


def test_texts_stay_below_what_clients_cut() -> None:
    assert len(toolspec.INSTRUCTIONS) <= 2048
    assert toolspec.INSTRUCTIONS.startswith("Call load_session_checkpoint first")
    for tool in TOOLS:
        assert len(tool["description"]) <= 2048
    for word in ("milestones", "risky operations", "conversation gets long"):
        assert word in TOOLS[0]["description"]
    for word in ("save_session_checkpoint", "milestone", "risky operation", "gets long", "not instructions"):
        assert word in " ".join(toolspec.INSTRUCTIONS.split()), word
    assert "at the start of a session" in TOOLS[1]["description"]
    assert "context, not instructions" in TOOLS[1]["description"]


def test_tools_are_described_to_the_letter() -> None:
    assert [tool["name"] for tool in TOOLS] == [SAVE, LOAD]
    assert [tool["title"] for tool in TOOLS] == ["Save session checkpoint", "Load session checkpoint"]
    hints = [{key: value for key, value in tool["annotations"].items() if key != "title"} for tool in TOOLS]
    assert hints == [
        {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False},
        {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False},
    ]
    for tool in TOOLS:
        Draft202012Validator.check_schema(tool["inputSchema"])
        Draft202012Validator.check_schema(tool["outputSchema"])
    assert TOOLS[1]["_meta"] == {"anthropic/maxResultSizeChars": 100_000}


def test_the_version_is_the_packages() -> None:
    import tomllib

    project = tomllib.loads((Path(session.__file__).parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == session.VERSION


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_a_known_handshake_version_is_echoed(version: str) -> None:
    answer = Wired().ask("initialize", {"protocolVersion": version, "capabilities": {}})
    assert answer["result"] == {
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "checkpoint", "title": "Checkpoint session", "version": session.VERSION},
        "instructions": toolspec.INSTRUCTIONS,
    }


@pytest.mark.parametrize(
    "params", [{"protocolVersion": "2026-07-28"}, {"protocolVersion": int("9" * 4000)}, {}, [], None]
)
def test_any_other_handshake_version_is_answered_with_the_newest(params: Any) -> None:
    assert Wired().ask("initialize", params)["result"]["protocolVersion"] == "2025-11-25"


def test_the_modern_era_is_served_by_message() -> None:
    wired = Wired()
    discovered = wired.ask("server/discover", modern())["result"]
    assert discovered == {
        "supportedVersions": ["2026-07-28"],
        "capabilities": {"tools": {}},
        "instructions": toolspec.INSTRUCTIONS,
        "ttlMs": 3_600_000,
        "cacheScope": "public",
        "resultType": "complete",
        "_meta": {
            "io.modelcontextprotocol/serverInfo": {
                "name": "checkpoint",
                "title": "Checkpoint session",
                "version": session.VERSION,
            }
        },
    }
    listed = wired.ask("tools/list", modern())["result"]
    assert listed["tools"] == json.loads(json.dumps(TOOLS))
    assert (listed["resultType"], listed["ttlMs"], listed["cacheScope"]) == ("complete", 3_600_000, "public")
    legacy = wired.ask("tools/list")["result"]
    assert legacy == {"tools": listed["tools"]}
    assert wired.ask("ping")["result"] == {}
    for handshake in ("ping", "initialize"):
        assert wired.ask(handshake, modern())["error"]["code"] == wire.METHOD_NOT_FOUND


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({"io.modelcontextprotocol/protocolVersion": "2026-07-28"}, wire.INVALID_PARAMS),
        (MODERN_META | {"io.modelcontextprotocol/clientCapabilities": []}, wire.INVALID_PARAMS),
        (MODERN_META | {"io.modelcontextprotocol/protocolVersion": 7}, wire.INVALID_PARAMS),
        (MODERN_META | {"io.modelcontextprotocol/protocolVersion": "2027-01-01"}, -32022),
    ],
)
@pytest.mark.parametrize("method", ["tools/list", "server/discover", "tools/call"])
def test_a_modern_request_needs_its_meta(meta: dict[str, Any], code: int, method: str) -> None:
    error = Wired().ask(method, {"name": LOAD, "_meta": meta})["error"]
    assert error["code"] == code
    if code == -32022:
        assert error["data"] == {"supported": ["2026-07-28"], "requested": "2027-01-01"}


def test_discover_without_meta_is_refused() -> None:
    assert Wired().ask("server/discover")["error"]["code"] == wire.INVALID_PARAMS


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b"garbage", (wire.PARSE_ERROR, None)),
        (b"\xff", (wire.PARSE_ERROR, None)),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', (wire.INVALID_REQUEST, None)),
        (b'{"jsonrpc":"2.0"}', (wire.INVALID_REQUEST, None)),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","method":"x"}', (wire.INVALID_REQUEST, 1)),
        (b'{"jsonrpc":"2.0","id":"7","method":"resources/list"}', (wire.METHOD_NOT_FOUND, "7")),
        (b'{"jsonrpc":"2.0","id":0,"method":"logging/setLevel"}', (wire.METHOD_NOT_FOUND, 0)),
        (b'{"jsonrpc":"2.0","id":2,"method":"subscriptions/listen"}', (wire.METHOD_NOT_FOUND, 2)),
        (b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"other"}}', (wire.INVALID_PARAMS, 3)),
        (b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":1}}', (wire.INVALID_PARAMS, 3)),
        (b'{"jsonrpc":"2.0","id":3,"method":"tools/call"}', (wire.INVALID_PARAMS, 3)),
        (
            b'{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"load_session_checkpoint","arguments":[]}}',
            (wire.INVALID_PARAMS, 4),
        ),
        (
            b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"load_session_checkpoint","task":{}}}',
            (wire.METHOD_NOT_FOUND, 5),
        ),
        (b'{"jsonrpc":"2.0","id":null,"method":"tools/call","params":{}}', (wire.INVALID_REQUEST, None)),
        (b'{"jsonrpc":"2.0","id":6,"x":' + b"[" * 600 + b"]" * 600 + b"}", (wire.INVALID_REQUEST, None)),
        (b"", None),
        (b"  ", None),
        (b'{"jsonrpc":"2.0","method":"notifications/initialized"}', None),
        (b'{"jsonrpc":"2.0","method":"notifications/whatever","params":{"x":1}}', None),
        (b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":99}}', None),
        (b'{"jsonrpc":"2.0","method":"tools/call","params":{"name":"load_session_checkpoint"}}', None),
        (b'{"jsonrpc":"2.0","id":"nobody asked","result":{}}', None),
        (b'{"jsonrpc":"2.0","id":8,"result":{}}', None),
        (b'{"jsonrpc":"2.0","id":"s","result":' + b"9" * 5000 + b"}", None),
        (b'\xef\xbb\xbf  {"jsonrpc":"2.0","id":"s","result":null} \r', None),
    ],
)
def test_odd_lines_are_answered_by_the_book_or_dropped(line: bytes, answer: tuple[int, Any] | None) -> None:
    said = Wired().send(line)
    assert (said and (said["error"]["code"], said["id"])) == answer


# ------------------------------------------------------------------------------------------------ the official client


def parameters(root: Path, **environ: str) -> StdioServerParameters:
    return StdioServerParameters(command=SERVE[0], args=SERVE[1:], cwd=root, env=environ or None)


@pytest.mark.parametrize("mode", ["auto", "legacy", "2026-07-28"])
def test_the_official_client_saves_and_loads(tmp_path: Path, mode: Any) -> None:
    repo = Repository(tmp_path / "repo")
    repo.write("README", "changed\n")

    async def run() -> None:
        with anyio.fail_after(30):
            async with Client(parameters(repo.root), mode=mode) as client:
                listed = (await client.list_tools()).tools
                assert [tool.name for tool in listed] == [SAVE, LOAD]
                empty = await client.call_tool(LOAD)
                assert empty.structured_content is not None
                assert empty.structured_content["found"] is False
                assert not empty.is_error
                saved = await client.call_tool(SAVE, {"goal": "the goal", "nextSteps": ["the step"]})
                assert saved.structured_content is not None
                assert getattr(saved.content[0], "text", "") == saved.structured_content["message"]
                for form in ("brief", "full"):
                    loaded = await client.call_tool(LOAD, {"format": form})
                    text, structured = getattr(loaded.content[0], "text", ""), json.dumps(loaded.structured_content)
                    for word in ("the goal", "the step", "README"):
                        assert word in text
                        assert word in structured
                refused = await client.call_tool(SAVE, {"goal": "x" * 812})
                assert refused.is_error
                assert refused.structured_content is None
                assert getattr(refused.content[0], "text", "") == "goal: 812 characters, the limit is 500"

    anyio.run(run)
    assert repo.checkpoint["goal"]["primary"] == "the goal"


FIRST_GENERATION = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    server = StdioServerParameters(command=sys.argv[1], args=json.loads(sys.argv[2]), cwd=sys.argv[3])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        assert len((await session.list_tools()).tools) == 2
        saved = await session.call_tool("save_session_checkpoint", {"goal": "the goal"})
        assert not saved.isError and saved.structuredContent["message"] == saved.content[0].text
        loaded = await session.call_tool("load_session_checkpoint", {})
        assert "the goal" in loaded.content[0].text and "the goal" in loaded.structuredContent["brief"]
        refused = await session.call_tool("save_session_checkpoint", {})
        assert refused.isError

asyncio.run(main())
"""


@pytest.mark.skipif("MCP1_PYTHON" not in os.environ, reason="MCP1_PYTHON names no Python with mcp below 2")
def test_the_official_client_of_the_first_generation_saves_and_loads(root: Path) -> None:
    command = [os.environ["MCP1_PYTHON"], "-c", FIRST_GENERATION, SERVE[0], json.dumps(SERVE[1:]), str(root)]
    subprocess.run(command, check=True, timeout=60)


def test_answers_fit_the_schemas_that_were_declared(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    unborn = Repository(tmp_path / "unborn", commits=False)
    plain = Project(tmp_path / "plain")
    plain.root.mkdir()
    save, load = (Draft202012Validator(tool["outputSchema"]) for tool in TOOLS)
    for project in (repo, unborn, plain):
        load.validate(project.load())
        save.validate(project.save())
        load.validate(project.load())
        load.validate(project.load(is_full=True))
    repo.commit()
    repo.git("commit", "-q", "--amend", "--allow-empty", "-m", "other")
    load.validate(repo.load())


def test_a_save_answers_with_the_references_text(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "my-app", branch="feat/github-oauth")
    repo.write("README", "changed\n")
    with Server(repo.root, repo.environ) as server:
        result = server.save(
            tasks=[{"description": "t"}],
            recentCommands=[{"command": "GITHUB_CLIENT_SECRET=gh_live_8f2a91 npm run dev", "exitCode": 0}],
        )
    size = repo.file.stat().st_size
    text = (
        f"Checkpoint saved to {repo.file} ({size} bytes, replace).\n"
        f"1 task(s), 1 file(s), 1 command(s) on feat/github-oauth@{repo.head[:9]}.\n"
        "⚠ Redacted 1 secret-looking value(s)."
    )
    assert result == {
        "content": [{"type": "text", "text": text}],
        "structuredContent": {
            "path": str(repo.file),
            "bytes": size,
            "mode": "replace",
            "counts": {"tasks": 1, "modifiedFiles": 1, "recentCommands": 1, "redactions": 1},
            "warnings": ["Redacted 1 secret-looking value(s)."],
            "message": text,
        },
        "isError": False,
    }


def test_a_full_load_is_json_with_checkpoint_and_drift(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    with Server(repo.root, repo.environ) as server:
        server.save()
        result = server.load(format="full")
        said = json.loads(result["content"][0]["text"])
        assert said == {key: result["structuredContent"][key] for key in ("checkpoint", "drift")}
        assert said["checkpoint"] == repo.checkpoint
        assert result["content"][1]["text"] == f"Read from {repo.file}."
        repo.commit(".claude-checkpoint")
        marked = server.load(format="full")
    before, content, path = (block["text"] for block in marked["content"])
    assert before == f"⚠ {brief.UNTRUSTED}\n{brief.NOTES}"
    assert before.split("\n")[0][2:] in marked["structuredContent"]["warnings"]
    assert json.loads(content)["checkpoint"] == said["checkpoint"]
    assert path == result["content"][1]["text"]


def test_nothing_to_resume_is_no_error(root: Path) -> None:
    with Server(root) as server:
        result = server.load()
    assert result["isError"] is False
    assert result["content"][0]["text"].startswith("Nothing to resume")
    assert result["structuredContent"]["brief"] == result["content"][0]["text"]


# -------------------------------------------------------------------------------------------------- calls in a row


def test_calls_sent_at_once_are_run_one_after_the_other(root: Path) -> None:
    with Server(root) as server:
        for number in range(20):
            arguments = {"goal": "g", "mode": "merge", "recentCommands": [{"command": f"c{number}"}]}
            params = {"name": SAVE, "arguments": arguments}
            server.send({"jsonrpc": "2.0", "id": f"m{number}", "method": "tools/call", "params": params})
        assert [server.receive()["id"] for _ in range(20)] == [f"m{number}" for number in range(20)]
    commands = [command["command"] for command in Project(root).checkpoint["recentCommands"]]
    assert commands == [f"c{number}" for number in range(20)]


def slow_git(folder: Path) -> tuple[dict[str, str], Path]:
    """A PATH on which the first git waits for a line from a FIFO, and that FIFO."""
    folder.mkdir()
    gate = folder / "gate"
    os.mkfifo(gate)
    (folder / "git").write_text(f"#!/bin/sh\n[ -p {gate} ] && read line < {gate} && rm {gate}\nexit 128\n")
    (folder / "git").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}, gate


def test_a_ping_is_answered_while_a_call_runs_and_a_cancelled_call_is_not(root: Path, tmp_path: Path) -> None:
    environ, gate = slow_git(tmp_path / "bin")
    with Server(root, environ) as server:
        params = {"name": SAVE, "arguments": {"goal": "of a cancelled call"}}
        server.send({"jsonrpc": "2.0", "id": "slow", "method": "tools/call", "params": params})
        writer = os.open(gate, os.O_WRONLY)  # returns once git is waiting, so the call is under way
        assert server.request("ping")["result"] == {}
        server.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "slow"}})
        assert server.request("ping")["result"] == {}
        os.write(writer, b"go\n")
        os.close(writer)
        output, _ = server.close()
    assert b"slow" not in output
    assert Project(root).checkpoint["goal"]["primary"] == "of a cancelled call"


@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGINT"])
def test_what_was_read_is_finished_and_answered_before_the_end(root: Path, tmp_path: Path, how: str) -> None:
    environ, gate = slow_git(tmp_path / "bin")
    server = Server(root, environ)
    with server:
        params = {"name": SAVE, "arguments": {"goal": "the last"}}
        server.send({"jsonrpc": "2.0", "id": "last", "method": "tools/call", "params": params})
        writer = os.open(gate, os.O_WRONLY)
        if how != "end of input":
            assert server.request("ping")["result"] == {}
            server.process.send_signal(getattr(signal, how))
        else:
            assert server.process.stdin
            server.process.stdin.close()
            server.process.stdin = None
        os.write(writer, b"go\n")
        os.close(writer)
        output, errors = server.close()
    assert json.loads(output)["id"] == "last"
    assert errors == b""
    assert server.process.returncode == 0
    assert Project(root).checkpoint["goal"]["primary"] == "the last"


def test_it_ends_by_itself_when_the_input_ends(root: Path) -> None:
    done = subprocess.run(
        SERVE, cwd=root, input=b'{"jsonrpc":"2.0","id":1,"method":"ping"}', capture_output=True, timeout=30
    )
    assert (done.returncode, json.loads(done.stdout)["id"], done.stderr) == (0, 1, b"")


@pytest.mark.parametrize(("closed", "said"), [("<&-", "must be open"), (">&-", "must be open"), ("<.", "")])
def test_streams_that_cannot_be_used_are_no_traceback(root: Path, closed: str, said: str) -> None:
    code = SERVE[2].replace(
        "sys.exit(session.serve())",
        "\ntry: sys.exit(session.serve())\nexcept session.SessionError as e: sys.exit(str(e))",
    )
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {closed}', SERVE[0], code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_that_stops_reading_is_no_traceback(root: Path) -> None:
    server = Server(root)
    with server:
        assert server.process.stdout
        server.process.stdout.close()
        server.process.stdout = None
        server.send({"jsonrpc": "2.0", "id": 1, "method": "ping"})
        _, errors = server.close()
    assert b"Traceback" not in errors
    assert server.process.returncode == 0


def test_an_error_inside_is_a_protocol_error_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    wired = Wired()
    monkeypatch.setattr(sessiontools, "load", explode)
    wired.ask("tools/call", {"name": LOAD, "arguments": {}}, 1)
    wired.ask("tools/call", {"name": SAVE, "arguments": {}}, 2)
    wired.server.end()
    wired.server.work()
    assert wired.lines[0]["error"]["code"] == wire.INTERNAL_ERROR
    assert "a bug" not in json.dumps(wired.lines)
    assert wired.lines[1]["result"]["isError"] is True


def test_a_root_whose_name_is_no_text_is_answered_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    folder.mkdir()
    (folder / "link").symlink_to(".")
    with Server(folder) as server:
        saved = server.save(modifiedFiles=[{"path": "b"}])
        assert saved["isError"] is False
        assert saved["structuredContent"]["path"].endswith("bad\ufffd/.claude-checkpoint")
        assert "bad\ufffd" in server.load()["content"][0]["text"]
        (folder / ".claude-checkpoint").write_text("{")
        assert server.load()["isError"] is True
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / os.fsdecode(b"bad\xff")).mkdir()
    (tmp_path / "outer/link").symlink_to(os.fsdecode(b"bad\xff"))
    outer = Project(tmp_path / "outer")
    assert any("Skipped 1 file(s)" in warning for warning in outer.save(modifiedFiles=[{"path": "link/f"}])["warnings"])


def test_without_jsonschema_a_call_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(SessionError, match="install jsonschema for this Python"):
        Project(root).save()


# -------------------------------------------------------------------------------------------------------- the root


def resolve(argument: str | None = None, roots: list[str] | None = None, cwd: str = "/", **environ: str) -> Any:
    return projectroot.resolve_root(argument, environ, lambda: roots or [], lambda: cwd)


def test_the_root_is_chosen_in_order(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("argument", "variable", "root", "claude", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    environ = {"CHECKPOINT_PROJECT_ROOT": str(folders["variable"]), "CLAUDE_PROJECT_DIR": str(folders["claude"])}
    roots = [folders["root"].as_uri()]
    cwd = str(folders["cwd"])
    assert resolve(str(folders["argument"]), roots, cwd, **environ).path == str(folders["argument"])
    assert resolve(None, roots, cwd, **environ).path == str(folders["variable"])
    del environ["CHECKPOINT_PROJECT_ROOT"]
    assert resolve(None, roots, cwd, **environ).path == str(folders["root"])
    assert resolve(None, [], cwd, **environ).path == str(folders["claude"])
    assert resolve(None, [], cwd, CHECKPOINT_PROJECT_ROOT="", CLAUDE_PROJECT_DIR="").path == cwd
    assert resolve(None, [], cwd, CLAUDE_PROJECT_DIR="relative").path == cwd
    assert resolve(None, [], cwd, CLAUDE_PROJECT_DIR=str(tmp_path / "gone")).path == cwd


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "must be an absolute path: it is empty"),
        (".", "must be an absolute path: ."),
        ("./app", "must be an absolute path: ./app"),
        ("~", "must be an absolute path: ~"),
        ("~/app", "must be an absolute path: ~/app"),
        ("FOLDER/gone", "is not an existing directory (No such file or directory)"),
        ("FOLDER/file", "is not a directory"),
        ("FOLDER/file/below", "is not an existing directory (Not a directory)"),
        ("FOLDER/\0", "must not contain a NUL character"),
        ("/" + "x" * 4000, "is not an existing directory (File name too long)"),
        ("FOLDER/loop", "is not an existing directory"),
    ],
)
def test_a_bad_root_is_an_error_that_names_where_it_came_from(tmp_path: Path, path: str, said: str) -> None:
    """SF-04"""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    path = path.replace("FOLDER", str(tmp_path))
    before = set(tmp_path.iterdir())
    with pytest.raises(SessionError) as caught:
        resolve(path)
    assert str(caught.value).startswith("projectRoot " + said)
    assert len(str(caught.value)) < 300
    if path:
        with pytest.raises(SessionError, match=r"^CHECKPOINT_PROJECT_ROOT "):
            resolve(None, CHECKPOINT_PROJECT_ROOT=path)
    assert set(tmp_path.iterdir()) == before


def test_parents_and_links_in_a_root_are_resolved(tmp_path: Path) -> None:
    """SF-04, SF-06"""
    (tmp_path / "repo").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "repo/sub").symlink_to(tmp_path / "outside")
    assert resolve(f"{tmp_path}/repo/../outside").path == str(tmp_path / "outside")
    assert resolve(f"{tmp_path}/repo/sub").path == str(tmp_path / "outside")


def test_the_working_directory_is_refused_at_the_top_and_warned_about_at_home(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="pass projectRoot or set CHECKPOINT_PROJECT_ROOT"):
        resolve(None, cwd="/")

    def gone() -> str:
        raise FileNotFoundError(2, "gone")

    with pytest.raises(SessionError, match="the working directory is gone"):
        projectroot.resolve_root(None, {}, list, gone)
    with Server(tmp_path, {"HOME": str(tmp_path)}) as server:
        saved, named = server.save(), server.save(projectRoot=str(tmp_path))
    assert "Saved in the home directory" in saved["content"][0]["text"]
    assert "Saved in the home directory" not in named["content"][0]["text"]


def test_only_local_folders_count_among_a_clients_roots(tmp_path: Path) -> None:
    folder = tmp_path / "a b%c\u00e9"
    folder.mkdir()
    (tmp_path / "file").touch()
    bad = [
        "https://x/y",
        f"file://elsewhere{tmp_path}",
        (tmp_path / "file").as_uri(),
        "file:///gone",
        "file:",
        "",
        "file://[x",
        f"{tmp_path.as_uri()}#x",
        f"{tmp_path.as_uri()}?x",
    ]
    assert resolve(None, [*bad, folder.as_uri(), tmp_path.as_uri()]).path == str(folder)
    assert resolve(None, [folder.as_uri().replace("file://", "file://localhost")]).path == str(folder)
    assert resolve(None, bad, cwd=str(tmp_path)).path == str(tmp_path)


class RootedClient(Server):
    """A client that offers roots."""

    def __init__(self, cwd: Path, environ: Mapping[str, str] = {}) -> None:
        super().__init__(cwd, environ, {"roots": {"listChanged": True}})

    def load_answering(self, answer: Mapping[str, Any] | None) -> dict[str, Any]:
        """Calls load and answers the server's question with `answer`."""
        self._last_id += 1
        params = {"name": LOAD, "arguments": {}}
        self.send({"jsonrpc": "2.0", "id": self._last_id, "method": "tools/call", "params": params})
        asked = self.receive()
        assert asked["method"] == "roots/list", asked
        if answer is not None:
            self.send({"jsonrpc": "2.0", "id": asked["id"], **answer})
        result = self.receive()
        assert result["id"] == self._last_id
        return dict(result["result"]["structuredContent"])


def test_a_client_is_asked_for_its_roots_at_each_call(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with RootedClient(root) as client:
        for folder in (root, other):
            answer = client.load_answering({"result": {"roots": [{"uri": folder.as_uri()}]}})
            assert answer["path"] == str(folder / ".claude-checkpoint")
        oddities: list[dict[str, Any]] = [
            {"error": {"code": -32601, "message": "List roots not supported"}},
            {"result": {}},
            {"result": {"roots": [1]}},
            {"result": {"roots": [{"uri": 1}]}},
            {"result": {"roots": None}},
            {"result": {"roots": []}},
        ]
        for odd in oddities:
            assert client.load_answering(odd)["path"] == str(root / ".claude-checkpoint")


def test_a_client_that_never_answers_is_waited_for_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ROOTS_WAIT_S", 0.05)
    monkeypatch.chdir(root)
    wired = Wired()
    wired.ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {"roots": {}}})
    worker = threading.Thread(target=wired.server.work, daemon=True)
    worker.start()

    def load(number: int) -> list[Any]:
        """Methods and ids of what comes until this call is answered."""
        seen = len(wired.lines)
        wired.server.receive(
            b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"%b"}}' % (number, LOAD.encode())
        )
        deadline = time.monotonic() + 20
        while not (wired.lines and wired.lines[-1].get("id") == number) and time.monotonic() < deadline:
            os.sched_yield()
        return [line.get("method") or line["id"] for line in wired.lines[seen:]]

    assert load(11) == ["roots/list", 11]
    assert load(12) == [12]
    wired.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"})
    assert load(13) == ["roots/list", 13]
    wired.server.end()
    worker.join(20)
    assert not worker.is_alive()


def test_the_end_of_the_input_ends_the_wait_for_roots(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ROOTS_WAIT_S", 1000)
    monkeypatch.chdir(root)
    asked = threading.Event()
    lines: list[Any] = []

    def write(line: bytes) -> None:
        lines.append(json.loads(line))
        if lines[-1].get("method") == "roots/list":
            asked.set()

    server = session.Server(write, {"PATH": os.environ["PATH"]})
    worker = threading.Thread(target=server.work, daemon=True)
    worker.start()
    for request, method in enumerate(("initialize", "tools/call", "tools/call")):
        params = {"capabilities": {"roots": {}}, "name": LOAD}
        server.receive(json.dumps({"jsonrpc": "2.0", "id": request, "method": method, "params": params}).encode())
    assert asked.wait(10)
    server.end()
    worker.join(20)
    assert not worker.is_alive()
    assert [line["id"] for line in lines if "result" in line] == [0, 1, 2]


def test_nobody_is_asked_who_offers_no_roots_or_is_of_the_modern_era(root: Path) -> None:
    with Server(root) as server:
        assert server.load()["structuredContent"]["path"] == str(root / ".claude-checkpoint")
    with RootedClient(root) as client:
        result = client.request("tools/call", modern({"name": LOAD, "arguments": {}}))["result"]
        assert result["resultType"] == "complete"
        named = client.load(projectRoot=str(root))
        assert named["structuredContent"]["path"] == str(root / ".claude-checkpoint")


# ------------------------------------------------------------------------------------------------------- start


def test_the_first_reply_waits_for_no_heavy_import(root: Path) -> None:
    """No module that takes long is loaded before a tool is called; the time itself is the next test's."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(session.__file__).parent)!r}); import session, io, os\n"
        "server = session.Server(lambda line: None, os.environ)\n"
        'server.receive(b\'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}\\n\')\n'
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "wire" in loaded
    heavy = {
        "asyncio",
        "anyio",
        "jsonschema",
        "mcp",
        "logging",
        "dataclasses",
        "inspect",
        "urllib.parse",
        "uuid",
        "redact",
    }
    assert not heavy & set(loaded)


def test_the_first_reply_comes_fast(root: Path) -> None:
    """Against a bare Python with json and subprocess, measured in turns: the best of each, since others compute here
    too, and more of them where that was not enough."""
    request = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}\n'

    def first_reply() -> float:
        begun = time.perf_counter()
        with subprocess.Popen(SERVE, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            process.stdin.write(request)
            process.stdin.flush()
            assert process.stdout.readline()
            taken = time.perf_counter() - begun
            process.stdin.close()
        return taken

    def bare() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import json, subprocess"], check=True)
        return time.perf_counter() - begun

    first_reply()
    ours, theirs, rounds = first_reply(), bare(), 1
    while rounds < 10 or (ours >= 1.5 * theirs and rounds < 60):
        ours, theirs, rounds = min(ours, first_reply()), min(theirs, bare()), rounds + 1
    assert ours < 0.3
    assert ours < 1.5 * theirs, f"{ours:.3f} s against {theirs:.3f} s"


def test_the_reader_of_briefs_splits_them_right() -> None:
    """Guards the helper that other tests rely on."""
    assert sections("# t\nx\n\n## A\n1\n\n## B\n2") == {"": "# t\nx", "A": "1", "B": "2"}
