"""An agent: holds the other ends of a relay's stdin and stdout, and passes on what the test says and hears.

`python agent.py WORDS...` starts the words. Killed, it leaves the relay the way a crashed agent does.
"""

import subprocess
import sys
import threading
from typing import IO


def copy(source: IO[bytes], sink: IO[bytes]) -> None:
    """Passes lines on until the end of input, then closes the sink."""
    for line in source:
        sink.write(line)
        sink.flush()
    sink.close()


def main() -> int:
    """Runs the relay; its exit code."""
    relay = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert relay.stdin is not None
    assert relay.stdout is not None
    threading.Thread(target=copy, args=(sys.stdin.buffer, relay.stdin), daemon=True).start()
    copy(relay.stdout, sys.stdout.buffer)
    return relay.wait()


if __name__ == "__main__":
    raise SystemExit(main())
