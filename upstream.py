"""The upstream server as a child process: started, watched, ended. Knows nothing of what it says.

It runs in a session and process group of its own, so that we alone decide when it is signalled, and so that whatever
it started can be ended with it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Final

from processes import has_running

_POLL_S: Final = 0.01  # nothing tells when the last process of a group is gone, so it is looked at
_KILLED_S: Final = 1.0  # SIGKILL is certain but not instant, and a process in the hands of a dead disk outlives even it
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class UpstreamError(Exception):
    """The upstream command could not be started."""


class Signals:
    """The signals that ask us to end; heard from before upstream starts, since dying of one would leave it behind."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self.on_signal: Callable[[], None] = lambda: None
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells that background us mean it
                loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        self.count += 1
        self.on_signal()


class Upstream:
    """A running upstream; `stdin` and `stdout` are our ends of its pipes."""

    def __init__(
        self, process: asyncio.subprocess.Process, words: Sequence[str], stdin: int, stdout: int, signals: Signals
    ) -> None:
        self._process = process
        self._words = words
        self._is_gone = False
        self.stdin = stdin
        self.stdout = stdout
        self.signals = signals

    @classmethod
    async def start(cls, words: Sequence[str], signals: Signals | None = None) -> "Upstream":
        """Starts `words` with our stderr, environment and working directory. Raises UpstreamError."""
        signals = signals or Signals(asyncio.get_running_loop())
        # Pipes of our own, not asyncio's: their ends are driven by the loop's bare readers and writers (streams.py).
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=their_stdin, stdout=their_stdout, start_new_session=True
            )
        except (OSError, ValueError) as error:
            os.close(stdin)
            os.close(stdout)
            raise UpstreamError(f"upstream could not be started: {words[0]!r}: {error}") from error
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        return cls(process, words, stdin, stdout, signals)

    async def start_another(self) -> "Upstream":
        """Starts the same command once more. Raises UpstreamError."""
        return await Upstream.start(self._words, self.signals)

    @property
    def name(self) -> str:
        """The name of its command; the arguments may hold secrets."""
        return self._words[0]

    @property
    def pid(self) -> int:
        """Its process id, which is the id of its process group too."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code once it has exited, negative for a signal; others may still hold its pipes."""
        return await self._process.wait()

    async def exits_within(self, seconds: float) -> bool:
        """Whether it and its whole process group are gone within that time."""
        deadline = asyncio.get_running_loop().time() + seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        while self._process.returncode is None or has_running(self.pid, counts_others=False):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        self._is_gone = True
        return True

    async def end(self, grace_s: float) -> bool:
        """Ends its process group: SIGTERM, `grace_s` seconds, SIGKILL. Whether nothing of it is left."""
        self._signal(signal.SIGTERM)
        if await self.exits_within(grace_s):
            return True
        self.kill()
        return await self.exits_within(_KILLED_S)

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._is_gone:  # its number may be another group's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
