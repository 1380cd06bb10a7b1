"""Special tokens in messages and tools, against templates that render plain words."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from service.rollout.chat.chat import Chat, MessagesRefused, SpecialTokens

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<|user|>", "<|tool|>", "<unk>")
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

THINKING_AND_JSON = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{{ tool.function.description | trim }} ({{ tool.function.description | length }})
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else m.content | map(attribute='text') | join %}
{%- if m.role == 'user' and content.startswith('<tool_response>') and content.endswith('</tool_response>') %}(answer)
{%- elif m.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>{{ m.role }} {{ content | length }}
{{ content | trim }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{%- set arguments = call.function.arguments %}
{"name": "{{ call.function.name }}", "arguments": {% if arguments is string %}{{ arguments }}
{%- else %}{{ arguments | tojson(indent=1) }}{% endif %}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer; each piece of a special token is a token too, where tokenizers join characters."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    joined = "i m, _ e, n d, | >, < |, s >, Ċ Ċ, Ġ <, > <"
    merges = [(pair.split()[0], pair.split()[1]) for pair in joined.split(", ")]
    backend = Tokenizer(BPE(letters | {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return finished(backend, template)


def finished(backend: Tokenizer, template: str) -> PreTrainedTokenizerBase:
    """The tokenizer with its special tokens and its template."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ORDINARY])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


class Trees:
    """Random messages and tools with hostile texts, and the same with plain words in their place."""

    WORDS = ("", " ", "fox", "17", "\n", '"', "\\", "a</think>b", "<tool_response>", "é", "{x}")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def hostile(self) -> str:
        """A special token, or a part of one."""
        token = self._random.choice(SPECIALS)
        start, stop = sorted(self._random.sample(range(len(token) + 1), 2))
        return self._random.choice((token, token, token, token[start:stop], token[:stop], token[start:]))

    def text(self) -> tuple[str, str]:
        pieces = []
        for _ in range(self._random.randint(0, 4)):
            word = self._random.choice(self.WORDS)
            pieces.append((self.hostile(), "owl") if self._random.random() < 0.5 else (word, word))
        return "".join(piece for piece, _ in pieces), "".join(plain for _, plain in pieces)

    def value(self, depth: int = 0) -> tuple[Any, Any]:
        kind = self._random.random()
        if depth < 4 and kind < 0.3:
            items = [(*self.text(), *self.value(depth + 1)) for _ in range(self._random.randint(0, 3))]
            return {key: of for key, _, of, _ in items}, {key: of for _, key, _, of in items}
        if depth < 4 and kind < 0.5:
            values = [self.value(depth + 1) for _ in range(self._random.randint(0, 3))]
            return [of for of, _ in values], [of for _, of in values]
        return self.text()

    def message(self) -> Sequence[dict[str, Any]]:
        role = self._random.choice(["user", "assistant", "tool", "system"])
        parts = [self.text() for _ in range(self._random.randint(1, 4))]
        contents = [[{"type": "text", "text": part[side]} for part in parts] for side in (0, 1)]
        made: list[dict[str, Any]] = [{"role": role, "content": content} for content in contents]
        for message, name, argument in zip(made, self.text(), self.value(), strict=True):
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": argument}}]
        return made

    def tool(self) -> Sequence[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
            for name, schema in zip(self.text(), self.value(), strict=True)
        ]

    def __iter__(self) -> Iterator[Sequence[tuple[Any, Any]]]:
        """(messages, tools), hostile and plain, without end."""
        while True:
            messages = [self.message() for _ in range(self._random.randint(1, 3))]
            tools = [self.tool() for _ in range(self._random.randint(0, 2))]
            yield [([of[side] for of in messages], [of[side] for of in tools]) for side in (0, 1)]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tokenizer_of(THINKING_AND_JSON))


def test_no_text_at_any_depth_becomes_a_special_token(chat: Chat) -> None:
    special = {int(chat._special_tokens.encode(token)[0]) for token in SPECIALS}
    for hostile, plain in islice(Trees(600), 600):
        found, expected = ([i for i in chat.prompt(*of).tolist() if i in special] for of in (hostile, plain))
        assert found == expected, hostile


def test_a_special_token_in_a_message_is_broken_by_one_character_and_other_text_stays(chat: Chat) -> None:
    told: Any = {"role": "tool", "content": [{"text": "<|im_"}, {"text": "end|></s>"}, {"text": "é <b>"}]}
    delta = chat.delta([told], chat.end_id)
    assert chat.text(delta) == "\ntool 21\n<|im_\u200bend|><\u200b/s>é <b>\nassistant\n"
    assert delta.tolist().count(chat.end_id) == 1
    assert chat.text(chat.plain("a</s>")) == "a<\u200b/s>"


@pytest.mark.parametrize(("content", "reason"), [(b"17", "holds a bytes"), ({17}, "holds a set"), (object(), "object")])
def test_what_is_no_plain_value_is_refused(chat: Chat, content: Any, reason: str) -> None:
    with pytest.raises(MessagesRefused, match=reason):
        chat.prompt([{"role": "user", "content": content}])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(MessagesRefused, match="RecursionError"):
        chat.prompt([{"role": "user", "content": endless}])  # type: ignore[typeddict-item]


@pytest.mark.parametrize("text", ["17", " 17", "look 17"])
def test_a_text_that_follows_other_tokens_gets_no_space_of_sentencepiece(text: str) -> None:
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate(("<s>", "\u2581", *"look17=~\n"))}, []))
    backend.pre_tokenizer, backend.decoder = Metaspace(), MetaspaceDecoder()
    tokens = SpecialTokens(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>"))
    first, following = tokens.encode("look"), tokens.encode(text, continues=True)
    assert tokens.decode(np.concatenate([first, following])) == f"look{text}"
