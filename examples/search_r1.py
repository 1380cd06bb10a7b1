"""Search-R1: search a corpus, read passages, answer.

    user: on which river is marn ?
    assistant: <search> marn </search>
    user: <information> 1 : marn is a town on the river sasa . ... </information>
    assistant: <answer> sasa </answer>                                                 done

The reward is 1 where the answer, without case, articles and punctuation, is one of those in the row's
`reward_spec.ground_truth` (a text, a list, or SkyRL's `{"target": ...}`). Passages come from the retrieval server at
`url`; without one, from `corpus` (JSONL, by words) in this process.

With `calls: tools` the policy searches by tool calls instead (`{"name": "search", "arguments": {"query": ...}}`), and a
response without a call ends the episode; the row's `tools` column describes the tool to the chat template.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from examples.data import CORPUS
from service.rollout.chat.tools import answer, tool_calls
from service.rollout.environment import Message, StepResult, Task
from service.rollout.retrieval.client import RetrievalClient
from service.rollout.retrieval.retriever import Retriever, WordEncoder, load_corpus

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
TOPK = 3
PUNCTUATION = str.maketrans("", "", string.punctuation)


class SearchR1:
    """One question."""

    def __init__(
        self,
        url: str = "",
        corpus: str = str(CORPUS),
        topk: int = TOPK,
        seconds: float = 30.0,
        calls: Literal["tags", "tools"] = "tags",
    ) -> None:
        if calls not in ("tags", "tools"):
            raise TypeError(f"calls is tags or tools, not {calls!r}")
        self._calls = calls
        self._url = url
        self._corpus = Path(corpus)
        self._topk = topk
        self._seconds = seconds
        self._client: RetrievalClient | None = None
        self._truths: frozenset[str] = frozenset()

    def check_task(self, task: Task) -> None:
        """Raises where the row has no answer as its `ground_truth`."""
        if not truths(task.reward_spec["ground_truth"]):
            raise ValueError("ground_truth has no answer")

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        self._truths = frozenset(map(normal, truths(task.reward_spec["ground_truth"])))
        if self._url:
            self._client = RetrievalClient(self._url, self._seconds)
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Search, or score an answer."""
        called = tool_calls(text) if self._calls == "tools" else []
        if called:
            return await answer(called, {"search": self._search})
        answers = ANSWER.findall(text)
        if answers:
            right = float(normal(answers[-1]) in self._truths)
            return StepResult((), right, True, {"right": right})
        if self._calls == "tools":
            return StepResult((), 0.0, True, {"right": 0.0})
        searches = SEARCH.findall(text)
        passages = await self._search(searches[-1].strip()) if searches else "give <search> or <answer>"
        observation = Message(role="user", content=f"<information> {passages} </information>")
        return StepResult([observation], 0.0, False, {"searches": 1.0 if searches else 0.0})

    async def close(self) -> None:
        """Close the connection to the server."""
        if self._client is not None:
            await self._client.close()

    async def _search(self, query: str) -> str:
        return numbered(await self._retrieve(str(query)))

    async def _retrieve(self, query: str) -> Sequence[str]:
        if self._client is not None:
            return await self._client.retrieve(query, self._topk)
        (hits,) = by_words(self._corpus).search([query], self._topk)
        return [hit.passage.contents for hit in hits]


def truths(ground_truth: Any) -> list[str]:
    """Every answer that is right."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth["target"]
    return [str(truth) for truth in ([ground_truth] if isinstance(ground_truth, str) else ground_truth)]


def normal(answer: str) -> str:
    """An answer without case, punctuation, articles and spare spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def numbered(passages: Sequence[str]) -> str:
    """Passages as an observation shows them."""
    return "\n".join(f"{i} : {passage}" for i, passage in enumerate(passages, start=1)) or "nothing"


@lru_cache(maxsize=4)
def by_words(corpus: Path) -> Retriever:
    """The corpus with an index of its words; read once."""
    passages = load_corpus(corpus)
    return Retriever.of(passages, WordEncoder([passage.contents for passage in passages]))
