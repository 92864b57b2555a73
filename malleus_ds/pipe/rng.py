"""Random numbers that do not depend on the plan: one seed per (job, step, micro-batch, layer)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator

_MASK = (1 << 64) - 1


def layer_seed(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """A 63-bit seed for one layer's forward pass over one global micro-batch.

    Chained SplitMix64 finalisers (Steele, Lea, Flood 2014), so that neighbouring keys give
    unrelated streams.
    """
    value = seed & _MASK
    for key in (step, micro_batch, layer):
        value = (value + 0x9E3779B97F4A7C15 * (key + 1)) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1


def seed_generators(seed: int) -> None:
    """Seed the generators that a layer's forward pass draws from: the CPU's and this device's."""
    torch.default_generator.manual_seed(seed)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the generators as they were."""
    accelerator = get_accelerator()
    on_device = accelerator.device_name() != "cpu"
    state = torch.get_rng_state()
    device_state = accelerator.get_rng_state() if on_device else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if device_state is not None:
            accelerator.set_rng_state(device_state)
