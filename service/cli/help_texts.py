"""What `baton --help` and `baton COMMAND --help` print besides the options."""

ABOUT = """\
Baton trains language models on multi-turn tasks by asynchronous reinforcement learning:
vLLM generators stream steps into a buffer, FSDP trainers learn from them and send new weights back.

    prompts --claim--> GENERATOR --submit--> BUFFER --lease--> TRAINER --publish--> weights --> GENERATOR
"""

EXAMPLES = """\
examples:
  baton init my-task                                     # a folder to begin a task of your own
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml trainer.lr=1e-4 run.seed=1
  baton run --config base.yaml --config mine.yaml        # the second file is merged over the first
  baton submit --config configs/quickstart.yaml          # the same as a job on a Ray cluster
  baton eval runs/quickstart data.eval_make_rows=200     # evaluates a run, a checkpoint or a model
  baton config validate --config mine.yaml               # reports mistakes, starts nothing
  baton plan --config mine.yaml --gpu h100 --gpus 8      # whether it fits, how fast it would be, what would bind
  baton config show --config mine.yaml buffer.lookahead=0
  baton config schema > config.schema.json               # for completion in an editor
  baton status runs/quickstart                           # what a run is doing now
  baton logs runs/quickstart --follow                    # what its parts print
  baton trajectories list runs/quickstart                # what the policy wrote
  baton profile runs/quickstart --steps 3                # what the ranks compute, for ui.perfetto.dev
  baton trace runs/quickstart                            # its timeline, for ui.perfetto.dev

`baton COMMAND --help` describes a command. Settings are written section.key=value, as many as you need.
"""

RUN = """\
Run a training: start Ray, or connect to the cluster that RAY_ADDRESS names; prepare the model and the data; train;
write the run folder.
"""

RUN_EXAMPLES = """\
examples:
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml buffer.lookahead=0        # strictly on-policy
  baton run --config mine.yaml model.path=models/qwen3-0.6b data.train=data/train.jsonl
  baton run --resume runs/quickstart                                   # continue a run that was stopped or killed
  baton run --resume s3://bucket/run                                   # ... on another machine, from its run.store

Ctrl-C ends the run in order: the optimizer step is finished and the final weights are written. After run.stop_grace
seconds, or at the third Ctrl-C, the run is ended by force. --resume also writes final/ where only that is missing.

exit code: 0 finished, 2 the input is wrong (one line says what), 1 the run failed, 128 + n stopped by signal n.
"""

EVAL = """\
Evaluate a model, a run or a checkpoint on the evaluation sets (data.eval, data.eval_make_rows), without training.
"""

EVAL_EXAMPLES = """\
examples:
  baton eval runs/gsm8k                                                # its final weights, or its newest checkpoint
  baton eval runs/gsm8k/checkpoints/step_40 data.eval_samples=8
  baton eval models/Qwen2.5-3B-Instruct --config configs/gsm8k.yaml --output before.json

A run is evaluated with its own configuration. The table has the mean reward, pass@k over data.eval_samples trajectories
of each prompt, the turns and sampled tokens of a trajectory, and the number of lost trajectories.

exit code: 0 evaluated, 2 the input is wrong (one line says what), 1 an engine failed, 128 + n stopped by signal n.
"""

EXPORT = """\
Write the adapter that a run with model.lora has trained: in PEFT's form, or merged into its base as a Hugging Face
folder in float32. Needs neither Ray nor a GPU.
"""

EXPORT_EXAMPLES = """\
examples:
  baton export runs/gsm8k merged --merge                               # its final adapter, or its newest checkpoint
  baton export runs/gsm8k/checkpoints/step_40 adapter                  # for model.adapter, PEFT or vLLM
"""

SUBMIT = "Submit `baton run` as a Ray job and show its output; while the cluster is starting, try again."

SUBMIT_NOTES = """\
The job works in a temporary copy of the current folder. Configuration files must lie in that folder. Give run.dir as an
absolute path; a relative one starts at the home folder of the node on which the job runs. The cluster's token is read
from ~/.ray/auth_token or RAY_AUTH_TOKEN. `ray job stop JOB` ends the run in order and writes its final weights.
"""

CONFIG = "A configuration is YAML files, merged in order, then settings. These actions start nothing."

CONFIG_EXAMPLES = """\
examples:
  baton config validate --config mine.yaml               # a line for each mistake; reads data and model headers
  baton config show --config mine.yaml trainer.lr=1e-4   # the configuration of the run, defaults included
  baton config schema > config.schema.json               # for completion in an editor
"""

STATUS = """\
Show a run's rates, its groups by state, its tokens by fate, and which actor waits for what; of a run that has ended,
its summary. The run serves the same as JSON at /status, with live charts at /, and for Prometheus at /metrics.
"""

STATUS_EXAMPLES = """\
examples:
  baton status                           # the newest run in runs/
  baton status quickstart                # the run of that name
  baton status runs/quickstart-2
  baton status 127.0.0.1:9400 --json
"""

TRAJECTORIES = "Show the trajectories that a run kept; run.trajectories_per_step says how many of each mini-batch."

TRAJECTORIES_EXAMPLES = """\
examples:
  baton trajectories list                                # of the newest run
  baton trajectories show runs/quickstart                # the newest trained one; or give an id
  baton trajectories slow runs/quickstart                # queue, prefill, decode, tools: where the time goes
  baton trajectories export-html runs/quickstart --last 20
"""

SCALE = """\
Ask a running run for more or fewer generators.

The run's configuration gives the bounds (generator.engines: {min: 1, max: 8}). One that joins takes the newest weights
and claims; one that leaves plays on for generator.leave_grace seconds, hands over what is open, and ends.
"""

SCALE_EXAMPLES = """\
examples:
  baton scale runs/mine --engines 3
"""
