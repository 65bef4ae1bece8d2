"""Parts of a swarm whose nodes of the DHT do not know each other: one look at a lost peer's place joins them."""

import asyncio
import time
from pathlib import Path

import pytest

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory
from decentral.comm.wire.identity import Identity
from decentral.lost_peers import clocks_apart, meet

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
KEY = "run/peers"
LIMIT_S = 120.0  # against hanging


async def announce(directory: HivemindDirectory, own: Identity) -> None:
    expires = time.time() + 60.0
    assert await directory.store(KEY, own.peer, own.seal(KEY, b"here", expires), expires)


@pytest.mark.swarm
def test_two_parts_that_have_forgotten_each_other_see_each_others_records_again(tmp_path: Path) -> None:
    async def story() -> None:
        owns = [Identity.load_or_create(tmp_path / name) for name in "abc"]
        transports = await asyncio.gather(*(Libp2p.start(tmp_path / name, LISTEN, ()) for name in "abc"))
        a, b, c = transports
        try:
            first = await a.directory([KEY], [])
            second = await b.directory([KEY], [await b.connect((await a.addresses())[0])])
            lost = await c.directory([KEY], [])
            for directory, own in zip((first, second, lost), owns, strict=True):
                await announce(directory, own)
            assert set(await first.fetch(KEY)) == {a.peer, b.peer}
            assert set(await lost.fetch(KEY)) == {c.peer}

            nobody = ("/ip4/127.0.0.1/tcp/1/p2p/" + c.peer,)
            assert await meet(a, first, [nobody, await c.addresses()]) == [c.peer]
            assert set(await first.fetch(KEY)) == set(await lost.fetch(KEY)) == {a.peer, b.peer, c.peer}
        finally:
            await asyncio.gather(*(one.close() for one in transports))

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))


@pytest.mark.swarm
def test_who_is_found_with_another_time_is_told_of(tmp_path: Path) -> None:
    async def story() -> None:
        late, right = time.time() - 3600.0, time.time()
        b = await Libp2p.start(tmp_path / "b", LISTEN, (), lambda: late)
        a = await Libp2p.start(tmp_path / "a", LISTEN, (), lambda: right)  # hivemind has one clock for both
        try:
            await a.directory([KEY], [])
            own = await b.directory([KEY], [])
            ((found, ahead_s),) = await clocks_apart(own, await meet(b, own, [await a.addresses()]))
            assert found == a.peer
            assert ahead_s == pytest.approx(3600.0, abs=0.01)
        finally:
            await asyncio.gather(a.close(), b.close())

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))
