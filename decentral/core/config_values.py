"""The types of the values in a config. Each type has bounds, because another peer may have sent the value."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_INTERVAL_S = 1e7  # a config may set no longer interval, such as the time between two checkpoints
MIN_INTERVAL_S = 0.01  # a config may set no shorter interval

Positive = Annotated[int, Field(gt=0, le=1 << 20)]
Large = Annotated[int, Field(gt=0, le=1 << 40)]
Steps = Annotated[int, Field(ge=0, le=1 << 40)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e12)]
Interval = Annotated[float, Field(ge=MIN_INTERVAL_S, le=MAX_INTERVAL_S)]
OwnPath = Annotated[str, Field(max_length=4096)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$", max_length=32)]


class Strict(BaseModel):
    """Base class of a config's sections. Values cannot be changed and are not converted; unknown keys are refused.

    The docstring below a field explains the key to users; the docstring of a number ends with the number's unit.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
