"""Hugging Face transformers, the Flax classes (4.x; 5 has none), trained as in its run_*_flax.py examples."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import transformers

from .training import Case, array, integers, label_loss, new_key, next_token_loss, params_step, shapes_of

PACKAGE = "transformers"


def _language_model(model: Any, batch: int, length: int) -> Any:
    params = shapes_of(lambda: model.init_weights(jax.random.key(0), (1, 8)))

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(tokens, params=params, dropout_rng=key, train=True).logits
        return next_token_loss(logits, tokens)

    return params_step(loss, params, integers(batch, length), new_key())


def gpt2() -> Any:
    """GPT-2 small's widths, 4 of its 12 layers."""
    config = transformers.GPT2Config(n_layer=4)
    return _language_model(
        transformers.FlaxGPT2LMHeadModel(config, dtype=jnp.bfloat16, _do_init=False), 16, 512
    )


def llama() -> Any:
    """Llama with grouped-query attention and a vocabulary of 32000; 4 layers."""
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    return _language_model(
        transformers.FlaxLlamaForCausalLM(config, dtype=jnp.bfloat16, _do_init=False), 16, 512
    )


def bert() -> Any:
    """BERT base's widths, 4 layers, masked language modelling."""
    model = transformers.FlaxBertForMaskedLM(transformers.BertConfig(num_hidden_layers=4), _do_init=False)
    params = shapes_of(lambda: model.init_weights(jax.random.key(0), (1, 8)))

    def loss(params: Any, tokens: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(tokens, attention_mask=mask, params=params, dropout_rng=key, train=True).logits
        masked = labels >= 0
        log_probabilities = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probabilities, jnp.where(masked, labels, 0)[..., None], -1)[..., 0]
        return -(picked * masked).sum() / masked.sum()

    batch = integers(32, 128)
    return params_step(loss, params, batch, batch, batch, new_key())


def vit() -> Any:
    """ViT base's widths, 4 layers."""
    model = transformers.FlaxViTForImageClassification(
        transformers.ViTConfig(num_hidden_layers=4), _do_init=False
    )
    params = shapes_of(lambda: model.init_weights(jax.random.key(0), (1, 224, 224, 3)))

    def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        return label_loss(
            model(images, params=params, dropout_rng=key, train=True).logits, labels % 2
        )

    return params_step(loss, params, array(64, 3, 224, 224), integers(64), new_key())


def whisper() -> Any:
    """Whisper tiny: convolutions over a spectrogram, cross-attention, 51865 tokens."""
    config = transformers.WhisperConfig()
    model = transformers.FlaxWhisperForConditionalGeneration(config, _do_init=False)
    params = shapes_of(lambda: model.init_weights(jax.random.key(0), (1, 80, 3000)))

    def loss(params: Any, features: jax.Array, tokens: jax.Array, key: jax.Array) -> jax.Array:
        outputs = model(features, decoder_input_ids=tokens, params=params, dropout_rng=key, train=True)
        return next_token_loss(outputs.logits, tokens)

    return params_step(loss, params, array(16, 80, 3000), integers(16, 128), new_key())


CASES: dict[str, Case] = {
    "FlaxGPT2LMHeadModel": gpt2,
    "FlaxLlamaForCausalLM": llama,
    "FlaxBertForMaskedLM": bert,
    "FlaxViTForImageClassification": vit,
    "FlaxWhisperForConditionalGeneration": whisper,
}
