"""Applies small faults to the code, one at a time, and checks that the tests notice each of them.

examples:
  python -m tests.mutations                     # all mutants; compares with killed.txt
  python -m tests.mutations outbox ledger/7     # one part of the table, and one mutant
  python -m tests.mutations --tree ../other --write     # of another checkout, and write killed.txt

`mutants.txt` names a function and a piece of its code, not a file, so a mutant survives that code moves. A mutant whose
code is not found has to be rewritten to the code that took its place. The checkout itself is never changed.
"""

import argparse
import ast
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

HERE = Path(__file__).parent
MOST_TIMES = 3.0
"""A mutant counts as killed, because the tests hang, after this many times the CPU seconds that they take without it:
other work on the machine changes nothing."""
LEAST_DEADLINE = 40.0
SLOWEST = 15.0
"""Or after this many times these seconds on the clock: tests that wait take no CPU."""
LIBRARIES = ("numpy", "msgspec", "xxhash", "pydantic", "yaml", "torch")
"""Imported once; the process of each mutant is a fork, which need not import them again."""
SOURCES = ("service", "actors")


class Mutant(NamedTuple):
    """One fault: in the source of the function or class `scope`, `old` becomes `new`."""

    name: str
    scope: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Names of the test files that should notice it."""


class Definition(NamedTuple):
    """A function or class: lines `first` to `last` of a file, counted from 1."""

    path: Path
    first: int
    last: int


def read_mutants(path: Path) -> list[Mutant]:
    """The table of mutants: `[part] test files`, then lines `number scope: old => new` of this part."""
    mutants: list[Mutant] = []
    part, tests = "", tuple[str, ...]()
    for line in path.read_text().splitlines():
        if line.startswith("["):
            part, _, names = line[1:].partition("]")
            tests = tuple(names.split())
        elif line and not line.startswith("#"):
            number, _, rest = line.partition(" ")
            scope, _, change = rest.partition(": ")
            old, _, new = change.partition(" =>")
            mutants.append(Mutant(f"{part}/{number}", scope, old, new.strip(), tests))
    return mutants


def definitions(tree: Path) -> dict[str, list[Definition]]:
    """All functions and classes of the production code, by qualified name."""
    found: dict[str, list[Definition]] = {}

    def visit(node: ast.AST, path: Path, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                place = Definition(path, child.lineno, child.end_lineno or child.lineno)
                found.setdefault(prefix + child.name, []).append(place)
                visit(child, path, f"{prefix}{child.name}.")

    for path in sorted(path for source in SOURCES for path in (tree / source).rglob("*.py")):
        visit(ast.parse(path.read_text()), path, "")
    return found


def mutated(mutant: Mutant, known: dict[str, list[Definition]]) -> tuple[Path, str] | None:
    """The file of a mutant and its text with the fault; None unless exactly one place has the old code."""
    places = []
    for path, first, last in known.get(mutant.scope, ()):
        lines = path.read_text().splitlines(keepends=True)
        source = "".join(lines[first - 1 : last])
        if source.count(mutant.old) == 1:
            changed = source.replace(mutant.old, mutant.new)
            places.append((path, "".join(lines[: first - 1]) + changed + "".join(lines[last:])))
    return places[0] if len(places) == 1 else None


class FirstFailure:
    """A plugin of pytest: writes the first test that fails to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A part of a test has ended."""
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        """A file was imported, or could not be."""
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid.rpartition("/")[2].split("[")[0])


class Checker:
    """Runs test files against mutants of a copy of a checkout."""

    def __init__(self, tree: Path, copy: Path) -> None:
        self._tree, self._copy = tree.resolve(), copy
        tracked = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(tracked, check=True, capture_output=True, text=True).stdout.split("\0"):
            if (tree / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, copy / name)
        self.known = definitions(copy)
        self._tests: dict[str, list[Path]] = {}
        # Only tests that start no Ray: a name such as test_recovery also stands in tests/e2e.
        for path in sorted((copy / "tests" / "pure").rglob("test_*.py")):
            self._tests.setdefault(f"{path.parent.name}/{path.name}", []).append(path)
            self._tests.setdefault(path.name, []).append(path)
        self._clock = int(time.time())
        self._seconds: dict[tuple[str, ...], float] = {}
        """CPU seconds that test files took when they first ran, by path."""

    def files(self, names: tuple[str, ...]) -> list[str]:
        """The paths of test files that exist."""
        return [str(path) for name in names for path in self._tests.get(f"{name}.py", ())]

    def missing(self, names: tuple[str, ...]) -> list[str]:
        """The names that no test file has."""
        return [name for name in names if f"{name}.py" not in self._tests]

    def result(self, mutant: Mutant) -> str:
        """The first test that fails; `survived` if none does, and `not found` if the code is not there."""
        found = mutated(mutant, self.known)
        if found is None:
            return "not found"
        path, text = found
        original = path.read_text()
        try:
            self._write(path, text)
            return self.run(self.files(mutant.tests))
        finally:
            self._write(path, original)

    def run(self, files: list[str]) -> str:
        """The first test of these files that fails; `survived` if none does."""
        failed = self._copy / "first_failure.txt"
        failed.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            try:
                os._exit(self._tested(files, failed))
            finally:  # pytest itself failed
                traceback.print_exc()
                os._exit(1)
        begun, process = time.monotonic(), psutil.Process(child)
        most = max(LEAST_DEADLINE, MOST_TIMES * self._seconds.get(tuple(files), 600.0))
        while not (ended := os.wait4(child, os.WNOHANG))[0]:
            if sum(process.cpu_times()[:4]) > most or time.monotonic() > begun + SLOWEST * most:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "the tests hang"
            time.sleep(0.05)
        self._seconds.setdefault(tuple(files), ended[2].ru_utime + ended[2].ru_stime)
        if failed.exists():
            return failed.read_text()
        return "survived" if ended[1] == 0 else "the tests break off"

    def _tested(self, files: list[str], failed: Path) -> int:
        """Run pytest in this process, which is a fork."""
        os.setsid()
        os.chdir(self._copy)
        os.environ |= {"PYTHONPATH": str(self._copy), "PYTHONSAFEPATH": "1"}
        own = {self._tree, HERE.parent.parent}
        sys.path[:] = [str(self._copy), *(entry for entry in sys.path if Path(entry).resolve() not in own)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", *SOURCES)]:
            del sys.modules[name]
        log = os.open(self._copy / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-c", str(self._copy / "pyproject.toml")]
        return int(pytest.main([*options, *files], plugins=[FirstFailure(failed)]))

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own, so that Python compiles it again."""
        path.write_text(text)
        self._clock += 2
        os.utime(path, (self._clock, self._clock))


def main() -> int:
    """Check the mutants that the command line asks for; returns how many survive that were killed before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART", help="parts of the table, or single mutants")
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="the checkout whose code and tests are used")
    parser.add_argument("--write", action="store_true", help="write the results to killed.txt")
    parser.add_argument("--find", action="store_true", help="only say which mutants' code or test files are not there")
    arguments = parser.parse_args()
    wanted = set(arguments.names)
    mutants = read_mutants(HERE / "mutants.txt")
    chosen = [m for m in mutants if not wanted or not wanted.isdisjoint((m.name, m.name.split("/")[0]))]
    table = HERE / "killed.txt"
    before = dict(line.split(" ", 1) for line in table.read_text().splitlines()) if table.exists() else {}
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="baton-mutations-") as folder:
        checker = Checker(arguments.tree, Path(folder))
        for missing in sorted({name for mutant in chosen for name in checker.missing(mutant.tests)}):
            print(f"there is no test file {missing}.py")
        if arguments.find:
            lost = [mutant for mutant in chosen if mutated(mutant, checker.known) is None]
            for mutant in lost:
                print(f"not found: {mutant.name} {mutant.scope}: {mutant.old}")
            return min(len(lost), 1)
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            if (failed := checker.run(checker.files(tests))) != "survived":
                print((Path(folder) / "pytest.log").read_text())
                sys.exit(f"without a fault too, {failed}")
        results = {}
        for mutant in chosen:
            results[mutant.name] = checker.result(mutant)
            print(f"{mutant.name} {results[mutant.name]}", flush=True)
    counts = Counter(result if result in ("survived", "not found") else "killed" for result in results.values())
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if arguments.write:
        known = before | results
        table.write_text("".join(f"{m.name} {known[m.name]}\n" for m in mutants if m.name in known))
        return 0
    worse = [m for m, result in results.items() if result == "survived" and before.get(m, result) != "survived"]
    for name in worse:
        print(f"{name} was killed by {before[name]}, and survives now")
    return min(len(worse) + counts["not found"], 1)


if __name__ == "__main__":
    sys.exit(main())
