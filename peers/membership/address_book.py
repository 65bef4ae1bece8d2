"""The last known addresses of other peers, in the state folder, so that a swarm that has stopped finds itself again.

Addresses are hints: a peer that answers at one still has to prove by its key who it is. One that names another peer is
not kept: each peer that the book leads to has a voice in what the time is, and one record shall not give it to many.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from decentral.core import strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

ADDRESSES_KEPT = 64  # peers: enough to find some of a swarm


@dataclass(slots=True)
class AddressBook:
    path: Path
    known: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)  # in the order in which they were learned
    _written: bool = True  # whether the file has all of them

    @classmethod
    def load(cls, path: Path) -> "AddressBook":
        """The book in this file. It is empty if there is no file, or a damaged one, as it holds hints only."""
        try:
            entries = strict_json.loads(path.read_text()).items()
            return cls(path, {PeerId(peer): _own(peer, tuple(map(str, addresses))) for peer, addresses in entries})
        except (OSError, ValueError, AttributeError, TypeError):
            return cls(path)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remembers them, in the file as well. One that the disk refuses is written with the next that it takes."""
        addresses = _own(peer, addresses)
        if self._written and self.known.get(peer) == addresses:
            return
        keep_latest(self.known, peer, addresses, ADDRESSES_KEPT)
        self._written = False
        with suppress(OSError):  # they are hints: a full disk is the checkpoint's to tell
            write_atomically(self.path, json.dumps(self.known).encode(), durable=False)  # the event loop waits for it
            self._written = True


def _own(peer: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Those that do not end in the id of another peer."""
    return tuple(one for one in addresses if one.rpartition("/p2p/")[2] in (peer, one))
