"""A node never raises and answers every question once, whatever others send and in whatever phase it is."""

import dataclasses
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, get_args

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.comm.gossip.exchange import BlockingPullTag, PullTag
from decentral.comm.gossip.gossip_cost import CoresUsed
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.pipeline.tags import ForwardTag
from decentral.comm.rounds.search import FollowTag
from decentral.comm.wire import blobs, messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import (
    MAX_PATIENCE_S,
    Hello,
    Message,
    Ping,
    Pong,
    Pull,
    Refused,
    RoundMember,
    Snapshot,
    Welcome,
)
from decentral.comm.wire.transport import Announce, Answered, Ask, Asked, AskFailed, Found, Lookup, Reply, Tag
from decentral.core import jobs
from decentral.core.config import Config, GossipConfig
from decentral.core.credit import SeenWork
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import AddressesLine, StatementLine, StatusLine
from decentral.core.machine import Log, Woke
from decentral.core.time_spent import TimeSpent
from decentral.peers.membership import records
from decentral.peers.membership.link_probes import ProbeTag, UploadTag
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.statements import opened
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.peers.runtime.witness import OWN_EVERY_S
from tests.comm.pipeline.one_form import one_form

RUN = RunId("gpt-3fa2c1")
NOW = 1.7e9
FRAGMENTS = (Fragment(0, 0, 1, 100), Fragment(1, 1, 3, 200))
LAYOUT = (Section("phi", "int8", 6, 6), Section("pseudo_gradient", "q4", 4, 2))
BLOB = b"ABCDEFGH"
PROFILE = Profile("cpu", 1 << 30, 1e9, 1e4)
ALGORITHMS = ("pull", "allreduce", "synchronous")
PHASES = ("joining", "training", "left")
FEW = settings(
    max_examples=12, phases=[Stage.explicit, Stage.generate]
)  # each example is a whole node, so shrinking would take minutes
STRANGER = PeerId("QmStranger")
UNDONE = (  # jobs that the played node waits for in vain
    *(jobs.Rest, jobs.EncodeSections, jobs.SetClock, jobs.Evaluate, jobs.Save, jobs.Start, jobs.Finish),
    *(jobs.Draw, jobs.Backward, jobs.Forget, jobs.Compare, jobs.Apply, jobs.Drop, jobs.Undo, jobs.Advance),
    *(jobs.ChangeSpan, jobs.ExportRetained, jobs.RetainCopy, jobs.DropCopy),
)

Algorithm = Literal["pull", "allreduce", "synchronous"]


@cache
def identity(name: str) -> Identity:
    return Identity.load_or_create(Path(mkdtemp()) / name)


class Played:
    """A node with its compute thread: jobs are done after each event, and time passes when a test says so."""

    def __init__(self, algorithm: Algorithm, phase: str, window_s: float = 1.0) -> None:
        config = Config(gossip=GossipConfig(algorithm=algorithm, window_s=window_s, start_window_s=window_s))
        self.known = identity("known")
        stage = StageConfig(
            RUN, identity("own").peer, 0, 3, FRAGMENTS, 9, 4, 1, lambda layer, sequences: one_form(LAYOUT)
        )
        self.node = Node(
            NodeSetup(
                config,
                RUN,
                identity("own"),
                FRAGMENTS,
                [LAYOUT, LAYOUT],
                3,
                PROFILE,
                ("/ip4/127.0.0.1/tcp/1",),
                routes=dataclasses.replace(stage, synchronous=algorithm == "synchronous"),
            )
        )
        self.now = NOW
        self.replies: Counter[int] = Counter()
        self.answers: dict[int, Envelope] = {}
        self.asks: list[Ask] = []
        self.effects: list[PeerEffect] = []
        self.carry(self.node.begin(self.now) if phase == "joining" else [])
        if phase != "joining":
            self.join_a_swarm()
        if phase == "left":
            self.carry(self.node.leave("interrupted", self.now))

    def join_a_swarm(self) -> None:
        """Meets the known peer, gets no state from it, and trains; in a synchronous run it trains with that peer."""
        self.node.begin(self.now)
        if self.node.rounds:
            self.meet(self.known)
        self.deliver(jobs.Started(0))
        self.meet(self.known)
        if self.node.rounds:
            both = tuple(
                sorted([RoundMember(self.known.peer, 0, 3), RoundMember(self.node.setup.own.peer, 0, 3)], key=str)
            )
            status = Envelope(messages.RoundStatus(RUN, 0, both))
            self.deliver(Answered(FollowTag(), self.known.peer, status, 0.1, 0.1, 10, 20))
        assert self.node.phase is PeerPhase.TRAINING

    def meet(self, peer: Identity) -> None:
        record = PeerRecord(RUN, self.now, (), PROFILE, 0, 3, 5, 5, 100, phase=PeerPhase.TRAINING)
        sealed = peer.seal(f"{RUN}/peers", records.pack(record), self.now + 600)
        self.deliver(Found(f"{RUN}/peers", {peer.peer: sealed}))

    def deliver(self, event: PeerEvent) -> None:
        self.carry(self.node.handle(event, self.now))

    def ask(self, number: int, sender: PeerId, message: Message, blob: bytes = b"") -> None:
        self.deliver(Asked(number, sender, Envelope(message, blob)))

    def pass_time(self, seconds: float) -> None:
        """Wakes the node whenever it wants to; nobody answers its own questions before their deadline."""
        end = self.now + seconds
        while self.node.wake_at is not None and self.node.wake_at <= end:
            self.now = max(self.now, self.node.wake_at)
            self.deliver(Woke())
        self.now = end

    def carry(self, effects: list[PeerEffect]) -> None:
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case Reply(request, envelope):
                    self.replies[request] += 1
                    self.answers[request] = envelope
                case Ask():
                    self.asks.append(effect)
                case jobs.CloseWindow(fragment, seq):
                    self.deliver(jobs.WindowClosed(fragment, seq, 64, LAYOUT, BLOB))
                case jobs.Merge(fragment, seq, parts):
                    self.deliver(jobs.Merged(fragment, seq, tuple(part.peer for part in parts), ()))
                case jobs.ExportState(fragment):
                    self.deliver(jobs.StateExported(fragment, LAYOUT, BLOB))
                case jobs.ImportState():
                    self.deliver(jobs.StateImported(True))
                case jobs.Forward(local_id, first):
                    self.deliver(
                        jobs.BackwardDone(local_id, 8, 1.0, LAYOUT, BLOB)
                        if first
                        else jobs.ExecutionFailed(local_id, "nan")
                    )
                case jobs.Seal():
                    self.deliver(jobs.Sealed(()))
                case jobs.CloseRound(round):
                    self.deliver(jobs.RoundClosed(round, (), ()))
                case _ if isinstance(effect, jobs.Job) and not isinstance(effect, UNDONE):
                    raise NotImplementedError(f"add {effect} to `carry` or UNDONE of tests/peers/runtime/test_node.py")


# Any message


def words(size: int) -> st.SearchStrategy[str]:
    return st.text(max_size=size)


def runs() -> st.SearchStrategy[str]:
    return st.sampled_from([RUN, "", "other-000000"]) | words(64)


def numbers(top: int = 1 << 62) -> st.SearchStrategy[int]:
    return st.integers(0, 3) | st.integers(0, top - 1) | st.just(int(NOW * 1000) + 5)


times = st.just(0.0) | st.floats(NOW - 100, NOW + 100) | st.floats(0, 1e11, exclude_max=True)
fragments = st.integers(0, 2) | st.integers(0, (1 << 20) - 1)
sections = st.builds(Section, words(32), words(16), numbers(1 << 40), numbers(1 << 40))
layouts = st.just(LAYOUT) | st.lists(sections, max_size=3).map(tuple)
digests = st.just(blobs.digest(BLOB)) | st.binary(min_size=16, max_size=16)
rates = st.floats(0, 1e12, exclude_max=True)
snapshots = st.builds(Snapshot, runs(), fragments, numbers(), numbers(), times, layouts, digests)
patience = st.floats(0, MAX_PATIENCE_S)
holds = st.floats(0, messages.MAX_ROUTE_S)
names = st.sampled_from([(), ("pseudo_gradient",), ("phi.0",)]) | st.lists(words(32), max_size=16).map(tuple)
lengths = st.integers(1, messages.MAX_CHUNK_BYTES)
hops = st.builds(messages.Hop, words(64), fragments, fragments)
members = st.builds(
    RoundMember, words(64) | st.sampled_from(["", str(STRANGER)]), fragments, st.integers(0, 3) | fragments
)
carried = st.builds(
    messages.CompletedMicroBatch,
    numbers(),
    numbers(),
    st.just((0,)) | st.lists(fragments, min_size=1, max_size=4).map(tuple),
    st.just((3,)) | st.lists(fragments, min_size=1, max_size=4).map(tuple),
)
executions = st.builds(messages.ExecutionId, words(64) | st.just(str(STRANGER)), numbers(), fragments)
MESSAGES: dict[type[Any], st.SearchStrategy[Any]] = {
    messages.Hello: st.builds(Hello, runs()),
    messages.Welcome: st.builds(Welcome, runs(), words(100)),
    messages.MembershipProof: st.builds(messages.MembershipProof, st.binary(min_size=1, max_size=200)),
    messages.Ping: st.builds(Ping, numbers()),
    messages.Pong: st.builds(Pong, numbers()),
    messages.Probe: st.builds(messages.Probe, st.integers(0, 1000) | st.just(messages.MAX_PROBE_BYTES)),
    messages.Probed: st.builds(messages.Probed, numbers()),
    messages.Pull: st.builds(Pull, runs(), fragments, numbers(), times, patience, st.booleans(), names),
    messages.Snapshot: snapshots,
    messages.Done: st.just(messages.Done()),
    messages.StateRequest: st.builds(messages.StateRequest, runs(), fragments, numbers(), lengths, st.booleans()),
    messages.StateChunk: st.builds(messages.StateChunk, runs(), fragments, numbers(), numbers(), numbers(), layouts),
    messages.ForwardRequest: st.builds(
        messages.ForwardRequest, runs(), words(64), numbers(), fragments, st.integers(1, 12), patience, holds, layouts
    ),
    messages.Offer: st.builds(messages.Offer, runs(), fragments, st.integers(1, 12)),
    messages.Load: st.builds(messages.Load, runs(), st.floats(0, 1e6), st.floats(0, 1e6), fragments),
    messages.ForwardStatusQuery: st.builds(messages.ForwardStatusQuery, runs(), executions),
    messages.BackwardResponse: st.builds(
        messages.BackwardResponse, runs(), rates, numbers(), st.lists(hops, max_size=3).map(tuple), layouts
    ),
    messages.CommitDecision: st.builds(
        messages.CommitDecision, runs(), st.lists(executions, max_size=3).map(tuple), executions.map(lambda one: (one,))
    ),
    messages.CommitQuery: st.builds(messages.CommitQuery, runs(), st.lists(executions, max_size=3).map(tuple)),
    messages.LeaseRequest: st.builds(messages.LeaseRequest, runs(), fragments, st.booleans()),
    messages.RecordsQuery: st.builds(
        messages.RecordsQuery,
        runs(),
        st.binary(max_size=64),
        st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(tuple),
        numbers(),
        st.binary(max_size=64),
        st.none() | st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(tuple),
    ),
    messages.PeerRecords: st.builds(
        messages.PeerRecords,
        runs(),
        st.lists(st.tuples(words(64), st.binary(max_size=64)), max_size=3).map(tuple),
        st.binary(max_size=64),
        st.lists(st.tuples(words(64), st.binary(max_size=64)), max_size=3).map(tuple),
    ),
    messages.RoundQuery: st.builds(messages.RoundQuery, runs(), numbers(), fragments, fragments, st.booleans()),
    messages.RoundStatus: st.builds(messages.RoundStatus, runs(), numbers(), st.lists(members, max_size=3).map(tuple)),
    messages.CollectRequest: st.builds(
        messages.CollectRequest, runs(), numbers(), words(64), fragments | st.none(), patience, st.booleans()
    ),
    messages.RoundReport: st.builds(
        messages.RoundReport,
        runs(),
        numbers(),
        members,
        st.lists(carried, max_size=3).map(tuple),
        rates,
        st.lists(members, max_size=3).map(tuple),
        st.lists(digests, max_size=3).map(tuple),
    ),
    messages.Refused: st.builds(Refused, words(32) | st.just("nothing-newer"), words(200) | numbers().map(str)),
}
any_message = st.one_of(*MESSAGES.values())
any_blob = st.sampled_from([b"", BLOB]) | st.binary(max_size=64)


def test_there_is_a_strategy_for_every_message() -> None:
    assert set(MESSAGES) == set(get_args(Message)), "add each to MESSAGES of tests/peers/runtime/test_node.py"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@FEW
@given(questions=st.lists(st.tuples(any_message, any_blob, st.booleans(), st.floats(0, 2)), min_size=1, max_size=6))
def test_every_question_gets_one_answer_in_bounded_time(
    algorithm: Algorithm, phase: str, questions: list[tuple[Message, bytes, bool, float]]
) -> None:
    played = Played(algorithm, phase, window_s=20.0)
    for number, (message, blob, known, pause_s) in enumerate(questions):
        played.ask(number, played.known.peer if known else STRANGER, message, blob)
        played.pass_time(pause_s)
    played.pass_time(MAX_PATIENCE_S + 1)
    assert played.replies == dict.fromkeys(range(len(questions)), 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@FEW
@given(answers=st.lists(st.tuples(any_message, any_blob), min_size=1, max_size=8))
def test_no_answer_to_our_own_questions_breaks_us(algorithm: Algorithm, answers: list[tuple[Message, bytes]]) -> None:
    played = Played(algorithm, "training")
    for message, blob in answers:
        played.pass_time(1.0)
        for ask in [played.asks.pop() for _ in range(len(played.asks))]:
            played.deliver(Answered(ask.tag, ask.to, Envelope(message, blob), 0.1, 0.1, 10, len(blob)))
    assert played.node.phase is PeerPhase.TRAINING


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@FEW
@given(answers=st.lists(st.tuples(any_message, any_blob), min_size=1, max_size=8))
def test_no_answer_of_a_donor_breaks_a_newcomer(algorithm: Algorithm, answers: list[tuple[Message, bytes]]) -> None:
    played = Played(algorithm, "joining")
    played.node.join.contacts = (played.known.peer,)
    played.node.join.begin(played.now)
    for message, blob in answers:
        played.pass_time(4.0)
        for ask in [played.asks.pop() for _ in range(len(played.asks))]:
            played.deliver(Answered(ask.tag, ask.to, Envelope(message, blob), 0.1, 0.1, 10, len(blob)))
    assert played.node.phase is PeerPhase.JOINING


@FEW
@given(values=st.dictionaries(st.text(max_size=50), st.binary(max_size=200), max_size=5))
def test_no_record_breaks_us(values: dict[str, bytes]) -> None:
    played = Played("pull", "training")
    played.deliver(Found(f"{RUN}/peers", values))
    assert sum(played.node.roster.refused.values()) == len(values)


# Held questions


def test_a_held_pull_is_answered_when_its_patience_is_over() -> None:
    played = Played("pull", "training", window_s=1000.0)
    played.ask(1, played.known.peer, Pull(RUN, 0, 0, 0.0, 5.0))
    played.pass_time(4.9)
    assert not played.replies
    played.pass_time(0.2)
    assert played.answers[1].message == Refused("nothing-newer", "0")


@pytest.mark.parametrize("algorithm", ["pull", "allreduce"])
def test_held_questions_are_answered_when_we_leave(algorithm: Algorithm) -> None:
    played = Played(algorithm, "training", window_s=1000.0)
    played.ask(1, played.known.peer, Pull(RUN, 0, 0, 0.0, MAX_PATIENCE_S))
    played.carry(played.node.leave("interrupted", played.now))
    assert played.answers[1].message == Refused("leaving")


def test_a_question_more_than_can_be_held_is_answered_at_once() -> None:
    played = Played("pull", "training", window_s=1000.0)
    for number in range(300):
        played.ask(number, played.known.peer, Pull(RUN, 0, 0, 0.0, 5.0))
    assert sum(played.replies.values()) == 300 - 256


# What a node answers


@pytest.mark.parametrize("phase", ["joining", "training"])
def test_hello_is_answered_with_the_run_and_its_config(phase: str) -> None:
    played = Played("pull", phase)
    played.ask(1, STRANGER, Hello())
    welcome = played.answers[1].message
    assert isinstance(welcome, Welcome)
    assert (welcome.run, welcome.config) == (RUN, played.node.setup.config.canonical())


def test_hello_for_another_run_is_refused_and_names_ours() -> None:
    played = Played("pull", "training")
    played.ask(1, STRANGER, Hello("other-000000"))
    assert played.answers[1].message == Refused("run", f"this peer is in {RUN}, not in other-000000")


def test_ping_comes_back() -> None:
    played = Played("pull", "joining")
    played.ask(1, STRANGER, Ping(7))
    assert played.answers[1].message == Pong(7)


def test_a_newcomer_without_state_gives_none() -> None:
    played = Played("pull", "joining")
    played.ask(1, STRANGER, messages.StateRequest(RUN, 0, 0, 100))
    assert played.answers[1].message == Refused("not-ready")


def test_a_trained_peer_gives_its_state_in_pieces() -> None:
    played = Played("pull", "training")
    for offset in (0, 5):
        played.ask(offset, STRANGER, messages.StateRequest(RUN, 1, offset, 5))
    assert played.answers[0].blob + played.answers[5].blob == BLOB
    played.ask(8, STRANGER, messages.StateRequest(RUN, 1, 8, 5))
    assert played.answers[8].message == Refused("offset")


@pytest.mark.parametrize("message", [Hello(), Ping(1), Pull(RUN, 0, 0, 0.0, 5.0)])
def test_a_peer_that_has_left_says_so(message: Message) -> None:
    played = Played("pull", "left")
    played.ask(1, STRANGER, message)
    assert played.answers[1].message == Refused("leaving")


def test_a_pull_is_refused_with_the_reason_where_rounds_take_its_place() -> None:
    played = Played("synchronous", "training")
    played.ask(1, played.known.peer, Pull(RUN, 0, 0, 0.0, 5.0))
    assert played.answers[1].message == Refused("algorithm", "this run gossips by synchronous")


def test_a_question_about_a_fragment_that_is_none_is_refused() -> None:
    played = Played("pull", "training")
    played.ask(1, played.known.peer, Pull(RUN, 2, 0, 0.0, 5.0))
    assert played.answers[1].message == Refused("fragment")


def test_gossip_before_we_train_is_refused() -> None:
    played = Played("pull", "joining")
    played.meet(played.known)
    played.ask(1, played.known.peer, Pull(RUN, 0, 0, 0.0, 5.0))
    assert played.answers[1].message == Refused("not-ready")


def test_only_some_messages_may_carry_a_blob() -> None:
    node = Played("pull", "joining").node
    snapshot = Snapshot(RUN, 1, 7, 64, NOW, LAYOUT, blobs.digest(BLOB))
    assert node.answers.blob_bound(messages.Probe(0)) == messages.MAX_PROBE_BYTES
    assert node.answers.blob_bound(snapshot) == 0


# What a node does


def test_it_announces_itself_and_looks_up_others_at_once() -> None:
    played = Played("pull", "joining")
    assert {type(effect) for effect in played.effects} >= {Announce, Lookup}


def test_it_pulls_from_the_peers_it_knows_at_the_windows_end() -> None:
    played = Played("pull", "training")
    played.pass_time(1.5)
    pulls = [ask for ask in played.asks if isinstance(ask.envelope.message, Pull)]
    assert {ask.to for ask in pulls} == {played.known.peer}
    assert {ask.envelope.message.fragment for ask in pulls if isinstance(ask.envelope.message, Pull)} == {0, 1}


def test_it_asks_no_peer_that_is_still_joining() -> None:
    played = Played("pull", "training")
    played.pass_time(1.5)
    newcomer = identity("newcomer")
    record = PeerRecord(RUN, played.now, (), PROFILE, 0, 3, 0, 0, 0, phase=PeerPhase.JOINING)
    sealed = newcomer.seal(f"{RUN}/peers", records.pack(record), played.now + 600)
    played.deliver(Found(f"{RUN}/peers", {newcomer.peer: sealed}))
    assert newcomer.peer in played.node.roster.live
    assert newcomer.peer not in played.node.selection.partners(0, played.now)


def test_a_partner_that_never_answers_is_dropped_and_training_goes_on() -> None:
    played = Played("pull", "training")
    for _ in range(4):
        played.pass_time(1.0)
        while played.asks:
            ask = played.asks.pop(0)
            played.deliver(AskFailed(ask.tag, ask.to, "unreachable", 0.1))
    assert played.known.peer not in played.node.roster.live
    assert played.node.gossip.counts.outcomes["failed"] >= 2
    assert played.node.gossip.counts.outcomes["solo"] >= 2


@pytest.mark.parametrize(
    ("tag", "reason", "known"),
    [
        (PullTag(0, 1), "deadline", False),
        (ForwardTag(1, 1), "deadline", True),  # the answer waits for the partner's device, which may be slow
        (ForwardTag(1, 1), "cut", False),
    ],
)
def test_a_peer_whose_device_is_late_is_not_taken_for_dead(tag: Tag, reason: str, known: bool) -> None:
    played = Played("pull", "training")
    for _ in range(3):
        played.deliver(AskFailed(tag, played.known.peer, reason, 3.0))
        played.now += 3.0
    assert (played.known.peer in played.node.roster.live) == known


def test_an_upload_that_our_own_uplink_is_too_thin_for_takes_nobody_for_dead() -> None:
    played = Played("pull", "training")
    for _ in range(3):
        played.deliver(AskFailed(UploadTag("up"), played.known.peer, "deadline", 20.0))
        played.now += 20.0
    assert played.known.peer in played.node.roster.live


@pytest.mark.parametrize(
    ("tag", "longer"),
    [(PullTag(0, 1), True), (BlockingPullTag(0, 1), False), (ProbeTag("down"), True), (UploadTag("up"), False)],
)
def test_a_link_whose_answers_are_late_gets_longer_deadlines(tag: Tag, longer: bool) -> None:
    played = Played("pull", "training")
    peer = played.known.peer
    before = played.node.selection.deadline_s(peer, 200_000)
    played.deliver(AskFailed(tag, peer, "deadline", 3.0))
    assert (played.node.selection.deadline_s(peer, 200_000) > before) == longer


def test_the_period_grows_where_the_link_is_too_slow_for_a_window() -> None:
    played = Played("pull", "training")
    assert played.node.selection.lengths.period_s(0, 1000) == 1.0
    played.node.meter.saw("slow", 10.0, 0.0, 70_000, 0)  # type: ignore[arg-type]
    assert played.node.selection.lengths.period_s(0, 200_000) > 10.0


def test_a_node_was_suspended_if_no_event_came_and_not_if_a_timer_event_was_long_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the waits for decisions seem shorter, even negative: questions about them then failed at once."""
    told: list[float] = []
    monkeypatch.setattr(Router, "was_stopped", lambda _, seconds: told.append(seconds))
    monkeypatch.setattr(Router, "wake_at", property(lambda _: NOW + 1.0))
    played = Played("pull", "training")
    for second in range(1, 30):
        played.now = NOW + second
        played.deliver(Woke())
    assert told == []
    played.now += 20.0
    played.ask(1, played.known.peer, messages.Ping(1))
    played.deliver(Woke())
    assert told == [20.0]


def test_the_network_s_work_for_our_own_state_and_for_routes_is_no_cost_of_gossip() -> None:
    played, used = Played("pull", "training"), CoresUsed(5.0, 5.0, 4.0)
    cost = played.node.selection.lengths.cost

    def network_s() -> float:
        for _ in FRAGMENTS:
            cost.did(0.01, closed=True)
        played.node.traffic.received(
            Answered(PullTag(0, 1), PeerId("B"), Envelope(messages.Done()), 0.1, 0.1, 0, 1 << 20)
        )
        played.deliver(used)
        played.deliver(CoresUsed(5.0, 5.0, 0.0))  # without gossip jobs
        return cost.network_s

    assert network_s() == 0  # we joined in this interval
    played.pass_time(10.0)
    played.node.present.now = dataclasses.replace(played.node.setup, fragments=FRAGMENTS[:1])
    assert network_s() == 0  # micro-batches travel through a peer that holds a part of the model
    played.node.present.now = dataclasses.replace(played.node.setup, fragments=FRAGMENTS)
    assert network_s() > 0


def test_a_speed_that_was_not_measured_is_told_by_the_first_steps_and_published() -> None:
    played = Played("pull", "training")
    own = dataclasses.replace(played.node.setup, profile=dataclasses.replace(PROFILE, tokens_per_s=0.0))
    played.node.present.now = own
    played.pass_time(4.0)
    played.effects.clear()
    played.deliver(jobs.Stepped(1, 1, 4000, 2.0, TimeSpent(training=4.0), 1))
    played.pass_time(0.1)
    assert played.node.setup.profile.tokens_per_s == pytest.approx(1000.0)
    assert any(isinstance(effect, Announce) for effect in played.effects)


def test_a_record_has_the_addresses_of_now_and_not_of_the_start() -> None:
    played, now = Played("pull", "training"), ("/ip4/10.0.0.2/tcp/1",)
    assert played.node.own_record.compose(PeerPhase.TRAINING, played.now).addresses == ("/ip4/127.0.0.1/tcp/1",)
    assert played.node.own_record.move_to(now) == Log(AddressesLine(addresses=now))
    assert played.node.own_record.compose(PeerPhase.TRAINING, played.now).addresses == now


def test_a_record_says_when_its_figures_last_changed_and_noise_is_no_change() -> None:
    played, versions = Played("pull", "training"), []
    own = played.node.own_record
    for second, times in enumerate((1.0, 1.4, 0.7, 1.6, 1.1, 0.9)):  # each over the speed at the start
        played.node.present.measured(1e4 * times)
        versions.append(own.compose(PeerPhase.TRAINING, played.now + second).profile.changed - played.now)
    assert versions == [0.0, 0.0, 0.0, 3.0, 3.0, 5.0]


def test_a_node_s_record_and_its_journal_say_how_its_training_goes() -> None:
    played = Played("pull", "training")
    partner = played.known.peer
    played.node.meter.saw(partner, 1.0, 0.05, 0, 1 << 20)
    played.node.gossip.counts.ended.update({("done", ""): 3, ("failed", "deadline"): 1})
    spent = TimeSpent(training=9.0, gossip=1.0)
    played.deliver(jobs.Stepped(1, 1, 256, 2.5, spent, 1))
    played.node.progress.evaluations.held_out = 1e9  # no loss that a valid record could tell
    standing = played.node.own_record.compose(PeerPhase.TRAINING, played.now).standing
    assert (standing.loss, standing.held_out, standing.shares[:2]) == (2.5, None, (900, 100))
    assert standing.exchanges == (3, 0, 1)
    assert standing.links[0][0] == partner[-8:]
    (line,) = [one.event for one in played.effects if isinstance(one, Log) and isinstance(one.event, StatusLine)]
    assert (line.first, line.last, line.window_s) == (0, 3, 1.0)
    assert line.mfu is None  # the fragments of this node do not say their work


def test_the_journal_says_how_much_of_the_device_training_uses() -> None:
    played = Played("pull", "training")
    setup = played.node.present.now
    work = [dataclasses.replace(one, work=(0.0, 5e6, 1e6)) for one in setup.fragments]
    device = dataclasses.replace(setup.profile, flops=4e9)
    played.node.present.now = dataclasses.replace(setup, fragments=work, profile=device)
    played.node.progress.rate.tokens_per_s = 100.0
    line = played.node.own_record.status(played.now).event
    assert isinstance(line, StatusLine)
    assert line.mfu == round(100.0 * len(work) * 6e6 / 4e9, 4)
    part = dataclasses.replace(played.node.present.now, fragments=work[:1])
    played.node.present.now = part
    assert played.node.own_record.utilisation(played.now) is None  # its tokens are not those that it computes


def test_a_node_writes_signed_records_of_what_it_has_seen_also_that_of_a_peer_which_leaves() -> None:
    played = Played("pull", "training")
    partner, own = played.known.peer, played.node.setup.own.peer
    played.deliver(Answered(ProbeTag("ping"), partner, Envelope(Pong(1)), 0.1, 0.1, 10, 4096))
    last = PeerRecord(RUN, played.now, (), PROFILE, 0, 3, 9, 9, 200, phase=PeerPhase.LEAVING)
    sealed = played.known.seal(f"{RUN}/peers", records.pack(last), played.now + 600)
    played.deliver(Found(f"{RUN}/peers", {partner: sealed}))
    played.pass_time(2 * OWN_EVERY_S)
    played.carry(played.node.leave("interrupted", played.now))
    lines = [one.event for one in played.effects if isinstance(one, Log) and isinstance(one.event, StatementLine)]
    assert opened(next(line for line in lines if line.peer == partner)).tokens == 200
    mine = [opened(line) for line in lines if line.peer == own]
    assert len(mine) >= 2
    (seen,) = mine[0].standing.seen
    assert (seen.peer, seen.served_bytes) == (partner[-8:], 4096)
    assert mine[-1].phase == PeerPhase.LEAVING


def test_a_node_that_leaves_writes_its_own_signed_record_last() -> None:
    """When it starts again it reads only the end of its journal, which records of others may fill."""
    played = Played("pull", "training")
    partner, own = played.known.peer, played.node.setup.own.peer
    left = played.node.leave("interrupted", played.now)
    lines = [one.event for one in left if isinstance(one, Log) and isinstance(one.event, StatementLine)]
    assert [line.peer for line in lines] == [partner, own]


def test_a_node_that_starts_again_goes_on_with_what_it_has_seen() -> None:
    row = SeenWork("abcdefgh", 100, 90, 0, 60, 5, 4, 1)
    played = Played("pull", "joining")
    setup = dataclasses.replace(played.node.setup, seen=(row,))
    assert Node(setup).own_record.compose(PeerPhase.JOINING, NOW).standing.seen == (row,)


def test_a_node_that_starts_again_goes_on_with_the_tokens_that_it_claims() -> None:
    """Else `claims` of the ledger, and the total on others' live pages, began again at each restart."""
    played = Played("pull", "training")
    node = Node(dataclasses.replace(played.node.setup, trained_tokens=700))
    node.progress.tokens = 50
    assert node.own_record.compose(PeerPhase.TRAINING, NOW).tokens == 750
