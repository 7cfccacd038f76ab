"""flaxmodels (Linen): its training examples' models, without their pretrained weights."""

from __future__ import annotations

from typing import Any

import flaxmodels
import jax
import optax

from .training import Case, array, integers, label_loss, new_key, params_step, shapes_of

PACKAGE = "flaxmodels"


def vgg16() -> Any:
    """VGG-16 with dropout, images of 224 x 224."""
    model = flaxmodels.VGG16(output="logits", pretrained=None, normalize=False, num_classes=1000)
    images = array(64, 224, 224, 3)
    params = shapes_of(lambda key, x: model.init(key, x, train=False), new_key(), images)

    def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        return label_loss(model.apply(params, images, train=True, rngs={"dropout": key}), labels)

    return params_step(loss, params, images, integers(64), new_key())


def resnet34() -> Any:
    """ResNet-34 and its batch statistics."""
    model = flaxmodels.ResNet34(output="logits", pretrained=None, normalize=False, num_classes=1000)
    images = array(64, 128, 128, 3)
    variables = shapes_of(lambda key, x: model.init(key, x), new_key(), images)
    tx = optax.sgd(0.1, momentum=0.9)

    def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        params, statistics, opt_state = state

        def loss_of(params: Any) -> Any:
            logits, changed = model.apply(
                {"params": params, "batch_stats": statistics}, images, mutable=["batch_stats"]
            )
            return label_loss(logits, labels), changed["batch_stats"]

        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    params = variables["params"]
    state = (params, variables["batch_stats"], shapes_of(tx.init, params))
    return train_step, (state, images, integers(64))


CASES: dict[str, Case] = {"VGG16": vgg16, "ResNet34": resnet34}
