"""Find out from the bytes that have left what our uplink carries at least. Start at `CarriedRates`.

A probe (peers/membership/link_probes.py) on a link that other peers use too gets the share of one transfer among
theirs: eight peers behind one router that all send measured a hundredth of what each of them did send. So our uplink
is also known by the bytes that it has carried.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decentral.comm.wire.slow_start import MOST_BYTES
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

SPAN_S = (
    60.0  # each sample gives two rates: the mean over about this time, and that over the time since the last sample
)
KEPT_S = 300.0  # the highest rates of this time count, so that an uplink that has become slower shows after it

TakeSent = Callable[[], Mapping[PeerId, int]]
"""Returns the bytes of large messages that have left to each peer since the last call."""


@dataclass(slots=True)
class CarriedRates:
    """The highest rates in bytes/s at which our uplink has lately sent to near peers and to far peers; 0 if unknown."""

    near: float = 0.0
    far: float = 0.0
    _take: TakeSent | None = None
    # Time of each sample, and the bytes that have left to each peer since the sample before it.
    _sent: deque[tuple[Seconds, Mapping[PeerId, int]]] = field(default_factory=deque)
    _rates: deque[tuple[Seconds, float, float]] = field(
        default_factory=deque
    )  # (time, rate to near, rate to far peers)

    def follow(self, take: TakeSent) -> None:
        """Count the bytes that `take` returns from now on."""
        self._take = take

    def sample(self, now: Seconds, is_near: Callable[[PeerId], bool]) -> None:
        """Compute the rates anew from the bytes that have left since the last call.

        Args:
            now: The present time. The node calls this every few seconds.
            is_near: Returns whether a peer is in our local network.
        """
        if self._take is None:
            return
        self._sent.append((now, self._take()))
        while len(self._sent) > 2 and self._sent[1][0] <= now - SPAN_S:
            self._sent.popleft()
        while self._rates and self._rates[0][0] <= now - KEPT_S:
            self._rates.popleft()
        for since in {0, len(self._sent) - 2} if len(self._sent) > 1 else ():
            near, far = self._carried(since, is_near)
            if near or far:
                self._rates.append((now, near, far))
        self.near = max((near for _, near, _ in self._rates), default=0.0)
        self.far = max((far for _, _, far in self._rates), default=0.0)

    def _carried(self, since: int, is_near: Callable[[PeerId], bool]) -> tuple[float, float]:
        """Return the mean rates to near and to far peers since a sample, in bytes/s.

        Of each peer's bytes MOST_BYTES are left out, because so many may still wait in buffers of this machine.
        """
        sent = Counter[PeerId]()
        for _, by_peer in list(self._sent)[since + 1 :]:
            sent.update(by_peer)
        near = far = 0.0
        for peer, size in sent.items():
            left = max(0, size - MOST_BYTES)
            if is_near(peer):
                near += left
            else:
                far += left
        lasted_s = self._sent[-1][0] - self._sent[since][0]
        return (near / lasted_s, far / lasted_s) if lasted_s > 0 else (0.0, 0.0)
