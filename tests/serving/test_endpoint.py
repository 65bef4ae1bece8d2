"""The endpoint /v1 on the page's server: answers in OpenAI's form, whole and streamed, and limits on what comes in."""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.requests import ClientDisconnect, Request
from starlette.testclient import TestClient

from decentral.core.config import ModelConfig
from decentral.core.sampling import Sampling
from decentral.data import tokenizer
from decentral.data.text_codec import ByteCodec, TokenizerCodec
from decentral.engine import measure
from decentral.engine.step import Device
from decentral.model import decoder
from decentral.serving import chat_template, decoding, endpoint
from decentral.serving.endpoint import Turns
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.openai_requests import MOST_BODY_BYTES, ApiError, TextRequest, parsed
from decentral.serving.served_model import ServedModel
from decentral.view.page.server import Updates, application
from decentral.view.page.swarm_view import SwarmView
from tests.data.few_words import few_words
from tests.patient_time import LIMIT_S

CPU = Device(torch.device("cpu"), torch.float32)
TINY = ModelConfig(depth=1, width=32, heads=2, context=64)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
SOURCE = "run words-3fa2c1: weights of A at step 3"


@pytest.fixture
def served() -> ServedModel:
    found = ServedModel("words-3fa2c1", CPU)
    found.take(LoadedModel(TINY, decoder.build(TINY, 0), ByteCodec(), SOURCE))
    return found


@pytest.fixture
def client(served: ServedModel) -> TestClient:
    return client_of(served)


def client_of(served: ServedModel, host: str = "127.0.0.1") -> TestClient:
    app = application(Updates(SwarmView()), model_api=endpoint.api(served))
    return TestClient(app, base_url="http://127.0.0.1:8420", raise_server_exceptions=False, client=(host, 5))


@pytest.fixture
def chatting(served: ServedModel, tmp_path: Path) -> TestClient:
    """With a chat template."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    served.template = chat_template.of_tokenizer(str(tmp_path))
    return client_of(served)


def asked(**fields: object) -> dict[str, object]:
    return {"model": "words-3fa2c1", "prompt": "the swarm", "max_tokens": 12, "seed": 5, **fields}


def conversation(*texts: str, **fields: object) -> dict[str, object]:
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, texts, strict=False)]
    return {"model": "words-3fa2c1", "messages": messages, "max_tokens": 12, "seed": 5, **fields}


def generated(prompt: str, **values: Any) -> str:
    """What one process makes of it."""
    sampling = Sampling(**{"temperature": 1.0, "top_p": 1.0, "seed": 5, "tokens": 12, "below": 256, **values})
    decode = ByteCodec().decoder()
    for byte in prompt.encode():
        decode(byte)
    found = decoding.generate(decoder.build(TINY, 0), list(prompt.encode()), sampling, CPU)
    return "".join(decode(token) for token in found if token is not None)


def events(text: str) -> list[Any]:
    found = re.findall(r"data: (.*)\n\n", text)
    assert "".join(f"data: {one}\n\n" for one in found) == text
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def error_of(answer: Any) -> dict[str, Any]:
    assert set(answer.json()) == {"error"}
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


# Answers


def test_without_a_model_to_serve_there_is_no_endpoint() -> None:
    plain = TestClient(application(Updates(SwarmView())), base_url="http://127.0.0.1:8420")
    assert plain.get("/v1/models").status_code == 404
    assert plain.post("/v1/completions", json=asked()).status_code == 404


def test_the_model_is_listed(client: TestClient) -> None:
    (one,) = client.get("/v1/models").json()["data"]
    assert (one["id"], one["object"]) == ("words-3fa2c1", "model")


def test_a_completion_is_what_decentral_generate_makes_of_the_prompt(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=asked()).json()
    assert answer["choices"] == [
        {"text": generated("the swarm"), "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    assert (answer["object"], answer["model"], answer["system_fingerprint"]) == (
        "text_completion",
        "words-3fa2c1",
        SOURCE,
    )


def test_a_prompt_of_tokens_is_the_same(client: TestClient) -> None:
    as_text = client.post("/v1/completions", json=asked()).json()["choices"]
    assert client.post("/v1/completions", json=asked(prompt=list(b"the swarm"))).json()["choices"] == as_text


def test_a_stream_has_the_same_text_in_parts(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=asked(stream=True, stream_options={"include_usage": True}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last, usage, done = events(answer.text)
    assert len(parts) > 3
    assert "".join(part["choices"][0]["text"] for part in parts) == generated("the swarm")
    assert {part["choices"][0]["finish_reason"] for part in parts} == {None}
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 21)
    assert done == "[DONE]"
    assert len({part["id"] for part in [*parts, last, usage]}) == 1


def test_a_chat_is_written_by_the_template(chatting: TestClient) -> None:
    answer = chatting.post("/v1/chat/completions", json=conversation("hi", "hello", "how?")).json()
    expected = generated("<user>hi\n<assistant>hello\n<user>how?\n<assistant>")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert (answer["object"], answer["choices"][0]["finish_reason"]) == ("chat.completion", "length")


def test_a_chat_streams(chatting: TestClient) -> None:
    answer = chatting.post("/v1/chat/completions", json=conversation("hi", stream=True))
    first, *parts, last, done = events(answer.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["choices"][0]["delta"]["content"] for part in parts)
    assert text == generated("<user>hi\n<assistant>")
    assert last["choices"][0] == {"delta": {}, "index": 0, "logprobs": None, "finish_reason": "length"}
    assert {part["object"] for part in [first, *parts, last]} == {"chat.completion.chunk"}
    assert done == "[DONE]"


def test_seeds_decide_and_without_one_texts_differ(client: TestClient) -> None:
    def text(**fields: object) -> str:
        return str(client.post("/v1/completions", json=asked(**fields)).json()["choices"][0]["text"])

    assert text() == text() != text(seed=6)
    assert text(seed=None) != text(seed=None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_understands_the_answers(chatting: TestClient, stream: bool) -> None:
    openai = pytest.importorskip("openai", reason="needs pip install openai")
    program = openai.OpenAI(base_url="http://127.0.0.1:8420/v1", api_key="none", http_client=chatting, max_retries=0)
    fields: dict[str, Any] = {"model": program.models.list().data[0].id, "max_tokens": 12, "seed": 5}
    fields |= {"stream": stream}
    said = program.completions.create(prompt="the swarm", **fields)
    told = program.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **fields)
    if stream:
        text = "".join(chunk.choices[0].text for chunk in said)
        reply = "".join(chunk.choices[0].delta.content or "" for chunk in told)
    else:
        text, reply = said.choices[0].text, told.choices[0].message.content
        assert said.usage.total_tokens == 21
    assert text == generated("the swarm")
    assert reply == generated("<user>hi\n<assistant>")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        program.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools"):
        program.chat.completions.create(model=fields["model"], messages=[{"role": "user", "content": "x"}], tools=[])


# Errors


def test_a_model_without_a_template_serves_no_chat(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json=conversation("hi"))
    assert (answer.status_code, error_of(answer)["code"]) == (400, "no_chat_template")


def test_a_template_s_own_refusal_reaches_the_program(served: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('turns must alternate') }}")
    served.template = chat_template.of_tokenizer(str(tmp_path))
    answer = client_of(served).post("/v1/chat/completions", json=conversation("hi"))
    assert answer.status_code == 400
    assert error_of(answer)["message"].endswith("turns must alternate")


def test_before_the_first_weights_are_there_programs_are_told_to_wait(client: TestClient) -> None:
    client = client_of(ServedModel("words-3fa2c1", CPU))
    assert client.get("/v1/models").json()["data"] == []
    answer = client.post("/v1/completions", json=asked())
    assert (answer.status_code, error_of(answer)["type"]) == (503, "server_error")


def test_paths_and_methods_that_are_not_there_are_errors_in_openai_s_form(client: TestClient) -> None:
    assert client.post("/v1/embeddings", json={}).status_code == 404
    error_of(client.post("/v1/embeddings", json={}))
    answer = client.get("/v1/completions")
    assert answer.status_code == 405
    error_of(answer)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "127.0.0.1:8420"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "evil.example"}, 421),
        ({"origin": "http://127.0.0.1:8420"}, 200),
    ],
)
def test_a_page_of_another_site_gets_nothing(client: TestClient, headers: dict[str, str], status: int) -> None:
    sent = {"content-type": "application/json", **headers}
    assert client.post("/v1/completions", content=json.dumps(asked()), headers=sent).status_code == status


def test_a_body_that_is_too_long_is_not_read_to_its_end(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=asked(prompt="x" * MOST_BODY_BYTES))
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


def test_a_prompt_longer_than_the_context_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=asked(prompt="x" * 65))
    assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")


def test_a_prompt_that_the_tokenizer_cannot_encode_is_refused(served: ServedModel, tmp_path: Path) -> None:
    assert served.model is not None
    codec = TokenizerCodec(tokenizer.load(str(few_words(tmp_path))))
    served.take(replace(served.model, codec=codec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    served.template = chat_template.of_tokenizer(str(tmp_path))
    client = client_of(served)
    for path, body in (("completions", asked(prompt="the hive")), ("chat/completions", conversation("the hive"))):
        answer = client.post(f"/v1/{path}", json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")


def test_a_model_that_takes_more_than_the_memory_is_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "memory_bytes", lambda device: 1000)
    assert error_of(client.post("/v1/completions", json=asked()))["code"] == "out_of_memory"


@pytest.mark.parametrize("stream", [False, True])
def test_weights_that_are_not_finite_are_an_error(served: ServedModel, stream: bool) -> None:
    assert served.model is not None
    with torch.no_grad():
        next(served.model.layers[1].parameters()).fill_(torch.nan)
    answer = client_of(served).post("/v1/completions", json=asked(stream=stream))
    found = events(answer.text)[0]["error"] if stream else error_of(answer)
    assert "not finite" in found["message"]
    assert found["type"] == "server_error"


def test_requests_are_parsed_outside_of_the_event_loop_one_after_another(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one begins only when the first is done, and the event loop goes on meanwhile."""
    begun, go_on = list[int](), threading.Event()

    def slow(kind: type[TextRequest], body: bytes) -> TextRequest:
        begun.append(threading.get_ident())
        assert go_on.wait(LIMIT_S)
        return parsed(kind, body)

    monkeypatch.setattr(endpoint, "parsed", slow)

    async def story() -> None:
        here = endpoint.Endpoint(served, Turns())
        tasks = [asyncio.create_task(called(here.completions, asked(max_tokens=1))) for _ in range(3)]
        while not begun:
            await asyncio.sleep(0)
        assert len(begun) == 1
        go_on.set()
        await asyncio.gather(*tasks)

    run(story())
    assert len(begun) == 3
    assert threading.get_ident() not in begun


# Turns


def run(found: Any) -> Any:
    return asyncio.run(found)


def crowd(turns: Turns, callers: str) -> tuple[list[str], list[str]]:
    """Return who is answered or refused while nobody's answer ends, and then in all, if these callers ask in turn."""

    async def story() -> tuple[list[str], list[str]]:
        found, leave = list[str](), asyncio.Event()

        async def one(caller: str) -> None:
            try:
                async with turns.turn(caller):
                    found.append(caller)
                    await leave.wait()
            except ApiError as error:
                found.append(f"{caller} {error.status}")

        tasks = [asyncio.create_task(one(caller)) for caller in callers]
        for _ in callers:
            await asyncio.sleep(0)
        before = list(found)
        leave.set()
        await asyncio.gather(*tasks)
        return before, found

    return run(story())  # type: ignore[no-any-return]


def test_one_request_more_than_may_wait_is_refused_and_turns_come_free() -> None:
    turns = Turns(at_once=1, waiting=1)
    before, found = crowd(turns, "ABC")
    assert (sorted(before), found[2:], turns.present) == (["A", "C 429"], ["B"], 0)


def test_one_caller_takes_half_of_the_turns_and_of_those_that_may_wait() -> None:
    before, found = crowd(Turns(), "A" * 20 + "BC")
    assert Counter(before) == {"A": 2, "A 429": 10, "B": 1, "C": 1}
    assert Counter(found) == {"A": 10, "A 429": 10, "B": 1, "C": 1}


def test_all_networks_of_a_customer_with_ipv6_are_one_caller(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers, turn = list[str](), Turns.turn

    def noted(turns: Turns, caller: str) -> AbstractAsyncContextManager[None]:
        callers.append(caller)
        return turn(turns, caller)

    monkeypatch.setattr(Turns, "turn", noted)
    for host in ("2001:db8:1:2::3", "2001:db8:1:4::5", "192.0.2.1"):
        client_of(served, host).post("/v1/completions", json=asked(max_tokens=1))
    assert callers == ["2001:db8:1::/48"] * 2 + ["192.0.2.1"]


def test_a_busy_server_says_so_in_openai_s_form(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "Turns", lambda: Turns(at_once=0, waiting=0))
    answer = client_of(served).post("/v1/completions", json=asked())
    assert (answer.status_code, error_of(answer)["type"]) == (429, "rate_limit_error")


def test_requests_take_turns_token_by_token(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request that comes later ends before a long one that was there first."""

    async def both() -> list[str]:
        here, ended = endpoint.Endpoint(served, Turns()), []

        async def ask(name: str, tokens: int) -> None:
            await called(here.completions, asked(max_tokens=tokens))
            ended.append(name)

        long = asyncio.create_task(ask("long", 60))
        await asyncio.sleep(0)
        await asyncio.gather(long, ask("short", 3))
        return ended

    assert run(both()) == ["short", "long"]


def test_nobody_generates_for_a_program_that_has_gone(served: ServedModel) -> None:
    async def gone() -> tuple[int, int]:
        steps = list[int]()
        here = endpoint.Endpoint(served, Turns())
        here.turns.in_thread = counted(here.turns.in_thread, steps)  # type: ignore[method-assign]
        with pytest.raises(ClientDisconnect):
            await called(here.completions, asked(max_tokens=4000), leaves=True)
        return len(steps), here.turns.present

    steps, present = run(gone())
    assert 8 <= steps < 40
    assert present == 0


def test_a_stream_that_nobody_reads_any_more_frees_its_turn(served: ServedModel) -> None:
    async def gone() -> int:
        here = endpoint.Endpoint(served, Turns())
        await called(here.completions, asked(max_tokens=4000, stream=True), leaves=True)
        return here.turns.present

    assert run(gone()) == 0


def counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        calls.append(1)
        return function(*values)

    return call


async def called(function: Callable[..., Any], content: dict[str, object], leaves: bool = False) -> None:
    """Calls an endpoint as the server does. `leaves`: the program does, after some tokens."""
    body, looks = {"type": "http.request", "body": json.dumps(content).encode(), "more_body": False}, iter(range(99))

    async def receive() -> dict[str, Any]:
        look = next(looks)
        if look and not (leaves and look > 2):
            await asyncio.Event().wait()
        return {"type": "http.disconnect"} if look else body

    async def send(message: Any) -> None:
        pass

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    answer = await function(Request(scope, receive))
    if content.get("stream"):
        await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive if not leaves else _soon_gone, send)


async def _soon_gone() -> dict[str, Any]:
    for _ in range(50):
        await asyncio.sleep(0)
    return {"type": "http.disconnect"}
