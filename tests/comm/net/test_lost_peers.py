"""Parts of a swarm whose nodes of the DHT do not know each other: one look at a lost peer's place joins them."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory
from decentral.comm.wire.identity import Identity
from decentral.core.ids import PeerId
from decentral.lost_peers import meet, some_finders, time_to_take
from decentral.peers.hosts.clock import MOST_FINDERS
from tests.patient_time import PatientLoop

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
KEY = "run/peers"
HOUR_S = 3600.0


async def announce(directory: HivemindDirectory, own: Identity) -> None:
    expires = time.time() + HOUR_S
    assert await directory.store(KEY, own.peer, own.seal(KEY, b"here", expires), expires)


@pytest.mark.swarm
def test_who_knows_nobody_of_those_that_have_found_it_asks_them_and_knows_where_they_are(tmp_path: Path) -> None:
    async def story() -> None:
        ours = await Libp2p.start(tmp_path / "ours", LISTEN, ())
        finders = await asyncio.gather(*(Libp2p.start(tmp_path / name, LISTEN, ()) for name in "abcd"))
        try:
            own = await ours.directory([KEY], [])
            for one in finders:
                assert await meet(one, await one.directory([KEY], []), [await ours.addresses()]) == [ours.peer]
            live, *strangers = [one.peer for one in finders]
            some = some_finders(await ours.connections(), {live})
            assert len(some) == MOST_FINDERS
            assert set(some) <= set(strangers)
            assert len(await own.clocks_ahead_s(some)) == MOST_FINDERS
            assert all([await ours.connect(addresses[0]) == peer for peer, addresses in some.items()])
        finally:
            await asyncio.gather(*(one.close() for one in (ours, *finders)))

    PatientLoop().play(story())


@pytest.mark.swarm
def test_where_one_peer_of_each_part_has_met_the_others_are_soon_connected_too(tmp_path: Path) -> None:
    """Their tables merge. So where one knows as many of both times, the lesser part still finds more of the other."""

    async def story() -> None:
        owns = [Identity.load_or_create(tmp_path / name) for name in "abcde"]
        transports = await asyncio.gather(*(Libp2p.start(tmp_path / name, LISTEN, ()) for name in "abcde"))
        try:
            directories = list[HivemindDirectory]()
            for number, transport in enumerate(transports):
                first = transports[0 if number < 3 else 3]  # a, b, c and d, e: two parts
                contacts = [] if first is transport else [await transport.connect((await first.addresses())[0])]
                directories.append(await transport.directory([KEY], contacts))
            e, a = transports[4], transports[0]
            assert set(await e.connections()) == {transports[3].peer}
            assert await meet(transports[3], directories[3], [await a.addresses()]) == [a.peer]
            for directory, own in zip(directories, owns, strict=True):
                await announce(directory, own)
                await directory.fetch(KEY)
            assert set(await e.connections()) == {one.peer for one in transports} - {e.peer}
        finally:
            await asyncio.gather(*(one.close() for one in transports))

    PatientLoop().play(story())


class WithOwnTime(HivemindDirectory):
    """This directory, and a live peer that has our time: all nodes of a process have one clock for the others."""

    def __init__(self, inner: HivemindDirectory) -> None:
        self.__dict__.update(vars(inner))

    async def clocks_ahead_s(self, peers: Iterable[PeerId]) -> list[float]:
        first, *live = dict.fromkeys(peers)
        return [*await super().clocks_ahead_s([first]), *(0.0 for _ in live)]


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

    PatientLoop().play(story())


@pytest.mark.swarm
def test_who_finds_another_time_is_told_unless_most_of_those_that_it_knows_have_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        right = time.time()
        late = right - HOUR_S
        b = await Libp2p.start(tmp_path / "b", LISTEN, (), lambda: late)
        a = await Libp2p.start(tmp_path / "a", LISTEN, (), lambda: right)  # hivemind has one clock for both
        c = await Libp2p.start(tmp_path / "c", LISTEN, (), lambda: right)
        try:
            await a.directory([KEY], [])
            own, lost = await b.directory([KEY], []), {a.peer: await a.addresses()}
            found = await meet(b, own, list(lost.values()))
            assert found == [a.peer]
            assert await time_to_take(b, own, found, {}) == pytest.approx(HOUR_S, abs=0.01)
            known = lost | {c.peer: await c.addresses()}
            assert await time_to_take(b, WithOwnTime(own), found, known) == 0.0
            twice = [*found, *found]
            assert await time_to_take(b, WithOwnTime(own), twice, known) == 0.0, "one of two counts once"
        finally:
            await asyncio.gather(*(one.close() for one in (a, b, c)))

    PatientLoop().play(story())
