"""Checks in float64 that training computes a small random model of a family as the family's own code does.

The family's code in transformers computes every row by itself, with its plain ("eager") attention. Every way in which
training may compute has to give the same loss, and the same gradient of every weight.
"""

import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from service.config.learn import LINEAR, LoraConfig, TrainerConfig
from service.learn.device_batch import DeviceBatch, DeviceSettings, unsampled_micro_batch
from service.learn.model.hf_checkpoint import load_weights, stored_names, write_folder
from service.learn.model.hf_config import read_config, unread_weights
from service.learn.model.lora import LoraLinear, add_adapter
from service.learn.model.policy_model import PolicyModel, allocate, empty_model, stored_buffers
from service.learn.sequence_parallel import WHOLE, Slice
from service.model_folder import experts_of
from service.types import MicroBatch, SupervisedRow

TOLERANCE = 1e-9
CPU = torch.device("cpu")
RANKS = 2
SEED = 35
PATIENCE = timedelta(seconds=120)
"""Time after which a rank stops waiting for another rank."""
SMALL_GRADIENT = 1e-3
"""The difference of a weight's gradient is taken relative to the gradient's norm, or to this fraction of the norm of
all gradients if that is larger."""

Outcome = tuple[float, dict[str, Tensor]]
"""A loss and the gradient of each weight."""


@dataclass(frozen=True)
class Finding:
    """The result of comparing one way of training with the family's own code."""

    name: str
    difference: float
    """Largest relative difference of the loss or of any weight's gradient; infinite if nothing could be computed."""
    reason: str = ""
    """What failed; empty if nothing did."""

    @property
    def told(self) -> str:
        """The result of the comparison as text."""
        return self.reason or f"{'equal' if self.holds else 'apart'} ({self.difference:.0e})"

    @property
    def holds(self) -> bool:
        """True if both results are equal up to rounding."""
        return self.difference <= TOLERANCE


def prove(config: PretrainedConfig) -> list[Finding]:
    """Compare every way in which training can compute a small model of this configuration with the code of the model's
    family in transformers. Returns one finding for each way."""
    with tempfile.TemporaryDirectory(prefix="baton-proof-") as parent, torch.random.fork_rng(devices=[]), Exact():
        folder = Path(parent) / "model"
        torch.manual_seed(0)
        try:
            _write(config, folder)
            proof = _Proof(folder)
        except Exception as error:  # noqa: BLE001 - a family may break anything; what it breaks is the finding
            return [Finding("loads", float("inf"), _told(error, folder))]
        return [Finding("loads", 0.0), *(proof.finding(name, way) for name, way in proof.ways().items())]


def _rows(vocab_size: int) -> MicroBatch:
    """Six rows of 1 to 106 tokens, with shared prefixes, a fork inside a row, a row of one token, and rows longer than
    a chunk. All tokens but the first of each row carry loss."""
    rng = np.random.default_rng(SEED)
    prompt, begun, *own = (rng.integers(0, vocab_size, n_tokens, np.int32) for n_tokens in (70, 20, 9, 37, 16, 5, 1, 2))
    parts = ([prompt, own[0]], [own[1]], [prompt, begun, own[2]], [prompt, begun, own[3]], [own[4]], [prompt, own[5]])
    rows = [np.concatenate(of_row) for of_row in parts]
    micro = unsampled_micro_batch([SupervisedRow(row, np.arange(len(row)) > 0) for row in rows])
    return replace(micro, temperature_R=np.array([1.0, 0.7, 1.0, 0.7, 1.0, 1.3], np.float32))


def _write(config: PretrainedConfig, folder: Path) -> None:
    """Write a model in which every weight has an effect: biases, norms and corrections are random, too."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for weight in [*model.parameters(), *stored_buffers(model).values()]:
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)


class _Proof:
    """The comparisons for one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_config(folder, proven=False)
        self._micro = _rows(self._config.vocab_size)
        self._factor_N = torch.from_numpy(np.random.default_rng(SEED).normal(size=len(self._micro.token_ids_N)))
        """Factor of each token's log-probability in the loss."""
        self._own = self._by_row(folder)

    def ways(self) -> dict[str, Callable[[], float]]:
        """The comparisons by name; each returns the largest relative difference."""
        ways: dict[str, Callable[[], float]] = {
            "packed": partial(self._compared, "packed"),
            "padded": partial(self._compared, "padded"),
            "shared prefixes": partial(self._compared, "shared_prefix"),
            "sequence parallel": self._split,
            "split and shared": partial(self._split, "shared_prefix"),
            "checkpointing": partial(self._compared, "shared_prefix", gradient_checkpointing=True),
            "adapter": self._merged,
            "saved": self._saved,
        }
        if experts_of(self._config):
            ways["replay"] = self._replayed
        return ways

    def finding(self, name: str, way: Callable[[], float]) -> Finding:
        """The result of a comparison; an error is a result, too."""
        try:
            difference = way()
        except Exception as error:  # noqa: BLE001 - see `prove`
            return Finding(name, float("inf"), _told(error, self._folder))
        return Finding(name, difference, "" if difference <= TOLERANCE else f"differs by {difference:.1e}")

    def _by_row(self, folder: Path) -> Outcome:
        """Loss and gradients by the family's own code, one row at a time."""
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        model.eval()
        total = torch.zeros((), dtype=torch.float64)
        lengths = np.diff(self._micro.offsets_R).tolist()
        ids_R = torch.split(torch.from_numpy(self._micro.token_ids_N).long(), lengths)
        factors_R = torch.split(self._factor_N, lengths)
        rows = zip(ids_R, self._micro.temperature_R.tolist(), factors_R, strict=True)
        for ids, temperature, factors in rows:
            table = (model(ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
            total = total + (table.gather(1, ids[1:, None])[:, 0] * factors[1:]).sum()
        return _outcome(total, dict(model.named_parameters()))

    def _model(self, **trainer: Any) -> PolicyModel:
        model = empty_model(self._config, torch.float64, TrainerConfig(**trainer))
        allocate(model, self._config, CPU)
        for layer in model.layers:
            layer.forward = exactly(layer.forward)  # also for recomputation: modes end before the backward pass
        weights = dict(model.named_parameters()) | stored_buffers(model)
        load_weights(self._folder, {n: w.detach() for n, w in weights.items()}, weights, unread_weights(self._config))
        return model

    def _total(self, model: PolicyModel, layout: str, part: Slice = WHOLE, micro: MicroBatch | None = None) -> Tensor:
        """The loss of a rank's part of the rows."""
        settings = DeviceSettings(CPU, torch.float64, layout, part=part)
        batch = DeviceBatch.of(micro or self._micro, settings)
        if layout == "shared_prefix" and batch.input_ids.numel() * part.of >= len(self._micro.token_ids_N):
            raise RuntimeError("no prefix is shared")
        logprob_M: Tensor = model(batch).logprob_M
        return (logprob_M * self._factor_N[batch.loss_token_M]).sum()

    def _compared(self, layout: str, **trainer: Any) -> float:
        model = self._model(layout=layout, **trainer)
        return _difference(_outcome(self._total(model, layout), dict(model.named_parameters())), self._own)

    def _split(self, layout: str = "packed") -> float:
        """Compute with two ranks (threads of this process), each with half of the tokens."""
        model = self._model(layout=layout)
        weights = dict(model.named_parameters())
        store = dist.HashStore()  # type: ignore[attr-defined]
        gloo = dist.ProcessGroup.BackendType.GLOO

        def outcome(rank: int) -> Outcome:
            group = dist.ProcessGroup(store, rank, RANKS)
            group._register_backend(CPU, gloo, dist.ProcessGroupGloo(store, rank, RANKS, PATIENCE))
            with Exact():
                return _outcome(self._total(model, layout, Slice(rank, RANKS, group)), weights)

        with ThreadPoolExecutor(RANKS) as pool:
            outcomes = list(pool.map(outcome, range(RANKS)))
        gradients = {name: sum((of_rank[1][name] for of_rank in outcomes), torch.zeros(())) for name in weights}
        return _difference((sum(of_rank[0] for of_rank in outcomes), gradients), self._own)

    @torch.no_grad()
    def _merged(self) -> float:
        """Check that an adapter gives the same log-probabilities as weights that it was merged into."""
        model = self._model()
        linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
        present = {name.rpartition(".")[2] for name in linear}
        experts = any(hasattr(layer.mlp, "experts") for layer in model.layers)
        targets = tuple(name for name in (LINEAR[:4] if experts else LINEAR) if name in present)
        add_adapter(model, model.layers, LoraConfig(rank=4, targets=targets), torch.float64)
        adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
        for module in adapted:
            for part in (module.lora_A, module.lora_B):
                part.weight.normal_(std=0.1)
        with_adapter = self._total(model, "packed")
        for module in adapted:
            module.is_on = False
        without = self._total(model, "packed")
        for module in adapted:
            module.weight.add_(module.lora_B.weight @ module.lora_A.weight, alpha=module.scale)
        merged = self._total(model, "packed")
        if abs(float(with_adapter - without)) <= TOLERANCE * abs(float(without)):
            raise RuntimeError("the adapter changes nothing")
        return abs(float(with_adapter - merged)) / abs(float(merged))

    def _saved(self) -> float:
        """Check that transformers loads the written folder, and that no weight is missing or left over."""
        out = self._folder.parent / "saved"
        weights = {name: weight.detach().clone() for name, weight in self._model().named_parameters()}
        write_folder(out, self._folder, stored_names(self._folder).split(weights))
        _, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64, output_loading_info=True)
        if rest := sorted(str(name) for kind in info.values() for name in kind):
            raise RuntimeError(f"transformers does not find or does not know {rest[0]} in what is written")
        return _difference(self._by_row(out), self._own)

    def _replayed(self) -> float:
        """Check that replaying the router's own choice for most tokens changes nothing."""
        model, chosen = self._model(), list[Tensor]()
        blocks: list[Any] = [layer.mlp for layer in model.layers if hasattr(layer.mlp, "experts")]
        hooks = [
            block.experts.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
            for block in blocks
        ]
        with torch.no_grad():
            self._total(model, "packed")
        for hook in hooks:
            hook.remove()
        experts_NLK = torch.stack(chosen, 1).sort(-1).values
        experts_NLK[::3] = -1
        micro = replace(self._micro, routed_experts_N=experts_NLK.numpy().astype("int16"))
        total = self._total(model, "packed", micro=micro)
        return _difference(_outcome(total, dict(model.named_parameters())), self._own)


def _outcome(total: Tensor, weights: Mapping[str, Tensor]) -> Outcome:
    found = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    zeros = (torch.zeros_like(weight) if of is None else of for of, weight in zip(found, weights.values(), strict=True))
    return float(total.detach()), dict(zip(weights, zeros, strict=True))


def _difference(ours: Outcome, own: Outcome) -> float:
    """The largest relative difference of loss and gradients.

    Raises:
        RuntimeError: the two models do not have the same weights.
    """
    if unknown := ours[1].keys() ^ own[1].keys():
        raise RuntimeError(f"the weight {min(unknown)} is not in both models")
    least = SMALL_GRADIENT * float(torch.stack([g.norm() for g in own[1].values()]).norm())
    differences = [
        float((gradient - own[1][name]).norm()) / max(float(own[1][name].norm()), least)
        for name, gradient in ours[1].items()
    ]
    return max(abs(ours[0] - own[0]) / abs(own[0]), *differences)


def _told(error: Exception, folder: Path) -> str:
    """The first line of the error's message, without the path of the small model."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("model.path: ")
    return line.replace(str(folder), "the small model").replace(f"{folder.parent}/", "")[:200]


class Exact(TorchFunctionMode):
    """Within the block, conversions of float64 tensors to float32 are skipped: the norms and routers of families would
    otherwise round."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(named or {})
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in arguments):
            if function is Tensor.float:
                return arguments[0]
            if function in (Tensor.to, Tensor.type):
                arguments = tuple(_wide(x) for x in arguments)
            options = {name: _wide(x) for name, x in options.items()}
        return function(*arguments, **options)


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it computes in float64 throughout."""

    @wraps(function)
    def exact(*arguments: Any, **named: Any) -> Any:
        with Exact():
            return function(*arguments, **named)

    return exact


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
