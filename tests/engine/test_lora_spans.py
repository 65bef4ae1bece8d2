"""Adapters over spans, and what their averages keep."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decentral.core import config
from decentral.data import corpora
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Chain
from decentral.model import decoder, huggingface
from decentral.model.shape import LoraConfig
from decentral.serving import replicas
from decentral.sim.host import Pace, Training
from decentral.sim.real_training import Trained, real_gradients
from decentral.sim.run import Scenario, run
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SwarmSettings
from tests.engine.test_stage_runner import batches, carried, summed, world_of

STEPS = 150


@pytest.fixture
def adapted(setup_of: Callable[..., ComputeSetup]) -> Callable[..., ComputeSetup]:
    """`adapted(peer, span)`: three blocks with adapters, whose factors have both moved."""

    def build(peer: str, span: tuple[int, int] | None = None) -> ComputeSetup:
        setup = setup_of(peer)
        model = setup.config.model.model_copy(update={"depth": 3, "lora": LoraConfig(rank=4)})
        train = setup.config.train.model_copy(update={"optimizer": "adamw", "clip_norm": 1e9})
        changed = {"model": model, "train": train, "routes": config.RoutesConfig(wire="fp32")}
        return dataclasses.replace(setup, config=setup.config.model_copy(update=changed), span=span)

    return build


def moved(compute: Compute) -> Compute:
    for live in compute.span.inner.lives:
        chance = torch.Generator().manual_seed(live.fragment.index)
        live.theta.copy_(0.1 * torch.randn(len(live.theta), generator=chance))
    return compute


def test_gradients_over_spans_are_those_of_one_process(adapted: Callable[..., ComputeSetup]) -> None:
    whole = moved(Compute(adapted("D")))
    cuts = [(one.first, one.last) for one in whole.fragments]
    assert cuts == [(0, 2), (2, 3), (3, 5)], "layers without adapters go with the block beside them"
    spans = {"A": (0, 3), "B": (2, 5), "C": (3, 5)}
    computes = {name: moved(Compute(adapted(name, span))) for name, span in spans.items()}
    carried(world_of(computes, per_step=1 << 30), 8)
    whole.span.inner.zero_grad()
    for inputs_BT, targets_BT in batches(computes["A"], 8):
        (decoder.loss_of(Chain(whole.span.layers)(inputs_BT), targets_BT) / 8).backward()  # type: ignore[no-untyped-call]
    found = summed(list(computes.values()))
    for live in whole.span.inner.lives:
        error = torch.linalg.vector_norm(found[live.fragment.index] - live.grad)
        assert torch.linalg.vector_norm(live.grad) > 0
        assert error <= 1e-5 * torch.linalg.vector_norm(live.grad)


@pytest.fixture
def base(setup_of: Callable[..., ComputeSetup], text: Path, tmp_path: Path) -> Path:
    """The folder of a model that has learned the text in capitals."""
    capitals = tmp_path / "capitals.txt"
    capitals.write_text(text.read_text().upper())
    setup = setup_of("base")
    source = setup.config.data.model_copy(update={"path": str(capitals)})
    run_config = setup.config.model_copy(update={"data": source})
    compute = Compute(dataclasses.replace(setup, config=run_config, corpus=corpora.load(source, run_config.model)))
    for _ in range(200):
        compute.step()
    huggingface.write(tmp_path / "model", run_config, compute.span.layers)
    return tmp_path / "model"


def test_three_peers_that_exchange_adapters_come_near_one_process(text: Path, base: Path, tmp_path: Path) -> None:
    """In virtual time, a step each second: within 2% of the loss of one process that had the same tokens."""
    model = [f"model.from={base}", "model.context=16", "model.lora.rank=8"]
    train = ["train.optimizer=adamw", "train.learning_rate=0.01", f"train.total_steps={STEPS}", "train.warmup_steps=10"]
    gossip = ["gossip.window_s=5", "gossip.start_window_s=1", "gossip.core_share=1"]
    keys = [*model, "data.kind=text", f"data.path={text}", *train, *gossip]
    trained: dict[str, Trained] = {}
    settings = config.load(None, [*keys, "train.micro_batch=4"])
    shape = real_gradients(SwarmSettings.of(settings, Pace(1.0, 0.05, report_s=10.0), (1.0,), 64), tmp_path)
    made = shape.gradients
    assert made is not None

    def kept(member: SimulatedPeer) -> Training:
        training = made(member)
        assert isinstance(training, Trained)
        trained[member.peer] = training
        return training

    run(Scenario(dataclasses.replace(shape, gradients=kept), 3, float(STEPS), 0, audited=False))
    tokens = sum(one.counters.tokens for one in trained.values())
    one = config.load(None, [*keys, "train.micro_batch=12"])
    setup = next(iter(trained.values())).setup
    folder = setup.folder.parent / "one"
    folder.mkdir(exist_ok=True)
    alone = Compute(dataclasses.replace(setup, config=one, folder=folder))
    before = loss(one, [alone])
    while alone.counters.tokens < tokens:
        alone.step()
    assert loss(one, list(trained.values())) <= 1.02 * loss(one, [alone])
    assert loss(one, [alone]) < 0.9 * before


def loss(settings: config.Config, computes: list[Compute] | list[Trained]) -> float:
    weights = [{one.live.fragment.index: one.live.theta for one in compute.gossip.fragments} for compute in computes]
    return replicas.held_out_loss(settings, replicas.average(weights))
