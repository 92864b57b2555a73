"""Runs the tests of `DistributedTest` classes in ranks instead of in pytest's process."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

# Before torch and numpy load, here and in the fork server: eight ranks share a few cores.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.harness import DistributedTest, RanksFailedError, run_ranks


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    cls = pyfuncitem.cls
    if cls is None or not issubclass(cls, DistributedTest):
        return None
    names = list(inspect.signature(pyfuncitem.function).parameters)[1:]
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    world_size = pyfuncitem.funcargs.get("world_size", cls.world_size)
    try:
        run_ranks(_call_test, world_size, cls, pyfuncitem.originalname, arguments, timeout_s=cls.timeout_s)
    except RanksFailedError as failure:
        pytest.fail(str(failure), pytrace=False)
    return True


def _call_test(cls: type[DistributedTest], method: str, arguments: dict[str, Any]) -> None:
    getattr(cls(), method)(**arguments)
