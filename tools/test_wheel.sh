#!/usr/bin/env bash
# Builds the wheel, installs it in two environments, and uses it from another folder: in a fresh one,
# and in one that holds pandas, transformers and torch, whose versions pip chooses together with ours.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
# The second environment is of the oldest Python after `make test-oldest`: both ends of the ranges.
oldest=$PWD/.venv-oldest/bin/python
if [ ! -e "$oldest" ]; then
  oldest=$python
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

rm -rf build # Files from an earlier build would get into the wheel.
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
wheels=("$folder"/*.whl)
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

echo "In a fresh environment, with the extra serve:"
"$python" -m venv fresh
fresh/bin/python -m pip install --quiet "${wheels[0]}[serve]"
use "$folder/fresh"

echo "Beside pandas, transformers and torch:"
"$oldest" -m venv shared
shared/bin/python -m pip install --quiet torch==2.13.0 pandas transformers
shared/bin/python -m pip install --quiet "${wheels[0]}[serve,tfds]"
shared/bin/python -c 'import pandas, torch, transformers'
use "$folder/shared"
