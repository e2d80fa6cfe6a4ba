"""Causal attention: with JAX's own kernels for TPUs and GPUs, or with all logits in memory."""

import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from repro.published.dense_decoder.sizes import Model, Run
from repro.published.dense_decoder.splits import ROWS

# JAX's kernel for GPUs calls itself when it is differentiated. It is then a function with a custom
# gradient, like nothing else in a layer at that point.
KERNELS = ("pallas_call", "custom_vjp_call")

_SPLASH_BLOCK = 512
_FLASH_BLOCK = 128


def attention(
    run: Run, mesh: Mesh | AbstractMesh, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Returns causal attention of queries [B, T, N, D] to keys and values [B, T, K, D]."""
    query = query * query.shape[-1] ** -0.5
    attend = {"splash": _splash, "flash": _flash, "whole": _whole}[run.attention]
    if run.attention == "whole":
        return attend(query, key, value)

    # A kernel is called on each device with the device's own parts.
    spec = PartitionSpec(ROWS, None, "tensor", None)
    attend = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )
    return attend(query, key, value)


def _whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention that keeps the logits of all pairs in memory, in float32."""
    key, value = _repeated(query, key, value)
    logits = jnp.einsum("BTND,BSND->BNTS", query, key, preferred_element_type=jnp.float32)
    length = query.shape[1]
    is_earlier = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(is_earlier, logits, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSND->BTND", shares.astype(query.dtype), value)


def _splash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention by JAX's own kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    _, length, heads, _ = query.shape
    block = min(_SPLASH_BLOCK, length)
    mask = splash_attention_mask.CausalMask((length, length))
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    by_heads = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(jax.vmap(kernel)(*by_heads), 1, 2)


def _flash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention by JAX's own kernel for GPUs, which needs as many keys as queries."""
    with warnings.catch_warnings():
        # JAX points to other copies of the kernel, which are not part of the package.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as kernels

    key, value = _repeated(query, key, value)
    return kernels.mha(query, key, value, None, sm_scale=1.0, causal=True)


def _repeated(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values with as many heads as queries: one copy per query head of a group."""
    copies = query.shape[2] // key.shape[2]
    return jnp.repeat(key, copies, axis=2), jnp.repeat(value, copies, axis=2)


def kernel_flops(model: Model, run: Run) -> list[str]:
    """Returns `NAME=FLOPS` of one run of each attention kernel on a device.

    Splash attention computes the blocks that the causal mask leaves: 2 products forward, 3 for the
    queries' gradient and 4 for the keys' and values'. Flash attention on GPUs counts the products
    of the published kernels (Dao, 2023), 2 forward and 5 backward, on half of all pairs; the
    backward kernel that is compiled here has 7.
    """
    heads = model.N // run.tensor
    product = 2 * run.rows_at_once * heads * model.D
    match run.attention:
        case "splash":
            product *= _causal_pairs(run.length, min(_SPLASH_BLOCK, run.length))
            counts = {
                "splash_mha_fwd_residuals": 2,
                "splash_mha_dq_no_residuals": 3,
                "splash_mha_dkv_no_residuals": 4,
            }
        case "flash":
            product *= _causal_pairs(run.length, min(_FLASH_BLOCK, run.length))
            counts = {"mha_forward": 2, "mha_preprocess_backward": 0, "mha_backward": 5}
        case _:
            counts = {}
    return [f"{name}={count * product}" for name, count in counts.items()]


def _causal_pairs(length: int, block: int) -> int:
    """Returns the number of token pairs in blocks that the mask does not hide completely."""
    blocks = -(-length // block)
    return blocks * (blocks + 1) // 2 * block**2
