"""torchvision, also where its compiled operators are missing, as with a CPU-only torch.

Its import then fails over two names that no classification model uses: they are declared here, without being there.
"""

from __future__ import annotations

import sys

import torch

try:
    import torchvision
except Exception:  # "operator torchvision::nms does not exist"
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    DECLARED = torch.library.Library("torchvision", "DEF")  # they live as long as this object
    for name in ("nms", "qnms"):
        DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
