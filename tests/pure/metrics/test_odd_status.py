"""`baton status` shows a page or says one line, whatever answers and whatever is in the way."""

from collections.abc import Iterator
from typing import Any

import pytest

from service.cli.status_view import status_lines
from service.clock import SystemClock
from service.config import Config
from service.errors import UserError
from service.observe.merged_metrics import Hub
from service.observe.metrics import AlertThresholds, Metrics

ODD = (None, True, -1, 10**400, float("nan"), "", "half \ud800", [], [[]], {}, {"state": {}})


def whole() -> dict[str, Any]:
    """A document with every part."""
    hub = Hub(SystemClock())
    metrics = Metrics("generator", "generator-0", AlertThresholds.of(Config()))
    metrics.set_all("baton_agent_sessions", "state", {"calling": 2, "finished": 3})
    hub.push("generator/generator-0", metrics.snapshot())
    hub.put_status(
        "run",
        {
            "name": "r",
            "started": 1.0,
            "stepped": 2.0,
            "max_steps": 9,
            "generators": 1,
            "seconds_left": 9.0,
            "not_learning": "in 90% of the groups",
        },
    )
    wait = {"who": "trainer", "reason": "groups", "detail": "3 of 4", "since": 1.0}
    hub.put_status("buffer", {"groups": {"open": 3}, "tokens": {"open": 9}, "waits": [wait], "issued": 4})
    hub.put_status("step", {"reward/avg_raw_reward": 0.5, "timing/step": 1.0})
    return hub.status()


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value of a document."""
    if path:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from paths(child, (*path, key))


def shown(document: Any) -> str:
    """The page, or the line that says why there is none."""
    try:
        return "\n".join(status_lines(document, 80))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


@pytest.mark.parametrize("path", [*paths(whole())], ids=str)
def test_a_document_of_which_a_part_is_anything_else_is_a_page_or_one_line(path: tuple[Any, ...]) -> None:
    document = whole()
    node = document
    for key in path[:-1]:
        node = node[key]
    for value in ODD:
        node[path[-1]] = value
        assert shown(document)
    del node[path[-1]]
    assert shown(document)
