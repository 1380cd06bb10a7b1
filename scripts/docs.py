"""The files that are generated from the code: `python -m scripts.docs` writes them, `--check` compares them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from scripts.dashboards.grafana import dashboards_page, grafana_json
from scripts.dashboards.pages import DASHBOARDS
from service.columns import columns_of
from service.config.engine_options import REFUSED
from service.config.load import section_of
from service.config.section import MOST
from service.config.tree import Config
from service.observe.metrics_table import STEP_KEYS, TABLE
from service.observe.not_learning import SYMPTOMS
from service.types import Steps

ROOT = Path(__file__).parent.parent

TABLE_HEAD = "|key|type|default|meaning|\n|-|-|-|-|\n"

METRICS_INTRO = """\
# Metrics

Made from `service/observe/metrics_table.py` by `python -m scripts.docs`.

A run serves its metrics at `/metrics`, and writes a line of `metrics.jsonl` for each optimizer step; TensorBoard and
Weights & Biases use the keys of that file. Lengths are in tokens, times in seconds.

## Prometheus

Every series has the labels `role` and `ident` of the actor that measured it. No label holds text of a prompt, and
label values are bounded. Counters end in `_total`; **h** marks histograms; all others are gauges. Buckets of lengths
are sixteenths of `max_input_length + max_generate_length`, and `metrics.long_batch_tokens`, an alert's threshold.
`key`: the key of `metrics.jsonl` with the same figure. Ray's own endpoints also serve IN_RAY,
with the run's name as a label.

|metric|meaning|key|
|-|-|-|
"""

OPTIONS_INTRO = """\
# Options of vLLM's engines

Made from `service/config/engine_options.py` by `python -m scripts.docs`.

`generator.engine_options` sets arguments of vLLM's `AsyncEngineArgs` (0.32.0) by their names:

```yaml
generator:
  engine_options: {max_num_batched_tokens: 16384, pipeline_parallel_size: 2}
```

vLLM checks the values when an engine starts; a wrong value ends the run with a line that says so. An engine has
`generator.tensor_parallel_size` times `pipeline_parallel_size` GPUs of one node; `enable_expert_parallel` divides the
experts among the same GPUs. The engines of teachers do not get these options.

Some options change the log-probabilities that an engine computes, such as `kv_cache_dtype: fp8` and `model_impl`. With
them look at the importance ratios of the first optimizer steps, and turn on `algorithm.correction`.

These arguments are refused before a run starts (`.*` stands for any characters):

| arguments | why |
|---|---|
"""

KEYS_INTRO = """
## Further keys of `metrics.jsonl`

Means are per trajectory unless the key says otherwise. `<versions>`: a range of staleness, `0`, `1`, `2`, `3_4`, `5_8`
or `9_up`.

|key|meaning|
|-|-|
"""

CONFIG_INTRO = """\
# Configuration

Made from `service/config/` by `python -m scripts.docs`.

Files given with `--config` are merged key by key, later over earlier; `section.key=value` overrides them. An empty
mapping (`env.options={}`) replaces what earlier files set. An unknown key is refused. `baton config show` prints the
resolved configuration, `baton config schema` its JSON schema. `baton config validate` also reads datasets, makes
environments, imports scorers and tokenizes up to 200 prompts. A broken file is an error (exit code 2); a missing file,
which may be on another machine, is a note. Lengths are in tokens, times in seconds, memory in bytes.
"""


def metrics_page() -> str:
    """The text of `docs/metrics.md`."""
    text = METRICS_INTRO.replace("IN_RAY", _as_code(f"ray_{metric.name}" for metric in TABLE if metric.in_ray))
    for metric in TABLE:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        kind = "**h** " if metric.kind == "histogram" else ""
        text += f"|`{metric.name}{labels}`|{kind}{metric.help}|{_as_code([metric.key] if metric.key else [])}|\n"
    text += KEYS_INTRO
    return text + "".join(f"|`{key}`|{meaning}|\n" for key, meaning in sorted(STEP_KEYS.items()))


def _as_code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def configuration_page() -> str:
    """The text of `docs/configuration.md`."""
    return CONFIG_INTRO + "".join(_section(name, field) for name, field in Config.model_fields.items())


def _section(path: str, field: FieldInfo) -> str:
    section = section_of(field.annotation)
    if section is None and get_origin(field.annotation) is dict:
        path, section = f"{path}.<name>", section_of(get_args(field.annotation)[1])
    if section is None:
        raise TypeError(f"{path} is no section")
    optional = "" if field.default else " (optional)"
    text = f"\n## `{path}`{optional}\n\n{(section.__doc__ or '').strip().splitlines()[0]}\n\n{TABLE_HEAD}"
    schemas = section.model_json_schema()["properties"]
    inner: list[str] = []
    for name, child in section.model_fields.items():
        if section_of(child.annotation) is not None:
            inner.append(_section(f"{path}.{name}", child))
            continue
        meaning = (child.description or "").replace("\n", " ").replace("|", "\\|")
        value = list(child.default) if isinstance(child.default, tuple) else child.default
        default = "none" if value is None else f"`{value}`"
        text += f"|`{name}`|{_type(schemas[name])}|{default}|{meaning}|\n"
    return text + "".join(inner)


LARGE = 1e6
"""Bounds from here on are not on the page of settings."""
_KINDS = {"integer": "int", "boolean": "bool"}
_BOUNDS = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))


def _type(schema: dict[str, Any]) -> str:
    """The type in the words of the JSON schema, with its bounds."""
    if "anyOf" in schema:
        return " or ".join(_type(member) for member in schema["anyOf"] if member.get("type") != "null")
    if "enum" in schema:
        return _as_code(schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        items = schema.get("items") or schema.get("prefixItems", [{}])[0]
        return f"list of {_type(items)}"
    if schema.get("format") == "path":
        return "path"
    if schema.get("type") == "object":
        return "mapping"
    bounds = " ".join(f"{sign} {schema[key]:g}" for key, sign in _BOUNDS if abs(schema.get(key, MOST)) < LARGE)
    kind = schema.get("type", "value")
    return f"{_KINDS.get(kind, kind)} {bounds}".strip()


COLUMNS_BEGIN = "<!-- columns of a step, made from service/types.py by `python -m scripts.docs` -->\n"
COLUMNS_END = "<!-- end of the columns -->\n"


SYMPTOMS_BEGIN = "<!-- symptoms, made from service/observe/not_learning.py by `python -m scripts.docs` -->\n"
SYMPTOMS_END = "<!-- end of the symptoms -->\n"


def formats_page() -> str:
    """`docs/formats.md` with the table of a step's columns; the rest of the page is written by hand."""
    lines = "".join(
        f"| `{column.name}` | {column.dtype} | {'-' if (fill := column.about.fill) is None else f'{fill:g}'} | "
        f"{column.about.meaning}{'; optional' if column.optional else ''} |\n"
        for column in columns_of(Steps).all
    )
    head = "| column | type | fill | meaning |\n|---|---|---|---|\n"
    return _with_table("docs/formats.md", COLUMNS_BEGIN, head + lines, COLUMNS_END)


def not_learning_page() -> str:
    """`docs/not-learning.md` with the table of symptoms; the rest of the page is written by hand."""
    lines = ""
    for name, key, comparison, threshold, _ in SYMPTOMS:
        of_what = " times that of the first steps" if comparison == "fallen to" else ""
        lines += f"| [`{name}`](#{name}) | `{key}` | {comparison} {threshold:g}{of_what} |\n"
    head = "| symptom | figure, mean of the last steps | named when it is |\n|---|---|---|\n"
    return _with_table("docs/not-learning.md", SYMPTOMS_BEGIN, head + lines, SYMPTOMS_END)


def _with_table(page: str, begin: str, table: str, end: str) -> str:
    """The page with the table between these two lines replaced."""
    before, _, rest = (ROOT / page).read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def prometheus_rule() -> str:
    """The alert rules in the form of the Prometheus operator."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8"))
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton", "labels": {"app.kubernetes.io/name": "baton"}},
        "spec": {"groups": rules["groups"]},
    }
    head = "# Made from deploy/prometheus/rules.yaml by `python -m scripts.docs`.\n"
    text: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return head + text


def engine_options_page() -> str:
    """The page about `generator.engine_options`: a row for the arguments that are refused for the same reason."""
    rows = ((", ".join(f"`{name}`" for name in names.split()), why) for why, names in REFUSED.items())
    return OPTIONS_INTRO + "".join(f"| {names.replace('|', chr(92) + '|')} | {why} |\n" for names, why in rows)


FILES: dict[str, Callable[[], str]] = {
    "docs/metrics.md": metrics_page,
    "docs/configuration.md": configuration_page,
    "docs/formats.md": formats_page,
    "docs/not-learning.md": not_learning_page,
    "docs/dashboards.md": dashboards_page,
    "docs/engine-options.md": engine_options_page,
    "deploy/kuberay/base/prometheusrule.yaml": prometheus_rule,
    **{f"deploy/grafana/dashboards/{d.uid}.json": partial(grafana_json, d) for d in DASHBOARDS},
}


def main(argv: Sequence[str]) -> int:
    """Write the files, or with `--check` say which are not current."""
    is_check, found_old = "--check" in argv, False
    for name, made in FILES.items():
        file, text = ROOT / name, made()
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        found_old = True
        if not is_check:
            file.write_text(text, encoding="utf-8")
        print(f"{name} is not current: run python -m scripts.docs" if is_check else f"wrote {name}")
    return 1 if is_check and found_old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
