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
    """A generator claimed the group; no step or end record of the group was accepted yet."""
    OPEN = "open"
    """A step or an end record of the group was accepted; not all trajectories are complete."""
    SCORING = "scoring"
    """All trajectories are complete; at least one scorer has not answered yet."""
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
    """The token's group is unfinished, waits to be leased, or is leased."""
    STEPPED = "stepped"
    """The token carried loss in an optimizer step that no durable checkpoint covers yet."""
    TRAINED = "trained"
    """The token carried loss in an optimizer step that a durable checkpoint covers."""
    STALE = "stale"
    """The token was older than `max_staleness` when its group was trained, so it carried no loss."""
    MASKED = "masked"
    """The token carried no loss for another reason than staleness, such as a log-probability that is not finite."""
    SUB = "sub"
    """The token is from a sub-agent, whose role is not trained (`agents.train`)."""
    AUX = "aux"
    """The token is from a single question outside an agent's conversation, whose role is not trained."""
    RETRY = "retry"
    """The token is from a response that a later response to the same request replaced."""
    UNDELIVERED = "undelivered"
    """The token is from a response that no client received."""
    JUDGE = "judge"
    """The token is from a role that the policy plays without being trained on it (`roles`)."""
    FILTERED = "filtered"
    REFUSED = "refused"
    EXPIRED = "expired"
    """The token's group expired, or continued without the token's trajectory."""
    SUPERSEDED = "superseded"
    """A newer attempt of the trajectory replaced the token's attempt."""
    ROLLED_BACK = "rolled_back"
    """The optimizer step that used the token was undone, and its group waits to be trained again. Or the run continued
    on an empty disk, from a checkpoint older than the token."""


GIVEN_UP = -1
"""Number of the attempt of a sample that was given up: its group continues without the sample."""
