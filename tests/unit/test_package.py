"""What an installed package promises: a light import, public names, documented settings."""

from __future__ import annotations

import configparser
import json
import re
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import malleus_ds
from malleus_ds.config import (
    CheckpointConfig,
    DetectorConfig,
    EmulationConfig,
    MalleusConfig,
    PlannerConfig,
    RateEvent,
    RedundancyConfig,
)
from tests.harness import REPOSITORY, run_command

SECTIONS: dict[str, type[BaseModel]] = {
    "malleus": MalleusConfig,
    "malleus.detector": DetectorConfig,
    "malleus.planner": PlannerConfig,
    "malleus.checkpoint": CheckpointConfig,
    "malleus.redundancy": RedundancyConfig,
    "malleus.emulation": EmulationConfig,
    "malleus.emulation.events": RateEvent,
}


def python(code: str) -> str:
    job = run_command([sys.executable, "-c", code], timeout_s=60)
    assert job.returncode == 0, job.stderr
    return job.stdout.splitlines()[-1]


def test_import_loads_no_heavy_package() -> None:
    heavy = {"torch", "deepspeed", "cvxpy", "mpi4py", "numpy"}
    assert python("import malleus_ds, sys; print(sorted(sys.modules))").count("'malleus_ds'") == 1
    assert python(f"import malleus_ds, sys; print({heavy!r} & sys.modules.keys())") == "set()"


def test_plans_and_config_load_no_torch() -> None:
    code = (
        "import malleus_ds, sys; malleus_ds.ParallelPlan, malleus_ds.MalleusConfig; import malleus_ds.planner"
    )
    assert python(f"{code}; print({{'torch', 'deepspeed', 'mpi4py'}} & sys.modules.keys())") == "set()"


@pytest.mark.parametrize("first", ["malleus_ds._initialize", "malleus_ds.pipe.engine", "malleus_ds"])
def test_initialize_is_the_function_whatever_is_imported_first(first: str) -> None:
    code = f"import importlib; importlib.import_module({first!r}); import malleus_ds"
    assert python(f"{code}; print(type(malleus_ds.initialize).__name__)") == "function"


def test_every_public_name_resolves() -> None:
    for name in malleus_ds.__all__:
        assert getattr(malleus_ds, name).__name__ == name
        assert name in dir(malleus_ds)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = malleus_ds.nothing


def documented_keys(section: str) -> dict[str, str]:
    """Key -> default, from the table under the section's heading in docs/configuration.md."""
    text = (REPOSITORY / "docs/configuration.md").read_text()
    body = re.split(r"^## ", text.split(f"## `{section}`\n")[1], flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", body, flags=re.MULTILINE))


def default_text(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps({} if isinstance(value, BaseModel) else value)}`"


@pytest.mark.parametrize("section", SECTIONS)
def test_configuration_page_has_every_key_with_its_default(section: str) -> None:
    model = SECTIONS[section]
    assert documented_keys(section) == {key: default_text(model, key) for key in model.model_fields}


def test_example_plan_of_the_quickstart_is_what_it_shows() -> None:
    text = (REPOSITORY / "docs/quickstart.md").read_text()
    code = re.search(r"```python\n(from malleus_ds import ParallelPlan.*?)```", text, flags=re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert code is not None
    assert shown is not None
    job = run_command([sys.executable, "-c", code[1]], timeout_s=60)
    assert job.stdout == shown[1]


def test_constraints_meet_the_requirements() -> None:
    from packaging.requirements import Requirement

    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    for extra in setup["options.extras_require"].values():
        lines += extra.split("\n")
    constraints = Path(REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in constraints if not line.startswith("#"))
    for line in filter(None, lines):
        requirement = Requirement(line)
        if requirement.name != "malleus_ds":
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), line
