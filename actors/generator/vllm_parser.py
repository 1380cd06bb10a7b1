"""vLLM's parsers of tool calls and thinking, behind the endpoint's protocol.

agents.tool_parser: hermes                    tool calls as Hermes' models write them
agents.tool_parser: hermes+deepseek_r1        and the thinking before them

Only finished responses are parsed: vLLM's streaming takes thinking for content from the second turn on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.agents.parser import Reply
from service.config import Config
from service.errors import UserError
from service.rollout.chat.chat import Tool
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.chat.tools import ToolCall
from service.rollout.player import Player

log = logging.getLogger(__name__)

OWN = "json"
"""The name of the endpoint's own parser."""


class VllmParser:
    """The parsers of one family of models, for the endpoint."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """`name`: that of a tool parser, with `+` and that of a reasoning parser after it.

        Raises:
            UserError: vLLM has no such parser, it lacks a package, or it does not fit the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager

        tools, _, thinking = name.partition("+")
        try:
            make = ParserManager.get_parser(tools, thinking or None, enable_auto_tools=True, tokenizer=tokenizer)
        except (TypeError, ImportError, KeyError) as error:
            raise UserError(f"agents.tool_parser: vLLM cannot use {name!r}: {error.__cause__ or error}") from error
        self._make: Any = make
        self._request = ChatCompletionRequest
        self._tokenizer = tokenizer

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Reply:
        """The reply; text that the parser cannot read is content."""
        request = self._request(messages=[], tools=list(tools) or None, tool_choice="auto" if tools else None)
        try:
            parser = self._make(self._tokenizer, request.tools)
            thinking, content, calls = parser.parse(text, request, enable_auto_tools=True)
        except Exception as error:  # noqa: BLE001 - a policy may write what no parser of well-formed texts has met
            log.warning("vLLM's parser failed on a response: %s: %s", type(error).__name__, error)
            return Reply(text.strip(), "", ())
        read = [_call(call) for call in calls or ()]
        if None in read:
            return Reply(text.strip(), "", ())
        return Reply((content or "").strip(), (thinking or "").strip(), tuple(call for call in read if call))


def use_parser(player: Player, config: Config, model_folder: Path) -> None:
    """Have the player's endpoint read responses with the parser that `agents.tool_parser` names.

    Raises:
        UserError: see `VllmParser`.
    """
    if player.agents is not None and config.endpoint is not None and config.endpoint.tool_parser != OWN:
        player.agents.parser = VllmParser(config.endpoint.tool_parser, load_tokenizer(model_folder))


def _call(call: Any) -> ToolCall | None:
    """A call of vLLM's; None where its arguments are no JSON object."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return ToolCall(call.name, arguments) if isinstance(arguments, dict) else None
