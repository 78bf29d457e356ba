"""Scores: exactly 1 at the start, gradients alive, KQ's cheap form against the explicit one."""

from __future__ import annotations

import copy
import math
import tomllib
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paam.config.recipe import Recipe, recipe_from_tree, recipe_to_toml, recipe_to_tree
from paam.config.schema import Range, arguments_of
from paam.errors import RecipeError
from paam.pruning.activations import ACTIVATIONS, activation
from paam.pruning.gates import Gate, Gates, filter_rows
from paam.pruning.pruner import Pruner
from paam.pruning.scorers import KQ, SCORERS, Vanilla, scorer_of
from paam.runs.setup import check_recipe, make_pruner


def scores_of(gate: Gate) -> torch.Tensor:
    return Gates([gate]).scores()[0]


def explicit_kq(filters: torch.Tensor, scorer: KQ, alpha: float) -> torch.Tensor:
    """The formula as it is printed: the F x F attention matrix, averaged over keys one entry at a time."""
    queries, keys = filters @ scorer.query.detach(), filters @ scorer.key.detach()
    count, d = queries.shape
    scores = []
    for i in range(count):
        total = sum(float(torch.dot(queries[i], keys[j])) for j in range(count))
        scores.append(total / count / (alpha * math.sqrt(d)))
    return torch.tensor(scores, dtype=filters.dtype)


@given(
    st.integers(1, 9),
    st.integers(1, 30),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([0.1, 1.0, 7.0]),
    st.integers(0, 99),
)
def test_kq_cheap_form_equals_the_explicit_one(
    filters: int, weights: int, ratio: float, alpha: float, seed: int
) -> None:
    torch.manual_seed(seed)
    scorer = scorer_of("kq", dim_ratio=ratio, alpha=alpha)(filters, weights).double()
    assert isinstance(scorer, KQ)
    scorer.key.data.normal_()
    rows = torch.randn(filters, weights, dtype=torch.float64)
    truth = explicit_kq(rows, scorer, alpha)
    torch.testing.assert_close(scorer.attend(rows, *scorer.tensors()).detach(), truth, rtol=1e-10, atol=1e-12)


def test_vanilla_is_one_linear_map_of_all_weights() -> None:
    scorer = Vanilla(2, 3)
    scorer.weight.data = torch.arange(12.0).view(6, 2)
    filters = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
    # 1 * row 0 + 2 * row 2 + 3 * row 4 of W, by hand.
    assert scorer.attend(filters, *scorer.tensors()).tolist() == [0 + 2 * 4 + 3 * 8, 1 + 2 * 5 + 3 * 9]


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("phi", ["leaky-exponential", "leaky-2sigmoid"])
def test_scores_start_at_exactly_one(name: str, phi: str) -> None:
    gate = Gate([torch.nn.Conv2d(3, 7, 3)], 7, scorer_of(name)(7, 27), activation(phi))
    assert torch.equal(scores_of(gate), torch.ones(7))


@pytest.mark.parametrize("name", SCORERS)
def test_layers_scored_together_score_as_they_do_alone(name: str) -> None:
    """Gradients too; layers of several shapes, one of them on its own."""
    torch.manual_seed(0)
    convs = [torch.nn.Conv2d(c, f, 3) for c, f in ((3, 5), (4, 5), (3, 5), (3, 6), (4, 5))]
    phi = activation("leaky-exponential")
    gates = [Gate([c], c.out_channels, scorer_of(name)(c.out_channels, 9 * c.in_channels), phi) for c in convs]
    together = Gates(gates).double()
    for conv in convs:
        conv.double()
    for parameter in together.parameters():
        parameter.data.normal_()
    ways = [torch.randn(c.out_channels, dtype=torch.float64) for c in convs]
    results = []
    for scores in (together.scores(), [phi(g.scorer.attend(g.rows(), *g.scorer.tensors())) for g in gates]):
        loss = torch.stack([(s * w).sum() for s, w in zip(scores, ways, strict=True)]).sum()
        grads = torch.autograd.grad(loss, list(together.parameters()))
        results.append([*scores, *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_held_rows_are_those_of_the_moment() -> None:
    conv = torch.nn.Conv2d(3, 4, 1)
    scorer = scorer_of("vanilla")(4, 3)
    scorer.weight.data.normal_()
    gates = Gates([Gate([conv], 4, scorer, activation("leaky-exponential"))])
    (before,) = gates.scores()
    gates.hold()
    memory = gates._held[0].data_ptr()
    conv.weight.data.uniform_(0, 1)
    assert torch.equal(gates.scores()[0], before)
    gates.hold()
    assert gates._held[0].data_ptr() == memory  # a captured step reads it there
    (after,) = gates.scores()
    gates.release()
    assert torch.equal(gates.scores()[0], after)
    assert not torch.equal(after, before)


def _step(gate: Gate, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """One step on a loss that weighs every score differently; the gradient norm of each scorer parameter."""
    optimizer.zero_grad()
    scores = scores_of(gate)
    (scores * torch.linspace(-1, 2, len(scores))).sum().backward()
    norms = {name: float(p.grad.norm()) for name, p in gate.scorer.named_parameters() if p.grad is not None}
    optimizer.step()
    return norms


@pytest.mark.parametrize("name", ["vanilla", "free"])
@pytest.mark.parametrize("phi", ACTIVATIONS)
def test_every_parameter_gets_a_gradient_at_once(name: str, phi: str) -> None:
    gate = Gate([torch.nn.Conv2d(4, 5, 3)], 5, scorer_of(name)(5, 36), activation(phi))
    norms = _step(gate, torch.optim.SGD(gate.scorer.parameters(), 0.1))
    assert set(norms) == {n for n, _ in gate.scorer.named_parameters()}
    assert min(norms.values()) > 0


def test_kq_keys_learn_at_step_one_and_queries_from_step_two() -> None:
    torch.manual_seed(0)
    gate = Gate([torch.nn.Conv2d(4, 5, 3)], 5, scorer_of("kq")(5, 36), activation("leaky-exponential"))
    optimizer = torch.optim.SGD(gate.scorer.parameters(), 0.1)
    first, second = _step(gate, optimizer), _step(gate, optimizer)
    assert first["key"] > 0
    assert first["query"] == 0
    assert min(second["key"], second["query"]) > 0


def test_no_gradient_reaches_the_filters() -> None:
    conv = torch.nn.Conv2d(4, 5, 3)
    gate = Gate([conv], 5, scorer_of("vanilla")(5, 36), activation("leaky-exponential"))
    scores_of(gate).sum().backward()
    assert conv.weight.grad is None


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_transposed_convolutions_are_rows(groups: int) -> None:
    """Weights [in, out / groups, k, k]: filter o reads, in its group, column o of every input."""
    conv = torch.nn.ConvTranspose2d(4, 6, 2, groups=groups)
    rows = filter_rows(conv)
    per, inputs = 6 // groups, 4 // groups
    for o in range(6):
        own = [conv.weight[(o // per) * inputs + i, o % per].flatten() for i in range(inputs)]
        assert torch.equal(rows[o], torch.cat(own).detach())


def test_activations_by_hand() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    sigmoid = 1 / (1 + math.e)  # sigmoid(-1)
    expected = {
        "leaky-exponential": [1 / math.e, 1.0, 1.02],
        "leaky-2sigmoid": [2 * sigmoid, 1.0, 1.02],
        "sigmoid": [sigmoid, 0.5, 1 / (1 + math.exp(-2))],
        "sharp-sigmoid": [1 / (1 + math.exp(100)), 0.5, 1.0],
    }
    for name, values in expected.items():
        torch.testing.assert_close(activation(name)(x), torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("name", ["leaky-exponential", "leaky-2sigmoid"])
def test_leaky_activations_keep_a_finite_gradient_far_out(name: str) -> None:
    x = torch.tensor([-20.0, 0.0, 1e4], requires_grad=True)
    activation(name)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad > 0).all()


@given(st.integers(0, 999), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_lemma_1_with_squares(seed: int, delta: float, epsilon: float) -> None:
    """With every score in [delta, 1 + eps], gating keeps ||f||^2 / ||x||^2 within the squared ratio of the bounds."""
    rng = torch.Generator().manual_seed(seed)
    f, x = torch.randn(2, 6, 4, 4, generator=rng, dtype=torch.float64)
    scores = torch.rand(6, 1, 1, generator=rng, dtype=torch.float64) * (1 + epsilon - delta) + delta
    ratio = float(f.square().sum() / x.square().sum())
    gated = float((scores * f).square().sum() / (scores * x).square().sum())
    bound = ((1 + epsilon) / delta) ** 2
    assert ratio / bound <= gated * (1 + 1e-12)
    assert gated <= ratio * bound * (1 + 1e-12)


def test_lemma_1_as_printed_without_squares_does_not_hold() -> None:
    """Two channels, delta 0.1: the unsquared bound of 10 is passed by a ratio that grows 100-fold."""
    f, x = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    scores = torch.tensor([1.0, 0.1])
    growth = (scores * f).square().sum() / (scores * x).square().sum() / (f.square().sum() / x.square().sum())
    assert growth > 1 / 0.1


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="leaky-exponential"):
        activation("leaky-exponentail")
    with pytest.raises(RecipeError, match="vanilla"):
        scorer_of("vanila")


# ---------------------------------------------------------------- options


def scored(**prune: Any) -> Recipe:
    return recipe_from_tree({"prune": {"method": "paam", **prune}})


def test_every_number_among_the_options_has_a_range() -> None:
    for name, make in SCORERS.items():
        hints = get_type_hints(make.__init__, include_extras=True)
        for option in arguments_of(make):
            is_number = any(part in str(hints[option]) for part in ("int", "float"))
            assert not is_number or any(isinstance(one, Range) for one in get_args(hints[option])), (name, option)


@pytest.mark.parametrize(
    ("option", "allowed", "refused"),
    [("dim_ratio", [0.25, 1], [0, -1, 65, math.nan, "1"]), ("alpha", [1e-3, 1], [0, -1, math.nan, True])],
)
def test_options_have_ranges_in_recipes_and_without(option: str, allowed: list[Any], refused: list[Any]) -> None:
    net, image = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3)), torch.zeros(1, 3, 8, 8)
    for value in allowed:
        assert check_recipe(scored(**{option: value})).prune.options[option] == value
        Pruner(net, image, **{option: value})
    for value in refused:
        with pytest.raises(RecipeError, match=f"{option} must be"):
            check_recipe(scored(**{option: value}))
        with pytest.raises(RecipeError, match=f"{option} must be"):
            Pruner(net, image, **{option: value})


def test_an_option_of_several_scorers_means_the_same_in_all() -> None:
    """A recipe's key has one range and one default, whatever scorer reads it."""
    found: dict[str, Any] = {}
    for make in SCORERS.values():
        hints = get_type_hints(make.__init__, include_extras=True)
        for option, (_, default) in arguments_of(make).items():
            assert found.setdefault(option, (hints[option], default)) == (hints[option], default)


def test_an_option_of_a_recipe_reaches_the_scorer_and_the_record() -> None:
    given = check_recipe(scored(dim_ratio=0.5))
    assert (given.prune.options["dim_ratio"], given.prune.options["alpha"]) == (0.5, 1.0)
    pruner = make_pruner(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3)), torch.zeros(1, 3, 8, 8), given
    )
    assert pruner.gates["0"].scorer.query.shape == (27, 2)
    assert recipe_to_tree(given)["prune"]["dim_ratio"] == 0.5
    assert "options" not in recipe_to_tree(given)["prune"]
    assert recipe_from_tree(tomllib.loads(recipe_to_toml(given))) == given
    assert check_recipe(scored(dim_ratio=0.5, scorer="vanilla")).prune.options["dim_ratio"] == 0.5  # left aside


def test_an_option_that_no_scorer_has_is_refused_with_the_nearest() -> None:
    net, image = torch.nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)
    for typed, meant in (("alhpa", "alpha"), ("penalti", "penalty"), ("dim_ration", "dim_ratio")):
        with pytest.raises(RecipeError) as in_recipe:
            check_recipe(scored(**{typed: 0.5}))
        wanted = f"Invalid recipe: unknown key 'prune.{typed}'. Did you mean 'prune.{meant}'?"
        assert str(in_recipe.value) == wanted
    with pytest.raises(
        RecipeError, match=r"unknown key 'prune\.options'\. Known: activation, alpha, balance, dim_ratio"
    ):
        check_recipe(scored(options=0.5))
    with pytest.raises(RecipeError, match=r"unknown key 'prune\.ignor'\. Did you mean 'prune\.ignore'\?"):
        scored(ignor=["head"])
    with pytest.raises(RecipeError, match=r"no scorer with an option 'alhpa'\. Did you mean 'alpha'\?"):
        Pruner(net, image, alhpa=0.5)
    with pytest.raises(RecipeError, match="prune.alpha must be a number, text, true or false"):
        scored(alpha=[1])
    for chosen in ({"criterion": "l1"}, {"scorer": SCORERS["free"]}):
        with pytest.raises(RecipeError, match="alpha: options are for scorers that are given by name"):
            Pruner(net, image, alpha=0.5, **chosen)


def test_options_outlive_a_copy() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    pruner = copy.deepcopy(Pruner(net, torch.zeros(1, 3, 8, 8), dim_ratio=0.5))
    assert pruner.gates["0"].scorer.query.shape == (27, 2)
