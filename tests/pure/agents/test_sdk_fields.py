"""Every field of the SDKs' requests is honoured, ignored and noted, or refused, as docs/agent-recipes.md lists it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from service.agents.dialects.dialect import Refused
from service.agents.policy_calls import DIALECTS
from tests.pure.agents.own_environment import IN_TIME, printed_by, python_with
from tests.pure.agents.test_dialects import ASKED
from tests.pure.agents.test_sdks import ANTHROPIC

PAGE = Path("docs/agent-recipes.md").read_text()
SDK = {
    "/v1/chat/completions": chat.CompletionCreateParamsBase,
    "/v1/completions": completions.CompletionCreateParamsBase,
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


def check(path: str, fields: set[str]) -> None:
    """Each field is in one list of the page, and the dialect treats it so."""
    honoured, ignored, refused = listed(path)
    assert fields == honoured | ignored | refused
    assert len(fields) == len(honoured) + len(ignored) + len(refused)
    for name in fields - ASKED[path].keys() - {"messages", "tools"}:
        expected = "honoured" if name in honoured else "ignored" if name in ignored else "refused"
        assert fate(path, name) == expected, name


@pytest.mark.parametrize("path", SDK)
def test_every_field_of_openais_requests_is_listed_and_treated_so(path: str) -> None:
    check(path, {*get_type_hints(SDK[path]), "stream"})


@IN_TIME
@pytest.mark.full
@pytest.mark.slow
async def test_every_field_of_anthropics_requests_is_listed_and_treated_so() -> None:
    check("/v1/messages", set(await printed_by(python_with(ANTHROPIC), "sdk_fields_program.py")))
