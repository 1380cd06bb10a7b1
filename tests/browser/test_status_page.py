"""The status page in a real headless Chromium: without errors, readable on a phone and a desktop."""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.observe.metrics_hub import MetricsHub
from service.config import Config, load_config
from service.observe.metrics import AlertThresholds, Metrics
from tests.browser.browser import CHROMIUM, REASON, SIZES, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=REASON)]


@asynccontextmanager
async def run_under_way(steps: int) -> AsyncIterator[tuple[str, MetricsHub]]:
    hub = MetricsHub(load_config([], ["metrics.port=0"]).model_dump_json())
    url = await hub.start()
    await push(hub, "generator/generator-0")
    await push(hub, "driver/driver", *(("step", a_step(step)) for step in range(1, steps + 1)))
    policy = {"incarnation": 1, "step": steps}
    run = {
        "name": "<b>quick</b>",
        "state": "training",
        "max_steps": 100,
        "long_batch": 54,
        "policy_version": policy,
        "generators": 1,
        "stepped": time.time() - 7200,
        "seconds_left": 2400.0,
        "failing": "in the last 5 steps 12 failures in 96 trajectories <b>",
        "not_learning": "in 94% of the groups all samples got 0 (docs/not-learning.md#never-solved)",
    }
    await push(hub, "driver/driver", ("run", run))
    wait = {"who": "trainer", "reason": "groups", "detail": "11 of 16", "since": time.time() - 3}
    attack = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    attacks = {"who": attack, "reason": attack, "detail": attack, "since": time.time() - 3}
    tokens = {"trained": 90000, "open": 1200, "stale": 40}
    groups = {"open": 7, "complete": 11, "leased": 0}
    buffer = {"groups": groups, "tokens": tokens, "waits": [wait, attacks], "accepted_tokens": 91240}
    await push(hub, "buffer/buffer", ("buffer", buffer))
    try:
        yield url, hub
    finally:
        await hub.stop()


async def push(hub: MetricsHub, source: str, *reports: tuple[str, dict[str, Any]]) -> None:
    await hub.push(source, Metrics(*source.split("/"), AlertThresholds.of(Config())).snapshot(), reports)


def a_step(step: int) -> dict[str, float]:
    return {
        "trainer/global_step": step,
        "reward/avg_raw_reward": 0.25 + 0.6 * (1 - math.exp(-step / 30)),
        "generate/batch_padded_seq_len": 50 + step % 7,
        "generate/avg_num_tokens": 17.0,
        "async/staleness_mean": 0.8,
        "async/staleness_max": 2.0,
        "timing/step": math.nan if step == 5 else 0.5,
        "timing/wait_for_generation_buffer": 0.1,
        "policy/policy_loss": 0.001,
        "policy/policy_entropy": 1.2 - step / 100,
    } | ({} if step <= 30 else {"environment/game:Nim<b>/won": step / 100})  # an environment that only later rows name


@pytest.mark.parametrize("size", SIZES)
async def test_the_page_shows_the_run_without_errors_at_both_sizes(size: str, tmp_path: Path) -> None:
    async with run_under_way(60) as (url, hub), browser(tmp_path) as page:
        await page.show(url, size)
        await page.until("document.querySelector('#state')?.textContent === 'training'")
        assert await page.value("document.querySelector('#name').textContent") == "<b>quick</b>"
        text = await page.value("document.querySelector('#progress-text').textContent")
        assert "step 60 of 100" in text and "last step 2.0 h ago" in text and "40 min left" in text
        notes = await page.value("document.querySelector('#notes').innerText")
        assert "12 failures in 96 trajectories <b>" in notes and "never-solved" in notes
        assert await page.value("document.querySelectorAll('.chart svg path').length") == 8
        assert await page.value("[...document.querySelectorAll('.chart h2')].pop().textContent") == "game:Nim<b>/won"
        assert "; long above 54" in await page.value("document.querySelector('#charts').textContent")
        assert "groups: 11 of 16" in await page.value("document.querySelector('#waits').textContent")
        assert await page.value("document.querySelectorAll('#actors tr').length") == 3
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.value(wide) == 0, "the page scrolls sideways"
        small = "Math.min(...[...document.querySelectorAll('td, dd, dt, h2, .note')]"
        assert await page.value(small + ".map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 12

        await push(hub, "driver/driver", ("step", a_step(61)))
        await page.until("document.querySelector('#charts').textContent.includes('61')")
        assert await page.value("history.columns['environment/game:Nim<b>/won'].indexOf(0.31)") == 30
        assert await page.value("new Set(Object.values(history.columns).map(each => each.length)).size") == 1
        await page.screenshot(tmp_path / f"{size}.png")
        assert (tmp_path / f"{size}.png").stat().st_size > 20_000
        assert await page.value("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 1]
        assert page.complaints == []


async def test_the_page_says_so_when_the_run_is_gone(tmp_path: Path) -> None:
    async with run_under_way(3) as (url, hub), browser(tmp_path) as page:
        await page.call("Page.navigate", url=url)
        await page.until("document.querySelector('#state')?.textContent === 'training'")
        await hub.stop()
        await page.until("document.querySelector('#state').textContent === 'not answering'")
