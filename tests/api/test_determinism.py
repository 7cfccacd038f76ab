"""The same input gives the same plan file, byte for byte, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys

import jax
import numpy as np

import jaxplan
import models

_, model, mesh_sizes, path = sys.argv
sizes = [int(size) for size in mesh_sizes.split("x")]
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), ("data", "fsdp", "model")[: len(sizes)])
state, batch = models.abstract_arguments(model, "tiny")
step = models.get(model).make_train_step(models.get_config(model, "tiny"))
jaxplan.plan(step, mesh, state, batch, donate_argnums=0, hardware="tpu-v5e").save(path)
"""


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("mlp", "4x2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("llama", "8"), ("moe", "2x2x2")]),
    ],
)
def test_the_plan_file_is_the_same_in_fresh_processes(model: str, mesh: str, tmp_path: Path) -> None:
    files = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", PROGRAM, model, mesh, str(path)], env=environment, check=True)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    assert len(files[0]) > 1000
