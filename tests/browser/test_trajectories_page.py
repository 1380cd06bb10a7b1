"""The exported page of trajectories in a real headless Chromium: readable, coloured, and deaf to what a policy says."""

from pathlib import Path
from typing import Any

import pytest

from service.trace.trajectories_page import html_page
from tests.browser.browser import CHROMIUM, REASON, SIZES, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=REASON)]

ATTACK = "<img src=x onerror=window.hacked=1></span><script>window.hacked=1</script>"
WORDS = ["what", " is", " the", " age", " ?", ATTACK, " answer", " 17", "."]


def a_step(index: int) -> dict[str, Any]:
    return {
        "index": index, "row": 0, "prompt_ids": [0, 1, 2, 3, 4] * 6, "response_ids": [5, 6, 7, 8],
        "logprobs": [-0.5, -0.1, -2, 0], "loss_mask": [1, 1, 1, 0], "versions": [[1, "0:1"], [2, "0:9"], [1, None]],
        "reward": 0.0, "stop_reason": ATTACK, "parent": index - 1 if index else None, "begins_as": None, "role": "main",
        "trains": True,
    }  # fmt: skip


def a_record(sample: int) -> dict[str, Any]:
    return {
        "id": f"group=7/sample={sample}/attempt=0", "prompt_uid": ATTACK, "trained_at": "0:10", "optimizer_step": 11,
        "fate": "trained", "return": 1.0, "advantage": 0.5, "rows": 1, "loss_tokens": 2, "sampled_tokens": 3,
        "stop_reason": ATTACK, "transcript": "", "scores": {}, "steps": [a_step(0), a_step(1)],
    }  # fmt: skip


def a_page(records: list[dict[str, Any]], folder: Path) -> str:
    """The address of a page of these records."""
    file = folder / "trajectories.html"
    file.write_text(html_page(ATTACK, records, 812, 8, lambda ids: [WORDS[i] for i in ids]))
    return file.as_uri()


LOOKS = [*zip(SIZES, ("light", "dark"), strict=True)]


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
async def test_the_page_shows_masks_as_colours_and_runs_nothing_that_a_policy_said(
    size: str, scheme: str, tmp_path: Path
) -> None:
    url = a_page([a_record(0), a_record(1)], tmp_path)
    async with browser(tmp_path) as page:
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await page.show(url, size)
        await page.until("document.querySelectorAll('.row').length === 2")
        assert await page.value(HEIGHT) == 0, "trajectories are closed at first"
        await page.value("document.querySelectorAll('.row').forEach(each => each.click())")
        assert await page.value(HEIGHT) > 0
        colour = "getComputedStyle(document.querySelector('.tokens .{}')).backgroundColor"
        colours = [await page.value(colour.format(kind)) for kind in ("prompt", "loss", "stale", "masked")]
        assert len(set(colours)) == 4
        ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128"
        assert await page.value(ground) is (scheme == "dark")
        assert await page.value("document.querySelector('.tokens').textContent.includes('<script>')")
        assert await page.value("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 1]
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.value(wide) == 0, "the page scrolls sideways"
        await page.screenshot(tmp_path / f"{size}.png")
        assert (tmp_path / f"{size}.png").stat().st_size > 10_000
        assert page.complaints == []


HEIGHT = "document.querySelector('.detail').offsetHeight"
SHOWN = "[...document.querySelectorAll('tbody:not([hidden]) .id')].map(each => each.textContent.split(/[=/]/)[3])"


async def test_the_table_is_filtered_and_sorted_by_hand_and_by_keys(tmp_path: Path) -> None:
    facts = (("stop", 1.0, 3), ("truncated", 0.25, 9), ("stop", None, 1))
    records = [
        {**a_record(n), "stop_reason": stop, "return": reward, "sampled_tokens": length, "optimizer_step": n}
        for n, (stop, reward, length) in enumerate(facts)
    ]
    records[1]["fate"] = "filtered"
    records[1]["steps"] = records[1]["steps"][:1]
    records[2]["trained_at"] = "0:30"
    url = a_page(records, tmp_path)

    async def choose(page: Any, name: str, value: str) -> list[str]:
        event = "new Event('input', {bubbles: true})"
        await page.value(f"{name}.value = '{value}'; {name}.dispatchEvent({event})".replace(name, f"control.{name}"))
        return list(await page.value(SHOWN))

    async def press(page: Any, key: str) -> Any:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        await page.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await page.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        return await page.value("document.activeElement.matches('.row') ? document.activeElement.cells[1].textContent"
                                " + document.activeElement.ariaExpanded : document.activeElement.id")  # fmt: skip

    async with browser(tmp_path) as page:
        await page.show(url, "desktop")
        await page.until("document.querySelectorAll('.row').length === 3")
        assert await page.value(SHOWN) == ["2", "1", "0"]
        for sort, order in (
            ("return-down", "012"), ("return-up", "210"), ("length-down", "102"), ("length-up", "201"),
            ("staleness-down", "210"), ("turns-up", "120"), ("stop-up", "201"), ("order-up", "012"),
        ):  # fmt: skip
            assert "".join(await choose(page, "sort", sort)) == order
        await page.value("document.querySelector('[data-sort=length]').click()")
        assert await page.value(SHOWN) == ["1", "0", "2"]
        assert await choose(page, "stop", "truncated") == ["1"]
        assert await page.value("document.getElementById('shown').textContent") == "1"
        assert await choose(page, "fate", "trained") == []
        assert await choose(page, "stop", "") == ["0", "2"]
        assert await choose(page, "fate", "") == ["1", "0", "2"]
        assert await choose(page, "filter", "FILTERED sample=1") == ["1"]
        await choose(page, "filter", "")
        assert await press(page, "j") == "1false"
        assert await press(page, "j") == "0false"
        assert await press(page, "Enter") == "0true"
        assert await press(page, "Escape") == "0false"
        assert await press(page, "k") == "1false"
        assert await press(page, "/") == "filter"
        assert page.complaints == []
