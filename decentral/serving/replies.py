"""Write answers as JSON in OpenAI's form: whole answers, and the chunks of a stream.

The field `system_fingerprint` names the origin and the step of the weights. A request with the same seed gives the same
text only if the weights are the same.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from decentral.core import strict_json
from decentral.core.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class ApiReply:
    """The writer of one answer as JSON, with the fields that all chunks share. Subclasses write the text itself."""

    model: str
    source: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str]  # the JSON field `object` of a whole answer
    chunk_kind: ClassVar[str]  # the JSON field `object` of a chunk of a stream
    prefix: ClassVar[str]  # the id of an answer begins with this

    def whole(self, text: str, finish: str, usage: dict[str, int]) -> str:
        """Return the JSON of an answer that is sent in one piece, not as a stream of chunks.

        Args:
            text: The generated text.
            finish: The field `finish_reason`: "stop" or "length".
            usage: The field `usage`: numbers of tokens by name.
        """
        return self._json(self.kind, [{**self.choice(text), **_ends(finish)}], usage=usage)

    def part(self, text: str, finish: str | None = None) -> str:
        """Return a chunk with the next piece of text. `finish`: the finish reason, only in the last chunk of text."""
        return self._json(self.chunk_kind, [{**self.delta(text), **_ends(finish)}])

    def usage_part(self, usage: dict[str, int]) -> str:
        """Return the chunk with the token counts, which follows the last chunk of text."""
        return self._json(self.chunk_kind, [], usage=usage)

    def opening(self) -> str | None:
        """Return the chunk that comes before the text, or None if this kind of answer has no such chunk."""
        return None

    def choice(self, text: str) -> JsonObject:
        """Return the JSON field that has the text in a whole answer. Subclasses implement this."""
        raise NotImplementedError

    def delta(self, text: str) -> JsonObject:
        """Return the JSON field that has a piece of text in a chunk. Subclasses implement this."""
        raise NotImplementedError

    def _json(self, kind: str, choices: list[JsonObject], **more: Any) -> str:
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return strict_json.dumps({**head, "system_fingerprint": self.source, "choices": choices, **more})


def _ends(finish: str | None) -> JsonObject:
    return {"index": 0, "logprobs": None, "finish_reason": finish}


class CompletionReply(ApiReply):
    """The writer of an answer to a completion request."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, text: str) -> JsonObject:
        """Return the text as the field `text` of a whole answer."""
        return {"text": text}

    def delta(self, text: str) -> JsonObject:
        """Return a piece of text as the field `text` of a chunk."""
        return {"text": text}


class ChatReply(ApiReply):
    """The writer of an answer to a chat request."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self) -> str:
        """Return the first chunk, which says that the role of the message is "assistant"."""
        return self._json(self.chunk_kind, [{"delta": {"role": "assistant", "content": ""}, **_ends(None)}])

    def choice(self, text: str) -> JsonObject:
        """Return the text as the field `message` of a whole answer."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> JsonObject:
        """Return a piece of text as the field `delta` of a chunk; an empty piece gives an empty `delta`."""
        return {"delta": {"content": text} if text else {}}
