"""Prepares a run: generates or reads its data and its model, and checks them against the whole configuration."""

from __future__ import annotations

from pathlib import Path

from service.config import Config
from service.config.checks import check_bytes
from service.learn.model.router_replay import routing_of_model
from service.model_folder import head_rows, values_left_aside
from service.plan.engine import check_engine
from service.plan.memory import FitSettings, refuse_too_large
from service.rollout.chat.chat import load_chat
from service.rollout.check_inputs import check_environments
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.files import train_file
from service.rollout.prompts.first_prompts import too_long
from service.run.folder import DATA, initial_model, warmed_model
from service.run.phases import say
from service.run.preparing.inputs import Prepared, checked_model, checked_shapes, make_policy, prepare_evaluation
from service.run.preparing.teachers import teachers_of
from service.scorers.scorer import check_tokenizers
from service.scorers.user import check_scorers
from service.types import MAX_SUPPORT, max_support


def prepare(config: Config, folder: Path) -> Prepared:
    """Write synthetic data and a model to `folder` if they are configured; else read data and model. Check both.
    `UserError` if a file or folder is missing or malformed, or the model does not fit the configuration."""
    data, env, model, seed = config.data, config.env, config.model, config.run.seed
    tasks_file = train_file(data, env, folder / DATA, seed)
    tasks = load_tasks(tasks_file)
    check_environments(env, tasks, tasks_file)
    check_scorers(config.scorers)
    columns, temperatures = [task.extra_info for task in tasks], [task.temperature for task in tasks]
    teachers_of(config.scorers, config.algorithm.teacher, columns, temperatures)
    evals = prepare_evaluation(data, env, seed, folder)
    model_folder = model.path or make_policy(model, env, seed, initial_model(model, folder))
    hf_config = checked_model(model_folder)
    chat = load_chat(model_folder, config.generator)
    long = too_long(config.generator, tasks, tasks_file, chat) if config.agents is None else []
    for note in (*long, *chat.notes(config.agents is not None or any(task.tools for task in tasks))):
        say(f"NOTE {note}")
    if (aside := values_left_aside(model_folder, config.generator)) is not None:
        say(f"NOTE {aside}")
    if max_support(config.generator) == MAX_SUPPORT:
        say("NOTE generator.top_k: set it, say to 50: otherwise an engine keeps 56 kB for each token until a turn ends")
    check_tokenizers(config.scorers, model_folder)
    routing = routing_of_model(hf_config, config.generator.record_experts)
    check_bytes(config, routing.token_bytes)
    check_engine(hf_config, config.generator, config.model.dtype)
    checked_shapes(model, model_folder, hf_config)
    memory = refuse_too_large(FitSettings.of(config), model_folder)
    if memory is not None and (host := memory.host_note()) is not None:
        say(f"NOTE {host}")
    warmed = warmed_model(model, folder)
    return Prepared(tasks_file, tasks, model_folder, head_rows(model_folder), routing, evals, warmed)
