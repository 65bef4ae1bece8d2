"""A lease binds its grantor until it ends or is given back, as long as the other peer holds the fragment."""

import pytest

from decentral.core.ids import PeerId
from decentral.scheduler.placement.move import LEASE_S, GrantedLeases, LeaseRequests

A, B = PeerId("A"), PeerId("B")


def granted() -> GrantedLeases:
    leases = GrantedLeases()
    leases.grant(0, A, 100.0)
    return leases


def test_a_lease_binds_until_its_time_is_over() -> None:
    leases = granted()
    assert leases.bind(0, {A}, 100.0 + LEASE_S - 1)
    assert not leases.bind(0, {A}, 100.0 + LEASE_S)
    assert leases.until == {}


def test_a_lease_binds_only_for_its_fragment_and_while_the_peer_holds_that() -> None:
    assert not granted().bind(1, {A}, 101.0)
    assert not granted().bind(0, {B}, 101.0)


@pytest.mark.parametrize("fragment", [0, 1])
def test_a_lease_that_was_given_back_binds_no_more(fragment: int) -> None:
    leases = granted()
    leases.end(fragment, A, 100.5)
    assert leases.bind(0, {A}, 101.0) == (fragment == 1)


def test_answers_to_lease_requests_are_counted() -> None:
    requests = LeaseRequests()
    requests.begin([0, 1])
    requests.asked(3)
    requests.answered(0, A)
    requests.answered(0, None)
    assert (requests.number, requests.unanswered, requests.granted) == (1, 1, {0: [A], 1: []})
