"""DeepSpeed's pipeline engine under a plan that may be uneven and may change between steps."""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern
from deepspeed.runtime.pipe import engine as stock
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

from malleus_ds.config import MalleusConfig
from malleus_ds.detector.clock import make_clock
from malleus_ds.detector.factory import make_control_plane
from malleus_ds.emulation import EmulatedDevice
from malleus_ds.environment import HOST_VARIABLE
from malleus_ds.pipe.additional_losses import AdditionalLosses, reports_losses
from malleus_ds.pipe.agreement import peer_errors, require_equal, run_together
from malleus_ds.pipe.control_loop import ControlLoop, most_pipelines
from malleus_ds.pipe.in_memory import InMemory
from malleus_ds.pipe.measurement import Measurement
from malleus_ds.pipe.outputs import tensors_with_gradient
from malleus_ds.pipe.parameter_groups import check_parameters, describe_optimizer, list_parameters
from malleus_ds.pipe.precision import check_precision, make_loss_scaler, skips_overflow
from malleus_ds.pipe.run_notes import RunNotes
from malleus_ds.pipe.schedule import StandbySchedule
from malleus_ds.pipe.switching import SwitchReport, prepare, switch
from malleus_ds.placement import Placement, make_buckets, merge_layouts, place
from malleus_ds.plan import ParallelPlan
from malleus_ds.zero.optimizer import MalleusZeroOptimizer
from malleus_ds.zero.supported import check_optimizer


class MalleusPipelineEngine(InMemory):
    """Trains a `MalleusPipelineModule`; create it with `malleus_ds.initialize`.

    The public methods are those of DeepSpeed's `PipelineEngine`; new are `plan` and `reconfigure`.
    Standby ranks call the same methods as all others: they take part in what is collective.
    """

    optimizer: MalleusZeroOptimizer
    loss: Any
    outputs: Any
    pipe_buffers: dict[str, list[Any]]
    data_iterator: Iterator[Any] | None

    def __init__(self, *args: Any, malleus_config: MalleusConfig, **kwargs: Any) -> None:
        self.malleus_config = malleus_config
        self._owns_data = False
        self._stale_iterator: Iterator[Any] | None = None
        self._next_micro_batch = 0
        self._micro_batch_totals: Tensor | None = None
        self._additional_losses = AdditionalLosses()
        self.switches: list[SwitchReport] = []
        self._is_built = False
        super().__init__(*args, **kwargs)
        self._is_built = True
        self.clock = self.module.waits.clock = make_clock(self.device)
        self._shares = self.plan.data_shares
        self.device_emulation: EmulatedDevice | None = None
        self._take_position()
        if malleus_config.emulation is not None:
            self.device_emulation = EmulatedDevice(
                malleus_config.emulation, self.global_rank, self.module.waits
            )
            self._emulate_layers()
        self.measurement: Measurement | None = None
        self.control_loop: ControlLoop | None = None
        if malleus_config.detector.enabled:
            self._start_control_loop()
        self._start_keeper()
        self._run_notes = self._make_run_notes()

    # -- plan ----------------------------------------------------------------------------------

    def reconfigure(self, plan: ParallelPlan) -> SwitchReport:
        """Switch to ``plan`` now, at a step boundary. Collective over the world.

        The training state migrates in place; engine, module, optimizer and LR scheduler stay the
        same objects. Raises on all ranks, with the old plan still running, when the plan does not
        fit (`PlanError`), the ranks have different plans (`AgreementError`), a rank cannot build its
        new layers (`SwitchFailedError`), or the state cannot move, for lack of a holder or of memory
        (`MigrationError`). What fails all the same once state moves is a `StateLostError` on all ranks.
        """
        with peer_errors(f"while switching plans before step {self.global_steps}", self.abandon):
            report = switch(self, plan)
        self._shares = self.plan.data_shares
        if not self._owns_data:
            # It was read for the old place: by first and last stages only, and another share of the data.
            self._stale_iterator = self.data_iterator or self._stale_iterator
            self.data_iterator = None
        self.switches.append(report)
        return report

    def prepare(self, plan: ParallelPlan, max_groups: int | None = None) -> int:
        """Create process groups that ``plan`` needs, so that a later `reconfigure` need not. Collective.

        max_groups: at most so many (None: all). Returns how many are still missing. All ranks must give
        the same plan, which `reconfigure` checks and this does not.
        """
        with peer_errors(f"while preparing a switch before step {self.global_steps}", self.abandon):
            return prepare(self, plan, max_groups)

    @property
    def placement(self) -> Placement:
        """Who holds what now."""
        assert self.optimizer.placement is not None, "DeepSpeed's constructor makes the optimizer"
        return self.optimizer.placement

    def cast_module(self) -> None:
        """Give layers that were built anew the dtypes that DeepSpeed gives the module at the start."""
        if self.fp16_enabled() or self.bfloat16_enabled():
            parameters, buffers = self._mixed_precision_dtypes()
            kept = keep_in_fp32_pattern(self.module, self._config.keep_in_fp32_modules, parameters)
            self._cast_module_mixed_precision(parameters, buffers, False, kept)

    def moved(self) -> None:
        """The module has another place in the plan, or other modules in the same place."""
        self._take_position()
        self._emulate_layers()
        if self.measurement is not None:
            self.measurement.moved()

    def _emulate_layers(self) -> None:
        if self.device_emulation is not None:
            relative_time = self.malleus_config.tensor_parallel.relative_time(
                self.grid.slice_parallel_size, self.module.num_slices
            )
            self.device_emulation.attach(self.module.local_layers(), relative_time)

    def is_first_stage(self) -> bool:
        """True also while DeepSpeed's constructor runs, whose greeting of neighbours assumes equal stages."""
        return not self._is_built or super().is_first_stage()

    def is_last_stage(self) -> bool:
        """As `is_first_stage`."""
        return not self._is_built or super().is_last_stage()

    def _start_control_loop(self) -> None:
        """Collective: the carrier of the records is chosen together."""
        config = self.malleus_config
        plane = make_control_plane(
            config.detector.control_plane, config.timeout_s, dist.get_world_size(), self.global_rank
        )
        # A standby rank has no layers of its own: its emulated device is free for the probe's.
        emulate = None
        if self.device_emulation is not None:
            relative_time = config.tensor_parallel.relative_time(1, self.module.num_slices)
            emulate = partial(self.device_emulation.attach, relative_time=relative_time)
        self.measurement = Measurement(self.module, self.clock, plane, config, self.device, emulate)
        nodes = self._ranks_of_nodes()

        # Weak, so that an engine without references is freed.
        reference = weakref.ref(self)

        def living() -> MalleusPipelineEngine:
            engine = reference()
            assert engine is not None, "only a living engine finishes steps"
            return engine

        def reconfigure(plan: ParallelPlan) -> dict[str, Any]:
            cost = asdict(living().reconfigure(plan))
            del cost["step"]  # the loop names the step of the event
            return cost

        def prepare_groups(plan: ParallelPlan, max_groups: int) -> int:
            return living().prepare(plan, max_groups)

        num_pipelines = most_pipelines(config, self.plan, self.module.restart_plan)
        self.control_loop = ControlLoop(
            config, plane, self.measurement, nodes, num_pipelines, reconfigure, prepare_groups
        )
        atexit.register(_close_at_exit, weakref.ref(self.control_loop))

    def destroy(self) -> None:
        """End the control loop and free groups and what DeepSpeed holds. All ranks call it, once training
        is over."""
        if self.control_loop is not None:
            self.control_loop.close()
            self.control_loop = None
        try:
            self.finish_saving()
            self.end_keeping()
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None
        finally:
            self.module.close_groups()
            super().destroy()

    def _make_run_notes(self) -> RunNotes | None:
        if self.global_rank != 0:
            return None
        num_pipelines = most_pipelines(self.malleus_config, self.plan, self.module.restart_plan)
        return RunNotes.of_environment(
            self.plan, self.malleus_config, self.module.num_slices, self._ranks_of_nodes(), num_pipelines
        )

    def _take_position(self) -> None:
        """Set what the engine derives from its place in the plan."""
        self.mpu = self.grid = self.module._grid
        deepspeed_groups.mpu = self.grid
        self.num_stages = self.grid.pipe_parallel_size
        self.stage_id = self.grid.stage_id
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = len(self.plan.pipelines) > 1
        self.micro_batches = self._micro_batch_range()[1] - self._micro_batch_range()[0]
        self.micro_batch_size = self.plan.micro_batch_size
        self._connect()
        self.num_pipe_buffers = 0
        self.pipe_buffers = {name: [] for name in self.pipe_buffers}
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}

    def _micro_batch_range(self) -> tuple[int, int]:
        position = self.plan.position(self.global_rank)
        return (0, 0) if position is None else self.plan.micro_batch_range(position.pipeline_id)

    # -- what DeepSpeed's constructor builds ---------------------------------------------------

    def _broadcast_model(self) -> None:
        """Replaced by `MalleusZeroOptimizer.adopt`: the holders of a layer differ from rank to rank."""

    def _configure_optimizer(
        self, client_optimizer: Any, model_parameters: list[nn.Parameter] | list[dict[str, Any]]
    ) -> None:
        """Wrap the torch optimizer that the config (or the user) names in ZeRO-1 over sync groups."""

        def build() -> torch.optim.Optimizer:
            check_precision(self._config)
            list_parameters(model_parameters)
            check_parameters(model_parameters, self.module)
            # Torch's optimizers refuse an empty list.
            parameters = model_parameters or list(self.module.parameters())
            if client_optimizer is None:
                return self._configure_basic_optimizer(parameters)  # type: ignore[no-any-return]
            is_instance = isinstance(client_optimizer, torch.optim.Optimizer)
            built: torch.optim.Optimizer = client_optimizer if is_instance else client_optimizer(parameters)
            check_optimizer(built)
            check_parameters(built.param_groups if is_instance else [], self.module)
            return built

        self.basic_optimizer, options = run_together(build, note=describe_optimizer)
        require_equal("optimizers or parameter groups", options, "give every rank the same")
        group_of = {
            id(parameter): index
            for index, group in enumerate(self.basic_optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        }
        _, all_described = run_together(lambda: self.module.describe(group_of), note=list)
        layout = merge_layouts(all_described)
        self.registration_order = tuple(dict.fromkeys(t.name for part in all_described for t in part))
        self._buckets = make_buckets(layout, self.malleus_config.bucket_bytes, self.module.num_slices)
        self.node_of = self._nodes()
        self.check_nodes(self.plan)
        placement = place(self.plan, self._buckets)
        self.module.groups.ensure(placement.groups)
        self.optimizer = MalleusZeroOptimizer(
            self.basic_optimizer,
            layout,
            self.module.groups,
            self.device,
            self.gradient_clipping(),
            make_loss_scaler(self._config),
            skips_overflow(self._config),
        )
        self.optimizer.adopt(placement, self.module.slots())

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        """Torch's LR schedulers take torch optimizers only; the groups are the same objects."""
        return super()._scheduler_from_config(self.basic_optimizer)

    def check_nodes(self, plan: ParallelPlan) -> None:
        """Raise `PlanError` for a TP group that crosses a node."""
        plan.validate(plan.num_layers, plan.world_size, nodes=self._ranks_of_nodes())

    def _ranks_of_nodes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(rank for rank, node in self.node_of.items() if node == index)
            for index in sorted(set(self.node_of.values()))
        )

    def _nodes(self) -> dict[int, int]:
        """Node of each rank: from the hostfile of `malleus-run`, else the config, else by host name."""
        own_host = os.environ.get(HOST_VARIABLE)
        if self.malleus_config.nodes is not None and own_host is None:
            return {rank: i for i, ranks in enumerate(self.malleus_config.nodes) for rank in ranks}
        _, hosts = run_together(lambda: own_host or socket.gethostname(), note=lambda host: host)
        names = sorted(set(hosts))
        return {rank: names.index(host) for rank, host in enumerate(hosts)}

    # -- a step --------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step over the global batch, as in DeepSpeed; returns the mean loss, on every rank.

        May end with a switch to a new plan, when the control loop decided so. Raises
        `PeerLostError` when another rank stopped answering.
        """
        self.require_state()
        with peer_errors(f"in step {self.global_steps}", self.abandon):
            step, plan = self.global_steps, self.plan
            if self.device_emulation is not None:
                self.device_emulation.set_step(step)
            if self.control_loop is not None:
                self.control_loop.begin_step()
            start, stop = self._micro_batch_range()
            self._check_iterator(data_iter)
            self._next_micro_batch = start
            self._expect(stop - start)
            self._micro_batch_totals = self.optimizer.local_totals
            if self._owns_data and data_iter is None:
                self.data_iterator = self.training_dataloader.micro_batches(self.global_samples, start, stop)
            loss: Tensor = super().train_batch(data_iter)
            if self.control_loop is not None:
                self.control_loop.finish_step(step, plan, stop - start, can_switch=self._owns_data)
            self._keep()
        if self._run_notes is not None:
            rates = () if self.control_loop is None else self.control_loop.estimator.planned_rates
            profile = None if self.measurement is None else self.measurement.profile
            self._run_notes.finish_step(step, self.plan, rates, profile)
        return loss

    def abandon(self) -> None:
        if self.control_loop is not None:
            self.control_loop.abandon()
        if self._saving is not None:
            self._saving.give_up()
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            keeper.leave(_EXIT_PATIENCE_S)

    def _train_schedule(self) -> schedule.PipeSchedule:
        return StandbySchedule() if self.is_standby else super()._train_schedule()

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.module.rng_key = (self.malleus_config.seed, self.global_steps, self._next_micro_batch)
        self._next_micro_batch += 1
        self.clock.start()
        super()._exec_forward_pass(buffer_id)
        self.clock.stop()
        if self.is_last_stage() and self._micro_batch_totals is not None:
            # A loss function may return two tensors: the sum of its losses and their weight (design 4.2).
            weight: Any = 1.0
            if isinstance(self.loss, list | tuple):
                self.loss, weight = self.loss
            if self.grid.get_slice_parallel_rank() == 0:  # the loss is the same on all ranks of a TP group
                self._micro_batch_totals[0] += weight
                self._micro_batch_totals[1] += self.loss.detach().reshape(())

    def _exec_backward_pass(self, buffer_id: int) -> None:
        is_last = self.is_last_stage()  # whose outputs may be anything that the loss takes
        outputs = [] if is_last else tensors_with_gradient(self.pipe_buffers["outputs"][buffer_id])
        if not is_last and not outputs:
            self.pipe_buffers["outputs"][buffer_id] = None  # a first stage without trained parameters
            return
        if self.measurement is not None:
            self.measurement.before_backward()
        self.clock.start()
        if is_last:
            # The weight of the global batch divides once, at the step: no scaling here.
            DeepSpeedEngine.backward(self, self.loss, scale_wrt_gas=False)
        else:
            with self._own_backward():
                torch.autograd.backward(outputs, self.grad_layer)
            self.pipe_buffers["outputs"][buffer_id] = None
            self.grad_layer = None
        self.clock.stop()
        if self.measurement is not None:
            self.measurement.after_backward()

    @contextmanager
    def _own_backward(self) -> Iterator[None]:
        """Tell DeepSpeed's hooks that a backward pass is the engine's, not the user's."""
        names = (
            stock.BACKWARD_MICRO_TIMER,
            stock.BACKWARD_GLOBAL_TIMER,
            stock.BACKWARD_INNER_MICRO_TIMER,
            stock.BACKWARD_INNER_GLOBAL_TIMER,
        )
        with ExitStack() as timing:
            for name in names:
                timing.enter_context(self._timing(name))
            self._running_engine_backward = True
            try:
                yield
            finally:
                self._running_engine_backward = False

    def _exec_reduce_grads(self) -> None:
        self.optimizer.reduce_gradients()
        self.finish_sends()

    def _exec_reduce_tied_grads(self) -> None:
        """Tied copies are holders of one sync group: reduced with all others."""

    def _aggregate_total_loss(self) -> Tensor:
        if reports_losses(self.module):
            # The same on all ranks of a TP group.
            own = self.total_additional_losses if self.grid.get_slice_parallel_rank() == 0 else None
            self.agg_additional_losses = self._additional_losses.mean(
                own, self.plan.num_micro_batches, self.device
            )
        weight, loss = self.optimizer.totals
        mean: Tensor = loss / weight
        return mean.float()

    def clip_fp32_gradients(self) -> None:
        """`MalleusZeroOptimizer.step` clips, by the norm over all ranks."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _start_timers(self, timer_names: Iterable[str]) -> None:
        """Stages that send gradients back have started these timers before DeepSpeed's hook does so again,
        which asserts under ``wall_clock_breakdown``."""
        idle = [name for name in timer_names if not getattr(self.timers(name), "started_", False)]
        super()._start_timers(idle)

    # -- not there yet -------------------------------------------------------------------------

    # Everything else keeps DeepSpeed's meaning; the map must name the overrides, because the parent's
    # holds its own functions.
    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.OptimizerStep: InMemory._exec_optimizer_step,
        schedule.SendActivation: InMemory._exec_send_activations,
        schedule.RecvActivation: InMemory._exec_recv_activations,
        schedule.SendGrad: InMemory._exec_send_grads,
        schedule.RecvGrad: InMemory._exec_recv_grads,
    }


_EXIT_PATIENCE_S = 2.0
"""At exit the peers may be gone, or stuck."""


def _close_at_exit(reference: weakref.ref[ControlLoop]) -> None:
    """For a program that ends without `MalleusPipelineEngine.destroy`, on all ranks alike."""
    loop = reference()
    if loop is not None:
        loop.close(_EXIT_PATIENCE_S)
