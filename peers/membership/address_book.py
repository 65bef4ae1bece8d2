"""Where we last met the others: kept in the state folder, so that a swarm that died finds itself again.

Addresses are hints. Whoever answers at one still has to prove by its key that it is the peer it should be.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from decentral.core.ids import PeerId

ADDRESSES_KEPT = 64  # peers; enough to find some of a swarm


@dataclass(slots=True)
class AddressBook:
    path: Path
    known: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)  # the latest last

    @classmethod
    def load(cls, path: Path) -> "AddressBook":
        """What is in the file; nothing if there is none, or it is damaged: it holds hints only."""
        book = cls(path)
        try:
            entries = json.loads(path.read_text())
            book.known = {PeerId(peer): tuple(map(str, addresses)) for peer, addresses in entries.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            pass
        return book

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        if self.known.get(peer) == addresses:
            return
        self.known.pop(peer, None)
        self.known[peer] = addresses
        while len(self.known) > ADDRESSES_KEPT:
            del self.known[next(iter(self.known))]
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(json.dumps(self.known))
        temporary.replace(self.path)
