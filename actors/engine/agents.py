"""The agents of a run's engine, and vLLM's parsers of tool calls and thinking for their endpoint.

agents.tool_parser: hermes                    parses tool calls as Hermes models write them
agents.tool_parser: hermes+deepseek_r1        also parses thinking as DeepSeek-R1 writes it, before the tool calls

Only finished responses are parsed: vLLM's streaming parser treats thinking as content from the second turn on.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from service.agents.agents import Agents, GatewayRoute
from service.agents.messages_and_replies import JsonCalls, Reply, ReplyParser
from service.config.rollout import AgentsConfig
from service.errors import UserError
from service.rollout.chat.chat import Chat, Tool
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.chat.tools import ToolCall, read_json
from service.rollout.engine import AgentLimits, Engine
from service.rollout.run_secret import RunSecret

log = logging.getLogger(__name__)

OWN = "json"
"""The value of `agents.tool_parser` that selects the endpoint's own parser instead of vLLM's parsers."""
EXTRA = "baton-rl[parsers]"
"""Baton's extra with the packages that most of vLLM's parsers import."""
ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "properties": {}}}}


class VllmParser:
    """Parses the responses of one family of models for the agents' endpoint, with vLLM's parser of tool calls and,
    optionally, vLLM's parser of thinking."""

    def __init__(self, name: str, tokenizer: Any, end_ids: Collection[int] = ()) -> None:
        """Load the parsers. `name`: the tool parser's name, optionally followed by `+` and the reasoning parser's name.

        Raises:
            UserError: vLLM has no such parser, or the parser lacks a package or does not fit the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        tools, _, thinking = name.partition("+")
        _load(tools, ToolParserManager.get_tool_parser, ToolParserManager.list_registered())
        if thinking:
            _load(thinking, ReasoningParserManager.get_reasoning_parser, ReasoningParserManager.list_registered())
        try:
            make = ParserManager.get_parser(tools, thinking or None, enable_auto_tools=True, tokenizer=tokenizer)
        except (TypeError, ImportError) as error:
            raise UserError(f"agents.tool_parser: vLLM cannot use {name!r}: {error.__cause__ or error}") from error
        request = ChatCompletionRequest(messages=[], tools=[ANY_TOOL], tool_choice="auto")
        self._make: Any = make
        self._end_ids = frozenset(end_ids)
        self._is_marked = not self._make(tokenizer, request.tools).adjust_request(request).skip_special_tokens
        """Whether the model family marks tool calls or thinking with special tokens."""
        self._request = ChatCompletionRequest
        self._tokenizer = tokenizer

    def parse(self, text: str, tools: Sequence[Tool] = (), token_ids: Sequence[int] = ()) -> Reply:
        """Return a response's content, thinking and tool calls. Text that the parser cannot read becomes content."""
        said = text
        if self._is_marked and token_ids:
            ended = token_ids[:-1] if token_ids[-1] in self._end_ids else token_ids
            said = self._tokenizer.decode(ended, skip_special_tokens=False)
        request = self._request(messages=[], tools=list(tools) or None, tool_choice="auto" if tools else "none")
        try:
            parser = self._make(self._tokenizer, request.tools)
            thinking, content, calls = parser.parse(said, request, True, token_ids)
        except Exception as error:  # noqa: BLE001 - a policy may write text that the parser cannot handle
            log.warning("vLLM's parser failed on a response: %s: %s", type(error).__name__, error)
            return Reply(text.strip(), "", ())
        read = [_call(call) for call in calls or ()]
        if None in read:
            return Reply(text.strip(), "", ())
        return Reply((content or "").strip(), (thinking or "").strip(), tuple(call for call in read if call))


def agents_of(
    endpoint: AgentsConfig | None,
    model_folder: Path,
    secret: RunSecret | None,
    number: int,
    route: GatewayRoute | None,
    chat: Chat,
    engine: Engine,
    limits: AgentLimits,
) -> Agents | None:
    """The agents that call this engine; None if `endpoint` is None. `number`: the generator's number; `route`: the way
    through the run's gateway.

    `load` of the result raises the errors of `VllmParser`.
    """
    if endpoint is None:
        return None

    def parser() -> ReplyParser:
        name = endpoint.tool_parser
        return JsonCalls() if name == OWN else VllmParser(name, load_tokenizer(model_folder), chat.end_ids)

    return Agents(endpoint, chat, engine, limits, secret, number, parser, route)


def _load(name: str, load: Callable[[str], object], known: Collection[str]) -> None:
    if name not in known:
        (near,) = difflib.get_close_matches(name, known, 1, cutoff=0.0)
        raise UserError(f"agents.tool_parser: vLLM has no parser {name!r}; the nearest is {near!r} of {sorted(known)}")
    try:
        load(name)
    except ImportError as error:
        raise UserError(f"agents.tool_parser: {name} needs {error.name}; pip install '{EXTRA}'") from error


def _call(call: Any) -> ToolCall | None:
    try:
        arguments = read_json(call.arguments)
    except ValueError:
        return None
    return ToolCall(call.name, arguments) if isinstance(arguments, dict) else None
