# Two commands for a new machine: `make demo` and `make test`. Both set up .venv first. `make help` lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INTEGRATION := .venv-integration
CLIENTS := .venv-clients
DOCS := .venv-docs
GPU := .venv-gpu
RESULTS := benchmarks/results

# Other CPUs, as far as this one can stand for them: torch's kernels without vector instructions and with AVX2 only,
# ours without fused multiply-add; and more threads than most machines have cores.
CPUS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 NUMBA_CPU_NAME=generic ROWSTEP_TEST_THREADS=4
ARITHMETIC := $(addprefix tests/,$(addsuffix .py,$(addprefix sparse/test_,same_as_torch options dtypes nonfinite) \
	$(addprefix deferred/test_,options dtypes backends) kernels/test_backends clip/test_clip arrays/test_arrays \
	state/test_row_steps))
SMOKE := $(addprefix tests/,$(addsuffix .py,sparse/test_same_as_torch deferred/test_same_as_torch clip/test_clip \
	state/test_plain_checkpoints))
# Those of the tests of the update that are small enough for Triton's interpreter.
INTERPRETED := $(addprefix tests/,$(addsuffix .py,$(addprefix sparse/test_,options nonfinite layouts odd_tensors gradients) \
	state/test_row_steps clip/test_clip))

.PHONY: help demo smoke test check gpu cpus old-cpu stress versions integration clients docs docs-test format bench learn peers figures dist clean clean-cache

# The first target is what `make` alone makes.
help: ## this list
	@echo "Each sets up the environment it needs, which takes minutes the first time."
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## in a minute, four optimizers on a table of a million rows
	$(BIN)/rowstep demo

smoke: $(READY) ## in under a minute, the tests that compare with torch
	$(BIN)/pytest -q -rs -n 2 --dist worksteal $(SMOKE)
	@echo "Rowstep works here: its kernels compile, steps and clipping agree with torch's, checkpoints load both ways."

test: $(READY) ## all tests, in a few minutes
	$(BIN)/pytest -n 2 --dist worksteal

check: $(READY) ## format, lint, types and tests, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

# The kernels for GPUs, without one: on Triton's interpreter, and compiled for three devices.
gpu: $(GPU)/.ready ## the kernels for GPUs, without one
	ROWSTEP_TRITON=1 $(GPU)/bin/python -m pytest -n 2 --dist worksteal -k "gpu or triton" tests/gpu $(INTERPRETED)

# Every test with each setting; all are tried, and those that failed are named at the end.
cpus: $(READY) ## all tests, as on other CPUs
	@failed=; for setting in $(CPUS); do \
		echo "== $$setting"; \
		env $$setting $(BIN)/pytest -n 2 --dist worksteal || failed="$$failed $$setting"; \
	done; test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

# What CI has time for: the tests of the arithmetic, with all of these settings at once.
old-cpu: $(READY) ## the tests of the arithmetic as on an old CPU
	ATEN_CPU_CAPABILITY=default NUMBA_CPU_NAME=generic ROWSTEP_TEST_THREADS=4 \
		$(BIN)/pytest -n 2 --dist worksteal $(ARITHMETIC)

# What takes too long for CI: the full matrices and the run of 1.2 million steps.
stress: $(READY) ## the tests at full length
	ROWSTEP_LONG=1 $(BIN)/pytest -n 2 --dist worksteal

# The core tests with the oldest torch that we support, the newest and two in between, each in a fresh environment of
# several GB; writes docs/versions.md. TORCH=2.8.0 tries that one only.
versions: ## the core tests with four versions of torch
	$(PYTHON) tools/versions.py $(TORCH)

# Training with other people's packages, in an environment of its own.
# PyKEEN finds two optimizers called AdamW in a process that has imported bitsandbytes, as others do, and gives up.
integration: $(INTEGRATION)/.ready ## training with other packages
	ROWSTEP_INTEGRATION=1 $(INTEGRATION)/bin/pytest tests/integration --ignore tests/integration/test_pykeen.py
	ROWSTEP_INTEGRATION=1 $(INTEGRATION)/bin/pytest tests/integration/test_pykeen.py

# Other people's programs, rebuilt, with torch's optimizer and with ours, in an environment of its own.
clients: $(CLIENTS)/.ready ## other people's programs, with torch's optimizers and ours
	ROWSTEP_CLIENTS=1 $(CLIENTS)/bin/pytest tests/clients

# The site, into out/site. Every warning is an error. The variable silences an announcement of the theme.
docs: $(DOCS)/.ready ## the site, into out/site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Every page in Chromium: links, console, requests, and screenshots for people to look at.
docs-test: docs ## every page of the site in Chromium
	$(DOCS)/bin/python -m website.browse out/site out/screenshots

format: $(READY) ## fix what a machine can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Measures what README and docs say of speed and memory, and fills it in. On an idle machine.
bench: $(READY) ## speed and memory, a quarter of an hour on an idle machine
	for suite in sparse deferred rows memory distributed host; do \
		$(BIN)/python -m benchmarks $$suite --out $(RESULTS) || exit 1; done
	$(BIN)/rowstep demo > $(RESULTS)/demo.txt
	$(MAKE) figures

# What models learn with each rule, and with less state: any machine will do.
learn: $(READY) ## what models learn with each rule, in 40 minutes
	for suite in quality lazy; do $(BIN)/python -m benchmarks $$suite --out $(RESULTS) || exit 1; done

# What a user would take instead, each in an environment of its own below .venv-peers, which this makes.
peers: $(READY) ## the alternatives, half an hour on an idle machine
	$(BIN)/python -m benchmarks peers --out $(RESULTS)

# Every figure, table and picture of README and docs, from benchmarks/results.
figures: $(READY) ## README and docs, from benchmarks/results
	$(BIN)/python -m benchmarks.pages

# What would be published, in dist/: built, checked, and used from an empty environment.
dist: ## build and try what would be published
	$(PYTHON) tools/dist.py

# The pinned torch is the version that the tests ran with. On Linux, PyPI's build of it brings several GB of CUDA packages;
# pip takes a build for the CPU alone where it is given one (--find-links or --extra-index-url, in pip's configuration).
# The version that is installed comes from rowstep's __init__.py.
$(READY): pyproject.toml constraints.txt src/rowstep/__init__.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch $@

# What .venv has, and Triton, whose wheel is 286 MB: torch's builds for GPUs bring it, those for CPUs do not.
$(GPU)/.ready: $(READY)
	$(PYTHON) -m venv $(GPU)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > \
		"$$($(GPU)/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	$(GPU)/bin/pip install --quiet --disable-pip-version-check triton==3.8.0
	touch $@

$(INTEGRATION)/.ready: pyproject.toml constraints.txt constraints-integration.txt
	$(PYTHON) -m venv $(INTEGRATION)
	$(INTEGRATION)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-integration.txt torch==2.13.0 -e '.[dev,integration]'
	touch $@

# RecBole asks for an old ray and exact versions of others; what it imports here works with those of today.
$(CLIENTS)/.ready: pyproject.toml constraints.txt constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-clients.txt \
		torch==2.13.0 -e '.[dev]' colorama colorlog minnt pandas PyYAML tensorboard texttable tqdm
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -c constraints-clients.txt --no-deps recbole
	touch $@

# The pins are the whole environment. Rowstep itself is not in it: the reference is read from the sources, without torch.
$(DOCS)/.ready: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r constraints-docs.txt
	touch $@

clean-cache: ## delete the compiled kernels
	find src benchmarks -name '*.nb[ic]' -delete

clean: ## delete environments, outputs and caches
	rm -rf .venv .venv-* out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
