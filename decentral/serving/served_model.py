"""Serve a model from a folder or a live swarm, and load newer weights at regular intervals.

Start reading at `of_folder` and `of_swarm`. While newer weights load, the old weights answer requests. Each request is
answered with the same weights from its beginning to its end.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from decentral.core.units import Seconds
from decentral.data import text_codec
from decentral.engine import measure
from decentral.engine.memory import WEIGHT_BYTES
from decentral.engine.step import Device
from decentral.model import families
from decentral.peers.startup.visit import VisitedSwarm
from decentral.serving import chat_template, gather_weights, loaded_model
from decentral.serving.chat_template import ChatTemplate
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.openai_requests import ApiError

REFRESH_S = 600.0  # a swarm's weights are downloaded this often, since each download costs its peers an upload
FOLDER_LOOK_S = 20.0
AGAIN_S = 20.0  # after a failed attempt to load weights, the next attempt follows after this pause
GATHERING_SHARE = 0.05  # loading may take this share of the time, so the pause after a slow load is longer
WEIGHT_FILES = "*.safetensors"

Load = Callable[[], Coroutine[object, None, LoadedModel | None]]
"""Returns the model with its newest weights, or None if they have not changed. Raises UserError."""


@dataclass(slots=True)
class ServedModel:
    """State of the model that answers requests: its name, its device, and its current weights."""

    name: str  # clients give this name in requests
    device: Device
    template: ChatTemplate | None = None  # without a chat template, chat requests are refused
    model: LoadedModel | None = None
    loaded_s: int = 0  # Unix time of the last load
    trouble: str = ""  # why the last attempt to load newer weights failed, or "" if it succeeded

    def of_name(self, name: str) -> LoadedModel:
        """Return the model for a request.

        Raises:
            ApiError: If the request names another model (404), or the weights are not loaded yet (503).
        """
        if name != self.name:
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.name!r}", "model_not_found", "model"
            )
        if self.model is None:
            raise ApiError(503, self.trouble or "the weights are still loading; try again later", "model_not_ready")
        return self.model

    def take(self, newest: LoadedModel) -> None:
        """Answer new requests with `newest` from now on."""
        self.model, self.loaded_s = newest, int(time.time())

    async def keep_fresh(
        self, load: Load, every_s: Seconds, rest: Callable[[Seconds], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Load newer weights again and again, until this task is cancelled.

        If loading fails, the old weights stay, and the error is printed on stderr, unless it is the previous error.

        Args:
            load: Returns newer weights, or None if there are none.
            every_s: Seconds from one load to the next. After a failure the pause is AGAIN_S instead, and after a slow
                load it is longer (GATHERING_SHARE).
            rest: Sleeps for the given number of seconds.
        """
        while True:
            began, trouble = time.monotonic(), ""
            try:
                newest = await load()
            except UserError as error:
                newest, trouble = None, shared.one_line(error)
            if newest is not None:
                self.take(newest)
            if trouble and trouble != self.trouble:
                print(f"no newer weights: {trouble}", file=sys.stderr, flush=True)
            self.trouble = trouble
            took_s = time.monotonic() - began
            await rest(max(AGAIN_S if trouble else every_s, took_s / GATHERING_SHARE))


@dataclass(frozen=True, slots=True)
class ServedSource:
    """The inputs of serving: the model's state, and the function that loads weights every `every_s` seconds."""

    served: ServedModel
    load: Load
    every_s: Seconds

    async def load_first(self) -> None:
        """Load the first weights.

        Raises:
            UserError: If the weights cannot be loaded.
        """
        newest = await self.load()
        assert newest is not None, "the first load returns a model"
        self.served.take(newest)


def of_folder(folder: Path, tokenizer: str | None, device: Device, base: str | None = None) -> ServedSource:
    """Return the source of the model in a Hugging Face folder, or of the mean of the models in peers' state folders.

    The weights are loaded later.

    Args:
        folder: The folder.
        tokenizer: Path of the tokenizer; None: the model's own tokenizer.
        device: Where to compute.
        base: Folder of the base model, for state folders of a run that trains adapters.

    Raises:
        UserError: If the tokenizer's settings or chat template are damaged.
    """
    is_model = (folder / families.CONFIG_FILE).is_file()

    def load() -> LoadedModel:
        if is_model:
            return loaded_model.of_folder(folder, tokenizer)
        found = gather_weights.from_folders([str(folder)], OwnInputs(model_folder=base))
        return loaded_model.of_run(found, tokenizer, base)

    known = tokenizer or (str(folder) if is_model else None)
    served = ServedModel(folder.resolve().name, device, chat_template.of_tokenizer(known))
    return ServedSource(served, WhenChanged(folder, load), FOLDER_LOOK_S)


class WhenChanged:
    """A function to load a folder's model, which reads the folder only if its weight files have changed."""

    def __init__(self, folder: Path, load: Callable[[], LoadedModel]) -> None:
        """Set the folder, and the function `load`, which reads the whole model from the folder."""
        self._folder, self._load = folder, load
        self._known: list[tuple[Path, int]] = []

    async def __call__(self) -> LoadedModel | None:
        """Return the model, or None if no weight file has changed. Raises UserError if the folder cannot be read."""
        return await asyncio.to_thread(self._newest)

    def _newest(self) -> LoadedModel | None:
        """Return the model, or None if no weight file has changed since the last call.

        Raises:
            UserError: If the folder cannot be read, for example because another program is replacing its files; a later
                call may then succeed.
        """
        try:
            files = [path for pattern in (WEIGHT_FILES, f"*/{WEIGHT_FILES}") for path in self._folder.glob(pattern)]
            found = [(path, path.stat().st_mtime_ns) for path in sorted(files)]
            if self._known and found == self._known:
                return None
            model, self._known = self._load(), found
        except OSError as error:
            raise UserError(f"{self._folder} cannot be read ({error.strerror or error}); check the folder") from None
        return model


def of_swarm(swarm: VisitedSwarm, tokenizer: str | None, device: Device, base: str | None = None) -> ServedSource:
    """Return the source of a live swarm's model. Each fragment's weights are from one peer, not a mean.

    `base` is the folder of the base model, for a run that trains adapters.

    Raises:
        UserError: If the tokenizer is missing or not the run's, or its chat template is damaged.
    """
    text_codec.of_run(swarm.config, tokenizer)
    own_bytes = WEIGHT_BYTES * sum(swarm.config.model.layer_parameters)  # the old weights stay in memory during a load

    async def load() -> LoadedModel:
        found = await gather_weights.of_visited(swarm, 1, measure.machine_bytes() - own_bytes)
        return await asyncio.to_thread(loaded_model.of_run, found, tokenizer, base)

    return ServedSource(ServedModel(swarm.run, device, chat_template.of_tokenizer(tokenizer)), load, REFRESH_S)
