"""A newcomer fetches its state from several donors, piece by piece, and some of them may fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest

from decentral.comm.net.fair_shares import MAX_STREAMS
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect, Reply
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import ExportState, ImportState, Start, StateExported, StateImported
from decentral.core.journal.events import REPEAT_S, ErrorLine
from decentral.core.machine import Log, Woke
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining import donor as donor_module
from decentral.peers.joining import fetch
from decentral.peers.joining.donor import (
    EXPORT_KEPT_S,
    FINISHED_S,
    MOST_OWED_S,
    MOST_SERVED,
    MOST_WAITING,
    PLACELESS_S,
    SERVED_S,
    STRANGER_EXPORTS,
    Donor,
)
from decentral.peers.joining.fetch import (
    AHEAD_BYTES,
    DONORS,
    FRAGMENTS_AHEAD,
    MOST_IN_FLIGHT,
    PIECE_BYTES,
    PIECE_DEADLINE_S,
    SOON_S,
    Fetch,
    Incoming,
)
from decentral.peers.joining.join import (
    GIVE_UP_S,
    HOLDER_RETRIES,
    JOIN_RETRY_S,
    MOST_PATIENT,
    Join,
    JoinPhase,
    JoinTag,
)
from tests.peers.joining.any_holder import AnyHolder

RUN = RunId("gpt-3fa2c1")
A, B = PeerId("A"), PeerId("B")
MANY = tuple(PeerId(f"donor{number:02d}") for number in range(30))
FRAGMENTS = (Fragment(0, 0, 1, 400_000), Fragment(1, 1, 2, 400_000))
SIZE = 3 * PIECE_BYTES - 1000  # bytes of each fragment's state: three pieces
LAYOUT = (Section("theta", "fp32", SIZE // 4, SIZE),)
OTHER = (Section("phi", "fp32", SIZE // 4, SIZE),)


def of_fragment(ask: Ask) -> int:
    assert isinstance(ask.tag, JoinTag)
    return ask.tag.fragment


@dataclass
class View:
    """The swarm as a test describes it."""

    holds: Callable[[PeerId, Fragment], bool] = lambda peer, fragment: True
    retained: Callable[[int], tuple[int, Sequence[PeerId]]] = lambda index: (-1, ())
    step: int | None = None

    def donates(self, peer: PeerId, fragment: Fragment) -> bool:
        return self.holds(peer, fragment)

    def newest_retained(self, fragment: int) -> tuple[int, Sequence[PeerId]]:
        return self.retained(fragment)

    def swarm_step(self) -> int | None:
        return self.step


class Newcomer:
    """A Join with its donors, which answer when a test says so."""

    def __init__(self, donors: Sequence[PeerId] = (A, B), own_step: int = 0, restored: bool = False) -> None:
        donated = (RUN, FRAGMENTS, [LAYOUT] * len(FRAGMENTS), tuple(donors))
        self.view = View()
        self.join = Join(*donated, own_step, restored, Random(0), self.view, has_weights=restored)
        self.live, self.now = list(donors), 100.0
        self.asks: list[Ask] = []
        self.fetched: list[object] = []
        self.effects: list[Effect] = []
        self.join.begin(self.now)

    def carry(self, effects: list[Effect]) -> None:
        self.asks += [effect for effect in effects if isinstance(effect, Ask)]
        self.effects += [effect for effect in effects if not isinstance(effect, Ask)]

    def know_the_roster(self) -> None:
        self.carry(self.join.roster_known(self.now, self.live))

    def wake(self, seconds: float) -> None:
        self.now += seconds
        self.carry(self.join.handle(Woke(), self.now, self.live))

    def next_of(self, donor: PeerId) -> Ask:
        ask = next(ask for ask in self.asks if ask.to == donor)
        self.asks.remove(ask)
        return ask

    def answer(self, ask: Ask, **flaw: object) -> None:
        pull = ask.envelope.message
        assert isinstance(pull, StateRequest)
        piece = bytes([pull.fragment]) * flaw.get("length", min(PIECE_BYTES, SIZE - pull.offset))  # type: ignore[operator]
        layout = flaw.get("layout", LAYOUT)
        chunk = StateChunk(RUN, pull.fragment, pull.offset, SIZE, flaw.get("step", 50), layout)  # type: ignore[arg-type]
        if not flaw:
            self.fetched.append(ask.tag)
        self.carry(
            self.join.handle(Answered(ask.tag, ask.to, Envelope(chunk, piece), 1.0, 1.0, 10, 10), self.now, self.live)
        )

    def refuse(self, ask: Ask, reason: str) -> None:
        answer = Answered(ask.tag, ask.to, Envelope(Refused(reason)), 0.1, 0.1, 10, 10)
        self.carry(self.join.handle(answer, self.now, self.live))

    def fail(self, ask: Ask, reason: str = "unreachable") -> None:
        self.carry(self.join.handle(AskFailed(ask.tag, ask.to, reason, 1.0), self.now, self.live))

    def finish(self) -> ImportState:
        while self.asks:
            self.answer(self.asks.pop(0))
        (imported,) = (effect for effect in self.effects if isinstance(effect, ImportState))
        return imported

    @property
    def starts(self) -> list[Effect]:
        return [effect for effect in self.effects if isinstance(effect, Start)]


def test_two_donors_are_asked_at_once_for_different_pieces() -> None:
    new = Newcomer()
    new.know_the_roster()
    assert {ask.to for ask in new.asks} == {A, B}
    assert len({ask.tag for ask in new.asks}) == len(new.asks)


def test_all_pieces_together_are_imported_and_training_starts() -> None:
    new = Newcomer()
    new.know_the_roster()
    imported = new.finish()
    assert imported.step == 50
    assert imported.blobs == tuple((index, LAYOUT, bytes([index]) * SIZE) for index in (0, 1))
    assert len(new.fetched) == len(set(new.fetched)) == 6
    new.carry(new.join.handle(StateImported(True), new.now, new.live))
    assert new.starts == [Start(newcomer=True)]
    assert new.join.fetch.used == {A, B}


def test_a_donor_that_dies_midway_is_replaced_and_nothing_is_fetched_twice() -> None:
    new = Newcomer()
    new.know_the_roster()
    new.answer(new.next_of(A))
    new.answer(new.next_of(B))
    while any(ask.to == A for ask in new.asks):
        new.fail(new.next_of(A))
    assert new.join.fetch.donors == [B]
    new.finish()
    assert len(new.fetched) == len(set(new.fetched)) == 6


def test_a_piece_of_a_wrong_length_is_asked_again() -> None:
    new = Newcomer()
    new.know_the_roster()
    bad = new.next_of(A)
    new.answer(bad, length=16)
    assert any(ask.tag == bad.tag for ask in new.asks)
    assert new.finish().blobs[0][2] == bytes(SIZE)


@pytest.mark.parametrize("flaw", [{"length": 16}, {"layout": ()}])
def test_a_donor_that_sends_bad_pieces_is_left_out(flaw: dict[str, object]) -> None:
    new = Newcomer()
    new.know_the_roster()
    while A in new.join.fetch.donors:
        if any(ask.to == A for ask in new.asks):
            new.answer(new.next_of(A), **flaw)
        else:
            new.answer(new.next_of(B))
    assert new.join.fetch.donors == [B]
    new.finish()
    assert new.join.fetch.used == {B}


def test_donors_that_disagree_on_the_layout_are_not_mixed() -> None:
    new = Newcomer()
    new.know_the_roster()
    for _ in range(2):
        new.answer(new.next_of(A))
    while any(ask.to == B for ask in new.asks):
        new.answer(new.next_of(B), layout=OTHER)
    assert {layout for _, layout, _ in new.finish().blobs} == {LAYOUT}


def test_donors_behind_our_checkpoint_teach_us_nothing() -> None:
    new = Newcomer(own_step=100, restored=True)
    new.know_the_roster()
    new.answer(new.next_of(A), step=90)
    new.answer(new.next_of(B), step=90)
    assert new.starts == [Start(newcomer=False)]
    assert new.join.phase is JoinPhase.DONE


@pytest.mark.parametrize("flaw", [{"step": 0}, {"step": 0, "layout": OTHER}, {"step": 1 << 60}])
def test_one_donor_does_not_tell_a_peer_with_a_checkpoint_where_the_swarm_is(flaw: dict[str, object]) -> None:
    """One chunk with a low step, of whatever shape, made it keep weights of long ago."""
    new = Newcomer(donors=(A, B, PeerId("C")), own_step=40, restored=True)
    new.know_the_roster()
    new.answer(new.asks.pop(0), **flaw)
    assert not new.starts
    assert new.finish().step == 50


def test_a_liar_that_names_a_late_step_does_not_have_a_peer_give_up_its_newer_checkpoint() -> None:
    new = Newcomer(donors=(A, B, PeerId("C")), own_step=100, restored=True)
    new.know_the_roster()
    new.answer(new.asks.pop(0), step=1 << 60)
    while not new.starts:
        new.answer(new.asks.pop(0))
    assert new.starts == [Start(newcomer=False)]


def test_a_checkpoint_that_is_behind_catches_up_and_is_no_newcomer() -> None:
    new = Newcomer(own_step=10, restored=True)
    new.know_the_roster()
    new.finish()
    new.carry(new.join.handle(StateImported(True), new.now, new.live))
    assert new.starts == [Start(newcomer=False)]


@pytest.mark.parametrize("restored", [False, True])
def test_with_nobody_there_it_starts_from_what_it_has(restored: bool) -> None:
    new = Newcomer(donors=(), restored=restored)
    new.know_the_roster()
    assert new.starts == [Start(newcomer=False)]


def in_silence(new: Newcomer, seconds: float) -> None:
    """So long no donor answers: every question fails."""
    for _ in range(round(seconds / JOIN_RETRY_S)):
        while new.asks:
            new.fail(new.asks.pop(), Reason.DEADLINE)
        new.wake(JOIN_RETRY_S)


def test_donors_that_never_answer_are_given_up_by_a_peer_with_a_checkpoint() -> None:
    new = Newcomer(restored=True)
    new.know_the_roster()
    in_silence(new, 30.0)
    assert new.starts == [Start(newcomer=False)]


def errors(new: Newcomer) -> list[str]:
    lines = [effect.event for effect in new.effects if isinstance(effect, Log)]
    return [line.reason for line in lines if isinstance(line, ErrorLine)]


@pytest.mark.parametrize("pieces", [0, 4])
def test_a_newcomer_asks_a_silent_swarm_until_it_answers_and_says_that_it_waits(pieces: int) -> None:
    new = Newcomer(donors=(A,))
    new.know_the_roster()
    for _ in range(pieces):
        new.answer(new.next_of(A))
    new.live = []  # the roster drops a peer that does not answer
    in_silence(new, 600.0)
    assert not new.starts
    assert "keeps asking" in new.join.waits
    assert errors(new)[0] == new.join.waits
    new.wake(JOIN_RETRY_S)
    assert len(new.finish().blobs) == 2
    assert new.join.waits == ""


def test_a_newcomer_that_waits_writes_so_again_as_long_as_it_waits() -> None:
    new = Newcomer(donors=(A,))
    new.know_the_roster()
    new.live = []
    in_silence(new, 60.0)
    (waits,) = errors(new)
    in_silence(new, 10 * REPEAT_S)
    assert errors(new) == [waits] * 11


def test_a_newcomer_waits_for_a_silent_donor_though_another_newcomer_answers() -> None:
    new = Newcomer()
    new.know_the_roster()
    for _ in range(60):
        while new.asks:
            ask = new.asks.pop()
            new.refuse(ask, Reason.NOT_READY) if ask.to == A else new.fail(ask, Reason.DEADLINE)
        new.live = [A]
        new.join.contacts = (A,)
        new.wake(JOIN_RETRY_S)
    assert not new.starts


def test_peers_of_which_none_has_weights_yet_begin_together() -> None:
    new = Newcomer()
    new.know_the_roster()
    for _ in range(30):
        while new.asks:
            new.refuse(new.asks.pop(), Reason.NOT_READY)
        new.wake(JOIN_RETRY_S)
    assert new.starts == [Start(newcomer=False)]


def test_a_newcomer_with_a_part_of_the_layers_waits_where_nothing_comes_at_all() -> None:
    new = Newcomer(donors=(A,))
    new.view.holds = lambda peer, fragment: peer in new.live
    new.know_the_roster()
    new.live = []
    in_silence(new, 600.0)
    assert not new.starts
    new.live = [A]
    new.wake(JOIN_RETRY_S)
    assert len(new.finish().blobs) == 2


def test_a_donor_that_is_not_ready_yet_is_asked_again() -> None:
    new = Newcomer(donors=(A,))
    new.know_the_roster()
    while new.asks:
        new.refuse(new.asks.pop(), "not-ready")
    new.wake(2.0)
    new.wake(2.0)
    new.finish()


def test_a_state_that_our_model_refuses_is_asked_again_after_a_pause() -> None:
    new = Newcomer()
    new.know_the_roster()
    new.finish()
    new.carry(new.join.handle(StateImported(False, "shape"), new.now, new.live))
    assert not new.starts
    assert not new.asks
    new.wake(2.0)
    assert new.asks


def test_a_few_of_many_donors_are_asked_and_the_others_are_spared() -> None:
    new = Newcomer(donors=MANY)
    new.know_the_roster()
    new.finish()
    assert new.join.fetch.used <= set(new.join.fetch.donors)
    assert len(new.join.fetch.donors) == DONORS


def test_newcomers_do_not_all_ask_the_same_donors() -> None:
    chosen = set()
    for seed in range(20):
        new = Newcomer(donors=MANY)
        new.join.fetch.chance = Random(seed)
        new.know_the_roster()
        chosen |= {ask.to for ask in new.asks}
    assert len(chosen) > 5 * DONORS


def test_a_donor_that_died_is_replaced_by_one_that_was_spared() -> None:
    new = Newcomer(donors=MANY)
    new.know_the_roster()
    first = new.join.fetch.donors[0]
    while any(ask.to == first for ask in new.asks):
        new.fail(new.next_of(first))
    new.wake(2.0)
    assert len(new.join.fetch.donors) == DONORS
    assert first not in new.join.fetch.donors


def test_a_busy_donor_is_spared_and_that_is_no_failure() -> None:
    new = Newcomer(donors=MANY)
    new.know_the_roster()
    busy = new.join.fetch.donors[0]
    new.refuse(new.next_of(busy), "busy")
    assert busy not in new.join.fetch.donors
    assert not [effect for effect in new.effects if isinstance(effect, Log)]
    new.finish()


def test_when_all_are_busy_they_are_asked_again_later() -> None:
    new = Newcomer()
    new.know_the_roster()
    for _ in range(5):
        while new.asks:
            new.refuse(new.asks.pop(), "busy")
        new.wake(JOIN_RETRY_S * (1 + MOST_PATIENT))
    assert {ask.to for ask in new.asks} == {A, B}
    new.finish()


def test_the_one_holder_of_a_layer_is_among_the_donors_however_many_others_there_are() -> None:
    for seed in range(5):
        new = Newcomer(donors=MANY)
        new.join.chance = Random(seed)
        new.view.holds = lambda peer, fragment: fragment.index == 0 or peer == MANY[7]
        new.know_the_roster()
        assert MANY[7] in new.join.fetch.donors
        assert len(new.finish().blobs) == 2


def test_a_layer_whose_last_holder_has_gone_does_not_hold_up_the_others() -> None:
    new = Newcomer()
    new.view.holds = lambda peer, fragment: fragment.index == (peer == B)
    new.know_the_roster()
    for _ in range(3):
        new.answer(new.next_of(A))
    new.live, new.join.contacts, new.asks = [A], (), []
    for _ in range(HOLDER_RETRIES):
        new.wake(JOIN_RETRY_S)
        assert new.join.phase is JoinPhase.FETCHING  # the record may only be late
    new.wake(JOIN_RETRY_S)
    (imported,) = (effect for effect in new.effects if isinstance(effect, ImportState))
    assert [index for index, _, _ in imported.blobs] == [0]
    (said,) = errors(new)
    assert said.startswith("layers 1 to 1 start from the run's initial weights: their last holder is gone")


def b_is_gone(new: Newcomer) -> None:
    """All questions to B fail, and A answers all of its own."""
    while new.asks:
        ask = new.asks.pop()
        new.fail(ask) if ask.to == B else new.answer(ask)
    new.live.remove(B)


def test_what_only_a_dead_donor_held_is_not_waited_for_when_all_else_is_here() -> None:
    new = Newcomer(restored=True, own_step=10)
    new.view.holds = lambda peer, fragment: peer in new.live and (peer == B or fragment.index == 0)
    new.know_the_roster()
    b_is_gone(new)
    new.wake(JOIN_RETRY_S)
    (imported,) = (effect for effect in new.effects if isinstance(effect, ImportState))
    assert [index for index, _, _ in imported.blobs] == [0]


def test_half_a_fragment_whose_only_donor_is_gone_is_given_up_in_the_end() -> None:
    new = Newcomer()
    new.view.holds = lambda peer, fragment: peer in new.live and (peer == B or fragment.index == 0)
    new.know_the_roster()
    new.answer(next(ask for ask in new.asks if ask.to == B and of_fragment(ask) == 1))
    b_is_gone(new)
    new.wake(JOIN_RETRY_S)
    assert not [effect for effect in new.effects if isinstance(effect, ImportState)]
    new.wake(GIVE_UP_S)
    (imported,) = (effect for effect in new.effects if isinstance(effect, ImportState))
    assert [index for index, _, _ in imported.blobs] == [0]


def test_what_nobody_holds_is_taken_from_a_peer_that_retains_it() -> None:
    new = Newcomer()
    new.view.holds = lambda peer, fragment: fragment.index == 0
    new.view.retained = lambda index: (40, (B,)) if index == 1 else (-1, ())
    new.know_the_roster()
    assert {ask.to for ask in new.asks if of_fragment(ask) == 1} == {B}
    assert {ask.envelope.message.kept for ask in new.asks if of_fragment(ask) == 1} == {True}  # type: ignore[union-attr]
    assert [index for index, _, _ in new.finish().blobs] == [0, 1]


@pytest.mark.parametrize(("own_step", "taken"), [(39, [0, 1]), (40, [0])])
def test_a_retained_state_is_taken_only_if_it_is_newer_than_our_checkpoint(own_step: int, taken: list[int]) -> None:
    new = Newcomer(restored=True, own_step=own_step)
    new.view.holds = lambda peer, fragment: fragment.index == 0
    new.view.retained = lambda index: (40, (B,)) if index == 1 else (-1, ())
    new.know_the_roster()
    assert [index for index, _, _ in new.finish().blobs] == taken


def test_only_peers_that_hold_something_of_ours_are_asked() -> None:
    new = Newcomer(donors=MANY)
    new.view.holds = lambda peer, fragment: peer == MANY[-1]
    new.know_the_roster()
    assert new.join.fetch.donors == [MANY[-1]]
    new.finish()


def test_a_holder_whose_record_comes_back_is_waited_for() -> None:
    new = Newcomer()
    new.view.holds = lambda peer, fragment: fragment.index == (peer == B)
    new.know_the_roster()
    new.live, new.join.contacts = [A], ()
    new.wake(JOIN_RETRY_S)
    new.live = [A, B]
    new.wake(JOIN_RETRY_S)
    assert len(new.finish().blobs) == 2


def test_a_donor_serves_so_many_newcomers_at_a_time_and_the_next_when_one_is_done() -> None:
    donor = Donor(RUN, FRAGMENTS, uplink=FAST)
    pull = StateRequest(RUN, 0, 0, PIECE_BYTES)
    answers = [donor.asked(number, PeerId(f"N{number}"), pull, 0, 0.0) for number in range(MOST_SERVED + 1)]
    (refusal,) = answers[-1]
    assert isinstance(refusal, Reply)
    assert refusal.envelope.message == Refused("busy")
    assert not any(isinstance(effect, Reply) for effects in answers[:-1] for effect in effects)
    assert donor.asked(50, PeerId("N0"), pull, 0, 4.0) == []  # a newcomer that is served already goes on
    assert busy(donor.asked(51, PeerId("late"), pull, 0, SERVED_S + 1.0))  # the others still wait for the worker
    assert len(donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 0, SERVED_S + 2.0)) == MOST_SERVED + 1
    assert not busy(donor.asked(52, PeerId("late"), pull, 0, 2 * SERVED_S + 3.0))


@dataclass
class Steady:
    """An uplink of one rate, in bytes/s."""

    rate: float | None

    def typical_up(self) -> float | None:
        return self.rate


PULL, FAST = StateRequest(RUN, 0, 0, PIECE_BYTES), Steady(1e9)


def busy(effects: list[Effect]) -> bool:
    """Whether a donor's answer is that it serves enough others."""
    return any(isinstance(one, Reply) and one.envelope.message == Refused("busy") for one in effects)


def serving(rate: float | None, *newcomers: str) -> Donor:
    """A donor that has sent each newcomer a piece at time 0; since then its uplink has `rate` bytes/s."""
    donor = Donor(RUN, FRAGMENTS, uplink=FAST)
    for number, name in enumerate(newcomers):
        donor.asked(number, PeerId(name), PULL, 0, 0.0)
    donor.uplink = Steady(rate)
    assert len(donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 0, 0.0)) == len(newcomers)
    return donor


def lets_in(donor: Donor, name: str, now: Seconds) -> bool:
    return not busy(donor.asked(99, PeerId(name), PULL, 0, now))


def test_a_newcomer_keeps_its_place_until_its_piece_has_left_a_slow_uplink() -> None:
    """Its place went to another one meanwhile, and so on, until all pieces came too late for everybody."""
    names = [f"N{number}" for number in range(MOST_SERVED)]
    donor = serving(PIECE_BYTES, *names)  # the last piece leaves after 8 s
    assert not lets_in(donor, "late", SERVED_S + 0.5)
    assert lets_in(donor, "late", MOST_SERVED - MOST_OWED_S + 0.5)


def test_a_donor_lets_nobody_in_while_many_pieces_wait_for_its_uplink() -> None:
    donor = serving(PIECE_BYTES / 5, "A", "B")  # ten seconds for both
    assert not lets_in(donor, "late", 7.5)
    assert lets_in(donor, "A", 7.5)  # those that are served already go on
    assert lets_in(donor, "late", 13.5)


def test_a_newcomer_that_never_stops_asking_does_not_keep_the_others_out() -> None:
    donor = serving(PIECE_BYTES, "A")
    for second in range(1, int(PIECE_DEADLINE_S)):
        for _ in range(4):
            donor.asked(second, A, PULL, 0, float(second))
        donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 0, float(second))
        assert not lets_in(donor, "late", second + 0.5)
    assert lets_in(donor, "late", PIECE_DEADLINE_S)


def test_newcomers_that_never_finish_lose_their_places_one_by_one() -> None:
    """Eight that asked for ever, whether they read the answers or not, kept all others out for ever."""
    greedy, late = [PeerId(f"N{number}") for number in range(MOST_SERVED)], [PeerId("late"), PeerId("later")]
    donor, served = Donor(RUN, FRAGMENTS, uplink=FAST), dict[PeerId, list[int]]()
    for second in range(int(PIECE_DEADLINE_S + PLACELESS_S)):
        for peer in greedy + late:
            if not busy(donor.asked(second, peer, PULL, 0, float(second))):
                served.setdefault(peer, []).append(second)
        donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 0, float(second))
    assert [served[peer][0] for peer in late] == [PIECE_DEADLINE_S, 2 * PIECE_DEADLINE_S]
    assert served[greedy[0]] == list(range(int(PIECE_DEADLINE_S) + 1))


def test_a_stranger_takes_no_place_of_a_known_newcomer() -> None:
    donor = serving(1e9, *[f"N{number}" for number in range(MOST_SERVED)])
    for number in range(MOST_SERVED):
        donor.asked(number, PeerId(f"N{number}"), PULL, 0, PIECE_DEADLINE_S)
    assert busy(donor.asked(99, PeerId("stranger"), PULL, 0, PIECE_DEADLINE_S, known=False))
    assert not busy(donor.asked(99, PeerId("late"), PULL, 0, PIECE_DEADLINE_S))


def test_a_donor_that_has_not_measured_its_uplink_takes_it_for_a_slow_one() -> None:
    donor = serving(None, *4 * ["A", "B", "C", "D", "E"])  # 5 MiB
    assert not lets_in(donor, "late", 1.0)
    assert lets_in(donor, "late", PIECE_DEADLINE_S / 2)


def test_newcomers_that_wait_for_an_export_leave_room_for_other_questions() -> None:
    """Eight that ask ahead would hold all questions that a peer answers at once, and its partners found it busy."""
    donor, pull = Donor(RUN, FRAGMENTS, uplink=FAST), StateRequest(RUN, 0, 0, PIECE_BYTES)
    asked = [(f"N{newcomer}", question) for newcomer in range(MOST_SERVED) for question in range(8)]
    effects = [donor.asked(number, PeerId(who), pull, 0, 0.0) for number, (who, _) in enumerate(asked)]
    refused = [one for found in effects for one in found if isinstance(one, Reply)]
    assert len(asked) - len(refused) == MOST_WAITING <= MAX_STREAMS // 2
    assert {one.envelope.message for one in refused} == {Refused("busy")}
    assert len(donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 0, 0.0)) == MOST_WAITING


def ahead(count: int, synchronous: bool = False) -> tuple[Fetch, list[Ask]]:
    """A fetch of so many fragments from one donor that has not answered yet, and its questions."""
    fragments = [Fragment(number, number, number + 1, 400_000) for number in range(count)]
    fetching = Fetch(RUN, JoinTag, Random(0), AnyHolder(), synchronous)
    fetching.begin((Incoming(fragment, LAYOUT) for fragment in fragments), 100.0)
    fetching.choose([A])
    return fetching, questions(fetching.ask())


def questions(effects: list[Effect]) -> list[Ask]:
    return [effect for effect in effects if isinstance(effect, Ask)]


def lengths(asks: Sequence[Ask]) -> list[int]:
    return [ask.envelope.message.length for ask in asks if isinstance(ask.envelope.message, StateRequest)]


def piece_of(ask: Ask, seconds: Seconds) -> Answered:
    """The answer to a question for a piece, which has come after so many seconds."""
    assert isinstance(ask.tag, JoinTag)
    piece = bytes(min(PIECE_BYTES, SIZE - ask.tag.offset))
    chunk = StateChunk(RUN, ask.tag.fragment, ask.tag.offset, SIZE, 50, LAYOUT)
    return Answered(ask.tag, A, Envelope(chunk, piece), seconds, 0.1, 10, 10)


def test_a_donor_may_encode_the_next_fragments_while_the_first_one_is_on_its_way() -> None:
    _, asked = ahead(count=20)
    assert [of_fragment(ask) for ask in asked] == list(range(1 + FRAGMENTS_AHEAD))
    assert lengths(asked) == [PIECE_BYTES] + [AHEAD_BYTES] * FRAGMENTS_AHEAD


@pytest.mark.parametrize(("kept", "early"), [(0, 0), (SIZE, 0), (2 * SIZE, 1), (4 * SIZE - 1, 2)])
def test_a_donor_keeps_few_bytes_of_encoded_states_for_a_newcomer(
    monkeypatch: pytest.MonkeyPatch, kept: int, early: int
) -> None:
    monkeypatch.setattr(fetch, "ENCODED_BYTES", kept)
    assert lengths(ahead(count=20)[1]) == [PIECE_BYTES] + [AHEAD_BYTES] * early


def test_a_newcomer_that_gets_pieces_soon_opens_no_more_fragments_than_the_donor_may_encode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked for the first pieces of eight fragments at once, so its donor held the whole model encoded."""
    monkeypatch.setattr(fetch, "ENCODED_BYTES", 2 * SIZE)
    fetching, asked = ahead(count=20)
    fragments = list[int]()
    while not fetching.complete:
        piece = next(ask for ask in asked if lengths([ask]) == [PIECE_BYTES])
        asked.remove(piece)
        more = questions(fetching.handle(piece_of(piece, 0.1), 100.0))
        asked += more
        fragments += [of_fragment(ask) for ask in more]
        encoded = {of_fragment(ask) for ask in asked if not fetching.incoming[of_fragment(ask)].complete()}
        assert len(encoded) <= 2
    assert sorted({*fragments}) == list(range(20))


def test_in_a_synchronous_run_early_states_may_have_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All states must be of one step."""
    monkeypatch.setattr(fetch, "ENCODED_BYTES", 0)
    assert lengths(ahead(count=20, synchronous=True)[1]) == [PIECE_BYTES] + [AHEAD_BYTES] * FRAGMENTS_AHEAD


def test_a_fragment_of_which_a_piece_is_here_leaves_room_to_encode_another() -> None:
    fetch, asked = ahead(count=20)
    assert fetch.handle(piece_of(asked[1], 0.1), 100.1) == []  # what says that it is encoded changes nothing
    chunk = StateChunk(RUN, 1, 0, SIZE, 50, LAYOUT)
    answered = Answered(JoinTag(1, 0), A, Envelope(chunk, bytes(PIECE_BYTES)), 1.0, 1.0, 10, 10)
    fetch.handle(piece_of(asked[0], SOON_S), 101.0)
    (early,) = [ask for ask in questions(fetch.handle(answered, 101.0)) if lengths([ask]) == [AHEAD_BYTES]]
    assert of_fragment(early) == len(asked)


def test_a_donor_is_asked_for_more_pieces_at_a_time_only_while_they_come_soon() -> None:
    """When three newcomers requested all pieces at once from a donor at 75 kB/s, each piece missed its deadline."""
    fetch, asked = ahead(count=20)
    waiting = [asked[0]]
    for seconds, at_a_time in ((2 * SOON_S, 1), (SOON_S, 2), (0.1, 3), (2 * SOON_S, 3)):
        waiting += [
            ask for ask in questions(fetch.handle(piece_of(waiting.pop(0), seconds), 101.0)) if lengths([ask])[0] > 1
        ]
        assert len(waiting) == at_a_time
    for _ in range(2 * MOST_IN_FLIGHT):
        waiting += [
            ask for ask in questions(fetch.handle(piece_of(waiting.pop(0), 0.1), 102.0)) if lengths([ask])[0] > 1
        ]
    assert len(waiting) == MOST_IN_FLIGHT
    fetch.handle(AskFailed(waiting.pop(0).tag, A, Reason.DEADLINE, PIECE_DEADLINE_S), 140.0)
    while waiting:
        asked = questions(fetch.handle(piece_of(waiting.pop(0), 2 * SOON_S), 141.0))
    assert len(asked) == 1


def test_a_fragment_that_is_whole_is_not_asked_for_again() -> None:
    one = Incoming(FRAGMENTS[0], LAYOUT)
    pieces = [bytes([at]) * min(PIECE_BYTES, SIZE - at * PIECE_BYTES) for at in range(3)]
    for at, piece in enumerate(pieces):
        place = (RUN, 0, at * PIECE_BYTES, SIZE, 50, LAYOUT)
        one.request_over(at * PIECE_BYTES)
        one.take(A, StateChunk(*place), piece)
    assert one.next_offset() is None
    assert one.hand_over() == b"".join(pieces)


def test_a_newcomer_finishes_the_export_that_it_has_begun_and_others_get_a_fresh_one() -> None:
    donor, pull = Donor(RUN, FRAGMENTS), StateRequest(RUN, 0, PIECE_BYTES, PIECE_BYTES)
    assert donor.asked(1, A, StateRequest(RUN, 0, 0, PIECE_BYTES), 50, 0.0) == [ExportState(0)]
    donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 50, 1.0)
    late = 1.0 + EXPORT_KEPT_S + 1.0
    donor.forget_old(late)
    (reply,) = donor.asked(2, A, pull, 60, late)
    assert isinstance(reply, Reply)
    assert donor.asked(3, B, pull, 60, late) == [ExportState(0)]
    donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 60, late)
    assert donor.asked(4, A, pull, 90, late + EXPORT_KEPT_S + FINISHED_S) == [ExportState(0)]


def test_a_peer_that_has_a_whole_export_gets_a_fresh_one_the_next_time() -> None:
    donor = Donor(RUN, FRAGMENTS)
    for offset in range(0, SIZE, PIECE_BYTES):
        donor.asked(1, A, StateRequest(RUN, 0, offset, PIECE_BYTES), 50, 0.0)
    donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 50, 1.0)
    again = StateRequest(RUN, 0, 0, PIECE_BYTES)
    assert donor.asked(2, A, again, 60, 1.0 + EXPORT_KEPT_S) == [ExportState(0)]


@pytest.mark.parametrize(("fetched", "kept"), [(0, False), (PIECE_BYTES, True), (SIZE, False)])
def test_an_expired_export_is_freed_unless_a_newcomer_has_fetched_a_part_of_it(fetched: int, kept: bool) -> None:
    donor = Donor(RUN, FRAGMENTS)
    donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 50, 1.0)
    for offset in range(0, fetched, PIECE_BYTES):
        donor.asked(1, A, StateRequest(RUN, 0, offset, PIECE_BYTES), 50, 1.0)
    donor.forget_old(1.0 + EXPORT_KEPT_S)
    assert bool(donor.exports) == kept
    donor.forget_old(1.0 + EXPORT_KEPT_S + FINISHED_S)
    assert not donor.exports


@pytest.mark.parametrize(("lie", "known", "begins"), [(1 << 60, None, 50), (1 << 60, 48, 50), (50, None, 50)])
def test_one_lying_donor_does_not_set_the_newcomers_clock(lie: int, known: int | None, begins: int) -> None:
    newcomer = Newcomer()
    newcomer.view.step = known
    newcomer.know_the_roster()
    while newcomer.asks:
        ask = newcomer.asks.pop(0)
        newcomer.answer(ask, step=lie if ask.to == B else 50)
    (imported,) = [effect for effect in newcomer.effects if isinstance(effect, ImportState)]
    assert imported.step == begins


def test_where_a_liar_is_the_only_donor_the_records_of_the_others_bound_the_clock() -> None:
    newcomer = Newcomer(donors=[A])
    newcomer.view.step = 48
    newcomer.know_the_roster()
    while newcomer.asks:
        newcomer.answer(newcomer.asks.pop(0), step=1 << 60)
    (imported,) = [effect for effect in newcomer.effects if isinstance(effect, ImportState)]
    assert imported.step == 2 * 48 + 1000


def test_a_stranger_does_not_keep_the_donor_encoding() -> None:
    """One byte of each fragment, once a second, had the whole model encoded every five seconds."""
    fragments = [Fragment(number, number, number + 1, 400_000) for number in range(8)]
    donor, exports, now = Donor(RUN, fragments), 0, 0.0
    for second in range(300):
        now = float(second)
        effects: list[Effect] = donor.forget_old(now)
        for fragment in fragments:
            effects += donor.asked(second, PeerId("stranger"), StateRequest(RUN, fragment.index, 0, 1), 5, now, False)
        for one in effects:
            if isinstance(one, ExportState):
                exports += 1
                donor.exported(StateExported(one.fragment, LAYOUT, bytes(SIZE)), 5, now)
        assert len(donor.exports) <= STRANGER_EXPORTS
    assert 0 < exports <= STRANGER_EXPORTS * (300 / (EXPORT_KEPT_S + FINISHED_S) + 1)


def test_a_newcomer_whose_record_comes_is_no_stranger_and_gets_what_it_waits_for() -> None:
    fragments = [Fragment(number, number, number + 1, 400_000) for number in range(8)]
    donor = Donor(RUN, fragments)
    pulls = [StateRequest(RUN, fragment.index, 0, PIECE_BYTES) for fragment in fragments]
    first = [one for number, pull in enumerate(pulls[:6]) for one in donor.asked(number, A, pull, 5, 0.0, False)]
    assert first == [ExportState(0), ExportState(1)]
    assert len(donor.exported(StateExported(0, LAYOUT, bytes(SIZE)), 5, 0.5)) == 1
    assert donor.recognise({B}.__contains__) == []
    assert donor.recognise({A}.__contains__) == [ExportState(number) for number in (2, 3, 4, 5)]
    assert donor.asked(7, A, pulls[6], 5, 1.0) == [ExportState(6)]


def test_a_visitor_that_takes_each_fragment_whole_need_not_wait_for_the_next_one() -> None:
    fragments = [Fragment(number, number, number + 1, 400_000) for number in range(8)]
    donor = Donor(RUN, fragments)
    for fragment in fragments:
        for offset in range(0, SIZE, PIECE_BYTES):
            pull = StateRequest(RUN, fragment.index, offset, PIECE_BYTES)
            effects = donor.asked(offset, A, pull, 5, 0.0, known=False)
            if not offset:
                assert effects == [ExportState(fragment.index)]
                effects = donor.exported(StateExported(fragment.index, LAYOUT, bytes(SIZE)), 5, 0.0)
            assert [type(one) for one in effects] == [Reply]


def test_states_that_were_fetched_make_room_for_others_and_those_under_way_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer on the same network fetched a large model in 4 s, and its donor held the whole model's exports."""
    monkeypatch.setattr(donor_module, "FINISHED_BYTES", 2 * SIZE)
    fragments = [Fragment(number, number, number + 1, 400_000) for number in range(5)]
    donor = Donor(RUN, fragments, uplink=FAST)
    for number in range(4):
        donor.exported(StateExported(number, LAYOUT, bytes(SIZE)), 50, 1.0)
        for offset in range(0, PIECE_BYTES if number == 0 else SIZE, PIECE_BYTES):
            donor.asked(1, A, StateRequest(RUN, number, offset, PIECE_BYTES), 50, 1.0)
    assert [index for index, _ in donor.exports] == [0, 3]
    donor.asked(2, B, StateRequest(RUN, 3, 0, PIECE_BYTES), 50, 1.0)
    donor.exported(StateExported(4, LAYOUT, bytes(SIZE)), 50, 1.0)
    assert [index for index, _ in donor.exports] == [0, 3, 4], "B has fetched a part"
