"""Which folder is the project: what names one, in order, and what a root may not be."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from plaintext import cut, one_line, scrub
from toolspec import SessionError


class Root(NamedTuple):
    path: str  # absolute, links resolved
    source: str  # what named it
    is_fallback: bool = False


def resolve_root(
    argument: str | None,
    environ: Mapping[str, str],
    ask_client: Callable[[], Sequence[str]],
    get_working_directory: Callable[[], str] = os.getcwd,
) -> Root:
    """The project folder: the argument, CHECKPOINT_PROJECT_ROOT, the client's first root that is a folder,
    CLAUDE_PROJECT_DIR, the working directory.

    The first two must be right where they are given: raises SessionError naming the one that is not. The others are
    passed over.
    """
    if argument is not None:
        return Root(_directory("projectRoot", argument), "projectRoot")
    if named := environ.get("CHECKPOINT_PROJECT_ROOT"):
        return Root(_directory("CHECKPOINT_PROJECT_ROOT", named), "CHECKPOINT_PROJECT_ROOT")
    for uri in ask_client():
        path = _path_of(uri)
        if path is not None:
            return Root(os.path.realpath(path), "the client's roots")
    project = environ.get("CLAUDE_PROJECT_DIR", "")
    if os.path.isabs(project) and os.path.isdir(project):
        return Root(os.path.realpath(project), "CLAUDE_PROJECT_DIR")
    advice = "pass projectRoot or set CHECKPOINT_PROJECT_ROOT"
    try:
        current = os.path.realpath(get_working_directory())
    except OSError as error:
        raise SessionError(f"the working directory is gone; {advice}") from error
    if os.path.dirname(current) == current:
        raise SessionError(f"no project root: the working directory is {current}; {advice}")
    return Root(current, "the working directory", is_fallback=True)


def _directory(name: str, path: str) -> str:
    said = cut(one_line(scrub(path)[0]), 200)
    if not os.path.isabs(path):
        raise SessionError(f"{name} must be an absolute path: {said or 'it is empty'}")
    try:
        resolved = os.path.realpath(path, strict=True)
        is_directory = os.path.isdir(resolved)
    except ValueError:
        raise SessionError(f"{name} must not contain a NUL character") from None
    except OSError as error:
        raise SessionError(f"{name} is not an existing directory ({error.strerror}): {said}") from None
    if not is_directory:
        raise SessionError(f"{name} is not a directory: {said}")
    return resolved


def _path_of(uri: str) -> str | None:
    """The folder that a `file://` root means; None for one on another host and for what is no folder."""
    try:
        parts = urlsplit(uri)
        path = unquote(parts.path, errors="surrogateescape")
        # A "#" or "?" of a folder's name comes escaped; anything else would name another folder.
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost") and not (parts.query or parts.fragment)
        return path if is_local and os.path.isabs(path) and os.path.isdir(path) else None
    except ValueError:
        return None
