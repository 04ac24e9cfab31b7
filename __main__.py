"""Starts Checkpoint from our own directory, whatever the working directory holds.

`python path/to/checkpoint`, `python -P -m checkpoint` and the installed `checkpoint` script come through here. A
`journal.py` or `json.py` in the working directory must never be imported instead of ours or the standard library's, so
the working directory leaves `sys.path` and our own directory goes first before anything else is imported.
"""

import os
import sys


def main() -> int:
    """Runs the command line of checkpoint.py and gives its exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036  # nothing but us keeps an old Python from a copy of the sources
        raise SystemExit("checkpoint: needs Python 3.11 or newer, and this is " + sys.version.split()[0])
    here = os.path.dirname(os.path.abspath(__file__))
    strangers = {os.path.realpath(here)}
    try:
        strangers.add(os.getcwd())
    except FileNotFoundError:  # it was removed, and nothing can be imported from it
        pass
    # A relative entry means the working directory, or something below it.
    others = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) not in strangers]
    sys.path[:] = [here, *others]
    # Installed, "checkpoint" already names the folder we were found in; from here on it names checkpoint.py.
    sys.modules.pop("checkpoint", None)
    if sys.argv[1:] in (["session"], ["session", "serve"]):
        # An agent waits for it at every start: it does without the command line's imports.
        from session import main as run
    else:
        from checkpoint import main as run
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
