"""`malleus_ds.initialize`, the twin of `deepspeed.initialize`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import initialize as initialize_stock  # bound here: `install` replaces the name
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from torch.distributed.distributed_c10d import _set_pg_timeout

from malleus_ds.comm import check_deepspeed_version, init_distributed
from malleus_ds.config import ConfigError, MalleusConfig, parse_config
from malleus_ds.data.loader import check_map_style
from malleus_ds.data.order import DataError
from malleus_ds.elastic.restart_plan import RestartPlan
from malleus_ds.environment import ATTEMPT_VARIABLE, HOST_VARIABLE
from malleus_ds.pipe.agreement import require_equal, run_together
from malleus_ds.pipe.engine import MalleusPipelineEngine
from malleus_ds.pipe.grid import max_degree
from malleus_ds.pipe.module import MalleusPipelineModule
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.zero.supported import check_optimizer_name


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[MalleusPipelineEngine, Any, Any, Any]:
    """Create the engine of a `MalleusPipelineModule`: arguments and result of `deepspeed.initialize`.

    The config is DeepSpeed's, with an optional ``"malleus"`` section (`malleus_ds.config`). Other
    models go to `deepspeed.initialize` as they are. ``training_data`` is read in an order that does
    not depend on the plan.

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)``. Raises `ConfigError` or
    `PlanError` for wrong input and `AgreementError` when ranks differ, on all ranks.
    """
    check_deepspeed_version()
    if not isinstance(model, MalleusPipelineModule):
        port = {} if distributed_port is None else {"distributed_port": distributed_port}
        return initialize_stock(  # type: ignore[no-any-return]
            args, model, optimizer, model_parameters, training_data, lr_scheduler,
            mpu=mpu, dist_init_required=dist_init_required, collate_fn=collate_fn, config=config,
            mesh_param=mesh_param, config_params=config_params, **port,
        )  # fmt: skip
    init_distributed(port=distributed_port)
    (ds_config, malleus_config), digests = run_together(
        lambda: _read_config(args, config if config is not None else config_params, optimizer),
        note=lambda both: _digest(both[0], model.base_seed),
    )
    require_equal("configs or seeds", digests, "give every rank the same config and base_seed")
    _, lengths = run_together(lambda: _check_data(training_data), note=str)
    require_equal("lengths of training_data", lengths, "give every rank the same data")
    plan, _ = run_together(lambda: _initial_plan(model, ds_config, malleus_config))
    num_slices, _ = run_together(lambda: _largest_degree(malleus_config, plan, model.restart_plan))
    model.start_with(plan, timedelta(seconds=malleus_config.timeout_s), num_slices)
    config_class, _ = run_together(lambda: _deepspeed_config(ds_config, model))
    engine = MalleusPipelineEngine(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=model.mpu(),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=ds_config,
        config_class=config_class,
        malleus_config=malleus_config,
    )
    # Until here ranks may be slow to come; from now on one that does not answer is stuck.
    _set_pg_timeout(timedelta(seconds=malleus_config.timeout_s))
    engine._configure_python_gc()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _read_config(args: Any, config: Any, optimizer: Any) -> tuple[dict[str, Any], MalleusConfig]:
    """The DeepSpeed config as a dict, and its ``"malleus"`` section."""
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and config is not None:
        raise ConfigError("give the config either as --deepspeed_config or as config=, not both")
    config = from_args if config is None else config
    if config is None:
        raise ConfigError("no DeepSpeed config: pass config= or --deepspeed_config FILE")
    if not isinstance(config, dict):
        try:
            config = load_ds_config(config)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the DeepSpeed config {config!r}: {error}") from error
    _check_deepspeed_keys(config, optimizer)
    return config, parse_config(config.get("malleus"))


def _check_deepspeed_keys(config: dict[str, Any], optimizer: Any) -> None:
    """What DeepSpeed would report with a traceback, or not at all."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f'zero_optimization is {zero!r}: give an object such as {{"stage": 1}}')
    stage = zero.get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f"zero_optimization.stage is {stage!r}: stages 2 and 3 would reduce gradients after every "
            f"micro-batch of the pipeline; use 0 or 1"
        )
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{key} is {value!r}: give a whole number of at least 1, or leave it out")
    if optimizer is not None:
        return
    named = config.get("optimizer")
    if not isinstance(named, dict) or not isinstance(named.get("type"), str):
        raise ConfigError(
            f"optimizer is {named!r} in the config: give an object with its type, or pass optimizer= to "
            f"initialize"
        )
    check_optimizer_name(named["type"])


def _check_data(training_data: Any) -> int | None:
    """Number of samples; None without data. Raises `DataError` for data that cannot be used."""
    if training_data is None:
        return None
    check_map_style(training_data)
    if len(training_data) == 0:
        raise DataError("training_data has no samples: give at least one")
    return len(training_data)


def _digest(config: dict[str, Any], base_seed: int) -> str:
    """Short hash of all that must be equal on all ranks."""
    text = json.dumps([config, base_seed], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _initial_plan(
    model: MalleusPipelineModule, ds_config: dict[str, Any], malleus_config: MalleusConfig
) -> ParallelPlan:
    """The module's own plan, else its equal pipelines, which share the config's batch."""
    plan = _share_batch(model.plan, ds_config) if model.has_implicit_plan else model.plan
    _check_batch(plan, ds_config)
    _check_ranks(malleus_config, plan)
    _check_trace(malleus_config.trace)
    return plan


def _largest_degree(config: MalleusConfig, plan: ParallelPlan, restart: RestartPlan | None) -> int:
    """TP degree that no plan of the job exceeds. Raises `ConfigError` for keys that do not fit it."""
    used, given = max_degree(plan), config.tensor_parallel.max_degree
    if restart is not None:
        used = max(used, restart.max_degree)
    largest = used if given is None else given
    if largest < used or largest & (largest - 1):
        raise ConfigError(
            f"malleus.tensor_parallel.max_degree is {largest}: give a power of two that is at least the "
            f"largest TP degree of the initial plan, {used}"
        )
    degrees = [str(2**k) for k in range(largest.bit_length())]
    rho = config.tensor_parallel.rho
    if rho is not None and (sorted(rho) != sorted(degrees) or rho[str(largest)] != 1.0):
        raise ConfigError(
            f"malleus.tensor_parallel.rho is {rho}: give one value for each of the degrees "
            f"{', '.join(degrees)}, and 1.0 for the largest"
        )
    return largest


def _check_trace(path: str | None) -> None:
    """The coordinator appends to it after every step: find out now whether it can."""
    if path is None or dist.get_rank() != 0:
        return
    try:
        Path(path).open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"malleus.trace is {path!r}: {error}; give a path that can be written") from error


def _check_ranks(config: MalleusConfig, plan: ParallelPlan) -> None:
    """Keys that speak of ranks and layers must fit the job."""
    ranks = sorted(rank for node in config.nodes or () for rank in node)
    # Under malleus-run the hostfile has the nodes, and ranks get other numbers after a loss.
    is_listed = config.nodes is not None and HOST_VARIABLE not in os.environ
    if is_listed and ranks != list(range(plan.world_size)):
        raise ConfigError(
            f"malleus.nodes lists the ranks {ranks}: list each rank from 0 to {plan.world_size - 1} once"
        )
    emulation = config.emulation
    if emulation is None:
        return
    for index, event in enumerate(emulation.events):
        if event.rank >= plan.world_size and int(os.environ.get(ATTEMPT_VARIABLE, "0")) == 0:
            raise ConfigError(
                f"malleus.emulation.events[{index}].rank is {event.rank}: the job has the ranks 0 to "
                f"{plan.world_size - 1}"
            )
    weights = emulation.layer_weights
    if weights is not None and len(weights) != plan.num_layers:
        raise ConfigError(
            f"malleus.emulation.layer_weights has {len(weights)} entries, but the model has "
            f"{plan.num_layers} layers: give one per layer, or leave the key out"
        )


def _share_batch(plan: ParallelPlan, ds_config: dict[str, Any]) -> ParallelPlan:
    """Equal data shares from two of DeepSpeed's three batch keys (all three must agree)."""
    num_pipelines = len(plan.pipelines)
    batch = ds_config.get("train_batch_size")
    micro = ds_config.get("train_micro_batch_size_per_gpu")
    steps = ds_config.get("gradient_accumulation_steps")
    if micro is None:
        steps = steps or 1
        micro = None if batch is None else batch // (steps * num_pipelines)
    if steps is None and micro:
        steps = 1 if batch is None else batch // (micro * num_pipelines)
    if not micro or not steps:
        raise ConfigError(
            f"train_batch_size {batch} is too small for {num_pipelines} pipelines, or not given: set "
            f"train_batch_size or train_micro_batch_size_per_gpu"
        )
    return replace(plan.with_micro_batches([steps] * num_pipelines), micro_batch_size=micro)


def _check_batch(plan: ParallelPlan, ds_config: dict[str, Any]) -> None:
    """The plan and DeepSpeed's batch keys must speak of the same batch."""
    batch = ds_config.get("train_batch_size")
    if batch is not None and batch != plan.global_batch_size:
        raise PlanError(
            f"train_batch_size is {batch}, but the plan has {plan.num_micro_batches} micro-batches of "
            f"{plan.micro_batch_size} samples, {plan.global_batch_size} in all: make them equal"
        )
    micro = ds_config.get("train_micro_batch_size_per_gpu")
    if micro is not None and micro != plan.micro_batch_size:
        raise PlanError(
            f"train_micro_batch_size_per_gpu is {micro}, but the plan's micro_batch_size is "
            f"{plan.micro_batch_size}: make them equal"
        )


def _deepspeed_config(ds_config: dict[str, Any], model: MalleusPipelineModule) -> DeepSpeedConfig:
    """DeepSpeed's own config; its arithmetic of batch sizes is given the plan's numbers."""
    plan = model.plan
    batch = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches // model.num_replicas,
    }
    return DeepSpeedConfig({**ds_config, **batch}, model.mpu())
