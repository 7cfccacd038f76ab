"""What the train steps of all models share: the state, the optimizer, the losses, the update.

A state is a dict of pytrees, `{"params", "opt_state", "step"}` (ResNet adds `"batch_stats"`); a batch is a
dict of arrays; a step takes both and returns the new state, equal in structure, shapes and dtypes, and a dict
of scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

State = dict[str, Any]
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]
LossFunction = Callable[[Any, Batch], tuple[jax.Array, Metrics]]


# Some gradients are zero but for rounding: softmax cancels the bias of attention keys.  Adam divides a
# gradient by its own size plus epsilon, so an epsilon below that rounding makes steps of full size and random
# sign from it.  The tiny configs exist to be compared, sharded with unsharded: theirs is far above it.
TINY_ADAM_EPSILON = 1e-3


def adamw(learning_rate: float, epsilon: float) -> optax.GradientTransformation:
    """AdamW with the betas and weight decay of Llama 2 (Touvron et al. 2023, arXiv:2307.09288, section 2.2).

    The configs' usual `adam_epsilon`, 1e-5, is from there too.
    """
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, eps=epsilon, weight_decay=0.1)


def new_state(params: Any, optimizer: optax.GradientTransformation, **others: Any) -> State:
    """The state at step 0; `others` (batch statistics) are further entries of it."""
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32), **others}


def apply_gradients(
    state: State, gradients: Any, optimizer: optax.GradientTransformation, **others: Any
) -> State:
    """The state after one update; `others` replace the entries of their names."""
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, **others, "params": params, "opt_state": opt_state, "step": state["step"] + 1}


def gradient_step(loss_function: LossFunction, optimizer: optax.GradientTransformation) -> TrainStep:
    """The train step of `loss_function(params, batch) -> (loss, metrics)`; adds `loss` and `grad_norm`."""

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        gradient = jax.value_and_grad(loss_function, has_aux=True)
        (loss, metrics), gradients = gradient(state["params"], batch)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients), **metrics}
        return apply_gradients(state, gradients, optimizer), metrics

    return train_step


def dropout_step(model: nn.Module, optimizer: optax.GradientTransformation) -> TrainStep:
    """The train step of an image classifier `model(images, train=True)` with dropout; its metrics and `accuracy`.

    A step draws its own dropout: from the number of the step.
    """

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        rngs = {"dropout": jax.random.fold_in(jax.random.key(0), state["step"])}

        def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
            logits: Any = model.apply({"params": params}, batch["images"], train=True, rngs=rngs)
            return classification_loss(logits, batch["labels"])

        return gradient_step(loss_function, optimizer)(state, batch)

    return train_step


def token_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean of -log softmax(logits)[target] over all tokens, in f32.

    logits: [batch, length, vocabulary]; targets: [batch, length] int32.  The target's logit is selected by
    comparing and summing, not by a gather, as is usual for large vocabularies: XLA fuses it, and no one-hot
    array is ever stored.
    """
    logits = logits.astype(jnp.float32)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def classification_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Metrics]:
    """Mean softmax cross entropy in f32 and the accuracy; logits: [batch, classes]; labels: [batch] int32."""
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    accuracy = jnp.mean((jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32))
    return jnp.mean(losses), {"accuracy": accuracy}


def random_tokens(key: jax.Array, batch_size: int, seq_len: int, vocab_size: int) -> Batch:
    """Uniform random text: `inputs` and, one position ahead, `targets`, each [batch_size, seq_len] int32."""
    tokens = jax.random.randint(key, (batch_size, seq_len + 1), 0, vocab_size, jnp.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def random_images(key: jax.Array, shape: tuple[int, ...], n_classes: int) -> Batch:
    """Normal random `images` of `shape` (f32, batch first) and uniform random `labels` [batch] int32."""
    image_key, label_key = jax.random.split(key)
    return {
        "images": jax.random.normal(image_key, shape, jnp.float32),
        "labels": jax.random.randint(label_key, shape[:1], 0, n_classes, jnp.int32),
    }


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple
