"""What a plan says, of either objective. To load it takes no solver."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from decentral.core.strict_json import JsonObject

LAST_IN_JSON = ("baselines", "reason", "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a plan was found, what it is compared with, why it is as it is, and for which topology it was made."""

    objective: ClassVar[str]
    solver: str
    seed: int
    seconds: float  # what planning took
    baselines: dict[str, float]  # the objective's value for each simple layout beside the plan
    reason: str  # one paragraph of plain words
    digest: str  # of the topology

    def to_json(self) -> JsonObject:
        """All fields in a fixed order: the objective's own stand between `seconds` and `baselines`."""
        own = asdict(self)
        last = {name: own.pop(name) for name in LAST_IN_JSON}
        return {"objective": self.objective} | own | last


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan(Plan):
    """Which peers form the stages and pipelines of a synchronous step, and what its communication costs."""

    objective: ClassVar[str] = "sync"
    cost: dict[str, float]  # seconds: total, data_parallel, pipeline
    stages: list[list[str]]  # peer ids
    pipelines: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPlan(Plan):
    """Which layers each peer holds, and how tokens and snapshots travel between them."""

    objective: ClassVar[str] = "throughput"
    throughput: dict[str, float]  # tokens_per_s, and the upper bound for it
    spans: dict[str, list[int]]  # peer id -> layers [first, last)
    micro_batches: dict[str, int]  # peer id -> sequences
    routes: list[JsonObject]  # share of the tokens, and hops: [peer id, first, last]
    gossip: JsonObject  # as Partners.to_json of partners/mixing.py
