"""The Helix judge: the flow of a placement, the search for placements, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.foreign import helix
from decentral.scheduler.spans.moves import filled, in_a_row
from decentral.scheduler.spans.searches import SEARCHES, search
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget


def case(seed: int = 0, nodes: int = 6, layers: int = 6) -> dict[str, object]:
    """Unequal nodes that hold 2 to 4 layers each, on links that limit the flow."""
    rng = np.random.default_rng(seed)
    rates = [[float(rng.uniform(50, 100)) / size for size in range(1, rng.integers(3, 6))] for _ in range(nodes)]
    ends = [[end, node, 60.0] if end == -1 else [node, end, 60.0] for node in range(nodes) for end in (-1, -2)]
    links = [[i, j, float(rng.uniform(5, 30))] for i in range(nodes) for j in range(nodes) if i != j]
    return {"name": "small", "layers": layers, "throughput": rates, "links": ends + links}


def problem(tmp_path: Path, content: object = None) -> helix.HelixProblem:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(content or case()))
    return helix.load(str(path))


def flow_by_linear_programme(content: dict[str, object], spans_N2: Ints) -> float:
    """The maximum flow from the case itself: one variable for each edge that the rules allow."""
    layers, rates, links = content["layers"], content["throughput"], content["links"]
    assert isinstance(links, list)
    assert isinstance(rates, list)
    span = {node: (int(first), int(last)) for node, (first, last) in enumerate(spans_N2) if last > first}
    ends = {-1: (0, 0), -2: (layers, layers)} | span
    edges = [(i, j, rate) for i, j, rate in links if i in ends and j in ends and ends[i][1] == ends[j][0]]
    balance, through = np.zeros((len(rates), len(edges))), np.zeros((len(rates), len(edges)))
    for number, (i, j, _) in enumerate(edges):
        if j >= 0:
            balance[j, number] = through[j, number] = 1.0
        if i >= 0:
            balance[i, number] -= 1.0
    most = [rates[node][span[node][1] - span[node][0] - 1] if node in span else 0.0 for node in range(len(rates))]
    value = [-1.0 if i == -1 else 0.0 for i, _, _ in edges]
    found = linprog(value, through, most, balance, np.zeros(len(rates)), [(0, rate) for _, _, rate in edges])
    return -float(found.fun)


@pytest.mark.parametrize("seed", range(4))
def test_the_flow_equals_that_of_a_linear_programme(tmp_path: Path, seed: int) -> None:
    content, rng = case(seed), np.random.default_rng(seed)
    one = problem(tmp_path, content)
    for make in (in_a_row, filled) * 3:
        spans_N2 = make(one, rng)
        assert one.flow(spans_N2)[0] == pytest.approx(flow_by_linear_programme(content, spans_N2))


def test_an_edge_needs_an_end_exactly_where_the_next_span_begins(tmp_path: Path) -> None:
    content = {"layers": 4, "throughput": [[9.0] * 4] * 2, "links": [[-1, 0, 8.0], [0, 1, 5.0], [1, -2, 8.0]]}
    one = problem(tmp_path, content)
    assert one.flow(np.array([[0, 2], [2, 4]]))[0] == 5.0
    assert one.flow(np.array([[0, 3], [2, 4]]))[0] == 0.0
    assert one.flow(np.array([[0, 2], [0, 0]]))[0] == 0.0


@pytest.mark.parametrize("solver", SEARCHES)
def test_every_search_stays_within_memory_and_below_the_bound(tmp_path: Path, solver: str) -> None:
    content = case(1)
    one = problem(tmp_path, content)
    found = search(one, solver, SearchBudget(rounds=200), np.random.default_rng(0))
    sizes = found.spans_N2[:, 1] - found.spans_N2[:, 0]
    assert (sizes <= one.most_N).all()
    assert 0 < found.value <= one.bound() * (1 + 1e-9)
    assert found.value == pytest.approx(flow_by_linear_programme(content, found.spans_N2))


def test_the_bound_divides_nodes_but_not_their_rates(tmp_path: Path) -> None:
    """A token takes 1/10 + 1/15 of a second of spans with two layers and one, or 3/15 of spans with one layer."""
    links = [[i, j, 99.0] for i in (-1, 0, 1, 2) for j in (-2, 0, 1, 2) if i != j and (i, j) != (-1, -2)]
    one = problem(tmp_path, {"layers": 3, "throughput": [[15.0, 10.0]] * 3, "links": links})
    assert one.bound() == pytest.approx(18.0)


def test_the_command_prints_the_throughput_and_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, content = tmp_path / "case.json", case()
    path.write_text(json.dumps(content))
    assert helix.main([str(path), "--seconds", "0.1", "--seed", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["throughput"] == pytest.approx(flow_by_linear_programme(content, np.array(shown["layers"])))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 0}, "layers: "),
        ({"throughput": [[1.0, -1.0]]}, "throughput.0.1: "),
        ({"throughput": []}, "throughput: "),
        ({"links": [[0, 77, 1.0]]}, "joins no two of 6 nodes"),
        ({"links": [[0, 1]]}, "links.0"),
        ({"links": None}, "links: "),
    ],
)
def test_a_bad_case_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], said: str
) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case() | change))
    assert helix.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_file_and_bad_seconds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert helix.main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "text.json").write_text("not JSON")
    assert helix.main([str(tmp_path / "text.json")]) == 2
    assert "case of Helix" in capsys.readouterr().err
    assert helix.main([str(tmp_path / "none.json"), "--seconds", "0"]) == 2
    assert "--seconds expects" in capsys.readouterr().err
