"""Invented geography as a corpus and as a database: towns on rivers that flow through regions.

`python -m baton.examples.data` writes the files of this folder again. They depend only on this module.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus.jsonl"
DATABASE = FOLDER / "databases" / "towns.sqlite"

N_TOWNS, N_RIVERS, N_REGIONS = 48, 16, 8
GOODS = ("salt", "wool", "glass", "honey", "iron", "paper", "silk", "timber")
SEED = 7
SCHEMA = (
    "regions ( name TEXT , good TEXT )",
    "rivers ( name TEXT , region TEXT )",
    "towns ( name TEXT , river TEXT , people INTEGER , height INTEGER )",
)
"""The tables of the database."""
LARGEST = 40
"""Maximum of both numbers of a town: its people (in thousands) and its height (in tens of metres)."""


class Town(NamedTuple):
    """One town and its river."""

    name: str
    river: str
    region: str
    people: int
    height: int


class Geography(NamedTuple):
    """All facts: a river flows through one region, and a region is known for one good."""

    towns: tuple[Town, ...]
    rivers: dict[str, str]
    """The region through which each river flows, by the river's name."""
    regions: dict[str, str]
    """The good for which each region is known, by the region's name."""


@lru_cache(maxsize=1)
def geography() -> Geography:
    """All facts of the invented geography; every call returns equal facts."""
    rng = np.random.default_rng(SEED)
    names = _names(N_TOWNS + N_RIVERS + N_REGIONS, rng)
    towns, rivers, regions = names[:N_TOWNS], names[N_TOWNS:-N_REGIONS], names[-N_REGIONS:]
    region_of = {river: regions[i % N_REGIONS] for i, river in enumerate(rivers)}
    placed = []
    for town in towns:
        river = rivers[int(rng.integers(N_RIVERS))]
        people, height = (int(number) for number in rng.integers(1, LARGEST + 1, size=2))
        placed.append(Town(town, river, region_of[river], people, height))
    return Geography(tuple(placed), region_of, dict(zip(regions, GOODS, strict=True)))


def _names(n: int, rng: np.random.Generator) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < n:
        names["".join(rng.choice(list(letters)) for letters in ("bdfgklmnprstv", "aeiou", "lmnrs", "aeiou"))] = None
    return list(names)


def passages() -> list[str]:
    """The texts of the corpus, one fact per passage."""
    drawn = geography()
    return [
        *(f"{town.name} is a town on the river {town.river} ." for town in drawn.towns),
        *(f"the river {river} flows through {region} ." for river, region in drawn.rivers.items()),
        *(f"the region {region} is known for {good} ." for region, good in drawn.regions.items()),
    ]


def names() -> tuple[str, ...]:
    """The names of all towns, rivers and regions, and all goods."""
    drawn = geography()
    return (*(town.name for town in drawn.towns), *drawn.rivers, *drawn.regions, *drawn.regions.values())


def write_corpus(path: Path) -> None:
    """Write the passages in Search-R1's form, one `{"id", "contents"}` per line."""
    lines = (json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(passages()))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_database(path: Path) -> None:
    """Write a SQLite file with the tables towns, rivers and regions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    drawn = geography()
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in SCHEMA:
            connection.execute(f"CREATE TABLE {table}")
        connection.executemany("INSERT INTO regions VALUES (?, ?)", drawn.regions.items())
        connection.executemany("INSERT INTO rivers VALUES (?, ?)", drawn.rivers.items())
        connection.executemany(
            "INSERT INTO towns VALUES (?, ?, ?, ?)", [(t.name, t.river, t.people, t.height) for t in drawn.towns]
        )
