"""A folder that Hugging Face's peft loads over the model that a run with `model.lora` started from: adapters alone.

adapter_config.json  adapter_model.safetensors
"""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save
from torch import nn

from decentral.core import config
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError
from decentral.train import gpt

SETTINGS, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of a tensor's name: peft's wrapper, and within it transformers' model


def write(folder: Path, run: config.Config, layers: Sequence[nn.Module]) -> list[str]:
    """Writes the folder and gives its files' names. The layers' frozen weights are not read.

    Raises UserError if the run has no adapters, or the disk refuses.
    """
    lora = run.model.lora
    if lora is None:
        raise UserError("--format peft: this run trains all weights, no adapters; leave --format out")
    named = gpt.named_weights(layers, run.model.depth)
    weights = {PREFIX + name: one.detach().float().contiguous() for name, one in named.items() if ".lora_" in name}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.model.start_from,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    files = {SETTINGS: (json.dumps(settings, indent=1) + "\n").encode(), WEIGHTS_FILE: save(weights, {"format": "pt"})}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; choose a folder that can be written") from None
    return list(files)
