"""Steps and trajectory ends on their way to the buffer: batched, numbered, and resent until acknowledged.

put, put, put --linger--> message 7 --submit--> Receipt                    (acknowledged: forgotten)
                                                no answer                  (the same bytes again, until the deadline)
                                                Refusal of several         (each trajectory again, on its own)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from service.errors import RunFailed, Starved
from service.handoff.steps.tables import step_group
from service.handoff.steps.wire import MAX_HEADER_BYTES, encode
from service.handoff.verbs import Receipt
from service.types import Refusal, RefusalReason, Sender, Step, TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)

Item = Step | TrajectoryEnd
Shape = tuple[int, ...]

LINGER_SECONDS = 0.01
"""How long a message waits for company: turns end in bursts, and a message costs more than a step."""
WINDOW = 4
"""Messages that may be on their way at once."""
MESSAGE_BYTES = 4 << 20
"""A message is closed once it holds as many bytes."""
NAME_BYTES = MAX_HEADER_BYTES // 2
"""It is also closed once its uids and stop reasons, if all were different, take as many; one item takes far less."""
TOKEN_BYTES = 4 + 4 + 1 + 8
"""A token's id, log-probability, mask and version."""
ANSWER_SECONDS = 10.0
"""Seconds after which an unanswered message is sent again; a stopped process gives no error."""
RETRY_SECONDS = (0.05, 1.0)
"""First and longest pause before a message is sent again."""


class Unreachable(Exception):
    """The buffer did not answer; it may still have accepted the message."""


class Outbox:
    """Sends what a generator's incarnation produced, at least once and without gaps.

    `on_closed` hears of each group_id, `on_refused` of each trajectory, that needs no more work.
    """

    def __init__(
        self,
        generator: str,
        incarnation: int,
        submit: Callable[[bytes], Awaitable[Receipt | Refusal]],
        deadline: float,
        on_closed: Callable[[int], None],
        on_refused: Callable[[TrajectoryId], None],
    ) -> None:
        self._on_closed = on_closed
        self._on_refused = on_refused
        self._sender = Sender(generator, incarnation, 0)
        self._submit = submit
        self._deadline = deadline
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._window = asyncio.Semaphore(WINDOW)
        self._delivering = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def put(self, item: Item) -> None:
        """Queue a finished step or a trajectory's end."""
        self._items.append(item)
        self._filled.set()
        self._quiet.clear()

    async def flush(self) -> None:
        """Return when the buffer has answered everything that was queued."""
        await self._quiet.wait()

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            Starved: the buffer did not answer within the deadline.
            RunFailed: another incarnation took this generator's place.
        """
        async with asyncio.TaskGroup() as deliveries:
            while True:
                await self._filled.wait()
                await asyncio.sleep(LINGER_SECONDS)
                await self._window.acquire()
                deliveries.create_task(self._deliver(self._next_message()))

    def _next_message(self) -> list[Item]:
        """The longest run of queued items that fits into a message, in which all routed experts have one shape."""
        size = names = count = 0
        shape: Shape | None = None
        while count < len(self._items) and size < MESSAGE_BYTES and names < NAME_BYTES:
            item = self._items[count]
            if (of := _experts_shape(item)) is not None and shape not in (None, of):
                break
            shape = shape or of
            size += _bytes(item)
            names += _name_bytes(item)
            count += 1
        message, self._items = self._items[:count], self._items[count:]
        if not self._items:
            self._filled.clear()
        self._delivering += 1
        return message

    async def _deliver(self, items: Sequence[Item]) -> None:
        try:
            refusal = await self._send(items)
            trajectories = _by_trajectory(items)
            if refusal is not None and len(trajectories) > 1:
                # One bad trajectory must not take the others of its message with it.
                for part in trajectories:
                    await self._send(part)
        finally:
            self._window.release()
            self._delivering -= 1
            if not self._delivering and not self._items:
                self._quiet.set()

    async def _send(self, items: Sequence[Item]) -> Refusal | None:
        self._sender = self._sender._replace(sequence=self._sender.sequence + 1)
        steps = [item for item in items if isinstance(item, Step)]
        ends = [item for item in items if isinstance(item, TrajectoryEnd)]
        data = encode(step_group(self._sender, steps, ends))
        answer = await self._answered(data)
        self.counts["messages"] += 1
        self.counts["bytes"] += len(data)
        if isinstance(answer, Refusal):
            return self._refused(answer, items)
        self.counts["steps"] += len(steps)
        self.counts["ends"] += len(ends)
        for group_id in answer.superseded:
            self._on_closed(group_id)
        return None

    def _refused(self, refusal: Refusal, items: Sequence[Item]) -> Refusal:
        self.refusals[refusal.reason] += 1
        log.warning("the buffer refused a message of %d items: %s", len(items), refusal)
        if refusal.reason == RefusalReason.FENCED:
            raise RunFailed(f"{self._sender.generator} was replaced by a newer incarnation: {refusal}")
        trajectories = {item.trajectory for item in items}
        if len(trajectories) == 1:
            self._on_refused(trajectories.pop())
        return refusal

    async def _answered(self, data: bytes) -> Receipt | Refusal:
        """Send the same bytes until there is an answer; the buffer accepts a step once, however often it comes."""
        start = time.monotonic()
        pause, longest = RETRY_SECONDS
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._submit(data)
            except (TimeoutError, Unreachable) as error:
                waited = time.monotonic() - start
                if waited > self._deadline:
                    raise Starved(
                        f"{self._sender.generator} got no answer from the buffer for {waited:.0f} s"
                    ) from error
                self.counts["resent"] += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)


def _bytes(item: Item) -> int:
    if not isinstance(item, Step):
        return 0
    experts = item.routed_experts.nbytes if item.routed_experts is not None else 0
    return TOKEN_BYTES * (len(item.prompt_ids) + len(item.response_ids)) + experts


def _experts_shape(item: Item) -> Shape | None:
    return item.routed_experts.shape[1:] if isinstance(item, Step) and item.routed_experts is not None else None


def _name_bytes(item: Item) -> int:
    """Bytes of its names in a message's header, with a length before each, at most."""
    return len(item.prompt_uid.encode()) + len(item.stop_reason.encode()) + 2 * 5


def _by_trajectory(items: Iterable[Item]) -> list[list[Item]]:
    parts: dict[TrajectoryId, list[Item]] = {}
    for item in items:
        parts.setdefault(item.trajectory, []).append(item)
    return list(parts.values())
