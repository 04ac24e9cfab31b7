"""Branches in the life of a relay: a divergence begins one, and what any of them has on record never runs again."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from memory import (
    Bench,
    call,
    cancel,
    database_held,
    failure,
    journal_path,
    lose_upstream,
    options,
    reasons,
    resolve,
    result,
    spoil,
    text_of,
)

from storage import JournalError

FORK: Final = options(forks=True)


@pytest.fixture
def path() -> Iterator[Path]:
    yield from journal_path()


@pytest.fixture
def bench(path: Path) -> Bench:
    return Bench(path, FORK)


def run(bench: Bench, *letters: str, start: int = 1) -> None:
    """Pinned calls of tools with these names, each answered with its own name and the branch's order."""
    for sequence, letter in enumerate(letters, start):
        bench.call(call(sequence, letter, seq=sequence), result(sequence, letter))


def replayed(bench: Bench, sequence: int, tool: str) -> str:
    """The text of a call that is answered without upstream."""
    sent = len(bench.up.lines)
    text = text_of(*bench.ask(call("again", tool, seq=sequence)))
    assert bench.up.lines[sent:] == []
    return text


def branches(bench: Bench) -> list[tuple[str, str, int]]:
    return bench.select("SELECT branch, parent, sequence FROM forks ORDER BY id")


def test_a_divergence_begins_a_branch_and_the_parents_rows_stay(bench: Bench) -> None:
    run(bench, "a", "b", "c")
    again = bench.restart()
    assert replayed(again, 1, "a") == "a"
    run(again, "x", "y", start=2)
    assert branches(again) == [("w~1", "w", 2)]
    assert again.places() == [
        *(("w", n, 1, tool) for n, tool in enumerate("abc", 1)),
        ("w~1", 2, 1, "x"),
        ("w~1", 3, 1, "y"),
    ]
    assert replayed(again, 1, "a") == "a", "below it reads its parent's rows"
    assert replayed(again, 3, "y") == "y"


def test_a_later_start_follows_the_newest_branch(bench: Bench) -> None:
    run(bench, "a", "b", "c")
    run(bench.restart(), "x", "y", start=2)
    third = bench.restart(options())  # strict: to follow a branch is no divergence
    assert [replayed(third, n, tool) for n, tool in enumerate("axy", 1)] == ["a", "x", "y"]
    assert third.error(call(1, "c", seq=3))["facts"]["workflow_id"] == "w~1"


def test_who_replays_what_an_older_branch_has_is_back_on_it(bench: Bench) -> None:
    run(bench, "a", "b", "c")
    run(bench.restart(), "x", "y", start=2)
    third = bench.restart(FORK)
    assert [replayed(third, n, tool) for n, tool in enumerate("abc", 1)] == ["a", "b", "c"]
    third.call(call(4, "d", seq=4), result(4, "d"))
    assert third.places()[-1] == ("w", 4, 1, "d")
    assert branches(third) == [("w~1", "w", 2)], "no third one"


def test_a_branch_that_has_this_call_in_doubt_is_gone_to_and_the_doubt_stands(bench: Bench, path: Path) -> None:
    run(bench, "a")
    bench.ask(call(2, "pay", seq=2))
    second = bench.restart()
    resolve_free = second.error(call(3, "look", seq=2))
    assert resolve_free["facts"]["reason"] == "in_doubt", "a row in doubt is nothing to diverge from"
    second.end()
    resolve(path, 2, "FAILED")
    third = bench.restart(FORK)
    third.ask(call(4, "look", seq=2))  # a branch; lost
    fourth = third.restart()
    facts = fourth.error(call(5, "look", seq=2))["facts"]
    assert (facts["reason"], facts["workflow_id"], facts["sequence"]) == ("in_doubt", "w~1", 2)
    fourth.end()
    resolve(path, 2, "COMPLETED", "looked", workflow_id="w~1")
    fifth = bench.restart(FORK)
    fifth.ask(call(6, "third", seq=2))  # one more branch; lost
    sixth = fifth.restart()
    sixth.end()
    resolve(path, 2, "NOT_EXECUTED", workflow_id="w~2")
    seventh = bench.restart(FORK)
    assert replayed(seventh, 2, "look") == "looked", "and the process is on that branch now"
    assert seventh.places()[-1] == ("w~2", 2, 1, "third")
    assert branches(seventh) == [("w~1", "w", 2), ("w~2", "w~1", 2)]


def test_a_call_in_doubt_on_the_branch_that_it_goes_to_is_refused_and_does_not_run(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    second = bench.restart()
    second.ask(call(1, "pay", seq=2))
    assert second.places()[-1] == ("w~1", 2, 1, "pay")
    third = second.restart()
    third.end()
    resolve(path, 2, "NOT_EXECUTED", workflow_id="w~1")
    fourth = bench.restart(FORK)
    assert replayed(fourth, 2, "b") == "b", "back on the root, so that the branch is the other one"
    assert [fourth.ask(call(2, "pay", seq=2)), fourth.places()[-1]] == [[], ("w~1", 2, 2, "pay")]
    fifth = fourth.restart()
    assert replayed(fifth, 1, "a") == "a"
    assert fifth.error(call(3, "b", seq=2))["facts"]["reason"] == "in_doubt"


def test_a_branch_may_leave_below_the_place_where_its_parent_left_and_so_on(bench: Bench) -> None:
    run(bench, "a", "b", "c", "d")
    run(bench.restart(), "x", "y", start=3)  # w~1 leaves w at 3
    run(bench.restart(), "p", start=4)  # w~2 leaves w~1 at 4
    run(bench.restart(), "q", start=2)  # w~3 leaves w~2 at 2
    again = bench.restart()
    assert branches(again) == [("w~1", "w", 3), ("w~2", "w~1", 4), ("w~3", "w~2", 2)]
    assert [replayed(again, n, tool) for n, tool in enumerate("aq", 1)] == ["a", "q"]
    for history in ("abcd", "abxy", "abxp", "aq"):
        back = again.restart()
        assert [replayed(back, n, tool) for n, tool in enumerate(history, 1)] == list(history)
        again = back
    assert len(branches(again)) == 3


def test_a_call_new_to_a_branch_of_a_branch_is_behind_its_history(bench: Bench) -> None:
    run(bench, "a", "b", "c")
    run(bench.restart(), "x", start=3)
    again = bench.restart()
    again.call(call(1, "new"), result(1))
    assert again.places()[-1] == ("w~1", 4, 1, "new")


def test_a_pin_below_where_the_branch_left_is_written_into_the_ancestor_that_owns_the_place(bench: Bench) -> None:
    bench.call(call(1, "a", seq=5), result(1))
    second = bench.restart()
    second.ask(call(2, "x", seq=5))
    second.answer(result(2))
    second.call(call(3, "below", seq=2), result(3))
    second.call(call(4, "above", seq=9), result(4))
    assert second.places()[1:] == [("w~1", 5, 1, "x"), ("w", 2, 1, "below"), ("w~1", 9, 1, "above")]


def test_once_a_later_row_was_replayed_or_dispatched_a_divergence_is_refused(bench: Bench) -> None:
    run(bench, "a", "b", "c")
    assert bench.error(call(1, "x", seq=2))["facts"]["reason"] == "diverged", "3 was dispatched"
    second = bench.restart()
    assert replayed(second, 3, "c") == "c"
    facts = second.error(call(1, "x", seq=2))["facts"]
    assert (facts["reason"], facts["workflow_id"], facts["expected"]["tool"]) == ("diverged", "w", "b")
    assert second.ask(call(2, "x", seq=3)) == [], "the last one may be left"
    assert branches(second) == [("w~1", "w", 3)]
    assert [replayed(second.restart(), 2, "b")] == ["b"]


def test_a_divergence_from_a_row_under_way_leaves_it_to_its_branch(bench: Bench) -> None:
    bench.ask(call(1, "a", seq=1))
    bench.ask(call(2, "b", seq=1))
    assert bench.up.lines == [call(1, "a", seq=1), call(2, "b", seq=1)]
    bench.answer(result(1, "A"), result(2, "B"))
    assert bench.select("SELECT workflow_id, status FROM calls ORDER BY workflow_id") == [
        ("w", "COMPLETED"),
        ("w~1", "COMPLETED"),
    ]


def test_in_strict_mode_nothing_branches(bench: Bench) -> None:
    run(bench, "a")
    again = bench.restart(options())
    assert again.error(call(1, "x", seq=1))["facts"]["reason"] == "diverged"
    assert branches(again) == []


def test_each_workflow_of_a_process_has_its_own_branches(bench: Bench) -> None:
    for name in ("w", "v"):
        bench.ask(call(f"{name}1", "a", seq=1, workflow=name), call(f"{name}2", "b", seq=2, workflow=name))
    bench.answer(*(result(f"{name}{n}") for name in ("w", "v") for n in (1, 2)))
    second = bench.restart()
    second.ask(call(1, "x", seq=2, workflow="v"), call(2, "b", seq=2), call(3, "a", seq=1, workflow="v"))
    assert branches(second) == [("v~1", "v", 2)]
    second.ask(call(4, "y", seq=2))
    assert branches(second) == [("v~1", "v", 2), ("w~1", "w", 2)]
    second.ask(call(5, "more", workflow="v"), call(6, "more"))
    assert [place[:2] for place in second.places()[-2:]] == [("v~1", 3), ("w~1", 3)]


def test_the_log_names_the_effects_that_stay_in_the_world(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    run(bench, "keep", "mail", "charge")
    bench.call(call(4, "bad", seq=4), failure(4, 1, "no"))
    bench.ask(call(5, "ship", seq=5))
    again = bench.restart()
    with caplog.at_level(logging.WARNING):
        again.ask(call(1, "x", seq=2))
    [line] = [record.getMessage() for record in caplog.records if record.name == "checkpoint.workflows"]
    assert line == (
        "workflow w: leaves branch w at sequence 2 for w~1; what stays in the world: "
        "mail at 2 (COMPLETED), charge at 3 (COMPLETED), bad at 4 (FAILED), ship at 5 (IN_DOUBT)"
    )


def test_the_log_names_no_effect_of_calls_that_did_not_run_and_of_many_the_first(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.ask(*(call(n, f"t{n}", seq=n) for n in range(1, 25)))
    bench.answer(*(result(n) for n in range(2, 25)))
    bench.up.unread = bench.up.taken_bytes
    lose_upstream(bench)
    again = bench.restart()
    with caplog.at_level(logging.WARNING, "checkpoint.workflows"):
        again.ask(call(1, "x", seq=1))
    line = caplog.messages[-1]
    assert "t1 at" not in line
    assert line.count("COMPLETED") == 20
    assert line.endswith("t21 at 21 (COMPLETED), and more")
    caplog.clear()
    other = Bench(bench.path, FORK, workflow_id="v")
    again.end()
    other.ask(call(1, "a", seq=1))
    other.up.unread = other.up.taken_bytes
    lose_upstream(other)
    other = other.restart(workflow_id="v")
    with caplog.at_level(logging.WARNING, "checkpoint.workflows"):
        other.ask(call(1, "x", seq=1))
    assert caplog.messages[-1].endswith("what stays in the world: nothing")


def test_a_host_that_sends_an_id_again_never_forks(bench: Bench) -> None:
    settings = options(forks=True, call_id_keys=("id",))
    first = bench.restart(settings)
    first.call(call(1, "a", meta={"id": "c"}), result(1))
    again = first.restart()
    assert again.error(call(2, "b", meta={"id": "c"}))["facts"]["reason"] == "diverged"
    assert branches(again) == []


def test_a_host_id_is_looked_for_on_every_branch(bench: Bench) -> None:
    settings = options(forks=True, call_id_keys=("id",))
    first = bench.restart(settings)
    first.call(call(1, "a", seq=1, meta={"id": "c"}), result(1, "A"))
    first.restart().ask(call(1, "x", seq=1))
    third = first.restart()
    assert text_of(*third.ask(call(2, "a", meta={"id": "c"}))) == "A"
    assert third.error(call(3, "a", seq=1))["facts"]["workflow_id"] == "w~1", "where it stays"


def test_ordered_calls_branch_at_the_cursor_and_go_on_behind_it(bench: Bench) -> None:
    settings = options("ordered", forks=True)
    first = bench.restart(settings)
    for n, tool in enumerate("abc", 1):
        first.call(call(n, tool), result(n, tool))
    second = first.restart()
    assert text_of(*second.ask(call(1, "a"))) == "a"
    second.call(call(2, "x"), result(2, "x"))
    second.call(call(3, "c"), result(3, "other c"))
    assert second.places()[3:] == [("w~1", 2, 1, "x"), ("w~1", 3, 1, "c")]
    third = second.restart()
    assert [text_of(*third.ask(call(n, tool))) for n, tool in enumerate("axc")] == ["a", "x", "other c"]
    fourth = third.restart()
    assert [text_of(*fourth.ask(call(n, tool))) for n, tool in enumerate("abc")] == ["a", "b", "c"]


# ----------------------------------------------------------------------------------------------- a branch that is named


def test_a_start_may_name_a_branch_and_follows_it(bench: Bench) -> None:
    run(bench, "a", "b")
    run(bench.restart(), "x", start=2)
    run(bench.restart(), "y", start=2)
    named = bench.restart(workflow_id="w~1")
    assert named.journal is not None
    named.journal.probe()
    assert replayed(named, 2, "x") == "x"
    named.call(call(3, "more"), result(3))
    assert named.places()[-1] == ("w~1", 3, 1, "more")
    other = named.restart(workflow_id="w~1")
    other.ask(call(1, "elsewhere", workflow="v"), call(2, "last", workflow="w"))
    assert other.places()[-1] == ("w~1", 4, 1, "last"), "also for calls that name the workflow"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_branch_that_is_not_there_cannot_be_named(bench: Bench, is_there: bool) -> None:
    if is_there:
        run(bench, "a")
    named = bench.restart(workflow_id="w~1")
    assert named.journal is not None
    with pytest.raises(JournalError, match=r"there is no branch w~1; there is w$"):
        named.journal.probe()


# ------------------------------------------------------------------------------------------------------- what can fail


def test_a_branch_whose_first_row_cannot_be_written_never_began(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    again = bench.restart()
    assert replayed(again, 1, "a") == "a"
    again.call(call(0, "a", seq=1, workflow="v"), result(0))
    with database_held(path):
        again.ask(call(1, "x", seq=2), call(2, "y", seq=3), call(3))
        again.loop.advance(5.1)
        assert reasons(again.down.lines[-1:]) == [(1, "busy")]
    again.loop.advance(0.1)
    assert branches(again) == []
    assert again.places()[-2:] == [("w", 3, 1, "y"), ("w", 4, 1, "t")], "back where it was"
    again.answer(result(2), result(3))
    fresh = again.restart()
    assert replayed(fresh, 2, "b") == "b"


def test_a_branch_begins_once_the_database_is_free_and_calls_behind_it_wait_for_that(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    again = bench.restart()
    again.call(call(0, "a", seq=1, workflow="v"), result(0))
    with database_held(path):
        again.ask(call(1, "x", seq=2), call(2, "y", seq=3))
        again.loop.advance(1)
    again.loop.advance(0.1)
    assert again.places()[-2:] == [("w~1", 2, 1, "x"), ("w~1", 3, 1, "y")]
    assert again.up.lines[-2:] == [call(1, "x", seq=2), call(2, "y", seq=3)]


@pytest.mark.parametrize("way", ["cancel", "timeout", "upstream lost"])
def test_a_call_that_begins_a_branch_and_is_given_up_before_its_row_is_written_leaves_no_branch(
    bench: Bench, path: Path, way: str
) -> None:
    run(bench, "a", "b")
    again = bench.restart(options(forks=True, call_timeout_s=1))
    again.call(call(0, "a", seq=1, workflow="v"), result(0))
    with database_held(path):
        again.ask(call(1, "x", seq=2))
        if way == "cancel":
            again.ask(cancel(1))
        elif way == "timeout":
            again.loop.advance(1.1)
            assert reasons(again.down.lines[-1:]) == [(1, "busy")]
        else:
            lose_upstream(again)
    again.loop.advance(0.1)
    assert branches(again) == []
    assert again.relay.is_idle
    if way != "upstream lost":
        assert replayed(again, 2, "b") == "b"
        again.ask(call(2, "x", seq=2))
        assert branches(again) == [("w~1", "w", 2)], "its name is free too"


def test_a_branch_is_in_one_commit_with_its_first_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run(bench, "a")
    again = bench.restart()
    commits: list[list[str]] = []
    assert again.journal is not None
    append = again.journal.append

    def noted(facts):  # type: ignore[no-untyped-def]
        commits.append([type(fact).__name__ for fact in facts])
        append(facts)

    monkeypatch.setattr(again.journal, "append", noted)
    again.ask(call(1, "x", seq=1), call(2, "y", seq=2))
    assert commits == [["Forked", "Dispatched"], ["Dispatched"]]


def test_after_a_failed_write_a_divergence_moves_nowhere_and_replays_go_on(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    again = bench.restart()
    again.ask(call(0, "z", seq=1, workflow="v"))
    spoil(path)
    again.answer(result(0))
    assert again.error(call(1, "x", seq=2))["facts"]["reason"] == "journal_unavailable"
    assert replayed(again, 2, "b") == "b"


def test_a_kill_right_after_a_branch_began_leaves_its_row_in_doubt_and_the_old_branch_open(bench: Bench) -> None:
    run(bench, "a", "b")
    second = bench.restart()
    second.ask(call(1, "x", seq=2))
    third = second.restart()
    assert third.error(call(2, "x", seq=2))["facts"]["workflow_id"] == "w~1"
    assert third.error(call(3, "b", seq=2))["facts"]["reason"] == "in_doubt", "whatever it is: a person looks first"
    third.end()
    assert bench.path is not None
    resolve(bench.path, 2, "NOT_EXECUTED", workflow_id="w~1")
    fourth = bench.restart(FORK)
    assert replayed(fourth, 2, "b") == "b"


def strays(bench: Bench, sequence: int, tool: str) -> None:
    """A pinned call that is refused, since another branch has it on record and the right one is not known yet."""
    sent = len(bench.up.lines)
    error = bench.error(call("stray", tool, seq=sequence))
    assert (error["facts"]["reason"], error["facts"]["sequence"]) == ("diverged", sequence)
    assert "send the pins in order" in error["message"]
    assert "--workflow-id" in error["message"]
    assert bench.up.lines[sent:] == []


def test_pins_out_of_order_repeat_nothing_of_the_branch_that_they_mean(bench: Bench) -> None:
    run(bench, "a", "b", "c", "d")
    run(bench.restart(), "x", start=3)
    third = bench.restart()
    assert replayed(third, 1, "a") == "a"
    strays(third, 4, "d")
    assert replayed(third, 3, "c") == "c", "and the process is on the older branch"
    assert replayed(third, 4, "d") == "d"


@pytest.mark.parametrize("forks", [True, False])
def test_once_the_branch_is_shown_its_next_call_runs_though_another_has_it_too(bench: Bench, forks: bool) -> None:
    run(bench, "a", "b", "c", "d")
    second = bench.restart()
    run(second, "x", start=3)
    third = second.restart(options(forks=forks))
    strays(third, 4, "d")
    assert replayed(third, 3, "x") == "x"
    third.call(call(1, "d", seq=4), result(1))
    assert third.places()[-1] == ("w~1", 4, 1, "d")


def test_the_process_that_began_a_branch_is_known_to_be_on_it(bench: Bench) -> None:
    run(bench, "a", "b", "c", "d")
    again = bench.restart()
    assert again.ask(call(1, "x", seq=3), call(2, "d", seq=4)) == []
    assert again.places()[-1] == ("w~1", 4, 1, "d")


def test_who_names_a_branch_at_the_start_means_it(bench: Bench) -> None:
    run(bench, "a", "b", "c", "d")
    run(bench.restart(), "x", start=3)
    named = bench.restart(workflow_id="w~1")
    named.call(call(1, "d", seq=4), result(1))
    assert named.places()[-1] == ("w~1", 4, 1, "d")


def test_pins_out_of_order_begin_no_branch_with_what_another_has_at_their_place(bench: Bench) -> None:
    run(bench, "a", "b", "c", "d")
    run(bench.restart(), "x", "y", start=3)
    third = bench.restart()
    strays(third, 4, "d")
    assert len(branches(third)) == 1


def test_pins_out_of_order_do_not_fill_a_free_place_with_what_another_branch_has_there(
    bench: Bench, path: Path
) -> None:
    run(bench, "a", "b", "c", "d")
    second = bench.restart()
    run(second, "x", start=3)
    second.ask(call(1, "d", seq=4))
    second.end()
    resolve(path, 4, "NOT_EXECUTED", workflow_id="w~1")
    third = bench.restart(FORK)
    strays(third, 4, "d")
    assert replayed(third, 3, "x") == "x"
    third.call(call(1, "d", seq=4), result(1))
    assert third.places()[-1] == ("w~1", 4, 2, "d")


def test_the_place_that_shows_a_branch_is_the_one_where_it_parts_from_the_other(bench: Bench) -> None:
    """Replays above it and below it may be of either."""
    run(bench, "a", "b", "c", "d", "e")
    second = bench.restart()
    run(second, "x", start=3)
    run(second, "e", start=5)
    third = bench.restart()
    for sequence, tool in ((1, "a"), (2, "b"), (5, "e")):
        assert replayed(third, sequence, tool) == tool
    strays(third, 4, "d")


def test_a_process_stays_on_its_branch_whatever_another_does_meanwhile(bench: Bench) -> None:
    run(bench, "a", "b")
    watcher = bench.restart()
    assert replayed(watcher, 1, "a") == "a"
    other = Bench(bench.path, FORK, loop=watcher.loop)
    other.ask(call(1, "x", seq=2))
    other.end()
    assert replayed(watcher, 2, "b") == "b"
    watcher.call(call(2, "c", seq=3), result(2))
    assert watcher.places()[-1] == ("w", 3, 1, "c")
    watcher.call(call(3, "d", seq=3), result(3))
    assert branches(watcher) == [("w~1", "w", 2), ("w~2", "w", 3)]


def test_doubt_elsewhere_in_the_family_stops_no_new_call_of_this_history(bench: Bench, path: Path) -> None:
    run(bench, "a", "b")
    bench.ask(call(9, "pay", seq=3))
    second = bench.restart()
    assert second.error(call(1, "look"))["facts"]["sequence"] == 3
    run(second, "x", start=2)
    assert second.ask(call(2, "look")) == [], "what is in doubt is on the branch that was left"
    third = second.restart()
    assert third.error(call(3, "look"))["facts"]["workflow_id"] == "w~1"


def test_doubt_in_a_shared_past_stops_new_calls_on_every_branch(bench: Bench) -> None:
    bench.ask(call(1, "pay", seq=1))
    second = bench.restart()
    run(second, "b", start=2)
    third = second.restart()
    run(third, "x", start=2)
    facts = third.error(call(1, "look"))["facts"]
    assert (facts["workflow_id"], facts["sequence"]) == ("w", 1)
