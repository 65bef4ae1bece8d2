"""Place a model on nodes as Helix does (Mei et al., ASPLOS 2025), by our search, and print the throughput.

    python -m benchmarks.foreign.helix CASE.json --seconds 30 --seed 1 --json

A case is a JSON object: `layers`, the number of layers; `throughput`, the tokens/s of each node when it holds 1, 2, ...
layers; `links`, triples (from, to, tokens/s) of node numbers, where -1 is the source and -2 the sink. A node holds one
span of layers. Tokens pass from node i to node j only where i's span ends exactly where j's begins. The throughput is
the maximum flow from the source to the sink. The result also has `bound`, which no placement exceeds.
"""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from benchmarks.foreign import helix_flow
from decentral.commands import shared
from decentral.core import foreign_file, strict_json
from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.scheduler.spans.moves import filled, in_a_row, paces
from decentral.scheduler.spans.problem import SpanValue, soft_minimum
from decentral.scheduler.spans.searches import SEARCHES, search
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

SOURCE, SINK = -1, -2
CASE_BYTES = 64_000_000
LEAST = 1e-3  # share of the bound that a layer without holders supplies in the guide, so that its logarithm is finite
STARTS = 8  # from paces, and as many at random

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Case(BaseModel):
    """The content of a case file; other keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)
    layers: int = Field(ge=1, le=10_000)
    throughput: list[Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]] = Field(
        min_length=1, max_length=10_000
    )
    links: list[tuple[int, int, Rate]]


@dataclass(frozen=True, eq=False)
class HelixProblem:
    """A case as a `SpanProblem`."""

    layers: int
    rate_NS: Floats  # tokens/s of each node when it holds s layers; s = 0 gives 0
    most_N: Ints  # the most layers that each node may hold
    link_NN: Floats
    source_N: Floats
    sink_N: Floats

    @cached_property
    def reach_NL(self) -> Ints:
        return np.asarray(np.minimum(np.arange(self.layers) + self.most_N[:, None], self.layers))

    def supply(self, peer: int, first: int, last: int) -> float:
        return float(self.rate_NS[peer, last - first])

    def flow(self, spans_N2: Ints) -> tuple[float, Floats]:
        """Return the maximum flow, and the flow through each node, in tokens/s."""
        return helix_flow.flow(spans_N2, self.layers, self.rate_NS, self.link_NN, self.source_N, self.sink_N)

    guide_s = 0.0  # only the clock limits the search

    def evaluate(self, spans_N2: Ints, progress: SearchProgress | None = None) -> SpanValue:
        value, through_N = self.flow(spans_N2)
        capacity_N = self.rate_NS[np.arange(len(spans_N2)), spans_N2[:, 1] - spans_N2[:, 0]]
        supply_L = helix_flow.supply(spans_N2, self.layers, self.rate_NS, LEAST * self.bound())
        return SpanValue(value, 1 - through_N / np.maximum(capacity_N, through_N + 1e-12), supply_L.min() / supply_L)

    def guide(self, spans_N2: Ints, smooth: float) -> float:
        supply_L = helix_flow.supply(spans_N2, self.layers, self.rate_NS, LEAST * self.bound())
        return (1 - smooth) * self.flow(spans_N2)[0] + smooth * soft_minimum(supply_L)

    def limit(self, spans_N2: Ints) -> float:
        return float(helix_flow.supply(spans_N2, self.layers, self.rate_NS, 0.0).min())

    def valid(self, spans_N2: Ints) -> bool:
        return True

    def repaired(self, spans_N2: Ints) -> Ints:
        return spans_N2

    def bound(self) -> float:
        return self._bound

    @cached_property
    def _bound(self) -> float:
        """The flow if a node could be divided over several spans (a linear programme over kinds of nodes)."""
        kinds = Counter(zip(map(tuple, self.rate_NS.tolist()), self.most_N.tolist(), strict=True))
        tail, head, use, kind = [], [], [], []
        for number, (rate_S, most) in enumerate(kinds):
            for first, size in itertools.product(range(self.layers), range(1, most + 1)):
                if first + size <= self.layers:
                    tail.append(first)
                    head.append(first + size)
                    use.append(1 / rate_S[size])
                    kind.append(number)
        arcs, scale = np.arange(len(tail)), float(self.rate_NS.max())
        ends = coo_matrix(
            (np.repeat([1.0, -1.0], len(arcs)), (np.concatenate((tail, head)), np.concatenate((arcs, arcs)))),
            shape=(self.layers + 1, len(arcs)),
        ).tocsr()
        nodes = coo_matrix((np.array(use) * scale, (kind, arcs)), shape=(len(kinds), len(arcs)))
        value = -(np.array(tail) == 0).astype(float)
        found = linprog(value, nodes, list(kinds.values()), ends[1:-1], np.zeros(self.layers - 1), method="highs")
        return -float(found.fun) * scale

    def starts(self, rng: np.random.Generator) -> list[Ints]:
        paced = [in_a_row(self, rng, pace) for pace in paces(self)[:STARTS]]
        return paced + [make(self, rng) for _ in range(STARTS // 2) for make in (in_a_row, filled)]


def load(path: str) -> HelixProblem:
    """Return the problem in a case file.

    Raises:
        UserError: If the file cannot be read, or is not a case.
    """
    try:
        case = Case.model_validate_json(foreign_file.read_bytes(path, CASE_BYTES))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a case file of Helix") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place + ': ' if place else ''}{first['msg']}; expected a case of Helix") from None
    nodes = len(case.throughput)
    most = max(map(len, case.throughput))
    rate_NS, link_VV = np.zeros((nodes, most + 1)), np.zeros((nodes + 2, nodes + 2))
    for node, rates in enumerate(case.throughput):
        rate_NS[node, 1 : len(rates) + 1] = rates
    for one, two, rate in case.links:
        if not (SOURCE <= one < nodes and (two == SINK or 0 <= two < nodes) and one != two):
            raise UserError(f"{path}: links: [{one}, {two}, ...] joins no two of {nodes} nodes, source -1 and sink -2")
        link_VV[one, two] += rate  # -1 and -2 are the last row and the column before the last
    most_N = np.array([min(len(rates), case.layers) for rates in case.throughput])
    return HelixProblem(case.layers, rate_NS, most_N, link_VV[:nodes, :nodes], link_VV[-1, :nodes], link_VV[:nodes, -2])


def main(arguments: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    parser = shared.Parser(prog="python -m benchmarks.foreign.helix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case", metavar="CASE.json", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of the search (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    parser.add_argument("--solver", choices=SEARCHES, default="genetic")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < float("inf"):
        raise UserError(f"--seconds expects a number above 0; got {options.seconds}")
    begin = time.monotonic()
    problem = load(options.case)
    problem.guide(np.zeros((len(problem.most_N), 2), np.int64), 0.5)  # compiles the flow
    budget = SearchBudget(max(1.0, options.seconds - (time.monotonic() - begin)), clock=time.monotonic)
    best = search(problem, options.solver, budget, chance.arrays(options.seed, "helix"))
    result = {"throughput": best.value, "layers": best.spans_N2.tolist(), "bound": problem.bound()}
    if options.json:
        print(strict_json.dumps(result))
        return
    print(f"{best.value:.6g} tokens/s of at most {problem.bound():.6g}")
    for node, (first, last) in enumerate(best.spans_N2.tolist()):
        print(f"node {node}: layers {first} to {last - 1}" if first < last else f"node {node}: left out")


if __name__ == "__main__":
    sys.exit(main())
