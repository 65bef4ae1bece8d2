"""The model that is served, and where its weights come from: a folder, or a live swarm, whose newest weights are
gathered now and then while the last ones still answer.

A request that has begun keeps the weights with which it began.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from decentral.commands import shared
from decentral.core.errors import UserError
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

REFRESH_S = 600.0  # between two gatherings of a swarm's weights, which its peers upload
FOLDER_LOOK_S = 20.0  # between two looks at a folder
AGAIN_S = 20.0  # until the next try, where one has failed
GATHERING_SHARE = 0.05  # of the time, at most
WEIGHT_FILES = "*.safetensors"

Load = Callable[[], Coroutine[object, None, LoadedModel | None]]
"""The newest weights; None: they are those that it gave last. Raises UserError."""


@dataclass(slots=True)
class ServedModel:
    """What answers requests. `name`: by which they name it. `model`: None until the first weights are there."""

    name: str
    device: Device
    template: ChatTemplate | None = None
    model: LoadedModel | None = None
    loaded_s: int = 0  # when the weights came, in unix time
    trouble: str = ""  # why there are no newer weights

    def of_name(self, name: str) -> LoadedModel:
        """The model that a request names. Raises ApiError if it is another one, or is not there yet."""
        if name != self.name:
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.name!r}", "model_not_found", "model"
            )
        if self.model is None:
            raise ApiError(503, self.trouble or "the model's weights are being gathered", "model_not_ready")
        return self.model

    def take(self, newest: LoadedModel) -> None:
        """From now on new requests are answered with these weights."""
        self.model, self.loaded_s = newest, int(time.time())

    async def keep_fresh(
        self, load: Load, every_s: Seconds, rest: Callable[[Seconds], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Loads again and again; what cannot be loaded is said once, and the last weights stay."""
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
    """A model to serve, and how its weights are had."""

    served: ServedModel
    load: Load
    every_s: Seconds

    async def load_first(self) -> None:
        """Raises UserError if there are no weights yet."""
        newest = await self.load()
        assert newest is not None, "what was never loaded is new"
        self.served.take(newest)


def of_folder(folder: Path, tokenizer: str | None, device: Device) -> ServedSource:
    """A Hugging Face folder's model, or that of peers' state folders. Raises UserError."""
    is_model = (folder / families.CONFIG_FILE).is_file()

    def load() -> LoadedModel:
        if is_model:
            return loaded_model.of_folder(folder, tokenizer)
        return loaded_model.of_run(gather_weights.from_folders([str(folder)]), tokenizer)

    known = tokenizer or (str(folder) if is_model else None)
    served = ServedModel(folder.resolve().name, device, chat_template.of_tokenizer(known))
    return ServedSource(served, WhenChanged(folder, load), FOLDER_LOOK_S)


class WhenChanged:
    """Loads from a folder when files of weights in it are others than last time."""

    def __init__(self, folder: Path, load: Callable[[], LoadedModel]) -> None:
        self._folder, self._load = folder, load
        self._known: list[tuple[Path, int]] = []

    async def __call__(self) -> LoadedModel | None:
        return await asyncio.to_thread(self._newest)

    def _newest(self) -> LoadedModel | None:
        """Raises UserError where a folder cannot be read, or is being replaced: the next look finds it whole."""
        try:
            files = [path for pattern in (WEIGHT_FILES, f"*/{WEIGHT_FILES}") for path in self._folder.glob(pattern)]
            found = [(path, path.stat().st_mtime_ns) for path in sorted(files)]
            if self._known and found == self._known:
                return None
            model, self._known = self._load(), found
        except OSError as error:
            raise UserError(f"{self._folder}: {error.strerror or error}; look at the folder") from None
        return model


def of_swarm(swarm: VisitedSwarm, tokenizer: str | None, device: Device) -> ServedSource:
    """A live swarm's model: one peer's weights of each layer. Raises UserError if nobody says what its tokens are."""
    text_codec.of_run(swarm.config, tokenizer)
    own_bytes = WEIGHT_BYTES * sum(swarm.config.model.layer_parameters)  # of the weights that answer meanwhile

    async def load() -> LoadedModel:
        found = await gather_weights.of_visited(swarm, 1, measure.machine_bytes() - own_bytes)
        return await asyncio.to_thread(loaded_model.of_run, found, tokenizer)

    return ServedSource(ServedModel(swarm.run, device, chat_template.of_tokenizer(tokenizer)), load, REFRESH_S)
