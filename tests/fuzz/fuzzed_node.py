"""A real node in virtual time, with liars all around it, and the rules that must hold whatever they say.

    no exception      whatever comes is refused, or has effects
    one answer        to every question, within the longest patience
    no busy loop      a node that was woken at a time does not want to be woken at that time for ever
    bounded effects   one event has no more than MOST_EFFECTS
    valid messages    whatever the node says keeps its own bounds

What the node asks is answered, late, twice, by somebody else, or never. Jobs go to a device that takes its time and
fails now and then (tests/fuzz/device.py). A seed decides all of it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from decentral.comm.gossip.gossip_cost import CoresUsed
from decentral.comm.net.fair_shares import QuestionShare, QuestionShares
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds.collection import CollectTag, RoundTag
from decentral.comm.wire import codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.invitations import NOTHING_REVOKED
from decentral.comm.wire.messages import Message, Refused
from decentral.comm.wire.private_swarm import MemberSigner
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Found, Reply
from decentral.core import jobs, rng
from decentral.core.config import Config, GossipConfig, TrainConfig
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Woke
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.reasons import Reason
from decentral.peers.joining.fetch import FetchTag
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.records import Profile
from decentral.peers.membership.revocation_watch import WARN_S, MembershipOver
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.progress import Stop
from decentral.peers.runtime.setup import NodeSetup
from decentral.scheduler.placement import plans
from decentral.scheduler.placement.evaluate import EvaluatePlans
from decentral.scheduler.placement.move import MemoryBudget
from decentral.sim.virtual_signer import VirtualSigner
from tests.fuzz import grammar
from tests.fuzz.device import FORMS, STATE, Device
from tests.fuzz.founder import Founder
from tests.fuzz.private import holding, member, signer

Kind = Literal["pull", "allreduce", "synchronous", "spans", "newcomer", "private"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RUN = RunId("fuzzed-000000")
NOW = 1.7e9
NAMES = tuple(PeerId(f"liar{number:04d}") for number in range(3000))
WHOLE = (Fragment(0, 0, 1, 100), Fragment(1, 1, 3, 200))
CUTS = (Fragment(0, 0, 1, 100), Fragment(1, 1, 3, 100), Fragment(2, 3, 5, 100), Fragment(3, 5, 6, 100))
PROFILE = Profile("cpu", 1 << 30, 1e9, 1e4)
MOST_EFFECTS = 4000  # of one event: all questions that can wait, of all kinds, are answered when a peer leaves
MOST_WAKES = 200  # at one time
PATIENCE_S = 90.0  # for an answer: the longest that a question may wait, and what the device takes
QUIET_S = 100.0  # at the end of a life, in which all that waits has to get its answer
SPARE_S = 90.0  # until the node's own invitation expires in an hour, which its user is told
MOST_ASKED = 512  # questions of the node that are remembered, to answer them a second time


class FuzzViolation(AssertionError):
    """A rule that does not hold."""


@dataclass
class Figures:
    """What was said to the node, and what became of it, by kind of message."""

    said: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by kind and reason

    def add(self, kind: str, reason: str) -> None:
        """`reason`: why it was refused; empty, if it was not."""
        self.said[kind] += 1
        if reason:
            self.refused[f"{kind}: {reason}"] += 1
        else:
            self.accepted[kind] += 1

    @property
    def messages(self) -> int:
        return self.said.total()


class FuzzedNode:
    """`only`: kinds of questions that are asked; none: all kinds. `watch` hears of each event and its effects."""

    def __init__(
        self, kind: Kind, seed: int, only: Sequence[type[Message]] = (), figures: Figures | None = None
    ) -> None:
        self.chance = rng.stream(seed, "fuzz", kind)
        setup = setup_of(kind)
        self.node, self.now = Node(setup), NOW
        self.kind, self.only = kind, tuple(only) or grammar.questions_for(self.node)
        self.cuts = tuple(setup.cuts)
        self.known = grammar.Known(self.node, self.chance, self.cuts, NAMES, NOW, NOW)
        sizes = {cut.index: cut.parameters for cut in self.cuts}
        self.device = Device(self.chance, setup.own.peer, self.cuts[-1].last, sizes, kind == "synchronous")
        self.figures = figures or Figures()
        self.watch: Callable[[object, list[PeerEffect]], None] = lambda event, effects: None
        self.founder = Founder(self.chance, setup.private) if setup.private else None
        if setup.private:
            setup.private.now = lambda: self.now
        self.shares = QuestionShares(self.node.answers.knows)
        self.open: dict[int, tuple[str, float, QuestionShare]] = {}  # questions that wait: kind, since when, share
        self.asked: list[Ask] = []  # by the node, not answered yet
        self.over: list[Ask] = []  # those that were
        self._request = 0
        self.stops = False
        self._carry(self.node.begin(self.now))
        self._introduce(grammar.CROWD)

    # What happens

    def step(self) -> None:
        """One thing more, whatever chance decides."""
        drawn = self.chance.random()
        if drawn < 0.5:
            self.ask(self.chance.choice(self.only if self.chance.random() < 0.97 else grammar.QUESTIONS))
        elif drawn < 0.88:
            self.answer()
        elif drawn < 0.94:
            self._introduce(1)
        elif drawn < 0.96 and self.node.span_manager:
            self._propose()
        elif drawn < 0.98 and self.founder:
            self._revoke(self.founder)
        else:
            self.pass_time(self.chance.choice((0.0, 0.05, 0.05, 0.3, 2.0)))
        if self.chance.random() < 0.1:
            self.pass_time(0.02)
        if self.chance.random() < 0.002:
            self.deliver(CoresUsed(5.0, 5.0, self.chance.choice((0.0, 1.0, 4.0))))

    def ask(self, kind: type[Message]) -> None:
        """A liar asks, as the transport lets it: its bytes, its blob's bound, its share."""
        known = self._present()
        envelope = grammar.spoilt(known, grammar.question(known, kind))
        sender, name = (
            known.asker(envelope.message) if self.chance.random() < 0.8 else None,
            type(envelope.message).__name__,
        )
        sender = sender or self._sender()
        self._request += 1
        try:
            message, _ = grammar.sent(self.chance, envelope)
            if len(envelope.blob) > self.node.answers.blob_bound(message):
                raise ProtocolError("oversize")
            if self.founder:
                self.founder.admit(sender, message)
            share = self.shares.begin(sender)
        except ProtocolError as error:
            self.figures.add(name, f"door {error.reason}")
            return
        try:
            share.reserve(len(envelope.blob))
        except ProtocolError as error:
            share.end()
            self.figures.add(name, f"door {error.reason}")
            return
        self.open[self._request] = name, self.now, share
        self.deliver(Asked(self._request, sender, Envelope(message, envelope.blob)))

    def answer(self) -> None:
        """A question of the node's own is answered, or fails; or one that is over is answered again."""
        again = self.chance.random() < 0.04
        if not (self.over if again else self.asked):
            self.pass_time(0.05)
            return
        asks = self.over if again else self.asked
        place = self.chance.randrange(len(asks))
        ask = asks[place]
        if not again:
            self.over.append(self.asked.pop(place))
            del self.over[:-MOST_ASKED]
        name = f"answer to {type(ask.envelope.message).__name__}"
        calm = self._present().calm
        if not calm and self.chance.random() < 0.06:
            reason = self.chance.choice(("deadline", "unreachable", "cut"))
            self._answered(name, AskFailed(ask.tag, ask.to, reason, 1.0), reason)
            return
        envelope = grammar.spoilt(self._present(), grammar.answer(self._present(), ask))
        if not calm and self.chance.random() < 0.08:
            envelope = Envelope(Refused(self.chance.choice(grammar.REFUSALS), self.chance.choice(("", "7"))))
        try:
            message, _ = grammar.sent(self.chance, envelope)
            if len(envelope.blob) > ask.max_blob_bytes:
                raise ProtocolError("oversize")
        except ProtocolError as error:
            self._answered(name, AskFailed(ask.tag, ask.to, error.reason, 0.1), f"door {error.reason}")
            return
        times = (self.chance.choice((0.01, 0.1, 3.0)), 0.01, 100, 100 + len(envelope.blob))
        why = "again" if again else message.reason if isinstance(message, Refused) else ""
        self._answered(name, Answered(ask.tag, ask.to, Envelope(message, envelope.blob), *times), why)

    def _answered(self, name: str, event: Answered | AskFailed, why: str) -> None:
        """Delivers it, and counts it as accepted if the machine has taken something of it."""
        before = self._taken(event)
        effects = self.deliver(event)
        after = self._taken(event)
        took = after > before or any(isinstance(one, jobs.Merge) and one.contributions for one in effects)
        if not why and before >= 0 and not took and not any(map(_goes_on, effects)):
            why = "not believed"
        self.figures.add(name, why)

    def _taken(self, event: Answered | AskFailed) -> int:
        """What the machine that asked has taken so far; -1 where every answer of the right kind is taken."""
        node, tag = self.node, event.tag
        if isinstance(tag, FetchTag):
            move = node.span_manager.span_move.fetch if node.span_manager else None
            return sum(one.here for fetch in (node.join.fetch, move) if fetch for one in fetch.incoming.values())
        if isinstance(tag, RoundTag):
            now_in = node.rounds.now_in if node.rounds else None
            wanted = now_in.collection.wanted.values() if now_in and isinstance(tag, CollectTag) else ()
            return sum(one.found is not None for one in wanted) if isinstance(tag, CollectTag) else -1
        window = getattr(node.gossip.running.get(getattr(tag, "fragment", -1)), "_window", None)
        return len(window.pulled) if window is not None else -1

    def pass_time(self, seconds: float) -> None:
        """The device works, and the node wakes whenever it wants to."""
        end, wakes = self.now + seconds, 0
        while True:
            for outcome in self.device.done(self.now):
                self.deliver(outcome)
            wake_at = None if self.stops else self.node.wake_at
            due = min(time for time in (wake_at, self.device.next_at(self.now), end) if time is not None)
            if due > self.now:
                self.now, wakes = due, 0
            if wake_at is not None and wake_at <= self.now:
                wakes += 1
                if wakes > MOST_WAKES:
                    raise FuzzViolation(
                        f"busy loop: {wake_at - NOW:.3f} is wanted again and again at {self.now - NOW:.3f}"
                    )
                self.deliver(Woke())
            elif self.now >= end:
                break
        self._check_patience()

    def deliver(self, event: PeerEvent) -> list[PeerEffect]:
        effects = self.node.handle(event, self.now)
        if len(effects) > MOST_EFFECTS:
            raise FuzzViolation(f"{len(effects)} effects of {event!r}"[:500])
        self.watch(event, effects)
        self._carry(effects)
        return effects

    def leave(self) -> None:
        """The node leaves: nothing may be left open."""
        self._carry(self.node.leave("interrupted", self.now))
        if self.open:
            raise FuzzViolation(f"{len(self.open)} questions have no answer: {list(self.open.values())[:3]}")

    # What the node wants done

    def _carry(self, effects: list[PeerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask | Reply):
                _require_valid(effect)
            match effect:
                case Reply(request, envelope):
                    self._replied(request, envelope)
                case Ask():
                    self.asked.append(effect)
                    if len(self.asked) > MOST_ASKED:
                        self.over.append(self.asked.pop(0))
                case Stop() | MembershipOver():
                    self.stops = True
                case EvaluatePlans():
                    self.device.put(effect, self.now)
                case _ if type(effect).__module__.endswith("core.jobs"):
                    self.device.put(effect, self.now)

    def _replied(self, request: int, envelope: Envelope) -> None:
        if request not in self.open:
            raise FuzzViolation(f"a second answer to question {request}, or one that nobody asked: {envelope!r}"[:300])
        name, _, share = self.open.pop(request)
        share.end()
        self.figures.add(name, envelope.message.reason if isinstance(envelope.message, Refused) else "")

    def _check_patience(self) -> None:
        for request, (name, since, _) in self.open.items():
            if name != "ForwardRequest" and self.now > since + PATIENCE_S:
                raise FuzzViolation(f"{name} {request} waits for {self.now - since:.0f} s")
            break  # the oldest one comes first

    # Liars

    def _present(self) -> grammar.Known:
        before, self.known.now = self.known.crowd, self.now
        if self.known.crowd != before:
            self._introduce(grammar.CROWD)
        return self.known

    def _sender(self) -> PeerId:
        """One of the present crowd, whose records are known; or anybody."""
        drawn = self.chance.random()
        return self.chance.choice(self._present().crowd if drawn < 0.9 else NAMES)

    def _introduce(self, count: int) -> None:
        """Records of liars, or bytes that are none."""
        names = self._present().crowd if count > 1 else (self._sender(),)
        values = dict[str, bytes]()
        for peer in names:
            made = grammar.record(self._present(), peer)
            body = records.pack(made)
            body = grammar.damaged(self.chance, body) if self.chance.random() < grammar.DAMAGED else body
            key, expires = swarm_size.key(self.known.run, 0, 0), self.now + self.chance.choice((5.0, 600.0, 3600.0))
            by: Signer = signer(peer) if self.founder else VirtualSigner(peer)
            values[peer] = by.seal(key, body, expires)
        before = self.node.roster.refused.total()
        self.deliver(Found(swarm_size.key(self.known.run, 0, 0), values))
        bad = self.node.roster.refused.total() - before
        for number in range(count):
            self.figures.add("record", "refused" if number < bad else "")

    def _revoke(self, founder: Founder) -> None:
        """The node looks for revocations. Who is revoked is out of its roster, and its own list never grows old."""
        before = founder.own.revocations.number
        self.deliver(founder.found(self._present().crowd, self.now))
        newer = founder.own.revocations.number - before
        self.figures.add("revocations", "" if newer else "nothing newer")
        revoked = [peer for peer in self.node.roster.live if founder.own.refusal(peer) == Reason.REVOKED]
        if newer < 0 or revoked or not founder.made(founder.own.revocations):
            raise FuzzViolation(f"list {before + newer} after list {before}, with {revoked} in the roster")

    def _propose(self) -> None:
        """A plan of a liar."""
        assert self.node.span_manager
        peer = self.chance.choice(self._present().crowd)
        self.deliver(Found(plans.key_of(RUN), {peer: grammar.sealed_plan(self._present(), peer)}))
        kept = peer in self.node.span_manager.swarm_plans.known
        self.figures.add("plan", "" if kept else "refused")


def _require_valid(effect: Ask | Reply) -> None:
    """What the node says itself is what others take."""
    message = effect.envelope.message
    try:
        there, _ = codec.decode(codec.encode(message, len(effect.envelope.blob)))
    except ProtocolError as error:
        raise FuzzViolation(f"the node says what nobody takes ({error}): {message!r}"[:500]) from None
    if there != message:
        raise FuzzViolation(f"{message!r} arrives as {there!r}"[:500])


def _goes_on(effect: PeerEffect) -> bool:
    """Whether the effect shows that an answer has led to something."""
    return isinstance(effect, Ask) or type(effect).__module__.endswith("core.jobs")


def setup_of(kind: Kind) -> NodeSetup:
    """A node of this kind, before it has met anybody."""
    algorithm: Any = {"spans": "pull", "newcomer": "pull", "private": "pull"}.get(kind, kind)
    gossip = GossipConfig(algorithm=algorithm, window_s=1.0, start_window_s=1.0)
    config = Config(gossip=gossip, train=TrainConfig(accumulate=4))
    signs, cuts = VirtualSigner(PeerId("honest")), CUTS if kind == "spans" else WHOLE
    invitation = holding(signs.peer, NOW + WARN_S + SPARE_S)
    private = member(signs.peer, invitation, NOTHING_REVOKED) if kind == "private" else None
    own: Signer = MemberSigner(signs, private) if private else signs
    run = private.run if private else RUN
    held = cuts[1:3] if kind == "spans" else cuts
    ones = tuple(1 for _ in cuts)
    needs = MemoryNeeds(cuts, tuple(10 for _ in cuts), ones, ones)
    sizes = tuple(10 for _ in cuts)
    place = (
        run,
        own.peer,
        held[0].first,
        held[-1].last,
        cuts,
        4,
        8,
        2,
        lambda layer, sequences: FORMS,
        sizes,
    )
    stage = StageConfig(*place, slots=2, overlap=True)
    setup = NodeSetup(
        config=config,
        run=run,
        own=own,
        fragments=held,
        state_layouts=[STATE] * len(held),
        layers=cuts[-1].last,
        profile=PROFILE,
        addresses=("/ip4/127.0.0.1/tcp/1",),
        contacts=NAMES[:2] if kind == "newcomer" else (),
        routes=replace(stage, synchronous=kind == "synchronous"),
        memory_budget=MemoryBudget(needs, 40, tuple(STATE for _ in cuts)) if kind == "spans" else None,
        retained=((0, 3),) if kind == "spans" else (),
        private=private,
    )
    return setup
