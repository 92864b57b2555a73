"""The whole loop in a job under mpirun: MPI carries records and plans beside gloo's training traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPOSITORY, mpirun

NUM_STEPS = 22
SLOW_FROM = 6


def run_training(folder: Path, detector: bool) -> list[dict[str, Any]]:
    """Train on 4 ranks, of which one becomes slow; the measurements of the coordinator."""
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "malleus": {
            "detector": {"enabled": detector, "control_plane": "mpi"},
            "emulation": {
                "layer_ms": 4.0,
                "layer_weights": [0, 1, 1, 1, 1, 1, 1, 0],
                "events": [{"step": SLOW_FROM, "rank": 1, "rate": 4.0}],
            },
        },
    }
    if not detector:
        del config["malleus"]["emulation"]  # it takes time, and has no part in the losses
    config_path, measurements_path = folder / "config.json", folder / f"{detector}.jsonl"
    config_path.write_text(json.dumps(config))
    arguments = ["--deepspeed_config", config_path, "--steps", NUM_STEPS, "--num_stages", 2]
    arguments += ["--num_blocks", 6, "--hidden_size", 16, "--sequence_length", 16]
    arguments += ["--measurements", measurements_path]
    job = mpirun(4, REPOSITORY / "launcher" / "train.py", *map(str, arguments), timeout_s=150)
    assert job.returncode == 0, job.stdout + job.stderr
    return [json.loads(line) for line in measurements_path.read_text().splitlines()]


def test_switch_under_mpi_keeps_the_losses(tmp_path: Path) -> None:
    measured = run_training(tmp_path, detector=True)
    switches = [line for line in measured if line.get("kind") == "switched"]
    assert switches
    assert SLOW_FROM + 2 <= switches[0]["step"] <= SLOW_FROM + 10
    details = switches[0]["details"]
    assert {"announcement", "agreement", "groups", "layers", "preparation", "wire"} <= details[
        "parts_s"
    ].keys()
    assert 0 < sum(details["parts_s"].values()) <= details["duration_s"]
    losses = [line["loss"] for line in measured if "loss" in line]
    fixed = [line["loss"] for line in run_training(tmp_path, detector=False) if "loss" in line]
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(fixed, rel=1e-5)
