"""One rank of the trainer as a Ray actor around `Learner`; `actors.trainer.group` drives all ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.calls import resolve_actor
from actors.cuda import unusable_cuda
from actors.deaths import WATCHING, Supervised
from actors.heap import freeze_heap
from actors.observe.actor_logs import keep_log, shared_logs
from actors.observe.reporting import Reporter
from actors.weights.cuda_ipc import encode_handles
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part import Source, WeightBucket
from actors.weights.part_buffers import PartBuffers
from actors.weights.policy_tensors import Octets, checksum_of
from service.config import Config
from service.errors import ProcessLost, UserError
from service.files import atomic_file
from service.handoff.steps.wire import decode_mini_batch
from service.learn.compile import share_cores, stop_compiling
from service.learn.learner import Learner, StepReport
from service.learn.model.policy import Policy
from service.learn.model.policy_model import Checkpointing
from service.learn.model.sharding import set_collective_deadline
from service.learn.profile import StepProfile
from service.learn.settings import LearnSettings
from service.learn.supervised import SupervisedSteps
from service.learn.trial import engine_bytes, keep_gathered_weights, take_trial
from service.observe.measure import measure_states
from service.observe.metrics import Metrics
from service.observe.recorder import States, Trace
from service.run.folder import PROFILES
from service.run.liveness.host_memory import in_gb
from service.run.liveness.supervisor import Life
from service.types import SupervisedRow

log = logging.getLogger(__name__)

MeetingPoint = tuple[str, int]
"""Address and port at which the ranks form their process group."""

FIRST_PROFILED = 4
"""The first optimizer step of a rank's process that `trainer.profile_steps` records; the steps before
it compile small functions."""

SENDING = "sending"
"""Ray's concurrency group of the calls that must not wait for an optimizer step."""


class TrainerRank(Supervised):
    """One rank of the trainer: has a shard of the policy, and trains on its part of each mini-batch."""

    def __init__(self, config_json: str, rank: int, hub: Any = None, on_gpu: bool = False) -> None:
        keep_log(f"trainer-{rank}")
        self._config = Config.model_validate_json(config_json)
        self._rank = rank
        self._world_size = self._config.trainer.ranks
        self._device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self._learner: Learner | None = None
        self._supervised: SupervisedSteps | None = None
        """Takes the steps of `baton sft`; None before the first step."""
        self._store: TCPStore | None = None
        """The store through which the ranks form their process group."""
        self._gathered: tuple[int | None, dict[str, torch.Tensor]] = (None, {})
        """The whole weights that were gathered last, for transport `ipc`, with their version."""
        self._buffers = PartBuffers(rank)
        """This rank's part of the newest weights, for transport `memory`."""
        self._steps = 0
        steps = self._config.trainer.profile_steps if rank == 0 else 0
        self._profile = StepProfile(steps, self._device, FIRST_PROFILED)
        trace = Trace()
        if hub is not None:
            reporter = Reporter("trainer", f"trainer-{rank}", self._config, resolve_actor(hub), self._measure_now)
            trace = reporter.trace
        self._states = States(trace, "rank", "starting")
        if hub is not None:
            reporter.start_thread()

    def _measure_now(self, metrics: Metrics) -> None:
        measure_states(metrics, self._states.seconds())

    @contextmanager
    def _busy(self, state: str) -> Iterator[None]:
        """Record a call of the driver in the timeline; between two calls the rank counts as waiting."""
        self._states.enter(state)
        try:
            yield
        finally:
            self._states.enter("waiting")

    @ray.method(concurrency_group=WATCHING)  # type: ignore[untyped-decorator]
    def life(self) -> Life:
        """Return the identity and state of this process; answers during an optimizer step too."""
        return self._life()

    @property
    def _is_set_up(self) -> bool:
        return self._learner is not None

    def place(self) -> tuple[str, MeetingPoint]:
        """Return the id of this rank's node, and the meeting point of the ranks, which rank 0 holds open from now on.
        Other ranks return the port 0."""
        address, node = ray.util.get_node_ip_address(), str(ray.get_runtime_context().get_node_id())
        if self._rank or not self._config.trainer.sharded:
            return node, (address, 0)
        self._store = self._store or self._joined((address, 0))
        return node, (address, self._store.port)

    def _joined(self, meeting_point: MeetingPoint) -> TCPStore:
        """Join the ranks' meeting point; rank 0 opens it."""
        # ranks import their packages and load their layers at different speeds
        timeout = timedelta(seconds=self._config.run.start_deadline)
        is_first = self._rank == 0
        return TCPStore(*meeting_point, self._world_size, is_first, timeout=timeout, wait_for_workers=False)

    def load(
        self,
        meeting_point: MeetingPoint,
        model_folder: str,
        nodes: Sequence[str] | None = None,
        adapter: bool = True,
        checkpointing: Checkpointing | None = None,
    ) -> None:
        """Join the process group and load the policy from disk.

        `nodes`: the node of each rank; None: all ranks are on one node. `adapter`: whether to train the adapter of
        `model.lora`, if one is configured; otherwise all weights are trained. `checkpointing`: the activations that are
        kept for the backward pass; None: as in the settings.

        Raises:
            UserError: Ray assigned a GPU to this rank that PyTorch cannot use.
            OutOfMemory: the largest micro-batch needs more memory.
        """
        if self._device.type == "cuda" and (why := unusable_cuda()) is not None:  # its node may have joined later
            node = ray.util.get_node_ip_address()
            raise UserError(f"trainer-{self._rank} has a GPU of node {node}, but PyTorch cannot use it: {why}")
        config = self._config if adapter else self._config.without_adapter
        if config.trainer.sharded:
            backend = process_group_backend(self._device, self._config.trainer.cpu_offload)
            choose_interface(ray.util.get_node_ip_address(), sum(node["Alive"] for node in ray.nodes()))
            self._store = self._store or self._joined(meeting_point)
            dist.init_process_group(
                backend,
                store=self._store,
                rank=self._rank,
                world_size=self._world_size,
                # until the end of the trial, because ranks load and compile their layers at different speeds
                timeout=timedelta(seconds=max(config.run.start_deadline, config.trainer.collective_deadline)),
            )
        where = Path(model_folder), self._device, self._rank, self._world_size
        settings = LearnSettings.of(config)
        policy = Policy(settings, *where, nodes=nodes, checkpointing=checkpointing)
        if policy.compiles:
            share_cores(nodes.count(nodes[self._rank]) if nodes else self._world_size)
        if policy.compiles or self._device.type == "cuda":
            self._try(settings, policy, chooses=checkpointing is None)
            stop_compiling()
        set_collective_deadline(config.trainer.collective_deadline)
        self._learner = Learner(settings, *where, policy)
        self._learner.began = self._states.enter
        freeze_heap()
        self._states.enter("waiting")

    def _try(self, settings: LearnSettings, policy: Policy, chooses: bool) -> None:
        """Take the trial; with `chooses`, choose afterwards whether gathered weights are kept."""
        began, shares = time.monotonic(), self._config.weights.transport == "ipc"
        elsewhere = engine_bytes(policy, self._config.generator.kv_cache_bytes or 0) if shares else 0.0
        take_trial(settings, policy, elsewhere)
        if chooses and settings.trainer.keeps_gathered:
            keep_gathered_weights(policy, elsewhere)
        log.info("the largest micro-batches took %.0f s with %s", time.monotonic() - began, policy.checkpointing)

    def warm_start(self, demonstrations: Sequence[SupervisedRow]) -> float:
        """Take supervised steps on demonstrations; returns the last step's cross-entropy per token."""
        with self._busy("warm_start"):
            return SupervisedSteps(LearnSettings.of(self._config), self.learner.policy).warm_start(demonstrations)

    def supervised(self, rows: Sequence[SupervisedRow], lr: float | None) -> float:
        """Take a supervised step on these rows; returns the cross-entropy per token. If `lr` is None, only measure."""
        if self._supervised is None:
            self._supervised = SupervisedSteps(LearnSettings.of(self._config), self.learner.policy)
        with self._busy("forward_backward"):
            return self._supervised.loss(rows) if lr is None else self._supervised.step(rows, lr)

    def step(self, batch: NDArray[np.uint8]) -> StepReport:
        """Take one optimizer step on this rank's micro-batches."""
        with self._busy("forward_backward"), self._profile.step():
            report = self.learner.step(decode_mini_batch(batch.data))
        self._steps += 1
        if self._profile.file is not None:
            self._write_profile(self._profile.file)
        if self._device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self._device)
            if self._steps == 1:
                log.info("memory of the GPU after the first step: %s reserved", in_gb(reserved))
            report = report._replace(metrics=report.metrics | {"trainer/gpu_reserved_bytes": float(reserved)})
        return report

    def _write_profile(self, recorded: bytes) -> None:
        """Write the recorded steps to `profiles/` of the run folder, if this host shares that folder."""
        self._profile.file = None
        if (logs := shared_logs()) is None:
            log.warning("no profile is written: this host does not share the run folder")
            return
        file = logs.parent / PROFILES / f"steps-{FIRST_PROFILED}-to-{self._steps}-trainer-{self._rank}.json.gz"
        file.parent.mkdir(exist_ok=True)
        with atomic_file(file) as partial:
            partial.write_bytes(recorded)
        log.info("the profile of steps %d to %d is in %s", FIRST_PROFILED, self._steps, file)

    def weights(self, version: int) -> Source | None:
        """Copy or gather the policy; every rank must call this.

        With transport `memory` each rank copies its own part of the weights and returns the part's place. Engines read
        the part there, or the driver sends the part with `bucket`. With transport `ipc` every rank gathers all weights
        for `ipc_handles`, and returns None.
        """
        with self._busy("weights"):
            if self._config.weights.transport == "memory":
                self._buffers.copy(version, self.learner.policy.shards(), self.learner.policy.dtype)
                return self._buffers.source
            self._gathered = None, {}
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            self._gathered = version, self.learner.policy.weights(everywhere=True) or {}
            return None

    @ray.method(concurrency_group=SENDING)  # type: ignore[untyped-decorator]
    def share(self) -> tuple[RemoteMemory | None, str]:
        """Let generators of other hosts read this rank's part of the weights. Returns the memory and an empty text, or
        None and the reason why NIXL cannot be used."""
        return self._buffers.share()

    @ray.method(concurrency_group=SENDING, num_returns=2)  # type: ignore[untyped-decorator]
    def bucket(self, version: int, start: int, stop: int) -> tuple[Octets | None, WeightBucket | None]:
        """Return the bytes from `start` to `stop` of this rank's part of a version, and their description; (None, None)
        if a newer version has replaced the version."""
        _, found = self.learner, self._buffers.bucket(version, start, stop)
        bucket, message = found or (None, None)
        return message, bucket

    def ipc_handles(self, version: int) -> tuple[bytes, int] | None:
        """Return an announcement with memory handles of a version's weights on this rank's GPU, and the announcement's
        checksum.

        The handles are for one update of the engine on this GPU. None: a newer version has replaced this version.
        """
        _, (gathered, weights) = self.learner, self._gathered
        if version != gathered:
            return None
        handles = encode_handles(weights, self._device)
        return handles, checksum_of(handles)

    def save(self, folder: str) -> None:
        """Copy this rank's part of a checkpoint and begin to write it."""
        with self._busy("checkpoint"):
            self.learner.save(Path(folder), background=True)

    @ray.method(concurrency_group=WATCHING)  # type: ignore[untyped-decorator]
    def save_progress(self) -> int | None:
        """Return the number of bytes of checkpoints that are on disk; None if this rank's part of the last checkpoint
        is complete. Answers during an optimizer step too; raises the error of a write that failed."""
        return self.learner.writer.progress()

    def restore(self, folder: str) -> None:
        """Resume from a checkpoint, which a different number of ranks may have written."""
        with self._busy("checkpoint"):
            self.learner.load(Path(folder))

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder; every rank must call this."""
        with self._busy("checkpoint"):
            self.learner.export(Path(folder))

    @property
    def learner(self) -> Learner:
        """Return the loaded learner.

        Raises:
            ProcessLost: this process was not set up, because it replaced an earlier one.
        """
        if self._learner is None:
            raise ProcessLost(f"trainer-{self._rank} was restarted and is not set up")
        return self._learner


def process_group_backend(device: torch.device, cpu_offload: bool) -> str:
    """Return the backends of the ranks' process group. The backend gloo is included only if tensors on the CPU are
    reduced."""
    if device.type == "cpu":
        return "gloo"
    return "cuda:nccl,cpu:gloo" if cpu_offload else "cuda:nccl"


def choose_interface(address: str, nodes: int) -> None:
    """If there are several nodes, make gloo and NCCL use the network interface that has this address, unless the user
    has chosen one. By default gloo takes the address of the host's name, on many hosts 127.0.1.1, and NCCL takes the
    first interface; other hosts may not reach these. Raises `UserError` if the user chose a missing one for gloo."""
    there = psutil.net_if_addrs()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if unknown := [name for name in chosen if name and name not in there]:
        raise UserError(f"GLOO_SOCKET_IFNAME: node {address} has no interface {unknown[0]}, only {', '.join(there)}")
    for name, addresses in there.items():
        if nodes > 1 and any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
