"""Checkpoints of DeepSpeed's own engine: training goes on the same in ours, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from malleus_ds import MalleusPipelineEngine
from malleus_ds.tensor_parallel import VocabParallelLoss
from tests.distributed.checkpoint_reference import assert_same_state, gather_state
from tests.distributed.reference import config, make_engine, plan
from tests.distributed.stock import StockJob, layers, stock_config
from tests.harness import RankPool

UNEVEN = plan(([((2, 0), 0, 5), (1, 5, 8)], 8), standby=(3,))


@dataclass(frozen=True)
class Case:
    """rtol: of the losses, as in the tests of precision; tied weights are added up in another order."""

    precision: str
    zero_stage: int
    tied: bool
    rtol: float
    options: dict[str, Any]

    def __str__(self) -> str:
        ties = "tied" if self.tied else "untied"
        return "-".join([self.precision, f"zero{self.zero_stage}", ties, *self.options])

    @property
    def config(self) -> dict[str, Any]:
        return stock_config(self.precision, self.zero_stage, **self.options)


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = [
    Case("fp32", 0, True, 1e-5, {}),
    Case("fp32", 1, False, 1e-5, {}),
    Case("fp32", 1, True, 1e-5, {}),
    Case("bf16", 0, True, 5e-3, {}),
    Case("bf16", 1, False, 1e-4, {}),
    Case("bf16", 1, False, 1e-4, FP32_GRADIENTS),
    Case("fp16", 0, False, 1e-4, {}),
    Case("fp16", 1, True, 5e-3, {}),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def ours(case: Case, **malleus: Any) -> MalleusPipelineEngine:
    settings = {**case.config, "malleus": config(**malleus)["malleus"]}
    return make_engine(UNEVEN, layers(case.tied), VocabParallelLoss(), ds_config=settings)


def stock_then_ours(case: Case, folder: Path) -> None:
    stock = StockJob(layers(case.tied), case.config)
    stock.steps(2)
    stock.engine.save_checkpoint(str(folder), client_state={"epoch": 3})
    state = stock.state()
    expected, rate = stock.steps(2), stock.engine.get_lr()
    stock.engine.destroy()
    engine = ours(case)
    path, client_state = engine.load_checkpoint(str(folder))
    assert (path, client_state) == (str(folder / "global_step2"), {"epoch": 3})
    assert (engine.global_steps, engine.global_samples) == (2, 32)
    assert_same_state(gather_state(engine), state)
    losses = [engine.train_batch().item() for _ in range(2)]
    torch.testing.assert_close(losses, expected, rtol=case.rtol, atol=0)
    assert engine.get_lr() == rate
    engine.destroy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ours_goes_on_where_stock_was(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    ranks.run(stock_then_ours, case, tmp_path)
