"""What security costs a real swarm in which nobody lies: tokens, processor time and bytes, with it and without.

    python -m benchmarks.security_price [--peers 2] [--seconds 60] [--rounds 2] [--set KEY=VALUE] [--json FILE]

The swarms are processes over libp2p on loopback with the default config, one after another: on off off on, in each
round. `on`: a private swarm, in which each peer proves its invitation to each other, and has all its defences. `off`: a
public one, whose peers merge what they are sent as it is (tests/hostile/credulous.py). Signatures of records, digests
of blobs and the limits of queues are in both, as there is no switch for them; audits of routes have a benchmark of
their own (benchmarks/route_audits.py).

Two swarms that are alike differ by some per cent in tokens a second, by where their memory lies and what the machine
does besides. What security takes of training is seen better where it is taken: `beside_share` is the processor time of
all threads but the training threads, libp2p daemons included, by the peers' time; `training_share` falls by what stops
training at step edges. Their changes together are the price where each core trains. Time counts from --settle after the
last peer has joined. Ratios are medians over neighbouring pairs, on by off.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.hostile_processes import hostile
from benchmarks.trained_swarm import say
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals
from decentral.core.strict_json import JsonObject

ORDER = (True, False, False, True)
TICKS = os.sysconf("SC_CLK_TCK")
FIGURES = ("tokens_per_s", "training_share", "beside_share", "bytes_per_token", "bytes_per_exchange")


class PricedSwarm(LocalSwarm):
    """All peers of a swarm with its defences, or all without."""

    secured = True

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> Any:
        return super().spawn(number, arguments if self.secured else hostile(arguments, ["--credulous"]), **options)


def main() -> None:
    args = _arguments()
    ratios: dict[str, list[float]] = {name: [] for name in FIGURES}
    prices = []
    for _ in range(args.rounds):
        found = []
        for secured in ORDER:
            found.append(measured(secured, args))
            say({"security": "on" if secured else "off"} | found[-1], args.json)
        for with_it, without in ((found[0], found[1]), (found[3], found[2])):
            for name in FIGURES:
                ratios[name].append(with_it[name] / without[name])
            lost = without["training_share"] - with_it["training_share"]
            prices.append(lost + with_it["beside_share"] - without["beside_share"])
    line = {"on_by_off": {name: round(median(values), 4) for name, values in ratios.items()}}
    say(line | {"price": round(median(prices), 5), "prices": [round(one, 5) for one in prices]}, args.json)


def measured(secured: bool, args: argparse.Namespace) -> dict[str, float]:
    """One swarm's figures over --seconds."""
    settings = [part for one in args.set for part in ("--set", one)]
    flags = ["--peers", str(args.peers), "--stop-after", "1e6s", *settings, *(["--private"] if secured else [])]
    with tempfile.TemporaryDirectory(prefix="price-") as folder:
        swarm = PricedSwarm(parse_local(flags), Path(folder))
        swarm.secured = secured
        try:
            swarm.begin(args.peers)
            time.sleep(args.settle)
            begin, used = time.time(), beside_s(swarm)
            time.sleep(args.seconds)
            end, used = time.time(), beside_s(swarm) - used
            swarm.stop()
            journals = [list(read(member.folder / "journal.jsonl")) for member in swarm.members]
            return figures(journals, begin, end, used)
        finally:
            swarm.kill()


def figures(journals: Iterable[Sequence[JsonObject]], begin: float, end: float, beside: float) -> dict[str, float]:
    """Of the lines between the two times; `beside` is the processor time of all but the training threads, in s."""
    tokens = moved = exchanges = 0
    shares = []
    for journal in journals:
        lines = [line for line in journal if begin <= line["t"] <= end]
        steps = [line for line in lines if line["event"] == "step"]
        done = [line for line in lines if line["event"] == "exchange" and line["outcome"] == "done"]
        tokens += sum(line["tokens"] for line in steps)
        moved += sum(line["received_bytes"] + line["sent_bytes"] for line in done)
        exchanges += len(done)
        shares.append(PeerTotals.of(steps).work.spent.shares()["training"])
    return {
        "tokens_per_s": tokens / (end - begin),
        "bytes_per_token": moved / tokens,
        "bytes_per_exchange": moved / exchanges,
        "training_share": mean(shares),
        "beside_share": beside / len(shares) / (end - begin),
        "exchanges": exchanges,
    }


def beside_s(swarm: LocalSwarm) -> float:
    """Processor time so far of the peers and of all that they have started, but for each peer's busiest thread."""
    total = 0.0
    for member in swarm.members:
        own = [_cpu_s(path) for path in Path(f"/proc/{member.process.pid}/task").glob("*/stat")]
        started = [path for path in Path("/proc").glob("[0-9]*/stat") if path.parent.name != str(member.process.pid)]
        total += sum(own) - max(own) + sum(_cpu_s(path) for path in started if _session(path) == member.process.pid)
    return total


def _session(stat: Path) -> int:
    fields = _fields(stat)
    return int(fields[3]) if fields else 0


def _cpu_s(stat: Path) -> float:
    fields = _fields(stat)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def _fields(stat: Path) -> list[str]:
    """What follows the name, from the state on; none where the process has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each swarm, from --settle after all have joined"
    )
    parser.add_argument("--settle", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=2, help="of four swarms each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the swarm's processes end with this one
    return parser.parse_args()


if __name__ == "__main__":
    main()
