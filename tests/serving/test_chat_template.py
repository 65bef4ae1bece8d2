"""Chat templates: found where Hugging Face puts them, rendered as transformers does, in a sandbox."""

import json
from pathlib import Path

import pytest

from decentral.core.errors import UserError
from decentral.serving import chat_template
from decentral.serving.openai_requests import ApiError, ChatMessage

QWEN = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
TRAINED = (
    "{% set who = 'user' %}{% for m in messages %}{% generation %}{% set who = m.role %}{{ who }}: {{ m.content }}\n"
    "{% endgeneration %}{{ who }}{% endfor %}"
)  # as templates mark the model's turns for training
HELLO = [ChatMessage(role="system", content="be kind"), ChatMessage(role="user", content="hi")]
SAID = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def settings(folder: Path, **fields: object) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, **fields}))
    return str(folder)


def rendered(path: str) -> str:
    template = chat_template.of_tokenizer(path)
    assert template is not None
    return template.render(HELLO)


@pytest.mark.parametrize("found", [QWEN, [{"name": "tools", "template": "x"}, {"name": "default", "template": QWEN}]])
def test_the_template_of_the_settings_writes_the_turns(tmp_path: Path, found: object) -> None:
    assert rendered(settings(tmp_path, chat_template=found)) == SAID


def test_a_file_of_its_own_counts_before_the_settings(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    assert rendered(settings(tmp_path, chat_template="other")) == SAID


def test_a_tokenizer_s_file_names_its_folder(tmp_path: Path) -> None:
    settings(tmp_path, chat_template=QWEN)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert rendered(str(tmp_path / "tokenizer.json")) == SAID


def test_special_tokens_may_stand_in_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert rendered(settings(tmp_path, chat_template="{{ bos_token }}" + QWEN)) == "<s>" + SAID


@pytest.mark.parametrize("template", [QWEN, TRAINED])
def test_transformers_writes_the_same(tmp_path: Path, template: str) -> None:

    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs pip install 'decentral[hf]'")
    turns = [{"role": one.role, "content": one.text} for one in HELLO]
    (theirs,), _ = utils.render_jinja_template(
        [turns], chat_template=template, add_generation_prompt=True, eos_token="<|im_end|>"
    )
    assert rendered(settings(tmp_path, chat_template=template)) == theirs


def test_the_tag_that_transformers_adds_writes_what_is_in_it(tmp_path: Path) -> None:
    assert rendered(settings(tmp_path, chat_template=TRAINED)) == "system: be kind\nuseruser: hi\nuser"


def test_there_may_be_none(tmp_path: Path) -> None:
    assert chat_template.of_tokenizer(None) is None
    assert chat_template.of_tokenizer(settings(tmp_path)) is None


@pytest.mark.parametrize(
    "text", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}"]
)
def test_a_template_does_not_leave_its_sandbox(tmp_path: Path, text: str) -> None:
    with pytest.raises(ApiError, match="unsafe"):
        rendered(settings(tmp_path, chat_template=text))


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ messages[0].content % 5 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_a_template_that_fails_refuses_the_conversation(tmp_path: Path, text: str) -> None:
    with pytest.raises(ApiError, match="chat template"):
        rendered(settings(tmp_path, chat_template=text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", r"tokenizer_config\.json cannot be read"),
        ('{"chat_template": "{% for %}"}', "the chat template in"),
        ('{"chat_template": "{% break %}"}', "the chat template in"),
        ('{"chat_template": "{% generation %}"}', "the chat template in"),
        ("[1]", r"tokenizer_config\.json must be a JSON object; it is a list"),
    ],
)
def test_settings_that_cannot_be_read_are_the_user_s_to_mend(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=said):
        chat_template.of_tokenizer(str(tmp_path))
