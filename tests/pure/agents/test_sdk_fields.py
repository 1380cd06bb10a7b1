"""Every field of the SDKs' requests is honoured, ignored and noted, or refused, as docs/agent-recipes.md lists it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from service.agents.dialects.dialect import Refused
from service.agents.policy_calls import DIALECTS
from tests.pure.agents.test_dialects import ASKED

PAGE = Path("docs/agent-recipes.md").read_text()
SDK = {
    "/v1/chat/completions": chat.CompletionCreateParamsBase,
    "/v1/responses": responses.ResponseCreateParamsBase,
}
LIKELY = (True, 2, "x", {"type": "x"}, [{"type": "x"}], ["x"], {"x": "y"})
"""Values of the kinds that fields have; one of them fits each field, and none is neutral."""


def listed(path: str) -> list[set[str]]:
    """The honoured, the ignored and the refused fields of a dialect, as the page has them."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {DIALECTS[path].name} |"))
    return [set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[2:5]]


def fate(path: str, field: str) -> str:
    """What becomes of a field with a value that has an effect."""
    fates = set()
    for value in LIKELY:
        body: dict[str, Any] = {**ASKED[path], field: value}
        try:
            fates.add("ignored" if field in DIALECTS[path].read(body).ignored else "honoured")
        except Refused as refused:
            fates.add("refused" if (refused.field or "").split(".")[0].split("[")[0] == field else "honoured")
    return fates.pop() if len(fates) == 1 else "honoured"


@pytest.mark.parametrize("path", [*SDK, "/v1/messages"])
def test_every_field_of_a_request_is_honoured_ignored_or_refused_as_it_is_listed(path: str) -> None:
    honoured, ignored, refused = listed(path)
    names = honoured | ignored | refused
    assert len(names) == len(honoured) + len(ignored) + len(refused)
    for name in names - ASKED[path].keys() - {"messages", "tools"}:
        expected = "honoured" if name in honoured else "ignored" if name in ignored else "refused"
        assert fate(path, name) == expected, name


@pytest.mark.parametrize("path", SDK)
def test_every_field_of_the_installed_sdk_is_listed(path: str) -> None:
    assert {*get_type_hints(SDK[path]), "stream"} <= set[str]().union(*listed(path))
