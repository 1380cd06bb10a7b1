"""Importance ratios on the weights that sampled: over each token's support, and over the whole vocabulary.

    python -m benchmarks.supports
    python -m benchmarks.supports --journal    bytes of messages; needs model and data of configs/smollm2_gsm8k.yaml

The quick start makes a model; with it every setting of a sampler plays one mini-batch, whose log-probabilities the
trainer's forward pass computes in both ways. Prints mean nats, draws the ratios of the first setting.
"""

import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from actors.engine.run_player import RunPlayer
from benchmarks.gpu.small_engine import serving
from benchmarks.own_environment import ROOT
from benchmarks.peer.baton_side import trained
from benchmarks.real_model import MODEL, played_group
from service.config import load
from service.config.core_settings import batch_settings, message_limits
from service.handoff.steps.tables import step_group, step_objects
from service.handoff.steps.wire import encode
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.files import train_file
from service.types import Float32s, Int32s, MicroBatch, Sender, Step
from tests.recorded import replayed

SETTINGS = ("generator.top_p=0.9", "generator.top_k=20", "generator.min_p=0.05")
WAYS = ("over the support", "over the whole vocabulary")
QUICK_START = ("--config", "configs/quickstart.yaml", "run.max_steps=1", "buffer.lookahead=0", "metrics.port=0")
ON_CPU = DeviceSettings(torch.device("cpu"), torch.float32)
GSM8K, GROUPS = ROOT / "configs" / "smollm2_gsm8k.yaml", 16
LENGTHS = ("generator.temperature=1", "generator.max_generate_length=129")
SAMPLERS = (["generator.top_k=20", "generator.top_p=0.95"], ["generator.top_k=20"])


def ratios(setting: str, model: Path, folder: Path) -> list[Float32s]:
    """The importance ratio of each token of a run's first mini-batch, in both ways."""
    trained([*QUICK_START, f"model.path={model}", "model.make=null", "model.warm_start=null", setting], folder)
    config = load([folder / "run" / "config.yaml"]).config
    batch = replayed(message_limits(config), batch_settings(config), folder / "run" / "journal", step=1)
    micros = [micro for rank in batch.ranks for micro in rank]
    policy = Learner(LearnSettings.of(config), model, ON_CPU.device, 0, 1).policy.model

    @torch.inference_mode()
    def computed(micro: MicroBatch) -> Float32s:
        tokens = DeviceBatch.of(micro, ON_CPU)
        return np.exp(policy(tokens)[0].numpy() - micro.logprobs_N[tokens.loss_token_M.numpy()])

    whole = [replace(micro, support_size_N=None, support_U=None) for micro in micros]
    return [np.concatenate(list(map(computed, of))) for of in (micros, whole)]


async def journal() -> None:
    """Print the bytes of messages with supports as multiples of those without, by the tokens of a prompt."""
    config = load([GSM8K], LENGTHS).config
    with tempfile.TemporaryDirectory() as folder:
        tasks = load_tasks(train_file(config.data, config.env, Path(folder), 0))[:GROUPS]
    async with serving(config, MODEL) as engine:
        for sampler in SAMPLERS:
            player = RunPlayer(load([GSM8K], [*LENGTHS, *sampler]).config, MODEL, engine)
            played = await asyncio.gather(*(played_group(player, n, task, config) for n, task in enumerate(tasks)))
            groups = [step_objects(group.steps) for group in played]
            sizes = np.concatenate([step.support_size for group in groups for step in group])  # type: ignore[misc]
            print(*sampler, f"{len(sizes)} tokens, mean size {sizes.mean():.1f}", flush=True)
            own = [group[0].prompt_ids for group in groups]
            others = [np.concatenate(own[n + 1 :] + own[:n])[:1000] for n in range(GROUPS)]
            for prompts in ([ids[:1] for ids in own], own, others):
                found = (f"{multiple(groups, prompts, times):.2f} with ids times {times}" for times in (1, 3))
                print(f"  prompts of {np.mean([*map(len, prompts)]):.0f} tokens:", *found, flush=True)


def multiple(groups: list[list[Step]], prompts: list[Int32s], times: int) -> float:
    """The bytes with supports over those without, with other prompts and ids that are `times` as large."""
    found = np.zeros(2)
    for steps, prompt in zip(groups, prompts, strict=True):
        wide = [replace(each, prompt_ids=times * prompt, response_ids=times * each.response_ids) for each in steps]
        plain = [replace(step, support_size=None, support=None) for step in wide]
        kind = np.uint16 if times == 1 else np.int32
        supported = [replace(step, support=np.asarray(step.support, kind) * times) for step in wide]
        found += [len(encode(step_group(Sender("generator-0", 1, 1), made, ()))) for made in (supported, plain)]
    return float(found[0] / found[1])


if __name__ == "__main__":
    if "--journal" in sys.argv:
        sys.exit(asyncio.run(journal()))
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    with tempfile.TemporaryDirectory() as folder:
        trained(QUICK_START, Path(folder) / "model")
        for setting in SETTINGS:
            both = ratios(setting, Path(folder) / "model" / "run" / "final", Path(folder) / setting)
            nats = (f"{np.abs(np.log(ratio_M)).mean():.2g} {way}" for ratio_M, way in zip(both, WAYS, strict=True))
            print(f"{setting}, {len(both[0])} tokens, mean nats:", *nats, flush=True)
            if setting == SETTINGS[0]:
                axes.hist(both, bins=np.linspace(0.7, 1.1, 81).tolist(), label=WAYS, log=True, histtype="step")
    axes.set(xlabel=f"importance ratio with {SETTINGS[0]}", ylabel="tokens")
    axes.legend()
    figure.savefig(ROOT / "docs" / "importance_ratios.png", dpi=110)
