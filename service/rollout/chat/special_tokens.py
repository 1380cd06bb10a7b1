"""Only the chat template can write special tokens: in a message, the characters of a special token are ordinary text.

    message              17<|im_end|>
    the template reads   17?|im_end|>                    `?`: a stand-in for `<`, a character that occurs nowhere else
    it renders           ...user\\n17?|im_end|><|im_end|>
    named                ...user\\n17<|im_end|>NAME       NAME replaces the template's token; the message is restored

A tokenizer that has each NAME in place of its special token then encodes the whole text at once. One stand-in replaces
one character, so templates that measure, cut, trim or quote a text treat it as they would treat the original.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from service.errors import UserError
from service.rollout.environment import is_text
from service.types import Int32s

PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Unicode's ranges of characters for private use, from which stand-ins are chosen."""


class MessagesRefused(UserError):
    """Raised if the chat template or the tokenizer refuses messages."""


class Hidden(NamedTuple):
    """The input of a chat template, with stand-ins in place of some characters."""

    values: Any
    stand_ins: dict[str, str]
    """For each replaced character, its stand-in."""

    def restore(self, text: str) -> str:
        """The text with the original characters in place of stand-ins, also where a template wrote a stand-in as JSON
        escapes."""
        for character, stand_in in self.stand_ins.items():
            text = text.replace(stand_in, character).replace(_escaped(stand_in), _escaped(character))
        return text


class SpecialTokens:
    """Encodes texts; distinguishes the template's special tokens from equal characters in a message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template = str(tokenizer.chat_template)
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._ids = frozenset(ids.values()) - {tokenizer.unk_token_id}
        self._special = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))))
        self._template_words = frozenset(re.findall(r"\w+", self._special.sub(" ", self._template)))
        self._longest = max(map(len, ids))
        self._beginnings = frozenset(token[:k] for token in ids for k in range(1, len(token)))
        self._endings = frozenset(token[k:] for token in ids for k in range(1, len(token)))
        self._all = "\0".join(ids)
        # Random, so that no message can contain a name.
        self._names = {token: f"{secrets.token_hex(16)}." for token in ids}
        self._backend = deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.add_tokens([_named(name, added.get(token)) for token, name in self._names.items()])
        self._backend.encode_special_tokens = True
        named = {self._backend.token_to_id(name): ids[token] for token, name in self._names.items()}
        self._id_of = np.arange(max(named) + 1, dtype=np.int32)
        self._id_of[list(named)] = list(named.values())

    def name(self, rendered: str) -> str:
        """The rendered text with a random name in place of each special token."""
        return self._special.sub(lambda found: self._names[found[0]], rendered)

    def encode(self, named: str) -> Int32s:
        """[T] token ids of a text. Each name that the method `name` has put into the text becomes its special token;
        everything else becomes ordinary tokens.

        Raises:
            MessagesRefused: the text contains half of a surrogate pair, which no tokenizer accepts, or the tokenizer
                makes a special token of ordinary text.
        """
        if not is_text(named):
            raise MessagesRefused("a message holds half a surrogate pair, which is no text")
        ids = self._ids_of(named)
        if not self._ids.isdisjoint(ids):
            # A vocabulary may have a special token among its ordinary words; such a word is split in two.
            cut = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", named)
            ids = self._ids_of(cut)
            if not self._ids.isdisjoint(ids):
                raise MessagesRefused("the tokenizer makes a special token of ordinary text in a message")
        return self._id_of.take(np.asarray(ids, dtype=np.int64))

    def decode(self, token_ids: Int32s, with_special: bool = False) -> str:
        """The text of token ids; `with_special`: whether special tokens are part of the text."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=not with_special))

    def hide(self, values: Any, names: Collection[str] = ()) -> Hidden:
        """A copy of `values` in which no text can form a special token, alone or next to another text.

        Texts in `names`, and words that occur in the template, are not changed: the template may put such a word inside
        a special token, as in `<|` role `|>`.

        Raises:
            MessagesRefused: `values` contains something other than texts, numbers, lists and mappings.
        """
        copied = _copied(values, str.__str__)
        unused, stand_ins = _unused([copied, self._template]), dict[str, str]()

        def stand_in(character: str) -> str:
            if character not in stand_ins:
                one = next(unused, None)
                if one is None:
                    raise MessagesRefused("no character is left to stand for one of a special token in a message")
                stand_ins[character] = one
            return stand_ins[character]

        def hide(text: str) -> str:
            # Without its first character a special token may still contain another one.
            while self._special.search(text):
                text = self._special.sub(lambda found: stand_in(found[0][0]) + found[0][1:], text)
            for position in self._open(text, names):
                text = text[:position] + stand_in(text[position]) + text[position + 1 :]
            return text

        return Hidden(_copied(copied, hide), stand_ins)

    def _ids_of(self, text: str) -> list[int]:
        # Batch encoding releases the interpreter's lock and is twice as fast, so that other threads run meanwhile.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def _open(self, text: str, names: Collection[str]) -> set[int]:
        """Positions of characters to replace, because together with adjacent text they might form a special token."""
        lengths = range(1, min(len(text), self._longest - 1) + 1)
        positions = {len(text) - k for k in lengths if text[-k:] in self._beginnings}
        if not text or text in self._template_words or text in names:
            return positions
        is_inside = len(text) < self._longest and text in self._all
        completes = is_inside or any(text[:k] in self._endings for k in lengths)
        return positions | {0} if completes else positions


def _unused(values: Any) -> Iterator[str]:
    """Characters for private use that the values contain neither as such nor as JSON escapes."""
    everything = json.dumps(values, ensure_ascii=False, default=str)
    used = frozenset(everything)
    for one in map(chr, chain.from_iterable(PRIVATE)):
        if one not in used and _escaped(one) not in everything:
            yield one


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


def _named(name: str, token: AddedToken | None) -> AddedToken:
    """A token that encodes `name` and strips surrounding spaces as `token` does."""
    strips = {} if token is None else {"lstrip": token.lstrip, "rstrip": token.rstrip}
    return AddedToken(name, special=False, normalized=False, **strips)


def _copied(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested values in which `change` is applied to all texts, including keys."""
    if isinstance(value, str):
        return change(str.__str__(value))
    if isinstance(value, Mapping):
        return {_copied(key, change): _copied(of, change) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(of, change) for of in value]
    if value is None or isinstance(value, Number):
        return value
    raise MessagesRefused(f"a message holds a {type(value).__name__}; texts, numbers, lists and mappings are allowed")
