"""The report in a real browser: it opens offline, draws, answers, and can be used without a mouse.

Debian's chromium comes with `make browser`, which `.ci/run` calls. On a machine without one these tests do not exist;
`test_a_browser_is_there` says so in pytest's warnings, and fails where CI is set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.observe import report
from phalanx.observe.run import load
from tests.observe.browser import INSTALLED, Browser
from tests.observe.synthetic import write_run

TAB = "\ue004"
ENTER = "\ue007"
BARS = "return document.querySelectorAll('#timeline .bars .point').length"

# The browser lives for the whole module: starting one takes seconds.
pytestmark = [pytest.mark.timeout(60), pytest.mark.allow_leaks("children")]


def test_a_browser_is_there() -> None:
    if not INSTALLED:
        assert not os.environ.get("CI"), "no chromium and chromedriver: `make browser` installs them"
        warnings.warn(
            "the report was not opened in a browser: no chromium and chromedriver here. `make browser` installs them",
            stacklevel=1,
        )


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
        drawn = browser.run("return [...document.querySelectorAll('.chart')].map(c => !!c.querySelector('.main-svg'))")
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
        browser.run("document.getElementById('lengths').emit('plotly_click', {points: [{x: 39}]})")
        assert browser.run("return document.getElementById('pass').selectedOptions[0].textContent").startswith("39")
        assert browser.run("return document.querySelectorAll('#lengths .bars .point').length") == 40

    def test_sharding_is_shown_beside_what_it_would_have_been(browser: Browser) -> None:
        assert browser.run("return document.getElementById('sharding').data.map(t => t.x)") == [[2, 2, 2, 2], [4, 2, 2, 2]]

    def test_a_narrow_window_needs_no_sideways_scrolling(browser: Browser) -> None:
        browser.resize(420, 900)
        try:
            assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
        finally:
            browser.resize(1280, 1000)

    def test_charts_answer_the_pointer(browser: Browser) -> None:
        browser.run("Plotly.Fx.hover('late', [{curveNumber: 0, pointNumber: 1}])")
        assert "6.00 ms late" in browser.run("return document.querySelector('#late .hoverlayer').textContent")

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
        ink = "return getComputedStyle(document.querySelector('#times text')).fill"
        light = browser.run(ink)
        browser.run("document.getElementById('theme').click()")
        assert browser.run("return document.documentElement.dataset.theme") == "dark"
        assert browser.run(ink) != light

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
