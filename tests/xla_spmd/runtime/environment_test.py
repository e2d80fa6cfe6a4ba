"""The environment must be prepared before TensorFlow and JAX are imported."""

import math
import os
import pathlib
import pwd
import re
import signal
import subprocess
import sys

import pytest

from xla_spmd.files import storage
from xla_spmd.runtime import environment


def _run(code: str, **env: str) -> subprocess.CompletedProcess:
    clean = {
        key: value
        for key, value in os.environ.items()
        if key
        not in ("TF_XLA_FLAGS", "XLA_FLAGS", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "PJRT_NPROC")
        and "MEM_FRACTION" not in key
    }
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True
    )


def test_sets_all_that_the_chain_needs():
    code = """
import os
from xla_spmd.runtime import environment
environment.prepare(num_devices=3)
import jax
print(os.environ["TF_XLA_FLAGS"], os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["JAX_PLATFORMS"])
print(os.environ["XLA_FLAGS"])
print(jax.device_count())
"""
    older = "--xla_force_host_platform_device_count=5 --xla_cpu_enable_fast_math=false"
    run = _run(code, TF_XLA_FLAGS="--tf_xla_auto_jit=0", XLA_FLAGS=older)
    first, xla_flags, count = run.stdout.splitlines()
    assert first == "--tf_xla_auto_jit=0 --tf_xla_disable_constant_folding=true 1 cpu"
    assert "device_count=3" in xla_flags and "device_count=5" not in xla_flags
    assert "--xla_cpu_enable_fast_math=false" in xla_flags
    assert count == "3"


def test_gpus_get_their_settings_unless_the_user_has_others():
    code = """
import os
from xla_spmd.runtime import environment
environment.prepare(2, "cuda")
print(os.environ["JAX_PLATFORMS"], os.environ.get("XLA_CLIENT_MEM_FRACTION"))
print(os.environ["XLA_FLAGS"], os.environ.get("PJRT_NPROC"))
"""
    platforms, flags = _run(code).stdout.splitlines()
    assert platforms == f"cuda,cpu {environment.GPU_MEMORY_SHARE}"
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    assert "device_count" not in flags and flags.endswith(" None")
    given = "--xla_gpu_enable_latency_hiding_scheduler=false"
    other = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_FLAGS": given}
    platforms, flags = _run(code, **other).stdout.splitlines()
    assert platforms == "cuda,cpu None" and flags.count("latency_hiding") == 1 and given in flags


@pytest.mark.parametrize(
    ("cores", "devices", "given", "threads"),
    [(2, 8, {}, "1"), (2, 1, {}, None), (1, 2, {"PJRT_NPROC": "3"}, "3")],
)
def test_devices_on_all_cores_have_a_thread_each(cores, devices, given, threads):
    code = f"""
import os
os.sched_getaffinity = lambda process: set(range({cores}))
from xla_spmd.runtime import environment
environment.prepare(num_devices={devices})
print(os.environ.get("PJRT_NPROC"))
"""
    assert _run(code, **given).stdout == f"{threads}\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                # The limit of a parent group applies, too.
                "proc/self/cgroup": "0::/pods/pod1/main\n",
                "sys/fs/cgroup/pods/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/pods/pod1/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pods/pod1/main/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n",
                # The container's mount shows the container's group as the root.
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
    ],
)
def test_control_groups_limit_the_cores(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert environment._cgroup_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, math.inf),
        (
            {
                "proc/self/cgroup": "0::/pod/main\n",
                "sys/fs/cgroup/pod/memory.max": "3000\n",
                "sys/fs/cgroup/pod/main/memory.max": "5000\n",
            },
            3000,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/a\n4:cpu:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "7000\n",
            },
            7000,
        ),
    ],
)
def test_control_groups_limit_the_memory(tmp_path, files, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert environment._cgroup_bytes(tmp_path) == limit


def test_a_machine_has_less_memory_in_a_container(monkeypatch):
    monkeypatch.setattr(environment, "_cgroup_bytes", lambda: math.inf)
    physical_bytes = environment.memory_bytes()
    total = re.search(r"MemTotal: +(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    assert physical_bytes == int(total[1]) * 1024
    monkeypatch.setattr(environment, "_cgroup_bytes", lambda: 5e8)
    assert environment.memory_bytes() == 500_000_000


def test_a_limit_of_time_limits_threads_and_the_affinity_holds(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(environment, "_cgroup_cores", lambda: 2.5)
    assert environment.num_cores() == 3
    monkeypatch.setattr(environment, "_cgroup_cores", lambda: math.inf)
    assert environment.num_cores() == 64


@pytest.mark.parametrize(
    ("flags", "platform", "is_fast"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_tile amx_bf16", "cpu", True),  # Sapphire Rapids.
        ("flags\t\t: fpu avx512_bf16 avx512_vnni", "cpu", True),  # Zen 4.
        ("flags\t\t: fpu avx512f avx512_vnni", "cpu", False),  # Ice Lake.
        ("flags\t\t: fpu amx_tile amx_int8", "cpu", False),
        ("Features\t: fp asimd", "cpu", False),
        ("flags\t\t: fpu avx512_bf16 amx_bf16", "cuda,cpu", False),
    ],
)
def test_a_cpu_multiplies_bfloat16_if_it_has_the_instructions(
    tmp_path, monkeypatch, flags, platform, is_fast
):
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    cpuinfo = tmp_path / "cpuinfo"
    lines = f"processor\t: {{}}\nmodel name\t: A CPU\n{flags}\n\n"
    cpuinfo.write_text(lines.format(0) + lines.format(1))
    assert environment.multiplies_bfloat16(cpuinfo) == is_fast


def _unknown_user(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    """This happens in a container whose user is missing from the list of users."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("LINGVO_GSHARD_COMPILATION_CACHE", raising=False)
    monkeypatch.delenv("LINGVO_GSHARD_BUCKET_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", _unknown_user)
    assert environment.cache_folder() is None
    with pytest.raises(ValueError, match="need a folder: set HOME or LINGVO_GSHARD_BUCKET_CACHE"):
        storage.cached("gs://bucket/data", "file", "00")
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", "kept")
    assert environment.cache_folder() == pathlib.Path.cwd() / "kept"


def test_refuses_if_tensorflow_was_imported_first():
    code = """
import sys, types
sys.modules["tensorflow"] = types.ModuleType("tensorflow")
from xla_spmd.runtime import environment
environment.prepare()
"""
    run = _run(code)
    assert run.returncode != 0
    assert "tensorflow was imported without the flags that it reads" in run.stderr


def test_refuses_when_jax_runs_with_fewer_devices():
    code = """
import jax
jax.devices()
from xla_spmd.runtime import environment
environment.prepare(num_devices=4)
"""
    run = _run(code, JAX_PLATFORMS="cpu")
    assert run.returncode != 0
    assert "JAX has started already with 1 devices, 4 are wanted" in run.stderr


def test_profiling_starts_each_kernel_by_itself_unless_the_user_wants_otherwise(monkeypatch):
    flag = "--xla_gpu_enable_command_buffer="
    for given in ("--xla_gpu_autotune_level=0", f"{flag}FUSION"):
        monkeypatch.setenv("XLA_FLAGS", given)
        environment.prepare_profiling()
        flags = os.environ["XLA_FLAGS"].split()
        assert [each for each in flags if flag in each] == [given if flag in given else flag]
        assert given in flags


def test_compiling_is_done_on_the_cpu_and_anew():
    code = """
from xla_spmd.runtime import environment
environment.prepare_compiling()
import os, jax
print(jax.config.jax_platforms, jax.config.jax_compilation_cache_dir)
"""
    run = _run(code, JAX_PLATFORMS="cuda")
    assert run.stdout == "cpu None\n", run.stderr


def test_refuses_no_devices():
    with pytest.raises(ValueError, match="num_devices must be 1 or more, got 0"):
        environment.prepare(num_devices=0)


@pytest.mark.slow
def test_a_program_called_again_takes_no_new_memory():
    code = """
import resource
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
import jax
import jax.numpy as jnp

call = jax.jit(lambda x: x @ x[:64] @ x[:64])
x = jnp.ones([2**18, 64])  # 64 MiB, 16384 pages
taken = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(8):
    call(x).block_until_ready()
    taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(min(after - before for before, after in zip(taken, taken[1:])))
"""
    assert int(_run(code).stdout) < 1000


def test_freed_memory_is_returned_when_asked():
    code = """
import re
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
import numpy as np

def used_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

before = used_mib()
blocks = [np.ones(2**20) for _ in range(32)]  # 8 MiB each
last = blocks[-1]
del blocks  # Below one that stays, so that the heap's end stays where it is.
freed = used_mib()
environment.return_freed_memory()
print(freed - before > 200, used_mib() - before < 50)
"""
    assert _run(code).stdout.split() == ["True", "True"]


@pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages"
)
def test_the_heap_asks_for_huge_pages_and_takes_no_memory_for_it():
    """It does so when prepared, and again for the heap's new end after memory was returned."""
    code = """
import ctypes
import re
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def block_has_advice():
    address = libc.malloc(ctypes.c_size_t(2**28))
    libc.free(ctypes.c_void_p(address))
    middle = address + 2**27
    areas = open("/proc/self/smaps").read()
    for begin, end, flags in re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:([^\\n]*)", areas, re.DOTALL | re.MULTILINE
    ):
        if int(begin, 16) <= middle < int(end, 16):
            return "hg" in flags.split()

print(block_has_advice())
environment.return_freed_memory()
print(block_has_advice())
print(int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) < 2**17)
"""
    assert _run(code).stdout.split() == ["True", "True", "True"]


_QUIETLY = """
import os, sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
with environment.quiet_stderr():
    {}
print("after", file=sys.stderr)
"""


@pytest.mark.slow
def test_tensorflow_and_jax_are_imported_silently():
    run = _run(_QUIETLY.format("import tensorflow, jax.experimental.jax2tf"))
    assert (run.returncode, run.stderr) == (0, "after\n")


@pytest.mark.slow
def test_keras_is_imported_when_it_is_first_used():
    code = """
import sys
from xla_spmd.runtime import environment
with environment.without_keras():
    import tensorflow as tf
print("keras" in sys.modules)
import tensorflow_text
print(tf.keras.layers.Dense(1)(tf.ones([2, 3])).shape)
"""
    assert _run(code).stdout.split("\n") == ["False", "(2, 1)", ""]


_LINES = r"""
I0000 00:00:1795312503.574543    8340 port.cc:153] news
W1127 02:03:24.058375    4433 a.cc:492] a warning
E0000 00:00:1795312503.574543    8340 port.cc:153] an error
no log line
"""


@pytest.mark.parametrize(("level", "kept"), [("1", ["W1127", "E0000", "no"])])
def test_quiet_stderr_drops_only_greetings(level, kept):
    code = _QUIETLY.format(f"os.write(2, {_LINES.strip().encode()!r} + bytes([10]))")
    run = _run(code, TF_CPP_MIN_LOG_LEVEL=level)
    assert [line.split()[0] for line in run.stderr.splitlines()] == [*kept, "after"]


def test_quiet_stderr_shows_the_error_of_an_import_that_fails():
    run = _run(_QUIETLY.format("import no_such_module"))
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_quiet_stderr_shows_the_last_words_of_a_process_that_aborts():
    run = _run(_QUIETLY.format("os.write(2, b'F0000 00:00:1.0 1 cpu.cc:1] no AVX'); os.abort()"))
    assert (run.returncode, run.stderr) == (-signal.SIGABRT, "F0000 00:00:1.0 1 cpu.cc:1] no AVX")
