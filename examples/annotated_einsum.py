"""The dispatch of Algorithm 2: one einsum, one table, one all-to-all."""

import lingvo_gshard as gshard

gshard.prepare(num_devices=4)  # Four virtual devices on any CPU.

import tensorflow as tf  # noqa: E402


def dispatch(tokens):
    x_EGCM = tf.einsum("GSEC,GSM->EGCM", tokens.mask, tokens.x)  # Tokens to their experts.
    return gshard.NestedMap(x=x_EGCM)


mask = gshard.TensorSpec((8, 16, 8, 4), "float32", "GSEC")  # A letter for each dim.
x = gshard.TensorSpec((8, 16, 32), "float32", "GSM")
function = gshard.AnnotatedFn(
    name="dispatch",
    fn=dispatch,
    arg_names=("tokens",),
    args=(gshard.NestedMap(mask=mask, x=x),),
    result_dims={"x": "EGCM"},
)

# Groups and experts lie on the same devices: from groups to experts, tokens must change places.
table = gshard.Partitioning.from_dict(gshard.Mesh.flat(4), {"G": "d", "E": "d"})
run = gshard.compile_program(gshard.export(function, table))

print(gshard.describe(function, table).table())
print(run.report().table())
