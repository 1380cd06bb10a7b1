"""Speed and memory of GPUs: values from data sheets, and rates that kernels reach in practice. The numbers are in
gpus.toml."""

from __future__ import annotations

from pathlib import Path

import msgspec


class DataSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values of a GPU's data sheet, in FLOP/s, bytes/s and bytes."""

    flops: float
    bandwidth: float
    memory: float
    link: float
    host_link: float


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that kernels reach on an H100, in FLOP/s and bytes/s. `fused_passes`: the bytes that fused layers move in
    elementwise operations, as a fraction of the bytes that unfused layers move."""

    products: float
    bandwidth: float
    attention: float
    attention_backward: float
    fused_passes: float


class _Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reached: Reached
    data_sheets: dict[str, DataSheet]


GPUS_OF_A_NODE = 8
"""Number of GPUs in a node, assumed for every GPU of the data sheets."""

_GPUS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Gpus)
REACHED, DATA_SHEETS = _GPUS.reached, _GPUS.data_sheets
H100 = DATA_SHEETS["h100"]
