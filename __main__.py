"""Starts Checkpoint from our own directory, whatever the working directory holds.

`python path/to/checkpoint`, `python -P -m checkpoint` and the installed `checkpoint` script come through here. A
`journal.py` or `json.py` in the working directory must never be imported instead of ours or the standard library's, so
the working directory leaves `sys.path` and our own directory goes first before anything else is imported.
"""

import os
import sys


def main() -> int:
    """Runs the command line of checkpoint.py and gives its exit code."""
    here = os.path.dirname(os.path.abspath(__file__))
    strangers = {"", ".", os.getcwd(), here}
    sys.path[:] = [here, *(entry for entry in sys.path if entry not in strangers)]
    # Installed, "checkpoint" already names the folder we were found in; from here on it names checkpoint.py.
    sys.modules.pop("checkpoint", None)
    from checkpoint import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
