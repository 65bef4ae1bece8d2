"""A private swarm whose members have invitations by the first three letters of their names."""

from typing import cast

from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.core.ids import PeerId


class _Invited:
    def admits(self, peer: PeerId) -> bool:
        return True

    def holder_of(self, peer: PeerId) -> PeerId:
        return PeerId(peer[:3])


INVITED = cast(PrivateSwarm, _Invited())
