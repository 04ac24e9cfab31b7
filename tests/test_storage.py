"""Everything the journal does on disk, on real files.

What SQLite and the kernel do to a file in trouble was tried first; each of those findings is a test here. Other
processes are children (storage_child.py): a connection of this process cannot stand for one, since POSIX locks belong
to processes.
"""

import contextlib
import os
import re
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from storage_helpers import (
    NOW_MS,
    WORKFLOW,
    an_entry,
    answer,
    change,
    child,
    completed,
    contents,
    dispatch,
    doubt,
    draft,
    open_journal,
    owned,
    powerless,
    rows,
    run_child,
    strace,
    taken,
    traced,
)

import journal as journal_module
import storage
from journal import Journal, JournalBusy, JournalFailed
from records import QUERIES
from states import (
    MAX_SEQUENCE,
    Answered,
    Cause,
    Delivered,
    Dispatched,
    Doubted,
    Status,
    TaskEnded,
    UpstreamStarted,
)
from storage import APPLICATION_ID, FORMAT, Files, JournalError, Lock, OpenFile

PAGE: Final = 4096
OUTCOME: Final = "INSERT INTO outcomes (dispatch, status, completed_at, result, error) VALUES "
DECISION: Final = "INSERT INTO decisions (dispatch, status, decided_at, reason, result, error) VALUES "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of its own for the journal, so that all files in it can be compared."""
    made = tmp_path / "folder"
    made.mkdir()
    return made


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "j.db"


@pytest.fixture
def finished(path: Path) -> Path:
    """A journal with three finished calls, that nobody has open."""
    with owned(path) as journal:
        completed(journal, 1, 2, 3)
    return path


def database_of(journal: Journal) -> sqlite3.Connection:
    """The connection that writes, to ask it what no other can tell."""
    assert journal._database is not None
    return journal._database


def statements_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What SQLite is told from now on, on every connection that is opened."""
    told: list[str] = []
    connect = storage.connect

    def connect_and_listen(path: str, mode: str) -> sqlite3.Connection:
        database = connect(path, mode)
        database.set_trace_callback(told.append)
        return database

    monkeypatch.setattr(storage, "connect", connect_and_listen)
    return told


# ------------------------------------------------------------------------------------------------------- what is ours


def foreign_file(path: Path) -> None:
    path.write_bytes(b"A" * PAGE)


def short_file(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def other_database(path: Path) -> None:
    change(path, "CREATE TABLE meta (k, v)", "INSERT INTO meta VALUES ('app', 'other')")


def other_database_in_wal_mode(path: Path) -> None:
    change(path, "PRAGMA journal_mode = WAL", "CREATE TABLE meta (k, v)")


def older_journal(path: Path) -> None:
    taken(path).close()
    change(path, f"PRAGMA user_version = {FORMAT - 1}")


def newer_journal(path: Path) -> None:
    taken(path).close()
    change(path, f"PRAGMA user_version = {FORMAT + 1}")


def half_stamped(path: Path) -> None:
    change(path, f"PRAGMA application_id = {APPLICATION_ID}", "CREATE TABLE calls (x)")


def folder_instead(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_null(path: Path) -> None:
    path.symlink_to(os.devnull)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def journal_with_two_names(path: Path) -> None:
    taken(path).close()
    os.link(path, path.parent / "other.db")


def orphaned_log(path: Path) -> None:
    Path(f"{path}-wal").write_bytes(b"rows")


def orphaned_log_of_an_empty_file(path: Path) -> None:
    path.touch()
    orphaned_log(path)


def orphaned_index(path: Path) -> None:
    Path(f"{path}-shm").write_bytes(b"index")


def name_below_a_file(path: Path) -> None:
    path.write_bytes(b"")


UNUSABLE: Final[list[tuple[Callable[[Path], None], str]]] = [
    (foreign_file, "not a Checkpoint journal; give another path"),
    (short_file, "not a Checkpoint journal; give another path"),
    (other_database, "a database of another program; give another path"),
    (other_database_in_wal_mode, "a database of another program; give another path"),
    (newer_journal, "has format 3, this version reads 2; use a newer Checkpoint"),
    (older_journal, "has format 1, this version reads 2; use the Checkpoint that wrote it, or a new journal"),
    (half_stamped, "has format 0, this version reads 2; use the Checkpoint that wrote it, or a new journal"),
    (folder_instead, "not a regular file; give the path of a file"),
    (fifo, "not a regular file; give the path of a file"),
    (link_to_null, "not a regular file; give the path of a file"),
    (link_to_itself, "Too many levels of symbolic links; give another path"),
    (journal_with_two_names, "delete the other names or copy the file"),
    (orphaned_log, "restore the journal, or delete -wal to start without them"),
    (orphaned_log_of_an_empty_file, "restore the journal, or delete -wal to start without them"),
    (orphaned_index, "restore the journal, or delete -shm to start without them"),
]


@pytest.mark.parametrize(("make", "says"), UNUSABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_ours_is_named_in_one_line_and_left_as_it_is(
    make: Callable[[Path], None], says: str, path: Path, folder: Path
) -> None:
    make(path)
    before, names = contents(folder), sorted(os.listdir(folder))
    with pytest.raises(JournalError) as raised:
        open_journal(path)
    message = str(raised.value)
    assert message.startswith(f"journal {path}: ")
    assert says in message
    assert "\n" not in message
    assert (contents(folder), sorted(os.listdir(folder))) == (before, names)


def test_a_null_device_is_no_journal() -> None:
    with pytest.raises(JournalError, match=r"^journal /dev/null: not a regular file; give the path of a file$"):
        open_journal(os.devnull)


def test_a_missing_folder_is_not_made(folder: Path) -> None:
    with pytest.raises(JournalError, match=r"the folder .*/missing does not exist; create it first$"):
        open_journal(folder / "missing" / "j.db")
    assert os.listdir(folder) == []


def test_a_path_below_a_file_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(JournalError, match=r"Not a directory; give another path$"):
        open_journal(folder / "file" / "j.db")


@pytest.mark.parametrize(
    ("modes", "says"),
    [
        ({"j.db": 0o444}, "j.db is not writable; make it so, or give another path"),
        ({"j.db": 0o200}, "Permission denied; make it readable"),
        ({".": 0o555}, "folder is not writable; make it so, or give another path"),
    ],
)
def test_what_cannot_be_written_is_refused_at_the_start(
    modes: dict[str, int], says: str, finished: Path, folder: Path
) -> None:
    before = contents(folder)
    for name, mode in modes.items():
        (folder / name).chmod(mode)
    said = run_child("check", finished, under=powerless()).stdout
    folder.chmod(0o700)
    finished.chmod(0o600)
    assert said.startswith(f"refused journal {finished}: ")
    assert said.endswith(f"{says}\n")
    assert contents(folder) == before


def test_an_empty_file_counts_as_new(path: Path) -> None:
    path.touch()
    with owned(path) as journal:
        completed(journal, 1)
    assert rows(path) == [(1, "COMPLETED")]


def test_a_file_whose_name_is_no_text_and_full_of_marks_can_be_a_journal(folder: Path) -> None:
    path = os.fsdecode(os.fsencode(folder) + b"/a b%20?mode=ro#\xff.db")
    with owned(path, None) as journal:
        completed(journal, 1)
    again = open_journal(path, None)
    again.probe()
    assert again.workflow_id.endswith("#\\udcff.db")
    with owned(path, None) as journal:
        assert journal.entry(WORKFLOW, 1) is not None
    assert [name for name in os.listdir(os.fsencode(folder)) if not name.endswith(b".lock")] == [
        b"a b%20?mode=ro#\xff.db"
    ]


@pytest.mark.parametrize(
    ("kind", "found"),
    [("ext4", None), ("overlay", None), ("tmpfs", None), ("nfs4", "nfs4"), ("fuse.sshfs", "fuse.sshfs"), ("9p", "9p")],
)
def test_a_file_system_that_is_not_local_is_known_by_the_folders_device(
    tmp_path: Path, kind: str, found: str | None
) -> None:
    """JF-10: as the system lists it, with a source and a mount point that hold all kinds of text."""
    device = os.stat(tmp_path).st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"20 1 0:99999 / /other rw - nfs other:{here} rw\n"
        f"21 1 {here} / /a\\040b rw,noatime shared:1 master:2 - {kind} user@host:/ü - nfs rw\n"
    )
    assert storage.kind_if_not_local(str(tmp_path), str(mounts)) == found
    assert storage.kind_if_not_local(str(tmp_path / "nowhere"), str(mounts)) is None
    assert storage.kind_if_not_local(str(tmp_path), str(tmp_path / "no list")) is None


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("calls", [0, 3])
def test_a_journal_that_lost_any_one_of_its_pages_is_refused_and_left_as_it_is(calls: int, path: Path) -> None:
    with owned(path) as journal:
        if calls:
            completed(journal, *range(1, calls + 1))
    whole = path.read_bytes()
    assert len(whole) > 8 * PAGE
    for start in range(0, len(whole), PAGE):
        kept = 100 if start == 0 else 0  # else it would be a stranger's
        damaged = whole[: start + kept] + bytes(PAGE - kept) + whole[start + PAGE :]
        path.write_bytes(damaged)
        journal = open_journal(path)
        with pytest.raises(JournalError) as raised:
            journal.probe()
        assert str(raised.value).startswith(f"journal {path}: "), f"page {start // PAGE + 1}"
        assert str(raised.value).endswith("it was left as it is: restore a copy or give another path")
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_a_journal_that_was_cut_off_is_refused_and_left_as_it_is(pages: int, finished: Path) -> None:
    cut = finished.read_bytes()[: pages * PAGE]
    finished.write_bytes(cut)
    with pytest.raises(JournalError, match="malformed; it was left as it is"):
        open_journal(finished).probe()
    assert finished.read_bytes() == cut


@pytest.mark.parametrize("name", ["dispatches", "outcomes", "decisions", "owners", "doubts", "journal"])
def test_a_journal_without_one_of_its_tables_is_refused(name: str, finished: Path) -> None:
    change(finished, f"DROP TABLE {name}")
    with pytest.raises(JournalError, match="no such table"):
        open_journal(finished).probe()


@pytest.mark.parametrize("name", ["attempts", "calls"])
def test_a_journal_without_one_of_its_views_is_refused(name: str, finished: Path) -> None:
    change(finished, f"DROP VIEW {name}")
    with pytest.raises(JournalError, match="no such table"):
        open_journal(finished).probe()


def test_a_probe_looks_neither_at_arguments_nor_at_results(path: Path) -> None:
    with owned(path) as journal:
        entries = dispatch(journal, an_entry(1, arguments=b"a" * 900_000))
        answer(journal, *entries, result=b"r" * 900_000)
    whole = path.read_bytes()
    for payload in (b"a", b"r"):
        for start in range(0, len(whole), PAGE):
            if whole[start + 4 : start + PAGE] == payload * (PAGE - 4):  # an overflow page
                whole = whole[:start] + b"\xff" * PAGE + whole[start + PAGE :]
    path.write_bytes(whole)
    journal = open_journal(path)
    journal.probe()
    with pytest.raises(JournalFailed, match="malformed"), owned(path) as journal:
        journal.entry(WORKFLOW, 1)


def test_damage_that_shows_later_stops_the_journal_and_raises_nothing_else(finished: Path) -> None:
    journal = open_journal(finished)
    journal.probe()
    whole = finished.read_bytes()
    finished.write_bytes(whole[:PAGE] + bytes(len(whole) - PAGE))
    with pytest.raises(JournalFailed, match=f"^journal {re.escape(str(finished))}: .*malformed"):
        journal.take()
    with pytest.raises(JournalFailed):
        journal.take()
    assert journal.failure is not None


def test_a_probe_of_a_journal_in_use_neither_fails_nor_looks_malformed(path: Path) -> None:
    with child("own", path):
        journal = open_journal(path, None)
        journal.probe()
        assert journal.workflow_id == WORKFLOW
        assert not journal.take()


# ----------------------------------------------------------------------------------------------------------- creation


def test_nothing_is_created_before_the_first_call(path: Path, folder: Path) -> None:
    journal = open_journal(path)
    journal.probe()
    journal.close()
    assert os.listdir(folder) == []


def test_every_file_is_for_its_owner_only(path: Path, folder: Path) -> None:
    mask = os.umask(0)
    try:
        with owned(path) as journal:
            completed(journal, 1)
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(["j.db", "j.db-wal", "j.db-shm", "j.db.lock"], 0o600)


def test_a_journal_is_stamped_before_it_is_in_wal_mode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = statements_of(monkeypatch)
    taken(path).close()
    stamps = [at for at, line in enumerate(told) if "application_id" in line or "user_version" in line]
    assert len(stamps) == 2
    assert max(stamps) < min(at for at, line in enumerate(told) if "journal_mode = WAL" in line)
    header = path.read_bytes()[:100]
    assert int.from_bytes(header[68:72], "big") == APPLICATION_ID
    assert int.from_bytes(header[60:64], "big") == FORMAT
    assert header[18:20] == b"\2\2"  # WAL


def test_a_kill_leaves_a_whole_journal_or_none(folder: Path) -> None:
    points = 0
    while True:
        points += 1
        path = folder / f"j{points}.db"
        ended = run_child("create_until", path, points)
        is_there = path.exists()
        if is_there:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
                assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                assert database.execute("SELECT workflow_id FROM journal").fetchone() == (WORKFLOW,)
        with owned(path) as journal:  # the next start, whatever was left
            completed(journal, 1)
        assert rows(path) == [(1, "COMPLETED")]
        if ended.returncode == 0:
            break
        assert ended.returncode == -9, ended.stderr
    assert points > 8
    assert not [file.name for file in folder.iterdir() if "checkpoint-new" in file.name]


def test_a_kill_within_sqlite_leaves_a_whole_journal_or_none(folder: Path) -> None:
    for point in (1, 2, 7, 13):
        path = folder / f"j{point}.db"
        inject = strace("-e", "trace=pwrite64", "-e", f"inject=pwrite64:signal=KILL:when={point}", log=folder / "log")
        assert run_child("create", path, under=inject).returncode != 0
        assert not path.exists()
        with owned(path) as journal:
            completed(journal, 1)
        assert rows(path) == [(1, "COMPLETED")]


def test_a_journal_is_on_disk_before_it_has_its_name(path: Path, folder: Path) -> None:
    log = folder.parent / "log"
    run_child("create", path, under=strace("-y", "-e", "trace=/fsync|fdatasync|rename", log=log))
    calls = re.findall(r"^(\w+)\((.*)\)", "\n".join(traced(log)), re.MULTILINE)
    names = [name for name, _ in calls]
    at = next(at for at, (name, words) in enumerate(calls) if name.startswith("rename") and "checkpoint-new" in words)
    assert "fsync" in names[at - 1]
    assert "checkpoint-new" in calls[at - 1][1]
    assert calls[at + 1][0] == "fsync"
    assert calls[at + 1][1].endswith(f"<{folder}>")


def test_a_file_of_anothers_beside_the_journal_is_not_touched(path: Path, folder: Path) -> None:
    for name in ("j.db.new", "j.db.tmp", "j.db.bak", "j.db~"):
        (folder / name).write_bytes(b"mine")
    with owned(path) as journal:
        completed(journal, 1)
    for name in ("j.db.new", "j.db.tmp", "j.db.bak", "j.db~"):
        assert (folder / name).read_bytes() == b"mine"


def test_a_disk_with_no_room_for_a_journal_leaves_none(path: Path, folder: Path) -> None:
    inject = strace("-e", "trace=pwrite64", "-e", "inject=pwrite64:error=ENOSPC:when=5", log=folder.parent / "log")
    said = run_child("check", path, under=inject).stdout
    assert said.startswith(f"refused journal {path}: database or disk is full; see to the disk")
    assert not path.exists()
    assert run_child("check", path).stdout == "taken True\n"


# -------------------------------------------------------------------------------------------------------- constraints


def test_the_connection_that_writes_is_durable(path: Path) -> None:
    expected = {
        "synchronous": 2,
        "fullfsync": 1,
        "checkpoint_fullfsync": 1,
        "wal_autocheckpoint": 0,
        "journal_mode": "wal",
        "journal_size_limit": -1,
        "foreign_keys": 1,
        "trusted_schema": 0,
        "busy_timeout": 0,
        "page_size": PAGE,
        "application_id": APPLICATION_ID,
        "user_version": FORMAT,
    }
    with owned(path) as journal:
        completed(journal, 1)
        journal.tidy()
        database = database_of(journal)
        assert {name: database.execute(f"PRAGMA {name}").fetchone()[0] for name in expected} == expected
        assert database.isolation_level is None


def test_every_table_is_strict(finished: Path) -> None:
    tables = rows(
        finished, "SELECT name, strict FROM pragma_table_list WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    )
    assert {name for name, _ in tables} == {
        *("journal", "owners", "dispatches", "outcomes", "doubts", "decisions"),
        *("tasks", "deliveries", "forks", "prunings", "reports"),
    }
    assert all(strict for _, strict in tables)


def checked(path: Path, table: str, column: str) -> set[str]:
    """The values that a CHECK constraint lists."""
    (sql,) = rows(path, f"SELECT sql FROM sqlite_schema WHERE name = '{table}'")[0]  # noqa: S608  # names of ours
    found = re.search(rf"CHECK \({column} IN \(([^)]*)\)\)", str(sql))
    assert found is not None
    return {word.strip().strip("'") for word in found[1].split(",")}


def test_the_constraints_of_the_tables_name_what_the_enums_name(finished: Path) -> None:
    derived = {Status.PENDING, Status.IN_DOUBT, Status.PRUNED}
    operators = {Status.COMPLETED, Status.FAILED, Status.NOT_EXECUTED}
    assert checked(finished, "outcomes", "status") == {*Status} - derived - {Status.NOT_EXECUTED}
    assert checked(finished, "decisions", "status") == operators
    assert checked(finished, "doubts", "cause") == {*Cause}
    assert checked(finished, "dispatches", "era") == {"handshake", "modern"}


IMPOSSIBLE: Final = {
    "an outcome without a dispatch": OUTCOME + "(99, 'COMPLETED', 1, x'7b7d', NULL)",
    "a second outcome": OUTCOME + "(1, 'FAILED', 1, NULL, x'7b7d')",
    "an outcome that is two": OUTCOME + "(4, 'COMPLETED', 1, x'7b7d', x'7b7d')",
    "an outcome that says nothing": OUTCOME + "(4, 'COMPLETED', 1, NULL, NULL)",
    "an answer to what was not sent": OUTCOME + "(4, 'NOT_SENT', 1, x'7b7d', NULL)",
    "an outcome that is none": OUTCOME + "(4, 'PENDING', 1, x'7b7d', NULL)",
    "a result that is text": OUTCOME + "(4, 'COMPLETED', 1, '{}', NULL)",
    "a second dispatch of an attempt": "INSERT INTO dispatches"
    " SELECT 99, workflow_id, sequence, attempt, epoch, 1, tool_name, call_signature, call_id, era, started_at, NULL"
    " FROM dispatches WHERE id = 1",
    "a place before the first": "UPDATE dispatches SET sequence = 0 WHERE id = 1",
    "a place after the last": "UPDATE dispatches SET sequence = 9007199254740992 WHERE id = 1",
    "an attempt before the first": "UPDATE dispatches SET attempt = 0 WHERE id = 1",
    "a mark above its row": "UPDATE dispatches SET settled_below = 2 WHERE id = 1",
    "a dispatch of nobody's": "UPDATE dispatches SET epoch = 77 WHERE id = 1",
    "a doubt about nothing": "INSERT INTO doubts VALUES (99, 'timeout', 1, 1)",
    "a doubt for no cause": "INSERT INTO doubts VALUES (4, 'whim', 1, 1)",
    "a decision about nothing": DECISION + "(99, 'NOT_EXECUTED', 1, 'why', NULL, NULL)",
    "a decision without a reason": DECISION + "(4, 'NOT_EXECUTED', 1, NULL, NULL, NULL)",
}


@pytest.mark.parametrize("statement", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_the_tables_make_the_wrong_thing_impossible(statement: str, finished: Path) -> None:
    with owned(finished) as journal:
        dispatch(journal, an_entry(4))
        with pytest.raises(sqlite3.IntegrityError):
            database_of(journal).execute(statement)


def test_a_second_outcome_stops_the_journal_and_leaves_the_first(path: Path) -> None:
    journal = taken(path)
    (entry,) = completed(journal, 1)
    with pytest.raises(JournalFailed, match="UNIQUE constraint failed"):
        answer(journal, entry, result=b'"other"')
    assert rows(path, "SELECT result FROM calls") == [('{"content":[]}',)]


def test_facts_that_stand_together_are_on_record_together_or_not_at_all(path: Path) -> None:
    journal = taken(path)
    good, bad = draft(journal, an_entry(1)), draft(journal, an_entry(2))
    with pytest.raises(JournalFailed):
        journal.append([Dispatched(good), Dispatched(bad), Dispatched(bad)])
    assert rows(path) == []
    for entry in (good, bad):
        journal.withdraw(entry)
        assert journal.entry(WORKFLOW, entry.sequence) is None


def test_a_fact_that_cannot_be_written_down_leaves_no_transaction_open(path: Path) -> None:
    with owned(path) as journal:
        bad = draft(journal, an_entry(1))._replace(signature="\ud800")
        with pytest.raises(UnicodeEncodeError):
            journal.append([Dispatched(bad)])
        journal.withdraw(bad)
        completed(journal, 1)
    assert rows(path) == [(1, "COMPLETED")]


class OutOfMemory:
    """A connection that runs out of memory in its commits."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            raise MemoryError
        return self.database.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.database, name)


def test_a_commit_that_ends_in_any_other_way_leaves_no_transaction_open(path: Path) -> None:
    journal = taken(path)
    database = journal._database
    assert database is not None
    journal._database = OutOfMemory(database)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        dispatch(journal, an_entry(1))
    assert not database.in_transaction
    journal.close()


# ------------------------------------------------------------------------------------------------------------ commits


def test_a_commit_is_on_disk_before_it_is_acknowledged(path: Path, folder: Path) -> None:
    taken(path).close()
    log = folder.parent / "log"
    run_child("work", path, 2, 10, under=strace("-y", "-e", "trace=write,pwrite64,fdatasync", log=log))
    is_dirty, acknowledged = False, 0
    for line in traced(log):
        if line.startswith("pwrite64") and "j.db-wal>" in line:
            is_dirty = True
        elif line.startswith("fdatasync") and "j.db-wal>" in line:
            is_dirty = False
        elif re.match(r'write\(1<.*"(dispatch|answer) ', line):
            acknowledged += 1
            assert not is_dirty, line
    assert acknowledged == 4


def test_many_facts_share_one_sync(path: Path, folder: Path) -> None:
    log = folder.parent / "log"
    run_child("batch", path, 64, under=strace("-e", "trace=write,fsync,fdatasync", log=log))
    lines = traced(log)
    begin, end = (next(at for at, line in enumerate(lines) if f'write(1, "{word}' in line) for word in ("begin", "end"))
    assert [line.partition("(")[0] for line in lines[begin + 1 : end]] == ["fdatasync"]
    assert len(rows(path)) == 65


def test_9_megabytes_of_arguments_and_of_result_come_back_to_the_byte(path: Path) -> None:
    arguments, result = os.urandom(4_500_000).hex().encode(), b'"' + b"\xff" * 9_000_000 + b'"'
    with owned(path) as journal:
        entries = dispatch(journal, an_entry(1, arguments=arguments))
        answer(journal, *entries, result=result)
        journal.tidy()
    with owned(path) as journal:
        found = journal.entry(WORKFLOW, 1)
    assert found is not None
    assert (found.arguments, found.result) == (arguments, result)


@pytest.mark.parametrize("arguments", [None, b"", b"null", b"{}"])
def test_arguments_are_kept_as_they_were_written_also_where_there_are_none(arguments: bytes | None, path: Path) -> None:
    with owned(path) as journal:
        dispatch(journal, an_entry(1, arguments=arguments))
    with owned(path) as journal:
        found = journal.entry(WORKFLOW, 1)
        assert found is not None
        assert found.arguments == arguments


def test_what_was_drafted_and_withdrawn_leaves_no_trace_and_frees_its_place(path: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1)
        drafted = draft(journal, an_entry(2))
        assert journal.entry(WORKFLOW, 2) == drafted
        assert journal.last_sequence(WORKFLOW) == 2
        later = draft(journal, an_entry(5))
        journal.withdraw(drafted)
        assert journal.entry(WORKFLOW, 2) is None
        assert journal.last_sequence(WORKFLOW) == 5
        journal.withdraw(later)
        assert journal.last_sequence(WORKFLOW) == 1
        completed(journal, 2)
    assert rows(path) == [(1, "COMPLETED"), (2, "COMPLETED")]


def test_a_workflow_that_is_full_is_told_so_and_harms_no_other(path: Path) -> None:
    with owned(path) as journal:
        completed(journal, MAX_SEQUENCE)
        with pytest.raises(JournalError, match="has no place after 9007199254740991") as raised:
            draft(journal, an_entry(journal.last_sequence(WORKFLOW) + 1))
        assert not isinstance(raised.value, JournalFailed)
        assert journal.entry(WORKFLOW, MAX_SEQUENCE + 1) is None
        answer(journal, *dispatch(journal, an_entry(1, workflow_id="other")))


def test_sequences_are_counted_per_workflow_and_go_on_after_a_restart(path: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1, 7)
        answer(journal, *dispatch(journal, an_entry(3, workflow_id="other")))
    with owned(path) as journal:
        assert [journal.last_sequence(name) for name in (WORKFLOW, "other", "third")] == [7, 3, 0]


# ------------------------------------------------------------------------------------------------- what is on record


def test_a_finished_call_is_the_same_after_a_restart(path: Path) -> None:
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(5, tool="é", arguments=b'{"a":1}', is_modern=True, call_id="c"))
        journal.append([Answered(entry, Status.FAILED, NOW_MS, error=b'{"code":1,"message":"m"}')])
    with owned(path) as journal:
        found = journal.entry(WORKFLOW, 5)
    assert found == entry._replace(status=Status.FAILED, error=b'{"code":1,"message":"m"}')


@pytest.mark.parametrize(
    "status", [Status.COMPLETED, Status.INPUT_REQUIRED, Status.TASK, Status.FAILED, Status.NOT_SENT]
)
def test_what_was_answered_is_what_is_on_record(status: Status, path: Path) -> None:
    bodies: dict[str, Any] = {Status.FAILED: {"error": b"{}"}, Status.NOT_SENT: {}}.get(status, {"result": b"{}"})
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(1))
        journal.append([Answered(entry, status, NOW_MS, **bodies)])
        live = journal.entry(WORKFLOW, 1)
        assert live is not None
        assert live.status is status
        assert journal.doubts() == []
    assert rows(path) == [(1, status)]


def test_a_call_of_this_process_is_pending_for_it_and_in_doubt_for_the_next(path: Path) -> None:
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(1))
        assert journal.entry(WORKFLOW, 1) == entry
        assert entry.status is Status.PENDING
        assert journal.doubts() == []
        assert rows(path) == [(1, "PENDING")]
    with owned(path) as journal:
        lost = entry._replace(status=Status.IN_DOUBT, cause=Cause.RELAY_LOST)
        assert journal.entry(WORKFLOW, 1) == lost
        assert journal.doubts() == [lost._replace(arguments=None)]


def test_the_newest_attempt_speaks_for_its_place(path: Path) -> None:
    with owned(path) as journal:
        (first,) = dispatch(journal, an_entry(1))
        journal.append([Answered(first, Status.NOT_SENT, NOW_MS)])
        (second,) = dispatch(journal, an_entry(1, attempt=2))
        answer(journal, second)
    assert rows(path, "SELECT sequence, attempt, status FROM calls") == [(1, 2, "COMPLETED")]
    assert rows(path, "SELECT attempt, status FROM attempts ORDER BY id") == [(1, "NOT_SENT"), (2, "COMPLETED")]
    with owned(path) as journal:
        found = journal.entry(WORKFLOW, 1)
        assert found is not None
        assert (found.id, found.attempt) == (second.id, 2)


def test_a_call_that_runs_again_does_not_hide_one_that_is_still_open(path: Path) -> None:
    with owned(path) as journal:
        first, _ = dispatch(journal, an_entry(1), an_entry(2))
        doubt(journal, first, Cause.TIMEOUT)
        dispatch(journal, an_entry(1, attempt=2))  # its server says that it may
    with owned(path) as journal:
        assert sorted(lost.place for lost in journal.doubts()) == [(WORKFLOW, 1), (WORKFLOW, 2)]


@pytest.mark.parametrize("cause", Cause)
def test_a_doubt_keeps_its_cause(cause: Cause, path: Path) -> None:
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(1))
        doubt(journal, entry, cause)
        doubted = entry._replace(status=Status.IN_DOUBT, cause=cause)
        slim = doubted._replace(arguments=None)
        assert journal.doubts() == [slim] == [journal.entry(WORKFLOW, 1)]
    with owned(path) as journal:
        assert (journal.doubts(), journal.entry(WORKFLOW, 1)) == ([slim], doubted)


def test_the_first_cause_of_a_doubt_stands(path: Path) -> None:
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(1))
        doubt(journal, entry, Cause.CANCELLED)
        doubt(journal, entry, Cause.UPSTREAM_LOST)
        assert [found.cause for found in journal.doubts()] == [Cause.CANCELLED]
    with owned(path) as journal:
        assert [found.cause for found in journal.doubts()] == [Cause.CANCELLED]


def in_two_commits(journal: Journal, facts: list[Any]) -> None:
    for fact in facts:
        journal.append([fact])


def in_one_commit(journal: Journal, facts: list[Any]) -> None:
    journal.append(facts)


def in_one_commit_backwards(journal: Journal, facts: list[Any]) -> None:
    journal.append(facts[::-1])


@pytest.mark.parametrize("append", [in_two_commits, in_one_commit, in_one_commit_backwards])
def test_an_answer_ends_a_doubt_for_this_process_and_for_the_next(
    append: Callable[[Journal, list[Any]], None], path: Path
) -> None:
    """A client cancels, and upstream's answer is read in the same turn of the loop."""
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(1))
        append(journal, [Doubted(entry, Cause.CANCELLED, NOW_MS), Answered(entry, Status.COMPLETED, NOW_MS, b"{}")])
        assert journal.doubts() == []
        found = journal.entry(WORKFLOW, 1)
        assert found is not None
        assert found.status is Status.COMPLETED
    with owned(path) as journal:
        assert journal.doubts() == []
    assert rows(path, "SELECT is_open FROM doubts") in ([(0,)], [])  # what every later start has to look at


def test_a_doubt_that_an_operator_settled_blocks_nothing_more(path: Path) -> None:
    with owned(path) as journal:
        for entry in dispatch(journal, an_entry(1), an_entry(2)):
            doubt(journal, entry)
    change(
        path,
        DECISION + "(1, 'NOT_EXECUTED', 5, 'looked', NULL, NULL)",
    )
    with owned(path) as journal:
        assert [found.sequence for found in journal.doubts()] == [2]
        found = journal.entry(WORKFLOW, 1)
        assert found is not None
        assert found.status is Status.NOT_EXECUTED


# ------------------------------------------------------------------------------------------------------------ the view

COLUMNS: Final = (
    "workflow_id, sequence, attempt, tool_name, call_signature, arguments, status, result, error, started_at,"
    " completed_at, call_id, era, owner_epoch"
)


def test_the_view_tells_the_whole_story_while_the_journal_is_open(path: Path) -> None:
    with owned(path) as journal:
        done, failed, unsent, asked, lost, settled, refuted, _ = dispatch(
            journal,
            an_entry(1, arguments=b'{"a":"\xc3\xa9"}', is_modern=True, call_id="c1"),
            *(an_entry(sequence, arguments=None) for sequence in range(2, 9)),
        )
        answer(journal, done, result=b'{"r":1}')
        journal.append(
            [
                Answered(failed, Status.FAILED, NOW_MS + 2, error=b'{"code":1}'),
                Answered(unsent, Status.NOT_SENT, NOW_MS + 3),
                Answered(asked, Status.INPUT_REQUIRED, NOW_MS + 4, result=b"{}"),
                Doubted(lost, Cause.TIMEOUT, NOW_MS),
            ]
        )
        database = database_of(journal)  # as the journal's resolve will write them
        database.execute(
            DECISION + "(?, 'COMPLETED', 77, 'seen', x'7b7d', NULL)",
            (settled.id,),
        )
        database.execute(
            DECISION + "(?, 'FAILED', 78, 'gone', NULL, x'7b7d')",
            (refuted.id,),
        )
        seen = rows(path, f"SELECT {COLUMNS} FROM calls ORDER BY sequence")  # noqa: S608  # names of ours
        causes = rows(path, "SELECT sequence, cause FROM calls WHERE cause IS NOT NULL")
    head = (WORKFLOW, 1, 1, "t", "s" * 64)
    assert seen[0] == (*head, '{"a":"é"}', "COMPLETED", '{"r":1}', None, NOW_MS + 1, NOW_MS + 999, "c1", "modern", 1)
    assert [(row[1], *row[5:9], row[10]) for row in seen[1:]] == [
        (2, None, "FAILED", None, '{"code":1}', NOW_MS + 2),
        (3, None, "NOT_SENT", None, None, NOW_MS + 3),
        (4, None, "INPUT_REQUIRED", "{}", None, NOW_MS + 4),
        (5, None, "IN_DOUBT", None, None, None),
        (6, None, "COMPLETED", "{}", None, 77),
        (7, None, "FAILED", None, "{}", 78),
        (8, None, "PENDING", None, None, None),
    ]
    assert {row[12] for row in seen[1:]} == {"handshake"}
    assert causes == [(5, "timeout")]


def test_a_decision_stands_above_what_upstream_said(path: Path) -> None:
    with owned(path) as journal:
        (entry,) = completed(journal, 1)
        database_of(journal).execute(
            DECISION + "(?, 'NOT_EXECUTED', 5, 'r', NULL, NULL)",
            (entry.id,),
        )
        found = journal.entry(WORKFLOW, 1)
    assert found is not None
    assert (found.status, found.result, found.error) == (Status.NOT_EXECUTED, None, None)
    assert rows(path, "SELECT status, result, completed_at FROM calls") == [("NOT_EXECUTED", None, 5)]


def test_what_an_earlier_owner_left_is_in_doubt_in_the_view_once_there_is_a_newer(path: Path) -> None:
    run_child("leave_open", path, 1, 2, "1")
    assert rows(path) == [(1, "COMPLETED"), (2, "PENDING")]
    with owned(path) as journal:
        dispatch(journal, an_entry(3))
        assert rows(path) == [(1, "COMPLETED"), (2, "IN_DOUBT"), (3, "PENDING")]


def test_a_pending_call_of_an_earlier_owner_is_in_doubt_in_the_view_also_without_a_cause_on_record(path: Path) -> None:
    run_child("leave_open", path, 1, 1, "")
    change(path, "INSERT INTO owners VALUES (2, 1, NULL, 1)")
    assert rows(path, "SELECT status, cause FROM calls") == [("IN_DOUBT", None)]


# ----------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("given", ["run-7", None])
def test_a_journal_keeps_its_identity_wherever_it_goes(given: str | None, path: Path, folder: Path) -> None:
    with owned(path, given) as journal:
        completed(journal, 1)
    moved = folder.parent / "elsewhere.db"
    path.rename(moved)
    probed = open_journal(moved, None)
    probed.probe()
    assert probed.workflow_id == given or str(path)
    with owned(moved, None) as journal:
        assert journal.workflow_id == (given or str(path))
    with owned(moved, "asked for") as journal:
        assert journal.workflow_id == "asked for"
    with owned(moved, None) as journal:
        assert journal.workflow_id == (given or str(path))


def test_a_journal_that_has_lost_its_identity_is_refused(finished: Path) -> None:
    change(finished, "DELETE FROM journal")
    with pytest.raises(JournalError, match="lost its identity"):
        open_journal(finished, None).probe()


def test_a_link_to_a_journal_is_that_journal(finished: Path, folder: Path) -> None:
    (folder / "link.db").symlink_to(finished)
    with child("read", folder / "link.db"):
        assert not open_journal(finished).take()
    assert {file.name for file in folder.iterdir() if file.name.endswith(".lock")} == {"j.db.lock"}


# ------------------------------------------------------------------------------------------------------------- owners


def test_a_second_process_waits_for_the_first_and_says_who_it_is(path: Path) -> None:
    with child("own", path) as owner:
        journal = open_journal(path)
        assert not journal.take()
        assert not journal.is_open
        assert journal.owner_pid() == owner.pid
        owner.kill()
        owner.wait()
        assert journal.take()
        assert [entry.sequence for entry in journal.doubts()] == [1]
        journal.close()


def test_a_process_that_has_only_read_gives_the_journal_back(finished: Path) -> None:
    journal = taken(finished)
    assert run_child("check", finished).stdout == "taken False\n"
    journal.give_back()
    assert not journal.is_open
    assert run_child("check", finished).stdout == "taken True\n"


def test_a_process_that_has_drafted_or_dispatched_keeps_the_journal(finished: Path) -> None:
    with owned(finished) as journal:
        drafted = draft(journal, an_entry(4))
        journal.give_back()
        assert journal.is_open
        journal.append([Dispatched(drafted)])
        answer(journal, drafted)
        assert journal.has_dispatched
        journal.give_back()
        assert journal.is_open
        assert run_child("check", finished).stdout == "taken False\n"


def test_what_another_process_wrote_meanwhile_is_read_when_the_journal_is_taken_again(finished: Path) -> None:
    journal = taken(finished)
    assert journal.last_sequence(WORKFLOW) == 3
    journal.give_back()
    run_child("leave_open", finished, 4, 5, "4")
    assert journal.take()
    assert journal.last_sequence(WORKFLOW) == 5
    assert [entry.sequence for entry in journal.doubts()] == [5]
    (entry,) = dispatch(journal, an_entry(6))
    journal.close()
    assert rows(finished, "SELECT max(id), count(*) FROM dispatches") == [(entry.id, 6)]


def test_only_a_process_that_dispatches_becomes_an_owner_on_record(finished: Path) -> None:
    before = rows(finished, "SELECT epoch FROM owners")
    with owned(finished) as journal:
        entry = journal.entry(WORKFLOW, 1)
        assert entry is not None
        journal.append([TaskEnded(entry, "tasks/get", 5, result=b"{}"), Delivered(entry.id), UpstreamStarted(4711)])
        assert not journal.has_dispatched
        journal.give_back()
        assert not journal.is_open
    assert rows(finished, "SELECT epoch FROM owners") == before == [(1,)]
    assert rows(finished, "SELECT count(*) FROM tasks") == [(1,)]
    with owned(finished) as journal:
        journal.upstream_pid = 4711
        dispatch(journal, an_entry(4))
        dispatch(journal, an_entry(5))
    assert rows(finished, "SELECT epoch, pid, upstream_pid FROM owners WHERE epoch > 1") == [(2, os.getpid(), 4711)]
    assert rows(finished, "SELECT sequence, owner_epoch FROM calls WHERE sequence > 3") == [(4, 2), (5, 2)]


def test_the_first_dispatch_puts_on_record_what_was_left_open_together_with_the_new_epoch(path: Path) -> None:
    run_child("leave_open", path, 1, 4, "2,3")
    with owned(path) as journal:
        assert rows(path, "SELECT dispatch FROM doubts") == []
        assert [entry.sequence for entry in journal.doubts()] == [1, 4]
        change_in_one = rows(path, "SELECT max(epoch) FROM owners")
        entry = draft(journal, an_entry(5))
        with pytest.raises(JournalBusy), blocking(path):
            journal.append([Dispatched(entry)])
        assert rows(path, "SELECT dispatch FROM doubts") == []
        assert rows(path, "SELECT max(epoch) FROM owners") == change_in_one
        journal.append([Dispatched(entry)])
        assert rows(path, "SELECT cause, is_open FROM doubts") == [("relay_lost", 1)] * 2
        assert rows(path, "SELECT max(epoch) FROM owners") == [(2,)]
    assert rows(path)[:4] == [(1, "IN_DOUBT"), (2, "COMPLETED"), (3, "COMPLETED"), (4, "IN_DOUBT")]


def test_doubt_outlives_every_later_owner_until_somebody_settles_it(path: Path) -> None:
    run_child("leave_open", path, 1, 2, "2")
    for more in range(3, 7):
        run_child("leave_open", path, more, more, str(more) if more % 2 else "")
    with owned(path) as journal:
        assert [entry.sequence for entry in journal.doubts()] == [1, 4, 6]
        assert {entry.cause for entry in journal.doubts()} == {Cause.RELAY_LOST}


def steps_of_take(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps SQLite's machine makes until a process has what it needs."""
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def connect(path: str) -> sqlite3.Connection:
        database = storage.connect_owner(path)
        database.set_progress_handler(step, 1)
        return database

    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "connect_owner", connect)
        with owned(path) as journal:
            assert [entry.sequence for entry in journal.doubts()] == [1, 2]
            journal.entry(WORKFLOW, 3)
            journal.last_sequence(WORKFLOW)
    return steps


def test_a_takeover_costs_the_same_however_long_the_journal_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_child("leave_open", path, 1, 1, "")
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(2))
        doubt(journal, entry)
        completed(journal, *range(3, 23))
    short = steps_of_take(path, monkeypatch)
    with owned(path) as journal:
        completed(journal, *range(23, 2023))
        completed(journal, 2023)
    assert steps_of_take(path, monkeypatch) < short * 1.2


def test_a_call_that_stays_open_is_found_behind_any_number_of_finished_ones(path: Path) -> None:
    with owned(path) as journal:
        dispatch(journal, an_entry(1))
        for start in range(2, 400, 100):
            completed(journal, *range(start, start + 100))
    with owned(path) as journal:
        assert [entry.sequence for entry in journal.doubts()] == [1]


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_walks_through_the_journal(query: str, finished: Path) -> None:
    bound = (WORKFLOW, *[1] * query.count("?"))[: query.count("?")]
    with contextlib.closing(sqlite3.connect(finished)) as database:
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}", bound)]
    scans = [line for line in plan if line.startswith("SCAN") and line != "SCAN CONSTANT ROW"]
    # Only the open doubts, and the answers that asked for input, which takes a person each time.
    allowed = {"SCAN doubts USING INDEX open_doubts", "SCAN outcomes USING INDEX interim"}
    if "settled_below" in query:
        allowed.add("SCAN dispatches")  # backwards, and one row of it: see the test above
    assert set(scans) <= allowed, plan


def test_a_second_writer_is_noticed_before_anything_is_acknowledged(path: Path) -> None:
    journal = taken(path)
    completed(journal, 1)
    change(path, "INSERT INTO owners VALUES (2, 1, NULL, 1)")
    with pytest.raises(JournalFailed, match="another process has written to it; restart to go on"):
        dispatch(journal, an_entry(2))
    assert rows(path) == [(1, "COMPLETED")]
    with pytest.raises(JournalFailed):
        draft(journal, an_entry(3))


def test_a_second_writer_is_noticed_by_a_process_that_has_not_dispatched_yet(finished: Path) -> None:
    journal = taken(finished)
    change(finished, "INSERT INTO owners VALUES (2, 1, NULL, 1)")
    with pytest.raises(JournalFailed, match="another process has written to it"):
        dispatch(journal, an_entry(4))
    assert len(rows(finished)) == 3


def test_the_lock_file_stays_and_names_who_has_it(path: Path) -> None:
    lock = Lock(Files(str(path)).lock)
    assert lock.take()
    assert Path(f"{path}.lock").read_bytes() == b"%d\n" % os.getpid()
    lock.give_back()
    assert lock.owner_pid() == os.getpid()
    Path(f"{path}.lock").write_bytes(b"9" * 30 + b"\nmore than a number")
    assert lock.take()
    assert Path(f"{path}.lock").read_bytes() == b"%d\n" % os.getpid()
    lock.give_back()


@pytest.mark.parametrize("content", [b"", b"nobody\n", b"\xff"])
def test_a_lock_file_that_names_nobody_is_no_reason_to_fail(content: bytes, path: Path) -> None:
    Path(f"{path}.lock").write_bytes(content)
    assert open_journal(path).owner_pid() is None


def test_a_lock_that_was_replaced_while_it_was_taken_is_not_ours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    flock = fcntl.flock

    def replaced(fd: int, operation: int) -> None:
        flock(fd, operation)
        os.unlink(f"{path}.lock")
        Path(f"{path}.lock").touch()

    monkeypatch.setattr(fcntl, "flock", replaced)
    lock = Lock(f"{path}.lock")
    assert not lock.take()
    monkeypatch.undo()
    assert lock.take()
    lock.give_back()


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "victim")


@pytest.mark.parametrize("make", [make_folder, make_link])
def test_a_lock_file_that_is_no_file_stops_the_journal_and_is_left_alone(
    make: Callable[[Path], None], path: Path, folder: Path
) -> None:
    make(Path(f"{path}.lock"))
    names = sorted(os.listdir(folder))
    journal = open_journal(path)
    with pytest.raises(JournalFailed, match=r"^journal lock .*; make it a file that can be locked and written$"):
        journal.take()
    assert sorted(os.listdir(folder)) == names


# ------------------------------------------------------------------------------------------ files that are not there


def delete(path: Path) -> None:
    path.unlink()


def move(path: Path) -> None:
    path.rename(f"{path}.moved")


def replace_by_a_copy(path: Path) -> None:
    os.system(f"cp '{path}' '{path}.copy'")  # in another process: see storage_helpers.py
    os.replace(f"{path}.copy", path)


def replace_by_an_empty_file(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize("suffix", ["", "-wal", ".lock"])
@pytest.mark.parametrize("how", [delete, move, replace_by_a_copy, replace_by_an_empty_file])
@pytest.mark.parametrize("has_dispatched", [True, False])
def test_a_file_that_is_not_what_it_was_is_noticed_before_anything_is_acknowledged(
    suffix: str, how: Callable[[Path], None], has_dispatched: bool, path: Path, folder: Path
) -> None:
    with owned(path) as journal:
        completed(journal, 1)
    journal = taken(path)
    if has_dispatched:
        completed(journal, 2)
    entry = draft(journal, an_entry(9))
    how(Path(f"{path}{suffix}"))
    after = files_of(folder)
    with pytest.raises(JournalFailed, match="it was moved, deleted or replaced while in use; put it back"):
        journal.append([Dispatched(entry)])
    with pytest.raises(JournalFailed):
        journal.append([Dispatched(entry)])
    with pytest.raises(JournalFailed):
        draft(journal, an_entry(10))
    if has_dispatched:  # replays of what is on record go on
        found = journal.entry(WORKFLOW, 1)
        assert found is not None
        assert found.status is Status.COMPLETED
    journal.close()
    assert files_of(folder) == after


@pytest.mark.parametrize("how", [delete, move, replace_by_a_copy, replace_by_an_empty_file])
@pytest.mark.parametrize("is_name_told", [True, False])
def test_an_open_file_is_in_place_until_its_name_is_not_its_own(
    is_name_told: bool, how: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_name_told:  # as on macOS
        monkeypatch.setattr(storage, "_link_to", lambda path: None)
    path = tmp_path / "a name \udcff\n (deleted)"
    with path.open("wb"):
        opened = OpenFile(str(path))
        assert opened.is_in_place()
        path.write_bytes(b"changed")
        assert opened.is_in_place()
        how(path)
        assert not opened.is_in_place()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the names of descriptors")
def test_no_commit_stats_the_log_which_would_slow_down_its_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    look = os.stat

    def watched(path: str) -> os.stat_result:
        asked.append(path)
        return look(path)

    with owned(path) as journal:
        completed(journal, 1)
        monkeypatch.setattr(os, "stat", watched)
        completed(journal, 2)
        monkeypatch.undo()
    assert asked
    assert f"{path}-wal" not in asked


def files_of(folder: Path) -> dict[str, bytes]:
    """What stands in files: the index in shared memory is our own, and a read leaves its mark there."""
    return {name: content for name, content in contents(folder).items() if not name.endswith("-shm")}


def test_a_folder_may_move_if_a_link_to_it_takes_its_place(path: Path, folder: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1)
        folder.rename(folder.with_suffix(".moved"))
        folder.symlink_to(folder.with_suffix(".moved"))
        completed(journal, 2)
    assert rows(path) == [(1, "COMPLETED"), (2, "COMPLETED")]


def test_a_checkpoint_looks_at_the_files_first(path: Path) -> None:
    journal = taken(path)
    answer(journal, *dispatch(journal, an_entry(1, arguments=b"x" * 300 * PAGE)))
    journal._is_log_written_out = True
    Path(f"{path}-wal").rename(f"{path}-wal.moved")
    with pytest.raises(JournalFailed, match="moved, deleted or replaced"):
        journal.tidy()


@pytest.mark.parametrize("way", ["close", "give_back"])
def test_giving_up_a_journal_whose_name_is_anothers_by_now_costs_that_one_no_row(
    way: str, path: Path, folder: Path
) -> None:
    """SQLite deletes a log by its name; that it first looks whether its database was moved is relied on here."""
    other = folder.parent / "other.db"
    run_child("leave_open", other, 1, 3, "1,2,3")  # its rows are in its log only
    with owned(path) as journal:
        completed(journal, 1)
    journal = taken(path)
    if way == "close":
        completed(journal, 2)
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{path}{suffix}", folder.parent / f"away{suffix}")
        os.rename(f"{other}{suffix}", f"{path}{suffix}")
    before = contents(folder)
    getattr(journal, way)()
    assert contents(folder) == before
    assert rows(path) == [(1, "COMPLETED"), (2, "COMPLETED"), (3, "COMPLETED")]


def test_rows_whose_log_was_deleted_are_saved_by_a_clean_end(path: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1)
        Path(f"{path}-wal").unlink()
    assert rows(path) == [(1, "COMPLETED")]


@pytest.mark.parametrize("how", [delete, replace_by_a_copy])
def test_a_journal_that_is_another_when_it_is_taken_again_is_refused(
    how: Callable[[Path], None], finished: Path
) -> None:
    journal = taken(finished)
    journal.give_back()
    how(finished)
    before = sorted(os.listdir(finished.parent))
    with pytest.raises(JournalFailed, match="restore it and start again"):
        journal.take()
    assert sorted(os.listdir(finished.parent)) == before


def test_rows_of_a_deleted_journal_do_not_come_back_in_the_next_one(path: Path) -> None:
    run_child("leave_open", path, 1, 3, "1,2,3")
    path.unlink()
    assert Path(f"{path}-wal").exists()
    with pytest.raises(JournalError, match=r"it does not exist, but .*-wal is there and may hold its newest rows"):
        open_journal(path)


# --------------------------------------------------------------------------------------------------------------- busy


@contextlib.contextmanager
def blocking(path: Path, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """Another program that is in the middle of something."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(begin)
        yield database
        database.execute("ROLLBACK")


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_another_program_that_writes_is_only_waited_for(begin: str, path: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1)
        entry = draft(journal, an_entry(2))
        with blocking(path, begin):
            for _ in range(2):
                with pytest.raises(JournalBusy, match="locked"):
                    journal.append([Dispatched(entry)])
            assert journal.failure is None
            assert rows(path) == [(1, "COMPLETED")]
            found = journal.entry(WORKFLOW, 1)
            assert found is not None
            assert found.status is Status.COMPLETED
        journal.append([Dispatched(entry)])
        answer(journal, entry)
    assert rows(path) == [(1, "COMPLETED"), (2, "COMPLETED")]


def test_a_program_that_has_the_database_for_itself_is_only_waited_for(finished: Path) -> None:
    journal = open_journal(finished)
    with child("exclude", finished):
        journal.probe()  # says nothing against the file
        assert not journal.take()
        assert journal.failure is None
    assert journal.take()
    journal.close()


def test_a_long_reader_only_delays_the_log_from_starting_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = statements_of(monkeypatch)
    log = Path(f"{path}-wal")

    def fill(first: int, count: int) -> None:
        for sequence in range(first, first + count):
            (entry,) = dispatch(journal, an_entry(sequence, arguments=b"x" * 64 * PAGE))
            answer(journal, entry)
            journal.tidy()

    with owned(path) as journal:
        fill(1, 12)
        usual = log.stat().st_size
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            before = reader.execute("SELECT count(*) FROM calls").fetchone()
            fill(13, 24)
            assert reader.execute("SELECT count(*) FROM calls").fetchone() == before == (12,)
        fill(37, 4)  # until the next attempt
        grown = log.stat().st_size
        assert grown > 4 * usual
        told.clear()
        fill(41, 40)
        assert log.stat().st_size == grown  # written over: neither longer nor cut
        assert 5 <= sum("wal_checkpoint" in line for line in told) <= 14
    assert len(rows(path)) == 80


# ---------------------------------------------------------------------------------------------------------------- log


def test_the_log_starts_over_at_about_256_pages_whether_calls_come_alone_or_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = statements_of(monkeypatch)
    with owned(path) as journal:
        completed(journal, 1)
        journal.tidy()
        size = Path(f"{path}-wal").stat().st_size
        assert 240 * PAGE < size < 270 * PAGE
        sequence = 2
        for together, batches in ((1, 250), (64, 40)):
            told.clear()
            for _ in range(batches):
                completed(journal, *range(sequence, sequence + together))
                journal.tidy()
                sequence += together
            assert 2 <= sum("wal_checkpoint" in line for line in told) <= 5
            assert Path(f"{path}-wal").stat().st_size < 2 * size
    assert len(rows(path)) == sequence - 1


def test_the_log_is_written_out_once_after_the_first_answer_and_holds_nothing_new(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = statements_of(monkeypatch)
    log = Path(f"{path}-wal")
    with owned(path) as journal:
        (entry,) = dispatch(journal, an_entry(1))
        journal.tidy()
        assert log.stat().st_size < 60 * PAGE  # no answer yet
        answer(journal, entry)
        journal.tidy()
        size = log.stat().st_size
        assert size > 240 * PAGE
        assert database_of(journal).execute("PRAGMA cache_size").fetchone() == (-2000,)
        assert rows(path, "SELECT name FROM sqlite_schema WHERE name = 'scratch'") == []
        completed(journal, *range(2, 40))
        journal.tidy()
        assert log.stat().st_size == size
        assert sum("SAVEPOINT" in line for line in told) == 1
        copy = path.parent.parent / "copied.db"
        for suffix in ("", "-wal"):
            os.system(f"cp '{path}{suffix}' '{copy}{suffix}'")  # what a kill would leave
    assert rows(path) == rows(copy)
    assert len(rows(copy)) == 39
    assert path.stat().st_size < 60 * PAGE


def test_a_kill_while_the_log_is_written_out_costs_nothing(path: Path, folder: Path) -> None:
    for point, row in ((60, 1), (120, 2), (250, 3)):
        inject = strace("-e", "trace=pwrite64", "-e", f"inject=pwrite64:signal=KILL:when={point}", log=folder / "log")
        taken(path).close()  # so that the child begins with an empty log
        ended = run_child("work", path, 1, 10, under=inject)
        assert ended.returncode != 0
        assert ended.stdout == f"dispatch {row}\nanswer {row}\n"
    with owned(path) as journal:
        assert database_of(journal).execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database_of(journal).execute("SELECT name FROM sqlite_schema WHERE name = 'scratch'").fetchone() is None
    assert rows(path) == [(1, "COMPLETED"), (2, "COMPLETED"), (3, "COMPLETED")]


def test_a_program_in_the_way_puts_the_writing_out_off(path: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1)
        with blocking(path), pytest.raises(JournalBusy):
            journal.tidy()
        assert journal.failure is None
        assert Path(f"{path}-wal").stat().st_size < 60 * PAGE
        journal.tidy()
        assert Path(f"{path}-wal").stat().st_size > 240 * PAGE


def test_a_closed_journal_is_one_file_and_its_lock(path: Path, folder: Path) -> None:
    with owned(path) as journal:
        completed(journal, 1)
        journal.tidy()
    assert sorted(os.listdir(folder)) == ["j.db", "j.db.lock"]


# ---------------------------------------------------------------------------------------------------------- fail-stop


def assert_stopped(path: Path, said: str) -> None:
    """A journal failed in a child: it stopped, and what is on disk is what was acknowledged, or one batch more."""
    lines = said.splitlines()
    failed = next(at for at, line in enumerate(lines) if line.startswith("failed "))
    acknowledged = lines[:failed]
    found = re.fullmatch(
        r"failed (\w+) ?(\d*): JournalFailed journal .*; see to the disk, then start again", lines[failed]
    )
    assert found is not None, said
    assert lines[failed + 1 : failed + 3] == ["again JournalFailed", "again JournalFailed"]
    answered = [int(line.split()[1]) for line in acknowledged if line.startswith("answer")]
    assert lines[failed + 3 :] == (["read COMPLETED"] if answered else [])
    dispatched = [int(line.split()[1]) for line in acknowledged if line.startswith("dispatch")]
    certain = {(sequence, "COMPLETED" if sequence in answered else "IN_DOUBT") for sequence in dispatched}
    possible = {
        "dispatch": certain | {(int(found[2] or 0), "IN_DOUBT")},
        "answer": {(sequence, "COMPLETED") for sequence in dispatched},
    }.get(found[1], certain)
    with owned(path) as journal:
        assert database_of(journal).execute("PRAGMA integrity_check").fetchone() == ("ok",)
        last = journal.last_sequence(WORKFLOW)
        entries = [journal.entry(WORKFLOW, sequence) for sequence in range(1, last + 1)]
    on_disk = {(entry.sequence, str(entry.status)) for entry in entries if entry is not None}
    assert on_disk in (certain, possible)


def failing(call: str, file: Path, log: Path, error: str = "EIO", when: int = 1) -> list[str]:
    """The words that run a child whose n-th such call on a file fails, once."""
    return strace("-P", str(file), "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}", log=log)


@pytest.mark.parametrize("limit", [9 * PAGE, 12 * PAGE, 40 * PAGE, 300 * PAGE])
def test_a_full_disk_stops_the_journal_and_takes_no_row_with_it(limit: int, path: Path) -> None:
    taken(path).close()
    ended = run_child("work", path, 200, 9000, limit)
    assert "failed " in ended.stdout, ended.stderr
    assert_stopped(path, ended.stdout)


@pytest.mark.parametrize(
    ("call", "error", "when"),
    [
        *(("fdatasync", "EIO", when) for when in (1, 2, 3, 4, 5)),
        ("fdatasync", "ENOSPC", 2),
        *(("pwrite64", "ENOSPC", when) for when in (1, 2, 5, 9, 400)),
        *(("pwrite64", "EIO", when) for when in (3, 8, 100)),
    ],
)
def test_a_write_or_sync_that_fails_once_stops_the_journal_for_good(
    call: str, error: str, when: int, path: Path, folder: Path
) -> None:
    """SQLite itself would go on, and acknowledge what comes after (tried)."""
    taken(path).close()
    inject = failing(call, Path(f"{path}-wal"), folder.parent / "log", error, when)
    ended = run_child("work", path, 3, 10, under=inject)
    assert "failed " in ended.stdout, (ended.stdout, ended.stderr)
    assert_stopped(path, ended.stdout)


def test_a_folder_that_cannot_be_synced_stops_the_journal(path: Path, folder: Path) -> None:
    """The log's name is new, and SQLite ignores the error (tried)."""
    taken(path).close()
    ended = run_child("work", path, 3, 10, under=failing("fsync", folder, folder.parent / "log"))
    assert ended.stdout.startswith("failed dispatch 1: JournalFailed"), (ended.stdout, ended.stderr)
    assert_stopped(path, ended.stdout)


@pytest.mark.parametrize("call", ["fdatasync", "pwrite64"])
def test_a_checkpoint_that_fails_is_seen(call: str, path: Path, folder: Path) -> None:
    """An automatic one hides its errors (tried)."""
    taken(path).close()
    inject = failing(call, path, folder.parent / "log")
    ended = run_child("work", path, 30, 60_000, under=inject)
    assert "failed tidy: JournalFailed" in ended.stdout, (ended.stdout, ended.stderr)
    assert_stopped(path, ended.stdout)


@pytest.mark.parametrize(
    ("how", "log_after"),
    [("leave", "stays"), ("close", "stays"), ("drop", "stays"), ("sqlite close", "is gone")],
)
def test_a_journal_that_failed_keeps_its_log_however_it_is_let_go(
    how: str, log_after: str, path: Path, folder: Path
) -> None:
    """The last line is why: SQLite would write the log back and delete it, on the word of a disk that has failed."""
    taken(path).close()
    inject = failing("fdatasync", path, folder.parent / "log")
    ended = run_child("end_after_failure", path, how, under=inject)
    assert ended.stdout.splitlines()[-1] == f"log {log_after}", (ended.stdout, ended.stderr)


def test_a_journal_that_failed_keeps_its_lock(path: Path) -> None:
    journal = taken(path)
    completed(journal, 1)
    change(path, "INSERT INTO owners VALUES (2, 1, NULL, 1)")
    with pytest.raises(JournalFailed):
        dispatch(journal, an_entry(2))
    journal.close()
    journal.give_back()
    assert run_child("check", path).stdout == "taken False\n"


def test_what_is_not_open_says_so(path: Path) -> None:
    journal = open_journal(path)
    for use in (
        lambda: journal.entry(WORKFLOW, 1),
        lambda: journal.last_sequence(WORKFLOW),
        lambda: draft(journal, an_entry(1)),
        lambda: journal.append([]),
    ):
        with pytest.raises(JournalFailed, match=r"^the journal is not open$"):
            use()
    assert journal.failure is None
    journal.tidy()
