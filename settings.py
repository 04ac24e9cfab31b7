"""What the command line says of how to relay, as values."""

from typing import NamedTuple

import wire
from locate import Unpinned
from states import Entry


class Settings(NamedTuple):
    """How to relay. An empty name or version leaves upstream's own."""

    name: str = "checkpoint"
    version: str = "0.0.0"
    trusts_annotations: bool = False
    redacts_arguments: bool = False
    unpinned: Unpinned = Unpinned.NEW
    forks: bool = False  # on a divergence; else it is refused
    call_id_keys: tuple[str, ...] = ()  # of `_meta`, in which a host sends its own id of a call
    call_timeout_s: float | None = None
    annotates: bool = False  # tool results, with their place
    restarts_upstream: bool = False  # when it is gone; else that is the end

    def named(self, result: bytes, *, is_handshake: bool = False) -> bytes:
        """A result with our name for upstream's; itself where upstream names itself nowhere."""
        if not wire.may_name_server(result):
            return result
        return wire.with_identity(result, self.name, self.version, is_handshake=is_handshake)

    def annotated(self, result: bytes, entry: Entry, *, is_replayed: bool) -> bytes:
        """A tool result with its place in `_meta.checkpoint`, where that is wanted."""
        if not self.annotates:
            return result
        place = {"workflow_id": entry.workflow_id, "sequence": entry.sequence, "replayed": is_replayed}
        return wire.with_meta(result, "checkpoint", place)
