"""Tables of the gossip algorithms, optimizers, wires, kinds of data and types of files that a config can choose.

Each record describes one algorithm, optimizer or kind of data. The record names the code that implements it as
"module:name", and `load` imports that code later, so that reading a config does not load torch. A config can choose
only names from these tables, so no text from the network selects code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from decentral.core.fragments import LARGE_ELEMENTS

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Properties of one value of `gossip.algorithm`: its code, its memory, and how peers exchange updates."""

    name: str
    rule: str  # "module:name" of the UpdateRule that implements the algorithm (comm/gossip/update_rules.py)
    memory_bytes: int  # gossip state and published snapshots together take at most this many bytes per parameter
    # `memory_bytes` of a fragment with at least LARGE_ELEMENTS parameters, and of such a fragment whose merges are all
    # applied in full (`Optimizer.takes_all`); 0: `memory_bytes`
    large_memory_bytes: int = 0
    full_merge_memory_bytes: int = 0
    blocking: bool = False  # whether training pauses in each window until this peer has merged with all other peers
    synchronous: bool = False  # whether all peers take each step together, with all peers' gradients (comm/rounds)
    # "module:name" of the FragmentGossip of which each device of a peer owns some fragments (engine/owned_rules.py).
    # Without such a class, the devices cannot divide the model.
    sharded: str = ""
    # Whether one hostile partner can change the weights only a little (comm/gossip/trust.py).
    limits_partners: bool = False
    is_estimated: bool = False  # whether decentral.estimate can predict its traffic (commands/estimates/traffic.py)

    def state_bytes(self, parameters: int, full_merges: bool) -> int:
        """Return the most bytes that gossip state and snapshots take in a fragment with this many parameters."""
        large = self.full_merge_memory_bytes if full_merges else self.large_memory_bytes
        return parameters * (large if large and parameters >= LARGE_ELEMENTS else self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Properties of one value of `train.optimizer`.

    The optimizer trains the matrices between the model's first and last layer; AdamW trains all other parameters. The
    state of an optimizer other than AdamW is one fp32 number for each parameter that it trains.
    """

    name: str
    peak_rate: float  # the best of the learning rates that docs/results/convergence.md compares
    stretch: str = ""  # "module:name" of the class that trains the inner matrices (engine/optimizers.py); "": AdamW
    scratch_bytes: int = 0  # temporary memory of an optimizer step, in bytes per parameter of the largest matrix
    flops: str = ""  # "module:name" of a function from a matrix's sides to the FLOPs of a step; "": too few to count
    # "module:name" of the class that takes the step of `stretch` on parts of matrices, one on each device of a peer
    # (engine/sharded.py). Without such a class, the devices cannot divide the model.
    sharded: str = ""
    # Whether a gossip merge that comes some steps after its window closed is applied in full. If not, the merge is
    # scaled down (outer_kernels.rho_of).
    takes_all: bool = False
    # Whether a CPU that trains a large model frees gradients between steps, because the new memory pages cost little
    # of a step.
    frees_gradients: bool = False

    @property
    def divides(self) -> bool:
        """Return whether several devices of one peer can divide the model: AdamW needs no code for that."""
        return not self.stretch or bool(self.sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """Properties of one value of `data.kind`: the code that opens the data, and the config keys that are required."""

    name: str
    opens: str  # "module:name" of a function (DataConfig, ModelConfig) -> TrainingData (data/corpora.py)
    needs_path: bool = True
    needs_tokenizer: bool = False
    is_bytes: bool = False  # whether each token is a byte
    has_formats: bool = False  # whether `data.format` says what a row is
    may_be_on_hub: bool = False  # whether `data.path` may name a data set on the Hugging Face hub


@dataclass(frozen=True, slots=True)
class Wire:
    """Properties of one value of `routes.wire`: how a micro-batch is encoded between two stages."""

    forward: str  # codec of hidden values (comm/codecs/blockwise.py)
    backward: str  # codec of their gradients
    value_bytes: float  # bytes of one number, the mean of both directions; planners count with it


ALGORITHMS = {
    one.name: one
    for one in (
        Algorithm(
            name="pull",
            rule="decentral.comm.gossip.pull_rule:PullRule",
            memory_bytes=16,  # 12 in fp32 vectors, 4 in our snapshot and its encoded answers
            large_memory_bytes=12,  # 10 in vectors, since one is int8 or bf16; 2 in our snapshot with the slow weights
            full_merge_memory_bytes=9,  # 4 in an fp32 vector, 3 in two residuals (int8: 2, bf16: 4); 2 in our snapshot
            sharded="decentral.engine.owned_rules:RemoteGossip",
            limits_partners=True,
            is_estimated=True,
        ),
        Algorithm(
            name="allreduce",
            rule="decentral.comm.gossip.allreduce:AllReduceRule",
            memory_bytes=16,
            blocking=True,
        ),
        Algorithm(
            name="synchronous",
            rule="decentral.comm.rounds.synchronous_rule:SynchronousRule",
            memory_bytes=24,  # six fp32 sums of gradients, those of three peers in two rounds
            synchronous=True,
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
            stretch="decentral.engine.muon:Muon",
            scratch_bytes=24,  # for the temporary matrices of Muon's Newton-Schulz iterations
            flops="decentral.engine.muon:flops",
            sharded="decentral.engine.sharded:ShardedMuon",
            takes_all=True,
            frees_gradients=True,
        ),
    )
}

WIRES = {
    "bf16": Wire("bf16", "bf16", value_bytes=2.0),
    "int8": Wire("int8", "int8", value_bytes=1.0),
    "int8-q4": Wire("int8", "q4", value_bytes=0.75),
    "fp32": Wire("fp32", "fp32", value_bytes=4.0),
}
# With `routes.wire: auto` a peer uses the first of these keys of WIRES if its uplink is fast, the second if it is slow.
AUTO_WIRES = ("bf16", "int8-q4")

DATA_KINDS = {
    one.name: one
    for one in (
        DataKind(name="python-stdlib", opens="decentral.data.corpora:corpus", needs_path=False, is_bytes=True),
        DataKind(name="text", opens="decentral.data.corpora:corpus", is_bytes=True),
        DataKind(name="tokens", opens="decentral.data.corpora:corpus"),
        DataKind(
            name="huggingface",
            opens="decentral.data.stream:TextStream",
            needs_tokenizer=True,
            has_formats=True,
            may_be_on_hub=True,
        ),
    )
}

READERS = {  # suffix of a file for data.kind huggingface -> kind of reader, with the name that `datasets` uses
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
FILES_OF_ROWS = tuple(suffix for suffix, reader in READERS.items() if reader != "text")  # no other kind reads these


def names_with(table: Mapping[str, T], holds: Callable[[T], bool]) -> str:
    """Return the names in a table of the records of which `holds` is true, such as "huggingface or tokens"."""
    return " or ".join(sorted(name for name, one in table.items() if holds(one)))


def wires_of(name: str) -> list[Wire]:
    """Return the wires of a value of `routes.wire`: the first for a fast uplink, the last for a slow one."""
    return [WIRES[wire] for wire in (AUTO_WIRES if name == "auto" else (name,))]


@cache
def load(code: str) -> Any:
    """Import the object that `code` names as "module:name", and return it."""
    module, name = code.split(":")
    return getattr(import_module(module), name)
