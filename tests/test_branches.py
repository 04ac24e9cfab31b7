"""Branches: who owns a place, what a branch sees, who shares a past. Against a model that copies rows."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branches import Family, Fork, Stretch, root_of

# w: 1 2 3 4 5 …
#        w~1: 3 4 5 …
#               w~2: 5 …
#     w~3: 2 …  (left w~1 below where that begins)
FAMILY: Final = Family("w", [Fork("w~1", "w", 3), Fork("w~2", "w~1", 5), Fork("w~3", "w~1", 2)])


def test_a_workflow_without_branches_owns_all_its_places() -> None:
    family = Family("w")
    assert family.members == ("w",)
    assert family.newest == "w"
    assert family.fork("w") is None
    assert family.line("w") == [Stretch("w", 1, None)]
    assert family.owner("w", 7) == "w"
    assert family.sharing("w", 7) == []
    assert family.next_name() == "w~1"


@pytest.mark.parametrize(
    ("branch", "owners"),
    [
        ("w", ["w", "w", "w", "w", "w", "w"]),
        ("w~1", ["w", "w", "w~1", "w~1", "w~1", "w~1"]),
        ("w~2", ["w", "w", "w~1", "w~1", "w~2", "w~2"]),
        ("w~3", ["w", "w~3", "w~3", "w~3", "w~3", "w~3"]),
    ],
)
def test_a_branch_reads_its_parents_rows_below_where_it_left(branch: str, owners: list[str]) -> None:
    assert [FAMILY.owner(branch, sequence) for sequence in range(1, 7)] == owners


def test_the_line_of_a_branch_is_its_history_from_the_first_place_on() -> None:
    assert FAMILY.line("w~2") == [Stretch("w", 1, 3), Stretch("w~1", 3, 5), Stretch("w~2", 5, None)]
    assert FAMILY.line("w~3") == [Stretch("w", 1, 2), Stretch("w~3", 2, None)]
    assert Family("w", [Fork("w~1", "w", 1)]).line("w~1") == [Stretch("w~1", 1, None)], "nothing is left of its parent"


def test_those_share_a_past_that_see_the_very_same_rows_newest_first() -> None:
    assert FAMILY.sharing("w", 1) == ["w~3", "w~2", "w~1"]
    assert FAMILY.sharing("w", 2) == ["w~3", "w~2", "w~1"]
    assert FAMILY.sharing("w", 3) == ["w~2", "w~1"]
    assert FAMILY.sharing("w~2", 5) == ["w~1"]
    assert FAMILY.sharing("w~2", 6) == []
    assert FAMILY.sharing("w", 4) == []


def test_branches_are_counted_within_the_family_and_no_name_is_given_twice() -> None:
    assert FAMILY.next_name() == "w~4"
    assert Family("w", [Fork("w~9", "w", 3), Fork("w~2", "w", 3)]).next_name() == "w~10"
    more = FAMILY.with_fork(Fork("w~4", "w", 9))
    assert more.newest == "w~4"
    assert more.fork("w~4") == Fork("w~4", "w", 9)
    assert FAMILY.newest == "w~3", "the other is another family"


@pytest.mark.parametrize(
    ("name", "root"),
    [("w", "w"), ("w~1", "w"), ("a~b~12", "a~b"), ("w~", "w~"), ("w~x", "w~x"), ("~1", "~1"), ("a\nb~3", "a\nb")],
)
def test_a_branch_is_told_by_its_name(name: str, root: str) -> None:
    assert root_of(name) == root


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=7))
def test_a_family_is_what_a_copy_of_the_parents_rows_for_each_branch_would_be(forks: list[tuple[int, int]]) -> None:
    family, copies = Family("w"), {"w": ["w"] * 8}
    for which, sequence in forks:
        parent = family.members[which % len(family.members)]
        branch = family.next_name()
        copies[branch] = [*copies[parent][: sequence - 1], *[branch] * (9 - sequence)]
        family = family.with_fork(Fork(branch, parent, sequence))
    for branch, owners in copies.items():
        assert [family.owner(branch, sequence) for sequence in range(1, 9)] == owners
        line = [
            owner
            for owner, start, below in family.line(branch)
            for _ in range(start, 9 if below is None else min(below, 9))
        ]
        assert line == owners
        for sequence in range(1, 9):
            same = [
                name for name in copies if name != branch and copies[name][: sequence - 1] == owners[: sequence - 1]
            ]
            assert family.sharing(branch, sequence) == same[::-1]
        for other, theirs in copies.items():
            apart = (at for at, both in enumerate(zip(owners, theirs, strict=True), 1) if both[0] != both[1])
            assert family.parting(branch, other) == next(apart, None)
