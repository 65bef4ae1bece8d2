"""Rows of chats as people have them: each gives the text and the mask that somebody has written down by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets", reason="needs the extra hf: pip install 'decentral[hf]'")
pytest.importorskip("transformers", reason="needs the extra hf: pip install 'decentral[hf]'")
import pyarrow as pa
import tokenizers
from pyarrow import parquet

from decentral.core import config
from decentral.core.errors import UserError
from decentral.data import chat_rows, conversations
from decentral.data.documents import Documents
from decentral.data.stream import TextStream

# As Qwen 2.5's: a default system prompt, tools in the system prompt, calls as JSON. Brackets begin and end a turn.
CHATML = (
    "{%- if tools %}[system {% for t in tools %}{{ t.function.name }};{% endfor %}]"
    "{%- elif messages and messages[0].role != 'system' %}[system be kind]{% endif %}"
    "{%- for m in messages %}[{{ m.role }} {{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}]"
    "{%- endfor %}{% if add_generation_prompt %}[assistant {% endif %}"
)
# As DeepSeek R1's: it prompts for a thought, and writes none into a chat.
THINKING = (
    "{%- for m in messages %}[{{ m.role }} {{ m.content.split('</think>')[-1] }}]{% endfor %}"
    "{%- if add_generation_prompt %}[assistant <think>{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "required": ["at"]}},
}
HI, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def folder_with(folder: Path, template: str) -> Path:
    """A tokenizer of bytes with that chat template; 256 ends a text."""
    letters = {letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE({**letters, "<end>": 256}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    conversations.template.cache_clear()
    return folder


@pytest.fixture
def marked(tmp_path: Path) -> Callable[..., str]:
    """`marked(row, format, template)`: the row's text as tokens, with «» around those that are learned."""

    def read(
        row: dict[str, Any], form: str = "chat", template: str = CHATML, as_table: bool = False, **keys: str
    ) -> str:
        tokenizer = folder_with(tmp_path / "tokenizer", template)
        file = tmp_path / ("rows.parquet" if as_table else "rows.jsonl")
        if as_table:
            parquet.write_table(pa.Table.from_pylist([row]), file)
        else:
            file.write_text(json.dumps(row))
        tree = {"kind": "huggingface", "format": form, "path": str(file), "tokenizer": str(tokenizer), **keys}
        model = config.ModelConfig(depth=1, width=32, context=1024, vocabulary=257)
        stream = TextStream(config.DataConfig.model_validate(tree), model)
        packer = stream.packer()
        packer.add(list(Documents(stream.data, tokenizer=str(tokenizer)).all_pieces()))
        tokens, learned = packer.take()
        text, was = "", False
        for token, one in zip(tokens.tolist(), learned.tolist(), strict=True):
            text += "«" if one and not was else "»" if was and not one else ""
            text += stream.tokenizer.tokenizer.decode([token], skip_special_tokens=False)
            was = one
        return text

    return read


PLAIN: dict[str, Any] = {
    "messages": [HI, HELLO, {"role": "user", "content": "bye"}, {"role": "assistant", "content": "see you"}]
}
OPENAI: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be short"},
        {"role": "user", "name": "ann", "content": "hi"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "again"}]},
        {"role": "assistant", "content": "right", "weight": 1},
    ]
}
SHAREGPT: dict[str, Any] = {
    "id": "1",
    "system": "be short",
    "conversations": [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
        {"from": "human", "value": "bye"},
        {"from": "gpt", "value": "see you"},
    ],
}
ALPACA = {"instruction": "add", "input": "1 and 2", "output": "3"}
PROMPTED: dict[str, Any] = {
    "prompt": [HI, {"role": "assistant", "content": "not this"}, {"role": "user", "content": "bye"}],
    "completion": [{"role": "assistant", "content": "see you"}],
}
CALLING: dict[str, Any] = {
    "tools": [WEATHER],
    "messages": [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "x"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
        {"role": "assistant", "content": "no"},
    ],
}
ALPACA_PROMPT = chat_rows.ALPACA[1].format(instruction="add", input="1 and 2")
FORMATS = {
    "plain messages": (PLAIN, "[system be kind][user hi][assistant «hello]»[user bye][assistant «see you]»"),
    "OpenAI": (OPENAI, "[system be short][user hi][assistant wrong][user again][assistant «right]»"),
    "ShareGPT": (SHAREGPT, "[system be short][user hi][assistant «hello]»[user bye][assistant «see you]»"),
    "Alpaca": (ALPACA, "[system be kind][user add\n\n1 and 2][assistant «3]»"),
    "prompted": (PROMPTED, "[system be kind][user hi][assistant not this][user bye][assistant «see you]»"),
    "tools": (
        CALLING,
        '[system weather;][user rain?][assistant «<call>weather{"at": "x"}</call>]»[tool dry][assistant «no]»',
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_public_data_set_s_row_gives_the_mask_that_is_written_here(marked: Callable[..., str], name: str) -> None:
    row, expected = FORMATS[name]
    assert marked(row).split("<end>")[0] == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_table_gives_the_same_as_json(marked: Callable[..., str], name: str) -> None:
    row, _ = FORMATS[name]
    if name == "OpenAI":  # Parquet has one type for all contents
        again = {**OPENAI["messages"][3], "content": "again"}
        row = {"messages": [*OPENAI["messages"][:3], again, OPENAI["messages"][4]]}
    assert marked(row, as_table=True) == marked(row)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 2 =", "completion": " 3"}, "1 + 2 =« 3<end>»"),
        (ALPACA, f"{ALPACA_PROMPT}«3<end>»"),
        (PROMPTED, FORMATS["prompted"][1]),
    ],
)
def test_a_completion_s_row_gives_the_mask_that_is_written_here(
    marked: Callable[..., str], row: dict[str, Any], expected: str
) -> None:
    text = marked(row, "completion")
    assert text.startswith(expected)
    assert "«" not in text[len(expected) :]


VARIANTS = {
    "a developer's own column": ({"talk": PLAIN["messages"]}, {"column": "talk"}),
    "messages as a text of JSON": ({"messages": json.dumps(PLAIN["messages"])}, {}),
    "ShareGPT's fields under another name": ({"messages": SHAREGPT["conversations"][:4], "system": "be kind"}, {}),
    "ShareGPT's roles in OpenAI's fields": (
        {"messages": [{"role": one["from"], "content": one["value"]} for one in SHAREGPT["conversations"]]},
        {},
    ),
    "OpenAI's fields that are null beside ShareGPT's": (
        {"messages": [{**one, "role": None, "content": None} for one in SHAREGPT["conversations"]]},
        {},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_these_shapes_is_read_as_they_are(marked: Callable[..., str], name: str) -> None:
    row, keys = VARIANTS[name]
    assert marked(row, **keys) == marked(PLAIN)


def test_calls_of_tools_are_the_same_in_each_notation(marked: Callable[..., str]) -> None:
    call = {"name": "weather", "arguments": {"at": "x"}}
    shapes = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"at": "x"}'}},
        {"from": "function_call", "value": json.dumps(call)},
        {"role": "function_call", "content": json.dumps(call)},
    )
    rows = ({**CALLING, "messages": [CALLING["messages"][0], one, *CALLING["messages"][2:]]} for one in shapes)
    assert {marked(row) for row in rows} == {marked(CALLING)}
    functions = {"functions": [WEATHER["function"]], "messages": CALLING["messages"]}
    assert marked(functions) == marked({**CALLING, "tools": json.dumps([WEATHER])}) == marked(CALLING)


# Masks of templates that write more than the turns


def test_an_assistant_that_speaks_first_does_not_teach_the_system_prompt(marked: Callable[..., str]) -> None:
    row = {"messages": [HELLO, HI, {"role": "assistant", "content": "and?"}]}
    assert marked(row).startswith("[system be kind][assistant «hello]»[user hi][assistant «and?]»")


@pytest.mark.parametrize("answer", ["hello", "<thanks>", "<think>hm</think>hello"])
def test_a_template_that_prompts_for_a_thought_teaches_the_answer(marked: Callable[..., str], answer: str) -> None:
    text = marked({"messages": [HI, {"role": "assistant", "content": answer}]}, template=THINKING)
    assert text.startswith(f"[user hi][assistant «{answer.split('</think>')[-1]}]»")


def test_a_chat_longer_than_a_piece_of_text_is_one_document(marked: Callable[..., str]) -> None:
    row = {"messages": [{"role": "user", "content": "why " * 30_000}, HELLO]}
    text = marked(row)
    assert text.count("«") == 1
    assert text.count("<end>") < 1024, "the end, and what fills the last window"


# Rows that are none


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        ({"messages": "[" * 100_000}, "chat", "the messages of a chat are text; expected a list"),
        ({"messages": [HI, HELLO], "tools": "[" * 100_000}, "chat", "tools is text; expected a list"),
        ({"text": "x"}, "chat", "no column messages; it has text; set data.format=text"),
        ({"messages": []}, "text", "no column text; it has messages; set data.format=chat"),
        ({"conversations": []}, "completion", "it has conversations; set data.format=chat"),
        ({"prompt": "x", "completion": "y"}, "chat", "messages as prompt, not text: set data.format=completion"),
        ({"instruction": "x", "output": "y"}, "text", "set data.format=completion"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "completion", "expected completion or instruction"),
        ({"messages": [{"content": "x"}]}, "chat", "a message has no role"),
        ({"messages": [HI, {**HELLO, "weight": 0.5}]}, "chat", "weight 0.5; expected 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "chat", "a part of type 'image_url'"),
        ({"messages": [HI, {"role": "assistant", "tool_calls": ["x"]}]}, "chat", "a tool call is text; expected"),
    ],
)
def test_a_row_of_another_kind_is_named_with_what_to_do(
    marked: Callable[..., str], row: dict[str, Any], form: str, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        marked(row, form)
    assert "line 1 of " in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_chat_that_is_nested_too_deeply_to_be_written_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools: list[Any] = []
    for _ in range(100_000):
        tools = [tools]
    monkeypatch.setattr(conversations, "read", lambda data, row: chat_rows.Chat((HI, HELLO), (1,), tools))
    (tmp_path / "a.jsonl").write_text(json.dumps(PLAIN))
    tree = {"kind": "huggingface", "format": "chat", "path": str(tmp_path / "a.jsonl"), "tokenizer": "x"}
    with pytest.raises(UserError, match=r"line 1 of .*a\.jsonl: its values are nested too deeply"):
        list(Documents(config.DataConfig.model_validate(tree)).all_pieces())
