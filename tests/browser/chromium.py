"""A headless Chromium of the distribution, driven by Playwright, which downloads none.

with chromium() as browser:
    visit = Visit(browser, width=1300, height=900)
    visit.page.goto("file:///data/runs/mine/report.html"); visit.requests; visit.errors
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, ConsoleMessage, sync_playwright

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
"""None where there is no Chromium."""
PATIENCE_MS = 90_000
"""Nothing that is looked for takes longer to appear, however busy the machine."""
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a sandbox (which root has none of) and with an empty profile of its own, for the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=PROGRAM, args=list(FLAGS), chromium_sandbox=False, timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page of so many pixels, of a person who was never here before; what it asked for, and what went wrong on it."""

    def __init__(self, browser: Browser, width: int = 1300, height: int = 900) -> None:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
        # MLflow's chat would open by itself over the page.
        context.add_init_script(
            "for (const name of ['fab.autoOpenedOnFirstLoad_v1', 'panelOpen_v1'])"
            "localStorage.setItem('mlflow.assistant.' + name, name.startsWith('fab'))"
        )
        context.set_default_timeout(PATIENCE_MS)
        self.page = context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)

    def close(self) -> None:
        """Forgets the page and all that the browser knows of it."""
        self.page.context.close()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)
