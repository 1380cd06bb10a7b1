"""Reads tokenizers from Hugging Face folders, and makes small tokenizers from a list of words or from bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from service.errors import UserError
from service.model_folder import TOKENIZER, require_files

PAD = "<|pad|>"
START = "<|im_start|>"
END = "<|im_end|>"
UNKNOWN = "<|unk|>"
SPECIALS = (PAD, START, END, UNKNOWN)
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words_of(vocabulary: Sequence[str]) -> list[str]:
    """The words of a made tokenizer in the order of their ids."""
    return list(dict.fromkeys((*SPECIALS, *ROLES, *vocabulary)))


def make_tokenizer(folder: Path, vocabulary: Sequence[str]) -> None:
    """Write a word-level tokenizer with a chat template. Special tokens have the lowest ids, then come roles, then
    words."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words_of(vocabulary))}, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    _write(folder, backend)


def make_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes, with a chat template that does not render tools."""
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    _write(folder, backend)


def _write(folder: Path, backend: Tokenizer) -> None:
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer with its chat template from a local folder; nothing is downloaded. `tokenizer.json` decides the
    tokens, and not the class that the folder names."""
    if not folder.is_dir():
        raise UserError(f"model.path: {folder} is no folder; give a Hugging Face folder with tokenizer.json")
    require_files(folder, TOKENIZER)
    try:
        # Other classes, such as LlamaTokenizer, replace how the file splits texts and decodes tokens.
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # Transformers raises different errors for different faults of the files.
        raise UserError(f"model.path: no tokenizer can be read from {folder}: {error}") from error
    if not tokenizer.chat_template:
        raise UserError(f"model.path: the tokenizer in {folder} has no chat template; add chat_template.jinja")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path: the tokenizer in {folder} names no eos_token; set it in tokenizer_config.json")
    return tokenizer
