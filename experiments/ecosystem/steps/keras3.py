"""Keras 3 on its JAX backend: the stateless train step of its guide "Writing a training loop from scratch in JAX"."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras

from .training import Case, array, integers, shapes_of

PACKAGE = "keras"


def trained(model: Any, loss_fn: Any, *batch: Any) -> Any:
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def loss_of(trainable: Any, fixed: Any, x: jax.Array, y: jax.Array) -> Any:
        predicted, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return loss_fn(y, predicted), fixed

    def train_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        trainable, fixed, optimizer_variables = state
        (loss, fixed), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, fixed, x, y)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        return (trainable, fixed, optimizer_variables), loss

    state = tuple(
        [variable.value for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    return train_step, (shapes_of(lambda: state), *batch)


def resnet50() -> Any:
    """keras.applications.ResNet50, images of 128 x 128."""
    model = keras.applications.ResNet50(weights=None, input_shape=(128, 128, 3), classes=1000)
    loss = keras.losses.SparseCategoricalCrossentropy()
    return trained(model, loss, array(64, 128, 128, 3), integers(64))


def efficientnet() -> Any:
    """keras.applications.EfficientNetB0: depthwise convolutions, squeeze and excitation, dropout's seeds."""
    model = keras.applications.EfficientNetB0(weights=None, input_shape=(128, 128, 3), classes=1000)
    loss = keras.losses.SparseCategoricalCrossentropy()
    return trained(model, loss, array(64, 128, 128, 3), integers(64))


def recurrent() -> Any:
    """Embedding, a bidirectional LSTM and a GRU, as in its IMDB example."""
    inputs = keras.Input((128,), dtype="int32")
    x = keras.layers.Embedding(20000, 256)(inputs)
    x = keras.layers.Bidirectional(keras.layers.LSTM(256, return_sequences=True))(x)
    x = keras.layers.GRU(256)(x)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    return trained(model, keras.losses.BinaryCrossentropy(), integers(64, 128), array(64, 1))


CASES: dict[str, Case] = {
    "applications.ResNet50": resnet50,
    "applications.EfficientNetB0": efficientnet,
    "LSTM and GRU": recurrent,
}
