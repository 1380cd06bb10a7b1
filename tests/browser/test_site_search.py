"""The documentation's search in a real headless Chromium, with the site opened as files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.browser import CHROMIUM, REASON, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=REASON)]

ROOT = Path(__file__).parents[2]
TYPED = """
const field = document.querySelector("[data-md-component=search-query]");
document.querySelector("[data-md-toggle=search]").click();
field.value = "lookahead";
field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
field.dispatchEvent(new Event("input", {bubbles: true}));
"""
FOUND = """
[...document.querySelectorAll(".md-search-result__link")].some(link => link.href.includes("staleness.html"))
"""
BROKEN = """
[...document.querySelectorAll("td code")].filter(key => key.getClientRects().length > 1).map(key => key.textContent)
"""


async def test_in_a_site_that_is_opened_from_disk_a_word_is_found_and_no_key_is_broken(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=400)
    async with browser(tmp_path) as page:
        await page.show(f"file://{site}/index.html", "desktop")
        await page.until("document.readyState === 'complete'")
        await page.value(TYPED)
        await page.until(FOUND)
        await page.show(f"file://{site}/configuration.html", "phone")
        await page.until("document.querySelectorAll('td code').length > 100")
        assert await page.value(BROKEN) == []
