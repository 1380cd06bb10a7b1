"""Every file for Kubernetes is valid, strictly: a misspelt field in any of them is found before a cluster sees it.

Kubernetes' own kinds are held against its published schemas, and so are the pod templates in the operators' kinds. Of
these, FIELDS lists the fields that are used here, which KubeRay 1.7.0 and the Prometheus operator have.
"""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from service.config import check, load_config

FOLDER = Path("deploy/kuberay")
VERSION = "1.34"
Document = dict[str, Any]

FIELDS = """
apiVersion kind metadata spec name namespace
rayVersion authOptions mode gcsFaultToleranceOptions redisAddress redisPassword valueFrom secretKeyRef key
enableInTreeAutoscaling autoscalerOptions version upscalingMode idleTimeoutSeconds resources securityContext
headGroupSpec serviceType workerGroupSpecs groupName replicas minReplicas maxReplicas
entrypoint submissionMode backoffLimit shutdownAfterJobFinishes ttlSecondsAfterFinished rayClusterSpec
selector podMetricsEndpoints port path interval relabelings sourceLabels targetLabel replacement regex action
groups rules alert record expr for
"""
FREE = {
    "labels", "annotations", "matchLabels", "rayStartParams", "nodeSelector", "data", "limits", "requests",
    "template", "resources", "securityContext",
}  # fmt: skip
"""Mappings whose keys are anybody's choice, or that Kubernetes' own schemas describe."""


def documents(folder: Path) -> list[Document]:
    """What `kubectl apply -k` would send; without kubectl, the files as they are."""
    if shutil.which("kubectl"):
        built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=240)
        assert built.returncode == 0, built.stderr
        return list(yaml.safe_load_all(built.stdout))
    files = [file for file in sorted(FOLDER.glob("base/*.yaml")) if file.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


BASE = documents(FOLDER / "base")
ELASTIC = list(yaml.safe_load_all((FOLDER / "elastic/networkpolicy.yaml").read_text()))
"""What the component `elastic` adds."""
MADE = [
    *BASE,
    *ELASTIC,
    yaml.safe_load((FOLDER / "fill.yaml").read_text()),
    *[document for document in documents(FOLDER / "job") if document["kind"] in ("RayJob", "PodMonitor")],
]
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def validate(document: Document) -> None:
    """Raises where the document is not valid."""
    if not document["apiVersion"].startswith(("ray.io/", "monitoring.coreos.com/")):
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    for template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pod, VERSION, strict=True)
    if unknown := fields(document) - {*FIELDS.split(), *FREE}:
        raise jsonschema.ValidationError(f"{unknown} are no fields")


def fields(value: Any) -> set[str]:
    """The names of all fields in a document, except in mappings whose keys are free or that have a published schema."""
    if isinstance(value, list):
        return {name for each in value for name in fields(each)}
    if not isinstance(value, dict):
        return set()
    return {*value, *(name for key, each in value.items() if key not in FREE for name in fields(each))}


def pod_templates(document: Document) -> list[Document]:
    spec = document.get("spec", {})
    cluster = spec.get("rayClusterSpec", spec)
    if document["kind"] in ("RayCluster", "RayJob"):
        return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return {"StatefulSet": lambda: [spec["template"]], "Pod": lambda: [document]}.get(document["kind"], list)()


def name_of(document: Document) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


@pytest.mark.parametrize("document", MADE, ids=name_of)
def test_the_document_is_valid(document: Document) -> None:
    validate(document)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate({**document, "misspelt": "x"})


@pytest.mark.parametrize("document", [d for d in MADE if pod_templates(d)], ids=name_of)
def test_pods_are_locked_down(document: Document) -> None:
    for template in pod_templates(document):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert "add" not in security["capabilities"]
            assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def ray_clusters() -> list[Document]:
    return [d["spec"].get("rayClusterSpec", d["spec"]) for d in MADE if d["kind"] in ("RayCluster", "RayJob")]


def test_ray_asks_for_a_token_and_keeps_its_state() -> None:
    for cluster in ray_clusters():
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
        for group in [*cluster["workerGroupSpecs"], cluster["headGroupSpec"]]:
            env = {e["name"]: e.get("value") for e in group["template"]["spec"]["containers"][0]["env"]}
            assert env["RAY_AUTH_MODE"] == "token"
        assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300, "a stopped job has time for its final weights"


def test_the_versions_are_those_of_the_lock_and_of_the_project() -> None:
    (ray,) = re.findall(r"^ray==(\S+)$", Path("requirements/cuda.txt").read_text(), re.MULTILINE)
    assert {cluster["rayVersion"] for cluster in ray_clusters()} == {ray}
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    (image,) = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())["images"]
    assert image["newTag"] == f"{project['version']}-cuda"
    dockerfile = Path("deploy/container/Dockerfile").read_text()
    assert set(re.findall(r"baton:(\S+?)-(?:cpu|cuda)", dockerfile)) == {project["version"]}
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)", dockerfile, re.MULTILINE)
    assert project["requires-python"] == f">={python}"


def needed(value: Any) -> set[tuple[str, str]]:
    """Kinds and names of what the pods in a document refer to."""
    if isinstance(value, list):
        return {pair for each in value for pair in needed(each)}
    if not isinstance(value, dict):
        return set()
    found = {pair for each in value.values() for pair in needed(each)}
    references = {
        "secretKeyRef": ("Secret", "name"),
        "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
        "configMap": ("ConfigMap", "name"),
        "serviceAccountName": ("ServiceAccount", ""),
    }
    for field, (kind, name) in references.items():
        if field in value and (not name or isinstance(value[field], dict)):
            found.add((kind, value[field][name] if name else value[field]))
    return found


@needs_kubectl
def test_the_commands_of_the_page_make_all_that_the_training_needs() -> None:
    section = Path("docs/operations.md").read_text().partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^kubectl (.+)$", section, re.MULTILINE)
    first, secret, volume, _, model, data, _, training, _ = commands
    assert first == f"apply -f {FOLDER}/base/namespace.yaml" and training == f"apply -k {FOLDER}/job"
    assert "openssl rand -hex 32" in secret
    files = [Path(file).read_text() for file in re.findall(r"-f (\S+)", volume)]
    applied = [document for text in files for document in yaml.safe_load_all(text)]
    applied += documents(FOLDER / "job")
    made = {(document["kind"], document["metadata"]["name"]) for document in applied}
    made.add(("Secret", re.findall(r"secret generic (\S+)", secret)[0]))
    assert needed(applied) - made == set()
    assert "/config/run.yaml" in next(d["spec"]["entrypoint"] for d in applied if d["kind"] == "RayJob")
    run = yaml.safe_load((FOLDER / "job/run.yaml").read_text())
    copied = [re.fullmatch(r"cp (?:\S+/)?(\S+) baton/baton-fill:(\S+)", command) for command in (model, data)]
    assert [f"{of[2]}/{of[1]}" for of in copied if of] == [run["model"]["path"], run["data"]["train"]]


def test_gpu_workers_have_rdma_shared_memory_and_a_fixed_number() -> None:
    for cluster in ray_clusters():
        assert {group["groupName"] for group in cluster["workerGroupSpecs"]} == {"trainer", "generator"}
        for group in cluster["workerGroupSpecs"]:
            assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
            pod = group["template"]["spec"]
            limits = pod["containers"][0]["resources"]["limits"]
            assert limits["nvidia.com/gpu"] == "8" and limits["rdma/ib"] == "1"
            shared = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
            assert shared["emptyDir"]["medium"] == "Memory"
            assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def with_component(name: str, folder: Path) -> list[Document]:
    """What an overlay of the base with a component makes, all of it valid."""
    shutil.copytree(FOLDER, folder / "kuberay")
    (folder / "kuberay/own").mkdir()
    overlay = {"resources": ["../base"], "components": [f"../{name}"]}
    (folder / "kuberay/own/kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = documents(folder / "kuberay/own")
    for document in made:
        validate(document)
    return made


@needs_kubectl
def test_the_elastic_variant_grows_and_shrinks_the_generators_and_nothing_else(tmp_path: Path) -> None:
    made = with_component("elastic", tmp_path)
    cluster = next(document["spec"] for document in made if document["kind"] == "RayCluster")
    assert cluster["enableInTreeAutoscaling"]
    sizes = {group["groupName"]: (group["minReplicas"], group["maxReplicas"]) for group in cluster["workerGroupSpecs"]}
    assert sizes["trainer"] == (1, 1) and sizes["generator"][0] < sizes["generator"][1]
    mounts = [group["template"]["spec"]["automountServiceAccountToken"] for group in cluster["workerGroupSpecs"]]
    assert cluster["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] and not any(mounts)
    policy = next(document["spec"] for document in made if document["metadata"]["name"] == "baton-autoscaler")
    # It opens a way out only; what may come in is the cluster's own policy.
    assert policy["podSelector"]["matchLabels"]["baton/role"] == "head" and "ingress" not in policy


@needs_kubectl
def test_the_efa_variant_asks_for_efa_instead_of_infiniband(tmp_path: Path) -> None:
    made = with_component("efa", tmp_path)
    cluster = next(document["spec"] for document in made if document["kind"] == "RayCluster")
    for group in cluster["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        env = {each["name"]: each["value"] for each in container["env"]}
        assert env["FI_PROVIDER"] == "efa" and "NCCL_IB_HCA" not in env
        for kind in ("requests", "limits"):
            assert container["resources"][kind]["vpc.amazonaws.com/efa"] == "32"
            assert "rdma/ib" not in container["resources"][kind]


def test_monitors_and_policies_name_ports_that_containers_have() -> None:
    head = ray_clusters()[0]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {port["name"] for port in head["ports"]}
    monitored = {e["port"] for d in MADE if d["kind"] == "PodMonitor" for e in d["spec"]["podMetricsEndpoints"]}
    policy = next(d for d in BASE if name_of(d) == "NetworkPolicy-baton")
    allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
    assert monitored <= allowed <= ports and "baton" in monitored


def test_strangers_reach_neither_ray_nor_redis() -> None:
    policies = {name_of(d): d["spec"] for d in BASE if d["kind"] == "NetworkPolicy"}
    for spec in policies.values():
        assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
        assert all(rule.get("from") for rule in spec["ingress"])
    open_ports = [rule for rule in policies["NetworkPolicy-baton"]["ingress"] if "ports" not in rule]
    assert [rule["from"] for rule in open_ports] == [
        [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "baton"}}}]
    ]


@needs_kubectl
def test_the_job_brings_the_same_cluster_with_its_configuration_and_no_second_one() -> None:
    made = {name_of(document): document for document in documents(FOLDER / "job")}
    assert "RayCluster-baton" not in made
    cluster = made["RayJob-baton"]["spec"]["rayClusterSpec"]
    base = next(d for d in BASE if d["kind"] == "RayCluster")["spec"]
    assert cluster["workerGroupSpecs"] == base["workerGroupSpecs"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert {"name": "run", "configMap": {"name": "baton-run"}} in head["volumes"]
    assert made["ConfigMap-baton-run"]["data"]["run.yaml"] == (FOLDER / "job/run.yaml").read_text()


def test_the_jobs_configuration_passes_and_fits_the_cluster() -> None:
    config = load_config([FOLDER / "job/run.yaml"], ["run.dir=/runs", "metrics.host=0.0.0.0"])
    check(config)
    groups = {group["groupName"]: group["replicas"] for group in ray_clusters()[0]["workerGroupSpecs"]}
    assert config.trainer.ranks == 8 * groups["trainer"]
    assert config.generator.engines * config.generator.tensor_parallel_size == 8 * groups["generator"]


def test_the_image_holds_what_the_dockerfile_copies_and_runs_as_nobody_special() -> None:
    lines = Path("deploy/container/Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    ignored = Path(".dockerignore").read_text()
    for name in copied:
        assert Path(name).exists() and f"!{name}\n" in ignored, name
    assert "USER 1000" in lines and json.dumps(["baton", "run"])[1:-1] in lines[-1]
