"""A model to generate from: a run's, from the weights that its peers gave, or a Hugging Face folder's."""

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
    """A model's layers on the CPU, what its tokens mean, and whose weights it has."""

    config: ModelConfig
    layers: Sequence["nn.Module"]
    codec: TextCodec
    source: str


def of_run(found: GatheredRun, tokenizer: str | None, model_folder: str | None = None) -> LoadedModel:
    """The mean of what the holders gave. Raises UserError if layers are missing, or nobody says what the tokens are."""
    run = found.config.with_own(OwnInputs(model_folder=model_folder))
    codec = text_codec.of_run(run, tokenizer)
    layers = replicas.layers_with(run, found.average())
    aside = "".join(f"; left out: {line}" for line in found.left_out)
    return LoadedModel(run.model, layers, codec, f"run {found.run}: {gather_weights.whose(found.holders)}{aside}")


def of_folder(folder: Path, tokenizer: str | None) -> LoadedModel:
    """The model of a Hugging Face folder. Raises UserError if it is of no family that we compute."""
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
