"""A request's text: it stops at stop strings, end tokens and its limit, and never shows a part of a stop string."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from decentral.core.config import ModelConfig
from decentral.core.sampling import Sampling
from decentral.data.text_codec import ByteCodec
from decentral.engine.step import Device
from decentral.model import decoder
from decentral.serving import decoding
from decentral.serving.completion import Completion
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.openai_requests import ApiError

CPU = Device(torch.device("cpu"), torch.float32)
TINY = ModelConfig(depth=1, width=32, heads=2, context=16)


@dataclass(frozen=True)
class EndingCodec(ByteCodec):
    """Bytes, and a token that ends a text."""

    ends: frozenset[int] = frozenset({ord("$"), ord("&")})


def model(codec: ByteCodec | None = None) -> LoadedModel:
    return LoadedModel(TINY, decoder.build(TINY, 0), codec or ByteCodec(), "weights of A at step 3")


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the model say this."""

    def say(text: str) -> None:
        def generated(layers: object, prompt: Sequence[int], sampling: Sampling, device: Device) -> Iterator[int]:
            return iter(text.encode()[: sampling.tokens])

        monkeypatch.setattr(decoding, "generate", generated)

    return say


def parts(stops: Sequence[str] = (), tokens: int = 64, codec: ByteCodec | None = None) -> tuple[list[str], Completion]:
    completion = Completion(model(codec), [1], Sampling(tokens=tokens), stops, CPU)
    found = []
    while completion.finish is None:
        found.append(completion.step())
    return [part for part in found if part], completion


def test_it_is_what_the_model_generates() -> None:
    sampling = Sampling(seed=3, tokens=12)
    completion = Completion(model(), list(b"the"), sampling, (), CPU)
    text = "".join(completion.step() for _ in range(12))
    decode = ByteCodec().decoder()
    found = decoding.generate(decoder.build(TINY, 0), list(b"the"), sampling, CPU)
    assert text == "".join(decode(token) for token in found if token is not None)
    assert (completion.finish, completion.generated, completion.prompt_tokens) == ("length", 12, 3)


def test_text_that_may_begin_a_stop_string_waits(says: Callable[[str], None]) -> None:
    says("one two\nthree")
    found, completion = parts(["\n\n", "\nx"], tokens=13)
    assert "".join(found) == "one two\nthree"
    assert "\nt" in found
    assert completion.finish == "length"


def test_it_stops_before_the_first_stop_string(says: Callable[[str], None]) -> None:
    says("ab END cd STOP")
    assert "".join(parts(["STOP", " END"])[0]) == "ab"
    assert parts(["STOP", " END"])[1].finish == "stop"


def test_what_was_held_back_is_given_at_the_end(says: Callable[[str], None]) -> None:
    says("abcEN")
    assert "".join(parts(["END"], tokens=5)[0]) == "abcEN"


@pytest.mark.parametrize("end", "$&")
def test_a_token_that_ends_a_text_ends_it_and_is_not_shown(says: Callable[[str], None], end: str) -> None:
    says(f"abc{end}def")
    found, completion = parts(codec=EndingCodec())
    assert "".join(found) == "abc"
    assert (completion.finish, completion.generated) == ("stop", 4)


def test_a_character_of_several_tokens_comes_whole(says: Callable[[str], None]) -> None:
    says("aé…b")
    assert parts(tokens=7)[0] == ["a", "é", "…", "b"]


def test_a_long_prompt_is_read_in_steps_that_give_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "READ_AT_ONCE", 4)
    completion = Completion(model(), list(b"the swarm"), Sampling(tokens=1), (), CPU)
    found = [(completion.step(), completion.generated) for _ in range(2)]
    assert found == [("", 0), ("", 0)]
    completion.step()
    assert (completion.generated, completion.finish) == (1, "length")


def test_an_empty_prompt_begins_a_text() -> None:
    assert Completion(model(), [], Sampling(), (), CPU).prompt_tokens == 1


def test_a_prompt_may_be_as_long_as_the_model_s_positions() -> None:
    wide = TINY.model_copy(update={"positions": 64})
    loaded = LoadedModel(wide, decoder.build(wide, 0), ByteCodec(), "weights of A at step 3")
    assert Completion(loaded, [1] * 60, Sampling(tokens=1), (), CPU).prompt_tokens == 60
    with pytest.raises(ApiError, match="the prompt has 65 tokens; this model reads at most 64"):
        Completion(loaded, [1] * 65, Sampling(), (), CPU)


@pytest.mark.parametrize(("prompt", "code"), [([1] * 17, "context_length_exceeded"), ([256], "invalid_value")])
def test_a_prompt_that_the_model_cannot_read_is_refused(prompt: list[int], code: str) -> None:
    with pytest.raises(ApiError) as refused:
        Completion(model(), prompt, Sampling(), (), CPU)
    assert (refused.value.status, refused.value.code) == (400, code)
