"""Makes a dataset of any taskset of the library verifiers, and plays the taskset's rollouts as an agent.

    python verifiers_agent.py rows TASKSET > train.jsonl            a row for each task
    python verifiers_agent.py play TASKSET TOKENIZER [RENDERER]     one rollout: the command of an agent

TASKSET is the id of an installed taskset, or the name of a module in this folder (`verifiers_sums`). TOKENIZER is the
folder of the model's tokenizer. RENDERER is a name from the package `renderers`, such as `qwen3`; the default is the
renderer that suits the tokenizer's name, or else the tokenizer's chat template. The program runs in an environment with
verifiers 0.4, without Baton. A rollout writes its reward to the file `reward` of the current folder, which
`env.score: [cat, reward]` reads, and its trace to `trace.json`.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

TASK = "task.json"
"""Name of the row's file that holds the task."""


def rows(taskset: str) -> Iterator[str]:
    """The lines of the dataset, one per task."""
    for task in vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset)):
        files = {TASK: task.data.model_dump_json(exclude_defaults=True)}
        yield json.dumps({"prompt": task.data.prompt_text, "files": files})


async def play(taskset: str, tokenizer: str, renderer: str) -> None:
    """Run the taskset's harness on the task in the current folder."""
    kind, file = vf.task_type(taskset), Path(TASK)
    task = kind(
        kind.data_type().model_validate_json(file.read_text()), vf.taskset_config_type(taskset)(id=taskset).task
    )
    file.unlink()  # the task may contain the answer, and a harness may run code that the policy writes
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer={"name": renderer, "thinking_retention": "all"},  # the next prompt contains all sampled tokens
        renderer_model_name=tokenizer,
    )
    harness = {"id": vf.default_harness_id(taskset)}
    agent = vf.AgentConfig(harness=harness, model="policy", client=client, runtime=vf.SubprocessConfig())
    trace = await vf.make_agent(agent).run(task)
    Path("trace.json").write_text(trace.model_dump_json())
    if trace.has_error:
        sys.exit(f"{trace.last_error.type}: {trace.last_error.message}")
    Path("reward").write_text(f"{trace.reward}\n")


def main() -> None:
    """Parse the arguments and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("rows", "play"):
        actions.add_parser(action).add_argument("taskset")
    playing = actions.choices["play"]
    playing.add_argument("tokenizer")
    playing.add_argument("renderer", nargs="?", default="auto")
    given = parser.parse_args()
    if given.action == "play" and not Path(given.tokenizer).is_dir():
        parser.error(f"{given.tokenizer} is no folder with a tokenizer")
    if given.action == "rows":
        for line in rows(given.taskset):
            print(line)
    else:
        asyncio.run(play(given.taskset, given.tokenizer, given.renderer))


if __name__ == "__main__":
    main()
