"""The manifests of examples/kubernetes/: against the published schemas, and what their parts have to agree on.

kubeflow_trainer_api has the schemas of Kubeflow Trainer, of JobSet and of Kubernetes itself. There is no such small
package for PyTorchJob: its own fields are compared with those of its CRD (Training Operator 1.9), and its pods with the
schema of Kubernetes.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY

models = pytest.importorskip("kubeflow_trainer_api.models")
PLACE = REPOSITORY / "examples" / "kubernetes"

KINDS = {
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "Job": "IoK8sApiBatchV1Job",
    "Service": "IoK8sApiCoreV1Service",
}
PYTORCH_JOB = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
REPLICA = {"replicas", "restartPolicy", "template"}


def read(file: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((PLACE / file).read_text())}


def check(model: str, document: dict[str, Any]) -> None:
    """Types and required fields are checked when it is read; a field that is unknown is not there afterwards."""
    assert pruned(getattr(models, model).from_dict(document).to_dict(), document) == document


def pruned(found: Any, document: Any) -> Any:
    """``found`` without the defaults that the document does not give."""
    if isinstance(found, dict):
        return {key: pruned(value, document[key]) for key, value in found.items() if key in document}
    if isinstance(found, list):
        return [pruned(*pair) for pair in zip(found, document, strict=True)]
    return found


@pytest.mark.parametrize("file", ["trainjob.yaml", "job.yaml"])
def test_the_schemas(file: str) -> None:
    for kind, document in read(file).items():
        check(KINDS[kind], document)
        broken = {**document, "spec": {**document["spec"], "sepc": 1}}
        with pytest.raises(AssertionError):
            check(KINDS[kind], broken)


def test_the_schema_of_pytorchjob() -> None:
    job = read("pytorchjob.yaml")["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert job["spec"].keys() <= PYTORCH_JOB
    assert isinstance(job["spec"]["nprocPerNode"], str)
    assert job["spec"]["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert replica.keys() <= REPLICA
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        check("IoK8sApiCoreV1PodTemplateSpec", replica["template"])
        assert [each["name"] for each in replica["template"]["spec"]["containers"]] == [
            "pytorch"
        ]  # the operator's name


def jobs() -> dict[str, dict[str, Any]]:
    """The specs of the Jobs, by file."""
    replicated = read("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert [each["name"] for each in replicated] == ["node"]  # Trainer's name
    return {"trainjob.yaml": replicated[0]["template"]["spec"], "job.yaml": read("job.yaml")["Job"]["spec"]}


def pods() -> dict[str, dict[str, Any]]:
    replicas = read("pytorchjob.yaml")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    of_jobs = {file: job["template"]["spec"] for file, job in jobs().items()}
    return {**of_jobs, **{name: replica["template"]["spec"] for name, replica in replicas.items()}}


def test_every_pod_has_shared_memory_and_time_to_save() -> None:
    for name, pod in pods().items():
        assert pod["terminationGracePeriodSeconds"] > 30, name
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory", name
        assert "/data" in mounted


def test_an_eviction_is_no_failure() -> None:
    for name, job in jobs().items():
        disrupted, stopped = job["podFailurePolicy"]["rules"]
        assert (disrupted["action"], stopped["action"]) == ("Ignore", "Ignore")
        assert [each["type"] for each in disrupted["onPodConditions"]] == ["DisruptionTarget"]
        assert stopped["onExitCodes"]["values"] == [143]
        pod = job["template"]["spec"]
        assert stopped["onExitCodes"]["containerName"] == pod["containers"][0]["name"], name
        assert pod["restartPolicy"] == "Never"  # a podFailurePolicy requires it


def test_the_parts_of_the_job_fit_together() -> None:
    service, job = read("job.yaml")["Service"], read("job.yaml")["Job"]
    template = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    flags = dict(flag.split("=", 1) for flag in container["args"] if "=" in flag)
    assert int(flags["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert flags["--master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(flags["--master-port"]) == service["spec"]["ports"][0]["port"]
