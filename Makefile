# Every target brings its own set-up: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$candidate -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$candidate; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
INSTALLED := .venv/.installed
# Processes that tests start would each compile the package again.
unexport PYTHONDONTWRITEBYTECODE
FAST_TESTS := tests/policy tests/docs tests/unit tests/hostile tests/versions

.PHONY: help venv gpu-packages check style types contracts fast-tests test $(PARTS) mutants torture fuzz fuzz-pickles fuzz-files demo demo-lr pictures bench gpu gpu-hosts gpu-wheels test-versions test-nanotron test-peers test-corpora format docs dist clean

help:
	@echo "make demo           train, change stage and ranks, resume; prints the bit-equality table"
	@echo "make demo-lr        resume with another learning rate; draws what each update uses in .demo/lr.png"
	@echo "make test           every test that needs no GPU; FIFTH=... a fifth of the slow cases of each file"
	@echo "make check          format, lint, types, import contracts, fast tests"
	@echo "make fuzz           hostile pickles and files: 100,000 cases, or FUZZ_CASES=..."
	@echo "make mutants        faults that are put into copies of the package: does each make a test fail?"
	@echo "make torture        every call on files, and to an object store, of conversions and loads fails once, in each way"
	@echo "make bench          every benchmark beside what it is compared with, and the tables of docs/benchmarks.md"
	@echo "make gpu            the tests and the benchmark that need a CUDA device; GPU_PYTHON=... where nothing can be installed"
	@echo "make gpu-hosts      tests of DeepSpeed and Megatron-LM whose ranks, over NCCL, share one CUDA device"
	@echo "make gpu-wheels     what both need beside torch, as wheels to carry along"
	@echo "make test-versions  a part of the tests against other DeepSpeed, accelerate, transformers and Megatron-LM releases, and other Pythons"
	@echo "make test-nanotron  a real checkout of nanotron (SRC=path) saves, loads what was converted, resumes"
	@echo "make test-peers     DeepSpeed's own tests of checkpoints (SRC=path), with and without the hooks"
	@echo "make test-corpora   the payloads of picklescan and fickling (SRC=path): each that acts is named"
	@echo "make format         rewrite the sources in the house's format"
	@echo "make docs           the pages as a site, in site/"
	@echo "make pictures       what commands show, drawn anew in docs/ from a real run"
	@echo "make dist           the sdist and the wheel, in dist/"
	@echo "make clean          remove .venv and everything that was built"

venv: $(INSTALLED)

# torch goes first and alone: DeepSpeed is a source distribution that looks for it.
$(INSTALLED): setup.cfg setup.py pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "ds_reshard needs Python 3.10, 3.11, 3.12 or 3.13, and found none: python3 is $$(python3 --version 2>&1)." >&2; \
		echo "Install one of them, or name it: make $(or $(MAKECMDGOALS),venv) PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "ds_reshard needs Python 3.10, 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version); a first run takes a few minutes."
	@$(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -c constraints.txt -e '.[deepspeed,accelerate,test,dev,docs]'
	@touch $@

# Types and tests take most of the time, and run side by side.
check: venv
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j2 types contracts fast-tests

style: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy

contracts: venv
	$(BIN)/lint-imports

fast-tests: venv
	$(BIN)/python -m pytest -m "not slow and not distributed and not gpu" $(FAST_TESTS)

# Four parts that take about as long, more than there are cores: ranks wait for each other, and for the disk.
HOST_TESTS := $(filter-out tests/hosts/megatron/%,$(wildcard tests/hosts/test_*.py tests/hosts/*/test_*.py))
GRID_TESTS := $(foreach name,grid preflight ranks remote,$(foreach file,$(HOST_TESTS),$(if $(findstring /test_$(name),$(file)),$(file))))
megatron-tests: TESTS = tests/hosts/megatron
grid-tests: TESTS = $(GRID_TESTS) tests/docs tests/hostile tests/torture
host-tests: TESTS = $(filter-out $(GRID_TESTS),$(HOST_TESTS))
other-tests: TESTS = $(filter-out %/docs %/hostile %/hosts %/torture %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
PARTS := megatron-tests grid-tests host-tests other-tests

# FIFTH=text: only a fifth of the slow cases of each file, drawn by the text.
FIFTH ?=
test: venv
	@$(BIN)/python tests/hosts/megatron/releases.py
	@$(MAKE) --no-print-directory --keep-going -j4 $(PARTS)

$(PARTS): venv
	$(BIN)/python -m pytest -m "not gpu" --durations=25 $(and $(FIFTH),--fifth=$(FIFTH)) $(TESTS)

# Pickles and files side by side; a test of so many cases takes longer than others may.
FUZZ_CASES ?= 100000
FUZZ := FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest tests/hostile/test_fuzz.py tests/hostile/test_oracle.py --timeout=7200

fuzz: venv
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j2 fuzz-pickles fuzz-files

fuzz-pickles:
	$(FUZZ) -k "not files"

fuzz-files:
	$(FUZZ) -k files

MUTANTS ?=
torture: venv
	$(BIN)/python tests/torture
	$(BIN)/python tests/torture/loads.py
	$(BIN)/python tests/torture/verified_saves.py
	$(BIN)/python tests/torture/ranks.py
	$(BIN)/python tests/torture/stores.py

mutants: venv
	$(BIN)/python tests/mutants.py $(MUTANTS)

demo: venv
	$(BIN)/python examples/demo.py

demo-lr: venv
	@mkdir -p .demo
	$(BIN)/python -W ignore examples/03_new_learning_rate.py .demo/lr.png

pictures: venv
	$(BIN)/python docs/pictures.py

bench: venv
	$(BIN)/python -m benchmarks

# GPU_PYTHON is an interpreter that has torch >= 2.11 with CUDA; what it lacks is unpacked from the wheels of WHEELS.
GPU_TESTS := tests/unit/test_cuda_executor.py tests/unit/test_executor_choice.py tests/unit/test_fingerprint.py \
	tests/hosts/deepspeed/test_one_rank.py
GPU_HOSTS := $(foreach name,test_matrix test_proved test_device test_universal test_dcp_reader test_grid \
	test_other_adams test_builder test_resume test_bad_input test_ranks_differ test_dcp_mesh test_fsdp_gather \
	test_fsdp_folders test_fsdp_convert test_fsdp_flat test_fsdp_asked test_verify_saved test_resume_accelerate \
	test_resume_trainer test_late_trainer test_megatron_load test_megatron_load_runs,\
	$(wildcard tests/hosts/*/$(name).py))
GPU_WHEELS := numpy isal safetensors hypothesis attrs sortedcontainers pytest pytest-timeout iniconfig pluggy packaging \
	pygments hjson pydantic pydantic_core annotated-types typing-inspection omegaconf rich markdown-it-py mdurl
GPU_TAGS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
GPU_PACKAGES := .gpu-packages
WHEELS ?= wheels
GPU_RUN = $(if $(GPU_PYTHON),PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_PACKAGES) $(GPU_PYTHON),$(BIN)/python)

gpu: $(if $(GPU_PYTHON),gpu-packages,venv)
	$(GPU_RUN) -m pytest -m gpu $(GPU_TESTS)
	$(GPU_RUN) -m benchmarks.gpu --output benchmarks/results $(if $(COMMIT),--commit $(COMMIT))
	$(GPU_RUN) -m benchmarks.page

gpu-hosts: $(if $(GPU_PYTHON),gpu-packages,venv)
	TEST_DEVICE=cuda $(GPU_RUN) -m pytest $(GPU_HOSTS)

gpu-packages:
	@rm -rf $(GPU_PACKAGES)
	@mkdir $(GPU_PACKAGES)
	@for wheel in $(WHEELS)/*.whl; do $(GPU_PYTHON) -m zipfile -e "$$wheel" $(GPU_PACKAGES) || exit 1; done

gpu-wheels: venv
	$(PIP) download -c constraints.txt --dest $(WHEELS) --no-deps --only-binary=:all: --python-version 3.12 \
		$(foreach tag,$(GPU_TAGS),--platform $(tag)) $(GPU_WHEELS)
	$(PIP) wheel -c constraints.txt --wheel-dir $(WHEELS) --no-deps --no-build-isolation deepspeed

test-versions: venv
	$(BIN)/python tests/versions/run.py
	$(BIN)/python tests/versions/run_libraries.py
	$(BIN)/python tests/versions/run_pythons.py
	DS_RESHARD_EVERY_RELEASE=1 $(BIN)/python -m pytest tests/hosts/megatron tests/versions/test_transformers_4.py

# SRC is a checkout of huggingface/nanotron; dacite is the one requirement of its serialize module that is not ours.
test-nanotron: venv
	@test -d "$(SRC)/src/nanotron" || { echo "name a checkout of nanotron: make test-nanotron SRC=path" >&2; exit 1; }
	@$(PIP) install dacite
	NANOTRON_SRC="$(abspath $(SRC))/src" $(BIN)/python -m pytest tests/formats/test_nanotron_real.py

# SRC is a checkout of deepspeedai/DeepSpeed, of which the tests alone are used; SELECT is what pytest's -k takes.
SELECT ?=
test-peers: venv
	@test -d "$(SRC)/tests/unit/checkpoint" || { echo "name a checkout of DeepSpeed: make test-peers SRC=path" >&2; exit 1; }
	$(BIN)/python tests/peers/run.py "$(abspath $(SRC))" "$(SELECT)"

# SRC is a folder with checkouts of mmaitre314/picklescan and trailofbits/fickling, called picklescan and fickling.
test-corpora: venv
	@test -d "$(SRC)/picklescan" -a -d "$(SRC)/fickling" || { \
		echo "name a folder with checkouts of picklescan and fickling: make test-corpora SRC=path" >&2; exit 1; }
	PICKLE_CORPORA="$(abspath $(SRC))" $(BIN)/python -m pytest -s tests/hostile/test_corpora.py

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: venv
	rm -rf dist build
	$(BIN)/python -c "from setuptools import build_meta as b; print(b.build_sdist('dist'), b.build_wheel('dist'))" | tail -1

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .demo .bench wheels $(GPU_PACKAGES)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
