"""Training steps that know nothing of this project: plain JAX, Flax and Equinox.

Each is (step, args, donated): a function of args, whose leaves are ShapeDtypeStructs on an abstract
mesh of data:2,model:4. The sizes differ.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

# The compiler chooses the shardings of the tensors between arguments and results.
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
BATCH = 16
LENGTH = 12
DIM = 32
HEADS = 8
HIDDEN = 64
LAYERS = 3


def spec(shape, *axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*axes)))


def _block(x, weights):
    with jax.named_scope("attn"):
        q, k, v = (jnp.einsum("BLM,MHD->BLHD", x, weights[name]) for name in "qkv")
        probs = jax.nn.softmax(jnp.einsum("BLHD,BmHD->BHLm", q, k))
        attended = jnp.einsum("BHLm,BmHD->BLHD", probs, v)
        x = x + jnp.einsum("BLHD,HDM->BLM", attended, weights["o"])
    with jax.named_scope("mlp"):
        x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    return x, None


def _loss(params, batch):
    x, _ = jax.lax.scan(jax.checkpoint(_block), batch, params)
    return jnp.mean(x**2)


def _step(state, batch):
    loss, gradients = jax.value_and_grad(_loss)(state["params"], batch)
    with jax.named_scope("momentum"):
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, loss


def plain():
    """A stack of attention and MLP, scanned and recomputed, trained with momentum."""
    heads = spec((LAYERS, DIM, HEADS, DIM // HEADS), None, "data", "model")
    params = {
        "q": heads,
        "k": heads,
        "v": heads,
        "o": spec((LAYERS, HEADS, DIM // HEADS, DIM), None, "model", None, "data"),
        "up": spec((LAYERS, DIM, HIDDEN), None, "data", "model"),
        "down": spec((LAYERS, HIDDEN, DIM), None, "model", "data"),
    }
    state = {"params": params, "moments": params}
    return _jitted(_step, state), (state, spec((BATCH, LENGTH, DIM), "data"))


def _jitted(step, state):
    """Jits a step whose new state has the old one's memory and shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def flax():
    """A Flax (linen) MLP with its own names of axes, trained by Optax' Adam."""
    import flax.linen as nn
    import optax

    def dense(size, *names):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), names)
        return nn.Dense(size, kernel_init=kernel, use_bias=False)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return dense(DIM, "model", "data")(nn.gelu(dense(HIDDEN, "data", "model")(x)))

    model = Model()
    optimizer = optax.adam(1e-3)

    def make():
        params = model.init(jax.random.key(0), jnp.zeros((1, DIM)))["params"]
        return {"params": params, "opt": optimizer.init(params)}

    boxed = jax.eval_shape(make)
    axes = nn.get_partition_spec(boxed)
    state = jax.tree.map(
        lambda leaf, axes: spec(leaf.shape, *axes, dtype=leaf.dtype), nn.unbox(boxed), axes
    )

    def step(state, batch):
        def loss(params):
            return jnp.mean((model.apply({"params": params}, batch) - batch) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return _jitted(step, state), (state, spec((BATCH, DIM), "data"))


def equinox():
    """An Equinox MLP, whose weights [out, in] are split by their shapes, trained by SGD."""
    import equinox

    make = lambda: equinox.nn.MLP(DIM, DIM, HIDDEN, depth=2, key=jax.random.key(0))  # noqa: E731
    arrays, rest = equinox.partition(equinox.filter_eval_shape(make), _is_array)

    def split(leaf):
        axes = ("model", "data") if len(leaf.shape) == 2 else ("model",)
        return spec(leaf.shape, *axes, dtype=leaf.dtype)

    state = jax.tree.map(split, arrays)

    def step(state, batch):
        def loss(arrays):
            model = equinox.combine(arrays, rest)
            return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return _jitted(step, state), (state, spec((BATCH, DIM), "data"))


def _is_array(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _keras_model():
    import tensorflow as tf

    layers = [tf.keras.layers.Dense(HIDDEN, activation="gelu"), tf.keras.layers.Dense(DIM)]
    model = tf.keras.Sequential(layers)
    model.build((None, DIM))
    return model


def keras():
    """A Keras MLP in TensorFlow, called by JAX, which splits its arguments; trained by SGD."""
    import tensorflow as tf
    from jax.experimental import jax2tf

    model = _keras_model()
    state = []
    for weight in model.trainable_variables:
        axes = ("data", "model") if len(weight.shape) == 2 else ("model",)
        state.append(spec(weight.shape, *axes))

    def update(weights, batch):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, _ = model.stateless_call(weights, [], batch)
            loss = tf.reduce_mean((outputs - batch) ** 2)
        gradients = tape.gradient(loss, weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    step = jax2tf.call_tf(tf.function(update, autograph=False), has_side_effects=False)
    return _jitted(step, state), (state, spec((BATCH, DIM), "data"))


def keras_ir(stage):
    """Returns TensorFlow's lowered form of a step of that model, which updates its variables."""
    import tensorflow as tf

    model = _keras_model()

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch) - batch) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    lowered = tf.function(step, jit_compile=True, autograph=False)
    ir = lowered.experimental_get_compiler_ir(tf.zeros((BATCH, DIM)))(stage=stage)
    return ir if isinstance(ir, bytes) else ir.encode()
