"""A swarm of volunteers for the planner: homes of all speeds, and laboratories behind links that their devices share.

python -m benchmarks.planner_volunteers [--peers 1000] [--seed 0] > volunteers.json
python -m decentral.plan volunteers.json --model deep.yaml --seconds 30
"""

import argparse
import json

import numpy as np

from decentral.core.strict_json import JsonObject

PLACES = ("Frankfurt", "London", "Ohio", "Oregon", "Seoul", "Singapore", "Sydney", "Virginia")
CARDS = (
    ("RTX 3060", 12, 51),
    ("RTX 3070", 8, 81),
    ("RTX 4060", 8, 61),
    ("RTX 3090", 24, 142),
    ("RTX 4090", 24, 330),
    ("GTX 1660", 6, 20),
)  # GB and peak TFLOP/s
LAB_CARDS = (("A100", 40, 312), ("V100", 16, 112), ("RTX 3090", 24, 142))
ACCESS = ((0.02, 0.1), (0.04, 0.25), (0.1, 0.5), (0.5, 1.0))  # Gb/s up and down: cable, vectored DSL, fibre, fast fibre
ACCESS_SHARE = (0.35, 0.3, 0.25, 0.1)
LAB_SHARE, LAB_PEERS, LAB_GBPS = 0.3, (8, 32), (1.0, 10.0)


def volunteers(count: int, seed: int) -> JsonObject:
    """The topology file of so many peers: 30% in labs of 8 to 32 behind 1 or 10 Gb/s, the others at home."""
    rng = np.random.default_rng(seed)
    peers: list[JsonObject] = []
    sites: dict[str, JsonObject] = {}
    while len(peers) < LAB_SHARE * count:
        lab = f"{PLACES[len(sites) % len(PLACES)]} lab {len(sites)}"
        card, gbps = LAB_CARDS[int(rng.integers(len(LAB_CARDS)))], float(rng.choice(LAB_GBPS))
        sites[lab] = {"up_gbps": gbps, "down_gbps": gbps}
        size = min(int(rng.integers(*LAB_PEERS)), count - len(peers))
        peers += [_peer(len(peers) + number, lab, card, (10.0, 10.0)) for number in range(size)]
    while len(peers) < count:
        place, card = PLACES[int(rng.integers(len(PLACES)))], CARDS[int(rng.integers(len(CARDS)))]
        access = ACCESS[int(rng.choice(len(ACCESS), p=ACCESS_SHARE))]
        measured = rng.lognormal(0, 0.2, 2) * access  # no two homes reach exactly the same
        peers.append(_peer(len(peers), place, card, (round(measured[0], 4), round(measured[1], 4))))
    return {
        "peers": peers,
        "inside": {"delay_ms": 5, "bandwidth_gbps": 10},
        "across": {"delay_ms": 60, "bandwidth_gbps": 1},
        "sites": sites,
    }


def _peer(number: int, region: str, card: tuple[str, int, int], access: tuple[float, float]) -> JsonObject:
    device, memory_gb, tflops = card
    return {
        "id": f"p{number:04}", "region": region, "device": device, "memory_gb": memory_gb, "tflops": tflops,
        "up_gbps": access[0], "down_gbps": access[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(volunteers(options.peers, options.seed)))


if __name__ == "__main__":
    main()
