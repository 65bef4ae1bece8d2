"""Plays tests/comm/pipeline/transcripts/*.txt: what happens to one peer's router, and what it wants done, a line each.

    == a micro-batch through two peers                 a scenario; then the peers, M among them, and M's settings
    M 0-2, C 2-4; quota 1
    10   wake                       -> draw 1 to 2     time, event -> effect
    11   drawn 1 as 7               -> ask C: ...      several effects: a line each, that starts with ->
    12   C forward: backward C:2-4  -> backward 1      C's answer to M's last question of that kind to C
    13   C asks #1: status M/7@2    -> answer #1: done C's question, and M's answer
    14   next                       -> at 20           when M wants to wake
    15   executions                 -> 1 away          the micro-batches that are here, with their states

An execution is named origin/number@layer. Each layer is a fragment; the model ends where the last peer's span ends.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from decentral.comm.pipeline.ledger import GradientLedger
from decentral.comm.pipeline.next_peer import RoutingWeights
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds.contributions import ContributionRecord
from decentral.comm.wire import messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    BackwardResponse,
    CommitDecision,
    CommitQuery,
    Done,
    ExecutionId,
    ForwardRequest,
    ForwardStatusQuery,
    Hop,
    Load,
    Message,
    Offer,
    Refused,
)
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log, Woke
from decentral.core.time_spent import NO_TIME
from tests.comm.pipeline.route_world import RUN, cuts_of, forms, layout

SECONDS = 1.0  # between a question and its answer


@dataclass
class Scene:
    """M's router, the peers that it sees, and its last question of each kind to each of them."""

    routes: Router
    asked: dict[str, Ask] = field(default_factory=dict)


@dataclass
class Peers:
    spans: dict[PeerId, tuple[int, int]]
    weights: RoutingWeights = field(default_factory=RoutingWeights)
    usual_speed: float = 0.0

    def successors(self, layer: int) -> Sequence[PeerId]:
        return [peer for peer, (first, last) in self.spans.items() if peer != "M" and first <= layer < last]

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        return *self.spans[peer], 1.0

    def there_and_back_s(self, peer: PeerId | None, sent: int, received: int) -> float:
        return 0.0

    def is_thin(self) -> bool:
        return False


def scenarios() -> Iterator[tuple[str, list[str]]]:
    for path in sorted(Path(__file__).with_name("transcripts").glob("*.txt")):
        for part in path.read_text().split("\n== ")[1:]:
            title, *lines = part.splitlines()
            yield f"{path.stem}: {title}", [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in scenarios()])
def test_the_router_does_what_the_transcript_says(lines: list[str]) -> None:
    expected = [" ".join(line.split()) for line in lines[1:]]
    assert play(lines[0], expected) == expected


def play(setting: str, expected: list[str]) -> list[str]:
    """The lines as they come out when the events among these happen."""
    scene, played = Scene(router_of(setting)), list[str]()
    for line in (line for line in expected if not line.startswith("->")):
        written, event = line.partition(" -> ")[0].split(" ", 1)
        effects = [spoken_effect(effect, scene) for effect in happen(event, float(written), scene)]
        played += [f"{written} {event} -> {effects[0]}" if effects else f"{written} {event}"]
        played += [f"-> {effect}" for effect in effects[1:]]
    return played


def router_of(setting: str) -> Router:
    named, *options = setting.split("; ")
    spans = {PeerId(one.split()[0]): span(one.split()[1]) for one in named.split(", ")}
    said: dict[str, str] = dict(option.split() for option in options)
    cuts = tuple(cuts_of([100] * max(last for _, last in spans.values())))
    own = RUN, PeerId("M"), *spans[PeerId("M")], cuts, 64
    capacity, step, slots = (
        int(said.get(name, default)) for name, default in (("capacity", 16), ("step", 1), ("slots", 1))
    )
    rounds = "rounds" in said
    overlap = said.get("overlap") == "on"
    stage = StageConfig(*own, capacity, step, forms, (), slots, overlap=overlap, synchronous=rounds)
    ledger = ContributionRecord() if rounds else GradientLedger(step, slots)
    routes = Router(stage, Peers(spans), ledger)
    routes.own.quota = int(said["quota"]) if "quota" in said else None
    if not rounds:
        routes.start()
    return routes


def span(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first), int(last)


# What happens


def happen(event: str, now: float, scene: Scene) -> Sequence[Effect | str]:
    routes = scene.routes
    match event.split():
        case ["next"]:
            return [f"at {routes.wake_at:g}" if routes.wake_at is not None else "never"]
        case ["executions"]:
            here = [f"{local_id} {one.state.name.lower()}" for local_id, one in routes.executions.items()]
            return [", ".join(here) or "none"]
        case ["round", number, "quota", quota]:
            return [*routes.begin_round(int(number), True, int(quota)), *routes.handle(Woke(), now)]
        case ["give", "up", "own"]:
            return routes.give_up_own()
        case ["round", "ends"]:
            return routes.end_round()
        case ["over"]:
            return ["yes" if routes.all_begun_are_over else "no"]
    return routes.handle(event_of(event, scene), now)


def event_of(text: str, scene: Scene) -> Event:
    if found := re.fullmatch(r"(\w+) asks #(\d+): (.*)", text):
        return Asked(int(found[2]), PeerId(found[1]), message_of(found[3]))
    if found := re.fullmatch(r"(\w+ [^:]*): failed (\w+)", text):
        ask = scene.asked[found[1]]
        return AskFailed(ask.tag, ask.to, found[2], SECONDS)
    if found := re.fullmatch(r"(\w+ (?:\w+(?: \S+)?)): (.*)", text):
        ask = scene.asked[found[1]]
        return Answered(ask.tag, ask.to, message_of(found[2]), SECONDS, SECONDS, 0, 0)
    match text.split():
        case ["drawn", local_id, "as", number]:
            return jobs.ForwardDone(int(local_id), int(number), 1, 8, layout(0, 1), bytes(20))
        case ["forwarded", local_id]:
            return jobs.ForwardDone(int(local_id), 0, 1, 8, layout(0, 1), bytes(20))
        case ["backed", local_id, *_] as words:
            drawn = int(words[3]) if "as" in words else 0
            return jobs.BackwardDone(int(local_id), 8, 1.0, layout(0, 1)[:1], bytes(16), drawn)
        case ["failed", local_id, reason]:
            return jobs.ExecutionFailed(int(local_id), reason)
        case ["sealed", slot, "with", *tokens]:
            return jobs.Sealed(tuple(map(int, tokens)), int(slot))
        case ["undone", local_id]:
            return jobs.Undone(int(local_id), True)
        case ["stepped", *tokens]:
            return jobs.Stepped(1, 0, 8, 1.0, NO_TIME, 1, tuple(map(int, tokens)))
    assert text == "wake", f"no such event: {text}"
    return Woke()


def execution(text: str) -> ExecutionId:
    origin, number, first = re.split("[/@]", text)
    return ExecutionId(origin, int(number), int(first))


def message_of(text: str) -> Envelope:
    """What another peer says, in the words that `spoken` has for it."""
    kind, *words = text.split()
    after = {word: words[at + 1] for at, word in enumerate(words[:-1])}
    seconds = {name: float(after.get(name, default)) for name, default in (("for", 5), ("hold", 20), ("drawn", 0))}
    match kind:
        case "forward":
            name, round = execution(words[0]), int(after.get("round", 0))
            times = (seconds["for"], seconds["hold"], layout(name.first, 1), round, seconds["drawn"])
            return Envelope(ForwardRequest(RUN, name.origin, name.number, name.first, 1, *times), bytes(20))
        case "backward":
            hops = tuple(Hop(peer, *span(layers)) for peer, layers in (word.split(":") for word in words))
            return Envelope(BackwardResponse(RUN, 1.0, 8, hops, layout(0, 1)[:1]), bytes(16))
        case "offer":
            return Envelope(Offer(RUN, int(words[0]), 1))
        case "load":
            return Envelope(Load(RUN, float(after["waits"]), float(after["takes"]), int(after["to"])))
        case "status":
            return Envelope(ForwardStatusQuery(RUN, execution(words[0])))
        case "decision":
            split = words.index("abort") if "abort" in words else len(words)
            commits, aborts = words[:split], words[split + 1 :]
            named = [execution(word) for word in commits if word != "commit"], [execution(word) for word in aborts]
            return Envelope(CommitDecision(RUN, tuple(named[0]), tuple(named[1])))
        case "query":
            return Envelope(CommitQuery(RUN, tuple(map(execution, words))))
        case "refused":
            return Envelope(Refused(*words))
    assert kind == "done", f"no such message: {text}"
    return Envelope(Done())


# What the router wants


def spoken_effect(effect: Any, scene: Scene) -> str:
    match effect:
        case str():
            return effect
        case Ask(_, to, envelope):
            said = spoken(envelope.message)
            kind, name = [*said.split(), ""][:2]
            scene.asked[f"{to} {kind}"] = scene.asked[f"{to} {kind} {name}"] = effect
            return f"ask {to}: {said}"
        case Reply(request, envelope):
            return f"answer #{request}: {spoken(envelope.message)}"
        case jobs.Draw(local_id, last):
            return f"draw {local_id} to {last}"
        case jobs.Forward(local_id, first, last):
            return f"forward {local_id} through {first}-{last}"
        case jobs.Backward(local_id):
            return f"backward {local_id}"
        case jobs.Undo():
            return f"undo {effect.local_id}"
        case jobs.Forget(tokens):
            return f"forget {' '.join(map(str, tokens))}"
        case jobs.Seal(ready, then, slot):
            return f"seal {slot}" + (f" and apply {' '.join(map(str, ready))}" if then else "")
        case jobs.Apply() | jobs.Drop():
            return f"{type(effect).__name__.lower()} {effect.slot}"
        case Log(event):
            told = (f"{name} {shown(value)}" for name, value in JOURNAL_LINES.fields(event).items())
            return " ".join(["log", JOURNAL_LINES.name(event), *told])
    raise AssertionError(effect)


def shown(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return " ".join(f"{origin}/{number}@{first}-{last}" for origin, number, first, last, _ in value)


def spoken(message: Message) -> str:
    match message:
        case ForwardRequest(_, origin, number, first, _, patience_s, hold_s, _, round, drawn):
            rest = f" round {round}" * bool(round) + f" drawn {drawn:g}" * bool(drawn)
            return f"forward {origin}/{number}@{first} for {patience_s:g} hold {hold_s:g}{rest}"
        case BackwardResponse(hops=hops):
            return " ".join(["backward", *(f"{hop.peer}:{hop.first}-{hop.last}" for hop in hops)])
        case Offer(_, first):
            return f"offer {first}"
        case Load(_, wait_s, seconds, last):
            return f"load waits {wait_s:g} takes {seconds:g} to {last}"
        case ForwardStatusQuery(_, name):
            return f"status {named(name)}"
        case CommitDecision(_, commits, aborts):
            parts = [("commit", commits), ("abort", aborts)]
            return " ".join(["decision", *(" ".join([word, *map(named, names)]) for word, names in parts if names)])
        case CommitQuery(_, names):
            return " ".join(["query", *map(named, names)])
        case Refused(reason):
            return f"refused {reason}"
    assert isinstance(message, messages.Done)
    return "done"


def named(name: ExecutionId) -> str:
    return f"{name.origin}/{name.number}@{name.first}"
