"""What git and the files themselves say about a project folder. Reads only; never runs what a repository brought along.

git is optional and untrusted: it may be missing, hang, or be configured by the repository to start programs. Every call
goes through `Git.run`, which defuses that configuration. Blob ids are computed here: git would run filters, follow
symlinks and stop at the first missing file.
"""

import contextlib
import functools
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from checkpointfile import is_own_file
from worktree import State, is_below

TIME_LIMIT_S: Final = 3.0
MAX_FILES: Final = 100
_LOOSE_UNTRACKED: Final = 10  # an untracked folder with more files than these becomes one entry

_EMPTY_BLOBS: Final = frozenset(
    {
        "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
        "473a0f4c3be8a93681a267e3b1e9a7dcda1185436fe141f7749120a303721813",
    }
)

# ------------------------------------------------------------------------------------------------------ asking git


class GitError(Exception):
    """git gave no answer; the message is one line. `is_plain`: there simply is no repository."""

    def __init__(self, message: str, *, is_plain: bool = False) -> None:
        super().__init__(message)
        self.is_plain = is_plain


class GitTimeout(GitError):
    """git ran into the time limit and was killed, with all that it had started."""


class Answer(NamedTuple):
    code: int
    output: bytes
    error: str


# Variables that say where the user's own configuration lies. Every other GIT_* could point to another repository.
_KEPT: Final = frozenset({"GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"})
_SET: Final = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # git before 2.44 does not know GIT_NO_LAZY_FETCH
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_PAGER": "cat",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "LC_ALL": "C",
}
# With -c, which git of any age understands: what the repository's own configuration would start or change.
_DEFUSED: Final = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.pager=cat",
    "core.sshCommand=false",
    "credential.helper=",
    "gc.auto=0",
    "maintenance.auto=false",
    "color.ui=false",
    "status.renames=true",
    "diff.renames=true",
    "safe.bareRepository=explicit",  # a commit can carry HEAD, objects/ and refs/, which make any folder one
)
_SENTINEL: Final = "checkpoint.defused"


def find_git(path: str, root: str) -> str | None:
    """The first git on a PATH that does not lie in the project: a repository could have brought it along."""
    project = _topmost_repository(root)
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder, "git")
        is_safe = os.path.isabs(folder) and not is_below(os.path.realpath(folder), project)
        if is_safe and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def _topmost_repository(folder: str) -> str:
    """The outermost folder around this one that has a `.git`; the folder itself where there is none."""
    found = folder
    while (above := os.path.dirname(folder)) != folder:  # one at the top would leave no folder for git itself
        found = folder if os.path.lexists(os.path.join(folder, ".git")) else found
        folder = above
    return found


class Git:
    """git in one folder for the length of one tool call. After a time-out and one retry it is not asked again."""

    def __init__(self, root: str, environ: Mapping[str, str] = os.environ, *, limit_s: float = TIME_LIMIT_S) -> None:
        self.root = root
        self._limit_s = limit_s
        self._executable = find_git(environ.get("PATH") or os.defpath, root)
        self._environ = {name: value for name, value in environ.items() if not name.startswith("GIT_") or name in _KEPT}
        self._environ |= _SET
        self._pairs: list[tuple[str, str]] = [(_SENTINEL, "true")]
        self._is_over = False
        self._is_prepared = False

    @property
    def is_installed(self) -> bool:
        return self._executable is not None

    def run(self, *arguments: str, is_last_try: bool = False) -> Answer:
        """git's exit code and output. Raises GitError when git is missing, GitTimeout when it is too slow."""
        if not self._is_prepared:
            self._defuse_filters()
        return self._run(arguments, is_last_try=is_last_try)

    @functools.cached_property
    def place(self) -> tuple[str, str]:
        """The root's place in its repository ("" or "a/b/") and the object format. Raises GitError where it has none.

        Ask it before anything that is to be believed: git answers for other work trees, too.
        """
        answer = self.run("rev-parse", "--absolute-git-dir", "--show-toplevel", "--show-prefix", "--show-object-format")
        if answer.code != 0:
            is_plain = answer.error.startswith("not a git repository") and not os.path.lexists(
                os.path.join(self.root, ".git")
            )
            raise GitError("not a git repository" if is_plain else f"git: {answer.error}", is_plain=is_plain)
        said, _, object_format = answer.output.removesuffix(b"\n").rpartition(b"\n")
        # Compared whole with what each parent folder would give, since a folder's name may hold a newline.
        top, prefix = os.fsencode(self.root), b""
        while not said.endswith(b"\n" + top + b"\n" + prefix):
            above, name = os.path.split(top)
            if above == top:
                raise GitError("git: the repository's work tree is elsewhere (core.worktree)")
            top, prefix = above, name + b"/" + prefix
        directory = said.removesuffix(b"\n" + top + b"\n" + prefix)
        if is_below(self.root, os.path.realpath(os.fsdecode(directory))):  # git before 2.38
            raise GitError("git: the folder looks like a bare repository")
        return os.fsdecode(prefix), "sha256" if object_format == b"sha256" else "sha1"

    def _defuse_filters(self) -> None:
        """Switches off the clean filters, which git would run on a file whose times changed.

        Their names come from the configuration itself. They are overruled by variables, since `-c` cannot say a name
        with "="; a git that does not know those variables does not echo the sentinel.
        """
        listed = self._run(
            ("config", "-z", "--name-only", "--get-regexp", rf"^(filter\..*\.(clean|process)|{_SENTINEL})$")
        )
        if listed.code > 1:
            raise GitError(f"git: {listed.error}")
        names = [os.fsdecode(name) for name in listed.output.split(b"\0") if name]
        if _SENTINEL not in names and names:
            self._is_over = True
            raise GitError("git: is older than 2.31 and could not be kept from running this repository's filters")
        for driver in sorted({name.rpartition(".")[0] for name in names if name != _SENTINEL}):
            self._pairs += [(f"{driver}.clean", ""), (f"{driver}.process", ""), (f"{driver}.required", "false")]
        self._is_prepared = True

    def _run(self, arguments: Sequence[str], *, is_last_try: bool = False) -> Answer:
        if self._executable is None:
            raise GitError("git: is not installed")
        if self._is_over and not is_last_try:
            raise GitError("git: was not asked again after it ran into the time limit")
        settings = [word for setting in _DEFUSED for word in ("-c", setting)]
        environ = self._environ | {"GIT_CONFIG_COUNT": str(len(self._pairs))}
        for index, (key, value) in enumerate(self._pairs):
            environ |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
        try:
            # A session of its own: no terminal to prompt on, and one group to kill.
            process = subprocess.Popen(
                [self._executable, *settings, "--no-pager", *arguments],
                cwd=self.root,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise GitError(f"git: {error.strerror}") from error
        with process:
            try:
                output, errors = process.communicate(timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                self._is_over = True
                raise GitTimeout(f"git: no answer within {self._limit_s:g} s") from None
            finally:
                if process.returncode is None:  # on any way out of here nothing of it may live on
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
        return Answer(process.returncode, output, _first_line(errors))


def _first_line(errors: bytes) -> str:
    """git's own reason on one line; its warnings come before it."""
    lines = [line.strip() for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[0] if lines else "failed")
    return reason.removeprefix("fatal: ").removeprefix("error: ")[:300]


# ----------------------------------------------------------------------------------------------------- one snapshot


class Change(NamedTuple):
    """One path that differs from HEAD, relative to the root."""

    path: str
    status: str  # M, A, D, R, U, T or ??
    origin: str | None = None  # the path a renamed file had
    blob: str | None = None  # of a deleted file: the blob id it has in the index
    kind: str | None = None  # "submodule" or "dir"
    remoded: str | None = None  # of a file whose mode differs from HEAD's: the blob id it has there


class Snapshot(NamedTuple):
    """A working tree at one moment. `head` is None before the first commit, `branch` on a detached HEAD."""

    head: str | None
    branch: str | None
    is_dirty: bool
    changes: tuple[Change, ...]
    folders: tuple[str, ...]  # topmost folders without a tracked file, each with its "/"; "" where the root is one
    object_format: str
    warnings: tuple[str, ...]


def take_snapshot(git: Git) -> Snapshot:
    """Branch, HEAD and every change below the root. Raises GitError if git cannot tell."""
    prefix, object_format = git.place
    warnings = []
    try:
        answer = git.run(*_STATUS, "--untracked-files=all", "--", ".")
    except GitTimeout:
        answer = git.run(*_STATUS, "--untracked-files=no", "--", ".", is_last_try=True)
        warnings.append("git was slow: untracked files were not scanned.")
    _expect_success(answer)
    head, branch, records = read_status(answer.output)
    changes, skipped = read_changes(git.root, records, os.fsencode(prefix))
    if skipped:
        warnings.append(f"Left out {skipped} file name(s) that are not UTF-8.")
    folders: tuple[str, ...] = ()
    if len(changes) > MAX_FILES and not warnings:
        folders = _untracked_folders(git, os.fsencode(prefix))
    return Snapshot(head, branch, bool(changes or skipped), tuple(changes), folders, object_format, tuple(warnings))


# --ignore-submodules=dirty: looking into a submodule would run that repository's own filters.
_STATUS: Final = ("status", "--porcelain=v2", "-z", "--branch", "--no-ahead-behind", "--ignore-submodules=dirty")


def _expect_success(answer: Answer) -> None:
    if answer.code != 0:
        raise GitError(f"git: {answer.error}")


def _expect(is_readable: bool) -> None:
    """Raises GitError unless git printed what its manual says: whatever stands first on PATH may be called git."""
    if not is_readable:
        raise GitError("git: printed something else than it was asked for")


def _untracked_folders(git: Git, prefix: bytes) -> tuple[str, ...]:
    try:
        answer = git.run(*_STATUS, "--untracked-files=normal", "--", ".")
    except GitError:
        return ()
    names = [record[2:] for record in answer.output.split(b"\0") if record.startswith(b"? ") and record.endswith(b"/")]
    if any(prefix.startswith(name) for name in names):
        return ("",)
    inside = [_relative(name, prefix) for name in names]
    return tuple(name for name in inside if name)


def read_status(output: bytes) -> tuple[str | None, str | None, list[bytes]]:
    """HEAD, branch and records of `status --porcelain=v2 -z --branch`. Unknown headers are passed over.

    Raises GitError for what is no such status, as does `read_changes`.
    """
    head = branch = None
    records = []
    rest = iter(output.split(b"\0"))
    for record in rest:
        if record.startswith(b"# branch.oid "):
            _expect(record[13:] == b"(initial)" or _commit(record[13:]) is not None)
            head = record[13:].decode()
        elif record.startswith(b"# branch.head "):
            branch = record[14:].decode("utf-8", "replace")
        elif record and not record.startswith(b"# "):
            records.append(record)
            if record.startswith(b"2 "):
                records.append(next(rest, b""))  # a file's old name, which may look like a header
    _expect(head is not None)
    return None if head == "(initial)" else head, None if branch == "(detached)" else branch, records


_FIELDS_BEFORE_PATH: Final = {b"1": 8, b"2": 9, b"u": 10}


def read_changes(root: str, records: Iterable[bytes], prefix: bytes) -> tuple[list[Change], int]:
    """The changes in status records, one per path, and the number of names that are not UTF-8."""
    changes: dict[str, Change] = {}
    skipped = 0
    rest = iter(records)
    for record in rest:
        kind = record[:1]
        old = None
        if kind == b"?":
            fields: list[bytes] = []
            name = record[2:]
        elif kind in _FIELDS_BEFORE_PATH:
            *fields, name = record.split(b" ", _FIELDS_BEFORE_PATH[kind])
            _expect(len(fields) == _FIELDS_BEFORE_PATH[kind] and len(fields[1]) == 2 and record[1:2] == b" ")
            old = next(rest, None) if kind == b"2" else None
        else:
            continue
        _expect(name != b"")
        path = _relative(name, prefix)
        if path is None:
            skipped += name.startswith(prefix)
            continue
        if is_own_file(path):
            continue
        origin = _relative(old, prefix) if old else None
        change = _read_change(root, path, kind, [field.decode("ascii", "replace") for field in fields], origin)
        if change and not (path in changes and change.status == "D"):
            changes[path] = change
    return list(changes.values()), skipped


def _relative(name: bytes, prefix: bytes) -> str | None:
    """A path below the root; None for one outside of it or one that is not UTF-8."""
    try:
        return name[len(prefix) :].decode() if name.startswith(prefix) else None
    except UnicodeDecodeError:
        return None


def _read_change(root: str, path: str, kind: bytes, fields: list[str], origin: str | None) -> Change | None:
    if kind == b"?":
        return Change(path, "??", kind="dir" if path.endswith("/") else None)
    both = fields[1]
    staged, unstaged = both[0], both[1]
    is_submodule = fields[2].startswith("S")
    if not _is_present(os.path.join(root, path), is_submodule=is_submodule):
        if kind != b"u" and (staged in "AC" or unstaged == "A"):
            return None  # added and gone again: there is nothing to say
        blob = fields[7] if kind == b"1" and staged == "." else None
        return Change(path, "D", blob=blob, kind="submodule" if is_submodule else None)
    if kind == b"u":
        status = "U"
    elif "D" in both:
        status = "??"  # only the index has lost it (git rm --cached)
    elif "R" in both:
        status = "R"
    elif "A" in both or "C" in both:
        status = "A"
    else:
        status = "T" if "T" in both else "M"
    is_remoded = kind == b"1" and fields[3] != fields[5] and fields[3][:3] == fields[5][:3] == "100"
    return Change(
        path,
        status,
        origin if status == "R" else None,
        kind="submodule" if is_submodule else None,
        remoded=fields[6] if is_remoded else None,
    )


def _is_present(path: str, *, is_submodule: bool) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) == is_submodule
    except (OSError, ValueError):
        return False


def collapse(snapshot: Snapshot) -> tuple[list[Change], list[str]]:
    """The changes with big untracked folders as one entry each, and a warning for each of those."""
    folders = set(snapshot.folders)
    if "" in folders:
        folders = {change.path.partition("/")[0] + "/" for change in snapshot.changes if "/" in change.path}
    collapsed: dict[str, int] = dict.fromkeys(folders, 0)
    homes: dict[str, str] = {}
    for change in snapshot.changes:
        home = _home(change.path, collapsed) if change.status == "??" else None
        if home:
            homes[change.path] = home
            collapsed[home] += 1
    big = {folder for folder, count in collapsed.items() if count > _LOOSE_UNTRACKED}
    changes = [change for change in snapshot.changes if homes.get(change.path) not in big]
    changes += [Change(folder, "??", kind="dir") for folder in sorted(big)]
    return changes, [f"{collapsed[folder]} untracked file(s) in {folder} stand as one entry." for folder in sorted(big)]


def _home(path: str, folders: Mapping[str, int]) -> str | None:
    end = path.find("/") + 1
    while end:
        if path[:end] in folders and path[:end] != path:
            return path[:end]
        end = path.find("/", end) + 1
    return None


def tracked(git: Git, names: Sequence[str]) -> frozenset[str]:
    """Those of these files of the root that git has, in any spelling. Raises GitError if git cannot tell."""
    _ = git.place
    answer = git.run("--icase-pathspecs", "ls-files", "-z", "--", *names)
    _expect_success(answer)
    listed = {name.lower() for name in answer.output.split(b"\0")}
    return frozenset(name for name in names if name.encode() in listed)


def not_ignored(git: Git, names: Sequence[str]) -> list[str]:
    """Those of these files of the root that git does not ignore. Raises GitError if git cannot tell."""
    answer = git.run("check-ignore", "--", *names)
    if answer.code > 1:
        raise GitError(f"git: {answer.error}")
    ignored = answer.output.splitlines()
    return [name for name in names if name.encode() not in ignored]


# --------------------------------------------------------------------------------------------------------- history


class History(NamedTuple):
    """How a saved commit lies to HEAD."""

    is_ancestor: bool
    commits: int | None = None  # on HEAD since then
    subjects: tuple[tuple[str, str], ...] = ()  # (id, first line) of the newest of them
    holder: str | None = None  # where it is no ancestor: some ref that still has it


def history(git: Git, saved: str) -> History:
    """Where a saved commit is now; by ancestry, since counting lies after a reset or an amend. Raises GitError."""
    if git.run("merge-base", "--is-ancestor", saved, "HEAD").code == 0:
        counted = git.run("rev-list", "--count", "--end-of-options", f"{saved}..HEAD")
        _expect_success(counted)
        _expect(re.fullmatch(rb"[0-9]{1,18}\n", counted.output) is not None)
        commits = int(counted.output)
        return History(True, commits, _subjects(git, saved) if commits else ())
    holders = git.run(
        "for-each-ref", "--count=1", "--format=%(refname:short)", f"--contains={saved}", "refs/heads", "refs/remotes",
        "refs/tags",
    )  # fmt: skip
    found = holders.output.decode("utf-8", "replace").strip() if holders.code == 0 else ""
    return History(False, holder=found or None)


def _subjects(git: Git, saved: str) -> tuple[tuple[str, str], ...]:
    answer = git.run(
        "rev-list", "--max-count=5", "--encoding=UTF-8", "--format=%x00%H %s", "--end-of-options", f"{saved}..HEAD"
    )
    lines = answer.output.decode("utf-8", "replace").split("\n")
    found = [line[1:].partition(" ") for line in lines if line.startswith("\0")]
    return tuple((commit[:9], subject) for commit, _, subject in found)


def committed_since(git: Git, saved: str) -> dict[str, str] | None:
    """Paths below the root whose entry in HEAD differs from that in a commit, with the blob id they had there.

    None where git does not have that commit. Two trees are compared: `git diff` with the work tree would write the
    index, GIT_OPTIONAL_LOCKS or not. Raises GitError.
    """
    answer = git.run(
        "diff-tree", "-r", "-z", "--raw", "--no-abbrev", "--no-renames", "--relative", "--end-of-options", saved,
        "HEAD", "--", ".",
    )  # fmt: skip
    if answer.code != 0:
        return None
    *fields, rest = answer.output.split(b"\0")
    _expect(len(fields) % 2 == 0 and rest == b"")
    found = {}
    for said, name in zip(fields[::2], fields[1::2], strict=True):
        path = _relative(name, b"")
        words = said.decode("ascii", "replace").split(" ")
        _expect(len(words) == 5)
        old_mode, new_mode, old_blob, new_blob, _ = words
        is_remoded = old_blob == new_blob and old_mode[1:4] == new_mode[:3] == "100"
        if path and not is_own_file(path) and not is_remoded:
            found[path] = old_blob
    return found


_commit: Final = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?").fullmatch


def submodule_head(git: Git, path: str) -> str | None:
    """The commit that is checked out in a submodule; None where there is none. Raises GitError."""
    folder = os.path.join(git.root, path)
    if not os.path.lexists(os.path.join(folder, ".git")):
        return None  # not initialised: git would answer for the repository around it
    inner = git.run("-C", folder, "rev-parse", "--show-toplevel")
    if inner.code != 0 or inner.output != os.fsencode(os.path.realpath(folder)) + b"\n":
        return None
    answer = git.run("-C", folder, "rev-parse", "HEAD")
    return answer.output.decode().strip() if answer.code == 0 and _commit(answer.output.removesuffix(b"\n")) else None


# ----------------------------------------------------------------------------------------------------------- moves


def pair_moves(changes: Sequence[tuple[Change, State]]) -> dict[str, str]:
    """New path to old path for files that were moved without telling git: the only two with this content."""
    gone: dict[str, list[str]] = {}
    fresh: dict[str, list[str]] = {}
    for change, state in changes:
        if change.status == "D" and change.blob and change.kind is None:
            gone.setdefault(change.blob, []).append(change.path)
        elif change.status == "??" and state.kind == "file" and state.blob:
            fresh.setdefault(state.blob, []).append(change.path)
    return {
        fresh[blob][0]: paths[0]
        for blob, paths in gone.items()
        if len(paths) == len(fresh.get(blob, ())) == 1 and blob not in _EMPTY_BLOBS
    }
