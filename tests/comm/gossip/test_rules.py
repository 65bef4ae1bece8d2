"""What each update rule keeps: means, or bits, while no partner is further away than a peer believes.

What partners may do beyond that: tests/comm/gossip/test_influence.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import outer_step
from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer, unpack
from decentral.comm.gossip import pull_rule, update_rules
from decentral.comm.gossip.outer_kernels import SPARSE_CODEC, TorchKernels, rho_of
from decentral.comm.gossip.pull_rule import PSEUDO_GRADIENT, UNSENT_KEPT, PullRule
from decentral.comm.gossip.update_rules import Correction, RuleTools, UpdateRule
from decentral.core import config
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from decentral.engine.fragment import Live
from decentral.engine.gossip_jobs import GossipedFragment
from tests.comm.gossip.credulous import believe_all

SIDE = 20
SIZE = SIDE * SIDE
TOOLS = RuleTools(blockwise, TorchKernels(blockwise))
ALGORITHMS = ["pull", "allreduce"]

Blob = tuple[Layout, bytes]


class Replica:
    """One peer's fragment under one rule; blobs go through the real codecs."""

    def __init__(self, algorithm: str, name: str, seed: int = 0, **gossip_keys: object) -> None:
        layer = nn.Linear(SIDE, SIDE, bias=False)
        torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
        self.peer = PeerId(name)
        self.live = Live(Fragment(0, 0, 1, SIZE), [layer], torch.device("cpu"), config.TrainConfig())
        gossip = config.GossipConfig.model_validate({"algorithm": algorithm, **gossip_keys})
        self.rule: UpdateRule = update_rules.rule(gossip, self.live.theta, self.peer, TOOLS)
        self.gossiped = GossipedFragment(self.live, self.rule, (), ())

    def train(self, seed: int, tokens: int = 1) -> None:
        self.live.theta += 0.1 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        self.live.tokens += tokens

    def close(self, thin: bool = False) -> Contribution:
        """Ends the window; gives all sections of it, those on request too."""
        packer = Packer(blockwise)
        window, theta = replace(self.gossiped.end_window(), thin=thin), self.copied()
        self.rule.close(theta, window, packer)
        self.rule.encode(packer, [section.name for section in self.rule.on_request])
        return Contribution(self.peer, window.tokens, *packer.finish())

    def merge(self, contributions: Sequence[Contribution]) -> None:
        parts = [self.rule.partner_window(one) for one in contributions]
        self.correct(self.rule.merge(parts, self.live.steps))

    def copied(self) -> Tensor:
        theta = self.rule.buffer()
        self.live.copy_theta(theta)
        return theta

    def correct(self, correction: Correction | None) -> None:
        for _ in self.gossiped.correct(correction):
            pass

    @property
    def pull(self) -> PullRule:
        assert isinstance(self.rule, PullRule)
        return self.rule

    def state(self) -> dict[str, Tensor]:
        return dict(self.rule.state(self.live.theta))

    def donate(self) -> Blob:
        packer = Packer(blockwise)
        self.rule.donate(self.live, packer)
        return packer.finish()


def vectors(one: Contribution) -> dict[str, Tensor]:
    """What partners read of it; the slices of a vector are put together."""
    found: dict[str, Tensor] = {}
    for name, part in unpack(blockwise, one.layout, one.blob).items():
        whole = name.partition(".")[0]
        found[whole] = torch.cat([found[whole], part]) if whole in found else part
    return found


def repacked(one: Contribution, changed: dict[str, Tensor]) -> Contribution:
    """The contribution with these vectors in the place of its own."""
    packer, used = Packer(blockwise), dict.fromkeys(changed, 0)
    for section in one.layout:
        if (name := section.name.partition(".")[0]) in changed:
            begin = used[name]
            packer.add(section.name, section.codec, changed[name][begin : begin + section.elements])
            used[name] += section.elements
    return Contribution(one.peer, one.tokens, *packer.finish())


def replicas(algorithm: str, count: int) -> list[Replica]:
    """Whose weights have nothing to do with each other."""
    found = [Replica(algorithm, chr(ord("A") + n), seed=n) for n in range(count)]
    for replica in found:
        believe_all(replica.rule)
    return found


def equal_replicas(algorithm: str, count: int) -> list[Replica]:
    return [Replica(algorithm, chr(ord("A") + n)) for n in range(count)]


def mean(peers: Sequence[Replica]) -> Tensor:
    return torch.stack([peer.live.theta.double() for peer in peers]).mean(dim=0)


def spread(peers: Sequence[Replica]) -> float:
    return float(torch.stack([peer.live.theta.double() - mean(peers) for peer in peers]).square().mean())


# All-reduce


def reduce_all(swarm: Sequence[Replica], orders: bool = True) -> None:
    closed = [peer.close() for peer in swarm]
    for index, peer in enumerate(swarm):
        others = closed[:index] + closed[index + 1 :]
        peer.merge(others[::-1] if orders and index % 2 else others)


def test_all_reduce_gives_all_the_same_bits() -> None:
    swarm = equal_replicas("allreduce", 5)
    for round_ in range(3):
        for index, peer in enumerate(swarm):
            peer.train(seed=10 * round_ + index, tokens=100 * index + 1)
        reduce_all(swarm)
        for peer in swarm:
            assert torch.equal(peer.live.theta, swarm[0].live.theta)


def test_all_reduce_is_the_mean_weighted_by_tokens() -> None:
    swarm = equal_replicas("allreduce", 2)
    for seed, (peer, tokens) in enumerate(zip(swarm, (120, 100), strict=True)):
        peer.train(seed, tokens)
    thetas = [peer.live.theta.double() for peer in swarm]
    reduce_all(swarm)
    assert torch.allclose(swarm[0].live.theta.double(), (6 * thetas[0] + 5 * thetas[1]) / 11, atol=1e-6)


def test_a_step_between_a_close_and_its_merge_is_not_lost_by_all_reduce() -> None:
    """Steps with gradients of routes do not wait for merges: their tokens count in the next window."""
    swarm = equal_replicas("allreduce", 2)
    for seed, peer in enumerate(swarm):
        peer.train(seed)
    closed = [peer.close() for peer in swarm]
    average, before = mean(swarm), swarm[0].live.theta.clone()
    swarm[0].train(seed=7)
    swarm[0].live.steps += 1
    trained = swarm[0].live.theta - before
    for peer, other in zip(swarm, closed[::-1], strict=True):
        peer.merge([other])
    assert torch.allclose(swarm[0].live.theta.double(), average + trained, atol=1e-6)
    assert torch.allclose(swarm[1].live.theta.double(), average, atol=1e-6)


def test_a_lone_all_reduce_changes_nothing() -> None:
    lone = Replica("allreduce", "A")
    before = lone.live.theta.clone()
    reduce_all([lone])
    assert torch.equal(lone.live.theta, before)


# Pull


def test_pulling_peers_come_to_agree() -> None:
    swarm = replicas("pull", 4)
    apart = spread_of_slow(swarm)
    for _ in range(30):
        closed = [peer.close() for peer in swarm]
        for index, peer in enumerate(swarm):
            peer.merge([closed[(index + 1) % 4]])
    assert spread_of_slow(swarm) < 0.01 * apart


def spread_of_slow(swarm: Sequence[Replica]) -> float:
    phi = torch.stack([peer.state()["phi"] for peer in swarm])
    return float((phi - phi.mean(dim=0)).square().mean())


def test_a_pull_leaves_the_one_pulled_from_alone() -> None:
    pair = replicas("pull", 2)
    closed = [peer.close() for peer in pair]
    before = pair[1].live.theta.clone()
    pair[0].merge([closed[1]])
    assert torch.equal(pair[1].live.theta, before)


def test_a_pull_of_the_pseudo_gradient_alone_moves_us_too() -> None:
    pair = replicas("pull", 2)
    pair[1].train(seed=5)
    _, theirs = (peer.close() for peer in pair)
    light = repacked(theirs, {PSEUDO_GRADIENT: vectors(theirs)[PSEUDO_GRADIENT]})
    before = pair[0].live.theta.clone()
    pair[0].merge([light])
    assert not torch.equal(pair[0].live.theta, before)


@pytest.mark.parametrize("late_steps", [0, 3], ids=["at once", "three steps later"])
@pytest.mark.parametrize("light", [True, False], ids=["pseudo-gradient", "slow weights too"])
def test_a_pull_is_the_outer_step_of_the_formulas(light: bool, late_steps: int) -> None:
    """So what tests/comm/gossip/test_outer.py says of the formulas (progress counts once, gain, agreement) holds
    here."""
    ours = Replica("pull", "A", 0)
    theirs = Replica("pull", "B", 1)
    believe_all(ours.rule)
    theirs.live.theta.mul_(0.1).add_(ours.live.theta)
    theirs.rule.load(theirs.live.theta, {})
    slow = outer_step.start(ours.live.theta)
    for window in range(5):
        ours.train(seed=10 * window, tokens=300)
        theirs.train(seed=10 * window + 1, tokens=100)
        slow, published = outer_step.close(slow, ours.live.theta, q4)
        own, partner = ours.close(), theirs.close()
        assert torch.equal(vectors(own)[PSEUDO_GRADIENT], published)
        for step in range(late_steps):
            ours.train(seed=100 * window + step, tokens=0)
            ours.live.steps += 1
        phi = None if light else vectors(partner)["phi"]
        read = outer_step.WindowUpdate(vectors(partner)[PSEUDO_GRADIENT], 100, 1e-3, phi)
        mine = outer_step.WindowUpdate(published, 300, 1e-3)
        expected = outer_step.merge(slow, mine, [read], outer_step.Constants(), rho_of(late_steps, TOOLS.optimizer))
        before, slow = ours.live.theta.clone(), expected.slow
        pulled = repacked(partner, {PSEUDO_GRADIENT: read.pseudo_gradient}) if light else partner
        ours.merge([pulled])
        theirs.merge([])
        assert torch.allclose(ours.state()["phi"], slow.phi, rtol=0, atol=1e-5)
        assert torch.allclose(ours.live.theta, before + expected.correction, rtol=0, atol=1e-5)


@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
def test_what_is_on_the_wire_is_what_partners_and_we_merge(code: str) -> None:
    ours, theirs = Replica("pull", "A", code=code), Replica("pull", "B", code=code)
    for seed, one in enumerate((ours, theirs)):
        one.train(seed)
    mine, partner = ours.close(), theirs.close()
    section = next(one for one in partner.layout if one.name == PSEUDO_GRADIENT)
    assert (section.codec, section.size) == (code, blockwise.size(code, SIZE))
    own = ours.pull.published()
    assert own is not None
    assert torch.equal(own, vectors(mine)[PSEUDO_GRADIENT])
    before = ours.pull.phi.clone()
    means = (vectors(mine)[PSEUDO_GRADIENT] + vectors(partner)[PSEUDO_GRADIENT]) / 2
    ours.merge([repacked(partner, {PSEUDO_GRADIENT: vectors(partner)[PSEUDO_GRADIENT]})])
    assert torch.allclose(ours.state()["phi"], before - means, rtol=0, atol=1e-6)


def test_a_rule_with_two_codes_sends_either_and_merges_both() -> None:
    ours, dense, sparse = (Replica("pull", name, code="auto") for name in "ABC")
    for seed, one in enumerate((ours, dense, sparse)):
        one.train(seed)
    sent = [ours.close(), dense.close(), sparse.close(thin=True)]
    codes = [next(section.codec for section in one.layout if section.name == PSEUDO_GRADIENT) for one in sent]
    assert codes == ["q4", "q4", "q1"]
    before, read = ours.pull.phi.clone(), [vectors(one)[PSEUDO_GRADIENT] for one in sent]
    partners = zip(sent[1:], read[1:], strict=True)
    ours.merge([repacked(one, {PSEUDO_GRADIENT: vector}) for one, vector in partners])
    assert torch.allclose(ours.state()["phi"], before - sum(read) / 3, rtol=0, atol=1e-6)


def test_what_a_shorter_code_keeps_back_goes_out_in_the_next_dense_window() -> None:
    one = Replica("pull", "A", code="auto")
    start = one.live.theta.clone()
    one.train(0)
    trained = start - one.live.theta
    published = vectors(one.close(thin=True))[PSEUDO_GRADIENT]
    one.merge([])
    together = published + vectors(one.close())[PSEUDO_GRADIENT]
    kept_back, left = (torch.linalg.vector_norm(trained - sent) for sent in (published, together))
    assert kept_back > 0.4 * torch.linalg.vector_norm(trained)
    assert left < 0.3 * kept_back


def test_a_merge_leaves_a_part_of_what_a_sparse_window_keeps_back_in_the_live_weights() -> None:
    one = Replica("pull", "A", code="sparse")
    start = one.live.theta.clone()
    one.train(0)
    trained = start - one.live.theta
    published = vectors(one.close())[PSEUDO_GRADIENT]
    kept_back = trained - published
    one.merge([])
    assert torch.allclose(one.live.theta, start - published - UNSENT_KEPT * kept_back, rtol=0, atol=1e-6)
    assert torch.allclose(one.state()["owed"], kept_back, rtol=0, atol=1e-6), "and all of it is owed"


@pytest.mark.parametrize("code", ["q4", *blockwise.SHORTER_CODECS])
def test_a_large_fragment_keeps_no_baseline_and_owes_all_that_it_has_not_published(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_rule, "LARGE_ELEMENTS", SIZE)
    one, residual = Replica("pull", "A", code=code), 0 if code == "q4" else 2  # bytes in int8 are no tensor
    # The share of a sparse window's residual that is not in the live weights is rounded once more.
    most = 2.0**-9 if code == SPARSE_CODEC else 1e-6
    expected = one.live.theta.clone()
    for window in range(6):
        before = one.live.theta.clone()
        one.train(seed=window)
        expected += one.live.theta - before
        one.close()
        kept = (4 + (2 if window else 1) * residual) * SIZE
        assert bytes_of(one) == kept, "phi, the residual, and from the second window on the one before it"
        assert_all_is_owed(one, expected, most)
        one.merge([])
        assert bytes_of(one) == (4 + residual) * SIZE, "phi, and the residual"
        assert_all_is_owed(one, expected, most)
    folded = one.gossiped.rule.fold(one.copied())
    assert folded is not None
    assert bytes_of(one) == 4 * SIZE, "phi"
    assert torch.equal(one.pull.baseline, one.pull.phi)


def test_a_large_fragment_that_is_restored_or_closed_twice_keeps_no_baseline_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pull_rule, "LARGE_ELEMENTS", SIZE)
    one = Replica("pull", "A")
    one.rule.tools = replace(TOOLS, optimizer="muon")
    one.train(seed=0)
    one.close()
    one.merge([])
    owed = one.state()["owed"]
    one.rule.load(one.live.theta, {name: vector.clone() for name, vector in one.state().items()})
    state = one.state()
    assert torch.allclose(state["owed"], owed, rtol=2.0**-8, atol=1e-6), "in bf16"
    expected = state["phi"] - state["owed"]
    for seed in (1, 2):
        before = one.live.theta.clone()
        one.train(seed)
        expected += one.live.theta - before
        one.close()
    assert bytes_of(one) == 6 * SIZE, "phi, and what was owed before"
    assert_all_is_owed(one, expected, 1e-6)
    one.merge([])
    assert bytes_of(one) == 4 * SIZE, "phi"
    assert_all_is_owed(one, expected, 1e-6)


def test_a_large_fragment_of_a_peer_that_has_trained_alone_keeps_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_rule, "LARGE_ELEMENTS", SIZE)
    one = Replica("pull", "A")
    one.train(seed=0)
    assert one.rule.fold(one.copied()) is None, "the live weights are the slow weights"
    assert bytes_of(one) == 4 * SIZE, "phi"
    assert_all_is_owed(one, one.live.theta, 1e-6)


def assert_all_is_owed(one: Replica, trained: Tensor, most: float) -> None:
    """Assert that the slow weights and what is owed add up to the weights `trained`, within `most`."""
    state = one.state()
    assert torch.allclose(state["phi"] - state["owed"], trained, rtol=0, atol=most)


def bytes_of(one: Replica) -> int:
    """How many bytes the tensors of the fragment's size take in its rule."""
    return sum(value.nbytes for value in vars(one.rule).values() if isinstance(value, Tensor) and value.numel() == SIZE)


def q4(values: Tensor) -> Tensor:
    return blockwise.decode("q4", blockwise.encode("q4", values), values.numel())


# Every rule


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_newcomer_starts_from_what_the_donor_holds(algorithm: str) -> None:
    donor, newcomer = replicas(algorithm, 2)
    donor.train(seed=7)
    newcomer.rule.adopt(newcomer.live, unpack(blockwise, *donor.donate()))
    slow = donor.state().get("phi", donor.live.theta)
    assert torch.equal(newcomer.live.theta, slow)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_newcomer_has_made_no_progress_yet(algorithm: str) -> None:
    donor, newcomer = replicas(algorithm, 2)
    newcomer.rule.adopt(newcomer.live, unpack(blockwise, *donor.donate()))
    pseudo_gradient = vectors(newcomer.close()).get(PSEUDO_GRADIENT, torch.zeros(1))
    assert float(pseudo_gradient.abs().max()) == 0.0


def test_slow_weights_that_come_in_memory_of_their_own_are_not_copied() -> None:
    donor, newcomer = replicas("pull", 2)
    layout, blob = donor.donate()
    given = unpack(blockwise, layout, bytearray(blob))
    newcomer.rule.adopt(newcomer.live, given)
    assert newcomer.pull.phi.data_ptr() == given["phi"].data_ptr()
    assert newcomer.pull.baseline is newcomer.pull.phi  # before the first window there is no other vector
    newcomer.train(seed=3)
    newcomer.close()
    newcomer.merge([])
    assert torch.allclose(newcomer.pull.phi, newcomer.live.theta, rtol=0, atol=1e-6)


def test_a_rule_of_which_only_the_length_is_known_begins_with_what_it_adopts() -> None:
    donor, newcomer = replicas("pull", 2)
    rule = update_rules.rule(config.GossipConfig(), donor.live.theta.to("meta"), PeerId("new"), TOOLS)
    rule.adopt(newcomer.live, unpack(blockwise, *donor.donate()))
    assert isinstance(rule, PullRule)
    assert torch.equal(rule.phi, donor.pull.phi)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_newcomers_of_the_same_blob_do_not_change_each_other(algorithm: str) -> None:
    donor, newcomer, other = replicas(algorithm, 3)
    donated = donor.donate()
    for one in (newcomer, other):
        one.rule.adopt(one.live, unpack(blockwise, *donated))
    state = {name: tensor.clone() for name, tensor in other.state().items()}
    newcomer.train(seed=5)
    newcomer.close()
    newcomer.merge([])
    for name, tensor in other.state().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rule_goes_on_from_its_saved_state_bit_for_bit(algorithm: str) -> None:
    one, other = Replica(algorithm, "A"), Replica(algorithm, "A")
    one.train(seed=1)
    one.close()
    one.merge([])
    other.live.theta.copy_(one.live.theta)
    other.rule.load(other.live.theta, {name: tensor.clone() for name, tensor in one.state().items()})
    for peer in (one, other):
        peer.train(seed=2)
    ours, theirs = one.close(), other.close()
    assert (ours.layout, ours.blob) == (theirs.layout, theirs.blob)


def test_slow_weights_that_are_near_are_taken_as_they_are() -> None:
    ours, theirs = replicas("pull", 2)
    before = ours.state()["phi"].clone()
    theirs.live.theta.copy_(before + 0.5)
    theirs.rule.load(theirs.live.theta, {})
    ours.close()
    ours.merge([theirs.close()])
    assert torch.allclose(ours.state()["phi"] - before, torch.full((SIZE,), 0.25), atol=0.01)
