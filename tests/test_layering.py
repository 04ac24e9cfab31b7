"""Which module may know which: the import lines of every module against the picture below."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent

# Arguments and wiring on top, the edges below, the leaves at the bottom; nothing points upwards.
PICTURE: Final = {
    "__main__": {"checkpoint", "session"},
    "checkpoint": {
        *("arguments", "demo", "session", "supervisor", "upstream", "streams", "settings", "locate", "eventloop"),
        *("turn", "refusals", "places", "journal", "storage", "branches", "reporter"),
        *("commands", "console", "reader", "queues"),
    },
    "arguments": {"commands", "reporting"},
    "reporting": {"queues", "render", "reporter"},
    "queues": {"reader", "render", "reporter", "reportrows", "storage", "writing"},
    "commands": {"console", "prune", "reader", "render", "settle", "states", "verify"},
    "settle": {
        *("console", "processes", "reader", "records", "refusals", "render", "states", "storage", "wire", "writing"),
    },
    "prune": {"branches", "records", "render", "states", "storage", "writing"},
    "writing": {"processes", "reader", "render", "storage"},
    "verify": {"branches", "reader", "render", "states", "storage", "wire"},
    "console": {"branches", "doubt", "processes", "reader", "render", "states", "storage", "wire"},
    "doubt": {"reader", "render", "states"},
    "reader": {"branches", "processes", "render", "states", "storage"},
    "render": set(),
    "demo": set(),
    "session": {"projectroot", "sessiontools", "toolspec", "wire"},
    "sessiontools": {
        *(
            "brief",
            "checkpointfile",
            "compose",
            "drift",
            "gitfacts",
            "plaintext",
            "projectroot",
            "toolspec",
            "worktree",
        ),
    },
    "brief": {"checkpointfile", "drift", "plaintext"},
    "compose": {"checkpointfile", "gitfacts", "plaintext", "toolspec"},
    "drift": {"checkpointfile", "gitfacts", "plaintext", "worktree"},
    "gitfacts": {"checkpointfile", "worktree"},
    "checkpointfile": {"plaintext", "toolspec"},
    "projectroot": {"plaintext", "toolspec"},
    "worktree": set(),
    "plaintext": {"redact"},
    "toolspec": set(),
    "redact": set(),
    "supervisor": {
        *("journal", "refusals", "relay", "settings", "states", "streams", "turn", "upstream", "wire"),
        *("courier", "eventloop", "reporter", "reports"),
    },
    "relay": {
        *("calls", "catalog", "journal", "refusals", "reports", "restarts", "settings", "states", "tasks", "turn"),
        "wire",
    },
    "courier": {"journal", "reporter", "states", "storage", "turn"},
    "reports": {"reporter", "states", "wire"},
    "reporter": set(),
    "restarts": {"turn", "wire"},
    "calls": {
        *(
            "branches",
            "catalog",
            "journal",
            "locate",
            "places",
            "refusals",
            "reports",
            "settings",
            "states",
            "storage",
            "turn",
            "wire",
        ),
        "workflows",
    },
    "tasks": {"journal", "settings", "states", "storage", "turn", "wire"},
    "turn": {"journal", "states", "storage"},
    "workflows": {"branches", "journal", "locate", "states"},
    "catalog": {"wire"},
    "refusals": {"states", "wire"},
    "settings": {"locate", "states", "wire"},
    "locate": {"branches", "states"},
    "journal": {"branches", "records", "reportrows", "states", "storage"},
    "reportrows": {"records", "states"},
    "records": {"branches", "states"},
    "states": {"branches"},
    "places": {"states"},
    "streams": {"wire"},
    "eventloop": set(),
    "branches": set(),
    "storage": set(),
    "upstream": {"processes"},
    "processes": set(),
    "wire": set(),
}
RUN_TIME_PACKAGES: Final = {"anyio", "jsonschema"}

MODULES: Final = sorted(path.stem for path in ROOT.glob("*.py"))
TREES: Final = {name: ast.parse((ROOT / f"{name}.py").read_text("utf-8")) for name in MODULES}


def imports_of(name: str) -> Iterator[str]:
    """The top-level modules that a module imports, wherever the line stands; those for the type checker too."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: siblings are imported flatly"
            yield str(node.module).partition(".")[0]


def names_in(tree: ast.AST) -> Iterator[str]:
    """The plain names that a module uses."""
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def test_the_picture_shows_every_module() -> None:
    assert set(MODULES) <= set(PICTURE)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_what_the_picture_says(name: str) -> None:
    assert set(imports_of(name)) & set(MODULES) == PICTURE[name]


def test_nothing_imports_in_a_circle() -> None:
    order = list(TopologicalSorter({name: set(imports_of(name)) & set(MODULES) for name in MODULES}).static_order())
    assert order[-1] == "__main__"
    assert order[-2] == "checkpoint"


@pytest.mark.parametrize("name", MODULES)
def test_nothing_else_is_imported_but_the_standard_library_and_two_packages(name: str) -> None:
    others = set(imports_of(name)) - set(MODULES) - sys.stdlib_module_names
    assert others <= RUN_TIME_PACKAGES


def test_the_project_depends_on_these_two_packages() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert {dependency.partition(">")[0] for dependency in dependencies} == RUN_TIME_PACKAGES


def test_no_module_takes_the_name_of_another() -> None:
    installed = {name for name, owners in packages_distributions().items() if "checkpoint-relay" not in owners}
    assert not set(MODULES) & (sys.stdlib_module_names | installed)


def test_the_root_is_no_package() -> None:
    # An __init__.py would tie imports to the name of the folder, and a conftest.py would ship.
    assert not {"__init__", "conftest", "setup"} & set(MODULES)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "checkpoint"])
def test_only_the_command_line_prints(name: str) -> None:
    assert "print" not in names_in(TREES[name])


@pytest.mark.parametrize("name", MODULES)
def test_loggers_are_named_in_full(name: str) -> None:
    # Installed, __name__ would say "relay", and the one handler would not hear it.
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
            expected = "checkpoint" if name == "checkpoint" else f"checkpoint.{name}"
            assert [ast.literal_eval(argument) for argument in node.args] == [expected]
