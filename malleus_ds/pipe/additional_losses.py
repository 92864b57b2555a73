"""Losses that a module reports beside the one it is trained by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor


def reports_losses(module: PipelineModule) -> bool:
    """Whether its class overrides `get_additional_losses`, which tells the same on all ranks."""
    return type(module).get_additional_losses is not PipelineModule.get_additional_losses


class AdditionalLosses:
    """Averages named losses over the micro-batches of all pipelines; every rank gets them.

    The names are those of the first step, so that later steps need one reduction of numbers only.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None

    def mean(
        self, totals: Mapping[str, Tensor] | None, num_micro_batches: int, device: torch.device
    ) -> OrderedDict[str, Tensor] | None:
        """Collective over the world. totals: this rank's sums, None where it computes no loss;
        num_micro_batches: of all pipelines. None when no rank reports any."""
        totals = totals or {}
        if self._names is None:
            gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(gathered, list(totals))
            self._names = tuple(dict.fromkeys(name for names in gathered for name in names))
        strange = sorted(totals.keys() - set(self._names))
        if strange:
            raise ValueError(
                f"get_additional_losses returns {strange}, which it did not in the first step "
                f"({list(self._names)}): return the same names in every micro-batch"
            )
        if not self._names:
            return None
        zero = torch.zeros(())
        sums = torch.stack(
            [totals.get(name, zero).detach().to(device, torch.float32) for name in self._names]
        )
        dist.all_reduce(sums)
        return OrderedDict(zip(self._names, sums / num_micro_batches, strict=True))
