# Every command here is what CI and developers run. The first one makes .venv; `make` alone lists them.
PYTHON ?= python3
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.frostline-set-up

JOB ?= examples/movielens.yaml
WORKLOAD ?= all
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test slow chaos check format proto simulate bench bench-lookup capacity cuts quality quality-smoke tune-check gpu-check clean

help: ## lists the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(SETUP) ## makes .venv and installs what requirements/ pins

$(SETUP): requirements/cpu.txt requirements/dev.txt requirements/setup.sh pyproject.toml
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" requirements/setup.sh $(VENV)
	@touch $@

train: $(SETUP) ## trains a job: JOB=examples/movielens.yaml ARGS="--set trainer.workers=2"
	@echo "train: frostline train $(JOB) $(ARGS)"
	@$(BIN)/frostline train $(JOB) $(ARGS)

test: $(SETUP) ## runs the tests: ARGS="-k heat"
	@echo "test: pytest $(ARGS)"
	@$(BIN)/python -m pytest $(ARGS)

slow: $(SETUP) ## runs the tests that take minutes
	@echo "slow: pytest -m slow $(ARGS)"
	@$(BIN)/python -m pytest -m slow $(ARGS) || [ $$? -eq 5 ] # 5: there are none

chaos: $(SETUP) ## kills shards, workers, drivers and clients at random moments: SEEDS=25 of each
	@echo "chaos: pytest tests/chaos/test_kill_*.py, $(or $(SEEDS),25) seeds $(ARGS)"
	@FROSTLINE_CHAOS_SEEDS=$(or $(SEEDS),25) $(BIN)/python -m pytest -m "slow or not slow" tests/chaos/test_kill_*.py $(ARGS)

check: $(SETUP) ## lints, checks formatting, types and generated code
	@echo "check: ruff check"
	@$(BIN)/ruff check .
	@echo "check: ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "check: mypy"
	@$(BIN)/mypy
	@echo "check: generated code, imports, documents"
	@$(BIN)/python -m pytest -q tests/test_repository*.py

format: $(SETUP) ## formats the code and mends what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(SETUP) ## regenerates proto/frostline/v1/*_pb2*.py from the .proto files
	@echo "proto: grpc_tools.protoc proto/frostline/v1/*.proto"
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/frostline/v1/*.proto

simulate: $(SETUP) ## simulates shards and workers that fail: SEEDS=500, or SEED=7 for one again
	@echo "simulate: python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),500)) $(ARGS)"
	@PYTHONPATH=.:proto $(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),500)) $(ARGS)

bench: $(SETUP) ## measures workloads beside their rivals: WORKLOAD=engine
	@echo "bench: python -m benchmarks $(WORKLOAD) $(ARGS)"
	@$(BIN)/python -m benchmarks $(WORKLOAD) $(ARGS)

bench-lookup: $(SETUP) ## measures look-ups beside Redis: rows/s, bytes a row (two minutes)
	@echo "bench-lookup: python -m benchmarks.lookup $(ARGS)"
	@$(BIN)/python -m benchmarks.lookup $(ARGS)

capacity: $(SETUP) ## measures bytes a row, and trains 200 million IDs in 14 GiB (an hour)
	@echo "capacity: python -m benchmarks.capacity $(ARGS)"
	@$(BIN)/python -m benchmarks.capacity $(ARGS)

cuts: $(SETUP) ## measures what a cut costs, and how soon a shard of 25 million rows serves again (five minutes)
	@echo "cuts: python -m benchmarks.cuts $(ARGS)"
	@$(BIN)/python -m benchmarks.cuts $(ARGS)

tune-check: $(SETUP) ## holds estimate and tune to their promises on the quality stream (10 minutes)
	@echo "tune-check: python -m benchmarks.tune_check $(ARGS)"
	@$(BIN)/python -m benchmarks.tune_check $(ARGS)

quality: $(SETUP) ## measures what each policy saves and costs in AUC (half an hour on 2 idle cores; goes on where it stopped)
	@echo "quality: python -m benchmarks.quality $(ARGS)"
	@$(BIN)/python -m benchmarks.quality $(ARGS)

quality-smoke: $(SETUP) ## the same at a fiftieth of the size (two minutes)
	@echo "quality-smoke: python -m benchmarks.quality --smoke $(ARGS)"
	@$(BIN)/python -m benchmarks.quality --smoke $(ARGS)

gpu-check: $(SETUP) ## compares the FBGEMM backend with the reference on a GPU and prints figures
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

clean: ## removes .venv, runs and caches
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
