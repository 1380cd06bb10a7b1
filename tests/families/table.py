"""Makes the table of model families in docs/models.md from the proof's results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from transformers import PretrainedConfig

from service.learn.model.hf_config import logit_scale
from service.model_folder import experts_of
from tests.families.prove import Finding, prove
from tests.families.small import small_config

HEADING = """\
| family | layers | what is read from its configuration | comparisons | largest difference |
|---|---|---|---|---|
"""


def families_table(families: Iterable[str]) -> Iterator[str]:
    """Prove the families one after the other, and yield the Markdown table of docs/models.md: its heading, then the
    line of each family as soon as its proof has ended."""
    yield HEADING
    for family in families:
        config = small_config(family)
        yield family_line(family, config, prove(config))


def family_line(family: str, config: PretrainedConfig, findings: list[Finding]) -> str:
    """The line of a model family in the table: its name, its layers, its traits, and the results of its proof."""
    passed = sum(finding.holds for finding in findings)
    worst = max(finding.difference for finding in findings)
    cells = (f"`{family}`", _layers(config), ", ".join(_traits(config)) or "-", f"{passed} of {len(findings)}")
    return f"| {' | '.join(cells)} | {worst:.0e} |\n"


def _layers(config: PretrainedConfig) -> str:
    kinds = {kind.removesuffix("_attention") for kind in getattr(config, "layer_types", None) or ()}
    if not kinds:
        kinds = {"sliding" if getattr(config, "sliding_window", None) else "full"}
    return ", ".join(sorted(kinds))


def _traits(config: PretrainedConfig) -> list[str]:
    """The family's differences from Llama, according to the configuration."""
    settings = config.to_dict()
    no_rope = 0 in (settings.get("no_rope_layers") or ())
    partial_rope = (settings.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) != 1.0
    found = {
        "experts": experts_of(config) > 0,
        "tied head": config.tie_word_embeddings,
        "scaled logits": logit_scale(config) != 1,
        "layers without RoPE": no_rope,
        "RoPE on a part of each head": partial_rope,
    }
    return [trait for trait, has in found.items() if has]
