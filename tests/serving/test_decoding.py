"""Kept keys and values change no number; tokens are drawn by temperature, nucleus and seed alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decentral.core.config import ModelConfig
from decentral.core.errors import UserError
from decentral.core.sampling import Sampling
from decentral.engine.step import Device
from decentral.model import decoder
from decentral.model.families import FAMILIES
from decentral.serving import decoding
from decentral.serving.decoding import CachedReader

CPU = Device(torch.device("cpu"), torch.float32)
OPTIONS: dict[str, dict[str, object]] = {  # by family, what its models may have and others not
    "llama": {"kv_heads": 1},
    "mistral": {"window": 5},
    "qwen2": {"kv_heads": 2},
    "qwen3": {"head_channels": 8},
    "olmo2": {"kv_heads": 1},
    "smollm3": {"block": {"unrotated": [0]}},
    "granite": {"block": {"residual_multiplier": 0.3, "attention_multiplier": 0.5, "embedding_multiplier": 3.0}},
    "phi3": {"window": 5, "block": {"partial_rotary_factor": 0.5}},
}
LONGROPE = {"kind": "longrope", "factor": 4.0, "positions": 8, "short": [1.0] * 8, "long": [1.0, *[3.0] * 7]}
LIKELIEST = Sampling(temperature=0, tokens=40)


def layers(family: str = "llama", context: int = 16, **more: object) -> list[nn.Module]:
    keys = {"depth": 2, "width": 32, "heads": 2, "vocabulary": 64, "context": context}
    made = decoder.build(
        ModelConfig.model_validate({**keys, "family": family, **OPTIONS.get(family, {}), **more}), seed=1
    )
    chance = torch.Generator().manual_seed(1)
    for parameter in (one for layer in made for one in layer.parameters() if one.ndim > 1):
        nn.init.normal_(parameter, std=0.3, generator=chance)  # large, so that a wrong position shows
    return made


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(64, (16,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("at_once", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_in_parts_gives_the_logits_of_the_whole(family: str, at_once: int, tokens: list[int]) -> None:
    model = layers(family)
    with torch.no_grad():
        whole_TV = nn.Sequential(*model)(torch.tensor([tokens]))[0]
    reader = CachedReader(model, 16, CPU)
    for end in range(at_once, 17, at_once):
        assert torch.allclose(reader.read(tokens[end - at_once : end]), whole_TV[end - 1], atol=1e-4)


def test_a_long_prompt_is_read_part_by_part(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    once = list(decoding.generate(layers(context=64), tokens, LIKELIEST, CPU))
    monkeypatch.setattr(decoding, "READ_AT_ONCE", 5)
    assert list(decoding.generate(layers(context=64), tokens, LIKELIEST, CPU)) == [None, None, None, *once]


def test_where_the_context_ends_its_last_half_is_read_again(tokens: list[int]) -> None:
    model = layers()
    seen, begin = list(tokens[:10]), 0
    while len(seen) < 50:
        begin = len(seen) - 8 if len(seen) - begin > 16 else begin
        with torch.no_grad():
            seen.append(int(nn.Sequential(*model)(torch.tensor([seen[begin:]]))[0, -1].argmax()))
    assert list(decoding.generate(model, tokens[:10], LIKELIEST, CPU)) == seen[10:]


def test_a_prompt_longer_than_the_context_counts_from_its_end(tokens: list[int]) -> None:
    model = layers()
    assert [*decoding.generate(model, tokens * 3, LIKELIEST, CPU)] == [
        *decoding.generate(model, tokens[8:], LIKELIEST, CPU)
    ]


def test_all_positions_that_the_model_is_made_for_are_read_whatever_it_is_trained_with(tokens: list[int]) -> None:
    wide, narrow = layers(context=48), layers(context=16, positions=48)
    assert [*decoding.generate(narrow, tokens * 2, LIKELIEST, CPU)] == [
        *decoding.generate(wide, tokens * 2, LIKELIEST, CPU)
    ]


def test_a_text_that_becomes_long_is_read_again_with_the_angles_of_a_long_one(tokens: list[int]) -> None:
    short, long = (layers(context=size, rope_scaling=LONGROPE, positions=32) for size in (8, 32))
    seen = list(tokens[:4])
    while len(seen) < 20:
        with torch.no_grad():
            logits_BTV = nn.Sequential(*(short if len(seen) <= 8 else long))(torch.tensor([seen]))
        seen.append(int(logits_BTV[0, -1].argmax()))
    assert list(decoding.generate(short, tokens[:4], Sampling(temperature=0, tokens=16), CPU)) == seen[4:]
    with torch.no_grad():
        others = nn.Sequential(*short)(torch.tensor([tokens[:8]])), nn.Sequential(*long)(torch.tensor([tokens[:8]]))
    assert not torch.allclose(*others, atol=1e-2)


def test_in_bfloat16_the_logits_are_close(tokens: list[int]) -> None:
    exact = CachedReader(layers(), 16, CPU).read(tokens)
    rounded = CachedReader(layers(), 16, Device(torch.device("cpu"), torch.bfloat16)).read(tokens)
    assert float((exact - rounded).abs().max()) < 0.1 * float(exact.abs().max())


def test_bfloat16_converts_the_weights_once_for_all_readers(tokens: list[int]) -> None:
    model, device = layers(), Device(torch.device("cpu"), torch.bfloat16)
    readers = [CachedReader(model, 16, device) for _ in range(2)]
    weights = [parameter for layer in model for parameter in layer.parameters()]
    assert {parameter.dtype for parameter in weights} == {torch.bfloat16}
    places = [parameter.data_ptr() for parameter in weights]
    assert torch.equal(readers[0].read(tokens[:15]), readers[1].read(tokens[:15]))
    with Conversions() as seen:
        readers[0].read([1])
    assert seen.largest <= 64, "only the logits are converted"
    assert places == [parameter.data_ptr() for parameter in weights]


class Conversions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of elements of the largest tensor that is converted to another dtype within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is not None:
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_in_half_of_the_bytes_twice_the_model_fits() -> None:
    model = ModelConfig(depth=2, width=32, heads=2, context=16)
    needed = 4 * sum(model.layer_parameters)
    decoding.check_memory(model, 1, 1, needed, torch.bfloat16)
    with pytest.raises(UserError, match="the device has"):
        decoding.check_memory(model, 1, 1, needed, torch.float32)


def test_a_model_whose_tokens_take_more_than_the_device_has_is_refused() -> None:
    wide = ModelConfig(depth=100, width=2, heads=1024, kv_heads=1024, head_channels=64, context=1 << 18)
    decoding.check_memory(wide, 1, 9, 1 << 30, torch.float32)
    with pytest.raises(UserError, match="parameters and a text of 1001 tokens take"):
        decoding.check_memory(wide, 1, 1000, 1 << 30, torch.float32)


# Drawing


def drawn(logits_V: Tensor, number: int = 400, **keys: float) -> Counter[int]:
    chance = torch.Generator().manual_seed(0)
    return Counter(decoding.sample(logits_V, Sampling(**keys), chance) for _ in range(number))  # type: ignore[arg-type]


def test_without_temperature_it_is_always_the_likeliest_token() -> None:
    assert set(drawn(torch.tensor([0.0, 1.0, 0.9]), 10, temperature=0)) == {1}


def test_tokens_are_as_frequent_as_they_are_likely() -> None:
    found = drawn(torch.tensor([0.6, 0.1, 0.3]).log(), temperature=1.0, top_p=1.0)
    assert [found[token] / 400 for token in range(3)] == pytest.approx([0.6, 0.1, 0.3], abs=0.06)


def test_a_lower_temperature_favours_the_likely() -> None:
    logits_V = torch.tensor([0.6, 0.1, 0.3]).log()
    assert drawn(logits_V, temperature=0.5, top_p=1.0)[0] > drawn(logits_V, temperature=1.0, top_p=1.0)[0]


@pytest.mark.parametrize(("top_p", "left"), [(0.0, {0}), (0.5, {0}), (0.7, {0, 2}), (0.95, {0, 1, 2})])
def test_only_the_least_set_with_that_probability_is_drawn_from(top_p: float, left: set[int]) -> None:
    assert set(drawn(torch.tensor([0.6, 0.1, 0.3]).log(), temperature=1.0, top_p=top_p)) == left


def test_a_tiny_temperature_overflows_nothing() -> None:
    assert set(drawn(torch.tensor([0.0, 80.0, 79.0]), 10, temperature=1e-300)) == {1}


def test_the_seed_decides(tokens: list[int]) -> None:
    model = layers()
    one, again, other = (
        list(decoding.generate(model, tokens, Sampling(seed=seed, tokens=8), CPU)) for seed in (1, 1, 2)
    )
    assert one == again != other


def test_tokens_without_a_text_are_not_drawn(tokens: list[int]) -> None:
    hot = Sampling(temperature=100.0, top_p=1.0, tokens=40, below=3)
    assert set(decoding.generate(layers(), tokens, hot, CPU)) == {0, 1, 2}


def test_weights_that_are_not_finite_are_refused(tokens: list[int]) -> None:
    model = layers()
    with torch.no_grad():
        next(model[1].parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        next(decoding.generate(model, tokens, Sampling(), CPU))
