"""A convolutional network, trained on images that are split over eight devices by their rows.

Each device holds 8 of the 64 rows of every image, and of all that is computed from it (appendix A.4
of the paper). The network is written for one device. Where a window reaches over the last row of a
device, XLA's partitioner fetches the rows that it needs from the neighbor.
"""

import lingvo_gshard as gshard

gshard.prepare(num_devices=8)  # Eight virtual devices on any CPU.

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

# The letters of dims: B images, X rows, Y columns, C channels.
B = 32
X = 64
Y = 64
STEPS = 60
RATE = 0.03
MOMENTUM = 0.9


# The images: a disk, a square or a cross somewhere, in noise. The network tells which it is.


def make_batch(seed):
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, B)
    radius = rng.uniform(8, 16, (B, 1, 1))
    x = np.arange(X)[None, :, None] - rng.uniform(16, X - 16, (B, 1, 1))
    y = np.arange(Y)[None, None, :] - rng.uniform(16, Y - 16, (B, 1, 1))

    farther = np.maximum(abs(x), abs(y))
    nearer = np.minimum(abs(x), abs(y))
    disk = np.hypot(x, y) < radius
    square = farther < 0.9 * radius
    cross = (farther < radius) & (nearer < 0.3 * radius)

    shape_BXY = np.choose(kind[:, None, None], [disk, square, cross])
    pixels_BXY = shape_BXY + 0.1 * rng.standard_normal((B, X, Y))
    return gshard.NestedMap(
        pixels=pixels_BXY[..., None].astype("float32"), kind=kind.astype("int32")
    )


# The network, as for one device.


def logits(weights, pixels_BXYC):
    h = tf.nn.relu(tf.nn.conv2d(pixels_BXYC, weights.first, 2, "SAME"))
    h = gshard.max_pool(h, (3, 3), (2, 2), "SAME")  # As tf.nn.max_pool2d; see its docstring.
    h = tf.nn.relu(tf.nn.conv2d(h, weights.second, 1, "SAME"))
    h = gshard.max_pool(h, (3, 3), (2, 2), "SAME")
    return tf.reduce_max(h, [1, 2]) @ weights.last


def train_step(state, batch):
    weights = state.weights.Flatten()
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scores = logits(state.weights, batch.pixels)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.kind, scores)
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, weights)

    pairs = zip(state.velocities.Flatten(), gradients, strict=True)
    velocities = [MOMENTUM * velocity + gradient for velocity, gradient in pairs]
    pairs = zip(weights, velocities, strict=True)
    moved = [weight - RATE * velocity for weight, velocity in pairs]

    is_right = tf.argmax(scores, 1, output_type=tf.int32) == batch.kind
    return gshard.NestedMap(
        state=gshard.NestedMap(
            weights=state.weights.Pack(moved), velocities=state.velocities.Pack(velocities)
        ),
        loss=loss,
        accuracy=tf.reduce_mean(tf.cast(is_right, tf.float32)),
    )


# What it is called with. Weights have no letters, since they are whole on every device.

kernels = gshard.NestedMap(
    first=gshard.TensorSpec((5, 5, 1, 16), "float32", "____"),
    second=gshard.TensorSpec((5, 5, 16, 32), "float32", "____"),
    last=gshard.TensorSpec((32, 3), "float32", "__"),
)
images = gshard.NestedMap(
    pixels=gshard.TensorSpec((B, X, Y, 1), "float32", "BXYC"),
    kind=gshard.TensorSpec((B,), "int32", "B"),
)
step = gshard.AnnotatedFn(
    name="train_step",
    fn=train_step,
    arg_names=("state", "batch"),
    args=(gshard.NestedMap(weights=kernels, velocities=kernels), images),
    donate=("state",),
)


def train(num_devices):
    """Returns the compiled step, and the loss and accuracy of each step."""
    # The one line that says what is split. {"B": "d"} would split by images, {"Y": "d"} by columns.
    table = gshard.Partitioning.from_dict(gshard.Mesh.flat(num_devices), {"X": "d"})
    run = gshard.compile_program(gshard.export(step, table))

    rng = np.random.default_rng(0)
    weights = gshard.NestedMap()
    for name, spec in kernels.items():
        fan_in = np.prod(spec.shape[:-1])
        values = rng.standard_normal(spec.shape) * np.sqrt(2 / fan_in)
        weights[name] = values.astype("float32")
    state = gshard.NestedMap(weights=weights, velocities=weights.Transform(np.zeros_like))

    history = []
    for seed in range(STEPS):
        result = run(state, make_batch(seed))
        state = result.state
        history.append((float(result.loss), float(result.accuracy)))
    return run, history


split_run, split_history = train(num_devices=8)
_, whole_history = train(num_devices=1)

print(split_run.report().table())
print("step   loss on 8 devices   loss on 1   accuracy")
for number in [*range(0, STEPS, 10), STEPS - 1]:
    split_loss, accuracy = split_history[number]
    whole_loss, _ = whole_history[number]
    print(f"{number:4}   {split_loss:17.5f}   {whole_loss:9.5f}   {accuracy:8.2f}")

np.testing.assert_allclose(split_history, whole_history, rtol=1e-2, atol=1e-3)
