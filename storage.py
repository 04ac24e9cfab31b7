"""The journal's files, before and around SQLite: which file is ours, who owns it, how one comes into being.

Imports SQLite only where a database is opened, so that a foreign file is recognised before SQLite ever sees it, and
before its import is paid for.
"""

import contextlib
import fcntl
import os
import stat
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import sqlite3

APPLICATION_ID: Final = 0x43484B50  # "CHKP"
FORMAT: Final = 2  # user_version; 1 had other signatures, and was in no release

# Dispatch and outcome are facts that are only ever appended; what a call's status is follows from them in one place,
# the view `attempts`. A row is written once: nothing is rewritten when a call ends.
DDL: Final = """
CREATE TABLE journal (
    workflow_id TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;
CREATE TABLE owners (
    epoch INTEGER PRIMARY KEY,
    pid INTEGER NOT NULL,
    upstream_pid INTEGER,
    started_at INTEGER NOT NULL
) STRICT;
CREATE TABLE dispatches (
    id INTEGER PRIMARY KEY,
    workflow_id TEXT NOT NULL,
    sequence INTEGER NOT NULL CHECK (sequence BETWEEN 1 AND 9007199254740991),
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    epoch INTEGER NOT NULL REFERENCES owners (epoch),
    settled_below INTEGER NOT NULL CHECK (settled_below <= id),
    tool_name TEXT NOT NULL,
    call_signature TEXT NOT NULL,
    call_id TEXT,
    era TEXT NOT NULL CHECK (era IN ('handshake', 'modern')),
    started_at INTEGER NOT NULL,
    arguments BLOB,
    UNIQUE (workflow_id, sequence, attempt)
) STRICT;
CREATE INDEX by_signature ON dispatches (workflow_id, call_signature, sequence);
CREATE INDEX by_call_id ON dispatches (call_id) WHERE call_id IS NOT NULL;
CREATE TABLE outcomes (
    dispatch INTEGER PRIMARY KEY REFERENCES dispatches (id),
    status TEXT NOT NULL CHECK (status IN ('COMPLETED', 'FAILED', 'INPUT_REQUIRED', 'TASK', 'NOT_SENT')),
    completed_at INTEGER NOT NULL,
    request_state TEXT,
    task_id TEXT,
    result BLOB,
    error BLOB,
    CHECK ((result IS NULL) + (error IS NULL) = 1 + (status = 'NOT_SENT'))
) STRICT;
CREATE INDEX interim ON outcomes (dispatch) WHERE status = 'INPUT_REQUIRED';
CREATE INDEX by_state ON outcomes (request_state) WHERE request_state IS NOT NULL;
CREATE INDEX by_task ON outcomes (task_id) WHERE task_id IS NOT NULL;
CREATE TABLE tasks (
    dispatch INTEGER NOT NULL REFERENCES outcomes (dispatch),
    method TEXT NOT NULL,
    ended_at INTEGER NOT NULL,
    result BLOB,
    error BLOB,
    PRIMARY KEY (dispatch, method),
    CHECK ((result IS NULL) + (error IS NULL) = 1)
) STRICT;
CREATE TABLE deliveries (
    dispatch INTEGER PRIMARY KEY REFERENCES dispatches (id)
) STRICT;
CREATE TABLE forks (
    id INTEGER PRIMARY KEY,
    root TEXT NOT NULL,
    branch TEXT NOT NULL UNIQUE,
    parent TEXT NOT NULL,
    sequence INTEGER NOT NULL CHECK (sequence >= 1),
    forked_at INTEGER NOT NULL
) STRICT;
CREATE INDEX by_root ON forks (root, id);
CREATE TABLE prunings (
    workflow_id TEXT PRIMARY KEY,
    last_sequence INTEGER NOT NULL,
    last_id INTEGER NOT NULL, -- the journal's highest dispatch then: no id is given twice
    pruned_at INTEGER NOT NULL
) STRICT;
CREATE INDEX by_last_id ON prunings (last_id);
CREATE TABLE doubts (
    dispatch INTEGER PRIMARY KEY REFERENCES dispatches (id),
    cause TEXT NOT NULL
        CHECK (cause IN ('relay_lost', 'upstream_lost', 'timeout', 'cancelled', 'journal_unavailable')),
    noted_at INTEGER NOT NULL,
    is_open INTEGER NOT NULL CHECK (is_open IN (0, 1))
) STRICT;
CREATE INDEX open_doubts ON doubts (dispatch) WHERE is_open;
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    dispatch INTEGER NOT NULL REFERENCES dispatches (id),
    status TEXT NOT NULL CHECK (status IN ('COMPLETED', 'FAILED', 'NOT_EXECUTED')),
    decided_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    result BLOB,
    error BLOB,
    CHECK ((result IS NULL) + (error IS NULL) = 1 + (status = 'NOT_EXECUTED'))
) STRICT;
CREATE INDEX by_dispatch ON decisions (dispatch, id);
CREATE TABLE reports (
    id INTEGER PRIMARY KEY, -- the dispatch that it is about: one each; below 0 for what was never dispatched
    base_url TEXT NOT NULL,
    tool_name TEXT NOT NULL,
    queued_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER, -- NULL: not sent any more
    is_claimed INTEGER NOT NULL DEFAULT 0 CHECK (is_claimed IN (0, 1)), -- by `report flush`, until it is due
    error TEXT,
    body BLOB -- NULL: delivered, and kept while its dispatch is in doubt so that no owner reports it again
) STRICT;
CREATE INDEX due_reports ON reports (base_url, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX ended_reports ON reports (id) WHERE due_at IS NULL;
CREATE VIEW attempts AS
    SELECT d.id, d.workflow_id, d.sequence, d.attempt, d.tool_name, d.call_signature, d.arguments,
        CASE
            WHEN decisions.status IS NOT NULL THEN decisions.status
            WHEN outcomes.status = 'TASK' AND doubts.is_open THEN 'IN_DOUBT' -- the server has forgotten the task
            WHEN outcomes.status IS NOT NULL THEN outcomes.status
            WHEN doubts.cause IS NOT NULL OR d.epoch < (SELECT max(epoch) FROM owners) THEN 'IN_DOUBT'
            ELSE 'PENDING'
        END AS status,
        CASE WHEN decisions.status IS NULL THEN outcomes.result ELSE decisions.result END AS result,
        CASE WHEN decisions.status IS NULL THEN outcomes.error ELSE decisions.error END AS error,
        d.started_at, coalesce(decisions.decided_at, outcomes.completed_at) AS completed_at,
        d.call_id, d.era, d.epoch AS owner_epoch, doubts.cause, deliveries.dispatch IS NOT NULL AS delivered
    FROM dispatches AS d
    LEFT JOIN outcomes ON outcomes.dispatch = d.id
    LEFT JOIN doubts ON doubts.dispatch = d.id
    LEFT JOIN deliveries ON deliveries.dispatch = d.id
    LEFT JOIN decisions ON decisions.id = (SELECT max(newest.id) FROM decisions AS newest WHERE newest.dispatch = d.id);
CREATE VIEW calls AS
    SELECT workflow_id, sequence, attempt, tool_name, call_signature, CAST(arguments AS TEXT) AS arguments, status,
        CAST(result AS TEXT) AS result, CAST(error AS TEXT) AS error, started_at, completed_at, call_id, era,
        owner_epoch, cause, delivered
    FROM attempts AS a
    WHERE attempt = (
        SELECT max(attempt) FROM dispatches AS d WHERE d.workflow_id = a.workflow_id AND d.sequence = a.sequence
    );
"""
# One row out of each table and index, without its arguments or results: a page of each is read, and no large value.
PROBES: Final = (
    "SELECT created_at FROM journal",
    "SELECT started_at FROM owners ORDER BY epoch DESC LIMIT 1",
    "SELECT started_at FROM dispatches ORDER BY id DESC LIMIT 1",
    "SELECT max(sequence) FROM dispatches WHERE workflow_id = ''",
    "SELECT completed_at FROM outcomes ORDER BY dispatch DESC LIMIT 1",
    "SELECT noted_at FROM doubts ORDER BY dispatch DESC LIMIT 1",
    "SELECT dispatch FROM doubts WHERE is_open LIMIT 1",
    "SELECT decided_at FROM decisions ORDER BY id DESC LIMIT 1",
    "SELECT dispatch FROM decisions WHERE dispatch = 0",
    "SELECT id FROM dispatches INDEXED BY by_signature WHERE workflow_id = ''",
    "SELECT id FROM dispatches WHERE call_id = ''",
    "SELECT dispatch FROM outcomes WHERE status = 'INPUT_REQUIRED' LIMIT 1",
    "SELECT dispatch FROM outcomes WHERE request_state = ''",
    "SELECT dispatch FROM outcomes WHERE task_id = ''",
    "SELECT ended_at FROM tasks ORDER BY rowid DESC LIMIT 1",
    "SELECT dispatch FROM deliveries ORDER BY dispatch DESC LIMIT 1",
    "SELECT forked_at FROM forks ORDER BY id DESC LIMIT 1",
    "SELECT branch FROM forks WHERE root = ''",
    "SELECT id FROM forks WHERE branch = ''",
    "SELECT ended_at FROM tasks WHERE dispatch = 0 AND method = ''",
    "SELECT pruned_at FROM prunings WHERE workflow_id = ''",
    "SELECT pruned_at FROM prunings LIMIT 1",
    "SELECT max(last_id) FROM prunings",
    "SELECT attempts FROM reports ORDER BY id DESC LIMIT 1",
    "SELECT due_at FROM reports WHERE base_url = '' AND due_at <= 0",
    "SELECT id FROM reports INDEXED BY ended_reports WHERE due_at IS NULL LIMIT 1",
    "SELECT status FROM calls LIMIT 1",
)


# Where another machine or program keeps the locks and syncs, and a log in shared memory may be nobody else's to see.
_NOT_LOCAL: Final = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs", "lustre", "ncp", "nfs", "ocfs", "prl_fs", "smb"),
    *("vboxsf", "virtiofs"),
)


_PLAIN: Final = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-"
)  # as themselves in a URI


class JournalError(Exception):
    """The journal cannot be used; the message names the file and says what to do next."""


Inode = tuple[int, int]  # device and inode number


def inode_of(path: str) -> Inode | None:
    """Which file a path names now; None where there is none. Never opens it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class OpenFile:
    """A file that this process has open: whether its path still names it. Never opens it itself.

    To stat a file makes the next write to it put down the exact time, with which the sync that follows takes half as
    long again (ext4, from Linux 6.13 on). So where the system tells the name of a descriptor (Linux), the inode behind
    the path is looked at only once that name is another. Another file mounted over the path is not noticed then.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = inode_of(path)
        self._link = _link_to(path)

    def is_in_place(self) -> bool:
        """False once it was moved, deleted or replaced."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                if os.readlink(self._link) == self._path:
                    return True
        return inode_of(self._path) == self._inode


def _link_to(path: str, descriptors: str = "/proc/self/fd") -> str | None:
    """The link that says which file a descriptor of ours is, for the one under which a path is open."""
    with contextlib.suppress(OSError):
        for name in os.listdir(descriptors):
            link = f"{descriptors}/{name}"
            with contextlib.suppress(OSError):  # the descriptor of this very listing is closed by now
                if os.readlink(link) == path:
                    return link
    return None


def kind_if_not_local(folder: str, mounts: str = "/proc/self/mountinfo") -> str | None:
    """The kind of the file system that holds a folder, if it is one that WAL is not made for; only Linux tells."""
    try:
        device = os.stat(folder).st_dev
        with open(mounts, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    at = f"{os.major(device)}:{os.minor(device)}".encode()
    for line in lines:
        mount, _, system = line.partition(b" - ")
        if at in mount.split(maxsplit=3)[2:3]:
            kind = system.partition(b" ")[0].decode("ascii", "replace")
            return kind if kind.startswith(_NOT_LOCAL) else None
    return None


class Files:
    """The files of one journal, by its real path: database, -wal, -shm and the lock file beside them."""

    def __init__(self, typed: str) -> None:
        self.typed = typed
        self.path = os.path.realpath(typed)
        self.wal = self.path + "-wal"
        self.lock = self.path + ".lock"
        self.folder = os.path.dirname(self.path)

    def exists(self, *, for_reading: bool = False) -> bool:
        """Whether there is a journal. Raises JournalError, with every file left as it is, for what is not usable.

        An empty file counts as new. SQLite never sees a file that is not ours: opening one could already change it.
        Who only reads need not be able to write.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._check_folder(for_reading=for_reading)
            self._check_orphans("does not exist")
            return False
        except OSError as error:
            raise JournalError(f"journal {self.typed}: {error.strerror}; give another path") from error
        if not stat.S_ISREG(found.st_mode):
            raise JournalError(f"journal {self.typed}: not a regular file; give the path of a file")
        if found.st_nlink > 1:
            raise JournalError(
                f"journal {self.typed}: has {found.st_nlink} hard links, and SQLite keeps a write-ahead log per name; "
                "delete the other names or copy the file"
            )
        self._check_folder(for_reading=for_reading)
        if found.st_size == 0:
            self._check_orphans("is empty")
            return False
        self._check_header()
        return True

    def _check_folder(self, *, for_reading: bool) -> None:
        if not os.path.isdir(self.folder):
            raise JournalError(f"journal {self.typed}: the folder {self.folder} does not exist; create it first")
        for path in () if for_reading else (self.folder, self.path):
            if os.path.exists(path) and not os.access(path, os.W_OK):
                raise JournalError(f"journal {self.typed}: {path} is not writable; make it so, or give another path")

    def _check_orphans(self, state: str) -> None:
        for suffix in ("-wal", "-shm"):
            if os.path.lexists(self.path + suffix):
                raise JournalError(
                    f"journal {self.typed}: it {state}, but {self.path}{suffix} is there and may hold its newest rows; "
                    f"restore the journal, or delete {suffix} to start without them"
                )

    def _check_header(self) -> None:
        try:
            with open(self.path, "rb") as file:
                header = file.read(100)
        except OSError as error:
            raise JournalError(f"journal {self.typed}: {error.strerror}; make it readable") from error
        if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
            raise JournalError(f"journal {self.typed}: not a Checkpoint journal; give another path")
        if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
            raise JournalError(f"journal {self.typed}: a database of another program; give another path")
        written_by = int.from_bytes(header[60:64], "big")
        if written_by != FORMAT:
            other = "a newer Checkpoint" if written_by > FORMAT else "the Checkpoint that wrote it, or a new journal"
            raise JournalError(
                f"journal {self.typed}: has format {written_by}, this version reads {FORMAT}; use {other}"
            )

    def create(self, workflow_id: str, now_ms: int) -> None:
        """Makes an empty journal, whole or not at all; only for the owner of the lock.

        It is built under another name and renamed: no kill can leave a file that is half a journal. On return it is on
        disk under its name.
        """
        draft = self.path + ".checkpoint-new"  # a name that nobody else gives to a file
        for leftover in (draft, draft + "-wal", draft + "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(connect(draft, "rw")) as database:
            database.execute("PRAGMA synchronous = OFF")  # a draft is synced once, as a whole
            database.execute("PRAGMA journal_mode = MEMORY")
            # Stamped before WAL is switched on: a database in WAL mode with no stamp would be a stranger's.
            database.executescript(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};{DDL}")
            database.execute("INSERT INTO journal (workflow_id, created_at) VALUES (?, ?)", (workflow_id, now_ms))
            database.execute("PRAGMA journal_mode = WAL")
        sync(draft)
        os.replace(draft, self.path)
        sync(self.folder)


def sync(path: str) -> None:
    """Brings a file's content, or a folder's names, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # there, fsync alone does not reach the platter
        else:
            os.fsync(fd)
    finally:
        os.close(fd)


def connect(path: str, mode: str) -> "sqlite3.Connection":
    """A connection that says what it does: no implicit transactions, no hidden waiting, nothing run from the schema."""
    import sqlite3

    # A file's name need not be text, so its bytes are quoted; to import urllib.parse for that would take 3 ms.
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in os.fsencode(path))
    uri = f"file:{quoted}?mode={mode}"
    database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def connect_owner(path: str) -> "sqlite3.Connection":
    """The one connection that writes; a commit on it is on disk when it returns."""
    database = connect(path, "rw")
    for pragma in (
        "synchronous = FULL",
        "fullfsync = ON",  # for macOS; see sync
        "checkpoint_fullfsync = ON",
        "wal_autocheckpoint = 0",  # an automatic checkpoint hides its errors; see Journal.tidy
        "foreign_keys = ON",
    ):
        database.execute(f"PRAGMA {pragma}")
    return database


class Lock:
    """The right to write a journal: an flock on the file beside it, which the kernel gives back when we die.

    The file is never removed: whoever locked a removed name and whoever locked the next one would both own it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._inode: Inode | None = None  # of what we locked, which stays the same while it is open
        self.pid = os.getpid()

    def take(self) -> bool:
        """Takes it without waiting; False while another process has it. Raises JournalError where it cannot be made."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as error:
            os.close(fd)
            raise self._unusable(error) from error
        found = os.fstat(fd)
        self._fd, self._inode = fd, (found.st_dev, found.st_ino)
        if not self.is_held():  # it was replaced between open and flock
            self.give_back()
            return False
        with contextlib.suppress(OSError):  # a full disk; the pid is only there to be read by people
            os.truncate(fd, 0)
            os.pwrite(fd, b"%d\n" % self.pid, 0)
        return True

    def _unusable(self, error: OSError) -> JournalError:
        return JournalError(
            f"journal lock {self._path}: {error.strerror}; make it a file that can be locked and written"
        )

    def give_back(self) -> None:
        """Lets the next process take it; without effect where it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held(self) -> bool:
        """Whether the lock that we took is still the one that the path names."""
        return self._fd is not None and inode_of(self._path) == self._inode

    def owner_pid(self) -> int | None:
        """Who has it, for messages only."""
        try:
            with open(self._path, "rb") as file:
                return int(file.read(20))
        except (OSError, ValueError):
            return None


def is_busy(error: Exception) -> bool:
    """Whether another connection is in the way, and nothing is wrong."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == 5  # SQLITE_BUSY and its extended codes
