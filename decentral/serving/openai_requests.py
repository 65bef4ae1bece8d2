"""Parse requests to `/v1`: the fields of OpenAI's API that this server supports, each with its bounds.

A request is refused if it has an unsupported field that would change the answer; otherwise a client would believe that
the answer takes the field into account. Errors have OpenAI's form: {"error": {"message", "type", "param", "code"}}.
Start reading at `parsed`.

Source: platform.openai.com/docs/api-reference, completions and chat.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decentral.core.sampling import Sampling
from decentral.core.strict_json import JsonObject

MOST_BODY_BYTES = 1 << 20
MOST_SERVED_TOKENS = 4096
USUAL_TOKENS, USUAL_CHAT_TOKENS = 16, 1024  # tokens to generate if a request sets no limit; OpenAI's default is 16
MOST_VALUES = 1 << 15  # a request with more JSON values and keys is refused, so that parsing takes at most 0.1 s
MOST_MESSAGES = 1024  # a conversation has at most this many messages, and a message this many parts

Text = Annotated[str, Field(max_length=MOST_BODY_BYTES)]
Name = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Tokens = Annotated[int, Field(ge=1, le=MOST_SERVED_TOKENS)]
Zero = Annotated[float, Field(ge=0, le=0)]
_FIRST_ERROR = Field(fail_fast=True)  # an error describes only the first wrong element of a list
Nothing = Annotated[dict[str, float], Field(max_length=0)]


class ApiError(Exception):
    """An error that is sent to the client as the answer, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        """Set the error's status and texts.

        Args:
            status: HTTP status.
            message: A text for people: what is wrong, and what to do.
            code: A word for programs, such as "model_not_found".
            param: The request's field that is wrong.
        """
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> JsonObject:
        """Return the error in OpenAI's JSON form."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else None
        kind = kind or "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """The request field `stream_options`: what a stream contains besides the text."""

    include_usage: bool = False  # whether the stream ends with a chunk that has the token counts
    include_obfuscation: bool | None = None  # accepted and ignored: no chunk is padded to hide its length


class TextRequest(_Strict):
    """The fields that completion and chat requests share."""

    model: Name
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None

    # Fields that are not supported: only values that do not change the answer are accepted.
    n: Literal[1] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Nothing | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the answer; () if the request has none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def tokens(self) -> int:
        """The largest number of tokens to generate."""
        return self.max_tokens or USUAL_TOKENS

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, fresh_seed: int, below: int) -> Sampling:
        """Return the settings with which to sample the answer's tokens.

        Args:
            fresh_seed: The seed to use if the request has none.
            below: Sample only tokens whose number is below this; the model's other tokens have no text.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        seed = fresh_seed if self.seed is None else self.seed % (1 << 64)
        return Sampling(temperature=temperature, top_p=top_p, seed=seed, tokens=self.tokens, below=below)


class CompletionRequest(TextRequest):
    """A request to `POST /v1/completions`: continue a text, or tokens."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=1)]
        | Annotated[list[Annotated[int, Field(ge=0)]], _FIRST_ERROR]
    )
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def text(self) -> str | None:
        """The prompt as text; None if the prompt is given as tokens."""
        first = self.prompt[0] if isinstance(self.prompt, list) and self.prompt else self.prompt
        return first if isinstance(first, str) else None

    @property
    def prompt_tokens(self) -> list[int]:
        """The prompt's tokens; [] if the prompt is given as text."""
        return [token for token in self.prompt if isinstance(token, int)]


class TextPart(_Strict):
    """One part of a message's content; only text is supported."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES), _FIRST_ERROR]
    name: Name | None = None

    @property
    def text(self) -> str:
        """The text of the message; the texts of several parts are joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(_Strict):
    """The field `response_format`; only text is supported."""

    type: Literal["text"]


class ChatRequest(TextRequest):
    """A request to `POST /v1/chat/completions`: write the next turn of a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES), _FIRST_ERROR]
    max_completion_tokens: Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    response_format: TextFormat | None = None

    @property
    def tokens(self) -> int:
        """The largest number of tokens to generate."""
        return self.max_completion_tokens or self.max_tokens or USUAL_CHAT_TOKENS


Asked = TypeVar("Asked", bound=TextRequest)


def parsed(kind: type[Asked], body: bytes) -> Asked:
    """Parse and check the JSON body of a request, and return the request.

    Raises:
        ApiError: If the body is not JSON or a field is not valid (status 400); the error names the first such field.
            Also if the body has more than MOST_VALUES values (status 413).
    """
    if _values(body) > MOST_VALUES:
        raise ApiError(413, f"a request may have at most {MOST_VALUES} values, such as tokens", "request_too_large")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(wrong["loc"][0]) if wrong["loc"] else None
        if wrong["type"] == "extra_forbidden":
            raise ApiError(
                400, f"{field}: this server does not support it; leave it out", "unsupported", field
            ) from None
        place = ".".join(map(str, wrong["loc"]))
        raise ApiError(400, f"{place}: {wrong['msg']}" if place else wrong["msg"], "invalid_value", field) from None


def _values(body: bytes) -> int:
    """Return about how many values and keys a JSON text has: its commas, colons and brackets outside of strings."""
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(without_escapes.split(b'"')[::2])
    return sum(map(outside.count, (b",", b":", b"[", b"{")))
