"""What holds for the whole suite: property tests try the same examples each time, and none is timed."""

from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
