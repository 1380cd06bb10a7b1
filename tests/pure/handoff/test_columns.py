"""The fields of `Steps` are the only definition of its columns: one more line is a column that goes all the way."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import service
from service.columns import concat, nested_offsets, select, widened
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.credit import Rule
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import end_objects, ends_table, same_step, step_group, steps_table
from service.handoff.steps.wire import decode, decode_mini_batch, encode, encode_mini_batch
from service.handoff.validate import refusal
from service.rollout.step_sinks import StepColumns
from service.types import Step, StepGroup, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import LIMITS, SENDER, end, episode, shared, step

NEW_COLUMN = """
    entropy_N: Annotated[Float32s | None, About("entropy of the sampling distribution", fill=0)] = None
"""

USE_OF_IT = """
from dataclasses import dataclass
import numpy as np
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.credit import Rule
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import merge
from service.handoff.prefixes.sharing import shared_form
from service.rollout.step_sinks import StepColumns
from service.handoff.steps.tables import same_step
from service.handoff.steps.values import Limits
from service.handoff.validate import refusal
from service.handoff.steps.wire import decode, decode_mini_batch, encode, encode_mini_batch
from service.types import Sender, Step, TrajectoryEnd, TrajectoryId

@dataclass(frozen=True, eq=False)
class Told(Step):
    entropy: object = None

def columns(*steps):
    made, told = StepColumns(), []
    for index, prompt, response, entropy in steps:
        sampled = np.ones(len(response), np.bool_)
        parts = np.array(prompt, np.int32), np.array(response, np.int32), -sampled.astype(np.float32), sampled
        versions = np.zeros(len(response), np.int64)
        told.append(Told(TrajectoryId(0, 0), "a", index, *parts, versions, entropy=entropy))
    for step in shared_form(told):
        made.append(step)
    made.end(TrajectoryEnd(TrajectoryId(0, 0), "a", len(steps), "stop", 1.0))
    return made

sent = columns((0, [1, 2], [3, 4], [0.25, 0.5]), (1, [1, 2, 3, 4, 5], [6], [0.75]), (2, [1, 2, 3, 9], [7], [1.0]))
limits = Limits(100, 50, 50, 9, 1, 1, 1 << 20)
group = decode(encode(sent.step_group(Sender("g", 1, 0))), limits)
assert refusal(group, limits) is None
shared = group.steps
assert shared.entropy_N.tolist() == [0, 0, 0.25, 0.5, 0, 0.75, 0, 1]

assert same_step(group.steps, 0, shared, 0)
assert not same_step(shared, 0, columns((0, [1, 2], [3, 4], [0.25, 0.625])).steps(), 0)
assert not same_step(shared, 0, columns((0, [1, 2], [3, 4], None)).steps(), 0)

rows = merge(shared).rows
assert rows.token_ids_N.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 7]
assert rows.entropy_N.tolist() == [0, 0, 0.25, 0.5, 0, 0.75, 0, 0, 0, 0, 1]

settings = BatchSettings(ranks=2, token_budget=16, rule=Rule("grpo_no_std"))
batch = form_mini_batch(1, [CompleteGroup(0, "a", shared, group.ends)], VersionHistory(), settings)
[packed], [dummy] = decode_mini_batch(encode_mini_batch(batch)).ranks
assert sorted(packed.entropy_N.tolist()) == sorted(rows.entropy_N.tolist())
assert packed.entropy_N[packed.token_ids_N == 6].tolist() == [0.75] and dummy.entropy_N.tolist() == [0, 0]
"""


def test_one_line_more_is_a_token_column_from_the_generator_to_the_trainer(tmp_path: Path) -> None:
    shutil.copytree(Path(service.__file__).parent, tmp_path / "service", ignore=shutil.ignore_patterns("__pycache__"))
    types = tmp_path / "service" / "types.py"
    text = types.read_text()
    assert text.count("ndim=3),\n    ] = None\n") == 1
    types.write_text(text.replace("ndim=3),\n    ] = None\n", "ndim=3)\n    ] = None" + NEW_COLUMN))
    done = subprocess.run(
        [sys.executable, "-c", USE_OF_IT], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_experts_that_one_table_has_as_bytes_and_another_as_int16_are_joined_as_int16() -> None:
    old = routed_as(np.int16, episode(np.random.default_rng(0), 2))
    new = routed_as(np.uint8, episode(np.random.default_rng(0), 2, TrajectoryId(0, 1)))
    joined = concat([steps_table(old), steps_table(new)])
    both = steps_table([*old, *new])
    for table in (joined, both):
        assert table.routed_experts_N is not None and table.routed_experts_N.dtype == np.int16
        halves = np.split(table.routed_experts_N, [joined.offsets_K[2]])
        assert all((half[::2] == -1).all() and (half[1::2] == [7, 255]).all() for half in halves)


def of_token(token_id: int) -> list[int]:
    """The other tokens of the support that a token has in these tests; a third of the tokens have none."""
    return [token_id + n for n in range(1, token_id % 9 - 1)]


def test_supports_stay_with_their_tokens_from_the_generator_to_the_trainer() -> None:
    steps, ends = list[Step](), list[TrajectoryEnd]()
    for sample in range(4):
        own = shared(episode(np.random.default_rng(sample), 5, TrajectoryId(0, sample)))
        own = [replace(step, versions=np.zeros_like(step.versions)) for step in own]
        ends.append(end(TrajectoryId(0, sample), steps=len(own)))
        steps += [supported(step) for step in own] if sample else own  # one that was not truncated
    message = step_group(SENDER, steps, ends)
    again = decode(encode(message), LIMITS)
    assert len(encode(message)) < 0.6 * len(encode(replace(message, steps=replace(message.steps, support_U=None))))
    assert isinstance(again, StepGroup) and refusal(again, replace(LIMITS, vocab_size=1010)) is None
    assert all(same_step(message.steps, k, again.steps, k) for k in range(len(steps)))
    other = again.steps.support_U + again.steps.support_size_N.max()  # type: ignore[operator,union-attr]
    k = int(np.flatnonzero(np.diff(nested_offsets(again.steps.support_size_N)[again.steps.offsets_K]))[0])  # type: ignore[arg-type]
    assert not same_step(replace(again.steps, support_U=other), k, again.steps, k)
    joined = concat([select(again.steps, part) for part in np.array_split(np.arange(len(steps))[::-1], 5)])
    settings = BatchSettings(ranks=2, token_budget=64, rule=Rule("grpo_no_std"), mode="tree")
    batch = form_mini_batch(1, [CompleteGroup(0, "a", joined, again.ends)], VersionHistory(), settings)
    n_tokens = 0
    for micro in [micro for rank in decode_mini_batch(encode_mini_batch(batch)).ranks for micro in rank]:
        sizes_N, others_U, at_N = micro.support_size_N, micro.support_U, nested_offsets(micro.support_size_N)  # type: ignore[arg-type]
        assert sizes_N is not None and others_U is not None and at_N[-1] == len(others_U)
        for n in np.flatnonzero(micro.loss_mask_N & (sizes_N > 0)).tolist():
            others = of_token(int(micro.token_ids_N[n]))
            assert others_U[at_N[n] : at_N[n + 1]].tolist() == others and sizes_N[n] == len(others) + 1
            n_tokens += 1
    assert n_tokens == sum(int((step.support_size > 0).sum()) for step in steps if step.support_size is not None) > 0


def supported(step: Step) -> Step:
    """The step as if a sampler had truncated: each sampled token with its support."""
    token_ids = [int(token_id) for token_id in step.response_ids]
    sizes = [0 if token_id % 3 == 0 else len(of_token(token_id)) + 1 for token_id in token_ids]
    others = [other for token_id, size in zip(token_ids, sizes, strict=True) if size for other in of_token(token_id)]
    sizes = np.where(step.loss_mask, sizes, 0)
    return replace(step, support_size=sizes.astype(np.uint16), support=np.array(others, np.uint16))


def routed_as(dtype: type[np.generic], steps: list[Step]) -> list[Step]:
    """Steps whose tokens have no experts and the experts 7 and 255 by turns."""
    made, start = [], 0
    for before in steps:
        n_tokens = len(before.prompt_ids) + len(before.response_ids)
        experts = np.tile(np.array([7, 255], np.int16), (n_tokens, 1, 1))
        experts[start % 2 :: 2] = -1
        start += n_tokens
        made.append(replace(before, routed_experts=experts.astype(dtype)))
    return made


def test_experts_as_bytes_are_unknown_where_all_of_a_token_are_255() -> None:
    experts = np.array([[[0, 255], [255, 255]], [[-1, -1], [254, 3]]], np.int16)
    read = widened(experts.astype(np.uint8)).tolist()
    assert read == [[[0, 255], [-1, -1]], [[-1, -1], [254, 3]]], "no two of a token's experts are equal"
    assert widened(experts) is experts


def test_selected_items_bring_their_own_values_on_every_axis_and_only_the_uids_that_they_use() -> None:
    ends = [
        end(steps=2)._replace(roles=b"\2\0", transcript=b"of a"),
        end(TrajectoryId(1, 0), uid="b")._replace(roles=b"\1"),
        end(TrajectoryId(2, 0), 3, uid="c")._replace(rewards=(0.0, 0.5, 0.25), transcript=b"c"),
    ]
    chosen = select(ends_table(ends), np.array([2, 0]))
    assert end_objects(chosen) == [ends[2], ends[0]] and set(chosen.uids) == {"a", "c"}


def test_what_was_appended_is_counted_and_can_be_sent_by_trajectory() -> None:
    columns = StepColumns()
    for sample in (1, 0, 1):
        columns.append(replace(step(len(columns), [1], [2, 3], trajectory=TrajectoryId(0, sample)), logprobs=None))
    columns.end(end(TrajectoryId(0, 0)))
    assert len(columns) == 4 and columns.n_bytes == 9 * (4 + 4 + 1 + 8)
    parts = {of.sample: (len(part.steps()), len(part.ends)) for of, part in columns.by_trajectory().items()}
    assert parts == {1: (2, 0), 0: (1, 1)}
