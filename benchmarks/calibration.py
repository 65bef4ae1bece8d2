"""Whether the simulator is right: real runs of decentral.local against simulated ones of the same settings.

    python -m benchmarks.calibration [--json FILE] [--journals DIR] [--only NAME]...

The first run is the reference: the journals of its two equal peers give one device's pace and the cost of a request.
Each other setting is then simulated twice: predicted from its settings and the device alone, and with each
peer's own step time from its journal. A setting differs from the reference in peers, throttles, window and
micro-batch. Micro-batches are emulated (mostly slept), so that two cores can carry six peers.

Two more settings, which no mean includes, run without emulation at the pace of a peer that runs alone: there the
peers share the cores, which the simulator knows nothing of. Nothing else should run meanwhile; a run takes about 45 s.

With --journals the runs' folders are kept, and a run that is there already is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from scipy.stats import spearmanr

from benchmarks.calibration_model import (
    DevicePace,
    Figures,
    Journals,
    Setting,
    device_of,
    figures,
    predict,
    replay,
    swarm_figures,
)
from decentral.core.journal.file import read

WARM_UP_S = 9.0  # the reference alone is still in its short windows then, on purpose
MEASURED_S = 20.0
STOP_AFTER_S = 32.0
RUN_S = 300.0  # the longest that a run may take, with its start and end
MODEL = ("model.depth=2", "model.width=64", "model.context=64", "train.micro_batch=4")  # as in straggler.py
REFERENCE = Setting("reference", (1, 1), 0.5, 0.05, (*MODEL, "gossip.start_steps=400"))
SETTINGS = [
    Setting("two-short", (1, 3), 0.3, 0.05, MODEL),
    Setting("two-long", (1, 1), 2.0, 0.1, MODEL),
    Setting("three-graded", (1, 2, 4), 0.5, 0.05, MODEL),
    Setting("four-equal", (1, 1, 1, 1), 0.5, 0.05, MODEL),
    Setting("four-one-slow", (1, 1, 1, 10), 0.5, 0.05, MODEL),
    Setting("four-graded", (1, 2, 4, 8), 1.0, 0.05, MODEL),
    Setting("four-sparse", (1, 1, 1, 1), 2.0, 0.2, MODEL),
    Setting("six-equal", (1, 1, 1, 1, 1, 1), 1.0, 0.1, MODEL),
    Setting("six-graded", (1, 1, 2, 2, 5, 10), 0.3, 0.1, MODEL),
]
RAW_REFERENCE = Setting("one-raw", (1,), 0.5, 0.0, MODEL)  # one peer without emulation, for its pace
RAW = [Setting("two-raw", (1, 1), 0.5, 0.0, MODEL), Setting("four-raw", (1, 1, 1, 1), 0.5, 0.0, MODEL)]


@dataclass(frozen=True, slots=True)
class Compared:
    """A setting's peers as they were measured, predicted, and simulated with their own step times."""

    setting: Setting
    measured: list[Figures]
    predicted: list[Figures]
    retold: list[Figures]


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        place = args.journals or Path(folder)
        device = device_of(REFERENCE, measure(REFERENCE, place))
        print(device)
        chosen = [one for one in SETTINGS if not args.only or one.name in args.only]
        compared = [_compare(one, device, measure(one, place)) for one in chosen]
        raw_s = _raw_micro_batch_s(device, place) if not args.only else 0.0
        raw = [_compare(one, device, measure(one, place), raw_s) for one in RAW if raw_s]
    print(_table(compared))
    print(_verdict(compared))
    print(_table(raw) if raw else "")
    if args.json:
        args.json.write_text(json.dumps(_json(device, compared, raw), indent=1) + "\n")


def measure(setting: Setting, place: Path) -> Journals:
    """The journals of a real run. Raises RuntimeError, with the end of what it printed, if it fails."""
    folder, done = place / setting.name, place / setting.name / "done"
    if not done.exists():
        if folder.exists():
            raise RuntimeError(f"{folder} holds a run that was cut off; move it away, and it is run again")
        throttles = ",".join(f"{one:g}" for one in setting.throttles)
        command = [sys.executable, "-m", "decentral.local", "--peers", str(len(setting.throttles))]
        command += ["--throttle", throttles, "--stop-after", f"{STOP_AFTER_S:g}s", "--state-dir", str(folder)]
        command += [part for override in setting.overrides for part in ("--set", override)]
        print(f"# {setting.name}: {throttles}", file=sys.stderr, flush=True)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
        if ran.returncode:
            raise RuntimeError(f"{setting.name}: {(ran.stdout + ran.stderr)[-2000:]}")
        done.touch()
    return [list(read(peer / "journal.jsonl")) for peer in sorted(folder.glob("peer-*"))]


def _compare(setting: Setting, device: DevicePace, journals: Journals, micro_batch_s: float = 0.0) -> Compared:
    known = replace(setting, micro_batch_s=setting.micro_batch_s or micro_batch_s)
    return Compared(
        setting,
        measured=figures(journals, WARM_UP_S, MEASURED_S),
        predicted=predict(known, device, WARM_UP_S, MEASURED_S),
        retold=replay(known, device, journals, WARM_UP_S, MEASURED_S),
    )


def _raw_micro_batch_s(device: DevicePace, place: Path) -> float:
    """The seconds of a micro-batch where nothing is emulated and no other peer computes."""
    (alone,) = figures(measure(RAW_REFERENCE, place), WARM_UP_S, MEASURED_S)
    return alone.step_s - device.beside_s


# Reports


def _table(compared: Sequence[Compared]) -> str:
    """Each setting, measured against predicted; the column `own` was simulated with each peer's own step time."""
    lines = [
        f"{'':14} {'throttles':>12} {'window':>6} {'batch':>6} | {'tokens/s':>15} {'off':>6} {'own':>6} | "
        f"{'busy':>11} | {'exchanges/s':>11} {'ms each':>11} {'kB each':>11} {'kB/s':>11}"
    ]
    for one in compared:
        setting, real, said = one.setting, swarm_figures(one.measured), swarm_figures(one.predicted)
        throttles = ",".join(f"{throttle:g}" for throttle in setting.throttles)
        lines.append(
            f"{setting.name:14} {throttles:>12} {setting.window_s:6g} {setting.micro_batch_s:6g} | "
            f"{real.tokens_per_s:7.0f} {said.tokens_per_s:7.0f} {_off(real, said):+6.1%} "
            f"{_off(real, swarm_figures(one.retold)):+6.1%} | {real.busy:5.3f} {said.busy:5.3f} | "
            f"{real.exchanges_per_s:5.1f} {said.exchanges_per_s:5.1f} {real.exchange_s * 1e3:5.1f} "
            f"{said.exchange_s * 1e3:5.1f} {real.exchange_bytes / 1e3:5.1f} {said.exchange_bytes / 1e3:5.1f} "
            f"{real.bytes_per_s / 1e3:5.0f} {said.bytes_per_s / 1e3:5.0f}"
        )
    return "\n".join(lines)


def _verdict(compared: Sequence[Compared]) -> str:
    rows = _agreements(compared)
    return "\n".join(f"{name}: rank correlation {one[0]:.3f}, median error {one[1]:.1%}" for name, one in rows.items())


def _agreements(compared: Sequence[Compared]) -> dict[str, tuple[float, float]]:
    """For each figure Spearman's rank correlation, and the median of the errors relative to what was measured."""
    told: list[tuple[str, Callable[[Compared], list[Figures]]]] = [
        ("predicted", lambda one: one.predicted),
        ("with own steps", lambda one: one.retold),
    ]
    formula = ((swarm_figures(one.measured).tokens_per_s, _formula(one.setting)) for one in compared)
    found = {"tokens/s of the swarm, by micro-batch and throttle without a simulator": _agreement(formula)}
    for how, simulated in told:
        swarms = [(swarm_figures(one.measured), swarm_figures(simulated(one))) for one in compared]
        peers = [pair for one in compared for pair in zip(one.measured, simulated(one), strict=True)]
        found[f"tokens/s of the swarm, {how}"] = _agreement((a.tokens_per_s, b.tokens_per_s) for a, b in swarms)
        found[f"tokens/s of each peer, {how}"] = _agreement((a.tokens_per_s, b.tokens_per_s) for a, b in peers)
        found[f"seconds of an exchange, {how}"] = _agreement((a.exchange_s, b.exchange_s) for a, b in swarms)
        found[f"bytes of an exchange, {how}"] = _agreement((a.exchange_bytes, b.exchange_bytes) for a, b in swarms)
        found[f"bytes/s of exchanges, {how}"] = _agreement((a.bytes_per_s, b.bytes_per_s) for a, b in swarms)
    return found


def _formula(setting: Setting) -> float:
    """Tokens/s if peers did nothing but micro-batches, which a simulator has to predict better."""
    return sum(setting.tokens_per_step / (setting.micro_batch_s * throttle) for throttle in setting.throttles)


def _agreement(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    real, said = zip(*pairs, strict=True)
    errors = [abs(ours - theirs) / theirs for theirs, ours in zip(real, said, strict=True)]
    return float(spearmanr(real, said).statistic), median(errors)


def _off(real: Figures, said: Figures) -> float:
    return said.tokens_per_s / real.tokens_per_s - 1


def _json(device: DevicePace, compared: Sequence[Compared], raw: Sequence[Compared]) -> dict[str, object]:
    return {
        "device": asdict(device),
        "agreement": {
            name: {"rank_correlation": one[0], "median_error": one[1]} for name, one in _agreements(compared).items()
        },
        "settings": [asdict(one) for one in compared],
        "without_emulation": [asdict(one) for one in raw],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journals", type=Path, help="keep the runs here; one that is here already is not repeated")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="of the settings; may be repeated")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
