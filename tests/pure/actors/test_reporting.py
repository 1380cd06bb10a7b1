"""The reporter of an actor, with a hub that is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from actors.observe.reporting import Reporter
from service.config import Config
from service.observe.metrics import Metrics


def fails(metrics: Metrics) -> None:
    raise ZeroDivisionError("a bug in what is measured")


async def test_a_push_that_fails_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    hub = SimpleNamespace(push=SimpleNamespace(remote=lambda *arguments: None))
    reporter = Reporter("generator", "generator-7", Config(), hub, refresh=fails)
    reporter.start()
    (pushing,) = asyncio.all_tasks() - {asyncio.current_task()}
    with pytest.raises(ZeroDivisionError):
        await pushing
    assert "generator/generator-7 pushes no more metrics to the hub" in caplog.text
    assert "a bug in what is measured" in caplog.text
