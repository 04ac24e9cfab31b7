"""What an operator sees: list, show, export, stats and verify, of journals that are closed, owned, or damaged."""

import contextlib
import json
import os
import random
import re
import sqlite3
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from console_helpers import (
    HANDLE,
    IS_ERROR,
    NOW_MS,
    Says,
    cli_words,
    life,
    on_terminal,
    run_cli,
)
from storage_helpers import change, child, contents, powerless

import doubt
import reader
import verify
from commands import _STATUSES
from reader import _held, holder_of
from render import clean, compact, duration_ms, iso, laid_out, moment_ms, span, table
from states import REDACTED_ARGUMENTS, Cause, Status
from storage import DDL

COLOUR = "\x1b["


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "j.db"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()


@pytest.fixture
def says(capfd: pytest.CaptureFixture[str]) -> Says:
    return Says(capfd)


def a_mixed_journal(path: Path) -> None:
    """One row of each status, of the workflow `run`, and one of another workflow."""
    with life(path) as owner:
        owner.call(1)
        owner.call(2, Status.FAILED, b'{"code":-32603,"message":"no"}')
        owner.call(3, body=IS_ERROR, tool="refund")
        owner.call(4, Status.IN_DOUBT, call_id="toolu_1")
        owner.call(5, Status.INPUT_REQUIRED, b'{"resultType":"input_required"}', is_modern=True)
        owner.call(6, Status.TASK, HANDLE)
        owner.call(7, Status.NOT_SENT)
        owner.now_ms += 3_600_000
        owner.call(1, workflow_id="other")
        owner.begin(8)


# -------------------------------------------------------------------------------------------------------- rendering


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (b'{"a":[1,{}],"b":{"c":"x\\"y"},"d":[]}', ["{", '  "a": [', "    1,", "    {}", "  ],", '  "b": {']),
        (b"[]", ["[]"]),
        (b'"x"', ['"x"']),
        (b"NaN", ["NaN"]),
        (b'{"a":9007199254740993,"a":1e400}', ["{", '  "a": 9007199254740993,', '  "a": 1e400', "}"]),
        (b'["\xff\xe2\x80\xae\x1b[2J"]', ["[", '  "\\xff\\u202e\\x1b[2J"', "]"]),
    ],
)
def test_json_is_laid_out_with_every_token_as_it_was_spelt(value: bytes, lines: list[str]) -> None:
    assert list(laid_out(value))[: len(lines)] == lines


@pytest.mark.parametrize("character", ["x", "\u65e5", "\x07"])
def test_a_long_string_is_shown_in_few_times_its_memory(character: str) -> None:
    value = json.dumps([character * 2_000_000 + "\\n"], ensure_ascii=False).encode()
    tracemalloc.start()
    try:
        assert sum(map(len, laid_out(value))) > 2_000_000
        assert tracemalloc.get_traced_memory()[1] < 16 * len(value)
    finally:
        tracemalloc.stop()


def test_json_of_any_depth_is_laid_out() -> None:
    lines = list(laid_out(b"[" * 5000 + b"1" + b"]" * 5000))
    assert len(lines) == 10_001
    assert max(map(len, lines)) < 100


def test_compact_json_is_one_line_and_the_same_value() -> None:
    text = '{ "a" : [ 1.50 , "x\\n y" ],\n\t"b":null }\n'
    assert compact(text) == b'{"a":[1.50,"x\\n y"],"b":null}'


@pytest.mark.parametrize(
    ("text", "ms"),
    [("90s", 90_000), ("45m", 2_700_000), ("12h", 43_200_000), ("30d", 2_592_000_000), ("2w", 1_209_600_000)],
)
def test_a_span_is_a_number_and_a_unit(text: str, ms: int) -> None:
    assert duration_ms(text) == ms
    assert moment_ms(text, NOW_MS) == NOW_MS - ms


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5h", "30 d", "1y", "٣d"])
def test_anything_else_is_no_span(text: str) -> None:
    with pytest.raises(ValueError, match="30d"):
        duration_ms(text)


@pytest.mark.parametrize(
    "text", ["2026-09-21T14:13:20Z", "2026-09-21T16:13:20+02:00", "2026-09-21T14:13:20", "2026-09-21 14:13:20.000"]
)
def test_a_time_is_utc_unless_it_says_otherwise(text: str) -> None:
    assert moment_ms(text, 0) == NOW_MS
    assert iso(NOW_MS) == "2026-09-21T14:13:20.000Z"


@pytest.mark.parametrize(
    ("ms", "text"),
    [(-1, "-"), (0, "0 ms"), (1500, "1.5 s"), (90_000, "1 min"), (7_300_000, "2 h"), (172_800_000, "2 days")],
)
def test_how_long_something_took_is_said_in_one_unit(ms: int, text: str) -> None:
    assert span(ms) == text


def test_a_table_stands_under_each_other_whatever_its_cells_hold() -> None:
    rows = [("1", "größe", "COMPLETED"), ("22", "日本", "x")]
    assert list(table(("N", "TOOL", "STATUS"), rows, in_colour=False, right=(0,))) == [
        " N  TOOL   STATUS",
        " 1  größe  COMPLETED",
        "22  日本   x",
    ]


def test_what_could_make_a_terminal_lie_stands_as_an_escape() -> None:
    assert clean("a\x1b[31mb\u202ec\u009bd\ne") == "a\\x1b[31mb\\u202ec\\x9bd\\ne"
    assert clean("größe 日本") == "größe 日本"


def test_every_cause_of_a_doubt_is_explained() -> None:
    assert set(doubt._WHY) == set(Cause)


def test_every_status_that_a_row_can_have_can_be_asked_for() -> None:
    assert set(_STATUSES) == set(Status) - {Status.PRUNED}


# -------------------------------------------------------------------------------------------------------------- list


def test_a_list_is_aligned_and_has_the_newest_last(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    lines = says("list", path).splitlines()
    assert lines[0].split() == ["SEQ", "TOOL", "STATUS", "STARTED", "TOOK", "NOTE", "WORKFLOW"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["1", "charge", "COMPLETED"],
        ["2", "charge", "FAILED"],
        ["3", "refund", "COMPLETED"],
        ["4", "charge", "IN_DOUBT"],
        ["5", "charge", "INPUT_REQUIRED"],
        ["6", "charge", "TASK"],
        ["7", "charge", "NOT_SENT"],
        ["1", "charge", "COMPLETED"],
        ["8", "charge", "IN_DOUBT"],
    ]
    column = lines[0].index("STATUS")
    assert all(line[column - 2 : column] == "  " for line in lines)
    assert "isError" in lines[3]
    assert "upstream_lost" in lines[4]
    assert "2026-09-21T14:13:20.000Z" in lines[1]
    assert "5 ms" in lines[1]


@pytest.mark.parametrize(
    ("flags", "places"),
    [
        (["--workflow-id", "other"], [("other", 1)]),
        (["--status", "IN_DOUBT"], [("run", 4), ("run", 8)]),
        (["--status", "IN_DOUBT", "--status", "PENDING"], [("run", 4), ("run", 8)]),
        (["--status", "IN_DOUBT", "--status", "FAILED"], [("run", 2), ("run", 4), ("run", 8)]),
        (["--status", "failed", "--status", "TASK"], [("run", 2), ("run", 6)]),
        (["--tool", "refund"], [("run", 3)]),
        (["--since", "2026-09-21T14:30:00Z"], [("other", 1), ("run", 8)]),
        (["--limit", "2"], [("other", 1), ("run", 8)]),
        (["--status", "COMPLETED", "--limit", "1"], [("other", 1)]),
        (["--tool", "refund", "--status", "FAILED"], []),
        (["--workflow-id", "ru"], []),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
)
def test_a_list_can_be_narrowed(path: Path, says: Says, flags: list[str], places: list[tuple[str, int]]) -> None:
    a_mixed_journal(path)
    found = says.objects("list", path, *flags, "--json")
    assert [(row["workflow_id"], row["sequence"]) for row in found] == places


def test_a_listed_object_has_the_documented_keys(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    (row,) = says.objects("list", path, "--status", "IN_DOUBT", "--workflow-id", "run", "--limit", "2", "--json")[:1]
    assert row == {
        "workflow_id": "run",
        "sequence": 4,
        "attempt": 1,
        "tool_name": "charge",
        "status": "IN_DOUBT",
        "cause": "upstream_lost",
        "is_error": False,
        "started_at": "2026-09-21T14:13:20.000Z",
        "completed_at": None,
        "call_id": "toolu_1",
        "era": "handshake",
        "owner_epoch": 1,
        "delivered": False,
        "settled": False,
        "stands": True,
        "call_signature": row["call_signature"],
    }


def test_a_list_of_the_newest_is_found_without_sorting_the_journal(path: Path) -> None:
    a_mixed_journal(path)
    with reader.reading(str(path)) as opened:
        found = opened.database.execute(f"EXPLAIN QUERY PLAN {reader._LIST}", [None] * 5 + [50]).fetchall()
    assert not any("TEMP B-TREE" in str(line) for line in found)


def test_a_list_that_was_cut_says_so_beside_its_lines(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    out, err = says.both("list", path, "--limit", "3")
    assert len(out.splitlines()) == 4
    assert "the newest 3 rows that fit; --limit 0 lists all" in err
    assert len(says("list", path, "--limit", "0").splitlines()) == 10
    assert says.both("list", path, "--limit", "9")[1] == "", "nothing was cut"


def test_only_the_newest_attempt_at_a_place_is_listed(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, Status.NOT_SENT)
        owner.call(1, attempt=2)
    (row,) = says.objects("list", path, "--json")
    assert (row["attempt"], row["status"]) == (2, "COMPLETED")


def test_a_hostile_tool_name_does_nothing_to_a_terminal(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, tool="\x1b[2J\x1b]0;owned\x07charge\u202e")
    for words in (("list", path), ("show", path, 1), ("stats", path), ("export", path), ("verify", path)):
        out = says(*words)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)


def test_colours_are_for_terminals(path: Path) -> None:
    a_mixed_journal(path)
    assert COLOUR not in run_cli("list", path).stdout
    code, shown = on_terminal(cli_words("list", path))
    assert code == 0
    assert "\x1b[1;33mIN_DOUBT\x1b[0m" in shown
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert plain == run_cli("list", path).stdout


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_can_do_without_colours(path: Path, env: dict[str, str]) -> None:
    a_mixed_journal(path)
    code, shown = on_terminal(cli_words("list", path), env=env)
    assert code == 0
    assert COLOUR not in shown


def test_a_reader_that_has_seen_enough_is_no_failure(path: Path) -> None:
    with life(path) as owner:
        for sequence in range(1, 40):
            owner.call(sequence, arguments=b'{"x":"%b"}' % (b"x" * 20_000))
    words = cli_words("export", path)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding_shows_what_it_can(path: Path, encoding: str) -> None:
    with life(path) as owner:
        owner.call(1, tool="日本")
    ended = run_cli("list", path, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert ended.returncode == 0
    assert "\\u65e5\\u672c" in ended.stdout


# -------------------------------------------------------------------------------------------------------------- show


def test_a_call_is_shown_with_all_that_is_on_record(path: Path, says: Says) -> None:
    with life(path, upstream_pid=4242) as owner:
        owner.call(1, Status.NOT_SENT)
        owner.call(1, attempt=2, call_id="toolu_9", body=b'{"content":[],"n":1e400,"n":9007199254740993}')
    out = says("show", path, 1)
    for part in (
        "workflow   run\n",
        "tool       charge\n",
        "status     COMPLETED\n",
        "attempt    2\n",
        "host's id  toolu_9\n",
        "upstream's 4242",
        '  "who": "Ada"\n',
        '  "n": 1e400,\n    "n": 9007199254740993\n',
        "\nattempts\n",
        "NOT_SENT",
    ):
        assert part in out
    assert "in doubt" not in out


def test_a_doubt_is_shown_with_what_is_known_what_to_check_and_what_to_type(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(4, Status.IN_DOUBT)
    out = says("show", path, 4)
    assert "IN_DOUBT, upstream_lost" in out
    known, check, settle = (out.index(heading) for heading in ("what is known", "what to check", "how to settle it"))
    assert known < check < settle
    for choice in ("--completed RESULT.json", "--failed 'TEXT'", "--not-executed"):
        assert choice in out[settle:]
    assert f" journal resolve {path} 4 --workflow-id=run " in out[settle:]


def test_what_is_shown_to_be_typed_does_what_it_says(path: Path, says: Says, tmp_path: Path) -> None:
    with life(path) as owner:
        owner.call(4, Status.IN_DOUBT, workflow_id="--it's; a $(name)")
    out = says("show", path, 4, "--workflow-id", "--it's; a $(name)")
    (line,) = (line.strip() for line in out.splitlines() if "--not-executed" in line)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(f"{line} --yes", shell=True, cwd=elsewhere, check=True, capture_output=True)
    assert "NOT_EXECUTED: WHAT YOU SAW" in says("show", path, 4, "--workflow-id", "--it's; a $(name)")


@pytest.mark.parametrize("name", ["a\u200db c", "it's\n\\x", "\x1b[2J", "é ü", "\x7f1"])
def test_what_is_shown_to_be_typed_can_be_pasted_whatever_is_in_it(path: Path, says: Says, name: str) -> None:
    folder = path.parent / name
    folder.mkdir()
    with life(folder / "j.db") as owner:
        owner.call(4, Status.IN_DOUBT, workflow_id=name)
    out = says("show", folder / "j.db", 4, "--workflow-id", name)
    (line,) = (line.strip() for line in out.splitlines() if "--not-executed" in line)
    assert line.isprintable()
    subprocess.run(["bash", "-c", f"{line} --yes"], check=True, capture_output=True)
    assert "NOT_EXECUTED: WHAT YOU SAW" in says("show", folder / "j.db", 4, "--workflow-id", name)


def test_an_earlier_attempt_in_doubt_is_shown_with_the_process_that_had_it(path: Path, says: Says) -> None:
    with life(path, upstream_pid=1111) as owner:
        owner.call(1, Status.IN_DOUBT)
    with life(path, upstream_pid=2222) as owner:
        owner.call(1, attempt=2)
    out = says("show", path, 1)
    assert "in doubt, attempt 1: what is known" in out
    assert "The server's process was 1111" in out
    assert "owner      epoch 2" in out
    (shown,) = says.objects("show", path, 1, "--json")
    assert "doubt" not in shown
    first, second = shown["attempts"]
    assert "The server's process was 1111, started by" in first["doubt"]["known"][-1]
    assert all("--attempt=1" in command for command in first["doubt"]["commands"])
    assert (first["stands"], second["stands"], "doubt" in second) == (False, True, False)


def test_an_earlier_attempt_in_doubt_is_found(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1)
        owner.call(2, Status.IN_DOUBT)
        owner.call(2, attempt=2)
    listed = says.objects("list", path, "--status", "IN_DOUBT", "--json")
    assert [(row["sequence"], row["attempt"], row["stands"]) for row in listed] == [(2, 1, False)]
    assert [row["attempt"] for row in says.objects("list", path, "--json")] == [1, 1, 2]
    assert "upstream_lost, earlier attempt 1" in says("list", path)
    (found,) = says.objects("stats", path, "--json")
    assert (found["rows"], found["earlier_attempts_in_doubt"]) == ({"COMPLETED": 2}, 1)
    assert (found["oldest_doubt"]["sequence"], found["oldest_doubt"]["attempt"]) == (2, 1)
    assert "1 earlier attempt, of a place that a later one decides" in says("stats", path)


def test_a_call_that_was_held_is_not_said_to_have_reached_the_server(path: Path, says: Says) -> None:
    with life(path) as owner:
        for sequence, cause in enumerate((Cause.TIMEOUT, Cause.CANCELLED), 1):
            owner.doubt(owner.begin(sequence), cause)
    for sequence in (1, 2):
        known = says.objects("show", path, sequence, "--json")[0]["doubt"]["known"][1]
        assert not re.search("It had the call|while the server had it", known)


def test_a_row_is_shown_from_a_branch_that_sees_it(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1)
        owner.call(2)
        owner.call(2, workflow_id="run~1", fork_from="run", arguments=b'{"who":"Ben"}')
    out = says("show", path, 1, "--workflow-id", "run~1")
    assert "run (seen from its branch run~1)" in out
    out = says("show", path, 2, "--workflow-id", "run~1")
    assert '"Ben"' in out
    assert "run~1  left run at 2; COMPLETED at 2" in out
    assert "run  the root; COMPLETED at 2" in out
    (shown,) = says.objects("show", path, 2, "--json")
    assert shown["arguments"] == {"who": "Ada"}
    assert shown["branches"] == [{"branch": "run~1", "parent": "run", "sequence": 2}]


def test_a_task_is_shown_with_the_last_word_on_it(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.end_task(owner.call(1, Status.TASK, HANDLE))
    out = says("show", path, 1)
    assert "upstream's last answer to tasks/get" in out
    assert '"status": "completed"' in out


def test_a_shown_object_has_the_doubt_and_the_raw_bodies(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(4, Status.IN_DOUBT)
        owner.call(5, body=b'{"content":NaN}')
    (shown,) = says.objects("show", path, 4, "--json")
    assert shown["arguments"] == {"who": "Ada"}
    assert shown["doubts"] == [
        {"attempt": 1, "cause": "upstream_lost", "noted_at": "2026-09-21T14:13:20.005Z", "is_open": True}
    ]
    assert len(shown["doubt"]["commands"]) == 3
    (shown,) = says.objects("show", path, 5, "--json")
    assert (shown["result"], shown["result_text"]) == (None, '{"content":NaN}')


def test_a_place_without_a_row_says_where_there_is_one(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(7, workflow_id="other")
    assert "no row at sequence 7 of workflow run; --workflow-id may be other" in says.refusal("show", path, 7)
    assert says.refusal("show", path, 8).endswith("no row at sequence 8 of workflow run\n")


# ------------------------------------------------------------------------------------------------------------ owners


def test_an_open_row_is_pending_while_its_owner_lives_and_in_doubt_after(path: Path) -> None:
    def status() -> list[Any]:
        lines = run_cli("list", path, "--json").stdout.splitlines()
        return [(row["status"], row["cause"]) for row in map(json.loads, lines)]

    with child("own", path) as owner:
        assert status() == [("PENDING", None)]
        assert run_cli("list", path, "--status", "IN_DOUBT", "--json").stdout == ""
        assert f"process {owner.pid}" in run_cli("stats", path).stdout
        assert f"process {owner.pid} (running)" in run_cli("show", path, 1).stdout
        owner.kill()
        owner.wait()
        assert status() == [("IN_DOUBT", "relay_lost")]
        assert f"process {owner.pid} (gone)" in run_cli("show", path, 1).stdout


def test_a_process_that_only_reads_is_not_who_left_a_row_open(path: Path) -> None:
    with life(path) as owner:
        owner.begin(1)
    with child("read", path):
        assert json.loads(run_cli("list", path, "--json").stdout)["status"] == "IN_DOUBT"


def test_reading_takes_no_lock_and_changes_nothing(path: Path) -> None:
    a_mixed_journal(path)
    lock = path.with_name("j.db.lock")
    before, stamp = contents(path.parent), lock.stat().st_mtime_ns
    for words in (
        ["list"],
        ["show", 4],
        ["export"],
        ["stats"],
        ["verify"],
        ["prune", "--older-than", "1s", "--dry-run"],
    ):
        assert run_cli(words[0], path, *words[1:]).returncode == 0
    after = contents(path.parent)
    assert {name: after[name] for name in before} == before
    assert {name for name in after if after[name]} - {"j.db-shm"} <= set(before)
    assert lock.stat().st_mtime_ns == stamp


def test_a_reader_is_nothing_to_an_owner_that_goes_on(path: Path) -> None:
    with life(path) as owner:
        for sequence in range(1, 20):
            owner.call(sequence)
            if sequence % 6 == 0:
                assert run_cli("verify", path).returncode == 0
        assert owner.journal.failure is None


def test_a_holder_is_told_from_who_waits_and_from_locks_of_other_files() -> None:
    lines = [
        "1: POSIX  ADVISORY  READ 11 fe:00:99 128 128",
        "2: FLOCK  ADVISORY  WRITE 12 fe:00:100 0 EOF",
        "2: -> FLOCK  ADVISORY  WRITE 13 fe:00:99 0 EOF",
        "3: FLOCK  ADVISORY  WRITE 14 fd:01:99 0 EOF",
        "4: nonsense",
    ]
    device = os.makedev(0xFE, 0)
    assert _held(lines[1:], device, 99, 0) is None
    assert _held(lines, device, 99, 0) == 11
    assert _held(lines[1:], device, 99, 14) == 14  # a file system that shows another device there
    assert _held(lines, device, 100, 0) == 12


def test_nobody_holds_a_lock_that_is_not_there(tmp_path: Path) -> None:
    assert holder_of(str(tmp_path / "j.db.lock")) is None
    (tmp_path / "j.db.lock").write_text("1\n")
    assert holder_of(str(tmp_path / "j.db.lock")) is None


# ------------------------------------------------------------------------------------------------------------ export


def test_an_export_is_the_whole_journal_in_lines(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    with life(path) as owner:
        owner.call(2, workflow_id="run~1", fork_from="run", arguments=b'{"who":"\xc3\xbc\xf0\x9f\x98\x80\x7f"}')
    header, *lines = says.objects("export", path)
    assert header == {
        "type": "journal",
        "format": 2,
        "workflow_id": "run",
        "created_at": "2026-09-21T14:13:20.000Z",
    }
    attempts = [line for line in lines if line["type"] == "attempt"]
    assert len(attempts) == 10
    assert attempts[2]["is_error"] is True
    assert attempts[1]["error"] == {"code": -32603, "message": "no"}
    assert attempts[-1]["arguments"] == {"who": "ü😀\x7f"}
    assert lines[-1] == {
        "type": "fork",
        "branch": "run~1",
        "parent": "run",
        "sequence": 2,
        "forked_at": "2026-09-21T14:13:20.000Z",
    }
    only = says.objects("export", path, "--workflow-id", "run~1")
    assert [line["type"] for line in only] == ["journal", "attempt", "owner", "fork"]
    assert only[2] == {
        "type": "owner",
        "epoch": 2,
        "pid": os.getpid(),
        "upstream_pid": None,
        "started_at": "2026-09-21T14:13:20.000Z",
    }
    assert [line["epoch"] for line in lines if line["type"] == "owner"] == [1, 2]


def test_an_export_keeps_the_spelling_of_what_went_over_the_wire(path: Path, says: Says) -> None:
    arguments = b'{"n":9007199254740993.0,"m":1E400,"k":1,"k":2}'
    with life(path) as owner:
        owner.call(1, arguments=arguments)
    assert f'"arguments":{arguments.decode()}' in says("export", path)


def test_an_export_goes_on_behind_what_was_read_at_once(
    path: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console._EXPORT_BYTES", 1)
    a_mixed_journal(path)
    assert [line.get("sequence") for line in says.objects("export", path)][1:-1] == [1, 2, 3, 4, 5, 6, 7, 1, 8]


def test_what_upstream_said_is_kept_beside_what_an_operator_decided(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, Status.FAILED, b'{"code":1e2,"message":"no"}')
        owner.end_task(owner.call(2, Status.TASK, HANDLE))
        owner.call(3, Status.IN_DOUBT)
        owner.call(3, attempt=2)
    for sequence in (1, 2):
        says("resolve", path, sequence, "--failed", "mine", "--yes", "--force", "--reason", "r")
    exported = {
        (line["sequence"], line["attempt"]): line for line in says.objects("export", path) if line["type"] == "attempt"
    }
    for sequence, attempt, status in ((1, 1, "FAILED"), (2, 1, "TASK"), (3, 2, None)):
        (shown,) = says.objects("show", path, sequence, "--json")
        for found in (shown, exported[sequence, attempt]):
            answer = found["answer"]
            assert (answer and answer["status"]) == status
            assert bool(found["decisions"]) is bool(status)
    assert (
        '"answer":{"status":"FAILED","completed_at":"2026-09-21T14:13:20.005Z","result":null,"error":{"code":1e2,'
        in (says("show", path, 1, "--json"))
    )
    assert exported[2, 1]["task_answers"] == [
        {
            "method": "tasks/get",
            "ended_at": "2026-09-21T14:13:20.009Z",
            "result": {"status": "completed"},
            "error": None,
        }
    ]
    assert exported[3, 1]["doubts"] == [
        {"attempt": 1, "cause": "upstream_lost", "noted_at": "2026-09-21T14:13:20.005Z", "is_open": True}
    ]
    assert exported[3, 2]["doubts"] == []


def test_an_export_of_a_workflow_that_is_not_there_says_so(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    assert says.both("export", path, "--workflow-id", "typo")[1] == "nothing is on record of workflow typo\n"
    assert says.both("export", path, "--workflow-id", "other")[1] == ""


def test_an_export_is_json_and_may_be_asked_for_as_such(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    assert says("export", path, "--json") == says("export", path)


# ------------------------------------------------------------------------------------------------------------- stats


def test_the_journal_in_numbers(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    (found,) = says.objects("stats", path, "--json")
    assert found["workflows"] == 2
    assert found["rows"] == {
        "IN_DOUBT": 2, "COMPLETED": 3, "FAILED": 1, "INPUT_REQUIRED": 1, "TASK": 1, "NOT_SENT": 1,
    }  # fmt: skip
    assert found["attempts"] == 9
    assert found["size_bytes"] == path.stat().st_size
    assert found["oldest_doubt"]["sequence"] == 4
    assert found["created_at"] == "2026-09-21T14:13:20.000Z"
    assert found["newest_call_at"] == "2026-09-21T15:13:20.000Z"
    assert (found["owner_pid"], found["is_owned"]) == (None, False)
    out = says("stats", path)
    assert "charge, sequence 4 of run: upstream_lost" in out
    assert "none is running" in out


def test_an_empty_journal_is_in_order(path: Path, says: Says) -> None:
    with life(path):
        pass
    assert "nothing is wrong" in says("verify", path)
    assert says.objects("list", path, "--json") == []
    assert says.objects("stats", path, "--json")[0]["oldest_doubt"] is None
    assert [line["type"] for line in says.objects("export", path)] == ["journal"]


# ------------------------------------------------------------------------------------------------------------ verify


def test_a_journal_that_a_relay_wrote_is_in_order(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    with life(path) as owner:  # who takes over puts what was left open on record
        owner.call(2, workflow_id="run~1", fork_from="run", arguments=b"{}")
        owner.call(9, Status.NOT_SENT, tool="t\\ud800", arguments=b'{"a":1,"a":2}')
        owner.call(9, tool="t\\ud800", attempt=2, arguments=b'{"a":1,"a":2}')
        owner.call(10, arguments=None)
    assert says("verify", path).splitlines()[-1] == "nothing is wrong with it"


DAMAGE = {
    "an outcome without its dispatch": ["DELETE FROM dispatches WHERE sequence = 2"],
    "a dispatch of an epoch that no owner has": ["UPDATE dispatches SET epoch = 7 WHERE id = 9"],
    "a dispatch of an earlier epoch than one before it": [
        "INSERT INTO owners VALUES (2, 1, 1, 1)",
        "UPDATE dispatches SET epoch = 2 WHERE id = 3",
    ],
    "a signature that is not that of its call": [
        'UPDATE dispatches SET arguments = CAST(\'{"who":"Eve"}\' AS BLOB) WHERE id = 1'
    ],
    "its arguments are not JSON": ["UPDATE dispatches SET arguments = X'7b' WHERE id = 1"],
    "a call that ran again though its outcome was on record": [
        "INSERT INTO dispatches SELECT 50, workflow_id, sequence, 2, epoch, 1, tool_name, call_signature, NULL, era,"
        " started_at, arguments FROM dispatches WHERE id = 1"
    ],
    "an attempt without the one before it": ["UPDATE dispatches SET attempt = 3 WHERE id = 1"],
    "an open call that no later owner would find": [
        "DELETE FROM outcomes WHERE dispatch = 1",
        "UPDATE dispatches SET settled_below = 9 WHERE id = 9",
    ],
    "a doubt that was closed by nothing": ["UPDATE doubts SET is_open = 0"],
    "a doubt that stayed open though it was settled": ["INSERT INTO doubts VALUES (1, 'timeout', 1, 1)"],
    "a row of a place that was pruned": ["INSERT INTO prunings VALUES ('run', 2, 1, 1)"],
    "a branch's row below the place where it left": [
        "INSERT INTO forks VALUES (1, 'run', 'run~1', 'run', 5, 1)",
        "UPDATE dispatches SET workflow_id = 'run~1' WHERE id = 2",
    ],
    "a fork that does not fit its family": ["INSERT INTO forks VALUES (1, 'run', 'run~1', 'else', 5, 1)"],
    "a decision without its dispatch": ["INSERT INTO decisions VALUES (1, 99, 'NOT_EXECUTED', 1, '', NULL, NULL)"],
    "a doubt without its dispatch": ["INSERT INTO doubts VALUES (99, 'timeout', 1, 1)"],
    "a delivery without its dispatch": ["INSERT INTO deliveries VALUES (99)"],
    "an owner that can be no process": ["UPDATE owners SET upstream_pid = 9223372036854775807"],
    "a text that is no UTF-8: dispatches, row 3: tool_name \\xffA": [
        "UPDATE dispatches SET tool_name = CAST(X'ff41' AS TEXT) WHERE id = 3"
    ],
    "a text that is no UTF-8: journal, row 1: workflow_id": ["UPDATE journal SET workflow_id = CAST(X'ff' AS TEXT)"],
    "more than one line: sequence 1 of workflow run, attempt 1 (arguments)": [
        "UPDATE dispatches SET arguments = X'7b0a7d' WHERE id = 1"
    ],
    "more than one line: sequence 1 of workflow run, attempt 1 (result)": [
        "UPDATE outcomes SET result = X'7b0a7d' WHERE dispatch = 1"
    ],
    "more than one line: sequence 2 of workflow run, attempt 1 (error)": [
        "UPDATE outcomes SET error = X'7b0a7d' WHERE dispatch = 2"
    ],
    "more than one line: sequence 4 of workflow run, attempt 1 (result)": [
        "INSERT INTO decisions VALUES (1, 4, 'COMPLETED', 1, '', X'7b0a7d', NULL)",
        "UPDATE doubts SET is_open = 0",
    ],
    "more than one line: sequence 6 of workflow run, attempt 1 (task's error)": [
        "INSERT INTO tasks VALUES (6, 'tasks/result', 1, NULL, X'7b0a7d')"
    ],
    "view attempts is not what it was made as": ["DROP VIEW attempts", "CREATE VIEW attempts AS SELECT 1"],
    "index by_signature is missing": ["DROP INDEX by_signature"],
    "trigger t was added": ["CREATE TRIGGER t AFTER INSERT ON dispatches BEGIN DELETE FROM outcomes; END"],
    "a task's answer without its handle": ["INSERT INTO tasks VALUES (99, 'm', 1, X'7b7d', NULL)"],
    "the journal has not one identity": ["DELETE FROM journal"],
}


@pytest.mark.parametrize("finding", DAMAGE)
def test_what_no_relay_leaves_behind_is_found_and_stays(path: Path, says: Says, finding: str) -> None:
    a_mixed_journal(path)
    change(path, *DAMAGE[finding])
    before = contents(path.parent)
    found = says.objects("verify", path, "--json", code=6)
    assert any(finding in each["text"] for each in found if each["kind"] == "finding")
    assert contents(path.parent)["j.db"] == before["j.db"]
    assert "nothing was repaired" in says("verify", path, code=6)


# A row against each CHECK of the tables, which SQLite does not look at where it only reads.
UNCHECKED = "PRAGMA ignore_check_constraints = ON"
BROKEN = {
    "dispatches: sequence 9223372036854775807 of workflow run": "UPDATE dispatches SET sequence = 9223372036854775807"
    " WHERE id = 3",
    "dispatches: sequence -9223372036854775808 of workflow run": "UPDATE dispatches SET sequence = -9223372036854775808"
    " WHERE id = 3",
    "dispatches: sequence 1 of workflow run, attempt -5": "UPDATE dispatches SET attempt = -5 WHERE id = 1",
    "dispatches: sequence 3 of workflow run, attempt 1": "UPDATE dispatches SET era = 'ancient' WHERE id = 3",
    "dispatches: sequence 2 of workflow run, attempt 1": "UPDATE dispatches SET settled_below = 3 WHERE id = 2",
    "outcomes: sequence 2 of workflow run, attempt 1": "UPDATE outcomes SET result = NULL, error = NULL"
    " WHERE dispatch = 2",
    "outcomes: sequence 1 of workflow run, attempt 1": "UPDATE outcomes SET status = 'DONE' WHERE dispatch = 1",
    "outcomes: row 99": "INSERT INTO outcomes VALUES (99, 'NOT_SENT', 1, NULL, NULL, X'7b7d', NULL)",
    "tasks: sequence 6 of workflow run, attempt 1": "INSERT INTO tasks VALUES (6, 'm', 1, NULL, NULL)",
    "forks: row 1": "INSERT INTO forks VALUES (1, 'run', 'run~1', 'run', 0, 1)",
    "doubts: sequence 8 of workflow run, attempt 1": "INSERT INTO doubts VALUES (9, 'weird', 1, 1)",
    "doubts: sequence 4 of workflow run, attempt 1": "UPDATE doubts SET is_open = 2",
    "decisions: sequence 4 of workflow run, attempt 1": "INSERT INTO decisions VALUES"
    " (1, 4, 'TASK', 1, '', X'7b7d', NULL)",
    "reports: row 7": "INSERT INTO reports VALUES (7, '', '', 1, 0, NULL, 2, NULL, NULL)",
    "decisions: sequence 1 of workflow run, attempt 1": "INSERT INTO decisions VALUES"
    " (1, 1, 'FAILED', 1, '', NULL, NULL)",
}


@pytest.mark.parametrize("row", BROKEN)
def test_a_row_that_breaks_a_constraint_is_found_and_named(path: Path, says: Says, row: str) -> None:
    a_mixed_journal(path)
    change(path, UNCHECKED, BROKEN[row])
    found = [each["text"] for each in says.objects("verify", path, "--json", code=6) if each["kind"] == "finding"]
    table, _, place = row.partition(": ")
    assert [text for text in found if text.startswith(f"a row of {table} without CHECK (") and place in text], found


def test_every_constraint_of_the_tables_is_looked_for() -> None:
    asked = list(verify._constraints())
    assert len(asked) == DDL.count("CHECK") == len(BROKEN) - 2  # two are broken in two ways
    for _, query in asked:
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.executescript(DDL)
            assert database.execute(query).fetchall() == []


def test_what_somebody_made_for_himself_is_no_finding(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    change(path, "CREATE VIEW mine AS SELECT * FROM calls", "CREATE INDEX more ON dispatches (tool_name)", "ANALYZE")
    assert says("verify", path).endswith("nothing is wrong with it\n")


@pytest.mark.parametrize("bytes_left", [100, 4096, 5000, -4096])
def test_a_journal_that_was_cut_is_a_finding_and_nothing_else_reads_it(path: Path, says: Says, bytes_left: int) -> None:
    a_mixed_journal(path)
    os.truncate(path, bytes_left if bytes_left > 0 else path.stat().st_size + bytes_left)
    found = says.objects("verify", path, "--json", code=6)
    assert [each["kind"] for each in found] == ["finding"] * (len(found) - 1) + ["note"]
    assert "SQLite" in found[-2]["text"]
    said = says.refusal("stats", path, code=4)
    assert "see what journal verify says, restore a copy" in said


@pytest.mark.parametrize(("start", "end"), [(100, 320), (4096, None)])
def test_garbled_bytes_are_a_finding(path: Path, says: Says, start: int, end: int | None) -> None:
    a_mixed_journal(path)
    content = path.read_bytes()
    end = len(content) if end is None else end
    path.write_bytes(content[:start] + random.Random(1).randbytes(end - start) + content[end:])
    assert "SQLite" in says("verify", path, code=6)


def test_a_disk_that_cannot_be_read_is_no_finding(path: Path, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    a_mixed_journal(path)
    monkeypatch.setattr("verify._schema", fail)
    assert says.refusal("verify", path, code=4).endswith("disk I/O error; see to the disk, then verify again\n")


def test_a_damaged_page_is_found(path: Path, says: Says) -> None:
    with life(path) as owner:
        for sequence in range(1, 200):
            owner.call(sequence, arguments=b'{"x":"%b"}' % (b"x" * 500))
    with open(path, "r+b") as file:
        file.seek(40 * 4096)
        file.write(b"\xff" * 4096)
    out = says("verify", path, code=6)
    assert "SQLite" in out


def test_redacted_arguments_are_no_finding(path: Path, says: Says) -> None:
    with life(path) as owner:
        owner.call(1, stored=REDACTED_ARGUMENTS)
        owner.call(2, arguments=REDACTED_ARGUMENTS)  # a call that really says that
    assert "note: the arguments of 1 row are redacted" in says("verify", path)


def test_gaps_of_sparse_pins_are_a_note(path: Path, says: Says) -> None:
    with life(path) as owner:
        for sequence in (2, 3, 7):
            owner.call(sequence)
    found = says.objects("verify", path, "--json")
    assert [each["kind"] for each in found] == ["note"]
    assert "workflow run has 4 places without a row (1, 4 to 6)" in found[0]["text"]


def test_progress_is_for_terminals(path: Path) -> None:
    a_mixed_journal(path)
    assert run_cli("verify", path).stderr == ""
    code, shown = on_terminal(cli_words("verify", path))
    assert code == 0
    assert "signatures: 0 of 9 ..." in shown


# --------------------------------------------------------------------------------------------- what somebody has edited

# What was done to a journal, and what is said of it where the edited row is looked at.
EDITED = {
    "a cause": (["INSERT INTO doubts VALUES (9, 'weird' || char(27), 1, 1)"], "dispatch 9 has a cause"),
    "a cause of what is not in doubt": (["INSERT INTO doubts VALUES (1, 'weird', 1, 0)"], "dispatch 1 has a cause"),
    "a status": (["UPDATE outcomes SET status = char(27) || '[2J' WHERE dispatch = 2"], "dispatch 2 has a status"),
    "an era": (["UPDATE dispatches SET era = char(27) || '[2J' WHERE id = 3"], "dispatch 3 has a era"),
    "a decision": (["INSERT INTO decisions VALUES (1, 1, char(27), 1, '', NULL, NULL)"], "dispatch 1 has a status"),
    "no identity": (["DELETE FROM journal"], "has not one identity"),
    "two identities": (["INSERT INTO journal VALUES ('x', 1)"], "has not one identity"),
    "a name in the schema": (
        [
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_schema SET sql = replace(sql, 'TABLE doubts', 'TABLE ' || char(27) || 'doubts')",
        ],
        "malformed database schema",
    ),
    "a view": (["DROP VIEW attempts", "CREATE VIEW attempts AS SELECT 1"], "no such column"),
    "a signature": (["UPDATE dispatches SET call_signature = char(27) || '[2J'"], ""),
    "a tool that is no text": (["UPDATE dispatches SET tool_name = CAST(X'1bff41' AS TEXT)"], ""),
    "times": (
        [f"UPDATE {of} = {number}" for number in (-(2**63), 2**63 - 1) for of in (
            "dispatches SET started_at", "outcomes SET completed_at", "journal SET created_at",
        )],
        "",
    ),
    "numbers": (
        ["UPDATE dispatches SET sequence = 9223372036854775807 WHERE id = 1", "UPDATE dispatches SET attempt = -5"], "",
    ),
    "processes": (["UPDATE owners SET pid = -9223372036854775808, upstream_pid = 9223372036854775807"], ""),
    "a loop of branches": (
        ["INSERT INTO forks VALUES (1, 'run', 'run~1', 'run~2', 5, 1), (2, 'run', 'run~2', 'run~1', 5, 1)"], "",
    ),
}  # fmt: skip
LOOKS = (
    ["list", "--limit", "0"], ["show", 2], ["show", 9], ["show", 2, "--json"], ["export"], ["stats"], ["verify"],
    ["verify", "--json"], ["prune", "--older-than", "1s", "--dry-run"], ["resolve", 8, "--not-executed", "--yes"],
)  # fmt: skip


@pytest.mark.parametrize("what", EDITED)
def test_whatever_somebody_has_put_into_a_journal_no_command_falls_over_it_or_moves_the_terminal(
    path: Path, says: Says, what: str
) -> None:
    statements, expected = EDITED[what]
    a_mixed_journal(path)
    change(path, UNCHECKED, *statements)
    heard = []
    for command, *words in LOOKS:
        out, err = says.any_of(command, path, *words, codes=(0, 1, 4, 6))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err)
        heard.append(err)
    assert any(expected in err and str(path) in err for err in heard) or not expected


def test_a_list_that_meets_an_edited_row_says_which_and_what_to_do(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    change(path, UNCHECKED, "UPDATE dispatches SET era = 'ancient' WHERE id = 3")
    said = says.refusal("list", path, code=4)
    assert "dispatch 3 has a era that no relay writes, 'ancient'; see what journal verify says, restore a copy" in said


def test_a_text_that_is_no_utf_8_is_shown_as_an_escape(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    change(path, "UPDATE dispatches SET tool_name = CAST(X'ff41' AS TEXT) WHERE id = 1")
    assert says.objects("list", path, "--json")[0]["tool_name"] == "\\xffA"


@pytest.mark.parametrize("command", ["list", "stats", "verify"])
def test_nobody_is_told_to_make_a_folder_for_a_journal_that_is_to_be_read(tmp_path: Path, command: str) -> None:
    ended = run_cli(command, tmp_path / "nowhere" / "j.db")
    assert ended.returncode == 4
    assert "there is none" in ended.stderr
    assert "create" not in ended.stderr


# ------------------------------------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    "command", [["list"], ["show", 1], ["export"], ["stats"], ["verify"]], ids=lambda words: words[0]
)
def test_what_is_no_journal_is_refused_in_one_line(tmp_path: Path, says: Says, command: list[Any]) -> None:
    foreign, text = tmp_path / "foreign.db", tmp_path / "text"
    sqlite3.connect(foreign).execute("CREATE TABLE t (x)").connection.close()
    text.write_text("hello" * 100)
    for given in (foreign, text, tmp_path / "none.db", tmp_path / "nowhere" / "j.db", tmp_path):
        said = says.refusal(command[0], given, *command[1:], code=4)
        assert str(given) in said
    assert not (tmp_path / "none.db").exists()


def test_a_journal_of_a_newer_version_is_refused(path: Path, says: Says) -> None:
    a_mixed_journal(path)
    change(path, "PRAGMA user_version = 99")
    assert "use a newer Checkpoint" in says.refusal("list", path, code=4)


def test_a_closed_journal_can_be_read_where_nothing_can_be_written(path: Path) -> None:
    a_mixed_journal(path)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        ended = subprocess.run(
            [*powerless(), *cli_words("list", path, "--json")], capture_output=True, text=True, timeout=30, check=False
        )
    finally:
        path.parent.chmod(0o755)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) == 9
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["j.db", "j.db.lock"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["look"],
        ["list"],
        ["list", "j.db", "--limit", "-1"],
        ["list", "j.db", "--status", "DONE"],
        ["list", "j.db", "--since", "yesterday"],
        ["show", "j.db"],
        ["show", "j.db", "0"],
        ["show", "j.db", "1.0"],
        ["show", "j.db", str(2**53)],
        ["show", "j.db", "1" * 5000],
        ["resolve", "j.db", "1"],
        ["resolve", "j.db", "1", "--not-executed", "--failed", "x"],
        ["resolve", "j.db", "1", "--failed", " ", "--yes"],
        ["prune", "j.db"],
        ["prune", "j.db", "--older-than", "30"],
        ["list", "j.db", "--", "server"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_wrong_command_line_is_told_in_one_line(says: Says, words: list[str]) -> None:
    assert says.refusal(*words, code=2).endswith(" --help)\n")


def test_help_teaches_each_command(says: Says) -> None:
    for command in ("list", "show", "resolve", "export", "stats", "verify", "prune"):
        assert command in says("--help")
        assert "JOURNAL" in says(command, "--help")
