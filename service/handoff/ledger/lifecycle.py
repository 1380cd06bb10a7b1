"""The states of a group, and the fates of its tokens.

ISSUED -> OPEN -> SCORING -> COMPLETE -> LEASED -> STEPPED -> TRAINED
                                ^  |        |         |          |
                                |  |        +-> release          |
                                +--|-----------  rollback  ------+
                                   +-> FILTERED          and from ISSUED to COMPLETE: REFUSED, EXPIRED

Groups that no scorer scores (`service.scorers`) go from OPEN to COMPLETE.
"""

from __future__ import annotations

from enum import StrEnum


class GroupState(StrEnum):
    """The state of a group in its lifecycle."""

    ISSUED = "issued"
    """Claimed; no step has come yet."""
    OPEN = "open"
    """Steps arrive."""
    SCORING = "scoring"
    """All trajectories ended, and all their steps were accepted; a scorer has not answered yet."""
    COMPLETE = "complete"
    """The group may be leased."""
    LEASED = "leased"
    STEPPED = "stepped"
    """An optimizer step used the group; no durable checkpoint covers that step yet."""
    TRAINED = "trained"
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"


_ENDS = (GroupState.REFUSED, GroupState.EXPIRED)
NEXT_STATES: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.ISSUED: (GroupState.OPEN, GroupState.SCORING, GroupState.COMPLETE, *_ENDS),
    GroupState.OPEN: (GroupState.SCORING, GroupState.COMPLETE, *_ENDS),
    GroupState.SCORING: (GroupState.COMPLETE, *_ENDS),
    GroupState.COMPLETE: (GroupState.LEASED, GroupState.FILTERED, *_ENDS),
    GroupState.LEASED: (GroupState.COMPLETE, GroupState.STEPPED),
    GroupState.STEPPED: (GroupState.TRAINED, GroupState.COMPLETE),
    GroupState.TRAINED: (GroupState.COMPLETE,),
    GroupState.FILTERED: (),
    GroupState.REFUSED: (),
    GroupState.EXPIRED: (),
}
UNFINISHED = (GroupState.ISSUED, GroupState.OPEN)
USED = (GroupState.STEPPED, GroupState.TRAINED)


class Fate(StrEnum):
    """The fate of a token that the policy sampled and the buffer accepted; every token has exactly one."""

    OPEN = "open"
    """Its group is unfinished, waits to be leased, or is leased."""
    STEPPED = "stepped"
    """It carried loss in an optimizer step that no checkpoint covers yet."""
    TRAINED = "trained"
    """It carried loss in an optimizer step that a durable checkpoint covers."""
    STALE = "stale"
    """It was older than `max_staleness` when it was trained, and carried no loss."""
    MASKED = "masked"
    """It carried no loss for another reason than staleness, such as a log-probability that is not finite."""
    SUB = "sub"
    """It is from a sub-agent, whose role is not trained (`agents.train`)."""
    AUX = "aux"
    """It is from a single question outside an agent's conversation, whose role is not trained."""
    RETRY = "retry"
    """It is from a response that a later response to the same request replaced."""
    UNDELIVERED = "undelivered"
    """It is from a response that no client received."""
    JUDGE = "judge"
    """It is from a role that the policy plays without being trained on it (`roles`)."""
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"
    """Its group expired, or continued without its trajectory."""
    SUPERSEDED = "superseded"
    """A newer attempt of its trajectory replaced it."""
    ROLLED_BACK = "rolled_back"
    """The optimizer step that used it was undone, and its group waits to be trained again. Or the run continued on an
    empty disk, from a checkpoint older than the token."""


GIVEN_UP = -1
"""Stands for the attempt of a sample without which its group continues."""
