"""Records trajectories for people to read: `trajectories.jsonl` contains a small sample of every mini-batch.

    {"id": "group=812/sample=3/attempt=0", "prompt_uid": "7", "optimizer_step": 37, "trained_at": "1:36",
     "reward": 1.0, "return": 1.0, "advantage": 0.93, "stop_reason": "stop", "fate": "trained", "loss_tokens": 11,
     "sampled_tokens": 11, "rows": 1,
     "steps": [{"index": 0, "prompt_ids": [..], "response_ids": [..], "logprobs": [..], "loss_mask": [1, 1, 0],
                "versions": [[2, "1:35"], [1, null]], "reward": 0.0, "stop_reason": "stop", "row": 0,
                "parent": null, "begins_as": null, "role": "main", "trains": true}, ..],
     "transcript": "", "scores": {"judge": {"reward": 0.7, "info": "brief", "fallback": ""}}}

`docs/formats.md` says what each field means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np

from service.columns import offsets_of, select
from service.config import Config
from service.errors import UserError, in_one_line
from service.handoff.ledger.events import Ended
from service.handoff.ledger.record import GroupData, Store
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import version_of
from service.handoff.prefixes.merge import Mode, merge_steps
from service.handoff.steps.tables import end_objects, step_objects
from service.handoff.steps.values import StopReason, roles_from
from service.run.folder import RUNS, TRAJECTORIES, TRAJECTORIES_BYTES, refuse_larger, run_folder
from service.types import Extension, Int64s, MiniBatch, PolicyVersion, Step, TrajectoryEnd, TrajectoryId

Record = dict[str, Any]
FAILED = "failed"
"""The fate of an attempt that failed, or for which a scorer gave no reward."""
SHOWN = 200
"""Maximum characters of an error message about a malformed line."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}:[0-9]{1,18}$")]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class StepShape(TypedDict):
    """The fields of a recorded step that are needed to show the step."""

    index: Count
    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    logprobs: list[float | None] | None
    loss_mask: list[int]
    versions: list[tuple[Count, Version | None]]
    reward: float | list[float]
    stop_reason: str | None
    row: Count | None
    parent: Count | None
    begins_as: tuple[Count, Count] | None
    role: str
    trains: bool
    advantage: NotRequired[float]


class ScoreShape(TypedDict):
    """A scorer's answer in a record."""

    reward: float | None
    info: str
    fallback: str


RecordShape = TypedDict(
    "RecordShape",
    {
        "id": str,
        "fate": str,
        "reason": NotRequired[str],
        "optimizer_step": Count,
        "trained_at": Version,
        "return": float | None,
        "advantage": float | None,
        "stop_reason": str,
        "loss_tokens": Count,
        "sampled_tokens": Count,
        "rows": Count,
        "transcript": str,
        "scores": dict[str, ScoreShape],
        "steps": list[StepShape],
    },
)
"""The fields of a trajectory's record that are needed to show the trajectory."""
_DECODER = msgspec.json.Decoder(RecordShape)


@dataclass(frozen=True)
class RecordSettings:
    """Settings that determine which trajectories are recorded, and how their steps are merged into rows."""

    per_step: int
    """Number of trajectories that are recorded per optimizer step."""
    roles: tuple[str, ...]
    trained_roles: tuple[str, ...]
    merge_mode: Mode

    @classmethod
    def of(cls, config: Config) -> RecordSettings:
        """Take from a run's configuration the settings of trajectory records."""
        kept = config.run.trajectories_per_step
        return cls(kept, tuple(config.roles), config.trained_roles, config.buffer.merge)


def trajectory_records(
    batch: MiniBatch, groups: Sequence[CompleteGroup], at: PolicyVersion, settings: RecordSettings
) -> list[Record]:
    """The records of a random sample of a mini-batch's trajectories. `at`: the policy version after training on the
    mini-batch; `settings`: contains the size of the sample."""
    count = min(settings.per_step, len(batch.return_G))
    chosen = sorted(np.random.default_rng(batch.lease).choice(len(batch.return_G), count, replace=False).tolist())
    first_of_group = np.searchsorted(batch.prompt_of_trajectory_G, np.arange(len(groups)))
    records = []
    for g in chosen:
        group, place = groups[(p := int(batch.prompt_of_trajectory_G[g]))], g - int(first_of_group[p])
        (end,) = end_objects(select(group.ends, np.argsort(group.ends.sample_E)[place : place + 1]))
        steps = step_objects(select(group.steps, _steps_by_sample(group)[place]))
        facts = {
            "fate": "trained",
            "optimizer_step": at.step + 1,
            "reward": end.reward,
            "return": float(batch.return_G[g]),
            "advantage": float(batch.advantage_G[g]),
            "stop_reason": end.stop_reason,
            "loss_tokens": int(batch.loss_tokens_G[g]),
            "scores": {
                score.scorer: {
                    "reward": score.rewards[place] if score.rewards else None,
                    "info": score.info[place] if score.info else "",
                    "fallback": score.fallback,
                }
                for score in group.scores
            },
        }
        records.append(_record(end.trajectory, end.prompt_uid, steps, end, at, settings) | facts)
    if batch.turn_advantage_X is not None:
        turns_G = [len(own) for group in groups for own in _steps_by_sample(group)]
        first_turn_G = offsets_of(np.array(turns_G))
        for g, record in zip(chosen, records, strict=True):
            of_turns = batch.turn_advantage_X[first_turn_G[g] : first_turn_G[g + 1]].tolist()
            for step, advantage in zip(record["steps"], of_turns, strict=True):
                step["advantage"] = advantage
    return records


def _steps_by_sample(group: CompleteGroup) -> list[Int64s]:
    """[G][K] for each sample of a group, the rows of its steps in the group's table, in order of the steps' index."""
    steps = group.steps
    by_index = np.argsort(steps.index_K)
    return [by_index[steps.sample_K[by_index] == sample] for sample in np.sort(group.ends.sample_E)]


def describe_ends(records: Sequence[Mapping[str, Any]]) -> str:
    """Counts of the records' stop reasons, such as `7 stop, 1 max_turns before the first turn`; empty without
    records."""
    before = {StopReason.LENGTH: " before the first turn (the prompt exceeds generator.max_input_length)"}
    ends = Counter(
        record["stop_reason"] + ("" if record["steps"] else before.get(record["stop_reason"], " before the first turn"))
        for record in records
    )
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())


class LostTrajectories:
    """Collects a bounded sample of untrained trajectories, which the buffer reports: one of each group that ends
    untrained (`ended`), and failed attempts (`failed`)."""

    def __init__(self, settings: RecordSettings) -> None:
        self._settings = settings
        self._records: list[Record] = []
        self._failed: list[Record] = []

    def ended(self, end: Ended, uid: str, store: Store, at: PolicyVersion) -> None:
        """Record one trajectory of a group that ends untrained: the complete trajectory with the most steps, or, if
        none is complete, the trajectory with the most steps. The steps are read from `store`."""
        if len(self._records) >= self._settings.per_step:
            return
        held = store.of(end.group_id)
        samples = [_stored(held, sample) for sample in held.samples()]
        found = [(steps, last) for steps, last in samples if steps or last is not None]
        if not found:
            return
        steps, last = max(found, key=lambda sample: (sample[1] is not None, len(sample[0])))
        trajectory = steps[0].trajectory if last is None else last.trajectory
        record = _record(trajectory, uid, steps, last, at, self._settings)
        self._records.append(record | _untrained(str(end.state), end.reason, last, at))

    def failed(self, end: TrajectoryEnd, reason: str, store: Store, at: PolicyVersion) -> None:
        """Record an attempt that failed, or for which a scorer gave no reward. The steps are read from `store`."""
        if len(self._failed) < self._settings.per_step:
            steps, _ = _stored(store.of(end.trajectory.group_id), end.trajectory.sample)
            record = _record(end.trajectory, end.prompt_uid, steps, end, at, self._settings)
            self._failed.append(record | _untrained(FAILED, reason, end, at))

    def take(self) -> list[Record]:
        """Return the records since the last call, and clear them: up to `run.trajectories_per_step` of ended groups,
        and as many of failed attempts."""
        records, self._records, self._failed = self._records + self._failed, [], []
        return records


def _untrained(fate: str, reason: str, end: TrajectoryEnd | None, at: PolicyVersion) -> Record:
    """The fields of a record of a trajectory that is not trained."""
    reward = None if end is None or fate == FAILED else end.reward
    return {
        "fate": fate,
        "reason": reason,
        "optimizer_step": at.step,
        "reward": reward,
        "return": reward,
        "advantage": None,
        "stop_reason": "unfinished" if end is None else end.stop_reason,
        "loss_tokens": 0,
        "scores": {},
    }


def _stored(held: GroupData, sample: int) -> tuple[list[Step], TrajectoryEnd | None]:
    """The steps of a sample up to its first missing step, and the record that ends the trajectory, if the buffer has
    it."""
    steps = [step for table in held.steps_of(sample) for step in step_objects(table)]
    steps.sort(key=lambda step: step.index)
    return [step for index, step in enumerate(steps) if step.index == index], held.ends.get(sample)


def _record(
    trajectory: TrajectoryId,
    uid: str,
    steps: Sequence[Step],
    end: TrajectoryEnd | None,
    at: PolicyVersion,
    settings: RecordSettings,
) -> Record:
    """The fields of a record that do not depend on the fate of its trajectory."""
    roles = roles_from(end.roles if end is not None else b"", len(steps), settings.roles)
    given = end.rewards[: len(steps)] if end is not None and end.rewards else (0.0,) * len(steps)
    rows = merge_steps(steps, settings.merge_mode)
    row_of_step = {index: r for r, row in enumerate(rows) for index in range(row.first_step, row.last_step + 1)}
    return {
        "id": str(trajectory),
        "prompt_uid": uid,
        "trained_at": str(at),
        "sampled_tokens": sum(int(np.count_nonzero(step.loss_mask)) for step in steps),
        "rows": len(rows),
        "steps": [
            {**_step_record(step, parent, later), "row": row_of_step.get(step.index), "role": role}
            | {"trains": role in settings.trained_roles}
            for step, parent, role, later in zip(steps, _parents(steps), roles, given, strict=True)
        ],
        "transcript": (end.transcript if end is not None else b"").decode(errors="replace"),
    }


def _parents(steps: Sequence[Step]) -> Iterator[int | None]:
    """For each step, the index of the earlier step that it continues, or None. A step continues an earlier step if it
    begins with all tokens of the earlier step."""
    lengths: dict[int, int] = {}
    for step in steps:
        extends = step.extends or Extension(-1, 0, 0)
        lengths[step.index] = extends.length + len(step.prompt_ids) + len(step.response_ids)
        yield extends.step if lengths.get(extends.step) == extends.length else None


def _step_record(step: Step, parent: int | None, later: float) -> Record:
    """The record of a step, except row and role. `later`: the reward that the step got after it was sent."""
    rewards = np.atleast_1d(np.array(step.reward, np.float64))
    rewards[-1:] += later
    logprobs = None
    if step.logprobs is not None:  # JSON has no NaN, and the buffer masks log-probabilities that are not finite
        logprobs = [round(value, 4) if math.isfinite(value) else None for value in step.logprobs.tolist()]
    return {
        "index": step.index,
        "prompt_ids": step.prompt_ids.tolist(),
        "extends": step.extends is not None,
        "response_ids": step.response_ids.tolist(),
        "logprobs": logprobs,
        "loss_mask": step.loss_mask.astype(int).tolist(),
        "versions": _runs(step.versions),
        "temperature": step.temperature,
        "reward": rewards.tolist() if isinstance(step.reward, np.ndarray) else float(rewards[0]),
        "stop_reason": step.stop_reason,
        "parent": parent,
        "begins_as": step.extends[:2] if step.extends is not None and parent is None else None,
    }


def _runs(versions: Int64s) -> list[tuple[int, str | None]]:
    """Run lengths of equal adjacent versions: [5, 5, -1] -> [(2, "0.5"), (1, None)]."""
    return [
        (len(list(same)), None if (version := version_of(number)) is None else str(version))
        for number, same in groupby(versions.tolist())
    ]


def find_recorded_run(run: str | None, runs: Path = RUNS) -> Path:
    """Find the folder of a run, by its path or name, or of the newest run; `UserError` if it does not exist or has
    recorded no trajectories."""
    if run is not None and (Path(run) / TRAJECTORIES).is_file():
        return Path(run)
    folder = run_folder(run, runs)
    if not (folder / TRAJECTORIES).is_file():
        raise UserError(f"{folder}: this run has kept no trajectories (run.trajectories_per_step, or no step yet)")
    return folder


def load_records(folder: Path) -> list[Record]:
    """The recorded trajectories in a run's folder, oldest first; `UserError` if a line is not a record."""
    records, file = list[Record](), folder / TRAJECTORIES
    refuse_larger([file], 2 * TRAJECTORIES_BYTES)
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break  # the writer was killed
            try:
                records.append(_checked(_DECODER.decode(line)))
            except (ValueError, OverflowError, RecursionError) as error:
                where = f"{file}, line {len(records) + 1}"
                raise UserError(f"{where}: no trajectory: {in_one_line(str(error))[:SHOWN]}") from None
    if not records:
        raise UserError(f"{folder}: this run has kept no trajectories yet")
    return records


def _checked(record: RecordShape) -> Record:
    """Check a record. ValueError if a step lacks data about its tokens, or continues a step that is not earlier."""
    for place, step in enumerate(record["steps"]):
        if step["index"] != place or not ((parent := step["parent"]) is None or parent < place):
            raise ValueError(f"step {step['index']} is not the step {place}, or continues a later one")
        tokens = len(step["response_ids"])
        facts = [len(step["loss_mask"]), sum(count for count, _ in step["versions"])]
        if facts != [tokens, tokens] or len(step["logprobs"] or step["response_ids"]) != tokens:
            raise ValueError(f"step {step['index']} has {tokens} tokens, but a column of another length")
    return dict(record)
