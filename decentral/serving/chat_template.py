"""Render a conversation as one prompt, by the chat template of a Hugging Face tokenizer.

The template is in the tokenizer's folder, in chat_template.jinja or in the field `chat_template` of
tokenizer_config.json. Jinja renders it in a sandbox. Start reading at `of_tokenizer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decentral.core import foreign_file, strict_json
from decentral.core.errors import UserError
from decentral.core.plain_text import error_text
from decentral.data import tokenizer
from decentral.data.tokenizer import MAX_SETTINGS_BYTES, TOKENIZER_SETTINGS
from decentral.serving.openai_requests import ApiError, ChatMessage

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What the code of a template can raise. Jinja also raises SyntaxError when it compiles a template."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's parsed chat template and special tokens."""

    template: Template
    special: dict[str, str]

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt for the model: the text of the whole conversation, and the beginning of the model's turn.

        Raises:
            ApiError: If the template refuses the conversation, or fails on it (status 400).
        """
        turns = [{"role": one.role, "content": one.text} for one in messages]
        try:
            said = {**self.special, "messages": turns, "add_generation_prompt": True, "tools": None}
            return self.template.render(said)
        except TEMPLATE_FAILURES as error:
            text = f"the model's chat template: {error_text(error)}"
            raise ApiError(400, text, "invalid_value", "messages") from None


def of_tokenizer(path: str | None) -> ChatTemplate | None:
    """Return the chat template from a tokenizer's folder, or None if the folder has none.

    Args:
        path: The tokenizer's file or folder; None: there is no tokenizer.

    Raises:
        UserError: If the template cannot be read or parsed.
    """
    if path is None:
        return None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    named, special = tokenizer.settings(folder / TOKENIZER_SETTINGS), tokenizer.special_tokens(folder)
    try:
        own = folder / TEMPLATE_FILE
        text = foreign_file.read_text(own, MAX_SETTINGS_BYTES) if own.is_file() else _named(named.get("chat_template"))
        return ChatTemplate(_environment().from_string(text), special) if text else None
    except (OSError, SyntaxError, *TEMPLATE_FAILURES) as error:
        raise UserError(f"the chat template in {folder} is not valid: {error}; correct or remove it") from None


def _named(found: Any) -> str | None:
    """Return the template in `found`, the value of `chat_template`: a text, or a list with an entry named `default`."""
    if isinstance(found, list):
        return next((str(one["template"]) for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


class GenerationTag(Extension):
    """The tag `{% generation %}` of transformers, which marks the model's own turns for training; it writes no text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Scope:
        """Return the statements up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja sandbox with the options, filters and functions that chat templates have in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = lambda value, indent=None: strict_json.dumps(value, indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
