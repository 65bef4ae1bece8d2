"""Vectors of a fragment that several ranks divide: each number is with one rank, and none is lost on its way."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from decentral.core import config
from decentral.engine import memory, shards
from decentral.engine.shards import Cut, Division, HostParts, Shards, Slot

CUTS = (Cut(torch.Size((5, 3)), 0), Cut(torch.Size((4, 6)), 1), Cut(torch.Size((2, 2)), 0))
WHOLE = torch.arange(15 + 24 + 4.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_the_ranks_have_together_is_the_whole_vector(ranks: int) -> None:
    division, found = Division(CUTS, ranks), torch.full_like(WHOLE, -1)
    parts = [division.taken(WHOLE, rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        assert part.numel() == division.part_elements(rank)
        division.fill(found, rank, part)
    assert torch.equal(found, WHOLE)
    assert sorted(torch.cat(parts).tolist()) == WHOLE.tolist()


def test_a_rank_has_rows_or_columns_of_a_matrix() -> None:
    assert Division(CUTS[:1], 2).taken(WHOLE[:15], 1).tolist() == [9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert Division(CUTS[1:2], 3).taken(WHOLE[:24], 0).tolist() == [0.0, 1.0, 6.0, 7.0, 12.0, 13.0, 18.0, 19.0]


def test_what_is_not_divided_each_rank_has_whole() -> None:
    division = Division((Cut(torch.Size((3,)), None),), 2)
    assert [division.taken(WHOLE[:3], rank).tolist() for rank in range(2)] == [[0.0, 1.0, 2.0]] * 2


def test_a_part_on_its_way_is_not_overwritten_before_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PART_S", 0.0)
    host = HostParts()
    host.put(0, Slot.CORRECTION, WHOLE)
    with pytest.raises(RuntimeError, match="CORRECTION of fragment 0 was not taken"):
        host.put(0, Slot.CORRECTION, WHOLE)
    assert host.take(0, Slot.CORRECTION) is WHOLE
    with pytest.raises(RuntimeError, match="CORRECTION of fragment 0 did not come"):
        host.take(0, Slot.CORRECTION)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which this rank would have ended. It has no memory for a part that another rank sends."""
    found: list[int] = []

    def receive(vector: Tensor, *_: object) -> None:
        if vector.is_floating_point():
            raise RuntimeError("can't allocate memory")
        vector.copy_(torch.tensor([shards._Request.RECEIVE, 0, Slot.THETA, 0]))

    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(dist, "send", lambda *_: None)
    monkeypatch.setattr(dist, "recv", receive)
    return found


def one_of_two(rank: int) -> Shards:
    group: Any = None
    one, division = Shards(rank, 2, group), Division(CUTS, 2)
    one.divisions.append((division, division))
    one.host.put(0, Slot.THETA, division.taken(WHOLE, rank))
    return one


def test_rank_0_ends_if_it_cannot_take_what_other_ranks_send(
    exits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    one_of_two(0).gather(0, Slot.THETA)
    assert exits == [1]
    assert capsys.readouterr().err == "error: rank 0 ends: can't allocate memory\n"


def test_another_rank_ends_if_it_cannot_do_what_rank_0_asks(
    exits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    one = one_of_two(1)
    one.start()
    one.end()
    assert exits == [1]
    assert capsys.readouterr().err == "error: rank 1 ends: can't allocate memory\n"


@pytest.mark.parametrize("fragments", [[100] * 12, [1, *[1000] * 12, 1], [300, 200, 100] * 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_owners_have_about_as_many_parameters_each_and_rank_0_fewer(fragments: list[int], ranks: int) -> None:
    loads = [0.0] * ranks
    for owner, count in zip(shards.owners_of(fragments, ranks), fragments, strict=True):
        loads[owner] += count
    assert max(loads[1:]) - min(loads[1:]) <= max(fragments)
    published = shards.PUBLISHED_SHARE * sum(fragments)
    assert loads[0] == pytest.approx(max(0.0, min(loads[1:]) - published), abs=max(fragments))


def test_rank_0_owns_fewer_fragments_than_the_other_ranks() -> None:
    owned = {ranks: shards.owners_of([1] * 24, ranks) for ranks in (2, 4, 8)}
    assert {ranks: owners.count(0) for ranks, owners in owned.items()} == {2: 7, 4: 0, 8: 0}


def test_a_rank_is_counted_with_what_it_takes_of_a_large_model_s_memory() -> None:
    """Rank 0 of two took 12.3 bytes a parameter, and 17.8 while it merged with a partner (benchmarks/islands.py)."""
    run = config.load(None, ["model.depth=12", "model.width=768", "train.micro_batch=1"])
    whole = memory.needs(run)
    count = len(whole.fragments)
    parameters = sum(one.parameters for one in whole.fragments)
    claims = [memory.part_of(whole, run, ranks).span_bytes(0, count) / parameters for ranks in (2, 4)]
    assert claims == [pytest.approx(15.8, rel=0.01), pytest.approx(10.6, rel=0.01)]
