"""Load a model to generate text with, from a run's gathered weights or from a Hugging Face folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.core.config import ModelConfig, validated
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from decentral.data import text_codec
from decentral.data.text_codec import TextCodec
from decentral.engine import measure, memory
from decentral.model import decoder
from decentral.model import families as model_families
from decentral.model.start_weights import ADAPTER
from decentral.serving import gather_weights, replicas
from decentral.serving.gather_weights import GatheredRun

if TYPE_CHECKING:
    from torch import nn

SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model: its config, its layers on the CPU, the codec between tokens and text, and the origin of its weights."""

    config: ModelConfig
    layers: Sequence["nn.Module"]
    codec: TextCodec
    source: str


def of_run(found: GatheredRun, tokenizer: str | None, model_folder: str | None = None) -> LoadedModel:
    """Return a run's model; its weights are the mean of the gathered weights.

    Args:
        found: The run and the weights of its holders.
        tokenizer: Path of the tokenizer; None: the path in the run's config.
        model_folder: Folder of the pretrained model for the run's adapters; None: the folder in the run's config.

    Raises:
        UserError: If layers are missing, or the tokenizer is missing or not the run's.
    """
    run = found.config.with_own(OwnInputs(model_folder=model_folder))
    codec = text_codec.of_run(run, tokenizer)
    layers = replicas.layers_with(run, found.average())
    aside = "".join(f"; left out: {line}" for line in found.left_out)
    return LoadedModel(run.model, layers, codec, f"run {found.run}: {gather_weights.whose(found.holders)}{aside}")


def of_folder(folder: Path, tokenizer: str | None) -> LoadedModel:
    """Return the model of a Hugging Face folder.

    Args:
        folder: The model's folder.
        tokenizer: Path of the tokenizer; None: the tokenizer in the folder.

    Raises:
        UserError: If the folder has no model, the model's architecture is not supported, or the model does not fit into
            this machine's memory.
    """
    if not (folder / model_families.CONFIG_FILE).is_file():
        adapter = "this folder is a peft adapter: export with --format huggingface, or generate from --state-dir"
        advice = adapter if (folder / ADAPTER).is_file() else "give a Hugging Face model's folder"
        raise UserError(f"--model {folder}: there is no {model_families.CONFIG_FILE}; {advice}")
    keys = model_families.model_keys(folder)
    context = min(keys["positions"], model_families.MOST_START_CONTEXT)
    run = validated({"model": {**keys, "context": context, "from": str(folder)}})
    memory.copies_that_fit(run, 1, measure.machine_bytes())
    codec = text_codec.of_folder(folder, tokenizer)
    return LoadedModel(run.model, decoder.build(run.model, run.seed), codec, f"weights of {folder}")
