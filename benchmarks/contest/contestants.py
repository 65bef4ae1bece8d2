"""Who takes part: name, how its peers are started, the options that it begins with, and the grid that tunes it.

`tuned.json` has for each what `python -m benchmarks.contest --tune` found best: the learning rate, and of the options
those that have a grid. All train the same model on the same data with the same optimizer (Muon for the inner matrices).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contest.scenarios import Scenario
from decentral.core.errors import UserError

TUNED = Path(__file__).parent / "tuned.json"
RATES = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
STEP_S = 0.15  # of a micro-batch on the fastest devices
MODEL = (  # 139,584 parameters; a step takes about 15 ms of one core, the rest of its time is emulated
    "model.depth=2",
    "model.width=64",
    "model.context=64",
    "train.micro_batch=8",
    f"train.emulated_micro_batch_s={STEP_S}",
    "train.warmup_steps=10",
    "train.eval_every_s=3000",  # the runner evaluates, for all alike
)
DILOCO = {"algorithm": "diloco", "outer_rate": 0.7, "outer_momentum": 0.6, "half": True}
HIVEMIND = {"matchmaking_s": 1.5, "float16": True, "state_every": 5, "local": False, "delayed": False}


@dataclass(frozen=True, slots=True)
class Contestant:
    """`kind`: ours, gloo, hivemind or torchft. `grid`: options to try beside the learning rates, in turn."""

    name: str
    kind: str
    options: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    alone: bool = False  # one peer only
    like: str = ""  # the contestant that it equals where devices are equal, and whose tuning it takes
    overrides: tuple[str, ...] = ()  # of the config
    note: str = ""

    def takes_part(self, place: Scenario) -> bool:
        """Only ours can train a model that no peer can hold; a peer alone has no links that could fail; and one that is
        like another takes part where it differs, which is where devices do."""
        if place.fault.spans:
            return self.kind == "ours"
        if self.like:
            return len(set(place.throttles)) > 1
        return not self.alone or place.fault.name == "equal"

    @property
    def stagger(self) -> bool:
        """Whether the others can be started only when the first peer is up."""
        return self.kind in ("hivemind", "torchft")


def _ours(algorithm: str, *overrides: str, suffix: str = "", note: str = "") -> Contestant:
    settings = (f"gossip.algorithm={algorithm}", "swarm.checkpoint_every_s=3", *overrides)
    name = f"ours ({algorithm}{suffix})" if (algorithm, suffix) != ("pull", "") else "ours"
    return Contestant(name, "ours", {}, overrides=settings, note=note)


ALL = (
    _ours("pull", note="the default"),
    _ours("pull", "train.optimizer=adamw", suffix=", adamw"),
    _ours("allreduce"),
    _ours("synchronous", "train.accumulate=4"),
    Contestant("alone", "gloo", {"algorithm": "alone"}, alone=True, note="the fastest peer by itself"),
    Contestant(
        "gloo data parallel",
        "gloo",
        {"algorithm": "parallel", "half": True, "accumulate": 1},
        {"accumulate": (1, 2, 4)},
        note="gradients averaged in every step, in fp16",
    ),
    Contestant(
        "gloo data parallel, adamw",
        "gloo",
        {"algorithm": "parallel", "half": True, "accumulate": 1},
        {"accumulate": (1, 2, 4)},
        overrides=("train.optimizer=adamw",),
    ),
    Contestant(
        "gloo DiLoCo",
        "gloo",
        {**DILOCO, "inner_steps": 10},
        {"inner_steps": (5, 10, 20, 40), "outer_momentum": (0.3, 0.6, 0.9)},
        note="all take equally many inner steps",
    ),
    Contestant(
        "gloo DiLoCo, by time",
        "gloo",
        {**DILOCO, "inner_s": 1.5},
        like="gloo DiLoCo",
        note="each takes as many inner steps as it can in the round's time",
    ),
    Contestant("hivemind", "hivemind", {**HIVEMIND, "batch": 64}, {"batch": (64, 128, 256)}, note="synchronous"),
    Contestant("hivemind, fp32", "hivemind", {**HIVEMIND, "batch": 64, "float16": False}, {"batch": (64, 128, 256)}),
    Contestant("hivemind, delayed", "hivemind", {**HIVEMIND, "batch": 64, "delayed": True}, {"batch": (64, 128, 256)}),
    Contestant(
        "hivemind, local updates",
        "hivemind",
        {**HIVEMIND, "batch": 256, "local": True, "state_every": 1},
        {"batch": (128, 256, 512)},
    ),
    Contestant(
        "torchft DiLoCo",
        "torchft",
        {"algorithm": "diloco", "inner_steps": 10, "outer_rate": 0.7, "outer_momentum": 0.6},
        {"inner_steps": (5, 10, 20, 40)},
    ),
    Contestant(
        "torchft LocalSGD", "torchft", {"algorithm": "local_sgd", "inner_steps": 10}, {"inner_steps": (5, 10, 20)}
    ),
)
QUICK = (
    "ours",
    "alone",
    "gloo data parallel",
    "gloo DiLoCo",
    "gloo DiLoCo, by time",
    "hivemind",
    "hivemind, local updates",
    "torchft DiLoCo",
)


def tuned() -> dict[str, dict[str, Any]]:
    """By contestant: its `rate` and options, as `tuned.json` has them; none for those that were not tuned."""
    found: dict[str, dict[str, Any]] = json.loads(TUNED.read_text())["chosen"] if TUNED.exists() else {}
    return found


def contestant(name: str) -> Contestant:
    """Raises UserError for a name that is not in ALL."""
    found = next((one for one in ALL if one.name == name), None)
    if found is None:
        raise UserError(f"no contestant {name!r}; there are {'; '.join(one.name for one in ALL)}")
    return found


def chosen(names: Sequence[str], full: bool) -> list[Contestant]:
    """The named contestants, or those of the setting."""
    return [contestant(name) for name in (names or ([one.name for one in ALL] if full else QUICK))]


def settings(one: Contestant, seed: int, picked: Mapping[str, Any] | None = None) -> tuple[list[str], dict[str, Any]]:
    """Overrides of the config, and the options, of a run. `picked`: as tuning tries them; default: as it chose."""
    found = dict(tuned().get(one.like or one.name, {}) if picked is None else picked)
    if "inner_s" in one.options and "inner_steps" in found:
        found["inner_s"] = found.pop("inner_steps") * STEP_S
    rate = found.pop("rate", None)
    overrides = [*MODEL, *one.overrides, f"seed={seed}"]
    return overrides + ([f"train.learning_rate={rate}"] if rate else []), {**one.options, **found}
