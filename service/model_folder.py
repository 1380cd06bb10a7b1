"""Checks a Hugging Face model folder without torch: names of its files, configuration, tokenizer.

When a run begins, `service.run.preparing.inputs` checks the shape of every weight, and how transformers reads the
folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from service.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FAMILIES = (
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "flex_olmo", "gemma", "gemma3", "glm", "glm4", "glm4_moe",
    "gpt_oss", "granite", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "olmo2", "olmo3", "olmoe", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "starcoder2",
)  # fmt: skip
"""Model types that can be trained: they pass the comparisons of `tests/families`, and vLLM supports them."""

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "do_sample": True}
SAMPLING |= dict.fromkeys(("num_beams", "repetition_penalty", "encoder_repetition_penalty", "typical_p"), 1)
SAMPLING |= dict.fromkeys(("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "eta_cutoff"), 0)
SAMPLING |= {"epsilon_cutoff": 0, **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"))}
"""Names of the sampling values in a generation_config.json, each with the value that has no effect on sampling."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys under which a config.json may have the number of experts per layer; the key depends on the family."""

MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = (".bin", ".safetensors", ".pt", ".pth")
"""Endings of files of weights."""
EMBEDDING = "model.embed_tokens.weight"


def is_model_folder(folder: Path) -> bool:
    """True if a folder contains a model: it has a config.json."""
    return (folder / MODEL_CONFIG).is_file()


def is_adapter_folder(folder: Path) -> bool:
    """True if a folder contains an adapter in PEFT's form."""
    return (folder / ADAPTER_CONFIG).is_file()


def check_model_folder(folder: Path, longest: int, sequence_parallel: int = 1) -> None:
    """Check that the model in a folder can be trained. `longest`: maximum tokens of a turn, prompt and response
    together; `sequence_parallel`: number of ranks that divide the heads.

    Raises:
        UserError: a file is missing or malformed; or the model is not supported, its maximum length is too short, or
            the ranks cannot divide its heads.
    """
    require_files(folder, MODEL_CONFIG, TOKENIZER)
    check_description(folder, longest, sequence_parallel)
    for file in weight_files(folder):
        require_files(folder, file.name)


def check_description(folder: Path, longest: int, sequence_parallel: int = 1) -> None:
    """Check a model as `check_model_folder` does, as far as possible, for a folder that may contain only a config.json.

    Raises:
        UserError: a file is malformed; or the model is not supported, its maximum length is too short, or the ranks
            cannot divide its heads.
    """
    refuse_remote_code(folder)
    config = text_part(model_config(folder))
    if reason := unsupported(model_config(folder)):
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    head_rows(folder)
    _check_length(config, folder, longest)
    if reason := undivided(config, sequence_parallel):
        raise UserError(f"trainer.sequence_parallel: {reason}")
    if (folder / TOKENIZER).is_file():
        check_vocabulary(folder, read_tokenizer(folder / TOKENIZER))


def require_files(folder: Path, *names: str) -> None:
    """Check that a model folder has certain files.

    Raises:
        UserError: a file is missing.
    """
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"model.path: the model folder {folder} has no {name}; give a Hugging Face folder")


def refuse_remote_code(folder: Path) -> None:
    """Refuse a model folder that refers to custom code, which transformers or vLLM might run.

    Raises:
        UserError: a configuration file in the folder names custom code.
    """
    for file in sorted(folder.glob("*config*.json")):
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            continue  # a malformed file is reported where it is read
        if _has_key(settings, "auto_map"):
            raise UserError(f"model.path: {file} names code of its own (auto_map), which is not run; remove that entry")


def _has_key(value: object, key: str) -> bool:
    """Whether a mapping has the key, at any depth."""
    if isinstance(value, Mapping):
        return key in value or any(_has_key(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_has_key(inner, key) for inner in value)


def model_config(folder: Path) -> dict[str, Any]:
    """The settings in the folder's config.json.

    Raises:
        UserError: the file is missing or malformed.
    """
    return _json(folder / MODEL_CONFIG)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model in a config.json; a multimodal model has them in `text_config`."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def experts_of(config: object) -> int:
    """Number of experts per layer, from a configuration that transformers has read; 0 for a model without experts."""
    return next((number for name in EXPERTS if (number := getattr(config, name, None))), 0)


def unsupported(config: Mapping[str, Any]) -> str | None:
    """The reason why a model with this config.json cannot be trained: its type, or quantised weights; None if it can be
    trained."""
    given, settings = config.get("model_type"), text_part(config)
    model_type = str(settings.get("model_type")).removesuffix("_text")
    if model_type not in FAMILIES:
        near = near_family(model_type)
        return (
            f"model type {given!r:.80} is none of the {len(FAMILIES)} families in docs/models.md"
            + (f", the nearest is {near}" if near else "")
            + f"; `python -m tests.families FOLDER` tells what fails with {transformers_of(config)}"
        )
    return quantised(config)


def quantised(config: Mapping[str, Any]) -> str | None:
    """A text that says what to do about a model's quantised weights, which cannot be trained; None if they are not
    quantised."""
    quantization = text_part(config).get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    hint = ", or load it with Mxfp4Config(dequantize=True) and save it" if method == "mxfp4" else ""
    return f"its weights are quantised (quantization_config); name the folder that it was quantised from{hint}"


def near_family(model_type: str) -> str | None:
    """The supported family whose name is most similar to a model type; None if no name is similar."""
    return next(iter(get_close_matches(model_type.lower(), FAMILIES, n=1)), None)


def transformers_of(config: Mapping[str, Any]) -> str:
    """The installed version of transformers as text; if a newer version wrote the model's config.json, that version is
    named, too."""
    written, installed = str(config.get("transformers_version", "")), version("transformers")
    needed, given = ([int(part) for part in re.findall(r"\d+", number[:20])[:2]] for number in (written, installed))
    return f"transformers {installed}" + (f" (it needs {written:.20})" if needed > given else "")


def undivided(config: Mapping[str, Any], ranks: int) -> str | None:
    """The reason why `ranks` ranks cannot divide the attention heads of a model with these settings; None if they
    can."""
    heads, linear = config.get("num_attention_heads"), config.get("linear_num_key_heads")
    if type(linear) is int and linear % ranks:
        return f"{ranks} ranks cannot divide the model's {linear} key heads of linear attention; use a divisor"
    return undivided_heads(heads, config.get("num_key_value_heads", heads), ranks)


def undivided_heads(heads: object, key_heads: object, ranks: int) -> str | None:
    """The reason why `ranks` ranks cannot divide a model's query heads and key heads; None if they can."""
    if type(heads) is not int or type(key_heads) is not int:
        return None  # numbers of another type are reported when the model is read
    if heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0):
        return None
    return (
        f"{ranks} ranks cannot divide the model's {heads} heads and {key_heads} key heads among themselves; use a "
        "divisor of both, or a multiple of the key heads that divides the heads"
    )


def _check_length(config: Mapping[str, Any], folder: Path, longest: int) -> None:
    """Refuse a `longest` beyond the engine's limit: `max_position_embeddings`, times the factor of `linear` scaling."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    rope = given if isinstance(given, Mapping) else {}
    factor: Any = rope.get("factor") if rope.get("rope_type", rope.get("type")) == "linear" else 1
    reach = config.get("max_position_embeddings")
    if type(reach) is int and reach < 1:
        raise UserError(f"{folder}: max_position_embeddings in its {MODEL_CONFIG} is {reach}; give the model's length")
    if type(reach) is int and type(factor) in (int, float) and longest > reach * factor:
        raise UserError(
            f"generator.max_input_length: with max_generate_length it comes to {longest} tokens, but {folder} reaches "
            f"only {reach * factor:g} (max_position_embeddings in its {MODEL_CONFIG}); lower one of the two"
        )


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer from a tokenizer.json, without transformers, which takes seconds to import.

    Raises:
        UserError: no tokenizer can be read from the file.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific, whatever is wrong with the file
        raise UserError(f"model.path: no tokenizer can be read from {file}: {error}") from error


def head_rows(folder: Path) -> int:
    """Number of token ids that the model in a folder can sample: the rows of its head. They may be more than the
    tokenizer's tokens, because heads are padded.

    Raises:
        UserError: the config.json is missing or malformed.
    """
    rows = text_part(model_config(folder)).get("vocab_size")
    if type(rows) is not int:
        raise UserError(f"model.path: {folder / MODEL_CONFIG} describes no model: vocab_size is {rows!r:.80}")
    return rows


def declared_ends(folder: Path) -> list[int]:
    """The token ids that end a turn according to the folder's generation_config.json, or else its config.json."""
    files = [file for name in ("generation_config.json", MODEL_CONFIG) if (file := folder / name).is_file()]
    ends = text_part(_json(files[0])).get("eos_token_id") if files else None
    return [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]


def values_left_aside(folder: Path, generator: object) -> str | None:
    """A note that names the sampling values of the folder's generation_config.json which differ from the settings of
    generator; None if there are none."""
    if not (file := folder / "generation_config.json").is_file():
        return None
    used = {name: getattr(generator, name, neutral) for name, neutral in SAMPLING.items()}
    found = {name: value for name, value in _json(file).items() if value not in (None, used.get(name, value))}
    listed = ", ".join(f"{name}={value!r}" for name, value in sorted(found.items()))
    return f"model.path: {file.name} is not used, the settings of generator apply: {listed}" if found else None


def highest_id(tokenizer: Tokenizer | PreTrainedTokenizerBase) -> int:
    """The highest token id of a tokenizer; some lower ids may have no token."""
    return max(tokenizer.get_vocab().values(), default=-1)


def check_vocabulary(folder: Path, tokenizer: Tokenizer | PreTrainedTokenizerBase) -> None:
    """Check that the head of the model in a folder has a row for every token of the folder's tokenizer.

    Raises:
        UserError: a token has no row.
    """
    if (highest := highest_id(tokenizer)) >= (rows := head_rows(folder)):
        raise UserError(
            f"model.path: the tokenizer in {folder} has {highest + 1} tokens, its model only {rows}; they do not "
            "belong together"
        )


def weight_index(folder: Path) -> dict[str, Path]:
    """The file of each weight, by the weight's name, according to the folder's index. Empty if the folder has a single
    file of weights and no index.

    Raises:
        UserError: there are no safetensors, or the index is malformed or names a file outside the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"model.path: {folder} has neither {SINGLE} nor {INDEX}; weights must be safetensors")
        return {}
    files = _json(index).get("weight_map")
    if not isinstance(files, Mapping) or not files:
        raise UserError(f"model.path: {index} is no index of weights: it has no weight_map")
    if outside := [str(file) for file in files.values() if Path(str(file)).name != file or file in ("", "..")]:
        raise UserError(f"model.path: {index} names {outside[0]!r}, which does not lie in the folder")
    return {name: folder / file for name, file in files.items()}


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights. A folder may have others: `consolidated.safetensors` of Mistral's models
    holds the same weights again.

    Raises:
        UserError: as `weight_index` does.
    """
    return sorted({*weight_index(folder).values()} or {folder / SINGLE})


def open_weights(file: Path, framework: Literal["numpy", "pt"]) -> Any:
    """Open a safetensors file and read its header.

    Raises:
        UserError: the file is missing, truncated or not in safetensors format.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.path: the weights {file} cannot be read: {error}") from error


def _no_number(word: str) -> float:
    """Raise an error for NaN and Infinity, which Python's JSON reader would accept as numbers."""
    raise ValueError(f"{word} is no number")


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"model.path: {file} is no JSON: {error}") from error
    except OSError as error:
        raise UserError(f"model.path: {file} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise UserError(f"model.path: {file} holds no object")
    return value
