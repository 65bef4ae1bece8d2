"""Export the adapters of a run with `model.lora` as a folder that Hugging Face's peft loads.

    adapter_config.json  adapter_model.safetensors

peft adds the adapters to the model that the run started from; the folder does not contain that model.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from decentral.core import config
from decentral.core.atomic_file import write_together
from decentral.core.errors import UserError, writing
from decentral.core.strict_json import JsonObject
from decentral.model import decoder, families, huggingface
from decentral.model.start_weights import ADAPTER, FUSED, WHOLE

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def write(folder: Path, run: config.Config, layers: Sequence[nn.Module]) -> list[str]:
    """Write the adapters and their settings to a folder, and return the names of the files written.

    Args:
        folder: The folder to write; created if it does not exist.
        run: The run's config.
        layers: All layers of the model; only their adapters are read.

    Raises:
        UserError: If the run has no adapters, the folder has files of a whole model, or a file cannot be written.
    """
    lora = run.model.lora
    if lora is None:
        raise UserError("--format peft: this run has no adapters, since it trains all weights; omit --format")
    huggingface.refuse_mixture(folder, (families.CONFIG_FILE, WHOLE, *huggingface.SHARDS))
    named = decoder.named_weights(layers, run.model.depth)
    weights = {PREFIX + name: one.detach().float().contiguous() for name, one in named.items() if ".lora_" in name}
    settings: JsonObject = {
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
    if run.model.options.fused:
        _fuse(weights, settings, run.model)
    described = (json.dumps(settings, indent=1) + "\n").encode()
    files = {ADAPTER: described, ADAPTER_WEIGHTS: save(weights, {"format": "pt"})}
    with writing("--out", folder, "folder"):
        write_together(folder, files)
    return list(files)


def _fuse(weights: dict[str, Tensor], settings: JsonObject, model: config.ModelConfig) -> None:
    """Combine the adapters of matrices that the family's files store as one matrix; change `weights` and `settings`.

    The factors A of the n matrices are stacked, and their factors B become one block diagonal matrix. The combined
    adapter has n times the rank, and its products equal those of the n adapters.
    """
    assert model.lora is not None
    settings |= {"rank_pattern": {}, "alpha_pattern": {}}
    for whole, parts in FUSED.items():
        adapted = [part for part in parts if part in model.lora.targets]
        for name in [name for name in weights if f".{adapted[0]}.lora_A." in name] if adapted else []:
            place = name.replace(adapted[0], whole)
            factors = {part: name.replace(adapted[0], part) for part in adapted}
            weights[place] = torch.cat([weights.pop(one) for one in factors.values()])
            none = {part: torch.zeros(model.block_shapes[part][1], 0) for part in parts}
            given = {part: weights.pop(one.replace("lora_A", "lora_B")) for part, one in factors.items()}
            diagonal: Tensor = torch.block_diag(*(none | given).values())  # type: ignore[no-untyped-call]
            weights[place.replace("lora_A", "lora_B")] = diagonal
        if adapted:
            settings["rank_pattern"][whole] = len(adapted) * model.lora.rank
            settings["alpha_pattern"][whole] = len(adapted) * model.lora.alpha
            kept = [one for one in settings["target_modules"] if one not in parts]
            settings["target_modules"] = [*kept, whole]
