"""Decides the role of each call of an agent, once, when the agent's trajectory ends.

A root is a call that continues no other call. A root and all calls that continue it form one conversation:

    root 0   one call without tools: "Name this task"           aux
    root 1   with tools                                         main
    call 2   continues root 1                                   retry, if call 3 repeats it and is continued
    call 3   continues root 1                                   main
    root 4   another system prompt, with tools                  sub
    root 5   one call: "Sum up what was done"                   main: root 6 begins with root 5's answer
    root 6   root 1's system prompt; its last answer was lost   main; its last call undelivered
    root 7   one call without tools: "Now the answer"           main: it is the newest call

No rule depends on the length of a response: all samples of a group are treated alike. If no conversation has tools or a
second call, the calls are steps of a pipeline, and all are `main`.

A client may name a role (`X-Baton-Role`): `main`, `sub`, `aux` or a configured role. It holds for the whole
conversation. If the client names several roles, the last role counts. Calls whose prompts are token ids are `main`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from service.agents.conversation_tree import AgentCall, Beginning
from service.handoff.steps.values import Role

PIECE = 16
"""Characters of one piece of a text, by which the text is recognised. Shorter pieces occur in other texts by chance."""
PIECES, FOUND = 8, 2
"""Number of pieces of a text that are searched for, and number of these that must be found. (Agents leave out parts of
a summary.)"""
NEXT = 8
"""Number of conversations after a summary that are searched for its text. It bounds the time of the search."""


class _RoledConversation(NamedTuple):
    calls: list[AgentCall]
    """A root call, and the calls that continue it, in order."""

    @property
    def begun(self) -> Beginning | None:
        return self.calls[0].begun

    @property
    def has_tools(self) -> bool:
        return self.begun is not None and self.begun.has_tools

    @property
    def is_continued(self) -> bool:
        return any(call.parent is not None for call in self.calls)

    @property
    def is_single(self) -> bool:
        """Whether the conversation is a single call without tools that no other call continues."""
        return not self.is_continued and not self.has_tools

    @property
    def named(self) -> str | None:
        """The role that the client named last for the conversation; None: it named no role."""
        return next((call.named for call in reversed(self.calls) if call.named), None)

    @property
    def rank(self) -> tuple[bool, bool, bool, bool]:
        """The sort key by which the agent's main conversation is found: the first conversation with the highest key."""
        is_received = self.is_continued or any(map(_is_delivered, self.calls))
        return is_received, self.named == Role.MAIN, self.has_tools, self.is_continued


_WithRoles = list[tuple[_RoledConversation, str]]


def roles_of(calls: Sequence[AgentCall]) -> list[str]:
    """The roles of all calls of one agent, in the order of the calls."""
    conversations, continued = _conversations(calls), {call.parent for call in calls}
    own = max((of for of in conversations if of.named in (None, Role.MAIN)), key=lambda of: of.rank, default=None)
    replaced = {call.body: call.index for call in calls if call in continued}
    roles: dict[AgentCall, str] = {}
    later: _WithRoles = []
    for conversation in reversed(conversations):  # a summary is recognised by the conversation after it
        role = _role(conversation, own, conversation.calls[-1] is calls[-1], later)
        later.append((conversation, role))
        for call in conversation.calls:
            if call in continued:
                roles[call] = role
            elif not _is_delivered(call):
                roles[call] = Role.UNDELIVERED
            else:
                roles[call] = Role.RETRY if replaced.get(call.body, -1) > call.index else role
    return [roles[call] for call in calls]


def _is_delivered(call: AgentCall) -> bool:
    """Whether a client received the reply. True for calls before a restart: their delivery was not recorded."""
    return call.delivered or call.is_restored


def _conversations(calls: Sequence[AgentCall]) -> list[_RoledConversation]:
    of: dict[AgentCall, _RoledConversation] = {}
    for call in calls:  # the list has each parent before its children
        of[call] = _RoledConversation([]) if call.parent is None else of[call.parent]
        of[call].calls.append(call)
    return [of[call] for call in calls if call.parent is None]


def _role(conversation: _RoledConversation, own: _RoledConversation | None, is_newest: bool, later: _WithRoles) -> str:
    """The role of a conversation. `own`: the agent's main conversation; `later`: the conversations that began after
    `conversation`, each with its role."""
    begun = conversation.begun
    if conversation.named is not None:
        return conversation.named
    if own is None or conversation is own or begun is None:
        return Role.MAIN
    if len(conversation.calls) == 1 and (found := _begun_by(conversation.calls[0], later)) is not None:
        return found
    alike = own.begun is not None and own.begun.system == begun.system
    if not conversation.is_single:
        return Role.MAIN if alike else Role.SUB
    # `aux` is a separate question: no edited history, and not the newest call, which may give the result.
    is_own = own.is_single or is_newest or (alike and conversation.calls[0].how == "rerendered")
    return Role.MAIN if is_own else Role.AUX


def _begun_by(call: AgentCall, later: _WithRoles) -> Role | None:
    """The role of the later conversation that begins with a call's answer; None if there is no such conversation."""
    found = {
        role
        for conversation, role in later[-NEXT:]
        if (begun := conversation.begun) is not None and _reappears(call, begun.text)
    }
    return next((role for role in (Role.MAIN, Role.SUB) if role in found), None)


def _reappears(call: AgentCall, where: str) -> bool:
    """Whether at least `FOUND` pieces of a root's answer appear in `where` but not in the root's own prompt."""
    text, asked = call.reply.content.strip(), call.begun.text if call.begun is not None else ""
    starts = (place * (len(text) - PIECE) // (PIECES - 1) for place in range(PIECES))
    pieces = (text[start : start + PIECE] for start in starts)
    return len(text) >= PIECE and sum(piece in where and piece not in asked for piece in pieces) >= FOUND
