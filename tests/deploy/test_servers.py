"""Installing what some tests need: quick where it is there, bounded where apt-get hangs, never an error."""

import shutil
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def servers() -> Iterator[ModuleType]:
    """`scripts/servers.py` as a module."""
    spec = spec_from_file_location("servers", ROOT / "scripts" / "servers.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["servers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["servers"]


@pytest.fixture
def bare(servers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of root's with nothing on its path but what a test puts into this folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "ln"):
        (folder / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("BATON_SERVERS", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(servers, "POLICY", tmp_path / "policy-rc.d")
    return folder


def program(folder: Path, name: str, script: str = "exit 0") -> None:
    (folder / name).write_text(f"#!{folder}/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_what_is_missing_is_installed_and_no_service_is_started(
    servers: ModuleType, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(bare, "prometheus")
    log, policy = tmp_path / "log", tmp_path / "policy-rc.d"
    links = "".join(f"ln -sf {bare}/prometheus {bare}/{name};" for name in ("alertmanager", "chromium", "slurmctld"))
    program(bare, "apt-get", f'echo "$@" >> {log}; [ -x {policy} ] && echo policy >> {log}; {links}')
    assert servers.main() == 0
    update, _, install, _ = said = log.read_text().splitlines()
    packages = "prometheus-alertmanager chromium slurm-wlm"
    assert update.endswith(" update") and install.endswith(f" install -y --no-install-recommends {packages}")
    assert said[1] == said[3] == "policy" and not policy.exists()
    assert "skipped" not in capsys.readouterr().out
    assert servers.main() == 0 and log.read_text().splitlines() == said, "nothing is missing any more"


@pytest.mark.parametrize(
    ("script", "deadline", "reason"),
    [
        ("echo 'E: Unable to locate package chromium'; exit 100", 200.0, "Unable to locate package"),
        ("sleep 500", 1.0, "took too long"),
    ],
)
def test_an_apt_that_refuses_or_hangs_is_no_error(
    script: str, deadline: float, reason: str, servers: ModuleType, bare: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(servers, "DEADLINE", deadline)
    program(bare, "apt-get", script)
    assert servers.main() == 0
    said = capsys.readouterr().out
    assert reason in said and "whose tests are skipped" in said


def test_nothing_is_installed_where_it_may_not_be(
    servers: ModuleType, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare, "apt-get", f"echo > {tmp_path}/ran")
    monkeypatch.setenv("BATON_SERVERS", "no")
    assert servers.main() == 0
    monkeypatch.delenv("BATON_SERVERS")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert servers.main() == 0
    said = capsys.readouterr().out
    assert "BATON_SERVERS=no" in said and "only root can install them" in said and not (tmp_path / "ran").exists()
