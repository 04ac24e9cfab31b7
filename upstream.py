"""The upstream server as a child process: started, watched, ended. Knows nothing of what it says.

It runs in a session and process group of its own, so that we alone decide when it is signalled, and so that whatever
it started can be ended with it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Final

_POLL_S: Final = 0.01  # nothing tells when the last process of a group is gone, so it is looked at


class UpstreamError(Exception):
    """The upstream command could not be started."""


class Upstream:
    """A running upstream; `stdin` and `stdout` are our ends of its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, stdin: int, stdout: int) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout

    @classmethod
    async def start(cls, words: Sequence[str]) -> "Upstream":
        """Starts `words` with our stderr, environment and working directory. Raises UpstreamError."""
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
        return cls(process, stdin, stdout)

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
        while self._process.returncode is None or self._has_group():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def end(self, grace_s: float) -> None:
        """Ends its process group: SIGTERM, `grace_s` seconds, SIGKILL. Returns when nothing of it is left."""
        self._signal(signal.SIGTERM)
        if not await self.exits_within(grace_s):
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _has_group(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # macOS says so of zombies, Linux of another user's processes
            return False
        return True
