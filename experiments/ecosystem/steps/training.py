"""What users write around a package's model: the loss, value_and_grad, an optax update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Step = Callable[..., Any]
Case = Callable[[], tuple[Step, tuple[Any, ...]]]


def shapes_of(make: Callable[..., Any], *args: Any) -> Any:
    """What `make(*args)` would return, as ShapeDtypeStructs."""
    return jax.eval_shape(make, *args)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument of that shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Tokens, labels, indices."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def new_key() -> jax.ShapeDtypeStruct:
    """A typed PRNG key."""
    return shapes_of(lambda: jax.random.key(0))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Cross entropy of every token but the first, as the packages' own examples write it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def label_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of class labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def params_step(
    loss: Callable[..., jax.Array], params: Any, *batch: Any, optimizer: optax.GradientTransformation | None = None
) -> tuple[Step, tuple[Any, ...]]:
    """The step of `loss(params, *batch) -> scalar` on abstract `params`; its arguments: (params, opt_state), batch."""
    tx = optax.adamw(1e-3) if optimizer is None else optimizer

    def train_step(state: tuple[Any, Any], *batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return train_step, ((params, shapes_of(tx.init, params)), *batch)
