"""How text is generated from a model, as a user or a program asks for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the model's distribution over all tokens."""

    temperature: float = 0.8  # 0: the likeliest token, always
    top_p: float = 0.95  # the least set of likeliest tokens with this probability is drawn from
    seed: int = 0
    tokens: int = 200  # how many
    below: int | None = None  # only tokens below this: a vocabulary may have more than there are texts for
