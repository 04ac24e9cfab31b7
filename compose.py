"""What a save makes of an agent's input, the recorded checkpoint and the measured facts. Pure: no clock, no file.

Order of treatment for every text: cleaned, redacted, then cut. Whatever is dropped is said in a warning, and the file
carries `truncated`.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

from checkpointfile import (
    FORMAT,
    MAX_BYTES,
    Checkpoint,
    Command,
    FileEntry,
    GitFacts,
    Task,
    blank,
    encode,
    is_deeper,
    normal,
)
from gitfacts import MAX_FILES, Change
from plaintext import cut, one_line, safe_path, scrub
from toolspec import SessionError

MAX_TASKS: Final = 30
MAX_DECISIONS: Final = 20
MAX_COMMANDS: Final = 50
MAX_COMMAND: Final = 1000
MAX_NOTE: Final = 300

_Item = TypeVar("_Item")

# -------------------------------------------------------------------------------------------------------- the input


class Given(NamedTuple):
    """A save's input, cleaned and redacted. None means that a member was not given."""

    goal: str
    tasks: list[dict[str, str]]
    summary: str | None
    next_steps: list[str] | None
    decisions: list[str] | None
    files: list[tuple[str, str | None]]  # path as given, note
    commands: list[Command]
    is_merge: bool
    project_root: str | None
    redactions: int
    is_cut: bool
    warnings: list[str]


def normal_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without null members and halves of surrogate pairs. Raises SessionError if they nest too deeply."""
    if is_deeper(arguments, 8):
        raise SessionError("arguments: nested deeper than 8 levels")
    return cast("dict[str, Any]", normal(arguments))


def check(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """The names of members that the schema does not know.

    Raises SessionError with one line for the first three faults: field, size and limit, never what the field holds.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise SessionError(f"cannot check the input: {error}; install jsonschema for this Python") from error
    faults = sorted(Draft202012Validator(schema).iter_errors(arguments), key=lambda fault: [*map(str, fault.path)])
    if faults:
        said = list(dict.fromkeys(_say(fault) for fault in faults))
        more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
        raise SessionError("; ".join(said[:3]) + more)
    return list(_unknown(arguments, schema, ""))


def _say(fault: Any) -> str:
    """One fault in our own words: those of jsonschema repeat the input."""
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault.path).lstrip(".")
    value, limit = fault.instance, fault.validator_value
    match fault.validator:
        case "required":
            missing = next(name for name in limit if name not in value)
            return f"{field}.{missing}: is required" if field else f"{missing}: is required"
        case "maxLength":
            return f"{field}: {len(value)} characters, the limit is {limit}"
        case "minLength":
            return f"{field}: must not be empty"
        case "maxItems":
            return f"{field}: {len(value)} items, the limit is {limit}"
        case "enum":
            return f"{field}: must be one of {', '.join(limit)}"
        case "type":
            return f"{field or 'arguments'}: must be of type {limit}, not {_TYPE_NAMES.get(type(value), 'null')}"
        case _:
            return f"{field}: the {fault.validator} is {limit}"


_TYPE_NAMES: Final = {str: "string", int: "number", float: "number", bool: "boolean", list: "array", dict: "object"}


def _unknown(value: Any, schema: Mapping[str, Any], path: str) -> Iterable[str]:
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, item in value.items():
            where = f"{path}.{name}" if path else name
            if name in known:
                yield from _unknown(item, known[name], where)
            else:
                yield cut(one_line(scrub(where)[0]), 80)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, schema.get("items", {}), f"{path}[{index}]")


class _Scrubber:
    """Cleans and redacts one text after the other, and counts."""

    def __init__(self) -> None:
        self.redactions = 0
        self.is_cut = False

    def text(self, text: str) -> str:
        redacted, count = scrub(text)
        self.redactions += count
        return redacted.strip()

    def short(self, text: str, limit: int) -> str:
        whole = self.text(text)
        self.is_cut |= len(whole) > limit
        return cut(whole, limit)

    def texts(self, items: Sequence[str] | None) -> list[str] | None:
        return None if items is None else [text for item in items if (text := self.text(item))]

    def task(self, task: Mapping[str, str]) -> dict[str, str]:
        return {name: self.text(text) for name, text in task.items() if name in _TASK_MEMBERS}

    def file(self, item: Mapping[str, str]) -> tuple[str, str | None]:
        return item["path"], self.short(item["note"], MAX_NOTE) if "note" in item else None

    def command(self, item: Mapping[str, Any]) -> Command:
        command = Command(command=self.short(item["command"], MAX_COMMAND))
        if "exitCode" in item:
            command["exitCode"] = int(item["exitCode"])
        if note := self.short(item.get("note", ""), MAX_NOTE):
            command["note"] = note
        return command


def read_input(arguments: Mapping[str, Any], unknown: Sequence[str]) -> Given:
    """The input of a save, from arguments that `check` let pass. Raises SessionError for a goal of nothing visible."""
    scrubber = _Scrubber()
    goal = scrubber.text(arguments["goal"])
    if not goal:
        raise SessionError("goal: must not be empty")
    tasks = map(scrubber.task, arguments.get("tasks", ()))
    commands = map(scrubber.command, arguments.get("recentCommands", ()))
    given = Given(
        goal=goal,
        tasks=[task for task in tasks if task["description"]],
        summary=None if "summary" not in arguments else scrubber.text(arguments["summary"]),
        next_steps=scrubber.texts(arguments.get("nextSteps")),
        decisions=scrubber.texts(arguments.get("decisions")),
        files=[scrubber.file(item) for item in arguments.get("modifiedFiles", ())],
        commands=[command for command in commands if command["command"]],
        is_merge=arguments.get("mode") == "merge",
        project_root=arguments.get("projectRoot"),
        redactions=0,
        is_cut=False,
        warnings=[f"Ignored unknown field(s): {', '.join(unknown[:10])}."] if unknown else [],
    )
    if scrubber.is_cut:
        given.warnings.append(f"Cut a command at {MAX_COMMAND:,} or a note at {MAX_NOTE} characters.")
    return given._replace(redactions=scrubber.redactions, is_cut=scrubber.is_cut)


_TASK_MEMBERS: Final = ("description", "status", "evidence")

# -------------------------------------------------------------------------------------------------------- the files


class Candidate(NamedTuple):
    """A file that may be listed, before its content was looked at."""

    entry: FileEntry
    change: Change | None  # what git says about it
    is_named: bool  # by the agent, now or with a note earlier
    carried: FileEntry | None = None  # its entry in the checkpoint that is merged into


def path_key(path: str) -> str:
    """What two spellings of one name have in common, composed and decomposed accents."""
    return path if path.isascii() else unicodedata.normalize("NFC", path)


def list_files(
    named: Sequence[tuple[str, str | None]],
    changes: Sequence[Change],
    recorded: Sequence[FileEntry],
    is_same_file: Callable[[str, str], bool],
) -> tuple[list[Candidate], int, int]:
    """The files of a checkpoint, at most 100; the number left out, and of those skipped for a secret in their path.

    Named files come first in the order they were named, then the git scan, then what a merge carries over. Where there
    are too many, named ones are kept before tracked ones, those before carried ones, and untracked ones go first.
    `is_same_file(given, path)` tells whether a spelling that git does not list means a path that it does.
    """
    by_path = {change.path: change for change in changes}
    spellings: dict[str, list[str]] = {}
    for path in by_path:
        spellings.setdefault(path_key(path).casefold(), []).append(path)
    earlier = {entry["path"]: entry for entry in recorded}
    listed: dict[str, Candidate] = {}

    def add(path: str, note: str | None, *, is_named: bool) -> None:
        change, carried = by_path.get(path), earlier.get(path)
        said_before = listed[path].entry if path in listed else carried
        if note is None and said_before is not None:
            note = said_before.get("note")
        entry = FileEntry(path=path, status=change.status if change else "M", source="git" if change else "agent")
        if note:
            entry["note"] = note
        listed[path] = Candidate(entry, change, is_named or bool(note), carried)

    for path, note in named:
        twins = [] if path in by_path else spellings.get(path_key(path).casefold(), [])
        add(next((twin for twin in twins if is_same_file(path, twin)), path), note, is_named=True)
    origins = {change.origin for change in changes if change.origin}
    for path in [*by_path, *(path for path in earlier if path not in origins)]:
        if path not in listed:
            add(path, None, is_named=False)
    return _choose(list(listed.values()))


def _choose(candidates: Sequence[Candidate]) -> tuple[list[Candidate], int, int]:
    kept: set[int] = set()
    secret = 0
    for index in sorted(range(len(candidates)), key=lambda index: _rank(candidates[index])):
        if len(kept) == MAX_FILES:
            break
        # Only as many as are kept: redaction takes its time, and there may be tens of thousands.
        if _has_secret(candidates[index]):
            secret += 1
        else:
            kept.add(index)
    chosen = [candidate for index, candidate in enumerate(candidates) if index in kept]
    return chosen, len(candidates) - len(kept) - secret, secret


def _has_secret(candidate: Candidate) -> bool:
    change = candidate.change
    return has_secret(candidate.entry["path"]) or bool(change and change.origin and has_secret(change.origin))


def _rank(candidate: Candidate) -> int:
    if candidate.is_named:
        return 0
    if candidate.change is None:
        return 2
    return 3 if candidate.entry["status"] == "??" else 1


def finish_entry(candidate: Candidate, blob: str | None, kind: str, moved_from: str | None) -> FileEntry:
    """The entry with what was found at its path: its hash, and a state that git has no more to say about."""
    entry, change, carried = candidate.entry, candidate.change, candidate.carried
    finished = entry.copy()
    if change is None and carried is not None and kind == "absent" and (carried["status"] == "D" or "hash" in carried):
        finished["status"] = "D"  # deleted and committed, or deleted outside of git
    elif change and change.status == "D":
        blob = None
    if blob is not None:
        finished["hash"] = blob
    if moved_from:
        finished["status"] = "R"
    said_kind = change.kind if change else carried.get("kind") if carried else None
    if said_kind in (None, "link"):
        said_kind = "link" if kind == "link" and blob else None
    if said_kind:
        finished["kind"] = said_kind
    old = moved_from or (change.origin if change else None)
    if old:
        cast("dict[str, Any]", finished)["from"] = old
    return finished


# --------------------------------------------------------------------------------------------------- the checkpoint


class Facts(NamedTuple):
    """What the server adds to what the agent said."""

    now: str
    fresh_id: str
    generator: dict[str, str]
    project: str
    git: GitFacts | None
    files: list[FileEntry]
    named_paths: frozenset[str]  # files that the agent named


class Composed(NamedTuple):
    checkpoint: Checkpoint
    content: bytes
    warnings: list[str]


def compose(given: Given, previous: Checkpoint | None, facts: Facts, *, is_cut: bool) -> Composed:
    """The checkpoint and its bytes, at most 64 KB. Raises SessionError for what cannot be kept within the limits."""
    old = previous or blank()
    tasks, gone_tasks = _merge_tasks(given.tasks, old["goal"]["tasks"])
    unique: dict[str, str] = {}
    for text in [*old["decisions"], *(given.decisions or [])]:
        unique.setdefault(_task_key(text), text)
    decisions, gone_decisions = _newest(list(unique.values()), MAX_DECISIONS)
    for command in given.commands:
        command["at"] = facts.now
    commands, gone_commands = _newest([*old["recentCommands"], *given.commands], MAX_COMMANDS)
    gone = (
        (gone_tasks, "done task(s)", MAX_TASKS),
        (gone_decisions, "decision(s)", MAX_DECISIONS),
        (gone_commands, "command(s)", MAX_COMMANDS),
    )
    warnings = [f"Dropped the oldest {count} {what} beyond {limit}." for count, what, limit in gone if count]
    known: dict[str, Any] = {
        "version": FORMAT,
        "id": old["id"] or facts.fresh_id,
        "createdAt": old["createdAt"] or facts.now,
        "updatedAt": facts.now,
        "generator": facts.generator,
        "project": {"name": facts.project},
        "git": facts.git,
        "goal": {**old["goal"], "primary": given.goal, "tasks": tasks},
        "summary": old.get("summary") if given.summary is None else given.summary,
        "nextSteps": old["nextSteps"] if given.next_steps is None else given.next_steps,
        "decisions": decisions,
        "modifiedFiles": facts.files,
        "recentCommands": commands,
        "meta": {"redactions": given.redactions, "truncated": old["meta"]["truncated"] or is_cut or bool(warnings)},
    }
    strangers = {key: value for key, value in old.items() if key not in known}
    if not known["summary"]:
        del known["summary"]
    checkpoint = cast("Checkpoint", known | strangers)
    content, said = fit(checkpoint, facts.named_paths)
    return Composed(checkpoint, content, warnings + said)


def _newest(items: list[_Item], limit: int) -> tuple[list[_Item], int]:
    """The last items, and the number of those before them."""
    return items[-limit:], max(0, len(items) - limit)


def _task_key(description: str) -> str:
    return path_key(one_line(description))


def _merge_tasks(given: Sequence[Mapping[str, str]], recorded: Sequence[Task]) -> tuple[list[Task], int]:
    """The tasks of both, at most 30, and the number of done ones that had to go."""
    tasks: dict[str, Task] = {_task_key(task["description"]): task for task in recorded}
    for task in given:
        key = _task_key(task["description"])
        old, status = tasks.get(key), task.get("status", "pending")
        merged: Task = old.copy() if old else {"description": task["description"], "status": status}
        # Evidence proves a state: it goes with it, or when an empty one is given.
        if status != merged["status"] or "evidence" in task:
            merged.pop("evidence", None)
        merged["status"] = status
        if evidence := task.get("evidence"):
            merged["evidence"] = evidence
        tasks[key] = merged
    kept = list(tasks.values())
    excess = max(0, len(kept) - MAX_TASKS)
    done = [index for index, task in enumerate(kept) if task["status"] == "done"]
    if len(done) < excess:
        raise SessionError(
            f"tasks: {len(kept) - len(done)} unfinished after the merge, the limit is {MAX_TASKS}; "
            "mark some as done, or save with mode replace"
        )
    dropped = set(done[:excess])
    return [task for index, task in enumerate(kept) if index not in dropped], excess


# ---------------------------------------------------------------------------------------------------------- 64 KB


def fit(checkpoint: Checkpoint, named_paths: frozenset[str]) -> tuple[bytes, list[str]]:
    """The bytes of a checkpoint that is cut, in place, to at most 64 KB, and a warning for each kind of cut.

    What goes first: commands, oldest first; untracked files; other files without a note; notes of files; done tasks;
    decisions; the end of the summary; files that the agent named. Goal, open tasks and next steps stay: raises
    SessionError naming the largest of them where they alone are too large.
    """
    content, warnings = encode(checkpoint), []
    for drop in _DROPS:
        if len(content) <= MAX_BYTES:
            break
        if said := drop(checkpoint, named_paths, len(content) - MAX_BYTES):
            warnings.append(f"{said} to keep the file within {MAX_BYTES:,} bytes.")
            checkpoint["meta"]["truncated"] = True
            content = encode(checkpoint)
    if len(content) <= MAX_BYTES:
        return content, warnings
    sizes = {
        "goal": len(checkpoint["goal"]["primary"].encode()),
        "tasks": sum(_written_bytes(task) for task in checkpoint["goal"]["tasks"]),
        "nextSteps": sum(len(text.encode()) for text in checkpoint["nextSteps"]),
    }
    biggest = max(sizes, key=lambda name: sizes[name])
    raise SessionError(
        f"{biggest}: {sizes[biggest]:,} bytes; the checkpoint would have {len(content):,} bytes, "
        f"the limit is {MAX_BYTES:,}"
    )


def _drop_items(items: list[Any], victims: Iterable[int], excess: int, saying: str) -> str:
    """Removes items in this order until the file fits or none is left. Says how many."""
    gone: set[int] = set()
    for victim in victims:
        if excess <= 0:
            break
        gone.add(victim)
        excess -= _written_bytes(items[victim])
    items[:] = [item for index, item in enumerate(items) if index not in gone]
    return saying.format(len(gone)) if gone else ""


def _written_bytes(item: Any) -> int:
    """What an item of a list at the top of the file takes there: a lower bound for a list further in."""
    text = json.dumps(item, ensure_ascii=False, indent=2)
    return len(text.encode()) + 4 * (text.count("\n") + 1) + len(",\n")


# Each drops enough of one kind to save `excess` bytes, or all of it, and says what went.


def _drop_commands(checkpoint: Checkpoint, _: frozenset[str], excess: int) -> str:
    items = checkpoint["recentCommands"]
    return _drop_items(items, range(len(items)), excess, "Dropped the oldest {} command(s)")


def _drop_untracked(checkpoint: Checkpoint, named: frozenset[str], excess: int) -> str:
    items = checkpoint["modifiedFiles"]
    victims = [index for index, entry in enumerate(items) if entry["status"] == "??" and entry["path"] not in named]
    return _drop_items(items, reversed(victims), excess, "Dropped {} untracked file(s)")


def _drop_tracked(checkpoint: Checkpoint, named: frozenset[str], excess: int) -> str:
    items = checkpoint["modifiedFiles"]
    victims = [index for index, entry in enumerate(items) if "note" not in entry and entry["path"] not in named]
    return _drop_items(items, reversed(victims), excess, "Dropped {} changed file(s)")


def _drop_notes(checkpoint: Checkpoint, _: frozenset[str], excess: int) -> str:
    count = 0
    for entry in reversed(checkpoint["modifiedFiles"]):
        if excess <= 0:
            break
        note = entry.pop("note", None)
        if note is not None:
            count += 1
            excess -= len(json.dumps(note, ensure_ascii=False).encode()) + len('      "note": ,\n')
    return f"Dropped the note(s) of {count} file(s)" if count else ""


def _drop_done_tasks(checkpoint: Checkpoint, _: frozenset[str], excess: int) -> str:
    items = checkpoint["goal"]["tasks"]
    victims = [index for index, task in enumerate(items) if task["status"] == "done"]
    return _drop_items(items, victims, excess, "Dropped the oldest {} done task(s)")


def _drop_decisions(checkpoint: Checkpoint, _: frozenset[str], excess: int) -> str:
    items = checkpoint["decisions"]
    return _drop_items(items, range(len(items)), excess, "Dropped the oldest {} decision(s)")


def _cut_summary(checkpoint: Checkpoint, _: frozenset[str], excess: int) -> str:
    whole = checkpoint.get("summary", "")
    low, high = 0, len(whole)  # the longest head of it with which the file fits
    while low < high:
        middle = (low + high + 1) // 2
        checkpoint["summary"] = cut(whole, middle)
        low, high = (middle, high) if len(encode(checkpoint)) <= MAX_BYTES else (low, middle - 1)
    if low:
        checkpoint["summary"] = cut(whole, low)
    else:
        checkpoint.pop("summary", None)
    return f"Cut the summary from {len(whole):,} to {low:,} characters" if whole else ""


def _drop_named(checkpoint: Checkpoint, _: frozenset[str], excess: int) -> str:
    items = checkpoint["modifiedFiles"]
    return _drop_items(items, reversed(range(len(items))), excess, "Dropped {} file(s) that were named")


_DROPS: Final = (
    _drop_commands,
    _drop_untracked,
    _drop_tracked,
    _drop_notes,
    _drop_done_tasks,
    _drop_decisions,
    _cut_summary,
    _drop_named,
)


def scrubbed(checkpoint: Checkpoint, limit: int | None = None) -> Checkpoint:
    """A recorded checkpoint, cleaned and redacted once more, since anybody may have edited it; texts cut at `limit`.

    Paths stay as they are, except for one that holds a secret: whoever shows one escapes it. Keys stay, too: `decode`
    lets none pass that would change, and one that did could take the place of another.
    """

    def text(value: str) -> str:
        redacted = scrub(value)[0]
        return redacted if limit is None else cut(redacted, limit)

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str):
            return safe_path(value) if key in ("path", "from") else text(value)
        if isinstance(value, list):
            return [walk(item, key) for item in value]
        if isinstance(value, dict):
            return {name: walk(item, name) for name, item in value.items()}
        return value

    return cast("Checkpoint", walk(checkpoint, ""))


def to_merge_into(checkpoint: Checkpoint) -> Checkpoint:
    """A recorded checkpoint as a merge goes on from it: scrubbed, without files whose path holds a secret."""
    safe = scrubbed(checkpoint)
    pairs = zip(checkpoint["modifiedFiles"], safe["modifiedFiles"], strict=True)
    safe["modifiedFiles"] = [entry for recorded, entry in pairs if recorded["path"] == entry["path"]]
    return safe


def has_secret(path: str) -> bool:
    """Whether a path holds something that redaction would replace."""
    return scrub(path)[1] > 0


def project_name(root: str) -> str:
    """The name of a project, from its folder."""
    return one_line(scrub(root.rstrip("/").rpartition("/")[2])[0]) or "/"
