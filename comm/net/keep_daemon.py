"""Open the network again when it has ended by itself: without it a peer or a visitor would be alone and never know."""

from collections import deque
from collections.abc import Callable

from decentral.comm.wire.network import PeerNetwork
from decentral.core.errors import UserError
from decentral.core.units import Seconds

DAEMON_RESTARTS, DAEMON_RESTARTS_S = (
    5,
    600.0,
)  # restarts, and the seconds in which so many are too many


async def keep_daemon(transport: PeerNetwork, now: Callable[[], Seconds], say: Callable[[str], None]) -> str:
    """Open the network again each time that it ends, and report it by `say`. Return why this was given up."""
    restarts = deque[Seconds](maxlen=DAEMON_RESTARTS)
    while True:
        trouble = await transport.ended()
        if len(restarts) == DAEMON_RESTARTS and now() < restarts[0] + DAEMON_RESTARTS_S:
            return f"{trouble}, {DAEMON_RESTARTS} times in {DAEMON_RESTARTS_S:g} s"
        restarts.append(now())
        say(f"{trouble}; starting it again")
        try:
            await transport.revive()
        except (UserError, OSError) as error:
            return f"{trouble} and cannot be started again: {error}"
