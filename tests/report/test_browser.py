"""The report in a real browser: nothing fetched, nothing complained about, and what moves shows the right numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from browser import Page, browser
from paam.report.page import write_report
from records import EPOCHS, RECIPE, SCORES, events, large, write
from render.pages import FIGURES

pytestmark = pytest.mark.browser

DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    """One run; three runs of two recipes, of which one is cut short; a long run of a deep network."""
    folder = tmp_path_factory.mktemp("reports")
    other = {**RECIPE, "prune": {**RECIPE["prune"], "scorer": "free"}}
    one = write(folder / "one", events())
    many = [
        one,
        write(folder / "two", events(accuracy=93.0, trained="warm-up", recipe=other)),
        write(folder / "three", events(recipe={**RECIPE, "description": "cut short", "target": {}})[:-1]),
    ]
    made = {"one": [one], "many": many, "deep": [write(folder / "deep", large())]}
    for name, records in made.items():
        write_report(records, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in made}


def use(page: Page, selector: str, value: str, event: str) -> None:
    """Give a control a value as a user would."""
    page.evaluate(
        f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})"
        f"(document.querySelector({json.dumps(selector)}))"
    )


@pytest.mark.parametrize("name", ["one", "many", "deep"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_nothing_is_fetched_nothing_complains_and_the_page_fits(chromium, reports, tmp_path, name, scheme, width):
    chromium.open(reports[name], width=width, scheme=scheme)
    chromium.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert chromium.complaints() == []
    assert chromium.requests() == [reports[name].as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    chromium.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.width == width
        shades = picture.convert("L").histogram()
    # Mostly paper, and some ink: no blank page, and the scheme that was asked for.
    paper = sum(shades[230:]) if scheme == "light" else sum(shades[:60])
    assert 0.5 < paper / sum(shades) < 0.999


def test_a_complaint_and_a_request_would_be_seen(chromium, tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.error('no')</script><img src='nowhere.png'>", "utf-8")
    chromium.open(tmp_path / "bad.html")
    assert any("no" in text for text in chromium.complaints())
    assert len(chromium.requests()) == 2


def test_bars_stand_at_the_height_of_what_was_kept_and_can_show_shares(chromium, reports):
    chromium.open(reports["deep"])
    record = [json.loads(line) for line in (reports["deep"].parent / "deep" / "record.jsonl").read_text().splitlines()]
    kept = record[-1]["kept_filters"]
    heights = "[...document.querySelectorAll('.layer .kept')].map(r => r.getBoundingClientRect().height)"
    full = chromium.evaluate("document.querySelector('.layer .full').getBoundingClientRect().height")
    assert chromium.evaluate(heights) == pytest.approx([full * k / w for k, w in kept.values()], abs=0.1)
    assert chromium.texts(".layer .count") == [str(k) for k, _ in kept.values()]
    # Every bar is drawn within the window: panels wrap.
    right = chromium.evaluate(
        "Math.max(...[...document.querySelectorAll('.layer')].map(r => r.getBoundingClientRect().right))"
    )
    assert right <= DESKTOP


def test_share_and_filters_change_heights_where_widths_differ(chromium, tmp_path):
    record = events()
    record[-1]["kept_filters"] = {"a": [2, 4], "b": [4, 16]}
    write_report([write(tmp_path / "run", record)], tmp_path / "r.html")
    chromium.open(tmp_path / "r.html")
    heights = "[...document.querySelectorAll('.layer .kept')].map(r => r.getBoundingClientRect().height)"
    assert chromium.evaluate(heights) == pytest.approx([150 * 2 / 16, 150 * 4 / 16], abs=0.1)
    chromium.evaluate("document.querySelector('[data-heights=share]').click()")
    assert chromium.evaluate(heights) == pytest.approx([75, 37.5], abs=0.1)
    chromium.evaluate("document.querySelector('[data-heights=filters]').click()")
    assert chromium.evaluate(heights) == pytest.approx([150 * 2 / 16, 150 * 4 / 16], abs=0.1)


def shown_histogram(page: Page) -> dict[float, float]:
    """Left edge of each bar in scores -> its height relative to the tallest."""
    path = page.evaluate("[...document.querySelectorAll('.scores .area path')].map(p => p.getAttribute('d'))")
    bars = re.findall(r"M([\d.]+) 100V([\d.]+)H", path[0] + path[1])
    most = max(100 - float(top) for _, top in bars)
    return {round(float(left) * 0.0102, 2): (100 - float(top)) / most for left, top in bars}  # the axis ends at 1.02


@pytest.mark.parametrize(
    ("cycle", "layer"), [(1, None), (2, None), (1, "stem"), (2, "block.outer"), (1, "block.inner")]
)
def test_the_slider_and_the_choice_of_a_layer_show_the_recorded_scores(chromium, reports, cycle, layer):
    chromium.open(reports["one"])
    use(chromium, ".cycle", str(cycle - 1), "input")
    use(chromium, ".layer-choice", str(-1 if layer is None else list(SCORES[1]).index(layer)), "change")
    scores = [s for name, values in SCORES[cycle].items() for s in values if layer in (None, name)]
    counts: dict[float, int] = {}
    for score in scores:
        left = round(100 * score) // 2 * 2 / 100
        counts[left] = counts.get(left, 0) + 1
    expected = {left: count / max(counts.values()) for left, count in counts.items()}
    assert shown_histogram(chromium) == pytest.approx(expected, abs=0.001)
    # The cumulative curve at the threshold: scores below a half.
    d = chromium.evaluate("document.querySelectorAll('.scores .area')[1].querySelector('path').getAttribute('d')")
    steps = {round(float(x) * 0.0102, 2): 1 - float(y) / 100 for x, y in re.findall(r"L([\d.]+) ([\d.]+)", d)}
    assert steps[0.5] == pytest.approx(sum(s < 0.5 for s in scores) / len(scores), abs=0.001)
    stay = sum(s >= 0.5 for s in scores)
    (line,) = chromium.texts(".score-line")
    assert line.startswith(f"Cycle {cycle}, {layer or 'all layers'}.")
    assert f"{stay} of {len(scores)} filters stay; threshold θ = 0.500" in line
    assert chromium.texts(".cycle-number") == [str(cycle)]


def test_what_python_drew_is_what_the_script_draws(chromium, reports):
    """Without scripts the page shows the last cycle, exactly as choosing it does."""
    numbers = (
        "[...document.querySelectorAll('.scores path')].map(p => p.getAttribute('d').match(/[\\d.]+/g).map(Number))"
    )
    chromium.open(reports["deep"])
    drawn = chromium.evaluate(numbers), chromium.texts(".scores .y-ticks span"), chromium.texts(".score-line")
    use(chromium, ".cycle", "0", "input")
    assert chromium.evaluate(numbers) != drawn[0]
    use(chromium, ".cycle", "9", "input")
    for ours, theirs in zip(chromium.evaluate(numbers), drawn[0], strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)
    assert chromium.texts(".scores .y-ticks span") == drawn[1]
    assert chromium.texts(".score-line") == drawn[2]


def test_the_cursor_tells_the_numbers_of_an_epoch(chromium, reports):
    chromium.open(reports["one"])
    chromium.evaluate("document.querySelector('.curves').focus()")
    for place in reversed(range(len(EPOCHS) - 1)):  # it stands on the last epoch
        chromium.key("ArrowLeft")
        _, cycle, loss, accuracy = EPOCHS[place]
        (words,) = chromium.texts("#tip")
        assert words.startswith(f"epoch {place + 1}, ")
        assert f"loss {loss:.4f} accuracy {accuracy:.2f} %" in words
        assert (f"of cycle {cycle}" in words) == bool(cycle)
    chromium.hover(".curves .area")  # the middle of ten epochs
    assert chromium.texts("#tip")[0].startswith(("epoch 5,", "epoch 6,"))


def test_hover_and_arrow_keys_tell_a_layer(chromium, reports):
    chromium.open(reports["one"])
    assert chromium.evaluate("document.getElementById('tip').hidden") is True
    chromium.hover(".layer.inner")
    assert chromium.evaluate("document.getElementById('tip').hidden") is False
    assert chromium.texts("#tip") == ["block.inner: 0 of 4 filters kept (0 %)"]
    chromium.evaluate("document.querySelector('.layer').focus()")
    assert chromium.texts("#tip") == ["stem: 3 of 4 filters kept (75 %), residual stream"]
    chromium.key("ArrowRight")
    assert chromium.texts("#tip") == ["block.inner: 0 of 4 filters kept (0 %)"]
    box = chromium.evaluate("(b => [b.left, b.right, b.top])(document.getElementById('tip').getBoundingClientRect())")
    assert box[0] >= 0
    assert box[1] <= DESKTOP
    assert box[2] >= 0


def test_a_tap_tells_a_layer_and_an_epoch(chromium, reports):
    chromium.open(reports["one"], width=PHONE)
    chromium.tap(".layer.inner")
    assert chromium.evaluate("document.getElementById('tip').hidden") is False
    assert chromium.texts("#tip") == ["block.inner: 0 of 4 filters kept (0 %)"]
    chromium.tap(".curves .area")
    assert chromium.evaluate("document.getElementById('tip').hidden") is False
    assert chromium.texts("#tip")[0].startswith(("epoch 5,", "epoch 6,"))
    chromium.tap("h1")
    assert chromium.evaluate("document.getElementById('tip').hidden") is True


def test_the_table_sorts_by_mouse_and_by_keyboard_and_gaps_stay_last(chromium, reports):
    chromium.open(reports["many"])
    order = "[...document.querySelectorAll('#runs tbody .name')].map(e => e.textContent)"
    assert chromium.evaluate(order) == ["one", "two", "three"]
    button = "document.querySelectorAll('#runs thead button')[2]"  # test accuracy: 88.5, 93, none
    chromium.evaluate(f"{button}.click()")
    assert chromium.evaluate(order) == ["one", "two", "three"]
    chromium.evaluate(f"{button}.focus()")
    chromium.key("Enter")
    assert chromium.evaluate(order) == ["two", "one", "three"]
    assert chromium.evaluate(f"{button}.parentElement.getAttribute('aria-sort')") == "descending"
    assert chromium.evaluate("document.querySelectorAll('#runs [aria-sort]').length") == 1


def test_marks_of_the_plane_stand_where_their_numbers_are(chromium, reports):
    chromium.open(reports["many"])
    marks = chromium.evaluate(
        "[...document.querySelectorAll('#plane .mark')].map(m => [m.dataset.tip, m.style.left, m.style.top])"
    )
    points = []
    for tip, left, top in marks:
        found = re.search(r"([\d.]+) % at ([\d.]+) % of", tip)
        if found:
            points.append((float(found[1]), float(found[2]), 100 - float(top[:-1]), float(left[:-1])))
    assert {(accuracy, macs) for accuracy, macs, _, _ in points} >= {(88.5, 25.0), (93.0, 25.0), (94.28, 50.7)}
    # One straight scale for all: place is a linear function of the number.
    for value, place in ((0, 2), (1, 3)):
        low, high = min(points, key=lambda p: p[value]), max(points, key=lambda p: p[value])
        slope = (high[place] - low[place]) / (high[value] - low[value])
        assert slope > 0
        for point in points:
            assert point[place] == pytest.approx(low[place] + slope * (point[value] - low[value]), abs=0.3)


def boxes(page: Page, selector: str) -> list[list[float]]:
    """Left, top, right and bottom of every element."""
    return page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.top, b.right, b.bottom])"
    )


def overlaps(found: list[list[float]]) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, a in enumerate(found)
        for j, b in enumerate(found[:i])
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_labels_of_runs_low_in_the_plane_cover_neither_the_axis_nor_each_other(chromium, tmp_path, width):
    records = [
        write(tmp_path / f"run{i}", events(accuracy=88 + 0.01 * i, recipe={**RECIPE, "description": str(i)}))
        for i in range(6)
    ]
    write_report(records, tmp_path / "r.html")
    chromium.open(tmp_path / "r.html", width=width)
    (area,) = boxes(chromium, "#plane .area")
    labels = boxes(chromium, "#plane .mark-label.ours")
    assert len(labels) == 6
    assert max(bottom for _, _, _, bottom in labels) < area[3] - 4
    assert min(left for left, _, _, _ in labels) > area[0]
    assert overlaps(labels) == []
    # From the best run to the last, as their points stand.
    assert [words.split()[0] for words in chromium.texts("#plane .mark-label.ours")] == list("654321")
    assert [top for _, top, _, _ in labels] == sorted(top for _, top, _, _ in labels)


def test_labels_of_the_stages_stand_apart_where_there_are_many(chromium, tmp_path):
    record = [event for event in events() if event.get("cycle", 0) == 0]
    place = next(number for number, event in enumerate(record) if event.get("phase") == "finetune")
    for event in record[place:]:
        event["epoch"] = event.get("epoch", 0) + 100
    for cycle in range(10, 0, -1):
        kept = {"kept_macs": 0.5, "kept_params": 0.5}
        cut = {"event": "selection", "epoch": cycle, "cycle": cycle, "threshold": 0.5, "kept_filters": {}, **kept}
        after = {"event": "epoch", "epoch": 10 + cycle, "phase": "weight", "cycle": cycle, "loss": 1.0, "lr": 0.1}
        record[place:place] = [{**cut, "accuracy": 50.0}, {**after, **kept, "accuracy": 60.0 + cycle, "seconds": 1.0}]
    write_report([write(tmp_path / "run", record)], tmp_path / "r.html")
    chromium.open(tmp_path / "r.html", width=PHONE)
    assert chromium.texts(".stages .x-ticks span") == ["warm-up", "1", "3", "5", "7", "9", "tuned", "dense"]
    assert overlaps(boxes(chromium, ".stages .x-ticks span")[-2:]) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_wider_than_the_page_shows_on_which_side_there_is_more(chromium, reports, tmp_path, scheme):
    def shaded() -> tuple[bool, bool]:
        """Whether the left and the right edge differ from the paper in most of their pixels."""
        chromium.frame()
        chromium.screenshot(tmp_path / "shot.png", ".compare .scroll")
        with Image.open(tmp_path / "shot.png") as shot:
            grey = shot.convert("L")
        sides = []
        for x in (1, grey.width - 2):
            column = sorted(grey.getpixel((x, y)) for y in range(grey.height))
            sides.append(abs(column[len(column) // 2] - paper[scheme]) > 30)
        return sides[0], sides[1]

    paper = {"light": 255, "dark": 21}  # #11161d
    chromium.open(reports["many"], width=PHONE, scheme=scheme)
    assert shaded() == (False, True)
    chromium.evaluate("document.querySelector('.compare .scroll').scrollLeft = 60")
    assert shaded() == (True, True)
    chromium.evaluate("document.querySelector('.compare .scroll').scrollLeft = 10000")
    assert shaded() == (True, False)
    chromium.open(reports["many"], width=DESKTOP, scheme=scheme)
    assert shaded() == (False, False)


def luminance(pixel: tuple[int, ...]) -> float:
    """Relative luminance of WCAG 2."""
    parts = [c / 255 for c in pixel[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("scheme", "paper"), [("light", (255, 255, 255)), ("dark", (17, 22, 29))])
def test_the_swatches_of_the_phases_can_be_seen_and_told_apart(chromium, reports, tmp_path, scheme, paper):
    chromium.open(reports["one"], scheme=scheme)
    fills = {}
    for phase in ("warmup", "score", "weight", "finetune", "control"):
        chromium.screenshot(tmp_path / "swatch.png", f".curves .swatch.{phase}", scale=4)
        with Image.open(tmp_path / "swatch.png") as shot:
            picture = shot.convert("RGB")
        middle = picture.height // 2
        edge, ground = luminance(picture.getpixel((2, middle))), luminance(paper)
        assert (max(edge, ground) + 0.05) / (min(edge, ground) + 0.05) >= 3  # WCAG's least for what is no text
        inner = [picture.getpixel((x, middle)) for x in range(8, picture.width - 8)]
        greens = [pixel[1] for pixel in inner]
        if phase == "control":
            assert max(greens) - min(greens) >= 40  # stripes
        else:
            assert max(greens) - min(greens) <= 2
            fills[phase] = inner[0]
    for one in fills:
        for other in fills:
            if one < other:
                assert max(abs(a - b) for a, b in zip(fills[one], fills[other], strict=True)) >= 12, (one, other)


def test_light_and_dark_follow_the_system_and_the_button(chromium, reports):
    paper = "getComputedStyle(document.body).backgroundColor"
    chromium.open(reports["one"], scheme="light")
    light = chromium.evaluate(paper)
    chromium.evaluate("document.getElementById('theme').click()")
    dark = chromium.evaluate(paper)
    assert dark != light
    chromium.evaluate("document.getElementById('theme').click()")
    assert chromium.evaluate(paper) == light
    chromium.open(reports["one"], scheme="dark")
    assert chromium.evaluate(paper) == dark
    assert chromium.texts("#theme") == ["Light"]
    chromium.evaluate("document.getElementById('theme').click()")
    assert chromium.evaluate(paper) == light


@pytest.mark.parametrize("button", [False, True])
def test_paper_is_white_to_its_edges_whatever_the_screen_was(chromium, reports, tmp_path, button):
    """The margins of a printed page have the colour of an empty page in the root's scheme."""
    chromium.open(reports["one"], scheme="light" if button else "dark")
    if button:
        chromium.evaluate("document.getElementById('theme').click()")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    assert chromium.evaluate(scheme) == "dark"
    features = [{"name": "prefers-color-scheme", "value": "light" if button else "dark"}]
    chromium.call("Emulation.setEmulatedMedia", media="print", features=features)
    printed = chromium.evaluate(scheme), chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    chromium.call("Emulation.setEmulatedMedia", media="", features=features)
    assert printed == ("light", "rgb(255, 255, 255)")


@pytest.mark.parametrize("name", ["one", "many"])
def test_what_stands_before_the_words_of_a_legend_keeps_its_shape_on_a_phone(chromium, reports, name):
    sizes = "[...document.querySelectorAll('.legend i')].map(i => [i.offsetWidth, i.offsetHeight])"
    found = {}
    for width in (DESKTOP, PHONE):
        chromium.open(reports[name], width=width)
        chromium.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        found[width] = chromium.evaluate(sizes)
    assert found[PHONE] == found[DESKTOP]
    assert min(width for width, _ in found[PHONE]) >= 5


def test_a_link_opens_its_run_and_paper_opens_all(chromium, reports):
    chromium.open(reports["many"])
    is_open = "[...document.querySelectorAll('details.run')].map(d => d.open)"
    assert chromium.evaluate(is_open) == [False] * 3
    chromium.evaluate("document.querySelector('#runs a[href=\"#run-2\"]').click()")
    chromium.frame()
    assert chromium.evaluate(is_open) == [False, True, False]
    pages = chromium.call("Page.printToPDF", printBackground=True)
    assert len(pages["data"]) > 20_000
    assert chromium.evaluate(is_open) == [False, True, False]


def test_the_command_can_be_copied(chromium, reports):
    chromium.open(reports["one"])
    copied = chromium.evaluate(
        "new Promise(done => { const button = document.querySelector('.copy'); button.click();"
        " new MutationObserver(() => done(button.textContent)).observe(button, {childList: true}); })"
    )
    assert copied in ("Copied", "Selected")
    if copied == "Selected":
        assert chromium.evaluate("getSelection().toString()") == "paam prune by-hand --seed 0"


def test_without_scripts_everything_but_the_controls_is_there(chromium, reports, tmp_path):
    for script in (True, False):
        chromium.open(reports["one"], script=script)
        chromium.screenshot(tmp_path / f"{script}.png")
    with Image.open(tmp_path / "True.png") as one, Image.open(tmp_path / "False.png") as other:
        assert 0.9 * one.height < other.height < one.height
    chromium.call("Emulation.setScriptExecutionDisabled", value=False)


def test_hostile_text_does_not_run(chromium, tmp_path):
    text = "</script x></script><script>window.caught = 1</script><img src=x onerror='window.caught = 1'>"
    recipe = {**RECIPE, "description": text, "model": {"name": text}}
    record = json.loads(json.dumps(events(recipe=recipe, command=text)).replace('"block.inner"', json.dumps(text)))
    write_report([write(tmp_path / "<script>window.caught = 1<", record)], tmp_path / "r.html")
    chromium.open(tmp_path / "r.html")
    chromium.hover(".layer.inner")
    use(chromium, ".layer-choice", "1", "change")
    assert text in chromium.texts("#tip")[0]
    assert chromium.evaluate("window.caught") is None
    assert chromium.complaints() == []
    assert len(chromium.requests()) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_figures_of_the_docs_follow_the_scheme_and_no_word_is_cut_off(chromium, path, scheme):
    chromium.open(path, scheme=scheme)
    assert chromium.complaints() == []
    assert chromium.requests() == [path.as_uri()]
    colour = "e => getComputedStyle(document.querySelector(e)).fill"
    paper, ink = (chromium.evaluate(f"({colour})('{element}')") for element in (".paper", ".title"))
    light, dark = ("rgb(255, 255, 255)", "rgb(27, 36, 48)"), ("rgb(17, 22, 29)", "rgb(229, 233, 239)")
    assert (paper, ink) == (light if scheme == "light" else dark)
    outside = chromium.evaluate(
        "(all => [...document.querySelectorAll('text')].filter(e => (b => b.left < all.left || b.top < all.top"
        " || b.right > all.right || b.bottom > all.bottom)(e.getBoundingClientRect())).map(e => e.textContent))"
        "(document.documentElement.getBoundingClientRect())"
    )
    assert outside == []
