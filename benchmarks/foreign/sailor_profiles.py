"""What Sailor's artifact measured: seconds and bytes of each layer, and the rates of links between zones.

Start at `Profiles.read`. Sizes are bytes of 32-bit floats; a link's rate depends on the size of a message.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.foreign import checkout
from decentral.scheduler.topology.arrays import Floats

PROJECT = "Sailor (github.com/eth-easl/sailor, branch sosp25_ae)"
SIMULATIONS = "sailor/Planner/simulations"
TRAINING = {"OPT-350": "training_config_opt_350.json", "GPT-Neo-2.7": "training_config_gpt_neo27.json"}
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds of each of L layers for one micro-batch on one group of devices, and of an optimiser step."""

    compute_L: Floats  # forward and backward
    update_s: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerSizes:
    """Bytes of each of L layers on one device of a group."""

    weights_L: Floats
    output_L: Floats  # what the layer sends on, for one sequence
    kept_L: Floats  # activations that wait for the backward pass, for one sequence


@dataclass(frozen=True, slots=True)
class Site:
    """Where a group of devices is, and of which kind the devices are."""

    zone: str
    device: str


@dataclass(frozen=True, slots=True, eq=False)
class Profiles:
    """All measurements of one model. A group is the `degree` devices of one node that share each layer."""

    model: str
    times: Mapping[tuple[str, int, int], LayerTimes]  # (device, micro-batch, degree)
    sizes: Mapping[int, LayerSizes]  # degree
    links: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, model: str) -> "Profiles":
        """Return the measurements of a model in a checkout. Raises UserError if the folder is none."""
        seconds = checkout.tree(folder, f"{SIMULATIONS}/profiles_tmp.json", PROJECT)[model]
        bytes_of = checkout.tree(folder, "sailor/Planner/llm_info.json", PROJECT)[model]
        links = checkout.tree(folder, "sailor/providers/multizone_bandwidths_het.json", PROJECT)
        times = {
            (device, int(batch), int(degree)): _times(layers)
            for device, batches in seconds.items()
            for batch, degrees in batches.items()
            for degree, layers in degrees.items()
        }
        return cls(model, times, {int(degree): _sizes(layers) for degree, layers in bytes_of.items()}, links)

    @property
    def layers(self) -> int:
        """Return the number of layers, with the embedding and the head."""
        return len(self.sizes[1].weights_L)

    def seconds(self, size: float, sender: Site, receiver: Site, devices: int) -> float:
        """Return the seconds to send `size` bytes between groups of which `devices` devices take part.

        The artifact fitted a link's GB/s by a polynomial in the binary logarithm of the message's size in MB.
        """
        count = str(devices)
        fit = self.links[sender.zone][sender.device][count][receiver.zone][receiver.device][count][0]
        rate, power = 0.0, math.log2(size / 1e6)
        for factor in fit:
            rate = rate * power + factor
        return size / 1e9 / rate

    def matrix(self, size: float, sites: tuple[Site, ...], devices: int) -> Floats:
        """Return the seconds to send `size` bytes between each pair of N groups, N x N; 0 within a group."""
        kinds = tuple(dict.fromkeys(sites))
        kind_N = np.array([kinds.index(site) for site in sites])
        seconds_KK = np.zeros((len(kinds), len(kinds)))
        for (a, sender), (b, receiver) in itertools.product(enumerate(kinds), repeat=2):
            seconds_KK[a, b] = self.seconds(size, sender, receiver, devices)
        seconds_NN: Floats = seconds_KK[np.ix_(kind_N, kind_N)]
        np.fill_diagonal(seconds_NN, 0.0)
        return seconds_NN


def _times(layers: Mapping[str, list[float]]) -> LayerTimes:
    rows = np.array([layers[str(at)] for at in range(len(layers))])
    return LayerTimes(rows[:, 0] + rows[:, 1], float(rows[:, 2].max()))


def _sizes(layers: Mapping[str, Mapping[str, float]]) -> LayerSizes:
    rows = [layers[str(at)] for at in range(len(layers))]
    floats = [[row[key] for row in rows] for key in ("params_floats", "act_output_floats", "act_mem_floats")]
    return LayerSizes(*(np.array(column) * FLOAT_BYTES for column in floats))
