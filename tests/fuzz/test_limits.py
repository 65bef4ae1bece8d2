"""What others can make grow in a node: each container is there, and keeps its cap after a flood.

CAPS lists them. What grows in a flooded node and is not in CAPS fails as well, so that no new one is forgotten.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from random import Random
from typing import Any, get_type_hints

import pytest

from decentral.comm.gossip import exchange, snapshots
from decentral.comm.net import fair_shares
from decentral.comm.pipeline import commits, execution_table, lifecycle, next_peer
from decentral.comm.rounds import collection, join_requests, members
from decentral.comm.rounds import round as rounds
from decentral.comm.wire import messages, meter
from decentral.peers.joining import donor
from decentral.peers.membership import address_book, holders, roster
from decentral.scheduler.placement import plans
from tests.fuzz.fuzzed_node import FuzzedNode, Kind

KINDS: tuple[Kind, ...] = ("pull", "synchronous", "spans", "private")
STEPS = 400
MANY = 64  # entries: what has more has grown

Container = tuple[type, str, int]
"""A class, the attribute of it that is a container, and how many entries that may have."""

CAPS: tuple[Container, ...] = (
    (roster.Roster, "live", roster.MAX_PEERS),
    (roster.Roster, "_known", 3 * roster.MAX_PEERS),
    (roster.Roster, "_dropped", roster.MOST_DROPPED + roster.MAX_PEERS),
    (roster.Roster, "_valid", roster.MOST_DROPPED),
    (roster.SoonerLookups, "_sought", roster.MOST_SOUGHT),
    (holders.Holders, "_places", roster.MAX_PEERS),
    (address_book.AddressBook, "known", address_book.ADDRESSES_KEPT),
    (commits.HoldLimits, "_waits", commits.ORIGINS_KEPT),
    (commits.HoldLimits, "_rests", commits.ORIGINS_KEPT),
    (commits.CommitProtocol, "_routes", commits.COMMITS_KEPT),
    (meter.Meter, "links", meter.MOST_LINKS),
    (snapshots.SnapshotStore, "waiting", snapshots.MAX_WAITING_PULLS),
    (snapshots.PublishedSnapshot, "parts", snapshots.MOST_PARTS),
    (snapshots.TokenClaims, "left", snapshots.MOST_BUDGETS),
    (exchange.PullExchange, "seen", snapshots.MOST_SEEN),
    (execution_table.ExecutionTable, "counted", execution_table.COUNTED_KEPT),
    (lifecycle.ExecutionLifecycle, "_heard_at", next_peer.MOST_NEXT_PEERS),
    (rounds.Rounds, "_waiting", rounds.MAX_WAITING_COLLECTS),
    (collection.Collection, "_under_way", collection.MAX_QUESTIONS),
    (join_requests.JoinRequests, "waiting", join_requests.MAX_WAITING_NEWCOMERS),
    (join_requests.JoinRequests, "_asked_at", join_requests.MAX_WAITING_NEWCOMERS),
    (join_requests.JoinRequests, "_rests", join_requests.MOST_REMEMBERED),
    (join_requests.JoinRequests, "_reported", join_requests.MOST_REMEMBERED),
    (members.DonorHolds, "holds", members.MOST_HOLDS),
    (members.DonorHolds, "_begun", members.MOST_HELD_FOR),
    (donor.Donor, "_served", donor.MOST_SERVED),
    (donor.Donor, "_strangers", donor.STRANGERS_SERVED),
    (donor.Donor, "_unknown", donor.MOST_WAITING),
    (plans.SwarmPlans, "known", messages.MAX_PLANS),
    (fair_shares.FairShare, "by_sender", fair_shares.IDLE_STREAMS),
)
NAMES = [f"{owner.__name__}.{attribute}" for owner, attribute, _ in CAPS]


def owned(root: object) -> Iterator[tuple[str, Collection[Any]]]:
    """Every container that the object reaches, by the class and the attribute that it is."""
    seen, left = set[int](), [("", root)]
    while left:
        name, one = left.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | Enum | type | Random | range):
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque | tuple):
            if name and not isinstance(one, tuple):
                yield name, one
            left += [("", value) for value in (one.values() if isinstance(one, dict) else one)]
        elif type(one).__module__.startswith("decentral."):
            slots = [slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ())]
            for attribute in {*slots, *getattr(one, "__dict__", {})}:
                left.append((f"{type(one).__name__}.{attribute}", getattr(one, attribute, None)))


@pytest.fixture(scope="module")
def largest() -> Mapping[str, int]:
    """The most entries that each container has had, in nodes of all kinds among liars."""
    found = defaultdict[str, int](int)
    for kind in KINDS:
        fuzzed = FuzzedNode(kind, 1)
        for _ in range(STEPS):
            fuzzed.step()
        for name, one in owned(fuzzed.node):
            found[name] = max(found[name], len(one))
    return found


@pytest.mark.parametrize("container", CAPS, ids=NAMES)
def test_a_container_is_there_and_keeps_its_cap(container: Container, largest: Mapping[str, int]) -> None:
    owner, attribute, cap = container
    assert attribute in {*get_type_hints(owner), *getattr(owner, "__slots__", ())}
    assert largest.get(f"{owner.__name__}.{attribute}", 0) <= cap


def test_what_grows_in_a_flood_has_a_cap(largest: Mapping[str, int]) -> None:
    grown = sorted(name for name, size in largest.items() if size > MANY and name not in NAMES)
    assert grown == [], "each needs a cap in CAPS of tests/fuzz/test_limits.py, and its row in docs/SECURITY.md"
