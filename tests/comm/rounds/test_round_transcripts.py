"""Plays transcripts/*.txt: what happens to one member of synchronous rounds, and what it wants done, a line each.

    == two members                                    a scenario; then our layers, and whom the view names
    M holds 0-2, knows B
    0    begin 7 fetched            -> ask B: follow from 7     time, event -> effect; `fetched`: from others
         -> ...                                                 several effects: a line each, that starts with ->
    0.1  B on follow: round 7 of nobody                         B's answer to our last question of that kind to B
    0.2  B asks #1: report of M in 7                            B's question; "answer #1: ..." is our reply to it
    0.3  through 5 by M-2,B-4                                   our micro-batch 5 is complete: who carried it where
    0.4  next                       -> at 5                     when it wants to wake

The model has four fragments of one layer and ten parameters each; a round has two micro-batches of ten tokens. What the
machine tells the router stands in parentheses; `behind` and the reason say that it wants to fetch the state anew.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from decentral.comm.pipeline.ledger import CommitState, GradientEntry
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds.contributions import ContributionRecord
from decentral.comm.rounds.round import Rounds
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    CollectRequest,
    CompletedMicroBatch,
    ExecutionId,
    Hop,
    Message,
    Refused,
    RoundMember,
    RoundQuery,
    RoundReport,
    RoundStatus,
    Snapshot,
)
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Advance, CloseRound, RoundClosed, SetClock, Stepped, WindowClosed
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log, Woke
from decentral.core.time_spent import NO_TIME
from tests.comm.pipeline.one_form import one_form

CUTS = tuple(Fragment(index, index, index + 1, 10) for index in range(4))
LAYOUT = (Section("gradient", "fp32", 10, 40),)
TOKENS = 10


@dataclass(frozen=True)
class Told:
    """A call of the router."""

    text: str


@dataclass
class FakeRouter:
    """The micro-batches are over when the transcript says so."""

    stage: StageConfig
    ledger: ContributionRecord = field(default_factory=ContributionRecord)
    under_way: int = 0

    @property
    def all_begun_are_over(self) -> bool:
        return self.under_way == 0

    def begin_round(self, round: int, active: bool, quota: int) -> list[Told]:
        self.under_way = quota
        return [Told(f"begin round {round}, draw {quota}" if active else f"begin round {round}, idle")]

    def end_round(self, everything: bool = False) -> list[Told]:
        return [Told("end round" + ", early ones too" * everything)]

    def give_up_own(self) -> list[Told]:
        given_up, self.under_way = self.under_way, 0
        return [Told(f"give up {given_up}")] if given_up else []

    def handle(self, event: Event, now: float) -> list[Effect]:
        return []

    def through(self, number: int, hops: list[tuple[str, int]]) -> None:
        self.under_way -= 1
        begins = [0, *(last for _, last in hops)]
        after = tuple(Hop(peer, first, last) for first, (peer, last) in zip(begins, hops, strict=False))[1:]
        self.carried(number, ExecutionId("M", number, 0), hops[0][1], own=True)
        self.ledger.ways[number] = after

    def carried(self, local_id: int, execution: ExecutionId, last: int, own: bool = False) -> None:
        self.ledger.add(local_id, GradientEntry(execution, last, TOKENS, 20.0, own), CommitState.IN_DOUBT)


@dataclass
class World:
    """The view of a machine, the router below it, and the questions that it has asked."""

    stage: StageConfig
    names: Sequence[PeerId]
    asked: dict[tuple[str, str], Ask] = field(default_factory=dict)  # the last question of a kind to a peer
    behind: str = ""

    def __post_init__(self) -> None:
        self.router = FakeRouter(self.stage)
        self.rounds = Rounds(cast(Router, self.router), self)

    def knows(self, peer: PeerId) -> bool:
        return True

    def acquaintances(self) -> Sequence[PeerId]:
        return self.names

    def trainers(self) -> Sequence[PeerId]:
        return self.names

    def member_deadline_s(self, peer: PeerId, size: int) -> float:
        return 3.0

    def play(self, text: str, now: float) -> list[str]:
        if text == "next":
            return [f"at {self.rounds.wake_at:g}" if self.rounds.wake_at is not None else "never"]
        effects = [self._shown(effect) for effect in self._handled(text, now)]
        if self.rounds.behind != self.behind:
            self.behind = self.rounds.behind
            effects.append(f"behind {self.behind}".strip())
        return effects

    def _handled(self, text: str, now: float) -> list[Effect]:
        match text.split():
            case ["begin", number, *fetched]:
                held = range(self.stage.first, self.stage.last) if fetched else ()
                self.rounds.begin(int(number), {index: (int(number), b"v" * 16) for index in held})
                return self.rounds.handle(Woke(), now)
            case ["stop"]:
                return self.rounds.stop()
            case ["state", "for", peer]:
                self.rounds.donor_holds.hold_for(PeerId(peer), now)
                return self.rounds.handle(Woke(), now)
            case ["through", number, "by", hops]:
                self.router.through(int(number), [(peer, int(last)) for peer, last in _pairs(hops)])
                return self.rounds.handle(Woke(), now)
            case ["carried", number, "of", origin, layers]:
                first, last = map(int, layers.split("-"))
                execution = ExecutionId(origin, int(number), first)
                self.router.carried(100 + len(self.router.ledger.entries), execution, last)
                return self.rounds.handle(Woke(), now)
        return self.rounds.handle(self._event(text, now), now)

    def _event(self, text: str, now: float) -> Event:
        if found := re.fullmatch(r"(\w) asks #(\d+): (.*)", text):
            return Asked(int(found[2]), PeerId(found[1]), self._asked(found[3]))
        if found := re.fullmatch(r"(\w) on ([^:]*): failed (\w+)", text):
            return AskFailed(self.asked[found[1], found[2]].tag, PeerId(found[1]), found[3], 1.0)
        if found := re.fullmatch(r"(\w) on ([^:]*): (.*)", text):
            ask = self.asked[found[1], found[2]]
            return Answered(ask.tag, PeerId(found[1]), self._said(ask.envelope.message, found[3]), 0.1, 0.1, 10, 20)
        match text.split():
            case ["closed", number, "with", executions, *sums]:
                tokens = tuple(int(local_id) for local_id in executions.split(",") if local_id != "-")
                closed = (one.split("=") for one in sums)
                return RoundClosed(int(number), tokens, tuple(_closed(int(i), int(number), int(n)) for i, n in closed))
            case ["stepped", *refused]:
                triples = (one.split(",") for one in refused)
                bad = tuple((int(index), PeerId(peer), reason) for index, peer, reason in triples)
                return Stepped(0, 0, 0, 0.0, NO_TIME, 0, (), bad)
        assert text == "wake", f"no such event: {text}"
        return Woke()

    def _asked(self, text: str) -> Envelope:
        run = self.stage.run
        if found := re.fullmatch(r"(follow|which round) (\d+) with (\d)-(\d)", text):
            return Envelope(RoundQuery(run, int(found[2]), int(found[3]), int(found[4]), found[1] == "follow"))
        found = re.fullmatch(r"(report|sum (\d)) of (\w) in (\d+)( as follower)?", text)
        assert found, text
        fragment = int(found[2]) if found[2] else None
        return Envelope(CollectRequest(run, int(found[4]), found[3], fragment, 3.0, not found[5]))

    def _said(self, question: Message, text: str) -> Envelope:
        """`round 7 of B:0-4,M:0-2`, `report B:2-4 through 5 by B-4 lets in N:0-4`, `sum of 20`, `refused gone`."""
        run, words = self.stage.run, text.split()
        match words:
            case ["refused", *reason]:
                return Envelope(Refused(*reason))
            case ["round", number, "of", members]:
                return Envelope(RoundStatus(run, int(number), _members(members)))
            case ["report", own, *more]:
                assert isinstance(question, CollectRequest)
                return Envelope(self._report(question, _members(own)[0], " ".join(more)))
            case ["sum", "of", tokens]:
                assert isinstance(question, CollectRequest)
                assert question.fragment is not None
                blob = question.origin.encode() * 40 if int(tokens) else b""
                layout = LAYOUT if int(tokens) else ()
                head = (run, question.fragment, question.round, int(tokens), 0.0, layout)
                return Envelope(Snapshot(*head, blobs.digest(blob)), blob)
        raise AssertionError(text)

    def _report(self, question: CollectRequest, own: RoundMember, text: str) -> RoundReport:
        now_in = self.rounds.now_in
        assert now_in is not None
        places = [member.peer for member in now_in.members]
        completed = []
        for number, hops in re.findall(r"through (\d+) by (\S+)", text):
            peers, ends = zip(*_pairs(hops), strict=True)
            at = tuple(places.index(peer) for peer in peers)
            completed.append(CompletedMicroBatch(int(number), TOKENS, at, tuple(map(int, ends))))
        newcomers = _members(found[1]) if (found := re.search(r"lets in (\S+)", text)) else ()
        ours = {} if "other weights" in text else self.rounds.versions
        versions = tuple(ours.get(index, b"w" * 16) for index in range(own.first, own.last))
        loss = 20.0 * len(completed)
        return RoundReport(self.stage.run, question.round, own, tuple(completed), loss, newcomers, versions)

    def _shown(self, effect: Effect) -> str:
        match effect:
            case Told(text):
                return f"({text})"
            case Ask(_, to, envelope):
                self.asked[to, _question(envelope.message)] = effect
                message = envelope.message
                assert isinstance(message, CollectRequest | RoundQuery)
                follows = isinstance(message, CollectRequest) and not message.member
                number = f"{'from' if isinstance(message, RoundQuery) else 'in'} {message.round}"
                return f"ask {to}: {_question(message)} {number}{' as follower' * follows}"
            case Reply(request, envelope):
                return f"answer #{request}: {self._spoken(envelope.message)}"
            case SetClock(step):
                return f"clock {step}"
            case CloseRound(number, executions):
                return f"close {number} with {','.join(map(str, executions)) or '-'}"
            case Advance(number, sums, _, tokens, micro_batches, loss):
                parts = " ".join(f"{index}={','.join(part.peer for part in sums)}" for index, sums in sums)
                return f"advance {number} with {parts}; own {tokens} tokens in {micro_batches}; loss {loss:g}"
            case Log(event):
                told = (f"{name}={_plain(value)}" for name, value in JOURNAL_LINES.fields(event).items())
                return " ".join(["log", JOURNAL_LINES.name(event), *told])
        raise AssertionError(effect)

    def _spoken(self, message: Message) -> str:
        match message:
            case RoundStatus(_, number, members):
                return f"round {number} of {_spans(members) or 'nobody'}"
            case RoundReport(_, number, own, completed, _, newcomers):
                assert self.rounds.now_in is not None
                places = [member.peer for member in (*self.rounds.now_in.members,)]
                through = "".join(
                    f" through {one.number} by {_hops(places, one.members, one.ends)}" for one in completed
                )
                return f"report {number} {_spans((own,))}{through}{' lets in ' * bool(newcomers)}{_spans(newcomers)}"
            case Snapshot(fragment=fragment, seq=number, tokens=tokens):
                return f"sum {fragment} in {number} of {tokens}"
            case Refused(reason, detail):
                return f"refused {reason} {detail}".strip()
        return type(message).__name__.lower()


def scenarios() -> Iterator[tuple[str, list[str]]]:
    for path in sorted(Path(__file__).with_name("transcripts").glob("*.txt")):
        for part in path.read_text().split("\n== ")[1:]:
            title, *lines = part.splitlines()
            yield f"{path.stem}: {title}", [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in scenarios()])
def test_a_member_does_what_the_transcript_says(lines: list[str]) -> None:
    world, expected = world_of(lines[0]), [" ".join(line.split()) for line in lines[1:]]
    played: list[str] = []
    for line in (line for line in expected if not line.startswith("->")):
        written, event = line.partition(" -> ")[0].split(" ", 1)
        effects = world.play(event, float(written))
        played += [f"{written} {event} -> {effects[0]}" if effects else f"{written} {event}"]
        played += [f"-> {effect}" for effect in effects[1:]]
    assert played == expected


def world_of(line: str) -> World:
    found = re.fullmatch(r"M holds (\d)-(\d), knows (\S*)", line)
    assert found, line
    place = (RunId("run"), PeerId("M"), int(found[1]), int(found[2]), CUTS, 8, 8, 2)
    stage = StageConfig(*place, forms=lambda layer, sequences: one_form(()), synchronous=True)
    return World(stage, [PeerId(name) for name in found[3].split(",") if name != "nobody"])


def _question(message: Message) -> str:
    match message:
        case RoundQuery(joining=joining):
            return "follow" if joining else "which round"
        case CollectRequest(origin=origin, fragment=fragment):
            return f"report of {origin}" if fragment is None else f"sum {fragment} of {origin}"
    raise AssertionError(message)


def _pairs(text: str) -> list[tuple[str, str]]:
    """`M-2,B-4`: who carried a micro-batch up to where."""
    return [(peer, last) for peer, _, last in (one.partition("-") for one in text.split(","))]


def _members(text: str) -> tuple[RoundMember, ...]:
    """`M:0-2,B:2-4`, or `nobody`."""
    found = re.findall(r"(\w):(\d+)-(\d+)", text)
    return tuple(RoundMember(peer, int(first), int(last)) for peer, first, last in found)


def _spans(members: Sequence[RoundMember]) -> str:
    return ",".join(f"{member.peer}:{member.first}-{member.last}" for member in members)


def _hops(places: Sequence[str], members: Sequence[int], ends: Sequence[int]) -> str:
    return ",".join(f"{places[place]}-{end}" for place, end in zip(members, ends, strict=True))


def _closed(fragment: int, number: int, tokens: int) -> WindowClosed:
    blob = b"M" * 40 if tokens else b""
    return WindowClosed(fragment, number, tokens, LAYOUT if tokens else (), blob)


def _plain(value: object) -> str:
    listed = [list(one) for one in value] if isinstance(value, tuple) else value
    return str(listed).replace(" ", "")
