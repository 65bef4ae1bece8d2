"""Hostile peers that know all windows of the honest ones: what they send, and that a swarm of real nodes stands it."""

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer, unpack
from decentral.comm.gossip.pull_rule import PSEUDO_GRADIENT
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Snapshot
from decentral.core.ids import RunId
from decentral.sim import faults, liars, surrogate, surrogate_model, surrogate_stages, swarm
from decentral.sim.invariants.convergence import distances, loss_of_mean
from tests.sim.test_fault_injector import FaultySwarm

NUMBERS = 512


def drawn(seed: int) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed))


def falsified(kind: str) -> tuple[Snapshot, dict[str, Tensor]]:
    """The snapshot that a liar sends instead of one with 100 tokens, and what partners read of it."""
    packer = Packer(blockwise)
    packer.add(PSEUDO_GRADIENT, "q4", drawn(0))
    packer.add("phi", "int8", drawn(9))
    layout, blob = packer.finish()
    snapshot = Snapshot(RunId("run"), 0, 1, 100, 1.0, layout, blobs.digest(blob))
    envelope = liars.falsify(kind, "liar", Envelope(snapshot, blob), blockwise, [drawn(1), drawn(2), drawn(3)])
    assert isinstance(envelope.message, Snapshot)
    assert envelope.message.layout == layout
    assert envelope.message.digest == blobs.digest(envelope.blob)
    return envelope.message, unpack(blockwise, layout, envelope.blob)


@pytest.mark.parametrize("kind", liars.FALSIFIED)
def test_a_lie_has_the_form_of_a_snapshot_and_another_content(kind: str) -> None:
    snapshot, vectors = falsified(kind)
    same = torch.allclose(vectors[PSEUDO_GRADIENT], drawn(0), atol=0.3)
    assert not same or snapshot.tokens != 100


def test_inner_product_manipulation_is_the_mean_backwards() -> None:
    _, vectors = falsified("opposed")
    mean = torch.stack([drawn(seed) for seed in (1, 2, 3)]).mean(dim=0)
    assert torch.cosine_similarity(vectors[PSEUDO_GRADIENT], -mean, dim=0) > 0.98


def test_a_little_is_within_the_honest_peers_spread() -> None:
    _, vectors = falsified("little")
    honest = torch.stack([drawn(seed) for seed in (1, 2, 3)])
    apart = (vectors[PSEUDO_GRADIENT] - honest.mean(dim=0)).abs()
    assert bool((apart <= 1.3 * honest.std(dim=0) + 0.3).all())


def test_who_lies_about_tokens_claims_a_thousand_times_as_many() -> None:
    assert falsified("tokens")[0].tokens == 100_000


@pytest.mark.parametrize("kind", liars.FALSIFIED)
def test_a_spec_names_the_lie(kind: str) -> None:
    (fault,) = faults.parse(f"lie 2 {kind} at 10 for 20")
    assert str(fault) == f"lie 2 {kind} at 10 for 20"


@pytest.fixture
def long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the surrogate's eight numbers chance alone makes any cosine, so that a direction tells nothing."""
    for module in (surrogate, surrogate_model, surrogate_stages, swarm):
        monkeypatch.setattr(module, "NUMBERS", 64)


@pytest.mark.usefixtures("long_vectors")
@pytest.mark.parametrize("kind", liars.FALSIFIED)
def test_honest_peers_learn_while_one_of_five_lies(kind: str) -> None:
    """All begin at a distance of one. Without bounds it is 0.17 to 0.56 with flipped, opposed and tokens."""
    faulty = FaultySwarm(f"lie 4 {kind} at 10 for 40", peers=5)
    faulty.play(50.0)
    honest = [member for member in faulty.swarm.living if member.number != 4]
    assert loss_of_mean(honest) ** 0.5 < 0.15
    assert max(distances(honest).values()) < 0.2


@pytest.mark.parametrize(
    ("spec", "unjudged"),
    [
        ("", False),
        ("crash all at 6 for 3", False),
        ("lie 0 random at 8 for 4", False),
        ("lie 0,1 flipped at 8 for 4", True),
    ],
)
def test_whether_replicas_are_together_is_judged_unless_liars_were_most_of_the_possible_partners(
    spec: str, unjudged: bool
) -> None:
    """A moment in which nobody trains is none of those."""
    faulty = FaultySwarm(spec, peers=4)
    faulty.play(14.0)
    assert faulty.audit.convergence.outvoted == unjudged
