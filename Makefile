# Every target first sets up what it needs.
PY := .venv/bin/python
# The corpus of the demo: a folder of {train,dev,test}/<lang>-en.tsv[.gz], or of such files alone.
# By default it is generated, in constructed languages.
CORPUS ?=
# Names of targets have no spaces, whatever the corpus is called: its path, with - for all but letters.
DEMO_NAME := $(if $(CORPUS),$(shell realpath -m -- '$(CORPUS)' | LC_ALL=C tr -c 'A-Za-z0-9._\n' '-'))
DEMO := out/demo$(DEMO_NAME)
DEMO_CORPUS := $(if $(CORPUS),$(CORPUS),$(DEMO)/corpus)
DEMO_MODEL := toy.MoE8E4L
# Sizes for the constructed languages; another corpus gets data_prep's defaults.
DEMO_VOCABULARIES := $(if $(CORPUS),,--source_vocab_size=8000 --target_vocab_size=2000)
# More devices than cores slow each other down.
DEMO_DEVICES := $(shell if [ $$(nproc) -lt 4 ]; then echo 2; else echo 4; fi)
DEMO_TRAINER = $(PY) -m lingvo_gshard.trainer --model=$(DEMO_MODEL) --data_dir=$(DEMO)/data \
	--logdir=$(DEMO)/run --platform=cpu --num_partitions=$(DEMO_DEVICES) \
	--set=decode.max_sentences=100

# Tests that run at a time. A compiler may take 5 GiB.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

.PHONY: setup setup-tpu setup-cuda12 setup-cuda13 setup-plan-gpu setup-compilers setup-chromium demo test test-oldest test-slow test-exhaustive bazel-test wheel-test wheel-test-beside check docs bench clean-demo

setup: .venv/ready

.venv/ready: $(wildcard requirements/*.txt constraints/*.txt) tools/setup.sh
	tools/setup.sh

# Needed to compute on TPUs, and to compile for TPU topologies without one.
setup-tpu: setup
	$(PY) -m pip install --quiet -r requirements/tpu.txt -c .venv/constraints.txt

# Needed to compute on NVIDIA GPUs, by the CUDA version of their driver.
setup-cuda12 setup-cuda13: setup-%: setup
	$(PY) -m pip install --quiet -r requirements/$*.txt -c .venv/constraints.txt

# Needed only to compile for GPU topologies without a GPU.
setup-plan-gpu: setup
	$(PY) -m pip install --quiet -r requirements/plan-gpu.txt -c .venv/constraints.txt

# Both, by one call of pip, for the slow tests.
setup-compilers: setup
	$(PY) -m pip install --quiet -r requirements/tpu.txt -r requirements/plan-gpu.txt -c .venv/constraints.txt

# The tests of the server's page run in Chromium.
setup-chromium:
	tools/setup_chromium.sh

test: setup setup-chromium
	$(PY) -m pytest -q -n $(JOBS)

# After .venv, since both may need apt, which serves one at a time.
.venv-oldest/ready: $(wildcard requirements/*.txt constraints/*.txt) tools/setup.sh | setup
	VERSIONS=3.11 VENV=.venv-oldest tools/setup.sh

# Tests on the oldest Python that is supported. It can break syntax, the standard library, and older
# versions of JAX and TensorFlow. So a test imports every module, and these folders read and write
# files, and trace, annotate, repair, compile and run programs; the layers and models of the other
# folders reach JAX and TensorFlow by the same interfaces.
OLDEST_TESTS ?= $(addprefix tests/,api checkpoints core data_prep files input serving sharding spmd \
	xla_spmd cli_test.py gshard_test.py imports_test.py registry_test.py trainer_test.py)
test-oldest: .venv-oldest/ready setup-chromium
	.venv-oldest/bin/python -m pytest -q -n $(JOBS) $(OLDEST_TESTS)

# Runs those tests of each file that have marks. Each file has a process of its own, since compilers
# keep memory. Large files come first, as most of them take long, so that no core waits for the last
# one. Pytest's status is 5 where a file has no such test.
EACH_FILE = xargs ls -S | xargs -P $(JOBS) -n 1 sh -c '$(PY) -m pytest -q -m "$$0" "$$1" || [ $$? -eq 5 ]'

# The folders and files whose slow tests run.
SLOW_TESTS ?= tests

# Without the compilers some slow tests would be skipped.
test-slow: setup-compilers
	grep -rl --include='*_test.py' 'mark.slow' $(SLOW_TESTS) | $(EACH_FILE) 'slow and not exhaustive'

# What slow tests leave out: the same things on fewer devices, by other tables, for other machines.
test-exhaustive: setup-compilers
	grep -rlE --include='*_test.py' 'mark.exhaustive|exhaustive.only' tests | $(EACH_FILE) exhaustive

# All quick tests, a process for each folder, and each room of the library where no other is seen.
BAZEL_TARGETS ?= //...
bazel-test: setup
	tools/setup_bazel.sh
	PATH="$(CURDIR)/.venv/bin:$$PATH" bazel test --config=offline $(BAZEL_TARGETS)

wheel-test: setup
	tools/test_wheel.sh

wheel-test-beside: setup
	tools/test_wheel.sh beside

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m tools.check_prose

# The environments of the benchmarks' peers.
.venv-torch/ready .venv-ctranslate2/ready: .venv-%/ready: bench/%_peer/requirements.txt | setup
	.venv/bin/python -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet -r $<
	touch $@

# The documentation site, in site/: docs/ and the docstrings. Every warning is an error.
.venv-docs/ready: requirements/docs.txt | setup
	.venv/bin/python -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -r $<
	touch $@

docs: .venv-docs/ready
	.venv-docs/bin/python -m mkdocs build --quiet

bench: setup .venv-torch/ready .venv-ctranslate2/ready
	$(PY) -m bench.step
	$(PY) -m bench.moe_layer
	$(PY) -m bench.loop
	$(PY) -m bench.decode
	$(PY) -m bench.decode --model=toy.Dense4L
	$(PY) -m bench.data_prep
	$(PY) -m bench.data_prep_memory --set=max_vocab_sentences=30000
	$(PY) -m bench.data_prep_tasks
	$(PY) -m bench.input

# After an interruption the demo continues; `make clean-demo` deletes it.
demo: $(DEMO)/data/manifest.json
	$(DEMO_TRAINER) --mode=train_and_eval
	$(DEMO_TRAINER) --mode=decode
	@echo "Pictures: $(DEMO)/run/decode_test/bleu.png and $(DEMO)/run/expert_load.png"
	@echo "Three sentences of test, and their translations:"
	@source=$$(ls $(DEMO)/run/decode_test/*.source.txt | head -n 1); \
	paste -d '\n' "$$source" "$${source%.source.txt}.txt" | head -n 6 | sed 'n; s/^/    /'

$(DEMO)/data/manifest.json: | setup $(if $(CORPUS),,$(DEMO)/corpus/.complete)
	$(PY) -m data_prep.build '--input=$(DEMO_CORPUS)' --out=$(DEMO)/data $(DEMO_VOCABULARIES)

$(DEMO)/corpus/.complete: | setup
	$(PY) -m data_prep.constructed --out=$(DEMO)/corpus
	touch $@

clean-demo:
	rm -rf $(DEMO)
