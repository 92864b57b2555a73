"""The whole loop on real ranks: measure, exchange, plan in a process, switch; exact all the while."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.pipe.control_loop import LoopEvent
from malleus_ds.pipe.engine import MalleusPipelineEngine
from tests.distributed.reference import BASE_SEED, config, gpt, make_engine, single_process
from tests.harness import DistributedTest

SLOW_RANK = 2
SLOW_FROM, SLOW_UNTIL = 6, 20
NUM_STEPS = 40


def emulated(rate: float, layer_ms: float = 5.0, end_weight: float = 0.0, **planner: Any) -> dict[str, Any]:
    """6 blocks that cost the same, one rank slow for a while. end_weight: of the first and last layer."""
    return config(
        seed=BASE_SEED,
        # Wide, so that what else a busy machine does is not a straggler.
        detector={"control_plane": "gloo", "small_shift": 0.5, "large_shift": 1.0},
        planner=planner,
        emulation={
            "layer_ms": layer_ms,
            "layer_weights": [end_weight, 1, 1, 1, 1, 1, 1, end_weight],
            "events": [
                {"step": SLOW_FROM, "rank": SLOW_RANK, "rate": rate},
                {"step": SLOW_UNTIL, "rank": SLOW_RANK, "rate": 1.0},
            ],
        },
    )


def run(engine: MalleusPipelineEngine, num_steps: int) -> tuple[list[float], list[bool], list[LoopEvent]]:
    """Losses, whether the slow rank stood by in each step, and the coordinator's events."""
    losses, standby = [], []
    for _ in range(num_steps):
        standby.append(SLOW_RANK in engine.plan.standby)
        losses.append(engine.train_batch().item())
    assert engine.control_loop is not None
    shared: list[Any] = [engine.control_loop.events]
    dist.broadcast_object_list(shared, src=0)
    engine.destroy()
    return losses, standby, shared[0]


class TestControlLoop(DistributedTest):
    world_size = 4
    timeout_s = 200.0

    def test_a_very_slow_device_stands_by_and_comes_back(self) -> None:
        expected = single_process(gpt_layers(gpt()), gpt_loss, NUM_STEPS)
        # With a layer that costs nothing, a plan could use the slow device as well as leave it out.
        ds_config = emulated(12.0, end_weight=1.0)
        engine = make_engine(None, num_stages=2, partition_method="type:Block", ds_config=ds_config)
        losses, standby, events = run(engine, NUM_STEPS)
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
        shifts = [event for event in events if event.kind == "shift"]
        assert shifts[0].details["ranks"] == (SLOW_RANK,)
        assert SLOW_FROM < shifts[0].step <= SLOW_FROM + 3
        assert standby[: SLOW_FROM + 1] == [False] * (SLOW_FROM + 1)
        assert any(standby), [(event.step, event.kind) for event in events]
        assert not standby[-1], "the probe found that the device recovered"
        assert {event.kind for event in events} >= {"calibrated", "shift", "planned", "switched"}

    def test_healthy_devices_keep_their_plan(self) -> None:
        ds_config = emulated(1.0)
        engine = make_engine(None, num_stages=2, partition_method="type:Block", ds_config=ds_config)
        first = engine.plan
        _, _, events = run(engine, 20)
        assert [event.kind for event in events] == ["calibrated"]
        assert engine.plan == first

    def test_a_planning_that_fails_leaves_the_plan(self) -> None:
        """A device too small for any plan: the planner says so, and training goes on."""
        engine = make_engine(
            None, num_stages=2, partition_method="type:Block", ds_config=emulated(4.0, memory_bytes=1000)
        )
        first = engine.plan
        losses, _, events = run(engine, 16)
        failures = [event for event in events if event.kind == "planning_failed"]
        assert failures
        assert "memory" in failures[0].details["reason"]
        assert engine.plan == first
        assert all(loss > 0 for loss in losses)
