"""What holds for the whole suite: where journal and ledger of a test lie, and the same examples each time, untimed."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# Under nohup a process ignores SIGHUP, and so would every relay that is started here.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "j.db"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"
