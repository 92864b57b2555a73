"""A slow member of a TP group: the detector names it and not its peers, and the new plan splits the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from malleus_ds.models import VocabParallelLoss, gpt_layers
from tests.distributed.reference import BASE_SEED, config, gpt, make_engine, plan, single_process
from tests.harness import DistributedTest

SLOW_RANK, RATE, SLOW_FROM, NUM_STEPS = 2, 3.0, 5, 16
RHO = {"1": 3.4, "2": 1.8, "4": 1.0}


def emulated() -> dict[str, Any]:
    return config(
        seed=BASE_SEED,
        nodes=[[0, 1, 2, 3], [4, 5, 6, 7]],
        tensor_parallel={"rho": RHO},
        detector={"control_plane": "gloo", "small_shift": 0.5, "large_shift": 1.0},
        emulation={
            "layer_ms": 15.0,
            "layer_weights": [0, 1, 1, 1, 1, 1, 1, 0],
            "events": [{"step": SLOW_FROM, "rank": SLOW_RANK, "rate": RATE}],
        },
    )


class TestSlowMember(DistributedTest):
    world_size = 8
    timeout_s = 240.0

    def test_is_named_and_leaves_its_group(self) -> None:
        specs = gpt_layers(gpt(num_heads=4))
        expected = single_process(specs, VocabParallelLoss(), NUM_STEPS)
        fours = plan(([((0, 1, 2, 3), 0, 8)], 4), ([((4, 5, 6, 7), 0, 8)], 4))
        engine = make_engine(fours, specs, VocabParallelLoss(), ds_config=emulated())
        losses = [engine.train_batch().item() for _ in range(NUM_STEPS)]
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
        assert engine.control_loop is not None
        shared: list[Any] = [engine.control_loop.events]
        dist.broadcast_object_list(shared, src=0)
        events = {event.kind: event.details for event in reversed(shared[0])}
        assert events["shift"]["ranks"] == (SLOW_RANK,)
        rates = events["shift"]["new_rates"]
        # How exact it is, `benchmarks/tensor_parallel.py` says: a busy machine adds to it.
        assert rates[0] == pytest.approx(RATE, rel=0.3), "of the slow member"
        degrees = {stage.degree for _, _, stage in engine.plan.stages()}
        slow = [stage for _, _, stage in engine.plan.stages() if SLOW_RANK in stage.ranks]
        assert degrees >= {1, 2} or SLOW_RANK in engine.plan.standby, str(engine.plan)
        assert all(stage.degree == 1 for stage in slow), str(engine.plan)
        assert engine.switches
        engine.destroy()
