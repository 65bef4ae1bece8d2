"""Convert rows of public chat and completion data sets to `Chat` or `PromptedText`.

    {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}      OpenAI's and Hugging Face's
    {"conversations": [{"from": "human", "value": ...}, ...], "system": ...}   ShareGPT's
    {"prompt": [message, ...], "completion": [message, ...]}                   conversational prompts
    {"prompt": "...", "completion": "..."}                                     format completion
    {"instruction": ..., "input": ..., "output": ...}                          Alpaca's, in both formats

Start reading at `chat` and `completion`. A message may have a `weight` of 0, as in OpenAI's fine-tuning files: it stays
in the text, but the loss does not count it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from decentral.core.strict_json import Json, JsonFields, JsonObject

MESSAGES = ("messages", "conversations", "conversation")
COLUMNS = {  # for each data.format, the columns of a row that are read; the format text reads data.column instead
    "chat": (*MESSAGES, "prompt", "completion", "instruction", "input", "output", "system", "tools", "functions"),
    "completion": ("prompt", "completion", "instruction", "input", "output", "system", "tools", "functions"),
}
# A row without any of these columns is refused.
ONE_OF = {"completion": ("completion", "instruction"), "chat": (*MESSAGES, "completion", "instruction")}
ROLES = {  # ShareGPT data sets name the roles of a chat otherwise than chat templates do; this maps their names
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
CALLS = "function_call"  # a tool call has this role in ShareGPT data, and this key in older OpenAI data
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:",
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:",
)
Message = JsonObject
Row = JsonFields


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat: the messages in the form that chat templates expect, and the indices of messages that the loss counts."""

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: list[Json] | None = None

    @property
    def identity(self) -> str:
        """The messages and tools as JSON with sorted keys. The hash of this text decides if the chat is held out."""
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class PromptedText:
    """A prompt, and the text that the model learns to write after it."""

    prompt: str
    completion: str

    @property
    def identity(self) -> str:
        """The prompt followed by the completion. The hash of this text decides whether the example is held out."""
        return self.prompt + self.completion


def chat(row: Row, column: str | None = None) -> Chat | None:
    """Return the chat of a row; None if the row holds no chat, for example if all its columns are null.

    Args:
        row: Values by column name.
        column: Name of the column with the messages. If None, the first column of MESSAGES that has a value is used.

    Raises:
        ValueError: If the row's values do not have the shape of a chat.
    """
    tools = _tools(row)
    names = (column,) if column is not None else MESSAGES
    found = next((row[name] for name in names if row.get(name)), None)
    if found is not None:
        return _chat(_with_system(row, _messages(found)), 0, tools)
    if isinstance(row.get("prompt"), str) and row.get("completion"):
        raise ValueError("data.format=chat expects a list of messages as prompt, not text: set data.format=completion")
    if row.get("prompt") and row.get("completion"):
        return _prompted(row, tools)
    if row.get("instruction") and row.get("output"):
        asked = "\n\n".join(text(row, name) for name in ("instruction", "input") if row.get(name))
        answer = {"role": "assistant", "content": text(row, "output")}
        return _chat(_with_system(row, [{"role": "user", "content": asked}, answer]), 0, None)
    return None


def completion(row: Row) -> Chat | PromptedText | None:
    """Return the prompt and completion of a row; None if the row holds no completion.

    If the completion is a list of messages, the result is a `Chat` in which the loss counts only the completion.

    Raises:
        ValueError: If the row's values do not have the shape of a prompt and completion.
    """
    if row.get("instruction") and row.get("output"):
        given = {"instruction": text(row, "instruction"), "input": text(row, "input") if row.get("input") else ""}
        return PromptedText(ALPACA[bool(given["input"])].format_map(given), text(row, "output"))
    if not row.get("completion"):
        return None
    if isinstance(row["completion"], list):
        return _prompted(row, _tools(row))
    return PromptedText(text(row, "prompt"), text(row, "completion"))


def _prompted(row: Row, tools: list[Json] | None) -> Chat:
    prompt = row.get("prompt")
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    before = _with_system(row, before)
    return _chat([*before, *_messages(row["completion"])], len(before), tools)


def _chat(messages: Sequence[Message], first: int, tools: list[Json] | None) -> Chat:
    """Return a chat in which the loss counts the assistant's messages from index `first` on."""
    learned = [at for at, one in enumerate(messages) if at >= first and one["role"] == "assistant" and _weighs(one)]
    bare = ({key: value for key, value in one.items() if key != "weight"} for one in messages)
    return Chat(tuple(bare), tuple(learned), tools)


def _weighs(message: Message) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"a message has the weight {weight!r}; expected 0 (not trained on) or 1")
    return bool(weight)


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    if not row.get("system") or any(one["role"] == "system" for one in messages):
        return messages
    return [{"role": "system", "content": text(row, "system")}, *messages]


def _messages(found: Json) -> list[Message]:
    found = _parsed(found)
    if not isinstance(found, list):
        raise ValueError(
            f'the messages of a chat are {kind(found)}; expected a list of {{"role": ..., "content": ...}}'
        )
    return [_message(one) for one in found]


def _message(one: Json) -> Message:
    if not isinstance(one, dict):
        raise ValueError(f'a message is {kind(one)}; expected {{"role": ..., "content": ...}}')
    made: Message = {key: value for key, value in one.items() if value is not None and key not in ("from", "value")}
    role = one.get("role") or one.get("from")
    content = one["content"] if one.get("content") is not None else one.get("value")
    if not isinstance(role, str):
        raise ValueError(
            'a message has no role: expected {"role": ..., "content": ...}, or {"from": ..., "value": ...}'
        )
    if role == CALLS:
        role, content, made["tool_calls"] = "assistant", None, _as_list(_parsed(content))
    role = ROLES.get(role, role)
    if CALLS in made:
        made["tool_calls"] = [made.pop(CALLS)]
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call) for call in _as_list(made["tool_calls"])]
    made["role"], made["content"] = role, _content(role, content, bool(made.get("tool_calls")))
    return made


def _content(role: str, content: Json, calls: bool) -> str:
    if content is None and calls:
        return ""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if isinstance(content, list) and len(parts) == len(content):
        texts = [text for part in parts if isinstance(text := part.get("text"), str)]
        if len(texts) < len(parts):
            other = next(part.get("type") for part in parts if not isinstance(part.get("text"), str))
            raise ValueError(f"a message with role {role} has a part of type {other!r}; expected text parts only")
        return "".join(texts)
    if not isinstance(content, str):
        raise ValueError(f"the content of a message with role {role} is {kind(content)}; expected text")
    return content


def _call(call: Json) -> Message:
    """Return a tool call in OpenAI's current form. Raises ValueError if the call has no name.

    Arguments that are JSON text are parsed, because chat templates serialise the arguments themselves.
    """
    inner = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        got = "has no name" if isinstance(inner, dict) else f"is {kind(inner)}"
        raise ValueError(f'a tool call {got}; expected {{"name": ..., "arguments": ...}}')
    outer = call if isinstance(call, dict) and "function" in call else {}
    return {"type": "function", **outer, "function": {**inner, "arguments": _parsed(inner.get("arguments"))}}


def _tools(row: Row) -> list[Json] | None:
    """Return the tool definitions in the column `tools` or OpenAI's older `functions`; None if both are empty."""
    tools, functions = _parsed(row.get("tools")), _parsed(row.get("functions"))
    if not tools and functions:
        tools = [{"type": "function", "function": one} for one in _as_list(functions)]
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools is {kind(tools)}; expected a list of tool definitions")
    return tools


def _parsed(value: Json) -> Json:
    """Parse a text that contains a JSON list or object, and return the result. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            found: Json = json.loads(value)
            return found
        except (ValueError, RecursionError):  # json raises RecursionError if brackets are nested too deeply
            return value
    return value


def text(row: Row, name: str) -> str:
    """Return a column's text. Raises ValueError if its value is not text."""
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {kind(value)}; expected text")
    return value


def _as_list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def kind(value: Json) -> str:
    """Return a description of a JSON value for an error message, such as "a list" or "a number (3)"."""
    match value:
        case None:
            return "null"
        case bool():
            return f"a truth value ({value})"
        case int() | float():
            return f"a number ({value})"
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"
