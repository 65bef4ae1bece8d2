"""Compute the estimates that `decentral.estimate` prints, from a swarm's devices and links. Start at `estimated`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decentral.commands.estimates import places
from decentral.commands.estimates.cards import card
from decentral.commands.estimates.forecast import ROUTED_S, Forecast, forecast, held_share
from decentral.commands.estimates.peer_devices import (
    MEASURED_UTILISATION,
    STEP_SEQUENCES,
    PeerDevice,
    devices_of,
    with_micro_batch,
)
from decentral.commands.estimates.places import MBIT, PeerGroup
from decentral.commands.estimates.playing import GOSSIP_SETTLED_S, PLAYED_S, ROUTES_SETTLED_S
from decentral.commands.estimates.sizes import WHOLE_MODEL
from decentral.core.config import Config
from decentral.core.strict_json import JsonObject
from decentral.core.units import readable_bytes, readable_number
from decentral.scheduler.throughput.layer_costs import FETCHED_BYTES, UTILISATION
from decentral.scheduler.topology.topology import Topology

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class EstimatedSwarm:
    """A run, the devices of its peers, and their links."""

    run: Config  # with a number as `train.micro_batch`
    devices: list[PeerDevice]  # the device of each group of peers
    each: list[PeerDevice]  # the device of each peer
    topology: Topology | None  # None: one peer alone


def swarm_of(run: Config, groups: Sequence[PeerGroup], own_flops: float | None = None) -> EstimatedSwarm:
    """Return a run on these peers; `own_flops` as for `devices_of`. Raise UserError if a device is unknown."""
    run = with_micro_batch(run, groups)
    devices = devices_of(run, groups, own_flops)
    each = [one for one, group in zip(devices, groups, strict=True) for _ in range(group.count)]
    topology = None
    if len(each) > 1:
        topology = places.topology_of(groups, [one.memory_bytes / 1e9 for one in devices], [1.0] * len(groups))
    return EstimatedSwarm(run, devices, each, topology)


def estimated(run: Config, groups: Sequence[PeerGroup], seconds: float) -> JsonObject:
    """Return the estimate as one JSON object: model, peers by group, tokens/s, links by place, limit, and notes.

    Args:
        run: The run's config.
        groups: The peers.
        seconds: Limit of the search for a plan.

    Raises:
        UserError: If a device is unknown, or the peers cannot hold the model.
    """
    swarm = swarm_of(run, groups)
    run, devices = swarm.run, swarm.devices
    found = forecast(run, swarm.topology, swarm.each, seconds)
    ends = [sum(group.count for group in groups[: number + 1]) for number in range(len(groups))]
    members = [list(range(end - group.count, end)) for group, end in zip(groups, ends, strict=True)]
    by_place = {
        group.place: [peer for other, peers in zip(groups, members, strict=True) if other.place == group.place
                      for peer in peers]
        for group in groups
    }  # fmt: skip
    kinds = [
        _kind(run, group, device, found, peers, [] if group.place.is_apart else by_place[group.place])
        for group, device, peers in zip(groups, devices, members, strict=True)
    ]
    return {
        "model": _model(run),
        "parameters": sum(run.model.layer_parameters),
        "peers": kinds,
        "tokens_per_s": found.tokens_per_s.to_json(),
        "links": [
            _link(place, peers, found) for place, peers in by_place.items() if len(by_place) > 1 or place.is_apart
        ],
        "limit": found.limit,
        "notes": [*_cut_short(run, found, seconds), *_notes(run, groups, found)],
    }


def _model(run: Config) -> str:
    """Return the model's shape as text for people."""
    model = run.model
    size = f"{readable_number(sum(model.layer_parameters))} parameters"
    shape = f"depth {model.depth}, width {model.d_model}, vocabulary {model.vocabulary}, context {model.context}"
    train = run.train
    step = f"{train.micro_batch} sequences a micro-batch" + (
        f", {train.accumulate} micro-batches a step (train.accumulate)" if train.accumulate > 1 else ""
    )
    return f"{size}: {shape}; {step}, {train.optimizer}"


def _kind(
    run: Config,
    group: PeerGroup,
    device: PeerDevice,
    found: Forecast,
    peers: Sequence[int],
    neighbours: Collection[int],
) -> JsonObject:
    """Return what is estimated for one peer of a group, as JSON: speed, memory, layers, traffic and window length.

    The traffic is the mean over the group's peers; `peers` are their indices in the forecast, and `neighbours` those of
    all peers of the same home or centre. Bytes to other places are `leaving`.
    """
    everyone = range(len(found.spans))
    sent, received = found.pairs.between(peers, everyone), found.pairs.between(everyone, peers)
    leaving = found.pairs.between(peers, _others(found, neighbours))
    window_s, bound = found.windows[peers[0]]
    return {
        "peers": group.text,
        "count": group.count,
        "memory_bytes": round(device.memory_bytes),
        "whole_model_bytes": device.whole_bytes,
        "holds": _holds(run, device, [found.spans[peer] for peer in peers]),
        "tokens_per_s": float(f"{device.tokens_per_s:.4g}"),
        "sent_bytes_per_hour": sent.times(HOUR_S / group.count).to_json(),
        "leaving_bytes_per_hour": leaving.times(HOUR_S / group.count).to_json(),
        "received_bytes_per_hour": received.times(HOUR_S / group.count).to_json(),
        "window_s": float(f"{window_s:.4g}"),
        "bound": bound,
    }


def _holds(run: Config, device: PeerDevice, spans: Sequence[tuple[int, int]]) -> str:
    """Return what the peers of a group hold in the plan, and what one of them could hold, as text for people."""
    planned = held(run, spans)
    return planned if planned == WHOLE_MODEL else f"{planned}; room for {held_share(device):.0%} of the parameters"


def held(run: Config, spans: Sequence[tuple[int, int]]) -> str:
    """Return as text for people which part of the model the peers with these layers hold, such as `4 of 14 layers`."""
    layers, all_layers = sorted({last - first for first, last in spans if first < last} or {0}), run.model.depth + 2
    busy = sum(first < last for first, last in spans)
    if not busy:
        return "nothing"
    who = f"{busy} of {len(spans)} peers: " if busy < len(spans) else ""
    if layers[0] == all_layers:
        return f"{who}{WHOLE_MODEL}"
    planned = f"{layers[0]} to {layers[-1]}" if layers[0] < layers[-1] else f"{layers[0]}"
    return f"{who}{planned} of {all_layers} layers"


def _others(found: Forecast, peers: Collection[int]) -> list[int]:
    """Return the indices of all peers but these, in order."""
    return sorted(set(range(len(found.spans))).difference(peers))


def _link(place: places.SharedPlace, peers: Sequence[int], found: Forecast) -> JsonObject:
    """Return the bytes per hour that the peers of a place send to other places, and receive from them.

    If each peer has a home of its own, the result is the mean of one home.
    """
    others, homes = (range(len(found.spans)), len(peers)) if place.is_apart else (_others(found, peers), 1)
    rates = f"{place.up / MBIT:,.0f}/{place.down / MBIT:,.0f} Mb/s"
    return {
        "place": place.name,
        "is": f"{rates} (assumed)" if place.assumed else rates,
        "homes": homes,
        "up": found.pairs.between(peers, others).times(HOUR_S / homes).to_json(),
        "down": found.pairs.between(others, peers).times(HOUR_S / homes).to_json(),
    }


def _notes(run: Config, groups: Sequence[PeerGroup], found: Forecast) -> list[str]:
    """Return notes for people: which time is counted, what a newcomer downloads, who shares a link, and on cards."""
    weights = readable_bytes(FETCHED_BYTES * sum(run.model.layer_parameters))
    downloads = f"a newcomer downloads {weights} of weights from several peers"
    early = (
        f"gossip and bytes are those of at most the first {PLAYED_S / 60:.0f} minutes; windows may shorten for hours"
    )
    settling = [early] if found.until_s is None and any(bound == "link" for _, bound in found.windows) else []
    return [downloads, *settling, *places.notes_on_places(groups), *notes_on_cards(groups)]


def _cut_short(run: Config, found: Forecast, seconds: float) -> list[str]:
    """Return a note for people if the simulation was cut short: by what, and what the figures are then; else []."""
    if found.until_s is None:
        return []
    routed = any(last - first not in (0, run.model.depth + 2) for first, last in found.spans)
    capped = routed and seconds >= ROUTED_S
    why = f"the {ROUTED_S:g} s that routes get at most" if capped else f"--seconds {seconds:g}"
    settled_s = ROUTES_SETTLED_S if routed else GOSSIP_SETTLED_S
    when = f"at {found.until_s:,.0f} of the {settled_s:,.0f} virtual seconds in which gossip settles"
    rough = "its bytes are by formulas" + (", tokens/s of routes without it, and ranges wider" if routed else "")
    return [f"the simulation was cut short by {why}, {when}: {rough}"]


def note_on_table(rows: Sequence[JsonObject], seconds: float) -> list[str]:
    """Return a note for people on the sizes in a table whose simulations were cut short; [] if there are none."""
    sizes = ", ".join(row["model"] for row in rows if row.get("is_cut_short"))
    why = f"--seconds {min(seconds, ROUTED_S):g}"
    return (
        [f"the simulation was cut short by {why} for {sizes}: tokens/s without gossip, wider ranges"] if sizes else []
    )


def notes_on_steps(run: Config) -> list[str]:
    """Return notes for people on the size of optimizer steps; [] if the user has set it."""
    if {"micro_batch", "accumulate"} & run.train.model_fields_set:
        return []
    less = "where memory holds a smaller micro-batch, set train.accumulate, or steps cost more"
    return [f"an optimizer step has {STEP_SEQUENCES} sequences: {less}"]


def notes_on_cards(groups: Sequence[PeerGroup]) -> list[str]:
    """Return notes for people about how the speed of cards is assumed; [] if no peer has a card."""
    notes, (low, high) = list[str](), MEASURED_UTILISATION
    named = [group.device for group in groups if not group.is_own]
    if named:
        share = f"{UTILISATION:.0%} of their published peak, the range with {low:.0%} to {high:.0%}"
        notes.append(f"cards count with {share}")
    slow = [device for device in named if not card(device).bf16]
    if slow:
        notes.append(f"{slow[0]} has no bf16 units, so it computes in float32, far below its peak")
    return notes
