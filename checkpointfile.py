"""The session checkpoint on disk: its shape, and how it is read, locked and replaced. Knows no git and no protocol.

The file is never trusted: it may be torn, hand-edited, newer than we are, brought along by a repository, or no file at
all. It is never followed through a symlink and never written in place.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, NotRequired, TypedDict, cast

from plaintext import scrub, without_surrogates
from toolspec import SessionError

MAIN: Final = ".claude-checkpoint"
BACKUP: Final = MAIN + ".prev"
DAMAGED: Final = MAIN + ".bad"
FORMAT: Final = 1
MAX_BYTES: Final = 65_536
LOCK_WAIT_S: Final = 5.0

_TEMPORARY: Final = MAIN + ".tmp-"
_MAX_READ_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 20
_MAX_VALUES: Final = 4_000  # ours have fewer than 1,500; each text in it costs a redaction
_MAX_KEY: Final = 200
_STALE_S: Final = 3600.0
_LOCK_POLL_S: Final = 0.02


class Task(TypedDict):
    description: str
    status: str
    evidence: NotRequired[str]


class FileEntry(TypedDict):
    """One touched file; `path` is relative to the root, `hash` the blob id of its bytes (a submodule's: its commit)."""

    path: str
    status: str
    source: str
    note: NotRequired[str]
    hash: NotRequired[str]
    kind: NotRequired[str]  # "submodule", "dir" or "link"; a file has none
    # A renamed file also has "from", which no class body can spell: see `origin`.


class Command(TypedDict):
    command: str
    exitCode: NotRequired[int]
    note: NotRequired[str]
    at: NotRequired[str]


class GitFacts(TypedDict):
    branch: str | None
    head: str
    dirty: bool


class Goal(TypedDict):
    primary: str
    tasks: list[Task]


class Meta(TypedDict):
    redactions: int
    truncated: bool


class Checkpoint(TypedDict):
    """The whole file, in the order of its keys. Keys that we do not know are kept beside these."""

    version: int
    id: str
    createdAt: str
    updatedAt: str
    generator: dict[str, str]
    project: dict[str, str]
    git: GitFacts | None
    goal: Goal
    summary: NotRequired[str]
    nextSteps: list[str]
    decisions: list[str]
    modifiedFiles: list[FileEntry]
    recentCommands: list[Command]
    meta: Meta


def origin(entry: FileEntry) -> str | None:
    """The path that a renamed file had before."""
    return cast("str | None", cast("Mapping[str, Any]", entry).get("from"))


def is_own_file(path: str) -> bool:
    """Whether a path below the root is the checkpoint or beside it by our doing: never a file of the project."""
    return path.startswith(MAIN) and "/" not in path


# ------------------------------------------------------------------------------------------------------- the format


class Valid(NamedTuple):
    """A checkpoint that could be read, with its bytes and the user id of the file's owner."""

    checkpoint: Checkpoint
    content: bytes
    owner: int


class Damaged(NamedTuple):
    """Something that is no checkpoint; `reason` names the field, never what it holds."""

    reason: str


class Newer(NamedTuple):
    """A checkpoint in a format that we do not know."""

    version: int


Found = Valid | Damaged | Newer | None


def encode(checkpoint: Checkpoint) -> bytes:
    """The bytes of the file: UTF-8, two blanks of indentation, one newline at the end."""
    return (json.dumps(checkpoint, ensure_ascii=False, indent=2) + "\n").encode()


def decode(content: bytes) -> Checkpoint | Newer:
    """The checkpoint in these bytes, with what is absent filled in. Raises ValueError with the reason there is none."""
    if len(content) > _MAX_READ_BYTES:
        raise ValueError(f"larger than {_MAX_READ_BYTES:,} bytes")
    try:
        text = content.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse, parse_int=_integer, parse_float=_fraction
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels") from None
    if is_deeper(value, _MAX_DEPTH):
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if _count(value) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES:,} values")
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    version = value.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError("version: must be an integer from 1")
    if version > FORMAT:
        return Newer(version)
    return _filled(value)


def blank() -> Checkpoint:
    """A checkpoint in which nothing is recorded yet, to be merged into."""
    return _filled({"version": FORMAT, "goal": {"primary": ""}})


def is_deeper(value: object, levels: int) -> bool:
    """Whether a JSON value nests arrays and objects deeper than `levels`."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(is_deeper(item, levels - 1) for item in value)


def _count(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def parse_time(text: str) -> datetime | None:
    """A moment in ISO 8601; without an offset it is taken for UTC."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def format_time(moment: datetime) -> str:
    """A moment in UTC with milliseconds and `Z`."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object repeats a key")
    return members


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number of over 20 digits")
    return int(digits)


def _fraction(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number that is out of range")
    return value


def _is_time(value: object) -> bool:
    return isinstance(value, str) and parse_time(value) is not None


_commit_id: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?").fullmatch


def _is_commit_id(value: object) -> bool:
    # Anything else could reach git as an option.
    return isinstance(value, str) and _commit_id(value) is not None


class _Scalar(NamedTuple):
    types: tuple[type, ...]
    name: str
    holds: Any = None


_TEXT: Final = _Scalar((str,), "a string")
_TIME: Final = _Scalar((str,), "a time in ISO 8601", _is_time)
_INTEGER: Final = _Scalar((int,), "an integer")
_BOOLEAN: Final = _Scalar((bool,), "true or false")
_COMMIT: Final = _Scalar((str,), "40 or 64 hexadecimal digits", _is_commit_id)
# What a file of version 1 must look like: a key with "?" may be absent or null. Any other key is let be.
_SHAPE: Final[Mapping[str, Any]] = {
    "id?": _TEXT,
    "createdAt?": _TIME,
    "updatedAt?": _TIME,
    "generator?": {"name?": _TEXT, "version?": _TEXT},
    "project?": {"name?": _TEXT},
    "git?": {"branch?": _TEXT, "head": _COMMIT, "dirty?": _BOOLEAN},
    "goal": {"primary": _TEXT, "tasks?": [{"description": _TEXT, "status?": _TEXT, "evidence?": _TEXT}]},
    "summary?": _TEXT,
    "nextSteps?": [_TEXT],
    "decisions?": [_TEXT],
    "modifiedFiles?": [
        {
            "path": _TEXT,
            "status?": _TEXT,
            "source?": _TEXT,
            "note?": _TEXT,
            "hash?": _TEXT,
            "from?": _TEXT,
            "kind?": _TEXT,
        }
    ],
    "recentCommands?": [{"command": _TEXT, "exitCode?": _INTEGER, "note?": _TEXT, "at?": _TEXT}],
    "meta?": {"redactions?": _INTEGER, "truncated?": _BOOLEAN},
}


def _check(value: Any, shape: Any, path: str) -> None:
    if isinstance(shape, _Scalar):
        is_odd_boolean = isinstance(value, bool) and bool not in shape.types
        if is_odd_boolean or not isinstance(value, shape.types) or (shape.holds and not shape.holds(value)):
            raise ValueError(f"{path}: must be {shape.name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{path}: must be an array")
        for index, item in enumerate(value):
            _check(item, shape[0], f"{path}[{index}]")
    else:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: must be an object")
        for key, inner in shape.items():
            name = key.removesuffix("?")
            where = f"{path}.{name}" if path else name
            if value.get(name) is not None:
                _check(value[name], inner, where)
            elif name == key:
                raise ValueError(f"{where}: is missing")


def _filled(value: dict[str, Any]) -> Checkpoint:
    """The same with null members dropped and absent ones at their defaults, in the order of the format."""
    _check(value, _SHAPE, "")
    value = cast("dict[str, Any]", _without_odd_keys(normal(value)))
    facts, goal = value.pop("git", None), value.pop("goal")
    filled: dict[str, Any] = {"version": FORMAT, "id": "", "createdAt": "", "updatedAt": "", "generator": {}}
    filled |= {"project": {}, "git": None, "goal": {}}
    if "summary" in value:
        filled["summary"] = value["summary"]
    filled |= {"nextSteps": [], "decisions": [], "modifiedFiles": [], "recentCommands": [], "meta": {}}
    filled |= value
    if facts is not None:
        filled["git"] = {"branch": None, "head": "", "dirty": False, **facts}
    tasks = [{"description": "", "status": "pending", **task} for task in goal.get("tasks", [])]
    filled["goal"] = {**goal, "tasks": tasks}
    usual = {"path": "", "status": "M", "source": "agent"}
    filled["modifiedFiles"] = [{**usual, **entry} for entry in filled["modifiedFiles"]]
    filled["meta"] = {"redactions": 0, "truncated": False, **filled["meta"]}
    return cast("Checkpoint", filled)


def normal(value: Any) -> Any:
    """A JSON value without null members and without halves of surrogate pairs, which no file can hold."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {without_surrogates(key): normal(item) for key, item in value.items() if item is not None}
    return [normal(item) for item in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=256)
def _is_plain(key: str) -> bool:
    return scrub(key)[0] == key


def _without_odd_keys(value: Any) -> Any:
    """The value without keys that hide a character, hold a secret, or have no end.

    They go, since none may be cleaned: `goal` and a zero-width blank would take the place of `goal`.
    """
    if isinstance(value, dict):
        return {key: _without_odd_keys(item) for key, item in value.items() if len(key) <= _MAX_KEY and _is_plain(key)}
    return [_without_odd_keys(item) for item in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------- the folder


class Folder:
    """A project folder, held open: every file is reached through its descriptor, so a moved folder stays the same."""

    def __init__(self, root: str) -> None:
        """Raises SessionError if the folder cannot be opened."""
        self.root = root
        try:
            self.descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SessionError(f"{root}: {error.strerror}") from error

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def read(self, name: str) -> Found:
        """What is there under `name`; None where nothing is.

        A symlink is damage: what it points to is neither read nor named. Raises SessionError for what no save may
        replace (a directory, a FIFO) and for what cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                return Damaged("a symbolic link")
            if not stat.S_ISREG(status.st_mode):
                raise SessionError(f"{self.path(name)}: is no regular file; move it away")
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SessionError(f"{self.path(name)}: {error.strerror}") from error
        with open(descriptor, "rb") as file:
            owner = os.fstat(descriptor).st_uid
            try:
                content = file.read(_MAX_READ_BYTES + 1)
            except OSError as error:
                raise SessionError(f"{self.path(name)}: {error.strerror}") from error
        try:
            decoded = decode(content)
        except ValueError as error:
            return Damaged(str(error))
        return decoded if isinstance(decoded, Newer) else Valid(decoded, content, owner)

    @contextlib.contextmanager
    def locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[list[str]]:
        """Keeps every other process of this machine from saving here; gives warnings.

        The lock is on the folder itself: there is no lock file to leave behind, and the kernel frees it with its
        holder. Raises SessionError if another process keeps it for `wait_s` seconds.
        """
        deadline = time.monotonic() + wait_s
        warnings: list[str] = []
        is_locked = False
        while not is_locked:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SessionError(
                        f"{self.root}: another process has been saving here for {wait_s:.0f} s; try again"
                    ) from None
                time.sleep(_LOCK_POLL_S)
            except OSError as error:  # some network shares lock no folders; a save that may race beats none
                warnings.append(f"This folder cannot be locked ({error.strerror}): do not save from two processes.")
                break
        try:
            self._sweep(0.0 if is_locked else _STALE_S)
            yield warnings
        finally:
            if is_locked:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def replace(self, content: bytes, found: Found) -> list[str]:
        """Makes `content` the checkpoint; `found` is what `read(MAIN)` gave. Call it inside `locked`. Gives warnings.

        On return the new file is on disk under its name, a valid one before it is the backup, a damaged or newer one
        is set aside under `aside_name`. At every moment, power loss included, MAIN is a whole file. Raises SessionError
        with everything as it was.
        """
        try:
            decode(content)
        except ValueError as error:
            raise SessionError(f"{self.path(MAIN)}: not written, since it could not be read again: {error}") from None
        with contextlib.ExitStack() as leftovers:
            try:
                with contextlib.ExitStack() as undo:
                    fresh = self._write_temporary(content, leftovers)
                    self._refuse_odd_backup()
                    if isinstance(found, Valid):
                        self._keep(found, leftovers, undo)
                    elif found is not None:
                        self._set_aside(self.aside_name(found), undo)
                    self._rename(fresh, MAIN)
                    undo.pop_all()
            except OSError as error:
                raise SessionError(f"{self.path(MAIN)}: cannot be written: {error.strerror}") from error
        try:
            os.fsync(self.descriptor)
        except OSError as error:  # the new file has the name already
            return [f"The folder could not be flushed ({error.strerror}): a power cut now may undo this save."]
        return []

    def aside_name(self, found: Damaged | Newer) -> str:
        """The name under which a save sets aside what it cannot take for a checkpoint: one that nothing has yet."""
        name = DAMAGED if isinstance(found, Damaged) else f"{MAIN}.v{found.version}"
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
        return next(free for free in names if not self._has(free))

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _write_temporary(self, content: bytes, leftovers: contextlib.ExitStack) -> str:
        name = _TEMPORARY + os.urandom(8).hex()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        leftovers.callback(self._remove, name)
        with open(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, 0o600)  # a umask may have taken more away
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(descriptor)
        return name

    def _keep(self, found: Valid, leftovers: contextlib.ExitStack, undo: contextlib.ExitStack) -> None:
        """Makes the checkpoint that stands now the backup, without MAIN being absent for a moment."""
        if not self._has(BACKUP):
            undo.callback(self._remove, BACKUP)
        elif before := self._second_backup(leftovers):
            undo.callback(self._put_back, before, BACKUP)
        try:
            name = self._link(MAIN, leftovers)
            os.chmod(name, 0o600, dir_fd=self.descriptor)
        except OSError:  # no hard links here, or a file of another user
            name = self._write_temporary(found.content, leftovers)
        self._rename(name, BACKUP)

    def _second_backup(self, leftovers: contextlib.ExitStack) -> str | None:
        """A second name for the backup, or for a copy of it; None for one that is no checkpoint and has no links."""
        try:
            return self._link(BACKUP, leftovers)
        except OSError:
            backup = self.read(BACKUP)
            return self._write_temporary(backup.content, leftovers) if isinstance(backup, Valid) else None

    def _set_aside(self, target: str, undo: contextlib.ExitStack) -> None:
        """Gives MAIN this name, too, or where there are no hard links, instead. Overwrites nothing."""
        try:
            try:
                os.link(MAIN, target, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)
                undo.callback(self._remove, target)
            except FileExistsError:
                raise
            except OSError:
                self._rename(MAIN, target)
                undo.callback(self._put_back, target, MAIN)
        except OSError as error:
            raise SessionError(f"{self.path(MAIN)}: cannot be moved to {target}: {error.strerror}") from error

    def _link(self, name: str, leftovers: contextlib.ExitStack) -> str:
        link = _TEMPORARY + os.urandom(8).hex()
        os.link(name, link, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)
        leftovers.callback(self._remove, link)
        return link

    def _rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def _put_back(self, name: str, to: str) -> None:
        with contextlib.suppress(OSError):
            self._rename(name, to)

    def _remove(self, name: str) -> None:
        # Also a temporary that was renamed: rename() leaves both names where they are already one file.
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor)

    def _refuse_odd_backup(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(BACKUP, dir_fd=self.descriptor, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise SessionError(f"{self.path(BACKUP)}: is no regular file; move it away")

    def _sweep(self, older_than_s: float) -> None:
        """Removes what killed saves left. Under the lock that is every temporary file: no living process owns one."""
        for name in os.listdir(self.descriptor):
            if name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                    if time.time() - status.st_mtime >= older_than_s:
                        os.unlink(name, dir_fd=self.descriptor)
