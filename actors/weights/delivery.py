"""Sends the newest weights to every engine that is up. An engine that was down gets the weights after its restart.

memory   engines pull from the ranks or from an image of their node    `pulled.py`, `node_images.py`
ipc      engines open handles to a rank's tensors on the same GPU      `cuda_ipc.py`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from actors.calls import ACTOR_FAILED, call, in_a_line, may_be_dropped
from actors.weights.node_images import NodeImages
from actors.weights.part import PublishedWeights, TrainerLost
from service.config import WeightsConfig
from service.errors import Starved, WeightsGone
from service.types import PolicyVersion


class Delivery:
    """Sends weights to the engines of some generators."""

    def __init__(
        self,
        config: WeightsConfig,
        generators: Mapping[str, Any],
        source: Any,
        is_up: Callable[[str], bool],
        not_taken: Callable[[str, PolicyVersion, BaseException], None],
        source_failed: Callable[[TrainerLost], None],
        sent: Callable[[int], None],
    ) -> None:
        """Store the settings. `not_taken` is called with the generator, the version and the error if an engine did not
        load a version; `source_failed` is called if the trainer could not send a version; `sent`: see `NodeImages`."""
        self._config, self._generators, self._source, self._is_up = config, generators, source, is_up
        self._not_taken, self._source_failed = not_taken, source_failed
        self._images = NodeImages(generators, source, config.sync_deadline, sent)
        self.node_of = self._images.node_of
        self._locks: dict[str, asyncio.Lock] = {}
        """A lock for each engine, held while the engine is updated."""
        self._latest: PublishedWeights | None = None
        """The newest weights that were sent to the engines."""
        self._sync: asyncio.Task[float] | None = None

    def register(self, name: str, node: str) -> None:
        """Note that a generator has started on the node `node`."""
        self._locks.setdefault(name, asyncio.Lock())
        self._images.register(name, node)

    async def forget(self, name: str) -> None:
        """Forget a generator whose process has ended for good; returns when its update has ended too."""
        async with self._locks.pop(name):
            pass

    async def publish(self, weights: PublishedWeights) -> None:
        """Wait until the previous weights have arrived, then send `weights` to every engine in the background."""
        await self.published()
        self._latest = weights
        self._sync = asyncio.ensure_future(self._update_all(weights))

    async def published(self) -> float | None:
        """Wait until every engine serves the newest weights.

        Returns the seconds from the start of sending the weights until the last engine served them; None if an earlier
        call has returned these seconds, or no weights were sent yet.
        """
        if self._sync is None:
            return None
        seconds = await asyncio.shield(self._sync)  # a waiting caller may be cancelled; the engines continue
        self._sync = None
        return seconds

    def give_up(self) -> None:
        """Stop sending weights, because the run ends."""
        if self._sync is not None:
            may_be_dropped(self._sync)
            self._sync.cancel()

    async def update(self, name: str) -> BaseException | None:
        """Update one engine; an engine that is down, or fails during the update, is updated after its restart.

        Returns the engine's error, or None. Also returns None if the trainer is lost, because the trainer publishes the
        weights again after its restart.
        """
        if (lock := self._locks.get(name)) is None:
            return None  # the generator has left
        async with lock:
            if self._latest is None or not self._is_up(name):
                return None
            weights = self._latest
            try:
                await self._bring(name, weights)
            except TrainerLost as lost:
                self._source_failed(lost)
            except ACTOR_FAILED as error:
                self._not_taken(name, weights.version, error)
                return error
        return None

    async def _bring(self, name: str, weights: PublishedWeights) -> None:
        within = weights.seconds(self._config.sync_deadline)
        try:
            async with asyncio.timeout(within):
                if self._config.transport == "memory":
                    return await self._pull(name, weights)
                handles = await self._source.ipc_handles(list(self._generators).index(name), weights.version)
                if handles is not None:  # otherwise the rank has newer weights, which are about to be published
                    await self._take(name, weights.version, *handles)
        except TimeoutError:
            raise Starved(f"it has not loaded the new weights within {within:.0f} s") from None

    async def _update_all(self, weights: PublishedWeights) -> float:
        start = time.monotonic()
        up = [name for name in self._generators if self._is_up(name)]
        if self._config.transport == "memory":
            self._images.begin(up, weights)
        await asyncio.gather(*(self.update(name) for name in up))
        return time.monotonic() - start

    async def _pull(self, name: str, weights: PublishedWeights) -> None:
        """Let a generator load these weights. If its node's image has vanished with the holder, try a new image."""
        for tries_left in reversed(range(len(self._generators))):
            if (sources := await self._images.sources_for(name, weights)) is None:
                return  # newer weights are about to be published
            try:
                return await self._take(name, weights.version, sources)
            except WeightsGone as gone:
                if sources is weights.sources:
                    why = f"{name} finds no weights of version {weights.version} ({in_a_line(gone)})"
                    raise TrainerLost(why) from gone
                self._images.forget(name)
                if not tries_left:
                    raise

    async def _take(self, name: str, version: PolicyVersion, data: Any, checksum: int = 0) -> None:
        update = self._generators[name].update_weights
        await call(update, version.pack(), data, checksum, who=name, within=None)
