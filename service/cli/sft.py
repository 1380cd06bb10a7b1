"""`baton sft`: trains a model on conversations."""

from __future__ import annotations

import argparse

ABOUT = """\
Train a model on conversations, before reinforcement learning or without it. data.train is a JSONL or parquet file with
one conversation a row:

    {"messages": [{"role": "user", "content": "2 + 3 ?"}, {"role": "assistant", "content": "5"}]}

Every message of the assistant is learned; other messages are only read. Tokens and packed rows are the same as
`baton run` would build from the messages.
"""

EXAMPLES = """\
examples:
  baton sft model.path=models/Qwen3-0.6B data.train=mine.jsonl
  baton sft model.path=models/Qwen3-0.6B data.train=mine.jsonl data.eval.held_out=held.jsonl data.eval_every=50
  baton sft --config mine.yaml run.max_steps=500 trainer.lr=5e-6                  # with the settings of a file
  baton run --config mine.yaml model.path=runs/sft/final                          # goes on with RL

settings that matter (docs/configuration.md has all):
  run.max_steps, trainer.mini_batch_size          optimizer steps, and conversations of each; a line says how many
                                                  epochs these are
  trainer.lr, warmup_steps, schedule              the learning rate; without --config 1e-5, 10 and linear
  trainer.ranks, max_tokens_per_micro_batch       GPUs, and tokens that are computed at once on each
  trainer.checkpoint_every, keep_checkpoints      models in checkpoints/, besides the last one in final/
  generator.max_input_length, max_generate_length their sum is the longest conversation, in tokens
  model.lora                                      train an adapter: final/ is then for model.adapter

A stop signal ends the training after its optimizer step and writes final/.

exit code: 0 finished, 2 the input is wrong (one line says what), 1 the training failed, 128 + n stopped by signal n.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has only the arguments of its configuration."""
