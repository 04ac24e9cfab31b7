"""scripts/mutants.py: each change that it makes finds what it changes, and some test file to fail."""

import runpy
from typing import Any, Final

import pytest
from support import ROOT

SCRIPT: Final[dict[str, Any]] = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))


@pytest.mark.parametrize(("file", "before", "after"), SCRIPT["BY_HAND"])
def test_what_is_changed_stands_there_once(file: str, before: str, after: str) -> None:
    assert (ROOT / file).read_text("utf-8").count(before) == 1
    assert before != after
    assert file in SCRIPT["TESTS"]
