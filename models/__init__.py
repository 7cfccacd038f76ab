"""Train steps of real models, written for one device, with nothing about sharding in them.

Each module of `MODELS` has `CONFIGS` (from `tiny` to published sizes), `init_state(config, key)`,
`make_train_step(config)`, `make_batch(config, key)` and
`batch_shapes(config)`.  Nothing here imports jaxplan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from models import (
    alexnet,
    dlrm,
    gnn,
    gpt,
    inception,
    llama,
    lstm,
    mamba,
    mlp,
    moe,
    nmt,
    resnet,
    t5,
    unet,
    vgg,
    vit,
    whisper,
)

MODELS: dict[str, ModuleType] = {
    "alexnet": alexnet,
    "dlrm": dlrm,
    "gnn": gnn,
    "gpt": gpt,
    "inception": inception,
    "llama": llama,
    "lstm": lstm,
    "mamba": mamba,
    "mlp": mlp,
    "moe": moe,
    "nmt": nmt,
    "resnet": resnet,
    "t5": t5,
    "unet": unet,
    "vgg": vgg,
    "vit": vit,
    "whisper": whisper,
}


def names() -> tuple[str, ...]:
    """The models' names, sorted."""
    return tuple(sorted(MODELS))


def get(name: str) -> ModuleType:
    """The module of a model; ValueError for a name that is not in `names()`."""
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; the models are {', '.join(names())}")
    return MODELS[name]


def get_config(model_name: str, config_name: str) -> Any:
    """The frozen `Config` of that name; ValueError for an unknown model or config."""
    configs = get(model_name).CONFIGS
    if config_name not in configs:
        raise ValueError(
            f"the model {model_name!r} has no config {config_name!r}; its configs are {', '.join(configs)}"
        )
    return configs[config_name]


def abstract_arguments(model_name: str, config_name: str) -> tuple[Any, Any]:
    """The shapes of a step's state and batch, as pytrees of ShapeDtypeStruct; allocates nothing."""
    model, config = get(model_name), get_config(model_name, config_name)
    return Case(name=model_name, model=model, config=config, what=config_name).shapes()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at one size, as experiments run it; `what` is its line of their tables."""

    name: str
    model: ModuleType
    config: Any
    what: str

    def step(self) -> Callable[..., Any]:
        """`(state, batch) -> (state, metrics)`, for one device."""
        step: Callable[..., Any] = self.model.make_train_step(self.config)
        return step

    def shapes(self) -> tuple[Any, Any]:
        """State and batch as ShapeDtypeStructs; allocates nothing."""
        state = jax.eval_shape(lambda: self.model.init_state(self.config, jax.random.key(0)))
        return state, self.model.batch_shapes(self.config)
