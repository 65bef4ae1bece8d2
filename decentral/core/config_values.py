"""The types of the values in a config, each with its bounds, for a stranger may have sent it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_INTERVAL_S = 1e7  # for any time in a config
MIN_INTERVAL_S = 0.01  # for whatever a peer does again and again

Positive = Annotated[int, Field(gt=0, le=1 << 20)]
Large = Annotated[int, Field(gt=0, le=1 << 40)]
Steps = Annotated[int, Field(ge=0, le=1 << 40)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e12)]
Interval = Annotated[float, Field(ge=MIN_INTERVAL_S, le=MAX_INTERVAL_S)]
OwnPath = Annotated[str, Field(max_length=4096)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$", max_length=32)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
