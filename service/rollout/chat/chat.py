"""Messages to token ids, append-only: a turn adds tokens and never changes earlier ones.

The model's own chat template gives the tokens between two turns. With a template of the `<|im_start|>` kind and the
response `look fox age <|im_end|>`, the observation `17` becomes

    template of [user, assistant, user 17] + generation prompt, from the end of the assistant's content on:
        <|im_end|> \\n <|im_start|> user \\n 17 <|im_end|> \\n <|im_start|> assistant \\n
    delta, because the response already ends in <|im_end|>:
                   \\n <|im_start|> user \\n 17 <|im_end|> \\n <|im_start|> assistant \\n

so the next prompt is exactly prompt + response + delta, and the history is neither rendered nor tokenised again.

Only the template writes special tokens. A special token in a message, such as `<|im_end|>`, is plain text: the template
renders a placeholder for it, which is then tokenised as ordinary characters. So no message can open or close a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
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
"""Placeholder for a response, to find the template's text after it."""
CACHED_PROMPTS = 4096
CACHED_CHARACTERS = 4096
"""Longer messages are not cached, so that the cache stays small."""

OPEN, CLOSE = "\ue000", "\ue001"
"""Private-use characters around the number of a text that is hidden from the template."""
HIDDEN = re.compile(f"{OPEN}([0-9]+){CLOSE}")

ASKED = (Message(role="user", content="?"), Message(role="assistant", content=MARK))

Tool = Mapping[str, Any]
"""The JSON schema of a tool, as templates expect it."""


class MessagesRefused(UserError):
    """The chat template or the tokenizer refuses these messages."""


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
        self._prompts = _cached(lambda messages: self._ids(*self._render(messages)))
        self._deltas = _cached(lambda messages: self._ids(*self._after_mark(messages)))
        self.end_id = self._find_end()
        """The token that ends a turn; `end_token` appends it where the policy stopped without one."""
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys((self.end_id, int(tokenizer.eos_token_id))))
        """All tokens at which the engine should stop."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Int32s:
        """[P] ids of a whole prompt, ending in the template's opening of the assistant's turn."""
        if tools:
            return self._ids(*self._render(messages, tools))
        return self._prompts(messages)

    def delta(self, messages: Sequence[Message], last_id: int) -> Int32s:
        """[D] ids that follow a response whose last token is `last_id`, up to the opening of the next turn."""
        delta = self._deltas(messages)
        return delta[1:] if len(delta) and delta[0] == last_id else delta

    def text(self, response_ids: Int32s) -> str:
        """The text of a response, without special tokens."""
        return str(self._backend.decode(response_ids.tolist(), skip_special_tokens=True))

    def encode(self, text: str) -> Int32s:
        """The ids of a text that the template rendered; special tokens in it are special.

        Raises:
            MessagesRefused: the text holds half of a surrogate pair, which no tokenizer takes.
        """
        if not is_text(text):
            raise MessagesRefused("a message holds half a surrogate pair, which is no text")
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def plain(self, text: str) -> Int32s:
        """The ids of a text from a policy, an environment or a dataset; special tokens in it are ordinary text."""
        self._backend.encode_special_tokens = True
        try:
            token_ids = self.encode(text)
            if not self._special_ids.isdisjoint(token_ids.tolist()):
                # A vocabulary may have a special token among its ordinary words; such a word is cut in two.
                token_ids = self.encode(self._special_text.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text))
        finally:
            self._backend.encode_special_tokens = False
        return token_ids

    def _ids(self, text: str, hidden: Sequence[str]) -> Int32s:
        """The ids of a rendered text with its hidden texts put back."""
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
        """The rendered text, in which special tokens of the messages are replaced by numbers; and those tokens."""
        hidden: list[str] = []

        def hide(found: re.Match[str]) -> str:
            hidden.append(found[0])
            return f"{OPEN}{len(hidden) - 1}{CLOSE}"

        visible = [
            {key: self._special_text.sub(hide, value) if isinstance(value, str) else value for key, value in of.items()}
            for of in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                visible, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **self._template_options
            )
        except Exception as error:  # a template is a program of the model: it may raise anything
            raise MessagesRefused(f"the chat template refuses: {type(error).__name__}: {error}") from error
        return str(text), hidden

    def _find_end(self) -> int:
        """The special token with which the template closes an assistant's message; else the end of sequence."""
        following = self._ids(*self._after_mark([Message(role="user", content="?")]))
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        if len(following) and int(following[0]) in special:
            return int(following[0])
        return int(self._tokenizer.eos_token_id)


def load_chat(folder: Path, config: GeneratorConfig) -> Chat:
    """The chat of the model in `folder`, with the configured options of its template."""
    return Chat(load_tokenizer(folder), config.chat_template_options)


def _cached(make: Callable[[Sequence[Message]], Int32s]) -> Callable[[Sequence[Message]], Int32s]:
    """`make`, with its results for the newest short message lists kept."""

    @lru_cache(CACHED_PROMPTS)
    def newest(key: tuple[tuple[str, str], ...]) -> Int32s:
        ids = make([Message(role=role, content=content) for role, content in key])
        ids.setflags(write=False)
        return ids

    def cached(messages: Sequence[Message]) -> Int32s:
        # A template may use further fields than role and content.
        if any(len(message) != 2 for message in messages):
            return make(messages)
        if sum(len(message["content"]) for message in messages) > CACHED_CHARACTERS:
            return make(messages)
        return newest(tuple((message["role"], message["content"]) for message in messages))

    return cached
