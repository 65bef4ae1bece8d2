"""Read the peers of a swarm that does not exist yet, as `--peers` gives them: `4x4090 home:50/500, 8xA100 oregon`.

    [COUNTx]DEVICE [PLACE[:UP/DOWN]], ...        UP and DOWN in Mb/s

Start at `groups_of` and `topology_of`. Peers of one place share its link to other places, as `sites` of a topology do,
and reach each other over a local network. If the place is `homes`, or its name begins with `homes-`, each peer has a
home and a link of its own.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from decentral.commands.estimates.cards import OWN, card, cards, key
from decentral.core import quantities
from decentral.core.errors import UserError
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import JsonObject
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.topology import GBIT, Topology

# Uplink and downlink that are assumed for a place whose name begins with `home`, as in the topology four-homes.
HOME_MBPS = (20.0, 100.0)
CENTRE_MBPS = (1000.0, 1000.0)  # uplink and downlink that are assumed for any other place
LAN = {"delay_ms": 0.5, "bandwidth_gbps": 1.0}  # the assumed link between two peers of one place
ACROSS = {"delay_ms": 30.0, "bandwidth_gbps": 1000.0}  # link between two places; only uplinks and downlinks limit it
NO_PLACE = "here"  # name of the place of all groups for which the user names no place
HOMES = "homes"  # name of places, or its first part, where each peer has a home of its own
MOST_ESTIMATED = topologies.MOST_TOPOLOGY_PEERS
MBIT = 1e6 / 8
# Words that end the name of a device; another last word of a group is the name of its place.
LAST_OF_DEVICE = re.compile(r"ti|super|ada|pcie|sxm\d?|hbm\d?e?|\d*gi?b|[a-z]?\d{2,4}[a-z]?", re.IGNORECASE)

LAPTOP = re.compile(r"(^|[\s_-])(laptop|notebook|mobile|max-?q)($|[\s_-])", re.IGNORECASE)  # in a device's name


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """A place of peers, and the rates in bytes/s of the link to other places that these peers share.

    If `is_apart`, each peer is in a home of its own, and has such a link alone.
    """

    name: str
    up: float
    down: float
    assumed: bool  # whether the user gave no rates

    @property
    def rates(self) -> str:
        """Uplink and downlink in Mb/s, as a user writes them."""
        return f"{self.up / MBIT:.15g}/{self.down / MBIT:.15g}"

    @property
    def is_apart(self) -> bool:
        """Whether each peer of this place has a home of its own."""
        return re.match(rf"{HOMES}(-|$)", self.name, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Equal peers in one place."""

    count: int
    device: str  # the device's name as the user wrote it
    place: SharedPlace

    @property
    def text(self) -> str:
        """The group as a user writes it, such as `4x4090 home`."""
        return f"{self.count}x{self.device} {self.place.name}"

    @property
    def is_own(self) -> bool:
        """Whether the group's peers run on this machine, so that their speed is measured instead of looked up."""
        return self.device.lower() in OWN


def groups_of(text: str) -> list[PeerGroup]:
    """Return the groups of peers in a text such as `4x4090 home:50/500, 8xA100 oregon`.

    Raises:
        UserError: If a part has another form, a device is unknown, a place has two links, or there are more than
            MOST_ESTIMATED peers.
    """
    try:
        groups = list(map(_group, text.split(",")))
    except UserError:
        if (hint := quantities.comma_hint(text)) and _is_read(hint.removeprefix("; write ")):
            raise UserError(f"--peers expects commas between groups of peers only; got {text!r}{hint}") from None
        raise
    places: dict[str, SharedPlace] = {}
    for group in groups:
        known, new = places.get(group.place.name), group.place
        if known and not known.assumed and not new.assumed and known != new:
            raise UserError(f"--peers: {new.name} has two different links; give its UP/DOWN once")
        places[new.name] = new if known is None or known.assumed else known
    if sum(group.count for group in groups) > MOST_ESTIMATED:
        raise UserError(f"--peers expects at most {MOST_ESTIMATED} peers; got {sum(group.count for group in groups)}")
    return [replace(group, place=places[group.place.name]) for group in groups]


def _is_read(text: str) -> bool:
    """Return whether each part of a text describes a group of peers."""
    with suppress(UserError):
        return bool(list(map(_group, text.split(","))))
    return False


def _group(text: str) -> PeerGroup:
    """Return the group that a part of --peers describes. Raise UserError if it has another form or unknown device."""
    text = text.strip()
    found = re.fullmatch(r"(?:(\d{1,6})\s*[xX*\u00d7]\s*)?([^;]*[^;\s])", text)
    words = found[2].split() if found else []
    if found is None or not words:
        form = "parts such as 4x4090 home:50/500 or 8xA100 oregon, with commas between them"
        raise UserError(f"--peers expects {form}; got {text!r}")
    count = int(found[1] or 1)
    if not count:
        raise UserError(f"--peers: expected at least 1 peer in {text!r}")
    last = words[-1]
    if re.fullmatch(r"[\d.]+/[\d.]+", last):
        place = words[-2] if len(words) > 2 else "home"
        raise UserError(f"--peers: a link stands behind its place, such as {place}:{last}; got {text!r}")
    named = len(words) > 1 and not LAST_OF_DEVICE.fullmatch(last)
    group = PeerGroup(count, " ".join(words[:-1] if named else words), _place(last if named else NO_PLACE))
    if meant := _counted_first(text):
        raise UserError(f"--peers: write {meant}; got {text!r}")
    if not group.is_own:
        if LAPTOP.search(group.device) or LAPTOP.fullmatch(group.place.name):
            less = "a laptop's card has less memory and speed than the desktop card of its name, and none is known"
            instead = "name a weaker desktop card, or add a row to configs/devices/published.yaml"
            raise UserError(f"--peers: {less}; {instead}; got {text!r}")
        card(group.device)
    return group


def _counted_first(text: str) -> str:
    """Return `4x4090 home` for `4 4090 home`, `4090 x4 home` or `4090x4 home`; "" for other texts."""
    rest, space, place = text.rpartition(" ")
    for named, end in ((text, ""), (rest, space + place)):
        before = re.fullmatch(r"(?P<count>\d{1,6})\s+(?P<device>.+)", named)
        behind = re.fullmatch(r"(?P<device>.+?)\s*[xX*\u00d7]\s*(?P<count>\d{1,2})", named)
        for found in (before, behind):
            if found and (found["device"].lower() in OWN or key(found["device"]) in cards()):
                return f"{found['count']}x{found['device']}{end}"
    return f"{text}x4090, with the device that you mean" if re.fullmatch(r"\d{1,3}", text) else ""


def _place(text: str) -> SharedPlace:
    name, colon, rates = text.partition(":")
    up_mbps, down_mbps = HOME_MBPS if name.lower().startswith("home") else CENTRE_MBPS
    if not colon:
        return SharedPlace(plain_text(name), up_mbps * MBIT, down_mbps * MBIT, assumed=True)
    up, slash, down = re.sub(r"(?<=[A-Za-z])/s\b", "", rates).partition("/")  # as in 50Mb/s/500Mb/s
    try:
        up_rate = quantities.rate_bytes(up)
        if not slash:
            such = f"{name}:{up_rate / MBIT:g}/500"
            raise UserError(f"--peers: {text} lacks the downlink; write {name}:UP/DOWN in Mb/s, such as {such}")
        return SharedPlace(plain_text(name), up_rate, quantities.rate_bytes(down), False)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--peers: {text}: {error}") from None


def topology_of(groups: Sequence[PeerGroup], memory_gb: Sequence[float], tflops: Sequence[float]) -> Topology:
    """Return the topology of at least two peers, group by group.

    Args:
        groups: The peers.
        memory_gb: Memory of a peer of each group, GB.
        tflops: Training speed of a peer of each group, TFLOP/s.
    """
    peers, sites = list[JsonObject](), dict[str, JsonObject]()
    crowd, homes = Counter[str](), Counter[str]()
    for group, memory, speed in zip(groups, memory_gb, tflops, strict=True):
        place = group.place
        for _ in range(group.count):
            homes[place.name] += place.is_apart
            region = f"{place.name}-{homes[place.name]}" if place.is_apart else place.name
            sites[region] = {"up_gbps": place.up / GBIT, "down_gbps": place.down / GBIT}
            crowd[region] += 1
            named = {"id": f"{region}-{crowd[region]}", "region": region, "device": group.device}
            peers.append(named | {"memory_gb": memory, "tflops": speed})
    for peer in peers:
        alone = crowd[peer["region"]] == 1
        peer |= sites[peer["region"]] if alone else dict.fromkeys(("up_gbps", "down_gbps"), LAN["bandwidth_gbps"])
    shared = {name: rates for name, rates in sites.items() if crowd[name] > 1 and len(crowd) > 1}
    return topologies.parse({"peers": peers, "inside": LAN, "across": ACROSS, "sites": shared})


def notes_on_places(groups: Sequence[PeerGroup]) -> list[str]:
    """Return notes for people on places.

    They name places whose several peers share a link that is slower than a data centre's, and homes whose link is
    faster up than down, since its rates may have been swapped.
    """
    counts: Counter[SharedPlace] = Counter()
    devices: dict[SharedPlace, PeerGroup] = {}
    for group in groups:
        counts[group.place] += group.count
        devices.setdefault(group.place, group)
    notes = []
    for place, count in counts.items():
        if count > 1 and not place.is_apart and place.up < CENTRE_MBPS[0] * MBIT:
            link = "" if place.assumed else f":{place.rates}"
            separate = f"{devices[place].count}x{devices[place].device} {HOMES}{link}"
            notes.append(f"{count} machines share the place {place.name} and its link; in separate homes: {separate}")
        if place.name.lower().startswith("home") and place.up > place.down:
            up, down = place.rates.split("/")
            most = f"most homes are slower up: {place.name}:{down}/{up} is UP/DOWN"
            notes.append(f"{place.name}:{place.rates} is {up} Mb/s up and {down} Mb/s down; {most}")
    return notes
