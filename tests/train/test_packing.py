"""Blocks of memory and what lies where in them: by hand, in every memory layout, and with layouts that cannot be."""

from __future__ import annotations

import itertools

import pytest
import torch

from paam.errors import ArtifactError
from paam.train.packing import Packed, as_tensors, copy_by_name, from_tensors, pack, unpack


def test_tensors_of_one_type_lie_end_to_end():
    tensors = {
        "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "count": torch.tensor(7),
        "turned": torch.tensor([[5.0, 6.0], [7.0, 8.0]]).t(),
        "none": torch.empty(0, 3),
        "b": torch.tensor(9.0),
    }
    blocks, layout = pack(tensors)
    assert [block.tolist() for block in blocks] == [[1, 2, 3, 4, 5, 7, 6, 8, 9], [7]]
    assert layout == {
        "a": (0, 0, (2, 2), (0, 1)),
        "turned": (0, 4, (2, 2), (0, 1)),
        "none": (0, 8, (0, 3), (0, 1)),
        "b": (0, 8, (), ()),
        "count": (1, 0, (), ()),
    }
    tensors["a"].zero_()
    assert unpack(Packed(blocks, layout))["a"].tolist() == [[1, 2], [3, 4]]  # copies


def test_axes_are_named_from_the_slowest_to_the_fastest():
    block = torch.arange(10)
    found = unpack(Packed([torch.zeros(0), block], {"columns": [1, 2, [2, 3], [1, 0]], "rows": [1, 2, [2, 3], [0, 1]]}))
    assert found["columns"].tolist() == [[2, 4, 6], [3, 5, 7]]
    assert found["rows"].tolist() == [[2, 3, 4], [5, 6, 7]]


def test_parts_come_back_by_their_names():
    parts = {
        "one": pack({"x": torch.ones(2), "y": torch.tensor(3)}),
        "two/x": pack({"x": torch.zeros(1)}),
        "no": pack({}),
    }
    tensors, layouts = as_tensors(parts)
    assert tensors.keys() == {"one:0", "one:1", "two/x:0"}
    back = from_tensors(tensors, layouts)
    assert {part: {name: v.tolist() for name, v in found.items()} for part, found in back.items()} == {
        "one": {"x": [1, 1], "y": 3},
        "two/x": {"x": [0]},
        "no": {},
    }


@pytest.mark.parametrize(
    "place",
    [
        (0, 5, (2, 3), (0, 1)),
        (0, 2**40, (2, 3), (0, 1)),
        (0, 0, (2, 2**40), (0, 1)),
        (0, 0, (2, 3), (0, 0)),
        (0, 0, (2, 3), (0,)),
        (0, 0, (2, 3), (0, 2)),
        (1, 0, (2, 3), (0, 1)),
        (0, 0, (2, 3)),
        (0, 0, None, (0, 1)),
    ],
    ids=str,
)
def test_a_place_that_cannot_be_is_an_error_and_never_memory_of_others(place):
    whole = torch.arange(100)
    with pytest.raises((ValueError, RuntimeError, IndexError, TypeError)):
        unpack(Packed([whole[:10]], {"x": place}))


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))), ids=str)
def test_values_are_copied_by_name_between_memory_layouts(axes):
    values = torch.arange(24.0).view(2, 3, 4)
    laid_out = torch.empty([(2, 3, 4)[axis] for axis in axes]).permute([axes.index(axis) for axis in range(3)])
    copy_by_name({"x": laid_out}, {"x": values})
    assert torch.equal(laid_out, values)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"x": torch.ones(1), "y": torch.ones(2)}, r"'x' has shape \(1,\) there and \(3,\) in this network"),
        ({"y": torch.ones(2)}, "'x' has shape none there"),
        ({"x": torch.ones(3), "y": torch.ones(2), "z": torch.ones(4)}, r"'z' has shape \(4,\) there and none"),
    ],
)
def test_values_of_another_network_are_refused_before_any_is_taken(stored, message):
    own = {"y": torch.zeros(2), "x": torch.zeros(3)}
    with pytest.raises(ArtifactError, match=message):
        copy_by_name(own, stored)
    assert not any(value.any() for value in own.values())
