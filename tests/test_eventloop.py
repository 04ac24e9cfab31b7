"""The end of a turn: after all that was ready, and before anything else is looked at."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from selectors import SelectorKey

import pytest

from eventloop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    """A loop that has been asked before."""
    loop = EventLoop()
    loop.at_turn_end(loop.stop)
    run_until_stopped(loop)
    yield loop
    loop.close()


def ready_pipes(loop: EventLoop, stack: ExitStack, *callbacks: Callable[[], None]) -> None:
    """As many pipes with a byte in them, each with its reader."""
    for callback in callbacks:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        os.write(writing, b"x")

        def read(fd: int = reading, callback: Callable[[], None] = callback) -> None:
            os.read(fd, 1)
            callback()

        loop.add_reader(reading, read)
        stack.callback(loop.remove_reader, reading)


def run_until_stopped(loop: EventLoop, timeout_s: float = 10) -> None:
    stuck = loop.call_later(timeout_s, loop.stop)
    loop.run_forever()
    assert loop.time() < stuck.when()
    stuck.cancel()


def test_a_turn_ends_when_all_that_was_ready_is_handed_out(loop: EventLoop) -> None:
    said: list[str] = []

    def end() -> None:
        said.append("end")
        loop.stop()

    def first_to_come(name: str) -> Callable[[], None]:
        def come() -> None:
            if not said:
                loop.call_soon(said.append, "next turn")
                loop.at_turn_end(end)
            said.append(name)

        return come

    with ExitStack() as stack:
        ready_pipes(loop, stack, first_to_come("a"), first_to_come("b"))
        run_until_stopped(loop)
        assert (sorted(said[:2]), said[2:]) == (["a", "b"], ["end"])


def test_the_end_of_a_turn_needs_no_further_look(loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float | None] = []
    select = loop._turns.select

    def watched(timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        timeouts.append(timeout)
        return select(timeout)

    monkeypatch.setattr(loop._turns, "select", watched)
    with ExitStack() as stack:
        ready_pipes(loop, stack, partial(loop.at_turn_end, partial(loop.call_later, 0.01, loop.stop)))
        run_until_stopped(loop)
    assert timeouts[1] != 0


def test_what_a_timer_asks_for_comes_too(loop: EventLoop) -> None:
    loop.call_later(0.001, lambda: loop.at_turn_end(loop.stop))
    run_until_stopped(loop)


def test_who_asks_first_waits_no_longer_than_until_the_next_turn() -> None:
    loop = EventLoop()
    with ExitStack() as stack:
        ready_pipes(loop, stack, partial(loop.at_turn_end, loop.stop))
        run_until_stopped(loop)
    loop.close()


def test_what_is_asked_for_at_the_end_of_a_turn_waits_for_the_next(loop: EventLoop) -> None:
    with ExitStack() as stack:
        ready_pipes(loop, stack, partial(loop.at_turn_end, partial(loop.at_turn_end, loop.stop)))
        run_until_stopped(loop)


def test_an_error_at_the_end_of_a_turn_is_told(loop: EventLoop) -> None:
    told: list[object] = []

    def tell(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        told.append(type(context["exception"]))
        loop.stop()

    loop.set_exception_handler(tell)
    with ExitStack() as stack:
        ready_pipes(loop, stack, partial(loop.at_turn_end, lambda: 1 / 0))
        run_until_stopped(loop)
    assert told == [ZeroDivisionError]


def test_nothing_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, EventLoop)
        loop.at_turn_end(lambda: None)
    assert set(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")) == before
