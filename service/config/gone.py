"""Removed settings, and what replaces each of them."""

from __future__ import annotations

from typing import Any

CHANGES_SAMPLING = (
    "it changes the sampling distribution in a way that the trainer cannot recompute, so every importance ratio would "
    "be wrong; leave it out"
)
UNMEASURED = "the warm start is not measured; the reward of the first optimizer steps says how good it is; leave it out"
GONE = {
    "algorithm.credit=potential": "use return_to_go; the environment adds the change of the score to the reward of a "
    "turn, see docs/credit.md",
    "buffer.lookahead=auto": "give a number; docs/staleness.md says what each costs",
    "buffer.drift": "a prompt that differs from its row always begins a new row; leave it out",
    "buffer.max_drift_tokens": "a prompt that differs from its row always begins a new row; leave it out",
    "env.retrieval": "start a server beside the run (`python -m baton.examples.search_server --corpus FILE`) and give "
    "its address as env.options.url; without one search_r1 searches env.options.corpus in its own process",
    **{
        f"generator.{name}": CHANGES_SAMPLING
        for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    },
    "model.warm_start.expected_success": UNMEASURED,
    "model.warm_start.probe_prompts": UNMEASURED,
    "weights.transport=nccl": "use memory, the default; between hosts it goes over RDMA where NIXL is installed, "
    "else through Ray's object store",
    "weights.delta": "weights go whole; where links are slow, send them less often (weights.sync_every) or train an "
    "adapter (model.lora)",
}
"""What to do instead of a removed setting (key: its path) or a removed value (key: path=value), for error messages."""

NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "buffer.drift": ("fork",),
    "buffer.max_drift_tokens": None,
    "env.retrieval": (None,),
    "generator.top_p": (1,),
    "generator.top_k": (-1, 0),
    "generator.min_p": (0,),
    "generator.repetition_penalty": (1,),
    "generator.presence_penalty": (0,),
    "generator.frequency_penalty": (0,),
    "model.warm_start.expected_success": None,
    "model.warm_start.probe_prompts": None,
    "weights.delta": (False,),
}
"""For each removed setting, the values that change nothing compared to a run without the setting; None: all values. The
`config.yaml` of an older run may have such values, so they are ignored."""

MOVED_MODULES = {"examples": "baton.examples"}
"""For each removed package, the package that now has its modules."""


def leave_out_neutral(values: dict[str, Any]) -> None:
    """Drop settings that no longer exist from the values of a configuration file, if they have a value that had no
    effect (`NEUTRAL`). `values` is changed in place."""
    for path, neutral in NEUTRAL.items():
        *parents, name = path.split(".")
        section: Any = values
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section and (neutral is None or _is_among(section[name], neutral)):
            del section[name]


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is equal to one of `neutral`; true and false are not equal to 1 and 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
