"""`baton run`: prepares data and model, starts Ray and the actors, and trains to the end or to a stop signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from actors.driver.authentication import keep_token_private
from actors.driver.cluster import place_actors
from actors.driver.coordinator import Coordinator
from actors.driver.prepare import prepare
from actors.driver.ray_session import ray_session
from actors.driver.signals import FORCING, exit_on_stop_signals, force_after, heeded_signals, on_stop_signal
from actors.observe.actor_logs import begin_logs
from service.config import Config, check, resolved_yaml
from service.config.core_settings import buffer_settings
from service.config.paths import with_absolute_paths
from service.errors import BatonError, RunFailed, UserError
from service.files import write_atomic
from service.handoff.buffer_settings import opening
from service.handoff.ledger.replaying import check_begun
from service.rollout.prompts.dataset import rows_digest
from service.rollout.run_secret import RunSecret, run_secret
from service.run.checkpoints import Checkpoints, Manifest
from service.run.folder import (
    CHECKPOINTS,
    DRIVER_LOG,
    IN_RAY_JOB,
    JOURNAL,
    LOGS,
    REVISIONS,
    SUMMARY,
    lock_run,
    new_run_folder,
    runs_folder,
)
from service.run.phases import phase, say
from service.run.preparing.inputs import Prepared, check_checkpoint
from service.run.preparing.resuming import changed_settings
from service.run.records.log_file import log_into
from service.run.records.progress import end_early
from service.run.records.writer import RunWriter
from service.store.uploads import Uploads

UPLOAD_QUIET_SECONDS = 1.0
"""Seconds after which a line says that the last uploads are still in progress."""


def run(
    config: Config,
    resume: Path | None = None,
    manifest: Manifest | None = None,
    revisions: Mapping[str, str] | None = None,
) -> int:
    """Run to the end, to a stop signal or to a failure. Returns the exit code.

    `resume`: the folder of a run to continue from the checkpoint of `manifest`; the caller holds the folder's lock.
    `revisions`: the downloaded revision of each hub address, by setting. After a stop signal the final weights are
    written, and the exit code is 128 + the signal's number.

    Raises:
        UserError: the configuration or a file that it names is wrong.
        RunFailed: the run cannot make progress.
    """
    check(config)
    if IN_RAY_JOB not in os.environ:  # each part of a job has its own copy of the folder
        config = with_absolute_paths(config)  # also in the folder's config.yaml, so that the run resumes from anywhere
    keep_token_private(os.environ, Path.home())
    path = resume or new_run_folder(runs_folder(config.run.dir), config.run.name)
    folder = RunWriter(path, has_begun=resume is None)
    with lock_run(path) if resume is None else contextlib.nullcontext():
        steps = 0 if manifest is None else manifest.step
        return guarded(folder, partial(_run, config, folder, manifest, revisions), steps)


def guarded(folder: RunWriter, work: Callable[[], int], steps: int = 0) -> int:
    """Do the work of a run that has already taken `steps` optimizer steps. Returns the exit code. The run's folder gets
    a log, and the reason if the run fails or is stopped."""
    path = folder.path
    try:
        with exit_on_stop_signals(), log_into(path / LOGS / DRIVER_LOG):
            return work()
    except SystemExit as stopped:
        end_early(folder, say, steps)
        return int(stopped.code or 0)
    except (BatonError, OSError) as error:
        if not path.is_dir() and not isinstance(error, UserError):  # the folder of refused input is deleted
            failure: BatonError = RunFailed(f"{path}: the folder was renamed or deleted while its run went on")
        elif isinstance(error, BatonError):
            failure = error
        else:
            failure = RunFailed(f"{error.filename or path}: {error.strerror or error}")
        with contextlib.suppress(OSError):  # the disk may be what failed
            folder.write_summary({"state": "failed", "reason": str(failure), "exit_code": failure.exit_code})
        raise failure from error
    finally:
        folder.delete_targets()


def _run(
    config: Config, folder: RunWriter, manifest: Manifest | None, revisions: Mapping[str, str] | None = None
) -> int:
    """Prepare and train; if data, model or store are refused, the folder of a new run is deleted."""
    kept, journal = config.trainer.keep_checkpoints, folder.path / JOURNAL
    with phase("preparing the data and the model"):
        try:
            prepared = prepare(with_absolute_paths(config), folder.path)
            secret = run_secret(folder.path) if config.endpoint is not None else None
            if manifest is not None:
                settings = buffer_settings(config, prepared.vocab_size, prepared.routing)
                uids = [task.uid for task in prepared.tasks]
                end = check_begun(journal, opening(settings, uids, rows_digest(prepared.tasks)))
                manifest.check_journal(end, journal)  # else the buffer would replace a lost journal by a new one
                checkpoints = Checkpoints(folder.path / CHECKPOINTS, kept)
                if manifest.files:  # otherwise its state is the model folder
                    check_checkpoint(config.model.lora, prepared.base, checkpoints.path(manifest.step))
            uploads = None
            if (url := config.run.store) is not None:
                step = None if manifest is None else manifest.step
                uploads = Uploads(url, folder.path, step, kept, say)
        except UserError:
            if manifest is None:
                shutil.rmtree(folder.path)
            raise
    if manifest is None:
        folder.begin(resolved_yaml(config), config.metrics.wandb, prepared.model_folder)
    say(f"run folder: {folder.path}")
    if revisions:
        write_atomic(folder.path / REVISIONS, json.dumps(revisions, indent=2) + "\n")
    changed = [] if manifest is None else changed_settings(config, folder.path)
    for line in (*config.notes, *changed):
        say(f"NOTE {line}")
    if manifest is not None and not changed:
        say("no setting has changed; docs/operations.md#resuming lists the settings that may change")
    seconds, heeded = config.run.stop_grace, heeded_signals()
    too_late = f"{seconds:g} s after the stop signal (run.stop_grace) the run had not ended in order"
    with force_after(seconds, partial(end_by_force, config, folder, too_late)) as countdown:
        try:
            code = _run_on_ray(config, folder, prepared, secret, manifest, uploads, countdown)
        except BaseException:  # also upload after a failure
            wait_for_uploads(uploads, heeded)
            raise
        if uploads is not None:
            uploads.ended()
        return wait_for_uploads(uploads, heeded, folder.has_final) or code


def _run_on_ray(
    config: Config,
    folder: RunWriter,
    prepared: Prepared,
    secret: RunSecret | None,
    manifest: Manifest | None,
    uploads: Uploads | None,
    countdown: Callable[[int], None],
) -> int:
    """Run the coordinator. The first stop signal ends it cleanly, within the time of the countdown."""
    mark = uuid.uuid4().hex[:12]
    address = os.environ.get("RAY_ADDRESS")
    stopped_early = partial(end_early, folder, say, 0 if manifest is None else manifest.step)

    def ray_ended(reason: str) -> None:
        say(reason)
        folder.write_summary({"state": "failed", "reason": reason, "exit_code": RunFailed.exit_code})

    begin_logs(folder.path / LOGS, config.generator.min_engines, config.trainer.ranks)
    with contextlib.ExitStack() as held:
        with phase(f"connecting to the Ray cluster at {address}" if address else "starting Ray"):
            summary = folder.path / SUMMARY
            held.enter_context(ray_session(config, mark, folder.path / LOGS, stopped_early, ray_ended, summary))
        cluster = place_actors(with_absolute_paths(config), prepared, folder.path / JOURNAL, secret)
        coordinator = Coordinator(config, cluster, folder, prepared, say, manifest, uploads)
        force = partial(end_by_force, config, folder, f"{FORCING} stop signals came before the run had ended in order")

        def stop(number: int) -> None:
            countdown(number)
            coordinator.stop(number)

        async def until_stopped() -> None:
            with on_stop_signal(stop, force):
                await coordinator.run()

        asyncio.run(until_stopped())
        return 128 + coordinator.stopped_by if coordinator.stopped_by else 0


def wait_for_uploads(uploads: Uploads | None, heeded: Sequence[signal.Signals], has_final: bool = False) -> int:
    """After a run has ended, wait until its uploads have reached the object store, or one of the `heeded` signals
    comes. Returns 0 or an exit code. `has_final`: whether the run has written final weights."""
    if uploads is None:
        return 0
    waiting = phase(f"uploading to {uploads.url}", say, uploads.left, after=UPLOAD_QUIET_SECONDS)
    try:
        with exit_on_stop_signals(heeded), waiting:
            uploads.finish()
    except RunFailed as failure:
        say(str(failure))
        return failure.exit_code
    except SystemExit as stopped:
        say(f"stopped before everything was uploaded: {uploads.url} lacks {uploads.left()}")
        return int(stopped.code or 0)
    step = uploads.status.step
    say(
        f"{uploads.url} has {'no checkpoint' if step is None else f'the checkpoint of step {step}'}"
        + (" and the final weights" if has_final else "")
    )
    return 0


def end_by_force(config: Config, folder: RunWriter, why: str, number: int) -> None:
    """End this process now; the watchdog ends the other processes of the run."""
    reason = f"ended by force: {why}"
    try:
        if not (folder.path / SUMMARY).exists():
            if not folder.has_final:
                reason += f"; the final weights of step {folder.step} are not written"
                reason += (
                    f"; `baton run --resume {folder.path}` goes on from the newest checkpoint and writes them"
                    if config.trainer.checkpoint_every
                    else ", and with trainer.checkpoint_every=0 there is no checkpoint to write them from"
                )
            folder.write_summary({"state": "stopped", "steps": folder.step, "reason": reason})
        say(reason)
    finally:  # even if the disk is full, or the terminal closed
        os._exit(128 + number)
