"""Headless Chromium, driven by selenium: what `browse` asks of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

_FLAGS = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

_PATIENCE = 30
"""Seconds: a machine may have other work."""


class Look(NamedTuple):
    """How a page is looked at."""

    name: str
    width: int
    dark: bool


class Browser:
    """Chromium with a fresh profile."""

    def __init__(self, chromium: str, driver: str, profile: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self._driver = webdriver.Chrome(options, Service(driver))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.quit()

    def open(self, url: str, look: Look) -> None:
        size = {"width": look.width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if look.dark else "light"}]
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self._driver.get("about:blank")  # or an anchor of the page that is open would not load it anew
        self._driver.get(url)

    def page_width(self) -> int:
        return int(self._driver.execute_script("return document.documentElement.scrollWidth"))

    def scrolled_tables(self) -> list[tuple[int, str]]:
        """The columns and the first words of each table that is wider than the page."""
        script = """return [...document.querySelectorAll('article table')]
                                .filter(each => each.clientWidth > each.closest('article').clientWidth)
                                .map(each => [each.rows[0].cells.length, each.rows[0].innerText.slice(0, 40)])"""
        return [(int(columns), str(words)) for columns, words in self._driver.execute_script(script)]

    def anchors(self) -> set[str]:
        """Every id of the page."""
        return set(self._driver.execute_script("return [...document.querySelectorAll('[id]')].map(each => each.id)"))

    def links(self) -> set[str]:
        """Where links inside the site lead, as the browser resolves them."""
        script = """return [...document.querySelectorAll('a[href]')].map(each => each.href)
                                .filter(each => each.startsWith(location.origin))"""
        return set(self._driver.execute_script(script))

    def console(self) -> list[str]:
        """What the page has written to the console since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What pages have asked for since the last call; not what Chromium's own, as the one of a new tab, has."""
        messages = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [str(params["request"]["url"]) for params in sent if params["documentURL"].startswith("http")]

    def click_in_text(self, words: str) -> str:
        """Click on the link in the page's text that says these words; return where that leads."""
        here = self._driver.current_url

        def link(driver: Any) -> Any:
            links = driver.find_elements(By.CSS_SELECTOR, "article a")
            return next((each for each in links if words in each.get_property("textContent").lower()), None)

        try:
            patience = WebDriverWait(self._driver, _PATIENCE)
            patience.until(link).click()
            patience.until(lambda driver: driver.current_url != here)
        except TimeoutException:
            return f"{self._driver.current_url}, {_PATIENCE} s later"
        return str(self._driver.current_url)

    def save_picture(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        taken = self._driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))
