"""An object store in memory that fails where a test says so."""

from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from service.errors import StoreFailed
from service.store.objects import Objects


class MemoryObjects(Objects):
    """The objects of one run; every answer can be a failure, before or after the store has done what was asked."""

    def __init__(self, held: dict[str, bytes] | None = None) -> None:
        self.url = "memory://bucket/run"
        self.held = {} if held is None else held
        self.fails: Callable[[str, str], bool] = lambda doing, name: False
        """Is asked with (`put`, `done` after a put, `get`, `list`, `delete`) and the name."""

    def put(self, name: str, file: BinaryIO) -> int:
        self._ask("put", name)
        self.held[name] = file.read()
        self._ask("done", name)
        return len(self.held[name])

    def create(self, name: str, data: bytes) -> bool:
        self._ask("put", name)
        made = self.held.setdefault(name, data) == data
        self._ask("done", name)
        return made

    def get(self, name: str) -> Iterator[bytes]:
        self._ask("get", name)
        if name not in self.held:
            raise StoreFailed(f"{self.url}: {name} is not there")
        yield self.held[name]

    def names(self) -> list[str]:
        self._ask("list", "")
        return [*self.held]

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._ask("delete", name)
            self.held.pop(name, None)

    def _ask(self, doing: str, name: str) -> None:
        if self.fails(doing, name):
            raise StoreFailed(f"{self.url}: {doing} {name} failed")
