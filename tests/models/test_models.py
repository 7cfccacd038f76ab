"""The train steps of models/: they learn, keep their state's form, and have the published sizes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models

ALL_CONFIGS = [(name, config) for name in models.names() for config in models.get(name).CONFIGS]
TINY_CONFIGS = [(name, config) for name, config in ALL_CONFIGS if config.startswith("tiny")]
BF16_CONFIGS = [(name, config) for name, config in TINY_CONFIGS if config.endswith("bf16")]

# The smallest published size of each of these models is traced by default.
SLOW_TO_TRACE = {
    *("ddpm-256", "ddpm-cifar10", "gpt2-medium", "inception-v3", "resnet101", "resnet152", "t5-base", "vit-l16"),
    *("whisper-base", "wide-resnet50-2", "wide-resnet101-2"),
}
SLOW_TO_COMPILE = {"inception", "unet", "whisper"}

# (model, config, parameters, relative tolerance of the figure as it was printed)
PUBLISHED_PARAMETERS = [
    # The released checkpoints, as the Hugging Face hub and nanoGPT's README count them.
    ("gpt", "gpt2", 124_439_808, 0),
    ("gpt", "gpt2-scan", 124_439_808, 0),
    ("gpt", "gpt2-medium", 354_823_168, 0),
    ("gpt", "gpt2-large", 774_030_080, 0),
    ("gpt", "gpt2-xl", 1_557_611_200, 0),
    # Brown et al. 2020, table 2.1.
    ("gpt", "gpt3-6.7b", 6.7e9, 0.01),
    ("gpt", "gpt3-175b", 175.0e9, 0.005),
    # The weights' own index files.
    ("llama", "llama2-7b", 6_738_415_616, 0),
    ("llama", "llama3-8b", 8_030_261_248, 0),
    ("llama", "llama3-70b", 70_553_706_496, 0),
    ("moe", "mixtral-8x7b", 46_702_792_704, 0),
    # Mistral AI's announcement: 141B; Fedus et al. 2021, table 9: 7B, 7.4B as released.
    ("moe", "mixtral-8x22b", 141e9, 0.005),
    ("moe", "switch-base", 7.4e9, 0.01),
    # torchvision's model tables.
    ("resnet", "resnet18", 11_689_512, 0),
    ("resnet", "resnet50", 25_557_032, 0),
    ("resnet", "resnet101", 44_549_160, 0),
    ("resnet", "resnet152", 60_192_808, 0),
    ("resnet", "wide-resnet50-2", 68_883_240, 0),
    ("resnet", "wide-resnet101-2", 126_886_696, 0),
    ("alexnet", "alexnet", 61_100_840, 0),
    ("vgg", "vgg11", 132_863_336, 0),
    ("vgg", "vgg16", 138_357_544, 0),
    ("vgg", "vgg19", 143_667_240, 0),
    ("inception", "inception-v3", 27_161_264, 0),
    ("vit", "vit-b16", 86_567_656, 0),
    ("vit", "vit-l16", 304_326_632, 0),
    # Dosovitskiy et al. 2020, table 1.
    ("vit", "vit-h14", 632e6, 0.001),
    # Zaremba et al. 2014 as counted by Gal and Ghahramani 2016 (20M, 66M); Jozefowicz et al. 2016, table 1.
    ("lstm", "ptb-medium", 20e6, 0.02),
    ("lstm", "ptb-large", 66e6, 0.005),
    ("lstm", "big-lstm", 1.8e9, 0.02),
    # Han et al. 2015, table 1: 267K; Ciresan et al. 2010, table 1: 12.11 million weights.
    ("mlp", "lenet-300-100", 267e3, 0.002),
    ("mlp", "ciresan-2010", 12.11e6, 0.001),
    # The released checkpoints as the Hugging Face hub counts them; Whisper's less the encoder's fixed sinusoids
    # (1500 x dim), which it counts too.
    ("t5", "t5-small", 60_506_624, 0),
    ("t5", "t5-base", 222_903_552, 0),
    ("t5", "t5-large", 737_668_096, 0),
    ("t5", "t5-3b", 2_851_598_336, 0),
    ("t5", "t5-11b", 11_307_321_344, 0),
    ("whisper", "whisper-tiny", 37_760_640 - 1500 * 384, 0),
    ("whisper", "whisper-base", 72_593_920 - 1500 * 512, 0),
    ("whisper", "whisper-small", 241_734_912 - 1500 * 768, 0),
    ("whisper", "whisper-medium", 763_857_920 - 1500 * 1024, 0),
    ("whisper", "whisper-large", 1_543_304_960 - 1500 * 1280, 0),
    ("mamba", "mamba-130m", 129_135_360, 0),
    ("mamba", "mamba-370m", 371_516_416, 0),
    ("mamba", "mamba-790m", 793_204_224, 0),
    ("mamba", "mamba-1.4b", 1_372_178_432, 0),
    ("mamba", "mamba-2.8b", 2_768_345_600, 0),
    # Ho et al. 2020, appendix B.
    ("unet", "ddpm-cifar10", 35.7e6, 0.002),
    ("unet", "ddpm-256", 114e6, 0.005),
    # Naumov et al. 2019, section 5 (540M); MLPerf Training's DLRM with 24 billion parameters.
    ("dlrm", "criteo-kaggle", 540e6, 0.002),
    ("dlrm", "criteo-terabyte", 24e9, 0.002),
    # The Open Graph Benchmark's leaderboards.
    ("gnn", "ogbn-products", 206_895, 0),
    ("gnn", "ogbn-proteins", 193_136, 0),
]


def parameter_count(module: Any, config: Any) -> int:
    state = jax.eval_shape(lambda: module.init_state(config, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"]))


def forms(tree: Any) -> list[tuple[str, tuple[int, ...], Any, bool]]:
    return [
        (jax.tree_util.keystr(path), leaf.shape, leaf.dtype, leaf.weak_type)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def trace_step(name: str, config_name: str) -> Any:
    step = models.get(name).make_train_step(models.get_config(name, config_name))
    return jax.jit(step).trace(*models.abstract_arguments(name, config_name))


# What two tests read; the jaxprs of published sizes would take too much memory together.
trace_tiny_step = functools.cache(trace_step)


@pytest.mark.parametrize(
    ("name", "config_name"),
    [pytest.param(*names, marks=[pytest.mark.slow] if SLOW_TO_TRACE & set(names) else []) for names in ALL_CONFIGS],
)
def test_step_traces_without_allocating_and_keeps_the_form_of_its_state(name: str, config_name: str) -> None:
    state, _ = models.abstract_arguments(name, config_name)
    bytes_before = sum(array.nbytes for array in jax.live_arrays())
    traced = (trace_tiny_step if (name, config_name) in TINY_CONFIGS else trace_step)(name, config_name)
    new_state, metrics = traced.out_info
    assert forms(new_state) == forms(state)
    assert all(metric.shape == () and metric.dtype == jnp.float32 for metric in metrics.values())
    # A mebibyte is far below the smallest layer of a real model.
    assert sum(array.nbytes for array in jax.live_arrays()) - bytes_before < 2**20


@pytest.mark.parametrize(("name", "config_name"), TINY_CONFIGS)
def test_step_says_nothing_about_sharding(name: str, config_name: str) -> None:
    jaxpr = str(trace_tiny_step(name, config_name).jaxpr)
    assert "pjit" in jaxpr or "jit[" in jaxpr  # nested jaxprs are printed too
    assert "sharding_constraint" not in jaxpr and "shard_map" not in jaxpr


@functools.cache
def step_of(module: ModuleType, config: Any) -> Any:
    return jax.jit(module.make_train_step(config))


@functools.cache
def arguments_of(module: ModuleType, config: Any) -> tuple[Any, Any]:
    state = jax.jit(lambda key: module.init_state(config, key))(jax.random.key(0))
    return state, module.make_batch(config, jax.random.key(1))


def losses_of_three_steps(name: str, config_name: str) -> list[float]:
    module, config = models.get(name), models.get_config(name, config_name)
    state, batch = arguments_of(module, config)
    losses = []
    for _ in range(3):
        state, metrics = step_of(module, config)(state, batch)
        losses.append(float(metrics["loss"]))
    assert int(state["step"]) == 3
    return losses


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW_TO_COMPILE else []) for n in models.names()]
)
def test_loss_falls_on_a_fixed_batch(name: str) -> None:
    first, second, third = losses_of_three_steps(name, "tiny")
    assert first > second > third


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config_name"), BF16_CONFIGS)
def test_bf16_compute_follows_f32(name: str, config_name: str) -> None:
    bf16 = losses_of_three_steps(name, config_name)
    assert bf16[0] > bf16[1] > bf16[2]
    # 2**-8 is half a unit in the last place of bf16; the loss is a mean of such roundings.
    np.testing.assert_allclose(bf16, losses_of_three_steps(name, "tiny"), rtol=2**-6)


@pytest.mark.parametrize(("name", "config_name"), BF16_CONFIGS)
def test_bf16_is_of_the_compute_alone(name: str, config_name: str) -> None:
    """Matmuls and convolutions multiply bf16, and nothing in the state is stored in it."""
    state, _ = models.abstract_arguments(name, config_name)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    hlo = trace_tiny_step(name, config_name).lower().as_text()
    products = [line for line in hlo.splitlines() if "dot_general" in line or "stablehlo.convolution" in line]
    in_bf16 = [line for line in products if line.split(" : ")[-1].split("->")[0].count("bf16>") == 2]
    # What stays in f32: a router, and the gradient of attention's scores.
    assert len(in_bf16) >= 0.6 * len(products) > 0


@pytest.mark.parametrize(("name", "config_name", "published", "tolerance"), PUBLISHED_PARAMETERS)
def test_published_parameter_count(name: str, config_name: str, published: float, tolerance: float) -> None:
    config = models.get_config(name, config_name)
    if hasattr(config, "vocab_multiple"):
        config = replace(config, vocab_multiple=1)
    assert parameter_count(models.get(name), config) == pytest.approx(published, rel=tolerance, abs=0)


def test_every_real_config_with_a_source_is_counted() -> None:
    without_source = {("llama", "bytes-3m"), ("mlp", "wide-small-batch"), ("mlp", "wide-big-batch")}
    # Their papers give dims and no count.
    without_source |= {("lstm", "rnnlm"), ("lstm", "rnntc"), ("nmt", "luong-2015"), ("nmt", "flexflow")}
    counted = {(name, config) for name, config, _, _ in PUBLISHED_PARAMETERS}
    assert counted == set(ALL_CONFIGS) - set(TINY_CONFIGS) - without_source


@pytest.mark.parametrize(
    ("name", "config_name"),
    [
        ("gpt", "gpt2-xl"),
        ("llama", "llama3-8b"),
        ("mamba", "mamba-130m"),
        ("moe", "switch-base"),
        ("t5", "t5-large"),
        ("vit", "vit-h14"),
        ("whisper", "whisper-small"),
    ],
)
def test_scanned_and_unrolled_have_as_many_parameters(name: str, config_name: str) -> None:
    module, config = models.get(name), models.get_config(name, config_name)
    counts = {parameter_count(module, replace(config, scan_layers=scan)) for scan in (False, True)}
    assert len(counts) == 1


def stacked(params: dict[str, Any]) -> dict[str, Any]:
    """The scanned form of unrolled parameters, Linen's `layer_<i>` or NNX's `layers`, a dict by index, at any depth."""
    if "layers" not in params and not any(key.startswith("layer_") for key in params):
        return {key: stacked(value) if isinstance(value, dict) else value for key, value in params.items()}
    if "layers" in params:
        layers, others = params["layers"], {key: value for key, value in params.items() if key != "layers"}
        ordered = [layers[index] for index in range(len(layers))]
    else:
        others = {key: value for key, value in params.items() if not key.startswith("layer_")}
        ordered = [params[f"layer_{index}"] for index in range(len(params) - len(others))]
    return {**others, "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *ordered)}


@pytest.mark.parametrize(
    ("name", "scan_and_remat"),
    [
        ("gpt", (True, True)),
        ("llama", (True, True)),
        ("llama", (False, True)),
        ("mamba", (True, True)),
        ("moe", (True, True)),
        pytest.param("t5", (True, True), marks=pytest.mark.slow),
        ("vit", (True, False)),
        pytest.param("whisper", (True, True), marks=pytest.mark.slow),
    ],
)
def test_scanned_and_rematerialised_steps_equal_the_plain_one(
    name: str, scan_and_remat: tuple[bool, bool]
) -> None:
    scan, remat = scan_and_remat
    module, plain = models.get(name), models.get_config(name, "tiny")
    other = replace(plain, scan_layers=scan, remat=remat)
    in_form_of_other = stacked if scan else lambda params: params
    state, batch = arguments_of(module, plain)
    form = jax.eval_shape(lambda: module.init_state(other, jax.random.key(0)))
    other_state = {
        "params": in_form_of_other(state["params"]),
        "opt_state": jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), form["opt_state"]),
        "step": state["step"],
    }
    after, metrics = step_of(module, plain)(state, batch)
    other_after, other_metrics = step_of(module, other)(other_state, batch)
    for key in metrics:
        np.testing.assert_allclose(other_metrics[key], metrics[key], rtol=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6),
        other_after["params"],
        in_form_of_other(after["params"]),
    )


@pytest.mark.parametrize("name", ["gpt", "llama", "lstm", "nmt"])
def test_targets_are_the_inputs_one_position_ahead(name: str) -> None:
    module, config = models.get(name), models.get_config(name, "tiny")
    batch = module.make_batch(config, jax.random.key(1))
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert int(batch["inputs"].max()) < config.vocab_size


def test_batch_statistics_are_a_moving_average_of_the_batch() -> None:
    module, config = models.get("resnet"), models.get_config("resnet", "tiny")
    state, batch = arguments_of(module, config)
    after, _ = step_of(module, config)(state, batch)
    stem = jax.lax.conv_general_dilated(
        batch["images"],
        state["params"]["conv_stem"]["kernel"],
        window_strides=(2, 2),
        padding=((3, 3), (3, 3)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    expected = 0.1 * np.asarray(stem).mean(axis=(0, 1, 2))  # momentum 0.9 from a mean of 0
    np.testing.assert_allclose(after["batch_stats"]["norm_stem"]["mean"], expected, rtol=1e-4, atol=1e-6)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no model 'gtp'; the models are alexnet, dlrm, gnn, gpt, inception, llama, .*, vit, whisper"
    ):
        models.get("gtp")
    with pytest.raises(ValueError, match=r"'gpt' has no config 'gpt5'; its configs are tiny, .*gpt3-175b"):
        models.abstract_arguments("gpt", "gpt5")
