"""Packed rows give the log-probabilities that each row gives alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from service.errors import UserError
from service.learn import attention_layout
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.model.logprob import token_logprobs
from tests.pure.learn.builders import CPU, MadeRow, made_row, made_rows, micro_batch, row_by_row, settings


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


def test_weights_that_do_not_fit_the_configuration_are_named(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        (model_folder / "config.json").read_text().replace('"vocab_size": 37', '"vocab_size": 38')
    )
    (tmp_path / "model.safetensors").symlink_to(model_folder / "model.safetensors")
    with pytest.raises(UserError, match="embed_tokens"):
        Learner(settings(), tmp_path, CPU, 0, 1)
    with pytest.raises(UserError, match=r"no config\.json"):
        Learner(settings(), tmp_path / "absent", CPU, 0, 1)


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


def test_a_vocabulary_entry_that_cannot_occur_leaves_gradients_finite() -> None:
    hidden = torch.tensor([[1.0, 0.5]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1e38, -1e38]], requires_grad=True)
    logprob, entropy = token_logprobs(hidden * 10, head, torch.tensor([0]), torch.ones(1))
    (logprob + entropy).sum().backward()
    assert torch.isfinite(entropy).all()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
