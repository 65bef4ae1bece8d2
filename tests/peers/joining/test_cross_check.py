"""A newcomer believes no donor alone: samples of what each sent are compared with what two others hold."""

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, Ask, Effect
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import DonorFailedLine
from decentral.core.machine import Log
from decentral.core.units import KiB
from decentral.peers.joining.fetch import PIECE_BYTES, Fetch, FetchTag, Incoming
from tests.peers.joining.any_holder import AnyHolder

RUN = RunId("run")
HONEST = [PeerId(name) for name in ("h1", "h2", "h3")]
LIAR = PeerId("liar")
PIECES = 12
SIZE = PIECES * PIECE_BYTES
LAYOUT = (Section("phi", "fp32", SIZE // 4, SIZE),)
FRAGMENTS = [Fragment(number, number, number + 1, SIZE // 4) for number in range(2)]
Floats = NDArray[np.float32]
TRUTH = np.random.default_rng(0).standard_normal(SIZE // 4, np.float32)


def replica(number: int, spread: float = 0.14) -> Floats:
    """An honest peer's weights: as far from the mean as those of README's swarm."""
    return TRUTH + np.float32(spread) * np.random.default_rng(number).standard_normal(SIZE // 4, np.float32)


class Swarm:
    """Donors that answer at their own speeds, in virtual time."""

    def __init__(self, states: dict[PeerId, Floats], seconds: dict[PeerId, float], synchronous: bool = False) -> None:
        self.states = {peer: state.tobytes() for peer, state in states.items()}
        self.seconds, self.now, self.count = seconds, 0.0, 0
        self.pieces = Counter[PeerId]()
        self.bytes_ = Counter[PeerId]()
        self.lines: list[DonorFailedLine] = []
        self.agenda: list[tuple[float, int, Ask]] = []
        self.fetch = Fetch(RUN, FetchTag, Random(0), AnyHolder(), synchronous)

    def run(self) -> list[Floats]:
        self.fetch.begin([Incoming(fragment, LAYOUT) for fragment in FRAGMENTS], 0.0)
        self.fetch.choose(sorted(self.states))
        self._carry(self.fetch.ask())
        while self.agenda and not self.fetch.complete:
            self.now, _, ask = heapq.heappop(self.agenda)
            question = ask.envelope.message
            assert isinstance(question, StateRequest)
            piece = self.states[ask.to][question.offset : question.offset + question.length]
            self.pieces[ask.to] += question.length == PIECE_BYTES
            self.bytes_[ask.to] += len(piece)
            chunk = StateChunk(RUN, question.fragment, question.offset, SIZE, 5, LAYOUT)
            self._carry(self.fetch.handle(Answered(ask.tag, ask.to, Envelope(chunk, piece), 0.1, 0.1, 1, 1), self.now))
        assert self.fetch.complete
        return [np.frombuffer(blob, np.float32) for _, _, blob in self.fetch.donated()]

    def _carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.count += 1
                question = effect.envelope.message
                assert isinstance(question, StateRequest)
                seconds = self.seconds[effect.to] * max(0.05, question.length / PIECE_BYTES)
                heapq.heappush(self.agenda, (self.now + seconds, self.count, effect))
            else:
                assert isinstance(effect, Log)
                assert isinstance(effect.event, DonorFailedLine)
                self.lines.append(effect.event)

    @property
    def left_out(self) -> list[str]:
        return [line.peer for line in self.lines if line.reason == "differs"]


SPEEDS = {**dict.fromkeys(HONEST, 0.5), LIAR: 0.02}


def at_one_place(state: Floats) -> Floats:
    lie = state.copy()
    lie[1000 :: PIECE_BYTES // 4] = 8.5e37  # a single number of each piece
    return lie


@pytest.mark.parametrize("lie", [lambda state: state * 0, lambda state: -state, lambda state: 3 * state, at_one_place])
def test_a_fast_donor_that_lies_has_no_part_in_a_newcomers_weights(lie: Callable[[Floats], Floats]) -> None:
    """It gave 52 of 64 pieces, and all of them were taken as they came."""
    states = {peer: replica(number) for number, peer in enumerate(HONEST)}
    swarm = Swarm({**states, LIAR: lie(replica(9))}, SPEEDS)
    for found in swarm.run():
        assert np.linalg.norm(found - TRUTH) < 0.2 * np.linalg.norm(TRUTH)
    assert swarm.left_out == [LIAR]


def test_a_number_that_is_not_finite_costs_its_donor_the_place() -> None:
    states = {peer: replica(number) for number, peer in enumerate(HONEST)}
    bad = replica(9)
    bad[5::1000] = np.nan
    swarm = Swarm({**states, LIAR: bad}, SPEEDS)
    assert all(np.isfinite(found).all() for found in swarm.run())
    assert LIAR not in swarm.fetch.used


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.14, 0.3])
def test_honest_replicas_that_differ_are_not_left_out_and_the_fastest_gives_most(spread: float) -> None:
    names = [*HONEST, PeerId("fast")]
    swarm = Swarm({peer: replica(n, spread) for n, peer in enumerate(names)}, {**SPEEDS, names[-1]: 0.02})
    swarm.run()
    assert swarm.left_out == []
    assert swarm.pieces[names[-1]] > sum(swarm.pieces[peer] for peer in HONEST)
    assert swarm.bytes_.total() <= 2 * (SIZE + PIECE_BYTES // 8) + 64 * KiB


def test_with_two_peers_nobody_can_tell_who_is_right() -> None:
    swarm = Swarm({HONEST[0]: replica(0), LIAR: -replica(9)}, SPEEDS)
    swarm.run()
    assert swarm.left_out == []


def test_where_most_differ_not_all_are_left_out() -> None:
    chance = np.random.default_rng(5)
    states = {PeerId(f"p{n}"): chance.standard_normal(SIZE // 4, np.float32) * 4**n for n in range(6)}
    swarm = Swarm(states, dict.fromkeys(states, 0.1))
    swarm.run()
    assert len(swarm.left_out) <= 2


def test_equal_replicas_are_compared_byte_by_byte() -> None:
    lie = TRUTH.copy()
    lie[7::1024] *= 1.0001
    swarm = Swarm({**dict.fromkeys(HONEST, TRUTH), LIAR: lie}, SPEEDS, synchronous=True)
    assert all((found == TRUTH).all() for found in swarm.run())
    assert swarm.left_out == [LIAR]
