"""Plays the transcripts beside this file: what happens to one machine, and what it wants done, a line each.

    == three partners                                 a scenario; then its machine and whom the view names
    pull partners B,C,D
    10  wake                        -> close 10000    time, event -> effect
    11  closed 10000                -> ask B: ...     several effects: a line each, that starts with ->
    12  B: snapshot 10000                             no effect; "B: ..." is B's answer to the last question to B
    13  B asks #1: pull after 9                       B's question; "answer #1: ..." is our reply to it
    14  next                        -> at 20          when it wants to wake
    15  partners C                                    from now on the view names C alone; "partners": nobody
    16  thin                                          from now on our link is thin; "wide": it is not

`pull partners B,C of 2` says how many holders there are; without it there are twice as many as partners. `pull in 3
slices partners B` cuts slow weights in three, `phi.0` to `phi.2`; without it they are one. `phi` stands for all.
A window may be `closed 10000 signs`, and a snapshot in signs: in the sparse one of its two codes.
A message may name a flaw (run, fragment, digest, shape) and when it was written (`at 3`). Windows come every 10 s.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from decentral.comm.gossip.exchange import PullExchange
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, Message, Pull, Refused, Snapshot
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply
from decentral.core.config import GossipConfig
from decentral.core.fragments import Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import (
    CloseWindow,
    EncodeSections,
    Merge,
    Merged,
    Rest,
    SectionsEncoded,
    WindowClosed,
)
from decentral.core.journal.events import ExchangeLine
from decentral.core.machine import Log, Woke
from tests.comm.gossip.partners import Partners

LIGHT = (Section("pseudo_gradient", "q4", 6, 3),)
PHI_BYTES = 6
SIGNS = (Section("pseudo_gradient", "q1", 6, 1),)
FLAWS = {
    "run": {"run": "other"},
    "fragment": {"fragment": 1},
    "digest": {"digest": b"x" * 16},
    "shape": {"layout": LIGHT * 2},
}


class Swarm(Partners):
    """The partners that a scenario names, and what the machine has asked them.

    `others` hold the fragment, or twice as many as partners. On request a window has slow weights in so many slices.
    """

    def __init__(self, names: Sequence[PeerId], others: int = 0, slices: int = 0) -> None:
        super().__init__(names)
        self.others, self.thin = others, False
        size = PHI_BYTES // max(1, slices)
        self.slow = tuple(Section(f"phi.{place}", "int8", size, size) for place in range(slices))
        self.asked: dict[str, Ask] = {}  # the last question to each

    def holders(self, fragment: int) -> Sequence[PeerId]:
        return [PeerId(str(number)) for number in range(self.others or 2 * len(self.peers))]

    def is_thin(self, fragment: int, size: int) -> bool:
        return self.thin


def scenarios() -> Iterator[tuple[str, list[str]]]:
    for path in sorted(Path(__file__).with_name("transcripts").glob("*.txt")):
        for part in path.read_text().split("\n== ")[1:]:
            title, *lines = part.splitlines()
            yield f"{path.stem}: {title}", [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in scenarios()])
def test_the_machine_does_what_the_transcript_says(lines: list[str]) -> None:
    kind, _, names = lines[0].partition(" partners ")
    names, _, others = names.partition(" of ")
    kind, _, slices = kind.partition(" in ")
    swarm = Swarm(peers(names), int(others or 0), int(slices.split()[0]) if slices else int(kind == "pull"))
    machine = machine_of(kind, swarm)
    expected = [" ".join(line.split()) for line in lines[1:]]
    played: list[str] = []
    for line in (line for line in expected if not line.startswith("->")):
        written, event = line.partition(" -> ")[0].split(" ", 1)
        now, effects = float(written), list[str]()
        if event == "partners" or event.startswith("partners "):
            swarm.peers = peers(event.partition(" ")[2])
        elif event in ("thin", "wide"):
            swarm.thin = event == "thin"
        elif event == "next":
            effects = [f"at {machine.wake_at:g}" if machine.wake_at is not None else "never"]
        else:
            effects = [shown(effect, swarm) for effect in machine.handle(event_of(event, now, swarm), now)]
        played += [f"{written} {event} -> {effects[0]}" if effects else f"{written} {event}"]
        played += [f"-> {effect}" for effect in effects[1:]]
    assert played == expected


def peers(names: str) -> list[PeerId]:
    return [PeerId(name) for name in names.split(",") if name]


def machine_of(kind: str, swarm: Swarm) -> PullExchange:
    context = FragmentContext(RunId("run"), PeerId("M"), 0, 0.0, GossipConfig(), swarm, swarm)
    if kind == "pull":
        return PullExchange(context, 10.0)
    return PullExchange(context, 10.0, blocking=True, seq=4)


def event_of(text: str, now: float, swarm: Swarm) -> Event:
    if found := re.fullmatch(r"(\w) asks #(\d+): (.*)", text):
        return Asked(int(found[2]), PeerId(found[1]), said(found[1], found[3], now, swarm.slow))
    if found := re.fullmatch(r"(\w): failed (\w+)", text):
        return AskFailed(swarm.asked[found[1]].tag, PeerId(found[1]), found[2], 1.0)
    if found := re.fullmatch(r"(\w): (.*)", text):
        return Answered(
            swarm.asked[found[1]].tag, PeerId(found[1]), said(found[1], found[2], now, swarm.slow), 1.0, 1.0, 10, 20
        )
    match text.split():
        case ["closed", seq, *code]:
            later, codings = (swarm.slow, (*LIGHT, *SIGNS)) if swarm.slow else ((), ())
            window = SIGNS if code == ["signs"] else LIGHT
            return WindowClosed(0, int(seq), 64, window, b"M" * sum(one.size for one in window), later, codings)
        case ["encoded", seq, *names]:
            made = tuple(one for one in swarm.slow if one.name in names or not names)
            return SectionsEncoded(0, int(seq), made, b"S" * sum(one.size for one in made))
        case ["merged", seq, *peers]:
            refused = [tuple(peer.split("=")) for peer in peers if "=" in peer]
            used = tuple(PeerId(peer) for peer in peers if "=" not in peer)
            return Merged(0, int(seq), used, tuple((PeerId(peer), reason) for peer, reason in refused))
    assert text == "wake", f"no such event: {text}"
    return Woke()


def said(sender: str, text: str, now: float, slow: Sequence[Section]) -> Envelope:
    """A partner's message: `snapshot 7 phi shape`, `refused busy`, `done`, `pull after 3 since 9 for 5`."""
    kind, *words = text.split()
    after = {word: words[at + 1] for at, word in enumerate(words[:-1])}
    match kind:
        case "refused":
            return Envelope(Refused(*words))
        case "done":
            return Envelope(Done())
        case "pull":
            names = tuple(word for word in words if word.startswith("phi"))
            times = (float(after.get("since", 0)), float(after.get("for", 0)))
            return Envelope(Pull("run", 0, int(after["after"]), *times, "exactly" in words, names))
    came = (one for one in slow if one.name in words or "phi" in words)
    layout = (*(SIGNS if "signs" in words else LIGHT), *came)
    blob = sender.encode() * sum(section.size for section in layout)
    sent = float(after.get("at", now))
    snapshot = Snapshot("run", 0, int(words[0]), 32, sent, layout, blobs.digest(blob))
    for flaw in set(words) & set(FLAWS):
        snapshot = replace(snapshot, **FLAWS[flaw])  # type: ignore[arg-type]
    return Envelope(snapshot, blob)


def shown(effect: Effect, swarm: Swarm) -> str:
    match effect:
        case CloseWindow(_, seq, hold, sparse):
            return f"close {seq}" + " and hold" * hold + " in signs" * sparse
        case EncodeSections(_, seq, names):
            return f"encode {' '.join(names)} of {seq}"
        case Rest():
            return "rest"
        case Ask(_, to, envelope):
            swarm.asked[to] = effect
            return f"ask {to}: {spoken(envelope.message)}"
        case Reply(request, envelope):
            return f"answer #{request}: {spoken(envelope.message)}"
        case Merge(_, seq, parts):
            return f"merge {seq} with {' '.join(part.peer for part in parts) or 'nobody'}"
        case Log(ExchangeLine() as line):
            return " ".join(filter(None, ("log", line.outcome, line.partner, line.reason)))
    raise AssertionError(effect)


def spoken(message: Message) -> str:
    match message:
        case Pull(_, _, after, since, patience, exact, sections):
            words = [f"pull after {after} since {since:g} for {patience:g}", *["exactly"] * exact, *sections]
            return " ".join(words)
        case Snapshot() as snapshot:
            slow = "".join(f" {section.name}" for section in snapshot.layout if section.codec == "int8")
            return f"snapshot {snapshot.seq}{slow}" + " in signs" * (SIGNS[0] in snapshot.layout)
        case Refused(reason, detail):
            return f"refused {reason} {detail}".strip()
    return type(message).__name__.lower()
