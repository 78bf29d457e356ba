"""Prune a YOLO as the guide and the example do: with ultralytics' own trainer, validation and exports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import paam
from networks import relative_error
from yolo import OFFLINE, ultralytics

pytestmark = pytest.mark.zoo

ROOT = Path(__file__).parents[2]
EXAMPLE, GUIDE = ROOT / "examples" / "prune_yolo.py", ROOT / "docs" / "guide" / "detectors.md"


def data_set(root: Path, classes: int = 2, name: str = "data") -> Path:
    """A few images of bright rectangles, as ultralytics reads them; returns the file that describes them."""
    rng = np.random.default_rng(0)
    for part, number in (("train", 8), ("val", 4)):
        (root / "images" / part).mkdir(parents=True)
        (root / "labels" / part).mkdir(parents=True)
        for place in range(number):
            pixels = rng.integers(0, 80, (96, 128, 3), dtype=np.uint8)
            x, y, colour = *rng.integers(10, 60, 2), place % 2
            pixels[y : y + 30, x : x + 40, colour] = 255
            Image.fromarray(pixels).save(root / "images" / part / f"{place}.png")
            centre = f"{(x + 20) / 128} {(y + 15) / 96} {40 / 128} {30 / 96}"
            (root / "labels" / part / f"{place}.txt").write_text(f"{colour} {centre}\n")
    names = ", ".join(f"{number}: class{number}" for number in range(classes))
    described = root / f"{name}.yaml"
    described.write_text(f"path: {root}\ntrain: images/train\nval: images/val\nnames: {{{names}}}\n")
    return described


def run_beside_ultralytics(code: str, *arguments: str | Path, cwd: Path) -> None:
    """Python code in a process of its own, in which torchvision is able to run detectors."""
    done = subprocess.run(
        [sys.executable, "-c", f"import detection_ops; detection_ops.supply()\n{code}", *arguments],
        cwd=cwd,
        env={
            # Without the name of the test: theirs would take it for one of its own, and write beside its code.
            **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            **OFFLINE,
            "YOLO_CONFIG_DIR": str(cwd),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def same_in_onnx_runtime(model: nn.Module, path: Path, size: int) -> None:
    """Every box with its scores, [N, 4 + classes, boxes], by the exported file and by the network."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    x = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    (found,) = session.run(None, {"images": x.numpy()})
    with torch.no_grad():
        truth = model.float().eval()(x)[0]
    assert found.shape == truth.shape
    for part, expected in zip(
        torch.from_numpy(found).split((4, truth.shape[1] - 4), 1), truth.split((4, truth.shape[1] - 4), 1), strict=True
    ):
        assert relative_error(part, expected) < 1e-3


@pytest.mark.parametrize("name", ["yolov8n", "yolo11n", "yolov5n"])
def test_example(name: str, tmp_path: Path) -> None:
    """Pruned, trained for an epoch by ultralytics' own trainer, validated, exported; then read back."""
    tasks = ultralytics()
    out = tmp_path / "out"
    code = "import runpy, sys\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')"
    options = ["--keep-macs=0.5", "--epochs=1", "--imgsz=64", "--batch=4", "--workers=0", "--device=cpu"]
    options += ["--export=onnx"]
    data = data_set(tmp_path / "data")
    run_beside_ultralytics(code, EXAMPLE, f"{name}.yaml", "--data", data, *options, "--out", out, cwd=tmp_path)
    small = paam.load(out, tasks.DetectionModel(f"{name}.yaml", nc=2, verbose=False))
    assert isinstance(small, tasks.DetectionModel)
    whole = tasks.DetectionModel(f"{name}.yaml", nc=2, verbose=False)
    x = torch.rand(1, 3, 64, 64)
    assert paam.count(small, x).macs <= 0.5 * paam.count(whole, x).macs
    (exported,) = out.rglob("*.onnx")
    same_in_onnx_runtime(small, exported, 64)


def test_code_of_the_guide(tmp_path: Path) -> None:
    """Word for word, but for a short training: on a checkpoint of random weights, and a data set of 80 classes."""
    tasks = ultralytics()
    code = re.search(r"```python\n(import paam.*?YOLO.*?)```", GUIDE.read_text(), re.S)[1]
    assert "epochs=100" in code
    assert code.count("640") == 2
    shorter = "epochs=1, imgsz=64, batch=4, workers=0, device='cpu', plots=False"
    code = code.replace("epochs=100", shorter).replace("640", "64")
    described = data_set(tmp_path / "data", 80, "coco8")
    described.rename(tmp_path / "coco8.yaml")
    before = "from ultralytics import YOLO, settings\nsettings.update(runs_dir=sys.argv[1])\n"
    run_beside_ultralytics(f"import sys\n{before}YOLO('yolov8n.yaml').save('yolov8n.pt')", tmp_path, cwd=tmp_path)
    run_beside_ultralytics(code, cwd=tmp_path)
    small = paam.load(tmp_path / "yolov8n-half", tasks.DetectionModel("yolov8n.yaml", nc=80, verbose=False))
    whole, x = tasks.DetectionModel("yolov8n.yaml", nc=80, verbose=False), torch.rand(1, 3, 64, 64)
    assert paam.count(small, x).macs <= 0.5 * paam.count(whole, x).macs
    (exported,) = tmp_path.rglob("*.onnx")
    same_in_onnx_runtime(small, exported, 64)
