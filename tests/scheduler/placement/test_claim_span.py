"""Which layers peers claim: the whole model if it fits, else what is missing, and never all the same ones.

Time passes only while all wait.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Refused
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.reasons import Reason
from decentral.engine import memory
from decentral.peers.membership.records import PeerPhase, Profile, first_record, pack
from decentral.peers.membership.swarm_size import key_of
from decentral.scheduler.placement import claim_span
from tests.comm.net.loopback import Loopback, LoopbackDirectory
from tests.patient_time import TimelessLoop

Result = TypeVar("Result")
EPOCH = 1.7e9
RUN = RunId("gpt-3fa2c1")
CONFIG = config.Config(model=config.ModelConfig(depth=4, width=128))
KEY = key_of(RUN, PeerId("any"))
NEEDS = memory.needs(CONFIG)
HALF = max(NEEDS.span_bytes(0, 2), NEEDS.span_bytes(1, 3), NEEDS.span_bytes(2, 4))


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return [Identity.load_or_create(folder / str(number)) for number in range(6)]


def play(story: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(story)


def now() -> float:
    return EPOCH + asyncio.get_running_loop().time()


class RunningClock:
    """The event loop's time as unix time."""

    def now(self) -> float:
        return now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def claimed(network: Loopback, own: Identity, memory_bytes: int) -> claim_span.ClaimedSpan:
    return await chosen(own, network, memory_bytes, None)


async def chosen(
    own: Identity, network: Loopback, memory_bytes: int, kept: tuple[int, int] | None
) -> claim_span.ClaimedSpan:
    request = claim_span.SpanRequest(CONFIG, RUN, own, (), memory_bytes, kept)
    return await claimed_by(request, network, LoopbackDirectory(network))


async def claimed_by(
    request: claim_span.SpanRequest, network: Loopback, directory: LoopbackDirectory, needs: MemoryNeeds = NEEDS
) -> claim_span.ClaimedSpan:
    silent = partial(claim_span.silent_peers, network.transport(request.own.peer))
    return await claim_span.claim(request, needs, directory, silent, RunningClock())


async def trains(
    network: Loopback, own: Identity, first: int, last: int, speed: float = 1000.0, alone: bool = False
) -> None:
    """Stores the record of a peer that trains these layers."""
    expires = now() + 60.0
    profile = Profile("cpu", 1 << 30, 0.0, speed, alone=alone)
    record = replace(first_record(RUN, (), profile), first=first, last=last, time=now(), phase=PeerPhase.TRAINING)
    await LoopbackDirectory(network).store(KEY, own.peer, own.seal(KEY, pack(record), expires), expires)


async def answer(sender: PeerId, question: Envelope) -> Envelope:
    """As a peer does for which we are a stranger: it is there all the same."""
    return Envelope(Refused(Reason.STRANGER))


def test_a_model_that_fits_is_held_whole_and_nobody_is_asked(identities: list[Identity]) -> None:
    network = Loopback(now=now)
    assert play(claimed(network, identities[0], NEEDS.span_bytes(0, 4))).span is None
    assert not network.records


def test_peers_that_come_one_after_another_cover_the_model(identities: list[Identity]) -> None:
    network = Loopback(now=now)

    async def in_turn() -> list[tuple[int, int] | None]:
        return [(await claimed(network, own, HALF)).span for own in identities[:2]]

    assert play(in_turn()) == [(0, 3), (3, 6)]


def test_peers_that_come_at_once_do_not_all_take_the_same(identities: list[Identity]) -> None:
    network = Loopback(now=now)

    async def together() -> list[claim_span.ClaimedSpan]:
        return list(await asyncio.gather(*(claimed(network, own, HALF) for own in identities[:4])))

    spans = [one.span for one in play(together())]
    covered = {layer for span in spans if span for layer in range(*span)}
    assert covered == set(range(6))
    assert max(spans.count(span) for span in spans) < 4


@pytest.mark.parametrize(
    ("there", "span"),
    [
        ((0, 1), (2, 4)),
        ((0,), (3, 6)),  # whoever held these has died, and its record is still there
        ((1,), (0, 3)),
        ((), (2, 4)),  # who hears nobody cannot tell who is gone
    ],
)
def test_a_newcomer_takes_the_place_of_a_peer_that_has_died(
    identities: list[Identity], there: tuple[int, ...], span: tuple[int, int]
) -> None:
    async def story() -> tuple[int, int] | None:
        network = Loopback(now=now)
        for number, layers in enumerate(((0, 3), (3, 6))):
            await trains(network, identities[number], *layers)
            if number in there:
                await network.transport(identities[number].peer).serve(answer, lambda _: 0)
        return (await claimed(network, identities[2], HALF)).span

    assert play(story()) == span


FIRST, LAST = (0, 3), (3, 6)


@pytest.mark.parametrize(
    ("there", "silent", "span"),
    [
        ([(*FIRST, 400), (*LAST, 1000)], [(*FIRST, 1000), (*FIRST, 1000)], FIRST),  # by records the last are scarce
        ([(*FIRST, 400)], [(*LAST, 1000)], FIRST),  # the silent one may have died, or be back in a moment
        ([(*FIRST, 1000), (*LAST, 400)], [], LAST),
        ([(*FIRST, 1000), (*LAST, 400)], [(*FIRST, 1000)], LAST),
        ([(*FIRST, 1000), (*FIRST, 1000), (*LAST, 400)], [(*LAST, 10**12)], LAST),  # it claims much and answers nothing
    ],
)
def test_where_those_that_answer_hold_all_the_earlier_of_both_choices_is_taken(
    identities: list[Identity],
    there: list[tuple[int, int, int]],
    silent: list[tuple[int, int, int]],
    span: tuple[int, int],
) -> None:
    async def story() -> tuple[int, int] | None:
        network = Loopback(now=now)
        answering = [(0, 6, 1000), *there]
        for number, (own, one) in enumerate(zip(identities[1:], [*answering, *silent], strict=False)):
            await trains(network, own, *one)
            if number < len(answering):
                await network.transport(own.peer).serve(answer, lambda _: 0)
        return (await claimed(network, identities[0], HALF)).span

    assert play(story()) == span


@pytest.mark.parametrize(("alone", "span"), [(False, LAST), (True, FIRST)])
def test_layers_whose_holder_computes_for_no_other_are_taken_as_if_nobody_held_them(
    identities: list[Identity], alone: bool, span: tuple[int, int]
) -> None:
    async def story() -> tuple[int, int] | None:
        network = Loopback(now=now)
        await trains(network, identities[1], *FIRST, alone=alone)
        await network.transport(identities[1].peer).serve(answer, lambda _: 0)
        return (await claimed(network, identities[0], HALF)).span

    assert play(story()) == span


def test_peers_with_the_oldest_and_the_latest_records_are_asked_whether_they_are_there(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_span, "MOST_TRIED", 2)
    asked = list[PeerId]()

    async def note(found: claim_span.Records) -> list[PeerId]:
        asked.extend(found)
        return []

    async def story() -> None:
        network = Loopback(now=now)
        for own in identities[:3]:
            await trains(network, own, 0, 3)
            await asyncio.sleep(0.001)  # so that no two records have the same time
        request = claim_span.SpanRequest(CONFIG, RUN, identities[3], (), HALF, None)
        clock = RunningClock()
        await claim_span.claim(request, NEEDS, LoopbackDirectory(network), note, clock)

    play(story())
    assert asked == [identities[0].peer, identities[2].peer]


def test_who_finds_nobody_at_first_asks_when_it_looks_again(identities: list[Identity]) -> None:
    class LateDirectory(LoopbackDirectory):
        lookups = 0

        async def fetch(self, key: str) -> Mapping[str, bytes]:
            self.lookups += 1
            return await super().fetch(key) if self.lookups > 1 else {}

    async def story() -> tuple[int, int] | None:
        network = Loopback(now=now)
        for own, layers in zip(identities[1:], (FIRST, FIRST, LAST), strict=False):
            await trains(network, own, *layers)
        await network.transport(identities[3].peer).serve(answer, lambda _: 0)  # only the last layers are held
        request = claim_span.SpanRequest(CONFIG, RUN, identities[0], (), HALF, None)
        return (await claimed_by(request, network, LateDirectory(network))).span

    assert play(story()) == FIRST


def test_who_only_donates_leaves_the_first_layers_to_those_that_begin_there(identities: list[Identity]) -> None:
    async def donates(needs: MemoryNeeds, memory_bytes: int) -> tuple[int, int] | None:
        request = claim_span.SpanRequest(CONFIG, RUN, identities[0], (), memory_bytes, None, originates=False)
        network = Loopback(now=now)
        return (await claimed_by(request, network, LoopbackDirectory(network), needs)).span

    assert play(claimed(Loopback(now=now), identities[0], HALF)).span == FIRST
    assert play(donates(NEEDS, HALF)) == (2, 4)
    growing = MemoryNeeds(tuple(Fragment(at, at, at + 1, 100) for at in range(3)), (10, 20, 30), (0,) * 3, (0,) * 3)
    assert play(donates(growing, 10)) == (0, 1), "for the others its memory is too small"


def test_a_peer_that_comes_back_keeps_its_layers(identities: list[Identity]) -> None:
    kept = play(chosen(identities[0], Loopback(now=now), HALF, (2, 4)))
    assert kept.span == (2, 4)


def test_a_checkpoint_that_does_not_fit_any_more_is_the_users_to_mend(identities: list[Identity]) -> None:
    with pytest.raises(UserError, match="this state folder has layers 0 to 5, which take"):
        play(chosen(identities[0], Loopback(now=now), HALF, (0, 6)))


def test_claims_of_others_that_are_no_records_are_left_out(identities: list[Identity]) -> None:
    network = Loopback(now=now)
    network.records[f"{RUN}/peers", "QmNobody"] = (b"garbage", 4e9)
    assert play(claimed(network, identities[0], HALF)).span == (0, 3)
