"""A process's rank in an island (a peer with several devices, engine/island.py), and how devices divide the model."""

import os
from dataclasses import dataclass
from enum import StrEnum

ATTEMPT = "DECENTRAL_ATTEMPT"  # environment variable of ranks: how many times their launcher has restarted them


class Split(StrEnum):
    """How the devices of one peer divide its model. Values of the flag --split."""

    AUTO = "auto"  # COPIES if a device can hold the whole model, else PARTS
    COPIES = "copies"  # each device has the whole model, and computes its own micro-batches
    PARTS = "parts"  # each device has a part of every parameter, and computes its own micro-batches
    TENSOR = "tensor"  # each device has a part of every matrix, and all devices compute the same micro-batches together


@dataclass(frozen=True, slots=True)
class Place:
    """A process's rank in its island, as the environment variables of torch's launchers give it."""

    rank: int
    local_rank: int  # rank among the processes of the island on this machine
    local_size: int
    restarts: int

    @classmethod
    def here(cls) -> "Place | None":
        """Return this process's place; None if no launcher started it, or if it is the only rank."""
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return None
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", ATTEMPT)
        rank, local_rank, local_size, restarts, attempt = (int(os.environ.get(name, 0)) for name in names)
        return cls(rank, local_rank, local_size, restarts + attempt)
