"""Sends steps and trajectory ends to the buffer in numbered messages. A message is sent again until it is acknowledged.

append, append, end: three items of message 7, which waits briefly for more items unless `hurry` is called

submit(message 7) -> Receipt      acknowledged: the message is forgotten
                  -> no answer    the same bytes are sent again, until the deadline
                  -> Refusal      each trajectory of the message is sent again in a separate message
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from service.backoff import Backoff, retried
from service.errors import RunFailed, Starved
from service.handoff.steps.wire import MAX_HEADER_BYTES, encode
from service.handoff.verbs import Receipt
from service.rollout.step_sinks import StepColumns
from service.types import Refusal, RefusalReason, Sender, Step, StepGroup, Steps, TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)

HOLD_SECONDS = 0.25
"""Maximum seconds for which a message waits for further items. Each message has a fixed cost, larger than the cost of a
step. Waiting costs little, because the buffer cannot use a part of a group."""
WINDOW = 4
"""Maximum number of messages in flight."""
MESSAGE_BYTES = 4 << 20
"""A message takes no further item once its token columns have this many bytes."""
NAME_BYTES = MAX_HEADER_BYTES // 2
"""A message also takes no further item once the uids and stop reasons of its items have this many bytes. (One item has
far fewer.)"""
ANSWER_SECONDS = 10.0
"""Seconds after which an unanswered message is sent again, because a frozen buffer process raises no error."""
RETRY = Backoff(0.05, 1.0)
"""Pauses, in seconds, before a message is sent again."""


class Unreachable(Exception):
    """Raised if the buffer did not answer. It may still have accepted the message."""


@dataclass(slots=True, eq=False)
class _Message:
    columns: StepColumns = field(default_factory=StepColumns)
    hurried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the message is sent without waiting for further items."""
    complete: int = 0
    """Number of groups that the message completes."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    refused: set[TrajectoryId] = field(default_factory=set)
    late: set[TrajectoryId] = field(default_factory=set)
    """Trajectories that the buffer's answer excludes from further play."""


@dataclass(eq=False)
class Outbox:
    """Delivers every step and trajectory end of a generator's incarnation to the buffer at least once. The messages
    have sequence numbers without gaps."""

    generator: str
    incarnation: int
    submit: Callable[[bytes], Awaitable[Receipt | Refusal]]
    deadline: float
    """Seconds without an answer of the buffer after which the run fails."""
    on_refused: Callable[[TrajectoryId], None]
    """Called with each trajectory that needs no more work, because the buffer accepts no more of its steps."""
    on_sent: Callable[[Steps], None] = lambda steps: None
    """Called with the steps of each message when it is sent for the first time."""

    def __post_init__(self) -> None:
        self._sender = Sender(self.generator, self.incarnation, 0)
        self._messages: asyncio.Queue[_Message] = asyncio.Queue()
        """Messages that are not sent yet; a message is marked done once it is answered."""
        self._open: _Message | None = None
        """The last message, which takes further items until it is sent."""
        self._window = asyncio.Semaphore(WINDOW)
        self._wanted = 1
        """The number of complete groups for which the trainer may wait. A message that completes this many groups is
        sent at once."""
        self.refusals: Counter[str] = Counter()
        self.last_refusals: dict[str, str] = {}
        """The most recent refusal for each reason."""

    def append(self, step: Step) -> None:
        """Queue a finished step."""
        experts = step.routed_experts
        self._message(None if experts is None else experts.shape[1:]).columns.append(step)

    def end(self, end: TrajectoryEnd) -> None:
        """Queue a trajectory's end."""
        self._message(None).columns.end(end)

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Wait for the buffer's answer to the last queued step, which must belong to this trajectory. Returns True if
        the buffer accepted the step."""
        if (message := self._open) is None:
            raise RuntimeError("nothing is queued")
        self.hurry()
        await message.answered.wait()
        return trajectory not in message.refused | message.late

    def group_complete(self, last: bool) -> None:
        """Record that the queued items complete a group. `last`: no other group is being played, so no further item
        will come soon; then the message is sent at once."""
        if self._open is not None:
            self._open.complete += 1
            if last or self._open.complete >= self._wanted:
                self.hurry()

    def hurry(self) -> None:
        """Send all queued items without waiting for further ones."""
        if self._open is not None:
            self._open.hurried.set()

    def _message(self, routing: tuple[int, ...] | None) -> _Message:
        """Return the open message for the next item. All routed experts of a message have the shape `routing`."""
        last = self._open
        if (
            last is None
            or last.columns.n_bytes >= MESSAGE_BYTES
            or last.columns.name_bytes >= NAME_BYTES
            or (routing is not None and last.columns.routing not in (None, routing))
        ):
            self.hurry()
            last = self._open = _Message()
            self._messages.put_nowait(last)
        return last

    async def flush(self) -> None:
        """Return when the buffer has answered all queued items."""
        self.hurry()
        await self._messages.join()

    async def run(self) -> None:
        """Send the queued messages until cancelled.

        Raises:
            Starved: the buffer did not answer within the deadline.
            RunFailed: another incarnation took this generator's place.
        """
        async with asyncio.TaskGroup() as deliveries:
            while True:
                message = await self._messages.get()
                with suppress(TimeoutError):
                    async with asyncio.timeout(HOLD_SECONDS):
                        await message.hurried.wait()
                await self._window.acquire()
                if message is self._open:
                    self._open = None
                deliveries.create_task(self._deliver(message))

    async def _deliver(self, message: _Message) -> None:
        try:
            group = message.columns.step_group(self._sender)
            self.on_sent(group.steps)
            if await self._send(group, message) is not None:
                await self._send_apart(message)
            message.answered.set()
        finally:
            self._window.release()
            self._messages.task_done()

    async def _send_apart(self, message: _Message) -> None:
        """Send a refused message again in parts, one for each trajectory: only the refused trajectories are lost."""
        trajectories = message.columns.by_trajectory()
        for trajectory, part in trajectories.items():
            if len(trajectories) == 1 or await self._send(part.step_group(self._sender), message) is not None:
                message.refused.add(trajectory)
                self.on_refused(trajectory)

    async def _send(self, group: StepGroup, message: _Message) -> Refusal | None:
        """Send a message with the next sequence number, again and again until it is answered."""
        self._sender = self._sender._replace(sequence=self._sender.sequence + 1)
        answer = await self._answered(encode(StepGroup(self._sender, group.steps, group.ends)))
        if isinstance(answer, Refusal):
            self.refusals[answer.reason] += 1
            self.last_refusals[f"refused_{answer.reason}"] = f"the buffer refused its message: {answer}"
            log.warning("the buffer refused a message of %d items: %s", len(group.steps) + len(group.ends), answer)
            if answer.reason == RefusalReason.FENCED:
                raise RunFailed(f"{self.generator} was replaced by a newer incarnation: {answer}")
            return answer
        message.late.update(answer.late)
        self._wanted = answer.wanted
        if self._open is not None and self._open.complete >= self._wanted:
            self.hurry()
        for trajectory in answer.late:
            self.on_refused(trajectory)
        return None

    async def _answered(self, data: bytes) -> Receipt | Refusal:
        """Send the same bytes until the buffer answers. The buffer accepts each step once, even if it arrives several
        times."""

        async def send() -> Receipt | Refusal:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self.submit(data)

        lost = (TimeoutError, Unreachable)
        try:
            return await retried(send, lost, RETRY, within=self.deadline)
        except lost as error:
            raise Starved(f"{self.generator} got no answer from the buffer for {self.deadline:.0f} s") from error
