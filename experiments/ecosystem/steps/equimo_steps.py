"""equimo: vision models in Equinox: a ViT with registers, ConvNeXt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from equimo.models import convnext, vit

from .training import Case, array, integers, label_loss, new_key, params_step

PACKAGE = "equimo"


def classifier(make: Callable[..., Any], **settings: Any) -> Any:
    """`make`'s model on 128 images of 224 x 224, with dropout's keys."""
    model = eqx.filter_eval_shape(lambda: make(key=jax.random.key(0), **settings))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        model = eqx.combine(params, static)
        keys = jax.random.split(key, images.shape[0])
        return label_loss(jax.vmap(lambda x, k: model(x, key=k))(images, keys), labels)

    return params_step(loss, params, array(128, 3, 224, 224), integers(128), new_key())


CASES: dict[str, Case] = {
    "vit_base_patch16_224": lambda: classifier(vit.vit_base_patch16_224, num_classes=1000, drop_path_rate=0.1),
    "convnext_t": lambda: classifier(convnext.convnext_t, num_classes=1000, drop_path_rate=0.1),
}
