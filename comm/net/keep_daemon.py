"""Restart a peer's network when it stops (`keep_daemon`), so that the peer does not stay offline."""

from collections import deque
from collections.abc import Callable

from decentral.comm.wire.network import PeerNetwork
from decentral.core.errors import UserError
from decentral.core.units import Seconds

# The network is given up if it stops once more after DAEMON_RESTARTS restarts in DAEMON_RESTARTS_S.
DAEMON_RESTARTS, DAEMON_RESTARTS_S = 5, 600.0


async def keep_daemon(transport: PeerNetwork, now: Callable[[], Seconds], say: Callable[[str], None]) -> str:
    """Open the network again each time that it stops, until opening fails or the network stops too often.

    Args:
        transport: The network, which is open.
        now: Returns the present time in seconds.
        say: Is called with a line for the user at each restart.

    Returns:
        A text for the user that says why the network is given up.
    """
    restarts = deque[Seconds](maxlen=DAEMON_RESTARTS)
    while True:
        trouble = await transport.ended()
        if len(restarts) == DAEMON_RESTARTS and now() < restarts[0] + DAEMON_RESTARTS_S:
            return f"{trouble} again, after {DAEMON_RESTARTS} restarts in {DAEMON_RESTARTS_S:g} s"
        restarts.append(now())
        say(f"{trouble}; starting it again")
        try:
            await transport.revive()
        except (UserError, OSError) as error:
            return f"{trouble} and cannot be started again: {error}"
