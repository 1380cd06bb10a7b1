"""The driver's part of broadcasts: which engines are in the group, when a new group is formed, and what happens to
engines that are cut off.

publication    group of rank 0 and all engines that are up     every engine receives
one has died   the group is cut off for all                    a new group without it; those cut off receive
one is back    group of rank 0 and that engine                 it receives; the next publication has a group of all
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from torch._C._distributed_c10d import TCPStore

from actors.calls import ACTOR_FAILED, call, in_a_line
from actors.weights.weight_group import OVER, Meeting, open_store
from actors.weights.weight_source import PublishedWeights, WeightSource
from service.config import WeightsConfig
from service.errors import RunFailed, WeightsCutOff

ANSWER_SECONDS = 30.0
"""Seconds after the deadline of the broadcast in which an engine must answer."""
MAX_FUTILE = 2
"""Maximum number of broadcasts of one version that are cut off although no engine was lost; then the run fails."""
TRIES = 3
"""Number of broadcasts that fit into `weights.sync_deadline`."""


class BroadcastGroup(NamedTuple):
    """Rank 0 and some engines."""

    engines: list[str]
    """The engines in the order of their ranks."""
    store: TCPStore
    meeting: Meeting


class Broadcasts:
    """Sends weights to engines through one group of them and the trainer's first rank."""

    def __init__(
        self,
        config: WeightsConfig,
        collective_deadline: float,
        workers: int,
        generators: Mapping[str, Any],
        trainer: WeightSource,
    ) -> None:
        """Store the settings; `workers`: the number of workers of each engine. A broadcast may take at most half of a
        collective's deadline, because a broadcast that hangs may block rank 0 in a collective."""
        self._generators, self._trainer, self._workers = generators, trainer, workers
        self._within = min(config.sync_deadline / TRIES, collective_deadline / 2)
        self._group: BroadcastGroup | None = None
        self._is_over = True
        """Whether a new group has to be formed."""

    async def send(self, names: Sequence[str], weights: PublishedWeights) -> dict[str, BaseException]:
        """Send weights to these engines; returns the error of each lost engine by name.

        A living engine that was cut off receives the weights in the next group. If the trainer has newer weights,
        nothing is sent, because the newer weights are about to be published.

        Raises:
            RunFailed: broadcasts were cut off repeatedly although no engine was lost.
            TrainerLost: the trainer does not answer.
        """
        lost: dict[str, BaseException] = {}
        left, futile = list(names), 0
        while left:
            failed = await self._broadcast(left, weights)
            gone = {name: error for name, error in failed.items() if not isinstance(error, WeightsCutOff)}
            left = [name for name in failed if name not in gone]
            futile += bool(left and not gone)
            if futile == MAX_FUTILE:
                why = in_a_line(failed[left[0]])
                raise RunFailed(
                    f"the weights of version {weights.version} reached no engine in {futile} broadcasts: {why}"
                )
            lost |= gone
        return lost

    def cut_off(self, why: str) -> None:
        """End the group, whatever its members wait for; the next broadcast forms a new group."""
        if self._group is not None and not self._is_over:
            self._group.store.set(OVER, why)
        self._is_over = True

    def forget(self, name: str) -> None:
        """Note that an engine's process has ended."""
        if self._group is not None and name in self._group.engines:
            self.cut_off(f"{name} is gone")

    def _formed(self, names: list[str]) -> BroadcastGroup:
        """Form a new group of these engines, which replaces the previous one."""
        self.cut_off("another group takes its place")
        address = ray.util.get_node_ip_address()
        store = open_store(address)
        meeting = Meeting(address, store.port, 1 + len(names) * self._workers, self._within)
        self._group, self._is_over = BroadcastGroup(names, store, meeting), False
        return self._group

    async def _broadcast(self, names: list[str], weights: PublishedWeights) -> dict[str, BaseException]:
        """Do one broadcast; returns the error of each engine that did not load the weights."""
        group, first_ranks = self._group, dict[str, int]()
        if group is None or self._is_over or group.engines != names:
            group = self._formed(names)
            first_ranks = {name: 1 + place * self._workers for place, name in enumerate(names)}
        takes: dict[str, asyncio.Future[None]] = {}
        try:
            if not await self._trainer.begin_send(weights.version, group.meeting):
                self.cut_off("the trainer has newer weights")
                return {}
            for name in names:
                taking = self._take(name, group.meeting, first_ranks.get(name), weights)
                takes[name] = asyncio.ensure_future(taking)
            await asyncio.wait(takes.values(), return_when=asyncio.FIRST_EXCEPTION)
            for name, error in _errors(takes).items():
                self.cut_off(f"{name}: {in_a_line(error)}")
            await asyncio.wait(takes.values())
        except BaseException:  # the trainer is lost, or the broadcast was given up: nobody waits for the engines
            self.cut_off("the broadcast was given up")
            for take in takes.values():
                take.cancel()
            raise
        failed = _errors(takes)
        for error in failed.values():
            if not isinstance(error, ACTOR_FAILED):
                raise error
        return failed

    async def _take(self, name: str, meeting: Meeting, first_rank: int | None, weights: PublishedWeights) -> None:
        """Let an engine join the group, if the group is new, and receive the weights."""
        generator, within = self._generators[name], self._within + ANSWER_SECONDS
        if first_rank is not None:
            await call(generator.join_trainer, meeting, first_rank, who=name, within=within)
        sent = weights.version.pack(), weights.announcement, weights.checksum
        await call(generator.update_weights, *sent, who=name, within=within)


def _errors(takes: Mapping[str, asyncio.Future[None]]) -> dict[str, BaseException]:
    """Return the errors of the tasks that have failed by now."""
    ended = ((name, take.exception()) for name, take in takes.items() if take.done())
    return {name: error for name, error in ended if error is not None}
