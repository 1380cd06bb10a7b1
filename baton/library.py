"""The way from steps to an optimizer step in plain Python, without a run, Ray or vLLM (docs/library.md).

Step, TrajectoryId, PolicyVersion             the output of a generator, and its identifiers
merge_steps                                   rows of steps
advantages, turn_advantages                   advantages of trajectories and of turns
complete_groups, batch_settings               groups of steps; the settings of mini-batches from a configuration
VersionHistory, form_mini_batch               the published policy versions; a mini-batch
batch_of_rank                                 a rank's part of a mini-batch
MakeModelConfig, make_model                   a small random model
LearnSettings, Learner, StepReport            the settings of learning; a policy in training; the result of a mini-batch
row_of_token, expand_to_tokens                the row of each token; values of trajectories as values of tokens
ConversationTree, JsonCalls, Chat             conversations in the form of messages
Generation, load_tokenizer, make_tokenizer    what an engine sampled; tokenizers

Each name is imported on first use, because torch takes seconds to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.lazy import lazy_names

if TYPE_CHECKING:
    from service.agents.conversation_tree import ConversationTree as ConversationTree
    from service.agents.messages_and_replies import JsonCalls as JsonCalls
    from service.config.core_settings import batch_settings as batch_settings
    from service.config.tree import MakeModelConfig as MakeModelConfig
    from service.handoff.batches.batch import batch_of_rank as batch_of_rank
    from service.handoff.batches.batch import complete_groups as complete_groups
    from service.handoff.batches.batch import form_mini_batch as form_mini_batch
    from service.handoff.batches.credit import turn_advantages as turn_advantages
    from service.handoff.batches.estimators import advantages as advantages
    from service.handoff.ledger.state import VersionHistory as VersionHistory
    from service.handoff.prefixes.merge import merge_steps as merge_steps
    from service.learn.device_batch import expand_to_tokens as expand_to_tokens
    from service.learn.device_batch import row_of_token as row_of_token
    from service.learn.learner import Learner as Learner
    from service.learn.learner import StepReport as StepReport
    from service.learn.model.tiny_model import make_model as make_model
    from service.learn.settings import LearnSettings as LearnSettings
    from service.rollout.chat.chat import Chat as Chat
    from service.rollout.chat.tokenizer import load_tokenizer as load_tokenizer
    from service.rollout.chat.tokenizer import make_tokenizer as make_tokenizer
    from service.rollout.engine import Generation as Generation
    from service.types import PolicyVersion as PolicyVersion
    from service.types import Step as Step
    from service.types import TrajectoryId as TrajectoryId

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "service.agents.conversation_tree": ("ConversationTree",),
        "service.agents.messages_and_replies": ("JsonCalls",),
        "service.config.core_settings": ("batch_settings",),
        "service.config.tree": ("MakeModelConfig",),
        "service.handoff.batches.credit": ("turn_advantages",),
        "service.handoff.batches.estimators": ("advantages",),
        "service.handoff.batches.batch": ("batch_of_rank", "complete_groups", "form_mini_batch"),
        "service.handoff.ledger.state": ("VersionHistory",),
        "service.handoff.prefixes.merge": ("merge_steps",),
        "service.learn.learner": ("Learner", "StepReport"),
        "service.learn.device_batch": ("expand_to_tokens", "row_of_token"),
        "service.learn.model.tiny_model": ("make_model",),
        "service.learn.settings": ("LearnSettings",),
        "service.rollout.chat.chat": ("Chat",),
        "service.rollout.chat.tokenizer": ("load_tokenizer", "make_tokenizer"),
        "service.rollout.engine": ("Generation",),
        "service.types": ("PolicyVersion", "Step", "TrajectoryId"),
    },
)
