"""ultralytics, only for the tests: it is under the AGPL-3.0, and make test-detectors installs it."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import pytest

from detection_ops import supply

OFFLINE = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}
"""Keeps ultralytics from checking for updates, installing packages and printing."""


@functools.cache
def ultralytics() -> Any:
    """Its networks, with its settings in a temporary directory."""
    for name, value in {**OFFLINE, "YOLO_CONFIG_DIR": tempfile.mkdtemp()}.items():
        os.environ.setdefault(name, value)
    supply()  # ultralytics imports torchvision
    return pytest.importorskip("ultralytics.nn.tasks", reason="make test-detectors installs ultralytics")
