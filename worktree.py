"""What lies at a path of a project folder, and whether it is the folder's at all. Knows no git."""

import hashlib
import os
import stat
import time
import unicodedata
from typing import Final, NamedTuple

HASH_LIMIT_S: Final = 1.5
HASH_LIMIT_BYTES: Final = 50_000_000


class State(NamedTuple):
    """What is at a path now: "file", "link", "dir", "absent" or "other"; `why` there is no blob id."""

    kind: str
    blob: str | None = None
    why: str | None = None  # "large", "slow", "unreadable", "outside"


class Hasher:
    """Blob ids of files below a root, as git would give them to the bytes on disk, within a limit of time in all.

    Line ends are not converted: what counts is whether the bytes on the disk changed.
    """

    def __init__(self, root: str, limit_s: float = HASH_LIMIT_S, limit_bytes: int = HASH_LIMIT_BYTES) -> None:
        self._root = root
        self._deadline = time.monotonic() + limit_s
        self._limit_bytes = limit_bytes

    def state(self, path: str, object_format: str = "sha1") -> State:
        """What is at a relative path. Never opens what is no regular file, never follows a link out of the root."""
        if not _is_plain(path):
            return State("absent", why="outside")
        if not is_inside(self._root, path):
            return State("absent")  # a folder on the way became a link out of the root: git calls the file deleted, too
        full = os.path.join(self._root, path)
        try:
            status = os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                return State("link", _blob(object_format, os.fsencode(os.readlink(full))))
            if stat.S_ISDIR(status.st_mode):
                return State("dir")
            if not stat.S_ISREG(status.st_mode):
                return State("other")
            return self._file(full, object_format)
        except (FileNotFoundError, NotADirectoryError):
            return State("absent")
        except (OSError, ValueError):
            return State("file", why="unreadable")

    def _file(self, full: str, object_format: str) -> State:
        descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return State("other")
            if status.st_size > self._limit_bytes:
                return State("file", why="large")
            digest = hashlib.new(object_format, b"blob %d\0" % status.st_size, usedforsecurity=False)
            read = 0
            while chunk := file.read(1 << 20):
                if time.monotonic() > self._deadline:
                    return State("file", why="slow")
                digest.update(chunk)
                read += len(chunk)
            # A file that grew or shrank meanwhile has no blob id that anybody could compare.
            return State("file", digest.hexdigest()) if read == status.st_size else State("file", why="unreadable")


def _blob(object_format: str, content: bytes) -> str:
    header = b"blob %d\0" % len(content)
    return hashlib.new(object_format, header + content, usedforsecurity=False).hexdigest()


def is_inside(root: str, path: str) -> bool:
    """Whether a recorded path stays below the root, `..` and links on its way considered, and out of `.git`."""
    parent = os.path.dirname(path.rstrip("/"))
    return _is_plain(path) and (not parent or is_below(os.path.realpath(os.path.join(root, parent)), root))


def _is_plain(path: str) -> bool:
    parts = path.removesuffix("/").split("/")
    return "\0" not in path and not any(part.lower() in ("", ".", "..", ".git") for part in parts)


def is_below(folder: str, root: str) -> bool:
    return folder == root or folder.startswith(root.rstrip("/") + "/")


def place_named(root: str, path: str) -> str | None:
    """The path below the root that an agent's path means; None where it leaves the root or enters `.git`."""
    try:
        full = os.path.normpath(os.path.join(root, path))
        folder = os.path.realpath(os.path.dirname(full))
    except ValueError:
        return None
    if full == "/" or not is_below(folder, root):
        return None
    relative = os.path.relpath(os.path.join(folder, os.path.basename(full)), root)
    try:
        relative.encode()  # a link may have led to a folder whose name is no text
    except UnicodeEncodeError:
        return None
    return relative if is_inside(root, relative) else None


def is_same_file(root: str, given: str, path: str) -> bool:
    """Whether a spelling means an existing path: it reaches the same file, as where case is ignored, or none at all
    and the names differ in the composition of their accents only."""
    try:
        theirs = os.lstat(os.path.join(root, path))
        ours = os.lstat(os.path.join(root, given))
    except (OSError, ValueError):
        return unicodedata.normalize("NFC", given) == unicodedata.normalize("NFC", path)
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def changed_at_ms(root: str, path: str) -> int | None:
    """When a file's inode last changed; None where there is no file."""
    try:
        return os.lstat(os.path.join(root, path)).st_ctime_ns // 1_000_000
    except (OSError, ValueError):
        return None
