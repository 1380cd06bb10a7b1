"""The exported page of trajectories in a real headless Chromium: readable, coloured, and deaf to what a policy says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from service.observe.trajectories.page import html_page
from tests.browser.browser import CHROMIUM, REASON, SIZES, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=REASON)]

ATTACK = "<img src=x onerror=window.hacked=1></span><script>window.hacked=1</script>"
WORDS = ["what", " is", " the", " age", " ?", ATTACK, " answer", " 17", "."]


def a_step(index: int) -> dict[str, Any]:
    return {
        "index": index, "row": 0, "prompt_ids": [0, 1, 2, 3, 4] * 6, "response_ids": [5, 6, 7, 8],
        "logprobs": [-0.5, -0.1, -2, 0], "loss_mask": [1, 1, 1, 0], "versions": [[1, "0.1"], [2, "0.9"], [1, None]],
        "reward": 0.0, "stop_reason": ATTACK,
    }  # fmt: skip


def a_record(sample: int) -> dict[str, Any]:
    return {
        "id": f"group=7/sample={sample}/attempt=0", "prompt_uid": ATTACK, "trained_at": "0.10", "optimizer_step": 11,
        "fate": "trained", "return": 1.0, "advantage": 0.5, "rows": 1, "loss_tokens": 2, "sampled_tokens": 3,
        "stop_reason": ATTACK, "steps": [a_step(0), a_step(1)],
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_the_page_shows_masks_as_colours_and_runs_nothing_that_a_policy_said(size: str, tmp_path: Path) -> None:
    file = tmp_path / "trajectories.html"
    page_text = html_page(ATTACK, [a_record(0), a_record(1)], 8, lambda ids: [WORDS[i] for i in ids])
    file.write_text(page_text)

    async def scenario() -> None:
        async with browser(tmp_path) as page:
            await page.show(file.as_uri(), size)
            await page.until("document.querySelectorAll('details').length === 2")
            await page.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            colour = "getComputedStyle(document.querySelector('.tokens .{}')).backgroundColor"
            colours = [await page.value(colour.format(kind)) for kind in ("prompt", "loss", "stale", "masked")]
            assert len(set(colours)) == 4
            assert await page.value("document.querySelector('.tokens').textContent.includes('<script>')")
            assert await page.value("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 0]
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await page.value(wide) == 0, "the page scrolls sideways"
            await page.screenshot(tmp_path / f"{size}.png")
            assert (tmp_path / f"{size}.png").stat().st_size > 10_000
            assert page.complaints == []

    asyncio.run(scenario())
