"""The checkpoint file: whole at every moment, private, never followed, never trusted."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from session_kit import SOURCES, Project, Server, handmade, names

import checkpointfile
from checkpointfile import Folder, Newer, Valid, decode, encode
from toolspec import SessionError


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    root.mkdir()
    return Project(root)


# ------------------------------------------------------------------------------------------------------- the format


def reference_checkpoint() -> dict[str, Any]:
    """The example of the reference document."""
    at = "2026-10-08T02:23:55.477Z"
    return handmade(
        generator={"name": "claude-checkpoint-mcp", "version": "0.1.0"},
        git={
            "branch": "feat/github-oauth",
            "head": "b2ef1b5919ee5d456ea146c9362a7abc92b1e556",
            "dirty": True,
        },
        goal={
            "primary": "Add GitHub OAuth login with persistent sessions",
            "tasks": [
                {"description": "OAuth callback route", "status": "done"},
                {"description": "Session cookie persistence", "status": "in_progress"},
                {"description": "Logout endpoint", "status": "pending"},
            ],
        },
        summary="Callback exchanges the code and creates a session, but the cookie is dropped on reload. "
        "Suspect SameSite/secure flags in dev.",
        nextSteps=[
            "Set sameSite: 'lax' and secure only in production in src/auth/session.ts",
            "Re-run npm test -- auth",
            "Start the logout endpoint",
        ],
        decisions=[
            "Use iron-session, not express-session (needs edge runtime support)",
            "Don't mock the GitHub API in e2e tests; use the recorded fixtures in test/fixtures",
        ],
        modifiedFiles=[
            {
                "path": "src/auth/session.ts",
                "status": "M",
                "source": "git",
                "note": "cookie options",
                "hash": "9ec893ef673dac860e7e2b6fcaad602983eeb0b1",
            },
            {
                "path": "src/auth/callback.ts",
                "status": "M",
                "source": "git",
                "hash": "f3ecc849c3875d4f11bb42ae0e5ab6c71931d7f1",
            },
            {
                "path": "src/auth/session.spec.ts",
                "status": "??",
                "source": "git",
                "hash": "9daeafb9864cf43055ae93beb0afd6c7d144bfa4",
            },
        ],
        recentCommands=[
            {"command": "GITHUB_CLIENT_SECRET=«redacted» npm run dev", "exitCode": 0, "at": at},
            {
                "command": "npm test -- auth",
                "exitCode": 1,
                "note": "2 failing in session.spec.ts: cookie missing after reload",
                "at": at,
            },
        ],
        meta={"redactions": 1, "truncated": False},
    )


def test_the_example_of_the_reference_has_the_bytes_that_it_reports() -> None:
    decoded = decode(json.dumps(reference_checkpoint()).encode())
    assert not isinstance(decoded, Newer)
    assert len(encode(decoded)) == 2202
    assert list(decoded) == [
        "version",
        "id",
        "createdAt",
        "updatedAt",
        "generator",
        "project",
        "git",
        "goal",
        "summary",
        "nextSteps",
        "decisions",
        "modifiedFiles",
        "recentCommands",
        "meta",
    ]


def test_a_saved_file_has_two_blanks_of_indentation_raw_letters_and_one_newline(project: Project) -> None:
    project.save(goal="café ✓", recentCommands=[{"command": "c", "exitCode": 0, "note": "n"}])
    text = project.file.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), ensure_ascii=False, indent=2) + "\n"
    assert "café ✓" in text
    assert list(project.checkpoint["recentCommands"][0]) == ["command", "exitCode", "note", "at"]
    assert project.checkpoint["recentCommands"][0]["at"] == project.checkpoint["updatedAt"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", project.checkpoint["updatedAt"])
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", project.checkpoint["id"])
    assert "summary" not in project.checkpoint
    assert project.checkpoint["git"] is None
    assert project.checkpoint["project"] == {"name": "project"}


def without(key: str) -> dict[str, Any]:
    value = handmade()
    del value[key]
    return value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON at line 1, column 1"),
        (b"\0" * 900, "not JSON at line 1, column 1"),
        (encode(handmade())[:200], "not JSON"),  # type: ignore[arg-type]
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"[1]", "must be an object"),
        (b'{"version": 1, "version": 1}', "an object repeats a key"),
        (b'{"version": 1, "x": NaN}', "NaN is not JSON"),
        (b'{"version": 1, "x": 1e999}', "a number that is out of range"),
        (b'{"version": 1, "x": ' + b"9" * 5000 + b"}", "a number of over 20 digits"),
        (b'{"version": 1, "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested deeper than 20 levels"),
        (b'{"version": 1, "x": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 20 levels"),
        (json.dumps(handmade(summary="s" * 1_100_000)).encode(), "larger than 1,048,576 bytes"),
        (json.dumps(handmade(nextSteps=[""] * 4001)).encode(), "more than 4,000 values"),
        (json.dumps(handmade(x={str(number): {} for number in range(4001)})).encode(), "more than 4,000 values"),
        (json.dumps(without("version")).encode(), "version: must be an integer from 1"),
        (json.dumps(handmade(version=0)).encode(), "version: must be an integer from 1"),
        (json.dumps(handmade(version=True)).encode(), "version: must be an integer from 1"),
        (json.dumps(handmade(version="1")).encode(), "version: must be an integer from 1"),
        (json.dumps(handmade(version=1.0)).encode(), "version: must be an integer from 1"),
        (json.dumps(without("goal")).encode(), "goal: is missing"),
        (json.dumps(handmade(goal={})).encode(), "goal.primary: is missing"),
        (json.dumps(handmade(goal={"primary": 1})).encode(), "goal.primary: must be a string"),
        (
            json.dumps(handmade(goal={"primary": "", "tasks": [{"description": "d"}, {}]})).encode(),
            "goal.tasks[1].description: is missing",
        ),
        (json.dumps(handmade(nextSteps=["a", 2])).encode(), "nextSteps[1]: must be a string"),
        (json.dumps(handmade(decisions={})).encode(), "decisions: must be an array"),
        (json.dumps(handmade(modifiedFiles=[[]])).encode(), "modifiedFiles[0]: must be an object"),
        (
            json.dumps(handmade(recentCommands=[{"command": "c", "exitCode": True}])).encode(),
            "recentCommands[0].exitCode: must be an integer",
        ),
        (json.dumps(handmade(updatedAt="yesterday")).encode(), "updatedAt: must be a time in ISO 8601"),
        (
            json.dumps(handmade(git={"branch": "b", "head": "--help", "dirty": False})).encode(),
            "git.head: must be 40 or 64 hexadecimal digits",
        ),
        (json.dumps(handmade(meta={"truncated": "no"})).encode(), "meta.truncated: must be true or false"),
    ],
)
def test_what_is_no_checkpoint_is_corrupt_with_a_reason_that_quotes_nothing(
    project: Project, content: bytes, reason: str
) -> None:
    """SA-03, SU-03"""
    project.file.write_bytes(content)
    with pytest.raises(SessionError, match=re.escape(f"is corrupt: {reason}")):
        project.load()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_and_other_line_ends_are_read(project: Project, mark: bytes) -> None:
    """SA-07"""
    content = json.dumps(handmade(summary="s"), indent=2).replace("\n", "\r\n").encode()
    project.file.write_bytes(mark + content)
    assert "## Where things stand\ns" in project.brief()


def test_a_sparse_file_written_by_hand_is_filled_in(project: Project) -> None:
    project.file.write_text(
        '{"version": 1, "goal": {"primary": "p", "tasks": [{"description": "d"}]}, "summary": null}'
    )
    loaded = project.load(is_full=True)
    assert loaded["updatedAt"] is None
    assert loaded["checkpoint"]["goal"]["tasks"] == [{"status": "pending", "description": "d"}]
    brief = project.brief()
    assert "checkpoint saved at an unknown time" in brief
    assert "- [ ] d" in brief
    project.save(goal="q", mode="merge")
    assert list(project.checkpoint["goal"]["tasks"][0]) == ["description", "status"]
    assert project.checkpoint["createdAt"] == project.checkpoint["updatedAt"]


def test_unknown_keys_survive_a_merge_and_not_a_replace(project: Project) -> None:
    project.plant(team="blue", goal={"primary": "p", "tasks": [{"description": "d", "x": 1}], "why": "w"})
    project.save(mode="merge")
    assert project.checkpoint["team"] == "blue"
    assert project.checkpoint["goal"]["why"] == "w"
    assert project.checkpoint["goal"]["tasks"][0]["x"] == 1
    project.save()
    assert "team" not in project.checkpoint


def test_half_a_surrogate_pair_becomes_a_replacement_character(project: Project) -> None:
    project.file.write_text(json.dumps(handmade(summary="a\ud800b", **{"k\udc00": "v"})))
    assert project.load(is_full=True)["checkpoint"]["summary"] == "a\ufffdb"
    project.save(goal="half \ud83d", mode="merge")
    assert project.checkpoint["goal"]["primary"] == "half \ufffd"


def test_a_key_that_would_turn_into_another_one_is_left_out(project: Project) -> None:
    planted = {
        "createdAt\u200b": 5,
        "goal\u200b": "boom",
        "ghp_" + "a" * 36: 1,
        "k" * 500: 1,
        "x": {"y\u200b": 1, "z": 2},
    }
    project.plant(goal={"primary": "good goal", "primary\u200b": 5}, **planted)
    assert "## Goal\ngood goal" in project.brief()
    project.save(goal="next", mode="merge", decisions=["one"])
    project.save(goal="next", mode="merge", decisions=["two"])
    assert project.checkpoint["decisions"] == ["one", "two"]
    assert project.checkpoint["goal"] == {"primary": "next", "tasks": []}
    assert {key: value for key, value in project.checkpoint.items() if key not in handmade()} == {"x": {"z": 2}}


def test_a_file_that_could_not_be_read_again_is_not_written(project: Project) -> None:
    project.plant(x=[0] * 3970)
    before = project.file.read_bytes()
    with pytest.raises(SessionError, match="not written, since it could not be read again: more than 4,000 values"):
        project.save(mode="merge", recentCommands=[{"command": f"c{number}"} for number in range(50)])
    assert project.file.read_bytes() == before
    assert names(project.root) == [".claude-checkpoint"]


# -------------------------------------------------------------------------------------------------------- the backup


def test_the_file_and_its_backup_are_private_whatever_they_were(project: Project) -> None:
    before = os.umask(0)
    try:
        project.plant()
        project.file.chmod(0o644)
        project.save()
    finally:
        os.umask(before)
    assert project.file.stat().st_mode & 0o777 == 0o600
    assert project.backup.stat().st_mode & 0o777 == 0o600
    os.umask(0o777)
    try:
        project.save()
    finally:
        os.umask(before)
    assert project.file.stat().st_mode & 0o777 == 0o600


def test_the_valid_file_before_is_the_backup_and_nothing_else_is_left(project: Project) -> None:
    """SB-04"""
    for goal in ("one", "two", "three"):
        project.save(goal=goal)
    assert project.checkpoint["goal"]["primary"] == "three"
    assert json.loads(project.backup.read_bytes())["goal"]["primary"] == "two"
    assert names(project.root) == [".claude-checkpoint", ".claude-checkpoint.prev"]


def test_without_hard_links_the_backup_is_a_copy(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    project.save(goal="one")
    monkeypatch.setattr(os, "link", refuse)
    project.save(goal="two")
    assert json.loads(project.backup.read_bytes())["goal"]["primary"] == "one"
    assert project.backup.stat().st_mode & 0o777 == 0o600
    project.file.write_text("garbage")
    project.save(goal="three")
    assert names(project.root) == [".claude-checkpoint", ".claude-checkpoint.bad", ".claude-checkpoint.prev"]


def test_a_backup_that_is_already_the_same_file_leaves_no_temporary_file(project: Project) -> None:
    """A kill between two renames leaves both names on one file, where rename() does nothing."""
    project.save(goal="one")
    os.link(project.file, project.backup)
    project.save(goal="two")
    assert names(project.root) == [".claude-checkpoint", ".claude-checkpoint.prev"]
    assert json.loads(project.backup.read_bytes())["goal"]["primary"] == "one"


def test_a_corrupt_file_gives_way_to_the_backup_and_never_overwrites_it(project: Project) -> None:
    """SA-04: the damaged bytes still exist after the save."""
    project.save(goal="good")
    project.save(goal="lost")
    damaged = project.file.read_bytes()[:100]
    project.file.write_bytes(damaged)
    loaded = project.load()
    assert loaded["fromBackup"] is True
    assert "## Goal\ngood" in loaded["brief"]
    assert "⚠ .claude-checkpoint is corrupt (not JSON at line" in loaded["brief"]
    answer = project.save(goal="next")
    assert json.loads(project.backup.read_bytes())["goal"]["primary"] == "good"
    assert (project.root / ".claude-checkpoint.bad").read_bytes() == damaged
    assert any("was corrupt" in warning and ".claude-checkpoint.bad" in warning for warning in answer["warnings"])


def test_a_merge_onto_a_corrupt_file_goes_on_from_the_backup(project: Project) -> None:
    project.save(goal="good", decisions=["kept"])
    project.save(goal="lost")
    project.file.write_text("{")
    answer = project.save(goal="next", mode="merge", decisions=["added"])
    assert project.checkpoint["decisions"] == ["kept", "added"]
    assert any("merged into .claude-checkpoint.prev" in warning for warning in answer["warnings"])
    assert json.loads(project.backup.read_bytes())["goal"]["primary"] == "good"


def test_corrupt_without_a_backup_is_an_error_and_missing_is_not(project: Project) -> None:
    """SA-04: two different answers."""
    missing = project.load()
    assert missing["found"] is False
    assert missing["brief"].startswith("Nothing to resume: there is no checkpoint at ")
    assert (missing["updatedAt"], missing["drift"], missing["warnings"]) == (None, None, [])
    project.file.write_text("{")
    project.backup.write_text("{")
    with pytest.raises(SessionError, match=r"is corrupt.*no valid backup"):
        project.load()
    project.save(mode="merge")
    assert (project.root / ".claude-checkpoint.bad").read_text() == "{"
    assert project.backup.read_text() == "{"


def test_a_missing_file_with_a_backup_is_not_resumed_but_named(project: Project) -> None:
    project.save(goal="one")
    project.save(goal="two")
    project.file.unlink()
    loaded = project.load()
    assert loaded["found"] is False
    assert "rename .claude-checkpoint.prev" in loaded["brief"]
    answer = project.save(mode="merge")
    assert "Nothing to merge into; saved as new." in answer["warnings"]
    assert answer["mode"] == "merge"


def test_a_newer_version_is_refused_and_a_replace_sets_it_aside(project: Project) -> None:
    project.save(goal="old")
    project.save(goal="backup of two")
    project.file.write_text('{"version": 2, "anything": []}')
    with pytest.raises(SessionError, match=r"newer version \(2\); upgrade, or delete the file"):
        project.load()
    before = project.file.read_bytes(), project.backup.read_bytes()
    with pytest.raises(SessionError, match=r"newer version \(2\)"):
        project.save(mode="merge")
    assert (project.file.read_bytes(), project.backup.read_bytes()) == before
    answer = project.save(goal="new")
    assert (project.root / ".claude-checkpoint.v2").read_bytes() == before[0]
    assert project.backup.read_bytes() == before[1]
    assert any(".claude-checkpoint.v2" in warning for warning in answer["warnings"])


# ---------------------------------------------------------------------------------------------------------- attacks


@pytest.mark.parametrize("target", ["victim", ".git/config", "nowhere"])
def test_a_symlink_is_replaced_by_a_save_and_refused_by_a_load(project: Project, tmp_path: Path, target: str) -> None:
    """SF-01, SF-03"""
    outside = tmp_path / target
    if target != "nowhere":
        outside.parent.mkdir(exist_ok=True)
        outside.write_text("TOPSECRET")
    project.file.symlink_to(outside)
    with pytest.raises(SessionError, match="a symbolic link") as caught:
        project.load()
    assert "TOPSECRET" not in str(caught.value)
    answer = project.save()
    assert project.file.is_file()
    assert not project.file.is_symlink()
    assert any("a symbolic link" in warning for warning in answer["warnings"])
    assert outside.exists() is (target != "nowhere")
    if outside.exists():
        assert outside.read_text() == "TOPSECRET"
        assert outside.stat().st_mode & 0o777 != 0o600


def test_a_symlinked_backup_is_never_followed(project: Project, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text(json.dumps(handmade(summary="TOPSECRET")))
    project.file.write_text("{")
    project.backup.symlink_to(victim)
    with pytest.raises(SessionError, match="no valid backup"):
        project.load()
    project.save(goal="one")
    project.save(goal="two")
    assert not project.backup.is_symlink()
    assert json.loads(victim.read_text())["summary"] == "TOPSECRET"


@pytest.mark.parametrize("name", [".claude-checkpoint", ".claude-checkpoint.prev"])
@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_a_folder_or_fifo_of_that_name_stops_a_save_that_writes_nothing(project: Project, name: str, kind: str) -> None:
    if name.endswith(".prev"):
        project.save(goal="kept")
    path = project.root / name
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = {found: (project.root / found).lstat().st_ino for found in names(project.root)}
    with pytest.raises(SessionError, match="is no regular file; move it away"):
        project.save(goal="new")
    assert {found: (project.root / found).lstat().st_ino for found in names(project.root)} == before
    if name == ".claude-checkpoint":
        with pytest.raises(SessionError, match="is no regular file"):
            project.load()


def test_a_root_that_is_a_symlink_is_resolved_openly(project: Project, tmp_path: Path) -> None:
    """SF-06"""
    link = tmp_path / "link"
    link.symlink_to(project.root)
    answer = Project(link).save()
    assert answer["path"] == str(project.file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_checkpoint_of_another_user_is_marked(project: Project) -> None:
    project.plant()
    os.chown(project.file, 12345, 12345)
    assert project.brief().split("\n")[1].startswith("⚠ This checkpoint belongs to another user")


# ------------------------------------------------------------------------------------------------ nothing half done


def in_child(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    prelude = f"import sys; sys.path[:0] = [{str(SOURCES)!r}, {str(SOURCES / 'tests')!r}]\n"
    command = [sys.executable, "-c", prelude + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


SAVE_IN_CHILD = """
from pathlib import Path
from session_kit import Project
from toolspec import SessionError
try:
    print(Project(Path(sys.argv[1])).save(goal="new", summary="s" * 4000)["bytes"])
except SessionError as error:
    print(error)
    sys.exit(1)
"""


def test_a_full_disk_leaves_everything_as_it_was(project: Project) -> None:
    """SA-06: with the limit on file sizes, which fails in the middle of a write as a full disk does."""
    project.save(goal="old")
    before = {name: (project.root / name).read_bytes() for name in names(project.root)}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    done = in_child(SAVE_IN_CHILD, str(project.root), preexec_fn=limit)
    assert done.returncode == 1, done
    assert done.stdout == f"{project.file}: cannot be written: File too large\n"
    assert {name: (project.root / name).read_bytes() for name in names(project.root)} == before


STEPS = ("open", "fchmod", "fsync", "link", "chmod", "rename")


def failing_at(point: int) -> tuple[dict[str, Any], list[str]]:
    """What to put in the place of each step of a save so that the one with this number fails, and the steps taken."""
    taken: list[str] = []

    def failing(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **options)
            taken.append(name)
            if len(taken) == point:
                raise OSError(5, "Input/output error")
            return real(*arguments, **options)

        return call

    return {name: failing(name, getattr(os, name)) for name in STEPS}, taken


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in names(root)}


@pytest.mark.parametrize("content", [None, b"garbage", b'{"version": 2}'])
@pytest.mark.parametrize("has_links", [True, False])
def test_a_step_that_fails_leaves_everything_as_it_was(
    project: Project, monkeypatch: pytest.MonkeyPatch, content: bytes | None, has_links: bool
) -> None:
    """SA-06. Ends at the first point that a save does not reach any more."""
    real_link = os.link

    def link(*arguments: Any, **options: Any) -> None:
        if not has_links:
            raise PermissionError(1, "no links here")
        real_link(*arguments, **options)

    failed = set()
    for point in range(1, 100):
        for path in project.root.iterdir():
            path.unlink()
        project.save(goal="oldest")
        project.save(goal="old")
        if content is not None:
            project.file.write_bytes(content)
        before = contents(project.root)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            steps, taken = failing_at(point)
            for name, step in steps.items():
                patch.setattr(os, name, step)
            try:
                answer = project.save(goal="new")
            except SessionError as error:
                assert "Input/output error" in str(error)  # noqa: PT017 (some steps may fail)
                assert contents(project.root) == before, (point, taken)
                failed.add(taken[-1])
                continue
        assert project.checkpoint["goal"]["primary"] == "new"
        if len(taken) < point:
            break
        # Where links are refused, copies take their place; once the last rename is done, nothing is an error.
        is_flush = taken[point - 2 :] == ["rename", "fsync"]
        assert is_flush or taken[point - 1] in ("link", "chmod"), taken
        assert any("could not be flushed" in warning for warning in answer["warnings"]) == is_flush
    else:
        pytest.fail("a save has too many steps")
    assert failed == {"open", "fchmod", "fsync", "rename"}


def test_what_was_set_aside_before_is_kept(project: Project) -> None:
    for number, name in enumerate((".bad", ".bad.1", ".bad.2")):
        (project.root / ".claude-checkpoint.bad.1").mkdir(exist_ok=True)
        project.file.write_text(f"garbage {number}")
        [warning] = project.save()["warnings"]
        target = name if number == 0 else f".bad.{number + 1}"
        assert warning.endswith(f"was moved to .claude-checkpoint{target}.")
        assert (project.root / f".claude-checkpoint{target}").read_text() == f"garbage {number}"


def test_what_cannot_be_set_aside_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def refuse(source: str, target: str, **options: Any) -> None:
        if target.endswith(".bad"):
            raise OSError(5, "Input/output error")
        real(source, target, **options)

    def no_link(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    project.file.write_text("garbage")
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(SessionError, match=r"cannot be moved to \.claude-checkpoint\.bad: Input/output error"):
        project.save()


def test_a_temporary_file_is_never_one_that_was_there(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of a shared folder may guess its name, and put a link or a file of their own there."""
    victim = project.write("victim", "theirs")
    name = ".claude-checkpoint.tmp-" + bytes(8).hex()
    monkeypatch.setattr(os, "urandom", bytes)
    monkeypatch.setattr(Folder, "_sweep", lambda *_: None)
    for is_link in (True, False):
        if is_link:
            (project.root / name).symlink_to(victim)
        else:
            os.link(victim, project.root / name)
        with pytest.raises(SessionError, match="File exists"):
            project.save()
        assert victim.read_text() == "theirs"
        assert not project.file.exists()
        (project.root / name).unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user to become")
def test_a_read_only_folder_leaves_everything_as_it_was(project: Project, tmp_path: Path) -> None:
    """SA-06"""
    project.save(goal="old")
    before = project.file.read_bytes()
    for path in (project.file, project.root):
        os.chown(path, 12345, 12345)
    project.root.chmod(0o555)
    for folder in project.root.parents:
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)

    code = "import os\nimport jsonschema\nimport session_kit\nos.setgid(12345)\nos.setuid(12345)\n" + SAVE_IN_CHILD
    done = in_child(code, str(project.root), env=os.environ | {"HOME": str(tmp_path)})
    assert done.returncode == 1, done
    assert done.stdout == f"{project.file}: cannot be written: Permission denied\n"
    assert project.file.read_bytes() == before
    assert names(project.root) == [".claude-checkpoint"]


KILL_AT = """
import os, signal
from pathlib import Path
import checkpointfile
from session_kit import Project

point = int(sys.argv[2])
seen = 0
def dying(name, real):
    def call(*arguments, **options):
        global seen
        if name == "open" and not (arguments[1] & os.O_CREAT):
            return real(*arguments, **options)
        if seen == point:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        result = real(*arguments, **options)
        if seen == point:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        return result
    return call
for name in ("open", "fchmod", "fsync", "link", "chmod", "rename", "unlink"):
    setattr(checkpointfile.os, name, dying(name, getattr(os, name)))
project = Project(Path(sys.argv[1]))
project.environ["PATH"] = "/nowhere"
project.save(goal="new", summary="s" * 4000)
print("finished after", seen)
"""


def test_a_kill_before_or_after_any_step_leaves_a_whole_file_and_no_stuck_lock(project: Project) -> None:
    """SA-01, SB-03. Ends at the first point that a save does not reach any more."""
    project.save(goal="oldest")
    project.save(goal="old")
    point = 0
    while True:
        done = in_child(KILL_AT, str(project.root), str(point))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done
        with Folder(str(project.root)) as folder:
            main, backup = folder.read(checkpointfile.MAIN), folder.read(checkpointfile.BACKUP)
        assert isinstance(main, Valid), (point, main)
        assert isinstance(backup, Valid), (point, backup)
        assert main.checkpoint["goal"]["primary"] in ("old", "new")
        assert project.load()["found"] is True
        project.save(goal="old")
        assert names(project.root) == [".claude-checkpoint", ".claude-checkpoint.prev"], point
        point += 1
    assert point >= 2 * 8, done.stdout


def test_the_new_file_is_on_disk_before_it_has_the_name(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """SA-03: content, then name, then the folder."""
    project.save(goal="old")
    order = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def record(*arguments: Any, _name: str = name, _real: Any = real, **options: Any) -> None:
            order.append(_name if _name == "fsync" else f"rename to {arguments[1]}")
            _real(*arguments, **options)

        monkeypatch.setattr(os, name, record)
    project.save(goal="new")
    assert order == ["fsync", "rename to .claude-checkpoint.prev", "rename to .claude-checkpoint", "fsync"]


def test_old_temporary_files_are_removed_and_other_files_are_not(project: Project) -> None:
    project.write(".claude-checkpoint.tmp-0123456789abcdef", "left over")
    project.write(".claude-checkpoint.notes", "mine")
    project.save()
    assert names(project.root) == [".claude-checkpoint", ".claude-checkpoint.notes"]


# -------------------------------------------------------------------------------------------------------- two at once


def test_a_lock_that_is_held_for_too_long_is_an_error(project: Project) -> None:
    holder = os.open(project.root, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with Folder(str(project.root)) as folder:
            with pytest.raises(SessionError, match="another process has been saving here"):
                with folder.locked(wait_s=0.05):
                    pytest.fail("locked twice")
    finally:
        os.close(holder)
    with Folder(str(project.root)) as folder, folder.locked(wait_s=0):
        pass


def test_a_folder_that_cannot_be_locked_is_saved_to_with_a_warning(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    project.write(".claude-checkpoint.tmp-0123456789abcdef", "of another process")
    answer = project.save()
    assert any("cannot be locked" in warning for warning in answer["warnings"])
    assert ".claude-checkpoint.tmp-0123456789abcdef" in names(project.root)


def test_two_servers_that_merge_at_once_lose_nothing(project: Project) -> None:
    """SB-01: 40 merges over two processes, and a reader that never sees anything but a whole file."""
    project.save()
    servers = [Server(project.root), Server(project.root)]
    stop = threading.Event()
    odd: list[object] = []

    def watch() -> None:
        while not stop.is_set():
            with Folder(str(project.root)) as folder:
                found = folder.read(checkpointfile.MAIN)
            if not isinstance(found, Valid):
                odd.append(found)

    def work(server: Server, name: str) -> None:
        with server:
            for number in range(20):
                command = {"command": f"{name}{number}", "exitCode": 0}
                result = server.save(mode="merge", recentCommands=[command])
                assert result["isError"] is False, result

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=work, args=(server, name)) for server, name in zip(servers, "ab", strict=True)]
    watcher.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    watcher.join()
    assert not odd
    said = [command["command"] for command in project.checkpoint["recentCommands"]]
    assert sorted(said) == sorted(f"{name}{number}" for name in "ab" for number in range(20))
    for name in "ab":
        assert [command for command in said if command[0] == name] == [f"{name}{number}" for number in range(20)]


def test_a_replace_over_another_sessions_fresh_checkpoint_says_so(project: Project) -> None:
    other = Project(project.root)
    other.save(goal="their work, token ghp_" + "a" * 36)
    answer = project.save(goal="mine")
    [warning] = [warning for warning in answer["warnings"] if "another session" in warning]
    assert warning.startswith("Replaced another session's checkpoint (goal: their work")
    assert "just now); it is kept as .claude-checkpoint.prev." in warning
    assert "ghp_" not in warning
    assert not any("another session" in warning for warning in project.save()["warnings"])
    other.save(mode="merge")
    project.load()
    assert not any("another session" in warning for warning in project.save()["warnings"])


def test_a_replace_over_an_old_checkpoint_says_nothing(project: Project) -> None:
    project.plant()
    assert project.save()["warnings"] == []
