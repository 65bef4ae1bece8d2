"""A tokenizer's chat template: how the turns of a conversation become one text.

The template is a file of this machine's own user, beside the tokenizer, as Hugging Face has it: the field
`chat_template` of tokenizer_config.json, or chat_template.jinja. It is rendered in Jinja's sandbox.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.data import tokenizer
from decentral.data.tokenizer import TOKENIZER_SETTINGS
from decentral.serving.openai_requests import ApiError, ChatMessage

TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    template: Template
    special: dict[str, str]  # special tokens by their role

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation up to where the model speaks. Raises ApiError where the template refuses it."""
        turns = [{"role": one.role, "content": one.text} for one in messages]
        try:
            said = {**self.special, "messages": turns, "add_generation_prompt": True, "tools": None}
            return self.template.render(said)
        except (TemplateError, TypeError, ValueError) as error:
            text = f"the model's chat template: {' '.join(str(error).split())[:200]}"
            raise ApiError(400, text, "invalid_value", "messages") from None


def of_tokenizer(path: str | None) -> ChatTemplate | None:
    """The template beside a tokenizer's file, or in its folder; None: there is none. Raises UserError."""
    if path is None:
        return None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    named, special = tokenizer.settings(folder / TOKENIZER_SETTINGS), tokenizer.special_tokens(folder)
    try:
        own = folder / TEMPLATE_FILE
        text = own.read_text() if own.is_file() else _named(named.get("chat_template"))
        return ChatTemplate(_environment().from_string(text), special) if text else None
    except (OSError, ValueError, AttributeError, TemplateError) as error:
        raise UserError(f"the chat template of {folder}: {error}; mend it, or remove it") from None


def _named(found: Any) -> str | None:
    """The template itself, or that of several whose name is `default`."""
    if isinstance(found, list):
        return next((str(one["template"]) for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders templates: what it gives them, they may use here."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: strict_json.dumps(value, indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
