"""Shares are those of what simulated peers trained, also if one claims ten times its work, or was away for a time."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from decentral.core.credit import Credit, Statement, contributions
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.membership.statements import statement_of
from decentral.peers.runtime.own_record import OwnRecord
from decentral.sim import surrogate, surrogate_model, surrogate_stages, swarm
from decentral.sim.liars import INFLATED_TOKENS
from tests.sim.test_fault_injector import FaultySwarm

PEERS, LIAR = 6, 5
SECONDS = 360.0


@pytest.fixture(autouse=True)
def long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the surrogate's eight numbers differs too much by chance."""
    for module in (surrogate, surrogate_model, surrogate_stages, swarm):
        monkeypatch.setattr(module, "NUMBERS", 64)


@pytest.fixture
def liars(monkeypatch: pytest.MonkeyPatch) -> set[PeerId]:
    """Peers whose records claim INFLATED_TOKENS times their tokens and their speed; at first there are none."""
    lying, honest = set[PeerId](), OwnRecord.compose

    def compose(own: OwnRecord, phase: PeerPhase, now: Seconds) -> PeerRecord:
        record = honest(own, phase, now)
        if own.setup.now.own.peer not in lying:
            return record
        profile = replace(record.profile, tokens_per_s=INFLATED_TOKENS * record.profile.tokens_per_s)
        return replace(record, profile=profile, tokens=INFLATED_TOKENS * record.tokens)

    monkeypatch.setattr(OwnRecord, "compose", compose)
    return lying


def played(spec: str, lying: set[PeerId]) -> tuple[list[Credit], dict[PeerId, int]]:
    """Return the contributions by the peers' records, and the tokens that each peer has really trained."""
    faulty = FaultySwarm(spec, peers=PEERS)
    if spec:
        lying.add(faulty[LIAR].peer)
    faulty.play(SECONDS)
    nodes = {member.peer: member.host.node for member in faulty.swarm.living if member.host}
    statements = {peer: statement_of(node.compose_record(SECONDS, False)) for peer, node in nodes.items()}
    return contributions(statements), {peer: node.progress.tokens for peer, node in nodes.items()}


def errors(found: Sequence[Credit], tokens: dict[PeerId, int]) -> dict[str, float]:
    """By peer: the relative error of its share."""
    total = sum(tokens.values())
    return {one.peer: one.share / (tokens[PeerId(one.peer)] / total) - 1 for one in found}


def test_shares_of_honest_peers_are_those_of_their_tokens(liars: set[PeerId]) -> None:
    found, tokens = played("", liars)
    assert max(map(abs, errors(found, tokens).values())) < 0.05
    assert {one.witnesses for one in found} == {PEERS - 1}


def test_the_share_of_a_liar_that_claims_ten_times_its_work_is_that_of_what_it_did(liars: set[PeerId]) -> None:
    found, tokens = played(f"lie {LIAR} inflated at 0 for {SECONDS:g}", liars)
    (liar,) = liars
    claimed = next(one for one in found if one.peer == liar).claimed_tokens
    assert claimed == INFLATED_TOKENS * tokens[liar]
    assert max(map(abs, errors(found, tokens).values())) < 0.05


def test_who_was_away_lowers_nobody_and_is_not_credited_for_its_absence(liars: set[PeerId]) -> None:
    """One of three is killed, returns, and leaves for good: shares are those of tokens after each of these times."""
    killed, back, left, end = 150.0, 250.0, 400.0, 600.0
    faulty = FaultySwarm(f"crash 2 at {killed:g}; restart 2 at {back:g}; leave 2 at {left:g}", peers=3)
    statements, lives = dict[PeerId, Statement](), dict[tuple[PeerId, int], int]()
    for until in (killed, back, left, end):
        faulty.play(until - 0.5)
        for member in faulty.swarm.living:
            if member.host:
                node = member.host.node
                statements[member.peer] = statement_of(node.compose_record(until, False))
                lives[member.peer, member.lives] = node.progress.tokens
        tokens = {peer: sum(count for (of, _), count in lives.items() if of == peer) for peer in statements}
        found = contributions(statements)
        assert max(map(abs, errors(found, tokens).values())) < 0.05, until
    hours = {one.peer: one.hours for one in found}
    assert 0.9 * end < 3600 * hours[faulty[0].peer] <= end
    assert 0.9 * (left - back + killed) < 3600 * hours[faulty[2].peer] <= left - back + killed
