"""What a peer's checkpoint has, and how the peer goes on from it. How the file is written is in train/checkpoint.py."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from decentral.core.errors import UserError
from decentral.train import checkpoint
from decentral.train.counters import Counters
from decentral.train.span import Span


def save(folder: Path, span: Span, counters: Counters) -> int:
    """Writes the folder's checkpoint; gives its size in bytes. Raises OSError and leaves the old one."""
    facts = {
        "run": span.run.digest(),
        "fragments": [asdict(fragment) for fragment in span.fragments],
        "own_steps": counters.own_steps,
        "lr_step": counters.lr_step,
        "inner_steps": span.inner.steps,
        "fragment_steps": [live.steps for live in span.inner.lives],
        "micro_batches": counters.micro_batches,
        "tokens": counters.tokens,
        "window": span.gossip.windows(),
        "versions": {index: version.hex() for index, version in counters.versions.items()},
    }
    return checkpoint.write(folder, span.gossip.tensors(), facts)


def resume(folder: Path, span: Span, counters: Counters) -> bool:
    """Goes on from the folder's checkpoint, if there is one. Raises UserError if it is of another run or damaged."""
    found = checkpoint.read(folder)
    if found is None:
        return False
    tensors, facts = found
    if facts["run"] != span.run.digest():
        raise UserError(f"{folder} holds a checkpoint of another run; use another --state-dir")
    try:
        _load(tensors, facts, span, counters)
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} holds a checkpoint of another model ({error})") from None
    return True


def _load(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], span: Span, counters: Counters) -> None:
    span.gossip.load(tensors, facts["window"], facts["inner_steps"])
    for live, steps in zip(span.inner.lives, facts.get("fragment_steps", ()), strict=False):
        live.steps = steps
    counters.own_steps, counters.lr_step = facts["own_steps"], facts["lr_step"]
    counters.micro_batches, counters.tokens = facts["micro_batches"], facts["tokens"]
    counters.versions = {int(index): bytes.fromhex(text) for index, text in facts.get("versions", {}).items()}
