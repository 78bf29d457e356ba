"""Pruner: frozen means frozen, the caller's model stays theirs, gates stand where PAAM.md puts them."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import paam
from networks import lively
from paam import Pruner
from paam.config.settings import DistillSettings
from paam.errors import DataError, PaamError, RecipeError, TargetError
from paam.events import Epoch, Event, Selected, of_kind
from paam.models import resnet20, resnet56, vgg16_bn

SCORERS = ["vanilla", "kq", "free"]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 16, 16, generator=generator), torch.arange(16) % 10


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, Tensor], module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(before[name], value)}


def score_step(pruner: Pruner, batch: tuple[Tensor, Tensor]) -> None:
    pruner.model.train()  # as anyone's loop does; it must not wake the batch norms
    pruner.optimizer.zero_grad()
    (F.cross_entropy(pruner.model(batch[0]), batch[1]) + pruner.penalty()).backward()
    pruner.optimizer.step()


def weight_step(pruner: Pruner, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
    pruner.model.train()
    optimizer.zero_grad()
    F.cross_entropy(pruner.model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_score_phase_moves_scorers_and_nothing_else(scorer: str, batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0], scorer=scorer)
    before = snapshot(pruner.model)
    with pruner.scoring():
        for _ in range(3):
            score_step(pruner, batch)
    moved = changed(before, pruner.model)
    assert moved == {name for name in before if ".scorer." in name}
    assert all((scores != 1).any() for scores in pruner.scores().values())


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_weight_phase_moves_the_network_and_no_scorer(scorer: str, batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0], scorer=scorer)
    with pruner.scoring():
        score_step(pruner, batch)
    everything = torch.optim.Adam(pruner.model.parameters(), 1e-3)  # even when handed the scorers by mistake
    with pruner.weighting(keep_macs=0.6):
        before = snapshot(pruner.model)
        for _ in range(3):
            weight_step(pruner, batch, everything)
    moved = changed(before, pruner.model)
    assert not {name for name in moved if name.startswith("paam_gates.")}
    assert {name.split(".")[-1] for name in moved} >= {"weight", "bias", "running_mean", "running_var"}


def test_batch_norm_may_train_in_score_phases_when_asked(batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0], score_norm="train")
    before = snapshot(pruner.model)
    with pruner.scoring():
        score_step(pruner, batch)
    moved = changed(before, pruner.model)
    assert {name for name in moved if name.startswith("bn1.")} == {
        "bn1.running_mean",
        "bn1.running_var",
        "bn1.num_batches_tracked",
    }


def test_closed_filters_wake_up_as_they_fell_asleep(batch: tuple[Tensor, Tensor]) -> None:
    """Momentum of earlier phases and weight decay would move them; open filters do move."""
    pruner = Pruner(resnet20(), batch[0])
    optimizer = torch.optim.AdamW(pruner.network_parameters(), 1e-2, weight_decay=0.1)
    with pruner.dense():
        weight_step(pruner, batch, optimizer)
    with pruner.scoring():
        score_step(pruner, batch)
    with pruner.weighting(keep_macs=0.5):
        before = snapshot(pruner.model)
        weight_step(pruner, batch, optimizer)
        weight_step(pruner, batch, optimizer)
    after = pruner.model.state_dict()
    closed = opened = 0
    for group in pruner.network.groups:
        mask = pruner.gates[group.name].mask.bool()
        for layer in group.layers + group.norms:
            for name in (f"{layer}.weight", f"{layer}.bias"):
                if name in before:
                    assert torch.equal(before[name][~mask], after[name][~mask])
                    opened += int((before[name][mask] != after[name][mask]).sum())
        closed += int((~mask).sum())
    assert closed > 50
    assert opened > 1000


def test_the_callers_model_is_untouched(batch: tuple[Tensor, Tensor]) -> None:
    model = resnet20().train()
    model.layer1.eval()
    model.conv1.weight.requires_grad_(False)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    pruner = Pruner(model, batch[0])
    with pruner.scoring():
        score_step(pruner, batch)
    with pruner.weighting(keep_filters=0.7):
        weight_step(pruner, batch, torch.optim.SGD(pruner.network_parameters(), 0.1))
    pruner.compact()
    assert not changed(before, model)
    assert modes == [m.training for m in model.modules()]
    assert not model.conv1.weight.requires_grad
    assert torch.equal(
        pruner.model.conv1.weight, model.conv1.weight
    )  # frozen by the caller, so frozen in the phases too


def test_in_place_trains_the_callers_parameters_when_asked(batch: tuple[Tensor, Tensor]) -> None:
    model = resnet20()
    before = snapshot(model)
    pruner = Pruner(model, batch[0], inplace=True)
    with pruner.dense():
        weight_step(pruner, batch, torch.optim.SGD(pruner.network_parameters(), 0.1))
    assert "conv1.weight" in changed(before, model)


def test_phases_restore_modes_and_gradients_even_after_an_error(batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0])
    pruner.model.eval()
    pruner.model.conv1.weight.requires_grad_(False)
    with pytest.raises(ZeroDivisionError), pruner.scoring():
        1 / 0  # noqa: B018
    assert not any(m.training for m in pruner.model.modules())
    frozen = [name for name, p in pruner.model.named_parameters() if not p.requires_grad]
    assert frozen == ["conv1.weight"]


def test_gates_open_leave_the_network_as_it_is(batch: tuple[Tensor, Tensor]) -> None:
    model = lively(resnet20()).float()
    pruner = Pruner(model, batch[0])
    with torch.no_grad():
        assert torch.equal(pruner.model.eval()(batch[0]), model(batch[0]))


def test_analog_gates_multiply_where_the_method_says() -> None:
    """S relu(x + f(x)) behind the sum and S relu(bn(conv)) inside, spelled out on one block of ResNet-20."""
    model = lively(resnet20())
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for placement in ("sum", "branch"):
        pruner = Pruner(model, x, scorer="free", placement=placement)
        for gate in pruner.gates.values():
            gate.scorer.logits.data.uniform_(-2, 0)
        scores = {name: value[:, None, None] for name, value in pruner.scores().items()}
        seen: list[Tensor] = []
        next_conv = pruner.model.get_submodule("layer1.1.conv1")
        next_conv.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
        with pruner.scoring(), torch.no_grad():
            pruner.model(x)
            stem = scores["conv1"] * F.relu(model.bn1(model.conv1(x)))
            block = model.layer1[0]
            inner = scores["layer1.0.conv1"] * F.relu(block.bn1(block.conv1(stem)))
            branch, gate = block.bn2(block.conv2(inner)), scores["layer1.0.conv2"]
            truth = gate * F.relu(stem + branch) if placement == "sum" else F.relu(stem + gate * branch)
        torch.testing.assert_close(seen[0], truth, rtol=1e-12, atol=1e-12)


def test_groups_of_tied_and_independent_streams() -> None:
    x = torch.zeros(1, 3, 32, 32)
    independent = Pruner(resnet20(), x).network.groups
    assert len(independent) == 19
    assert [g.name for g in independent if g.stream] == [
        "conv1",
        *(f"layer{s}.{b}.conv2" for s in (1, 2, 3) for b in range(3)),
    ]
    tied = {g.name: g for g in Pruner(resnet20(), x, streams="tied").network.groups}
    assert len(tied) == 9 + 3
    assert tied["conv1"].layers == ("conv1", "layer1.0.conv2", "layer1.1.conv2", "layer1.2.conv2")
    assert tied["layer2.0.conv2"].layers == ("layer2.0.conv2", "layer2.1.conv2", "layer2.2.conv2")


@pytest.mark.parametrize(("scorer", "millions"), [("vanilla", 47.1), ("kq", 1.70)])
def test_scorer_sizes_on_resnet56(scorer: str, millions: float) -> None:
    pruner = Pruner(resnet56(), torch.zeros(1, 3, 32, 32), scorer=scorer)
    assert sum(p.numel() for p in pruner.scorer_parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_scores_move_at_the_scorers_own_rate_unless_given_one() -> None:
    image = torch.zeros(1, 3, 16, 16)
    rates = {name: Pruner(resnet20(), image, scorer=name).optimizer.param_groups[0]["lr"] for name in ("kq", "vanilla")}
    assert rates == {"kq": 1e-3, "vanilla": 1e-6}
    assert Pruner(resnet20(), image, score_lr=0.25).optimizer.param_groups[0]["lr"] == 0.25


def test_penalty_by_hand() -> None:
    """At the start every score is 1: ResNet-20 weighs 7 layers of 16 with 16, 6 of 32 with 4, 6 of 64 with 1."""
    x = torch.zeros(1, 3, 32, 32)
    expected = {"area": 7 * 16 * 16 + 6 * 32 * 4 + 6 * 64, "side": 7 * 16 * 4 + 6 * 32 * 2 + 6 * 64, "none": 688}
    for balance, total in expected.items():
        penalty = Pruner(resnet20(), x, penalty=0.01, balance=balance).penalty()
        assert penalty.item() == pytest.approx(0.01 * total)


def test_a_pruner_follows_its_model_to_another_precision(batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0])
    with pruner.scoring():
        before = pruner.penalty().item()
    pruner.model.double()
    with pruner.scoring():
        assert pruner.penalty().dtype == torch.float64
        assert pruner.penalty().item() == pytest.approx(before)
        assert pruner.model(batch[0].double()).dtype == torch.float64


def test_the_penalty_pushes_scores_down(batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(vgg16_bn(), batch[0], scorer="free", penalty=1.0)
    with pruner.scoring():
        for _ in range(3):
            score_step(pruner, batch)
    assert all((scores < 1).all() for scores in pruner.scores().values())


def test_a_gated_model_can_be_copied(batch: tuple[Tensor, Tensor]) -> None:
    """A copy's gates must read the copy's own filters."""
    pruner = Pruner(resnet20(), batch[0], scorer="vanilla")
    with pruner.scoring():
        score_step(pruner, batch)
        twin = copy.deepcopy(pruner.model)
        with torch.no_grad():
            twin.conv1.weight.zero_()
        gates = twin.get_submodule("paam_gates")
        gates.release()
        assert torch.equal(gates.scores()[0], torch.ones(16))
        assert not torch.equal(pruner.scores()["conv1"], torch.ones(16))


def test_misuse_is_explained(batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0])
    with pytest.raises(PaamError, match="Nothing is selected yet"):
        pruner.compact()
    with pytest.raises(TargetError, match="needs a target the first time"), pruner.weighting():
        pass
    with pytest.raises(RecipeError, match="Did you mean 'tied'"):
        Pruner(resnet20(), batch[0], streams="tide")
    with pytest.raises(RecipeError, match="placement cannot be 'after'"):
        Pruner(resnet20(), batch[0], placement="after")
    with pytest.raises(RecipeError, match="no layer that can be pruned"):
        Pruner(nn.Sequential(nn.Linear(3, 2)), torch.zeros(1, 3))


def test_prune_in_one_call() -> None:
    """Two classes told apart by colour: a small CNN must keep solving it with 40 % of its MACs."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(128) % 2
    images = torch.rand(128, 3, 8, 8, generator=generator)
    images[labels == 1, 0] += 1
    loader = list(zip(images.split(32), labels.split(32), strict=True))
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
        ),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)),
    )
    before = snapshot(model)
    schedule = paam.Schedule(warmup=2, cycles=2, score=1, weight=1, finetune=3)
    seen: list[Event] = []
    pruned = paam.prune(
        model,
        loader,
        loader,
        keep_macs=0.4,
        schedule=schedule,
        device="cpu",
        on_event=seen.append,
    )
    assert not changed(before, model)
    assert paam.count(pruned.model, images[:1]).macs <= 0.4 * paam.count(model, images[:1]).macs
    with torch.no_grad():
        assert (pruned.model(images).argmax(1) == labels).float().mean() > 0.95
    assert seen == pruned.history
    assert len(of_kind(seen, Epoch)) == schedule.total == 9
    assert of_kind(seen, Selected)[-1].kept_filters == pruned.plan.counts
    with pytest.raises(paam.errors.DataError, match="no batch"):
        paam.prune(model, [], keep_macs=0.5)


def test_prune_keeps_the_shape_of_a_recipes_target() -> None:
    images, labels = torch.rand(8, 3, 8, 8), torch.arange(8) % 2
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)),
    )
    schedule = paam.Schedule(warmup=0, cycles=1, score=1, weight=1, finetune=0)
    recipe = paam.Recipe(target=paam.Target(keep_macs=0.6, floor=0.5))
    options = {"recipe": recipe, "schedule": schedule, "device": "cpu"}
    rounded = paam.prune(model, [(images, labels)], round_to=4, **options).plan
    assert all(len(kept.filters) % 4 == 0 for kept in rounded.groups.values())
    floored = paam.prune(model, [(images, labels)], keep_macs=0.45, **options).plan
    assert all(len(kept.filters) >= 8 for kept in floored.groups.values())
    with pytest.raises(DataError, match="training batches are exhausted"):
        paam.prune(model, OneEpoch([(images, labels)]), keep_macs=0.6, schedule=schedule, device="cpu")


class OneEpoch(list):
    """A loader that can be read twice: to look at it, and for one epoch."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__() if self.reads <= 2 else iter(())


def test_prune_takes_the_teacher_that_a_recipe_names(tmp_path: Path) -> None:
    """Its weights decide what the network learns: another teacher, another loss."""
    torch.manual_seed(0)
    model, batches = resnet20(), [(torch.randn(4, 3, 16, 16), torch.arange(4))]
    schedule = paam.Schedule(warmup=0, cycles=1, score=1, weight=1, finetune=0)
    losses = []
    for factor in (1.0, 3.0):
        weights = {
            name: value * factor if value.is_floating_point() else value for name, value in model.state_dict().items()
        }
        save_file(weights, tmp_path / "teacher.safetensors")
        distill = DistillSettings(0.5, teacher=str(tmp_path / "teacher.safetensors"))
        history = paam.prune(
            model, batches, keep_macs=0.5, schedule=schedule, recipe=paam.Recipe(distill=distill), device="cpu"
        ).history
        losses.append([event.loss for event in of_kind(history, Epoch)])
    assert losses[0][0] == losses[1][0]  # scores are not taught
    assert losses[0][1] != losses[1][1]


def readme_example(name: str) -> str:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.S)[1]


def test_the_readmes_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library example of the README, word for word, with the parts that are the user's own."""
    monkeypatch.chdir(tmp_path)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    epochs = []

    def train_one_epoch(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        epochs.append(1)

    scope = {"images": images, "loader": [(images, labels)], "criterion": F.cross_entropy, "torch": torch}
    exec(readme_example("loop"), scope | {"train_one_epoch": train_one_epoch} | {"__name__": "example"}, scope)
    assert len(epochs) == 10
    assert paam.count(scope["small"], images[:1]).macs <= 0.5 * 125_485_696
    scope["pruner"].load_state_dict(torch.load(tmp_path / "cycle.pt"))


def test_the_readmes_trained_model_gets_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, images = resnet20(), torch.randn(4, 3, 32, 32)
    scope = {"paam": paam, "model": model, "images": images}
    exec(readme_example("trained"), scope)
    assert paam.count(scope["small"], images[:1]).macs <= 0.5 * paam.count(model, images[:1]).macs
    assert "filters stay" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == ["half.pt2", "model.safetensors", "plan.json"]
    loaded = paam.load("half", model).eval()
    assert torch.equal(loaded(images), scope["small"].eval()(images))


def test_the_readmes_loaders_and_own_criterion_run() -> None:
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
    short = paam.Schedule(warmup=0, cycles=1, score=1, weight=1, finetune=1)
    scope = {"paam": paam, "model": resnet20(), "train": [(images, labels)], "val": [(images, labels)], "short": short}
    exec(re.sub(r"paam\.Schedule\(.*?\)", "short", readme_example("loaders")), scope)
    assert paam.count(scope["small"], images[:1]).macs <= 0.5 * paam.count(resnet20(), images[:1]).macs
    scope = {"paam": paam, "model": resnet20(), "images": images}
    exec(readme_example("own"), scope)
    assert scope["pruner"].selection.kept_params <= 0.5


def test_an_export_takes_its_format_from_the_suffix(tmp_path: Path, batch: tuple[Tensor, Tensor]) -> None:
    pruner = Pruner(resnet20(), batch[0][:1], criterion="l1")
    pruner.select(keep_filters=0.5)
    small = pruner.compact().eval()
    paam.export(small, batch[0][:2], tmp_path / "small.safetensors")
    paam.export(small, batch[0][:2], tmp_path / "small.pt2")
    loaded = paam.load(tmp_path / "small.safetensors", resnet20()).eval()
    assert torch.equal(loaded(batch[0]), small(batch[0]))
    program = torch.export.load(tmp_path / "small.pt2").module()
    torch.testing.assert_close(program(batch[0]), small(batch[0]))
    with pytest.raises(RecipeError, match=r"small.h5 has no known suffix; end it in one of onnx, pt2, safetensors"):
        paam.export(small, batch[0][:2], tmp_path / "small.h5")
