# Every target sets up what it needs.
PY := .venv/bin/python
# A folder of {train,dev,test}/<lang>-<lang>.tsv[.gz]; by default constructed languages.
CORPUS ?=
DEMO := out/$(if $(CORPUS),demo-$(notdir $(abspath $(CORPUS))),demo)
DEMO_CORPUS := $(if $(CORPUS),$(CORPUS),$(DEMO)/corpus)
DEMO_MODEL := toy.MoE8E4L
# Of the constructed languages; a real corpus gets data_prep's own sizes.
DEMO_VOCABULARIES := $(if $(CORPUS),,--source_vocab_size=8000 --target_vocab_size=2000)
DEMO_TRAINER = $(PY) -m lingvo_gshard.trainer --model=$(DEMO_MODEL) --data_dir=$(DEMO)/data \
	--logdir=$(DEMO)/run --num_partitions=4 --set=decode.max_sentences=100

.PHONY: setup setup-tpu setup-chromium demo test test-slow bazel-test wheel-test check bench clean-demo
# Of those that bazel-test runs: one of each kind.
BAZEL_TESTS := //tests:core/hyperparams_test //tests:sharding/mesh_test //tests:layers/gating_test \
	//tests:params/experiments_test //tests:layering_test //tests:tools/disturbed_run_test

setup: .venv/ready

.venv/ready: requirements.txt requirements-serve.txt requirements-dev.txt constraints.txt tools/setup.sh
	tools/setup.sh

# To compile for TPU topologies without one; nothing else needs it.
setup-tpu: setup
	$(PY) -m pip install --quiet -r requirements-tpu.txt -c constraints.txt

# The tests of the server's page run in it.
setup-chromium:
	tools/setup_chromium.sh

test: setup setup-chromium
	$(PY) -m pytest -q -n 2

test-slow: setup
	$(PY) -m pytest -q -n 2 -m slow

# All of them: `bazel test --config=offline //...` after it.
bazel-test: setup
	tools/setup_bazel.sh
	PATH=$(CURDIR)/.venv/bin:$$PATH bazel test --config=offline $(BAZEL_TESTS)

wheel-test: setup
	tools/test_wheel.sh

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The peer of bench.step, in an environment of its own.
.venv-torch/ready: bench/torch_peer/requirements.txt | setup
	.venv/bin/python -m venv .venv-torch
	.venv-torch/bin/pip install --quiet -r $<
	touch $@

bench: setup .venv-torch/ready
	$(PY) -m bench.step
	$(PY) -m bench.moe_layer
	$(PY) -m bench.loop
	$(PY) -m bench.decode
	$(PY) -m bench.data_prep
	$(PY) -m bench.data_prep_memory --set=max_vocab_sentences=30000
	$(PY) -m bench.input

# Interrupted, it goes on where it was; `make clean-demo` starts afresh.
demo: $(DEMO)/data/manifest.json
	$(DEMO_TRAINER) --mode=train_and_eval
	$(DEMO_TRAINER) --mode=decode
	@echo "Pictures: $(DEMO)/run/decode_test/bleu.png and $(DEMO)/run/expert_load.png"

$(DEMO)/data/manifest.json: | setup $(if $(CORPUS),,$(DEMO)/corpus/complete)
	$(PY) -m data_prep.build --input=$(DEMO_CORPUS) --out=$(DEMO)/data $(DEMO_VOCABULARIES)

$(DEMO)/corpus/complete: | setup
	$(PY) -m data_prep.constructed --out=$(DEMO)/corpus
	touch $@

clean-demo:
	rm -rf $(DEMO)
