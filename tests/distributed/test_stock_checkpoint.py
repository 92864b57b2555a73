"""Checkpoints of DeepSpeed's own engine: training goes on the same in ours, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from malleus_ds import MalleusPipelineEngine, MalleusPipelineModule, initialize
from malleus_ds.checkpoint.opening import open_path
from malleus_ds.checkpoint.stock.layout import StockLayout
from malleus_ds.checkpoint.stock.writing import divide_layers, write_stock
from malleus_ds.cli.main import main
from malleus_ds.models import LlamaConfig
from malleus_ds.models.llama import llama_layers
from malleus_ds.tensor_parallel import VocabParallelLoss
from tests.checkpoints import write_own
from tests.distributed.checkpoint_reference import assert_same_state, gather_state
from tests.distributed.reference import BASE_SEED, Tokens, build_all, config, gather_parameters, plan
from tests.distributed.stock import StockJob, layers, parameter_groups, stock_config
from tests.distributed.test_checkpoint import load_error, on_rank_0
from tests.harness import RankPool
from tests.unit.test_checkpoint_stock import Touches

UNEVEN = plan(([((2, 0), 0, 5), (1, 5, 8)], 8), standby=(3,))


@dataclass(frozen=True)
class Case:
    """kind: of `layers`, special ones also have two parameter groups; rtol: of the losses, as in the tests of
    precision; tied weights are added up in another order."""

    precision: str
    zero_stage: int
    kind: str
    rtol: float
    options: dict[str, Any]

    def __str__(self) -> str:
        names = ["shuffled"] if self.is_shuffled else self.options
        return "-".join([self.precision, f"zero{self.zero_stage}", self.kind, *names])

    @property
    def is_shuffled(self) -> bool:
        """DeepSpeed's own functions then mix parameters up, and losses alone can tell."""
        return "round_robin_gradients" in self.options.get("zero_optimization", {})

    @property
    def config(self) -> dict[str, Any]:
        return stock_config(self.precision, self.zero_stage, **self.options)


ALIGNED = {"zero_optimization": {"stage": 1, "parameter_alignment": True}}
SHUFFLED = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = [
    Case("fp32", 0, "special", 1e-5, {}),
    Case("fp32", 1, "special", 1e-5, ALIGNED),
    Case("fp32", 1, "untied", 1e-5, SHUFFLED),
    Case("bf16", 0, "tied", 5e-3, {}),
    Case("bf16", 1, "untied", 1e-4, {}),
    Case("bf16", 1, "untied", 1e-4, FP32_GRADIENTS),
    Case("fp16", 0, "untied", 1e-4, {}),
    Case("fp16", 1, "tied", 5e-3, {}),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def ours(case: Case, **malleus: Any) -> MalleusPipelineEngine:
    settings = {**case.config, "malleus": config(**malleus)["malleus"]}
    module = MalleusPipelineModule(
        layers(case.kind), loss_fn=VocabParallelLoss(), plan=UNEVEN, base_seed=BASE_SEED
    )
    groups = parameter_groups(module) if case.kind == "special" else None
    engine, *_ = initialize(model=module, model_parameters=groups, training_data=Tokens(), config=settings)
    return engine


def stock(case: Case, first_step: int = 0) -> StockJob:
    return StockJob(layers(case.kind), case.config, first_step, has_groups=case.kind == "special")


def there_and_back(case: Case, folder: Path) -> None:
    """From stock to ours, and from ours to another job of stock."""
    first = stock(case)
    first.steps(2)
    first.engine.save_checkpoint(str(folder / "stock"), client_state={"epoch": 3})
    state = first.state()
    expected, rate = first.steps(2), first.engine.get_lr()
    first.engine.destroy()

    engine = ours(case)
    path, client_state = engine.load_checkpoint(str(folder / "stock"))
    assert (path, client_state) == (str(folder / "stock/global_step2"), {"epoch": 3})
    assert (engine.global_steps, engine.global_samples) == (2, 32)
    if not case.is_shuffled:
        assert_same_state(gather_state(engine), state)
    losses = [engine.train_batch().item() for _ in range(2)]
    torch.testing.assert_close(losses, expected, rtol=case.rtol, atol=0)
    assert engine.get_lr() == rate
    if case.is_shuffled or (case.zero_stage == 0 and case.precision != "fp32"):  # not written
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
    second = stock(case, first_step=4)
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


def refuse_a_trap(folder: Path) -> None:
    case = CASES[0]
    engine = ours(case)
    engine.train_batch()
    engine.save_checkpoint(str(folder / "ours"))
    trap = folder / "executed"

    def plant() -> None:
        checkpoint = open_path(folder / "ours")
        layout = StockLayout(divide_layers(checkpoint.manifest, 2, "uniform"), 1, case.zero_stage)
        write_stock(checkpoint, folder / "stock", "weights", replace(layout, zero_stage=None))
        directory = write_stock(checkpoint, folder / "stock", "bad", layout)
        torch.save({"weight": Touches(trap)}, directory / "layer_03-model_states.pt")

    on_rank_0(plant)
    before = gather_state(engine)
    text = load_error(engine, str(folder / "stock"))
    assert text.startswith(f"{folder / 'stock/bad/layer_03-model_states.pt'}: names ")
    assert not trap.exists()
    assert_same_state(gather_state(engine), before)
    assert "has weights alone" in load_error(engine, str(folder / "stock"), tag="weights")
    engine.train_batch()
    engine.load_checkpoint(str(folder / "stock"), tag="weights", load_optimizer_states=False)
    weights = {key: values for key, values in before.items() if key[0] == "parameter"}
    assert_same_state({key: v for key, v in gather_state(engine).items() if key[0] == "parameter"}, weights)
    assert engine.global_steps == 1
    engine.train_batch()


def test_a_trap_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refuse_a_trap, tmp_path)


def train_on(theirs: Path, folder: Path) -> None:
    """A LLaMA that Hugging Face's library would load goes on in bf16 on ranks that cut it."""
    config = LlamaConfig(24, 16, 24, num_heads=2, num_kv_heads=2, num_blocks=6)
    module = MalleusPipelineModule(llama_layers(config), loss_fn=VocabParallelLoss(), plan=UNEVEN)
    settings = stock_config("bf16", 1)
    engine, *_ = initialize(model=module, training_data=Tokens(), config=settings)
    weights, _ = build_all(llama_layers(config))
    on_rank_0(lambda: write_own(weights, folder / "ours"))
    command = ["checkpoint", "export", str(folder / "ours"), str(theirs), "--format", "huggingface"]
    on_rank_0(lambda: main([*command, "--num-heads", "2"]))
    command = ["checkpoint", "import", str(theirs), str(folder / "back"), "--format", "huggingface"]
    on_rank_0(lambda: main([*command, "--dtype", "bfloat16"]))
    assert "has weights alone" in load_error(engine, str(folder / "back"))
    engine.load_checkpoint(str(folder / "back"), load_module_only=True)
    expected = {name: parameter.detach().bfloat16() for name, parameter in weights.named_parameters()}
    torch.testing.assert_close(gather_parameters(engine), expected, rtol=0, atol=0)
    engine.train_batch()


def test_a_llama_of_hugging_face_is_trained_on(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train_on, tmp_path / "theirs", tmp_path)
