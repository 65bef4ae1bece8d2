"""A private swarm of real nodes in virtual time: the uninvited stay out, whoever is revoked goes, the others train."""

from dataclasses import replace
from functools import partial
from random import Random

from decentral.comm.wire.invitations import FounderKeys
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm, revoked_key
from decentral.comm.wire.transport import Found
from decentral.core import config
from decentral.peers.membership.revocation_watch import NO_MEMBER
from decentral.sim import faults
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.host import Pace
from decentral.sim.network.geography import SwarmGeography, TypicalLink
from decentral.sim.report import RunReport
from decentral.sim.run import Scenario, run
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings
from decentral.sim.sweep import QUICK, SETTINGS, SPAN_MODEL, with_memory_for
from decentral.sim.virtual_claims import EPOCH
from decentral.sim.virtual_signer import VirtualSigner

SEED = 3
FOUNDER = FounderKeys.create("simulated", Random(SEED).randbytes)


def swarm(peers: int = 4) -> SimulatedSwarm:
    run = config.load(None, SETTINGS)
    settings = SwarmSettings.of(run, Pace(0.4, 0.05, report_s=2.0), (1.0,), 1024, QUICK)
    found = SimulatedSwarm(replace(settings, founder=FOUNDER), SEED, SwarmGeography(SEED, TypicalLink(delay_s=0.02)))
    for number in range(peers):
        found.agenda.at(0.3 * number, partial(found.start, found.add()))
    return found


def with_donors(donors: tuple[int, ...], spec: str = "") -> RunReport:
    """Four peers that each have memory for a half of the layers, in a private swarm. The report is after 150 s."""
    run_config = config.load(None, [*SETTINGS, *SPAN_MODEL, "routes.overlap=true"])
    settings = SwarmSettings.of(run_config, Pace(1.0, 0.05, report_s=5.0), (1.0,), 64, QUICK)
    private = replace(with_memory_for(settings, [2], 8), founder=FOUNDER, donors=donors)
    return run(Scenario(private, 4, 150.0, SEED, tuple(faults.parse(spec)), TypicalLink(0.01)))


def test_members_that_only_donate_have_work_and_the_others_begin_it() -> None:
    busy = [one["busy_fraction"] for one in with_donors((2, 3)).by_peer]
    assert min(busy) > 0.5


def test_where_all_that_begin_have_gone_from_the_first_layers_another_one_takes_them() -> None:
    """The donors beside it cannot, and would be without work for good."""
    report = with_donors((2, 3), "crash 0 at 30")
    after = [one.tokens for one in report.samples if one.at > 100]
    assert after[-1] - after[0] > 40 * 64


def roster_of(member: SimulatedPeer) -> set[str]:
    assert member.host is not None
    return set(member.host.node.roster.live)


def names(members: list[SimulatedPeer]) -> set[str]:
    return {member.peer for member in members}


def revoke(found: SimulatedSwarm, member: SimulatedPeer) -> tuple[str, dict[str, bytes]]:
    """The founder's list comes into the DHT, as `python -m decentral.invite --revoke` brings it there."""
    assert member.holding is not None
    packed = FOUNDER.revoke(1, frozenset({member.holding.invitation.id})).packed
    herald = found.add()
    assert herald.holding is not None
    signer = MemberSigner(VirtualSigner(herald.peer), PrivateSwarm(herald.peer, herald.holding, found.clock(herald)))
    key, expires = revoked_key(FOUNDER.run), EPOCH + found.agenda.now + 600
    value = signer.seal(key, packed, expires)
    assert found.records.store(herald.peer, key, herald.peer, value, expires)
    return key, {herald.peer: value}


def test_members_find_each_other_and_exchange() -> None:
    found = swarm()
    found.agenda.run(60.0)
    for member in found.members:
        assert member.training
        assert roster_of(member) == names(found.members) - {member.peer}


def test_an_uninvited_peer_is_in_no_roster_and_gets_nothing() -> None:
    found = swarm()
    found.agenda.run(30.0)
    intruder = found.add()
    intruder.holding = None
    found.start(intruder)
    found.agenda.run(90.0)
    assert roster_of(intruder) == set()
    assert intruder.host is not None
    assert not intruder.host.node.join.fetch.used
    members = found.members[:-1]
    assert all(roster_of(member) == names(members) - {member.peer} for member in members)
    refused = sum(member.host.port.refused["uninvited"] for member in members if member.host)
    assert refused > 0


def test_a_revoked_peer_is_dropped_by_all_and_stops_within_a_minute() -> None:
    found = swarm()
    found.agenda.run(30.0)
    gone, *others = found.members
    revoke(found, gone)
    found.agenda.run(90.0)
    assert gone.host is not None
    assert (gone.host.ended or "").startswith(NO_MEMBER)
    assert all(roster_of(member) == names(others) - {member.peer} for member in others)
    found.agenda.run(150.0)
    assert all(member.training for member in others)


def test_hostile_nodes_that_hide_the_list_of_revocations_do_not_keep_it_from_the_members() -> None:
    """The revoked peer itself may own the DHT's key. One member was told by the founder's command."""
    found = swarm(10)
    FaultInjector(found).plan(faults.parse("eclipse revoked at 25 for 200"))
    found.agenda.run(30.0)
    gone, told, *others = found.members
    key, values = revoke(found, gone)
    assert told.host is not None
    told.host.deliver(Found(key, values))
    found.agenda.run(90.0)
    members = [told, *others]
    assert all(roster_of(member) == names(members) - {member.peer} for member in members)
    assert gone.host is not None
    assert (gone.host.ended or "").startswith(NO_MEMBER)


def test_the_same_seed_gives_the_same_private_swarm() -> None:
    def steps() -> list[int]:
        found = swarm()
        found.agenda.run(40.0)
        return [member.host.node.progress.step for member in found.members if member.host]

    assert steps() == steps()
