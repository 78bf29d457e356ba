# make demo   prune a network on the embedded digits, from nothing, in under two minutes after set-up
# make test   the test suite
# make check  lint and types
# make test-slow   tests that need the public checkpoints and CIFAR-10 beside this repository
# make test-crash  runs killed again and again, in every phase, resumed and compared to the bit
# make fuzz        thousands of damaged recipes, plans, records, checkpoints, data files and images
# make test-browser   the HTML report in a headless Chromium or Chrome
# make test-zoo    every CNN of torchvision and 30 families of timm, exports, TensorBoard, GPU kernels by an interpreter;
#                  installs those packages
# make coverage    examine the zoos anew and rewrite docs/coverage.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
EXTRAS := $(VENV)/extras

.PHONY: demo test test-slow test-crash fuzz test-browser test-zoo coverage check format clean

demo: $(READY)
	$(BIN)/paam demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not crash and not browser and not zoo and not gpu"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-crash: $(READY)
	$(BIN)/python -m pytest -m crash tests/test_killed.py

fuzz: $(READY)
	$(BIN)/python tests/fuzz.py

test-browser: $(READY)
	$(BIN)/python -m pytest -m browser

test-zoo: $(EXTRAS)
	$(BIN)/python -m pytest -m zoo tests/test_zoo.py tests/test_tensorboard.py tests/test_compiled_kernels.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m zoo tests/test_kernels.py

coverage: $(EXTRAS)
	cd tests && ../$(BIN)/python zoo.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/point_links.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paam needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

$(EXTRAS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,torchvision,timm,onnx,tensorboard,benchmarks,triton]"
	touch $(EXTRAS)
