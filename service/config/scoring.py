"""Settings of scorers: reward models, judges and teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from service.config.section import Positive, Seconds, Section

ScorerName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class ScorerConfig(Section):
    """Scores complete groups before they are leased; one of `use`, `url` and `model` is set. See docs/scorers.md."""

    kind: Literal["rewards", "teacher"] = "rewards"
    """`rewards`: one reward a trajectory; `teacher`: the log-probability of each sampled token under another model."""
    use: str | None = None
    """A function, or a class with a method `score` (`logprobs` for a teacher), as `your.module:name`."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """An address that takes the group as JSON in a POST; of a teacher, a completions endpoint of vLLM."""
    model: Path | None = None
    """A teacher's Hugging Face folder, which an engine of this run serves."""
    tokenizer: Path | None = None
    """Of a teacher at an address: the Hugging Face folder of its tokenizer, which must be the policy's."""
    served_model: str = ""
    """Of a teacher at an address: the model's name there."""
    key_file: Path | None = None
    """File with a key that is sent to the address as `Authorization: Bearer`."""
    options: dict[str, str | int | float | bool] = {}
    """Passed to the constructor of the class."""
    combine: Literal["replace", "add"] = "replace"
    """The reward takes the place of the environment's, or is added to it."""
    weight: float = 1.0
    """Factor of the reward."""
    workers: Positive = 1
    """Groups that are scored at once. Those of `use` are processes, so that one that hangs or dies costs one group."""
    deadline: Seconds = 60.0
    """Seconds in which a group must be scored."""
    attempts: Positive = 3
    """Times that a group is given to the scorer, until it gives a good answer."""
    fallback: Literal["refuse", "environment_reward"] = "refuse"
    """Without a good answer: the group is refused, or goes on as if there were no such scorer."""
    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each process of the scorer."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for each process of the scorer."""
    start_deadline: Seconds = 600.0
    """Seconds in which the scorer must start."""


class TeacherConfig(Section):
    """On-policy distillation: a term that draws the policy towards a teacher; see docs/scorers.md."""

    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the term."""
    mode: Literal["advantage", "kl"] = "advantage"
    """`advantage`: each token's advantage grows by the weighted log-ratio of teacher to rollout; `kl`: the loss grows
    by the weighted KL term (`kl_estimator`) against the teacher."""
    column: str | None = None
    """Column of the dataset that names each row's teacher, if any; None: the only teacher teaches every row."""
