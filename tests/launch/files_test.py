"""The batch script with stand-ins for Slurm's commands; the JobSet by its schema and by JAX."""

import copy
import os
import pathlib
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import yaml
from jax._src.clusters import K8sCluster
from kubeflow_trainer_api import models

_LAUNCH = pathlib.Path(__file__).parents[2] / "launch"


def _stand_in(folder, name, script):
    path = folder / name
    path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>{folder}/calls\n{script}\n')
    path.chmod(0o755)


def _batch_script(folder, step, *, state="RUNNING", restarts=0):
    """Starts the batch script where srun runs `step`, a shell script."""
    _stand_in(folder, "srun", step)
    _stand_in(folder, "squeue", f"echo {state}")
    _stand_in(folder, "scontrol", "")
    _stand_in(folder, "scancel", f"touch {folder}/stop")
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    return subprocess.Popen(
        [_LAUNCH / "slurm.sbatch", "--logdir=a folder"],
        env={**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )


def _calls(folder):
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("status", "state", "restarts", "requeued"),
    [
        (0, "RUNNING", 0, False),
        (1, "RUNNING", 0, False),
        (69, "RUNNING", 0, True),
        (75, "RUNNING", 99, True),
        (75, "RUNNING", 100, False),
        (75, "COMPLETING", 0, False),
        (134, "RUNNING", 0, True),
    ],
)
def test_a_job_is_requeued_unless_it_is_done_or_cancelled_or_at_fault(
    tmp_path, status, state, restarts, requeued
):
    batch = _batch_script(tmp_path, f"exit {status}", state=state, restarts=restarts)
    printed, _ = batch.communicate(timeout=60)
    assert batch.returncode == status and f"ended with status {status} after" in printed
    assert ("scontrol requeue 7" in _calls(tmp_path)) == requeued


def test_sigterm_is_sent_on_to_the_tasks_and_their_status_awaited(tmp_path):
    step = f"touch {tmp_path}/started; until [ -e {tmp_path}/stop ]; do sleep 0.05; done; exit 75"
    batch = _batch_script(tmp_path, step)
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    batch.send_signal(signal.SIGTERM)
    batch.communicate(timeout=60)
    assert batch.returncode == 75
    srun, *others = _calls(tmp_path)
    assert srun.endswith(" -m lingvo_gshard.trainer --cluster=auto --logdir=a folder")
    assert others[0] == "scancel --signal=TERM 7" and others[-1] == "scontrol requeue 7"


def _documents():
    documents = yaml.safe_load_all((_LAUNCH / "jobset.yaml").read_text())
    return {document["kind"]: document for document in documents}


def _by_schema(job_set):
    """Returns the JobSet with the fields that its schema knows."""
    return models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(job_set)).to_dict()


def test_the_job_set_has_only_fields_of_its_schema():
    job_set = _documents()["JobSet"]
    assert _by_schema(job_set) == job_set
    pods = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pods["terminationGracePeriodSecs"] = pods.pop("terminationGracePeriodSeconds")
    assert _by_schema(job_set) != job_set
    pods["restartPolicy"] = 0
    with pytest.raises(ValueError, match="valid string"):
        _by_schema(job_set)


class _Api:
    """What Kubernetes answers to pod 1 of the JobSet, as long as its role allows the question."""

    def __init__(self, documents):
        self._allowed = {
            (verb, resource)
            for rule in documents["Role"]["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        self._name = documents["JobSet"]["metadata"]["name"]
        (self._job,) = documents["JobSet"]["spec"]["replicatedJobs"]

    def list_namespaced_pod(self, **_):
        assert ("list", "pods") in self._allowed
        owner = SimpleNamespace(controller=True, kind="Job")
        metadata = SimpleNamespace(
            labels={"job-name": f"{self._name}-{self._job['name']}-0"}, owner_references=[owner]
        )
        return SimpleNamespace(items=[SimpleNamespace(metadata=metadata)])

    def read_namespaced_job(self, name, **_):
        assert ("get", "jobs") in self._allowed
        spec = self._job["template"]["spec"]
        labels = {"jobset.sigs.k8s.io/jobset-name": self._name}
        return SimpleNamespace(
            metadata=SimpleNamespace(name=name, labels=labels),
            spec=SimpleNamespace(parallelism=spec["parallelism"]),
        )


def test_jax_finds_the_pods_of_the_job_set(monkeypatch):
    class Cluster(K8sCluster):
        opt_in_only_method = True  # Otherwise JAX would try it, too.
        _core_api = _batch_api = _Api(_documents())
        _ApiException = OSError

    monkeypatch.setattr(Cluster, "_namespace", lambda: "default")
    monkeypatch.setenv("HOSTNAME", "localhost")
    address = Cluster.get_coordinator_address(None, None)
    assert address == "lingvo-gshard-trainer-0-0.lingvo-gshard:55527"
    assert Cluster.get_process_count() == 2


def test_all_pods_run_at_once_and_restart_together():
    spec = _documents()["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] == 0 and spec["template"]["spec"]["restartPolicy"] == "Never"
