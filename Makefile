# make help lists the targets. Each does all the set-up that it needs, and repeats nothing.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train test test-all run-tests sanitized mutants program build configure wheel deb image-test plain bench bench-peers bench-experts fuzzers fuzz faults soak docs format format-check lint clean setup

comma := ,
LOCKSTEP_CUDA ?= AUTO
SANITIZE ?=
LABEL ?=
CMAKE_ARGS ?=
RANKS ?= 2
LINTED ?= core kernels parallel_state distributed optimizer models pipeline datasets planner checkpoint training program
CONFIG ?= configs/tiny.textproto
OUTPUT ?= runs/tiny
FUZZ_SECONDS ?= 60
FAULTS_ARGS ?=
SOAK_ARGS ?=
BUILD ?= build$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))
export LOCKSTEP_CUDA
export UBSAN_OPTIONS ?= halt_on_error=1:print_stacktrace=1
export LSAN_OPTIONS ?= suppressions=$(CURDIR)/tests/support/leaks.supp:print_suppressions=0
export TSAN_OPTIONS ?= suppressions=$(CURDIR)/tests/sanitizers/thread.supp:ignore_noninstrumented_modules=1:detect_deadlocks=0
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# The options that CMake would keep when they are no longer given.
kept_args = $(CMAKE_ARGS) \
  $(if $(filter-out default undefined,$(origin CXX)),-DCMAKE_CXX_COMPILER=$(CXX))

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo 'Settings: LOCKSTEP_CUDA=AUTO|ON|OFF  SANITIZE=address,undefined|thread  LABEL=unit|ranks|end-to-end|gpu|long'
	@echo '          CONFIG=FILE RANKS=N OUTPUT=DIR (of train)  FAULTS_ARGS=...  CMAKE_ARGS=...  CXX=...'

setup:
	@scripts/setup compiler packages venv

configure: setup
	@scripts/configure $(BUILD) -DLOCKSTEP_CUDA=$(LOCKSTEP_CUDA) -DLOCKSTEP_SANITIZE=$(SANITIZE) \
	  -- $(kept_args)

program: configure ## Build what is installed: the program and the libraries
	@ninja -C $(BUILD) lockstep_installed

build: configure ## Build the libraries, the program, the tests and the benchmarks
	@ninja -C $(BUILD)

wheel: program ## Make dist/lockstep-*.whl from the build folder: the program without a compiler
	@scripts/setup packaging
	@.venv/bin/python packaging/wheel.py $(BUILD) dist

deb: program ## Make dist/lockstep_*.deb for CPUs, with the part of libtorch that it needs
	@scripts/setup packaging
	@.venv/bin/python packaging/deb.py $(BUILD) dist

image-test: wheel ## Run docker/Dockerfile in a chroot, as root, and train and generate there
	@scripts/setup text
	@scripts/setup image || true
	@.venv/bin/python tests/packaging/image_test.py

plain: setup ## Compile parallel_state without CUDA and the host transport
	@scripts/configure build-plain -DLOCKSTEP_CUDA=OFF -DLOCKSTEP_HOST_TRANSPORT=OFF \
	  -DLOCKSTEP_BUILD_TESTS=OFF -DLOCKSTEP_BUILD_BENCHMARKS=OFF -- $(kept_args) > /dev/null
	@ninja -C build-plain lockstep_parallel_state

train: configure ## Train the reference GPT on English text with two data-parallel ranks
	@ninja -C $(BUILD) lockstep
	@scripts/setup text
	@LOCKSTEP_BUILD=$(BUILD) scripts/launch -n $(RANKS) -- train $(CONFIG) --output $(OUTPUT)

test: chosen_tests = $(if $(LABEL),-L '^$(LABEL)$$',-LE '^long$$')
test: run-tests ## Run all but the long tests (LABEL=... for some, SANITIZE=... for a sanitizer)

test-all: run-tests ## Run every test

run-tests: configure
	@ninja -C $(BUILD) test_programs
	@scripts/setup text packaging
	@cd $(BUILD) && ctest -j$$(($$(nproc) + 1)) --output-on-failure --no-tests=error $(chosen_tests)

# Only clang's runtimes can be loaded before a program of another compiler.
sanitized: build ## Run the tests with libraries that a sanitizer watches (SANITIZER=address|thread), for hours
	@scripts/setup fuzz
	@.venv/bin/python tests/sanitizers/run.py $(or $(SANITIZER),address) --build $(BUILD)

mutants: build ## Seed bugs, one at a time: the tests must see 95 % of them
	@.venv/bin/python tests/mutants/run.py --build $(BUILD)

bench: build ## Run the benchmarks: ours and its peer side by side
	@$(BUILD)/benchmarks/ddp_step
	@$(BUILD)/benchmarks/optimizer_step
	@$(BUILD)/benchmarks/fused_ops
	@scripts/setup megatron || true
	@.venv/bin/python benchmarks/step_growth.py --build $(BUILD)
	@LOCKSTEP_BUILD=$(BUILD) scripts/bench_steps sharded --ranks 2
	@LOCKSTEP_BUILD=$(BUILD) scripts/bench_steps sharded --ranks 4
	@LOCKSTEP_BUILD=$(BUILD) scripts/bench_steps link
	@LOCKSTEP_BUILD=$(BUILD) scripts/bench_steps link --batch 256
	@$(BUILD)/benchmarks/collectives
	@$(BUILD)/benchmarks/group_setup
	@$(BUILD)/benchmarks/rank_groups
	@OMP_NUM_THREADS=1 $(BUILD)/benchmarks/context_attention
	@OMP_NUM_THREADS=1 $(BUILD)/benchmarks/tensor_overlap
	@$(BUILD)/benchmarks/pipeline_bubble
	@$(BUILD)/benchmarks/device_waits
	@$(BUILD)/benchmarks/data_pipeline loader
	@scripts/setup text gpt2 tiktoken
	@.venv/bin/python benchmarks/tokenizer.py $(BUILD)
	@.venv/bin/python benchmarks/checkpoint.py $(BUILD)

bench-peers: program ## Train the same GPTs here and with PyTorch, FSDP2, ZeRO, Megatron, in turn
	@scripts/setup text
	@scripts/setup megatron || true
	@.venv/bin/python benchmarks/peers.py $(BUILD)

bench-experts: build ## Train configs/moe_tiny.textproto and its dense twin: which loss is lower
	@scripts/setup text
	@LOCKSTEP_BUILD=$(BUILD) scripts/compare_experts

# Only clang has libFuzzer.
fuzzers: setup ## Build the fuzz targets
	@scripts/setup fuzz
	@scripts/configure build-fuzz -DCMAKE_C_COMPILER=clang-16 -DCMAKE_CXX_COMPILER=clang++-16 \
	  -DLOCKSTEP_FUZZ=ON -DLOCKSTEP_SANITIZE=fuzzer-no-link,address,undefined \
	  -DLOCKSTEP_CUDA=OFF -DLOCKSTEP_PRECOMPILE=OFF -- $(CMAKE_ARGS) > /dev/null
	@ASAN_OPTIONS=detect_leaks=0 ninja -C build-fuzz fuzzers

# New inputs that reach more code are kept in build-fuzz/corpus.
fuzz: fuzzers ## Fuzz every parser, FUZZ_SECONDS of processor time each
	@scripts/fuzz --seconds $(FUZZ_SECONDS)

# An interrupted run keeps its results: FAULTS_ARGS=--resume continues it.
faults: configure $(if $(findstring --only,$(FAULTS_ARGS)),,fuzzers) ## Break trainings, commands and parsers in every way, for hours (FAULTS_ARGS=... for less)
	@ninja -C $(BUILD) lockstep fault_injection
	@mkdir -p $(BUILD)/faults
	@LOCKSTEP_BUILD=$(abspath $(BUILD)) .venv/bin/python tests/faults/run.py \
	  --results $(BUILD)/faults/results.jsonl --table $(BUILD)/faults/table.md $(FAULTS_ARGS)

soak: configure ## Train 20,000 steps with 400 saves on six layouts: nothing may grow (an hour)
	@ninja -C $(BUILD) lockstep
	@LOCKSTEP_BUILD=$(abspath $(BUILD)) .venv/bin/python tests/faults/soak.py $(SOAK_ARGS)

docs: configure ## Write the API reference of the installed headers to build/docs/html
	@scripts/setup docs
	@ninja -C $(BUILD) lockstep_config_header
	@doxygen $(BUILD)/Doxyfile

format: ## Format all C++ and CUDA sources
	@scripts/setup tools
	@scripts/sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format -i

format-check: ## Fail if a source is not formatted
	@scripts/setup tools
	@scripts/sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror

# clang cannot read g++'s precompiled headers, and clang-tidy needs a command for each source: it
# gets a build folder without precompiled headers and unity builds.
lint: setup format-check ## Format check and clang-tidy
	@scripts/configure build-lint -DLOCKSTEP_CUDA=$(LOCKSTEP_CUDA) -DLOCKSTEP_PRECOMPILE=OFF \
	  -DLOCKSTEP_UNITY=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -- $(kept_args) > /dev/null
	@ninja -C build-lint lockstep_core_pure > /dev/null
	@scripts/sources $(foreach room,$(LINTED),'$(room)/*.cpp') | grep -v -e no_cuda -e no_nccl -e plain_gloo | \
	  xargs -n 1 -P "$$(nproc)" clang-tidy --quiet -p build-lint

clean: ## Remove the build folders; .venv, data and runs stay
	@rm -rf build build-*
