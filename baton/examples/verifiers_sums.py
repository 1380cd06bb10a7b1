"""A small taskset of the library verifiers, with its harness: each task is a sum, which the policy answers twice, the
second time after `sure ?`.

Runs in an environment with verifiers 0.4, without Baton: `verifiers_agent.py` in this folder plays the taskset. The
harness runs in the process of the rollout, so it needs neither `uv` nor a container.
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["SumHarness", "SumTaskset"]


class SumData(vf.TaskData):
    """A sum and its value."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Rewards a right last answer, and to a lesser degree a right first answer."""

    @vf.reward
    async def last(self, trace: vf.Trace) -> float:
        """1 if the last answer is right, otherwise 0."""
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def first(self, trace: vf.Trace) -> float:
        """1 if the first answer is right, otherwise 0."""
        return float(trace.assistant_messages[0].content == self.data.answer)


class SumTaskset(vf.Taskset[SumTask]):
    """All sums of two digits."""

    def load(self) -> Iterator[SumTask]:
        """All tasks, one after the other."""
        for a in range(10):
            for b in range(10):
                yield SumTask(SumData(prompt=f"{a} + {b} ?", answer=str(a + b)), self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    """A harness that asks the question, then asks again."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """Make the two calls of one conversation."""
        messages = []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for said in (data.prompt, "sure ?"):
                messages.append({"role": "user", "content": said})
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))  # includes thinking
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
