"""A swarm in which every peer has every fragment."""

from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId


class AnyHolder:
    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        return True
