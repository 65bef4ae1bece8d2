"""Read the weights of a Hugging Face folder (`model.from`), from which all peers of a run start.

    first peer's folder -> digest -> `model.weights` in the run's config -> other peers compare their folders' digests

Start reading at `fill`. The digest depends on the tensors, but not on their division into files. A peer without the
folder gets its weights from other peers, and stops with an error if no peer can send them. If a folder ties the head to
the embedding (`tie_word_embeddings`), both layers begin with the same weights, and each layer is then trained
separately, since different peers may hold the two layers.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decentral.core import foreign_file, strict_json
from decentral.core.config import ModelConfig
from decentral.core.errors import UserError
from decentral.core.plain_text import error_text
from decentral.model import families as model_families

T = TypeVar("T")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {HEAD: EMBEDDING, EMBEDDING: HEAD}  # a folder may omit one of these two matrices if they are equal
FUSED = {  # name of a fused matrix in Phi-3's files -> the matrices of a block that it contains
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PICKLES = "*.bin", "*.pt", "*.pth"  # pickled weights are never read, since a pickle can run code
ADAPTER = "adapter_config.json"
MAX_INDEX_BYTES = 64 << 20
PIECE_ELEMENTS = 1 << 22  # a tensor is hashed in pieces of this many elements, so that no large copy is made


class StartWeightsError(UserError):
    """Raised if this peer has no folder with the run's initial weights, or the folder is not usable."""


def fill(model: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Copy the tensors of the folder `model.from` into `weights`, in place.

    Args:
        model: The section `model` of the config, with the folder and the digest of the run's weights.
        weights: Tensors to fill, by their names in Hugging Face's models.

    Raises:
        StartWeightsError: If no folder is given, the folder cannot be read, it has other weights than the run's, or a
            tensor is missing or has a wrong shape.
    """
    if model.start_from is None:
        if model.lora is not None:
            raise StartWeightsError("this run trains a model's adapters; give the model's folder with --model-from DIR")
        raise StartWeightsError(
            "this run starts from the weights of a folder, and no peer gave them; "
            "join when a peer with these weights is online, or give --model-from DIR"
        )
    if model.weights is not None:
        compare(model)
    with Folder(Path(model.start_from)) as folder:
        for name, tensor in weights.items():
            found = folder.part(name, model) if model.options.fused else folder.tensor(name)
            if found.shape != tensor.shape:
                came, expected = list(found.shape), f"{model_families.CONFIG_FILE} expects {list(tensor.shape)}"
                raise StartWeightsError(f"{folder.path}: tensor {name} has shape {came}; {expected}")
            tensor.copy_(found)


def compare(model: ModelConfig) -> None:
    """Raise StartWeightsError if the folder's weights are not the run's initial weights (their digests differ)."""
    assert model.start_from is not None
    if digest(model) != model.weights:
        folder = f"--model-from {model.start_from}"
        advice = "give a copy of the folder that the run's first peer used"
        raise StartWeightsError(f"{folder}: its weights are not this run's initial weights; {advice}")


def digest(model: ModelConfig) -> str:
    """Return a digest of the names, types, shapes and bytes of all tensors of the folder.

    Raises:
        StartWeightsError: If the folder cannot be read.
    """
    assert model.start_from is not None
    return _digest(str(Path(model.start_from).absolute()))


@lru_cache(maxsize=4)
def _digest(path: str) -> str:
    found = hashlib.blake2b(digest_size=16)
    with Folder(Path(path)) as folder:
        found.update(b"tied" if folder.tied else b"")
        for name in sorted(folder.files):
            tensor = folder.tensor(name)
            found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            for piece in torch.split(tensor.contiguous().flatten(), PIECE_ELEMENTS):
                found.update(piece.view(torch.uint8).numpy().data)
    return found.hexdigest()


class Folder:
    """A reader of a model folder's tensors, stored in one file or in several files with an index; a context manager."""

    def __init__(self, path: Path) -> None:
        """Set the folder's path; `__enter__` opens the folder."""
        self.path = path
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "Folder":
        """Open the folder and find each tensor's file. Raises StartWeightsError if the folder cannot be read."""
        self.tied = self._read(lambda: model_families.is_tied(self.path))
        self.files = self._read(self._places)
        return self

    def __exit__(self, *_: object) -> None:
        """Close all files."""
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of this name. If the folder ties head and embedding, both names give the same tensor.

        Raises:
            StartWeightsError: If the tensor is missing, cannot be read, or is not of a floating-point type.
        """
        if name not in self.files and self.tied and name in TIED:
            name = TIED[name]
        if name not in self.files:
            raise StartWeightsError(f"{self.path} has no tensor {name}; give a folder that transformers saved")
        found: Tensor = self._read(lambda: self._file(self.files[name]).get_tensor(name))
        if not found.is_floating_point():
            raise StartWeightsError(f"{self.path}: {name} is {found.dtype}; expected float32, bfloat16 or float16")
        return found

    def part(self, name: str, model: ModelConfig) -> Tensor:
        """Return a tensor by its name in the model; if a file's matrix contains it (`FUSED`), cut it out of the matrix.

        Raises:
            StartWeightsError: If the tensor is missing, or its shape is not the one in config.json.
        """
        module = name.split(".")[-2]
        whole = next((whole for whole, parts in FUSED.items() if module in parts), None)
        if whole is None:
            return self.tensor(name)
        name, parts = name.replace(module, whole), FUSED[whole]
        found, rows = self.tensor(name), [model.block_shapes[one][1] for one in parts]
        if len(found) != sum(rows):
            expected = f"{model_families.CONFIG_FILE} expects {[sum(rows), *found.shape[1:]]}"
            raise StartWeightsError(f"{self.path}: tensor {name} has shape {list(found.shape)}; {expected}")
        return torch.split(found, rows)[parts.index(module)]

    def _places(self) -> dict[str, str]:
        """Return each tensor's file name, by tensor name. If `model.safetensors` exists, ignore an index.

        Raises:
            StartWeightsError: If the folder holds an adapter, or only pickled weights.
        """
        if (self.path / ADAPTER).exists():
            merge = "merge it with peft's PeftModel.from_pretrained(MODEL, DIR).merge_and_unload().save_pretrained(NEW)"
            raise StartWeightsError(
                f"{self.path} is an adapter ({ADAPTER}); expected a whole model; "
                f"{merge}, or remove {ADAPTER} if the folder is a whole model"
            )
        index = self.path / INDEX
        if (self.path / WHOLE).exists() or not index.exists():
            pickles = [path.name for kind in PICKLES for path in sorted(self.path.glob(kind))]
            if pickles and not (self.path / WHOLE).exists():
                convert = "convert it with transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
                found = f"found only the pickle {pickles[0]}"
                raise StartWeightsError(f"{self.path}: expected {WHOLE}; {found}; {convert}")
            return dict.fromkeys(self._file(WHOLE).keys(), WHOLE)
        places = strict_json.loads(foreign_file.read_text(index, MAX_INDEX_BYTES))["weight_map"]
        return {str(name): Path(str(file)).name for name, file in places.items()}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            foreign_file.require_fit(self.path / name)
            self._open[name] = self._stack.enter_context(safe_open(self.path / name, framework="pt"))
        return self._open[name]

    def _read(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = error_text(error, None)
            raise StartWeightsError(f"{self.path}: the weights cannot be read ({why}); expected {WHOLE}") from None
