"""The text that answers one request, a token at a time, up to where it has to stop.

Text that may be the beginning of a stop string is held back until it is known whether it is one.
"""

from collections.abc import Sequence

from decentral.core.sampling import Sampling
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.openai_requests import ApiError
from decentral.train import decoding
from decentral.train.step import Device


class Completion:
    """What goes on from a prompt. Every method takes time, and is for the thread that generates."""

    def __init__(
        self, model: LoadedModel, prompt: Sequence[int], sampling: Sampling, stops: Sequence[str], device: Device
    ) -> None:
        """`prompt`: tokens; an empty one begins a text. Raises ApiError if the model cannot read them."""
        prompt = prompt or [model.codec.start]
        if len(prompt) > model.config.most_positions:
            longest = f"this model reads {model.config.most_positions} tokens at once, and the prompt has {len(prompt)}"
            raise ApiError(400, longest, "context_length_exceeded", "prompt")
        if max(prompt) >= model.config.vocabulary:
            raise ApiError(400, f"the prompt has token {max(prompt)}; the model knows those below "
                           f"{model.config.vocabulary}", "invalid_value", "prompt")  # fmt: skip
        self.prompt_tokens, self.generated = len(prompt), 0
        self.finish: str | None = None  # why it is over: "stop" or "length"
        self._ends, self._most, self._stops, self._held = model.codec.ends, sampling.tokens, stops, ""
        self._tokens = decoding.generate(model.layers, prompt, sampling, device)
        self._decode = model.codec.decoder()
        for token in prompt:
            self._decode(token)

    def step(self) -> str:
        """Read a part of the prompt or generate a token; return the text that is final. Set `finish` after the last.

        Raises:
            UserError: If the weights give numbers that are not finite.
        """
        token = next(self._tokens)
        if token is None:
            return ""
        self.generated += 1
        if token in self._ends:
            return self.cut("stop")
        self._held += self._decode(token)
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self._held = self._held[: min(found)]
            return self.cut("stop")
        if self.generated == self._most:
            return self.cut("length")
        return self._certain()

    def cut(self, why: str) -> str:
        """Ends it, and gives what was held back."""
        self.finish, text, self._held = why, self._held, ""
        return text

    def _certain(self) -> str:
        """What is held but for its longest end with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        ends = (self._held[-size:] for size in range(min(longest, len(self._held)), 0, -1))
        end = next((end for end in ends if any(stop.startswith(end) for stop in self._stops)), "")
        text = self._held[: len(self._held) - len(end)]
        self._held = end
        return text
