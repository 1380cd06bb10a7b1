"""Everything that the events determine."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.handoff.ledger.events import Opened
from service.handoff.ledger.lengths import Lengths
from service.handoff.ledger.lifecycle import Fate, FilteredStats, Group, Lease, Member


@dataclass(slots=True)
class State:
    """Everything that the events determine; it can be written down and read back."""

    n_samples: int
    opened: Opened | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    """All that may still change, by group_id."""
    next_group_id: int = 0
    vacated: int = 0
    """Groups that gave their slot back."""
    generators: dict[str, Member] = field(default_factory=dict)
    trainer_incarnation: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    next_lease: int = 1
    last_commit: int = 0
    """The lease of the newest optimizer step."""
    step: int = 0
    branches: list[tuple[int, int]] = field(default_factory=list)
    """Of each trainer that joined: (the step that had been reached, the step that it went on from)."""
    covered: int = 0
    finals: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(groups, loss tokens) of optimizer steps that nobody can go back behind and no checkpoint covers yet."""
    next_finished: int = 1
    filtered: FilteredStats = field(default_factory=FilteredStats)
    lengths: Lengths = field(default_factory=Lengths)
    accepted: int = 0
    """Tokens accepted."""
    fates: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    """Those tokens by fate."""
    ended: dict[str, int] = field(default_factory=dict)
    """Groups that ended, by `state/reason`."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Trajectories that started anew, by reason."""
    given_up: dict[str, int] = field(default_factory=dict)
    """Trajectories that their group went on without, by reason."""
    routing: tuple[int, ...] | None = None
    """(layers, topk) of all routed experts, as the first ones came."""
    draining: str | None = None
