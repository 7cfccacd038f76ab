"""ott-jax: a network that moves one point cloud onto another, trained by a regularised transport cost."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

from .training import Case, array, new_key, params_step, shapes_of

PACKAGE = "ott"

POINTS, WIDTH = 4096, 64


def transport() -> Any:
    """Sinkhorn's iteration, a while loop with a derivative of its own, on 4096 points each."""

    class Mover(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = nn.relu(nn.Dense(512)(nn.relu(nn.Dense(512)(x))))
            return x + nn.Dense(WIDTH)(hidden)

    model = Mover()
    params = shapes_of(model.init, new_key(), array(POINTS, WIDTH))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        geometry = pointcloud.PointCloud(model.apply(params, x), y, epsilon=0.1)
        return sinkhorn.Sinkhorn(max_iterations=100)(linear_problem.LinearProblem(geometry)).reg_ot_cost

    return params_step(loss, params, array(POINTS, WIDTH), array(POINTS, WIDTH))


CASES: dict[str, Case] = {"Sinkhorn": transport}
