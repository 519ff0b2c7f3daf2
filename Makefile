# What CI runs, by name. `make` alone runs all of it but the benchmarks.
PYTHON ?= python

.PHONY: all format lint types test bench smoke

all: lint types test

format:  ## Rewrites the code in the house's style.
	ruff format .
	ruff check --fix .

lint:  ## Checks style.
	ruff format --check .
	ruff check .

types:  ## Checks types.
	mypy

test:  ## Runs every test.
	pytest -n auto

bench:  ## Measures what the documents claim about time; minutes.
	$(PYTHON) -m benchmarks.startup
	$(PYTHON) -m benchmarks.tasks

smoke:  ## Trains a tiny run to its end, in seconds.
	$(PYTHON) -m experiments.train --config=configs/reverse.py \
	  --config.train.steps=20 --config.train.eval_every=20 \
	  --workdir=$$(mktemp -d)
