"""A dense decoder's training step in plain JAX, for machines that have published their rates.

It imports nothing of this project, and is planned as anybody's program is (any_program.py). So it
also shows how to plan a model of your own.

B rows, T tokens of a row, M model, H hidden, N heads, K heads of keys and values, D of a head, L
layers, V vocabulary. A mesh has three axes: `data` copies the weights, as slices do; `fsdp` splits
the weights by M, and gathers a layer's when it computes; `tensor` splits N, K, H, V, and the
activations' M between products. `data` and `fsdp` split the rows.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ACTIVATIONS = ("relu", "gelu", "silu_gated")
POSITIONS = ("rope", "learned", "none")
# What the backward pass finds of a layer: what a run names, the results of products with weights,
# or those of attention's kernel, too. It always repeats what is computed element by element, which
# costs no more than to read it would.
REMAT = ("full", "minimal", "none")
# The names of a layer's results.
RESULTS = ("input", "query", "key", "value", "attention", "output", "up", "gate", "down")
ATTENTION = ("splash", "flash", "whole")

# JAX's kernel for GPUs calls itself when it is differentiated, and so is a function with a gradient
# of its own, which nothing else of a layer is by then.
_KERNELS = ("pallas_call", "custom_vjp_call")

_ROWS = ("data", "fsdp")
_AXIS_OF_LETTER = {"M": "fsdp", "N": "tensor", "K": "tensor", "H": "tensor", "V": "tensor"}

# AdamW's numbers, which change no time.
_LEARNING_RATE = 1e-3
_BETA1 = 0.9
_BETA2 = 0.95
_EPSILON = 1e-8
_WEIGHT_DECAY = 0.1

_SPLASH_BLOCK = 512
_FLASH_BLOCK = 128
_ROPE_BASE = 10_000.0
_NORM_EPSILON = 1e-5
_GPU_KINDS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3"}

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a decoder. Raises ValueError for those that do not go together."""

    layers: int
    M: int
    H: int
    N: int
    D: int
    vocab: int
    K: int = 0  # As many as N, unless it is given.
    activation: str = "relu"
    positions: str = "rope"
    max_length: int = 0  # Of learned positions.
    tied: bool = True  # Whether the softmax has the embedding's weights.
    biases: bool = False  # Of products and norms, which then subtract the mean.

    def __post_init__(self) -> None:
        if not self.K:
            object.__setattr__(self, "K", self.N)
        for name in ("layers", "M", "H", "N", "K", "D", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more.")
        if self.N % self.K:
            raise ValueError(f"K={self.K}: expected a divisor of N={self.N}.")
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("positions", self.positions, POSITIONS)
        if (self.max_length > 0) != (self.positions == "learned"):
            raise ValueError(f"max_length={self.max_length}: expected for learned positions alone.")

    @property
    def weights(self) -> int:
        """The number of all weights."""
        return sum(math.prod(shape) for shape in jax.tree.leaves(_shapes(self), is_leaf=_is_tuple))

    @property
    def norms(self) -> int:
        """The number of weights that are scales of norms, which some do not count."""
        return (2 * self.layers + 1) * self.M


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How a step of a decoder is run. Raises ValueError for what does not go together."""

    rows: int  # Of a batch, on all devices.
    length: int  # In tokens.
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    microbatches: int = 1
    remat: str = "full"
    kept: tuple[str, ...] = ()  # Of RESULTS, beside remat="full".
    attention: str = "whole"  # Pallas's splash on TPUs, its flash attention on GPUs, or logits.
    dtype: str = "bfloat16"  # Of activations; weights and slots are float32.

    def __post_init__(self) -> None:
        _check_choice("remat", self.remat, REMAT)
        _check_choice("attention", self.attention, ATTENTION)
        for name in self.kept:
            _check_choice("kept", name, RESULTS)
        if self.kept and self.remat != "full":
            raise ValueError(f"remat={self.remat!r}: expected full beside kept results.")
        parts = self.data * self.fsdp * self.microbatches
        if self.rows < 1 or self.rows % parts:
            raise ValueError(
                f"rows={self.rows}: expected a multiple of {parts}, data * fsdp * microbatches."
            )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def rows_at_once(self) -> int:
        """The rows of a microbatch on one device."""
        return self.rows // (self.data * self.fsdp * self.microbatches)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}.")


def abstract_mesh(run: Run, gpu: str | None = None) -> AbstractMesh:
    """Returns the mesh of a run on devices that nobody has; a GPU's kernels need to know which."""
    device = None
    if gpu is not None:
        device = AbstractDevice(_GPU_KINDS[gpu], num_cores=None, platform="cuda")
    sizes = (run.data, run.fsdp, run.tensor)
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=device)


def tracing(mesh: AbstractMesh) -> AbstractContextManager[Any]:
    """Returns the context in which a step is traced: the kernels for GPUs ask for the devices."""
    return jax.sharding.use_abstract_mesh(mesh)


def arguments(model: Model, run: Run, mesh: Mesh | AbstractMesh) -> tuple[Tree, Any]:
    """Returns the types and shardings of a step's state and tokens.

    The tokens are [microbatches, rows of each, T + 1], whose last tokens are labels alone.
    """
    weights = {}
    for name, letters in _letters(model).items():
        shape = tuple(_size(model, letter) for letter in letters)
        sharding = NamedSharding(mesh, _spec(letters))
        weights[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = {"params": weights, "slots": {"mean": weights, "square": weights}, "step": step}
    token_shape = (run.microbatches, run.rows // run.microbatches, run.length + 1)
    sharding = NamedSharding(mesh, PartitionSpec(None, _ROWS))
    return state, jax.ShapeDtypeStruct(token_shape, jnp.int32, sharding=sharding)


def initial_weights(model: Model, seed: int) -> Tree:
    """Returns random weights of every name, as NumPy-able arrays on the default device."""
    weights = {}
    key = jax.random.key(seed)
    for index, (name, letters) in enumerate(_letters(model).items()):
        shape = tuple(_size(model, letter) for letter in letters)
        noise = jax.random.normal(jax.random.fold_in(key, index), shape)
        # Norms begin near one; the scale of the rest matters to no test and no time.
        weights[name] = 1.0 + 0.1 * noise if name.endswith("norm") else 0.1 * noise
    return weights


def train_step(model: Model, run: Run, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the jitted step(state, tokens) -> (state, loss), which takes over the state."""

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        gradient_of = jax.value_and_grad(functools.partial(_loss, model, run, mesh))
        params = state["params"]
        if run.microbatches == 1:
            loss, gradients = gradient_of(params, tokens[0])
        else:
            loss, gradients = _accumulated(gradient_of, params, tokens)
        return _adam_w(state, gradients), loss

    return jax.jit(step, donate_argnums=0)


def kernel_flops(model: Model, run: Run) -> list[str]:
    """Returns `NAME=FLOPS` of one run of each attention kernel on a device.

    Splash attention computes the blocks that the causal mask leaves: 2 products forward, 3 for the
    queries' gradient and 4 for those of keys and values. For flash attention on GPUs these are the
    products of the published kernels (Dao, 2023), 2 forward and 5 backward, of half of all pairs;
    the backward kernel that is compiled here has 7.
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
    """Returns the pairs of tokens in blocks that are not all masked."""
    blocks = -(-length // block)
    return blocks * (blocks + 1) // 2 * block**2


# --- Weights ---


def _letters(model: Model) -> dict[str, str]:
    """Returns the dims of every weight by name; those that begin with L are layers' own."""
    letters = {
        "embedding": "VM",
        "attention_norm": "LM",
        "query": "LMND",
        "key": "LMKD",
        "value": "LMKD",
        "output": "LNDM",
        "mlp_norm": "LM",
        "up": "LMH",
        "down": "LHM",
        "final_norm": "M",
    }
    if model.activation == "silu_gated":
        letters["gate"] = "LMH"
    if model.positions == "learned":
        letters["positions"] = "TM"
    if not model.tied:
        letters["head"] = "VM"
    if model.biases:
        letters |= {
            "attention_norm_bias": "LM",
            "query_bias": "LND",
            "key_bias": "LKD",
            "value_bias": "LKD",
            "output_bias": "LM",
            "mlp_norm_bias": "LM",
            "up_bias": "LH",
            "down_bias": "LM",
            "final_norm_bias": "M",
        }
    return letters


def _size(model: Model, letter: str) -> int:
    sizes = {"L": model.layers, "T": model.max_length, "V": model.vocab}
    return sizes[letter] if letter in sizes else getattr(model, letter)


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    letters = _letters(model)
    return {name: tuple(_size(model, letter) for letter in letters[name]) for name in letters}


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple)


def _spec(letters: str) -> PartitionSpec:
    return PartitionSpec(*(_AXIS_OF_LETTER.get(letter) for letter in letters))


# --- The step ---


def _accumulated(gradient_of: Callable, params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
    """Returns the mean loss and gradients of microbatches, one after the other."""

    def add(sums: Any, microbatch: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient_of(params, microbatch)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    sums, _ = jax.lax.scan(add, zeros, tokens)
    loss, gradients = jax.tree.map(lambda total: total / len(tokens), sums)
    return loss, gradients


def _adam_w(state: Tree, gradients: Tree) -> Tree:
    """Returns the state after one step of AdamW (Loshchilov and Hutter, 2019)."""
    step = state["step"] + 1
    slots = state["slots"]
    scale1 = 1 / (1 - _BETA1**step)
    scale2 = 1 / (1 - _BETA2**step)

    params = {}
    means = {}
    squares = {}
    for name, gradient in gradients.items():
        means[name] = _BETA1 * slots["mean"][name] + (1 - _BETA1) * gradient
        squares[name] = _BETA2 * slots["square"][name] + (1 - _BETA2) * gradient**2
        update = scale1 * means[name] / (jnp.sqrt(scale2 * squares[name]) + _EPSILON)
        weight = state["params"][name]
        params[name] = weight - _LEARNING_RATE * (update + _WEIGHT_DECAY * weight)
    return {"params": params, "slots": {"mean": means, "square": squares}, "step": step}


def _loss(
    model: Model, run: Run, mesh: Mesh | AbstractMesh, params: Tree, tokens: jax.Array
) -> Any:
    """Returns the mean cross entropy of tokens [B, T + 1]."""
    letters = _letters(model)
    own = {name: params[name] for name in params if letters[name].startswith("L")}
    table = _gathered(mesh, letters["embedding"], run.dtype, params["embedding"])

    x = table[tokens[:, :-1]]
    if model.positions == "learned":
        positions = _gathered(mesh, letters["positions"], run.dtype, params["positions"])
        x = x + positions[: run.length]
    x = _between(mesh, x)

    block = jax.checkpoint(functools.partial(_block, model, run, mesh), policy=_is_kept(run))
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, own)

    with jax.named_scope("softmax"):
        x = _norm(x, params["final_norm"], params.get("final_norm_bias"))
        head = table
        if not model.tied:
            head = _gathered(mesh, letters["head"], run.dtype, params["head"])
        # In memory logits have the activations' dtype, as in MaxText and with PyTorch's autocast.
        logits = jnp.einsum("BTM,VM->BTV", x, head).astype(jnp.float32)
        is_label = jnp.arange(model.vocab) == tokens[:, 1:, None]
        label_logits = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits)


def _is_kept(run: Run) -> Callable[..., bool]:
    """Returns the policy that tells which operations' results the backward pass finds."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def policy(primitive: Any, *args: Any, **parameters: Any) -> bool:
        is_kernel = primitive.name in _KERNELS
        match run.remat:
            case "full" if is_kernel:
                return "attention" in run.kept
            case "full":
                return primitive.name == "name" and parameters["name"] in run.kept
            case "minimal":
                return is_product(primitive, *args, **parameters)
        return is_kernel or is_product(primitive, *args, **parameters)

    return policy


def _block(model: Model, run: Run, mesh: Mesh | AbstractMesh, x: jax.Array, own: Tree) -> jax.Array:
    """Returns the activations [B, T, M] after one layer with its `own` weights."""
    letters = _letters(model)

    def weight(name: str) -> jax.Array:
        return _gathered(mesh, letters[name][1:], run.dtype, own[name])

    def project(equation: str, inputs: jax.Array, name: str) -> jax.Array:
        result = jnp.einsum(equation, inputs, weight(name))
        bias = own.get(f"{name}_bias")
        if bias is not None:
            result = result + bias.astype(run.dtype)
        return checkpoint_name(result, name)

    x = checkpoint_name(x, "input")
    with jax.named_scope("attention"):
        y = _norm(x, own["attention_norm"], own.get("attention_norm_bias"))
        query = project("BTM,MND->BTND", y, "query")
        key = project("BTM,MKD->BTKD", y, "key")
        value = project("BTM,MKD->BTKD", y, "value")
        if model.positions == "rope":
            query = _rotated(query)
            key = _rotated(key)
        context = _attention(run, mesh, query, key, value)
        x = _between(mesh, x + project("BTND,NDM->BTM", context, "output"))

    with jax.named_scope("mlp"):
        y = _norm(x, own["mlp_norm"], own.get("mlp_norm_bias"))
        hidden = project("BTM,MH->BTH", y, "up")
        match model.activation:
            case "relu":
                hidden = jax.nn.relu(hidden)
            case "gelu":
                hidden = jax.nn.gelu(hidden)
            case "silu_gated":
                hidden = hidden * jax.nn.silu(project("BTM,MH->BTH", y, "gate"))
        return _between(mesh, x + project("BTH,HM->BTM", hidden, "down"))


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns RMSNorm of activations, or with a bias LayerNorm; computed in float32."""
    wide = x.astype(jnp.float32)
    if bias is not None:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide**2, axis=-1, keepdims=True)
    normed = scale * wide * jax.lax.rsqrt(variance + _NORM_EPSILON)
    if bias is not None:
        normed = normed + bias
    return normed.astype(x.dtype)


def _rotated(heads: jax.Array) -> jax.Array:
    """Returns queries or keys [B, T, N, D] turned by their positions (Su et al., 2021)."""
    length = heads.shape[1]
    half = heads.shape[-1] // 2
    rates = _ROPE_BASE ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None, None] * rates
    left, right = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned_left = left * jnp.cos(angles) - right * jnp.sin(angles)
    turned_right = right * jnp.cos(angles) + left * jnp.sin(angles)
    return jnp.concatenate([turned_left, turned_right], axis=-1).astype(heads.dtype)


# --- Attention ---


def _attention(
    run: Run, mesh: Mesh | AbstractMesh, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Returns causal attention of queries [B, T, N, D] to keys and values [B, T, K, D]."""
    query = query * query.shape[-1] ** -0.5
    attend = {"splash": _splash, "flash": _flash, "whole": _whole}[run.attention]
    if run.attention == "whole":
        return attend(query, key, value)

    # A kernel is called on each device with what lies there.
    spec = PartitionSpec(_ROWS, None, "tensor", None)
    attend = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )
    return attend(query, key, value)


def _whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention whose logits of all pairs are in memory, in float32."""
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
    """Attention by JAX's own kernel for GPUs, which has as many keys as queries."""
    with warnings.catch_warnings():
        # JAX points to copies of it elsewhere, which are not part of the package.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    key, value = _repeated(query, key, value)
    return attention.mha(query, key, value, None, sm_scale=1.0, causal=True)


def _repeated(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values with as many heads as queries, each for its group of them."""
    copies = query.shape[2] // key.shape[2]
    return jnp.repeat(key, copies, axis=2), jnp.repeat(value, copies, axis=2)


# --- Partitioning ---


def _between(mesh: Mesh | AbstractMesh, x: jax.Array) -> jax.Array:
    """Returns activations [B, T, M] split as they are between products."""
    sharding = NamedSharding(mesh, PartitionSpec(_ROWS, None, "tensor"))
    return jax.lax.with_sharding_constraint(x, sharding)


def _gathered(mesh: Mesh | AbstractMesh, letters: str, dtype: str, weight: jax.Array) -> jax.Array:
    """Returns a weight in the activations' dtype, whole along `fsdp`.

    Its gradient is split again: the sums over the rows' devices become ReduceScatters.
    """
    spec = _spec(letters)
    whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))

    def make_whole(weight: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, whole))

    gather = jax.custom_vjp(make_whole)

    def forward(weight: jax.Array) -> tuple[jax.Array, None]:
        return make_whole(weight), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, spec)),)

    gather.defvjp(forward, backward)
    narrow = weight.astype(dtype)
    return gather(jax.lax.with_sharding_constraint(narrow, NamedSharding(mesh, spec)))
