"""The two tools at work: root, git, files and the checkpoint joined. Knows no protocol; imported at the first call."""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

from brief import FOREIGN, NOTES, UNTOLD, UNTRUSTED, Brief, age, render, render_for_hook
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
    format_time,
    is_own_file,
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
    MAX_FILES,
    Git,
    GitError,
    Snapshot,
    collapse,
    not_ignored,
    pair_moves,
    submodule_head,
    take_snapshot,
    tracked,
)
from plaintext import clean, cut, one_line, scrub, shown, visible
from projectroot import Root
from toolspec import SessionError
from worktree import Hasher, State, is_inside, is_same_file, place_named

_FOREIGN_HOURS: Final = 24
_MERGED: Final = {
    UNTRUSTED: "Merged into notes that came with the repository.",
    UNTOLD: "Merged into notes that may have come with the repository: git could not tell.",
    FOREIGN: "Merged into notes of another user of this machine.",
}
_SHOWN_TEXT: Final = 8_000  # characters; twice the longest that a save takes: only an edited file has more

# ------------------------------------------------------------------------------------------------- what git can tell


class World(NamedTuple):
    """git's view of the root, or why there is none."""

    git: Git
    snapshot: Snapshot | None
    trouble: str | None  # one line; None outside of a repository, where nothing is wrong
    is_repository: bool
    tracked: frozenset[str] | None  # of MAIN and BACKUP, those that git has; None where it should know and cannot tell

    def has(self, name: str) -> bool | None:
        """Whether git has this file of ours; None where it should know and cannot tell."""
        return None if self.tracked is None else name in self.tracked


def look(root: str, environ: Mapping[str, str]) -> World:
    git = Git(root, environ)
    names = None
    try:
        names = tracked(git, (MAIN, BACKUP))  # first: after a scan that is too slow, git is asked nothing more
        return World(git, take_snapshot(git), None, True, names)
    except GitError as error:
        if error.is_plain or not (git.is_installed or _has_repository(root)):
            return World(git, None, None, False, frozenset())
        return World(git, None, scrub(one_line(str(error)))[0], True, names)


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
    world = look(root.path, environ)
    with Folder(root.path) as folder, folder.locked() as lock_warnings:
        ground = _ground(folder, given, world, seen, now())
        scan = _scan(root.path, given, world, ground.previous)
        facts = Facts(
            now=format_time(now()),
            fresh_id=str(uuid.uuid4()),
            generator=dict(generator),
            project=project_name(root.path),
            git=_git_facts(world.snapshot),
            files=scan.entries,
            named_paths=scan.named_paths,
        )
        composed = compose(given, ground.previous, facts, is_cut=scan.is_cut or given.is_cut)
        disk_warnings = folder.replace(composed.content, ground.found)
    seen.note(root.path, composed.checkpoint)
    warnings = [
        *given.warnings,
        *_place_warnings(root, world, environ),
        *lock_warnings,
        *ground.warnings,
        *scan.warnings,
        *composed.warnings,
        *disk_warnings,
        *([f"Redacted {given.redactions} secret-looking value(s)."] if given.redactions else []),
        *_ignore_warnings(world),
    ]
    return _save_answer(folder.path(MAIN), given, composed.checkpoint, len(composed.content), _said(warnings))


def _place_warnings(root: Root, world: World, environ: Mapping[str, str]) -> list[str]:
    warnings = []
    if root.is_fallback and root.path == os.path.realpath(environ.get("HOME") or "/"):
        warnings.append(
            "Saved in the home directory, where the server was started: pass projectRoot or set "
            "CHECKPOINT_PROJECT_ROOT for a project."
        )
    if world.trouble:
        warnings.append(f"{world.trouble}; saved without git facts.")
    return warnings


def _git_facts(snapshot: Snapshot | None) -> GitFacts | None:
    if snapshot is None or snapshot.head is None:
        return None
    branch = None if snapshot.branch is None else scrub(snapshot.branch)[0]
    return GitFacts(branch=branch, head=snapshot.head, dirty=snapshot.is_dirty)


class _Ground(NamedTuple):
    """What a save stands on: what is in the way of the new file, and the checkpoint that a merge goes on from."""

    found: Found
    previous: Checkpoint | None = None
    warnings: Sequence[str] = ()


def _ground(folder: Folder, given: Given, world: World, seen: Seen, now: datetime) -> _Ground:
    found = folder.read(MAIN)
    match found:
        case None:
            return _Ground(None, None, ["Nothing to merge into; saved as new."] if given.is_merge else [])
        case Valid() if given.is_merge:
            return _merged(found, world, MAIN, found)
        case Valid():
            return _Ground(found, None, _foreign_warnings(found.checkpoint, folder.root, seen, now))
        case Newer() if given.is_merge:
            raise SessionError(
                f"{folder.path(MAIN)} was written by a newer version ({found.version}); "
                "upgrade, or save with mode replace"
            )
        case Newer():
            said = f"The checkpoint of a newer version ({found.version}) was moved to {folder.aside_name(found)}."
            return _Ground(found, None, [said])
        case Damaged():
            said = f"{MAIN} was corrupt ({found.reason}) and was moved to {folder.aside_name(found)}"
            backup = folder.read(BACKUP) if given.is_merge else None
            if isinstance(backup, Valid):
                return _merged(found, world, BACKUP, backup, f"{said}; merged into {BACKUP}.")
            return _Ground(found, None, [f"{said}; nothing to merge into." if given.is_merge else f"{said}."])


def _merged(found: Found, world: World, name: str, valid: Valid, *warnings: str) -> _Ground:
    marks = [_MERGED[mark] for mark in _marks(world, name, valid)]
    return _Ground(found, to_merge_into(valid.checkpoint), [*warnings, *marks])


def _foreign_warnings(checkpoint: Checkpoint, root: str, seen: Seen, now: datetime) -> list[str]:
    """What to say about a checkpoint that is replaced: something where another session may still need it."""
    saved = parse_time(checkpoint["updatedAt"])
    if saved is None or seen.has(root, checkpoint) or (now - saved).total_seconds() >= _FOREIGN_HOURS * 3600:
        return []
    goal = cut(one_line(scrub(checkpoint["goal"]["primary"])[0]), 80)
    return [f"Replaced another session's checkpoint (goal: {goal}, {age(now, saved)}); it is kept as {BACKUP}."]


class _Scan(NamedTuple):
    """The files of a new checkpoint."""

    entries: list[FileEntry]
    named_paths: frozenset[str]
    is_cut: bool  # some were left out
    warnings: Sequence[str]


def _scan(root: str, given: Given, world: World, previous: Checkpoint | None) -> _Scan:
    snapshot = world.snapshot
    changes, collapsed = collapse(snapshot) if snapshot else ([], [])
    named, refused = _named(root, given)
    recorded = [
        entry
        for entry in (previous["modifiedFiles"] if previous else [])
        if is_inside(root, entry["path"]) and not is_own_file(entry["path"])
    ]
    candidates, left_out, secret = list_files(
        named, changes, recorded, lambda one, other: is_same_file(root, one, other)
    )
    entries, unread = _hashed(root, candidates, world)
    counted = (
        (refused, "Skipped {} file(s) outside of the project root or inside .git."),
        (secret, "Skipped {} file(s) whose path looks like it holds a secret."),
        (left_out, f"Left out {{}} changed file(s): a checkpoint lists at most {MAX_FILES}."),
        (unread.count("large"), "{} large file(s) not hashed; drift unknown."),
        (unread.count("slow"), "{} file(s) not hashed for lack of time; drift unknown."),
    )
    return _Scan(
        entries,
        frozenset(candidate.entry["path"] for candidate in candidates if candidate.is_named),
        bool(left_out or collapsed),
        [
            *(snapshot.warnings if snapshot else ()),
            *collapsed,
            *(saying.format(count) for count, saying in counted if count),
        ],
    )


def _named(root: str, given: Given) -> tuple[list[tuple[str, str | None]], int]:
    """The files that the agent named, by their paths below the root, and the number of those that have none."""
    named = []
    for path, note in given.files:
        place = place_named(root, path)
        if place is not None and not is_own_file(place):
            named.append((place, note))
    return named, len(given.files) - len(named)


def _hashed(root: str, candidates: Sequence[Candidate], world: World) -> tuple[list[FileEntry], list[str]]:
    """The entries with what is on the disk, and why some of them have no hash."""
    hasher = Hasher(root)
    object_format = world.snapshot.object_format if world.snapshot else "sha1"
    states = [_state(candidate, hasher, world.git, object_format) for candidate in candidates]
    seen = [(candidate.change, state) for candidate, state in zip(candidates, states, strict=True) if candidate.change]
    moves = pair_moves(seen)
    entries = []
    for candidate, state in zip(candidates, states, strict=True):
        path = candidate.entry["path"]
        is_gone_folder = candidate.change is None and state.kind == "absent" and path.endswith("/")
        if path not in moves.values() and not is_gone_folder:
            entries.append(finish_entry(candidate, state.blob, state.kind, moves.get(path)))
    return entries, [state.why for state in states if state.why]


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
    if world.tracked:
        names = sorted(world.tracked)
        return [
            *warnings,
            f"{_are(names)} tracked by git: run git rm --cached {' '.join(names)}, then ignore {MAIN}*.",
        ]
    try:
        names = not_ignored(world.git, (MAIN, BACKUP))
    except GitError:  # then nothing can be said; the reason is in the warnings already where it matters
        return warnings
    if names:
        warnings.append(
            f"{_are(names)} not git-ignored: add {MAIN}* to .gitignore, or to .git/info/exclude to keep that private."
        )
    return warnings


def _are(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _save_answer(path: str, given: Given, checkpoint: Checkpoint, size: int, warnings: list[str]) -> dict[str, Any]:
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
        *(f"⚠ {warning}" for warning in warnings),
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
        f"{folder.aside_name(found)}"
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
    name = BACKUP if is_from_backup else MAIN
    recorded_name, project = checkpoint["project"].get("name"), project_name(root.path)
    if recorded_name and recorded_name != project:
        recorded_name = cut(one_line(scrub(recorded_name)[0]), 80)
        warnings.append(f"It was saved in a project named {recorded_name}; this one is {project}.")
    drift, unknown, drift_warnings = _measure(root.path, world, checkpoint)
    return Loaded(
        path=folder.path(MAIN),
        checkpoint=scrubbed(checkpoint, _SHOWN_TEXT),
        is_from_backup=is_from_backup,
        drift=drift,
        drift_unknown=unknown,
        untrusted=tuple(_marks(world, name, valid)),
        is_tracked=world.has(name),
        warnings=tuple(_said([*warnings, *drift_warnings])),
    )


def _marks(world: World, name: str, valid: Valid) -> list[str]:
    """Why a checkpoint may be a stranger's."""
    is_tracked = world.has(name)
    marks = [] if is_tracked is False else [UNTRUSTED if is_tracked else UNTOLD]
    return marks if valid.owner == os.geteuid() else [*marks, FOREIGN]


def _said(warnings: Iterable[str]) -> list[str]:
    """The warnings as they may be shown: names of folders and branches are in them."""
    return [one_line(scrub(warning)[0]) for warning in warnings]


def _measure(root: str, world: World, checkpoint: Checkpoint) -> tuple[Drift | None, str | None, Sequence[str]]:
    """The drift, or None and why it cannot be told, and warnings."""
    facts, snapshot = checkpoint["git"], world.snapshot
    if facts is None:
        was_repository = any(entry["source"] == "git" for entry in checkpoint["modifiedFiles"])
        late = "There was no commit yet when this was saved; there are commits now."
        has_commits_now = was_repository and snapshot and snapshot.head
        return None, "the checkpoint has no git facts", [late] if has_commits_now else []
    warnings = snapshot.warnings if snapshot else ()
    if snapshot is None or snapshot.head is None:
        reason = world.trouble or ("the repository has no commit" if snapshot else "not a git repository")
    else:
        try:
            return measure(world.git, snapshot, checkpoint, facts, Hasher(root)), None, warnings
        except GitError as error:
            reason = scrub(one_line(str(error)))[0]
    return None, reason, [*warnings, f"What changed since is unknown: {reason}."]


def to_brief(loaded: Loaded, now: datetime) -> Brief:
    return Brief(loaded.checkpoint, now, loaded.drift, loaded.untrusted, loaded.warnings, visible(loaded.path))


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


class Texts(NamedTuple):
    """The text of a load's answer, which is enough without the structured one. A brief says all of it in `main`."""

    main: str
    before: str = ""
    after: str = ""


def load_texts(answer: Mapping[str, Any]) -> Texts:
    if "checkpoint" not in answer:
        return Texts(answer["brief"])
    content = {name: answer[name] for name in ("checkpoint", "drift")}
    warnings = [f"⚠ {warning}" for warning in answer["warnings"]]
    return Texts(
        json.dumps(content, ensure_ascii=False, indent=2),
        before="\n".join([*warnings, NOTES] if warnings else []),
        after=f"Read from {shown(answer['path'])}.",
    )


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
