"""Rows of chats and completions as text, with the stretches of it that are learned: `data.format`.

    chat        {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    completion  {"prompt": ..., "completion": ...}

A chat becomes text by the tokenizer's own chat template, a Jinja file of this peer's folder, which transformers renders
in a sandbox; a swarm never sends one. What a turn of the assistant adds to the text behind its prompt is learned.
Some templates write earlier turns otherwise once others follow: such a turn is left out of what is learned.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from decentral.core import config
from decentral.core.errors import UserError

COLUMNS = {"text": ("text",), "chat": ("messages",), "completion": ("prompt", "completion")}
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the ranges of its characters that are learned; None: all. The character behind the last one stands
    for the token that ends a document."""

    text: str
    learned: Ranges | None = None


def columns(data: config.DataConfig) -> tuple[str, ...]:
    """The columns of a row that are read."""
    given = data.column != config.DataConfig().column and data.format != "completion"
    return (data.column,) if given else COLUMNS[data.format]


def document(data: config.DataConfig, row: Sequence[Any], path: str | None) -> Document | None:
    """What a row's `columns` hold; None where nothing of it is learned. `path`: of the tokenizer.

    Raises UserError where a row is no chat or completion, or the tokenizer has no chat template.
    """
    if data.format == "text":
        found = Document(row[0])
    elif data.format == "completion":
        if not all(isinstance(one, str) for one in row):
            raise UserError(f"data.format: completion expects texts in {' and '.join(COLUMNS['completion'])}")
        text = "".join(row)
        found = Document(text, ((len(row[0]), len(text) + 1),) if row[1] else ())
    else:
        assert path is not None
        found = _chat(row[0], template(path))
    return None if found.learned == () else found


def digest(data: config.DataConfig, path: str, tokenizer: str) -> str:
    """What all peers must have alike beside the tokenizer, and that one's digest, as one."""
    if data.format != "chat":
        return tokenizer
    content = json.dumps([tokenizer, template(path).chat_template])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=2)
def template(path: str) -> Any:
    """transformers' tokenizer of this folder. Raises UserError unless it has a chat template."""
    try:
        import transformers
    except ImportError:
        raise UserError("data.format chat needs the package transformers: pip install 'decentral[hf]'") from None
    if not Path(path).is_dir():
        raise UserError(f"--tokenizer {path}: a chat template is read from a folder; name the folder")
    try:
        found = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises what it likes
        raise UserError(f"--tokenizer {path}: {' '.join(str(error).split())[:200]}") from None
    if isinstance(found.chat_template, dict):  # several by their names
        found.chat_template = found.chat_template.get("default")
    if not isinstance(found.chat_template, str):
        raise UserError(f"--tokenizer {path}: it has no chat template; put chat_template.jinja into the folder")
    return found


def _chat(messages: Any, tokenizer: Any) -> Document:
    if not isinstance(messages, list) or not all(_is_message(one) for one in messages):
        raise UserError('data.format: chat expects lists of {"role": ..., "content": ...}, as text')
    messages = [{key: value for key, value in one.items() if value is not None} for one in messages]
    text = _rendered(tokenizer, messages)
    learned = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(tokenizer, messages[:at], add_generation_prompt=True) if at else ""
        until = _rendered(tokenizer, messages[: at + 1])
        if until.startswith(before) and text.startswith(until) and len(until) > len(before):
            learned.append((len(before), len(until)))
    return Document(text, tuple(learned))


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Raises UserError where the template refuses them."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return text
    except Exception as error:  # jinja's errors, and those that a template raises itself
        why = " ".join(str(error).split())[:200]
        raise UserError(f"data.format: the chat template refuses a chat ({why})") from None
