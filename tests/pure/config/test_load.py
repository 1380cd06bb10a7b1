"""Files and overrides become a configuration, or one clear line each."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from service.config import Config, check, load, load_config, resolved_yaml
from service.config.checks import problems
from service.config.load import key_paths, section_of
from service.config.paths import with_absolute_paths
from service.errors import ConfigError, UserError


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_later_files_are_merged_deep_over_earlier_ones(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", "trainer: {lr: 1e-6, ranks: 4}\nrun: {seed: 7}\n")
    mine = write(tmp_path, "mine.yaml", "trainer: {lr: 0.001}\n")
    config = load_config([base, mine])
    assert (config.trainer.lr, config.trainer.ranks, config.run.seed) == (0.001, 4, 7)


def test_overrides_win_in_order_and_a_whole_section_can_be_overridden_and_removed(tmp_path: Path) -> None:
    file = write(tmp_path, "c.yaml", "model: {make: {num_layers: 3}}\ntrainer: {lr: 0.5}\n")
    merged = load_config([file], ["model.make={hidden_size: 64}", "trainer.lr=5", "trainer.lr=1e-4"])
    assert merged.model.make is not None and merged.trainer.lr == 1e-4
    assert (merged.model.make.num_layers, merged.model.make.hidden_size) == (3, 64)
    assert load_config([file], ["model.make=null"]).model.make is None
    assert load_config([file], ["model.make=null", "model.make.num_layers=5"]).model.make is not None


def test_words_that_yaml_1_1_would_turn_into_something_else_stay_what_they_are(tmp_path: Path) -> None:
    file = write(
        tmp_path, "c.yaml", "buffer: {merge: off}\nenv: {options: {date: 2024-01-01, clock: '1:30', n: 010, x: 1e3}}\n"
    )
    config = load_config([file])
    assert config.buffer.merge == "off"
    assert config.env.options == {"date": "2024-01-01", "clock": "1:30", "n": 10, "x": 1000.0}


def test_no_whole_number_is_so_large_that_the_types_that_keep_it_overflow() -> None:
    numbers = {".".join(path) for path in key_paths() if re.search(r"\bint\b(?!.*dict)", str(annotation_of(path)))}
    numbers -= {"generator.engines.min", "generator.engines.max"}  # generator.engines itself is a number here
    with pytest.raises(ConfigError) as caught:
        load_config([], [f"{path}={2**63}" for path in numbers])
    refused = set(re.findall(r"^override (\S+)=", str(caught.value), re.MULTILINE))
    assert len(numbers) > 40 and refused == numbers


def annotation_of(path: tuple[str, ...]) -> object:
    section: type[BaseModel] | None = Config
    for key in path[:-1]:
        section = section_of(section.model_fields[key].annotation) if section is not None else None
    return section.model_fields[path[-1]].annotation if section is not None else None


def test_the_resolved_file_reads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config([Path("configs/quickstart.yaml")], ["buffer.merge=off", "run.dir=somewhere"])
    assert load_config([write(tmp_path, "r.yaml", resolved_yaml(config))]) == config


def test_a_place_is_known_for_every_value_that_was_set(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", "run:\n  seed: 1\ntrainer:\n  lr: 1e-3\n  ranks: 2\n")
    mine = write(tmp_path, "mine.yaml", "\ntrainer:\n  ranks: 3\n")
    source = load([base, mine], ["run.seed=4"]).source
    assert source.place(("trainer", "lr")) == f"{base}:4"
    assert source.place(("trainer", "ranks")) == f"{mine}:3"
    assert source.place(("run", "seed")) == "override run.seed=4"
    assert source.place(("metrics", "port")) is None


def test_an_empty_mapping_replaces_what_a_lower_layer_set(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", "env: {options: {a: 1}, max_turns: 3}\ndata: {eval: {x: x.jsonl}}\n")
    config = load_config([base], ["env.options={}", "data.eval={}"])
    assert (config.env.options, config.data.eval, config.env.max_turns) == ({}, {}, 3)
    assert load_config([base], ["env.options={}", "env.options.b=2"]).env.options == {"b": 2}


@pytest.mark.parametrize(
    ("text", "line", "path", "hint"),
    [
        ("trainer:\n  lrr: 3\n", 2, "trainer.lrr", "mean trainer.lr?"),
        ("trainer:\n  mini_batch: 3\n", 2, "trainer.mini_batch", "mean trainer.mini_batch_size?"),
        ("trainr:\n  lr: 3\n", 1, "trainr", "mean trainer?"),
        ("data:\n  eval: x.jsonl\n", 2, "data.eval", "write {NAME: VALUE}"),
        ("generator:\n  presence_penalty: 0.9\n", 2, "generator.presence_penalty", "changes the sampling distribution"),
        ("generator:\n  logit_bias: {3: 1}\n", 2, "generator.logit_bias", "changes the sampling distribution"),
        ("generator: {}\nxyzzy: 3\n", 2, "xyzzy", "valid here: run, model"),
        ("model:\n  make: {intermediate_size: 3}\n", 2, "model.make.intermediate_size", "valid here: hidden_size, "),
        ("learn: {estimate: grpo}\n", 1, "learn", "mean algorithm.estimator?"),
        ("trainer:\n  learning_rate: 1\n", 2, "trainer.learning_rate", "valid here: ranks, "),
        ("buffer:\n  order: strickt\n", 2, "buffer.order", "mean strict?"),
        ("run:\n  seed: 1\n  max_steps: many\n", 3, "run.max_steps", "must be"),
        ("algorithm:\n  loss: {my_loss: }\n", 2, "algorithm.loss", "quotes"),
        ("run:\n  name: 5\n", 2, "run.name", "quotes"),
        ("\ntrainer: 5\n", 2, "trainer", "section"),
        ("trainer:\n  lr: 1\n  lr: 2\n", 3, "trainer.lr", "twice"),
        ("trainer:\n  lr: [1\n", 3, "", "not YAML"),
        ("env:\n  options:\n    a: [1]\n", 3, "env.options", "must be"),
        ("run:\n  seed: !!python/name:os.system x\n", 2, "run.seed", "cannot read the value"),
        ("- 1\n", 1, "", "mappings"),
        ("env:\n  trusted_modules: my_envs\n", 2, "env.trusted_modules", "write [my_envs]"),
        ("trainer:\n  lr: .nan\n", 2, "trainer.lr", "must be"),
        ("data:\n  mixture: {a: {path: x, weight: 1e308}}\n", 2, "data.mixture.a.weight", "must be"),
        ("data:\n  curriculum: {band: [0.1]}\n", 2, "data.curriculum.band", "too few"),
        ("data:\n  mixture:\n    a: {weight: 2}\n", 3, "data.mixture.a.path", "has no default"),
        ("scorers:\n  judge:\n    falback: refuse\n", 3, "scorers.judge.falback", "mean scorers.judge.fallback?"),
        ("scorers:\n  judge:\n    url: localhost:1\n", 3, "scorers.judge.url", "http:// or https://"),
        ("scorers:\n  Judge: {use: 'a:b'}\n", 2, "scorers.Judge", "lower-case"),
        ("run:\n  name: ../x\n", 2, "run.name", "because it names a folder"),
        (
            "generator:\n  engines: {minimum: 1, max: 2}\n",
            2,
            "generator.engines.minimum",
            "mean generator.engines.min?",
        ),
        ("generator:\n  engines: {min: 0}\n", 2, "generator.engines.min", "must be"),
        ("generator:\n  engines: two\n", 2, "generator.engines", "a section, not"),
        ("trainer:\n  compile: maybe\n", 2, "trainer.compile", "must be"),
        ("model:\n  lora: {targets: q_proj}\n", 2, "model.lora.targets", "write [q_proj]"),
        ("generator:\n  stop: ['']\n", 2, "generator.stop", "must have"),
    ],
)
def test_a_mistake_is_named_by_file_line_path_and_the_nearest_valid_key(
    tmp_path: Path, text: str, line: int, path: str, hint: str
) -> None:
    file = write(tmp_path, "c.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}  {path}") and hint in message and "\n" not in message


@pytest.mark.parametrize(
    "word",
    [
        "buffer.lookahead=true",
        "trainer.betas=[false,0.9]",
        "trainer.ranks=0",
        "trainer.lr",
    ],
)
def test_a_wrong_override_names_itself(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"^override '?{re.escape(word)}'?: "):
        load_config([], [word])


def test_all_mistakes_are_reported_at_once_one_line_each(tmp_path: Path) -> None:
    """A combination with a key that is wrong, or was meant by an unknown one, is not judged."""
    written = "trainer: {lrr: 1, ranks: 0}\nenv: {options: {a: [1]}}\nmodel: {make: {}}\ndata: {make_rows: 9}\n"
    together = "algorithm: {credit: return_to_go, retruns: sum}\nweights: {verify: true, kv_cache: keep}\n"
    with pytest.raises(ConfigError) as caught:
        load([write(tmp_path, "c.yaml", written + together)], rules=problems)
    found = re.findall(r"c.yaml:\d  (\S+):", str(caught.value))
    assert found == ["env.options.a", "algorithm.retruns", "trainer.ranks", "trainer.lrr", "weights.verify"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"none\.yaml: cannot read the configuration file: No such file"),
        (b"#" * 10_000_001, "has more than 10000000 characters"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a: &a [*a]\n", "not a configuration"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "not a configuration"),
        (
            b"a: &a [1]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n, n, n - 1, n - 1) for n in range(98, 123)),
            "10000 values",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "none.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_config([file])
    with pytest.raises(UserError, match="cannot read"):
        load_config([tmp_path])


@pytest.mark.parametrize(
    "override",
    [
        "run.name=" + "a b" * 5000,
        "run.seed=" + "9" * 6000,
        "algorithm.estimator=" + "x" * 5000 + ":",
        "run.name='a\nb'",
        "x" * 5000 + "=1",
        "--" + "x" * 5000,
        'run={"a\\nb": 1}',
    ],
)
def test_a_mistake_is_one_line_that_repeats_only_the_beginning_of_a_long_value(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load_config([Path("configs/quickstart.yaml")], [override]))
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 800


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config([write(tmp_path, "empty.yaml", "# nothing\n")]) == Config()


@given(st.text(max_size=200), st.lists(st.text(alphabet="abc.=-[]{}:'\"!&*", max_size=12), max_size=4))
def test_any_text_and_any_override_is_a_configuration_or_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, overrides: list[str]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8", errors="ignore")
    for files, words in (([file], []), ([], overrides)):
        try:
            load_config(files, words)
        except UserError as error:
            assert str(error)


def test_every_path_that_goes_to_other_nodes_is_absolute() -> None:
    paths = ["model.path=m", "data.train=t", "data.mixture.a.path=a", "data.eval.e=e", "model.adapter=c"]
    config = with_absolute_paths(load_config([], [*paths, "env.workdir=n"]))
    relative = load_config([], paths)
    named = re.findall(rf'"{Path.cwd()}/(\w)"', config.model_dump_json())
    assert sorted(named) == sorted("mtaecn")
    assert with_absolute_paths(config) == config != with_absolute_paths(relative)
