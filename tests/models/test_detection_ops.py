"""nms and roi_align in plain torch, worked by hand; and against torchvision's own in Python."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from detection_ops import nms, roi_align, supply

BOXES = torch.tensor(
    [
        [0.0, 0.0, 10.0, 10.0],
        [0.0, 0.0, 10.0, 5.0],  # half of the first: overlap 50 / 100
        [8.0, 0.0, 18.0, 10.0],  # 20 / 180 with the first
        [50.0, 50.0, 60.0, 60.0],
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize(
    ("scores", "threshold", "kept"),
    [
        ([0.9, 0.8, 0.7, 0.6], 0.5, [0, 1, 2, 3]),  # an overlap of exactly the threshold is none
        ([0.9, 0.8, 0.7, 0.6], 0.49, [0, 2, 3]),
        ([0.9, 0.8, 0.7, 0.6], 0.1, [0, 3]),
        ([0.1, 0.8, 0.7, 0.9], 0.3, [3, 1, 2]),  # best first
        ([0.5, 0.5, 0.5, 0.5], 0.3, [0, 2, 3]),  # of equal scores the first is the better one
    ],
)
def test_nms(scores: list[float], threshold: float, kept: list[int]) -> None:
    assert nms(BOXES, torch.tensor(scores), threshold).tolist() == kept


def test_nms_is_not_transitive() -> None:
    """A box that was removed removes no others."""
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [4.0, 0.0, 14.0, 10.0], [8.0, 0.0, 18.0, 10.0]])
    assert nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.4).tolist() == [0, 2]


def test_nms_of_nothing_and_of_empty_boxes() -> None:
    nothing = nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
    assert nothing.shape == (0,)
    assert nothing.dtype == torch.int64
    assert nms(torch.zeros(2, 4), torch.tensor([0.1, 0.2]), 0.5).tolist() == [1, 0]  # 0 / 0 overlaps nothing


def pooled(x: Tensor, box: list[float], size: int, *, scale: float = 1.0, ratio: int = 1, aligned: bool) -> Tensor:
    return roi_align(x, torch.tensor([[0.0, *box]], dtype=x.dtype), scale, size, size, ratio, aligned)[0, 0]


def ramp() -> Tensor:
    """One 4 x 4 map whose value at row y and column x is 10 y + x."""
    return (10 * torch.arange(4.0)[:, None] + torch.arange(4.0))[None, None].double()


def test_roi_align_samples_the_middle_of_bins() -> None:
    # Bins of 1 x 1 from (0, 0): the middle (0.5, 0.5) lies between four pixels, or on the first one when aligned.
    assert pooled(ramp(), [0, 0, 2, 2], 2, aligned=False).tolist() == [[5.5, 6.5], [15.5, 16.5]]
    assert pooled(ramp(), [0, 0, 2, 2], 2, aligned=True).tolist() == [[0.0, 1.0], [10.0, 11.0]]
    assert pooled(ramp(), [0, 0, 4, 4], 2, scale=0.5, aligned=True).tolist() == [[0.0, 1.0], [10.0, 11.0]]


def test_roi_align_averages_samples() -> None:
    # One bin of 2 x 2 with a 2 x 2 grid: samples at 0.5 and 1.5 in both directions; a ramp's mean is at the middle.
    assert pooled(ramp(), [0, 0, 2, 2], 1, ratio=2, aligned=False).item() == pytest.approx(11.0)
    assert pooled(ramp(), [0, 0, 2, 2], 1, ratio=0, aligned=False).item() == pytest.approx(11.0)  # 2 by its own size


def test_roi_align_at_the_borders() -> None:
    x = ramp()
    assert pooled(x, [0, 0, 1, 1], 1, aligned=True).item() == 0.0
    assert pooled(x, [3, 3, 5, 5], 1, aligned=False).item() == 33.0  # (4, 4): up to one pixel beyond, the last value
    assert pooled(x, [4, 4, 6, 6], 1, aligned=False).item() == 0.0  # (5, 5): further beyond
    assert pooled(x, [-2, -2, 0, 0], 1, aligned=False).item() == 0.0  # (-1, -1): still the first value, which is 0
    assert pooled(x + 7, [-2, -2, 0, 0], 1, aligned=False).item() == 7.0
    assert pooled(x + 7, [-4, -4, -2, -2], 1, aligned=False).item() == 0.0


def test_roi_align_of_an_empty_region() -> None:
    assert pooled(ramp() + 7, [1, 1, 1, 1], 1, ratio=0, aligned=True).item() == 0.0  # no sample at all
    assert pooled(ramp(), [1, 1, 1, 1], 1, ratio=0, aligned=False).item() == pytest.approx(16.5)  # 1 x 1 at the least
    assert roi_align(ramp(), torch.zeros(0, 5).double(), 1.0, 2, 3, 0, True).shape == (0, 1, 2, 3)


def test_roi_align_reads_the_image_that_is_named() -> None:
    x = torch.cat([ramp(), ramp() + 100, ramp() + 200])
    rois = torch.tensor([[2.0, 0, 0, 1, 1], [0.0, 0, 0, 1, 1], [2.0, 1, 0, 2, 1]]).double()
    assert roi_align(x, rois, 1.0, 1, 1, 1, True).flatten().tolist() == [200.0, 0.0, 201.0]


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_gradient(ratio: int, aligned: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0.0, 0.3, 1.1, 4.0, 4.7], [1.0, -2.0, 0.0, 9.0, 3.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, 0.7, 2, 3, ratio, aligned), x)


@pytest.mark.zoo
@pytest.mark.parametrize("ratio", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_is_torchvisions(ratio: int, aligned: bool) -> None:
    """Within the map, where torchvision's version in Python and its compiled one are the same."""
    torchvision = supply()
    theirs = sys.modules["torchvision.ops.roi_align"]._roi_align.__wrapped__
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 12, dtype=torch.float64, requires_grad=True)
    corner, size = torch.rand(2, 20, 2, dtype=torch.float64)
    corner, size = corner * torch.tensor([40.0, 30.0]), size * torch.tensor([50.0, 50.0])
    opposite = torch.minimum(corner + size, torch.tensor([46.0, 34.0]).double())
    rois = torch.cat([torch.randint(0, 2, (20, 1)).double(), corner, opposite], 1)
    ours = torchvision.ops.roi_align(x, rois, (5, 7), 0.25, ratio, aligned)
    truth = theirs(x, rois, 0.25, 5, 7, ratio, aligned)
    assert torch.allclose(ours, truth, rtol=0, atol=1e-12)
    (gradient,), (expected,) = (torch.autograd.grad(value.square().sum(), x) for value in (ours, truth))
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.zoo
def test_torchvision_has_them() -> None:
    torchvision = supply()
    scores, classes = torch.tensor([0.9, 0.8, 0.7, 0.6]).double(), torch.tensor([0, 1, 0, 0])
    assert torchvision.ops.nms(BOXES, scores, 0.3).tolist() == [0, 2, 3]
    assert torchvision.ops.batched_nms(BOXES, scores, classes, 0.3).tolist() == [0, 1, 2, 3]
    assert supply() is torchvision
