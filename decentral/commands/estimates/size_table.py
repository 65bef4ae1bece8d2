"""Estimate models of several sizes for the same peers, to show what they can train. Start at `by_size`."""

import re
from collections.abc import Sequence

from decentral.commands.estimates import sizes
from decentral.commands.estimates.estimating import held, swarm_of
from decentral.commands.estimates.forecast import outlook
from decentral.commands.estimates.peer_devices import flops_here, peers_here
from decentral.commands.estimates.places import PeerGroup
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.core.units import readable_bytes

SHOWN_SIZES = ("10M", "125M", "350M", "1B", "3B", "7B")
DOES_NOT_FIT = "does not fit"


def by_size(run: Config, groups: Sequence[PeerGroup], seconds: float) -> list[JsonObject]:
    """Return an estimate for each of SHOWN_SIZES up to the first that does not fit into the peers' memory.

    The speeds are those of an estimate of one size. Bytes, which take a simulation of peers with the whole model, are
    not estimated.

    Args:
        run: A config that sets no shape of the model.
        groups: The peers.
        seconds: Limit of the search for a plan of one size, as for `outlook`.

    Returns:
        JSON objects with the size, the parameters, which layers a peer holds, tokens/s, and what limits the size or the
        speed; `is_cut_short` if the simulation was. If the model does not fit, there are no tokens/s.
    """
    here, given = peers_here(groups), frozenset(run.model.model_fields_set)
    own_flops = flops_here(here) if here else None
    rows: list[JsonObject] = []
    for size in SHOWN_SIZES:
        swarm = swarm_of(sizes.with_shape(run, size, given), groups, own_flops)
        row: JsonObject = {"model": size, "parameters": sum(swarm.run.model.layer_parameters)}
        try:
            found = outlook(swarm.run, swarm.topology, swarm.each, seconds)
        except UserError as error:
            needs, has = min(one.whole_bytes for one in swarm.each), sum(one.memory_bytes for one in swarm.each)
            limit = f"memory: it needs {readable_bytes(needs)}, and all peers have {readable_bytes(has)}"
            return [*rows, row | {"holds": DOES_NOT_FIT, "limit": limit if needs > has else str(error)}]
        limit = re.split("[:;]", found.limit)[0]
        speed = found.tokens_per_s.to_json()
        cut = {"is_cut_short": True} if found.until_s is not None else {}
        rows.append(row | {"holds": held(swarm.run, found.spans), "tokens_per_s": speed, "limit": limit} | cut)
    return rows
