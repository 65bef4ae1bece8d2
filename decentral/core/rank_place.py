"""Where this process stands among the ranks of its island (decentral/train/island.py), by its environment."""

import os
from dataclasses import dataclass

ATTEMPT = "DECENTRAL_ATTEMPT"  # in the environment of ranks: how often their launcher has started them before


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its island, as torch's launchers name it in the environment."""

    rank: int
    local_rank: int  # on this machine
    local_size: int
    restarts: int

    @classmethod
    def here(cls) -> "Place | None":
        """None: no launcher has started this process, or it started nothing else."""
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return None
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", ATTEMPT)
        rank, local_rank, local_size, restarts, attempt = (int(os.environ.get(name, 0)) for name in names)
        return cls(rank, local_rank, local_size, restarts + attempt)
