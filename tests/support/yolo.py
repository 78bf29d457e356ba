"""ultralytics, for the tests alone: it is under the AGPL-3.0, and make test-detectors installs it."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import pytest

from detection_ops import supply

OFFLINE = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}
"""What keeps ultralytics from looking for updates, installing packages and talking."""


@functools.cache
def ultralytics() -> Any:
    """Its networks, with its settings in a directory of our own."""
    for name, value in {**OFFLINE, "YOLO_CONFIG_DIR": tempfile.mkdtemp()}.items():
        os.environ.setdefault(name, value)
    supply()  # it imports torchvision in its turn
    return pytest.importorskip("ultralytics.nn.tasks", reason="make test-detectors installs ultralytics")
