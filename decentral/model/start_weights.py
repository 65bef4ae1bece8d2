"""The weights of a Hugging Face folder (`model.from`), which all peers of a run start from.

    the founder's folder -> digest -> `model.weights` in the run's config -> members with the folder compare

The digest is of the folder's tensors, whichever files they stand in. A member without the folder gets its
weights from donors, as any newcomer does; where nobody can give them it has none, and says so. A folder whose head is
its embedding (`tie_word_embeddings`) gives both layers the same weights, and from then on each is trained by itself:
they are in different fragments, and different peers may hold them.
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

from decentral.core import strict_json
from decentral.core.config import ModelConfig
from decentral.core.errors import UserError
from decentral.model import families as model_families

T = TypeVar("T")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {HEAD: EMBEDDING, EMBEDDING: HEAD}  # each stands for the other where a folder ties them and has one
FUSED = {  # the matrices that files of Phi-3 have as one, its outputs one after another
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PICKLES = "*.bin", "*.pt", "*.pth"
ADAPTER = "adapter_config.json"
MAX_INDEX_BYTES = 64 << 20
PIECE_ELEMENTS = 1 << 22  # of a tensor, digested at once


class StartWeightsError(UserError):
    """The initial weights of this run cannot be had from a folder of this peer."""


def fill(model: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Copies the folder's tensors into these, which have Hugging Face's names. Raises StartWeightsError."""
    if model.start_from is None:
        if model.lora is not None:
            raise StartWeightsError("this run trains adapters of a folder's weights: name it with --model-from DIR")
        why = "this run starts from the weights of a folder, and no peer gave them"
        raise StartWeightsError(f"{why}; join when a peer that has them is there, or give --model-from DIR")
    if model.weights is not None:
        compare(model)
    with Folder(Path(model.start_from)) as folder:
        for name, tensor in weights.items():
            found = folder.part(name, model) if model.options.fused else folder.tensor(name)
            if found.shape != tensor.shape:
                shapes = f"{list(found.shape)}; {model_families.CONFIG_FILE} says {list(tensor.shape)}"
                raise StartWeightsError(f"{folder.path}: {name} has the shape {shapes}")
            tensor.copy_(found)


def compare(model: ModelConfig) -> None:
    """Raises StartWeightsError unless the folder has the weights that this run starts from."""
    assert model.start_from is not None
    if digest(model) != model.weights:
        raise StartWeightsError(f"--model-from {model.start_from}: its weights are not those that this run starts from")


def digest(model: ModelConfig) -> str:
    """Names, types, shapes and bytes of all tensors of the folder. Raises StartWeightsError."""
    assert model.start_from is not None
    return _digest(str(Path(model.start_from).absolute()))


@lru_cache(maxsize=4)  # a folder is read once by a process: it may have many gigabytes
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
    """A folder's tensors by name, in one file or in several with an index. To be used in a `with` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "Folder":
        """Raises StartWeightsError."""
        self.tied = self._read(lambda: model_families.is_tied(self.path))
        self.files = self._read(self._places)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """Raises StartWeightsError if it is not there, or holds no floating-point numbers."""
        if name not in self.files and self.tied and name in TIED:
            name = TIED[name]
        if name not in self.files:
            raise StartWeightsError(f"{self.path} has no tensor {name}")
        found: Tensor = self._read(lambda: self._file(self.files[name]).get_tensor(name))
        if not found.is_floating_point():
            raise StartWeightsError(f"{self.path}: {name} is {found.dtype}; expected float32, bfloat16 or float16")
        return found

    def part(self, name: str, model: ModelConfig) -> Tensor:
        """Return a tensor of a family whose files have some matrices as one (`FUSED`). Raises StartWeightsError."""
        module = name.split(".")[-2]
        whole = next((whole for whole, parts in FUSED.items() if module in parts), None)
        if whole is None:
            return self.tensor(name)
        name, parts = name.replace(module, whole), FUSED[whole]
        found, rows = self.tensor(name), [model.block_shapes[one][1] for one in parts]
        if len(found) != sum(rows):
            shapes = f"{list(found.shape)}; {model_families.CONFIG_FILE} says {[sum(rows), *found.shape[1:]]}"
            raise StartWeightsError(f"{self.path}: {name} has the shape {shapes}")
        return torch.split(found, rows)[parts.index(module)]

    def _places(self) -> dict[str, str]:
        """Return the file of each tensor; `model.safetensors` wins over an index, as in transformers."""
        if (self.path / ADAPTER).exists():
            merge = "merge it with peft's PeftModel.from_pretrained(MODEL, DIR).merge_and_unload().save_pretrained(NEW)"
            adapter = f"{self.path} is an adapter ({ADAPTER}); expected a whole model"
            raise StartWeightsError(f"{adapter}: {merge}, or remove {ADAPTER}")
        index = self.path / INDEX
        if (self.path / WHOLE).exists() or not index.exists():
            pickles = [path.name for kind in PICKLES for path in sorted(self.path.glob(kind))]
            if pickles and not (self.path / WHOLE).exists():
                convert = "convert it with transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
                found = f"found only the pickle {pickles[0]}"
                raise StartWeightsError(f"{self.path}: expected {WHOLE}; {found}: {convert}")
            return dict.fromkeys(self._file(WHOLE).keys(), WHOLE)
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"{INDEX} is larger than {MAX_INDEX_BYTES} bytes")
        places = strict_json.loads(index.read_text())["weight_map"]
        return {str(name): Path(str(file)).name for name, file in places.items()}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.path / name, framework="pt"))
        return self._open[name]

    def _read(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split())
            raise StartWeightsError(f"{self.path}: its weights cannot be read ({why}); expected {WHOLE}") from None
