"""The options with which a user or a program asks for generated text."""

from dataclasses import dataclass

MOST_HOLDERS = 16  # text comes from the mean of at most this many peers' weights; more would change the mean little


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for generated text: how to sample each token from the model's distribution, and how many tokens."""

    temperature: float = 0.8  # at 0, the most likely token is always chosen
    top_p: float = 0.95  # nucleus sampling: sample only from the likeliest tokens, whose probabilities sum to this
    seed: int = 0
    tokens: int = 200  # at most this many tokens are generated
    below: int | None = None  # larger token ids are never sampled, since they may have no text; None allows all ids
