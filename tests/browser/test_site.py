"""The documentation as a site, in a real browser: built without a warning, searched and read without a network."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import PROGRAM, Visit, chromium

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PAGES = ("README", "docs/README", "docs/settings/optimizer", "docs/api", "docs/tutorials/first_hour", "deploy/slurm/README")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-d", str(folder / "trees"), "."]
    built = subprocess.run([*command, str(folder / "site")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.fixture
def visit() -> Iterator[Visit]:
    if PROGRAM is None:
        pytest.skip("no Chromium on this machine; .ci/tools brings Debian's")
    with chromium() as browser:
        visit = Visit(browser)
        yield visit
        visit.close()


def test_every_page_of_the_repository_is_a_page_of_the_site(site: Path) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"), *ROOT.glob("*.md")]
    assert not [page for page in pages if not (site / page.relative_to(ROOT).with_suffix(".html")).exists()]


def test_the_search_finds_the_page_of_a_setting_without_a_network(site: Path, visit: Visit) -> None:
    visit.page.goto(f"file://{site}/README.html")
    visit.page.get_by_placeholder("Search").first.fill("decay_share")
    visit.page.keyboard.press("Enter")
    visit.page.locator("#search-results").get_by_role("link", name="optimizer", exact=True).click()
    assert "optimizer.decay_share" in visit.page.locator("table").first.inner_text()
    # Without a server Chromium refuses the excerpts below the results, which stand there all the same.
    assert all(request.startswith(("file:", "data:")) for request in visit.requests)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_text_pictures_and_the_others(page: str, site: Path, visit: Visit) -> None:
    visit.page.goto(f"file://{site}/{page}.html")
    assert visit.page.get_by_role("heading", level=1).is_visible()
    assert visit.page.locator(".sidebar-tree").get_by_role("link", name="Sweeps", exact=True).is_visible()
    broken = "images => images.filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
    assert visit.page.locator("img").evaluate_all(broken) == []
    assert all(request.startswith(("file:", "data:")) for request in visit.requests)
    assert not visit.errors
