"""The choices of a config that bring code with them: gossip algorithms, optimizers and kinds of data.

A record holds the facts that the config, the node and the arithmetic of memory need, and loads nothing. The code of a
choice is named "module:name"; `load` imports it for whoever runs it, so that a config needs no torch. A name comes from
the strict config and must be in a table here: nothing that comes from the network chooses code.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

MOST_PARTNERS = 64  # in a window: the most that `gossip.partners` may say


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a value of `gossip.algorithm` is. A run has either exchanges, or exact gradients by comm/rounds."""

    name: str
    rule: str  # its UpdateRule, of train/update_rules.py
    machine: str = ""  # its GossipMachine, of core/algorithms.py; "": the algorithm is exact
    partners: int | None  # in a window, at most, where `gossip.partners` says no less; None: all holders, in order
    snapshot_bytes: float  # at most, for each parameter, in a published snapshot, besides a few for each section
    memory_bytes: int  # at most, for each parameter, of gossip state on the device and in published snapshots
    light: tuple[str, ...] = ()  # sections pulled in every window; all of them in every `consensus_every`-th; (): all
    blocking: bool = False  # training waits for each merge
    exact: bool = False  # all peers take one step with the gradients of all
    aligned: bool = True  # windows end at the same instants on all peers; else each peer draws its own phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What a value of `train.optimizer` does with the matrices between the model's first and last layer.

    AdamW trains everything else. An optimizer keeps one fp32 vector as long as what it trains.
    """

    name: str
    peak_rate: float  # the best of those that docs/results/convergence.md compares
    stretch: str = ""  # its StretchOptimizer, of train/optimizers.py; "": AdamW trains these matrices too
    scratch_bytes: int = 0  # while it takes a step, for each parameter of the largest matrix
    takes_all: bool = False  # merges correct the weights in full, however late they come (train/outer.py, rho)


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
            machine="decentral.comm.gossip.pull:PullExchange",
            partners=MOST_PARTNERS,
            snapshot_bytes=1.53,
            memory_bytes=24,  # phi, baseline, residual, spare, momentum in fp32, and two published snapshots
            light=("pseudo_gradient",),
        ),
        Algorithm(
            name="symmetric",
            rule="decentral.algorithms.symmetric:SymmetricRule",
            machine="decentral.comm.gossip.swap:SwapExchange",
            partners=1,
            snapshot_bytes=1.01,
            memory_bytes=16,  # two published snapshots, what was sent, the baseline and the way to the partner
            aligned=False,  # peers that ask each other at the same time only get in each other's way
        ),
        Algorithm(
            name="push_sum",
            rule="decentral.algorithms.push_sum:PushSumRule",
            machine="decentral.comm.gossip.push:PushExchange",
            partners=1,
            snapshot_bytes=1.01,
            memory_bytes=16,  # the mass, the baseline, the way to a partner's weights, and two published snapshots
            aligned=False,  # peers that push to each other at the same time only get in each other's way
        ),
        Algorithm(
            name="allreduce",
            rule="decentral.algorithms.allreduce:AllReduceRule",
            machine="decentral.comm.gossip.pull:PullExchange",
            partners=None,
            snapshot_bytes=4,
            memory_bytes=16,
            blocking=True,
        ),
        Algorithm(
            name="synchronous",
            rule="decentral.algorithms.synchronous:SynchronousRule",
            partners=None,
            snapshot_bytes=4,
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
