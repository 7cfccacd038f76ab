"""Hugging Face diffusers' Flax classes (before 0.36), trained as its text-to-image example does."""

from __future__ import annotations

from typing import Any

import diffusers
import jax
import jax.numpy as jnp

from .training import Case, array, new_key, params_step, shapes_of

PACKAGE = "diffusers"


def unet() -> Any:
    """Stable Diffusion's U-Net with half of its channels, latents of 64 x 64, text states of 77 x 768."""
    model = diffusers.FlaxUNet2DConditionModel(
        sample_size=64, block_out_channels=(160, 320, 640, 640), cross_attention_dim=768, layers_per_block=1
    )
    params = shapes_of(lambda: model.init_weights(jax.random.key(0)))
    scheduler = diffusers.FlaxDDPMScheduler(num_train_timesteps=1000)
    noise_state = scheduler.create_state()

    def loss(params: Any, latents: jax.Array, text: jax.Array, key: jax.Array) -> jax.Array:
        noise_key, time_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, latents.shape)
        times = jax.random.randint(time_key, latents.shape[:1], 0, 1000)
        noisy = scheduler.add_noise(noise_state, latents, noise, times)
        predicted = model.apply({"params": params}, noisy, times, text, train=True).sample
        return jnp.mean((noise - predicted) ** 2)

    return params_step(loss, params, array(16, 4, 64, 64), array(16, 77, 768), new_key())


def autoencoder() -> Any:
    """The KL autoencoder, two levels, images of 64 x 64."""
    model = diffusers.FlaxAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(64, 128),
        sample_size=64,
    )
    params = shapes_of(lambda: model.init_weights(jax.random.key(0)))

    def loss(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        posterior = model.apply({"params": params}, images, method=model.encode).latent_dist
        latents = posterior.sample(key)
        decoded = model.apply({"params": params}, latents, method=model.decode).sample
        kl = 0.5 * jnp.mean(posterior.mean**2 + posterior.var - 1 - posterior.logvar)
        return jnp.mean((decoded - images) ** 2) + 1e-6 * kl

    return params_step(loss, params, array(16, 3, 64, 64), new_key())


CASES: dict[str, Case] = {"FlaxUNet2DConditionModel": unet, "FlaxAutoencoderKL": autoencoder}
