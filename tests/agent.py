"""An agent: holds the other ends of a relay's stdin and stdout, and passes on what the test says and hears.

`python agent.py WORDS...` starts the words. Killed, it leaves the relay the way a crashed agent does.
"""

import os
import subprocess
import sys
import threading


def copy(source: int, sink: int) -> None:
    """Passes bytes on until the end of input, then closes the sink."""
    while piece := os.read(source, 65536):
        view = memoryview(piece)
        while view:  # a write that SIGSTOP interrupts takes a part
            view = view[os.write(sink, view) :]
    os.close(sink)


def main() -> int:
    """Runs the relay; its exit code."""
    relay = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert relay.stdin is not None
    assert relay.stdout is not None
    threading.Thread(target=copy, args=(0, os.dup(relay.stdin.fileno())), daemon=True).start()
    relay.stdin.close()
    copy(relay.stdout.fileno(), 1)
    return relay.wait()


if __name__ == "__main__":
    raise SystemExit(main())
