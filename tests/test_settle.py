"""What an operator decides: resolve and prune, and what the next relay makes of it."""

import json
import re
import shlex
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from console_helpers import (
    HANDLE,
    IS_ERROR,
    NOW_MS,
    RESULT,
    ROOT,
    Life,
    Says,
    cli_words,
    life,
    on_terminal,
    run_cli,
    stopped_group,
)
from storage_helpers import child, contents, rows
from support import Client, ledger_lines, refusal_of, relay, relay_words, text_of, upstream_words

from console import ConsoleError
from prune import _shrink
from reader import reading
from settle import RESULT_SCHEMA, Verdict, plan, read_result, settle
from states import Action, Cause, Entry, Status, decide

DAY_MS: Final = 86_400_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "j.db"


@pytest.fixture
def says(capfd: pytest.CaptureFixture[str]) -> Says:
    return Says(capfd)


@pytest.fixture
def receipt(tmp_path: Path) -> Path:
    file = tmp_path / "receipt.json"
    file.write_bytes(b'{\n  "content": [\n    {"type": "text", "text": "receipt 7"}\n  ],\n  "total": 1.50\n}\n')
    return file


RECEIPT: Final = b'{"content":[{"type":"text","text":"receipt 7"}],"total":1.50}'


def entry_at(path: Path, sequence: int, workflow_id: str = "run") -> Entry:
    """What the next owner finds at a place."""
    with life(path) as owner:
        found = owner.journal.entry(workflow_id, sequence)
        assert found is not None
        return found


def in_doubt(path: Path, **more: Any) -> Entry:
    """A journal with one call in doubt, at sequence 4."""
    with life(path) as owner:
        return owner.call(4, Status.IN_DOUBT, **more)


def decisions(path: Path) -> list[tuple[object, ...]]:
    return rows(path, "SELECT dispatch, status, reason FROM decisions ORDER BY id")


# ----------------------------------------------------------------------------------------------------------- resolve


def test_a_completed_call_is_replayed_with_the_operators_result(path: Path, says: Says, receipt: Path) -> None:
    doubted = in_doubt(path)
    says("resolve", path, 4, "--completed", receipt, "--yes", "--reason", "seen at the bank")
    assert "settled" in says("list", path)
    entry = entry_at(path, 4)
    assert (entry.status, entry.result, entry.error) == (Status.COMPLETED, RECEIPT, None)
    assert decide(entry, doubted.signature) is Action.REPLAY
    assert decisions(path) == [(doubted.id, "COMPLETED", "seen at the bank")]


def test_a_failed_call_is_replayed_as_an_error_of_ours(path: Path, says: Says) -> None:
    doubted = in_doubt(path)
    says("resolve", path, 4, "--failed", "card declined", "--yes")
    entry = entry_at(path, 4)
    assert decide(entry, doubted.signature) is Action.REPLAY
    assert entry.status is Status.FAILED
    error = json.loads(entry.error or b"")
    assert error["code"] == 31007
    assert "(card declined)" in error["message"]
    facts = error["data"]["checkpoint"]
    assert (facts["reason"], facts["sequence"], facts["status"]) == ("resolved_failed", 4, "FAILED")
    assert facts["next_action"].endswith(f" journal show {path} 4 --workflow-id run")


def test_a_call_that_was_not_executed_leaves_its_place_free(path: Path, says: Says) -> None:
    doubted = in_doubt(path)
    says("resolve", path, 4, "--not-executed", "--yes")
    entry = entry_at(path, 4)
    assert entry.status is Status.NOT_EXECUTED
    assert decide(entry, doubted.signature) is Action.PROCEED
    assert decide(entry, "another") is Action.DIVERGE
    with life(path) as owner:
        owner.call(4, attempt=2)
    assert entry_at(path, 4).status is Status.COMPLETED


@pytest.mark.parametrize("flags", [["--completed", "-"], ["--failed", "no"], ["--not-executed"]], ids=lambda f: f[0])
@pytest.mark.parametrize("is_on_record", [True, False], ids=["on record", "left open"])
def test_a_settled_doubt_is_closed_and_stays_so_for_every_later_owner(
    path: Path, flags: list[str], is_on_record: bool
) -> None:
    with life(path) as owner:
        open_call = owner.begin(4)
        if is_on_record:
            owner.doubt(open_call)
    assert run_cli("resolve", path, 4, *flags, "--yes", input=RESULT.decode()).returncode == 0
    assert rows(path, "SELECT cause, is_open FROM doubts") == [("upstream_lost" if is_on_record else "relay_lost", 0)]
    for sequence in (5, 6):
        with life(path) as owner:
            assert owner.journal.doubts() == []
            owner.call(sequence)
    assert rows(path, "SELECT count(*) FROM doubts WHERE is_open") == [(0,)]
    assert run_cli("verify", path).returncode == 0


def test_settling_one_open_call_of_a_dead_owner_leaves_the_others_in_doubt(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.begin(1)
        owner.begin(2)
        owner.begin(3)
    says("resolve", path, 2, "--not-executed", "--yes")
    with life(path) as owner:
        assert [entry.sequence for entry in owner.journal.doubts()] == [1, 3]
        owner.call(4)
    with life(path) as owner:
        assert [entry.sequence for entry in owner.journal.doubts()] == [1, 3]


def test_a_result_for_a_modern_call_says_that_it_is_complete(path: Path, says: Says, receipt: Path) -> None:
    in_doubt(path, is_modern=True)
    says("resolve", path, 4, "--completed", receipt, "--yes")
    assert json.loads(entry_at(path, 4).result or b"")["resultType"] == "complete"


def test_an_earlier_attempt_can_be_settled_too(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, Status.IN_DOUBT)
        owner.call(1, attempt=2)  # its server says that it may be repeated
    assert "resolve" in says("show", path, 1)
    assert "--attempt=1" in says("show", path, 1)
    says.refusal("resolve", path, 1, "--not-executed", "--yes")
    says("resolve", path, 1, "--attempt", 1, "--not-executed", "--yes")
    with life(path) as owner:
        assert owner.journal.doubts() == []
        found = owner.journal.entry("run", 1)
        assert found is not None
        assert (found.attempt, found.status) == (2, Status.COMPLETED)


def test_an_attempt_that_was_not_sent_leaves_the_doubt_before_it_to_be_settled(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, Status.IN_DOUBT)
        owner.call(1, Status.NOT_SENT, attempt=2)
    (row,) = says.objects("list", path, "--json")
    assert (row["attempt"], row["status"]) == (1, "IN_DOUBT")
    assert says.objects("stats", path, "--json")[0]["rows"] == {"IN_DOUBT": 1}
    assert "nothing to prune" in says("prune", path, "--older-than", "0s")
    assert " --attempt" not in says("show", path, 1)
    says("resolve", path, 1, "--failed", "no", "--yes")
    assert says.objects("show", path, 1, "--json")[0]["status"] == "FAILED"


def test_what_was_done_is_an_object_for_programs(path: Path, says: Says) -> None:
    in_doubt(path)
    (done,) = says.objects("resolve", path, 4, "--not-executed", "--yes", "--json", "--reason", "r")
    assert (done["workflow_id"], done["sequence"], done["status"], done["reason"]) == ("run", 4, "NOT_EXECUTED", "r")


def keys_of(value: Any) -> Iterator[str]:
    """Every key in a JSON value, but for those that are names and statuses and for what went over the wire."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        if key not in ("arguments", "result", "error", "members", "rows"):
            yield from keys_of(inner)
    for inner in value if isinstance(value, list) else ():
        yield from keys_of(inner)


def test_every_key_that_a_program_can_meet_is_documented(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, Status.IN_DOUBT)
        owner.call(1, attempt=2, body=b'{"content":NaN}')
        owner.end_task(owner.call(2, Status.TASK, HANDLE))
        owner.call(2, workflow_id="run~1", fork_from="run", arguments=b"{}")
        owner.call(1, workflow_id="old")
    said = [
        *says.objects("resolve", path, 2, "--failed", "no", "--yes", "--force", "--reason", "r", "--json"),
        *says.objects("prune", path, "--older-than", "0s", "--json"),
        *(line for sequence in (1, 2) for line in says.objects("show", path, sequence, "--json")),
        *says.objects("show", path, 1, "--workflow-id", "old", "--json"),
        *(line for command in ("list", "export", "stats", "verify") for line in says.objects(command, path, "--json")),
    ]
    documented = set(re.findall("`([a-z_]+)`", (ROOT / "docs" / "operating.md").read_text("utf-8")))
    assert set(keys_of(said)) - {"type"} <= documented
    assert {"journal", "attempt", "owner", "fork", "pruning"} == {line["type"] for line in said if "type" in line}


# ---------------------------------------------------------------------------------------------------- what is no result


@pytest.mark.parametrize(
    ("value", "says_what"),
    [
        (b"", "no tool result"),
        (b"done", "no tool result"),
        (b"[]", "is not of type 'object'"),
        (b"{}", "'content' is a required property"),
        (b'{"content":"done"}', "content: 'done' is not of type 'array'"),
        (b'{"content":[{"text":"x"}]}', "content/0: 'type' is a required property"),
        (b'{"content":[{"type":"txt","text":"x"}]}', "content/0/type: 'txt' is not one of"),
        (b'{"content":[{"type":"text"}]}', "content/0: 'text' is a required property"),
        (b'{"content":[{"type":"image","data":"x"}]}', "'mimeType' is a required property"),
        (b'{"content":[{"type":"resource","resource":{"uri":"x"}}]}', "content/0/resource"),
        (b'{"content":[],"isError":"yes"}', "isError: 'yes' is not of type 'boolean'"),
        (b'{"content":[],"resultType":"input_required"}', "resultType: 'complete' was expected"),
        (b'{"content":[],"task":{"taskId":"1"}}', "the handle of a task"),
        (b'{"content":[],"content":[]}', "repeats a key"),
        (b'{"content":[],"n":NaN}', "NaN is not JSON"),
        (b'{"content":[]} {"content":[]}', "Extra data"),
        (b'{"content":[{"type":"text","text":"\xff"}]}', "can't decode"),
        (b'{"content":[{"type":"text","text":"a\nb"}]}', "control character"),
        (b"[" * 100_000, "no tool result"),
    ],
    ids=lambda value: value.decode("latin-1")[:40] if isinstance(value, bytes) else "",
)
def test_what_is_no_tool_result_is_refused_before_anything_is_asked(
    path: Path, says: Says, tmp_path: Path, value: bytes, says_what: str
) -> None:
    in_doubt(path)
    file = tmp_path / "result.json"
    file.write_bytes(value)
    assert says_what in says.refusal("resolve", path, 4, "--completed", file)
    assert decisions(path) == []


def test_every_kind_of_content_is_a_tool_result() -> None:
    blocks = [
        {"type": "text", "text": "x", "annotations": {"priority": 1}},
        {"type": "image", "data": "eA==", "mimeType": "image/png"},
        {"type": "audio", "data": "eA==", "mimeType": "audio/wav"},
        {"type": "resource_link", "uri": "file:///x", "name": "x"},
        {"type": "resource", "resource": {"uri": "file:///x", "text": "x"}},
        {"type": "resource", "resource": {"uri": "file:///x", "blob": "eA=="}},
    ]
    result = {"content": blocks, "isError": True, "structuredContent": {"n": 1}, "_meta": {"x": 1}, "other": [1]}
    assert json.loads(read_result(json.dumps(result, indent=2).encode())) == result


def test_a_result_keeps_the_spelling_of_its_numbers() -> None:
    digits = b"1" * 10_000
    value = b'{"content": [], "n": [9007199254740993, 1E400, -0.0, %b]}' % digits
    assert read_result(value) == b'{"content":[],"n":[9007199254740993,1E400,-0.0,%b]}' % digits


def test_the_schema_of_a_result_is_one() -> None:
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(RESULT_SCHEMA)


def test_a_file_that_cannot_be_read_is_an_expected_failure(path: Path, says: Says, tmp_path: Path) -> None:
    in_doubt(path)
    assert "No such file" in says.refusal("resolve", path, 4, "--completed", tmp_path / "none")


def test_a_stdin_that_was_closed_holds_no_result(path: Path) -> None:
    in_doubt(path)
    words = shlex.join(cli_words("resolve", path, 4, "--completed", "-", "--yes"))
    ended = subprocess.run(f"{words} <&-", shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("checkpoint: no tool result: ")


# ------------------------------------------------------------------------------------------------- what may be settled

BODIES: Final = {
    "COMPLETED": (Status.COMPLETED, RESULT),
    "isError": (Status.COMPLETED, IS_ERROR),
    "FAILED": (Status.FAILED, b'{"code":1,"message":"no"}'),
    "INPUT_REQUIRED": (Status.INPUT_REQUIRED, b'{"resultType":"input_required"}'),
    "TASK": (Status.TASK, HANDLE),
    "NOT_SENT": (Status.NOT_SENT, None),
    "IN_DOUBT": (Status.IN_DOUBT, None),
}
VERDICTS: Final = (["--failed", "no"], ["--not-executed"])


@pytest.mark.parametrize("flags", VERDICTS, ids=lambda flags: flags[0])
@pytest.mark.parametrize("held", BODIES)
def test_what_has_an_answer_takes_force_and_a_reason_and_an_outcome_stays(
    path: Path, says: Says, held: str, flags: list[str]
) -> None:
    status, body = BODIES[held]
    with life(path) as owner:
        owner.call(4, status, body)
    refused = [*flags, "--yes"], [*flags, "--yes", "--force"], [*flags, "--yes", "--reason", "r"]
    if held != "IN_DOUBT":
        for words in refused:
            says.refusal("resolve", path, 4, *words)
        assert decisions(path) == []
    if held in ("COMPLETED", "NOT_SENT"):
        says.refusal("resolve", path, 4, *flags, "--yes", "--force", "--reason", "r")
        return
    says("resolve", path, 4, *flags, "--yes", "--force", "--reason", "r")
    assert entry_at(path, 4).status is (Status.FAILED if flags[0] == "--failed" else Status.NOT_EXECUTED)
    out = says("show", path, 4)
    assert ": r\n" in out
    if body is not None:
        assert f"what upstream had answered ({status})" in out
    assert says("verify", path).endswith("nothing is wrong with it\n")


def test_a_wrong_not_executed_can_be_taken_back_before_the_call_runs(path: Path, says: Says) -> None:
    in_doubt(path)
    says("resolve", path, 4, "--not-executed", "--yes")
    assert "--force --reason" in says.refusal("resolve", path, 4, "--failed", "it ran", "--yes")
    says("resolve", path, 4, "--failed", "it ran", "--yes", "--force", "--reason", "looked again")
    assert entry_at(path, 4).status is Status.FAILED
    out = says("show", path, 4)
    assert out.index("settled as NOT_EXECUTED, no reason") < out.index("settled as FAILED: looked again")


def test_a_branch_is_named_exactly(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, Status.IN_DOUBT)
        owner.call(2)
        owner.call(2, Status.IN_DOUBT, workflow_id="run~1", fork_from="run", arguments=b"{}")
    said = says.refusal("resolve", path, 1, "--workflow-id", "run~1", "--not-executed", "--yes")
    assert "branch run~1 has no row of its own at 1; the one it sees is --workflow-id run" in said
    says("resolve", path, 2, "--workflow-id", "run~1", "--not-executed", "--yes")
    assert entry_at(path, 2, "run~1").status is Status.NOT_EXECUTED
    assert entry_at(path, 2).status is Status.COMPLETED


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([5], "no row at sequence 5 of workflow run; --workflow-id may be other"),
        ([6], "no row at sequence 6 of workflow run\n"),
        ([4, "--attempt", 2], "has no attempt 2"),
    ],
    ids=["elsewhere", "nowhere", "no such attempt"],
)
def test_what_is_not_there_cannot_be_settled(path: Path, says: Says, words: list[Any], what: str) -> None:
    with life(path) as owner:
        owner.call(4, Status.IN_DOUBT)
        owner.call(5, workflow_id="other")
    assert what in says.refusal("resolve", path, *words, "--not-executed", "--yes")


# ------------------------------------------------------------------------------------------ the server that has it


def test_a_call_may_still_run_while_its_server_lives(path: Path, says: Says) -> None:
    with stopped_group() as group:
        with life(path, upstream_pid=group) as owner:
            owner.call(4, Status.IN_DOUBT)
        said = says.refusal("resolve", path, 4, "--not-executed", "--yes")
        assert f"process group {group} lives" in said
        assert decisions(path) == []
        says("resolve", path, 4, "--not-executed", "--yes", "--force")
        assert entry_at(path, 4).status is Status.NOT_EXECUTED


def test_a_server_that_lives_hinders_no_other_verdict(path: Path, says: Says) -> None:
    with stopped_group() as group:
        with life(path, upstream_pid=group) as owner:
            owner.call(4, Status.IN_DOUBT)
        says("resolve", path, 4, "--failed", "no", "--yes")


def test_the_server_of_the_rows_own_epoch_counts(path: Path, says: Says) -> None:
    with stopped_group() as group:
        with life(path, upstream_pid=None) as owner:
            owner.call(3, Status.IN_DOUBT)
        with life(path, upstream_pid=group) as owner:
            owner.call(4, Status.IN_DOUBT)
        says("resolve", path, 3, "--not-executed", "--yes")
        says.refusal("resolve", path, 4, "--not-executed", "--yes")


@pytest.mark.parametrize("number", [0, 1, -1, 2**31, 2**63 - 1, -(2**63)])
def test_a_number_that_no_server_can_have_is_not_taken_for_one_that_is_gone(
    path: Path, says: Says, number: int
) -> None:
    with life(path, upstream_pid=number) as owner:
        owner.call(4, Status.IN_DOUBT)
    assert f"process {number}, which none can be" in says.refusal("resolve", path, 4, "--not-executed", "--yes")
    says("resolve", path, 4, "--not-executed", "--yes", "--force")


# ------------------------------------------------------------------------------------------------ who else is at it


@pytest.mark.parametrize("how", ["own", "read"])
@pytest.mark.parametrize(
    "words", [["resolve", "1", "--not-executed", "--yes"], ["prune", "--older-than", "1d"]], ids=lambda words: words[0]
)
def test_writing_needs_the_journal_for_itself_and_says_who_has_it(path: Path, how: str, words: list[str]) -> None:
    with life(path) as owner:
        owner.call(1, Status.IN_DOUBT)
        owner.begin(2)
    with child(how, path) as other:
        ended = run_cli(words[0], path, *words[1:], *(["--workflow-id", "run"] if words[0] == "resolve" else []))
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(f"checkpoint: busy: process {other.pid} owns {path}; ")
        assert decisions(path) == []


def test_a_row_that_changed_since_it_was_looked_at_is_left_alone(path: Path) -> None:
    with life(path) as owner:
        owner.begin(4)
    verdict = Verdict(Status.NOT_EXECUTED)
    with reading(str(path)) as reader:
        planned = plan(reader, 4, None, None, verdict)
    settle(str(path), planned, Verdict(Status.FAILED, text="no"), ["checkpoint"], NOW_MS)
    with pytest.raises(ConsoleError, match="has changed"):
        settle(str(path), planned, verdict, ["checkpoint"], NOW_MS)
    assert [row[1] for row in decisions(path)] == ["FAILED"]


# ------------------------------------------------------------------------------------------------------- the question


def test_a_person_is_asked_on_the_terminal_and_not_on_stdin(path: Path) -> None:
    in_doubt(path)
    code, shown = on_terminal(cli_words("resolve", path, 4, "--not-executed"), "y\n")
    assert code == 0
    assert "charge, sequence 4 of workflow run: IN_DOUBT, upstream_lost\n" in shown
    assert 'arguments {"who":"Ada"}' in shown
    assert "Settle it as NOT_EXECUTED?" in shown
    assert [row[1] for row in decisions(path)] == ["NOT_EXECUTED"]


@pytest.mark.parametrize("answer", ["\n", "n\n", "yes please\n", "\x04"])
def test_anything_but_a_yes_changes_nothing(path: Path, answer: str) -> None:
    in_doubt(path)
    code, shown = on_terminal(cli_words("resolve", path, 4, "--not-executed"), answer)
    assert code == 1
    assert "nothing was changed" in shown
    assert decisions(path) == []


def test_without_a_terminal_nobody_is_asked_and_nothing_is_done(path: Path) -> None:
    in_doubt(path)
    ended = run_cli("resolve", path, 4, "--not-executed", input="y\n")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no terminal to ask on; --yes" in ended.stderr
    assert decisions(path) == []


def test_a_result_may_come_from_stdin_while_the_terminal_is_asked(path: Path, receipt: Path) -> None:
    in_doubt(path)
    words = " ".join(cli_words("resolve", path, 4, "--completed", "-"))
    code, shown = on_terminal(["/bin/sh", "-c", f"cat {receipt} | {words}"], "yes\n")
    assert code == 0, shown
    assert entry_at(path, 4).result == RECEIPT


# --------------------------------------------------------------------------------------------------- with a real relay


def crashed(path: Path, ledger: Path) -> None:
    """A relay that was killed when the server had the second call, and had run it."""
    words = relay_words("--journal", path, "--crash-at", "mid_upstream@2", upstream=upstream_words(ledger))
    with Client(words) as client:
        client.shake_hands()
        client.call("append", {"n": 1}, seq=1)
        client.start_call("append", {"n": 2}, seq=2)
        assert client.wait() == -signal.SIGKILL


def test_next_action_of_a_refusal_works_from_any_directory(path: Path, tmp_path: Path) -> None:
    crashed(path, tmp_path / "ledger")
    with relay(path, tmp_path / "ledger") as client:
        refusal = refusal_of(client.call("append", {"n": 2}, seq=2))
    ended = subprocess.run(refusal["next_action"], shell=True, cwd="/", capture_output=True, text=True, check=True)
    assert "IN_DOUBT" in ended.stdout
    assert "how to settle it" in ended.stdout


def test_what_a_person_settles_is_what_the_agent_gets_and_nothing_runs_twice(
    path: Path, tmp_path: Path, receipt: Path, says: Says
) -> None:
    ledger = tmp_path / "ledger"
    crashed(path, ledger)
    before = ledger_lines(ledger)
    says("resolve", path, 2, "--completed", receipt, "--yes")
    with relay(path, ledger) as client:
        assert text_of(client.call("append", {"n": 2}, seq=2)) == "receipt 7"
    assert ledger_lines(ledger) == before


def test_a_call_that_a_person_found_undone_runs_once_more_at_its_place(path: Path, tmp_path: Path, says: Says) -> None:
    ledger = tmp_path / "ledger"
    crashed(path, ledger)
    before = ledger_lines(ledger)
    says("resolve", path, 2, "--not-executed", "--yes")
    with relay(path, ledger) as client:
        first = client.call("append", {"n": 2}, seq=2)
        assert text_of(client.call("append", {"n": 2}, seq=2)) == text_of(first)
        assert len(ledger_lines(ledger)) == len(before) + 1
        assert run_cli("resolve", path, 2, "--failed", "x", "--yes", "--force", "--reason", "r").returncode == 1


# ------------------------------------------------------------------------------------------------------------- prune


def old(path: Path) -> None:
    """A family of two, finished long before another workflow of the same journal began."""
    with life(path) as owner:
        for sequence in (1, 2, 5):
            owner.call(sequence, call_id=f"id{sequence}", arguments=b'{"x":"%b"}' % (b"x" * 20_000))
        owner.call(2, workflow_id="run~1", fork_from="run", arguments=b"{}")
        owner.call(3, workflow_id="run~1")
    with life(path, now_ms=NOW_MS + 40 * DAY_MS) as owner:
        owner.call(1, workflow_id="young")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commands._now_ms", lambda: NOW_MS + 41 * DAY_MS)


@pytest.mark.usefixtures("later")
def test_an_old_family_goes_and_its_places_are_refused_for_ever(path: Path, says: Says) -> None:
    old(path)
    out = says("prune", path, "--older-than", "30d")
    assert "run and 1 branch: 5 rows went" in out
    with life(path) as owner:
        journal = owner.journal
        for place in (("run", 1), ("run", 3), ("run", 5), ("run~1", 2), ("run~1", 3)):
            entry = journal.entry(*place)
            assert entry is not None
            assert decide(entry, "any") is Action.REFUSE_PRUNED
        assert journal.entry("run", 6) is None
        assert journal.entry("young", 1) is not None
        assert journal.family("run").next_name() == "run~2"
        assert journal.last_sequence("run~1") == 3
        assert journal.next_sequence("run~1", 1, None) == 2
    assert says("verify", path).endswith("nothing is wrong with it\n")
    assert "PRUNED" in says("show", path, 5)
    assert "was pruned" in says.refusal("resolve", path, 5, "--not-executed", "--yes")
    assert "pruned        2 workflows" in says("stats", path)


@pytest.mark.usefixtures("later")
def test_pruning_gives_the_space_back_to_the_system(path: Path, says: Says) -> None:
    old(path)
    before = path.stat().st_size
    (pruned,) = says.objects("prune", path, "--older-than", "30d", "--json")
    assert pruned["size_before_bytes"] == before
    assert pruned["size_after_bytes"] == path.stat().st_size < before - 60_000
    assert (pruned["rows"], pruned["dry_run"], pruned["why_not_shrunk"], pruned["kept"]) == (5, False, None, [])
    assert 60_000 < pruned["about_bytes"] == pruned["families"][0]["about_bytes"] < 70_000
    assert pruned["families"][0]["members"] == {"run": 5, "run~1": 3}
    assert b"xxxx" not in path.read_bytes()
    assert not path.with_name("j.db-wal").exists()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("later")
def test_a_dry_run_says_the_same_and_changes_nothing(path: Path, says: Says) -> None:
    old(path)
    before = contents(path.parent)
    out = says("prune", path, "--older-than", "30d", "--dry-run")
    assert "run and 1 branch: 5 rows would go" in out
    assert "about 60." in out
    assert contents(path.parent)["j.db"] == before["j.db"]
    (pruned,) = says.objects("prune", path, "--older-than", "30d", "--dry-run", "--json")
    assert pruned["dry_run"]
    assert {pruned[key] for key in ("size_before_bytes", "size_after_bytes", "why_not_shrunk")} == {None}


@pytest.mark.usefixtures("later")
def test_space_that_could_not_be_given_back_is_given_back_by_the_next_prune(
    path: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(path)
    before = path.stat().st_size
    with monkeypatch.context() as full:
        full.setattr("prune._shrink", lambda _: "the space could not be given back")
        assert "(the space could not be given back)" in says("prune", path, "--older-than", "30d")
    assert path.stat().st_size == before
    out = says("prune", path, "--older-than", "30d")
    assert out.startswith("nothing to prune")
    assert "the journal went from " in out
    assert path.stat().st_size < before - 60_000
    assert says("prune", path, "--older-than", "30d") == (
        "nothing to prune: no family of workflows is that old with every row final\n"
    )


def test_a_disk_that_is_too_full_to_shrink_is_told_with_the_way_to_try_again(path: Path) -> None:
    class Full:
        def execute(self, _: str) -> None:
            raise sqlite3.OperationalError("database or disk is \x1bfull")

    why = _shrink(Full())  # type: ignore[arg-type]  # all that is asked of it
    assert why is not None
    assert why.isprintable()
    assert "another prune tries again" in why


KEEPS: Final[dict[str, Any]] = {
    "in doubt": lambda owner: owner.call(9, Status.IN_DOUBT),
    "left open": lambda owner: owner.begin(9),
    "in doubt in a branch": lambda owner: owner.call(5, Status.IN_DOUBT, workflow_id="run~1", fork_from="run"),
    "input required": lambda owner: owner.call(9, Status.INPUT_REQUIRED, b"{}"),
    "input required, and the next leg not sent": lambda owner: (
        owner.call(9, Status.INPUT_REQUIRED, b"{}"),
        owner.call(9, Status.NOT_SENT, attempt=2),
    ),
    "a task that did not end": lambda owner: owner.call(9, Status.TASK, HANDLE),
    "an earlier attempt in doubt": lambda owner: (owner.call(9, Status.IN_DOUBT), owner.call(9, attempt=2)),
}
LETS_GO: Final[dict[str, Any]] = {
    "a failure": lambda owner: owner.call(9, Status.FAILED, b"{}"),
    "not sent": lambda owner: owner.call(9, Status.NOT_SENT),
    "input that was given": lambda owner: (owner.call(9, Status.INPUT_REQUIRED, b"{}"), owner.call(9, attempt=2)),
    "a task that ended": lambda owner: owner.end_task(owner.call(9, Status.TASK, HANDLE)),
}


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("what", [*KEEPS, *LETS_GO])
def test_a_family_goes_as_a_whole_and_only_when_every_row_is_final(path: Path, says: Says, what: str) -> None:
    with life(path) as owner:
        owner.call(1)
        (KEEPS.get(what) or LETS_GO[what])(owner)
    before = rows(path, "SELECT count(*) FROM dispatches")
    out = says("prune", path, "--older-than", "30d")
    if what in KEEPS:
        assert "nothing to prune" in out
        assert rows(path, "SELECT count(*) FROM dispatches") == before
        where = "5 '--workflow-id=run~1'" if what == "in doubt in a branch" else "9 --workflow-id=run"
        (command,) = (line.strip() for line in out.splitlines() if f" journal show {path} {where}" in line)
        assert subprocess.run(command, shell=True, check=False, capture_output=True).returncode == 0
        (pruned,) = says.objects("prune", path, "--older-than", "30d", "--json")
        (kept,) = pruned["kept"]
        assert kept["open"][0]["status"] in ("IN_DOUBT", "INPUT_REQUIRED", "TASK")
        assert (kept["workflow_id"], kept["open"][0]["sequence"], kept["open"][0]["attempt"]) == (
            "run", 5 if what == "in doubt in a branch" else 9, 1,
        )  # fmt: skip
    else:
        assert rows(path, "SELECT count(*) FROM dispatches") == [(0,)]
    assert says("verify", path).endswith("nothing is wrong with it\n")


@pytest.mark.usefixtures("later")
def test_the_newest_fact_about_a_family_decides_how_old_it_is(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1)
        owner.call(2, Status.IN_DOUBT)
    says("resolve", path, 2, "--not-executed", "--yes")  # today, in the operator's time
    assert "nothing to prune" in says("prune", path, "--older-than", "30d")
    assert "nothing to prune" not in says("prune", path, "--older-than", "0s", "--dry-run")


@pytest.mark.usefixtures("later")
def test_no_id_is_given_twice(path: Path, says: Says) -> None:
    with life(path) as owner:
        last = [owner.call(sequence) for sequence in range(1, 6)][-1]
    says("prune", path, "--older-than", "30d")
    assert rows(path, "SELECT count(*) FROM dispatches") == [(0,)]
    with life(path) as owner:
        assert owner.call(6).id == last.id + 1
        assert owner.journal.entry("run", 6) is not None
    assert says("verify", path).endswith("nothing is wrong with it\n")


@pytest.mark.usefixtures("later")
def test_a_call_that_was_left_open_is_found_after_everything_behind_it_was_pruned(path: Path, says: Says) -> None:
    owner = Life(path)
    owner.begin(1, workflow_id="open")
    for sequence in range(1, 6):
        owner.call(sequence)
    owner.journal.close()
    assert "run: 5 rows went" in says("prune", path, "--older-than", "30d")
    with life(path) as owner:
        assert [entry.workflow_id for entry in owner.journal.doubts()] == ["open"]
        owner.call(7)
    with life(path) as owner:
        assert [(entry.workflow_id, entry.cause) for entry in owner.journal.doubts()] == [("open", Cause.RELAY_LOST)]


@pytest.mark.usefixtures("later")
def test_what_was_pruned_twice_is_refused_up_to_its_last_row(path: Path, says: Says) -> None:
    for sequence in (3, 7):
        with life(path) as owner:
            owner.call(sequence)
        says("prune", path, "--older-than", "30d")
    assert rows(path, "SELECT workflow_id, last_sequence FROM prunings") == [("run", 7)]
    assert entry_at(path, 1).status is Status.PRUNED


def test_space_that_a_reader_holds_goes_back_later_and_the_rows_go_now(path: Path) -> None:
    old(path)
    with reading(str(path)) as reader, reader.snapshot():
        assert reader.totals().attempts == 6
        ended = run_cli("prune", path, "--older-than", f"{(time.time_ns() // 1_000_000 - NOW_MS) // DAY_MS - 20}d")
        assert "(a reader holds the rest" in ended.stdout
        assert reader.totals().attempts == 6
    assert rows(path, "SELECT DISTINCT workflow_id FROM dispatches") == [("young",)]


def test_a_pruned_place_is_refused_by_the_relay(path: Path, tmp_path: Path, says: Says) -> None:
    ledger = tmp_path / "ledger"
    with relay(path, ledger) as client:
        client.call("append", {"n": 1}, seq=1)
        client.finish()
    before = ledger_lines(ledger)
    says("prune", path, "--older-than", "0s")
    with relay(path, ledger) as client:
        refusal = refusal_of(client.call("append", {"n": 1}, seq=1))
        assert (refusal["reason"], refusal["status"]) == ("diverged", "PRUNED")
        assert ledger_lines(ledger) == before
        client.call("append", {"n": 2}, seq=2)
        client.finish()
    assert len(ledger_lines(ledger)) == len(before) + 1
