"""A resumption that is refused, or ends before the run goes on, changes nothing of the run and starts no Ray."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.driver import run as running
from service.cli import main
from service.clock import SystemClock
from service.config import Config, load_config
from service.config.core_settings import buffer_settings
from service.errors import RunFailed
from service.handoff.buffer import Buffer
from service.handoff.journal.journal import Journal
from service.learn.checkpoint import METADATA_FILE, CheckpointMetadata, CheckpointWriter
from service.learn.model.adapter_folder import Base
from service.learn.model.hf_config import read_config
from service.learn.model.optimizer import MOMENTS
from service.learn.model.policy_model import trained_shapes
from service.rollout.environments.registry import synthetic_data
from service.rollout.prompts.dataset import rows_digest
from service.rollout.prompts.rows import write_rows
from service.run.checkpoints import MANIFEST, TRAINER, Checkpoints
from service.run.folder import CHECKPOINTS, CONFIG, DRIVER_LOG, JOURNAL, LOGS, METRICS, SUMMARY, TARGETS, initial_model
from service.run.preparing.inputs import Prepared
from service.run.records.writer import RunWriter

STEP = 3
KINDS = ("weights", *MOMENTS)
SUMMARY_OF_RUN = {"state": "finished", "steps": STEP}


LORA = ("model.lora={rank: 4, alpha: 8}",)


def rows(seed: int) -> list[dict[str, Any]]:
    """Rows of the environment `lookup`."""
    return synthetic_data("lookup", (), "rows")(4, seed)


def write_checkpoint(of: Checkpoints, step: int, model: Path, config: Config, base: Base | None = None) -> None:
    """A checkpoint of weights that are 0, of the one rank of a trainer."""
    lora = config.model.lora
    shapes = trained_shapes(read_config(model), lora)
    learner = {f"{kind}/{name}": torch.zeros(shape) for kind in KINDS for name, shape in shapes.items()}
    alpha = None if lora is None else lora.alpha
    metadata = CheckpointMetadata(steps=step, frozen={}, shapes=shapes, base=base, alpha=alpha, world_size=1)
    writer = CheckpointWriter(0, 1)
    writer.start(of.begin(step) / TRAINER, learner, metadata)
    writer.finish()
    of.finish(step, journal_position=0)


def trained(config: Config, folder: RunWriter, prepared: Prepared, *others: object) -> int:
    """A run without Ray: it leaves a journal, a checkpoint and a summary."""
    journal, uids = Journal(folder.path / JOURNAL, SystemClock()), [task.uid for task in prepared.tasks]
    digest = rows_digest(prepared.tasks)
    settings = buffer_settings(config, prepared.vocab_size, prepared.routing)
    Buffer(settings, uids, journal, SystemClock(), digest)
    journal.sync()
    journal.close()
    base = None if config.model.lora is None else Base.of(prepared.base)
    write_checkpoint(Checkpoints(folder.path / CHECKPOINTS, keep=1), STEP, prepared.model_folder, config, base)
    folder.write_summary(SUMMARY_OF_RUN)
    return 0


@pytest.fixture
def more() -> tuple[str, ...]:
    """Settings of the run beyond those of the quick start."""
    return ()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> Path:
    """The folder of a finished run on a dataset whose path was given relative to the folder of its start."""
    quickstart = str(Path("configs/quickstart.yaml").resolve())
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    write_rows(Path("rows.jsonl"), rows(seed=1))
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    settings = ["data.train=rows.jsonl", "data.make_rows=null", "model.warm_start=null", f"run.max_steps={STEP}", *more]
    with monkeypatch.context() as patched:
        patched.setattr(running, "_run_on_ray", trained)
        assert running.run(load_config([Path(quickstart)], [*settings, "metrics.port=0"])) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = next((tmp_path / "start" / "runs").glob("quickstart*"))
    targets = folder.parent / TARGETS / f"{folder.name}.json"
    targets.parent.mkdir(exist_ok=True)
    targets.write_text("[]")  # as a killed run leaves it
    return folder


@pytest.fixture
def refused(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line with which `baton run --resume` is refused; the run is as it was."""

    def ray_started(*arguments: object) -> AbstractContextManager[None]:
        raise RunFailed("Ray was started")

    monkeypatch.setattr(running, "ray_session", ray_started)

    def resume(*settings: str, code: int = 2) -> str:
        capsys.readouterr()
        assert main(["run", "--resume", str(run), *settings]) == code
        assert json.loads((run / SUMMARY).read_text()) == SUMMARY_OF_RUN
        assert (run.parent / TARGETS / f"{run.name}.json").exists()
        err = capsys.readouterr().err
        assert err.startswith("baton: ") and err.count("\n") == 1
        return err

    return resume


def test_other_settings_and_rows_are_refused_before_ray_starts_and_leave_how_the_run_ended(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    more = "run.max_steps=9"
    samples = refused("algorithm.n_samples_per_prompt=4", more)
    assert samples.startswith("baton: override algorithm.n_samples_per_prompt=4: it is 4, but was ")
    other = tmp_path / "other.jsonl"
    write_rows(other, rows(seed=2))
    said = refused(f"data.train={other}", more)
    assert said.startswith(f"baton: override data.train={other}: the dataset has other rows than when this run began")


@pytest.mark.parametrize(
    ("more", "setting", "reason"),
    [
        ((), "model.lora={rank: 4}", "holds all weights, but the configuration trains an adapter (model.lora)"),
        (LORA, "model.lora.alpha=16", "was written with 8"),
        (LORA, "model.lora.rank=8", "has shape (4,"),
        (LORA, "model.lora=null", "holds an adapter, but the configuration trains all weights"),
    ],
)
def test_another_adapter_is_refused_before_ray_starts(refused: Callable[..., str], setting: str, reason: str) -> None:
    assert reason in refused(setting, "run.max_steps=9")
    assert "Ray was started" in refused("run.max_steps=9", code=1)


def test_what_a_resumption_changes_is_written_down(refused: Callable[..., str], run: Path) -> None:
    more, log = "run.max_steps=9", run / LOGS / DRIVER_LOG
    refused(more, "model.dtype=bfloat16", "trainer.layout=padded", "placement.trainer={gpu: h100}", code=1)
    assert load_config([run / CONFIG]).run.max_steps == STEP, "the run did not go on"
    notes = re.findall(r"NOTE (\S+): it is (\S+) from here on, and was (\S+)", log.read_text())
    assert sorted(notes) == [
        ("model.dtype", "bfloat16", "float32"),
        ("placement.trainer.gpu", "h100", "None"),
        ("run.max_steps", "9", str(STEP)),
        ("trainer.layout", "padded", "auto"),
    ]


@pytest.mark.parametrize("left", ['{"state": "failed", "steps": 3, "reason": "the disk is full"}', '{"state":', None])
def test_a_run_with_all_steps_goes_on_where_its_final_weights_are_missing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: str | None
) -> None:
    (run / SUMMARY).unlink()
    if left is not None:
        (run / SUMMARY).write_text(left)
    monkeypatch.setattr(running, "_run_on_ray", lambda *arguments: 7)
    assert main(["run", "--resume", str(run)]) == 7
    assert main(["run", "--resume", str(run), f"run.max_steps={STEP - 1}"]) == 2
    assert f"the run has all of its {STEP} steps" in capsys.readouterr().err


def test_a_run_that_has_nothing_to_go_on_from_is_refused_before_anything_is_loaded(
    refused: Callable[..., str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "actors.driver.run", None)  # an import of it fails
    assert f"the run has all of its {STEP} steps; raise run.max_steps" in refused()
    checkpoint = run / CHECKPOINTS / f"step_{STEP}"
    with (checkpoint / TRAINER / METADATA_FILE).open("a") as part:
        part.write(" ")
    assert f"every checkpoint is damaged (of step {STEP})" in refused("run.max_steps=9")
    manifest = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(manifest.replace("step", "stop"))
    assert f"every checkpoint is damaged (of step {STEP})" in refused("run.max_steps=9")
    (checkpoint / MANIFEST).unlink()
    assert "the run ended before its first one was written" in refused("run.max_steps=9") and checkpoint.exists()
    checkpoint.rename(run / "elsewhere")
    assert "the run ended before its first one was written" in refused("run.max_steps=9")
    assert "because trainer.checkpoint_every is 0" in refused("run.max_steps=9", "trainer.checkpoint_every=0")
    (run / METRICS).write_text('{"trainer/global_step": 1, "sft/loss": 2.0}\n')
    assert "a training by baton sft is not resumed" in refused("run.max_steps=9")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file, manifest: file.write_bytes(file.read_bytes()[:-1] + b"\x01"), "has other bytes"),
        (lambda file, manifest: file.unlink(), "is missing"),
        (lambda file, manifest: manifest.write_text(manifest.read_text()[:40]), "is damaged"),
    ],
    ids=["a flipped bit", "a file less", "half a manifest"],
)
def test_a_resumption_takes_the_checkpoint_before_the_damaged_ones_and_names_them(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path, Path], object],
    says: str,
) -> None:
    checkpoints, config = Checkpoints(run / CHECKPOINTS, keep=9), load_config([run / CONFIG])
    model = initial_model(config.model, run)
    for step in (STEP + 1, STEP + 2):
        write_checkpoint(checkpoints, step, model, config)
    newest, taken = checkpoints.path(STEP + 2), list[Any]()
    damage(next((newest / TRAINER).glob("*.safetensors")), newest / MANIFEST)
    monkeypatch.setattr(running, "_run_on_ray", lambda *arguments: taken.append(arguments[4].step) or 0)
    assert main(["run", "--resume", str(run), "run.max_steps=9"]) == 0 and taken == [STEP + 1]
    (line,) = [line for line in caplog.messages if f"step_{STEP + 2}: " in line]
    assert says in line and line.endswith(f"that of step {STEP + 1} is taken")


def test_a_resumption_without_its_journal_is_refused_and_begins_no_other_one(
    refused: Callable[..., str], run: Path
) -> None:
    manifest = run / CHECKPOINTS / f"step_{STEP}" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"journal_position": 0', '"journal_position": 128'))
    (segment,) = (run / JOURNAL).glob("*.journal")
    segment.rename(run / segment.name)
    assert "the journal ends at position 0" in refused("run.max_steps=9")
    assert not [*(run / JOURNAL).glob("*.journal")]
    (run / segment.name).rename(segment)
    assert "Ray was started" in refused("run.max_steps=9", code=1)
