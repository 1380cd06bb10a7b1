"""Adapters on disk: PEFT's form, a start from one, and the merged weights that `baton export` writes."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from service.cli.parser import main
from service.config.learn import LoraConfig
from service.errors import UserError
from service.learn.learner import Learner
from service.learn.model.adapter_folder import ADAPTER_WEIGHTS, PREFIX, Base, check_adapter, merge
from service.learn.model.hf_config import read_config
from service.learn.model.lora import adapter_off
from service.learn.model.policy_model import trained_shapes
from service.model_folder import ADAPTER_CONFIG
from service.rollout.chat.tokenizer import make_tokenizer
from service.run.checkpoints import TRAINER, Checkpoints
from service.run.folder import CHECKPOINTS, CONFIG, FINAL
from tests.families.engine import small_model as model_of_family
from tests.pure.conftest import Refused
from tests.pure.learn.builders import CPU, made_rows, mini_batch, row_by_row, settings, small_model
from tests.pure.learn.families import saved

LORA = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))


LITTLE = 3000
"""Bytes, fewer than an adapter has."""


def trained(folder: Path, dtype: str = "float32") -> Learner:
    """A learner whose adapter has had steps large enough to be seen."""
    learner = Learner(settings(trainer={"lr": 0.05}, dtype=dtype, lora=LORA), folder, CPU, 0, 1)
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    assert all(learner.step(batch).applied for _ in range(3))
    return learner


def test_an_adapter_is_written_in_pefts_form_in_float32(model_folder: Path, tmp_path: Path) -> None:
    learner = trained(model_folder, "bfloat16")
    learner.export(tmp_path / FINAL)
    assert {file.name for file in (tmp_path / FINAL).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    found = json.loads((tmp_path / FINAL / "adapter_config.json").read_text())
    wanted = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["down_proj", "q_proj"], "bias": "none"}
    assert found.items() >= (wanted | {"base_model_name_or_path": str(model_folder), "use_rslora": False}).items()
    tensors, masters = load_file(tmp_path / FINAL / ADAPTER_WEIGHTS), learner.policy.master_weights.tensors
    assert tensors.keys() == {f"base_model.model.{name}" for name in masters}
    assert all(torch.equal(tensors[PREFIX + name], master) for name, master in masters.items())
    assert PREFIX + "model.layers.1.mlp.down_proj.lora_B.weight" in tensors


@pytest.mark.parametrize("files", [1, 2])
def test_transformers_computes_with_merged_weights_what_the_learner_computes_with_the_adapter(
    model_folder: Path, tmp_path: Path, files: int
) -> None:
    base = small_model(tmp_path / "base")
    if files > 1:
        weights = load_file(base / "model.safetensors")
        (base / "model.safetensors").unlink()
        save_torch_state_dict(
            weights, base, max_shard_size=sum(map(torch.Tensor.nbytes.__get__, weights.values())) // 2
        )
    learner = trained(base)
    learner.export(tmp_path / "adapter")
    merge(tmp_path / "adapter", base, tmp_path / "merged")
    (row,) = made_rows(1, seed=3)
    micro = learner.policy.to_device(mini_batch([[[row]]], trajectories=1).ranks[0][0])
    ours = learner.policy.logprobs([micro])[0]
    torch.testing.assert_close(ours, row_by_row(tmp_path / "merged", [row])[0], atol=1e-6, rtol=1e-6)
    files_of_merged = (tmp_path / "merged").glob("*.safetensors")
    assert {weight.dtype for file in files_of_merged for weight in load_file(file).values()} == {torch.float32}
    with adapter_off(learner.policy.model):
        assert not torch.allclose(ours, learner.policy.logprobs([micro])[0], atol=1e-2)


def test_a_run_that_begins_with_an_adapter_computes_what_the_adapter_did(model_folder: Path, tmp_path: Path) -> None:
    learner = trained(model_folder)
    learner.export(tmp_path / "adapter")
    begun = Learner(settings(lora=LORA, adapter=tmp_path / "adapter"), model_folder, CPU, 0, 1)
    masters = (one.policy.master_weights.tensors for one in (learner, begun))
    assert all(torch.equal(*pair) for pair in zip(*(each.values() for each in masters), strict=True))


def test_an_adapter_of_a_multimodal_folder_has_the_names_of_the_folder_and_none_of_its_image_model(
    tmp_path: Path,
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model_of_family("gemma3", 0, multimodal=True).save_pretrained(base)
    learner = trained(base)
    learner.policy.export(adapter)
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    assert all(name.startswith("base_model.model.language_model.model.layers.") for name in tensors)
    excluded = json.loads((adapter / ADAPTER_CONFIG).read_text())["exclude_modules"]
    layer = "layers.0.self_attn.q_proj"
    of_peft = [f"model.{part}.{layer}" for part in ("vision_tower.encoder", "language_model")]
    assert [bool(re.fullmatch(excluded, name)) for name in of_peft] == [True, False]
    merge(adapter, base, tmp_path / "merged")
    (row,) = made_rows(1, seed=3)
    micro = learner.policy.to_device(mini_batch([[[row]]], trajectories=1).ranks[0][0])
    ours = learner.policy.logprobs([micro])[0]
    torch.testing.assert_close(ours, row_by_row(tmp_path / "merged", [row])[0], atol=1e-5, rtol=1e-5)
    with adapter_off(learner.policy.model):
        assert not torch.allclose(ours, learner.policy.logprobs([micro])[0], atol=1e-2)
    classes = {name.replace("language_model.model.", "model.language_model."): of for name, of in tensors.items()}
    save_file(classes, adapter / ADAPTER_WEIGHTS)  # as PEFT names them after the classes of transformers
    begun = Learner(settings(lora=LORA, adapter=adapter), base, CPU, 0, 1)
    assert torch.equal(begun.policy.logprobs([micro])[0], ours)
    save_file({}, adapter / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match="has no tensor"):
        merge(adapter, base, tmp_path / "without_effect")


def other_settings(folder: Path, **changed: Any) -> None:
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def changed(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    save_file({name: change(tensor) for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS, metadata)


def other_tensors(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: other_settings(folder, r=8), r"model\.lora\.rank: .* has 8"),
        (lambda folder: other_settings(folder, lora_alpha=32), r"model\.lora\.alpha: .* has 32"),
        (lambda folder: other_settings(folder, target_modules=["q_proj"]), r"model\.lora\.targets: .* has \[q_proj\]"),
        (lambda folder: other_settings(folder, use_dora=True), "sets use_dora"),
        (lambda folder: other_settings(folder, init_lora_weights="pissa_niter_4"), "changes the base model; merge"),
        (lambda folder: other_settings(folder, peft_type="IA3"), "describes no LoRA adapter"),
        (lambda folder: other_settings(folder, r=-1), "rank Input should be greater than 0"),
        (lambda folder: other_settings(folder, target_modules=".*_proj"), "target_modules is of another kind"),
        (lambda folder: changed(folder, lambda tensor: tensor / 0), "holds other than finite"),
        (lambda folder: changed(folder, torch.Tensor.int), "holds other than finite"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("["), "describes no LoRA adapter"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).write_text("x"), "cannot be read"),
        (other_tensors, r"lora_A\.weight has shape none there, \(4, 48\) here"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(
    model_folder: Path, tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    adapter = tmp_path / "adapter"
    trained(model_folder).export(adapter)
    shapes = trained_shapes(read_config(model_folder), LORA)
    check_adapter(adapter, LORA, Base.of(model_folder), shapes)
    with pytest.raises(UserError, match="is of an adapter for another model"):
        check_adapter(adapter, LORA, Base.of(small_model(tmp_path / "other", seed=1)), shapes)
    damage(adapter)
    with pytest.raises(UserError, match=reason) as caught:
        check_adapter(adapter, LORA, Base.of(model_folder), shapes)
    assert "\n" not in str(caught.value)


def same(ours: Path, theirs: Path) -> None:
    left, right = load_file(ours), load_file(theirs)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def checkpointed(learner: Learner, run: Path) -> Path:
    """A run folder with a checkpoint of step 3; returns the checkpoint."""
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1)
    learner.save(checkpoints.begin(3) / TRAINER)
    checkpoints.finish(3, 0)
    return checkpoints.path(3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformers_computes_with_an_exported_checkpoint_of_all_weights_what_the_learner_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused, family: str
) -> None:
    base, run = saved(family, tmp_path), tmp_path / "run"
    make_tokenizer(base, ["a", "b"])
    learner = Learner(settings(trainer={"lr": 0.05}), base, CPU, 0, 1)
    assert learner.step(mini_batch([[made_rows(2, seed=1)]], trajectories=2)).applied
    checkpoint = checkpointed(learner, run)
    (run / CONFIG).write_text(f"model: {{path: {base}, dtype: float32}}\n")
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said == f"{tmp_path / 'out'}: the weights after step 3, a Hugging Face folder\n"
    learner.export(run / FINAL)
    assert main(["export", str(run), str(tmp_path / "of_final")]) == 0
    same(*(tmp_path / name / "model.safetensors" for name in ("out", "of_final")))
    assert main(["export", str(checkpoint), str(tmp_path / "half"), "model.dtype=bfloat16"]) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    said = refused("export", run, tmp_path / "no", "model.dtype=bfloat16")
    assert "model.dtype=bfloat16: these weights are copied as they are" in said
    (row,) = made_rows(1, seed=3)
    micro = learner.policy.to_device(mini_batch([[[row]]], trajectories=1).ranks[0][0])
    ours = learner.policy.logprobs([micro])[0]
    torch.testing.assert_close(ours, row_by_row(tmp_path / "out", [row])[0], atol=1e-5, rtol=0)
    assert not torch.allclose(ours, row_by_row(base, [row])[0], atol=1e-2), "the steps have changed the weights"


def test_a_run_and_its_checkpoint_are_exported_and_what_has_no_adapter_is_refused(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    base = small_model(tmp_path / "base")
    make_tokenizer(base, ["a", "b"])
    learner, run = trained(base), tmp_path / "run"
    checkpointed(learner, run)
    lora = f"lora: {{rank: {LORA.rank}, alpha: {LORA.alpha}, targets: [{', '.join(LORA.targets)}]}}"
    (run / CONFIG).write_text(f"model: {{path: {base}, dtype: float32, {lora}}}\n")
    before = {*tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, limits[1]))  # as on a full disk
    try:
        assert "cannot be written: " in refused("export", run, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {*tmp_path.iterdir()} == before
    assert main(["export", str(run), str(tmp_path / "from_checkpoint"), "--adapter"]) == 0
    learner.export(run / FINAL)
    assert main(["export", str(run / FINAL), str(tmp_path / "from_final"), "--adapter"]) == 0
    exported = [tmp_path / f"from_{name}" for name in ("checkpoint", "final")]
    assert len({(folder / ADAPTER_CONFIG).read_bytes() for folder in exported}) == 1
    same(*(folder / ADAPTER_WEIGHTS for folder in exported))
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    matrices = merge(run / FINAL, base, tmp_path / "expected")
    assert matrices and f"an adapter merged into {matrices} matrices, " in capsys.readouterr().out
    same(*(tmp_path / name / "model.safetensors" for name in ("merged", "expected")))
    (tmp_path / "link").symlink_to(tmp_path / "no")
    for words, reason in (
        ([str(run), str(tmp_path / "merged")], "exists already"),
        ([str(run), str(tmp_path / "link")], "exists already"),
        ([str(run), str(tmp_path / "no"), "--adapter", "model.lora=null"], "without model.lora"),
        ([str(run), str(tmp_path / "no"), "model.lora.rank=8"], r"model.lora.rank: the adapter"),
        (
            [str(run), str(tmp_path / "no"), "model.dtype=bfloat16"],
            "model.dtype=bfloat16: an adapter is merged in float32",
        ),
        (
            [str(run), str(tmp_path / "no"), "trainer.lr=1"],
            "trainer.lr=1: an export depends on settings of the section",
        ),
        ([str(tmp_path / "merged"), str(tmp_path / "no")], "a model of no run"),
        ([str(tmp_path / "from_final"), str(tmp_path / "no")], "an adapter without its run"),
    ):
        assert reason in refused("export", *words)
    assert not (tmp_path / "no").exists()
