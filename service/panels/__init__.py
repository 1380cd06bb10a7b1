"""What each panel of the Grafana dashboards asks and means: a module a dashboard."""

from __future__ import annotations

from service.panels.buffer import BUFFER
from service.panels.generators import GENERATORS
from service.panels.ledger import LEDGER
from service.panels.overview import OVERVIEW
from service.panels.parts import Dashboard, Panel, Query
from service.panels.sequences import SEQUENCES
from service.panels.trainer import TRAINER

__all__ = ["DASHBOARDS", "Dashboard", "Panel", "Query"]

DASHBOARDS = (OVERVIEW, SEQUENCES, BUFFER, GENERATORS, TRAINER, LEDGER)
