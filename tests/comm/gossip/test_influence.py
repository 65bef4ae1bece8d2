"""How far one partner may move a peer, under every rule: by what honest progress explains, from the first window on."""

import pytest
import torch
from torch import Tensor

from decentral.comm.gossip import influence
from decentral.comm.gossip.pull_rule import PSEUDO_GRADIENT
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from tests.comm.gossip.test_rules import ALGORITHMS, SIZE, Replica, equal_replicas, repacked, vectors

PROGRESS = 2.0  # about how long a window's progress is: 0.1 times a normal vector of 400 numbers


def alike(algorithm: str, count: int) -> list[Replica]:
    """Replicas that began with the same weights and have trained for one window."""
    found = [Replica(algorithm, chr(ord("A") + n)) for n in range(count)]
    for seed, replica in enumerate(found):
        replica.train(seed=seed, tokens=1000)
    return found


def claim(one: Contribution, tokens: int) -> Contribution:
    return Contribution(one.peer, tokens, one.layout, one.blob)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours - theirs))


def moved_by(algorithm: str, lie: Contribution, ours: Replica) -> float:
    """How far the merge of a lie puts us from where we were."""
    before = ours.live.theta.clone()
    ours.merge([lie])
    return distance(ours.live.theta, before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("times", [0.0, -1.0, 1000.0])
def test_one_partner_moves_us_no_further_than_progress_explains(algorithm: str, times: float) -> None:
    """In its first window: weights of zero, backwards or a thousand times as large, and so many times the tokens."""
    ours, liar = alike(algorithm, 2)
    ours.close()
    theirs = liar.close()
    lie = repacked(theirs, {name: times * one for name, one in vectors(theirs).items()})
    believed = (
        influence.TIMES_USUAL_TOKENS if algorithm == "allreduce" else 2
    )  # there the usual progress is one for each token
    most = believed * influence.TIMES_USUAL * PROGRESS
    assert moved_by(algorithm, claim(lie, 1000 * lie.tokens), ours) <= most


def test_slow_weights_of_zero_do_not_wipe_the_model_out() -> None:
    """An untrained model's loss came back after one merge, when slow weights were taken by their claimed tokens."""
    ours, liar = alike("pull", 2)
    ours.close()
    theirs = liar.close()
    lie = claim(repacked(theirs, {name: torch.zeros_like(one) for name, one in vectors(theirs).items()}), 1 << 40)
    whole = float(torch.linalg.vector_norm(ours.live.theta))
    assert moved_by("pull", lie, ours) < 0.25 * whole


@pytest.mark.parametrize("tokens", [1, 2000, 1 << 40])
def test_a_newcomer_that_has_made_no_step_is_not_thrown_by_the_only_peer_that_has(tokens: int) -> None:
    """It had seen no round, so that one liar's weights of 1e38 were all of its mean."""
    newcomer, other, liar = (Replica("allreduce", name) for name in "ABC")
    for round_ in range(3):
        liar.train(seed=100 + round_, tokens=1000)
        lie = claim(repacked(liar.close(), {"theta": torch.full((SIZE,), 1e38)}), tokens)
        newcomer.close()
        before = newcomer.live.theta.clone()
        newcomer.merge([other.close(), lie])
        other.merge([])
        assert distance(newcomer.live.theta, before) == 0.0
    newcomer.train(seed=3, tokens=1000)
    other.train(seed=4, tokens=1000)
    before = newcomer.live.theta.clone()
    newcomer.close()
    assert moved_by("allreduce", claim(lie, tokens), newcomer) <= 4 * influence.TIMES_USUAL * PROGRESS


def test_a_round_in_which_one_peer_of_three_has_made_a_step_counts_it_and_says_little_of_the_next() -> None:
    """The median of all tokens was 0: what they had made counted as by one token, and a liar's as by 2000 of those."""
    ours, second, liar = alike("allreduce", 3)
    closed = [one.close() for one in (ours, second, liar)]
    ours.merge(closed[1:])
    ours.train(seed=7, tokens=1000)
    trained, shut = ours.live.theta.clone(), ours.close()
    assert shut.tokens == 1000
    ours.merge([claim(one, 0) for one in closed[1:]])
    assert torch.allclose(ours.live.theta, trained, atol=1e-6)
    ours.train(seed=8, tokens=1000)
    ours.close()
    lie = claim(repacked(closed[2], {"theta": torch.full((SIZE,), 1e38)}), 1 << 40)
    assert moved_by("allreduce", lie, ours) <= 4 * influence.TIMES_USUAL * PROGRESS


def test_a_good_window_does_not_carry_slow_weights_that_are_nowhere_near_the_others() -> None:
    """Its trust came from the window, and what was near from our own place, which it had moved itself."""
    ours, *partners, liar = alike("pull", 5)
    for round_ in range(40):
        for number, one in enumerate((ours, *partners, liar)):
            one.train(seed=10 * round_ + number, tokens=1000)
        closed = [one.close() for one in (*partners, liar)]
        lie = repacked(
            closed[-1], {"phi": torch.full((SIZE,), 1e6), PSEUDO_GRADIENT: vectors(closed[0])[PSEUDO_GRADIENT]}
        )
        ours.close()
        ours.merge([closed[round_ % 3], claim(lie, 4000)])
        for number, one in enumerate(partners):
            one.merge([closed[(number + 1) % 3]])
        liar.merge([])
    middle = torch.stack([one.pull.phi for one in partners]).mean(dim=0)
    assert distance(ours.pull.phi, middle) < 5 * PROGRESS


@pytest.mark.parametrize(
    ("copied", "times", "most"),
    [
        ("another's", 2.0, 0.2),
        ("another's", 1e6, 0.0),  # it does not count, and so takes nothing from the other one
        ("ours", 2.0, 0.0),
        ("another's last", 2.0, 0.0),
        ("ours, the last", 2.0, 0.0),
    ],
)
def test_progress_that_is_sent_twice_counts_once(copied: str, times: float, most: float) -> None:
    """A copy twice as long, with four times the tokens, had half of the weight in each merge."""
    moved = []
    for lies in (False, True):
        everyone = ours, *_ = alike("pull", 4)
        for round_ in range(1, 7):  # so many windows tell how alike honest ones are
            sent = [one.close() for one in everyone]
            for number, one in enumerate(everyone):
                one.merge(sent[:number] + sent[number + 1 :])
                one.train(seed=10 * round_ + number, tokens=1000)
        window, *closed, theirs = [one.close() for one in everyone]
        original = {"another's": closed[0], "ours": window, "another's last": sent[1], "ours, the last": sent[0]}[
            copied
        ]
        copy = times * vectors(original)[PSEUDO_GRADIENT]
        lie = claim(repacked(theirs, {**vectors(theirs), PSEUDO_GRADIENT: copy}), 4 * theirs.tokens)
        ours.merge([*closed, lie] if lies else closed)
        moved.append(ours.live.theta.clone())
    assert distance(*moved) <= most * PROGRESS


def test_a_round_without_progress_is_not_a_round_of_which_nothing_is_known() -> None:
    """A liar that sent the last mean made the usual progress 0, and the next round took its 1e38 for the whole mean."""
    first, second, liar = alike("allreduce", 3)
    liar.live.theta.copy_(liar.rule.baseline)  # type: ignore[attr-defined]
    closed = [one.close() for one in (first, second, liar)]
    first.merge([claim(closed[1], 0), closed[2]])
    second.merge([closed[0], closed[2]])
    lie = repacked(closed[2], {"theta": torch.full((SIZE,), 1e38)})
    for one in (first, second):
        one.close()
        assert moved_by("allreduce", claim(lie, 1000), one) <= 4 * influence.TIMES_USUAL * PROGRESS


@pytest.mark.parametrize("beside", ["nobody", "a liar of zero length"])
def test_progress_that_grows_is_not_clipped_to_what_it_once_was(beside: str) -> None:
    """With the least of all rounds as one more vote, usual progress never grew: 3% of it counted after a warm-up."""
    ours, other = equal_replicas("allreduce", 2)
    for round_ in range(20):
        before = ours.live.theta.clone()
        ours.live.theta.add_(0.01 * (round_ + 1) * torch.randn(SIZE, generator=torch.Generator().manual_seed(round_)))
        ours.live.tokens += 1000
        trained = distance(ours.live.theta, before)
        ours.close()
        ours.merge([] if beside == "nobody" else [claim(other.close(), 10)])
        if beside != "nobody":
            other.merge([])
    assert distance(ours.live.theta, before) > 0.5 * trained


def test_weights_of_zero_in_a_round_in_which_nobody_trained_change_nothing() -> None:
    ours, liar = (Replica("allreduce", name) for name in "AB")
    ours.close()
    theirs = liar.close()
    assert moved_by("allreduce", repacked(theirs, {"theta": torch.zeros(SIZE)}), ours) == 0


@pytest.mark.parametrize("event", ["start", "restart", "join"])
def test_the_first_pseudo_gradient_ever_is_clipped(event: str) -> None:
    ours, liar = alike("pull", 2)
    if event == "restart":
        ours.rule.load(ours.live.theta, {name: one.clone() for name, one in ours.state().items()})
    if event == "join":
        ours.rule.adopt(ours.live, {"phi": liar.state()["phi"].clone()})
        ours.train(seed=7, tokens=1000)
    mine, theirs = ours.close(), liar.close()
    own = float(torch.linalg.vector_norm(vectors(mine)[PSEUDO_GRADIENT]))
    grown = repacked(theirs, {PSEUDO_GRADIENT: 100 * vectors(theirs)[PSEUDO_GRADIENT]})
    assert moved_by("pull", grown, ours) <= 2 * influence.TIMES_USUAL * own


@pytest.mark.parametrize(("times", "counts"), [(100, True), (1e4, False), (1e38, False)])
def test_progress_that_no_device_could_make_takes_the_place_of_nobody(times: float, counts: bool) -> None:
    (ours, liar), (alone, _) = alike("pull", 2), alike("pull", 2)
    ours.close(), alone.close()
    theirs = liar.close()
    longer = {PSEUDO_GRADIENT: (times * vectors(theirs)[PSEUDO_GRADIENT].double()).clamp(-1e38, 1e38).float()}
    ours.merge([repacked(theirs, {**vectors(theirs), **longer})])
    alone.merge([])
    assert torch.equal(ours.live.theta, alone.live.theta) != counts
    assert ours.gossiped.rule.left_out == (() if counts else (liar.peer,))


def test_a_lie_that_no_device_could_have_sent_does_not_help_the_next_liar() -> None:
    """Of the two partners that we know one has sent numbers as large as there are, and lies no more; what is usual was
    then up to the other (seed 602863 of the sweep)."""
    ours, first, second = alike("pull", 3)
    ours.close()
    theirs = first.close()
    ours.merge([repacked(theirs, {name: torch.full((SIZE,), 1e38) for name in vectors(theirs)})])
    ours.train(seed=7, tokens=1000)
    own = float(torch.linalg.vector_norm(vectors(ours.close())[PSEUDO_GRADIENT]))
    theirs = second.close()
    lie = repacked(theirs, {name: 100 * one for name, one in vectors(theirs).items()})
    assert moved_by("pull", lie, ours) <= 2 * influence.TIMES_USUAL * own


def test_two_liars_that_are_all_partners_of_a_window_do_not_make_their_lengths_usual() -> None:
    """Of five partners two lie, and a window has just those two (seed 35821 of the sweep)."""
    known = influence.Experience()
    known.closed(1.0)
    assert known.usual_progress([(PeerId(name), 1.1) for name in "ABC"]) == pytest.approx(1.1)
    assert known.usual_progress([(PeerId("D"), 64.0), (PeerId("E"), 1e38)]) == pytest.approx(1.1)


def test_two_liars_that_are_the_first_to_send_slow_weights_do_not_make_their_distances_usual() -> None:
    """Of five partners two lie, and nobody else's slow weights were pulled yet (seed 35821 of the sweep, again)."""
    known = influence.Experience()
    known.closed(1.0)
    known.usual_progress([(PeerId(name), 1.1) for name in "ABCDE"])
    assert known.usual_distance([(PeerId("D"), 1e38)]) == 1.0
    assert known.usual_distance([(PeerId("E"), 131.0)]) == 1.0
    assert known.usual_distance([(PeerId("A"), 1.2)]) == pytest.approx(1.2)


def test_where_two_partners_are_all_there_are_the_nearer_one_says_what_is_usual() -> None:
    """So a peer that fell behind is pulled along by both."""
    known = influence.Experience()
    known.closed(1.0)
    known.usual_progress([(PeerId(name), 1.1) for name in "AB"])
    assert known.usual_distance([(PeerId("A"), 5.0), (PeerId("B"), 6.0)]) == 5.0


def test_a_claim_of_a_thousand_times_the_tokens_is_not_believed() -> None:
    shares = influence.token_shares(1000, [1000, 1000, 1_000_000])
    assert shares[2] <= influence.MOST_SHARE
    assert shares[0] == shares[1] <= shares[2]
    assert 1 - sum(shares) >= shares[0], "the rest is ours"


def test_tokens_without_progress_take_the_place_of_nobody() -> None:
    """Progress of zero with our own tokens' claim would halve what we gain in a merge with it."""
    (ours, liar), (alone, _) = alike("pull", 2), alike("pull", 2)
    ours.close(), alone.close()
    theirs = liar.close()
    nothing = {PSEUDO_GRADIENT: torch.zeros_like(vectors(theirs)[PSEUDO_GRADIENT])}
    ours.merge([claim(repacked(theirs, {**vectors(theirs), **nothing}), 1000)])
    alone.merge([])
    assert torch.equal(ours.live.theta, alone.live.theta)


@pytest.mark.parametrize("faster", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("grows", [0.5, 1.0])
def test_honest_progress_explains_its_tokens(faster: float, grows: float) -> None:
    """It grows with the steps where they agree, and with their root where they are noise."""
    assert influence.explained_tokens(faster**grows, 1000, 1.0) >= faster * 1000


def test_no_claim_makes_one_partner_more_than_we_are() -> None:
    assert influence.token_shares(0, [1 << 60]) == [influence.MOST_SHARE]
    assert influence.token_shares(1, [1 << 60]) == [influence.MOST_SHARE]


def test_honest_claims_weigh_as_they_are() -> None:
    claims = [1000, 800, 300]
    assert influence.token_shares(900, claims) == pytest.approx(influence.token_weights([900, *claims])[1:])


def test_a_slow_peer_among_faster_ones_still_has_its_share_only() -> None:
    shares = influence.token_shares(100, [1000, 1000, 1000])
    assert 1 - sum(shares) == pytest.approx(100 / 3100)


def test_partners_count_whole_where_a_window_has_no_step_of_ours() -> None:
    ours, theirs = Replica("pull", "A"), Replica("pull", "B")
    ours.train(seed=1, tokens=1000)
    theirs.train(seed=1, tokens=1000)
    ours.close()
    ours.merge([theirs.close()])
    theirs.merge([])
    theirs.train(seed=2, tokens=1000)
    ours.close()
    assert moved_by("pull", theirs.close(), ours) > 0.4 * PROGRESS


def test_a_pseudo_gradient_backwards_moves_nobody() -> None:
    ours, liar = Replica("pull", "A"), Replica("pull", "B")
    for replica in (ours, liar):
        replica.train(seed=1, tokens=1000)
    mine, theirs = ours.close(), liar.close()
    flipped = repacked(theirs, {PSEUDO_GRADIENT: -vectors(theirs)[PSEUDO_GRADIENT]})
    alone = Replica("pull", "A")
    alone.train(seed=1, tokens=1000)
    alone.close()
    alone.merge([])
    ours.merge([flipped])
    assert torch.equal(ours.live.theta, alone.live.theta)
    assert mine.tokens == flipped.tokens


def test_a_partner_that_works_against_us_is_named_with_the_reason() -> None:
    ours, liar = alike("pull", 2)
    liar.live.theta.copy_(ours.live.theta)
    gossiped = ours.gossiped
    ours.close()
    theirs = liar.close()
    ours.merge([repacked(theirs, {PSEUDO_GRADIENT: -vectors(theirs)[PSEUDO_GRADIENT]})])
    assert gossiped.rule.left_out == (liar.peer,)
