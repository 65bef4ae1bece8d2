"""Generate the text of one request token by token, until a stop string, an end token or the length limit.

Text that may be the beginning of a stop string is withheld until later tokens complete the stop string or rule it out.
"""

from collections.abc import Sequence

from decentral.core.sampling import Sampling
from decentral.engine.step import Device
from decentral.serving import decoding
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.openai_requests import ApiError


class Completion:
    """An answer that is being generated. Call its methods in the generation thread, since a step takes a while."""

    def __init__(
        self, model: LoadedModel, prompt: Sequence[int], sampling: Sampling, stops: Sequence[str], device: Device
    ) -> None:
        """Check the prompt and prepare to generate; nothing is computed yet.

        Args:
            model: The model to generate from.
            prompt: Tokens of the prompt. An empty prompt becomes the token that begins a text.
            sampling: How to sample tokens, and the largest number of tokens.
            stops: Strings that end the answer, and that the answer does not contain.
            device: The device on which the model computes.

        Raises:
            ApiError: If the prompt has too many tokens, or tokens outside the vocabulary (status 400).
        """
        prompt = prompt or [model.codec.start]
        if len(prompt) > model.config.most_positions:
            longest = f"the prompt has {len(prompt)} tokens; this model reads at most {model.config.most_positions}"
            raise ApiError(400, longest, "context_length_exceeded", "prompt")
        if max(prompt) >= model.config.vocabulary:
            raise ApiError(400, f"the prompt has token {max(prompt)}; this model knows tokens below "
                           f"{model.config.vocabulary}", "invalid_value", "prompt")  # fmt: skip
        self.prompt_tokens, self.generated = len(prompt), 0
        self.finish: str | None = None  # "stop" or "length" says why the text ended; None while it grows
        self._ends, self._most, self._stops, self._held = model.codec.ends, sampling.tokens, stops, ""
        self._tokens = decoding.generate(model.layers, prompt, sampling, device)
        self._decode = model.codec.decoder()
        for token in prompt:
            self._decode(token)

    def step(self) -> str:
        """Read a part of the prompt or generate one token, and return the next text of the answer; it may be "".

        The last step sets `finish`. Text that may be the beginning of a stop string is not returned yet.

        Raises:
            UserError: If the model's logits are not finite.
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
        """End the answer for the reason `why` ("stop" or "length"), and return the text that was withheld until now."""
        self.finish, text, self._held = why, self._held, ""
        return text

    def _certain(self) -> str:
        """Return the withheld text, except an end that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        ends = (self._held[-size:] for size in range(min(longest, len(self._held)), 0, -1))
        end = next((end for end in ends if any(stop.startswith(end) for stop in self._stops)), "")
        text = self._held[: len(self._held) - len(end)]
        self._held = end
        return text
