"""Two processes as the ranks of one peer, over gloo on loopback: their steps, and what reaches the other rank.

The processes are started once for all tests, play one scenario after another, and write down what they have in the end.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from decentral.comm.codecs import blockwise
from decentral.core import config, jobs
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.island import Assignment, Island, follow
from decentral.engine.shards import Order
from decentral.engine.step import ALONE, Device, Ranks
from tests.patient_time import LIMIT_S

RANKS = 2
CPU = torch.device("cpu")
Ended = dict[str, Tensor]
Settings = dict[str, object]


# What the ranks play


def compute_of(
    folder: Path, train: Settings | None = None, algorithm: str = "pull", peer: str = "A", ranks: Ranks = ALONE
) -> Compute:
    settings = {"learning_rate": 1e-2, "warmup_steps": 2, "micro_batch": 4, **(train or {})}
    run = config.Config(
        model=config.ModelConfig(depth=1, width=32, context=16),
        data=config.DataConfig(kind="text", path=str(folder / "words.txt")),
        train=config.TrainConfig.model_validate(settings),
        gossip=config.GossipConfig.model_validate({"fragment_parameters": 1000, "algorithm": algorithm}),
    )
    corpus = corpora.load(run.data, run.model)
    return Compute(ComputeSetup(run, PeerId(peer), corpus, blockwise, Device(CPU, torch.float32, ranks=ranks), folder))


def steps(compute: Compute, count: int) -> None:
    for _ in range(count):
        compute.step()


def merge_with_partner(compute: Compute) -> None:
    """A window of every fragment with what another peer, alone, has trained in it."""
    train = compute.setup.config.train.model_dump()
    partner = compute_of(compute.setup.folder, train, compute.setup.config.gossip.algorithm, peer="B")
    steps(partner, 3)
    for fragment in compute.fragments:
        theirs = partner.do(jobs.CloseWindow(fragment.index, 1))
        assert isinstance(theirs, jobs.WindowClosed)
        compute.do(jobs.CloseWindow(fragment.index, 1))
        part = jobs.Contribution(PeerId("B"), theirs.tokens, theirs.layout, theirs.blob)
        merged = compute.do(jobs.Merge(fragment.index, 1, (part,)))
        assert isinstance(merged, jobs.Merged)
        assert merged.used == ("B",)


def import_donors_state(compute: Compute) -> None:
    donor = compute_of(compute.setup.folder, peer="B")
    steps(donor, 3)
    exported = [donor.do(jobs.ExportState(fragment.index)) for fragment in donor.fragments]
    blobs = tuple((one.fragment, one.layout, one.blob) for one in exported if isinstance(one, jobs.StateExported))
    assert compute.do(jobs.ImportState(blobs, 3)) == jobs.StateImported(True)


def save(compute: Compute) -> None:
    compute.do(jobs.Save())


def resume(compute: Compute) -> None:
    assert compute.resume()


def train(count: int) -> Callable[[Compute], None]:
    return lambda compute: steps(compute, count)


LITTLE_MEMORY = {"weights": "bfloat16", "recompute": True}
SCENARIOS: dict[str, tuple[Settings, list[Callable[[Compute], None]]]] = {
    "one step": ({}, [train(1)]),
    "one step of two micro-batches": ({"train": {"accumulate": 2}}, [train(1)]),
    "muon": ({"train": {"optimizer": "muon"}}, [train(3), merge_with_partner, train(2)]),
    "little memory": ({"train": LITTLE_MEMORY}, [train(3), merge_with_partner, train(2)]),
    "five steps": ({}, [train(5)]),
    "a merge": ({}, [train(3), merge_with_partner, train(2)]),
    "a donor's state": ({}, [train(3), import_donors_state, train(2)]),
    "a checkpoint": ({}, [train(3), save, train(2), resume, train(2)]),
}


def play(rank: int, ports: list[int], folder: Path) -> None:
    """One rank's part in all scenarios."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    for port, (name, (settings, script)) in zip(ports, SCENARIOS.items(), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        island = Island(CPU)
        ended = lead(island, folder, settings, script) if rank == 0 else followed(island)
        torch.save(ended, folder / f"{name} {rank}.pt")


def lead(island: Island, folder: Path, settings: Settings, script: list[Callable[[Compute], None]]) -> Ended:
    compute = compute_of(folder, ranks=island, **settings)  # type: ignore[arg-type]
    run, peer = compute.setup.config, compute.setup.peer
    island.assign(Assignment(run, peer, compute.sequences))
    island.wrap(compute.span)
    for act in script:
        act(compute)
    island.close()
    return what_it_has(compute)


def followed(island: Island) -> Ended:
    assignment = island.assignment()
    assert assignment is not None
    replica = follow(island, assignment, Device(CPU, torch.float32, ranks=island))
    island.close()
    lives = replica.inner.lives
    return {f"{live.fragment.index}.{name}": tensor for live in lives for name, tensor in live.tensors().items()} | {
        "steps": torch.tensor([live.steps for live in lives])
    }


def what_it_has(compute: Compute) -> Ended:
    lives = compute.span.inner.lives
    return {f"{live.fragment.index}.{name}": tensor for live in lives for name, tensor in live.tensors().items()} | {
        "steps": torch.tensor([live.steps for live in lives]),
        "counted": torch.tensor([compute.counters.tokens, compute.counters.micro_batches, lives[0].tokens]),
    }


# What they have in the end


@pytest.fixture(scope="module")
def ended(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Ended]:
    """`ended(scenario, rank)`"""
    folder = tmp_path_factory.mktemp("island")
    (folder / "words.txt").write_bytes(text.read_bytes())
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in SCENARIOS]
    spawn = multiprocessing.get_context("spawn")
    ports = [store.port for store in stores]
    ranks = [spawn.Process(target=play, args=(rank, ports, folder), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    return lambda name, rank: torch.load(folder / f"{name} {rank}.pt")


@pytest.fixture
def alone(text: Path, tmp_path: Path) -> Callable[[int], Compute]:
    """`alone(accumulate)`: the same peer as one process."""
    (tmp_path / "words.txt").write_bytes(text.read_bytes())
    return lambda accumulate: compute_of(tmp_path, {"accumulate": accumulate})


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_have_the_same_bits(ended: Callable[[str, int], Ended], name: str) -> None:
    first, other = ended(name, 0), ended(name, 1)
    assert set(other) == set(first) - {"counted"}
    for key, tensor in other.items():
        assert torch.equal(tensor, first[key]), key


@pytest.mark.parametrize(("name", "accumulate"), [("one step", 2), ("one step of two micro-batches", 4)])
def test_a_step_of_two_ranks_is_that_of_one_process_with_all_their_micro_batches(
    ended: Callable[[str, int], Ended], alone: Callable[[int], Compute], name: str, accumulate: int
) -> None:
    """AdamW's first moment after one step is the clipped mean gradient, but for a factor."""
    compute, found = alone(accumulate), ended(name, 0)
    compute.step()
    for live in compute.span.inner.lives:
        gradient, mean = found[f"{live.fragment.index}.exp_avg"], live.state.exp_avg
        assert torch.linalg.vector_norm(gradient - mean) < 1e-5 * torch.linalg.vector_norm(mean)
    assert found["counted"].tolist() == [accumulate * 4 * 16, accumulate, accumulate * 4 * 16]


def test_what_changed_rank_0_alone_is_in_the_other_rank_s_weights(ended: Callable[[str, int], Ended]) -> None:
    """The same five steps end elsewhere with a merge, or a donor's state, between the third and the fourth."""
    for name in ("a merge", "a donor's state"):
        assert ended(name, 1)["steps"].tolist() == [5, 5, 5]
        assert not torch.equal(ended(name, 1)["0.theta"], ended("five steps", 1)["0.theta"])


def test_after_a_checkpoint_the_other_rank_goes_on_with_its_counts_too(ended: Callable[[str, int], Ended]) -> None:
    assert ended("a checkpoint", 1)["steps"].tolist() == [5, 5, 5]
    assert torch.equal(ended("a checkpoint", 1)["0.theta"], ended("five steps", 1)["0.theta"])


def test_after_a_failed_step_rank_0_does_not_wait_for_ranks_that_take_no_orders() -> None:
    island = Island.__new__(Island)  # a rank that has not connected
    island.lives, island.under_way = (), True
    with pytest.raises(RuntimeError, match="a step has failed on this rank"):
        island.tell(Order.LIFT, 0, 0)
