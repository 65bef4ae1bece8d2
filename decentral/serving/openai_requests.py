"""What a program may ask of `/v1`: the fields of OpenAI's requests that are computed here, each with its bound.

A field that would change the answer and is not computed here is refused rather than passed over, so that nobody takes
an answer for one that it is not. Errors have OpenAI's form: {"error": {"message", "type", "param", "code"}}.

Source: platform.openai.com/docs/api-reference, completions and chat.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decentral.core.sampling import Sampling
from decentral.core.strict_json import JsonObject

MOST_BODY_BYTES = 1 << 20
MOST_SERVED_TOKENS = 4096  # that one request may generate
USUAL_TOKENS, USUAL_CHAT_TOKENS = 16, 1024  # where it does not say how many: 16 is OpenAI's own default
MOST_MESSAGES = 1024

Text = Annotated[str, Field(max_length=MOST_BODY_BYTES)]
Name = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Tokens = Annotated[int, Field(ge=1, le=MOST_SERVED_TOKENS)]
Zero = Annotated[float, Field(ge=0, le=0)]
Nothing = Annotated[dict[str, float], Field(max_length=0)]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> JsonObject:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else None
        kind = kind or "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # nothing is put beside the text that hides its length


class TextRequest(_Strict):
    """What both kinds of request have."""

    model: Name
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None  # is not used

    # What would change the answer, and is computed for no other value.
    n: Literal[1] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Nothing | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def tokens(self) -> int:
        """How many to generate at most."""
        return self.max_tokens or USUAL_TOKENS

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, fresh_seed: int, below: int) -> Sampling:
        """`fresh_seed`: taken where the request has none. `below`: the tokens that have a text."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        seed = fresh_seed if self.seed is None else self.seed % (1 << 64)
        return Sampling(temperature, top_p, seed, self.tokens, below)


class CompletionRequest(TextRequest):
    """`POST /v1/completions`: what follows a text, or tokens."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)] | list[Annotated[int, Field(ge=0)]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def text(self) -> str | None:
        """The prompt; None: it is tokens."""
        first = self.prompt[0] if isinstance(self.prompt, list) and self.prompt else self.prompt
        return first if isinstance(first, str) else None

    @property
    def prompt_tokens(self) -> list[int]:
        return [token for token in self.prompt if isinstance(token, int)]


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)]
    name: Name | None = None  # is not used

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(_Strict):
    type: Literal["text"]


class ChatRequest(TextRequest):
    """`POST /v1/chat/completions`: the next turn of a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    response_format: TextFormat | None = None

    @property
    def tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or USUAL_CHAT_TOKENS


Asked = TypeVar("Asked", bound=TextRequest)


def parsed(kind: type[Asked], body: bytes) -> Asked:
    """The request in these bytes. Raises ApiError, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(wrong["loc"][0]) if wrong["loc"] else None
        if wrong["type"] == "extra_forbidden":
            raise ApiError(
                400, f"{field}: this server does not compute that; leave it out", "unsupported", field
            ) from None
        place = ".".join(map(str, wrong["loc"]))
        raise ApiError(400, f"{place}: {wrong['msg']}" if place else wrong["msg"], "invalid_value", field) from None
