"""launch/kubernetes.yaml: fits the schema of Kubernetes, agrees with itself and the launch scripts, and trains.

The last test runs what the containers run, as two real "pods" on loopback."""

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

REPO = Path(__file__).parent.parent
SERVICE, JOB = yaml.safe_load_all((REPO / "launch/kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENV = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}


def validate(resource):
    for version in ("1.31", kubernetes_validate.latest_version()):  # where podFailurePolicy became stable, and now
        kubernetes_validate.validate(resource, version, strict=True)


def test_it_fits_the_schema():
    validate(SERVICE)
    validate(JOB)


@pytest.mark.parametrize(
    "place, wrong",
    [
        (("spec", "template", "spec", "containers", 0, "resource"), {}),  # no such field
        (("spec", "podFailurePolicy", "rules", 0, "onExitCodes", "values"), ["two"]),
        (("spec", "completions"), "two"),
        (("spec", "template", "spec", "volumes", 2, "emptyDir", "kind"), "Memory"),
        (("apiVersion",), "batch/v7"),
    ],
)
def test_a_wrong_field_would_be_noticed(place, wrong):
    resource = copy.deepcopy(JOB)
    *above, last = place
    part = resource
    for key in above:
        part = part[key]
    part[last] = wrong
    with pytest.raises((kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)):
        validate(resource)


def test_numbers_and_names_that_are_written_twice_agree():
    spec, name = JOB["spec"], JOB["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"] == int(ENV["NNODES"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(ENV["NPROC"])
    assert POD["subdomain"] == SERVICE["metadata"]["name"] and SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert ENV["HEAD"] == f"{name}-0.{POD['subdomain']}"  # the host name that an Indexed Job gives its first pod
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in POD["volumes"]}
    assert {ENV["DATA"], ENV["LOGS"], "/dev/shm"} == set(mounts.values())
    (shm,) = (volume["emptyDir"] for volume in POD["volumes"] if mounts[volume["name"]] == "/dev/shm")
    assert shm["medium"] == "Memory"


def test_there_is_time_to_save():
    default = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", (REPO / "launch/common.sh").read_text())[1]
    assert POD["terminationGracePeriodSeconds"] > int(default)


def action(code, conditions=()):
    """What the Job controller does about a pod that failed: the action of the first rule that fits."""
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["containerName"] == CONTAINER["name"] and codes["operator"] == "In":
            if code in codes["values"]:
                return rule["action"]
        elif any(condition["type"] in conditions for condition in rule.get("onPodConditions", ())):
            return rule["action"]
    return "Count"


def test_what_was_saved_starts_again_and_a_mistake_does_not():
    from pcmepp_openclip.training.coordination import EXIT_STOPPED

    assert POD["restartPolicy"] == "Never"  # otherwise the rules do not apply
    assert action(EXIT_STOPPED) == "Ignore" and action(2) == "FailJob" and action(1) == action(137) == "Count"
    assert action(128 + signal.SIGTERM, ["DisruptionTarget"]) == "Ignore"
    assert JOB["spec"]["backoffLimit"] > 0


class Pods:
    """The containers of all pods with what Kubernetes would give them. The recipe and the place of the head are other
    ones: there is no GPU here, and no name server."""

    def __init__(self, folder: Path):
        (recipe,) = CONTAINER["command"]
        assert os.access(REPO / recipe, os.X_OK) and recipe.startswith("launch/recipes/")
        flags = ["--workers", "0", "--train-num-samples", "480", "--global-batch-size", "16"]
        self.command = [str(REPO / "launch/recipes/smoke-cpu.sh"), *CONTAINER["args"], *flags]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here = {"HEAD": "127.0.0.1", "PORT": str(port), "NPROC": "1", "LOGS": str(folder), "DATA": str(folder)}
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        self.env = {**kept, "PYTHON": sys.executable, "PYTHONPATH": str(REPO), **ENV, **here}
        self.folder, self.starts = folder, 0

    def start(self) -> list[subprocess.Popen]:
        self.starts += 1
        return [
            subprocess.Popen(
                self.command,
                cwd=REPO,
                env={**self.env, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{JOB['metadata']['name']}-{index}"},
                stdout=(self.folder / f"{self.starts}-{index}").open("w"),
                stderr=subprocess.STDOUT,
            )
            for index in range(JOB["spec"]["completions"])
        ]

    @property
    def output(self) -> str:
        return "".join(f"\n== {path}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("[0-9]-*")))


@pytest.mark.system
def test_the_containers_train_and_resume_after_a_pod_was_evicted(tmp_path):
    pods, run = Pods(tmp_path), tmp_path / ENV["NAME"]

    def steps():
        log = run / "out.log"
        return re.findall(r"Train Epoch: 0 \[ *(\d+)/480", log.read_text()) if log.exists() else []

    running = pods.start()
    while len(steps()) < 2 and all(pod.poll() is None for pod in running):
        time.sleep(0.05)
    running[1].send_signal(signal.SIGTERM)  # to its first process alone, as the kubelet does
    grace = POD["terminationGracePeriodSeconds"]
    codes = [pod.wait(grace) for pod in running]
    assert [action(codes[0]), action(codes[1], ["DisruptionTarget"])] == ["Ignore", "Ignore"], pods.output
    assert codes[0] == 75 and (run / "stopped").exists() and 2 <= len(steps()) < 30, pods.output
    assert [pod.wait(grace) for pod in pods.start()] == [0, 0], pods.output
    assert steps() == [str(16 * step) for step in range(1, 31)]
    assert (run / "done").read_text() == "480 samples\n"
