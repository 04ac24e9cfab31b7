"""The README says what the program does: tables, flags, codes and the demonstration are compared with the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint import EXIT_CODES, build_parser
from refusals import CODES, Reason
from reports import OF_STATUS, REPLAYED
from states import DECISIONS, Action, Status
from turn import CrashDrill

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")


def rows(text: str, first_header: str) -> list[list[str]]:
    """The rows of the Markdown table whose header begins with a cell."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    table = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_the_decision_table_is_the_one_in_the_code() -> None:
    statuses: list[Status | None] = [None, *dict.fromkeys(status for status, _ in DECISIONS if status is not None)]
    expected = [
        [status or "nothing", DECISIONS[status, True].value, DECISIONS[status, False].value] for status in statuses
    ]
    assert rows(README, "on record at the place") == expected


def test_every_action_is_explained() -> None:
    for action in (Action.PROCEED, Action.REPLAY, Action.DIVERGE):
        assert f"*{action.value.capitalize()}*" in README


def test_every_flag_of_the_help_is_in_the_table_of_flags() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", " ".join(row[0] for row in rows(README, "flag"))))
    flags = {option for action in build_parser()._actions for option in action.option_strings if option[:2] == "--"}
    assert named == flags - {"--help"}


def test_every_exit_code_is_documented() -> None:
    assert rows(README, "code | meaning") == [[str(code), meaning] for code, meaning in EXIT_CODES.items()]


def test_every_refusal_is_documented_with_its_code() -> None:
    documented = {row[1].strip("`"): int(row[0]) for row in rows(README, "code | reason | what happened") if row[1]}
    assert documented == {reason.value: code for reason, code in CODES.items()}
    assert [row[0].strip("`") for row in rows(AGENTS, "reason")] == [reason.value for reason in Reason]


def test_every_point_of_the_crash_drill_is_documented() -> None:
    assert tuple(row[0].strip("`") for row in rows(README, "point")) == tuple(CrashDrill.POINTS)


@pytest.mark.parametrize("name", ["README.md", "AGENTS.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_demonstration_in_the_readme_is_a_fresh_run() -> None:
    run = subprocess.run([sys.executable, ROOT, "demo"], capture_output=True, text=True, timeout=60, check=True)
    assert f"```\n{run.stdout.rstrip()}\n```" in README
    assert run.stdout.rstrip().endswith("Charges that happened twice: 0.")


def test_what_is_reported_is_the_table_in_the_code() -> None:
    documented = {(row[1], row[2].strip("`")) for row in rows(README, "what became of a call")}
    told = {(told.action, told.reason) for told in (*OF_STATUS.values(), REPLAYED)}
    assert documented - {("block", "the reason of the refusal")} == told


def test_the_outbox_in_the_documentation_is_one_that_the_tests_run() -> None:
    source = (ROOT / "tests" / "reporter_own_outbox.py").read_text(encoding="utf-8")
    assert source.split('"""\n', 1)[1].strip() in (ROOT / "docs" / "reporting.md").read_text(encoding="utf-8")
