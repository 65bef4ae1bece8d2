"""The model of a device's memory, compared with what torch really keeps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import SIZES
from decentral.core import config, memory_needs
from decentral.core.choices import OPTIMIZERS
from decentral.core.errors import UserError
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.engine import measure, memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.step import Chain, Device
from decentral.model import decoder


def really_kept(model: config.ModelConfig, layer: int) -> float:
    """Bytes a token that autograd keeps for this layer, parameters and buffers left out."""
    layers = decoder.build(model, 0)
    fixed = {t.untyped_storage().data_ptr() for one in layers for t in [*one.parameters(), *one.buffers()]}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens_BT = torch.zeros(2, model.context, dtype=torch.int64)
    hidden_BTD = torch.randn(2, model.context, model.d_model, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layers[layer](tokens_BT if layer == 0 else hidden_BTD)
        if layer == len(layers) - 1:
            out = decoder.loss_of(out, tokens_BT)
    seen[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(seen.values()) / tokens_BT.numel()


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("layer", [1, -1])
def test_a_layer_keeps_about_what_the_model_says(width: int, layer: int) -> None:
    model = config.ModelConfig(depth=1, width=width, context=64)
    said = memory.activation_bytes(model)[layer]
    kept = really_kept(model, layer % 3)
    passing = 2 * 4 * model.vocabulary if layer == -1 else 0  # logits and their gradient, while the loss is taken
    assert 0.8 * kept <= said <= 1.3 * (kept + passing)


SAVING: dict[str, dict[str, object]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "bf16 weights": {"weights": "bfloat16"},
    "int8 moments": {"moments": "int8"},
    "all": {"weights": "bfloat16", "moments": "int8"},
}
MODELS = {
    "ours": config.ModelConfig(depth=2, width=64, kv_heads=1),
    "a user's": config.ModelConfig(layers=f"{__name__}:own_layers", vocabulary=40),
}


def own_layers(model: config.ModelConfig) -> list[nn.Module]:
    inner = [nn.Sequential(nn.Linear(24, 24), nn.Conv1d(model.context, model.context, 3, padding=1))]
    return [nn.Embedding(model.vocabulary, 24), *inner, nn.Linear(24, model.vocabulary)]


@pytest.mark.parametrize("changes", SAVING.values(), ids=SAVING)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_whole_models_weights_gradient_and_optimizer_take_what_is_said(
    changes: dict[str, object], model: config.ModelConfig
) -> None:
    """With AdamW in fp32 16 bytes a parameter."""
    if "moments" in changes:
        pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    run = config.Config(model=model, train=config.TrainConfig.model_validate(changes))
    layers, cuts = decoder.build(model, 0), fragments_of(run)
    lives = [Live(cut, layers, torch.device("cpu"), run.train) for cut in cuts]
    needs = memory.needs(run, gossip_apart=True)
    taken = sum(tensor.nbytes for live in lives for tensor in (live.grad, *live.tensors().values()))
    assert taken <= sum(needs.state) <= taken + 8 * len(layers)  # a block of int8 moments may reach over layers
    assert needs.span_bytes(0, len(cuts), 0) == sum(needs.state) + max(needs.scratch)  # there are no sums of gradients
    if changes == {"optimizer": "adamw"}:
        assert taken == 16 * sum(decoder.parameters(model))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_part_of_a_model_has_its_sums_of_gradients_too(setup_of: Callable[..., ComputeSetup], weights: str) -> None:
    setup = setup_of("A")
    train = setup.config.train.model_copy(update={"weights": weights})
    run = setup.config.model_copy(update={"train": train})
    span = Compute(dataclasses.replace(setup, config=run, span=(1, 3))).span
    sums = [*span.stages.sums.filled, *(one for slot in span.stages.sums.sealed for one in slot)]
    lives = [tensor for live in span.inner.lives for tensor in (live.grad, *live.tensors().values())]
    needs = memory.needs(run, gossip_apart=True)
    taken = {tensor.data_ptr(): tensor.nbytes for tensor in (*sums, *lives)}
    assert sum(taken.values()) == sum(needs.state_of_parts[1:3])
    assert needs.span_bytes(1, 3, 0) == sum(taken.values()) + max(needs.scratch[1:3])


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes at a time of the tensors that are made within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.held = {key: one for key, one in self.held.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        self.bytes = max(self.bytes, sum(size for _, size in self.held.values()))
        return made


WIDE = {"model": {"depth": 1, "width": 16, "context": 64, "vocabulary": 128_000}}
DEEP = {"model": {"depth": 6, "width": 64, "context": 64}}


@pytest.mark.parametrize(
    ("shape", "recompute", "logits_at_once"),
    [(WIDE, False, 1 << 20), (WIDE, False, 1 << 25), (DEEP, True, 1 << 25), (DEEP, False, 1 << 25)],
    ids=["a large vocabulary in parts", "a large vocabulary at once", "recomputed", "kept"],
)
def test_a_forward_and_backward_pass_takes_at_most_what_is_said(
    shape: dict[str, dict[str, object]], recompute: bool, logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "LOGITS_AT_ONCE", logits_at_once)
    run = config.Config.model_validate({**shape, "train": {"micro_batch": 2, "recompute": recompute}})
    layers = decoder.build(run.model, 0)
    for cut in fragments_of(run):
        Live(cut, layers, torch.device("cpu"), run.train).grad.zero_()  # it is there before, as a part of the state
    tokens_BT = torch.zeros(2, run.model.context, dtype=torch.int64)
    with Peak() as peak:
        Chain(layers, run=run).loss(tokens_BT, tokens_BT).backward()  # type: ignore[no-untyped-call]
    needs = memory.needs(run, gossip_apart=True)
    said = sum(needs.activations) + max(needs.scratch)
    assert 0.6 * said <= peak.bytes <= said


BF16_ON_GPU = Device(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("depth", "width", "sequences", "optimizer", "measured_gb"),
    [(18, 768, 16, "adamw", 12.86), (20, 2048, 8, "adamw", 30.45), (20, 2048, 8, "muon", 26.40)],
    ids=["125M", "1B", "1B with Muon"],
)
def test_a_whole_model_on_a_gpu_is_claimed_at_what_training_it_took(
    depth: int, width: int, sequences: int, optimizer: str, measured_gb: float
) -> None:
    """The most that torch had allocated on an H100, in bf16 (docs/results/gpu.md)."""
    run = config.Config(
        model=config.ModelConfig(depth=depth, width=width, context=1024),
        train=config.TrainConfig.model_validate({"micro_batch": sequences, "optimizer": optimizer}),
    )
    needs = memory.needs_on(run, BF16_ON_GPU)
    assert 1.0 <= needs.span_bytes(0, len(needs.fragments)) / 1e9 / measured_gb <= 1.15


@pytest.mark.parametrize(
    ("size", "optimizer", "measured_mb"),
    [("10M", "muon", 495.8), ("10M", "adamw", 565.2), ("85M", "muon", 1822.0), ("85M", "adamw", 2441.7)],
)
def test_a_whole_model_on_a_cpu_is_claimed_at_what_training_it_took(
    size: str, optimizer: str, measured_mb: float
) -> None:
    """A process's peak of memory while closed windows of all fragments waited to be merged (benchmarks/memory.py)."""
    needs = memory.needs(config.load(None, [*SIZES[size], f"train.optimizer={optimizer}"]))
    assert 1.0 <= needs.span_bytes(0, len(needs.fragments)) / 1e6 / measured_mb <= 1.15


@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_a_micro_batch_that_is_chosen_here_fits_the_memory_that_the_user_gave(
    setup_of: Callable[..., ComputeSetup], monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """`decentral.peer small --memory 300MB` trained 8 sequences, which took 1,128 MB by its own count."""
    monkeypatch.setattr(measure, "_trained_s", lambda *_: 1.0)  # so the more sequences, the faster
    setup = setup_of()
    fixed = memory.with_micro_batch(setup.config, sequences)
    given = memory.needs_on(fixed, setup.device).span_bytes(0, 3) + 1000
    train = setup.config.train.model_copy(update={"micro_batch": "auto"})
    chosen = dataclasses.replace(setup, config=setup.config.model_copy(update={"train": train}))
    assert Compute(dataclasses.replace(chosen, memory_bytes=given)).sequences == sequences
    assert Compute(dataclasses.replace(chosen, memory_bytes=1000)).sequences == 1
    assert Compute(chosen).sequences == measure.LARGEST


@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_a_part_of_a_model_takes_larger_micro_batches_only_if_as_many_still_fit(sequences: int) -> None:
    """Its layers are claimed with room for many of one sequence; `auto` took so many sequences that two fitted."""
    run, device = config.Config(model=config.ModelConfig(depth=8, width=128)), measure.choose("cpu")
    fixed = memory.needs_on(memory.with_micro_batch(run, sequences), device)
    usual = fixed.preferred_in_flight(2)
    assert usual > memory_needs.LEAST_IN_FLIGHT
    given = fixed.span_bytes(0, 2, usual)
    assert memory.most_sequences(run, device, 0, 2, given, measure.LARGEST) == sequences
    assert fixed.capacity(0, 2, given) == usual
    assert memory.most_sequences(run, device, 0, 2, given - 1, measure.LARGEST) == max(1, sequences // 2)


def test_gradients_of_a_part_and_of_several_micro_batches_count_beside_activations() -> None:
    """Only a step of the whole model with one micro-batch allocates gradients where it has freed activations."""
    run = config.Config(model=config.ModelConfig(depth=4, width=128))
    needs = memory.needs_on(run, BF16_ON_GPU)
    apart = dataclasses.replace(needs, late_gradients=())
    saved = [apart.span_bytes(*one) - needs.span_bytes(*one) for one in ((0, 4, 1), (0, 4, 2), (0, 4, 0), (0, 3, 1))]
    assert saved == [4 * sum(decoder.parameters(run.model)), 0, 0, 0]
    several = run.model_copy(update={"train": run.train.model_copy(update={"accumulate": 2})})
    assert not memory.needs_on(several, BF16_ON_GPU).late_gradients


def test_a_span_grows_as_far_as_the_memory_goes() -> None:
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    count = len(needs.fragments)
    assert memory_needs.widest_span(needs, needs.span_bytes(0, count))(0) == count
    part = needs.span_bytes(0, 2)
    assert part < needs.span_bytes(0, count)
    assert [memory_needs.widest_span(needs, size)(0) for size in (part, part - 1)] == [2, 1]
    assert memory_needs.widest_span(needs, 1)(2) == 2


def test_a_memory_too_small_for_one_layer_is_a_user_error() -> None:
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    with pytest.raises(UserError, match=r"--memory 1\.0 kB: the smallest part of this model takes [\d.]+ [kM]B"):
        memory.check(needs, 1000)


LARGE = memory.needs(
    config.Config(
        model=config.ModelConfig(depth=4, width=128, context=256),
        train=config.TrainConfig(micro_batch=16, optimizer="adamw"),
    )
)


def test_layers_that_none_of_the_peers_could_hold_are_a_user_error() -> None:
    """The first three of the four fragments fit, and the head's does not: such a swarm would wait for ever."""
    largest, others = LARGE.span_bytes(3, 4), max(LARGE.span_bytes(at, at + 1) for at in range(3))
    assert others < largest - 1
    with pytest.raises(UserError, match=f"layers 4 to 5 take {largest} bytes, more than any peer has.*micro_batch"):
        memory.check_together(LARGE, 64, largest - 1)
    memory.check_together(LARGE, 4, largest)


def test_peers_that_are_too_few_for_all_layers_are_a_user_error() -> None:
    with pytest.raises(UserError, match="3 peers with this memory cannot hold layers 4 to 5"):
        memory.check_together(LARGE, 3, LARGE.span_bytes(3, 4))


def test_peers_whose_widest_spans_cover_the_model_are_no_error() -> None:
    half = max(LARGE.span_bytes(0, 2), LARGE.span_bytes(2, 4))
    memory.check_together(LARGE, 2, half)
    memory.check_together(LARGE, 1, LARGE.span_bytes(0, 4))
    assert [LARGE.reach(1, size) for size in (1000, LARGE.span_bytes(0, 2), half)] == [0, 2, 4]


def test_room_for_more_micro_batches_is_used_up_to_a_limit() -> None:
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    assert needs.capacity(0, 2, needs.span_bytes(0, 2)) == memory_needs.LEAST_IN_FLIGHT
    assert needs.capacity(0, 2, 1 << 50) == MOST_UNDER_WAY


def test_the_narrower_a_span_the_more_micro_batches_a_peer_prefers_memory_for() -> None:
    """The first of P stages holds P micro-batches while they are on their way; two are the least for any part."""
    found = memory.needs(
        config.Config(model=config.ModelConfig(depth=16), gossip=config.GossipConfig(fragment_parameters=1))
    )
    count = len(found.fragments)
    widths = (count, count // 2, count // 6, 1)
    assert [found.least_in_flight(width) for width in widths] == [1, 2, 2, 2]
    assert [found.preferred_in_flight(width) for width in widths] == [1, 4, 8, count + 2]
    assert [found.wanted_in_flight(0, width) for width in widths] == [1, 4, 30, MOST_UNDER_WAY]
    assert [found.wanted_in_flight(count - 3, count), found.wanted_in_flight(count - 1, count)] == [8, 20]


def test_a_span_is_as_wide_as_its_wanted_micro_batches_allow_or_else_its_preferred_or_least_ones() -> None:
    found = memory.needs(
        config.Config(model=config.ModelConfig(depth=16), gossip=config.GossipConfig(fragment_parameters=1))
    )
    enough = found.span_bytes(3, 6, found.wanted_in_flight(3, 6))
    assert memory_needs.widest_span(found, enough)(3) >= 6
    preferred = found.span_bytes(3, 4, found.preferred_in_flight(1))
    assert preferred < found.span_bytes(3, 4, found.wanted_in_flight(3, 4))
    assert memory_needs.widest_span(found, preferred)(3) == 4
    least = found.span_bytes(3, 4, 2)  # 16 fewer than are preferred: the peer takes part all the same
    assert memory_needs.widest_span(found, least)(3) == 4
    assert memory_needs.widest_span(found, least - 1)(3) == 3


def test_memory_for_two_micro_batches_counts_as_two() -> None:
    """Peers kept at least four, which the memory does not hold, where plans count on two."""
    needs = memory.needs(config.Config(model=config.ModelConfig(depth=4, width=128)))
    assert needs.capacity(0, 2, needs.span_bytes(0, 2, 2)) == 2
    assert needs.capacity(0, 2, needs.span_bytes(0, 2, 3) - 1) == 2
    assert needs.capacity(0, 2, needs.span_bytes(0, 2, 3)) == 3


def test_a_peer_with_the_whole_model_computes_for_others_only_if_their_gradient_sums_fit() -> None:
    """It allocated them when the first micro-batch came, beyond all that `--memory` allows."""
    run = config.Config(model=config.ModelConfig(depth=4, width=128))
    needs = memory.needs(run)
    count, parameters = len(needs.fragments), sum(decoder.parameters(run.model))
    fits = needs.span_bytes(0, count)
    assert needs.capacity(0, count, fits) == 0
    sums = 4 * (run.routes.slots + 1) * parameters
    assert needs.capacity(0, count, fits + sums + sum(needs.activations)) == 1
    assert needs.capacity(0, count, fits + sums + 3 * sum(needs.activations)) == 3


@pytest.mark.parametrize("key", ["train.recompute=true", "train.accumulate=2"])
def test_a_whole_model_on_a_cpu_claims_the_freed_memory_that_its_heap_keeps(key: str) -> None:
    """Such peers took 1.2 to 1.4 times what they claimed."""
    plain, found = memory.needs(config.Config()), memory.needs(config.load(None, [key]))
    count, without = len(found.fragments), dataclasses.replace(found, kept=0)
    assert 0.4 * sum(plain.activations) <= found.kept <= 0.5 * sum(plain.activations)
    assert found.span_bytes(0, count) - without.span_bytes(0, count) == found.kept
    assert found.span_bytes(0, count - 1) == without.span_bytes(0, count - 1)
    assert plain.kept == 0


def test_in_a_synchronous_run_the_whole_model_computes_routed_micro_batches_only() -> None:
    needs = memory.needs(config.load(None, ["gossip.algorithm=synchronous"]))
    assert needs.capacity(0, len(needs.fragments), needs.span_bytes(0, len(needs.fragments))) == 1


# Before anything is made


def test_a_layer_that_this_machine_cannot_build_is_refused_by_arithmetic() -> None:
    run = config.Config(model=config.ModelConfig(depth=1024, width=65_536, vocabulary=1 << 20, heads=1024))
    with pytest.raises(UserError, match=r"model: building 52.9 T parameters, 68.7 B of them in one layer, takes"):
        memory.check_machine(run, (1, 2), 64 << 30)
    with pytest.raises(UserError, match=r"takes 274\.9 GB; this machine has 68\.7 GB"):
        memory.check_machine(run, (0, 0), 64 << 30)


def test_tables_of_positions_count_for_the_blocks_of_the_span() -> None:
    run = config.Config(model=config.ModelConfig(depth=64, width=64, heads=1, context=1 << 18))
    memory.check_machine(run, (0, 4), 2 << 30)
    with pytest.raises(UserError, match="model: building"):
        memory.check_machine(run, None, 2 << 30)


def test_a_usual_model_is_built_anywhere() -> None:
    memory.check_machine(config.Config(), None, 64 << 20)
