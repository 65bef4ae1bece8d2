"""Whether the simulator's links are right: swarms in the lab (benchmarks/wan/) against simulated ones.

    python -m benchmarks.calibration_lab [--json FILE] [--journals DIR] [--only NAME]... [--seeds N]

Each setting runs once in the lab, with real processes, libp2p and TCP, and is predicted by the simulator from the same
topology file, the same config and as many seconds. What the simulator is told beside that comes from one reference run
of two peers on loopback, as in benchmarks/calibration.py; nothing is fitted to a run in the lab. Needs root on Linux.

Compared are the exchanges of each pair and kind: a partner's pseudo-gradient alone (light), or with its slow weights
(whole). With --journals the runs' folders are kept, and a run that is there already is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.calibration import MODEL, REFERENCE, RUN_S, agreement, measure
from benchmarks.calibration_links import ExchangeFigures, LabSetting, Pull, bytes_per_s, medians, predict, pulls_of
from benchmarks.calibration_model import DevicePace, Setting, device_of
from benchmarks.wan import namespaces
from decentral import command

WARM_UP_S = 8.0  # the probes of a peer's links are over then
MEASURED_S = 50.0
SEEDS = 5  # simulated runs of a setting: a prediction is the median of their exchanges
LEAST_PULLS = 5  # of a pair and kind, in the lab: fewer have no median
EMULATED_S = 0.4
LARGER = ("model.depth=2",)
SETTINGS = [
    LabSetting(Setting("homes", (1, 1, 1, 1), 0.5, EMULATED_S, LARGER), "four-homes"),
    LabSetting(Setting("homes-graded", (1, 1, 2, 4), 2.0, EMULATED_S, LARGER), "four-homes"),
    LabSetting(Setting("homes-small", (1, 1, 1, 1), 1.0, EMULATED_S, MODEL), "four-homes"),
    LabSetting(Setting("far-homes", (1, 1, 1, 1), 0.5, EMULATED_S, LARGER), "four-far-homes"),
    LabSetting(Setting("far-homes-small", (1, 1, 1, 1), 1.0, EMULATED_S, MODEL), "four-far-homes"),
    LabSetting(Setting("regions", (1, 1, 1, 1), 1.0, EMULATED_S, LARGER), "four-regions", 1, 0.02),
    LabSetting(Setting("cities", (1,) * 8, 2.0, EMULATED_S, MODEL), "eight-cities", 1, 0.05),
    LabSetting(Setting("cities-thin", (1,) * 8, 2.0, EMULATED_S, MODEL), "eight-cities", 1, 0.01),
]
Compared = tuple[LabSetting, Sequence[Pull], Sequence[Pull]]  # measured and predicted; the latter of all seeds


def main() -> int:
    return command.run(_main)


def _main() -> None:
    args = _arguments()
    namespaces.require_root()
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        place = args.journals or Path(folder)
        device = device_of(REFERENCE, measure(REFERENCE, place))
        print(device)
        chosen = [one for one in SETTINGS if not args.only or one.setting.name in args.only]
        compared = [_compare(one, device, place, args.seeds) for one in chosen]
    print(table(compared))
    print("\n".join(f"{what}: rank correlation {rank:.3f}, median error {error:.1%}" for what, rank, error in verdict(compared)))
    if args.json:
        args.json.write_text(json.dumps(_json(device, compared), indent=1) + "\n")


def _compare(one: LabSetting, device: DevicePace, place: Path, seeds: int) -> Compared:
    journals = _measured(one, place)
    predicted = [pull for seed in range(seeds) for pull in predict(one, device, seed, WARM_UP_S, MEASURED_S)]
    return one, pulls_of(journals, WARM_UP_S, MEASURED_S), predicted
