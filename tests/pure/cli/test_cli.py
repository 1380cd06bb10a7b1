"""The command line: what it prints, and the code with which it exits."""

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from service.cli import parser
from service.cli.parser import main, split_overrides
from service.cli.status_view import LABEL_WIDTH, status_lines
from service.clock import SystemClock
from service.config import Config, load_config, resolved_yaml
from service.observe.merged_metrics import Hub
from service.run.folder import lock_run, write_address
from service.run.records.writer import RunWriter
from tests.pure.conftest import Refused

QUICKSTART = "configs/quickstart.yaml"
COMMANDS = [command.name for command in parser.COMMANDS]


def test_overrides_are_told_from_other_words_wherever_they_stand() -> None:
    words = ["a.b=1", "run", "--config", "x=y.yaml", "--config=b.yaml", "lr=3", "--json"]
    assert split_overrides(words) == (
        ["run", "--config", "x=y.yaml", "--config=b.yaml", "--json"],
        ["a.b=1", "lr=3"],
    )
    words = ["trajectories", "show", "runs/quickstart", "group=812/sample=3/attempt=0"]
    assert split_overrides(words) == (words, [])


def test_the_resolved_configuration_is_shown_and_is_fine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", "--config", QUICKSTART, "trainer.lr=1e-4", "run.seed=3"]) == 0
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out)
    shown = load_config([tmp_path / "shown.yaml"])
    assert (shown.trainer.lr, shown.run.seed, shown.run.name) == (1e-4, 3, "quickstart")
    assert main(["config", "validate", "--config", QUICKSTART]) == 0
    assert capsys.readouterr().out == f"{QUICKSTART}: fine\n"
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False and "trainer" in schema["properties"]


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(Path(QUICKSTART).read_text())
    settings = ["run.dir=~/runs", "data.eval={one: ~/one.jsonl}"]
    assert main(["config", "show", "--config=~/mine.yaml", "model.path=~/model", *settings]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    paths = [shown["run"]["dir"], shown["model"]["path"], shown["data"]["eval"]["one"]]
    assert paths == [str(tmp_path / name) for name in ("runs", "model", "one.jsonl")]
    assert split_overrides(["trace", "~/r", "--out=~/b"]) == (["trace", f"{tmp_path}/r", f"--out={tmp_path}/b"], [])
    assert split_overrides(["status", "~/runs/one"]) == (["status", f"{tmp_path}/runs/one"], [])


WRONG = {
    "run": "give a configuration: --config FILE",
    "run --config none.yaml": "none.yaml: cannot read",
    "run QUICKSTART trainer.lrr=1": "did you mean trainer.lr?",
    "run QUICKSTART model.lora={rank: 16}": "put quotes around",
    "run QUICKSTART placement.trainer.a/b=c": "goes into braces",
    "run QUICKSTART OWN model.path=/none": "model folder /none does not exist",
    "run --generator.concurrent-groups=3": "generator.concurrent-groups=VALUE",
    "config validate QUICKSTART env.name=lokup": "the nearest is 'lookup'",
    "config validate QUICKSTART env.name=nim.Nim": "there are compute_score, gsm8k, ",
    "config validate QUICKSTART algorithm.estimator=rank": "there are grpo, grpo_no_std, rloo, maxrl, reinforce++_b",
    "config validate QUICKSTART algorithm.estimator=json:mine": "no estimator is named 'mine'",
    "config validate QUICKSTART scorers.judge.use=json:lods": "did you mean json:loads?",
    "config validate QUICKSTART scorers.judge.use=json:loads scorers.judge.options.x=1": "scorers.judge.options",
    "config validate QUICKSTART scorers.j.use=tests.pure.scorers.mine:Weighed scorers.j.options.wait=1": "'wait'",
    "config validate QUICKSTART env.name=os:Path": "env.trusted_modules does not name 'os'",
    "config validate QUICKSTART env.options.colour=1": "'lookup' refuses them",
    "config validate QUICKSTART OWN model.path=ROWS": "model.path=ROWS: the model folder ROWS is a file",
    "config validate QUICKSTART OWN model.path=EMPTY": "model.path=EMPTY: the model folder EMPTY has no config.json",
    "config validate QUICKSTART data.eval.dev=EMPTY": "dataset EMPTY: the folder has no .jsonl or .parquet",
    "config validate QUICKSTART algorithm.teacher={} scorers.t={kind:\xa0teacher,model:\xa0EMPTY}": "scorers.t.model",
    "config validate QUICKSTART data.make_rows=null data.train=ROWS": "first needed by row 0",
    "config validate --confg x": "--confg (did you mean --config?); see baton config validate --help",
    "config schema trainer.lr=1": "trainer.lr=1",
    "status nobody": "nor the name of a run",
    "status 127.0.0.1:1": "no run answers there",
    "status --xyzzy 4": "--xyzzy; see baton status --help",
    "logs --last 2.5": "argument --last: '2.5'",
    "logs s3://bucket/run": "only `baton run --resume` reads a run from a store",
    "export s3://bucket/run out": "s3:/bucket/run: there is no such folder",
    "eval http://host/model": "http:/host/model: there is no such folder",
    "trace runs/r run.seed=1": "run.seed=1: baton trace takes no settings",
    "trace --output /no/folder/x.json": "there is no folder /no/folder",
    "plan --gpus-of-node 8": "did you mean --gpus?",
    "runn": "did you mean run? baton --help lists",
    "train": "did you mean run? ",
    "validate": "did you mean config validate? ",
    "agent-worker": "did you mean agent-try? ",
    "doctor": "no such command; baton --help lists the commands",
}
"""Words of a command line, and a part of the line that refuses them."""


@pytest.mark.parametrize(("line", "message"), WRONG.items())
def test_wrong_input_is_one_line_and_code_2(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "rows.jsonl").write_text('{"prompt": "hi", "env_class": "lokup"}\n')
    (empty := tmp_path / "empty").mkdir()
    line = line.replace("QUICKSTART", f"--config {QUICKSTART}").replace("OWN", "model.make=null model.warm_start=null")
    line, message = (text.replace("ROWS", str(file)).replace("EMPTY", str(empty)) for text in (line, message))
    try:
        code = main([word.replace("\xa0", " ") for word in line.split(" ")])
    except SystemExit as ended:  # the parser of a command
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    said = [line for line in out.splitlines() if not line.startswith("reading the configuration ...")]  # if slow
    assert code == 2 and said == []
    assert err.startswith("baton") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["generator.concurrent_groups=1", "generator.concurrent_groups=1"],  # for a mini-batch, and for the engines
        ["buffer.lookahed=1"],
        ["env.max_turns=0", "scorers.k.use=no_module:f"],
    ],
)
def test_mistakes_of_several_kinds_are_told_together(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Those of settings, of code and of files, each once; a misspelled name is not judged by what it is not."""
    settings = [*wrong, "algorithm.returns=last", "algorithm.credit=return_to_go", "algorithm.estimator=gprp"]
    settings += ["env.name=lokup", "scorers.j.use=json:lods", "data.eval.dev=/no.jsonl"]
    assert main(["config", "validate", "--config", QUICKSTART, "generator.engines=2", *settings]) == 2
    told = [line.split()[2].partition("=")[0] for line in capsys.readouterr().err.splitlines()]
    assert sorted([*told, "algorithm.returns"]) == sorted(word.partition("=")[0] for word in settings)


def test_an_unknown_key_brings_no_line_about_the_default_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "--config", QUICKSTART, "env.nmae=mine:Env", "env.options.colour=1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_paths_of_another_machine_are_notes_of_the_validation_and_refused_by_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--config", QUICKSTART, "model.make=null", "model.warm_start=null", "data.make_rows=null"]
    words += [f"data.train={tmp_path}/rows.parquet", f"model.path={tmp_path}/models/smal"]
    assert main(["config", "validate", *words]) == 0
    first, second, cut, last = capsys.readouterr().out.splitlines()
    missing = f"note: model.path: the model folder {tmp_path}/models/smal does not exist"
    assert first.startswith(missing)
    assert second.startswith(f"note: data.train: the dataset {tmp_path}/rows.parquet does not exist")
    assert cut.startswith("note: generator.max_generate_length: every answer is cut after 7 tokens")
    assert last == f"{QUICKSTART}: fine, but it cannot be run here"
    assert main(["run", *words]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert [line.split("override ")[1].split("=")[0] for line in refused] == ["model.path", "data.train"]


def test_status_shows_what_a_run_serves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):  # a run on this machine is asked without a proxy
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    hub = Hub(SystemClock())
    before = SystemClock().wall() - 7200
    policy = {"incarnation": 1, "step": 3}
    hub.put_status(
        "run", {"name": "r", "state": "training", "max_steps": 9, "policy_version": policy, "stepped": before}
    )
    wait = {"who": "trainer", "reason": "groups", "detail": "3 of 16", "since": before}
    hub.put_status("buffer", {"groups": {"open": 3, "leased": 0}, "tokens": {"open": 9}, "waits": [wait]})
    hub.put_status("step", {"reward/avg_raw_reward": 0.5})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(hub.status()).encode() if self.path == "/status" else b"{}"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "address.json").write_text(json.dumps({"url": url}))
        (tmp_path / "config.yaml").touch()
        for target in (url, f"{url}/status", str(tmp_path), f"127.0.0.1:{server.server_port}"):
            assert main(["status", target]) == 0
            shown = capsys.readouterr().out
            assert shown.startswith("r: training, step 3 of 9\n")
            assert "  groups     3 open\n  tokens     9 open\n" in shown
            assert "  last step  reward 0.500, - tokens a response, 2 h 0 min ago\n" in shown
            assert "  waits      trainer for groups: 3 of 16, 2 h 0 min\n" in shown
        assert main(["status", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == 1

        hub.put_status("run", {"name": "\x1b]0;owned\x07 \x9b2J", "state": "training", "folder": "another"})
        assert main(["status", url]) == 0
        shown = capsys.readouterr().out
        assert "owned" in shown and not set(shown) & {"\x1b", "\x07", "\x9b"}
        assert main(["status", str(tmp_path)]) == 2
        assert str(tmp_path) in capsys.readouterr().err
        (tmp_path / "summary.json").write_text('{"state": "finished", "steps": 9, "reward_gain": null}')
        assert main(["status", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path}: finished after 9 optimizer steps\n"
        assert main(["status", f"{url}/other"]) == 2
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    (tmp_path / "config.yaml").touch()
    return tmp_path


def test_status_says_how_a_run_ended_until_it_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text('{"state": "failed", "reason": "no mini-batch for 600 s"}')
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}: failed\n  no mini-batch for 600 s\n"
    with lock_run(run):
        RunWriter(run).begin(resolved_yaml(Config()))
        assert main(["status", str(run)]) == 2 and "the run is starting" in capsys.readouterr().err


def test_status_tells_a_run_that_starts_from_one_that_was_killed(run: Path, refused: Refused) -> None:
    with lock_run(run):
        assert "the run is starting" in refused("status", run)
        write_address(run, "http://127.0.0.1:1")
        assert "no run answers there" in refused("status", run)
    assert f"baton run --resume {run}" in refused("status", run)
    RunWriter(run).begin(resolved_yaml(Config()))
    assert all(words in refused("status", run) for words in ("it was killed", "checkpoint (none here)"))
    for step in (2, 10):
        (run / f"checkpoints/step_{step}").mkdir(parents=True)
        (run / f"checkpoints/step_{step}/manifest.json").touch()
    assert "checkpoint (step 10)" in refused("status", run)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", '{"state": {}}', "[" * 100_000, "\udcff", '{"state": "finished"}'),
        *('{"state": "finished", "steps": "9"}', '{"state": "failed", "reason": 3}'),
    ],
)
@pytest.mark.parametrize("file", ["address.json", "summary.json"])
def test_a_damaged_file_of_a_run_is_one_line(file: str, text: str, run: Path, refused: Refused) -> None:
    (run / file).write_text(text, errors="surrogateescape")
    line = refused("status", run)
    assert file == "address.json" or "summary.json is damaged" in line


def test_an_output_that_takes_nothing_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "service", "config", "schema"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 2 and done.stderr.startswith("baton: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["config", "schema"], ["status", "--help"]])
def test_a_closed_output_is_as_good_as_one_that_nobody_reads(words: list[str], tmp_path: Path) -> None:
    def ended(files: str) -> tuple[int, bytes]:
        command = ["sh", "-c", f'exec "$@" {files}', "sh", sys.executable, "-P", "-m", "service", *words]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, timeout=240)
        return done.returncode, done.stderr

    assert ended(">&-") == ended(">/dev/null")
    assert ended("<&- >&- 2>&-") == (ended(">/dev/null")[0], b"")


@pytest.mark.parametrize(
    ("argv", "unneeded"),
    [
        (["config", "validate", "--config", QUICKSTART], {"ray", "torch", "vllm", "matplotlib"}),
        (["--help"], {"numpy", "pydantic", "yaml"}),
        (["status", "nobody"], {"numpy", "pydantic", "yaml"}),
        (["trajectories", "list", "nobody"], {"tensorboard", "matplotlib", "torch"}),
    ],
)
def test_commands_load_only_what_they_need(argv: list[str], unneeded: set[str]) -> None:
    code = (
        "import contextlib, sys\n"
        "from service.cli.parser import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main({argv})\n"
        f"sys.exit(sorted({unneeded} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_status_has_a_line_for_each_part_of_the_data_flow_also_in_a_narrow_terminal() -> None:
    hub = Hub(SystemClock())
    assert status_lines(hub.status())[0] == "run: starting, step 0"
    policy = {"incarnation": 1, "step": 7}
    run = {"state": "training", "generators": 2, "weights_sync_seconds": 0.03, "policy_version": policy}
    hub.put_status("run", run)
    detail = "waits for the weights of step 12 (lookahead 1); has those of step 11"
    wait = {"who": "generator-0", "reason": "lookahead", "detail": detail, "since": hub.status()["time"]}
    buffer = {"issued": 1203, "groups": {"open": 4, "leased": 0}, "tokens": {"open": 1903}, "waits": [wait]}
    hub.put_status("buffer", buffer)
    waits = {"async/generator_wait_fraction": 0.14, "async/trainer_wait_fraction": 0.39, "async/staleness_mean": 1.0}
    hub.put_status("step", {"timing/step": 0.29, **waits})
    wide, narrow = status_lines(hub.status()), status_lines(hub.status(), 80)
    assert wide[:-1] == [
        "run: training, step 7",
        "",
        "  prompts    1,203 given out",
        "  generators 0 of 2 up, - tokens/s, idle 14%",
        "  groups     4 open",
        "  tokens     1,903 open",
        "  trainer    newest step 0.29 s, waited 39%, staleness 1.00, weights synced in 0.03 s",
    ]
    assert len(wide[-1]) > 80 and max(map(len, narrow)) <= 80, "lines end between words"
    assert narrow[-1].startswith(" " * (LABEL_WIDTH + 2)) and narrow[-1].strip() in wide[-1]


ACTIONS = [("config", action) for action in ("show", "validate", "schema")]


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), *ACTIONS])
def test_every_command_says_what_it_does_before_its_options(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    page = capsys.readouterr().out
    usage, about, *_ = page.split("\n\n")
    assert usage.startswith("usage: baton ")
    assert about[0].isupper() and len(about) > 20, about  # "options:" and "positional arguments:" are not
    *_, examples = page.partition("\nexamples:\n")
    names_settings = re.search(r"^  baton .* \w+\.\w+=", examples, re.MULTILINE)
    assert "section.key=value" in usage or "ACTION" in usage or not names_settings


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    ([\w-]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert listed == COMMANDS and {"run", "eval", "config", "status", "logs"} <= set(listed) and len(listed) <= 14
