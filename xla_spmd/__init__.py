"""Programs that XLA's SPMD partitioner partitions: annotations, repairs, and the compiled result.

Both doors stand on this package: lingvo_gshard, which trains, and xla_plan, which plans.
"""
