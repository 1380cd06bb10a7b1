"""`baton status` shows a page or says one line, whatever answers and whatever is in the way."""

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.cli.status_view import status_lines
from service.clock import SystemClock
from service.config import Config
from service.errors import UserError
from service.observe.merged_metrics import Hub
from service.observe.metrics import AlertThresholds, Metrics

WORDS = """
actors agents bound_by buffer detail folder generators groups incarnation max_steps not_learning policy_version reason
reward/avg_raw_reward reward_gain reward_gain_interval role run seconds seconds_left since started state step
stepped steps summary time timing/step tokens trainer_wait_fraction waits weights_sync_seconds who
"""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS.split()) | st.text(), inner, max_size=6)
    ),
    max_leaves=12,
)


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


@given(path=st.sampled_from(list(paths(whole()))), value=JSON)
def test_a_document_of_which_a_part_is_anything_else_is_a_page_or_one_line(path: tuple[Any, ...], value: Any) -> None:
    document = whole()
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert shown(document)
    del node[path[-1]]
    assert shown(document)
