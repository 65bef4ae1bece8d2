"""Store other peers' last addresses in the state folder, so that the peers of a stopped swarm find each other again.

Addresses are only hints: a peer that answers at an address still proves its identity by its key. An address that ends
in the id of another peer is not stored. Each peer in the book has a vote on the swarm's time (peers/runtime/clock.py),
so no peer may add votes by publishing addresses of others.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from decentral.core import foreign_file, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import MiB

MOST_BOOK_BYTES = 1 * MiB  # a larger file is not read; the addresses of 64 peers need at most 100 KiB
ADDRESSES_KEPT = 64  # the addresses of this many peers are kept; a restarted peer needs only a few of them


@dataclass(slots=True)
class AddressBook:
    """The last known addresses of up to ADDRESSES_KEPT peers, mirrored in a file."""

    path: Path
    known: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)  # the peer with the newest addresses comes last
    _written: bool = True

    @classmethod
    def load(cls, path: Path) -> "AddressBook":
        """Return the address book in this file; if the file is missing or damaged, an empty book."""
        try:
            entries = strict_json.loads(foreign_file.read_text(path, MOST_BOOK_BYTES)).items()
            return cls(path, {PeerId(peer): _own(peer, tuple(map(str, addresses))) for peer, addresses in entries})
        except (OSError, ValueError, AttributeError, TypeError):
            return cls(path)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remember a peer's addresses, and write the book to its file if they are new.

        A full book forgets the peer whose addresses are the oldest. If the file cannot be written, the next call tries
        again.
        """
        addresses = _own(peer, addresses)
        if self._written and self.known.get(peer) == addresses:
            return
        keep_latest(self.known, peer, addresses, ADDRESSES_KEPT)
        self._written = False
        with suppress(OSError):  # losing addresses does no harm, and a full disk is reported elsewhere
            write_atomically(self.path, json.dumps(self.known).encode(), durable=False)  # fsync blocks the event loop
            self._written = True


def _own(peer: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses that do not end in another peer's id."""
    return tuple(one for one in addresses if one.rpartition("/p2p/")[2] in (peer, one))
