#!/usr/bin/env bash
# Builds the wheel, installs it in a fresh environment, and uses it from another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
constraints=$PWD/constraints.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

rm -rf build # Files from an earlier build would get into the wheel.
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
"$python" -m venv "$folder/venv"
wheels=("$folder"/*.whl)
"$folder/venv/bin/python" -m pip install --quiet "${wheels[0]}[serve]" -c "$constraints"
cd "$folder"
bin=$folder/venv/bin
for command in trainer translate plan compare; do
  "$bin/$command" --help | grep -i "usage" >/dev/null
done
"$bin/python" -m data_prep.constructed --out=corpus
"$bin/python" -m data_prep.build --input=corpus --out=data --source_vocab_size=2000 \
  --target_vocab_size=1000
"$bin/trainer" --model=toy.MoE8E4L --data_dir=data --logdir=run --mode=train \
  --platform=cpu --num_partitions=2 --set=train.max_steps=2 --set=train.iterations_per_loop=1
gunzip -c corpus/test/qta-en.tsv.gz | cut -f 1 | head -n 2 |
  "$bin/translate" --logdir=run --platform=cpu --num_partitions=2
