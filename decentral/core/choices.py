"""The choices of a config that bring code with them: gossip algorithms, optimizers and kinds of data.

A record holds the facts that the config, the node and the arithmetic of memory need, and loads nothing. The code of a
choice is named "module:name"; `load` imports it for whoever runs it, so that a config needs no torch. A name comes from
the strict config and must be in a table here: nothing that comes from the network chooses code.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a value of `gossip.algorithm` is. A run has either exchanges, or exact gradients by comm/rounds."""

    name: str
    rule: str  # its UpdateRule, of train/update_rules.py
    memory_bytes: int  # at most, for each parameter, of gossip state on the device and in published snapshots
    light: tuple[str, ...] = ()  # sections pulled in every window; the others now and then; (): all
    blocking: bool = False  # every window is exchanged with all holders, and training waits for its merge
    exact: bool = False  # all peers take one step with the gradients of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What a value of `train.optimizer` does with the matrices between the model's first and last layer.

    AdamW trains everything else. An optimizer keeps one fp32 vector as long as what it trains.
    """

    name: str
    peak_rate: float  # the best of those that docs/results/convergence.md compares
    stretch: str = ""  # its StretchOptimizer, of train/optimizers.py; "": AdamW trains these matrices too
    scratch_bytes: int = 0  # while it takes a step, for each parameter of the largest matrix
    takes_all: bool = False  # merges correct weights in full, however late they come (train/outer_kernels.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """What a value of `data.kind` needs from the user of a peer, and gives."""

    name: str
    opens: str  # (DataConfig, ModelConfig) -> TrainingData, of train/data_source.py
    needs_path: bool = True
    needs_tokenizer: bool = False
    is_bytes: bool = False  # a token is a byte
    has_formats: bool = False  # `data.format` says what a row is
    may_be_on_hub: bool = False  # data.path may be the name of a data set


ALGORITHMS = {
    one.name: one
    for one in (
        Algorithm(
            name="pull",
            rule="decentral.algorithms.pull:PullRule",
            memory_bytes=24,  # four vectors in fp32, two published snapshots, and answers made of them
            light=("pseudo_gradient",),
        ),
        Algorithm(
            name="allreduce",
            rule="decentral.algorithms.allreduce:AllReduceRule",
            memory_bytes=16,
            blocking=True,
        ),
        Algorithm(
            name="synchronous",
            rule="decentral.algorithms.synchronous:SynchronousRule",
            memory_bytes=24,  # of three holders the gradient sums of two rounds, in fp32
            exact=True,
        ),
    )
}

OPTIMIZERS = {
    one.name: one
    for one in (
        Optimizer(name="adamw", peak_rate=4e-3),
        Optimizer(
            name="muon",
            peak_rate=8e-3,
            stretch="decentral.train.muon:Muon",
            scratch_bytes=24,  # its iterations' matrices
            takes_all=True,
        ),
    )
}

DATA_KINDS = {
    one.name: one
    for one in (
        DataKind(name="python-stdlib", opens="decentral.train.data:corpus", needs_path=False, is_bytes=True),
        DataKind(name="text", opens="decentral.train.data:corpus", is_bytes=True),
        DataKind(name="tokens", opens="decentral.train.data:corpus"),
        DataKind(
            name="huggingface",
            opens="decentral.train.text_stream:TextStream",
            needs_tokenizer=True,
            has_formats=True,
            may_be_on_hub=True,
        ),
    )
}


@cache
def load(code: str) -> Any:
    """Return what a record names as "module:name"; the module is imported."""
    module, name = code.split(":")
    return getattr(import_module(module), name)
