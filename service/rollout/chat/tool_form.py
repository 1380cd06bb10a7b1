"""The form in which a chat template takes the calls and the answers of tools. Templates differ: some refuse or drop a
form that others need. `Chat.tool_form` tries these forms and takes the first that works:

    called   the answer must follow a turn with its call                 ...<call> <end> | tool 17 <end> assistant
    alone    the answer follows any turn of the assistant                ...<end> | tool 17 <end> assistant
    user     the answer is sent as a message of the user: the template   ...<end> | user 17 <end> assistant
             refuses or drops answers, or moves them into the call's turn
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import xxhash

from service.rollout.environment import Message
from service.rollout.exact_json import read_arguments

NO_CALL = {"tool_call_id": f"call_{'0' * 24}_0", "name": "tool"}
"""Id and name of a call, for an answer of a tool that names no call: some templates need them."""


class ToolForm(NamedTuple):
    """How a template takes calls and answers."""

    place: Literal["called", "alone", "user"]
    short_ids: bool = False
    """Whether ids have nine characters (Mistral)."""
    needs_call: bool = False
    """Whether an answer that follows no call becomes a message of the user: the template does not show it."""

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, converted to this form; errors as in `with_names`, and `InexactJson` for a call's arguments."""
        fitted: list[Any] = []
        for message in with_names(messages):
            one: dict[str, Any] = dict(message)
            if calls := one.get("tool_calls"):
                one["tool_calls"] = [self._call(call) for call in calls]
            if one["role"] == "tool":
                one = {**NO_CALL, **one}
                if self.short_ids:
                    one["tool_call_id"] = _short(one["tool_call_id"])
                if self.place == "user" or (self.needs_call and not any("tool_calls" in of for of in fitted)):
                    one = {"role": "user", "content": one["content"]}
            is_changed = one["role"] != message["role"] or self.place == "user"
            if is_changed and fitted and one["role"] == fitted[-1]["role"] == "user":  # roles may alternate
                one["content"] = f"{fitted.pop()['content']}\n{one['content']}"
            fitted.append(one)
        return fitted

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])  # some templates render its keys in their order
        function["arguments"] = read_arguments(function.get("arguments", {}))
        return {**call, **({"id": _short(call["id"])} if self.short_ids and "id" in call else {}), "function": function}


FORMS = [ToolForm(place, is_short) for place in ("called", "alone") for is_short in (False, True)]
"""The forms that are tried, in order."""


def with_names(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """The messages; an answer of a tool that has no name gets the name of its call. It answers the newest calls with
    its id, in their order: ids may come again in later turns, or be missing in calls or answers.

    Raises:
        ValueError: a call has no function with a name.
    """
    names, left = dict[Any, str](), list[tuple[Any, str]]()
    for message in messages:
        if message["role"] == "tool":
            of, own = message.get("tool_call_id"), message.get("name")
            fits = [call for call in left if of in (None, call[0]) or (call[0] is None and of not in names)]
            if fit := next((call for call in fits if own in (None, "", call[1])), None):
                left.remove(fit)
            if not own and (name := fit[1] if fit else names.get(of)):
                message = {**message, "name": name}
        left = [] if message.get("tool_calls") else left
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not isinstance(call.get("id"), str | None):
                raise ValueError(f'a call needs "function" with a name, and an id that is a text, not {call!r:.80}')
            left.append((call.get("id"), name))
            names |= {call.get("id"): name, None: name}
        yield message


def called(answers: Sequence[Message], mark: str, most: int | None = None) -> list[Message]:
    """A test conversation: a question, a turn with one call for each answer (at most `most` calls), and the answers.
    The calls' arguments contain `mark`."""
    named = [{**NO_CALL, **answer} for answer in answers if answer["role"] == "tool"]
    calls = [
        {"type": "function", "id": of["tool_call_id"], "function": {"name": of["name"], "arguments": {"x": mark}}}
        for of in named[:most]
    ]
    return [Message(role="user", content="?"), Message(role="assistant", content="", tool_calls=calls), *answers]


def _short(call_id: str) -> str:
    return xxhash.xxh3_64_hexdigest(call_id.encode(errors="replace"))[:9]
