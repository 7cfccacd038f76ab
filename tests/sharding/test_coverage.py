"""Every primitive of jax is ruled, seen through, or named here with the reason why it has no rule.

A jax that adds primitives fails here, and the failure names them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxplan._jax import primitive_names
from jaxplan.ir import trace
from jaxplan.ir.flatten import SEEN_THROUGH
from jaxplan.sharding import graph_rules
from jaxplan.sharding.rules import registered

WITHOUT_A_RULE = {
    "inside shard_map, where the user's own specs rule": """
        all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start
        all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done pbroadcast_dynamic
        pbroadcast_start pmax pmin ppermute ppermute_done ppermute_start precv preduced psend psum psum_done
        psum_invariant psum_invariant_start psum_start pvary ragged_all_to_all reduce_scatter reduce_scatter_done
        reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin unreduced_psum
        unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast
        vary_unreduced_cast_p""",
    "gone before a program is lowered: expanded, differentiated, batched or discharged": """
        box_get box_set call_hi_primitive call_hi_primitive_linearized check create_linear custom_jvp_call_jaxpr
        custom_lin dce_sink log_extend log_read new_box new_log program_order run_state stage tie unreachable
        zeros_like""",
    "inside another primitive's own lowering": """
        from_edtype iota_2x32_shape philox2x32 philox4x32 select_and_scatter threefry4x32 to_edtype""",
    "mutable arrays, replicated and named: who writes when is not in the data flow": """
        accum_grad_in_ref addupdate broadcast_to empty_ref free_ref freeze get new_ref pin swap unpin""",
    "meshes with Explicit axes, on which nothing is planned": "relayout reshard",
    "kernels and programs that jax does not look into, replicated and named": """
        call_exported cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper
        inspect_sharding scaled_dot scaled_matmul scaled_matmul_wrapper
        with_memory_space_constraint""",
    "tokens and shapes of exported programs": """
        after_all create_token dim_as_value dimension_size shape_assertion""",
}
UNRULED = frozenset(name for names in WITHOUT_A_RULE.values() for name in names.split())
LOOPS = frozenset({"scan", "while", "cond"})


def test_every_primitive_of_jax_is_ruled_or_named_with_a_reason() -> None:
    fresh = primitive_names() - registered() - SEEN_THROUGH - LOOPS - UNRULED
    assert not fresh, f"jax {jax.__version__} has primitives that are new here: {sorted(fresh)}"
    assert len(primitive_names()) > 250


def test_nothing_is_both_ruled_and_excused() -> None:
    assert not UNRULED & (registered() | SEEN_THROUGH | LOOPS)


@jax.custom_batching.custom_vmap
def _own_batching(x: Any) -> Any:
    return jnp.sin(x)


_own_batching.def_vmap(lambda size, batched, x: (jnp.cos(x), batched[0]))


@jax.custom_vjp
def _saved(x: Any) -> Any:
    return jnp.sin(x)


_saved.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),), optimize_remat=True)

X = jax.ShapeDtypeStruct((8, 4), np.float32)
SQUARE = jax.ShapeDtypeStruct((4, 4), np.float32)
SEEN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "solve": (lambda a, x: jax.grad(lambda a: jnp.linalg.solve(a, x.T).sum())(a), (SQUARE, X)),
    "conjugate gradients": (lambda a, x: jax.scipy.sparse.linalg.cg(lambda v: a @ v, x[0])[0], (SQUARE, X)),
    "custom_vmap": (_own_batching, (X,)),
    "custom_vmap, batched": (jax.vmap(_own_batching), (X,)),
    "composite": (lambda x: lax.composite(jnp.sin, name="own.sine")(x), (X,)),
    "optimize_remat": (jax.grad(lambda x: _saved(x).sum()), (X,)),
    "named residuals": (
        jax.grad(jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "kept").sum(),
                                policy=jax.checkpoint_policies.save_only_these_names("kept"))), (X,)),
    "platform": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (X,)),
    "empty": (lambda x: x + 0 * jnp.empty((8, 4)), (X,)),
    "polynomial": (lambda x: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), x), (X,)),
    "histogram": (lambda x: jnp.histogram(x)[0], (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_only_wraps_is_seen_through(name: str) -> None:
    fn, args = SEEN[name]
    graph = trace(fn, args, {}).graph
    rules = graph_rules(graph)
    assert rules
    assert not {op.primitive for op, rule in zip(graph.ops, rules, strict=True) if rule.note}
