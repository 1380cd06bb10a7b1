"""Whether the environments and datasets that a configuration names can be used, before anything is started."""

from __future__ import annotations

from pathlib import Path

from service.config.tree import Config
from service.rollout.environments.factory import check_environments
from service.rollout.environments.registry import make_environment, synthetic_data
from service.rollout.prompts.dataset import load_tasks, tasks_of

MADE = Path("made")
"""Stands for the file of rows that are made."""


def check_inputs(config: Config) -> None:
    """Make every environment, and read every dataset, that the configuration names; one that is not there is passed.

    Raises:
        UserError: an environment is unknown, not trusted or does not take its options; a dataset's row is malformed.
    """
    data = config.data
    make_environment(config.env.name, config.env.options, config.env.trusted_modules)
    makes = data.make_rows is not None or data.eval_make_rows is not None or config.model.make is not None
    if makes:
        synthetic_data(config.env.name)
    for path in (data.train, *(part.path for part in data.mixture.values()), *data.eval.values()):
        if path is not None and path.exists():
            check_environments(config.env, load_tasks(path), path)
    if data.make_rows is not None:
        made_rows = tasks_of(synthetic_data(config.env.name, config.env.options).rows(1, config.run.seed), MADE)
        check_environments(config.env, made_rows, MADE)
