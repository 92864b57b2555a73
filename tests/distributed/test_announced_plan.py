"""Between the announcement of a plan and the switch: process groups, a few per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from malleus_ds.pipe.control_loop import _Announced
from malleus_ds.plan import ParallelPlan
from malleus_ds.zero.state import OptimizerStateError
from tests.distributed.reference import config, make_engine, plan
from tests.harness import DistributedTest


class TestAnnouncedPlan(DistributedTest):
    world_size = 1

    def test_many_groups_are_spread_over_four_step_boundaries(self) -> None:
        ds_config = config(detector={"control_plane": "gloo"}, planner={"enabled": False})
        engine = make_engine(plan(([(0, 0, 8)], 8)), ds_config=ds_config)
        loop = engine.control_loop
        assert loop is not None
        for num_groups, expected in ((100, [0, 25, 25, 25, 25]), (16, [0]), (20, [0, 16, 16])):
            left, calls = num_groups, list[Any]()

            def prepare(_: ParallelPlan, max_groups: int) -> int:
                nonlocal left
                calls.append(max_groups)  # noqa: B023
                left -= min(max_groups, left)
                return left

            def switch(_: ParallelPlan) -> dict[str, Any]:
                calls.append("switch")  # noqa: B023
                return {"duration_s": 0.2, "parts_s": {"wire": 0.1}}

            loop._prepare, loop._switch = prepare, switch
            loop._next = _Announced(engine.plan.digest, engine.plan, 0, received_s=0.3)
            while loop._next is not None:
                loop._approach(loop._next, 0, engine.plan)
            assert calls == [*expected, "switch"]
        kinds = [event.kind for event in loop.events]
        assert kinds == ["prepared"] * 3 + ["switched", "switched"] + ["prepared", "switched"]
        assert loop.events[-1].details["parts_s"] == {"announcement": 0.3, "wire": 0.1}
        assert loop.events[-1].details["duration_s"] == 0.5

        def fail(_: ParallelPlan) -> dict[str, Any]:
            raise OptimizerStateError("cannot be cut")

        loop._switch, loop._submitted = fail, replace(loop._submitted, planned_rates=(1.0,))
        loop._approach(_Announced(engine.plan.digest, engine.plan, 0, received_s=0.3), 0, engine.plan)
        assert loop.events[-1].kind == "switch_failed"
        engine.destroy()
