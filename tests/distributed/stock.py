"""DeepSpeed's own pipeline engine, on the samples and layers that the tests of ours use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from malleus_ds.models.gpt import gpt_layers
from malleus_ds.tensor_parallel import VocabParallelLoss
from tests.distributed.checkpoint_reference import Whole
from tests.distributed.reference import (
    BASE_SEED,
    CLIP_NORM,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Tokens,
    gpt,
)
from tests.distributed.test_checkpoint import FrozenBlock, Half
from tests.distributed.test_precision import allow_fp16

NUM_STAGES = 2


def layers(kind: str) -> list[Any]:
    """Without dropout, whose random numbers differ between the engines.

    kind: "tied", "untied", or "special": tied, with frozen parameters and buffers.
    """
    config = replace(gpt(kind != "untied"), dropout=0.0)
    specs = gpt_layers(config)
    if kind == "special":
        specs[3:5] = [LayerSpec(Half), LayerSpec(FrozenBlock, config)]
    return specs


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """As most programs have them: matrices decay, vectors do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def stock_config(precision: str, zero_stage: int, **options: Any) -> dict[str, Any]:
    config = {
        "train_batch_size": NUM_MICRO_BATCHES * MICRO_BATCH_SIZE,
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": LEARNING_RATE, "warmup_num_steps": 6, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 10**9,
        **options,
    }
    return config if precision == "fp32" else {**config, precision: {"enabled": True}}


class StockJob:
    """One rank of a job of `NUM_STAGES` stages, and as many pipelines as the world has room for.

    first_step: of the samples; has_groups: whether it has `parameter_groups`.
    """

    def __init__(
        self, specs: Sequence[Any], config: dict[str, Any], first_step: int = 0, has_groups: bool = False
    ) -> None:
        allow_fp16()
        module = PipelineModule(
            list(specs),
            num_stages=NUM_STAGES,
            loss_fn=VocabParallelLoss(),
            seed_layers=True,
            base_seed=BASE_SEED,
            partition_method="uniform",
        )
        self.engine: PipelineEngine
        parameters = parameter_groups(module) if has_groups else list(module.parameters())
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
        self._batches = self._read(first_step)

    def steps(self, count: int) -> list[float]:
        return [self.engine.train_batch(self._batches).item() for _ in range(count)]

    def _read(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This pipeline's share of each global batch, as ours divides it."""
        data, own = Tokens(), NUM_MICRO_BATCHES // self.engine.grid.data_parallel_size
        first = self.engine.grid.get_data_parallel_rank() * own
        while True:
            for index in range(first, first + own):
                start = (step * NUM_MICRO_BATCHES + index) * MICRO_BATCH_SIZE
                samples = [data[start + offset] for offset in range(MICRO_BATCH_SIZE)]
                yield tuple(torch.stack(column) for column in zip(*samples, strict=True))  # type: ignore[misc]
            step += 1

    def state(self) -> Whole:
        """The whole training state, on every rank, by DeepSpeed's functions; ties from the first stage."""
        link = getattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:  # what was loaded is linked by the next step, and then the first group only
            self.engine.optimizer._hp_optimizer_states_linked = False
            link()
        own: Whole = {}
        for name, buffer in self.engine.module.named_buffers():
            own["parameter", name] = buffer.clone()
        for name, parameter in self.engine.module.named_parameters():
            own["parameter", name] = parameter.detach().clone()
            if not parameter.requires_grad:
                continue
            if parameter.dtype != torch.float32:
                own["master", name] = self._full(parameter, None)
            for state in ("exp_avg", "exp_avg_sq"):
                own[state, name] = self._full(parameter, state)
        gathered: list[Whole] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        whole: Whole = {}
        for part in gathered:
            whole = {**part, **whole}
        return {key: values.reshape(-1) for key, values in whole.items()}

    def _full(self, parameter: nn.Parameter, state: str | None) -> Tensor:
        """A state of a parameter; None: its master."""
        optimizer = self.engine.optimizer
        if hasattr(parameter, "_hp_mapping"):
            if state is None:
                full: Tensor = safe_get_full_fp32_param(parameter)
            else:
                full = safe_get_full_optimizer_state(parameter, state)
            return full.clone()
        for group, masters in zip(
            getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
        ):
            for index, of in enumerate(group):
                if of is parameter:
                    parameter = masters[index]
        torch_optimizer = getattr(optimizer, "optimizer", optimizer)
        return (parameter if state is None else torch_optimizer.state[parameter][state]).detach().clone()
