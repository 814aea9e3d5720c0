"""Job files for clouds: what a cluster reads from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lowpeak.cli.cloud_files import LEAD_SECONDS, CloudJob, kubernetes_file, sky_file

ONE = CloudJob("grpo", Path("plan/train.sh"), hosts=1, gpus_per_host=8, card="h100")
SERVED = replace(ONE, hosts=2, server="exec bash plan/serve.sh", server_gpus=4)


def test_a_sky_task_has_all_hosts_and_its_secrets_by_reference():
    task = yaml.safe_load(sky_file(replace(SERVED, card="a100"), Path("plan/sky.yaml")))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "A100-80GB:8"
    assert set(task["secrets"].values()) == {""}
    assert task["run"].splitlines()[-1] == "exec bash plan/train.sh"
    assert "start serve.sh on 4 GPUs" in sky_file(SERVED, Path("plan/sky.yaml"))


def pod_of(group):
    return group["template"]["spec"]


@pytest.mark.parametrize(("card", "resource"), [("h100", "nvidia.com/gpu"), ("mi300x", "amd.com/gpu")])
def test_a_job_on_one_host_has_its_gpus_and_time_to_save(card, resource):
    job = yaml.safe_load(kubernetes_file(replace(ONE, card=card), Path("plan/k8s.yaml")))
    pod = pod_of(job["spec"])
    assert (job["kind"], pod["terminationGracePeriodSeconds"]) == ("Job", LEAD_SECONDS)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {resource: 8}
    assert all("valueFrom" in secret for secret in container["env"])


def test_several_hosts_and_a_server_are_groups_of_a_job_set():
    text = kubernetes_file(SERVED, Path("plan/k8s.yaml"))
    assert "http://lowpeak-grpo-rollout-0-0.lowpeak-grpo:8000" in text
    job_set = yaml.safe_load(text)
    groups = {group["name"]: group["template"]["spec"] for group in job_set["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in groups.items()} == {"trainer": 2, "rollout": 1}
    trainer, server = (pod_of(groups[name])["containers"][0] for name in ("trainer", "rollout"))
    assert "HOST_0=lowpeak-grpo-trainer-0-0.lowpeak-grpo" in trainer["command"][-1]
    assert server["command"][-1] == "exec bash plan/serve.sh"
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert job_set["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
