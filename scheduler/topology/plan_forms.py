"""Define the plans for both objectives, synchronous steps and throughput. This module imports no solver."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from decentral.core.strict_json import JsonObject

LAST_IN_JSON = ("baselines", "reason", "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fields that `SyncPlan` and `ThroughputPlan`, the plans for the two objectives, have in common."""

    objective: ClassVar[str]
    solver: str
    seed: int
    seconds: float  # how long the search took
    baselines: dict[str, float]  # simple layout -> its cost (s/step) or throughput (tokens/s), for comparison
    reason: str
    digest: str  # digest of the topology

    def to_json(self) -> JsonObject:
        """Return all fields in a fixed order: `objective`, the fields of the plan, and LAST_IN_JSON at the end."""
        own = asdict(self)
        last = {name: own.pop(name) for name in LAST_IN_JSON}
        return {"objective": self.objective} | own | last


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan(Plan):
    """A plan for synchronous steps: the peers of each stage and pipeline, and the seconds of a step.

    `cost` has seconds of communication, "total" = "data_parallel" + "pipeline". If each peer's FLOP/s are known, it
    also has those of "compute", and the whole "step" = "total" + "compute".
    """

    objective: ClassVar[str] = "sync"
    cost: dict[str, float]
    stages: list[list[str]]  # peer ids of each stage
    pipelines: list[list[str]]  # peer ids of each pipeline, one for each stage
    left_out: dict[str, str]  # id of each peer without a stage -> why
    degrees: dict[str, float]  # for each pair that was tried: "stages x replicas" -> seconds of the pair's best step


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPlan(Plan):
    """A plan for an asynchronous swarm: each peer's layers, and how tokens and snapshots travel between peers."""

    objective: ClassVar[str] = "throughput"
    # Tokens/s. `estimated`: what the search computed for the plan's routes. `tokens_per_s`: the promise, which is what
    # the plan reached if the simulator has played it, else the estimate. `bound`: what no plan can exceed.
    throughput: dict[str, float]
    planned_for: JsonObject  # name, parameters and layers of the model, and the utilisation of the peers' FLOP/s
    spans: dict[str, list[int]]  # peer id -> [first, last): its layers
    micro_batches: dict[str, int]  # peer id -> sequences in one micro-batch
    accumulate: int = 1  # minimum number of micro-batches in a routed peer's step, to reach the run's tokens per step
    routes: list[JsonObject]  # each has its `share` of the tokens and its `hops`: peer id, first layer, end
    gossip: JsonObject  # result of Partners.to_json (scheduler/partners/mixing.py)
    use: dict[str, float]  # highest utilisation, 0 to 1, of any device, memory, uplink, downlink, link, and shared link
