"""The page for those who come from DeepSpeed: its code runs, before and after, with the same losses."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

import malleus_ds
from tests.harness import REPOSITORY, RankPool

WORLD_SIZE = 4
SAME_ORDER = 'config={**config, "malleus": {"shuffle": False}}'


def code_blocks() -> list[str]:
    text = (REPOSITORY / "docs/migrating_from_deepspeed.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run_script(code: str) -> tuple[str, str, list[float]]:
    """Types of its module and engine, and its losses."""
    # As in a job of one's own: DeepSpeed's data loaders start workers, which the harness makes slow.
    multiprocessing.set_start_method("fork", force=True)
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(code, "docs/migrating_from_deepspeed.md", "exec"), namespace)
    return type(namespace["module"]).__name__, type(namespace["engine"]).__name__, namespace["losses"]


def run_installed(install: str, code: str) -> tuple[str, str, list[float]]:
    """The same under `install`; undone afterwards."""
    import deepspeed

    stock = (deepspeed.initialize, deepspeed.pipe.PipelineModule)
    install, count = re.subn(
        r"^malleus_ds\.install\(\)", "installed = malleus_ds.install()", install, flags=re.M
    )
    assert count == 1
    namespace: dict[str, Any] = {}
    exec(install, namespace)
    try:
        result = run_script(code)
    finally:
        namespace["installed"].uninstall()
    assert (deepspeed.initialize, deepspeed.pipe.PipelineModule) == stock
    return result


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(WORLD_SIZE) as pool:
        yield pool


def test_losses_before_and_after_are_equal(ranks: RankPool) -> None:
    shared, before, after, install = code_blocks()
    stock = ranks.run(run_script, shared + before)
    ours = ranks.run(run_script, shared + after)
    kept = ranks.run(run_installed, install, (shared + before).replace("config=config", SAME_ORDER))
    for results, names in (
        (stock, ("PipelineModule", "PipelineEngine")),
        (ours, ("MalleusPipelineModule", "MalleusPipelineEngine")),
        (kept, ("MalleusPipelineModule", "MalleusPipelineEngine")),
    ):
        assert [result[:2] for result in results] == [names] * WORLD_SIZE
        for _, _, losses in results:
            torch.testing.assert_close(losses, stock[0][2], rtol=1e-5, atol=0)
    assert stock[0][2][-1] < stock[0][2][0]


def stock_engine() -> str:
    """Type of the engine that `deepspeed.initialize` makes of a module that is not ours."""
    import deepspeed

    with malleus_ds.install():
        module = PipelineModule(
            [torch.nn.Linear(2, 2)] * 2, num_stages=2, loss_fn=torch.nn.functional.mse_loss
        )
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    assert isinstance(engine, PipelineEngine)
    return type(engine).__name__


def test_other_models_keep_their_engine_and_uninstall_is_complete(ranks: RankPool) -> None:
    import deepspeed

    assert ranks.run(stock_engine) == ["PipelineEngine"] * WORLD_SIZE
    stock = (deepspeed.initialize, deepspeed.pipe.PipelineModule)
    installation = malleus_ds.install()
    again = malleus_ds.install()
    assert deepspeed.initialize is malleus_ds.initialize
    assert deepspeed.pipe.PipelineModule is malleus_ds.MalleusPipelineModule
    again.uninstall()
    installation.uninstall()
    installation.uninstall()
    assert (deepspeed.initialize, deepspeed.pipe.PipelineModule) == stock
