"""The learner on a CUDA GPU: the same numbers as on CPU, and no hidden waits for the device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from service.learn.attention_layout import Packing
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.model import flash, logprob
from service.learn.model.attention import packed_attention
from service.learn.model.tiny_model import make_model
from tests.pure.learn.builders import CPU, VOCABULARY, made_row, made_rows, mini_batch, settings, split_row
from tests.pure.learn.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "policy"
    make_model(folder, SHAPE, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
    return folder


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16, generator=torch.Generator(CUDA).manual_seed(0))


def in_full(inputs: list[torch.Tensor], window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of one row [1, heads, T, head_dim] with all its logits, in float32."""
    query, key, value = (x.repeat_interleave(inputs[0].shape[1] // x.shape[1], 1) for x in inputs)
    n_tokens = query.shape[2]
    hidden = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=CUDA).triu(1)
    hidden |= torch.ones_like(hidden).tril(-(window or n_tokens))
    logits = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, n_tokens, 1)[None]], -1)
    return logits.softmax(-1)[..., :n_tokens] @ value


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (40, False), (None, True), (40, True)])
@pytest.mark.parametrize("kernel", ["of torch", "FlashAttention 4"])
def test_the_variable_length_kernels_are_causal_attention_in_each_row(
    monkeypatch: pytest.MonkeyPatch, kernel: str, window: int | None, sinks: bool
) -> None:
    monkeypatch.setattr(flash, "_kernels", None)
    if kernel == "FlashAttention 4" and not flash.begin(CUDA):
        pytest.skip(f"needs flash-attn-4 {flash.VERSION}, and a GPU that it is for")
    lengths = [5, 130, 1, 64, 0, 33]
    packing = Packing.of(np.cumsum([0, *lengths], dtype=np.int64), CUDA, variable_length=True)
    inputs = [drawn(1, heads, sum(lengths), 64).requires_grad_() for heads in (8, 2, 2)]
    inputs += [torch.linspace(-1, 1, 8, device=CUDA, dtype=torch.bfloat16).requires_grad_()] if sinks else []
    named: dict[str, Any] = {"sliding_window": window, "scaling": 64**-0.5, "s_aux": inputs[3] if sinks else None}
    out, _ = packed_attention(torch.nn.Identity(), *inputs[:3], None, packing, **named)

    exact = [x.detach().float().requires_grad_() for x in inputs]
    rows = zip(*(x.split(lengths, 2) for x in exact[:3]), strict=True)
    parts = [in_full(list(row), window, exact[3] if sinks else None) for row in rows]
    expected = torch.cat(parts, 2).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    weight = drawn(*out.shape).float()
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, reference in zip(inputs, exact, strict=True):
        assert ours.grad is not None and reference.grad is not None
        assert (ours.grad.float() - reference.grad).norm() <= 2e-2 * reference.grad.norm()


@pytest.mark.parametrize("function", [logprob.statistics, logprob.logit_gradient])
def test_a_fused_function_is_the_plain_one(function: Any) -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    logits = torch.randn(33, 5003, device=CUDA, generator=generator) * 4
    tokens = torch.randint(0, 5003, (33,), device=CUDA, generator=generator)
    inverse = torch.linspace(0.5, 2.0, 33, device=CUDA)
    plain = logprob.statistics.__wrapped__(logits, tokens, inverse)
    arguments: tuple[Any, ...] = (logits, tokens, inverse)
    if function is logprob.logit_gradient:
        of_tokens = torch.randn(2, 33, device=CUDA, generator=generator)
        arguments = (logits, torch.float32, tokens, inverse, plain[2], plain[1], *of_tokens)
    # An entropy is the difference of two numbers near 10, and a fused exponential is another one in its last digits.
    torch.testing.assert_close(function(*arguments), function.__wrapped__(*arguments), atol=1e-4, rtol=1e-5)


def test_the_gradient_of_the_head_is_added_up_over_chunks_as_on_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (40, 300))
    tokens = torch.randint(0, 300, (40,), generator=generator)
    gradients = []
    for device in (CPU, CUDA):
        inputs = [x.to(device, copy=True).requires_grad_() for x in (hidden, head)]
        temperature = torch.ones(40, device=device)
        found = logprob.token_logprobs(*inputs, tokens.to(device), temperature, chunk_entries=7 * 300)
        (found.logprob_M.sum() + found.entropy_M.sum()).backward()
        gradients.append([x.grad.float().cpu() for x in inputs])
    for expected, ours in zip(*gradients, strict=True):
        assert (ours - expected).norm() <= 2e-2 * expected.norm()


def outcome(folder: Path, device: torch.device, dtype: str, **trainer: Any) -> tuple[float, torch.Tensor]:
    learner = Learner(settings(trainer=trainer, dtype=dtype), folder, device, 0, 1)
    forked = split_row(made_row(5, 40, np.random.default_rng(1)), [20, 30])  # rows that begin alike
    totals = learner.accumulate(mini_batch([[[*made_rows(5, seed=1), *forked]]], trajectories=6)).totals()
    gradients = learner.policy.master_weights.gradients()
    return totals["loss"], torch.cat([gradient.flatten().float().cpu() for gradient in gradients])


@pytest.mark.parametrize(
    ("dtype", "trainer", "tolerance"),
    [
        ("float32", {}, 1e-4),
        ("float32", {"layout": "padded"}, 1e-4),
        ("float32", {"cpu_offload": True}, 1e-4),
        ("bfloat16", {}, 5e-2),
        ("bfloat16", {"gradient_checkpointing": True}, 5e-2),
        ("bfloat16", {"compile": True}, 5e-2),
        ("float32", {"layout": "shared_prefix"}, 1e-4),
        ("bfloat16", {"layout": "shared_prefix"}, 5e-2),
    ],
)
def test_loss_and_gradient_are_those_on_cpu(
    folder: Path, dtype: str, trainer: dict[str, Any], tolerance: float
) -> None:
    loss, gradient = outcome(folder, CUDA, dtype, **trainer)
    expected_loss, expected = outcome(folder, CPU, "float32")
    assert loss == pytest.approx(expected_loss, abs=tolerance)
    assert (gradient - expected).norm() <= tolerance * expected.norm()


def outcome_of_rank(rank: int, world_size: int, folder: Path, layout: str) -> tuple[float, np.ndarray]:
    """Loss and gradient of the rows of `outcome`, of which each rank has a part of the tokens."""
    torch.cuda.set_device(rank)
    config = settings(
        trainer={"ranks": world_size, "sequence_parallel": world_size, "layout": layout}, dtype="bfloat16"
    )
    learner = Learner(config, folder, torch.device("cuda", rank), rank, world_size)
    forked = split_row(made_row(5, 40, np.random.default_rng(1)), [20, 30])
    totals = learner.accumulate(mini_batch([[[*made_rows(5, seed=1), *forked]]], trajectories=6)).totals()
    gradients = [parameter.grad for parameter in learner.policy.model.parameters()]
    whole = [each.full_tensor().flatten().float().cpu() for each in gradients if isinstance(each, DTensor)]
    return totals["loss"], torch.cat(whole).numpy()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_gpus_that_share_tokens_have_the_loss_and_gradient_of_a_cpu(folder: Path, layout: str) -> None:
    expected_loss, expected = outcome(folder, CPU, "float32")
    ranks = Ranks(backend="cuda:nccl")
    try:
        results = ranks(2, outcome_of_rank, folder, layout)
    finally:
        ranks.close()
    for loss, gradient in results:
        assert loss == pytest.approx(expected_loss, abs=5e-2)
        assert np.linalg.norm(gradient - expected.numpy()) <= 5e-2 * float(expected.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_waits_for_the_device_before_the_sums_are_read(folder: Path, dtype: str) -> None:
    learner = Learner(settings(dtype=dtype), folder, CUDA, 0, 1)
    rows = made_rows(6, seed=2)
    batch = mini_batch([[rows[:3], rows[3:]]], trajectories=6)
    learner.step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = learner.accumulate(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(sums.totals()["loss"])


def test_steps_on_the_gpu_lower_the_loss(folder: Path) -> None:
    learner = Learner(settings(dtype="bfloat16"), folder, CUDA, 0, 1)
    batch = mini_batch([[made_rows(6, seed=3)]], trajectories=6)
    losses = [learner.step(batch).metrics["policy/policy_loss"] for _ in range(10)]
    assert losses[-1] < losses[0]


def test_the_variable_length_kernel_gets_no_padding() -> None:
    micro = mini_batch([[made_rows(4, seed=4)]], trajectories=4).ranks[0][0]
    micro_on_gpu = DeviceBatch.of(micro, DeviceSettings(CUDA, torch.float32, variable_length=True))
    assert not micro_on_gpu.attention["packing"].buckets
    assert micro_on_gpu.input_ids.device.type == "cuda"
