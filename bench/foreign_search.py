"""The partitionings that `plan search` finds for a training step written without this library.

python -m bench.foreign_search --topology=v5e:4x4 --out=FOLDER
python -m bench.foreign_search --topology=h100:1x8 --out=FOLDER

The step trains a decoder-only Transformer in plain JAX, with Adam in float32 and products in
bfloat16. It is partitioned like most first programs: the batch is split over all devices, and each
device has all weights and moments. docs/planning.md has its figures from the printed search.
"""

import pathlib

import jax
import jax.numpy as jnp
import optax
from absl import flags
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import xla_plan
from lingvo_gshard import cli
from xla_plan.machines import topology
from xla_plan.searches import search
from xla_spmd.runtime import environment

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:4x4", "As for plan.")
_OUT = flags.DEFINE_string("out", None, "The folder for program_search.json and report.md.")
_LAYERS = flags.DEFINE_integer("layers", 8, "The layers.")
_DIM = flags.DEFINE_integer("dim", 2048, "The model's dim; heads have 128, hidden layers 4 * dim.")
_VOCAB = flags.DEFINE_integer("vocab", 32768, "The vocabulary.")
_BATCH = flags.DEFINE_integer("batch", 32, "The rows of a batch.")
_LENGTH = flags.DEFINE_integer("length", 1024, "The tokens of a row.")

_HEAD_DIM = 128


def _norm(x, scale):
    centered = x.astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)
    return (centered * rms * scale).astype(jnp.bfloat16)


@jax.checkpoint
def _layer(x, layer):
    w = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), layer)
    batch, length, dim = x.shape

    # Like in nanoGPT, one product computes queries, keys and values.
    qkv = _norm(x, w["ln_1"]) @ w["attn"]["qkv"]
    heads = (batch, length, dim // _HEAD_DIM, _HEAD_DIM)
    q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))
    logits = jnp.einsum("blhd,bmhd->bhlm", q, k).astype(jnp.float32) * _HEAD_DIM**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    probs = jax.nn.softmax(jnp.where(causal, logits, -1e9)).astype(jnp.bfloat16)
    attended = jnp.einsum("bhlm,bmhd->blhd", probs, v).reshape(x.shape)
    x = x + attended @ w["attn"]["out"]

    hidden = jax.nn.gelu(_norm(x, w["ln_2"]) @ w["mlp"]["up"])
    return x + hidden @ w["mlp"]["down"]


def _loss(params, tokens):
    x = params["embedding"][tokens].astype(jnp.bfloat16)
    for layer in params["layers"]:
        x = _layer(x, layer)
    x = _norm(x, params["ln_f"])
    logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.mean(losses)


_OPTIMIZER = optax.adam(1e-4)


def train_step(state, tokens):
    """Returns the state and the loss after a step of Adam."""
    loss, gradients = jax.value_and_grad(_loss)(state["params"], tokens)
    updates, opt = _OPTIMIZER.update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def example(num_devices, layers, dim, vocab, batch, length):
    """Returns the step and its arguments; only the batch is split."""

    def layer():
        return {
            "attn": {"qkv": jnp.zeros((dim, 3 * dim)), "out": jnp.zeros((dim, dim))},
            "mlp": {"up": jnp.zeros((dim, 4 * dim)), "down": jnp.zeros((4 * dim, dim))},
            "ln_1": jnp.zeros(dim),
            "ln_2": jnp.zeros(dim),
        }

    def make():
        params = {
            "embedding": jnp.zeros((vocab, dim)),
            "layers": [layer() for _ in range(layers)],
            "ln_f": jnp.zeros(dim),
            "head": jnp.zeros((dim, vocab)),
        }
        return {"params": params, "opt": _OPTIMIZER.init(params)}

    mesh = AbstractMesh((num_devices,), ("data",), axis_types=(AxisType.Auto,))

    def spec(leaf, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # Each device has all weights and moments, and a part of the batch.
    state = jax.tree.map(spec, jax.eval_shape(make))
    tokens = spec(jax.ShapeDtypeStruct((batch, length), jnp.int32), "data")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    return step, (state, tokens)


def main():
    environment.prepare(1)
    name = _TOPOLOGY.value
    num_devices = len(topology.devices(name))
    step, args = example(
        num_devices, _LAYERS.value, _DIM.value, _VOCAB.value, _BATCH.value, _LENGTH.value
    )
    found = xla_plan.search(step, args, name, progress=lambda line: print(line, flush=True))
    print(xla_plan.search_text(found))
    if _OUT.value:
        search.save(found, pathlib.Path(_OUT.value))


if __name__ == "__main__":
    cli.run("foreign_search", main)
