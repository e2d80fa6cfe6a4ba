"""A decoder's training step in plain JAX, for machines that have published their rates.

It imports nothing else of this project, and is planned like any other program
(xla_plan/plans/programs.py). So it also shows how to plan a model of your own: `sizes` has the
model and the settings of a step, `splits` the mesh and its axes' splits, `attention` the kernels,
`experts` the layers of a mixture, and `step` the training step.

B rows, T tokens per row, M model, H hidden, N heads, K heads of keys and values, D size of a head,
L layers, V vocabulary, E experts. A mesh has three axes: `data` copies the weights, as slices do;
`fsdp` splits the weights by M, and gathers a layer's weights for its computation; `tensor` splits
N, K, H, V, and the activations' M between products. `data` and `fsdp` split the rows. Experts are
gathered like other weights, or each device of `fsdp` keeps some of them, to which tokens travel.
"""
