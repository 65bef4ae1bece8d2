"""Swarms that hold the model in spans, in virtual time: real nodes, jobs and placement with surrogate weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.router import Router
from decentral.core import config, jobs, rng
from decentral.core.ids import PeerId
from decentral.core.jobs import (
    Apply,
    Backward,
    BackwardDone,
    Draw,
    Drop,
    ExecutionFailed,
    Forward,
    ForwardDone,
    Seal,
    Sealed,
)
from decentral.core.journal.events import CopyLine, MoveLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.engine.micro_batch_names import MicroBatchNames
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.peers.membership.swarm_size import key_of
from decentral.scheduler.placement import evaluate, recover
from decentral.scheduler.placement.cold_copies import ColdCopies
from decentral.scheduler.placement.evaluate import SwarmPlan
from decentral.scheduler.placement.move import MoveEffect, MovePhase, SpanMove
from decentral.scheduler.placement.plans import KnownPlan, SwarmPlans
from decentral.sim import faults, sweep
from decentral.sim.host import Pace
from decentral.sim.invariants.evidence import Violation
from decentral.sim.network.geography import TypicalLink
from decentral.sim.real_training import real_gradients
from decentral.sim.report import RunReport
from decentral.sim.run import Scenario, run
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.surrogate import SurrogateDisk, SurrogateWorkload
from decentral.sim.surrogate_model import DESCENT_RATE, STEP_NOISE, SurrogateModel
from decentral.sim.swarm import RUN, SimulatedSwarm, SwarmSettings
from decentral.sim.virtual_claims import EPOCH
from decentral.sim.virtual_signer import VirtualSigner

MODEL = [*sweep.SETTINGS, *sweep.SPAN_MODEL]


def settings_for(fragments: int, *overrides: str, under_way: int = 8, step_s: float = 1.0) -> SwarmSettings:
    """The memory of each peer takes so many of the four fragments."""
    settings = SwarmSettings.of(
        config.load(None, [*MODEL, *overrides]), Pace(step_s, 0.05, report_s=5.0), (1.0,), 64, sweep.QUICK
    )
    return sweep.with_memory_for(settings, [fragments], under_way)


def scenario(spec: str = "", seconds: float = 90.0, peers: int = 4, settings: SwarmSettings | None = None) -> Scenario:
    settings = settings or settings_for(2, "routes.overlap=true")
    return Scenario(settings, peers, seconds, 1, tuple(faults.parse(spec)), TypicalLink(0.01))


@pytest.fixture(scope="module", autouse=True)
def _short_searches() -> Iterator[None]:
    """Search for plans in a tenth of the usual rounds, which suffice for four peers: searches take most test time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "SEARCH_ROUNDS", evaluate.SEARCH_ROUNDS // 10)
        yield


@pytest.fixture(scope="module")
def calm() -> RunReport:
    return run(scenario())


def test_peers_with_spans_train_together_and_each_layer_counts_each_micro_batch_once(calm: RunReport) -> None:
    """In part are those under way at the end, 14 to 17 however long the run is."""
    assert calm.throughput.tokens > 120 * 64
    assert calm.routes.routed["twice"] == 0
    assert calm.routes.routed["everywhere"] > 120
    assert calm.routes.routed["in_part"] < 0.1 * calm.routes.routed["everywhere"]


def test_a_peer_that_says_it_joins_and_never_comes_does_not_keep_lost_layers_from_others_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One record with all layers, renewed for ever, is all that it takes to say so. It might be the holder that comes
    back with the only state of them, so that they wait for half an hour: here for two minutes."""
    monkeypatch.setattr(recover, "RETURN_S", recover.JOINING_S)

    class Ghost:
        def begin(self, swarm: SimulatedSwarm) -> None:
            self.swarm, self.peer = swarm, PeerId("ghost")
            swarm.geography.add(self.peer, 99)
            swarm.agenda.at(20.0, self.tell)

        def tell(self) -> None:
            agenda, last = self.swarm.agenda, self.swarm.settings.fragments[-1].last
            key, now = key_of(RUN, self.peer), EPOCH + agenda.now
            record = PeerRecord(RUN, now, (), Profile("", 1 << 20, 0.0, 100.0), 0, last, 0, 0, 0)
            sealed = VirtualSigner(self.peer).seal(key, records.pack(record), now + 60)
            self.swarm.records.store(self.swarm.members[0].peer, key, self.peer, sealed, now + 60)
            agenda.after(10.0, self.tell)

        def line(self, peer: PeerId, t: Seconds, line: Log) -> None:
            pass

        def end(self) -> None:
            pass

    lost = replace(scenario("crash 1,2 at 30", seconds=320.0), audited=False)  # the audit waits for less
    after = [one.tokens for one in run(lost, watches=[Ghost()]).samples if one.at > 260]
    assert after[-1] - after[0] > 30 * 64


def test_the_weights_descend_as_micro_batches_are_counted(calm: RunReport) -> None:
    assert calm.replicas.loss < 0.5  # 1 at the start


def test_a_swarm_of_spans_has_one_digest_for_one_seed() -> None:
    short = scenario(seconds=30.0)
    assert run(short).audit.digest == run(short).audit.digest != run(replace(short, seed=2)).audit.digest


def test_a_micro_batch_costs_the_devices_together_one_pass_through_the_model(calm: RunReport) -> None:
    """Devices are busy for as long as the micro-batches that were counted take, and a little for gossip and retries."""
    busy_s = sum(one["busy_fraction"] for one in calm.by_peer) * 85
    assert calm.routes.routed["everywhere"] * 1.0 < busy_s * 1.1
    assert busy_s < 1.3 * calm.routes.routed["everywhere"] * 1.0


def test_a_peer_with_room_for_all_of_the_model_holds_it_and_trains_by_itself() -> None:
    report = run(scenario(peers=2, seconds=20.0, settings=settings_for(4)))
    assert all(one["tokens"] > 500 for one in report.by_peer)
    assert report.routes.routed["everywhere"] == 0


def test_a_killed_peer_comes_back_to_its_layers_and_its_numbers_go_on() -> None:
    """The audit checks that no number is counted twice; this test, that the swarm goes on."""
    report = run(scenario("crash 0 at 20; restart 0 at 25; crash 1 at 30; restart 1 at 33", seconds=120.0))
    assert report.routes.routed["twice"] == 0
    assert report.by_peer[0]["lives"] == 2
    assert report.by_peer[0]["tokens"] > 0
    late = [one.tokens for one in report.samples]
    assert late[-1] > late[len(late) // 2] > 0


def test_only_a_peer_that_was_frozen_knows_that_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its held executions could not be decided meanwhile (tests/comm/pipeline/test_hold_limits.py)."""
    told: dict[PeerId, Seconds] = {}
    monkeypatch.setattr(Router, "was_stopped", lambda routes, seconds: told.update({routes.stage.peer: seconds}))
    run(scenario("freeze 1 at 15 for 25", seconds=45.0))
    assert told.keys() == {"sim00001"}
    assert told[PeerId("sim00001")] == pytest.approx(25.0, abs=5.0)


def test_a_layer_whose_holders_all_die_is_taken_over_by_another_peer() -> None:
    """No peer has retained its state, so it begins anew when its holders have had a minute to come back."""
    report = run(scenario("crash 1,2 at 30", seconds=130.0))
    assert report.routes.moves == {"lost done": 1}
    assert report.routes.routed["twice"] == 0
    counted = {round(one.at): one.tokens for one in report.samples}
    assert counted[31] > 0
    assert counted[90] - counted[40] < 64 * 8  # only micro-batches that were under way
    assert counted[130] > counted[100] + 64 * 8


@dataclass
class Lines:
    """A Watch: the lines about copies and moves, with their virtual times."""

    copies: list[tuple[Seconds, CopyLine]] = field(default_factory=list)
    moves: list[tuple[Seconds, MoveLine]] = field(default_factory=list)

    def begin(self, swarm: SimulatedSwarm) -> None: ...

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        match log.event:
            case CopyLine() as line:
                self.copies.append((t - EPOCH, line))
            case MoveLine() as line:
                self.moves.append((t - EPOCH, line))

    def end(self) -> None: ...


def test_a_layer_whose_only_holder_dies_for_good_goes_on_from_a_copy_at_most_one_interval_old() -> None:
    """Fragment 3 has one holder, peer 1. The copy's step says that it is not the first one."""
    lines = Lines()
    report = run(scenario("crash 1 at 45; wipe 1 at 46", seconds=75.0), watches=[lines])
    before = [(at, line) for at, line in lines.copies if at < 45.0]
    assert {line.fragment for _, line in before} == {3}
    assert before[-1][0] >= 45.0 - 10.0  # swarm.checkpoint_every_s
    assert before[-1][1].step > before[0][1].step > 0
    at, move = lines.moves[0]
    assert (move.why, move.outcome) == ("lost", "done")
    assert at < 45.0 + recover.INITIALISE_AFTER_S / 3
    counted = {round(one.at): one.tokens for one in report.samples}
    assert counted[62] > counted[48] + 64 * 4
    assert counted[75] > counted[62] + 64 * 8  # a plan gives the layer up that has been saved, and one peer follows it


def test_a_layer_without_a_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdCopies, "review", lambda *_: [])
    with pytest.raises(Violation, match="has one holder, and no copy"):
        run(scenario())


@dataclass
class Parts:
    """A Watch: who holds a part of the model. From 60 s on those with the first layers follow a plan by which they stay
    there, if they are to."""

    planned: bool = False
    members: list[SimulatedPeer] = field(default_factory=list)

    def begin(self, swarm: SimulatedSwarm) -> None:
        self.members = swarm.members
        if self.planned:
            swarm.agenda.at(60.0, self.adopt)

    def with_layers(self, fragments: range) -> list[SimulatedPeer]:
        return [one for one in self.members if one.host is not None and one.host.node.setup.held == fragments]

    def adopt(self) -> None:
        first = self.with_layers(range(2))
        spans, made_from = tuple((one.peer, 0, 2) for one in first), (EPOCH + 50.0,) * len(first)
        plan = SwarmPlan(RUN, EPOCH + 50.0, "", spans, made_from)
        for one in first:
            assert one.host is not None
            assert one.host.node.span_manager is not None
            plans = one.host.node.span_manager.swarm_plans
            plans.adopted, plans.known[plans.own.peer] = plan, KnownPlan(plan, EPOCH + 1e3, b"")

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        pass

    def end(self) -> None:
        pass


def beside_whole_models(fault: str, planned: bool = False, seconds: Seconds = 170.0) -> RunReport:
    """Two peers with the whole model, and six with a half of it; the fault is of those with the last half."""
    settings = settings_for(2)
    mixed = replace(settings, memory=(1 << 40, 1 << 40, *6 * settings.memory))
    calm = replace(scenario(seconds=20.0, settings=mixed), peers=8, seed=6)
    parts = Parts()
    run(calm, watches=[parts])
    last = parts.with_layers(range(2, 4))
    assert (len(last), len(parts.with_layers(range(2)))) == (3, 3)
    spec = fault.format(",".join(str(one.number) for one in last))
    return run(replace(calm, seconds=seconds, faults=tuple(faults.parse(spec))), watches=[Parts(planned)])


def test_parts_train_beside_a_whole_model_that_has_no_memory_to_compute_for_them() -> None:
    """They waited for ever, since by its record it held the layers that they lacked."""
    settings = settings_for(2)
    needs, count = replace(settings.needs, whole_in_flight=1), len(settings.fragments)
    half = max(needs.span_bytes(at, at + 2, 2) for at in range(count - 1))
    tight = needs.span_bytes(0, count)
    assert (needs.capacity(0, count, tight), half < tight) == (0, True)
    mixed = replace(settings, planned_needs=needs, memory=(half, half, half, tight))
    report = run(scenario(seconds=60.0, settings=mixed))
    assert report.routes.routed["everywhere"] > 20


@pytest.mark.night
def test_layers_that_only_whole_models_hold_are_taken_from_them_and_all_train_more() -> None:
    report = beside_whole_models("crash {} at 30")
    assert report.routes.moves == {"relief done": 1}
    assert report.routes.routed["twice"] == 0
    tokens = {round(one.at): one.tokens for one in report.samples}
    assert tokens[170] - tokens[145] > 1.15 * (tokens[60] - tokens[35])  # 1.31; seeds 3 and 5: 1.21 and 1.18


@pytest.mark.night
def test_holders_that_come_back_in_time_are_not_replaced() -> None:
    assert beside_whole_models("freeze {} at 30 for 25").routes.moves == {}


@pytest.mark.night
def test_one_part_takes_them_however_long_fetching_takes_and_whoever_else_begins_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three did, and nobody was left with the first layers: what whole-model peers lease does not count."""
    review = SpanMove._proceed

    def fetching(move: SpanMove, now: Seconds) -> list[MoveEffect]:
        if move.phase is not MovePhase.FETCHING or now >= move._began_at + 60.0:
            return review(move, now)
        move.wake_at = move.fetch.last_piece_at = now + 2.0
        return []

    monkeypatch.setattr(SpanMove, "_proceed", fetching)
    monkeypatch.setattr(recover, "RELIEF_TURN_S", 10.0)
    moves = beside_whole_models("crash {} at 30", seconds=240.0).routes.moves
    assert moves["relief done"] == 1
    assert moves["relief failed"] >= 2


@pytest.mark.night
def test_a_plan_of_the_time_before_does_not_lead_back() -> None:
    assert beside_whole_models("crash {} at 30", planned=True).routes.moves == {"relief done": 1}


SLOW = scenario("slow 2 x20 at 30 for 300", seconds=180.0)


@pytest.mark.night
def test_peers_follow_one_plan_and_move_while_they_train() -> None:
    planned, stayed = run(SLOW), run(replace(SLOW, settings=replace(SLOW.settings, moves=False)))
    assert planned.routes.moves["plan done"] >= 1
    assert planned.routes.plans >= 1
    assert planned.routes.routed["twice"] == stayed.routes.routed["twice"] == stayed.routes.plans == 0
    last_third = [report.throughput.tokens - report.samples[-67].tokens for report in (planned, stayed)]
    assert last_third[0] > 1.05 * last_third[1]


def test_peers_that_do_not_look_at_others_plans_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwarmPlans, "_read", lambda *_: None)
    with pytest.raises(Violation, match="follow different plans"):
        run(SLOW)


@pytest.mark.parametrize("narrow", [(), ("model.bottleneck=8",)], ids=["all channels", "a bottleneck"])
def test_real_gradients_travel_through_spans_and_learn(narrow: tuple[str, ...], text: Path, tmp_path: Path) -> None:
    small = [
        *narrow,
        *("model.depth=2", "model.width=32", "model.context=16", "gossip.fragment_parameters=5000"),
        *("data.kind=text", f"data.path={text}", "train.micro_batch=4", "train.learning_rate=0.01"),
        *("train.warmup_steps=5", "routes.overlap=true"),
    ]
    unspanned = SwarmSettings.of(config.load(None, [*sweep.SETTINGS, *small]), Pace(1.0), (1.0,), 64, sweep.QUICK)
    settings = sweep.in_parts(real_gradients(unspanned, tmp_path))
    needs = settings.needs
    half = max(needs.span_bytes(0, 2), needs.span_bytes(2, len(needs.fragments)))
    settings = replace(settings, memory=(half,))
    losses: list[float] = []

    class LossObserver:
        def handled(self, host: object, event: object, effects: object) -> None: ...

        def done(self, host: object, job: object, outcome: object) -> None:
            if isinstance(outcome, jobs.BackwardDone) and outcome.loss:
                losses.append(outcome.loss / outcome.tokens)

    report = run(Scenario(settings, 3, 80.0, 1, audited=False), observer=LossObserver())
    assert report.routes.routed["everywhere"] > 50
    assert report.routes.routed["twice"] == 0
    assert sum(losses[-20:]) / 20 < 0.8 * sum(losses[:20]) / 20


# The surrogate's sums of gradients. Fragments are layers [0, 2) [2, 3) [3, 4) [4, 6).


def surrogate(first: int, last: int, *overrides: str) -> SurrogateWorkload:
    settings = settings_for(2, *overrides)
    chance = rng.arrays(1, "surrogate")
    model = SurrogateModel(settings.config, settings.fragments, blockwise, 64, settings.model.forms)
    return SurrogateWorkload(model, PeerId("P"), (first, last), chance, SurrogateDisk())


def drawn(number: int, *overrides: str) -> tuple[SurrogateWorkload, ForwardDone]:
    """An origin peer with layers [0, 3), and what it sends on of its micro-batch."""
    origin = surrogate(0, 3, *overrides)
    origin.counters.micro_batches = number
    sent = origin.do(Draw(1, 3))
    assert isinstance(sent, ForwardDone)
    return origin, sent


def test_activations_and_gradients_have_the_real_model_s_sizes() -> None:
    origin, sent = drawn(7)
    pair = MicroBatchNames.known("P").pair(7)  # one of it is given out, by chance: the other names audits
    assert (sent.number // 2, sent.tokens) == (pair // 2, 64)
    assert len(sent.blob) == 64 * 32 * 2 + 64 * 2  # bf16 hidden values, u16 targets
    back = surrogate(3, 6).do(Forward(1, 3, 6, 2, sent.layout, sent.blob))
    assert isinstance(back, BackwardDone)
    assert len(back.blob) == 64 * 32 * 2
    assert isinstance(origin.do(Backward(1, back.layout, back.blob)), BackwardDone)


def test_with_a_bottleneck_a_swarm_sends_its_channels_and_the_tokens() -> None:
    _, sent = drawn(7, "model.bottleneck=4")
    assert len(sent.blob) == 64 * 4 * 2 + 2 * 64 * 2  # bf16 hidden values, u16 targets and inputs
    back = surrogate(3, 6, "model.bottleneck=4").do(Forward(1, 3, 6, 2, sent.layout, sent.blob))
    assert isinstance(back, BackwardDone)
    assert len(back.blob) == 64 * 4 * 2


def test_a_step_moves_only_the_layers_that_the_micro_batch_went_through() -> None:
    _, sent = drawn(0)
    middle = surrogate(3, 6)
    passed = middle.do(Forward(1, 3, 4, 2, sent.layout, sent.blob))
    assert isinstance(passed, ForwardDone)
    back = surrogate(4, 6).do(Forward(1, 4, 6, 2, passed.layout, passed.blob))
    assert isinstance(back, BackwardDone)
    middle.do(Backward(1, back.layout, back.blob))
    sealed = middle.do(Seal())
    assert sealed == Sealed((1,))
    middle.do(Apply(0, 0, 0.0))
    through, beside = (gossiped.live for gossiped in middle.gossip.fragments)
    assert (through.tokens, beside.tokens) == (64, 0)
    assert float(through.theta.mean()) == pytest.approx(1 - DESCENT_RATE, abs=5 * STEP_NOISE)
    assert float(beside.theta.mean()) == 1.0


def test_a_sum_that_is_dropped_moves_nothing() -> None:
    _, sent = drawn(0)
    last = surrogate(3, 6)
    last.do(Forward(1, 3, 6, 2, sent.layout, sent.blob))
    last.do(Seal())
    last.do(Drop())
    last.do(Apply(0, 0, 0.0))
    assert [gossiped.live.tokens for gossiped in last.gossip.fragments] == [0, 0]


def test_a_gradient_that_is_undone_is_in_no_step() -> None:
    last = surrogate(3, 6)
    passes = []
    for number, local_id in ((0, 1), (1, 2)):
        _, sent = drawn(number)
        passes.append(Forward(local_id, 3, 6, 2, sent.layout, sent.blob))
        last.do(passes[-1])
    assert last.do(jobs.Undo(passes[0])) == jobs.Undone(1, True)
    assert last.do(Seal()) == Sealed((2,))
    last.do(Apply(0, 0, 0.0))
    assert [gossiped.live.tokens for gossiped in last.gossip.fragments] == [64, 64]


def test_what_a_move_gives_up_is_on_the_disk_and_taken_back_from_there() -> None:
    mover = surrogate(0, 3)
    mover.do(jobs.Start(newcomer=False))
    for gossiped, weight in zip(mover.gossip.fragments, (0.25, 0.5), strict=True):
        gossiped.live.theta.fill_(weight)
        mover.do(jobs.CloseWindow(gossiped.live.fragment.index, 1))
        mover.do(jobs.Merge(gossiped.live.fragment.index, 1, ()))
    assert mover.do(jobs.ChangeSpan(2, 4, (), 9)) == jobs.SpanChanged(True, retained=((0, 0),))
    assert [float(gossiped.live.theta[0]) for gossiped in mover.gossip.fragments] == pytest.approx([0.5, 1.0], abs=0.01)
    assert mover.do(jobs.ChangeSpan(0, 3, (), 9)) == jobs.SpanChanged(True, retained=((2, 9),))
    assert mover.lr_step == 9
    assert float(mover.gossip.fragments[0].live.theta[0]) == pytest.approx(0.25, abs=0.01)


def test_the_gradient_of_another_micro_batch_is_noticed() -> None:
    origin, _ = drawn(1)
    _, other = drawn(2)
    back = surrogate(3, 6).do(Forward(1, 3, 6, 2, other.layout, other.blob))
    assert isinstance(back, BackwardDone)
    with pytest.raises(AssertionError, match="gradient of"):
        origin.do(Backward(1, back.layout, back.blob))


def test_activations_of_another_layer_are_noticed() -> None:
    _, sent = drawn(0)
    with pytest.raises(AssertionError, match="layer"):
        surrogate(3, 6).do(Forward(1, 4, 6, 2, sent.layout, sent.blob))


@pytest.mark.parametrize("blob", [b"", bytes(17)])
def test_what_has_not_the_right_length_is_refused_and_changes_nothing(blob: bytes) -> None:
    _, sent = drawn(0)
    last = surrogate(3, 6)
    assert last.do(Forward(1, 3, 6, 2, sent.layout, blob)) == ExecutionFailed(1, "shape")
    assert last.do(Seal()) == Sealed(())


@pytest.mark.parametrize(
    ("job", "part"),
    [
        (Draw(1, 3), 1 / 2 / 3),
        (Forward(1, 2, 4, 8, (), b""), 1 / 2 / 3),
        (Forward(1, 3, 6, 8, (), b""), 1 / 2),
        (Backward(1, (), b""), 1 / 2 * 2 / 3),
        (Apply(0, 0, 0.0), 0.0),
    ],
)
def test_a_job_costs_its_layers_share_of_a_micro_batch(job: jobs.Job, part: float) -> None:
    """The forward pass is a third of it. At the model's end the backward pass follows at once."""
    origin, _ = drawn(0)
    assert origin.work(job) == pytest.approx(part)
