"""The ``"malleus"`` section of a DeepSpeed JSON config: strict, documented, without torch."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DEFAULT_TIMEOUT_S = 600.0
"""Longer than any step: a standby rank waits for the whole of it. A peer that dies is noticed at once."""


class ConfigError(ValueError):
    """A wrong ``"malleus"`` section: names the key, the value and the fix."""


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DetectorConfig(_Section):
    """Measuring the straggling rates."""

    enabled: bool = Field(True, description="measure rates and exchange one record per rank per step")
    control_plane: Literal["auto", "mpi", "gloo"] = Field(
        "auto", description="carrier of the records: MPI under mpirun, else a gloo group"
    )
    calibration_steps: Annotated[int, Field(ge=1)] = Field(
        2, description="steps in which the healthy time of each layer is measured"
    )
    window_steps: Annotated[int, Field(ge=1)] = Field(
        5, description="steps whose median gives a rate when it moves little"
    )
    large_shift: PositiveFloat = Field(
        0.3, description="relative change of a rate that counts after 2 steps in a row"
    )
    small_shift: PositiveFloat = Field(
        0.12, description="relative change of a rate that counts once the window's median has it"
    )
    probe_interval_steps: Annotated[int, Field(ge=1)] = Field(
        1, description="steps between two probes of a standby rank"
    )


class PlannerConfig(_Section):
    """Making a new plan when the rates move."""

    enabled: bool = Field(True, description="re-plan on rank 0 in a process of its own")
    time_limit_s: PositiveFloat = Field(10.0, description="limit of one planning, in seconds")
    min_gain: NonNegativeFloat = Field(
        0.03, description="switch only if the predicted step time falls by this share"
    )
    memory_bytes: Annotated[int, Field(gt=0)] | None = Field(
        None, description="memory of a device; null: not a limit"
    )
    max_pipelines: Annotated[int, Field(gt=0)] | None = Field(
        None,
        description="most pipelines of a plan; null: with memory_bytes no limit, else as many as the "
        "initial plan has, because each pipeline holds the whole model",
    )


class TensorParallelConfig(_Section):
    """What plans may do with tensor parallelism."""

    max_degree: Annotated[int, Field(ge=1)] | None = Field(
        None, description="largest TP degree of any plan, a power of two; null: that of the initial plan"
    )
    rho: dict[str, PositiveFloat] | None = Field(
        None,
        description="layer time by TP degree, relative to that at max_degree; null: max_degree / degree",
    )

    def relative_time(self, degree: int, max_degree: int) -> float:
        """``rho(degree)``; max_degree: that of the job."""
        return self.degrees(max_degree)[degree]

    def degrees(self, max_degree: int) -> dict[int, float]:
        """``rho`` of each degree that a plan may use."""
        if self.rho is not None:
            return {int(degree): factor for degree, factor in self.rho.items()}
        return {2**k: max_degree / 2**k for k in range(max_degree.bit_length())}


class RateEvent(_Section):
    """From `step` on, rank `rank` takes `rate` times the healthy time."""

    step: Annotated[int, Field(ge=0)]
    rank: Annotated[int, Field(ge=0)]
    rate: PositiveFloat


class EmulationConfig(_Section):
    """Emulated devices: real computation and communication, emulated duration."""

    layer_ms: PositiveFloat = Field(
        description="forward time of one layer on a healthy device (at the largest TP degree), in ms; "
        "backward takes twice that"
    )
    layer_weights: tuple[NonNegativeFloat, ...] | None = Field(
        None,
        strict=False,
        description="factor on layer_ms per layer; null: 1 for every layer that has parameters",
    )
    events: tuple[RateEvent, ...] = Field((), strict=False, description="the script of rates")
    jitter: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="relative half-width of the uniform noise on each layer call"
    )
    step_jitter: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="relative half-width of the uniform noise on each rank in each step"
    )
    seed: int = Field(0, description="seed of the noise")


class CheckpointConfig(_Section):
    """Saving the training state."""

    async_save: bool = Field(
        False, description="copy the state to the host's memory and write it beside the next steps"
    )
    timeout_s: PositiveFloat = Field(
        1800.0, description="a save in the background that takes longer than this has failed"
    )


class RedundancyConfig(_Section):
    """A second copy of the training state in the memory of another node."""

    enabled: bool = Field(
        False, description="keep each rank's share of the state in its host's memory and on another node"
    )
    interval_steps: Annotated[int, Field(ge=1)] = Field(
        1, description="steps between two generations of copies; so many steps may be repeated after a loss"
    )
    directory: str | None = Field(
        None,
        description="directory in each host's memory (tmpfs), of this job alone; null: that of "
        "MALLEUS_MEMORY_DIR",
    )


class MalleusConfig(_Section):
    """The whole ``"malleus"`` section; every key may be left out."""

    seed: int = Field(1234, description="seed of dropout and of the sample order")
    shuffle: bool = Field(True, description="shuffle training_data each epoch, in a plan-invariant order")
    bucket_bytes: Annotated[int, Field(gt=0)] = Field(
        32 * 2**20, description="size of a flat buffer that is reduced, stepped, gathered and moved at once"
    )
    timeout_s: PositiveFloat = Field(
        DEFAULT_TIMEOUT_S,
        description="after this long without an answer a peer counts as stuck; more than a step or a save "
        "takes",
    )
    overlap: bool = Field(
        True, description="exchange activations and gradients beside the computation; false: wait for each"
    )
    nodes: tuple[tuple[int, ...], ...] | None = Field(
        None, strict=False, description="ranks of each node; null: from the hosts that the ranks run on"
    )
    trace: str | None = Field(None, description="path of a JSON-lines log of steps, decisions and switches")
    detector: DetectorConfig = DetectorConfig()
    planner: PlannerConfig = PlannerConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    redundancy: RedundancyConfig = RedundancyConfig()
    emulation: EmulationConfig | None = None


def parse_config(section: Any) -> MalleusConfig:
    """Validate the ``"malleus"`` section (None: all defaults). Raises `ConfigError`."""
    if not isinstance(section, dict | None):
        raise ConfigError(f'"malleus" must be an object, not {section!r}')
    try:
        # Through JSON, so that strict mode accepts JSON's lists where the fields are tuples.
        return MalleusConfig.model_validate_json(json.dumps(section or {}))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """One line per fault: the key, the value, what is wrong and what is allowed."""
    lines = []
    for fault in error.errors():
        key = ".".join(("malleus", *map(str, fault["loc"])))
        if fault["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {fault['input']!r}); remove it or fix its name")
        elif fault["type"] == "missing":
            lines.append(f"{key}: missing; give it a value")
        else:
            lines.append(f"{key}: {fault['msg']}, but it is {fault['input']!r}")
    return "; ".join(lines)
