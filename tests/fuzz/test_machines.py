"""Stateful fuzzing of every machine, inside a real node: events in any order, with any values, from anybody.

MACHINES names each class that handles events, the node that it is fuzzed in, and the questions that are for it. The
rules that must hold are those of tests/fuzz/fuzzed_node.py; a machine that the liars never reach fails as well. What
hypothesis finds it shrinks to a few steps, each with a seed of its own.
"""

import ast
import importlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from decentral.comm.wire import messages
from decentral.comm.wire.messages import Message
from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.peers.membership.address_book import ADDRESSES_KEPT, AddressBook
from decentral.peers.membership.records import PeerRecord
from tests.fuzz import grammar, values
from tests.fuzz.fuzzed_node import QUIET_S, FuzzedNode, Kind
from tests.test_rooms import MODULES, tree

ROUNDS = grammar.ROUNDS
ROUTES = (
    messages.ForwardRequest,
    messages.Offer,
    messages.ForwardStatusQuery,
    messages.CommitDecision,
    messages.CommitQuery,
)
MACHINES: dict[str, tuple[str, Kind, tuple[type[Message], ...]]] = {  # class -> method, node, questions
    "comm.gossip.exchange.PullExchange": ("handle", "pull", (messages.Pull,)),
    "comm.rounds.collection.Collection": ("handle", "synchronous", ROUNDS),
    "comm.rounds.round.Rounds": ("handle", "synchronous", (*ROUNDS, *ROUTES)),
    "comm.rounds.members.DonorHolds": ("hold_for", "synchronous", (*ROUNDS, messages.StateRequest)),
    "comm.rounds.join_requests.JoinRequests": ("ask", "synchronous", (*ROUNDS, messages.StateRequest)),
    "comm.pipeline.router.Router": ("handle", "spans", ROUTES),
    "peers.joining.donor.Donor": ("asked", "pull", (messages.StateRequest,)),
    "peers.joining.fetch.Fetch": ("handle", "synchronous", ()),
    "peers.joining.join.Join": ("handle", "newcomer", ()),
    "peers.membership.link_probes.Prober": ("handle", "pull", (messages.Probe, messages.Ping)),
    "peers.membership.revocation_watch.RevocationWatch": ("handle", "private", ()),
    "peers.membership.roster.Roster": ("handle", "pull", ()),
    "peers.membership.record_gossip.RecordGossip": ("handle", "pull", (messages.RecordsQuery,)),
    "peers.runtime.answers.Answers": ("asked", "pull", ()),
    "peers.runtime.handlers.Handlers": ("handle", "allreduce", ()),
    "peers.runtime.node.Node": ("handle", "spans", ()),
    "peers.runtime.progress.TrainingProgress": ("handle", "pull", ()),
    "peers.runtime.progress.StepClock": ("follow", "pull", ()),
    "scheduler.placement.cold_copies.ColdCopies": ("review", "spans", (messages.StateRequest,)),
    "scheduler.placement.recover.LayerRecovery": ("span_to_take", "spans", (messages.LeaseRequest,)),
    "scheduler.placement.move.GrantedLeases": ("grant", "spans", (messages.LeaseRequest,)),
    "scheduler.placement.move.SpanMove": ("handle", "spans", (messages.LeaseRequest, messages.StateRequest)),
    "scheduler.placement.plans.SwarmPlans": ("handle", "spans", ()),
}
SETTLED = 300  # steps
EXAMPLES = 3
# Examples of machines that are reached seldom: the node moves itself, and few donors' answers belong to a fetch.
RARE = {"scheduler.placement.move.SpanMove": 14, "peers.joining.fetch.Fetch": 6}
FEW = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, (1 << 32) - 1)


def machine_of(kind: Kind, only: tuple[type[Message], ...]) -> type[RuleBasedStateMachine]:
    """What hypothesis does to a node of this kind."""

    class Liars(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.fuzzed = FuzzedNode(kind, 0, only)
            for _ in range(0 if kind == "newcomer" else SETTLED):  # it has joined, is in a round, has executions
                self.fuzzed.step()

        @rule(seed=seeds)
        def ask(self, seed: int) -> None:
            self.fuzzed.chance.seed(seed)
            for _ in range(5):
                self.fuzzed.ask(self.fuzzed.chance.choice(self.fuzzed.only))

        @rule(seed=seeds)
        def answer(self, seed: int) -> None:
            self.fuzzed.chance.seed(seed)
            for _ in range(4):
                self.fuzzed.answer()

        @rule(seed=seeds)
        def anything(self, seed: int) -> None:
            self.fuzzed.chance.seed(seed)
            for _ in range(5):
                self.fuzzed.step()

        @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 5.0, 61.0]))
        def time_passes(self, seconds: float) -> None:
            self.fuzzed.pass_time(seconds)

        @invariant()
        def it_does_not_want_to_be_woken_in_the_past(self) -> None:
            self.fuzzed.pass_time(0.0)

        def teardown(self) -> None:
            self.fuzzed.pass_time(QUIET_S)
            self.fuzzed.leave()

    return Liars


def together() -> dict[str, list[str]]:
    """The machines that the same questions reach in the same kind of node: one life of it is fuzzed for all of them."""
    found = defaultdict[tuple[Kind, tuple[type[Message], ...]], list[str]](list)
    for name, (_, kind, only) in MACHINES.items():
        found[kind, only].append(name)
    return {", ".join(name.rpartition(".")[2] for name in names): names for names in found.values()}


TOGETHER = together()


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_no_liars_break_a_machine(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reached = Counter[str]()
    for name in names:
        method, kind, only = MACHINES[name]
        module, _, owner = name.rpartition(".")
        count_calls(getattr(importlib.import_module(f"decentral.{module}"), owner), method, name, reached, monkeypatch)
    examples = max(RARE.get(name, EXAMPLES) for name in names)
    run_state_machine_as_test(machine_of(kind, only), settings=settings(FEW, max_examples=examples))
    seldom = {name: reached[name] for name in names if reached[name] <= 10}
    assert seldom == {}, (
        "no node reaches them: name another in MACHINES here, or add one to `setup_of` (fuzzed_node.py)"
    )


def count_calls(owner: type, method: str, name: str, reached: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    handle = getattr(owner, method)

    def counted(*arguments: Any, **more: Any) -> Any:
        reached[name] += 1
        return handle(*arguments, **more)

    monkeypatch.setattr(owner, method, counted)


def handling_classes() -> Iterator[str]:
    """Classes of comm, peers and scheduler that are machines: they have `handle`, with the time."""
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef) and module.split(".")[0] in ("comm", "peers", "scheduler"):
                if any(ast.unparse(base) == "Protocol" for base in node.bases):
                    continue
                methods = {one.name: one.args.args for one in node.body if isinstance(one, ast.FunctionDef)}
                if "now" in [argument.arg for argument in methods.get("handle", [])]:
                    yield f"{module}.{node.name}"


def test_every_machine_is_in_the_table() -> None:
    missing = sorted(set(handling_classes()) - set(MACHINES))
    assert missing == [], "each needs a line in MACHINES of tests/fuzz/test_machines.py"


def test_an_address_book_takes_any_addresses_of_a_record(tmp_path: Any) -> None:
    book, chance = AddressBook(tmp_path / "peers.json"), rng.stream(0, "addresses")
    for number in range(3 * ADDRESSES_KEPT):
        book.learn(PeerId(f"liar{number}"), values.maker(PeerRecord)(chance).addresses)
    assert len(book.known) == ADDRESSES_KEPT
    assert AddressBook.load(tmp_path / "peers.json").known == book.known
