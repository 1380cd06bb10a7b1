"""Importance ratios on the weights that sampled: over each token's support, and over the whole vocabulary.

    python -m benchmarks.supports

The quick start makes a model; with it every setting of a sampler plays one mini-batch, whose log-probabilities the
trainer's forward pass computes in both ways. Prints mean nats, draws the ratios of the first setting.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.own_environment import ROOT
from benchmarks.peer.baton_side import trained
from service.config import load
from service.config.core_settings import batch_settings, message_limits
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.types import Float32s, MicroBatch
from tests.recorded import replayed

SETTINGS = ("generator.top_p=0.9", "generator.top_k=20", "generator.min_p=0.05")
WAYS = ("over the support", "over the whole vocabulary")
QUICK_START = ("--config", "configs/quickstart.yaml", "run.max_steps=1", "buffer.lookahead=0", "metrics.port=0")
ON_CPU = DeviceSettings(torch.device("cpu"), torch.float32)


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


if __name__ == "__main__":
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
