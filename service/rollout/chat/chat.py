"""From messages to token ids, append-only: a turn adds tokens and never touches earlier ones.

The model's own chat template says what stands between two turns. With a template of the `<|im_start|>` kind and the
response `look fox age <|im_end|>`, the observation `17` becomes

    template of [user, assistant, user 17] + generation prompt, from the end of the assistant's content on:
        <|im_end|> \\n <|im_start|> user \\n 17 <|im_end|> \\n <|im_start|> assistant \\n
    delta, because the response already ends in <|im_end|>:
                   \\n <|im_start|> user \\n 17 <|im_end|> \\n <|im_start|> assistant \\n

so the next prompt is exactly prompt + response + delta, and the history is neither rendered nor tokenised again.

Only the template writes special tokens. What a message says is text, `<|im_end|>` too: the template renders a mark in
its place, and it is tokenised as the characters it consists of. So nobody opens or closes a turn by writing so.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from service.config.rollout import GeneratorConfig
from service.errors import UserError
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.environment import Message, is_text
from service.types import Int32s

MARK = "baton-marks-the-response"
"""Stands for a response when the template is asked what follows one."""
CACHED_MESSAGES = 4096
CACHED_CHARACTERS = 4096
"""Longer texts are not cached, so the cache stays small."""

OPEN, CLOSE = "\ue000", "\ue001"
"""Characters for private use: between them stands the number of a text that the template does not see."""
HIDDEN = re.compile(f"{OPEN}([0-9]+){CLOSE}")

ASKED = (Message(role="user", content="?"), Message(role="assistant", content=MARK))

Key = tuple[tuple[str, str], ...]
Tool = Mapping[str, Any]
"""The JSON schema of a tool, as templates expect it."""


class MessagesRefused(UserError):
    """The chat template or the tokenizer does not take these messages."""


class Chat:
    """A tokenizer and its chat template, for one model."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, str | int | float | bool] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self._template_options = dict(template_options or {})
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        specials = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        specials |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        longest_first = sorted(specials, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, [*longest_first, OPEN])))
        self._special_ids = frozenset(specials.values()) - {tokenizer.unk_token_id}
        self._prompts: OrderedDict[Key, Int32s] = OrderedDict()
        self._deltas: OrderedDict[Key, Int32s] = OrderedDict()
        self.end_id = self._find_end()
        """The token that ends a turn; the loop appends it where the model stopped without one."""
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys((self.end_id, int(tokenizer.eos_token_id))))
        """All tokens at which the engine should stop."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Int32s:
        """The token ids of a whole prompt, with the generation prompt at its end."""
        if tools:
            return self._ids(*self._render(messages, tools))
        return _cached(self._prompts, messages, lambda: self._ids(*self._render(messages)))

    def delta(self, messages: Sequence[Message], last_id: int) -> Int32s:
        """The token ids that follow a response whose last token is `last_id`."""
        delta = _cached(self._deltas, messages, lambda: self._ids(*self._after_mark(messages)))
        return delta[1:] if len(delta) and delta[0] == last_id else delta

    def text(self, response_ids: Int32s) -> str:
        """The text of a response, without special tokens."""
        return str(self._backend.decode(response_ids.tolist(), skip_special_tokens=True))

    def encode(self, text: str) -> Int32s:
        """The token ids of a template's text, in which special tokens count as such.

        Raises:
            MessagesRefused: it holds half of a surrogate pair, which no tokenizer takes.
        """
        if not is_text(text):
            raise MessagesRefused("a message holds half a surrogate pair, which is no text")
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def plain(self, text: str) -> Int32s:
        """The token ids of text that anybody may have written, in which nothing counts as a special token."""
        self._backend.encode_special_tokens = True
        try:
            token_ids = self.encode(text)
            if not self._special_ids.isdisjoint(token_ids.tolist()):
                # A vocabulary may hold a special token among its ordinary words; such a word is cut in two.
                token_ids = self.encode(self._special_text.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text))
        finally:
            self._backend.encode_special_tokens = False
        return token_ids

    def _ids(self, text: str, hidden: Sequence[str]) -> Int32s:
        """The token ids of what the template rendered, with what it did not see."""
        if not hidden:
            return self.encode(text)
        parts = enumerate(HIDDEN.split(text))
        return np.concatenate([self.plain(hidden[int(part)]) if i % 2 else self.encode(part) for i, part in parts])

    def _after_mark(self, messages: Sequence[Message]) -> tuple[str, list[str]]:
        text, hidden = self._render([*ASKED, *messages])
        _, found, after = text.partition(MARK)
        if not found:
            raise MessagesRefused("the chat template leaves out an assistant's message; use another template")
        return after, hidden

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[str, list[str]]:
        """The template's text, in which special tokens that the messages hold are numbers; and what they stand for."""
        hidden: list[str] = []

        def hide(found: re.Match[str]) -> str:
            hidden.append(found[0])
            return f"{OPEN}{len(hidden) - 1}{CLOSE}"

        seen = [
            {key: self._special_text.sub(hide, value) if isinstance(value, str) else value for key, value in of.items()}
            for of in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                seen, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **self._template_options
            )
        except Exception as error:  # a template is a program that came with the model: anything can come out of it
            raise MessagesRefused(f"the chat template refuses: {type(error).__name__}: {error}") from error
        return str(text), hidden

    def _find_end(self) -> int:
        """The special token with which the template closes an assistant's message, or else the tokenizer's own end."""
        following = self._ids(*self._after_mark([Message(role="user", content="?")]))
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        if len(following) and int(following[0]) in special:
            return int(following[0])
        return int(self._tokenizer.eos_token_id)


def load_chat(folder: Path, config: GeneratorConfig) -> Chat:
    """The chat of the model in `folder`, with the configured options of its template."""
    return Chat(load_tokenizer(folder), config.chat_template_options)


def _cached(cache: OrderedDict[Key, Int32s], messages: Sequence[Message], make: Callable[[], Int32s]) -> Int32s:
    if any(len(message) != 2 for message in messages):  # a template may look at whatever else it holds
        return make()
    key = tuple((message["role"], message["content"]) for message in messages)
    found = cache.get(key)
    if found is not None:
        cache.move_to_end(key)
        return found
    made = make()
    made.setflags(write=False)
    if sum(len(content) for _, content in key) <= CACHED_CHARACTERS:
        cache[key] = made
        if len(cache) > CACHED_MESSAGES:
            cache.popitem(last=False)
    return made
