"""Adapters: what is trained, what stays, what travels, and what peft and transformers make of an export."""

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentral.commands import export
from decentral.core import config, jobs
from decentral.core.errors import UserError
from decentral.core.ids import RunId
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.received import received
from decentral.data import run_inputs
from decentral.engine import checkpoint, memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.step import Chain, Device
from decentral.model import decoder, lora
from decentral.model.shape import LoraConfig
from decentral.peers.startup.state import StateFolder
from decentral.serving import replicas, served_model
from tests.engine.test_memory import really_kept
from tests.model.hf_folders import SMALL, loaded, logits, made

MakeSetup = Callable[..., ComputeSetup]
TOKENS = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(0))
RUN = RunId("words-3fa2c1")


@pytest.fixture
def member(setup_of: MakeSetup, tmp_path: Path) -> Callable[..., ComputeSetup]:
    """`member(peer, *overrides, span=None, name="llama")`: a peer that adapts the folder's model."""

    def build(
        peer: str, *overrides: str, span: tuple[int, int] | None = None, name: str = "llama", **more: object
    ) -> ComputeSetup:
        folder, setup = tmp_path / "model", setup_of(peer)
        if not folder.exists():
            made(folder, name)
        keys = [f"model.from={folder}", "model.context=16", "gossip.fragment_parameters=1000", "train.micro_batch=4"]
        fixed = ["model.lora.rank=4", "train.optimizer=adamw", "train.learning_rate=0.01", "train.warmup_steps=0"]
        run = run_inputs.sealed(config.load(None, [*keys, *fixed, *overrides]))
        run = run.model_copy(update={"data": setup.config.data})
        return dataclasses.replace(setup, config=run, span=span, **more)  # type: ignore[arg-type]

    return build


def forward(layers: list[nn.Module]) -> Tensor:
    with torch.no_grad():
        return Chain(layers)(TOKENS)


def saved(compute: Compute, steps: int) -> Path:
    """The state folder of a peer that has taken so many steps and stopped."""
    for _ in range(steps):
        compute.step()
    compute.do(jobs.Save())
    StateFolder(compute.setup.folder).write_run(RUN, compute.setup.config)
    return compute.setup.folder


# What is trained


def test_a_run_starts_from_the_folders_logits(member: MakeSetup, tmp_path: Path) -> None:
    compute = Compute(member("A"))
    assert torch.allclose(forward(compute.span.layers), logits(loaded(tmp_path / "model"), TOKENS), atol=1e-4)


def test_training_moves_the_factors_and_nothing_else(member: MakeSetup) -> None:
    compute = Compute(member("A"))
    before = {name: one.clone() for name, one in decoder.named_weights(compute.span.layers, 2).items()}
    losses = [compute.step().loss for _ in range(30)]
    after = decoder.named_weights(compute.span.layers, 2)
    moved = {name for name, one in after.items() if not torch.equal(one, before[name])}
    assert moved == {name for name in after if ".lora_" in name}
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("matrices", ["queries-values", "attention", "feed-forward", "all"])
def test_figures_of_adapters_are_those_of_the_layers(member: MakeSetup, matrices: str) -> None:
    run = member("A", f"model.lora.matrices={matrices}").config
    layers = decoder.build(run.model, run.seed)
    assert decoder.parameters(run.model) == [sum(p.numel() for p in layer.parameters()) for layer in layers]
    for said, layer in zip(decoder.sizes(run.model), layers, strict=True):
        assert sorted(said.matrices) == sorted(parameter.numel() for parameter in layer.parameters())
    assert sum(one.parameters for one in fragments_of(run)) == sum(decoder.parameters(run.model))
    kept = really_kept(run.model, 1)
    assert 0.8 * kept <= memory.activation_bytes(run.model)[1] <= 1.8 * kept  # frozen matrices keep no input


def test_a_span_has_the_adapters_of_the_whole_model(member: MakeSetup) -> None:
    run = member("A").config
    whole, part = decoder.build(run.model, run.seed), decoder.build(run.model, run.seed, 2, 4)
    for one, other in zip(whole[2:], part, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        )


def test_layers_have_adapters_of_their_own(member: MakeSetup) -> None:
    run = member("A").config
    weights = decoder.named_weights(decoder.build(run.model, run.seed), 2)
    drawn = [one for name, one in weights.items() if name.endswith("q_proj.lora_A.weight")]
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_memory_counts_frozen_weights(member: MakeSetup, weights: str) -> None:
    run = member("A", f"train.weights={weights}").config
    cpu = torch.device("cpu")
    layers = decoder.placed(decoder.build(run.model, 0), run, cpu)
    lives = [Live(cut, layers, cpu, run.train) for cut in fragments_of(run)]
    names = decoder.named_weights(layers, 2)
    frozen = sum(one.nbytes for name, one in names.items() if ".lora_" not in name)
    assert frozen == (4 if weights == "float32" else 2) * sum(run.model.layer_parameters)
    taken = frozen + sum(tensor.nbytes for live in lives for tensor in (live.grad, *live.tensors().values()))
    assert sum(memory.needs(run, gossip_apart=True).state) == taken


def test_weights_in_bf16_train_too(member: MakeSetup) -> None:
    compute = Compute(member("A", "train.weights=bfloat16", "train.learning_rate=0.02"))
    losses = [compute.step().loss for _ in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


# What travels


def test_a_checkpoint_and_a_newcomers_state_have_the_adapters_alone(member: MakeSetup) -> None:
    donor = Compute(member("A"))
    weights = replicas.read(saved(donor, 0))
    assert weights is not None
    assert sum(one.numel() for one in weights.values()) == sum(decoder.parameters(donor.setup.config.model))
    newcomer = Compute(member("B", state_expected=True))
    states = [donor.do(jobs.ExportState(cut.index)) for cut in donor.fragments]
    given = tuple((one.fragment, one.layout, one.blob) for one in states if isinstance(one, jobs.StateExported))
    assert newcomer.do(jobs.ImportState(given, 1)) == jobs.StateImported(True)
    newcomer.do(jobs.Start(True))
    for one, other in zip(newcomer.span.inner.lives, donor.span.inner.lives, strict=True):
        torch.testing.assert_close(one.theta, other.theta, rtol=0, atol=0.01)
    assert torch.allclose(forward(newcomer.span.layers), forward(donor.span.layers), atol=1e-4)  # B is zero


def test_a_peer_goes_on_from_its_checkpoint(member: MakeSetup) -> None:
    before = Compute(member("A"))
    saved(before, 5)
    after = Compute(member("A", state_expected=True))
    assert after.resume()
    assert torch.equal(forward(after.span.layers), forward(before.span.layers))


def test_who_joins_needs_the_folder(member: MakeSetup, tmp_path: Path) -> None:
    text = member("A").config.canonical()
    with pytest.raises(UserError, match="each peer needs the base model: give --model-from DIR"):
        received(text).adopt(OwnInputs(data="words.txt"))
    own = OwnInputs(data="words.txt", model_folder=str(tmp_path / "model"))
    assert received(text).adopt(own).model.lora == LoraConfig(rank=4)


def test_without_its_folder_a_peer_says_what_to_name(member: MakeSetup) -> None:
    model = member("A").config.model.model_copy(update={"start_from": None})
    with pytest.raises(UserError, match="give the model's folder with --model-from DIR"):
        decoder.build(model, 0, drawn=False)


def test_a_users_own_layers_have_no_adapters() -> None:
    with pytest.raises(UserError, match=r"model\.lora works only with the built-in model; omit model\.lora"):
        config.load(None, ["model.layers=my.module:layers", "model.lora.rank=4"], NOTHING_NAMED)


def test_a_drawn_model_can_be_adapted_too(setup_of: MakeSetup) -> None:
    setup = setup_of("A")
    model = setup.config.model.model_copy(update={"lora": LoraConfig(rank=2)})
    plain = decoder.build(setup.config.model, 3)
    assert torch.equal(forward(decoder.build(model, 3)), forward(plain))
    assert torch.equal(forward(decoder.build(model, 3, drawn=False)), forward(plain)), "no donor gives frozen weights"


# Exports


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama 3, tied",
        "qwen2",
        "qwen3, wide heads, tied",
        "mistral with a window",
        "llama with biases",
        "olmo2",
        "smollm3, tied",
        "granite",
        "phi3, longrope",
    ],
)
def test_peft_loads_the_adapter_with_the_same_logits(member: MakeSetup, tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra lora: pip install 'decentral[lora]'")
    compute = Compute(member("A", name=name))
    folder, out = saved(compute, 20), tmp_path / "out"
    assert export.main(["--state-dir", str(folder), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = loaded(tmp_path / "model")
    plain = logits(base, TOKENS)
    theirs = logits(peft.PeftModel.from_pretrained(base, out).eval(), TOKENS)
    ours = forward(compute.span.layers)
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, plain, atol=1e-1)


@pytest.mark.parametrize("matrices", ["queries-values", "feed-forward"])
def test_adapters_of_some_of_a_fused_matrix_load_in_peft(member: MakeSetup, tmp_path: Path, matrices: str) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra lora: pip install 'decentral[lora]'")
    compute = Compute(member("A", f"model.lora.matrices={matrices}", name="phi3 with a window"))
    folder, out = saved(compute, 20), tmp_path / "out"
    assert export.main(["--state-dir", str(folder), "--out", str(out)]) == 0
    theirs = logits(peft.PeftModel.from_pretrained(loaded(tmp_path / "model"), out).eval(), TOKENS)
    assert torch.allclose(forward(compute.span.layers), theirs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3, wide heads, tied", "llama with biases", "phi3, longrope"])
def test_transformers_loads_the_merged_model_with_the_same_logits(member: MakeSetup, tmp_path: Path, name: str) -> None:
    compute = Compute(member("A", name=name))
    folder, out = saved(compute, 20), tmp_path / "out"
    flags = ["--state-dir", str(folder), "--model-from", str(tmp_path / "model")]
    assert export.main([*flags, "--format", "huggingface", "--out", str(out)]) == 0
    merged = loaded(out)
    assert torch.allclose(forward(compute.span.layers), logits(merged, TOKENS), atol=1e-4)
    assert merged.config.tie_word_embeddings is ("tied" in name)


def test_an_adapter_and_a_whole_model_are_never_in_one_folder(
    member: MakeSetup, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = str(tmp_path / "model")
    flags = ["--state-dir", str(saved(Compute(member("A")), 1)), "--model-from", start, "--out", str(tmp_path / "out")]
    assert export.main(flags) == export.main(flags) == 0
    assert export.main([*flags, "--format", "huggingface"]) == 2
    assert (
        "another model's files (adapter_config.json, adapter_model.safetensors), which programs would load"
        in capfd.readouterr().err
    )
    assert export.main([*flags[:5], start]) == 2
    assert "another model's files (config.json, model.safetensors)" in capfd.readouterr().err


def test_an_adapter_is_written_without_its_folder_and_a_merged_model_is_not(
    member: MakeSetup, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, out = saved(Compute(member("A")), 1), tmp_path / "out"
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    (tmp_path / "model" / "model.safetensors").unlink()
    flags = ["--state-dir", str(folder), "--out", str(out)]
    assert export.main(flags) == 0
    assert export.main([*flags, "--format", "huggingface"]) == 2
    assert "give the model's folder with --model-from DIR" in capfd.readouterr().err
    flags = ["--state-dir", str(folder), "--out", str(tmp_path / "merged"), "--format", "huggingface"]
    assert export.main([*flags, "--model-from", str(tmp_path / "moved")]) == 0


def test_adapters_are_served_over_the_named_folder(member: MakeSetup, tmp_path: Path) -> None:
    folder, cpu = saved(Compute(member("A")), 1), Device(torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="give the model's folder with --model-from DIR"):
        asyncio.run(served_model.of_folder(folder, None, cpu).load_first())
    source = served_model.of_folder(folder, None, cpu, str(tmp_path / "model"))
    asyncio.run(source.load_first())
    assert source.served.model is not None


def test_a_run_without_adapters_has_none_to_export(
    setup_of: MakeSetup, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved(Compute(setup_of("A")), 1)
    assert export.main(["--state-dir", str(folder), "--format", "peft", "--out", str(tmp_path / "out")]) == 2
    assert "this run has no adapters, since it trains all weights" in capfd.readouterr().err


def test_a_merged_layer_is_a_plain_one_with_the_same_output() -> None:
    model = config.ModelConfig(depth=1, width=32, context=16, lora=LoraConfig(rank=2))
    layers = decoder.build(model, 0)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
    before = forward(layers)
    lora.merge(layers)
    assert torch.allclose(forward(layers), before, atol=1e-4)
    assert not any(isinstance(module, lora.AdaptedLinear) for layer in layers for module in layer.modules())


def test_a_checkpoint_of_other_adapters_is_refused(member: MakeSetup) -> None:
    saved(Compute(member("A")), 1)
    with pytest.raises(UserError, match="a checkpoint of another run"):
        Compute(member("A", "model.lora.rank=2", state_expected=True)).resume()
    assert checkpoint.lr_step(member("A").folder) is not None


def test_adapters_have_bounds() -> None:
    values: list[Any] = [0, 1025, 1.5]
    for rank in values:
        with pytest.raises(UserError, match=r"model\.lora\.rank must be"):
            config.load(None, [f"model.lora.rank={rank}"])
    with pytest.raises(UserError, match=r"model\.lora\.matrices must be 'queries-values', 'attention'"):
        config.load(None, ["model.lora.matrices=heads"])
    assert SMALL["hidden_size"] == 64
