"""The facts that asynchronous gossip rests on: docs/GOSSIP.md."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import outer_step
from benchmarks.outer_step import Constants, Moments, Quantise, Slow, WindowUpdate, moment_shift
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.influence import token_weights
from decentral.comm.gossip.outer_kernels import rho_of
from decentral.core import rng

SIZE = 64
WINDOW = 10  # steps


def exact(owed: Tensor) -> Tensor:
    return owed.clone()


def q4(owed: Tensor) -> Tensor:
    return blockwise.decode("q4", blockwise.encode("q4", owed), owed.numel())


@dataclass
class Replica:
    """A peer's live and slow weights of one fragment, trained by adding whatever the test says."""

    theta: Tensor
    quantise: Quantise = exact
    constants: Constants = field(default_factory=Constants)
    trained: Tensor = field(default_factory=lambda: torch.zeros(SIZE))
    has_baseline: bool = True  # without: progress is what theta is away from phi, as in DiLoCo

    def __post_init__(self) -> None:
        self.slow: Slow = outer_step.start(self.theta)

    def train(self, move: Tensor) -> None:
        self.theta = self.theta + move
        self.trained = self.trained + move

    def close(self, tokens: int = 1) -> WindowUpdate:
        if not self.has_baseline:
            self.slow = replace(self.slow, baseline=self.slow.phi)
        self.slow, sent = outer_step.close(self.slow, self.theta, self.quantise)
        return WindowUpdate(sent, tokens, lr_sum=float(tokens))

    def merge(self, own: WindowUpdate, partners: Sequence[WindowUpdate] = (), rho: float = 1.0) -> None:
        before = self.slow
        outcome = outer_step.merge(before, own, partners, self.constants, rho)
        self.slow, correction = outcome.slow, outcome.correction
        if not self.has_baseline:
            correction = self.slow.phi - before.phi + own.pseudo_gradient
        self.theta = self.theta + correction

    def publish(self, own: WindowUpdate) -> WindowUpdate:
        return replace(own, phi=self.slow.phi.clone())


def moves(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def idle(replicas: Sequence[Replica], windows: int) -> None:
    """Windows without training: what is still under way arrives."""
    for _ in range(windows):
        meet(replicas, [replica.close() for replica in replicas])


def meet(replicas: Sequence[Replica], closed: Sequence[WindowUpdate], rho: float = 1.0) -> None:
    """Everybody merges with everybody's snapshot."""
    published = [replica.publish(one) for replica, one in zip(replicas, closed, strict=True)]
    for index, replica in enumerate(replicas):
        replica.merge(closed[index], published[:index] + published[index + 1 :], rho)


def train_with_latency(
    replicas: Sequence[Replica], latency: int, steps: int = 60, drain: bool = True, rho: float = 1.0
) -> None:
    """Everybody trains at every step; a window's merge comes `latency` steps after its close. `drain`: then rest."""
    pending: list[tuple[int, list[WindowUpdate]]] = []
    for step in range(1, steps + 1):
        for index, replica in enumerate(replicas):
            replica.train(moves(1000 * step + index))
        if step % WINDOW == 0:
            pending.append((step + latency, [replica.close() for replica in replicas]))
        while pending and pending[0][0] <= step:
            meet(replicas, pending.pop(0)[1], rho)
    if drain:
        for _, closed in pending:
            meet(replicas, closed)
        idle(replicas, 60)


def mean_trained(replicas: Sequence[Replica]) -> Tensor:
    return torch.stack([replica.trained for replica in replicas]).mean(dim=0)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours - theirs))


def close_to(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> bool:
    return distance(ours, theirs) <= tolerance * float(torch.linalg.vector_norm(theirs))


# A lone peer


def test_a_lone_peers_slow_weights_follow_its_live_ones_with_gain_one() -> None:
    lone = Replica(moves(0))
    lone.train(moves(1))
    idle([lone], 40)
    assert close_to(lone.slow.phi, moves(0) + moves(1), 1e-6)


def test_a_lone_peers_live_weights_end_where_training_took_them() -> None:
    lone = Replica(moves(0))
    for seed in range(1, 20):
        lone.train(moves(seed))
        lone.merge(lone.close())
    idle([lone], 40)
    assert close_to(lone.theta, moves(0) + lone.trained, 1e-5)
    assert close_to(lone.slow.phi, lone.theta, 1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_the_gain_is_the_step_over_one_less_the_momentum(alpha: float, gain: float) -> None:
    lone = Replica(moves(0), constants=Constants(alpha=alpha, beta=gain * (1 - alpha)))
    lone.train(moves(1))
    idle([lone], 60)
    assert close_to(lone.slow.phi, moves(0) + gain * moves(1), 1e-5)


def test_a_window_without_training_or_history_changes_nothing() -> None:
    lone = Replica(moves(0))
    idle([lone], 3)
    assert torch.equal(lone.theta, moves(0))
    assert torch.equal(lone.slow.phi, moves(0))


# Progress is counted once


@pytest.mark.parametrize("peers", [1, 2, 5])
@pytest.mark.parametrize("latency", [0, 3, 9, 25], ids=lambda steps: f"{steps} steps")
def test_progress_is_counted_once_whatever_the_latency(peers: int, latency: int) -> None:
    replicas = [Replica(torch.zeros(SIZE)) for _ in range(peers)]
    train_with_latency(replicas, latency)
    mean = mean_trained(replicas)
    for replica in replicas:
        assert close_to(replica.slow.phi, mean)
        assert close_to(replica.theta, mean)


@pytest.mark.parametrize("latency", [3, 25], ids=lambda steps: f"{steps} steps")
def test_progress_is_counted_once_through_four_bits(latency: int) -> None:
    replicas = [Replica(torch.zeros(SIZE), q4) for _ in range(3)]
    train_with_latency(replicas, latency)
    mean = mean_trained(replicas)
    for replica in replicas:
        assert close_to(replica.slow.phi, mean)


@pytest.mark.parametrize("latency", [25, 40], ids=lambda steps: f"{steps} steps")
def test_with_a_latency_above_the_window_we_lag_and_a_trainer_without_a_baseline_diverges(latency: int) -> None:
    ours = [Replica(torch.zeros(SIZE)) for _ in range(2)]
    without = [Replica(torch.zeros(SIZE), has_baseline=False) for _ in range(2)]
    train_with_latency(ours, latency, steps=600, drain=False)
    train_with_latency(without, latency, steps=600, drain=False)
    assert distance(ours[0].theta, mean_trained(ours)) < 2 * float(torch.linalg.vector_norm(mean_trained(ours)))
    assert distance(without[0].theta, mean_trained(without)) > 1000 * distance(ours[0].theta, mean_trained(ours))


@pytest.mark.parametrize("rho", [0.25, 0.6])
def test_a_correction_that_is_taken_in_part_counts_no_progress_twice(rho: float) -> None:
    replicas = [Replica(torch.zeros(SIZE)) for _ in range(3)]
    train_with_latency(replicas, latency=5, rho=rho)
    for replica in replicas:
        assert close_to(replica.slow.phi, mean_trained(replicas))
        assert close_to(replica.theta, mean_trained(replicas))


def test_training_while_a_merge_is_pending_belongs_to_the_next_window() -> None:
    lone = Replica(torch.zeros(SIZE))
    lone.train(moves(1))
    closed = lone.close()
    lone.train(moves(2))
    lone.merge(closed, [WindowUpdate(moves(3), 1, 1.0, moves(4))])
    assert torch.allclose(closed.pseudo_gradient, -moves(1))
    assert torch.allclose(lone.close().pseudo_gradient, -moves(2), atol=1e-5)


def test_what_quantisation_keeps_back_is_sent_later() -> None:
    peer = Replica(torch.zeros(SIZE), q4)
    sent = torch.zeros(SIZE)
    for seed in range(10):
        peer.train(moves(seed))
        sent = sent + peer.close().pseudo_gradient
    assert torch.allclose(sent + peer.slow.residual, -peer.trained, atol=1e-4)
    assert torch.linalg.vector_norm(peer.slow.residual) < 0.2 * torch.linalg.vector_norm(moves(9))


# Agreement


def spread(replicas: Sequence[Replica]) -> float:
    phi = torch.stack([replica.slow.phi for replica in replicas])
    return float((phi - phi.mean(dim=0)).square().mean())


@pytest.mark.parametrize("gamma", [0.3, 0.7, 1.0])
def test_the_spread_contracts_by_the_stated_factor_per_window_of_pulls(gamma: float) -> None:
    g = gamma / 2
    before = after = 0.0
    for seed in range(20):
        chance = rng.stream(seed, "partners")
        replicas = [Replica(moves(100 * seed + n), constants=Constants(gamma=gamma)) for n in range(8)]
        for _ in range(3):
            before += spread(replicas)
            pull_from_one_each(replicas, chance)
            after += spread(replicas)
    assert after / before <= 1 - 2 * g * (1 - g)


def pull_from_one_each(replicas: Sequence[Replica], chance: random.Random) -> None:
    closed = [replica.close(tokens=0) for replica in replicas]  # nobody trained: uniform weights
    published = [replica.publish(one) for replica, one in zip(replicas, closed, strict=True)]
    for index, replica in enumerate(replicas):
        partner = chance.choice([other for other in range(len(replicas)) if other != index])
        replica.merge(closed[index], [published[partner]])


def test_two_peers_that_pull_each_other_keep_their_mean() -> None:
    replicas = [Replica(moves(1)), Replica(moves(2))]
    idle(replicas, 5)
    mean = (replicas[0].slow.phi + replicas[1].slow.phi) / 2
    assert torch.allclose(mean, (moves(1) + moves(2)) / 2, atol=1e-5)


def test_live_weights_follow_the_slow_ones_into_agreement() -> None:
    replicas = [Replica(moves(n)) for n in range(4)]
    idle(replicas, 40)
    for replica in replicas:
        assert torch.allclose(replica.slow.phi, replicas[0].slow.phi, atol=1e-4)


# Weights


def test_a_peer_ten_times_slower_gets_a_tenth_of_the_weight() -> None:
    us = Replica(torch.zeros(SIZE))
    fast, slow = torch.zeros(SIZE), torch.zeros(SIZE)
    fast[0], slow[1] = -1.0, -1.0  # the same progress, each in its own direction
    us.merge(us.close(), [WindowUpdate(fast, 1000, 10.0), WindowUpdate(slow, 100, 1.0)])
    assert us.slow.phi[0] > 0
    assert float(us.slow.phi[1] / us.slow.phi[0]) == pytest.approx(0.1)


def test_a_slow_partner_pulls_our_slow_weights_by_its_share_too() -> None:
    us = Replica(torch.zeros(SIZE))
    us.merge(us.close(tokens=1000), [WindowUpdate(torch.zeros(SIZE), 100, 1.0, torch.ones(SIZE))])
    assert float(us.slow.phi[0]) == pytest.approx(us.constants.gamma * 100 / 1100)


def test_a_partner_whose_slow_weights_were_not_pulled_gives_its_progress_only() -> None:
    us = Replica(moves(0))
    us.merge(us.close(tokens=1), [WindowUpdate(-moves(1), 1, 1.0)])
    assert torch.allclose(us.slow.phi, moves(0) + us.constants.beta * moves(1) / 2, atol=1e-6)


def test_a_newcomer_that_publishes_no_tokens_moves_nobody() -> None:
    us = Replica(torch.zeros(SIZE))
    us.merge(us.close(tokens=1000), [WindowUpdate(moves(2), 0, 0.0, moves(1))])
    assert torch.equal(us.slow.phi, torch.zeros(SIZE))


def test_the_order_in_which_partners_come_makes_no_difference() -> None:
    partners = [WindowUpdate(moves(n + 10), 100 * n, 1.0, moves(n)) for n in range(1, 4)]
    one, other = Replica(torch.zeros(SIZE)), Replica(torch.zeros(SIZE))
    one.merge(one.close(50), partners)
    other.merge(other.close(50), partners[::-1])
    assert torch.allclose(one.slow.phi, other.slow.phi, atol=1e-6)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_weights_are_shares_of_the_tokens(tokens: list[int]) -> None:
    weights = token_weights(tokens)
    assert sum(weights) == pytest.approx(1)
    assert all(0 <= weight <= 1 for weight in weights)
    if sum(tokens):
        assert [weight * sum(tokens) for weight in weights] == pytest.approx(tokens)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_peers_that_have_not_trained_get_equal_shares(count: int) -> None:
    assert token_weights([0] * count) == [1 / count] * count


# Late corrections


@pytest.mark.parametrize(("steps", "rho"), [(0, 1.0), (1, 1.0), (3, 0.5), (7, 0.25), (99, 0.02)])
def test_with_adamw_the_later_a_correction_the_less_of_it_is_taken_but_never_none(steps: int, rho: float) -> None:
    assert rho_of(steps, "adamw") == pytest.approx(rho)
    assert rho_of(steps, "muon") == 1.0, "measured: docs/results/convergence.md"


def test_slow_weights_take_a_late_step_whole_and_live_ones_in_part() -> None:
    prompt, late = Replica(torch.zeros(SIZE)), Replica(torch.zeros(SIZE))
    partner = WindowUpdate(moves(1), 1, 1.0, moves(2))
    prompt.merge(prompt.close(), [partner], rho=1.0)
    late.merge(late.close(), [partner], rho=0.5)
    assert torch.equal(late.slow.phi, prompt.slow.phi)
    assert torch.allclose(late.theta, 0.5 * prompt.theta, atol=1e-6)


# The first moment


def shift(own: WindowUpdate, partners: Sequence[WindowUpdate], moments: Moments) -> Tensor:
    outcome = outer_step.merge(outer_step.start(torch.zeros(SIZE)), own, partners, Constants(), rho=1.0)
    return moment_shift(own, outcome, moments, strength=1.0)


def after(steps: int, seed: int = 9) -> Moments:
    """AdamW's state after so many steps, betas 0.9 and 0.95."""
    return Moments(moves(seed).square(), 1 - 0.9**steps, 1 - 0.95**steps)


def progress(first_moment: Tensor, moments: Moments, rate: float) -> Tensor:
    """What one AdamW step takes off the weights."""
    scale = (moments.exp_avg_sq / moments.bias_2).sqrt() + moments.eps
    return rate * first_moment / moments.bias_1 / scale


def test_the_first_moment_follows_to_the_mean_of_the_swarms() -> None:
    moments = after(steps=5)
    firsts = [moves(n) for n in range(3)]
    windows = [WindowUpdate(progress(first, moments, 1e-3), 100, 1e-3) for first in firsts]
    moved = firsts[0] + shift(windows[0], windows[1:], moments)
    assert torch.allclose(moved, torch.stack(firsts).mean(dim=0), atol=1e-4)


def test_a_partner_with_twice_the_steps_at_the_same_slope_changes_no_moment() -> None:
    moments = after(steps=5)
    own = WindowUpdate(progress(moves(1), moments, 1e-3), 100, 1e-3)
    partner = WindowUpdate(2 * own.pseudo_gradient, 200, 2e-3)
    assert float(shift(own, [partner], moments).abs().max()) < 1e-5


def test_a_lone_peers_first_moment_stays() -> None:
    own = WindowUpdate(moves(1), 100, 1e-3)
    assert float(shift(own, [], after(steps=5)).abs().max()) < 1e-5


def test_a_peer_that_took_no_step_keeps_its_first_moment() -> None:
    own = WindowUpdate(torch.zeros(SIZE), 0, 0.0)
    assert torch.equal(shift(own, [WindowUpdate(moves(1), 100, 1e-3)], after(steps=5)), torch.zeros(SIZE))


def test_a_fresh_optimizer_keeps_its_first_moment() -> None:
    fresh = Moments(torch.zeros(SIZE), 0.0, 0.0)
    assert torch.equal(
        shift(WindowUpdate(moves(2), 1, 1e-3), [WindowUpdate(moves(1), 1, 1e-3)], fresh), torch.zeros(SIZE)
    )


# Purity


def test_closing_and_merging_leave_their_inputs_as_they_were() -> None:
    slow, theta, partner = outer_step.start(moves(0)), moves(1), WindowUpdate(moves(3), 1, 1.0, moves(2))
    given = (slow.phi, slow.baseline, slow.momentum, slow.residual, theta, partner.pseudo_gradient)
    kept = [tensor.clone() for tensor in given]
    closed, sent = outer_step.close(slow, theta, q4)
    outer_step.merge(closed, WindowUpdate(sent, 1, 1.0), [partner], Constants(), rho=0.5)
    now = (slow.phi, slow.baseline, slow.momentum, slow.residual, theta, partner.pseudo_gradient)
    assert all(torch.equal(before, after) for before, after in zip(kept, now, strict=True))


def test_training_after_a_close_does_not_reach_into_what_was_closed() -> None:
    theta = moves(1)
    slow, sent = outer_step.close(outer_step.start(moves(0)), theta, exact)
    kept, baseline = sent.clone(), slow.baseline.clone()
    theta += 1.0
    assert torch.equal(sent, kept)
    assert torch.equal(slow.baseline, baseline)
