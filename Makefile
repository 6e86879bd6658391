# Every target installs what it needs on a machine with Python 3.11+, git, make and a C++ compiler.
#   make demo | test | test-full | check | bench | docs | sbom | audit | format | build-ops | venv | clean
# Variables: PYTHON, VENV, EXTRAS, TORCH_VERSION, TORCH_INDEX_URL (an index with the torch build you want), TESTS,
#   TEST_JOBS, DEMO_FLAGS, BENCH_FLAGS.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Tests start hundreds of processes: without compiled modules each would compile all of neap.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$name"; break; }; done)
TORCH_VERSION ?= 2.13.0
TORCH_INDEX_URL ?=
TESTS ?= tests
# Processes that run tests side by side: more than two cores could keep busy, because many tests wait for a process.
TEST_JOBS ?= 4
DEMO_FLAGS ?=
BENCH_FLAGS ?= --per-task 5
# Optional dependencies to install. An image of the services needs "oci,otel,sign,smg" alone.
EXTRAS ?= dev

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIBRARY := shared/ops/_lib/libneap_ops.so
PROTO_SOURCES := $(shell find protos -name '*.proto') $(wildcard protos/neap_client/aio*.py)
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
CLANG_FORMATTED := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)
SCRIPTS := .ci/run .ci/debian .ci/proto-breaking
# Prints what a command says, and an advice, only if it fails.
quietly = out=$$($(1) 2>&1) || { echo "$$out" >&2; $(if $(2),echo "$(2)" >&2;) exit 1; }
# What pip is configured to use, in uv's words: name of pip's setting, name of uv's. As by pip, a path that is not there
# is left out.
as_pip = $$($(BIN)/pip config list | sed -n "s/^[^=]*\.$(1)='\(.*\)'$$/\1/p" | head -n 1 | sed 's/\\n/ /g' | \
	tr ' ' '\n' | while read -r value; do case "$$value" in *://*) ;; *) [ -e "$$value" ] || continue ;; esac; \
	echo "$(2)=$$value"; done)
# uv finds in seconds what fits together, for which pip takes minutes.
INSTALL = env $(call as_pip,cert,SSL_CERT_FILE) $(BIN)/uv pip install --quiet --python $(BIN)/python \
	--compile-bytecode --index-strategy unsafe-best-match $(call as_pip,extra-index-url,--index) \
	$(call as_pip,find-links,--find-links) $(call as_pip,constraint,--constraints)
PIP_INDEX = $(call as_pip,index-url,--default-index)

.PHONY: help venv build-ops demo test test-full check bench docs sbom audit format clean

help:
	@sed -n '1,4s/^# *//p' Makefile

venv: $(STAMP)

# torch is installed first and separately, so that one variable selects its CPU or CUDA build. The package is built
# against it.
$(STAMP): pyproject.toml shared/build_hook.py protos/pyproject.toml protos/hatch_build.py $(PROTO_SOURCES)
	@[ -n "$(PYTHON)" ] || { echo "neap needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@echo "installing neap into $(VENV) (torch $(TORCH_VERSION) first; minutes on a new machine)"
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check -qq --no-input install uv
	@$(INSTALL) $(if $(TORCH_INDEX_URL),--default-index $(TORCH_INDEX_URL),$(PIP_INDEX)) torch==$(TORCH_VERSION)
	@$(INSTALL) $(PIP_INDEX) $$($(BIN)/python -c 'import tomllib; \
		print(*(line for path in ("pyproject.toml", "protos/pyproject.toml") \
		for line in tomllib.load(open(path, "rb"))["build-system"]["requires"]))')
	@$(INSTALL) $(PIP_INDEX) --no-build-isolation --reinstall-package neap-client --reinstall-package neap-server \
		--editable ./protos --editable '.[$(EXTRAS)]'
	@touch $@

BUILD_OPS = $(BIN)/python -m shared.ops.build >/dev/null && touch $(LIBRARY)

# Always asks what the machine has, because a GPU, its driver and nvcc may have come since.
build-ops: $(STAMP)
	@$(BUILD_OPS)

$(LIBRARY): $(STAMP) $(NATIVE_SOURCES) shared/ops/build.py shared/ops/toolkit.py
	@$(BUILD_OPS)

demo: $(LIBRARY)
	@$(BIN)/python -m demo $(DEMO_FLAGS)

test: $(LIBRARY)
	@$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist worksteal --durations 15 -m "not full" $(TESTS)

# In the order of tests/conftest.py, which has the longest files first. Soaks and floods take the whole machine, one at
# a time.
test-full: $(LIBRARY)
ifeq ($(TESTS),tests)
	@$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --timeout 600 \
		--durations 15 -m "full and not alone"
	@$(BIN)/python -m pytest -m "full and alone"
else
	@$(BIN)/python -m pytest -m full $(TESTS)
endif

check: $(STAMP)
	@echo "ruff format"; $(call quietly,$(BIN)/ruff format --check --output-format concise .,run make format)
	@echo "csrc for ARM64"; $(call quietly,$(BIN)/python -m shared.ops.build --target aarch64-linux-gnu)
	@echo "clang-format"; $(call quietly,$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED),run make format)
	@echo "ruff"; $(BIN)/ruff check --quiet .
	@echo "mypy"; $(BIN)/mypy --no-error-summary
	@echo "import-linter"; $(call quietly,$(BIN)/lint-imports)
	@echo "budget of lines"; $(call quietly,$(BIN)/python .ci/budget.py,a room grows only by a commit that changes its number in budget.toml and says why)
	@echo "buf lint"; $(BIN)/buf lint
	@echo "buf breaking"; BUF=$(BIN)/buf .ci/proto-breaking
	@echo "shellcheck"; $(BIN)/shellcheck $(SCRIPTS)
	@echo "check passed"

bench: $(LIBRARY)
	@$(BIN)/python -m bench $(BENCH_FLAGS)

docs: $(STAMP)
	@for page in reference settings; do \
		$(BIN)/python -m docs.generators.$$page > docs/$$page.md; echo "docs/$$page.md"; done

# What is installed in $(VENV), as CycloneDX.
sbom: $(STAMP)
	@mkdir -p build
	@$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file build/sbom.json && echo "build/sbom.json"

# Known vulnerabilities of what is installed, which PyPI is asked for.
audit: $(STAMP)
	@if $(BIN)/python -c 'import urllib.request as r; r.urlopen("https://pypi.org/pypi/pip/json", timeout=10)' \
		2>/dev/null; then $(BIN)/pip-audit --local --skip-editable --progress-spinner off; \
		else echo "nothing is audited: pypi.org cannot be reached"; fi

format: $(STAMP)
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CLANG_FORMATTED)

clean:
	@rm -rf $(VENV) build dist shared/ops/_lib .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find protos -name '*_pb2*.py*' -delete
	@echo "clean; .neap (the demo's model and data) is kept: remove it by hand"
