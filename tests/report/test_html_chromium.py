"""The page in a browser: drawn, silent, usable by mouse and keys, and inert to hostile names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.planners.round_robin import RoundRobin
from placement.report.html import write_report
from placement.runs.compare import compare
from tests.chromium import Page, chromium, executable
from tests.report.test_html_report import EVIL, compared, modular

pytestmark = pytest.mark.skipif(executable() is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    problems = {"first": modular(60), f"second {EVIL}": modular(20, 3, evil=True, seed=2)}
    compared(folder, problems)
    steps = "\n".join(f"{s},{1 + s / 100},{2 - s / 100}" for s in range(0, 100, 10))
    (folder / "metrics.csv").write_text(f"steps,best_speedup,entropy\n{steps}\n")
    return write_report(folder).path


@pytest.fixture
def shown(browser: Page, report: Path) -> Iterator[Page]:
    """The report, drawn; whatever a test does, the console stays empty and nothing is loaded."""
    browser.open(report)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.until("document.querySelector('#gantt-0').dataset.to")
    browser.until("document.querySelector('#graph-canvas').dataset.nodes")
    yield browser
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.errors == []
    assert {url.partition("#")[0] for url in browser.requests} == {report.resolve().as_uri()}


def view(page: Page) -> tuple[float, float]:
    """From when to when the timeline is seen; drawn in the next frame."""
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    seen = page.run("({...document.querySelector('#gantt-0').dataset})")
    return float(seen["from"]), float(seen["to"])


def tip(page: Page) -> str:
    return str(page.run("document.querySelector('#tip').hidden ? '' : $('tip').innerText"))


def num_nodes(page: Page) -> int:
    return int(page.run("document.querySelector('#graph-canvas').dataset.nodes"))


def test_every_section_is_drawn(shown: Page) -> None:
    sections = shown.run(
        "[...document.querySelectorAll('main section')].filter((s) => !s.hidden).map((s) => s.id)"
    )
    assert sections == [
        *("summary", "compare", "timeline", "graph", "search"),
        *("fidelity", "training", "provenance"),
    ]
    painted = """(() => {
        const c = document.querySelector('#gantt-0');
        const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer;
        return new Set(new Uint32Array(pixels)).size;
    })()"""
    assert shown.run(painted) > 20  # lanes, micro-batches, text
    for section in ("search", "fidelity", "training"):
        shown.until(f"!!document.querySelector('#{section} svg path')")


def test_the_table_shows_the_numbers_and_sorts(shown: Page) -> None:
    cells = """[...document.querySelectorAll('#compare-table tbody tr')].map(
        (row) => [row.cells[0].title, row.cells[1].innerText])"""
    seconds = "data.workloads[0].planners.map((p) => [p.name, seconds(p.period_s)])"
    assert shown.run(cells) == shown.run(seconds)
    shown.click("#compare-table thead tr:last-child th:nth-child(2) button")
    names = "data.workloads[0].planners.toSorted((a, b) => a.period_s - b.period_s)"
    expected = shown.run(f"{names}.map((p) => p.period_s)")
    order = shown.run(cells)
    period = shown.run(
        "Object.fromEntries(data.workloads[0].planners.map((p) => [p.name, p.period_s]))"
    )
    assert [period[name] for name, _ in order] == expected
    assert shown.run("document.querySelector('th[aria-sort]').ariaSort") == "ascending"


def test_hovering_names_the_operator(shown: Page) -> None:
    left, top, *_ = shown.place("#gantt-0")
    point = shown.run("""(() => {
        const panel = onPage.panels[0];
        const bars = (t) => panel.parts[t.source].lanes[t.device];
        const track = panel.tracks.find((t) => t.kind === "lane" && bars(t).length);
        const { start, took, tick, num } = panel.parts[track.source];
        const bar = bars(track)[0];
        return [panel.x((start[bar] + took[bar] / 2) * tick), track.y + 8, bar % num];
    })()""")
    shown.mouse("mouseMoved", left + point[0], top + point[1])
    text = tip(shown)
    assert text.startswith(f"op {point[2]}\n") and "micro-batch" in text and "measured" in text
    shown.mouse("mouseMoved", 2, 2)
    assert tip(shown) == ""


def test_zoom_by_buttons_wheel_and_keys(shown: Page) -> None:
    begin, end = view(shown)
    shown.click("#zoom-in")
    a, b = view(shown)
    assert begin < a < b < end and b - a == pytest.approx(0.6 * (end - begin))
    shown.click("#zoom-all")
    assert view(shown) == (begin, end)
    # The wheel scrolls the page until the timeline was clicked; then the point under it stays.
    left, top, *_ = shown.place("#gantt-0")
    shown.mouse("mouseWheel", left + 600, top + 60, deltaX=0, deltaY=-100)
    assert view(shown) == (begin, end)
    shown.run("scrollBy(0, 0)")
    shown.click("#gantt-0", 600, 60)
    left, top, *_ = shown.place("#gantt-0")
    under = shown.run("onPage.panels[0].time(600)")
    shown.mouse("mouseWheel", left + 600, top + 60, deltaX=0, deltaY=-100)
    a, b = view(shown)
    assert b - a < end - begin
    assert shown.run("onPage.panels[0].time(600)") == pytest.approx(under)
    for key, is_right in (("ArrowRight", True), ("ArrowLeft", False)):
        before = view(shown)[0]
        shown.key(key)
        assert (view(shown)[0] > before) == is_right
    shown.key("0")
    assert view(shown) == (begin, end)
    shown.key("+")
    assert view(shown)[1] - view(shown)[0] == pytest.approx(0.7 * (end - begin))


def test_marks_of_logarithmic_axes(shown: Page) -> None:
    """Few decades: 1, 2, 5; many: powers of ten; less than one: as on a linear axis."""
    assert shown.run("logTicks(0.9, 21)") == [1, 2, 5, 10, 20]
    assert shown.run("logTicks(0.09, 21)") == pytest.approx([0.1, 1, 10])
    assert shown.run("logTicks(1.9, 4.1)") == [2, 3, 4]


def test_keys_step_through_operators_and_say_them(shown: Page) -> None:
    shown.run("document.querySelector('#gantt-0').focus()")
    shown.key(".")
    first = shown.run("document.querySelector('#live').textContent")
    assert first.startswith("op ") and "micro-batch 0" in first and tip(shown)
    shown.key(".")
    assert shown.run("document.querySelector('#live').textContent") != first


def test_two_planners_side_by_side(shown: Page) -> None:
    shown.run("""(() => {
        const select = document.querySelector('#planner-right');
        select.value = 'round_robin';
        select.dispatchEvent(new Event('change'));
    })()""")
    shown.until("document.querySelector('#gantt-1')?.dataset.to")
    boxes = [shown.run(f"$('gantt-{i}').getBoundingClientRect().toJSON()") for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["right"] < boxes[1]["left"]
    shown.click("#zoom-in")
    view(shown)
    spans = [shown.run(f"[$('gantt-{i}').dataset.from, $('gantt-{i}').dataset.to]") for i in (0, 1)]
    assert spans[0] == spans[1]


def test_the_graph_opens_by_mouse_and_keys(shown: Page) -> None:
    shown.click("#graph-fold")
    folded = num_nodes(shown)
    assert folded <= 2
    group = "#graph-canvas .node[aria-expanded=false]"
    shown.click(group)
    opened = num_nodes(shown)
    assert opened > folded
    assert shown.run("document.activeElement.ariaExpanded") == "true"
    shown.key("Enter")
    assert num_nodes(shown) == folded
    shown.key("Enter")
    shown.key("ArrowDown")
    name = shown.run("document.activeElement.getAttribute('aria-label')")
    assert name
    shown.key("Escape")
    assert num_nodes(shown) == folded


def test_an_operator_is_found_by_name(shown: Page) -> None:
    shown.run("document.querySelector('#graph input').value = 'op 33'")
    shown.run("document.querySelector('#graph input').focus()")
    shown.key("Enter")
    assert shown.run("document.querySelector('.node.found .name').textContent") == "op 33"


def test_light_and_dark(shown: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = shown.run(background)
    shown.theme(dark=True)
    dark = shown.run(background)
    assert dark != light
    shown.click("#theme")
    assert shown.run(background) == light
    shown.run("localStorage.clear()")


def test_a_phone(browser: Page, report: Path) -> None:
    browser.open(report, 360, 780)
    browser.until("document.querySelector('#gantt-0').dataset.to")
    browser.until("!!document.querySelector('#search svg path')")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.errors == []


def test_hostile_names_stay_text(browser: Page, report: Path) -> None:
    browser.open(report)
    browser.run(
        "(() => { $('workload').value = 1; $('workload').dispatchEvent(new Event('change')); })()"
    )
    browser.until("document.querySelector('#gantt-0')?.dataset.to")
    browser.click("#graph-split")
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    left, top, *_ = browser.place("#gantt-0")
    for x in range(150, 1100, 50):
        browser.mouse("mouseMoved", left + x, top + 40)
    assert browser.run("document.querySelectorAll('img, script[src]').length") == 0
    assert browser.run("typeof window.hacked") == "undefined"
    assert EVIL in browser.run("document.querySelector('#workload').innerText")
    assert browser.errors == []


def test_two_thousand_operators(browser: Page, tmp_path: Path) -> None:
    problem = modular(2000, 4)
    compare({"large": problem}, {"round_robin": RoundRobin()}, out_dir=tmp_path)
    browser.open(write_report(tmp_path).path)
    browser.until("document.querySelector('#graph-canvas').dataset.nodes")
    assert 1 < num_nodes(browser) <= 60
    browser.click("#graph-canvas .node[aria-expanded=false]")
    browser.until("document.querySelector('#gantt-0').dataset.to")
    browser.run("document.querySelector('#graph input').value = 'op 1234'")
    browser.run("document.querySelector('#graph input').focus()")
    browser.key("Enter")
    assert browser.run("document.querySelector('.node.found .name').textContent") == "op 1234"
    assert num_nodes(browser) <= 200
    assert browser.errors == []


def test_packed_arrays_are_read_as_they_were_written(shown: Page) -> None:
    bars: Any = shown.run("""onPage.panels[0].ready.then(() => {
        const { start, took, num, tick } = onPage.panels[0].parts.predicted;
        return [num, tick, [...start], [...took]];
    })""")
    num, tick, start, took = bars
    end = (np.array(start) + np.array(took)) * tick
    makespan = shown.run("onPage.panels[0].decision.predicted.makespan_s")
    assert num == 60 and len(start) == 360
    assert end.max() == pytest.approx(makespan, rel=1e-6)
    assert json.dumps(bars)


def test_without_scripts_there_are_a_table_and_a_picture_and_no_controls(browser, report):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=report.resolve().as_uri())
        browser.until("document.querySelectorAll('#stills svg.gantt').length === 2")
        said = browser.run("document.body.innerText")
        seen = "(x) => x.checkVisibility()"
        controls = browser.run(f"[...document.querySelectorAll('button, select')].some({seen})")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "first" in said and "round_robin" in said and "measured period" in said and EVIL in said
    assert not controls
    assert browser.run("document.querySelector('svg.gantt').textContent.includes('one run')")


def test_paper_has_the_timeline_and_whole_tables(shown: Page) -> None:
    """As a browser prints: an event, then another width; nothing is cut at a scrollbar."""
    shown.run("dispatchEvent(new Event('beforeprint'))")
    features: dict[str, Any] = {"media": "print"}
    shown.call("Emulation.setEmulatedMedia", **features)
    try:
        for selector in ("#compare .scroll", "#timeline .sideways", "#graph-canvas", "#gantt-0"):
            wide = f"[...document.querySelectorAll('{selector}')].map((x) => x.scrollWidth)"
            assert max(shown.run(wide)) <= 920, selector
        pixels = """(() => {
            const canvas = document.querySelector('#gantt-0');
            const [w, h] = [canvas.width, canvas.height];
            const { data } = canvas.getContext('2d').getImageData(0, 0, w, h);
            const found = new Set();
            for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
            return found.size;
        })()"""
        assert shown.run(pixels) > 8  # one colour a micro-batch at least
        assert shown.run("getComputedStyle(document.querySelector('.bar')).display") == "none"
    finally:
        shown.call("Emulation.setEmulatedMedia", media="")
        shown.run("dispatchEvent(new Event('afterprint'))")


def test_a_page_that_is_photographed_at_once_has_a_timeline(browser: Page, report: Path) -> None:
    browser.open(report)  # until the scripts have run; what is unpacked may still be awaited
    drawn = "document.querySelector('#timeline svg.gantt rect, #gantt-0[data-to]') !== null"
    assert browser.run(drawn)
    assert browser.run("document.querySelectorAll('#graph-canvas .node').length") > 0
