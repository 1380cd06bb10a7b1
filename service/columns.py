"""Tables of columns: how a class declares columns; checks tables, selects items from tables, and joins tables.

A table is a dataclass of arrays whose names end in an axis letter: `.._K` has one item per step, `.._N` one per token.
Item `k` owns the tokens `offsets_K[k]:offsets_K[k + 1]`. Likewise `step_offsets_E` gives each item of axis `E` a range
of a second ragged axis, `S`. A field's name, type and annotation define its column. An example:

    offsets_K    [0          3       5]     token_ids_N [10 20 30 | 80 90]
    select [1] -> offsets_K [0 2], token_ids_N [80 90]
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import xxhash
from numpy.typing import NDArray

# Not NDArray[...]: with numpy 2.5 and Python 3.12 that is a `type` alias, which does not show its dtype.
Int16s = np.ndarray[tuple[Any, ...], np.dtype[np.int16]]
Int32s = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Int64s = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Uint16s = np.ndarray[tuple[Any, ...], np.dtype[np.uint16]]
Uint64s = np.ndarray[tuple[Any, ...], np.dtype[np.uint64]]
Uint8s = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]
Float32s = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
Float64s = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Bools = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]

AnyTable = TypeVar("AnyTable", bound="Table")
Name = TypeVar("Name", bound=Hashable)

NO_BYTE = 255
"""The byte that stands for an unknown expert."""
ALIGNMENT = 64
"""Each column begins at a multiple of this many bytes."""


class About(NamedTuple):
    """The properties of a column that its annotation states, in addition to the field's name and type."""

    meaning: str = ""
    fill: float | None = None
    """The value of an item or token that has no value of its own, such as a token of a prompt."""
    on_prompt: bool = False
    """Whether tokens of a prompt have values too, not only tokens of a response."""
    ndim: int = 1
    sizes: str = ""
    """Name of the column with the sizes of a nested column (see `nested_offsets`); empty: the column is not nested."""


class Column(NamedTuple):
    """The definition of one column, as the class of the table declares it."""

    name: str
    axis: str
    dtype: np.dtype[Any]
    optional: bool
    """Whether the column may be None in a table."""
    about: About
    is_offsets: bool
    """Whether the column has one item more than its axis, because it holds offsets."""
    narrow: np.dtype[Any] | None = None
    """A narrower type that the column may have instead of `dtype` (see `widened`)."""


class Table:
    """Base class of tables; making a table raises a ValueError if columns of one axis differ in length."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for column in columns_of(type(self)).all:
            array = getattr(self, column.name)
            if array is None:
                continue
            length = len(array) - column.is_offsets
            if lengths.setdefault(column.axis, length) != length:
                expected = lengths[column.axis]
                raise ValueError(f"{type(self).__name__}.{column.name} has {len(array)} items; its axis has {expected}")

    def __len__(self) -> int:
        return len(getattr(self, columns_of(type(self)).items[0].name))


class Columns(NamedTuple):
    """The columns that a table's class declares."""

    all: tuple[Column, ...]
    items: tuple[Column, ...]
    """Columns with one item per step, end record or row."""
    tokens: tuple[Column, ...]
    """Columns with one item per token."""
    nested: tuple[Column, ...]
    """Columns with any number of items per token (see `nested_offsets`)."""
    ragged: tuple[tuple[str, tuple[Column, ...]], ...]
    """For each ragged axis: (its offsets column, its columns), for example ("offsets_K", the token columns)."""
    names: tuple[tuple[str, str], ...]
    """Pairs (field with a tuple of names, column with indices into the tuple), for example ("uids", "uid_K")."""

    @property
    def axis(self) -> str:
        """The letter of the axis with one entry per item, for example `K` for a table of steps."""
        return self.items[0].axis


_COLUMNS: dict[type, Columns] = {}


def columns_of(table: type) -> Columns:
    """The columns of a table's class, in order of declaration."""
    if table not in _COLUMNS:
        hints = get_type_hints(table, include_extras=True)
        found = tuple(column for field in fields(table) for column in _column(field.name, hints[field.name]))
        # `offsets_K` bounds N, tokens; `step_offsets_E` bounds S
        bounds = [column.name for column in found if column.is_offsets]
        offsets = {"N" if name.startswith("offsets_") else name[0].upper(): name for name in bounds}
        nested = tuple(column for column in found if column.about.sizes)
        others = [column for column in found if column not in nested and not column.is_offsets]
        items = tuple(column for column in others if column.axis not in {"N", *offsets})
        of_axis = {axis: tuple(column for column in found if column.axis == axis) for axis in ("N", *offsets)}
        ragged = tuple((name, of_axis[axis]) for axis, name in offsets.items())
        lists = [field.name for field in fields(table) if hints[field.name] == tuple[str, ...]]
        names = tuple((name, f"{name.removesuffix('s')}_{items[0].axis}") for name in lists)
        _COLUMNS[table] = Columns(found, items, of_axis["N"], nested, ragged, names)
    return _COLUMNS[table]


def _column(name: str, hint: Any) -> Iterator[Column]:
    about = About()
    if get_origin(hint) is Annotated:
        hint, about = get_args(hint)
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    array = hint if get_origin(hint) is np.ndarray else kinds[0]
    if get_origin(array) is np.ndarray:
        scalar = get_args(get_args(array)[1])[0]
        others = [] if array is hint else [np.dtype(get_args(get_args(kind)[1])[0]) for kind in kinds[1:]]
        narrow, offsets = (others or [None])[0], name[:-2].endswith("offsets")
        yield Column(name, name.rpartition("_")[2], np.dtype(scalar), array is not hint, about, offsets, narrow)


# -- whole tables ------------------------------------------------------------------------------------------------------


def select(table: AnyTable, index_X: Int64s, copy: bool = False) -> AnyTable:
    """A table of the items at these positions, in this order, with only the names (such as `uids`) that they use.

    Token columns are views if the selected tokens are contiguous and `copy` is False.
    """
    columns = columns_of(type(table))
    made: dict[str, Any] = {column.name: getattr(table, column.name)[index_X] for column in columns.items}
    for name, of_axis in columns.ragged:
        offsets_X = getattr(table, name)
        start_X, stop_X = offsets_X[index_X], offsets_X[index_X + 1]
        made[name] = offsets_of(stop_X - start_X)
        made |= segments_of(table, of_axis, start_X, stop_X, copy)
    for names, code in columns.names:
        if len(strings := getattr(table, names)) > 1:
            used, renumbered_X = np.unique(made[code], return_inverse=True)
            made[names], made[code] = tuple(strings[name] for name in used), renumbered_X.astype(np.int32)
    return replace(table, **made)


def segments_of(
    table: Table, columns: Sequence[Column], start_C: Int64s, stop_C: Int64s, copy: bool = False
) -> dict[str, Any]:
    """By column name, the concatenated items of the segments [C] `start:stop` of one ragged axis, nested columns
    included. Arrays are views if the segments are contiguous and `copy` is False. Adjacent segments are copied at once:

        select [0 1 3] of items with offsets [0 5 9 12 20]  ->  copies tokens 0:9 and 12:20
    """
    made = _segments(table, columns, start_C, stop_C, copy)
    for column in columns_of(type(table)).nested:
        if made.get(column.about.sizes) is not None:
            at_N = nested_offsets(getattr(table, column.about.sizes))
            made |= _segments(table, (column,), at_N[start_C], at_N[stop_C], copy)
    return made


def nested_offsets(sizes_N: Uint16s) -> Int64s:
    """[N + 1] where each token's items begin in a nested column; a token of size n has n - 1 items, or none if n is 0.
    Example: [0 1 3] -> [0 0 0 2]."""
    return offsets_of(np.maximum(sizes_N, 1) - 1)


def _segments(table: Table, columns: Sequence[Column], start_C: Int64s, stop_C: Int64s, copy: bool) -> dict[str, Any]:
    arrays = {column.name: getattr(table, column.name) for column in columns}
    known = {name: array for name, array in arrays.items() if array is not None}
    breaks = np.flatnonzero(start_C[1:] != stop_C[:-1])
    starts = start_C[np.concatenate(([0], breaks + 1))].tolist() if len(start_C) else [0]
    stops = stop_C[np.concatenate((breaks, [len(stop_C) - 1]))].tolist() if len(start_C) else [0]
    if len(starts) == 1 and not copy:
        return arrays | {name: array[starts[0] : stops[0]] for name, array in known.items()}
    pieces = [slice(*bounds) for bounds in zip(starts, stops, strict=True)]
    return arrays | _joined({name: [array[piece] for piece in pieces] for name, array in known.items()})


def _joined(parts: dict[str, list[NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Each column's parts, concatenated. One block of memory holds all columns, which causes fewer page faults."""
    heads = {name: (sum(map(len, arrays)), *arrays[0].shape[1:]) for name, arrays in parts.items()}
    sizes = {name: math.prod(shape) * parts[name][0].itemsize for name, shape in heads.items()}
    room, stop, made = np.empty(sum(size + -size % ALIGNMENT for size in sizes.values()), np.uint8), 0, {}
    for name, arrays in parts.items():
        start, stop = stop, stop + sizes[name] + -sizes[name] % ALIGNMENT
        made[name] = room[start : start + sizes[name]].view(arrays[0].dtype).reshape(heads[name])
        np.concatenate(arrays, out=made[name])
    return made


def concat(tables: Sequence[AnyTable]) -> AnyTable:
    """The items of several tables, in order, as one table; a column that a table lacks has its fill value there."""
    if len(tables) == 1:
        return tables[0]
    of = type(tables[0])
    columns, names = columns_of(of), [field.name for field in fields(of)]
    # all fields of a table are read at once, because there may be thousands of tables of a single step
    parts = dict(zip(names, zip(*map(attrgetter(*names), tables), strict=True), strict=True))
    made: dict[str, Any] = {column.name: np.concatenate(parts[column.name]) for column in columns.items}
    for column in columns.nested:
        known = of_one_type(column, [array for array in parts[column.name] if array is not None])
        made[column.name] = np.concatenate(known) if known else None
    for strings, code in columns.names:
        made[strings], made[code] = _joined_names(parts[strings], parts[code])
    for name, of_axis in columns.ragged:
        lasts = np.cumsum([len(offsets) for offsets in parts[name]]) - 1
        made[name] = offsets_of(np.delete(np.diff(np.concatenate(parts[name])), lasts[:-1]))
        counts = [len(tokens) for tokens in parts[of_axis[0].name]]
        full = {column.name: _filled_up(column, parts[column.name], counts) for column in of_axis}
        made |= dict.fromkeys(full) | _joined({name: arrays for name, arrays in full.items() if arrays})
    return of(**made)


def _filled_up(column: Column, arrays: Sequence[NDArray[Any] | None], counts: Sequence[int]) -> list[NDArray[Any]]:
    """One column's arrays, table by table; a table that lacks the column gets fill values. Empty if no table has it."""
    known = of_one_type(column, [array for array in arrays if array is not None])
    if len(known) in (0, len(arrays)):
        return known
    rest = iter(known)
    return [
        filled(column, count, known[0]) if array is None else next(rest)
        for array, count in zip(arrays, counts, strict=True)
    ]


def filled(column: Column, count: int, like: NDArray[Any] | None = None) -> NDArray[Any]:
    """`count` fill values of a column. Each has the shape of one item of the array `like`, and its type if a column may
    have two types."""
    rest = () if like is None else np.shape(like)[1:]
    array = np.full((count, *rest), column.about.fill or 0, column.dtype)
    return array if like is None or column.narrow is None else array.astype(like.dtype)


def of_one_type(column: Column, arrays: list[Any]) -> list[Any]:
    """The given arrays of a column; if their types differ, all arrays in the wider type (`widened`)."""
    same = column.narrow is None or len({array.dtype for array in arrays}) < 2
    return arrays if same else [widened(array) for array in arrays]


def unknown(experts: Any) -> Any:
    """[..., k] -> [...] True where a token's k expert numbers, an array or a tensor, are unknown: they are all 255 in
    unsigned bytes (known numbers of a token differ), or -1 in a wider type."""
    return (experts == NO_BYTE).all(-1) if experts.dtype.itemsize == 1 else (experts < 0).any(-1)


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """Token ids as int32; or expert numbers `[..., k]` as int16, with -1 for unknown experts."""
    if array.dtype == np.uint16:
        return array.astype(np.int32)
    if array.dtype != np.uint8:
        return array
    wide = array.astype(np.int16)
    wide[unknown(array)] = -1
    return wide


# -- offsets, segments, trajectories, names ----------------------------------------------------------------------------


def offsets_of(length_X: NDArray[np.integer[Any]]) -> Int64s:
    """The offsets of items on a ragged axis, from the items' lengths: [3 2] -> [0 3 5]."""
    offsets_X = np.zeros(len(length_X) + 1, np.int64)
    np.cumsum(length_X, out=offsets_X[1:])
    return offsets_X


def lengths_of(offsets_X: Int64s) -> Int64s:
    """The lengths of items, from their offsets: [0 3 5] -> [3 2]."""
    return offsets_X[1:] - offsets_X[:-1]


def trajectories(group_id_X: Int64s, sample_X: Int32s, attempt_X: Int32s) -> Int64s:
    """[X] the number of each item's trajectory; trajectories are numbered as they appear.

    >>> trajectories(np.array([7, 3, 7]), np.array([0, 0, 0]), np.array([0, 0, 0])).tolist()
    [0, 1, 0]
    """
    columns = (group_id_X, sample_X, attempt_X)
    new = changes(*columns)
    _, number_H = codes_of(zip(*(column[new].tolist() for column in columns), strict=True))
    return np.asarray(number_H[np.cumsum(new) - 1], np.int64)


def changes(*columns: NDArray[Any]) -> Bools:
    """[X] True for the first item, and for each item that differs from the item before it in any column."""
    new = np.ones(len(columns[0]), np.bool_)
    new[1:] = False
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def bytes_per_token(table: Table) -> int:
    """The bytes of one token, summed over the token columns that the table has."""
    arrays = [getattr(table, column.name) for column in columns_of(type(table)).tokens]
    return sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays if array is not None)


def token_bytes(token_ids: Int32s) -> memoryview:
    """The bytes of token ids as little-endian int32; a view if the array already has this type."""
    return np.ascontiguousarray(token_ids, "<i4").data.cast("B")


def digest(token_ids: Int32s) -> int:
    """A 64-bit hash of token ids; a step that extends an earlier step carries the digest of the extended tokens.

    >>> digest(np.array([10, 20, 30, 40, 50], np.int32)) == digest(np.arange(10, 60, 10, np.int32))
    True
    """
    return int(xxhash.xxh3_64_intdigest(token_bytes(token_ids)))


def codes_of(names: Iterable[Name]) -> tuple[tuple[Name, ...], Int32s]:
    """The distinct names, and the index of each name among them: ("b" "a" "b") -> ("b" "a"), [0 1 0]."""
    code: dict[Name, int] = {}
    codes = [code.setdefault(name, len(code)) for name in names]
    return tuple(code), np.array(codes, np.int32)


def _joined_names(
    names_of_tables: Sequence[tuple[str, ...]], codes_of_tables: Sequence[Int32s]
) -> tuple[tuple[str, ...], Int32s]:
    joined, renumbered = codes_of(name for names in names_of_tables for name in names)
    starts = offsets_of(np.array([len(names) for names in names_of_tables], np.int64))[:-1]
    start_X = np.repeat(starts, [len(code_X) for code_X in codes_of_tables])
    return joined, renumbered[np.concatenate(codes_of_tables) + start_X]


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise a ValueError unless `value` is one of `choices`, a Literal type; `name`: the setting's name."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")
