"""Contestants over torch.distributed's gloo, and one peer alone: `python -m benchmarks.contest.gloo_peer SETUP`.

    alone        one peer, no network
    parallel     data parallel: the gradients of all are averaged in every step
    diloco       DiLoCo (Douillard et al., arXiv 2311.08105): H inner steps, then the mean pseudo-gradient of all moves
                 the shared weights by SGD with Nesterov momentum. `inner_s` instead of `inner_steps` gives each peer as
                 many steps as it can take in that time, as Liu et al. (arXiv 2401.09135) have it for unequal devices

Members come and go as groups.py says. Whoever joins takes weights and optimizer states of the others.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.contest import trainee
from benchmarks.contest.groups import Group, Lost
from benchmarks.contest.trainee import Trainee

TIMEOUT_S = 90.0  # of a collective: longer than a slow peer's round. The dead are noticed by their closed connections


def main() -> None:
    peer = trainee.from_arguments()
    options = peer.setup.options
    if options["algorithm"] == "alone":
        alone(peer)
    group = Group(peer.setup.name, peer.setup.place == 0, peer.setup.leader, peer.setup.peers, TIMEOUT_S)
    if not peer.setup.late:
        group.form(first=True)
    peer.ready()
    {"parallel": parallel, "diloco": diloco}[options["algorithm"]](peer, group, options)


def alone(peer: Trainee) -> None:
    peer.ready()
    while True:
        peer.gradient()
        peer.apply()


def parallel(peer: Trainee, group: Group, options: dict[str, Any]) -> None:
    """`accumulate`: micro-batches of each peer in a step; `half`: gradients travel in fp16."""
    state = [*peer.parameters, *peer.optimizer.vectors()]
    waits = peer.setup.late
    while True:
        try:
            if waits:
                peer.steps = rejoined(peer, group, state, peer.steps)
            for _ in range(options["accumulate"]):
                peer.gradient()
            flat, waits = group.mean(peer.gradients() / options["accumulate"], options["half"])
        except Lost:
            waits = True
            peer.optimizer.zero_grad()
            continue
        peer.set_gradients(flat)
        peer.apply()


def diloco(peer: Trainee, group: Group, options: dict[str, Any]) -> None:
    """`inner_steps` or `inner_s`, `outer_rate`, `outer_momentum`, `half`: pseudo-gradients travel in fp16."""
    shared = peer.weights()
    momentum = torch.zeros_like(shared)
    state, rounds, waits = [shared, momentum, *peer.optimizer.vectors()], 0, peer.setup.late
    while True:
        try:
            if waits:
                before, rounds = rounds, rejoined(peer, group, state, rounds)
                if rounds != before:  # what this peer has trained since is not of the round that the others are in
                    peer.set_weights(shared)
                    peer.steps = max(peer.steps, peer.run.train.warmup_steps)  # the moments came with the weights
            inner_steps(peer, options)
            mean, waits = group.mean(shared - peer.weights(), options["half"])
        except Lost:
            waits = True
            continue
        outer_step(shared, momentum, mean, options)
        peer.set_weights(shared)
        rounds += 1


def inner_steps(peer: Trainee, options: dict[str, Any]) -> None:
    """As many steps as the round has; by time, at least one."""
    if "inner_s" in options:
        step_s = peer.run.train.emulated_micro_batch_s * peer.setup.throttle
        count = max(1, round(options["inner_s"] / step_s))
    else:
        count = int(options["inner_steps"])
    for _ in range(count):
        peer.gradient()
        peer.apply()


def outer_step(shared: Tensor, momentum: Tensor, mean: Tensor, options: dict[str, Any]) -> None:
    """SGD with Nesterov momentum on the mean pseudo-gradient, as torch.optim.SGD takes it; in place."""
    momentum.mul_(options["outer_momentum"]).add_(mean)
    shared -= options["outer_rate"] * (mean + options["outer_momentum"] * momentum)


def rejoined(peer: Trainee, group: Group, state: list[Tensor], progress: int) -> int:
    """Forms a new group, and takes the state of the member that is farthest. Gives how far it is."""
    group.form()
    farthest = group.agree(state, progress)
    peer.note(group=group.size)
    return farthest


if __name__ == "__main__":
    main()
