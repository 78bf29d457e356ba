# make demo   prune a network on the embedded digits, from nothing, in under two minutes after set-up
# make test   the test suite
# make check  lint and types
# make test-generated   2,000 random networks, pruned at random: each is exact, or refused
# make test-slow   tests that need the public checkpoints and CIFAR-10 beside this repository
# make test-crash  runs killed again and again, in every phase, resumed and compared to the bit
# make test-faults a seeded sample of what make faults does
# make faults      a fault at every file operation of short runs: killed, power cut, I/O errors; an hour, rewrites the counts
# make fuzz        thousands of damaged or hostile recipes, plans, records, checkpoints, data files and images
# make mutants     one operator of graph/ or of selection changed at a time, 200 times: do the tests notice?
# make test-browser   the HTML report in a headless Chromium or Chrome
# make test-zoo    a sample of the CNNs of torchvision and timm, exports, int8, TensorBoard, GPU kernels by an interpreter;
#                  installs those packages; with ZOO=all every one of those CNNs but a few giants
# make test-detectors  detectors of ultralytics and torchvision; installs ultralytics (AGPL-3.0), which paam never imports
# make coverage    examine the zoos anew and rewrite docs/reference/coverage.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
EXTRAS := $(VENV)/extras
DETECTORS := $(VENV)/detectors
# Without what they depend on: torch, torchvision and the like are there, and OpenCV is taken without its windows.
ULTRALYTICS := ultralytics opencv-python-headless psutil polars polars-runtime-32
ULTRALYTICS += matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil six

# Tests run in several processes, of one thread each: layers in tests are small.
WORKERS := --numprocesses auto --maxprocesses 4

.PHONY: demo test test-generated test-slow test-crash test-faults faults fuzz mutants test-browser test-zoo test-detectors coverage check format clean

demo: $(READY)
	$(BIN)/paam demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) -m "not slow and not crash and not browser and not zoo and not gpu and not generated and not faults"

test-generated: $(READY)
	$(BIN)/python -m pytest -m generated tests/graph/test_generated.py tests/project/test_claims.py

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-crash: $(READY)
	$(BIN)/python -m pytest -m crash tests/runs/test_killed.py

test-faults: $(READY)
	$(BIN)/python -m pytest -m faults tests/runs/test_faults.py

faults: $(READY)
	$(BIN)/python -W error tests/support/faults.py --jobs 2 --out tests/support/faults.counts.txt

fuzz: $(READY)
	$(BIN)/python tests/support/fuzz.py

mutants: $(READY)
	$(BIN)/python tests/support/mutants.py

test-browser: $(READY)
	$(BIN)/python -m pytest -m browser

test-zoo: $(EXTRAS)
	$(BIN)/python -m pytest -m zoo tests/models/test_zoo.py tests/artifacts/test_small_networks.py tests/graph/test_small_training.py tests/views/test_tensorboard.py tests/train/cuda/test_compiled_kernels.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m zoo tests/train/cuda/test_kernels.py

test-detectors: $(DETECTORS)
	$(BIN)/python -m pytest -m zoo tests/models/test_detection_ops.py tests/models/test_detectors.py tests/models/test_yolo.py

coverage: $(EXTRAS)
	$(BIN)/python tests/support/zoo.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/point_links.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paam needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

$(EXTRAS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,torchvision,timm,onnx,tensorboard,benchmarks,triton,torchao]"
	touch $(EXTRAS)

$(DETECTORS): $(EXTRAS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(ULTRALYTICS)
	touch $(DETECTORS)
