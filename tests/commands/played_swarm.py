"""One libp2p peer in a thread, which plays a swarm towards the commands: a welcome, and signed records in its DHT."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Welcome
from decentral.core import config
from decentral.core.ids import PeerId, RunId
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from tests.patient_time import LIMIT_S, PatientLoop

RUN = RunId("gpt-3fa2c1")
HOUR_S = 3600.0


class PlayedSwarm:
    """Welcomes who asks, with `config`, and stores the signed records of as many peers as are wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = config.Config().canonical()
        self.loop = PatientLoop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.wait(self._start())

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    async def _start(self) -> None:
        Identity.load_or_create(self.folder / "key")
        self.transport = await Libp2p.start(self.folder / "key", ["/ip4/127.0.0.1/tcp/0"], [])
        (self.address,) = await self.transport.addresses()
        await self.transport.serve(self._welcome, lambda _message: 0)
        self.directory = await self.transport.directory([f"{RUN}/peers"], [])

    async def _welcome(self, _sender: PeerId, _question: Envelope) -> Envelope:
        return Envelope(Welcome(RUN, self.config))

    def close(self) -> None:
        self.wait(self.transport.close())
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def announce(self, name: str, region: str, device: str = "cpu") -> None:
        own, key, expires = Identity.load_or_create(self.folder / name), f"{RUN}/peers", time.time() + HOUR_S
        profile = Profile(device, 8 * 10**9, 1e10, 500.0, region=region)
        record = PeerRecord(RUN, time.time(), (), profile, 0, 6, 0, 0, 0, phase=PeerPhase.TRAINING)
        assert await self.directory.store(key, own.peer, own.seal(key, records.pack(record), expires), expires)
