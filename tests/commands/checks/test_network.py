"""What others' words say of routers and of being reached, and what real daemons say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decentral.comm.net import libp2p_services
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping, Pong
from decentral.comm.wire.network import DialBack, DialStatus, Identified
from decentral.comm.wire.transport import Answer, AskError
from decentral.commands.checks import network
from decentral.commands.checks.finding import Finding, FindingState
from decentral.commands.checks.network import Seen
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason

OWN = ["/ip4/192.168.0.7/tcp/4001/p2p/QmA", "/ip4/127.0.0.1/tcp/4001/p2p/QmA"]


def seen(*observed: str) -> list[Seen]:
    return [Seen(PeerId(f"Qm{n}"), Identified(one, True, "")) for n, one in enumerate(observed)]


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (["/ip4/192.168.0.7/tcp/4001", "/ip4/192.168.0.7/tcp/4001"], "none: others see 192.168.0.7"),
        (["/ip4/8.8.8.8/tcp/4001", "/ip4/8.8.8.8/tcp/4001"], "others see 8.8.8.8; one port for all others"),
        (["/ip4/8.8.8.8/tcp/4001", "/ip4/8.8.8.8/tcp/4002"], "another port for each other peer (symmetric)"),
        (["/ip4/192.168.0.7/tcp/4001", "/ip4/8.8.8.8/tcp/4001"], "others see 8.8.8.8"),
        (["/ip4/8.8.8.8/tcp/4001"], "its kind is unknown"),
        (["", "/p2p-circuit"], "no peer says"),
    ],
)
def test_routers_are_told_by_how_others_see_this_machine(observed: list[str], said: str) -> None:
    assert said in network.address_translation(OWN, seen(*observed)).seen


CAME = DialBack(DialStatus.OK, "/ip4/8.8.8.8/tcp/4001", "")
DROPPED = DialBack(DialStatus.ERROR, "", "dial failed")
TOO_OFTEN = DialBack(DialStatus.REFUSED, "", "too many dials")


def reachability(observed: str, *came: DialBack, own: list[str] = OWN) -> Finding:
    return network.reachability(own, seen(observed), came)


def test_one_peer_that_dials_back_is_enough() -> None:
    found = reachability("/ip4/8.8.8.8/tcp/4001", DROPPED, CAME)
    assert found.state == FindingState.OK
    assert "1 of 2 peers dialled back" in found.seen


def test_behind_a_router_a_port_is_forwarded_and_on_a_public_address_one_is_opened() -> None:
    behind = reachability("/ip4/8.8.8.8/tcp/55", DROPPED)
    assert "--listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/8.8.8.8/tcp/4001" in behind.remedy
    public = reachability("/ip4/8.8.8.8/tcp/4001", DROPPED, own=["/ip4/8.8.8.8/tcp/4001"])
    assert "open TCP port 4001 in this machine's firewall" in public.remedy


def test_where_others_see_an_ipv6_address_the_remedies_are_for_ipv6() -> None:
    closed = reachability("/ip6/2001:4860::7/tcp/4001", DROPPED, own=["/ip6/2001:4860::7/tcp/4001"])
    assert "--listen /ip6/::/tcp/4001" in closed.remedy
    loopback = reachability("/ip6/2001:4860::7/tcp/4001", own=["/ip4/127.0.0.1/tcp/4001"])
    assert "--listen /ip6/::/tcp/PORT" in loopback.remedy


def test_what_peers_do_not_dial_is_unknown() -> None:
    private, often = reachability("/ip4/192.168.0.7/tcp/1", TOO_OFTEN), reachability("/ip4/8.8.8.8/tcp/1", TOO_OFTEN)
    assert "private network" in private.seen
    assert "too many dials" in often.seen
    assert private.state == often.state == FindingState.UNKNOWN


def test_a_peer_that_listens_to_itself_only_cannot_be_reached() -> None:
    found = reachability("/ip4/8.8.8.8/tcp/4001", own=["/ip4/127.0.0.1/tcp/4001"])
    assert "--listen /ip4/0.0.0.0" in found.remedy


@pytest.mark.parametrize(
    ("address", "came", "state", "said"),
    [
        ("/ip4/8.8.8.8/tcp/4001", [CAME, DROPPED], FindingState.OK, "good, 1 of 2 peers"),
        ("/ip4/8.8.8.8/tcp/4001", [DROPPED, DROPPED], FindingState.WARN, "not good, none of 2 peers could connect"),
        ("/ip4/8.8.8.8/tcp/4001", [], FindingState.UNKNOWN, "no peer has tried it"),
        ("/dns4/ann.example.org/tcp/4001", [TOO_OFTEN], FindingState.UNKNOWN, "no peer has tried it"),
        ("/ip4/192.168.0.7/tcp/4001", [TOO_OFTEN], FindingState.UNKNOWN, "a private address, good only inside"),
    ],
)
def test_an_announced_address_is_said_to_be_good_or_not(
    address: str, came: list[DialBack], state: FindingState, said: str
) -> None:
    found = network.announced([address], came)
    assert found.state == state
    assert found.seen.startswith(f"announced is {address}: ")
    assert said in found.seen


def test_the_announced_address_of_a_running_peer_is_tried_from_another_machine() -> None:
    found = network.announced(["/ip4/8.8.8.8/tcp/4001"], [DROPPED], PeerId("QmA"))
    assert found.state == FindingState.UNKNOWN
    assert "decentral.doctor --join /ip4/8.8.8.8/tcp/4001/p2p/QmA" in found.remedy


def test_real_daemons_say_how_they_see_each_other_and_dial_no_private_addresses(tmp_path: Path) -> None:
    async def play() -> None:
        pair = [await Libp2p.start(tmp_path / name, ["/ip4/127.0.0.1/tcp/0"], []) for name in "AB"]
        try:
            peer = await pair[0].connect((await pair[1].addresses())[0])
            said = await pair[0].identify(peer)
            assert said.observed.startswith("/ip4/127.0.0.1/tcp/")
            assert said.dials_back
            came = await pair[0].dial_back(peer, await pair[0].addresses())
            assert came.status == DialStatus.REFUSED
            with pytest.raises(AskError, match="protocols not supported"):
                await pair[0].call(peer, "/no/such", b"", 10, 10.0)
            with pytest.raises(AskError, match="more than 10 bytes"):
                await pair[0].call(peer, libp2p_services.IDENTIFY, b"", 10, 10.0)
        finally:
            for one in pair:
                await one.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("ahead_s", "state"),
    [
        ([0.1, -0.2], FindingState.OK),
        ([-10.0, -10.0], FindingState.WARN),
        ([3600.0, 3599.0, 0.0], FindingState.WRONG),
        ([], FindingState.UNKNOWN),
        ([float("inf"), float("nan")], FindingState.UNKNOWN),
    ],
)
def test_a_clock_is_judged_by_the_median_of_the_others(ahead_s: list[float], state: FindingState) -> None:
    assert network.clock(ahead_s).state == state


def test_the_remedy_of_a_wrong_clock_says_which_one_to_set() -> None:
    assert "60 min behind 3 peers'" in network.clock([3600.0] * 3).seen


class Path1400:
    """A transport over a path that drops packets of more than 1,400 bytes: only small answers arrive."""

    def __init__(self, small: bool = True) -> None:
        self.small = small

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: float, max_blob_bytes: int) -> Answer:
        if isinstance(envelope.message, Ping) and self.small:
            return Answer(Envelope(Pong(envelope.message.nonce)), 0.02, 0.02, 40, 40)
        raise AskError(Reason.DEADLINE, f"{deadline_s:.1f} s")


def downloaded(transport: Any) -> Finding:
    return asyncio.run(network.download(transport, [PeerId("A"), PeerId("B")], RunId("gpt-3fa2c1")))


def test_a_path_that_drops_large_packets_is_wrong_and_the_remedy_names_the_mtu() -> None:
    found = downloaded(Path1400())
    assert found.state == FindingState.WRONG
    assert "the path drops large packets (MTU)" in found.seen
    assert "mtu 1280" in found.remedy


def test_peers_that_answer_nothing_do_not_tell_of_a_path_that_drops_large_packets() -> None:
    assert downloaded(Path1400(small=False)).state == FindingState.UNKNOWN
