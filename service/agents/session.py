"""A session: one trajectory of an external agent. A call becomes a step before it is answered.

request -> asked before? -> parent and prompt -> within the limits? -> sample -> the buffer accepts the step -> answer

the body of a call whose reply was lost      the reply of that call, again
the body of a call that is being sampled     the reply of that call, once it is sampled
a prompt beyond `max_input_length`           400 context_length_exceeded
no tokens or calls left for the trajectory   `Step budget exhausted.`, not recorded as a step
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

from service.agents.call_roles import roles_of
from service.agents.conversation_tree import AgentCall, ConversationTree, PreparedCall
from service.agents.dialects.dialect import CallRequest, Refused
from service.errors import in_one_line
from service.handoff.group_bytes import TRANSCRIPT_BYTES
from service.handoff.steps.values import NEEDED, Role, StopReason, is_reward
from service.rollout.agent_loop import step_of
from service.rollout.chat.chat import MessagesRefused
from service.rollout.engine import AgentLimits, Generation, Sampling
from service.rollout.environment import Status, TrajectoryFailed
from service.rollout.exact_json import InexactJson
from service.rollout.plain_values import NotAllowed, plain_info, plain_reward
from service.rollout.step_sinks import StepSink
from service.rollout.user_errors import type_name
from service.types import EvaluationId, Int32s, Step, Steps, TrajectoryId, max_support

log = logging.getLogger(__name__)

MIN_BODY_BYTES, BYTES_PER_TOKEN, MAX_BODY_BYTES = 64 << 10, 16, 16 << 20
"""Maximum bytes of a call's body: a constant, plus bytes for each token that a prompt may have, up to a maximum. Texts
have about 4 bytes per token, escaped texts up to 12. A larger body is refused early, because rendering its messages
takes about a second per MB."""
REASON_CHARACTERS = 1000
"""Maximum characters of the reason for which an agent's run failed."""
MAX_LOGGED, SHOWN = 20, 80
"""Maximum number of different refusals of one session that are logged, and maximum characters of a client's name."""
SHOWN_REFUSALS = 3
TOO_LONG = "context_length_exceeded"
SPENT = "Step budget exhausted."
"""The answer if a session has no tokens or calls left. (After an error of status 429, clients would repeat the
request.)"""

Sample = Callable[[Int32s, Sampling, str], Awaitable[Generation]]
"""A function that samples a response: (ids of the prompt, sampling parameters, id of the request) -> response."""


class Outcome(NamedTuple):
    """The result of an agent's run."""

    reward: float | None = None
    """The reward of the trajectory; None if there is no reward."""
    status: Status = "ok"
    info: Mapping[str, float] = {}
    rewards: Mapping[str, float] = {}
    """Further rewards, by the id of a call or the name of a role."""
    reason: str = ""
    """Why the agent's run failed, or a note on how it ended; empty if there is nothing to say."""
    exit_code: int | None = None
    """Exit code of the agent's process."""

    def plain(self) -> Outcome:
        """The same result in plain Python values. (An agent's code or a request may have given any value.)

        Raises:
            NotAllowed: a value has another type, or is out of range.
        """
        if type(self.status) is not str or self.status not in get_args(Status):
            allowed = ", ".join(get_args(Status))
            raise NotAllowed(StopReason.ENVIRONMENT_ERROR, f"status is one of {allowed}")
        if type(self.reason) is not str or type(self.exit_code) not in (int, type(None)):
            raise NotAllowed(StopReason.ENVIRONMENT_ERROR, "reason is a text, exit_code a whole number or None")
        named = plain_info(self.rewards, "rewards").items()
        rewards = {name: plain_reward(number, f"rewards[{name!r:.80}]") for name, number in named}
        reward = None if self.reward is None else plain_reward(self.reward)
        return Outcome(
            reward, self.status, plain_info(self.info), rewards, self.reason[:REASON_CHARACTERS], self.exit_code
        )


class Session:
    """One trajectory of an agent: its key, its calls, and its result."""

    def __init__(
        self,
        trajectory: TrajectoryId,
        prompt_uid: str,
        tree: ConversationTree,
        limits: AgentLimits,
        max_tokens: int,
        sample: Sample,
        sink: StepSink,
        name: str,
        key: str,
    ) -> None:
        """`limits`: limits of each call; there are at most `limits.max_turns` calls.

        `max_tokens`: maximum tokens of all steps together. Tokens that a step shares with its parent count once.
        """
        self.key = key
        """The key that a client must send. Every client with the key may call the policy."""
        self.name = name
        """The session's name in addresses."""
        self.trajectory = trajectory
        self.tree = tree
        self.base_url = ""
        """The address that clients call."""
        self.began = asyncio.get_running_loop().time()
        """Time at which the session was first opened, in seconds of the event loop's clock. For a restored session it
        is later: the time between its last step elsewhere and its opening here does not count."""
        self.heard = self.began
        """Time of the last request of the agent, on the event loop's clock in seconds."""
        self.moves = False
        """Whether another generator continues the session. Then the agent must not end its work."""
        self.transcript = ""
        """The output of the agent's run, as the program that ran the agent reported it."""
        self.recorded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the buffer accepted the trajectory's end; set when the buffer answers, and cancelled if the buffer
        was not asked."""
        self.calls_again: Callable[[list[TrajectoryId]], Awaitable[bool]] | None = None
        """Called before the first call of a restored session. It tells the buffer that this call may kill the process,
        and returns whether the buffer was told."""
        self.posted: float | None = None
        """The reward that the agent itself posted. It counts if the session is finished without a reward."""
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """The result of the agent's run, or the error that ended the session earlier."""
        self.refusals: Counter[str] = Counter()
        """Number of requests that the endpoint refused, by status, field, reason and client."""
        self.refused = ""
        """Why the newest call was refused. Empty if the call was answered, or if its prompt was too long."""
        self.opening = asyncio.Lock()
        """Held while a prompt is matched with the tree (possibly in a thread): the tree must not grow meanwhile."""
        self._prompt_uid = prompt_uid
        self._limits = limits
        self._max_tokens = max_tokens
        self._sample = sample
        self._sink = sink
        self._tokens = 0
        """Tokens of all steps, plus the maximum that calls in progress may add."""
        self._calls = 0
        """Number of steps and of calls that are being sampled."""
        self._cut = StopReason.STOP
        """Why no call was made for the newest request; `STOP` if a call was made."""
        self._flying: dict[str, asyncio.Task[AgentCall]] = {}
        """Calls that are being sampled, by the request's body."""
        self._in_order = asyncio.Lock()
        """Held from the time a call gets its number until its step is accepted. So the journal's steps have no gaps."""

    @property
    def state(self) -> Literal["open", "finished", "closed"]:
        """`open` until the session ends. Then `finished` if the agent's run has a result, else `closed`."""
        if not self.ended.done():
            return "open"
        return "closed" if self.ended.cancelled() or self.ended.exception() is not None else "finished"

    @property
    def n_steps(self) -> int:
        """Number of the trajectory's steps so far."""
        return len(self.tree.calls)

    @property
    def waits_for(self) -> Literal["calling", "idle"]:
        """What an open session waits for: the policy, or its agent."""
        return "calling" if self._flying else "idle"

    @property
    def stop_reason(self) -> StopReason:
        """The stop reason of the trajectory.

        If no call was made for the newest request, this is the reason: its prompt was too long, or the limits left no
        room. Otherwise the last call counts, in the longest chain of calls with the role `main`. Other roles are
        ignored, because clients test the server with one token, or ask for a title.
        """
        if self._cut != StopReason.STOP:
            return self._cut
        lengths: dict[AgentCall, int] = {}
        for call, role in zip(self.tree.calls, roles_of(self.tree.calls), strict=True):
            if role == Role.MAIN:
                lengths[call] = 1 + (lengths.get(call.parent, 0) if call.parent else 0)
        if not lengths:
            return StopReason.STOP
        last = max(lengths, key=lambda call: (lengths[call], call.index))
        return StopReason.TRUNCATED if last.stop_reason == StopReason.LENGTH else StopReason.STOP

    def rewards_of_calls(self, outcome: Outcome) -> tuple[float, ...]:
        """The final reward of each call; the trajectory's reward goes to the newest call with the role `main`.

        Empty if all rewards are 0.

        Raises:
            NotAllowed: a name is neither a call nor a role with a call, or the sum of a call's rewards is too large.
        """
        roles, given = roles_of(self.tree.calls), [0.0] * len(self.tree.calls)
        for role, reward in ((Role.MAIN, outcome.reward or 0.0), *outcome.rewards.items()):
            named = [call.index for call in self.tree.calls if role.endswith(call.name)]
            places = named or [index for index, of in enumerate(roles) if of == role]
            if places:
                given[places[-1]] += reward
            elif role in outcome.rewards:
                why = f"rewards[{role!r:.80}] is for no call, and for no role that had one"
                raise NotAllowed(StopReason.ENVIRONMENT_REWARD, why)
        if not all(map(is_reward, given)):
            raise NotAllowed(StopReason.ENVIRONMENT_REWARD, f"rewards of one call are together not {NEEDED}")
        return tuple(given) if any(given) else ()

    @property
    def most_body_bytes(self) -> int:
        """Maximum bytes of a call's body. A larger body is refused as a prompt that is too long."""
        return min(MIN_BODY_BYTES + BYTES_PER_TOKEN * self._limits.max_input_length, MAX_BODY_BYTES)

    def too_long(self, what: str) -> Refused:
        """The refusal of a prompt that is too long. If no call follows, the trajectory counts as truncated.

        Clients recognise this error by its text, and shorten the conversation. Claude Code looks for the first words;
        litellm, Harbor and NeMo-Gym look for the words about the model.
        """
        self._cut = StopReason.LENGTH
        length = f"This model's maximum context length is {self._limits.max_input_length} tokens"
        reason = f"prompt is too long: {what}. {length}"
        return Refused(400, "messages", reason, TOO_LONG)

    @property
    def age(self) -> float:
        """Seconds for which the session has been open, since `began`."""
        return asyncio.get_running_loop().time() - self.began

    @property
    def silence(self) -> float:
        """Seconds since the agent's last request; 0 while a call is being sampled."""
        return 0.0 if self._flying else asyncio.get_running_loop().time() - self.heard

    def hear(self) -> None:
        """Note that the agent sent a request."""
        self.heard = asyncio.get_running_loop().time()

    async def until_finished(self, silence: float) -> None:
        """Wait until a program elsewhere has finished the session; see `AgentSession`."""
        self.hear()
        while not self.ended.done():
            if (left := silence - self.silence) <= 0:
                raise TimeoutError(f"no request of session {self.name} came for {silence:g} s")
            await asyncio.wait({self.ended}, timeout=left)
        if self.moves:
            raise asyncio.CancelledError

    def restore(self, steps: Steps) -> None:
        """Restore the calls that an earlier process sampled, from their `steps`, which the buffer accepted. Then the
        session continues.

        Raises:
            ValueError: a step is missing, or is not a call of this session.
        """
        self.began -= self.tree.restore(steps)
        self._calls = len(self.tree.calls)
        self._tokens = sum(len(call.carried_ids) + len(call.response.token_ids) for call in self.tree.calls)

    def begin(
        self, asked: CallRequest, opened: PreparedCall, body: str, is_retry: bool = False, mark: str = ""
    ) -> asyncio.Future[AgentCall]:
        """Begin the call of the policy that answers the request `asked`, with the prompt `opened`. Returns a future of
        the call.

        The call continues even if the client disconnects. A repeated request gets the earlier call if this is being
        sampled, or if `ConversationTree.replayed` finds it. `body` identifies the request; `is_retry`: the client marks
        the request as a retry; `mark`: the gateway's mark of the request.

        Raises:
            Refused: the session has ended, or the prompt is too long.
        """
        self.check_open()
        self.refused = ""
        if (flying := self._flying.get(body)) is not None:
            return flying
        if (known := self.tree.replayed(body, is_retry, opened.tools, mark)) is not None:
            return _done(known)
        sampling = self._sampling_of(asked)
        if len(opened.prompt_ids) > self._limits.max_input_length:
            raise self.too_long(f"{len(opened.prompt_ids)} tokens")
        continued = opened.parent.path() if opened.parent is not None else ()
        for call in (*opened.received, *continued):
            call.delivered = True
        left = self._max_tokens - self._tokens - len(opened.carried_ids) - 1  # reserves one token for an appended end
        if left < 1 or self._calls >= self._limits.max_turns:
            self._cut = StopReason.LENGTH if left < 1 else StopReason.MAX_TURNS
            return _done(self.tree.unsampled(opened, SPENT))
        most = min(left, sampling.max_tokens, asked.max_tokens or left)
        self._tokens += (reserved := len(opened.carried_ids) + most + 1)
        self._calls += 1
        task = asyncio.create_task(self._call(opened, body, replace(sampling, max_tokens=most), reserved))
        self._flying[body] = task
        task.add_done_callback(partial(self._landed, body))
        return task

    def _sampling_of(self, asked: CallRequest) -> Sampling:
        """The sampling parameters of a request. Raises `Refused` if the buffer has no room for the supports that they
        need."""
        own = self._limits.sampling
        sampling, most = replace(own, **asked.truncation), max_support(own)
        if max_support(sampling) > most:
            room = f"at most {most} tokens to draw from: send top_k, or set" if most else "no supports: set"
            raise Refused(400, next(iter(asked.truncation)), f"this run keeps room for {room} generator.top_k")
        return sampling

    def opened(self, asked: CallRequest) -> PreparedCall:
        """Match the prompt of the request `asked` with the calls so far. Returns the call to make, with its prompt.

        Raises:
            Refused: the messages cannot be rendered.
        """
        try:
            if asked.prompt is not None:
                return self.tree.open_ids(asked.prompt)
            before = self.tree.named(asked.continues, asked.tools) if asked.continues else None
            if asked.continues and before is None:
                reason = "this session has no such response; send the whole conversation"
                raise Refused(400, "previous_response_id", reason, "previous_response_not_found")
            opened = self.tree.open(asked.messages, asked.tools, asked.echoed, asked.begun, before)
            return opened if asked.may_call else opened._replace(tools=())
        except MessagesRefused as refused:
            raise Refused(400, "messages", str(refused)) from refused
        except InexactJson as error:
            raise Refused(400, error.field, error.reason) from error
        except RecursionError as error:
            raise Refused(400, "messages", "nested too deep") from error

    def note_refusal(self, refused: Refused, client: str, is_call: bool = True) -> None:
        """Record that the endpoint refused a request of this session. Each different refusal is logged once. `is_call`:
        whether the request called the policy."""
        said = in_one_line(f"{refused.status} {refused} (client {client[:SHOWN]})".replace(self.key, "[key]"))
        if is_call and self.state == "open":  # an agent that has finished may leave a call behind
            self.refused = "" if refused.code == TOO_LONG else said
        if said not in self.refusals:
            if len(self.refusals) == MAX_LOGGED:
                return
            log.warning("%s: a request of session %s is refused: %s", self.trajectory, self.name, said)
        self.refusals[said] += 1

    @property
    def refused_requests(self) -> str:
        """The most frequent refusals, as text for messages; empty if no request was refused."""
        return "\n".join(f"refused {times} times: {said}" for said, times in self.refusals.most_common(SHOWN_REFUSALS))

    def check_open(self) -> None:
        """Raises `Refused` if the session has ended, `ConnectionResetError` if another generator may continue it."""
        if self.moves:
            raise ConnectionResetError("the session moves")
        if self.state != "open":
            raise Refused(409, None, f"the session is {self.state}")

    def finish(
        self,
        reward: float | None,
        status: Status = "ok",
        info: Mapping[str, float] = {},
        transcript: str = "",
        rewards: Mapping[str, float] = {},
        reason: str = "",
        exit_code: int | None = None,
    ) -> None:
        """End the session with the reward of its trajectory; for the arguments see `AgentSession`. A second call with
        the same result changes nothing.

        If a value is not allowed, the session is closed with this error as the reason, and the trajectory is lost.

        Raises:
            Refused: the session was finished with another result, or is closed.
        """
        try:
            if type(transcript) is not str:
                raise NotAllowed(StopReason.ENVIRONMENT_ERROR, f"transcript is a {type_name(transcript)}, and no text")
            self.end(Outcome(reward, status, info, rewards, reason, exit_code).plain(), transcript)
        except NotAllowed as refused:
            self.check_open()
            self.close(TrajectoryFailed(refused.reason, f"session.finish: {refused.detail}"))

    def end(self, outcome: Outcome, transcript: str) -> None:
        """End the session; `transcript` as in `finish`.

        Raises:
            NotAllowed: the rewards are not allowed; the session stays open.
            Refused: the session was finished with another result, or is closed.
        """
        if outcome.reward is None:
            outcome = outcome._replace(reward=self.posted)
        self.rewards_of_calls(outcome)
        self.transcript = transcript or self.transcript
        if self.state == "finished" and self.ended.result() == outcome:
            return
        self.check_open()
        self.ended.set_result(outcome)
        self._abandon_calls()

    def close(self, error: BaseException | None = None) -> None:
        """End the session without a reward, and abandon calls that are being sampled. An error that is no
        `TrajectoryFailed` ends this process; then another generator continues the session."""
        if self.state != "open":
            return
        if error is None:
            self.ended.cancel()
        else:
            if not isinstance(error, TrajectoryFailed):
                self.leave()
            self.ended.set_exception(error)
        self._abandon_calls()

    def leave(self) -> None:
        """Note that another generator continues the session. An evaluation is played again instead."""
        self.moves = not isinstance(self.trajectory, EvaluationId)

    def _abandon_calls(self) -> None:
        for task in self._flying.values():
            task.cancel()

    async def _call(self, opened: PreparedCall, body: str, sampling: Sampling, reserved: int) -> AgentCall:
        """Sample a call, for which `reserved` tokens are reserved. Any failure ends the session."""
        try:
            if self.calls_again is not None and await self.calls_again([self.trajectory]):
                self.calls_again = None
            request_id = f"{self.trajectory}/{body}"
            generation = await self._sample(opened.prompt_ids, sampling, request_id)
            async with self._in_order:
                async with self.opening:
                    call = self.tree.add(opened, generation, body)
                self._tokens += len(call.carried_ids) + len(call.response.token_ids) - reserved
                self._cut = StopReason.STOP
                self._sink.append(self._step(call, generation))
                if not await self._sink.accepted(self.trajectory):
                    raise TrajectoryFailed(StopReason.ABORT, "the buffer accepts no more steps of it")
        except TrajectoryFailed as failed:
            self.close(failed)
            raise Refused(502, None, f"the session is closed: {failed.reason}") from failed
        except Exception as error:  # the engine died, or this is a bug: the player of the trajectory raises it
            self.close(error)
            raise
        return call

    def _step(self, call: AgentCall, generation: Generation) -> Step:
        """Make the step of a call. It may extend an earlier step."""
        response, extends = call.response, self.tree.reference(call)
        n_shared = extends.length if extends is not None else 0
        own_ids = call.carried_ids if call.parent is not None else call.carried_ids[n_shared:]
        return step_of(
            own_ids,
            response,
            generation,
            extends,
            trajectory=self.trajectory,
            prompt_uid=self._prompt_uid,
            index=call.index,
            temperature=self._limits.sampling.temperature,
            note=call.note(round(self.age, 3)),
        )

    def _landed(self, body: str, task: asyncio.Task[AgentCall]) -> None:
        del self._flying[body]
        self.hear()  # from now on its agent is silent
        if not task.cancelled():
            task.exception()  # read the result here too, because the client may have left


def kept_transcript(text: str) -> bytes:
    """Up to `TRANSCRIPT_BYTES` of a text in UTF-8; the middle of a longer text is left out."""
    data = text.encode(errors="replace")
    if len(data) <= TRANSCRIPT_BYTES:
        return data
    mark = f"\n[{len(data) - TRANSCRIPT_BYTES} bytes and more left out]\n".encode()
    kept = TRANSCRIPT_BYTES - len(mark)
    parts = data[: kept // 4], mark, data[kept // 4 - kept :]
    return b"".join(part.decode(errors="ignore").encode() for part in parts)  # drops an incomplete character


def _done(call: AgentCall) -> asyncio.Future[AgentCall]:
    done: asyncio.Future[AgentCall] = asyncio.get_running_loop().create_future()
    done.set_result(call)
    return done
