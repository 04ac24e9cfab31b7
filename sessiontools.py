"""The two tools at work: root, git, files and the checkpoint joined. Knows no protocol; imported at the first call."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from brief import FOREIGN, UNTRUSTED, Brief, age, render, render_for_hook
from checkpointfile import (
    BACKUP,
    MAIN,
    Checkpoint,
    Damaged,
    FileEntry,
    Folder,
    Found,
    GitFacts,
    Newer,
    Valid,
    aside_name,
    format_time,
    parse_time,
)
from compose import (
    Candidate,
    Facts,
    Given,
    check,
    compose,
    finish_entry,
    list_files,
    normal_arguments,
    project_name,
    read_input,
    scrubbed,
    to_merge_into,
)
from drift import Drift, measure
from gitfacts import (
    Git,
    GitError,
    Hasher,
    Snapshot,
    State,
    collapse,
    is_ignored,
    is_inside,
    is_same_file,
    is_tracked,
    pair_moves,
    place_named,
    submodule_head,
    take_snapshot,
)
from plaintext import clean, cut, one_line, scrub, visible
from toolspec import SessionError

_FOREIGN_HOURS: Final = 24
_SHOWN_TEXT: Final = 8_000  # characters; twice the longest that a save takes: only an edited file has more

# --------------------------------------------------------------------------------------------------------- the root


class Root(NamedTuple):
    path: str  # absolute, links resolved
    source: str  # what named it
    is_fallback: bool = False


def resolve_root(
    argument: str | None,
    environ: Mapping[str, str],
    ask_client: Callable[[], Sequence[str]],
    get_working_directory: Callable[[], str] = os.getcwd,
) -> Root:
    """The project folder: the argument, CHECKPOINT_PROJECT_ROOT, the client's first root that is a folder,
    CLAUDE_PROJECT_DIR, the working directory.

    The first two must be right where they are given: raises SessionError naming the one that is not. The others are
    passed over.
    """
    if argument is not None:
        return Root(_directory("projectRoot", argument), "projectRoot")
    if named := environ.get("CHECKPOINT_PROJECT_ROOT"):
        return Root(_directory("CHECKPOINT_PROJECT_ROOT", named), "CHECKPOINT_PROJECT_ROOT")
    for uri in ask_client():
        path = _path_of(uri)
        if path is not None:
            return Root(os.path.realpath(path), "the client's roots")
    project = environ.get("CLAUDE_PROJECT_DIR", "")
    if os.path.isabs(project) and os.path.isdir(project):
        return Root(os.path.realpath(project), "CLAUDE_PROJECT_DIR")
    advice = "pass projectRoot or set CHECKPOINT_PROJECT_ROOT"
    try:
        current = os.path.realpath(get_working_directory())
    except OSError as error:
        raise SessionError(f"the working directory is gone; {advice}") from error
    if os.path.dirname(current) == current:
        raise SessionError(f"no project root: the working directory is {current}; {advice}")
    return Root(current, "the working directory", is_fallback=True)


def _directory(name: str, path: str) -> str:
    said = cut(one_line(scrub(path)[0]), 200)
    if not os.path.isabs(path):
        raise SessionError(f"{name} must be an absolute path: {said or 'it is empty'}")
    try:
        resolved = os.path.realpath(path, strict=True)
        is_directory = os.path.isdir(resolved)
    except ValueError:
        raise SessionError(f"{name} must not contain a NUL character") from None
    except OSError as error:
        raise SessionError(f"{name} is not an existing directory ({error.strerror}): {said}") from None
    if not is_directory:
        raise SessionError(f"{name} is not a directory: {said}")
    return resolved


def _path_of(uri: str) -> str | None:
    """The folder that a `file://` root means; None for one on another host and for what is no folder."""
    try:
        parts = urlsplit(uri)
        path = unquote(parts.path, errors="surrogateescape")
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
        return path if is_local and os.path.isabs(path) and os.path.isdir(path) else None
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------- what git can tell


class World(NamedTuple):
    """git's view of the root, or why there is none."""

    git: Git
    snapshot: Snapshot | None
    trouble: str | None  # one line; None outside of a repository, where nothing is wrong
    is_repository: bool


def look(root: str, environ: Mapping[str, str]) -> World:
    git = Git(root, environ)
    try:
        return World(git, take_snapshot(git), None, True)
    except GitError as error:
        if error.is_plain:
            return World(git, None, None, False)
        is_repository = git.is_installed or _has_repository(root)
        return World(git, None, scrub(one_line(str(error)))[0] if is_repository else None, is_repository)


def _has_repository(folder: str) -> bool:
    """Whether this folder or one above it looks like a repository; for when there is no git to ask."""
    while not os.path.lexists(os.path.join(folder, ".git")):
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above
    return True


# -------------------------------------------------------------------------------------------------------------- save


class Seen(set[tuple[str, str, str]]):
    """The checkpoints that this process has saved or loaded, so that it can tell those of another session."""

    def note(self, root: str, checkpoint: Checkpoint) -> None:
        self.add((root, checkpoint["id"], checkpoint["updatedAt"]))

    def has(self, root: str, checkpoint: Checkpoint) -> bool:
        return (root, checkpoint["id"], checkpoint["updatedAt"]) in self


def save(
    arguments: Mapping[str, Any],
    schema: Mapping[str, Any],
    find_root: Callable[[str | None], Root],
    *,
    environ: Mapping[str, str],
    seen: Seen,
    generator: Mapping[str, str],
    now: Callable[[], datetime],
) -> dict[str, Any]:
    """Saves a checkpoint and gives the structured answer; its `message` is the text. Raises SessionError."""
    arguments = normal_arguments(arguments)
    given = read_input(arguments, check(arguments, schema))
    root = find_root(given.project_root)
    warnings = list(given.warnings)
    if root.is_fallback and root.path == os.path.realpath(environ.get("HOME") or "/"):
        warnings.append(
            "Saved in the home directory, where the server was started: pass projectRoot or set "
            "CHECKPOINT_PROJECT_ROOT for a project."
        )
    world = look(root.path, environ)
    if world.trouble:
        warnings.append(f"{world.trouble}; saved without git facts.")
    with Folder(root.path) as folder, folder.locked() as lock_warnings:
        warnings += lock_warnings
        found, previous = _previous(folder, given, seen, now, warnings)
        entries, named_paths, is_cut = _scan(root.path, given, world, previous, warnings)
        facts = Facts(
            now=format_time(now()),
            fresh_id=str(uuid.uuid4()),
            generator=dict(generator),
            project=project_name(root.path),
            git=_git_facts(world.snapshot),
            files=entries,
            named_paths=named_paths,
        )
        composed = compose(given, previous, facts, is_cut=is_cut or given.is_cut)
        folder.replace(composed.content, found)
    seen.note(root.path, composed.checkpoint)
    warnings += composed.warnings
    if given.redactions:
        warnings.append(f"Redacted {given.redactions} secret-looking value(s).")
    warnings += _ignore_warnings(world)
    return _save_answer(root, folder.path(MAIN), given, composed.checkpoint, len(composed.content), warnings)


def _git_facts(snapshot: Snapshot | None) -> GitFacts | None:
    if snapshot is None or snapshot.head is None:
        return None
    branch = None if snapshot.branch is None else scrub(snapshot.branch)[0]
    return GitFacts(branch=branch, head=snapshot.head, dirty=snapshot.is_dirty)


def _previous(
    folder: Folder, given: Given, seen: Seen, now: Callable[[], datetime], warnings: list[str]
) -> tuple[Found, Checkpoint | None]:
    """What stands in the way of the new file, and the checkpoint that a merge goes on from."""
    found = folder.read(MAIN)
    if isinstance(found, Newer):
        if given.is_merge:
            raise SessionError(
                f"{folder.path(MAIN)} was written by a newer version ({found.version}); "
                "upgrade, or save with mode replace"
            )
        warnings.append(f"The checkpoint of a newer version ({found.version}) was moved to {aside_name(found)}.")
        return found, None
    if isinstance(found, Damaged):
        backup = folder.read(BACKUP) if given.is_merge else None
        is_usable = isinstance(backup, Valid)
        on = f"; merged into {BACKUP}" if is_usable else "; nothing to merge into" if given.is_merge else ""
        warnings.append(f"{MAIN} was corrupt ({found.reason}) and was moved to {aside_name(found)}{on}.")
        return found, to_merge_into(backup.checkpoint) if isinstance(backup, Valid) else None
    if found is None:
        if given.is_merge:
            warnings.append("Nothing to merge into; saved as new.")
        return None, None
    if given.is_merge:
        return found, to_merge_into(found.checkpoint)
    saved = parse_time(found.checkpoint["updatedAt"])
    moment = now()
    if (
        not seen.has(folder.root, found.checkpoint)
        and saved
        and (moment - saved).total_seconds() < _FOREIGN_HOURS * 3600
    ):
        goal = cut(one_line(scrub(found.checkpoint["goal"]["primary"])[0]), 80)
        warnings.append(
            f"Replaced another session's checkpoint (goal: {goal}, {age(moment, saved)}); it is kept as {BACKUP}."
        )
    return found, None


def _scan(
    root: str, given: Given, world: World, previous: Checkpoint | None, warnings: list[str]
) -> tuple[list[FileEntry], frozenset[str], bool]:
    """The files of the new checkpoint, the paths of those that were named, and whether some were left out."""
    snapshot = world.snapshot
    changes, collapsed = collapse(snapshot) if snapshot else ([], [])
    warnings += snapshot.warnings if snapshot else ()
    warnings += collapsed
    named, refused = _named(root, given)
    if refused:
        warnings.append(f"Skipped {refused} file(s) outside of the project root or inside .git.")
    recorded = [
        entry
        for entry in (previous["modifiedFiles"] if previous else [])
        if is_inside(root, entry["path"]) and not entry["path"].startswith(MAIN)
    ]
    candidates, left_out, secret = list_files(
        named, changes, recorded, lambda one, other: is_same_file(root, one, other)
    )
    if secret:
        warnings.append(f"Skipped {secret} file(s) whose path looks like it holds a secret.")
    if left_out:
        warnings.append(f"Left out {left_out} changed file(s): a checkpoint lists at most {len(candidates)}.")
    entries = _hashed(root, candidates, world, snapshot, warnings)
    paths = frozenset(candidate.entry["path"] for candidate in candidates if candidate.is_named)
    return entries, paths, bool(left_out or collapsed)


def _named(root: str, given: Given) -> tuple[list[tuple[str, str | None]], int]:
    """The files that the agent named, by their paths below the root, and the number of those that have none."""
    named = []
    for path, note in given.files:
        place = place_named(root, path)
        if place is not None and not (place.startswith(MAIN) and "/" not in place):
            named.append((place, note))
    return named, len(given.files) - len(named)


def _hashed(
    root: str, candidates: Sequence[Candidate], world: World, snapshot: Snapshot | None, warnings: list[str]
) -> list[FileEntry]:
    hasher = Hasher(root)
    object_format = snapshot.object_format if snapshot else "sha1"
    states = [_state(candidate, hasher, world.git, object_format) for candidate in candidates]
    seen = [(candidate.change, state) for candidate, state in zip(candidates, states, strict=True) if candidate.change]
    moves = pair_moves(seen)
    unread = sum(state.why in ("large", "slow") for state in states)
    if unread:
        warnings.append(f"{unread} large file(s) not hashed; drift unknown.")
    entries = []
    for candidate, state in zip(candidates, states, strict=True):
        path = candidate.entry["path"]
        is_gone_folder = candidate.change is None and state.kind == "absent" and path.endswith("/")
        if path not in moves.values() and not is_gone_folder:
            entries.append(finish_entry(candidate, state.blob, state.kind, moves.get(path)))
    return entries


def _state(candidate: Candidate, hasher: Hasher, git: Git, object_format: str) -> State:
    change, carried = candidate.change, candidate.carried
    kind = change.kind if change else carried.get("kind") if carried else None
    state = hasher.state(candidate.entry["path"], object_format)
    if kind == "submodule" and state.kind == "dir":
        try:
            return State("dir", submodule_head(git, candidate.entry["path"]))
        except GitError:
            return state
    return state


def _ignore_warnings(world: World) -> list[str]:
    snapshot = world.snapshot
    if snapshot is None:
        return []
    warnings = []
    if snapshot.head is None:
        branch = scrub(snapshot.branch or "HEAD")[0]
        warnings.append(f"No commit yet on {branch}: what changes after this save cannot be told before the first one.")
    try:
        if is_tracked(world.git, MAIN):
            warnings.append(f"{MAIN} is tracked by git: run git rm --cached {MAIN}, then ignore {MAIN}*.")
        elif not is_ignored(world.git, (MAIN, BACKUP)):
            warnings.append(
                f"{MAIN} is not git-ignored: add {MAIN}* to .gitignore, or to .git/info/exclude to keep that private."
            )
    except GitError:  # then nothing can be said; the reason is in the warnings already where it matters
        return warnings
    return warnings


def _save_answer(
    root: Root, path: str, given: Given, checkpoint: Checkpoint, size: int, warnings: list[str]
) -> dict[str, Any]:
    counts = {
        "tasks": len(checkpoint["goal"]["tasks"]),
        "modifiedFiles": len(checkpoint["modifiedFiles"]),
        "recentCommands": len(checkpoint["recentCommands"]),
        "redactions": checkpoint["meta"]["redactions"],
    }
    mode = "merge" if given.is_merge else "replace"
    facts = checkpoint["git"]
    place = f" on {one_line(facts['branch'] or 'detached')}@{facts['head'][:9]}" if facts else ""
    path = visible(path)
    lines = [
        f"Checkpoint saved to {one_line(clean(path))} ({size} bytes, {mode}).",
        f"{counts['tasks']} task(s), {counts['modifiedFiles']} file(s), {counts['recentCommands']} command(s){place}.",
        *(f"⚠ {one_line(clean(warning))}" for warning in warnings),
    ]
    return {
        "path": path,
        "bytes": size,
        "mode": mode,
        "counts": counts,
        "warnings": warnings,
        "message": "\n".join(lines),
    }


# -------------------------------------------------------------------------------------------------------------- load


class Loaded(NamedTuple):
    """A checkpoint as it may be shown, with everything that was measured about it."""

    path: str
    checkpoint: Checkpoint  # scrubbed
    is_from_backup: bool
    drift: Drift | None
    drift_unknown: str | None
    untrusted: tuple[str, ...]
    is_tracked: bool | None  # by git; None where git should know and cannot tell
    warnings: tuple[str, ...]


def read_best(folder: Folder) -> tuple[Valid | None, bool, str | None]:
    """The checkpoint to go on from, whether it is the backup, and a warning or message.

    Raises SessionError for a newer format, and for a corrupt file without a valid backup.
    """
    found = folder.read(MAIN)
    if isinstance(found, Valid):
        return found, False, None
    if isinstance(found, Newer):
        raise SessionError(
            f"{folder.path(MAIN)} was written by a newer version ({found.version}); upgrade, or delete the file"
        )
    backup = folder.read(BACKUP)
    if found is None:
        hint = f" A backup is there: rename {BACKUP} to {MAIN} to resume from it." if isinstance(backup, Valid) else ""
        return None, False, f"Nothing to resume: there is no checkpoint at {folder.path(MAIN)}.{hint}"
    if isinstance(backup, Valid):
        return backup, True, f"{MAIN} is corrupt ({found.reason}); this is the backup, {BACKUP}."
    raise SessionError(
        f"{folder.path(MAIN)} is corrupt: {found.reason}; there is no valid backup. The next save moves it to "
        f"{aside_name(found)}"
    )


def read_load_input(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The projectRoot of a load, and whether the whole checkpoint is asked for. Raises SessionError."""
    arguments = normal_arguments(arguments)
    check(arguments, schema)
    return arguments.get("projectRoot"), arguments.get("format") == "full"


def load(root: Root, *, environ: Mapping[str, str], seen: Seen) -> Loaded | str:
    """The checkpoint of a root and its drift, or one line that says there is nothing. Raises SessionError."""
    with Folder(root.path) as folder:
        valid, is_from_backup, message = read_best(folder)
    if valid is None:
        return message or ""
    checkpoint, warnings = valid.checkpoint, [message] if message else []
    if not is_from_backup:
        seen.note(root.path, checkpoint)
    world = look(root.path, environ)
    tracked = _tracked(world, BACKUP if is_from_backup else MAIN)
    untrusted = [UNTRUSTED] if tracked else []
    if valid.owner != os.geteuid():
        untrusted.append(FOREIGN)
    recorded_name, name = checkpoint["project"].get("name"), project_name(root.path)
    if recorded_name and recorded_name != name:
        recorded_name = cut(one_line(scrub(recorded_name)[0]), 80)
        warnings.append(f"It was saved in a project named {recorded_name}; this one is {name}.")
    drift, unknown = _measure(root.path, world, checkpoint, warnings)
    return Loaded(
        path=folder.path(MAIN),
        checkpoint=scrubbed(checkpoint, _SHOWN_TEXT),
        is_from_backup=is_from_backup,
        drift=drift,
        drift_unknown=unknown,
        untrusted=tuple(untrusted),
        is_tracked=tracked,
        warnings=tuple(one_line(clean(warning)) for warning in warnings),
    )


def _tracked(world: World, name: str) -> bool | None:
    """Whether git tracks the file; None where there is a repository that cannot be asked."""
    if not world.is_repository:
        return False
    try:
        return is_tracked(world.git, name)
    except GitError:
        return None


def _measure(root: str, world: World, checkpoint: Checkpoint, warnings: list[str]) -> tuple[Drift | None, str | None]:
    facts, snapshot = checkpoint["git"], world.snapshot
    if facts is None:
        was_repository = any(entry["source"] == "git" for entry in checkpoint["modifiedFiles"])
        if was_repository and snapshot and snapshot.head:
            warnings.append("There was no commit yet when this was saved; there are commits now.")
        return None, "the checkpoint has no git facts"
    if snapshot is None or snapshot.head is None:
        reason = world.trouble or ("the repository has no commit" if snapshot else "not a git repository")
        warnings.append(f"What changed since is unknown: {reason}.")
        return None, reason
    try:
        warnings += snapshot.warnings
        return measure(world.git, snapshot, checkpoint, facts, Hasher(root)), None
    except GitError as error:
        reason = scrub(one_line(str(error)))[0]
        warnings.append(f"What changed since is unknown: {reason}.")
        return None, reason


def to_brief(loaded: Loaded, now: datetime) -> Brief:
    return Brief(loaded.checkpoint, now, loaded.drift, loaded.untrusted, loaded.warnings)


def load_answer(root: Root, loaded: Loaded | str, *, is_full: bool, now: datetime) -> dict[str, Any]:
    """The structured answer of a load; `brief` or `checkpoint` is what its text says, too."""
    if isinstance(loaded, str):
        path = os.path.join(root.path, MAIN)
        return {
            "found": False,
            "path": visible(path),
            "fromBackup": False,
            "updatedAt": None,
            "drift": None,
            "warnings": [],
            "brief": one_line(clean(loaded)),
        }
    answer = {
        "found": True,
        "path": visible(loaded.path),
        "fromBackup": loaded.is_from_backup,
        "updatedAt": loaded.checkpoint["updatedAt"] or None,
        "drift": loaded.drift.as_json() if loaded.drift else None,
        "warnings": [*loaded.untrusted, *loaded.warnings],
    }
    if loaded.drift_unknown:
        answer["driftUnknown"] = loaded.drift_unknown
    if is_full:
        return answer | {"checkpoint": shown_checkpoint(loaded.checkpoint)}
    return answer | {"brief": render(to_brief(loaded, now))}


def shown_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its paths escaped where they would hide something."""
    entries = [
        {key: visible(value) if isinstance(value, str) else value for key, value in entry.items()}
        for entry in checkpoint["modifiedFiles"]
    ]
    return cast("Checkpoint", {**checkpoint, "modifiedFiles": entries})


def hook_text(loaded: Loaded | str, now: datetime) -> str:
    """What a SessionStart hook prints: nothing of a checkpoint that a repository brought along, or may have."""
    if isinstance(loaded, str):
        return one_line(clean(loaded))
    if loaded.is_tracked or FOREIGN in loaded.untrusted:
        return ""
    if loaded.is_tracked is None:
        return "A session checkpoint is here, but git could not tell whose it is: ask before loading it."
    return render_for_hook(to_brief(loaded, now))


# ------------------------------------------------------------------------------------------------------------ doctor


def describe_root(root: Root) -> str:
    """The root and what named it."""
    return f"{visible(root.path)} (from {root.source})"


def describe_git(world: World) -> str:
    """git's state in one line."""
    snapshot = world.snapshot
    if snapshot is None:
        return world.trouble or ("is not installed" if not world.git.is_installed else "not a git repository")
    place = f"branch {scrub(snapshot.branch)[0]}" if snapshot.branch else "detached HEAD"
    commit = snapshot.head[:9] if snapshot.head else "no commit yet"
    return f"{place}, {commit}, {len(snapshot.changes)} changed file(s)"


def describe_ignored(world: World) -> str:
    """Whether git would commit the checkpoint."""
    if world.snapshot is None:
        return "cannot be told" if world.is_repository else "not needed outside of a repository"
    return "; ".join(warning for warning in _ignore_warnings(world) if MAIN in warning) or "yes"


def describe_files(root: Root) -> tuple[str, str]:
    """The state of the checkpoint and of its backup, in a line each."""
    with Folder(root.path) as folder:
        return _health(folder, MAIN), _health(folder, BACKUP)


def _health(folder: Folder, name: str) -> str:
    try:
        found = folder.read(name)
    except SessionError as error:
        return f"unusable: {error}"
    match found:
        case None:
            return "none"
        case Valid():
            saved = found.checkpoint["updatedAt"] or "an unknown time"
            mode = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False).st_mode & 0o777
            return f"valid, {len(found.content):,} bytes, mode {mode:04o}, saved {saved}"
        case Damaged():
            return f"corrupt: {found.reason}"
        case Newer():
            return f"of a newer version: {found.version}"
