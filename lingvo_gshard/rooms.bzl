"""The import rule: the rooms of the library in order, and what each may import.

Each may import some of the rooms above it, the registry, which imports core alone, and the packages
below the library: xla_spmd and xla_plan. A new room needs a line. The values are those that Python
has, too: tests/layering_test.py reads this file.
"""

ROOMS = {
    "core": ["xla_spmd"],
    "files": ["xla_spmd"],
    "sharding": ["xla_spmd", "core"],
    "layers": ["core", "sharding"],
    "optim": ["core", "sharding"],
    "beam_search": ["core", "layers"],
    "spmd": ["xla_spmd", "core", "sharding"],
    "input": ["xla_spmd", "core", "files", "sharding"],
    "decoding": ["xla_spmd", "core", "files", "spmd", "input"],
    "serving": ["xla_spmd", "files", "input", "decoding"],
    "model": ["xla_spmd", "core", "sharding", "layers", "optim", "beam_search"],
    "checkpoints": ["xla_spmd", "core", "files", "sharding", "spmd"],
    "train": ["xla_spmd", "core", "sharding", "spmd", "checkpoints", "model"],
    "runs": [
        "xla_spmd",
        "core",
        "files",
        "sharding",
        "layers",
        "spmd",
        "input",
        "decoding",
        "model",
        "checkpoints",
        "train",
        "registry",
    ],
    "hugging_face": [
        "xla_spmd",
        "core",
        "files",
        "sharding",
        "layers",
        "beam_search",
        "input",
        "model",
        "checkpoints",
        "runs",
        "registry",
    ],
    "plans": [
        "xla_spmd",
        "xla_plan",
        "core",
        "sharding",
        "layers",
        "spmd",
        "model",
        "train",
        "runs",
        "registry",
    ],
    "evaluation": [
        "xla_spmd",
        "xla_plan",
        "core",
        "spmd",
        "input",
        "decoding",
        "model",
        "train",
        "runs",
        "plans",
    ],
    "api": [
        "xla_spmd",
        "xla_plan",
        "core",
        "spmd",
        "decoding",
        "train",
        "runs",
        "plans",
        "evaluation",
        "registry",
    ],
}

# The packages below the library, which know nothing of it, and what each may import.
PACKAGES = {
    "xla_spmd": [],
    "xla_plan": ["xla_spmd"],
}
