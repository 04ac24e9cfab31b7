#!/usr/bin/env python3
"""Breaks the decision table, the order on disk and the lock, one rule at a time; every broken program must fail its tests.

    scripts/mutants.py            all of them, some ten minutes
    scripts/mutants.py --quick    some of each kind, drawn by --seed

A mutant is a copy of the project in which one piece of text is another. Exit code 1 if one survives.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from states import DECISIONS, Action  # noqa: E402  # the path comes first

COPIED: Final = ("*.py", "pyproject.toml", "tests", "scripts", "README.md", "AGENTS.md", "docs")
DEADLINE_S: Final = 300
# Of each mutant, the tests that must fail, the quickest first.
TESTS: Final = {
    "states.py": ("tests/test_journal.py", "tests/test_readme.py"),
    "turn.py": (
        *("tests/test_turn.py", "tests/test_relay.py", "tests/test_calls.py", "tests/test_workflows.py"),
        "tests/test_crash.py",
    ),
    "storage.py": ("tests/test_storage.py",),
    "journal.py": ("tests/test_storage.py",),
    "eventloop.py": ("tests/test_eventloop.py",),
    "calls.py": ("tests/test_calls.py", "tests/test_interleavings.py"),
}
# (file, what is there, what is put in its place)
BY_HAND: Final = (
    # the order on disk
    ("turn.py", "        self._commit()\n        self.up.flush()\n", "        self.up.flush()\n        self._commit()\n"),
    ("turn.py", "        self._commit()\n        self.up.flush()", "        self.up.flush()"),
    ("turn.py", "        if self._waiting:\n            self._waiting.append(line)", "        if False:\n            pass"),
    ("turn.py", "journal.append([*facts, *map(Delivered, self._read), *riding])", "journal.append([*facts])"),
    ("turn.py", "        self._read.clear()\n", "        pass\n"),
    ("turn.py", "            self._wait_for_database(error)\n            return", "            return"),
    ("turn.py", "                held.when_refused(held.slot, error)\n            return", "                held.when_on_disk(held.slot)\n            return"),
    ("turn.py", '("before_reserve", "before_complete")', '("before_complete",)'),
    ("turn.py", '("before_reserve", "before_complete")', '("before_reserve",)'),
    ("turn.py", '("after_reserve", "after_complete")', '("after_complete",)'),
    ("turn.py", '("after_reserve", "after_complete")', '("after_reserve",)'),
    ("turn.py", '"before_complete": Answered', '"before_complete": Dispatched'),
    ("turn.py", "return self.is_due and self._retry is None", "return self.is_due"),
    ("eventloop.py", "            self.is_in_turn = True\n", ""),
    ("eventloop.py", "        self._turns.is_in_turn = False\n", ""),
    ("eventloop.py", "            self.call_soon(self._run_callbacks)\n", ""),
    ("calls.py", "        if isinstance(fact, Answered) and flight.is_given_up:", "        if False:"),
    ("turn.py", "late = [held for held in self._held if held.deadline <= now]", "late: list[_Held] = []"),
    ("turn.py", "self._held = [held for held in kept if not held.speaks_of(refused)]", "self._held = kept"),
    ("turn.py", "            self._retry = self._loop.call_later(RETRY_S, self.end)", "            pass"),
    ("turn.py", "                item.is_open = False\n", "                pass\n"),
    ("turn.py", "                    item.position = position\n", "                    item.position = 0\n"),
    # the lock
    ("storage.py", "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ("storage.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
    ("storage.py", "        if not self.is_held():  # it was replaced between open and flock", "        if False:"),
    ("storage.py", "os.O_CLOEXEC | os.O_NOFOLLOW, 0o600", "os.O_CLOEXEC | os.O_NOFOLLOW, 0o666"),
    ("storage.py", "os.O_CLOEXEC | os.O_NOFOLLOW, 0o600", "os.O_CLOEXEC, 0o600"),
    ("storage.py", "            os.close(self._fd)\n            self._fd = None", "            os.unlink(self._path)\n            os.close(self._fd)\n            self._fd = None"),
    ("storage.py", '        "synchronous = FULL",', '        "synchronous = NORMAL",'),
    ("storage.py", '        "wal_autocheckpoint = 0",', '        "wal_autocheckpoint = 1000",'),
    ("journal.py", "            and self._lock.is_held()\n", ""),
    ("journal.py", "            inode_of(self._files.path) == self._inode\n            and ", "            "),
    ("journal.py", "        if journal.failure is not None or database is None", "        if database is None"),
    ("journal.py", "        journal._check_files()\n", ""),
    ("journal.py", "            and (self._log is None or self._log.is_in_place())\n", ""),
    ("storage.py", "                if os.readlink(self._link) == self._path:", "                if True:"),
    ("storage.py", "        return inode_of(self._path) == self._inode\n", "        return False\n"),
    ("journal.py", "        self._live.pop((workflow_id, sequence), None)  # one", "        # one"),
    ("journal.py", "                doubted.add(entry.id)\n", ""),
    ("journal.py", "records.newest_epoch() != journal._newest_epoch", "False"),
    ("journal.py", "            if not self._lock.take():\n                return False\n", ""),
    ("journal.py", "_LEFT_ALONE.append(self._database)", "self._database.close()"),
)  # fmt: skip


class Mutant(NamedTuple):
    """One change to one file."""

    file: str
    before: str
    after: str

    @property
    def name(self) -> str:
        before, after = (" ".join(text.split())[:60] or "nothing" for text in (self.before, self.after))
        return f"{self.file}: {before} -> {after}"


def decisions() -> Iterator[Mutant]:
    """Each row of the decision table with each other action."""
    for (status, is_same), action in DECISIONS.items():
        key = f"({f'Status.{status.name}' if status else None}, {is_same}): Action."
        for other in Action:
            if other is not action:
                yield Mutant("states.py", f"{key}{action.name},", f"{key}{other.name},")


def survives(mutant: Mutant) -> bool:
    """Whether all tests pass with it."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-mutant-") as name:
        folder = Path(name)
        for source in (found for pattern in COPIED for found in ROOT.glob(pattern)):
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / source.name)
        path = folder / mutant.file
        text = path.read_text("utf-8")
        if text.count(mutant.before) != 1:
            raise SystemExit(f"{mutant.name}: stands {text.count(mutant.before)} times in {mutant.file}")
        path.write_text(text.replace(mutant.before, mutant.after), "utf-8")
        return all(passes(folder, tests) for tests in TESTS[mutant.file])


def passes(folder: Path, tests: str) -> bool:
    """Whether some tests pass in a copy; one that hangs does not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """Prints how many were made and killed, and each that survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one in twelve")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose file or change contains it")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    mutants = [*decisions(), *(Mutant(*each) for each in BY_HAND)]
    mutants = [mutant for mutant in mutants if args.only in mutant.name]
    if args.quick:
        mutants = random.Random(seed).sample(mutants, len(mutants) // 12)
    print(f"seed {seed}, {len(mutants)} mutants", flush=True)
    made: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (mutant, lives) in enumerate(zip(mutants, pool.map(survives, mutants), strict=True), 1):
            made[mutant.file] += 1
            killed[mutant.file] += not lives
            if lives:
                print(f"survives: {mutant.name}", flush=True)
            if sys.stderr.isatty():
                print(f"\r\x1b[K{number} of {len(mutants)}", end="", file=sys.stderr, flush=True)
    for file, count in made.items():
        print(f"{file:12} {count:4} made {killed[file]:4} killed")
    return 0 if made == killed else 1


if __name__ == "__main__":
    raise SystemExit(main())
