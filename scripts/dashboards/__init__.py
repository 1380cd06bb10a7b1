"""The Grafana dashboards: a module for the panels of each one; `python -m scripts.docs` writes them as JSON."""

from __future__ import annotations

from scripts.dashboards.buffer import BUFFER
from scripts.dashboards.generators import GENERATORS
from scripts.dashboards.ledger import LEDGER
from scripts.dashboards.overview import OVERVIEW
from scripts.dashboards.sequences import SEQUENCES
from scripts.dashboards.trainer import TRAINER

DASHBOARDS = (OVERVIEW, SEQUENCES, BUFFER, GENERATORS, TRAINER, LEDGER)
