"""DeepSpeed's `PipelineModule` under a plan: each rank builds the layers that the plan gives it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from malleus_ds.config import DEFAULT_TIMEOUT_S
from malleus_ds.detector.layer_timer import LayerTimer
from malleus_ds.detector.waits import CollectiveWaits
from malleus_ds.elastic.restart_plan import RestartPlan
from malleus_ds.emulation import layers_of
from malleus_ds.pipe.agreement import require_equal, run_together
from malleus_ds.pipe.build import build_without_data
from malleus_ds.pipe.grid import PlanGrid, max_degree, nominal_replicas
from malleus_ds.pipe.partitioning import LayerCosts, PartitionMethod, num_stages_of, partition_layers
from malleus_ds.pipe.rng import layer_seed, preserved_rng, seed_generators
from malleus_ds.pipe.topology import check_topology, plan_of_topology
from malleus_ds.placement import LayoutError, LogicalTensor
from malleus_ds.placement.groups import GroupCache
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.plan.types import check_num_stages
from malleus_ds.tensor_parallel import TensorParallelGroup, cut_layer
from malleus_ds.tensor_parallel.cuts import check_units, cut_degrees, set_group, whole_shape
from malleus_ds.zero.binding import TensorSlot, tensor_slots


class MalleusPipelineModule(PipelineModule):  # type: ignore[misc]
    """A pipeline of layers whose stages follow a `ParallelPlan`, which may change during the job.

    Takes the arguments of `deepspeed.pipe.PipelineModule`, and ``plan``. With no plan,
    ``num_stages`` (or a ``topology`` of ``pipe``, ``data`` and ``model`` axes) gives equal pipelines, and
    ``partition_method`` the layers of their stages: a name of DeepSpeed's, or their boundaries, or
    ``"profile"`` to balance the measured ``layer_costs``. Every rank must be given the same layers.

    Two things differ from the parent, so that training does not depend on the plan: each layer is
    always initialised from its own seed ``base_seed + layer``, and in training the random numbers
    of a layer are keyed by (seed, step, global micro-batch, layer).

    Raises `PlanError` on all ranks for a plan that does not fit, `AgreementError` when ranks differ.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: PartitionMethod = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        plan: ParallelPlan | None = None,
        layer_costs: LayerCosts | None = None,
    ) -> None:
        nn.Module.__init__(self)  # the parent's constructor builds a grid of equal stages
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn
        self.base_seed = base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self.is_checkpointable_results: list[bool] = []
        self.is_checkpointable_results_interval: int | None = None
        self.micro_offset = 0
        self.rng_key = (base_seed, 0, 0)
        """(seed, step, global micro-batch) of the next forward pass; the engine sets it."""
        self.layer_timer: LayerTimer | None = None
        """Runs the layers in training while their times are measured."""
        self.world_group = dist.group.WORLD
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.groups = GroupCache(timedelta(seconds=DEFAULT_TIMEOUT_S))
        self.waits = CollectiveWaits()
        self.num_slices = 1
        """Into how many slices TP may cut a tensor: the largest degree of any plan of this job."""
        # Gloo matches messages of a pair by direction; others may need one communicator for each.
        self.activation_group = None
        self.gradient_group = None if dist.get_backend() == dist.Backend.GLOO else dist.new_group()
        self._layer_specs = list(layers)
        self._num_layers = len(self._layer_specs)
        self.restart_plan: RestartPlan | None = None
        """After a loss: what `malleus-run` gives in place of the job's first plan."""

        def first_plan() -> ParallelPlan:
            self.restart_plan = RestartPlan.of_environment()
            given = plan if self.restart_plan is None else self.restart_plan.plan
            chosen = given or self._equal_plan(num_stages, topology, partition_method, layer_costs)
            chosen.validate(self._num_layers, self.world_size)
            self.num_slices = max_degree(chosen)  # `start_with` may raise it
            return chosen

        self.plan, notes = run_together(first_plan, note=lambda chosen: (chosen.digest, self._layer_names()))
        require_equal("plans", [digest for digest, _ in notes], "give every rank the same plan")
        require_equal("layers", [", ".join(names) for _, names in notes], "give every rank the same layers")
        self.has_implicit_plan = plan is None and self.restart_plan is None
        """True when the plan came from ``num_stages``: the config then gives the micro-batches."""
        self.num_replicas = self._first_replicas = nominal_replicas(self.plan)
        self.fwd_map: dict[str, int] = {}
        self.forward_funcs: list[Any] = []
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, list[str]] = {}
        self.tied_comms: dict[str, Any] = {}  # ties are sync groups like all others
        self._modules_by_layer: dict[int, nn.Module] = {}
        self._placeholders = [nn.Parameter(torch.zeros(0))]  # in a list: not one of the model's
        self._before: tuple[ParallelPlan, dict[int, nn.Module], dict[str, nn.Module]] | None = None
        self._take_position(self.plan)
        run_together(self._build)
        self.to(get_accelerator().device_name(self.local_rank))

    def _layer_names(self) -> list[str]:
        """Type or function of each layer, for a comparison between ranks."""
        named = [spec.typename if isinstance(spec, LayerSpec) else spec for spec in self._layer_specs]
        return [getattr(name, "__name__", type(name).__name__) for name in named]

    def _equal_plan(
        self, num_stages: int | None, topology: Any, method: PartitionMethod, costs: LayerCosts | None
    ) -> ParallelPlan:
        if topology is not None:
            check_topology(topology, self.world_size)
            num_stages = max(topology.get_dim("pipe"), 1)
        if num_stages is None:
            num_stages = num_stages_of(method)
        if num_stages is None:
            raise PlanError("give num_stages, topology or plan")
        if topology is None:
            check_num_stages(num_stages, self.world_size)
        with preserved_rng():  # counting parameters builds layers
            boundaries = partition_layers(
                method, num_stages, self._layer_names(), self._count_layer_params, costs
            )
        if topology is not None:
            return plan_of_topology(topology, boundaries)
        return ParallelPlan.homogeneous(self._num_layers, self.world_size, num_stages, boundaries=boundaries)

    def check(self, plan: ParallelPlan) -> None:
        """Raise `PlanError` unless this module can run under ``plan`` in this world."""
        plan.validate(self._num_layers, self.world_size)
        for pipeline_id, stage_id, stage in plan.stages():
            if stage.degree > self.num_slices:
                raise PlanError(
                    f"pipeline {pipeline_id}, stage {stage_id}: ranks {stage.ranks} have TP degree "
                    f"{stage.degree}, but the job allows {self.num_slices}: raise "
                    f"malleus.tensor_parallel.max_degree in the config"
                )

    def _take_position(self, plan: ParallelPlan) -> None:
        self.plan = plan
        self._grid = PlanGrid(plan, self.groups, self.num_replicas)
        self._topo = self._grid.topology()
        self.tensor_group = TensorParallelGroup(
            self._grid.slice_parallel_size,
            self._grid.get_slice_parallel_rank(),
            self._grid.get_slice_parallel_group(),
            self.waits,
        )
        self.num_stages = self._grid.pipe_parallel_size
        self.stage_id = self._grid.stage_id
        position = plan.position(self.global_rank)
        self.parts = [0, 0] if position is None else list(plan.pipelines[position.pipeline_id].boundaries)
        self._set_bounds(*plan.layers_of(self.global_rank))

    def start_with(self, plan: ParallelPlan, timeout: timedelta, num_slices: int) -> None:
        """Take the data shares of ``plan``, which has the same stages. Collective over the world.

        timeout: of all groups of the module; num_slices: the largest TP degree of any plan.
        """
        self.num_slices = num_slices
        run_together(self._check_cuts)
        self.num_replicas = self._first_replicas = nominal_replicas(plan)
        if timeout != self.groups.timeout:  # those that the constructor made wait too long, or too short
            self.groups.close()
            self.groups.timeout = timeout
        self._take_position(plan)
        set_group(self, self.tensor_group)

    def close_groups(self) -> None:
        """Destroy the module's communicators. Collective over the world."""
        self.groups.close()
        if self.gradient_group is not None:
            dist.destroy_process_group(self.gradient_group)
            self.gradient_group = None

    def _check_cuts(self) -> None:
        """Raise `PlanError` or `TensorParallelError` for a layer that the largest degree cannot cut."""
        for layer, module in self._modules_by_layer.items():
            if module is self._layer_specs[layer]:
                self._check_object(layer, module)
        check_units(self, self.num_slices)

    def _check_object(self, layer: int, module: nn.Module) -> None:
        if self.num_slices > 1 and cut_degrees(module):
            raise PlanError(
                f"layer {layer} is a {type(module).__name__} object, which cannot be cut again for other "
                f"TP degrees: give LayerSpec({type(module).__name__}, ...) instead"
            )

    def take_batch_of(self, plan: ParallelPlan) -> None:
        """Take the data shares of ``plan``, which has the same stages and another batch, during a job.

        The nominal data-parallel size is that of the start where the new batch divides by it.
        """
        is_whole = plan.num_micro_batches % self._first_replicas == 0
        self.num_replicas = self._first_replicas if is_whole else 1
        self._take_position(plan)

    def rebuild(self, plan: ParallelPlan) -> dict[str, TensorSlot]:
        """Take the place that a new plan gives this rank. Collective over the world.

        Layers that stay keep their modules, layers that come are built without data (migration
        brings it), layers that leave are dropped. Returns the tensors of the new layers. `go_back` undoes
        it, until `forget`.
        """
        self._before = (self.plan, dict(self._modules_by_layer), dict(self.tied_modules.items()))
        previous, cut = range(self._local_start, self._local_stop), self.tensor_group
        self._take_position(plan)
        current = range(self._local_start, self._local_stop)
        is_cut_alike = (cut.degree, cut.index) == (self.tensor_group.degree, self.tensor_group.index)
        for layer in previous:
            module = self._modules_by_layer.get(layer)  # None for functions and ties
            if module is not None and (layer not in current or (not is_cut_alike and cut_degrees(module))):
                self._drop(layer, module)
        for key in [key for key, tied in self.tied_modules.items() if not is_cut_alike and cut_degrees(tied)]:
            del self.tied_modules[key]
        return self._rebuilt()

    def go_back(self) -> dict[str, TensorSlot]:
        """Take the place of before `rebuild` again, with the same modules: a constructor that failed may
        fail again. Collective over the world. Returns their tensors, some of which have lost their memory.
        """
        assert self._before is not None, "rebuild() comes before go_back()"
        plan, modules, tied = self._before
        self.forget()
        for layer in self._modules_by_layer:
            delattr(self, str(layer))
        self._modules_by_layer = modules
        for layer, module in modules.items():
            self.add_module(str(layer), module)
        self.tied_modules = nn.ModuleDict(tied)
        self._take_position(plan)
        return self._rebuilt()

    def forget(self) -> None:
        """Free the modules that the last `rebuild` dropped."""
        self._before = None

    def _rebuilt(self) -> dict[str, TensorSlot]:
        self._build(make=build_without_data)
        self.is_checkpointable_results_interval = None
        if self.activation_checkpoint_interval > 0:
            self._precompute_checkpointable_values()
        return self.slots()

    def _drop(self, layer: int, module: nn.Module) -> None:
        del self._modules_by_layer[layer]
        delattr(self, str(layer))
        if module is self._layer_specs[layer]:  # the user's object stays alive: free its memory
            for slot in tensor_slots(module).values():
                slot.release()

    def _build(self, make: Callable[[LayerSpec], nn.Module] = LayerSpec.build) -> None:
        """Build what is missing of the local layers, and the list of functions that `forward` runs."""
        local = range(self._local_start, self._local_stop)
        specs = [self._layer_specs[layer] for layer in local]
        keys = {spec.key for spec in specs if isinstance(spec, TiedLayerSpec)}
        for key in [key for key in self.tied_modules if key not in keys]:
            del self.tied_modules[key]
        self.fwd_map = {}
        self.forward_funcs = []
        for layer, spec in zip(local, specs, strict=True):
            if isinstance(spec, TiedLayerSpec):
                module = self._tied_module(spec, make)
                function = module if spec.forward_fn is None else partial(spec.forward_fn, module)
            elif isinstance(spec, LayerSpec | nn.Module):
                function = self._own_module(layer, spec, make)
                self.fwd_map[str(layer)] = len(self.forward_funcs)
            else:
                function = spec
            self.forward_funcs.append(function)
        set_group(self, self.tensor_group)
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined] # DeepSpeed asks for it

    def _own_module(self, layer: int, spec: Any, make: Callable[[LayerSpec], nn.Module]) -> nn.Module:
        if layer not in self._modules_by_layer:
            module = spec
            if isinstance(spec, LayerSpec):
                module = self._seeded(layer, spec, make)
            else:
                self._check_object(layer, spec)
            self._modules_by_layer[layer] = module
            self.add_module(str(layer), module)
        return self._modules_by_layer[layer]

    def _tied_module(self, spec: TiedLayerSpec, make: Callable[[LayerSpec], nn.Module]) -> nn.Module:
        if spec.key not in self.tied_modules:
            self.tied_modules[spec.key] = self._seeded(self.layers_of_tie(spec.key)[0], spec, make)
            self.tied_weight_attrs[spec.key] = spec.tied_weight_attr
        return self.tied_modules[spec.key]

    def _seeded(self, layer: int, spec: LayerSpec, make: Callable[[LayerSpec], nn.Module]) -> nn.Module:
        """Build with the layer's own seed, so that the initial weights do not depend on the plan."""
        with preserved_rng():
            (self.seed_fn if self.seed_layers and self.seed_fn else seed_generators)(self.base_seed + layer)
            module = make(spec)
            if self.tensor_group.degree > 1:
                cut_layer(module, self.tensor_group)
            return module

    def layers_of_tie(self, key: str) -> tuple[int, ...]:
        """All layers that use the tied module ``key``."""
        return tuple(
            layer
            for layer, spec in enumerate(self._layer_specs)
            if isinstance(spec, TiedLayerSpec) and spec.key == key
        )

    def bytes_at_largest_degree(self, layer: nn.Module) -> int:
        """Of a layer's parameters on one rank, were its TP group the largest of the job."""
        degrees = cut_degrees(layer)
        return sum(
            parameter.nbytes * degrees.get(id(parameter), self.num_slices) // self.num_slices
            for parameter in layer.parameters()
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the local layers; an empty one where there are none, as on standby ranks: torch's
        optimizers refuse an empty list, and a user makes one on every rank."""
        own = iter(super().parameters(recurse))
        first = next(own, None)
        yield self._placeholders[0] if first is None else first
        yield from own

    def local_layers(self) -> dict[int, nn.Module]:
        """The modules of this rank's layers by layer index, in execution order; functions left out."""
        return layers_of(self)

    def describe(self, group_of: Mapping[int, int]) -> list[LogicalTensor]:
        """The logical tensors that this rank holds. group_of: parameter group by ``id(parameter)``.

        Raises `LayoutError` for tensors that would belong to several layers, or to none.
        """
        described = []
        degrees = cut_degrees(self)
        for name, slot in self.slots().items():
            tensor = slot.tensor
            described.append(
                LogicalTensor(
                    name=name,
                    shape=whole_shape(tensor, degrees.get(id(tensor))),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    itemsize=tensor.element_size(),
                    layers=self._layers_of_tensor(slot),
                    group=group_of.get(id(tensor)),
                    is_cut=self.num_slices > 1 and id(tensor) in degrees,
                )
            )
        return described

    def slots(self) -> dict[str, TensorSlot]:
        """The tensors of the local layers by name. Buffers of the loss stay on every rank."""
        slots = tensor_slots(self)
        loss = {name: slot for name, slot in slots.items() if name.startswith("loss_fn.")}
        if any(slot.is_parameter and slot.tensor.requires_grad for slot in loss.values()):
            raise LayoutError(
                f"loss_fn has parameters ({sorted(loss)}), which no stage holds: make it the last layer"
            )
        return {name: slot for name, slot in slots.items() if name not in loss}

    def _layers_of_tensor(self, slot: TensorSlot) -> tuple[int, ...]:
        """All layers that use it: one, or those of a tie."""
        owners = {tuple(name.split(".")[: 1 if name[0].isdigit() else 2]) for name in slot.names}
        if len(owners) > 1:
            raise LayoutError(
                f"{slot.names} are one tensor in several layers, which a plan may put on different ranks: "
                f"tie the layers with TiedLayerSpec, or give each its own"
            )
        (owner,) = owners
        return (int(owner[0]),) if owner[0].isdigit() else self.layers_of_tie(owner[1])

    def forward(self, forward_input: Any) -> Any:
        """Run the local layers on one micro-batch, each with the random numbers of `rng_key`."""
        if not self.training:
            return self._run_layers(forward_input, None)
        with preserved_rng():
            return self._run_layers(forward_input, self.rng_key)

    def _run_layers(self, value: Any, key: tuple[int, int, int] | None) -> Any:
        interval = self.activation_checkpoint_interval
        count = len(self.forward_funcs)
        if interval == 0:
            return self._range_function(0, count, key)(value)
        starts = range(0, count, interval)
        for start, is_checkpointable in zip(starts, self.is_checkpointable_results, strict=True):
            function = self._range_function(start, min(start + interval, count), key)
            arguments = value if isinstance(value, tuple) else (value,)
            if is_checkpointable:
                value = self.activation_checkpoint_func(function, *arguments)
            else:
                value = function(*arguments)
        return value

    def _range_function(
        self, start: int, stop: int, key: tuple[int, int, int] | None
    ) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """The layers ``[start, stop)`` of this rank as one function; ``key`` is kept in the closure,
        so that a recomputation draws the same random numbers."""

        def run(*inputs: Any) -> Any:
            value = inputs[0] if len(inputs) == 1 else inputs
            for index in range(start, stop):
                self.curr_layer = index + self._local_start
                if key is not None:
                    seed = layer_seed(*key, self.curr_layer)
                    (self.seed_fn if self.seed_layers and self.seed_fn else seed_generators)(seed)
                function = self.forward_funcs[index]
                if key is None or self.layer_timer is None:
                    value = function(value)
                else:
                    value = self.layer_timer.run(self.curr_layer, function, value)
            return value

        return run
