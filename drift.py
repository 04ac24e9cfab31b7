"""Where a checkpoint and the world disagree: content first, history only by ancestry."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from checkpointfile import Checkpoint, FileEntry, GitFacts, origin, parse_time
from gitfacts import MAX_FILES, Git, History, Snapshot, collapse, committed_since, history, submodule_head
from plaintext import safe_path, scrub, visible
from worktree import Hasher, State, changed_at_ms

MAX_NEW: Final = 20


class Drift(NamedTuple):
    """What changed since a checkpoint was saved. Secrets are redacted; whoever shows paths escapes them."""

    saved_branch: str | None
    branch: str | None
    saved_head: str
    history: History
    changed: tuple[str, ...]  # recorded files whose content, type or existence differs, in the order of the file
    deleted: frozenset[str]  # those of them that are gone
    restored: frozenset[str]  # those of them that were gone at save and are back
    unchecked: tuple[str, ...]  # recorded files without a hash, or whose content could not be read
    new: tuple[str, ...]  # files that are not in the checkpoint and changed since
    new_left_out: int

    @property
    def is_nothing(self) -> bool:
        return not (self.changed or self.new or self.history.commits != 0 or self.is_branch_changed)

    @property
    def is_branch_changed(self) -> bool:
        return self.saved_branch != self.branch

    def as_json(self) -> dict[str, Any]:
        """The `drift` member of an answer."""
        past = self.history
        where = "ancestor" if past.is_ancestor else "elsewhere" if past.holder else "unreachable"
        return {
            "branchChanged": self.is_branch_changed,
            "currentBranch": self.branch,
            "commitsSince": past.commits,
            "changedSince": [visible(path) for path in self.changed],
            "newSince": [visible(path) for path in self.new],
            "deleted": [visible(path) for path in self.changed if path in self.deleted],
            "restored": [visible(path) for path in self.changed if path in self.restored],
            "notChecked": [visible(path) for path in self.unchecked],
            "savedCommit": where,
            "newCommits": [f"{commit} {subject}" for commit, subject in past.subjects],
        }


def measure(git: Git, snapshot: Snapshot, checkpoint: Checkpoint, facts: GitFacts, hasher: Hasher) -> Drift:
    """The drift of a checkpoint that was saved with git facts. Raises GitError if git stops answering."""
    past = history(git, facts["head"])
    fates, unchecked = _fates(git, checkpoint["modifiedFiles"], hasher)
    names = list(_names_since(git, snapshot, facts["head"], hasher))
    new, left_out = _not_recorded(git.root, names, checkpoint)
    # The file may have been edited by anybody, so what it names is redacted like what git names.
    return Drift(
        saved_branch=facts["branch"] and scrub(facts["branch"])[0],
        branch=snapshot.branch and scrub(snapshot.branch)[0],
        saved_head=facts["head"],
        history=past._replace(
            subjects=tuple((commit, scrub(subject)[0]) for commit, subject in past.subjects),
            holder=past.holder and scrub(past.holder)[0],
        ),
        changed=tuple(map(safe_path, fates)),
        deleted=frozenset(safe_path(path) for path, fate in fates.items() if fate == "deleted"),
        restored=frozenset(safe_path(path) for path, fate in fates.items() if fate == "restored"),
        unchecked=tuple(map(safe_path, unchecked)),
        new=tuple(new),
        new_left_out=left_out,
    )


def _fates(git: Git, entries: Sequence[FileEntry], hasher: Hasher) -> tuple[dict[str, str], Iterable[str]]:
    """What became of recorded files, where that is not nothing, and those of which nothing can be said.

    An edited file may record anything: each path is looked at once, and no more of them than a save records.
    """
    fates: dict[str, str] = {}
    unchecked: dict[str, None] = {}
    recorded = {entry["path"]: entry for entry in reversed(entries)}
    for number, (path, entry) in enumerate(reversed(recorded.items())):
        verdict = judge(entry, state_of(git, entry, hasher)) if number < MAX_FILES else None
        if verdict is None:
            unchecked[path] = None
        elif verdict:
            fates[path] = verdict
        old = origin(entry) if number < MAX_FILES else None
        if old is not None and old not in recorded and hasher.state(old).kind in ("file", "link"):
            fates[old] = "restored"
    return fates, unchecked


def state_of(git: Git, entry: FileEntry, hasher: Hasher) -> State:
    """What is at an entry's path now, with the checked out commit where the entry is a submodule."""
    kind, recorded = entry.get("kind"), entry.get("hash", "")
    state = hasher.state(entry["path"], "sha256" if len(recorded) == 64 and kind != "submodule" else "sha1")
    if kind == "submodule" and state.kind == "dir":
        return State("dir", submodule_head(git, entry["path"]))
    return state


def judge(entry: FileEntry, state: State) -> str | None:
    """ "" for the same, "changed", "deleted", "restored", or None where nothing can be said."""
    recorded = entry.get("hash")
    if state.why is not None:
        return None
    if entry["status"] == "D" and recorded is None:
        return "restored" if state.kind in ("file", "link") or (state.kind == "dir" and state.blob) else ""
    if recorded is None:
        return None
    if state.kind == "absent":
        return "deleted"
    if entry.get("kind") == "submodule" and state.kind == "dir" and state.blob is None:
        return None
    is_link_too = (entry.get("kind") == "link") == (state.kind == "link")
    return "" if state.blob == recorded and is_link_too else "changed"


def _names_since(git: Git, snapshot: Snapshot, saved: str, hasher: Hasher) -> Iterable[str]:
    """Names that differ from the saved commit, untracked ones included, big untracked folders as one name."""
    changes, _ = collapse(snapshot)
    committed = committed_since(git, saved) or {}  # where git does not have that commit, HEAD is all there is to go by
    uncommitted = {change.path: change.remoded for change in changes}
    yield from (path for path in committed if path not in uncommitted)
    for path, head_blob in uncommitted.items():
        # An edit may have taken back what was committed since, and a changed mode is no changed content.
        same = committed.get(path, head_blob)
        if same is None or hasher.state(path, snapshot.object_format).blob != same:
            yield path


def _not_recorded(root: str, names: Iterable[str], checkpoint: Checkpoint) -> tuple[list[str], int]:
    """Up to 20 names that no entry of the checkpoint stands for and that hold no secret, and the number of the rest."""
    entries = checkpoint["modifiedFiles"]
    recorded = {entry["path"] for entry in entries} | {old for entry in entries if (old := origin(entry))}
    folders = tuple(path for path in recorded if path.endswith("/"))
    saved_at = parse_time(checkpoint["updatedAt"])
    new: list[str] = []
    left_out = 0
    for name in names:
        if name in recorded or name.startswith(folders):
            continue
        if checkpoint["meta"]["truncated"] and saved_at:
            # It may have been dropped for its size, so that only the clock can tell.
            changed_ms = changed_at_ms(root, name)
            if changed_ms is None or changed_ms <= saved_at.timestamp() * 1000:
                continue
        if len(new) == MAX_NEW:
            left_out += 1
        elif not scrub(name)[1]:
            new.append(name)
    return new, left_out
