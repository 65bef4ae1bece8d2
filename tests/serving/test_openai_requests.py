"""Requests: what OpenAI's clients send is understood, and what is not computed is refused by its name."""

import json

import pytest
from pydantic import ValidationError

from decentral.serving.openai_requests import MOST_SERVED_TOKENS, ApiError, ChatRequest, CompletionRequest, parsed


def completion(**fields: object) -> CompletionRequest:
    return parsed(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def chat(**fields: object) -> ChatRequest:
    return parsed(
        ChatRequest, json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    )


def test_what_is_not_said_is_as_with_openai() -> None:
    sampling = completion().sampling(9, 256)
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.tokens) == (1.0, 1.0, 9, 16)


def test_a_prompt_is_a_text_or_one_in_a_list_or_tokens() -> None:
    assert completion(prompt="ab").text == "ab"
    assert completion(prompt=["ab"]).text == "ab"
    assert completion(prompt=[1, 2]).text is None
    assert completion(prompt=[1, 2]).prompt_tokens == [1, 2]
    assert completion(prompt="").text == ""


def test_the_newer_name_of_a_chat_s_limit_counts() -> None:
    assert chat(max_tokens=5).tokens == 5
    assert chat(max_completion_tokens=7).tokens == 7


def test_a_message_may_come_in_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"


def test_values_that_change_nothing_are_taken() -> None:
    completion(
        n=1, best_of=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=None, echo=False, user="u"
    )
    chat(logprobs=False, response_format={"type": "text"}, temperature=2, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"logprobs": 3}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": []}, "tools"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": MOST_SERVED_TOKENS + 1}, "max_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"model": None}, "model"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "m"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": 1e999}',
        b'{"model": "m", "prompt": ' + b"[" * 10_000,
    ],
)
def test_bytes_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(CompletionRequest, body)
    assert refused.value.status == 400
    assert len(refused.value.message) < 1000


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(ApiError, match="messages"):
        chat(messages=[])
    with pytest.raises(ApiError, match="messages"):
        chat(messages=[{"role": "tool", "content": "x"}])


def body(field: str, element: str, count: int) -> bytes:
    """A request whose field is a list of the same element."""
    return f'{{"model": "m", "{field}": [{", ".join([element] * count)}]}}'.encode()


@pytest.mark.parametrize("element", ["-1", "{}", "[]", "1"])
def test_more_values_than_a_request_may_have_are_refused_before_they_are_checked(element: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(CompletionRequest, body("prompt", element, 340_000))
    assert (refused.value.status, refused.value.code) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("kind", "field", "element"),
    [
        (CompletionRequest, "prompt", "-1"),
        (CompletionRequest, "prompt", "{}"),
        (ChatRequest, "messages", '{"a": 0, "b": 0}'),
        (ChatRequest, "messages", '{"role": "user", "content": [{}, {}, {}, {}, {}]}'),
    ],
)
def test_a_thousand_wrong_elements_are_not_described_one_by_one(
    kind: type[CompletionRequest | ChatRequest], field: str, element: str
) -> None:
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate_json(body(field, element, 1000))
    assert wrong.value.error_count() <= 5


def test_commas_in_a_text_are_no_values() -> None:
    text = '",\\",' * 20_000
    assert completion(prompt=text).text == text
