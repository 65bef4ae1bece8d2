"""Whether the simulator's links are right: swarms in the lab (benchmarks/wan/) against simulated ones.

    python -m benchmarks.calibration_lab [--json FILE] [--journals DIR] [--only NAME]... [--runs N]

Each setting runs once in the lab, with real processes, libp2p and TCP, and is predicted by the simulator from the same
topology file, the same config and as many seconds. What the simulator is told beside that comes from one reference run
of two peers on loopback (benchmarks/calibration.py); nothing is fitted to a run in the lab. Gossip may use all cores,
in the lab as in the simulator, because the simulator knows nothing of cores. Needs root on Linux, two cores with
nothing else on them, and 15 minutes.

With --journals the runs' folders are kept, and a run that is there already is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.calibration import MODEL, REFERENCE, RUN_S, measure
from benchmarks.calibration_links import (
    Agreement,
    Compared,
    LabSetting,
    exchange_bytes,
    exchange_seconds,
    of_kind,
    pair_seconds,
    predict,
    pulled,
    pulls_of,
)
from benchmarks.calibration_model import DevicePace, Journals, Setting, device_of
from benchmarks.wan import namespaces
from decentral.commands import shared
from decentral.core.journal.file import read

WARM_UP_S = 8.0  # a peer has probed its links by then
MEASURED_S = 50.0
STOP_AFTER_S = 60.0
EMULATED_S = 0.4
ALL_CORES = "gossip.core_share=1"
LARGE, SMALL = ("model.depth=2", ALL_CORES), (*MODEL, ALL_CORES)
STEADY = "gossip.start_steps=20"  # the short windows of a swarm's beginning are over when the measured time begins
SETTINGS = [
    LabSetting(Setting("homes", (1,) * 4, 0.5, EMULATED_S, LARGE), "four-homes"),
    LabSetting(Setting("far-homes", (1,) * 4, 0.5, EMULATED_S, LARGE), "four-far-homes"),
    LabSetting(Setting("regions", (1,) * 4, 1.0, EMULATED_S, (*LARGE, STEADY)), "four-regions", 1, 0.02),
    LabSetting(Setting("cities", (1,) * 8, 2.0, EMULATED_S, (*SMALL, STEADY)), "eight-cities", 1, 0.05),
    LabSetting(Setting("homes-graded", (1, 1, 2, 4), 2.0, EMULATED_S, (*LARGE, STEADY)), "four-homes"),
    LabSetting(Setting("homes-small", (1,) * 4, 1.0, EMULATED_S, (*SMALL, STEADY)), "four-homes"),
    LabSetting(Setting("far-homes-small", (1,) * 4, 1.0, EMULATED_S, (*SMALL, STEADY)), "four-far-homes"),
    LabSetting(Setting("cities-thin", (1,) * 8, 2.0, EMULATED_S, (*SMALL, STEADY)), "eight-cities", 1, 0.01),
]


def main() -> int:
    return shared.run(_main)


def _main() -> None:
    args = _arguments()
    namespaces.require_root()
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        place = args.journals or Path(folder)
        device = device_of(REFERENCE, measure(REFERENCE, place))
        chosen = [one for one in SETTINGS if not args.only or one.setting.name in args.only]
        compared = [_compare(one, device, _measured(one, place), args.runs) for one in chosen]
    print(device)
    print(_table(compared))
    print("\n".join(f"{what}: {_said(found)}" for what, found in _agreements(compared).items()))
    if args.json:
        args.json.write_text(json.dumps(_json(device, compared), indent=1) + "\n")


def _measured(one: LabSetting, place: Path) -> Journals:
    """The journals of a run in the lab. Raises RuntimeError, with the end of what it printed, if it fails."""
    name, folder = one.setting.name, place / one.setting.name
    if not (folder / "done").exists():
        if folder.exists():
            raise RuntimeError(f"{folder} holds a run that was cut off; move it away, and it is run again")
        print(f"# {name}", file=sys.stderr, flush=True)
        ran = subprocess.run(_command(one, folder), capture_output=True, text=True, timeout=RUN_S)
        if ran.returncode:
            raise RuntimeError(f"{name}: {(ran.stdout + ran.stderr)[-2000:]}")
        (folder / "done").touch()
    return [list(read(peer / "journal.jsonl")) for peer in sorted(folder.glob("peer-*"))]


def _command(one: LabSetting, folder: Path) -> list[str]:
    throttles = ",".join(f"{throttle:g}" for throttle in one.setting.throttles)
    lab = ["--swarm", one.topology, "--peers-per-region", str(one.per_region), "--rates", f"{one.rates:g}"]
    local = ["--throttle", throttles, "--state-dir", str(folder)]
    local += [part for override in one.setting.overrides for part in ("--set", override)]
    return [sys.executable, "-m", "benchmarks.wan", *lab, "--seconds", f"{STOP_AFTER_S:g}", "--", *local]


def _compare(one: LabSetting, device: DevicePace, journals: Journals, runs: int) -> Compared:
    predicted = [pull for seed in range(runs) for pull in predict(one, device, seed, WARM_UP_S, MEASURED_S)]
    return Compared(one, pulls_of(journals, WARM_UP_S, MEASURED_S), predicted, runs)


def _table(compared: Sequence[Compared]) -> str:
    """Measured, then predicted: medians of all pulls of a kind, how many there were, and the bytes of all peers."""
    lines = [f"{'':16} {'light: s':>22} {'pulls':>11}   {'whole: s':>22} {'pulls':>11} {'kB/s':>13}"]
    for one in compared:
        cells = [f"{one.lab.setting.name:16}"]
        for whole in (False, True):
            real, said = of_kind(one.measured, whole), of_kind(one.predicted, whole)
            off = f"{median(said) / median(real) - 1:+7.1%}" if real and said else ""
            cells.append(f"{_median(real)} {_median(said)} {off} {len(real):5d} {len(said) / one.runs:5.0f}  ")
        rates = pulled(one.measured) / MEASURED_S / 1e3, pulled(one.predicted) / one.runs / MEASURED_S / 1e3
        lines.append(" ".join([*cells, f"{rates[0]:6.0f} {rates[1]:6.0f}"]))
    return "\n".join(lines)


def _median(seconds: Sequence[float]) -> str:
    return f"{median(seconds):7.3f}" if seconds else f"{'-':>7}"


def _agreements(compared: Sequence[Compared]) -> dict[str, Agreement]:
    return {
        "seconds of an exchange, of each setting and kind": exchange_seconds(compared),
        "seconds of an exchange, of each pair and kind": pair_seconds(compared),
        "bytes of exchanges, of each setting": exchange_bytes(compared),
    }


def _said(found: Agreement) -> str:
    return (
        f"{found.count} figures, rank correlation {found.rank_correlation:.3f}, "
        f"median error {found.median_error:.1%}, bias {found.bias:+.1%}"
    )


def _json(device: DevicePace, compared: Sequence[Compared]) -> dict[str, object]:
    return {
        "device": asdict(device),
        "agreement": {what: asdict(found) for what, found in _agreements(compared).items()},
        "settings": [
            {
                "name": one.lab.setting.name,
                "measured": [asdict(pull) for pull in one.measured],
                "predicted": [asdict(pull) for pull in one.predicted],
            }
            for one in compared
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = shared.Parser(
        prog="python -m benchmarks.calibration_lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--journals", type=Path, help="keep the runs here; one that is here already is not repeated")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="of the settings; may be repeated")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="simulated runs of a setting; default 5")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
