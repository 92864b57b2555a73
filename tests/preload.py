"""Imported once by the fork server of `tests.harness`, so that its ranks start with everything loaded."""

from __future__ import annotations

import contextlib
import importlib

import torch

# Not public, but the only way to have failing asserts show their values in ranks as well.
with contextlib.suppress(ImportError):
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())

# `torch._dynamo` comes with the first engine and takes seconds, and so does Muon with DeepSpeed's first
# ZeRO engine. A module that fails here fails again, with its traceback, in the test that uses it.
for _name in (
    "torch._dynamo",
    "deepspeed.runtime.zero.muon.original_muon",
    "malleus_ds._initialize",
    "malleus_ds.models.gpt",
    "tests.harness",
):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

import malleus_ds.comm  # noqa: E402

torch.set_num_threads(1)
malleus_ds.comm.skip_shared_memory_op()  # Also has the op table probed once, not in each rank.
