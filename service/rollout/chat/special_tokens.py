"""Only the chat template can write special tokens: a special token in a message is broken by a zero-width character.

message              17<|im_end|>
the template reads   17<?|im_end|>                 `?`: U+200B, ZERO WIDTH SPACE
it renders           ...user\\n17<?|im_end|><|im_end|>     only the last one is the special token
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from numbers import Number
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from service.errors import UserError
from service.rollout.environment import is_text
from service.types import Int32s

BREAK = "\u200b"


class MessagesRefused(UserError):
    """Raised if the chat template or the tokenizer refuses messages."""


class SpecialTokens:
    """Breaks special tokens in texts, and encodes and decodes texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        tokens = sorted({token for token in (*added, *tokenizer.all_special_tokens) if len(token) > 1}, key=len)[::-1]
        self._special = re.compile("|".join(map(re.escape, tokens)))
        self._beginnings = tuple({token[:k] for token in tokens for k in range(1, len(token))})
        self._backend = deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()

    def broken(self, value: Any) -> Any:
        """A copy of nested values in which no text, including names in mappings, contains a special token.

        Raises:
            MessagesRefused: a value is neither a text, a number, a list nor a mapping.
        """
        if isinstance(value, str):
            text = self.broken_text(str.__str__(value))
            # The template may append the rest of a token from another text.
            return text + BREAK if text.endswith(self._beginnings) else text
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(of) for key, of in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(of) for of in value]
        if value is None or isinstance(value, Number):
            return value
        raise MessagesRefused(
            f"a message holds a {type(value).__name__}; texts, numbers, lists and mappings are allowed"
        )

    def broken_text(self, text: str) -> str:
        """The text with a zero-width character after the first character of each special token."""
        while self._special.search(text):  # a broken token may contain another one
            text = self._special.sub(lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", text)
        return text

    def encode(self, text: str) -> Int32s:
        """[T] token ids of a text; a special token's characters become the special token.

        Raises:
            MessagesRefused: the text contains half of a surrogate pair, which no tokenizer accepts.
        """
        if not is_text(text):
            raise MessagesRefused("a message holds half a surrogate pair, which is no text")
        # Batch encoding releases the interpreter's lock and is twice as fast, so that other threads run meanwhile.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoded.ids, np.int32)

    def decode(self, token_ids: Int32s, with_special: bool = False) -> str:
        """The text of token ids; `with_special`: whether special tokens are part of the text."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=not with_special))
