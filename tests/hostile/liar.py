"""A hostile peer over libp2p: a real one, whose transport falsifies what it publishes and repeats its questions.

Its lies are the simulator's (decentral/sim/liars.py): they keep a snapshot's form, and its digest fits. A liar that has
to know the honest peers' windows knows those that it has pulled. It floods: what it asks a partner it asks again, as
often as FLOOD_PER_S, on several streams at once, and reads every answer.
"""

import asyncio
from contextlib import suppress

from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import unpack
from decentral.comm.gossip.pull_rule import PSEUDO_GRADIENT
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Pull, Snapshot
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler, Knows, knows_all
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim import liars

FLOOD_PER_S = 50.0  # questions to each partner
FLOOD_STREAMS = 8  # to each partner, at once
FLOOD_DEADLINE_S = 10.0
REPLAYED = "replayed"
LIES = tuple({**liars.FALSIFIED, **liars.TIMES_TOKENS, **liars.GARBLED, REPLAYED: 0})


class LyingLibp2p(Libp2p):
    """A Transport. `lying` makes the class of one kind of liar."""

    kind = ""
    floods = True

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        if isinstance(envelope.message, Pull):
            self._flood(to, envelope, max_blob_bytes)
        answer = await super().ask(to, envelope, deadline_s, max_blob_bytes)
        self._learn_window(to, answer.envelope)
        return answer

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        async def lying(sender: PeerId, envelope: Envelope) -> Envelope:
            answer = await handler(sender, envelope)
            return self._falsified(sender, answer) if isinstance(answer.message, Snapshot) else answer

        await super().serve(lying, bound, knows)

    async def close(self) -> None:
        for task in self._floods.values():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await super().close()

    @property
    def windows(self) -> dict[tuple[int, PeerId], Tensor]:
        """The last pseudo-gradient of each fragment that it has pulled from each honest peer."""
        found: dict[tuple[int, PeerId], Tensor] = self.__dict__.setdefault("_windows", {})
        return found

    @property
    def _firsts(self) -> dict[tuple[int, PeerId], Envelope]:
        """The first snapshot of each fragment that each partner was sent."""
        found: dict[tuple[int, PeerId], Envelope] = self.__dict__.setdefault("_first_answers", {})
        return found

    @property
    def flooded(self) -> dict[PeerId, int]:
        """How many questions too many each partner has answered or refused."""
        found: dict[PeerId, int] = self.__dict__.setdefault("_flooded", {})
        return found

    @property
    def _floods(self) -> dict[PeerId, "asyncio.Future[list[None]]"]:
        found: dict[PeerId, asyncio.Future[list[None]]] = self.__dict__.setdefault("_flood_tasks", {})
        return found

    def _learn_window(self, partner: PeerId, answer: Envelope) -> None:
        snapshot = answer.message
        if isinstance(snapshot, Snapshot):
            vectors = unpack(blockwise, snapshot.layout, answer.blob)
            if PSEUDO_GRADIENT in vectors:
                self.windows[snapshot.fragment, partner] = vectors[PSEUDO_GRADIENT]

    def _falsified(self, asker: PeerId, answer: Envelope) -> Envelope:
        assert isinstance(answer.message, Snapshot)
        fragment = answer.message.fragment
        if self.kind in liars.GARBLED:
            return liars.garble(self.kind, answer)
        if self.kind == REPLAYED:
            return self._firsts.setdefault((fragment, asker), answer)
        honest = [vector for (index, _), vector in self.windows.items() if index == fragment]
        return liars.falsify(self.kind, self.peer, answer, blockwise, honest) if self.kind else answer

    def _flood(self, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> None:
        """Begins once for each partner; its questions are the first one, again and again."""
        if self.floods and to not in self._floods:
            askers = [self._ask_on_and_on(to, envelope, max_blob_bytes) for _ in range(FLOOD_STREAMS)]
            self._floods[to] = asyncio.gather(*askers)

    async def _ask_on_and_on(self, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> None:
        while True:
            with suppress(AskError):
                await super().ask(to, envelope, FLOOD_DEADLINE_S, max_blob_bytes)
            self.flooded[to] = self.flooded.get(to, 0) + 1
            await asyncio.sleep(FLOOD_STREAMS / FLOOD_PER_S)


def lying(kind: str, floods: bool = True) -> type[LyingLibp2p]:
    """The transport of a liar of this kind, one of LIES; "": it tells the truth."""
    assert not kind or kind in LIES, f"no lie is called {kind}"
    return type("LyingLibp2p", (LyingLibp2p,), {"kind": kind, "floods": floods})
