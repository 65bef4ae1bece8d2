"""One of six real peers claims ten times its work over libp2p: by the signed records, its share is what it did."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from decentral.commands.ledger import of_journals
from decentral.core.credit import contributions
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.runtime.own_record import OwnRecord
from decentral.sim.liars import INFLATED_TOKENS
from tests.hostile.test_real_liar import LIAR, RealSwarm
from tests.peers.runtime.host_swarm import MakeSetup

SECONDS = 40.0


class SixPeers(RealSwarm):
    honest = "ABCDF"
    gossip: Mapping[str, float] = MappingProxyType({"window_s": 0.5, "start_window_s": 0.5, "core_share": 1.0})


@pytest.fixture
def swarm(setup_of: MakeSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SixPeers:
    """A swarm whose liar also publishes ten times its speed and its tokens."""
    made, honest = SixPeers(setup_of, tmp_path), OwnRecord.compose

    def compose(own: OwnRecord, phase: PeerPhase, now: Seconds) -> PeerRecord:
        record = honest(own, phase, now)
        if own.setup.now.own.peer != made.identities[LIAR].peer:
            return record
        profile = replace(record.profile, tokens_per_s=INFLATED_TOKENS * record.profile.tokens_per_s)
        return replace(record, profile=profile, tokens=INFLATED_TOKENS * record.tokens)

    monkeypatch.setattr(OwnRecord, "compose", compose)
    return made


@pytest.mark.night
@pytest.mark.swarm
def test_the_share_of_a_liar_is_within_a_twentieth_of_what_it_did(swarm: SixPeers) -> None:
    async def story() -> None:
        await swarm.connect("inflated", floods=False)
        try:
            running = [await swarm.start("A")]
            running += [await swarm.start(name, contacts="A") for name in (swarm.honest[1:] + LIAR)]
            began = swarm.loop.time()
            await swarm.until(lambda: swarm.loop.time() > began + SECONDS)
            for host in swarm.hosts.values():
                host.stop("enough")
            await asyncio.gather(*running)
        finally:
            await swarm.close()

    swarm.play(story())
    _, statements = of_journals([str(swarm.folder(name)) for name in swarm.identities])
    found = {PeerId(one.peer): one for one in contributions(statements)}
    tokens = {swarm.identities[name].peer: host.node.progress.tokens for name, host in swarm.hosts.items()}
    liar = swarm.identities[LIAR].peer
    did, credited = tokens[liar] / sum(tokens.values()), found[liar].share
    print(f"did {did:.4f}, credited {credited:.4f}, claimed {found[liar].claimed_tokens / tokens[liar]:.1f} times")
    assert credited == pytest.approx(did, rel=0.05)
