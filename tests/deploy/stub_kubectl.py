"""A stand-in of `kubectl` with a cluster in a file: it refuses what an API server refuses, and what would stay pending.

Kustomizations are built by the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

STATE = Path("cluster.json")


class Cluster:
    """What was applied, by kind/namespace/name, and the files that were copied into the volume."""

    def __init__(self) -> None:
        held = json.loads(STATE.read_text()) if STATE.exists() else {"things": {}, "files": []}
        self.things: dict[str, Any] = held["things"]
        self.files: list[str] = held["files"]

    def keep(self) -> None:
        STATE.write_text(json.dumps({"things": self.things, "files": self.files}))

    def add(self, document: dict[str, Any], namespace: str) -> None:
        kind, meta = document["kind"], document["metadata"]
        if kind == "Namespace":
            namespace = ""
        else:
            namespace = meta.get("namespace", namespace)
            if f"Namespace//{namespace}" not in self.things:
                sys.exit(f"Error from server (NotFound): namespace {namespace} not found")
        self.things[f"{kind}/{namespace}/{meta['name']}"] = document
        print(kind, meta["name"], "applied")

    def settle(self) -> None:
        """Exits where a pod that was applied would wait for ever."""
        for key, document in self.things.items():
            namespace = key.split("/")[1]
            for kind, name in sorted(needed(document)):
                if f"{kind}/{namespace}/{name}" not in self.things:
                    sys.exit(f"{key} stays pending: {kind} {name} is missing")
        for key, document in self.things.items():
            if key.startswith("RayJob/"):
                self.settle_run(key, document)

    def settle_run(self, key: str, job: dict[str, Any]) -> None:
        """Exits where the run of a job would miss its configuration or what that names."""
        config = self.things[f"ConfigMap/{key.split('/')[1]}/baton-run"]["data"]["run.yaml"]
        assert "/config/run.yaml" in job["spec"]["entrypoint"]
        run = yaml.safe_load(config)
        for file in (run["model"]["path"], run["data"]["train"]):
            if file not in self.files:
                sys.exit(f"{key} fails: {file} is not in the volume")


def needed(value: Any) -> set[tuple[str, str]]:
    """Kinds and names of what pods in a document refer to."""
    if isinstance(value, list):
        return {pair for each in value for pair in needed(each)}
    if not isinstance(value, dict):
        return set()
    found = {pair for each in value.values() for pair in needed(each)}
    if "secretKeyRef" in value:
        found.add(("Secret", value["secretKeyRef"]["name"]))
    if "persistentVolumeClaim" in value:
        found.add(("PersistentVolumeClaim", value["persistentVolumeClaim"]["claimName"]))
    if isinstance(value.get("configMap"), dict):
        found.add(("ConfigMap", value["configMap"]["name"]))
    if "serviceAccountName" in value:
        found.add(("ServiceAccount", value["serviceAccountName"]))
    return found


def options(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The plain words, and the values of -n, -f and -k."""
    rest, given, each = [], {"-n": ["default"], "-f": [], "-k": []}, iter(words)
    for word in each:
        if word in given:
            given[word].append(next(each))
        else:
            rest.append(word)
    return rest, given


def main() -> None:
    words, given = options(sys.argv[1:])
    namespace, cluster = given["-n"][-1], Cluster()
    match words:
        case ["apply"]:
            texts = [Path(file).read_text() for file in given["-f"]]
            for folder in given["-k"]:
                texts.append(subprocess.check_output([os.environ["REAL_KUBECTL"], "kustomize", folder], text=True))
            for document in [one for text in texts for one in yaml.safe_load_all(text)]:
                cluster.add(document, namespace)
            cluster.settle()
        case ["create", "secret", "generic", name, literal]:
            assert len(literal.removeprefix("--from-literal=password=")) >= 32, literal
            cluster.add({"kind": "Secret", "metadata": {"name": name}}, namespace)
        case ["wait", "--for=condition=Ready", pod, _] if pod.startswith("pod/"):
            existing(cluster, namespace, pod.removeprefix("pod/"))
        case ["cp", source, target]:
            where, _, folder = target.partition(":")
            container = existing(cluster, *where.split("/"))["spec"]["containers"][0]
            assert Path(source).exists() and folder in container["command"][-1].split(), (source, folder)
            assert any(PurePosixPath(folder).is_relative_to(mount["mountPath"]) for mount in container["volumeMounts"])
            cluster.files.append(f"{folder}/{Path(source).name}")
        case ["delete", "pod", name]:
            existing(cluster, namespace, name)
            del cluster.things[f"Pod/{namespace}/{name}"]
            print("deleted Pod", name)
        case _:
            sys.exit(f"the stand-in does not know: kubectl {' '.join(sys.argv[1:])}")
    cluster.keep()


def existing(cluster: Cluster, namespace: str, pod: str) -> dict[str, Any]:
    """The pod; exits where there is none."""
    if (found := cluster.things.get(f"Pod/{namespace}/{pod}")) is None:
        sys.exit(f"Error from server (NotFound): pods {pod} not found")
    held: dict[str, Any] = found
    return held


if __name__ == "__main__":
    main()
