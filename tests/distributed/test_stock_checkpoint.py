"""Checkpoints of DeepSpeed's own engine: training goes on the same in ours, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from malleus_ds import MalleusPipelineEngine
from malleus_ds.checkpoint.opening import open_path
from malleus_ds.checkpoint.stock.layout import StockLayout
from malleus_ds.checkpoint.stock.writing import divide_layers, write_stock
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


def there_and_back(case: Case, folder: Path) -> None:
    """From stock to ours, and from ours to another job of stock."""
    first = StockJob(layers(case.tied), case.config)
    first.steps(2)
    first.engine.save_checkpoint(str(folder / "stock"), client_state={"epoch": 3})
    state = first.state()
    expected, rate = first.steps(2), first.engine.get_lr()
    first.engine.destroy()

    engine = ours(case)
    path, client_state = engine.load_checkpoint(str(folder / "stock"))
    assert (path, client_state) == (str(folder / "stock/global_step2"), {"epoch": 3})
    assert (engine.global_steps, engine.global_samples) == (2, 32)
    assert_same_state(gather_state(engine), state)
    losses = [engine.train_batch().item() for _ in range(2)]
    torch.testing.assert_close(losses, expected, rtol=case.rtol, atol=0)
    assert engine.get_lr() == rate
    if case.zero_stage == 0 and case.precision != "fp32":
        engine.destroy()
        return

    engine.save_checkpoint(str(folder / "ours"), client_state={"epoch": 4})
    state, scale = gather_state(engine), engine.optimizer.loss_scale
    expected, rate = [engine.train_batch().item()], engine.get_lr()
    engine.destroy()
    if dist.get_rank() == 0:
        checkpoint = open_path(folder / "ours")
        layout = StockLayout(divide_layers(checkpoint.manifest, 2, "uniform"), 2, case.zero_stage)
        write_stock(checkpoint, folder / "exported", "step4", layout)
    dist.barrier()
    second = StockJob(layers(case.tied), case.config, first_step=4)
    path, client_state = second.engine.load_checkpoint(str(folder / "exported"))
    assert path is not None
    assert client_state["epoch"] == 4
    assert (second.engine.global_steps, second.engine.global_samples) == (4, 64)
    if case.precision == "fp16":
        assert second.engine.optimizer.cur_scale == scale
    assert_same_state(second.state(), state)
    torch.testing.assert_close(second.steps(1), expected, rtol=case.rtol, atol=0)
    assert second.engine.get_lr() == rate
    second.engine.destroy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_goes_on_from_stock_to_ours_and_back(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    ranks.run(there_and_back, case, tmp_path)
