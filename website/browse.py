"""Open the built site in headless Chromium, page by page, and report what is wrong with it.

    python -m website.browse out/site out/screenshots        (`make docs-test`)

It checks that links inside the site lead to a page and an anchor that exist, that the console stays empty, that nothing
is requested from elsewhere, that no page, and no table of up to seven columns, is wider than a phone, and that the four
questions that newcomers have are one click from the start page. Every page is opened on a light desktop and on a dark
phone, the start page also the other way round.
Screenshots are for people to look at. Without Chromium and its driver (Debian: chromium, chromium-driver) it says so
and does nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from website.browser import Browser, Look

QUESTIONS = {
    "which optimizer": "choosing.html",
    "memory": "memory.html",
    "distributed": "distributed.html",
    "my gradient is dense": "faq.html#why-is-my-gradient-dense",
}
"""What the link on the start page says, in any case, and where it leads."""

LOOKS = (Look("wide-light", 1280, dark=False), Look("narrow-dark", 390, dark=True))
ALL_LOOKS = (*LOOKS, Look("wide-dark", 1280, dark=True), Look("narrow-light", 390, dark=False))

FITTING_COLUMNS = 7
"""Tables of up to so many columns have to fit on a phone. Wider ones scroll."""


def main(site: Path, pictures: Path) -> int:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        print("skipped: chromium and chromedriver were not found (Debian: apt-get install chromium chromium-driver)")
        return 0
    pictures.mkdir(parents=True, exist_ok=True)
    server = _serve(site)
    home = f"http://127.0.0.1:{server.server_address[1]}/"
    with tempfile.TemporaryDirectory() as profile, Browser(chromium, driver, profile) as browser:
        pages = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*.html"))}
        pages.pop("404.html")  # its links assume the root of a server
        faults = _visit(browser, home, list(pages), site, pictures) + _ask(browser, home)
    server.shutdown()
    print(f"{len(pages)} pages, screenshots in {pictures}, {len(faults)} faults")
    print(*faults, sep="\n")
    return 1 if faults else 0


def _visit(browser: Browser, home: str, pages: list[str], site: Path, pictures: Path) -> list[str]:
    """Look at every page; then see whether each of their links leads somewhere."""
    faults, anchors, links = [], {}, {}
    for page in pages:
        for look in ALL_LOOKS if page == "index.html" else LOOKS:
            browser.open(home + page, look)
            width = browser.page_width()
            if width > look.width:
                faults.append(f"{page}: {width} pixels wide where {look.width} are there")
            for columns, words in browser.scrolled_tables():
                if columns <= FITTING_COLUMNS:
                    faults.append(f"{page}: a table of {columns} columns is cut at {look.width} pixels: {words!r}")
            if not page.startswith("source/"):
                browser.save_picture(pictures / f"{page.removesuffix('.html').replace('/', '-')}-{look.name}.png")
        anchors[page], links[page] = browser.anchors(), browser.links()
        faults += [f"{page}: the console says {line}" for line in browser.console()]
        faults += [f"{page}: asks for {url}" for url in browser.requests() if not url.startswith((home, "data:"))]
    for page, targets in links.items():
        for target in targets:
            file, _, anchor = target.removeprefix(home).partition("#")
            file = file or "index.html"
            if not (site / file).is_file():
                faults.append(f"{page}: links to {file}, which is not there")
            elif anchor and anchor not in anchors.get(file, ()):
                faults.append(f"{page}: links to {file}#{anchor}, which is not there")
    return faults


def _ask(browser: Browser, home: str) -> list[str]:
    """Click on each question of a newcomer, on the start page itself and not in its menu."""
    faults = []
    for words, target in QUESTIONS.items():
        browser.open(home + "index.html", LOOKS[0])
        reached = browser.click_in_text(words)
        if reached != home + target:
            faults.append(f"index.html: a click on {words!r} leads to {reached}; expected {target}")
    return faults


def _serve(site: Path) -> ThreadingHTTPServer:
    handler: Callable[..., Any] = partial(_Quiet, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
