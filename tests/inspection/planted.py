"""A training step and its plan, and the ways in which a compiled program may turn out to be another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.sharding import Layout

WIDTH, HIDDEN = 256, 512


@dataclass(frozen=True, kw_only=True)
class Step:
    """A scanned MLP with momentum: `(state, batch) -> (state, loss)`; the fields are what can be got wrong."""

    layers: int = 4
    batch: int = 8192
    dtype: Any = jnp.float32
    remat: bool = True
    inside: Callable[[Any], Any] | None = None

    def __call__(self, state: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            up = jnp.tanh(h @ w["up"])
            up = self.inside(up) if self.inside else up
            return h + up @ w["down"], None

        def loss(params: Any) -> Any:
            out, _ = jax.lax.scan(jax.checkpoint(layer) if self.remat else layer, batch["x"], params)
            return jnp.mean((out - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    def shapes(self) -> tuple[Any, Any]:
        params = {
            "up": jax.ShapeDtypeStruct((self.layers, WIDTH, HIDDEN), self.dtype),
            "down": jax.ShapeDtypeStruct((self.layers, HIDDEN, WIDTH), self.dtype),
        }
        rows = jax.ShapeDtypeStruct((self.batch, WIDTH), self.dtype)
        return {"params": params, "momentum": params}, {"x": rows, "y": rows}


def planned(mesh: Mesh, step: Step = Step(), *, donate: bool = True, **options: Any) -> Any:
    """The step sharded with its tensors cut over `model`, the batch over `data`; what happens inside is searched."""
    constraints = {"state/*/up": P(None, None, "model"), "state/*/down": P(None, "model"), "batch/*": P("data")}
    return jaxplan.auto_shard(
        step, mesh, constraints=None if "plan" in options else constraints, donate_argnums=(0,) if donate else (),
        options={"compare_templates": False} | options,
    )  # fmt: skip


def relaid(plan: Any, inputs: Mapping[str, tuple[Any, ...]], outputs: Mapping[str, tuple[Any, ...]]) -> Any:
    """`plan` with other layouts of some arguments and results: for each dimension the axes that cut it."""

    def changed(tensors: Any, layouts: Mapping[str, tuple[Any, ...]]) -> Any:
        return tuple(
            dataclasses.replace(t, layout=Layout(dims=layouts[t.path])) if t.path in layouts else t
            for t in tensors
        )

    return dataclasses.replace(
        plan, inputs=changed(plan.inputs, inputs), outputs=changed(plan.outputs, outputs)
    )


def over(mesh: Mesh, *spec: Any) -> Callable[[Any], Any]:
    """A sharding constraint on what each layer makes."""
    return lambda h: jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(*spec)))
