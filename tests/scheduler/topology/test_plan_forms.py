"""The JSON of both kinds of plan: fixed names in a fixed order, which scripts rely on."""

from decentral.scheduler.topology.plan_forms import SyncPlan, ThroughputPlan

FOUND = {"solver": "genetic", "seed": 7, "seconds": 0.5, "baselines": {"random": 2.0}, "reason": "why", "digest": "d"}


def test_a_synchronous_plan_as_json() -> None:
    cost = {"total": 1.0, "data_parallel": 0.25, "pipeline": 0.75}
    plan = SyncPlan(
        **FOUND,  # type: ignore[arg-type]
        cost=cost,
        stages=[["a"], ["b"]],
        pipelines=[["a", "b"]],
        left_out={"c": "slow"},
        degrees={"2x1": 1.0},
    )
    shown = plan.to_json()
    assert list(shown)[:4] == ["objective", "solver", "seed", "seconds"]
    assert list(shown)[4:9] == ["cost", "stages", "pipelines", "left_out", "degrees"]
    assert list(shown)[9:] == ["baselines", "reason", "digest"]
    assert shown["objective"] == "sync"
    assert shown["cost"] == cost


def test_a_throughput_plan_as_json() -> None:
    plan = ThroughputPlan(
        **FOUND,  # type: ignore[arg-type]
        throughput={"tokens_per_s": 1.0, "bound": 2.0},
        planned_for={},
        spans={"a": [0, 2]},
        micro_batches={"a": 4},
        routes=[{"share": 1.0, "hops": [["a", 0, 2]]}],
        gossip={},
        use={},
    )
    shown = plan.to_json()
    assert list(shown)[:4] == ["objective", "solver", "seed", "seconds"]
    names = [
        "throughput",
        "planned_for",
        "spans",
        "micro_batches",
        "accumulate",
        "routes",
        "gossip",
        "use",
    ]
    assert list(shown)[4:12] == names
    assert list(shown)[12:] == ["baselines", "reason", "digest"]
    assert shown["objective"] == "throughput"
