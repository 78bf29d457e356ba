"""Recipes: what is shipped, what is refused and with which words, and that a recipe written out reads back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import paam.config.recipe
from paam.config.recipe import (
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    PruneSettings,
    Recipe,
    TrainSettings,
    load_recipe,
    parse_override,
    recipe_from_tree,
    recipe_to_toml,
    shipped_recipes,
)
from paam.config.schedule import Schedule
from paam.config.target import Target
from paam.errors import RecipeError

FILES = sorted((Path(paam.config.recipe.__file__).parent / "recipes").glob("*.toml"))
DIGITS = "digits-resnet20-kq"
PAPER = [(56, "medium", 5e-4), (56, "high", 1.5e-3), (110, "medium", 2e-4), (110, "high", 5.5e-4)]


def override(key, value):
    return load_recipe(DIGITS, {key: value})


# ---------------------------------------------------------------- what is shipped


def tree_of(file: Path) -> dict:
    return tomllib.loads(file.read_text("utf-8"))


VARIANTS = [(file, name) for file in FILES for name in tree_of(file).get("variants", {})]


def assert_says(recipe: Recipe, section: str, values: dict) -> None:
    for key, value in values.items():
        loaded = getattr(getattr(recipe, section), key)
        assert loaded == value
        assert isinstance(loaded, bool) == isinstance(value, bool)


def test_every_toml_of_the_package_is_listed_with_its_description_and_its_variants():
    listed = shipped_recipes()
    assert FILES
    assert set(listed) == {f.stem for f in FILES} | {f"{f.stem}-{name}" for f, name in VARIANTS}
    for file in FILES:
        assert listed[file.stem] == tree_of(file)["description"]
    assert all(text.strip() and "\n" not in text for text in listed.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_recipe_loads_with_every_value_of_its_file(file):
    recipe = load_recipe(file.stem)
    tree = tree_of(file)
    assert recipe.description == tree.pop("description")
    tree.pop("variants", None)
    for section, values in tree.items():
        assert_says(recipe, section, values)
    assert load_recipe(str(file)) == recipe


@pytest.mark.parametrize(("file", "variant"), VARIANTS, ids=lambda part: getattr(part, "stem", part))
def test_a_variant_is_its_recipe_with_only_its_own_changes(file, variant):
    base, varied = load_recipe(file.stem), load_recipe(f"{file.stem}-{variant}")
    changes = tree_of(file)["variants"][variant]
    assert changes
    for section, values in changes.items():
        assert_says(varied, section, values)
        kept = {key: getattr(getattr(base, section), key) for key in values}
        varied = dataclasses.replace(varied, **{section: dataclasses.replace(getattr(varied, section), **kept)})
    assert dataclasses.replace(varied, description=base.description) == base


@pytest.mark.parametrize("scorer", ["kq", "vanilla"])
@pytest.mark.parametrize(("depth", "ratio", "penalty"), PAPER)
def test_the_papers_recipes_have_the_papers_numbers(scorer, depth, ratio, penalty):
    """Section 2 of the method's description; the rate of KQ scores is our reading."""
    recipe = load_recipe(f"cifar10-resnet{depth}-{scorer}-{ratio}")
    assert recipe.model.name == f"resnet{depth}"
    assert (recipe.data.name, recipe.data.batch_size, recipe.data.crop, recipe.data.flip) == ("cifar10", 256, 4, True)
    assert recipe.prune.scorer == scorer
    assert recipe.prune.penalty == penalty
    assert recipe.prune.activation == "leaky-exponential"
    assert recipe.target == Target(threshold=0.5)
    schedule = recipe.schedule
    assert (schedule.warmup, schedule.alternation, schedule.finetune) == (50, 90, 300)
    assert (schedule.cycles, schedule.score, schedule.weight) == (10, 3, 6)
    for phase in (recipe.warmup, recipe.finetune):
        assert (phase.optimizer, phase.lr, phase.momentum, phase.weight_decay) == ("sgd", 0.1, 0.9, 5e-4)
    assert (recipe.weight.optimizer, recipe.weight.lr) == ("adam", 1e-3)
    assert (recipe.score.optimizer, recipe.score.lr) == ("adam", {"kq": 1e-3, "vanilla": 1e-6}[scorer])


def test_what_a_recipe_leaves_out_is_the_papers_setting(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[finetune]\nmomentum = 0.5\n[weight]\nweight_decay = 1e-4\n", "utf-8")
    recipe = load_recipe(str(path))
    # One changed key of a phase leaves the rest of that phase's own defaults alone.
    assert recipe.finetune == OptimizerSettings("sgd", 0.1, 0.5, False, 5e-4, "cosine", 0, False)
    assert recipe.weight == OptimizerSettings("adam", 1e-3, 0.9, False, 1e-4, "constant", 0, False)
    assert recipe.warmup == OptimizerSettings("sgd", 0.1, 0.9, False, 5e-4, "constant", 0, False)
    assert recipe.schedule == Schedule(warmup=50, cycles=10, score=3, weight=6, finetune=300)
    assert recipe.target == Target(threshold=0.5)
    assert recipe.prune.penalty == 5e-4


# ---------------------------------------------------------------- written out and read back

epochs = st.integers(1, 1_000_000)
share = st.floats(0, 1, exclude_min=True)


def optimizers(rates):
    return st.builds(
        OptimizerSettings,
        optimizer=st.sampled_from(["sgd", "adam"]),
        lr=rates,
        momentum=st.floats(0, 1),
        nesterov=st.booleans(),
        weight_decay=st.floats(0, 1e6),
        decay=st.sampled_from(["constant", "cosine", "step"]),
        ramp=st.integers(0, 1_000_000),
        reset=st.booleans(),
    ).filter(lambda settings: settings.momentum > 0 or not settings.nesterov)


rate = st.floats(0, 1e6)
recipes = st.builds(
    Recipe,
    description=st.text(),
    model=st.builds(ModelSettings, name=st.text()),
    data=st.builds(
        DataSettings,
        name=st.sampled_from(["digits", "cifar10", "folder"]),
        directory=st.none() | st.text(),
        image_size=st.none() | st.integers(1, 4096),
        holdout=st.floats(0, 0.9),
        batch_size=st.integers(1, 1 << 20),
        crop=st.integers(0, 256),
        flip=st.booleans(),
    ),
    prune=st.builds(
        PruneSettings,
        scorer=st.sampled_from(["kq", "vanilla", "free"]),
        penalty=st.floats(0, 1e300),
        balance=st.sampled_from(["area", "side", "none", "macs", "params"]),
        placement=st.sampled_from(["sum", "branch"]),
        streams=st.sampled_from(["independent", "tied"]),
        score_norm=st.sampled_from(["eval", "train"]),
        options=st.dictionaries(
            st.sampled_from(["alpha", "dim_ratio", "other"]), st.floats(-1e300, 1e300) | st.booleans() | st.text()
        ),
    ),
    target=st.one_of(
        st.builds(Target, threshold=st.floats(allow_nan=False, allow_infinity=False)),
        st.builds(Target, keep_filters=share),
        st.builds(Target, keep_macs=share),
        st.builds(Target, keep_params=share),
    ),
    schedule=st.builds(
        Schedule,
        warmup=st.integers(0, 100_000),
        cycles=st.integers(1, 100),
        score=st.integers(1, 1000),
        weight=st.integers(1, 1000),
        finetune=st.integers(0, 100_000),
        control=st.booleans(),
    ),
    warmup=optimizers(rate),
    score=optimizers(st.none() | rate),
    weight=optimizers(rate),
    finetune=optimizers(rate),
    train=st.builds(TrainSettings, checkpoint_every=epochs, threads=st.integers(0, 1024)),
)
ODD = "\x00\x01\x08\t\n\r\x1b\x1f\x7f\x80\x85\xa0\u2028\u2029\ufeff\U0001f600\"'\\\"\"\"'''#=[]{}\\u0041é"


@settings(deadline=None, max_examples=150)
@given(recipes)
@example(Recipe(description=ODD, data=DataSettings(directory=ODD), model=ModelSettings(name=ODD)))
@example(Recipe(description="\\"))
@example(Recipe(prune=PruneSettings(penalty=1e-05, options={"alpha": 1e22})))
def test_a_recipe_written_out_reads_back_equal(recipe):
    text = recipe_to_toml(recipe)
    tree = tomllib.loads(text)
    assert tree["description"] == recipe.description
    assert tree["finetune"]["lr"] == recipe.finetune.lr
    assert recipe_from_tree(tree) == recipe
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.toml"
        path.write_bytes(text.encode("utf-8"))
        assert load_recipe(str(path)) == recipe


def test_a_written_recipe_states_every_default():
    tree = tomllib.loads(recipe_to_toml(Recipe(score=OptimizerSettings("adam", 0.5))))
    # None, which TOML cannot say
    left_out = {"directory", "image_size", "keep_filters", "keep_macs", "keep_params"}
    left_out |= {"widths", "weights", "workers", "compile", "teacher"}
    left_out |= {"options"}  # which are keys of [prune] themselves; a run knows their defaults
    for field in dataclasses.fields(Recipe):
        part = getattr(Recipe(), field.name)
        if dataclasses.is_dataclass(part):
            assert {f.name for f in dataclasses.fields(part)} - left_out == set(tree[field.name])


def test_recipes_are_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes('description = "schmaler — 剪枝"\n'.encode())
    script = (
        "import sys; from paam.config.recipe import load_recipe; print(ascii(load_recipe(sys.argv[1]).description))"
    )
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, **ascii_only},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.strip() == ascii("schmaler — 剪枝")


# ---------------------------------------------------------------- unknown names


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digits-resnet20-qk", f"Did you mean '{DIGITS}'"),
        ("nothing like it", DIGITS),
        ("", DIGITS),
        (f"../recipes/{DIGITS}", DIGITS),
        ("__init__", DIGITS),
        ("x" * 300, DIGITS),
    ],
    ids=["near", "far", "empty", "path", "python", "long"],
)
def test_an_unknown_recipe_names_the_nearest_and_says_how_to_give_ones_own(name, hint):
    with pytest.raises(RecipeError) as refusal:
        load_recipe(name)
    assert hint in str(refusal.value)
    assert ".toml" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("finetun.lr", "finetune"),
        ("Model.name", "model"),
        ("descripton", "description"),
        ("finetune.ler", "finetune.lr"),
        ("finetune.weight-decay", "finetune.weight_decay"),
        ("data.batchsize", "data.batch_size"),
        ("target.keep_mac", "target.keep_macs"),
        ("schedule.cycle", "schedule.cycles"),
    ],
)
def test_an_unknown_section_or_key_names_the_nearest(key, wanted):
    with pytest.raises(RecipeError, match=f"Did you mean '{wanted}'\\?") as refusal:
        override(key, 1)
    assert key.partition(".")[0] in str(refusal.value)


def test_an_unknown_key_that_is_near_to_none_lists_those_there_are():
    with pytest.raises(RecipeError, match=r"'train\.zzzz'.*checkpoint_every.*threads"):
        override("train.zzzz", 1)


@pytest.mark.parametrize("key", ["finetune.lr.min", "model.name.first", "a.b.c"])
def test_keys_deeper_than_a_section_are_unknown(key):
    with pytest.raises(RecipeError):
        override(key, 1)


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("schedule.warmup", True, "a whole number"),
        ("schedule.warmup", 3.0, "a whole number"),
        ("schedule.warmup", "3", "a whole number"),
        ("finetune.lr", True, "a number"),
        ("finetune.lr", "0.1", "a number"),
        ("finetune.lr", [0.1], "a number"),
        ("target.keep_macs", "half", "a number"),
        ("data.flip", 1, "true or false"),
        ("data.flip", "yes", "true or false"),
        ("data.image_size", 32.0, "a whole number"),
        ("data.directory", 3, "text"),
        ("model.name", 56, "text"),
        ("model.name", {"a": 1}, "text"),
        ("description", 1.5, "text"),
    ],
)
def test_a_wrong_type_is_refused_with_the_right_one(key, value, wanted):
    with pytest.raises(RecipeError) as refusal:
        override(key, value)
    assert key in str(refusal.value)
    assert f"must be {wanted}" in str(refusal.value)
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize(("key", "value"), [("finetune.lr", 1), ("prune.penalty", 0), ("target.keep_macs", 1)])
def test_whole_numbers_are_good_for_numbers(key, value):
    section, name = key.split(".")
    loaded = getattr(getattr(override(key, value), section), name)
    assert loaded == value
    assert type(loaded) is float


@pytest.mark.parametrize("value", ["resnet20", 3, [1], True])
def test_a_value_where_a_section_belongs_is_refused(value):
    with pytest.raises(RecipeError, match="model must be a table"):
        override("model", value)


def test_an_override_inside_something_that_is_no_section_is_refused(tmp_path):
    path = tmp_path / "flat.toml"
    path.write_text('model = "resnet20"\n', "utf-8")
    with pytest.raises(RecipeError, match="'model' is not a section"):
        load_recipe(str(path), {"model.name": "resnet56"})


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["high", "low"])
def test_whole_numbers_beyond_any_float_are_refused(value):
    with pytest.raises(RecipeError, match=r"finetune\.lr"):
        override("finetune.lr", value)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.times()
names = st.sampled_from(
    [*(f.name for f in dataclasses.fields(Recipe)), "name", "lr", "keep_macs", "threshold", "cycles", "optimizer", "x"]
)
trees = st.dictionaries(names, leaves | st.lists(leaves, max_size=2) | st.dictionaries(names, leaves, max_size=3))


@settings(deadline=None, max_examples=300)
@given(trees)
def test_any_tree_becomes_a_recipe_or_a_recipe_error(tree):
    try:
        recipe = recipe_from_tree(tree)
    except RecipeError:
        return
    assert recipe_from_tree(tomllib.loads(recipe_to_toml(recipe))) == recipe


# ---------------------------------------------------------------- ranges and choices


@pytest.mark.parametrize(
    ("key", "allowed", "refused"),
    [
        ("data.image_size", [1, 4096], [0, -1, 4097]),
        ("data.holdout", [0, 0.9], [-0.01, 0.91, 1, float("nan")]),
        ("data.batch_size", [1, 4096], [0, -64]),
        ("data.crop", [0, 4], [-1]),
        ("prune.penalty", [0, 5e-4, 10], [-1e-9, float("nan")]),
        ("schedule.warmup", [0, 50], [-1]),
        ("schedule.finetune", [0, 300], [-1]),
        ("schedule.cycles", [1, 10], [0, -1]),
        ("schedule.score", [0, 1, 3], [-1]),
        ("data.cutout", [0, 8], [-1]),
        ("data.mixup", [0, 0.2], [-0.1, 101]),
        ("data.workers", [0, 4], [-1]),
        ("distill.weight", [0, 1], [-0.1, 1.1]),
        ("distill.temperature", [1, 4], [0]),
        ("target.floor", [0, 0.25, 1], [-0.1, 1.1]),
        ("schedule.weight", [1, 6], [0]),
        ("train.checkpoint_every", [1, 10], [0]),
        ("train.threads", [0, 2], [-1]),
        ("warmup.lr", [0, 0.1], [-0.1, float("nan"), float("inf")]),
        ("finetune.momentum", [0, 0.9], [-0.1, 1.1, float("nan")]),
        ("weight.weight_decay", [0, 5e-4], [-1e-4, float("nan")]),
        ("score.ramp", [0, 5], [-1]),
        ("target.keep_macs", [1e-3, 0.5, 1], [0, -0.5, 1.01, float("nan")]),
        ("target.keep_params", [0.5], [0, 2]),
        ("target.keep_filters", [0.5], [0, 50]),
        ("target.threshold", [0, 0.5, 0.9], [float("nan")]),
    ],
)
def test_ranges(key, allowed, refused):
    section, name = key.split(".")
    for value in allowed:
        assert getattr(getattr(override(key, value), section), name) == value
    for value in refused:
        with pytest.raises(RecipeError, match=name):
            override(key, value)


def test_a_number_out_of_range_is_told_the_range():
    with pytest.raises(RecipeError, match=r"data\.holdout must be from 0 to 0\.9 \(got 1\.5\)\."):
        override("data.holdout", 1.5)


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [
        ("prune.balance", "aera", "area"),
        ("prune.placement", "branche", "branch"),
        ("prune.streams", "independant", "independent"),
        ("prune.score_norm", "evaluation", "eval"),
        ("warmup.optimizer", "SGD", "sgd"),
        ("finetune.decay", "cosin", "cosine"),
    ],
)
def test_a_word_that_is_no_choice_names_the_nearest(key, typed, meant):
    with pytest.raises(RecipeError) as refusal:
        override(key, typed)
    assert key in str(refusal.value)
    assert f"'{typed}'" in str(refusal.value)
    assert meant in str(refusal.value)
    section, name = key.split(".")
    assert getattr(getattr(override(key, meant), section), name) == meant


@pytest.mark.parametrize("phase", ["score", "weight"])
def test_phases_that_alternate_have_no_mean(phase):
    with pytest.raises(RecipeError, match=rf"{phase}\.average must be 0"):
        load_recipe(DIGITS, {f"{phase}.average": 0.9})
    assert load_recipe(DIGITS, {"warmup.average": 0.9}).warmup.average == 0.9


def test_nesterov_needs_momentum():
    with pytest.raises(RecipeError, match="momentum"):
        load_recipe(DIGITS, {"finetune.momentum": 0, "finetune.nesterov": True})


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("finetune.lr=0.05", "finetune.lr", 0.05),
        ("finetune.lr = 5e-2", "finetune.lr", 0.05),
        ("schedule.warmup=3", "schedule.warmup", 3),
        ("data.flip=true", "data.flip", True),
        ("model.name=resnet56", "model.name", "resnet56"),
        ("model.name=nets:make", "model.name", "nets:make"),
        ('model.name="resnet56"', "model.name", "resnet56"),
        ("description=a = b", "description", "a = b"),
        ("data.directory=/data/cifar 10", "data.directory", "/data/cifar 10"),
        ("data.directory=", "data.directory", ""),
        ("description=it's", "description", "it's"),
    ],
)
def test_overrides_are_toml_and_bare_words_are_text(text, key, value):
    parsed = parse_override(text)
    assert parsed == (key, value)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize("text", ["", "finetune.lr", "=3", "  = 3", "finetune.lr: 3"])
def test_an_override_without_key_or_value_is_refused_with_an_example(text):
    with pytest.raises(RecipeError, match="--set finetune"):
        parse_override(text)


@pytest.mark.parametrize("raw", ["9" * 5000, "[" * 20_000, "{a=" * 20_000], ids=["digits", "lists", "tables"])
def test_an_override_that_python_cannot_parse_is_still_only_a_recipe_error(raw):
    with pytest.raises(RecipeError, match=r"finetune\.lr"):
        override(*parse_override(f"finetune.lr={raw}"))


def test_an_override_changes_one_key_and_nothing_else():
    plain, changed = load_recipe(DIGITS), override("finetune.lr", 0.25)
    assert plain.finetune.lr != 0.25
    assert changed.finetune == dataclasses.replace(plain.finetune, lr=0.25)
    assert dataclasses.replace(changed, finetune=plain.finetune) == plain


# ---------------------------------------------------------------- targets


def test_a_target_override_takes_the_place_of_the_recipes_own():
    assert load_recipe(DIGITS).target == Target(keep_macs=0.5)
    assert override("target.keep_params", 0.25).target == Target(keep_params=0.25)
    assert override("target.threshold", 0.4).target == Target(threshold=0.4)
    assert override("target.keep_macs", 0.3).target == Target(keep_macs=0.3)


def test_two_targets_in_a_file_are_refused(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text("[target]\nkeep_macs = 0.5\nkeep_filters = 0.5\n", "utf-8")
    with pytest.raises(RecipeError, match="Give one of.*got keep_filters and keep_macs"):
        load_recipe(str(path))


def test_macs_and_parameters_may_be_limited_together():
    target = load_recipe(DIGITS, {"target.keep_macs": 0.5, "target.keep_params": 0.4}).target
    assert target.limits == {"keep_macs": 0.5, "keep_params": 0.4}


def test_two_targets_among_overrides_are_refused():
    with pytest.raises(RecipeError, match="target"):
        load_recipe(DIGITS, {"target.keep_macs": 0.5, "target.threshold": 0.5})


def test_an_empty_target_is_refused(tmp_path):
    path = tmp_path / "none.toml"
    path.write_text("[target]\n", "utf-8")
    with pytest.raises(RecipeError, match="Give one of.*got none"):
        load_recipe(str(path))


# ---------------------------------------------------------------- files that are no recipes


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"this is no TOML", "not valid TOML"),
        (b"[model\nname = 1", "not valid TOML"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"\x80\x04\x95\xff\x00\xfe", "cannot be read"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "cannot be read"),
        (b"a = " + b"[" * 20_000, "recipe"),
        (b"a = " + b"9" * 5000, "recipe"),
    ],
    ids=["words", "open", "twice", "pickle", "picture", "deep", "long"],
)
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=reason) as refusal:
        load_recipe(str(path))
    assert str(path) in str(refusal.value)


def test_a_missing_file_and_a_directory_are_refused_by_name(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    for name in ("missing.toml", "folder.toml", "x" * 300 + ".toml"):
        with pytest.raises(RecipeError, match="cannot be read") as refusal:
            load_recipe(str(tmp_path / name))
        assert name in str(refusal.value)


def test_an_empty_file_is_the_default_recipe(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_bytes(b"")
    assert load_recipe(str(path)) == Recipe()


def test_what_is_ignored_is_a_list_of_names():
    recipe = load_recipe("digits-resnet20-kq", dict([parse_override('prune.ignore=["layer1", "linear"]')]))
    assert recipe.prune.ignore == ("layer1", "linear")
    assert recipe_from_tree(tomllib.loads(recipe_to_toml(recipe))) == recipe
    for value in ("layer1", 3, [3], [["layer1"]]):
        with pytest.raises(RecipeError, match="prune.ignore must be"):
            load_recipe("digits-resnet20-kq", {"prune.ignore": value})


def test_a_new_target_keeps_the_steps_of_widths(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[target]\nkeep_params = 0.5\nround_to = 8\n")
    assert load_recipe(str(path), {"target.keep_macs": 0.3}).target == Target(keep_macs=0.3, round_to=8)
    assert load_recipe(str(path), {"target.round_to": 4}).target == Target(keep_params=0.5, round_to=4)
    with pytest.raises(RecipeError, match="target.round_to must be from 1"):
        load_recipe(str(path), {"target.round_to": 0})
