"""Which peers of the swarm each machine asks."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decentral.comm.wire.identity import Identity
from decentral.comm.wire.meter import Meter
from decentral.core.config import Config, GossipConfig
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import RetainedStates
from decentral.core.units import MiB
from decentral.peers.membership.holders import Holders
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.roster import Roster, RosterEntry
from decentral.peers.membership.swarm_size import SwarmSize
from decentral.peers.runtime.peer_selection import FASTEST_DEVICE, NEVER, PeerSelection
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import NodeSetup, PresentSetup
from decentral.peers.runtime.window_lengths import ALONE_TIMES, LONGEST_WINDOW_S
from decentral.scheduler.throughput.link_limits import TokenLinks

RUN = RunId("gpt-3fa2c1")
FRAGMENTS = (Fragment(0, 0, 1, 100), Fragment(1, 1, 3, 200))
PROFILE = Profile("cpu", 1 << 30, 1e9, 1e4)
A, B, C, D = (PeerId(name) for name in "ABCD")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load_or_create(tmp_path_factory.mktemp("own") / "identity.key")


class Swarm:
    """A peer selection and its roster; `meet` adds a peer that holds layers [first, last)."""

    def __init__(
        self,
        own: Identity,
        algorithm: Literal["pull", "allreduce"] = "pull",
        partners: int = 2,
        held: tuple[Fragment, ...] = FRAGMENTS,
    ) -> None:
        config = Config(gossip=GossipConfig(algorithm=algorithm, partners=partners, link_share=0.8, core_share=0.02))
        setup = NodeSetup(config, RUN, own, held, [()] * len(held), 3, PROFILE, (), contacts=(D,))
        self.live: dict[PeerId, RosterEntry] = {}
        size = SwarmSize(RUN, own.peer, Random(0))
        holders = Holders(own.peer, FRAGMENTS, TokenLinks.of(config))
        roster = Roster(RUN, own, config.swarm, self, size, holders, self.live)
        self.meter = Meter()
        progress = TrainingProgress(config.train, config.swarm, None)
        self.asks = PeerSelection(PresentSetup(setup), roster, self.meter, progress, Random(0))

    def compose_record(self, now: float, leaving: bool) -> PeerRecord:
        raise AssertionError("no record is announced here")

    def meet(
        self,
        peer: PeerId,
        first: int = 0,
        last: int = 3,
        phase: PeerPhase = PeerPhase.TRAINING,
        kept: RetainedStates = (),
    ) -> "Swarm":
        record = PeerRecord(RUN, 0.0, (), PROFILE, first, last, 0, 0, 0, phase=phase, kept=kept)
        self.live[peer] = RosterEntry(record, 60.0)
        self.asks.roster.changes += 1
        return self


def test_a_holder_has_all_of_the_fragment_and_trains(own: Identity) -> None:
    swarm = Swarm(own).meet(C).meet(A, 1, 3).meet(B, 0, 2).meet(D, phase=PeerPhase.JOINING)
    assert swarm.asks.holders(1) == [A, C]


def test_partners_are_different_holders_and_as_many_as_the_run_wants(own: Identity) -> None:
    swarm = Swarm(own).meet(A).meet(B).meet(C)
    drawn = swarm.asks.partners(0, 0.0)
    assert len(set(drawn)) == len(drawn) == 2


def test_a_slow_link_is_drawn_seldom_but_not_never(own: Identity) -> None:
    swarm = Swarm(own, partners=1).meet(A).meet(B)
    swarm.meter.saw(A, 1.0, 0.0, 0, 100 * MiB)
    swarm.meter.saw(B, 100.0, 0.0, 0, 1 * MiB)
    drawn = Counter(swarm.asks.partners(0, 0.0)[0] for _ in range(500))
    assert 0 < drawn[B] < drawn[A] / 5


def test_allreduce_has_everybody_for_a_partner(own: Identity) -> None:
    assert Swarm(own, "allreduce").meet(B).meet(A).asks.partners(0, 0.0) == [A, B]


def test_a_newcomer_asks_peers_that_train_or_all_while_none_does(own: Identity) -> None:
    swarm = Swarm(own).meet(B, phase=PeerPhase.JOINING).meet(A, phase=PeerPhase.JOINING)
    assert swarm.asks.donors() == [A, B]
    assert swarm.meet(C).asks.donors() == [C]


def test_the_newest_retained_state_counts(own: Identity) -> None:
    swarm = Swarm(own).meet(A, kept=((1, 5),)).meet(B, kept=((1, 7), (0, 9))).meet(C, kept=((1, 7),))
    assert swarm.asks.newest_retained(1) == (7, [B, C])
    assert Swarm(own).meet(A).asks.newest_retained(1) == (NEVER, [])


def test_a_round_may_have_begun_with_peers_that_no_record_tells_of(own: Identity) -> None:
    swarm = Swarm(own).meet(A).meet(B, phase=PeerPhase.JOINING)
    assert swarm.asks.acquaintances() == [A, B, D]
    assert swarm.asks.trainers() == [A]


# The length of windows


def test_windows_are_as_long_as_the_config_says_while_nothing_is_known_to_cost_much(own: Identity) -> None:
    asks = grown(Swarm(own)).asks
    assert asks.lengths.windows(1, 1000) == (1, "")
    assert asks.lengths.period_s(1, 1000) == asks.lengths.window_s() == 0.5


def grown(swarm: Swarm) -> Swarm:
    """Beyond the swarm's first steps."""
    swarm.asks.progress.lr_step = 1000
    return swarm


def test_a_slow_link_stretches_windows_and_is_named(own: Identity) -> None:
    swarm = grown(Swarm(own).meet(A))
    swarm.meter.saw(A, 100.0, 0.0, 100_000, 0)  # 1000 bytes/s
    windows, bound = swarm.asks.lengths.windows(1, 10_000)
    assert bound == "link"
    assert windows > 10
    assert swarm.asks.lengths.period_s(1, 10_000) == windows * 0.5


def test_gossip_leaves_half_of_the_uplink_to_tokens_where_a_peer_holds_a_part_of_the_model(own: Identity) -> None:
    """Sending all layers takes 0.35 s of the window's 0.5: less than 0.8 of them, but more than a half."""
    for held, size, windows in ((FRAGMENTS, 233, 1), (FRAGMENTS[1:], 350, 2)):
        swarm = grown(Swarm(own, held=held).meet(A))
        swarm.meter.saw(A, 100.0, 0.0, 100_000, 0)  # 1000 bytes/s
        assert swarm.asks.lengths.windows(1, size)[0] == windows


def test_gossip_that_costs_much_stretches_windows_and_the_cores_are_named(own: Identity) -> None:
    swarm = grown(Swarm(own).meet(A))
    swarm.asks.lengths.cost.compute_s, swarm.asks.lengths.cost.cores = 0.007, 1.0
    assert swarm.asks.lengths.windows(1, 10) == (2, "cores")  # two fragments, 1.5% of a core


def test_the_tighter_of_two_bounds_is_named(own: Identity) -> None:
    swarm = grown(Swarm(own).meet(A))
    swarm.asks.lengths.cost.compute_s, swarm.asks.lengths.cost.cores = 0.01, 1.0
    swarm.meter.saw(A, 100.0, 0.0, 100_000, 0)
    assert swarm.asks.lengths.windows(1, 10_000)[1] == "link"
    swarm.asks.lengths.cost.compute_s = 100.0
    assert swarm.asks.lengths.windows(1, 10_000)[1] == "cores"


def test_in_the_swarm_s_first_steps_gossip_may_cost_more_and_windows_are_shorter(own: Identity) -> None:
    asks = Swarm(own).asks
    asks.lengths.cost.compute_s, asks.lengths.cost.cores = 0.006, 1.0
    assert asks.lengths.window_s() == 0.125
    assert asks.lengths.windows(1, 10) == (4, "cores")
    asks.progress.lr_step = 1000
    assert asks.lengths.window_s() == 0.5
    assert asks.lengths.windows(1, 10) == (2, "cores"), "twice as long, since the larger share is gone"


def test_no_measurement_stretches_windows_without_limit(own: Identity) -> None:
    """A partner that reads a probe slowly chooses what the link seems to carry."""
    swarm = grown(Swarm(own).meet(A))
    swarm.meter.saw(A, 1e6, 0.0, 100_000, 0)
    assert swarm.asks.lengths.windows(1, 1_000_000) == (1024, "link")
    swarm.asks.lengths.cost.compute_s, swarm.asks.lengths.cost.cores = 1e9, 1.0
    assert swarm.asks.lengths.windows(1, 1_000_000) == (1024, "cores")
    assert LONGEST_WINDOW_S / 2 < swarm.asks.lengths.period_s(1, 1_000_000) <= LONGEST_WINDOW_S


# Windows of the swarm


def needing(swarm: Swarm, **needs: float) -> Swarm:
    """Others need windows of so many seconds."""
    for name, window_s in needs.items():
        swarm.meet(PeerId(name))
        record = replace(swarm.live[PeerId(name)].record, window_s=window_s)
        swarm.live[PeerId(name)] = RosterEntry(record, 60.0)
    swarm.asks.roster.changes += 1
    return swarm


def test_where_half_of_the_peers_need_longer_windows_all_have_them(own: Identity) -> None:
    assert needing(grown(Swarm(own)), A=2.0, B=2.0, C=0.5).asks.lengths.windows(1, 10) == (4, "swarm")
    assert needing(grown(Swarm(own)), A=2.0).asks.lengths.windows(1, 10) == (4, "swarm")


def test_one_slow_peer_or_liar_makes_nobody_s_windows_longer(own: Identity) -> None:
    assert needing(grown(Swarm(own)), A=1e17, B=0.5, C=0.5).asks.lengths.windows(1, 10) == (1, "")


def test_a_need_that_the_swarm_invents_is_limited_as_ours_is(own: Identity) -> None:
    assert needing(grown(Swarm(own)), A=1e17, B=1e17).asks.lengths.windows(1, 10)[0] * 0.5 <= LONGEST_WINDOW_S


def test_peers_with_other_layers_do_not_count(own: Identity) -> None:
    swarm = needing(grown(Swarm(own)), A=2.0)
    swarm.live[A] = RosterEntry(replace(swarm.live[A].record, first=3, last=9), 60.0)
    swarm.asks.roster.changes += 1
    assert swarm.asks.lengths.windows(1, 10) == (1, "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=7))
def test_all_peers_come_to_windows_that_end_together_whoever_looks(own: Identity, needs: list[float]) -> None:
    """Each by the others' records: those of at least half of them are the same, the others' are doublings."""
    found = []
    for number, window_s in enumerate(needs):
        others = {f"Q{place}": need for place, need in enumerate(needs) if place != number}
        swarm = needing(grown(Swarm(own)), **others)
        swarm.asks.lengths.cost.compute_s, swarm.asks.lengths.cost.cores = 0.02 * window_s / 2 * 0.99, 1.0
        assert swarm.asks.lengths.needed_s(1, 10) == window_s
        found.append(swarm.asks.lengths.windows(1, 10)[0])
    common = min(found)
    assert 2 * found.count(common) >= len(found)
    assert all((times // common).bit_count() == 1 and times % common == 0 for times in found)


# Thin links


def test_over_a_thin_link_fewer_are_pulled_from_and_windows_are_shorter_for_it(own: Identity) -> None:
    swarm = grown(Swarm(own, partners=3).meet(A).meet(B).meet(C))
    swarm.meter.saw(A, 10.0, 0.0, 400_000, 0)
    assert len(swarm.asks.partners(1, 0.0)) == 3  # until a window's bytes are known
    windows, bound = swarm.asks.lengths.windows(1, 10_000)
    assert (windows, bound) == (2, "link")  # 30 kB for each of two, 0.8 of the time
    assert len(swarm.asks.partners(1, 0.0)) == 2
    swarm.meter.saw(A, 10.0, 0.0, 40_000_000, 0)
    assert swarm.asks.lengths.windows(1, 10_000) == (1, "")
    assert len(swarm.asks.partners(1, 0.0)) == 3


def over_a_thin_link(own: Identity) -> Swarm:
    """Of which windows of 10 kB a fragment would need four times the shortest: 45 kB in 0.8 of the time, at 40 kB/s."""
    swarm = grown(Swarm(own, partners=3).meet(A).meet(B).meet(C))
    swarm.meter.saw(A, 10.0, 0.0, 400_000, 0)
    return swarm


def test_a_link_is_thin_that_would_stretch_windows_with_dense_codes(own: Identity) -> None:
    swarm = over_a_thin_link(own)
    assert not swarm.asks.lengths.is_thin(1, 3_000)
    assert swarm.asks.lengths.is_thin(1, 10_000)
    assert swarm.asks.lengths.is_thin(1, 3_000), "not until dense codes need much less than the link carries"
    assert not swarm.asks.lengths.is_thin(1, 1_000)
    assert not swarm.asks.lengths.is_thin(1, 3_000)
    swarm.asks.progress.lr_step = 10
    assert not swarm.asks.lengths.is_thin(1, 10_000), "in the swarm's first steps"


def test_a_link_is_not_thin_where_the_cores_need_windows_as_long(own: Identity) -> None:
    swarm = over_a_thin_link(own)
    swarm.asks.lengths.cost.compute_s, swarm.asks.lengths.cost.cores = 0.03, 1.0
    assert not swarm.asks.lengths.is_thin(1, 10_000)


@pytest.mark.parametrize(("others_s", "thin"), [(2.0, True), (4.0, False)])
def test_a_link_is_thin_while_the_others_need_no_longer_windows_than_it(
    own: Identity, others_s: float, thin: bool
) -> None:
    """Where all links are alike each needs what the others need: if none began, all would wait for each other."""
    swarm = needing(over_a_thin_link(own), A=others_s, B=others_s, C=others_s)
    assert swarm.asks.lengths.is_thin(1, 10_000) is thin


# What others publish of their speed


def publishing(swarm: Swarm, **speeds: float) -> PeerSelection:
    """Others publish so many tokens/s; their first records came at 0, and the last ones will expire at 1000."""
    for name, tokens_per_s in speeds.items():
        record = swarm.meet(PeerId(name)).live[PeerId(name)].record
        profile = replace(record.profile, tokens_per_s=tokens_per_s)
        swarm.live[PeerId(name)] = RosterEntry(replace(record, profile=profile), 1000.0)
    swarm.asks.roster.changes += 1
    return swarm.asks


def test_who_never_publishes_a_speed_is_believed_to_have_the_lowest_one(own: Identity) -> None:
    asks = publishing(Swarm(own), A=0.0, B=200.0, C=300.0)
    assert asks.tokens_per_s(A, 0) == 200.0
    asks.roster.live[A].expires = 60.0  # its first record
    assert asks.tokens_per_s(A, 0) == 0.0


def test_an_absurd_speed_is_believed_as_far_as_devices_differ(own: Identity) -> None:
    asks = publishing(Swarm(own), A=1e12, B=2e4, C=3e4)
    assert asks.tokens_per_s(A, 0) == FASTEST_DEVICE * 2e4
    assert asks.tokens_per_s(B, 0) == 2e4
    assert publishing(Swarm(own), A=1e12).tokens_per_s(A, 0) == FASTEST_DEVICE * PROFILE.tokens_per_s


def test_where_only_one_other_peer_holds_our_layers_it_makes_our_windows_a_few_times_as_long_at_most(
    own: Identity,
) -> None:
    assert needing(grown(Swarm(own)), A=1e17).asks.lengths.windows(1, 10) == (ALONE_TIMES, "swarm")
    assert needing(grown(Swarm(own)), A=1.0).asks.lengths.windows(1, 10) == (2, "swarm")
