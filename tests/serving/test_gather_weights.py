"""Weights from live peers: piece by piece, from as many holders as are wanted, and from others where some fail."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip.allreduce import AllReduceRule
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import StateRequest
from decentral.comm.wire.transport import Answer, AskError, Reply, Transport
from decentral.core import jobs
from decentral.core.choices import ALGORITHMS
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.engine import memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import Live
from decentral.peers.joining.donor import Donor
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.serving import gather_weights
from decentral.serving.gather_weights import HolderWeights

RUN = RunId("words-3fa2c1")
STEP = 7
PROFILE = Profile("cpu", 1 << 30, 1e9, 1e4)


class Serving:
    """A transport on which each named compute answers StateRequest as a live peer's donor does."""

    def __init__(self, setup_of: Callable[..., ComputeSetup], dead: str = "") -> None:
        self.computes, self.dead = {PeerId(name): Compute(setup_of(name)) for name in "AB"}, dead
        self.asked: set[tuple[str, int]] = set()

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: float, max_blob_bytes: int) -> Answer:
        compute, question = self.computes[to], envelope.message
        assert isinstance(question, StateRequest)
        self.asked.add((to, question.fragment))
        if to == self.dead:
            raise AskError("unreachable")
        donor = Donor(RUN, compute.fragments)
        donor.asked(1, PeerId("asker"), question, 0, 0.0)
        exported = compute.do(jobs.ExportState(question.fragment))
        assert isinstance(exported, jobs.StateExported)
        (reply,) = donor.exported(exported, STEP, 0.0)
        assert isinstance(reply, Reply)
        return Answer(reply.envelope, 0.1, 0.1, 0, 0)

    def gathered(self, copies: int, **spans: tuple[int, int]) -> list[HolderWeights]:
        """What peers with these layers give."""
        live = {
            PeerId(name): PeerRecord(RUN, 1.0, (), PROFILE, *span, 0, 0, 0, phase=PeerPhase.TRAINING)
            for name, span in spans.items()
        }
        transport: Transport = self  # type: ignore[assignment]
        settings = self.computes[PeerId("A")].setup.config
        return asyncio.run(gather_weights.gather(transport, RUN, settings, live, copies))


@pytest.mark.parametrize("dead", ["", "B"])
def test_live_peers_are_gathered_piece_by_piece_and_a_dead_one_is_left_out(
    setup_of: Callable[..., ComputeSetup], dead: str
) -> None:
    swarm = Serving(setup_of, dead)
    found = swarm.gathered(16, A=(0, 3), B=(0, 3))
    assert len(found) == (1 if dead else 2)
    for mixed in swarm.computes[PeerId("A")].gossip.fragments:
        assert torch.equal(found[0].weights[mixed.live.fragment.index], mixed.live.theta)
    assert found[0].steps == {0: STEP, 1: STEP, 2: STEP}


class MeanRule(AllReduceRule):
    """A rule whose newcomers get the weights under a name that no other rule uses."""

    donated: Mapping[str, str] = {"count": "fp32", "mean": "fp32"}
    weights_section = "mean"

    def donate(self, live: Live, packer: Packer) -> None:
        packer.add("count", "fp32", torch.zeros_like(live.theta, dtype=torch.float32))
        super().donate(live, packer)


def test_a_rule_names_the_section_that_has_the_weights(
    setup_of: Callable[..., ComputeSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "pull", replace(ALGORITHMS["allreduce"], rule=f"{__name__}:MeanRule"))
    swarm = Serving(setup_of)
    (found,) = swarm.gathered(1, A=(0, 3))
    for mixed in swarm.computes[PeerId("A")].gossip.fragments:
        assert torch.equal(found.weights[mixed.live.fragment.index], mixed.live.theta)


def test_one_copy_is_asked_of_one_peer(setup_of: Callable[..., ComputeSetup]) -> None:
    swarm = Serving(setup_of)
    assert [one.name for one in swarm.gathered(1, A=(0, 3), B=(0, 3))] == ["A"]
    assert swarm.asked == {("A", 0), ("A", 1), ("A", 2)}


def test_another_holder_gives_what_the_first_one_does_not(setup_of: Callable[..., ComputeSetup]) -> None:
    (holder,) = Serving(setup_of, dead="A").gathered(1, A=(0, 3), B=(0, 3))
    assert (holder.name, set(holder.weights)) == ("B", {0, 1, 2})


def test_layers_come_from_several_peers_where_nobody_holds_all(setup_of: Callable[..., ComputeSetup]) -> None:
    found = Serving(setup_of).gathered(1, A=(0, 2), B=(1, 3))
    assert [set(one.weights) for one in found] == [{0, 1}, {2}]


def test_a_layer_that_nobody_gives_is_named_with_the_reason(setup_of: Callable[..., ComputeSetup]) -> None:
    with pytest.raises(UserError, match=r"no peer gave layers 2 to 2 of the model \(peer B: unreachable\)"):
        Serving(setup_of, dead="B").gathered(1, A=(0, 2), B=(1, 3))
    with pytest.raises(UserError, match=r"no peer gave layers 2 to 2 of the model \(no peer holds them\)"):
        Serving(setup_of).gathered(1, A=(0, 2))


def test_a_machine_gathers_as_many_copies_as_fit_and_refuses_a_model_of_which_none_does(
    setup_of: Callable[..., ComputeSetup],
) -> None:
    run = setup_of("A").config
    assert memory.copies_that_fit(run, 16, 1 << 30) == 16
    assert memory.copies_that_fit(run, 16, 1 << 20) == 5
    with pytest.raises(UserError, match=r"gathering \d+ parameters takes"):
        memory.copies_that_fit(run, 1, 1 << 18)


def test_the_layouts_it_expects_are_those_that_peers_donate(setup_of: Callable[..., ComputeSetup]) -> None:
    for algorithm in ("pull", "allreduce", "synchronous"):
        compute = Compute(setup_of("A", algorithm=algorithm))
        expected = [layout for _, layout in gather_weights.donated_layouts(compute.setup.config)]
        assert expected == compute.gossip.state_layouts()
        assert set(blockwise.CODECS) >= {section.codec for layout in expected for section in layout}
