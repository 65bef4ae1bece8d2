"""What a simulated peer's device waits for while it is idle. Start reading at `wait_of`."""

from enum import Enum

from decentral.sim.host import VirtualHost


class Wait(Enum):
    """What an idle device waits for, if its peer takes part in routes. `decentral simulate --plan` prints the value."""

    NOTHING_HERE = "a micro-batch to arrive"
    STEP = "a step, for which micro-batches must come back or be committed"
    MEMORY = "memory for another micro-batch of its own"
    WINDOW = "its own micro-batches in flight, as many as it may have"  # MicroBatchWindow limits their number
    LATER_PEERS = "later peers and links"


def wait_of(host: VirtualHost) -> Wait | None:
    """Return what a running peer's device waits for; None if the device works, or its peer takes part in no routes."""
    router, engine = host.node.routes, host.engine
    if engine.doing or engine.began is not None or router is None:
        return None
    if router.table.step_waits:
        return Wait.STEP
    if router.stage.first > 0:
        return Wait.LATER_PEERS if router.executions else Wait.NOTHING_HERE
    if not router.admission.has_memory(0):
        return Wait.MEMORY
    return Wait.WINDOW if len(router.own.under_way) >= router.window.size else Wait.LATER_PEERS
