"""The shape of a model that is named by its size, such as `125M`."""

import argparse
import math

from decentral.core import quantities
from decentral.core.config import Config, validated
from decentral.core.errors import UserError

WIDTH_STEP = 64  # each width is a multiple of this, the default number of channels of a head above width 256
MOST_DEPTH = 128
ASPECT = 64.0  # the preferred ratio of width to depth, which is also the default of `model.width`
ASPECT_WEIGHT = 0.03  # a width of twice the preferred width counts as much as a size that is off by 3%
LEAST_PARAMETERS, MOST_PARAMETERS = 1e5, 1e12
WHOLE_MODEL = "whole model"  # what a peer with all layers holds, for people
TOKENIZER_VOCABULARY = 32_768  # `model.vocabulary` of a run with a tokenizer, unless the user gives another
CONTEXT = 1024  # number of tokens in a training sequence if neither a config nor a flag sets it


def is_size(text: str) -> bool:
    """Return whether a text is a number of parameters such as 125M, and not the name of a config."""
    try:
        quantities.count(text)
    except argparse.ArgumentTypeError:
        return False
    return True


def shape_of(text: str, vocabulary: int) -> dict[str, int]:
    """Return depth and width of a model with about this many parameters, embedding and head included.

    The width is a multiple of WIDTH_STEP. The function chooses the shape that is nearest to the size and to a width of
    ASPECT times the depth.

    Args:
        text: The size, such as 125M or 1.3B.
        vocabulary: Number of tokens in the model's vocabulary.

    Raises:
        UserError: If the size is not between LEAST_PARAMETERS and MOST_PARAMETERS, or the vocabulary alone exceeds it.
    """
    size = quantities.count(text)
    if not LEAST_PARAMETERS <= size <= MOST_PARAMETERS:
        raise UserError(f"--model {text}: expected a size from 100k to 1T parameters, such as 125M or 1.3B")
    best, shape = math.inf, (1, WIDTH_STEP)
    for depth in range(1, MOST_DEPTH + 1):
        for width in _widths(size, depth, vocabulary):
            parameters = depth * 12 * width**2 + 2 * vocabulary * width
            off = abs(math.log(parameters / size)) + ASPECT_WEIGHT * abs(math.log2(width / (ASPECT * depth)))
            if off < best:
                best, shape = off, (depth, width)
    if best > 0.5:
        raise UserError(f"--model {text}: no shape has so few parameters with {vocabulary} tokens; give a larger size")
    return {"depth": shape[0], "width": shape[1]}


def _widths(size: float, depth: int, vocabulary: int) -> list[int]:
    """Return the two multiples of WIDTH_STEP around the width at which `depth` blocks give the size."""
    a, b = 12.0 * depth, 2.0 * vocabulary
    exact = (math.sqrt(b * b + 4 * a * size) - b) / (2 * a)
    below = max(1, math.floor(exact / WIDTH_STEP))
    return [WIDTH_STEP * below, WIDTH_STEP * (below + 1)]


def with_shape(run: Config, text: str, given: frozenset[str]) -> Config:
    """Return a config whose model has about the size in `text`, with CONTEXT tokens in a sequence unless it is given.

    Its micro-batch is auto unless the user has set another.

    Args:
        run: The config. Its vocabulary determines the size of the embedding and the head.
        text: The size, such as 125M.
        given: The keys below `model` that the user has set.

    Raises:
        UserError: If no shape has that size, or the user has set `model.depth` or `model.width` as well.
    """
    if given & {"depth", "width"}:
        raise UserError(f"--model {text} sets model.depth and model.width; leave one of both out")
    tree = run.model_dump(by_alias=True)
    tree["model"] |= shape_of(text, run.model.vocabulary) | ({} if "context" in given else {"context": CONTEXT})
    if "micro_batch" not in run.train.model_fields_set:
        tree["train"] |= {"micro_batch": "auto"}
    if "accumulate" not in run.train.model_fields_set:
        del tree["train"]["accumulate"]  # so that the new config does not say that the user has set it
    return validated(tree)
