"""A Slurm cluster of this machine alone, with its files in one folder; root starts it."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

from tests import ports

# A requeued job waits `cred_expire` seconds before it starts again; the default is 120.
_CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000
PartitionName=all Nodes={host} Default=YES
"""


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Runs the cluster and gives the environment in which Slurm's commands find it."""
    host = socket.gethostname().split(".")[0]
    free_ports = {"controller_port": ports.free(), "node_port": ports.free()}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, **free_ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(config)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(_munged(folder), env, folder / "munge.socket"))
        stack.enter_context(_daemon(["slurmctld", "-D"], env, folder / "slurmctld.pid"))
        stack.enter_context(_daemon(["slurmd", "-D"], env, folder / "slurmd.pid"))
        _wait_until(lambda: "idle" in _output(["sinfo", "--noheader", "--format=%T"], env))
        yield env


def wait_for_state(job: str, states: tuple[str, ...], env: dict[str, str], secs: float) -> str:
    """Waits until the job is in one of the states and returns scontrol's description of it."""
    command = ["scontrol", "show", "job", job]
    _wait_until(
        lambda: any(f"JobState={state} " in _output(command, env) for state in states), secs
    )
    return _output(command, env)


def _munged(folder: pathlib.Path) -> list[str]:
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    flags = [f"--{flag}-file={folder}/munge.{name}" for flag, name in files.items()]
    flags[1] = f"--socket={folder}/munge.socket"
    return ["munged", "--foreground", "--force", *flags]


@contextlib.contextmanager
def _daemon(command: list[str], env: dict[str, str], ready: pathlib.Path) -> Iterator[None]:
    """Runs a daemon from the moment at which its file `ready` exists."""
    path = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    with (ready.parent / f"{command[0]}.log").open("w") as log:
        process = subprocess.Popen(
            [path or command[0], *command[1:]], env=env, stdout=log, stderr=log
        )
    try:
        _wait_until(ready.exists)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _output(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout


def _wait_until(condition: Callable[[], object], secs: float = 60) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, f"not within {secs} s"
        time.sleep(0.2)
