"""tests/README.md: every tier's file is there, every case has one row, and the test that it names cites the case."""

import ast
import re
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
README: Final = (TESTS / "README.md").read_text(encoding="utf-8")
CASE: Final = re.compile(r"\b[A-Z]{2}-[0-9]{2}\b")
ROW: Final = re.compile(r"^\| \[([A-Z]{2}-[0-9]{2})\]\(https://[^)]+\) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
ROWS: Final = ROW.findall(README)


def cited() -> dict[str, set[str]]:
    """By test, as `file::name`, the cases that its docstring names."""
    found = {}
    for path in TESTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = set(CASE.findall(ast.get_docstring(node) or ""))
    return found


def test_every_case_has_one_row() -> None:
    cases = [case for case, _ in ROWS]
    assert len(cases) == len(set(cases)) == README.count("\n| [")
    assert f"The {len(cases)} cases below" in README


def test_the_tests_that_a_row_names_cite_its_case() -> None:
    citations = cited()
    for case, where in ROWS:
        named = re.findall(r"`([^`]+)`", where)
        assert named or where.startswith("Does not apply: "), case
        for test in named:
            assert case in citations.get(test, ()), f"{case} is not in the docstring of {test}"


def test_a_case_that_a_docstring_names_has_a_row_with_tests() -> None:
    covered = {case for case, where in ROWS if "::" in where}
    assert set().union(*cited().values()) == covered


def test_every_file_stands_in_one_tier() -> None:
    tiers = README[: README.index("## ")]
    assert sorted(re.findall(r"`(test_\w+\.py)`", tiers)) == sorted(path.name for path in TESTS.glob("test_*.py"))
