"""Start the libp2p daemon again when it has ended: without it a peer or a visitor would be alone and never know."""

from collections import deque
from collections.abc import Callable

from decentral.comm.net.libp2p import Libp2p
from decentral.core.errors import UserError
from decentral.core.units import Seconds

DAEMON_RESTARTS, DAEMON_RESTARTS_S = (
    5,
    600.0,
)  # restarts of the libp2p daemon, and the seconds in which so many are too many


async def keep_daemon(transport: Libp2p, now: Callable[[], Seconds], say: Callable[[str], None]) -> str:
    """Start the daemon again whenever it has ended, and `say` so. Return why it is not started again any more."""
    restarts = deque[Seconds](maxlen=DAEMON_RESTARTS)
    while True:
        how = await transport.ended()
        trouble = f"the libp2p daemon has ended ({how})"
        if len(restarts) == DAEMON_RESTARTS and now() < restarts[0] + DAEMON_RESTARTS_S:
            return f"{trouble}, {DAEMON_RESTARTS} times in {DAEMON_RESTARTS_S:g} s"
        restarts.append(now())
        say(f"{trouble}; starting it again")
        try:
            await transport.revive()
        except (UserError, OSError) as error:
            return f"{trouble} and cannot be started again: {error}"
