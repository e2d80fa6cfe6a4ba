#!/usr/bin/env bash
# Builds the wheel, installs it, and uses it from another folder.
#   tools/test_wheel.sh         the planner alone, and the library with an extra
#   tools/test_wheel.sh beside  beside pandas, transformers and torch, whose versions pip chooses
#                               together with ours; torch takes gigabytes
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

rm -rf build # Files from an earlier build would get into the wheel.
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
rm -rf xla_plan/build
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" ./xla_plan
rm -rf xla_plan/build xla_plan/*.egg-info
cd "$folder"

# Uses the wheel that is installed in an environment: from a corpus to a translation.
use() {
  local bin=$1/bin out=$1/out
  mkdir "$out"
  "$bin/gshard" prepare --help | grep "Prepares text" >/dev/null
  for command in trainer translate plan compare; do
    test ! -e "$bin/$command" # Names that other packages have, too.
  done
  "$bin/python" -m data_prep.constructed --out="$out/corpus"
  "$bin/gshard" prepare --input="$out/corpus" --out="$out/data" --source_vocab_size=2000 \
    --target_vocab_size=1000
  "$bin/gshard" train --model=toy.MoE8E4L --data_dir="$out/data" --logdir="$out/run" --mode=train \
    --platform=cpu --num_partitions=2 --set=train.max_steps=2 --set=train.iterations_per_loop=1
  gunzip -c "$out/corpus/test/qta-en.tsv.gz" | cut -f 1 | sed -n 1,2p |
    "$bin/gshard" translate --logdir="$out/run" --platform=cpu --num_partitions=2
  "$bin/python" -m pip check
}

if [ "${1:-}" = beside ]; then
  echo "Beside pandas, transformers and torch:"
  "$python" -m venv shared
  shared/bin/python -m pip install --quiet torch==2.13.0 pandas transformers
  shared/bin/python -m pip install --quiet "$(ls lingvo_gshard-*.whl)[serve,tfds]"
  shared/bin/python -c 'import pandas, torch, transformers'
  use "$folder/shared"
  exit
fi

echo "The planner alone, with the compiler for TPUs, plans a program of JAX:"
"$python" -m venv light
light/bin/python -m pip install --quiet "$(ls xla_plan-*.whl)[tpu]"
light/bin/python -m pip check
for package in tensorflow grain orbax sentencepiece matplotlib torch; do
  if light/bin/python -c "import $package" 2>/dev/null; then
    echo "$package is installed, too." >&2
    exit 1
  fi
done

cat >step.py <<'END'
import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec(shape, *axes):
    return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def step(weights, batch):
    gradients = jax.grad(lambda w: ((batch @ w["up"] @ w["down"]) ** 2).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


weights = {"up": spec((256, 1024), None, "model"), "down": spec((1024, 256), "model", None)}
exported = jax.export.export(jax.jit(step, donate_argnums=0), platforms=["tpu"])
open("step.export", "wb").write(exported(weights, spec((512, 256), "data")).serialize())
END
JAX_PLATFORMS=cpu light/bin/python step.py
light/bin/xla_plan program --program=step.export --topology=v5e:2x4 --out=light/plan --role=weights=weights |
  tee plan.txt
grep "^fits; a call needs" plan.txt >/dev/null
grep "all-reduce" plan.txt >/dev/null
echo "$(du -sm light | cut -f 1) MB in all."

echo "The library in a fresh environment, with the extra serve:"
"$python" -m venv fresh
fresh/bin/python -m pip install --quiet "$(ls lingvo_gshard-*.whl)[serve]"
use "$folder/fresh"
