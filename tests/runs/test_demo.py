"""The demo itself, whole: what the README promises, and the same bits twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from events import of_kind
from paam.config.recipe import load_recipe
from ran import run


@pytest.mark.slow
def test_the_demo_keeps_its_promise_and_repeats_itself(tmp_path: Path) -> None:
    weights = []
    for name in ("first", "second"):
        events = run(load_recipe("digits-resnet20-kq"), tmp_path / name, device="cpu")
        end = of_kind(events, "end")[0]
        assert end["pruned"]["accuracy"] >= 97
        assert end["pruned"]["macs"] <= 0.5 * end["dense"]["macs"]
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
