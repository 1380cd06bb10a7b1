"""Packed rows give the log-probabilities that each row gives alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from service.learn import attention_layout
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.model import logprob
from service.learn.model.logprob import token_logprobs
from tests.pure.learn.builders import (
    CPU,
    VOCABULARY,
    MadeRow,
    made_row,
    made_rows,
    micro_batch,
    row_by_row,
    settings,
    with_supports,
)
from tests.pure.learn.outcomes import PACKED, SHARED, exact
from tests.pure.learn.trees import tree_rows


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_of_very_different_length_and_empty_ones_are_computed_as_alone_and_come_back_in_order(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(attention_layout, "CALL_COST", 100)
    rows = made_rows(9, seed=2, lengths=(5, 60))
    assert len(attention_layout.Packing.of(micro_batch(rows).offsets_R, CPU).buckets) > 2
    nothing = MadeRow(1, *(np.zeros(0, dtype) for dtype in (np.int32, bool, np.float32, np.int32)))
    rows = [nothing, rows[0], nothing, *rows[1:], nothing]
    batch = DeviceBatch.of(micro_batch(rows), DeviceSettings(CPU, torch.float32, layout=layout))
    found = Learner(settings(trainer={"layout": layout}), model_folder, CPU, 0, 1).policy.model(batch)
    for ours, alone in zip(found, row_by_row(model_folder, rows), strict=True):
        torch.testing.assert_close(ours, alone, atol=2e-5, rtol=1e-5)


def test_a_row_whose_first_token_carries_loss_is_refused() -> None:
    row = made_row(0, 8, np.random.default_rng(0))
    row.loss_mask[0] = True
    with pytest.raises(ValueError, match="first token carries loss"):
        DeviceBatch.of(micro_batch([row]), DeviceSettings(CPU, torch.float32))


@pytest.mark.parametrize("chunk", [1, 3 * 11, 1 << 20])
def test_log_probabilities_in_chunks_have_the_gradient_of_the_whole_table(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 11, (7,), generator=generator)
    temperature = torch.linspace(0.5, 1.5, 7, dtype=torch.float64)
    of_logprob, of_entropy = torch.randn(2, 7, generator=generator, dtype=torch.float64)

    logprob, entropy = token_logprobs(hidden, head, tokens, temperature, chunk)
    ours = torch.autograd.grad((of_logprob * logprob + of_entropy * entropy).sum(), (hidden, head))

    table = (hidden @ head.t() / temperature[:, None]).log_softmax(-1)
    expected_logprob, expected_entropy = table.gather(1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)
    torch.testing.assert_close(logprob, expected_logprob)
    torch.testing.assert_close(entropy, expected_entropy)
    whole = (of_logprob * expected_logprob + of_entropy * expected_entropy).sum()
    for gradient, expected in zip(ours, torch.autograd.grad(whole, (hidden, head)), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("layout", [PACKED, "padded", SHARED])
def test_supports_give_the_loss_and_gradient_of_a_whole_table_that_is_masked(
    model_folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact(monkeypatch)
    monkeypatch.setitem(logprob.CHUNK_ENTRIES, "cpu", 7 * VOCABULARY)
    rows = [row for row in tree_rows(3, trajectories=16, most=24) if len(row.token_ids) > 1]
    micro = with_supports(micro_batch(rows))
    batch = DeviceBatch.of(micro, DeviceSettings(CPU, torch.float64, layout=layout))
    assert batch.support is not None and len(batch.token_ids_M) > 100
    model = Learner(settings(trainer={"layout": layout}, dtype="float64"), model_folder, CPU, 0, 1).policy.model
    weight_XM = torch.randn(2, len(batch.token_ids_M), dtype=torch.float64)
    loss = (weight_XM * torch.stack(model(batch))).sum()
    loss.backward()

    whole = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa", dtype=torch.float64)
    whole.model.embed_tokens.padding_idx = None  # with one, that token would have no gradient
    tables = [whole(torch.from_numpy(row.token_ids).long()[None]).logits[0] for row in rows]
    table_MV = torch.cat(tables)[batch.loss_token_M - 1] / batch.row_to_tokens(batch.temperature_R)[:, None]
    for m, (n, at) in enumerate(zip(batch.loss_token_M.tolist(), batch.support.offsets_M.tolist(), strict=False)):
        if size := int(micro.support_size_N[n]):  # type: ignore[index]
            allowed = [*micro.support_U[at : at + size - 1].tolist(), int(micro.token_ids_N[n])]  # type: ignore[index]
            table_MV[m, np.delete(np.arange(VOCABULARY), allowed)] = -1e300
    table_MV = table_MV.log_softmax(-1)
    expected_M = table_MV.gather(1, batch.token_ids_M[:, None])[:, 0]
    entropy_M = -(table_MV.exp() * table_MV).sum(-1)
    expected = (weight_XM * torch.stack((expected_M, entropy_M))).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad, rtol=1e-9, atol=1e-9)


def test_a_vocabulary_entry_that_cannot_occur_leaves_gradients_finite() -> None:
    hidden = torch.tensor([[1.0, 0.5]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1e38, -1e38]], requires_grad=True)
    logprob, entropy = token_logprobs(hidden * 10, head, torch.tensor([0]), torch.ones(1))
    (logprob + entropy).sum().backward()
    assert torch.isfinite(entropy).all()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
