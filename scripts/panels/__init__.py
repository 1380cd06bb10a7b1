"""What each panel of the Grafana dashboards asks and means: a module a dashboard."""

from __future__ import annotations

from scripts.panels.buffer import BUFFER
from scripts.panels.generators import GENERATORS
from scripts.panels.ledger import LEDGER
from scripts.panels.overview import OVERVIEW
from scripts.panels.parts import Dashboard, Panel, Query
from scripts.panels.sequences import SEQUENCES
from scripts.panels.trainer import TRAINER

__all__ = ["DASHBOARDS", "Dashboard", "Panel", "Query"]

DASHBOARDS = (OVERVIEW, SEQUENCES, BUFFER, GENERATORS, TRAINER, LEDGER)
