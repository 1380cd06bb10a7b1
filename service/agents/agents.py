"""Plays trajectories of agents: each trajectory has a session at the endpoint of this process.

agent.play(session, task, seed) --HTTP--> endpoint --> engine, steps --> session.finish(reward) --> the trajectory's end
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from socket import gaierror
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from service.agents.call_roles import roles_of
from service.agents.conversation_tree import ConversationTree
from service.agents.messages_and_replies import JsonCalls, ReplyParser
from service.agents.server import Endpoint
from service.agents.session import Outcome, Session, kept_transcript
from service.agents.sessions import EVALUATION, Sessions, session_key
from service.config.rollout import AgentsConfig
from service.errors import UserError, in_one_line, last_lines
from service.handoff.steps.info import packed_info
from service.handoff.steps.values import ROLES, StopReason, packed_roles
from service.observe.metrics import Metrics
from service.rollout.agent_loop import TrajectoryResult, generate_turn
from service.rollout.chat.chat import Chat
from service.rollout.engine import AgentLimits, Engine, Generation, Sampling
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Task, TrajectoryFailed
from service.rollout.run_secret import RunSecret, new_secret
from service.rollout.step_sinks import StepSink
from service.types import EvaluationId, Int32s, Steps, TrajectoryEnd, TrajectoryId

log = logging.getLogger(__name__)


class GatewayRoute(NamedTuple):
    """How requests of agents reach a generator through the run's gateway."""

    url: str
    """The gateway's address; empty: agents cannot reach the gateway, so they call the generator itself."""
    listen_host: str
    """The address at which the generator listens for the gateway."""


class Agents:
    """The sessions of one engine, and their endpoint. The endpoint starts to listen with the first trajectory."""

    def __init__(
        self,
        config: AgentsConfig,
        chat: Chat,
        engine: Engine,
        limits: AgentLimits,
        secret: RunSecret | None = None,
        number: int = 0,
        make_parser: Callable[[], ReplyParser] = JsonCalls,
        route: GatewayRoute | None = None,
    ) -> None:
        """`secret`: the run's secret; None: keys are valid only in this process. `number`: the generator's number, from
        0. `make_parser`: see `load`. `route`: the way through the run's gateway; None: agents call this process."""
        self._config = config
        self._route = route
        self._secret = secret or new_secret()
        self._make_parser = make_parser
        self._chat = chat
        self._engine = engine
        self.limits = replace(limits, max_turns=config.max_calls, step_deadline=config.deadline)
        """Limits of an agent's trajectory; `step_deadline` bounds the agent's whole run."""
        self.parser: ReplyParser = JsonCalls()
        """The parser of the policy's responses. A new parser applies to sessions that begin later."""
        noted = self._secret.run
        self.sessions = Sessions(None if noted is None else noted / f"ended_sessions_{number}")
        played = [name for name, role in limits.roles.items() if role is not None and role.mode != "frozen"]
        self.endpoint = Endpoint(self.sessions, limits.max_length, config.structured, played)
        self._restored: dict[str, Session] = {}
        """By the trajectory's name: sessions of an earlier process that no call of `play` has continued yet."""
        self._roles: Counter[str] = Counter()
        """Number of steps of trajectories that ended, by role."""
        self._roots: list[int] = []
        """Number of conversations of each trajectory that ended since the last measurement."""
        self._starting = asyncio.Lock()
        self.address = ""
        """The address of this process's endpoint; empty before `listen`."""
        self.calls_again: Callable[[list[TrajectoryId]], Awaitable[bool]] | None = None
        """`Session.calls_again` of restored sessions."""
        self.trained = config.train
        """The roles that are trained; tokens of calls in other roles carry no loss."""

    def load(self) -> None:
        """Make the parser of the responses."""
        self.parser = self._make_parser()

    def abandon(self) -> None:
        """Stop answering requests, because another generator continues the open sessions."""
        self.endpoint.is_abandoned = True
        for session in self.sessions.open():
            session.leave()

    def open_trajectories(self) -> list[TrajectoryId]:
        """The trajectories whose sessions are open."""
        return [session.trajectory for session in self.sessions.open()]

    def restore(self, trajectory: TrajectoryId, task: Task, steps: Steps, sink: StepSink) -> bool:
        """Open a session again that another process served, from its `steps`; `play` then continues the session.

        Returns False if the trajectory cannot be continued: a step is missing, or is not a call of this session.
        """
        session = self.session(trajectory, task, sink)
        try:
            session.restore(steps)
        except ValueError as error:
            log.warning("%s cannot be continued: %s", trajectory, in_one_line(str(error)))
            self.sessions.remove(session)
            return False
        session.calls_again = self.calls_again
        self._restored[str(trajectory)] = session
        return True

    async def play(
        self, trajectory: TrajectoryId, task: Task, guard: EnvGuard, seed: int, sink: StepSink
    ) -> TrajectoryResult:
        """Play one trajectory. Send a step for each call to `sink`, then the trajectory's end.

        `guard`: calls the agent's `play`, or `resume` for a restored session, within time limits. Returns once the
        buffer has answered about the trajectory's end.
        """
        await self.listen()
        restored = self._restored.pop(str(trajectory), None)
        session = restored or self.session(trajectory, task, sink)
        url = self._route.url if self._route is not None else ""
        session.base_url = f"{url or self.address}/s/{session.name}/v1"
        try:
            run = guard.play(session, task, seed, resumes=restored is not None, spent=session.age)
            return await self._played(session, task, guard, run, sink)
        finally:
            self.sessions.remove(session)

    async def _played(
        self, session: Session, task: Task, guard: EnvGuard, run: Coroutine[Any, Any, None], sink: StepSink
    ) -> TrajectoryResult:
        trajectory = session.trajectory
        failure, outcome = "", Outcome(0.0)
        playing = asyncio.create_task(run)
        try:
            outcome = await _outcome(session, playing)
            stop_reason = session.stop_reason
        except TrajectoryFailed as failed:
            why = f"{failed}{last_lines(session.refused_requests)}".replace(session.key, "[key]")
            reward = self._config.exit_code_reward.get(failed.error)
            if reward is None or session.refused:  # a refusal says nothing about the policy
                stop_reason, failure = failed.reason, why
                log.warning("%s of prompt %s is lost: %s", trajectory, in_one_line(task.uid), why)
            else:
                outcome, stop_reason = Outcome(reward), session.stop_reason
                log.info("%s has the reward %g by agents.exit_code_reward: %s", trajectory, reward, why)
        finally:
            session.close()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            await guard.close(trajectory)
        roles = [] if failure else roles_of(session.tree.calls)
        transcript = "\n\n".join(filter(None, (failure.partition("\n")[0], session.transcript)))
        end = TrajectoryEnd(
            trajectory,
            task.uid,
            session.n_steps,
            str(stop_reason),
            outcome.reward or 0.0,
            packed_roles(roles, [role for role in self.limits.roles if role not in ROLES]),
            kept_transcript(transcript.replace(session.key, "[key]")),
            () if failure else session.rewards_of_calls(outcome),
            "" if failure else packed_info(guard.name, outcome.info),
        )
        if roles:
            self._roles.update(roles)
            self._roots.append(sum(call.parent is None for call in session.tree.calls))
        sink.end(end)
        is_accepted = await sink.accepted(trajectory)
        session.recorded.set_result(is_accepted)
        return TrajectoryResult(end, failure)

    def measure(self, metrics: Metrics) -> None:
        """Record the endpoint's counts as metrics."""
        endpoint = self.endpoint
        for (dialect, how), calls in endpoint.calls.answered.items():
            metrics.count_to("baton_agent_calls_total", calls, dialect=dialect, how=how)
        for status, requests in endpoint.requests.refused.items():
            metrics.count_to("baton_agent_refused_total", requests, status=status)
        metrics.count_to("baton_agent_undelivered_total", endpoint.requests.undelivered)
        for role, steps in self._roles.items():
            metrics.count_to("baton_agent_steps_total", steps, step_role=role)
        for roots in self._roots:
            metrics.observe("baton_agent_roots_per_trajectory", roots)
        self._roots.clear()
        metrics.set_all("baton_agent_sessions", "state", self.sessions.by_state())
        metrics.set_all("baton_agent_oldest_session_seconds", "state", self.sessions.oldest())

    async def close(self) -> None:
        """Close the endpoint."""
        await self.endpoint.stop()

    async def listen(self) -> None:
        """Start the endpoint, so that clients can call.

        Raises:
            UserError: the address is taken, or is not an address of this machine.
        """
        async with self._starting:
            if self.address:
                return
            own = (self._config.host, self._config.port) if self._route is None else (self._route.listen_host, 0)
            with named_errors(self._config):
                self.address = await self.endpoint.start(*own)
            log.info("the policy is served at %s", self.address)
            warn_if_open(self.address)

    def session(self, trajectory: TrajectoryId, task: Task, sink: StepSink) -> Session:
        """Open the session of a trajectory, whose steps go to `sink`."""
        limits = self.limits.of_trajectory(trajectory, task.temperature)

        async def sample(prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
            of_call = replace(limits, sampling=sampling)
            return await generate_turn(self._engine, prompt_ids, of_call, self._chat.vocab_size, request_id)

        tree = ConversationTree(self._chat, self.parser)
        name = "-".join(map(str, trajectory))
        if isinstance(trajectory, EvaluationId):  # may be played again, so each time the name is new
            name = f"{EVALUATION}{secrets.token_hex(8)}"
        key, max_tokens = session_key(self._secret, name), self._config.max_tokens
        session = Session(trajectory, task.uid, tree, limits, max_tokens, sample, sink, name, key)
        self.sessions.add(session)
        return session


@contextmanager
def named_errors(config: AgentsConfig) -> Iterator[None]:
    """Within the block, an error of listening at the address becomes a `UserError` with the setting to change."""
    try:
        yield
    except (OSError, UnicodeError, OverflowError) as error:  # host too long, or port out of range
        setting = "agents.host" if isinstance(error, gaierror | UnicodeError) else "agents.port"
        where = f"{config.host}, port {config.port}"
        raise UserError(f"{setting}: the endpoint cannot listen on {where}: {error}") from error


def is_loopback(url: str) -> bool:
    """Whether only processes of this machine reach a URL. The URL's host is an IP address."""
    return ip_address(urlsplit(url).hostname or "").is_loopback


def warn_if_open(url: str) -> None:
    """Log a warning if a URL can be reached over the network."""
    if not is_loopback(url):
        log.warning("agents.host: %s is no loopback address: keys and texts cross the network unencrypted", url)


async def _outcome(session: Session, playing: asyncio.Task[None]) -> Outcome:
    """The result with which the agent finished its session.

    Raises:
        TrajectoryFailed: the agent failed or gave no reward, or the engine or the buffer ended the trajectory.
    """
    both: set[asyncio.Future[Any]] = {playing, session.ended}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not session.ended.done():
        playing.result()
        raise TrajectoryFailed(StopReason.ENVIRONMENT_REWARD, "the agent returned and finished no session")
    outcome = session.ended.result()
    await asyncio.wait({playing})  # the agent may still have to clean up; its deadline applies
    if outcome.reward is None:
        detail = ": ".join(filter(None, (f"the agent ended without a reward, as {outcome.status!r}", outcome.reason)))
        error = "" if outcome.exit_code is None else str(outcome.exit_code)
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, detail, session.transcript, error)
    if session.refused:  # many agents treat an error as an answer
        detail = f"the agent ended after its newest request was refused: {session.refused}"
        raise TrajectoryFailed(StopReason.ENVIRONMENT_ERROR, detail, session.transcript)
    return outcome
