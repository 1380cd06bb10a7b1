"""Converts messages to token ids, append-only: a turn adds tokens and never changes earlier tokens.

The model's own chat template gives the tokens between two turns. With a template of the `<|im_start|>` kind and the
response `look fox age <|im_end|>`, the observation `17` becomes

    template of [user, assistant, user 17] + generation prompt, from the end of the assistant's content on:
        <|im_end|> \\n <|im_start|> user \\n 17 <|im_end|> \\n <|im_start|> assistant \\n
    delta (the response already ends in <|im_end|>):
                   \\n <|im_start|> user \\n 17 <|im_end|> \\n <|im_start|> assistant \\n

The next prompt is exactly prompt + response + delta: the history is not rendered or tokenised again.

Only the chat template can write special tokens. A zero-width character breaks each special token in a message, so that
no message can open or close a turn.

    message              17<|im_end|>
    the template reads   17<?|im_end|>                 `?`: U+200B, ZERO WIDTH SPACE
    it renders           ...user\\n17<?|im_end|><|im_end|>     only the last one is the special token
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from numbers import Number
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from service.config.rollout import GeneratorConfig
from service.errors import UserError
from service.model_folder import declared_ends, head_rows, highest_id, is_model_folder
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.chat.tool_form import FORMS, ToolForm, called
from service.rollout.environment import Message, is_text
from service.types import Int32s

MARK = f"baton-marks-the-response-{secrets.token_hex(8)}"
"""Placeholder for a response in a rendered conversation, to find the text after the response. It is random, so that no
message contains it."""
BREAK = "\u200b"
ANCHORS = ("\n", "~", "=")
"""For tokenizers that put a space before a text's first word: the text is encoded after one of these characters."""
TAG = re.compile(r"(?!<unk>)</?[A-Za-z][\w:.-]*>|\[/?[A-Z_]+\]")
"""Tokens that are part of a response's text even if the tokenizer calls them special, such as `<tool_call>`, unless
they frame messages."""
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}

ASKED = (Message(role="user", content="?"), Message(role="assistant", content=MARK))

ANSWER = Message(role="tool", content=f"baton-marks-the-answer-{secrets.token_hex(8)}")

CALL_HEADER = re.compile(r"to=functions\.([\w.-]+)")
"""In the header of a message that is a call, the name of its tool."""

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""The roles of messages that every template knows. Many leave out another one, or show its name as it is."""

Tool = Mapping[str, Any]
"""The JSON schema of a tool, in the form that chat templates expect."""


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
        self._added: dict[int, bytes] = {
            of: token.content.encode() for of, token in tokenizer.added_tokens_decoder.items()
        }
        self._has_bytes = "ByteLevel" in repr(self._backend.decoder)
        first = self._backend.encode("a", add_special_tokens=False).tokens[:1]
        self._prepends = bool(first) and first[0].startswith("\u2581")

    def broken(self, value: Any) -> Any:
        """A copy of nested values, in which the special tokens in all texts, and in names in mappings, are broken.

        Raises:
            MessagesRefused: a value is not a text, a number, a list or a mapping.
        """
        if isinstance(value, str):
            text = self.broken_text(str.__str__(value))
            # The template may append another text, which completes a special token.
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

    def encode(self, text: str, continues: bool = False) -> Int32s:
        """[T] token ids of a text; the characters of a special token become that token. `continues`: the text follows
        other tokens, so a sentencepiece tokenizer must not put a space before it.

        Raises:
            MessagesRefused: the text contains half of a surrogate pair, which no tokenizer accepts.
        """
        if not is_text(text):
            raise MessagesRefused("a message holds half a surrogate pair, which is no text")
        for anchor in ANCHORS if continues and self._prepends else ():
            encoded = self._backend.encode(anchor + text, add_special_tokens=False)
            kept = [start >= 1 for start, _ in encoded.offsets]
            if all(end <= 1 for (_, end), is_kept in zip(encoded.offsets, kept, strict=True) if not is_kept):
                return np.array(encoded.ids, np.int32)[kept]
        # Batch encoding is twice as fast. It also releases the interpreter's lock, so that other threads can run.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoded.ids, np.int32)

    def decode(self, token_ids: Int32s, with_special: bool = False) -> str:
        """The text of token ids; `with_special`: whether special tokens are part of the text."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=not with_special))

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token's text; a character may consist of several tokens."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._added:
            return self._added.get(token_id, b"")
        if self._has_bytes:
            return bytes(BYTES[character] for character in token)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


class Chat:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_options: Mapping[str, str | int | float | bool] | None = None,
        vocab_size: int | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """`vocab_size`: see the attribute; None: the model has no ids that the tokenizer lacks. `ends`: more ids that
        end the model's turns, besides the ids that the tokenizer and the template name."""
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size or highest_id(tokenizer) + 1
        """Number of rows of the model's head: all token ids are below it. The tokenizer may lack some ids."""
        self._template_options = dict(template_options or {})
        names = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ()
        chosen = str(self._template_options.get("chat_template", "" if len(names) > 1 else "default"))
        if names and chosen not in names and "{" not in chosen:  # tools would choose anew for each prompt
            told = "so name one for the whole run: generator.chat_template_options={chat_template: NAME}"
            raise UserError(f"model.path: the tokenizer has the chat templates {', '.join(names)}, {told}")
        self._template = tokenizer.get_chat_template(self._template_options.get("chat_template"))
        for option in self._template_options.keys() - {"chat_template"}:
            if not re.search(rf"\b{re.escape(option)}\b", self._template):
                told = f"reads no {option!r:.80}, so it would change nothing; leave it out"
                raise UserError(f"generator.chat_template_options: the chat template {told}")
        self._special_tokens = SpecialTokens(tokenizer)
        self.end_id = eos = int(tokenizer.eos_token_id)
        """The token that ends a turn; `conversation` appends it if the policy stopped without an end token."""
        self.end_ids: tuple[int, ...] = (eos, *ends)
        """All tokens at which the engine should stop."""
        self._declared_ends = self.end_ids
        self.closing_id: int | None = None
        """The token with which the template closes an earlier turn; None: the first token of the next message ends the
        turn."""
        self._all_ends = {eos}
        self._header, self._begins = np.zeros(0, np.int32), -1
        """What the policy writes before its answer if a turn may have several messages, and its last special token."""
        self._find_ends()
        unknown = tokenizer.unk_token_id
        self.unknown_id: int | None = None if unknown in self.end_ids else unknown
        """The token for unknown characters; None if the tokenizer has none, or uses it as the end of a turn (GPT-2)."""

    def notes(self, has_tools: bool) -> list[str]:
        """Warnings about ends that the folder does not declare, and about what the template omits of tools.
        `has_tools`: whether prompts may have tools."""
        answers = "the chat template refuses, drops or moves answers of tools: they become messages of the user"
        calls = "the chat template leaves out earlier calls of tools where it renders a conversation again"
        tools = "the chat template shows no tools: describe them in the messages"
        end = f"turns end with {self._tokenizer.convert_ids_to_tokens(self.end_id)}, but the folder names it in no"
        unnamed = f"{end} eos_token_id: other engines will not stop there; add it to generation_config.json"
        notes = [unnamed] * (self.end_id not in self._declared_ends) + [answers] * (self.tool_form.place == "user")
        if has_tools:
            with suppress(MessagesRefused):
                notes += [calls] * (MARK not in self._render(called([ANSWER], MARK)))
            notes += [tools] * (not self.shows_tools)
        return notes

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template puts the tools of a request into the prompt. Also True if the template refuses the tool
        that this function tries."""
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        try:
            return self._render(ASKED[:1], [tool]) != self._render(ASKED[:1])
        except MessagesRefused:  # a refused tool of a request gives its own error later
            return True

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Int32s:
        """[Q] token ids of a whole prompt, which ends where the assistant's turn begins."""
        return self._special_tokens.encode(self._render(messages, tools))

    def delta(self, messages: Sequence[Message], last_id: int) -> Int32s:
        """[D] token ids between a response and the assistant's next turn: `messages` as the template renders them.
        `last_id`: the response's last token; if the rendered text begins with this token, the delta omits it."""
        delta = self._special_tokens.encode(self._following(messages), continues=True)
        first = int(delta[0]) if len(delta) else None
        is_second_end = self.closing_id is not None and last_id in self.end_ids and first in self._all_ends
        return delta[1:] if first == last_id or is_second_end else delta

    @cached_property
    def tool_form(self) -> ToolForm:
        """The first of `FORMS` in which the template shows a tool's answer (tried in a test conversation)."""
        shown = []
        for form in FORMS:
            with suppress(MessagesRefused):
                if form.place == "alone":
                    after = self._after_mark([ANSWER], form)
                else:
                    after = self._after_call(self._render(called([ANSWER], MARK), form=form))
                shown += [form] * (ANSWER["content"] in after)
        needs_call = all(form.place == "called" for form in shown)
        return shown[0]._replace(needs_call=needs_call) if shown else ToolForm("user")

    def text(self, response_ids: Int32s, with_special: bool = False) -> str:
        """The text of a response, with or without special tokens; tags (`TAG`) are always part of the text."""
        if not with_special and np.isin(response_ids, self._tags).any():
            response_ids, with_special = response_ids[~np.isin(response_ids, self._hidden)], True
        return self._special_tokens.decode(response_ids, with_special)

    def said(self, response_ids: Int32s) -> str:
        """The text of a response. A turn of several messages, which have headers, is written as other families do:

        <|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>
            -> <think>2+2</think>4
        <|channel|>commentary to=functions.add<|message|>{"x": 2}<|call|>
            -> <tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>
        """
        if self._begins not in response_ids:  # no message has begun
            return self.text(response_ids)
        thoughts, answer = [], ""
        for message in np.split(response_ids, np.flatnonzero(response_ids == self.closing_id) + 1):
            begins = [-1, *np.flatnonzero(message == self._begins).tolist()][-1] + 1
            header, text = self.text(message[:begins], True), self.text(message[begins:]) if begins else ""
            if call := CALL_HEADER.search(header):
                text = text.replace("</tool_call>", r"<\/tool_call>")  # the same text in JSON
                answer += f'<tool_call>{{"name": "{call[1]}", "arguments": {text}}}</tool_call>'
            elif header.endswith(self.text(self._header, True)):
                answer += text
            elif text:
                thoughts.append(text)
        thinking = f"<think>{chr(10).join(thoughts)}" if thoughts else ""
        return f"{thinking}</think>{answer}" if thinking and answer else thinking + answer

    def plain(self, text: str, continues: bool = False) -> Int32s:
        """Token ids of a text from a policy, an environment or a dataset; special tokens in it are broken. `continues`:
        the text follows other tokens of the same message."""
        return self._special_tokens.encode(self._special_tokens.broken_text(text), continues)

    def answer(self, text: str, continues: bool = False) -> Int32s:
        """`plain` of an answer that was not sampled, after the header that the policy would write before it."""
        return np.append(self._header, self.plain(text, continues or len(self._header) > 0))

    def pieces(self, token_ids: Int32s) -> list[bytes]:
        """The bytes of each token's text; a character may consist of several tokens."""
        return [self._special_tokens.piece(token_id) for token_id in token_ids.tolist()]

    def _following(self, messages: Sequence[Message]) -> str:
        """The text between a response and the next turn."""
        if any(message["role"] == "tool" for message in messages) and self.tool_form.place == "called":
            try:
                return self._after_call(self._render(called(messages, MARK)))
            except MessagesRefused:  # some templates allow one call in a turn (Llama)
                return self._after_call(self._render(called(messages, MARK, most=1)))
        return self._after_mark(messages)

    def _after_call(self, rendered: str) -> str:
        """The rendered text that begins at the end of a turn; the mark is in the last call of this turn."""
        _, is_shown, after = rendered.rpartition(MARK)
        ends = self._tokenizer.convert_ids_to_tokens(list(self._all_ends))
        found = [place for token in ends if token and (place := after.find(token)) >= 0]
        if not is_shown or not found:
            raise MessagesRefused("the chat template shows no call, or no end after it")
        return after[min(found) :]

    def _after_mark(self, messages: Sequence[Message], form: ToolForm | None = None) -> str:
        _, found, after = self._render([*ASKED, *messages], form=form).partition(MARK)
        if not found:
            raise MessagesRefused("the chat template leaves out an assistant's message; use another template")
        return after

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), form: ToolForm | None = None) -> str:
        """The rendered text; only the template writes special tokens. `form`: of tools' answers; None:
        `tool_form`'s."""
        for role in {message["role"] for message in messages} - ROLES:
            if not re.search(rf"""role[^%}}]*["']{re.escape(role)}\\?["']""", self._template):
                raise MessagesRefused(f"the chat template names no role {role!r:.80}; use {', '.join(sorted(ROLES))}")
        if any(message.get("function_call") for message in messages):
            raise MessagesRefused("no template shows `function_call`; write the call into `tool_calls`")
        has_tools = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        form = form or (self.tool_form if has_tools else None)
        try:
            messages = form.fitted(messages) if form else messages
            text = self._tokenizer.apply_chat_template(
                self._special_tokens.broken(messages),
                tools=self._special_tokens.broken(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **self._template_options,
            )
        except MessagesRefused:
            raise
        except Exception as error:  # a template is a program of the model: it may raise anything
            raise MessagesRefused(f"the chat template refuses: {type(error).__name__}: {error}") from error
        return str(text)

    def _find_ends(self) -> None:
        """Find the tokens that end a turn: see how the template closes an assistant's message."""
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        following = self._special_tokens.encode(self._after_mark([Message(role="user", content="?")])).tolist()
        closing = following[0] if following and following[0] in special else self.end_id
        before, _, after = self._render([Message(role="user", content=MARK)]).partition(MARK)
        opens, closes = self._special_tokens.encode(before), self._special_tokens.encode(after).tolist()
        is_next = closing in [of for of in opens.tolist() if of in special][-1:]  # GLM: `<|user|>` ends a turn
        self.closing_id = None if is_next else closing
        is_part = closing not in self.end_ids and self._find_header()  # gpt-oss: it ends each message of a turn
        self.end_id = self.end_id if is_part else closing
        further = ""
        with suppress(MessagesRefused):
            if is_next:
                further = self._after_mark([ANSWER], ToolForm("alone"))
            elif is_part:  # a call has an end of its own
                further = self._render(called([ANSWER], MARK), form=FORMS[0]).partition(MARK)[2]
        ends = [of for of in self._special_tokens.encode(further).tolist() if of in special][:1]
        self.end_ids = tuple(dict.fromkeys((self.end_id, *self.end_ids, *ends)))
        self._all_ends = {closing, *self.end_ids}
        others = (self._tokenizer.bos_token_id, self._tokenizer.pad_token_id, self._tokenizer.unk_token_id)
        earlier = self._special_tokens.encode(self._render([*ASKED, *ASKED[:1]]).partition(MARK)[0]).tolist()
        closing_user = {*[of for of in closes if of in special][:1]} & {*earlier}  # not `<think>` of a prompt's end
        framing = {*self._all_ends, *opens.tolist(), *closing_user, *others}
        added = {of: token for of, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        tags = {of for of, token in added.items() if of not in framing and TAG.fullmatch(token.content)}
        self._tags, self._hidden = np.array([*tags], np.int32), np.array([*added.keys() - tags], np.int32)

    def _find_header(self) -> bool:
        """Whether the policy writes special tokens before its text. Then one turn may have several messages."""
        asked, told = self._render(ASKED[:1]), self._render([*ASKED, *ASKED[:1]]).partition(MARK)[0]
        header = told[len(commonprefix((asked, told))) :]  # noqa: RUF071 - of characters
        special = [of for of, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        header_ids = self._special_tokens.encode(header)
        if marks := [of for of in header_ids.tolist() if of in special]:
            self._header, self._begins = header_ids, marks[-1]
        return bool(marks)


def load_chat(folder: Path, config: GeneratorConfig) -> Chat:
    """The tokenizer and chat template of the model in `folder`, with the configured template options."""
    rows = head_rows(folder) if is_model_folder(folder) else None
    return Chat(load_tokenizer(folder), config.chat_template_options, rows, declared_ends(folder))
