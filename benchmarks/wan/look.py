"""What the peers of a live swarm believe of their links: `python -m benchmarks.wan.look ADDRESS`, one JSON object.

By peer id: `up` and `down` in bytes/s and `latency_s`, as each publishes them in the DHT; 0 is not measured yet. It
looks from inside the lab, and is no member of the swarm.
"""

import asyncio
import json
import sys
import time

from decentral.peers.membership import records
from decentral.peers.startup.visit import visit


async def look(address: str) -> dict[str, dict[str, float]]:
    """Raises UserError if nobody answers at that address."""
    async with visit([address]) as swarm:
        known = await records.lookup(swarm.directory, swarm.run, swarm.own, time.time())
    profiles = {peer: record.profile for peer, record in known.items()}
    return {peer: {"up": one.up, "down": one.down, "latency_s": one.latency_s} for peer, one in profiles.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(look(sys.argv[1]))))
