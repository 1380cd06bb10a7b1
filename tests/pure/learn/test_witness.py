"""The numbers of training against an outside witness: a model of plain torch in float64, which uses neither modules of
transformers nor code of Baton, and formulas of its own for advantages and loss."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from service.handoff.batches.estimators import advantages
from service.handoff.batches.pack import prefix_order
from service.learn import device_batch
from service.learn.learner import Learner
from tests.families.prove import Exact, exactly
from tests.pure.learn.builders import CPU, VOCABULARY, MadeRow, made_row, mini_batch, settings
from tests.pure.learn.families import saved

END = 2
RETURNS = [1.0, 0.25, 0.0, -0.5, 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]
"""Of six trajectories, two for each prompt; those of the last prompt differ by rounding only."""
CLIP, ENTROPY = 0.3, 0.05


class Witness:
    """A decoder with RMS norms, rotary positions and a gated MLP: Llama, Qwen2 (biases) or Qwen3 (norms of heads)."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: weight.double().requires_grad_() for name, weight in stored.items()}
        self.head_dim: int = self.config.get("head_dim") or 32 // 4
        self.frequency_F = self.config["rope_parameters"]["rope_theta"] ** -(
            torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        return (
            x
            if weight is None
            else weight * x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        )

    def rotated(self, x_THF: Tensor) -> Tensor:
        angle_TF = torch.outer(torch.arange(len(x_THF), dtype=torch.float64), self.frequency_F)
        cos, sin = angle_TF.cos()[:, None], angle_TF.sin()[:, None]
        first, second = x_THF.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, name: str, x: Tensor) -> Tensor:
        query, key, value = (self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, self.head_dim)) for part in "qkv")
        query, key = self.rotated(self.norm(f"{name}.q_norm", query)), self.rotated(self.norm(f"{name}.k_norm", key))
        key, value = (heads.repeat_interleave(query.shape[1] // key.shape[1], 1) for heads in (key, value))
        scores_HTT = torch.einsum("thf,shf->hts", query, key) / self.head_dim**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights_HTT = scores_HTT.masked_fill(later, -torch.inf).softmax(-1)
        return self.linear(f"{name}.o_proj", torch.einsum("hts,shf->thf", weights_HTT, value).flatten(1))

    def table(self, ids: Tensor, temperature: float) -> Tensor:
        """[T, V] log-probabilities of the tokens that follow."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for n in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{n}"
            x = x + self.attention(f"{layer}.self_attn", self.norm(f"{layer}.input_layernorm", x))
            y = self.norm(f"{layer}.post_attention_layernorm", x)
            gate = self.linear(f"{layer}.mlp.gate_proj", y)
            x = x + self.linear(
                f"{layer}.mlp.down_proj", gate * gate.sigmoid() * self.linear(f"{layer}.mlp.up_proj", y)
            )
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return (self.norm("model.norm", x) @ head.T / temperature).log_softmax(-1)

    def loss(self, rows: list[MadeRow], advantage_G: list[float]) -> tuple[Tensor, Tensor]:
        """PPO's clipped loss with an entropy bonus, a mean over trajectories; and [M] the log-probabilities."""
        total, logprobs = torch.zeros((), dtype=torch.float64), []
        n_tokens = np.bincount([row.trajectory for row in rows], [row.loss_mask.sum() for row in rows])
        for row in rows:
            ids = torch.from_numpy(row.token_ids).long()
            table = self.table(ids, float(np.float32(row.temperature)))
            for t in np.flatnonzero(row.loss_mask).tolist():
                logprob, advantage = table[t - 1, ids[t]], advantage_G[row.trajectory]
                ratio = (logprob - float(row.logprobs[t])).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                entropy = -(table[t - 1].exp() * table[t - 1]).sum()
                total = total - (surrogate + ENTROPY * entropy) / (len(advantage_G) * int(n_tokens[row.trajectory]))
                logprobs.append(logprob.detach())
        return total, torch.stack(logprobs)


def grpo(return_G: list[float]) -> list[float]:
    """Of pairs: the distance from the mean in sample deviations."""
    found = []
    for first, second in zip(return_G[::2], return_G[1::2], strict=True):
        half = (first - second) / 2 if abs(first - second) > 1e-12 else 0.0
        found += [half / (abs(half) * 2**0.5 + 1e-6), -half / (abs(half) * 2**0.5 + 1e-6)]
    return found


def rows_with_ends() -> list[MadeRow]:
    """Six rows, the first two with a common prefix; the end token is an input of each, and the last sampled one."""
    rng = np.random.default_rng(5)
    rows = [made_row(trajectory, length, rng) for trajectory, length in enumerate((24, 24, 13, 30, 6, 9))]
    rows[1].token_ids[:18], rows[1].loss_mask[:18], rows[0].loss_mask[:18] = rows[0].token_ids[:18], False, False
    for row in rows:
        row.token_ids[len(row.token_ids) // 2] = row.token_ids[-1] = END
        row.logprobs[~row.loss_mask], row.staleness[~row.loss_mask] = 0, -1
    return rows


def folder_of(family: str, pad: int | None, parent: Path) -> Path:
    folder = saved(family, parent)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"pad_token_id": pad}))
    return folder


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-10)])
@pytest.mark.parametrize(("family", "pad"), [("llama", END), ("qwen2", VOCABULARY + 5), ("qwen3", -1)])
def test_loss_gradients_log_probabilities_and_advantages_are_those_of_the_witness(
    family: str, pad: int, dtype: str, tolerance: float, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pad token is: the end, as in SmolLM2; one outside of the vocabulary; the last one."""
    monkeypatch.setattr(device_batch, "prefix_order", partial(prefix_order, least=1, fraction=0))
    folder, rows, expected_G = folder_of(family, pad, tmp_path), rows_with_ends(), grpo(RETURNS)
    advantage_G = advantages("grpo", RETURNS, [0, 0, 1, 1, 2, 2])
    assert advantage_G.tolist() == pytest.approx(expected_G, rel=1e-12, abs=1e-12)
    algorithm = {"reduction": "trajectory_mean", "clip_low": CLIP, "clip_high": CLIP, "entropy_coef": ENTROPY}
    learner = Learner(settings(algorithm, {"layout": layout}, dtype=dtype), folder, CPU, 0, 1)
    model = learner.policy.model
    witness = Witness(folder)
    if dtype == "float64":  # the library's rotary table and norms are of float32
        model.model.rotary_emb.inv_freq = witness.frequency_F
        for layer in model.layers:
            layer.forward = exactly(layer.forward)
    rounded_G = np.array(advantage_G, np.float32)
    batch = replace(mini_batch([[rows[:3], rows[3:]]], len(RETURNS), prompts=3), advantage_G=rounded_G)
    micros = [learner.policy.to_device(micro) for micro in batch.ranks[0]]
    assert (micros[0].input_ids.numel() < sum(len(row.token_ids) for row in rows[:3])) == (layout == "shared_prefix")
    with Exact() if dtype == "float64" else nullcontext():
        logprob_M = torch.cat(learner.policy.logprobs(micros))
        total = learner.accumulate(batch).totals()["loss"]
    loss, expected_M = witness.loss(rows, rounded_G.tolist())
    loss.backward()
    assert total == pytest.approx(float(loss.detach()), abs=tolerance)
    torch.testing.assert_close(logprob_M.double(), expected_M, atol=10 * tolerance, rtol=0)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert gradients.keys() == witness.weights.keys()
    for name, gradient in gradients.items():
        for row, (ours, own) in enumerate(zip(gradient.double(), witness.weights[name].grad, strict=True)):
            assert float((ours - own).abs().max()) <= tolerance, f"{name}, row {row}"
