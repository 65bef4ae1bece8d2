"""Vectors of a fragment that several ranks divide: each number is with one rank, and none is lost on its way."""

import pytest
import torch

from decentral.core import config
from decentral.engine import memory, shards
from decentral.engine.shards import Cut, Division, HostParts, Slot

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
    assert host.get(0, Slot.CORRECTION, take=True) is WHOLE
    with pytest.raises(RuntimeError, match="CORRECTION of fragment 0 did not come"):
        host.get(0, Slot.CORRECTION, take=True)


def test_gossip_s_vectors_are_replaced_by_newer_ones() -> None:
    host = HostParts()
    host.put(0, Slot.PHI, WHOLE)
    host.put(0, Slot.PHI, newer := WHOLE + 1)
    assert host.get(0, Slot.PHI, take=False) is newer
    assert host.get(0, Slot.PHI, take=False) is newer


def test_a_sum_counts_a_missing_vector_as_zero() -> None:
    host, ones = HostParts(), torch.ones_like(WHOLE)
    host.put(0, Slot.PHI, WHOLE)
    assert torch.equal(host.get(0, Slot.PHI_AND_RESIDUAL, take=False), WHOLE)
    host.put(0, Slot.RESIDUAL, 3 * ones)
    assert torch.equal(host.get(0, Slot.PHI_AND_RESIDUAL, take=False), WHOLE + 3)
    assert torch.equal(host.get(0, Slot.PHI_AND_CHANGE, take=False), WHOLE - 3)
    host.rename(0, Slot.RESIDUAL, Slot.EARLIER)
    assert torch.equal(host.get(0, Slot.PHI_AND_CHANGE, take=False), WHOLE + 3)
    host.put(0, Slot.RESIDUAL, ones)
    assert torch.equal(host.get(0, Slot.PHI_AND_CHANGE, take=False), WHOLE + 2)
    assert torch.equal(host.get(0, Slot.PHI, take=False), torch.arange(15 + 24 + 4.0)), "a sum changes no part"


def test_a_missing_residual_replaces_the_one_where_it_is_moved() -> None:
    host = HostParts()
    host.put(0, Slot.PHI, WHOLE)
    host.put(0, Slot.EARLIER, WHOLE)
    host.rename(0, Slot.RESIDUAL, Slot.EARLIER)
    assert torch.equal(host.get(0, Slot.PHI_AND_CHANGE, take=False), WHOLE)


@pytest.mark.parametrize(("slot", "most"), [(Slot.INT8_RESIDUAL, 1 / 250), (Slot.BF16_RESIDUAL, 1 / 256)])
def test_a_rounded_residual_replaces_the_older_one_until_it_is_dropped(slot: Slot, most: float) -> None:
    host = HostParts()
    host.put(0, Slot.PHI, WHOLE)
    host.put(0, Slot.RESIDUAL, -WHOLE)
    host.put(0, slot, 0.3 * WHOLE)
    apart = (host.get(0, Slot.RESIDUAL, take=False) - 0.3 * WHOLE).abs().max()
    assert 0 < apart <= 0.3 * WHOLE.max() * most
    host.rename(0, Slot.RESIDUAL, Slot.EARLIER)
    apart = (host.get(0, Slot.PHI_AND_CHANGE, take=False) - 1.3 * WHOLE).abs().max()
    assert 0 < apart <= 0.3 * WHOLE.max() * most
    host.drop(0, Slot.EARLIER)
    assert torch.equal(host.get(0, Slot.PHI_AND_RESIDUAL, take=False), WHOLE)


def test_a_rank_is_counted_with_what_it_takes_of_a_large_model_s_memory() -> None:
    """Rank 0 of two took 12.3 bytes a parameter, and 17.8 while it merged with a partner (benchmarks/islands.py)."""
    run = config.load(None, ["model.depth=12", "model.width=768", "train.micro_batch=1"])
    whole = memory.needs(run)
    count = len(whole.fragments)
    parameters = sum(one.parameters for one in whole.fragments)
    claims = [memory.part_of(whole, run, ranks).span_bytes(0, count) / parameters for ranks in (2, 4)]
    assert claims == [pytest.approx(16.8, rel=0.01), pytest.approx(12.1, rel=0.01)]
