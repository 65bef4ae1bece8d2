"""Render chats and completions as text, and mark the characters that the loss counts (`data.format`).

A chat becomes text by the tokenizer's own chat template, a Jinja file of this peer's folder, which transformers renders
in a sandbox; a swarm never sends one. The loss counts the text that a turn of the assistant adds after its prompt.
Some templates rewrite earlier turns once later ones follow; the loss leaves such turns out.

data/chat_rows.py has the shapes of rows that are read.
"""

import hashlib
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonFields
from decentral.data import chat_rows
from decentral.data.chat_rows import Chat, Message, PromptedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ranges = tuple[tuple[int, int], ...]
Example = str | Chat | PromptedText
"""What a row has: a text, or what becomes one."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the ranges of its characters that are learned; None: all. The character behind the last one stands
    for the token that ends a document."""

    text: str
    learned: Ranges | None = None


def columns(data: config.DataConfig) -> tuple[str, ...]:
    """Return the columns that are read where a row has them."""
    if data.format == "text":
        return (data.column,)
    named = _named_column(data)
    return chat_rows.COLUMNS[data.format] if named is None else (named, *chat_rows.COLUMNS[data.format])


def needed_columns(data: config.DataConfig) -> tuple[str, ...]:
    """Return the columns of which a row has to have one."""
    named = _named_column(data)
    if data.format == "text" or named is not None:
        return (data.column,)
    return chat_rows.ONE_OF[data.format]


def format_of(names: Container[str]) -> str | None:
    """Return the format of rows that have these columns; None if it is not known."""
    found = (form for form, needed in chat_rows.ONE_OF.items() if any(name in names for name in needed))
    return next(found, "text" if "text" in names else None)


def read(data: config.DataConfig, row: JsonFields) -> Example | None:
    """Parse a row as `data.format` says; None if its columns are empty.

    Raises:
        ValueError: If the row has another format, with what to do.
    """
    if data.format == "chat":
        return chat_rows.chat(row, _named_column(data))
    if data.format == "completion":
        return chat_rows.completion(row)
    return chat_rows.text(row, data.column) if row.get(data.column) is not None else None


def document(found: Chat | PromptedText, path: str | None) -> Document | None:
    """Return the text of a chat or completion; None if nothing of it is learned.

    Args:
        found: What was read of a row.
        path: Of the tokenizer, whose folder has the chat template.

    Raises:
        UserError: If the tokenizer has no chat template.
        ValueError: If the template refuses the chat.
    """
    if isinstance(found, PromptedText):
        text = found.prompt + found.completion
        return Document(text, ((len(found.prompt), len(text) + 1),)) if found.completion else None
    assert path is not None
    return _rendered(found, template(path)) if found.learned else None


def _named_column(data: config.DataConfig) -> str | None:
    return data.column if data.column != config.DataConfig().column else None


class NoTemplate(UserError):
    """A tokenizer's folder has no chat template."""


def digest(data: config.DataConfig, path: str, tokenizer: str) -> str:
    """Return a digest of the tokenizer, and for chats of its template too: all peers must have it alike."""
    if data.format != "chat":
        return tokenizer
    content = json.dumps([tokenizer, template(path).chat_template])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=2)
def template(path: str) -> "PreTrainedTokenizerBase":
    """Return transformers' tokenizer of this folder. Raises UserError unless it has a chat template."""
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
        raise NoTemplate(f"--tokenizer {path}: it has no chat template; put chat_template.jinja into the folder")
    return found


def _rendered(chat: Chat, tokenizer: "PreTrainedTokenizerBase") -> Document | None:
    messages = chat.messages
    text = _text(tokenizer, chat, len(messages))
    ranges = []
    for at in chat.learned:
        until = text if at + 1 == len(messages) else _text(tokenizer, chat, at + 1)
        if text.startswith(until) and (begin := _turn_begins(tokenizer, chat, at, until)) is not None:
            ranges.append((begin, len(until)))
    return Document(text, tuple(ranges)) if ranges else None


def _turn_begins(tokenizer: "PreTrainedTokenizerBase", chat: Chat, at: int, until: str) -> int | None:
    """Return the character at which the loss of assistant turn `at` starts; None if it cannot be located.

    A template may end its prompt with text that it omits from finished chats, such as <think>. Then the loss starts
    where the two texts first differ, or at the turn's content if that begins with the same characters.
    """
    content = chat.messages[at]["content"].strip()
    if not at:  # what stands before is the template's own, such as a default system prompt
        place = until.rfind(content) if content else -1
        return place if place >= 0 else None
    prompt = _text(tokenizer, chat, at, add_generation_prompt=True)
    if until.startswith(prompt):
        return len(prompt) if len(prompt) < len(until) else None
    before = _text(tokenizer, chat, at)
    place = until.find(content, len(before)) if content else -1
    parting = next((at for at, (one, other) in enumerate(zip(prompt, until, strict=False)) if one != other), len(until))
    begin = min(parting, place) if place >= 0 else parting
    return begin if begin > len(before) else None


def _text(tokenizer: Any, chat: Chat, count: int, add_generation_prompt: bool = False) -> str:
    """Render the first `count` messages. Raises ValueError if the template refuses them."""
    messages: Sequence[Message] = list(chat.messages[:count])
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=chat.tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text
    except Exception as error:  # jinja's errors, and those that a template raises itself
        raise ValueError(f"the chat template refuses a chat ({' '.join(str(error).split())[:200]})") from None
