"""Render chats and completions as text, and mark the characters that the loss counts (`data.format`).

The tokenizer's chat template turns a chat into text. The template is a Jinja file in the tokenizer's folder on this
machine. The package transformers renders it in a sandbox; a template never comes from another peer. The loss counts
the text of the assistant's turns, without the generation prompt before each turn. Some templates change the text of an
earlier turn when later turns follow; the loss does not count such a turn.

Start reading at `read` and `document`. `chat_rows` lists the supported row formats.
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
from decentral.core.plain_text import error_text
from decentral.core.strict_json import JsonFields
from decentral.data import chat_rows
from decentral.data.chat_rows import Chat, Message, PromptedText
from decentral.data.tokenizer import TOKENIZER_FILE, tried_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ranges = tuple[tuple[int, int], ...]  # each pair is a range of character indices [begin, end)
Example = str | Chat | PromptedText
"""The content of a row: a text, or a chat or completion that `document` renders as text."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the ranges of its characters that the loss counts.

    A token follows the text and ends the document. The loss counts this token if a range ends at len(text) + 1.
    """

    text: str
    learned: Ranges | None = None  # the loss counts only these characters; None means all characters


def columns(data: config.DataConfig) -> tuple[str, ...]:
    """Return the names of the columns that `data.format` reads; a row may lack some of these columns."""
    if data.format == "text":
        return (data.column,)
    named = _named_column(data)
    return chat_rows.COLUMNS[data.format] if named is None else (named, *chat_rows.COLUMNS[data.format])


def needed_columns(data: config.DataConfig) -> tuple[str, ...]:
    """Return column names for `data.format`; a row must have at least one of these columns."""
    named = _named_column(data)
    if data.format == "text" or named is not None:
        return (data.column,)
    return chat_rows.ONE_OF[data.format]


def format_of(names: Container[str]) -> str | None:
    """Return the value of `data.format` that fits rows with these columns; None if no format fits."""
    found = (form for form, needed in chat_rows.ONE_OF.items() if any(name in names for name in needed))
    return next(found, "text" if "text" in names else None)


def read(data: config.DataConfig, row: JsonFields) -> Example | None:
    """Return the content of a row in `data.format`; None if the columns that `data.format` reads are empty.

    Raises:
        ValueError: If the row has another format; the message says what to do.
    """
    if data.format == "chat":
        return chat_rows.chat(row, _named_column(data))
    if data.format == "completion":
        return chat_rows.completion(row)
    return chat_rows.text(row, data.column) if row.get(data.column) is not None else None


def document(found: Chat | PromptedText, path: str | None) -> Document | None:
    """Render a chat or completion, and return its text; None if the loss would count none of its characters.

    Args:
        found: The content of a row.
        path: Folder of the tokenizer and its chat template. May be None if `found` is a `PromptedText`.

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
    """Raised if a tokenizer's folder has no chat template."""


def digest(data: config.DataConfig, path: str, tokenizer: str) -> str:
    """Return a digest of the tokenizer and, for chats, of its chat template. Peers compare their digests.

    Args:
        data: The section `data` of the config; only `data.format` is used.
        path: Folder of the tokenizer.
        tokenizer: The digest of the tokenizer without its template.

    Raises:
        UserError: If the format is chat, and the folder has no chat template or cannot be read.
    """
    if data.format != "chat":
        return tokenizer
    content = json.dumps([tokenizer, template(path).chat_template])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=2)
def template(path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder with `transformers`. Raises UserError if the tokenizer has no chat template."""
    try:
        import transformers
    except ImportError:
        raise UserError("data.format chat needs the package transformers: pip install 'decentral[hf]'") from None
    if not Path(path).is_dir():
        raise UserError(f"--tokenizer {path} is not a folder; name the tokenizer's folder, which has its chat template")
    try:
        tried_text(Path(path) / TOKENIZER_FILE)  # a child process tries the file first, as a bad file may crash it
        found = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises errors of any type; a panic of `tokenizers` is no Exception
        raise UserError(f"--tokenizer {path} cannot be loaded ({error_text(error)})") from None
    if isinstance(found.chat_template, dict):
        found.chat_template = found.chat_template.get("default")
    if not isinstance(found.chat_template, str):
        raise NoTemplate(f"--tokenizer {path} has no chat template; put chat_template.jinja into the folder")
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
    """Return the index of the first character of assistant turn `at` in `until`; None if the turn is not found.

    `until` is the rendered chat up to the end of this turn. Usually the turn begins where the generation prompt ends.
    A template may end the generation prompt with text, such as <think>, that a finished chat does not contain. Then
    the turn begins where the prompt and `until` first differ, or at the turn's content if the content begins earlier.
    """
    content = chat.messages[at]["content"].strip()
    if not at:  # a chat that begins with this turn has no prompt before the turn, so search for the turn's text
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
    """Render the first `count` messages and return the text. Raises ValueError if the template raises an error."""
    messages: Sequence[Message] = list(chat.messages[:count])
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=chat.tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text
    except Exception as error:
        raise ValueError(f"the chat template refuses a chat ({error_text(error)})") from None
