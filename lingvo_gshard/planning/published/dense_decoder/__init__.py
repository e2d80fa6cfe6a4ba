"""A dense decoder's training step in plain JAX, for machines that have published their rates.

It imports nothing else of this project, and is planned as anybody's program is (any_program.py). So
it also shows how to plan a model of your own: `sizes` has the model and how a step is run, `splits`
the mesh and what its axes split, `attention` the kernels, and `step` the training step.

B rows, T tokens of a row, M model, H hidden, N heads, K heads of keys and values, D of a head, L
layers, V vocabulary. A mesh has three axes: `data` copies the weights, as slices do; `fsdp` splits
the weights by M, and gathers a layer's when it computes; `tensor` splits N, K, H, V, and the
activations' M between products. `data` and `fsdp` split the rows.
"""
