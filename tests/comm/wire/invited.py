"""A private swarm for tests: a founder, and members with any invitation."""

import os
from collections.abc import Callable
from functools import cache

from decentral.comm.wire.invitations import FounderKeys, Permission
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.core.ids import PeerId

NOW = 1_700_000_000.0
HOUR_S = 3600.0


@cache
def founder(name: str = "gpt") -> FounderKeys:
    return FounderKeys.create(name, os.urandom)


def member(
    peer: str,
    until: float = NOW + HOUR_S,
    may: Permission = Permission.TRAIN,
    by: FounderKeys | None = None,
    now: Callable[[], float] = lambda: NOW,
) -> PrivateSwarm:
    """A peer with an invitation of its own."""
    return PrivateSwarm(PeerId(peer), (by or founder()).invite(f"holder of {peer}", until, may, os.urandom), now)
