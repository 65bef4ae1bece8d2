"""What a plan of either objective says; each planner adds its own fields to this record."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

MARGIN = 0.02  # a new plan must be better by this share before a peer changes to it
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

    def to_json(self) -> dict[str, Any]:
        """All fields in a fixed order: the objective's own stand between `seconds` and `baselines`."""
        own = asdict(self)
        last = {name: own.pop(name) for name in LAST_IN_JSON}
        return {"objective": self.objective} | own | last


def adopts(current: float, proposed: float) -> bool:
    """Whether a peer that pays `current` seconds changes to a plan that its own evaluation puts at `proposed`."""
    return proposed < current * (1 - MARGIN)
