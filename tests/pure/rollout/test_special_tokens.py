"""Special tokens in messages and tools, against templates that render plain words."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from service.rollout.chat.chat import Chat
from service.rollout.chat.special_tokens import PRIVATE, MessagesRefused
from service.rollout.environment import Message

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

TAGS_MADE_OF_NAMES = """\
{%- macro tree(value) -%}
{%- if value is mapping %}{% for key, of in value | items %}<{{ key }}>{{ tree(of) }}</{{ key }}>{% endfor %}
{%- elif value is string %}{{ value }}
{%- elif value is iterable %}{% for of in value %}{{ tree(of) }}{% endfor %}
{%- else %}{{ value }}{% endif %}
{%- endmacro -%}
<s>{% for tool in tools or [] %}{{ tree(tool) }}{% endfor %}
{%- for m in messages %}{{ '[INST]' ~ m.role ~ ':' }}
{{- tree(m.content) }}{{ tree(m.tool_calls or []) }}</s>{% endfor %}"""

ROLES_BETWEEN_MARKS = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{{ m.content if m.content is string else '[' ~ (m.content | map(attribute='text') | join) ~ ']' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name ~ (call.function.arguments | tojson) }}{% endfor %}
{%- endfor %}<|assistant|>"""

TEMPLATES = (THINKING_AND_JSON, TAGS_MADE_OF_NAMES, ROLES_BETWEEN_MARKS)


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer; each piece of a special token is a token too, where tokenizers join characters."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    joined = "i m, _ e, n d, | >, < |, s >, Ċ Ċ, Ġ <, > <"
    merges = [(pair.split()[0], pair.split()[1]) for pair in joined.split(", ")]
    backend = Tokenizer(BPE(letters | {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return finished(backend, template)


def finished(backend: Tokenizer, template: str = THINKING_AND_JSON) -> PreTrainedTokenizerBase:
    """The tokenizer with its special tokens and its template."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ORDINARY])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


class Trees:
    """Random messages and tools, and the same with a plain word for each hostile text."""

    WORDS = (
        *("", " ", "fox", "17", "\n", '"', "\\", "a</think>b", "<tool_response>", "</tool_response>", "é", "'", "{x}"),
    )

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._plain: dict[str, str] = {}
        """The plain word of each hostile text: one Chinese character as often as the text has characters."""

    def hostile(self) -> str:
        """A special token, a part of one, or characters that nobody else writes."""
        token = self._random.choice(SPECIALS)
        start, stop = sorted(self._random.sample(range(len(token) + 1), 2))
        private = chr(self._random.choice(self._random.choice(PRIVATE)))
        pieces = token[start:stop], token[:stop], token[start:]
        kinds = (token, token, token, *pieces, private, "\ue0000\ue001", "\ufdd0")
        text = self._random.choice(kinds)
        self._plain.setdefault(text, chr(0x4E00 + len(self._plain)) * len(text))
        return text

    def text(self) -> tuple[str, str]:
        pieces = []
        for _ in range(self._random.randint(0, 4)):
            hostile = self._random.random() < 0.5
            piece = self.hostile() if hostile else self._random.choice(self.WORDS)
            pieces.append((piece, self._plain[piece] if hostile else piece))
        return "".join(piece for piece, _ in pieces), "".join(plain for _, plain in pieces)

    def value(self, depth: int = 0) -> tuple[Any, Any]:
        kind = self._random.random()
        if depth < 4 and kind < 0.3:
            items = [(*self.text(), *self.value(depth + 1)) for _ in range(self._random.randint(0, 3))]
            return {key: of for key, _, of, _ in items}, {key: of for _, key, _, of in items}
        if depth < 4 and kind < 0.5:
            values = [self.value(depth + 1) for _ in range(self._random.randint(0, 3))]
            return [of for of, _ in values], [of for _, of in values]
        if kind < 0.6:
            number = self._random.choice([None, True, 17, 0.5])
            return number, number
        return self.text()

    def message(self) -> Sequence[dict[str, Any]]:
        role = self._random.choice(["user", "assistant", "tool", "system"])
        roles = (role, role) if self._random.random() < 0.9 else [role + text for text in self.text()]
        made = [{"role": role, "content": content} for role, content in zip(roles, self.content(), strict=True)]
        if self._random.random() < 0.4:
            for message, name, argument in zip(made, self.text(), self.value(), strict=True):
                message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": argument}}]
        return made

    def content(self) -> Sequence[Any]:
        if self._random.random() < 0.7:
            return self.text()
        parts = [self.text() for _ in range(self._random.randint(1, 4))]
        return [[{"type": "text", "text": part[side]} for part in parts] for side in (0, 1)]

    def tool(self) -> Sequence[dict[str, Any]]:
        names, descriptions, parameters = self.text(), self.text(), self.value()
        return [
            {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
            for name, description, schema in zip(names, descriptions, parameters, strict=True)
        ]

    def __iter__(self) -> Iterator[Sequence[tuple[Any, Any]]]:
        """(messages, tools), hostile and plain, without end."""
        while True:
            messages = [self.message() for _ in range(self._random.randint(1, 3))]
            tools = [self.tool() for _ in range(self._random.randint(0, 2))]
            yield [([of[side] for of in messages], [of[side] for of in tools]) for side in (0, 1)]

    def restored(self, text: str) -> str:
        """The text with its hostile texts in place of plain words."""
        for hostile, plain in self._plain.items():
            text = text.replace(plain, hostile)
        return text


def expected(tokenizer: PreTrainedTokenizerBase, trees: Trees, messages: Any, tools: Any) -> list[int]:
    """The ids of a prompt of plain words, with the hostile texts put back as ordinary text."""
    text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    backend, ids = tokenizer.backend_tokenizer, []
    for part in re.split(f"({'|'.join(map(re.escape, SPECIALS))})", str(text)):
        backend.encode_special_tokens = part not in SPECIALS
        ids += backend.encode(trees.restored(part), add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return ids


@pytest.mark.parametrize("n_trees", [600, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_text_at_any_depth_becomes_a_special_token_and_every_other_token_stays(n_trees: int) -> None:
    cast = [(tokenizer_of(template), Chat(tokenizer_of(template))) for template in TEMPLATES]
    trees = Trees(n_trees)
    for number, (hostile, plain) in enumerate(islice(trees, n_trees)):
        tokenizer, chat = cast[number % len(cast)]
        messages, tools = hostile
        assert chat.prompt(messages, tools).tolist() == expected(tokenizer, trees, *plain), (messages, tools)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tokenizer_of(THINKING_AND_JSON))


def test_what_follows_a_response_hides_special_texts_as_a_whole_prompt_does(chat: Chat) -> None:
    told: Any = {"role": "tool", "content": [{"text": "<|im_"}, {"text": "end|>"}, {"text": "\ue0000\ue001"}]}
    delta = chat.delta([told], chat.end_id)
    assert chat.text(delta) == "\ntool 13\n<|im_end|>\ue0000\ue001\nassistant\n"
    assert delta.tolist().count(chat.end_id) == 1


def test_a_special_text_that_a_template_writes_as_escaped_json_is_read_as_any_other() -> None:
    chat = Chat(tokenizer_of("{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}</s>{% endfor %}"))
    said = [Message(role="user", content='<|im_end|>\ue000é"<|im_')]
    assert chat.text(chat.prompt(said)) == '"<|im_end|>\\ue000\\u00e9\\"<|im_"'


def test_a_message_may_hold_every_character_that_could_stand_for_another(chat: Chat) -> None:
    private = "".join(map(chr, chain.from_iterable(PRIVATE)))
    assert private in chat.text(chat.prompt([Message(role="user", content=private)]))
    with pytest.raises(MessagesRefused, match="no character is left"):
        chat.prompt([Message(role="user", content=f"{private}</s>")])


def test_a_tokenizer_that_marks_only_the_first_word_marks_no_word_after_a_special_text() -> None:
    words = {word: i for i, word in enumerate(["▁fox</s>", "▁a", "a"])}
    backend = Tokenizer(BPE(words, [], unk_token=None, ignore_merges=True))
    backend.pre_tokenizer = Metaspace(prepend_scheme="first", split=True)
    tokenizer = finished(backend, "{% for m in messages %}{{ m.content }}<|im_end|>a{% endfor %}")
    prompt = Chat(tokenizer).prompt([Message(role="user", content="fox</s>")])
    assert tokenizer.convert_ids_to_tokens(prompt) == ["▁fox</s>", "<|im_end|>", "a"]


@pytest.mark.parametrize("normalizer", [None, Lowercase()])
def test_a_special_token_among_the_words_of_a_vocabulary_is_cut_or_refused(normalizer: Lowercase | None) -> None:
    backend = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "<": 2, "/s>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if normalizer is not None:
        backend.normalizer = normalizer
    chat = Chat(finished(backend, "{% for m in messages %}{{ m.content }} </s> {% endfor %}"))
    assert chat.prompt([Message(role="user", content="</s>")]).tolist() == [2, 3, 1]
    if normalizer is not None:
        with pytest.raises(MessagesRefused, match="makes a special token of ordinary text"):
            chat.prompt([Message(role="user", content="</S>")])


@pytest.mark.parametrize(("content", "reason"), [(b"17", "holds a bytes"), ({17}, "holds a set"), (object(), "object")])
def test_what_is_no_plain_value_is_refused(chat: Chat, content: Any, reason: str) -> None:
    with pytest.raises(MessagesRefused, match=reason):
        chat.prompt([{"role": "user", "content": content}])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(MessagesRefused, match="RecursionError"):
        chat.prompt([{"role": "user", "content": endless}])  # type: ignore[typeddict-item]


def test_threads_that_render_at_once_get_what_one_gets() -> None:
    texts = [f"{i} {''.join(SPECIALS)} é {'fox ' * (i % 7)}" for i in range(200)]
    chats = [Chat(tokenizer_of(template)) for template in TEMPLATES]

    def rendered(text: str) -> list[list[int]]:
        messages = [Message(role="user", content=text), Message(role="assistant", content=text[:9])]
        return [chat.prompt(messages, [{"function": {"description": text}}]).tolist() for chat in chats]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rendered, texts)) == [rendered(text) for text in texts]
