"""A learner goes on from a checkpoint as if it had never stopped, on any number of ranks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from service.config.learn import LoraConfig
from service.errors import UserError
from service.learn import checkpoint
from service.learn.learner import Learner
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, SHAPE, VOCABULARY, made_rows, settings, small_model
from tests.pure.learn.outcomes import batch_in
from tests.pure.learn.ranks import Ranks

PART = "rank_0_of_1.safetensors"


LORA = LoraConfig(rank=4)


def configured(dtype: str = "float32", lora: LoraConfig | None = None) -> LearnSettings:
    algorithm: dict[str, Any] = {"anchor": "proximal", "anchor_every": 3, "kl_coef": 0.1}
    return settings(algorithm, {"schedule": "linear", "warmup_steps": 2}, dtype=dtype, lora=lora)


def batches(world_size: int) -> list[MiniBatch]:
    return [batch_in(world_size, made_rows(6, seed=50 + number)) for number in range(4)]


def steps(learner: Learner, these: list[MiniBatch]) -> list[float]:
    return [learner.step(batch).metrics["policy/policy_loss"] for batch in these]


def save_after_two(rank: int, world_size: int, model: Path, folder: Path, *how: Any) -> list[float]:
    learner = Learner(configured(*how), model, CPU, rank, world_size)
    steps(learner, batches(world_size)[:2])
    learner.save(folder)
    return steps(learner, batches(world_size)[2:])


def resume(rank: int, world_size: int, model: Path, folder: Path, *how: Any) -> list[float]:
    learner = Learner(configured(*how), model, CPU, rank, world_size)
    learner.load(folder)
    return steps(learner, batches(world_size)[2:])


@pytest.mark.parametrize(("dtype", "lora"), [("float32", None), ("bfloat16", None), ("bfloat16", LORA)])
def test_a_resumed_learner_takes_the_same_steps(
    model_folder: Path, tmp_path: Path, dtype: str, lora: LoraConfig | None
) -> None:
    expected = save_after_two(0, 1, model_folder, tmp_path, dtype, lora)
    assert resume(0, 1, model_folder, tmp_path, dtype, lora) == expected
    with safe_open(tmp_path / PART, "pt") as opened:
        trained = [name for name in opened.keys() if "lora_" in name]  # noqa: SIM118
        assert len(trained) == (0 if lora is None else len(opened.keys())), "a checkpoint of an adapter is small"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2)])
def test_a_learner_resumes_on_another_number_of_ranks(
    model_folder: Path, tmp_path: Path, ranks: Ranks, before: int, after: int
) -> None:
    folder = tmp_path / "step_2"
    expected = ranks(before, save_after_two, model_folder, folder)[0]
    for losses in ranks(after, resume, model_folder, folder):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_steps_taken_while_a_checkpoint_is_written_are_not_in_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(configured(), model_folder, CPU, 0, 1)
    steps(learner, batches(1)[:2])
    stepped = Event()

    def slow_sync(file: int) -> None:
        assert stepped.wait(timeout=240)

    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(os, "fsync", slow_sync)
    learner.save(tmp_path, background=True)
    expected = steps(learner, batches(1)[2:])
    assert learner.writer.progress() == 0, "as long as the disk takes no byte"
    stepped.set()
    while (progress := learner.writer.progress()) is not None:
        assert progress <= (tmp_path / PART).stat().st_size if (tmp_path / PART).exists() else True
    assert resume(0, 1, model_folder, tmp_path) == expected
    assert sorted(file.name for file in tmp_path.iterdir()) == ["learner.json", "rank_0_of_1.safetensors"]


def kept(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.master_weights.tensors.items()}


def refused(learner: Learner, folder: Path, reason: str) -> None:
    """The checkpoint is refused in one line and the learner is as it was."""
    before = kept(learner)
    with pytest.raises(UserError, match=reason) as caught:
        learner.load(folder)
    assert "\n" not in str(caught.value)
    assert learner.steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept(learner).items())


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"vocab_size": 64}, r"model\.embed_tokens\.weight has shape \(64, 32\) there, \(37, 32\) here"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ has shape \(\S+\) there, none here"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ has shape none there"),
        ({"intermediate_size": 64}, r"down_proj\.weight has shape \(32, 64\) there, \(32, 48\) here"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused(
    model_folder: Path, tmp_path: Path, other: dict[str, int], reason: str
) -> None:
    vocab_size = other.pop("vocab_size", VOCABULARY)
    shape = SHAPE | other
    make_model(tmp_path / "other", shape, vocab_size, eos_token_id=2, pad_token_id=0, seed=0)
    Learner(configured(), tmp_path / "other", CPU, 0, 1).save(tmp_path / "step_0")
    refused(Learner(configured(), model_folder, CPU, 0, 1), tmp_path / "step_0", f"of another model: .*{reason}")


def test_a_checkpoint_of_all_weights_or_of_an_adapter_for_another_base_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    learners = [Learner(configured(lora=lora), model_folder, CPU, 0, 1) for lora in (None, LORA)]
    for number, learner in enumerate(learners):
        learner.save(tmp_path / str(number))
    refused(learners[1], tmp_path / "0", r"holds all weights, but the configuration trains an adapter \(model\.lora\)")
    refused(learners[0], tmp_path / "1", r"holds an adapter, but the configuration trains all weights \(model\.lora\)")
    other = small_model(tmp_path / "other", seed=1)
    refused(Learner(configured(lora=LORA), other, CPU, 0, 1), tmp_path / "1", rf"another model than {other}; use")
    moved = Path(shutil.copytree(model_folder, tmp_path / "moved"))
    Learner(configured(lora=LORA), moved, CPU, 0, 1).load(tmp_path / "1")


def cut_short(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def of_one_row(part: Path) -> None:
    with safe_open(part, "pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    save_file(tensors | {"weights/model.norm.weight": torch.zeros(1)}, part, metadata)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        *(
            ("learner.json", lambda file, text=text: file.write_text(text), r"is damaged: learner\.json")
            for text in ("", "[]", '{"steps": 7}', '{"world_size": 0, "steps": 7, "frozen": {}, "shapes": {}}')
        ),
        ("learner.json", Path.unlink, "holds no checkpoint"),
        (PART, Path.unlink, r"not whole: rank_0_of_1\.safetensors is missing"),
        (PART, cut_short, r"is damaged: rank_0_of_1\.safetensors cannot be read"),
        (PART, of_one_row, r"is damaged: rank_0_of_1\.safetensors has other tensors than learner\.json"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_not_whole_is_refused(
    model_folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    learner = Learner(configured(), model_folder, CPU, 0, 1)
    learner.save(tmp_path)
    damage(tmp_path / name)
    refused(learner, tmp_path, reason)


def test_a_save_over_another_that_was_cut_off_is_not_taken_for_a_whole_one(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, fresh = (Learner(configured(), model_folder, CPU, 0, 1) for _ in range(2))
    learner.save(tmp_path)
    steps(learner, batches(1)[:2])

    def replace_metadata_alone(source: Path, target: Path) -> None:
        if target.name != "learner.json":
            raise OSError("cut off")
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patched, pytest.raises(OSError, match="cut off"):
        patched.setattr("service.files.os.replace", replace_metadata_alone)
        learner.save(tmp_path)
    refused(fresh, tmp_path, r"is not whole: rank_0_of_1\.safetensors is of another save than learner\.json")
    learner.save(tmp_path)
    fresh.load(tmp_path)
    assert fresh.steps == 2


def test_what_went_wrong_in_the_background_is_raised(model_folder: Path, tmp_path: Path) -> None:
    learner = Learner(configured(), model_folder, CPU, 0, 1)
    (tmp_path / "taken").write_text("a file, where the folder should be")
    learner.save(tmp_path / "taken", background=True)
    with pytest.raises(OSError, match=r"taken cannot be written: .*File exists"):
        learner.writer.finish()
    learner.writer.finish()
