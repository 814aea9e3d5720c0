"""Job files for clouds: a SkyPilot task, and for Kubernetes a Job on one host or a JobSet on several.

Both run the folder's train.sh, which resumes from the run's last checkpoint, so that a job that was preempted or restarted goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowpeak.cli.output import to_yaml

LEAD_SECONDS = 600  # from the signal that ends a job to its kill, in which the run saves
_MAX_RESTARTS = 8
_SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "LOWPEAK_SERVER_TOKEN")
_IMAGE = "lowpeak:latest"  # built from the Containerfile
# SkyPilot's names of cards that it does not call as the table does, in capitals.
_SKY_CARDS = {
    "a100": "A100-80GB", "a100-40": "A100", "v100": "V100-32GB", "v100-16": "V100", "a10": "A10G", "rtxa6000": "RTXA6000",
    "rtx6000ada": "RTX6000-Ada", "rtxpro6000": "RTXPRO6000",
}  # fmt: skip
# A preempted pod does not count as a failure.
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
_IGNORING_DISRUPTIONS = {"rules": [{"action": "Ignore", "onPodConditions": [_DISRUPTED]}]}
_SKY_NOTE = """\
# sky jobs launch {file} --secret HF_TOKEN
# A managed job, which SkyPilot starts again after a preemption; output_dir must be in a mounted bucket to be found then.
"""
_SKY_SERVER_NOTE = (
    "# The run's vLLM server is a task of its own: start serve.sh on {gpus} GPUs and name its URL in run.yaml.\n"
)
_KUBERNETES_NOTE = """\
# kubectl apply -f {file}
# Needs the image {image} (Containerfile), the claim {name} with this folder and the data, mounted at /work, and if wanted a secret
# {name} with {secrets}.{jobset}
"""


@dataclass(frozen=True)
class CloudJob:
    """A run to start: its command, its train.sh, and the command of its vLLM server, if it has one."""

    kind: str
    script: Path
    hosts: int
    gpus_per_host: int
    card: str
    server: str | None = None
    server_gpus: int = 1

    @property
    def name(self) -> str:
        return f"lowpeak-{self.kind}"


def sky_file(job: CloudJob, file: Path) -> str:
    """Return a SkyPilot task: one task of all hosts, with secrets by reference."""
    card = _SKY_CARDS.get(job.card, job.card.upper())
    recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": _MAX_RESTARTS}
    task = {
        "name": job.name,
        "num_nodes": job.hosts,
        "workdir": ".",
        "resources": {"accelerators": f"{card}:{job.gpus_per_host}", "job_recovery": recovery},
        "secrets": dict.fromkeys(_SECRETS, ""),
        "setup": "pip install '.[vllm,deepspeed,peft]'",
        "run": 'export HOST_0=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) RANK_OF_HOST=$SKYPILOT_NODE_RANK\n'
        f"exec bash {job.script}\n",
    }
    server = "" if job.server is None else _SKY_SERVER_NOTE.format(gpus=job.server_gpus)
    return _SKY_NOTE.format(file=file) + server + to_yaml(task)


def kubernetes_file(job: CloudJob, file: Path) -> str:
    """Return a Job, or a JobSet for several hosts or a run with a vLLM server."""
    is_set = job.hosts > 1 or job.server is not None
    jobset = "\n# Needs JobSet (jobset.sigs.k8s.io) in the cluster." if is_set else ""
    if job.server is not None:
        jobset += f"\n# vllm_server_base_url is http://{job.name}-rollout-0-0.{job.name}:8000."
    note = _KUBERNETES_NOTE.format(
        file=file, image=_IMAGE, name=job.name, secrets=" and ".join(_SECRETS), jobset=jobset
    )
    return note + to_yaml(_job_set(job) if is_set else _job(job))


def _job(job: CloudJob) -> dict[str, Any]:
    pod = _pod(job, job.gpus_per_host, f"exec bash {job.script}")
    spec = {"backoffLimit": _MAX_RESTARTS, "podFailurePolicy": _IGNORING_DISRUPTIONS, "template": pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec}


def _job_set(job: CloudJob) -> dict[str, Any]:
    """Return a JobSet whose pods find the first host by its name; all start again if one fails."""
    script = (
        f"export HOST_0={job.name}-trainer-0-0.{job.name} RANK_OF_HOST=$JOB_COMPLETION_INDEX\nexec bash {job.script}\n"
    )
    groups = [_group("trainer", job.hosts, _pod(job, job.gpus_per_host, script))]
    if job.server is not None:
        groups.append(_group("rollout", 1, _pod(job, job.server_gpus, job.server)))
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": _MAX_RESTARTS},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
        "replicatedJobs": groups,
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name}, "spec": spec}


def _group(name: str, hosts: int, pod: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": _IGNORING_DISRUPTIONS,
        "template": pod,
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _pod(job: CloudJob, gpus: int, script: str) -> dict[str, Any]:
    resource = "amd.com/gpu" if job.card.startswith("mi") else "nvidia.com/gpu"
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name, "optional": True}}}
        for name in _SECRETS
    ]
    container = {
        "name": "lowpeak",
        "image": _IMAGE,
        "workingDir": "/work",
        "command": ["bash", "-c", script],
        "env": secrets,
        "resources": {"limits": {resource: gpus}},
        "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": job.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": LEAD_SECONDS,
            "containers": [container],
            "volumes": volumes,
        }
    }
