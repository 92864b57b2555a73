"""Engines that take turns in one process: stock DeepSpeed's and ours, on the same emulated devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups

import malleus_ds
from malleus_ds import MalleusPipelineEngine, MalleusPipelineModule
from malleus_ds.config import RateEvent, parse_config
from malleus_ds.data import VOCABULARY_SIZE, ByteTextDataset, PlanInvariantLoader, SampleOrder
from malleus_ds.emulation import BACKWARD_TO_FORWARD, EmulatedDevice, layers_of
from malleus_ds.models import GPTConfig, VocabParallelLoss, gpt_layers
from malleus_ds.pipe.control_loop import ControlLoop
from malleus_ds.plan import ParallelPlan

NUM_PIPELINES = 2
_MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Workload:
    """A GPT in two equal pipelines of one rank per stage; emulated, a block takes ``layer_ms``.

    num_micro_batches: per pipeline, of one sample each; layer_ms: forward time of a block on a healthy
    device; jitter, step_jitter: as in the config's ``emulation``.
    """

    layer_ms: float = 10.0
    num_micro_batches: int = 16
    num_blocks: int = 16
    hidden_size: int = 32
    sequence_length: int = 32
    jitter: float = 0.0
    step_jitter: float = 0.0
    is_emulated: bool = True
    """False: layers take what their computation takes."""

    @property
    def total_micro_batches(self) -> int:
        return self.num_micro_batches * NUM_PIPELINES

    @property
    def block_s(self) -> float:
        """Forward and backward of a block on a healthy device, in seconds."""
        return self.layer_ms * 1e-3 * (1 + BACKWARD_TO_FORWARD)

    def emulation(self, events: Sequence[RateEvent] = ()) -> dict[str, Any]:
        """The config's section ``emulation``."""
        return {
            "layer_ms": self.layer_ms,
            "layer_weights": [0.0, *[float(self.is_emulated)] * self.num_blocks, 0.0],
            "events": [event.model_dump() for event in events],
            "jitter": self.jitter,
            "step_jitter": self.step_jitter,
        }

    def config(self) -> dict[str, Any]:
        """DeepSpeed's config."""
        return {
            "train_batch_size": self.total_micro_batches,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }

    def module_arguments(self) -> dict[str, Any]:
        """Of `PipelineModule` and of ours."""
        model = GPTConfig(
            vocabulary_size=VOCABULARY_SIZE,
            hidden_size=self.hidden_size,
            num_heads=4,
            num_blocks=self.num_blocks,
            sequence_length=self.sequence_length,
            dropout=0.1,
        )
        return {
            "layers": gpt_layers(model),
            "num_stages": dist.get_world_size() // NUM_PIPELINES,
            "loss_fn": VocabParallelLoss(),
            "partition_method": "type:Block",
        }

    def dataset(self) -> ByteTextDataset:
        return ByteTextDataset(self.sequence_length, max_bytes=_MAX_TEXT_BYTES)


class Contender:
    """One engine of several in a process. `step` is collective, in the same order on all ranks."""

    def __init__(self, engine: PipelineEngine, device: EmulatedDevice) -> None:
        self.engine = engine
        self.device = device

    def step(self) -> float:
        """Run one training step; returns its duration in seconds, from first to last rank."""
        self._take_over()
        self.device.set_step(self.engine.global_steps)
        data = self._data()
        dist.barrier()
        began = time.perf_counter()
        self.engine.train_batch(data)
        dist.barrier()
        return time.perf_counter() - began

    def _data(self) -> Iterator[Any] | None:
        """What the engine does not read by itself."""
        return None

    def _take_over(self) -> None:
        """DeepSpeed keeps the grid of one engine in module globals, set when an engine is created:
        point-to-point messages go by ``p2p``'s, and ``groups`` answers by ``mpu``."""
        deepspeed_groups.mpu = self.engine.mpu
        if self.engine.num_stages > 1:
            p2p.init_process_groups(self.engine.grid)


class Stock(Contender):
    """DeepSpeed's own engine and module; it reads the samples that ours reads."""

    def __init__(self, workload: Workload) -> None:
        module = PipelineModule(**workload.module_arguments())
        engine, _, _, _ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=workload.config()
        )
        super().__init__(engine, _emulated_device(workload))
        self.device.attach(layers_of(module))
        self._workload = workload
        dataset = workload.dataset()
        self._loader = PlanInvariantLoader(dataset, 1, SampleOrder(len(dataset), parse_config(None).seed))

    def set_rate(self, rank: int, rate: float) -> None:
        """From now on ``rank`` takes ``rate`` times the healthy time, and all others the healthy one."""
        self.device.detach()
        self.device = _emulated_device(self._workload, (RateEvent(step=0, rank=rank, rate=rate),))
        self.device.attach(layers_of(self.engine.module))

    def _data(self) -> Iterator[Any]:
        start = self.engine.grid.get_data_parallel_id() * self._workload.num_micro_batches
        stop = start + self._workload.num_micro_batches
        return self._loader.micro_batches(self.engine.global_samples, start, stop)


class Ours(Contender):
    """Our engine, with the control loop or parts of it."""

    engine: MalleusPipelineEngine

    def __init__(
        self,
        workload: Workload,
        has_detector: bool = True,
        has_planner: bool = True,
        events: Sequence[RateEvent] = (),
        plan: ParallelPlan | None = None,
        **section: Any,
    ) -> None:
        """plan: the first one, instead of equal pipelines; section: other keys of the config's ``malleus``."""
        section |= {
            "detector": {"enabled": has_detector},
            "planner": {"enabled": has_planner},
            "emulation": workload.emulation(events),
        }
        engine = make_engine(workload, section, plan)
        assert engine.device_emulation is not None, "the config emulates devices"
        super().__init__(engine, engine.device_emulation)


def make_engine(
    workload: Workload, section: dict[str, Any], plan: ParallelPlan | None = None
) -> MalleusPipelineEngine:
    """An engine of ours; section: the config's ``malleus``; plan: instead of equal pipelines. Collective."""
    module = MalleusPipelineModule(**workload.module_arguments(), plan=plan)
    engine, _, _, _ = malleus_ds.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        training_data=workload.dataset(),
        config={**workload.config(), "malleus": section},
    )
    return engine


def _emulated_device(workload: Workload, events: Sequence[RateEvent] = ()) -> EmulatedDevice:
    """The device of this rank, as the engine makes it from the config."""
    config = parse_config({"emulation": workload.emulation(events)}).emulation
    assert config is not None
    return EmulatedDevice(config, dist.get_rank())


def overrun_share(devices: Sequence[EmulatedDevice]) -> float:
    """Share of the emulated waits of all ranks that came too late: the machine was too slow. Collective."""
    counts = torch.tensor(
        [sum(device.num_overruns for device in devices), sum(device.num_calls for device in devices)]
    )
    dist.all_reduce(counts)
    num_overruns, num_calls = counts.tolist()
    return float(num_overruns / max(num_calls, 1))


class TimedControlLoop:
    """Stands before a `ControlLoop` and takes the time that this rank spends in it, per step.

    durations_s: of each step so far.
    """

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop
        self._begin_s = 0.0
        self.durations_s: list[float] = []

    @classmethod
    def put_around(cls, engine: MalleusPipelineEngine) -> TimedControlLoop:
        """Let ``engine`` call its loop through the new object."""
        assert engine.control_loop is not None, "the detector is enabled"
        timed = cls(engine.control_loop)
        engine.control_loop = timed  # type: ignore[assignment]
        return timed

    def begin_step(self) -> None:
        began = time.perf_counter()
        self._loop.begin_step()
        self._begin_s = time.perf_counter() - began

    def finish_step(self, step: int, plan: ParallelPlan, num_micro_batches: int, can_switch: bool) -> None:
        began = time.perf_counter()
        self._loop.finish_step(step, plan, num_micro_batches, can_switch)
        self.durations_s.append(self._begin_s + time.perf_counter() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
