"""What a save makes of its input: limits, merge, 64 KB, secrets, paths."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_kit import Project, Repository

import compose
from checkpointfile import MAX_BYTES
from compose import Facts, Given
from plaintext import clean
from toolspec import SessionError


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    root.mkdir()
    return Project(root)


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"goal": "x" * 501}, "goal: 501 characters, the limit is 500"),
        ({"goal": ""}, "goal: must not be empty"),
        ({"goal": " \u200b"}, "goal: must not be empty"),
        ({"goal": None}, "goal: is required"),
        ({"goal": 1}, "goal: must be of type string, not number"),
        ({"summary": "x" * 4001}, "summary: 4001 characters, the limit is 4000"),
        ({"tasks": [{"description": "d"}] * 31}, "tasks: 31 items, the limit is 30"),
        ({"tasks": "[]"}, "tasks: must be of type array, not string"),
        ({"tasks": [{"status": "done"}]}, "tasks[0].description: is required"),
        ({"tasks": [{"description": "x" * 501}]}, "tasks[0].description: 501 characters, the limit is 500"),
        (
            {"tasks": [{"description": "d", "status": "TODO"}]},
            "tasks[0].status: must be one of pending, in_progress, done, blocked",
        ),
        (
            {"tasks": [{"description": "d", "evidence": "x" * 201}]},
            "tasks[0].evidence: 201 characters, the limit is 200",
        ),
        ({"nextSteps": ["s"] * 21}, "nextSteps: 21 items, the limit is 20"),
        ({"nextSteps": ["ok", "x" * 501]}, "nextSteps[1]: 501 characters, the limit is 500"),
        ({"decisions": ["s"] * 21}, "decisions: 21 items, the limit is 20"),
        ({"decisions": ["x" * 501]}, "decisions[0]: 501 characters, the limit is 500"),
        ({"modifiedFiles": [{"path": "p"}] * 101}, "modifiedFiles: 101 items, the limit is 100"),
        ({"modifiedFiles": [{"path": "x" * 1025}]}, "modifiedFiles[0].path: 1025 characters, the limit is 1024"),
        ({"modifiedFiles": ["p"]}, "modifiedFiles[0]: must be of type object, not string"),
        ({"recentCommands": [{"command": "c"}] * 51}, "recentCommands: 51 items, the limit is 50"),
        (
            {"recentCommands": [{"command": "x" * 32_769}]},
            "recentCommands[0].command: 32769 characters, the limit is 32768",
        ),
        (
            {"recentCommands": [{"command": "c", "exitCode": "0"}]},
            "recentCommands[0].exitCode: must be of type integer, not string",
        ),
        (
            {"recentCommands": [{"command": "c", "exitCode": 1.5}]},
            "recentCommands[0].exitCode: must be of type integer",
        ),
        ({"recentCommands": [{"command": "c", "exitCode": 2**40}]}, "recentCommands[0].exitCode: the maximum is"),
        ({"mode": "append"}, "mode: must be one of replace, merge"),
        ({"projectRoot": "/x" * 2049}, "projectRoot: 4098 characters, the limit is 4096"),
        ({"x": [[[[[[[[[]]]]]]]]]}, "arguments: nested deeper than 8 levels"),
        ({"goal": "x" * 501, "mode": "m", "tasks": 1, "decisions": 2, "nextSteps": 3}, "; and 2 more"),
    ],
)
def test_input_over_a_limit_is_refused_by_field_size_and_limit(
    project: Project, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(SessionError) as caught:
        project.save(**arguments)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "xxx" not in str(caught.value)
    assert not project.file.exists()


def test_input_at_every_limit_is_taken(project: Project) -> None:
    answer = project.save(
        goal="é" * 500,
        summary="😀" * 4000,
        tasks=[{"description": f"{number:02}" + "d" * 498, "status": "done"} for number in range(30)],
        nextSteps=["s" * 500] * 20,
        decisions=[f"{number:02}" + "d" * 498 for number in range(20)],
    )
    assert answer["counts"] == {"tasks": 30, "modifiedFiles": 0, "recentCommands": 0, "redactions": 0}
    assert answer["bytes"] == project.file.stat().st_size


def test_null_members_count_as_absent(project: Project) -> None:
    project.save(summary="kept", nextSteps=["kept"], tasks=[{"description": "d", "status": None}])
    project.save(mode="merge", summary=None, nextSteps=None, decisions=None, recentCommands=None)
    assert project.checkpoint["summary"] == "kept"
    assert project.checkpoint["nextSteps"] == ["kept"]
    assert project.checkpoint["goal"]["tasks"] == [{"description": "d", "status": "pending"}]


def test_unknown_members_are_named_and_ignored(project: Project) -> None:
    answer = project.save(nextStep=["a"], tasks=[{"description": "d", "priority": 1}])
    assert answer["warnings"] == ["Ignored unknown field(s): nextStep, tasks[0].priority."]


def test_commands_and_notes_are_cut_after_redaction(project: Project) -> None:
    secret = "ghp_" + "b" * 36
    answer = project.save(
        recentCommands=[{"command": "c" * 980 + f" {secret}", "note": "n" * 400}],
        modifiedFiles=[{"path": "p", "note": "m" * 301}],
    )
    [command] = project.checkpoint["recentCommands"]
    assert len(command["command"]) <= 1000
    assert "ghp_" not in project.file.read_text()
    assert command["note"] == "n" * 299 + "…"
    assert project.entries()["p"]["note"] == "m" * 299 + "…"
    assert project.checkpoint["meta"]["truncated"] is True
    assert any(warning.startswith("Cut a command") for warning in answer["warnings"])


def test_empty_items_are_left_out(project: Project) -> None:
    project.save(nextSteps=["", " ", "a"], decisions=["\u200b", "b"], recentCommands=[{"command": "c", "note": ""}])
    assert project.checkpoint["nextSteps"] == ["a"]
    assert project.checkpoint["decisions"] == ["b"]
    assert "note" not in project.checkpoint["recentCommands"][0]


# ------------------------------------------------------------------------------------------------------------- merge


def test_replace_keeps_nothing(project: Project) -> None:
    project.save(
        goal="old",
        summary="s",
        nextSteps=["n"],
        decisions=["d"],
        tasks=[{"description": "t"}],
        recentCommands=[{"command": "c"}],
        modifiedFiles=[{"path": "p"}],
    )
    old = project.checkpoint
    project.save(goal="new")
    new = project.checkpoint
    assert new["goal"] == {"primary": "new", "tasks": []}
    assert [new[key] for key in ("nextSteps", "decisions", "modifiedFiles", "recentCommands")] == [[], [], [], []]
    assert "summary" not in new
    assert new["id"] != old["id"]
    assert new["createdAt"] >= old["createdAt"]


def test_merge_follows_the_table(project: Project) -> None:
    project.write("one", "1\n")
    project.save(
        goal="old",
        summary="kept",
        nextSteps=["kept"],
        decisions=["a", "b"],
        tasks=[{"description": "Session cookie", "status": "in_progress"}, {"description": "Logout"}],
        recentCommands=[{"command": "c1"}],
        modifiedFiles=[{"path": "one", "note": "first"}],
    )
    old = project.checkpoint
    project.write("two", "2\n")
    answer = project.save(
        goal="new",
        mode="merge",
        decisions=["b ", "c"],
        tasks=[{"description": " Session  cookie", "status": "done"}, {"description": "Added", "status": "blocked"}],
        recentCommands=[{"command": "c2"}],
        modifiedFiles=[{"path": "two"}],
    )
    new = project.checkpoint
    assert (new["id"], new["createdAt"]) == (old["id"], old["createdAt"])
    assert new["goal"]["primary"] == "new"
    assert new["goal"]["tasks"] == [
        {"description": "Session cookie", "status": "done"},
        {"description": "Logout", "status": "pending"},
        {"description": "Added", "status": "blocked"},
    ]
    assert (new["summary"], new["nextSteps"], new["decisions"]) == ("kept", ["kept"], ["a", "b", "c"])
    assert [command["command"] for command in new["recentCommands"]] == ["c1", "c2"]
    assert new["recentCommands"][0]["at"] == old["recentCommands"][0]["at"]
    assert list(project.entries()) == ["two", "one"]
    assert project.entries()["one"]["note"] == "first"
    assert answer["mode"] == "merge"


def test_an_empty_value_in_a_merge_clears(project: Project) -> None:
    project.save(summary="s", nextSteps=["n"])
    project.save(mode="merge", summary="", nextSteps=[])
    assert "summary" not in project.checkpoint
    assert project.checkpoint["nextSteps"] == []


def test_a_task_is_found_by_what_is_stored_and_its_last_state_counts(project: Project) -> None:
    secret = "deploy with ghp_" + "c" * 36
    project.save(tasks=[{"description": secret}, {"description": "cafe\u0301"}])
    project.save(
        mode="merge",
        tasks=[
            {"description": secret, "status": "done"},
            {"description": "caf\u00e9", "status": "done"},
            {"description": "caf\u00e9", "status": "blocked"},
            {"description": "Café"},
        ],
    )
    states = [task["status"] for task in project.checkpoint["goal"]["tasks"]]
    assert states == ["done", "blocked", "pending"]


def test_evidence_goes_with_the_state_that_it_proves(project: Project) -> None:
    project.save(tasks=[{"description": "d", "status": "done", "evidence": "npm test, exit 0"}])
    assert list(project.checkpoint["goal"]["tasks"][0]) == ["description", "status", "evidence"]
    project.save(mode="merge", tasks=[{"description": "d", "status": "done"}])
    assert project.checkpoint["goal"]["tasks"][0]["evidence"] == "npm test, exit 0"
    project.save(mode="merge", tasks=[{"description": "d", "status": "done", "evidence": ""}])
    assert project.checkpoint["goal"]["tasks"] == [{"description": "d", "status": "done"}]
    project.save(mode="merge", tasks=[{"description": "d", "evidence": "red"}])
    assert project.checkpoint["goal"]["tasks"] == [{"description": "d", "status": "pending", "evidence": "red"}]
    project.save(mode="merge", tasks=[{"description": "d", "status": "in_progress"}])
    assert project.checkpoint["goal"]["tasks"] == [{"description": "d", "status": "in_progress"}]


def test_a_merge_beyond_the_limits_drops_the_oldest_and_says_so(project: Project) -> None:
    project.save(
        decisions=[f"old {number}" for number in range(20)],
        tasks=[{"description": f"old {number}", "status": "done"} for number in range(30)],
        recentCommands=[{"command": f"old {number}"} for number in range(50)],
    )
    answer = project.save(
        mode="merge", decisions=["new"], tasks=[{"description": "new"}], recentCommands=[{"command": "new"}]
    )
    checkpoint = project.checkpoint
    assert checkpoint["decisions"] == [*(f"old {number}" for number in range(1, 20)), "new"]
    assert [task["description"] for task in checkpoint["goal"]["tasks"]][:1] == ["old 1"]
    assert len(checkpoint["goal"]["tasks"]) == 30
    assert checkpoint["recentCommands"][0]["command"] == "old 1"
    assert checkpoint["recentCommands"][-1]["command"] == "new"
    assert checkpoint["meta"]["truncated"] is True
    assert len(answer["warnings"]) == 3


def test_too_many_unfinished_tasks_are_refused_and_nothing_is_written(project: Project) -> None:
    project.save(tasks=[{"description": f"{number}"} for number in range(30)])
    before = project.file.read_bytes()
    with pytest.raises(SessionError, match="tasks: 31 unfinished after the merge, the limit is 30"):
        project.save(mode="merge", tasks=[{"description": "one more"}])
    assert project.file.read_bytes() == before


def test_files_of_an_earlier_save_are_carried_over_as_the_agents_with_a_new_hash(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    for name in ("committed", "edited later", "deleted"):
        repo.write(name, "1\n")
    repo.save(modifiedFiles=[{"path": "deleted", "note": "n"}, {"path": "not there yet"}])
    repo.commit()
    repo.commit_file("edited later", "2\n")
    repo.git("rm", "-q", "deleted")
    repo.commit()
    repo.write("fresh")
    repo.save(mode="merge", modifiedFiles=[{"path": "edited later"}])
    entries = repo.entries()
    assert {path: (entry["status"], entry["source"]) for path, entry in entries.items()} == {
        "edited later": ("M", "agent"),
        "fresh": ("??", "git"),
        "deleted": ("D", "agent"),
        "not there yet": ("M", "agent"),
        "committed": ("M", "agent"),
    }
    assert entries["edited later"]["hash"] == repo.git("hash-object", "edited later")
    assert "hash" not in entries["deleted"]
    assert entries["deleted"]["note"] == "n"
    drift = repo.load()["drift"]
    assert (drift["changedSince"], drift["notChecked"]) == ([], ["not there yet"])


def test_what_is_carried_over_does_not_push_out_what_changed_now(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    names = [f"{number:03}" for number in range(100)]
    for name in names:
        repo.write(name)
    repo.save(modifiedFiles=[{"path": "007", "note": "n"}])
    repo.commit()
    for name in names[:20]:
        repo.write(f"tracked {name}")
    repo.git("add", ".")
    repo.write("untracked")
    answer = repo.save(mode="merge", modifiedFiles=[{"path": "fresh"}])
    statuses = repo.statuses()
    assert len(statuses) == 100
    assert sum(status == "A" for status in statuses.values()) == 20
    assert "007" in statuses
    assert "fresh" in statuses
    assert "untracked" not in statuses
    assert any(warning.startswith("Left out 22 ") for warning in answer["warnings"])


# ------------------------------------------------------------------------------------------------------------- paths


def test_paths_are_stored_relative_and_those_that_leave_the_root_are_skipped(project: Project, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(project.root)
    (project.root / "out").symlink_to(tmp_path)
    project.write("src/a")
    (project.root / "into").symlink_to("src")
    given = {
        "src/a": "src/a",
        str(project.root / "src/b"): "src/b",
        str(tmp_path / "alias/src/c"): "src/c",
        "./src//d": "src/d",
        "src/../e": "e",
        "into/f": "src/f",
        "src/g/": "src/g",
        "~": "~",
        "../outside": None,
        "/etc/passwd": None,
        str(tmp_path / "project-twin/x"): None,
        "out/secret": None,
        ".git/config": None,
        "sub/.GIT/hooks/x": None,
        ".claude-checkpoint": None,
        ".": None,
        "a\0b": None,
        "/": None,
    }
    answer = project.save(modifiedFiles=[{"path": path} for path in given])
    assert list(project.entries()) == [stored for stored in given.values() if stored]
    skipped = sum(stored is None for stored in given.values())
    assert answer["warnings"] == [f"Skipped {skipped} file(s) outside of the project root or inside .git."]
    assert str(tmp_path) not in project.file.read_text()


def test_only_our_own_files_at_the_top_are_left_out_of_what_a_merge_carries_over(project: Project) -> None:
    named = [".claude-checkpoints2/a.py", ".claude-checkpoint.notes"]
    for name in named:
        project.write(name)
    project.save(modifiedFiles=[{"path": name} for name in named])
    project.save(mode="merge")
    assert list(project.entries()) == [".claude-checkpoints2/a.py"]


def test_a_file_named_twice_is_one_entry_with_the_last_note(project: Project) -> None:
    project.save(modifiedFiles=[{"path": "a", "note": "1"}, {"path": "b"}, {"path": "./a", "note": "2"}])
    assert [(path, entry.get("note")) for path, entry in project.entries().items()] == [("a", "2"), ("b", None)]


def test_named_files_come_first_and_keep_what_git_says(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    for name in "abc":
        repo.write(name)
    repo.save(modifiedFiles=[{"path": "c", "note": "n"}, {"path": "README"}])
    assert repo.statuses() == {"c": "??", "README": "M", "a": "??", "b": "??"}
    assert [entry["source"] for entry in repo.entries().values()] == ["git", "agent", "git", "git"]


def test_a_hard_link_is_a_file_of_its_own(project: Project) -> None:
    project.write("a")
    (project.root / "b").hardlink_to(project.root / "a")
    project.save(modifiedFiles=[{"path": "a"}, {"path": "b"}])
    assert list(project.entries()) == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------ secrets

GITHUB = "ghp_" + "b" * 36
CLOUD = "AKIA" + "Y" * 16


def test_no_field_lets_a_secret_reach_the_disk(project: Project) -> None:
    """SR-01: names stay, values go."""
    access, secret = "AKIA" + "Z" * 16, "k" * 20 + "/" + "Q" * 19
    text = f'AWS_ACCESS_KEY_ID={access} AWS_SECRET_ACCESS_KEY = "{secret}"'
    project.save(
        goal=text,
        summary=text,
        tasks=[{"description": text, "status": "done", "evidence": text}],
        nextSteps=[text],
        decisions=[text],
        modifiedFiles=[{"path": "p", "note": text}],
        recentCommands=[{"command": text, "note": text}],
    )
    stored = project.file.read_text()
    assert access not in stored
    assert secret not in stored
    assert stored.count("AWS_SECRET_ACCESS_KEY") == 9
    assert project.checkpoint["meta"]["redactions"] == 18


def test_the_example_of_the_reference_is_redacted_as_it_shows(project: Project) -> None:
    command = "GITHUB_CLIENT_SECRET=gh_live_8f2a91 npm run dev"
    answer = project.save(recentCommands=[{"command": command, "exitCode": 0}])
    assert project.checkpoint["recentCommands"][0]["command"] == "GITHUB_CLIENT_SECRET=«redacted» npm run dev"
    assert answer["counts"]["redactions"] == 1
    assert answer["message"].endswith("\n⚠ Redacted 1 secret-looking value(s).")


def test_redactions_are_those_of_this_save(project: Project) -> None:
    project.save(summary=f"token {GITHUB}", recentCommands=[{"command": f"curl {GITHUB}"}])
    answer = project.save(mode="merge", nextSteps=[f"use «redacted» and {CLOUD}"])
    assert answer["counts"]["redactions"] == project.checkpoint["meta"]["redactions"] == 1


def test_a_secret_split_by_invisible_characters_is_still_seen(project: Project) -> None:
    project.save(summary="\u200b".join(GITHUB), goal="A\u202eKIA" + "Z" * 16)
    stored = project.file.read_text()
    assert GITHUB not in stored
    assert "AKIAZZ" not in stored


def test_secrets_in_branch_remote_and_file_names_stay_out_of_file_and_answers(tmp_path: Path) -> None:
    """SR-06"""
    password = "p" * 20
    repo = Repository(tmp_path / "repo")
    repo.git("remote", "add", "origin", f"https://user:{password}@git.example.invalid/x.git")
    repo.git("checkout", "-q", "-b", f"fix-{GITHUB}")
    repo.write(f"key-{CLOUD}.txt")
    answers = [repo.save(modifiedFiles=[{"path": f"also-{CLOUD}"}])]
    assert "Skipped 2 file(s) whose path looks like it holds a secret." in answers[0]["warnings"]
    repo.commit(message=f"with {GITHUB}")
    answers += [repo.load(), repo.load(is_full=True)]
    with pytest.raises(SessionError) as caught:
        repo.save(projectRoot=f"/nowhere/{GITHUB}")
    said = repo.file.read_text() + json.dumps(answers) + str(caught.value)
    for secret in (password, GITHUB, CLOUD):
        assert secret not in said
    assert answers[1]["drift"]["branchChanged"] is False
    assert answers[1]["drift"]["commitsSince"] == 1


def test_a_file_whose_old_name_holds_a_secret_is_skipped(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "repo")
    secret = "ghp_" + "a" * 36
    repo.commit_file(f"{secret}.txt", "content that is long enough to be recognised\n" * 5)
    repo.git("mv", f"{secret}.txt", "plain.txt")
    answer = repo.save()
    assert answer["warnings"] == ["Skipped 1 file(s) whose path looks like it holds a secret."]
    assert repo.entries() == {}
    assert secret not in repo.file.read_text()


def test_a_checkpoint_that_already_holds_secrets_is_redacted_when_it_is_shown(project: Project) -> None:
    """SR-07"""
    slack, password = "xoxb-" + "3" * 24, "w" * 16
    text = f"{slack} and postgres://u:{password}@db/x"
    project.plant(
        summary=text,
        nextSteps=[text],
        goal={"primary": text, "tasks": [{"description": text, "status": "done", "evidence": text}]},
        recentCommands=[{"command": text, "note": text}],
        modifiedFiles=[{"path": f"a-{slack}", "status": "M", "source": "agent", "note": text}],
        project={"name": slack},
        git={"branch": slack, "head": "1" * 40, "dirty": False},
        extra={"deep": [text], slack: 1},
    )
    said = json.dumps([project.load(), project.load(is_full=True)])
    assert slack not in said
    assert password not in said
    project.save(mode="merge")
    assert project.entries() == {}
    stored = project.file.read_text()
    assert slack not in stored
    assert password not in stored
    assert "tasks" in project.checkpoint["goal"]
    assert project.checkpoint["meta"]["redactions"] == 0


def test_a_checkpoint_with_secrets_in_its_facts_is_redacted_in_its_drift(tmp_path: Path) -> None:
    """SR-07"""
    repo = Repository(tmp_path / "repo")
    repo.plant(
        git={"branch": f"b-{GITHUB}", "head": repo.head, "dirty": False},
        modifiedFiles=[
            {"path": f"a-{CLOUD}", "status": "M", "source": "git", "hash": "1" * 40},
            {"path": f"b-{CLOUD}", "status": "M", "source": "agent"},
            {"path": "README", "status": "R", "source": "git", "hash": "1" * 40, "from": f"c-{CLOUD}"},
        ],
    )
    repo.write(f"c-{CLOUD}")
    answers = [repo.load(), repo.load(is_full=True)]
    assert answers[0]["drift"]["branchChanged"] is True
    assert [len(answers[0]["drift"][name]) for name in ("deleted", "notChecked", "restored")] == [1, 1, 1]
    said = json.dumps(answers)
    assert GITHUB not in said
    assert CLOUD not in said


def test_a_key_block_is_gone_in_time_with_or_without_its_end(project: Project) -> None:
    """SR-03"""
    dashes = "-" * 5
    lines = [f"{'MIIE'}{number:02}" + "Ab9/" * 14 + "zz" for number in range(60)]
    head = f"{dashes}BEGIN RSA PRIVATE KEY{dashes}"
    unfinished = head + "\\n" + "\\n".join(lines)
    whole = "\n".join([head, *lines, f"{dashes}END RSA PRIVATE KEY{dashes}"])
    begun = time.monotonic()
    project.save(recentCommands=[{"command": unfinished}, {"command": whole, "note": whole}])
    assert time.monotonic() - begun < 2
    stored = project.file.read_text()
    assert not any(line in stored for line in lines)


@pytest.mark.parametrize(
    "text", ["A_" * 16_384, "a." * 16_000 + "token", "a=" * 16_384, "x" * 32_768, "€\u0301" * 16_000]
)
def test_long_runs_of_anything_are_redacted_in_time(project: Project, text: str) -> None:
    """SR-04"""
    begun = time.monotonic()
    project.save(recentCommands=[{"command": text, "note": text}])
    with pytest.raises(SessionError, match="the limit is"):
        project.save(summary=text * 8)
    assert time.monotonic() - begun < 2


# -------------------------------------------------------------------------------------------------------------- 64 KB


def facts(files: list[dict[str, Any]], named: frozenset[str] = frozenset()) -> Facts:
    return Facts("2026-10-08T02:23:55.477Z", "id", {}, "p", None, files, named)  # type: ignore[arg-type]


def given_with(**members: Any) -> Given:
    usual = Given(
        goal="g",
        tasks=[],
        summary=None,
        next_steps=None,
        decisions=None,
        files=[],
        commands=[],
        is_merge=False,
        project_root=None,
        redactions=0,
        is_cut=False,
        warnings=[],
    )
    return usual._replace(**members)


def entry(number: int, status: str, *, note: str = "") -> dict[str, Any]:
    made = {"path": f"{number:03}" + "p" * 700, "status": status, "source": "git"}
    return made | {"note": note} if note else made


def test_what_goes_first_when_the_file_is_too_large() -> None:
    """The whole order, by making what cannot go larger and larger."""
    commands = [{"command": f"{number}" + "c" * 300} for number in range(20)]
    files = [
        entry(0, "M", note="n" * 250),
        *(entry(number, "M") for number in range(1, 9)),
        *(entry(number, "??") for number in range(9, 17)),
        *(entry(number, "M") for number in range(17, 20)),
    ]
    named = frozenset({files[0]["path"], files[17]["path"]})
    tasks = [{"description": f"{number}" + "t" * 400, "status": "done"} for number in range(10)]
    decisions = [f"{number}" + "d" * 400 for number in range(10)]
    steps_seen = []
    for size in range(0, 66_000, 300):
        made = compose.compose(
            given_with(
                commands=[dict(command) for command in commands],
                tasks=tasks,
                decisions=decisions,
                summary="s" * 4000,
                next_steps=["n" * size] if size else [],
            ),
            None,
            facts([dict(file) for file in files], named),
            is_cut=False,
        )
        checkpoint = made.checkpoint
        assert len(made.content) <= MAX_BYTES
        assert len(made.content) > MAX_BYTES - 1200 or not made.warnings
        assert checkpoint["meta"]["truncated"] is bool(made.warnings)
        kept = [file["path"] for file in checkpoint["modifiedFiles"]]
        untracked = [file["path"] for file in checkpoint["modifiedFiles"] if file["status"] == "??"]
        gone = {
            "commands": len(commands) - len(checkpoint["recentCommands"]),
            "untracked": 8 - len(untracked),
            "tracked": sum(
                file["path"] not in kept for file in files if file["status"] == "M" and file["path"] not in named
            ),
            "notes": int(all("note" not in file for file in checkpoint["modifiedFiles"])),
            "done": 10 - len(checkpoint["goal"]["tasks"]),
            "decisions": 10 - len(checkpoint["decisions"]),
            "summary": 4000 - len(checkpoint.get("summary", "")),
            "named": len(named - set(kept)),
        }
        whole = {
            "commands": 20,
            "untracked": 8,
            "tracked": 10,
            "notes": 1,
            "done": 10,
            "decisions": 10,
            "summary": 4000,
        }
        order = list(gone)
        last = max((index for index, name in enumerate(order) if gone[name]), default=-1)
        for name in order[: max(last, 0)]:
            assert gone[name] == whole[name], (size, gone)
        if last >= 0 and order[last] not in steps_seen:
            steps_seen.append(order[last])
        assert len(made.warnings) == sum(1 for name in order if gone[name])
        if checkpoint["recentCommands"]:
            assert checkpoint["recentCommands"][-1]["command"][:2] == "19"
        assert untracked == [file["path"] for file in files if file["status"] == "??"][: len(untracked)]
        if not checkpoint.get("summary", "s" * 4000).endswith("s"):
            assert checkpoint["summary"].endswith("…")
        if last == len(order) - 1 and gone["named"] == 2:
            break
    assert steps_seen == ["commands", "untracked", "tracked", "notes", "done", "decisions", "summary", "named"]


def test_what_may_not_go_is_refused_when_it_alone_is_too_large() -> None:
    with pytest.raises(SessionError, match=r"nextSteps: 70,000 bytes; .* the limit is 65,536"):
        compose.compose(given_with(next_steps=["é" * 35_000]), None, facts([]), is_cut=False)


def test_the_largest_input_that_the_schema_takes_is_saved_within_64_kb(project: Project) -> None:
    wide = "😀"
    answer = project.save(
        goal=wide * 500,
        summary=wide * 4000,
        tasks=[{"description": f"{number:03}" + "t" * 497} for number in range(30)],
        nextSteps=["s" * 500] * 20,
        decisions=[f"{number:02}" + wide * 498 for number in range(20)],
        modifiedFiles=[{"path": f"{number:03}" + "p" * 200, "note": "n" * 300} for number in range(100)],
        recentCommands=[{"command": "c" * 1000, "note": "n" * 300}] * 50,
    )
    assert answer["bytes"] == project.file.stat().st_size <= MAX_BYTES
    assert project.checkpoint["meta"]["truncated"] is True
    assert len(project.checkpoint["goal"]["tasks"]) == 30
    assert len(project.checkpoint["nextSteps"]) == 20
    assert "to keep the file within 65,536 bytes." in answer["message"]


texts = st.text(max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {"goal": texts.filter(lambda text: bool(clean(text).strip()))},
        optional={
            "summary": st.text(max_size=400),
            "tasks": st.lists(st.fixed_dictionaries({"description": texts.filter(bool)}), max_size=5),
            "nextSteps": st.lists(texts, max_size=5),
            "decisions": st.lists(texts, max_size=5),
            "recentCommands": st.lists(st.fixed_dictionaries({"command": texts.filter(bool)}), max_size=5),
            "mode": st.sampled_from(["replace", "merge"]),
        },
    )
)
def test_any_text_is_saved_and_comes_back_as_it_was_saved(arguments: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder), {"PATH": "/nowhere"})
        project.save(**arguments)
        first = project.checkpoint
        loaded = project.load(is_full=True)["checkpoint"]
        assert loaded == first
        project.save(first["goal"]["primary"], mode="merge")
        second = project.checkpoint
        assert {**second, "updatedAt": 0, "meta": 0} == {**first, "updatedAt": 0, "meta": 0}
