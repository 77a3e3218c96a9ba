"""The report in a real browser: it opens offline, draws, answers, and can be used without a mouse.

Debian's chromium comes with `make browser`, which `.ci/run` calls. On a machine without one these tests do not exist;
`test_a_browser_is_there` says so in pytest's warnings, and fails where CI is set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.observe import report
from phalanx.observe.run import load
from tests.observe.browser import INSTALLED, Browser
from tests.observe.synthetic import write_run

NODE = shutil.which("node")
TAB = "\ue004"
ENTER = "\ue007"
BARS = "return document.querySelectorAll('#timeline .span').length"

# The browser lives for the whole module: starting one takes seconds.
pytestmark = [pytest.mark.timeout(60), pytest.mark.allow_leaks("children")]


def test_a_browser_is_there() -> None:
    if not INSTALLED:
        assert not os.environ.get("CI"), "no chromium and chromedriver: `make browser` installs them"
        warnings.warn(
            "the report was not opened in a browser: no chromium and chromedriver here. `make browser` installs them",
            stacklevel=1,
        )


if NODE is not None:

    def test_an_axis_ends_also_where_numbers_are_too_large_to_count_on() -> None:
        charts = Path(report.__file__).with_name("page") / "charts.js"
        script = f"""
            globalThis.document = {{ getElementById() {{}}, addEventListener() {{}} }};
            {charts.read_text(encoding="utf-8")}
            const found = [ticks(0, 10, 4), ticks(1e17, 1e17 + 16, 4).length, ticks(1e400, 1e400, 4).length];
            console.log(JSON.stringify(found));"""
        done = subprocess.run([NODE, "-e", script], capture_output=True, text=True, timeout=20)
        usual, *large = json.loads(done.stdout)
        assert usual == [0, 2.5, 5, 7.5, 10] and max(large) <= 6, done.stderr


if INSTALLED:

    @pytest.fixture(scope="module")
    def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
        root = write_run(tmp_path_factory.mktemp("run"), world=3, num_steps=40, late_rank=1)
        return report.write(load(root), root / "report.html")

    @pytest.fixture(scope="module")
    def started() -> Iterator[Browser]:
        with Browser() as browser:
            yield browser

    @pytest.fixture
    def browser(started: Browser, page: Path) -> Browser:
        started.console()
        started.open(page)
        return started

    def test_every_chart_is_drawn_without_a_console_error(browser: Browser) -> None:
        charts = "[...document.querySelectorAll('.chart')]"
        drawn = browser.run(f"return {charts}.map(c => c.querySelector('svg, .bars') !== null)")
        assert len(drawn) == 8 and all(drawn)
        assert browser.run(BARS) == 3 * (4 + 2) + 1  # the late rank's last reduction is cut where it was exposed
        assert [entry for entry in browser.console() if entry["level"] in ("SEVERE", "WARNING")] == []

    def test_nothing_is_fetched(browser: Browser) -> None:
        assert browser.run("return performance.getEntriesByType('resource').map(r => r.name)") == []

    def test_choosing_a_pass_redraws_the_timeline(browser: Browser) -> None:
        before = browser.run("return document.getElementById('pass').value")
        browser.run("document.getElementById('next').click()")
        assert browser.run("return document.getElementById('pass').value") == str(int(before) + 1)
        browser.run("const s = document.getElementById('pass'); s.value = '0'; s.dispatchEvent(new Event('change'))")
        assert browser.run("return document.getElementById('previous').disabled") is True
        assert browser.run(BARS) > 0

    def test_a_click_on_the_strip_of_passes_shows_the_nearest_drawn_one(browser: Browser) -> None:
        right = "const r = document.getElementById('lengths').getBoundingClientRect(); return [r.right - 8, r.top + 40]"
        browser.click(*browser.run(right))
        assert browser.run("return document.getElementById('pass').selectedOptions[0].textContent").startswith("39")
        assert browser.run("return document.querySelectorAll('#lengths .pass').length") == 40

    def test_sharding_is_shown_beside_what_it_would_have_been(browser: Browser) -> None:
        ends = "return [...document.querySelectorAll('#sharding .end')].map(e => e.textContent)"
        assert browser.run(ends) == ["6.0 MB", "4.0 MB", "4.0 MB", "4.0 MB"]

    def test_a_narrow_window_needs_no_sideways_scrolling_and_the_timeline_stays_readable(browser: Browser) -> None:
        browser.resize(420, 900)
        try:
            browser.run("requestAnimationFrame(() => { window.settled = true })")
            assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
            wide = browser.run(
                "const b = [...document.querySelectorAll('#timeline .span.k-backward')].map(e => e.getBoundingClientRect());"
                "return [Math.min(...b.map(r => r.width)), Math.max(...b.map(r => r.right)), innerWidth]"
            )
            # Nearly half of the pass is backward, and lanes take the whole width: labels stand above them.
            assert wide[0] > 0.35 * wide[2] and wide[1] <= wide[2]
        finally:
            browser.resize(1280, 1000)

    def test_all_tiles_are_in_one_row_on_a_wide_screen(browser: Browser) -> None:
        browser.resize(1300, 1000)
        tops = browser.run("return [...document.querySelectorAll('.tile')].map(t => t.getBoundingClientRect().top)")
        assert len(tops) >= 6 and len(set(tops)) == 1
        # Eight, as the demo has, and the longest that may stand in one.
        browser.run(
            "const tiles = document.querySelector('.tiles'); tiles.style.setProperty('--tiles', 8);"
            "tiles.querySelector('dd').textContent = '59 min 59 s'"
        )
        cut = "return [...document.querySelectorAll('.tile dd')].filter(d => d.scrollWidth > d.clientWidth).length"
        assert browser.run(cut) == 0
        browser.resize(1280, 1000)

    def test_charts_answer_the_pointer(browser: Browser) -> None:
        over = "arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true, clientX: 50, clientY: 200}))"
        browser.run(over.replace("arguments[0]", "document.querySelector('#late .part')"))
        assert "6.00 ms late on average" in browser.run("return document.getElementById('tip').textContent")
        moved = "const c = document.querySelector('section[data-curves^=loss] .curve'), r = c.getBoundingClientRect();"
        moved += "c.dispatchEvent(new PointerEvent('pointermove', {clientX: (r.left + r.right) / 2, clientY: r.top + 9}))"
        browser.run(moved)
        assert "rank 2: " in browser.run("return document.getElementById('tip').textContent")

    def test_a_drag_over_the_timeline_looks_closer(browser: Browser) -> None:
        part = "const s = document.querySelector('#timeline svg'), r = s.getBoundingClientRect();"
        for kind, share in (("pointerdown", 0.2), ("pointermove", 0.4), ("pointerup", 0.5)):
            event = f"new PointerEvent('{kind}', {{pointerType: 'mouse', clientX: r.left + {share} * r.width}})"
            browser.run(f"{part} s.dispatchEvent({event})")
        assert browser.run("return document.getElementById('whole').hidden") is False
        browser.run("document.getElementById('whole').click()")
        assert browser.run("return document.getElementById('whole').hidden") is True

    def test_every_control_is_reached_by_the_tab_key(browser: Browser) -> None:
        reached = []
        browser.run("document.activeElement.blur()")
        for _ in range(14):
            browser.press(TAB)
            reached.append(browser.run("const e = document.activeElement; return e.id || e.tagName.toLowerCase()"))
        assert {"theme", "pass", "next", "summary"} <= set(reached)

    def test_enter_on_a_button_moves_the_timeline(browser: Browser) -> None:
        before = browser.run("return document.getElementById('pass').value")
        browser.run("document.getElementById('next').focus()")
        browser.press(ENTER)
        assert browser.run("return document.getElementById('pass').value") != before

    def test_the_theme_button_turns_the_charts_dark(browser: Browser) -> None:
        ink = "return getComputedStyle(document.querySelector('#timeline .lane')).fill"
        light = browser.run(ink)
        browser.run("document.getElementById('theme').click()")
        assert browser.run("return document.documentElement.dataset.theme") == "dark"
        assert browser.run(ink) != light

    @pytest.mark.thorough  # a browser of its own; the button above shows the dark charts
    def test_the_page_follows_a_dark_system(page: Path) -> None:
        with Browser("--force-dark-mode", "--blink-settings=preferredColorScheme=0") as browser:
            browser.open(page)
            assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") is True
            assert browser.run("return document.documentElement.dataset.theme") == "dark"

    def test_every_chart_and_control_has_a_name(browser: Browser) -> None:
        unnamed = browser.run(
            "return [...document.querySelectorAll('button,select,[role=img],[role=region],section')]"
            ".filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') ||"
            " e.textContent.trim())).map(e => e.outerHTML.slice(0, 80))"
        )
        assert unnamed == []
