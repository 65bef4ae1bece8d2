"""The JSON of answers in OpenAI's form: whole ones, and the chunks of a stream.

`system_fingerprint` says whose weights they were and at which step: the same seed gives the same text of the same
weights only.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from decentral.core import strict_json
from decentral.core.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class ApiReply:
    """What is the same in all chunks of an answer."""

    model: str
    source: str  # of the weights
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def whole(self, text: str, finish: str, usage: dict[str, int]) -> str:
        return self._json(self.kind, [{**self.choice(text), **_ends(finish)}], usage=usage)

    def part(self, text: str, finish: str | None = None) -> str:
        return self._json(self.chunk_kind, [{**self.delta(text), **_ends(finish)}])

    def usage_part(self, usage: dict[str, int]) -> str:
        """The chunk after the text, where numbers of tokens are wanted."""
        return self._json(self.chunk_kind, [], usage=usage)

    def opening(self) -> str | None:
        """The chunk before the text; None: there is none."""
        return None

    def choice(self, text: str) -> JsonObject:
        raise NotImplementedError

    def delta(self, text: str) -> JsonObject:
        raise NotImplementedError

    def _json(self, kind: str, choices: list[JsonObject], **more: Any) -> str:
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return strict_json.dumps({**head, "system_fingerprint": self.source, "choices": choices, **more})


def _ends(finish: str | None) -> JsonObject:
    return {"index": 0, "logprobs": None, "finish_reason": finish}


class CompletionReply(ApiReply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, text: str) -> JsonObject:
        return {"text": text}

    def delta(self, text: str) -> JsonObject:
        return {"text": text}


class ChatReply(ApiReply):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self) -> str:
        return self._json(self.chunk_kind, [{"delta": {"role": "assistant", "content": ""}, **_ends(None)}])

    def choice(self, text: str) -> JsonObject:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> JsonObject:
        return {"delta": {"content": text} if text else {}}
