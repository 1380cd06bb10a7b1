"""Search-R1: search a corpus, read passages, answer.

    user: on which river is marn ?
    assistant: <search> marn </search>
    user: <information> 1 : marn is a town on the river sasa . ... </information>
    assistant: <answer> sasa </answer>                                                 done

The reward is 1 if the answer, without case, articles and punctuation, is one of the answers in the row's
`reward_spec.ground_truth` (a text, a list, or SkyRL's `{"target": ...}`). Passages come from the retrieval server at
`url`, such as `baton.examples.search_server`; without a `url`, from `corpus` (JSONL) in this process, by BM25 (the
extra `search`).

With `calls: tools` the policy searches by tool calls instead (`{"name": "search", "arguments": {"query": ...}}`). A
response without a call ends the episode. The row's `tools` column describes the tool to the chat template.

The synthetic rows are questions over the corpus in `baton.examples.data`, in words of a small vocabulary.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from baton import Message, StepResult, Task, tagged, tool_answer, tool_calls
from baton.examples import data
from baton.examples.retrieval_client import RetrievalClient
from baton.examples.search_server import Corpus

ARTICLES = re.compile(r"\b(a|an|the)\b")
TOPK = 3
SEARCHES = ThreadPoolExecutor(1, thread_name_prefix="search")
"""The thread that runs searches in this process. In the event loop, the first search would block all episodes, because
it reads the whole corpus."""
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass
class SearchR1:
    """The environment: an object plays one episode, with one question."""

    url: str = ""
    corpus: str = str(data.CORPUS)
    topk: int = TOPK
    seconds: float = 30.0
    calls: Literal["tags", "tools"] = "tags"

    def __post_init__(self) -> None:
        if self.calls not in ("tags", "tools"):
            raise TypeError(f"calls is tags or tools, not {self.calls!r}")
        self._corpus = Path(self.corpus).absolute()  # another environment may change the current folder
        self._client: RetrievalClient | None = None

    def check_task(self, task: Task) -> None:
        """Raises if the row has no answer as its `ground_truth`, or the corpus cannot be read."""
        if not self.url:
            _corpus(self._corpus)
        if not truths(task.reward_spec["ground_truth"]):
            raise ValueError("ground_truth has no answer")

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        self._truths = frozenset(map(normal, truths(task.reward_spec["ground_truth"])))
        if self.url:
            self._client = RetrievalClient(self.url, self.seconds)
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Search, or score an answer."""
        called = tool_calls(text) if self.calls == "tools" else []
        if called:
            return await tool_answer(called, {"search": self._search})
        answers = tagged(text, "answer")
        if answers:
            right = float(normal(answers[-1][1]) in self._truths)
            return StepResult((), right, True, {"right": right})
        if self.calls == "tools":
            return StepResult((), 0.0, True, {"right": 0.0})
        searches = tagged(text, "search")
        passages = await self._search(searches[-1][1].strip()) if searches else "give <search> or <answer>"
        observation = Message(role="user", content=f"<information> {passages} </information>")
        return StepResult([observation], 0.0, False, {"searches": 1.0 if searches else 0.0})

    async def close(self) -> None:
        """Close the connection to the server."""
        if self._client is not None:
            await self._client.close()

    async def _search(self, query: str) -> str:
        query = str(query)  # a tool call may contain a number
        if self._client is not None:
            return numbered(await self._client.retrieve(query, self.topk))
        searching = partial(passages_of, self._corpus, query, self.topk)
        return numbered(await asyncio.get_running_loop().run_in_executor(SEARCHES, searching))


def truths(ground_truth: Any) -> list[str]:
    """All right answers in a row's `ground_truth`."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth["target"]
    return [str(truth) for truth in ([ground_truth] if isinstance(ground_truth, str) else ground_truth)]


def normal(answer: str) -> str:
    """The answer in lower case, without punctuation, articles and extra spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def numbered(passages: Sequence[str]) -> str:
    """The text of an observation: one line for each passage, with its number; `nothing` if there are no passages."""
    return "\n".join(f"{i} : {passage}" for i, passage in enumerate(passages, start=1)) or "nothing"


def passages_of(corpus: Path, query: str, topk: int) -> list[str]:
    """The `topk` passages of a corpus that match the query best."""
    (hits,) = _corpus(corpus).search([query], topk)
    return [hit.passage.contents for hit in hits]


_corpus = lru_cache(maxsize=4)(Corpus)


TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
QUESTION_WORDS = (
    *("on", "which", "river", "is", "?", "through", "region"),
    *("flows", "the", "of", "what", "known", "for", "nothing"),
)
ANSWER_WORDS = ("a", "town", ".", ":", "give", "or", *(str(i) for i in range(1, 11)))


class SearchQuestion(NamedTuple):
    """A question, the searches that lead to the answer, and the answer."""

    text: str
    searches: tuple[str, ...]
    answer: str


def question(rng: np.random.Generator) -> SearchQuestion:
    """Draw a question of one hop (a town's river) or two hops (the region of a town's river)."""
    drawn = data.geography()
    town = drawn.towns[int(rng.integers(len(drawn.towns)))]
    if rng.random() < 0.5:
        return SearchQuestion(f"on which river is {town.name} ?", (town.name,), town.river)
    asked = f"through which region flows the river of {town.name} ?"
    return SearchQuestion(asked, (town.name, f"river {town.river} flows through"), town.region)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` questions as dataset rows."""
    rng = np.random.default_rng(seed)
    return [
        {
            "uid": f"search_r1-{seed}-{i}",
            "data_source": "baton/towns",
            "prompt": [Message(role="user", content=asked.text)],
            "env_class": "search_r1",
            "reward_spec": {"method": "rule", "ground_truth": {"target": [asked.answer]}},
            "extra_info": {"hops": len(asked.searches)},
        }
        for i, asked in enumerate(question(rng) for _ in range(n))
    ]


def vocabulary() -> tuple[str, ...]:
    """Every word of the questions, the searches and the corpus."""
    return (*TAGS, *QUESTION_WORDS, *ANSWER_WORDS, *data.names())


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations. About `right_fraction` of them search and answer correctly; the others answer at random."""
    return [_demonstration(question(rng), rng.random() < right_fraction, rng) for _ in range(n)]


def _demonstration(asked: SearchQuestion, right: bool, rng: np.random.Generator) -> list[Message]:
    messages = [Message(role="user", content=asked.text)]
    for search in asked.searches[: None if right else int(rng.integers(len(asked.searches) + 1))]:
        passages = numbered(passages_of(data.CORPUS, search, TOPK))
        messages.append(Message(role="assistant", content=f"<search> {search} </search>"))
        messages.append(Message(role="user", content=f"<information> {passages} </information>"))
    rivers = tuple(data.geography().rivers)
    answer = asked.answer if right else rivers[int(rng.integers(len(rivers)))]
    return [*messages, Message(role="assistant", content=f"<answer> {answer} </answer>")]
