"""The process environment that TensorFlow and JAX need, prepared before they are imported.

from lingvo_gshard.spmd import environment
environment.prepare(num_devices=8)

Compiled programs are cached in ~/.cache/lingvo_gshard, which may be deleted at any time; a user
without a home has no such folder. LINGVO_GSHARD_COMPILATION_CACHE=off caches nothing. Otherwise
JAX_COMPILATION_CACHE_DIR or, if that is not set, LINGVO_GSHARD_COMPILATION_CACHE names another
folder.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from lingvo_gshard.files import storage
from lingvo_gshard.spmd import versions

# Without this flag, TensorFlow's constant folding, which finds no device, crashes the process when
# jax2tf.call_tf lowers a function that holds anything foldable.
_NO_CONSTANT_FOLDING = "--tf_xla_disable_constant_folding=true"
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Set unless XLA_FLAGS has them.
_XLA_FLAGS = {
    # Many CPU devices on few cores may reach a collective minutes apart; XLA aborts after 40 s.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # Of the loops between products, on a CPU with vectors of 512 bits; XLA's default is 256.
    "--xla_cpu_prefer_vector_width": "512",
    # Lets a GPU compute while it communicates.
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
}
# The share of a GPU's memory that XLA takes at its start; the rest is NCCL's and the driver's.
GPU_MEMORY_SHARE = 0.92

# Options of glibc's mallopt, and values with which it has one heap for all blocks, whose end is
# never returned to the kernel.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEEP_MEMORY = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1}

# Linux's advice to use huge pages, and the bytes of one.
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2**21

# Linux's description of the CPU, and its names for instructions that multiply bfloat16 numbers.
_CPUINFO = pathlib.Path("/proc/cpuinfo")
_FAST_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16"})

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS_ONLY = "3"
# C++ log lines at severity I or W, in either of TensorFlow's formats, and absl's preamble to them.
_GREETING = (
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|[IW][0-9]{4} [0-9:.]+ +[0-9]+ [^ ]+:[0-9]+\] "
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: [IW] "
)


def prepare(num_devices: int | None = None, platform: str | None = None) -> None:
    """Sets the environment variables that TensorFlow and JAX read when they are loaded.

    Without `num_devices` the devices are left as they are. `platform` is `cpu`, `cuda` or `tpu`, by
    default that of JAX_PLATFORMS, or `cpu`. On a CPU, this process then has `num_devices` virtual
    devices and keeps the memory that it has freed. With at least as many devices as cores, each
    device has one thread, unless PJRT_NPROC is set. On a GPU, XLA takes GPU_MEMORY_SHARE of the
    memory, unless XLA_CLIENT_MEM_FRACTION is set.

    Raises ValueError for fewer than one device, or another JAX than was tested; and RuntimeError if
    TensorFlow was imported earlier without the flag that it needs, or if JAX has started with fewer
    devices.
    """
    if num_devices is not None and num_devices < 1:
        raise ValueError(f"prepare: num_devices must be 1 or more, got {num_devices}.")
    versions.check_jax()

    # What both libraries need, whatever they run on.
    _disable_constant_folding()
    os.environ.setdefault(_LOG_LEVEL, _ERRORS_ONLY)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # Its older name; JAX refuses both.
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    _set_compilation_cache()
    _add_xla_flags(_XLA_FLAGS)

    # The platform and its devices, of which processes that only compile need none.
    if num_devices is None:
        return
    platform = platform or os.environ.get("JAX_PLATFORMS") or "cpu"
    # The CPU remains beside an accelerator, for what is computed on the host.
    _set_jax("jax_platforms", platform if platform.endswith("cpu") else f"{platform},cpu")
    if platform == "cpu":
        _set_cpu_devices(num_devices)
        _keep_freed_memory()


def return_freed_memory() -> None:
    """Returns to the kernel what this process has freed, if the C library is glibc.

    It is for the end of work that takes more memory than what comes after it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
        # The addresses at the heap's end are gone, and with them the advice that held for these.
        _ask_for_huge_pages(libc)


def prepare_tracing() -> None:
    """Prepares a process that traces and lowers alone, with TensorFlow and JAX on the CPU.

    Accelerators are the parent's. XLA_FLAGS are those of JAX's XLA: TensorFlow has one of its own,
    which would end the process at a flag that it does not know.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["XLA_FLAGS"] = ""
    _set_jax("jax_platforms", "cpu")
    _disable_constant_folding()


def prepare_profiling() -> None:
    """Lets the traces of GPUs name what they run, unless XLA_FLAGS has it otherwise.

    XLA records many kernels in one graph and starts them together, whose traces have no names.
    """
    _add_xla_flags({"--xla_gpu_enable_command_buffer": ""})


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use, which a container may limit."""
    return math.ceil(min(_num_allowed_cores(), _cgroup_cores()))


def _num_allowed_cores() -> int:
    """Returns the number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it.
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cgroup_cores(root: pathlib.Path = pathlib.Path("/")) -> float:
    """Returns how many cores' time the control groups of this process have; inf without a limit.

    A group has at most what those above it have.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return math.inf

    # Each line is ID:CONTROLLERS:GROUP, of version 2 without controllers.
    least = math.inf
    for membership in memberships:
        _, controllers, group = membership.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
        else:
            continue

        # A container may see its own group as the root.
        folder = mount / group.lstrip("/")
        for candidate in (folder, *folder.parents):
            if candidate == mount.parent:
                break
            least = min(least, _quota(candidate))
    return least


def _quota(group: pathlib.Path) -> float:
    """Returns how many cores' time a control group's own limit allows."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        is_limited = quota != "max" and int(quota) > 0  # Of version 1, -1 is no limit.
        return int(quota) / int(period) if is_limited else math.inf
    except (OSError, ValueError):
        return math.inf


def has_fast_bfloat16(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
    """Returns whether `prepare` chose a CPU that multiplies bfloat16 numbers faster than float32.

    Those have matrix units (AMX), or instructions that multiply and add vectors of them
    (AVX512-BF16).
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return False
    words = " ".join(_cpu_features(cpuinfo)).split()
    return not _FAST_BFLOAT16.isdisjoint(words)


def cache_folder() -> pathlib.Path | None:
    """Returns the folder of what is kept between starts on this machine.

    It is None if that is off, and by default for a user without a home.
    """
    folder = os.environ.get("LINGVO_GSHARD_COMPILATION_CACHE", "~/.cache/lingvo_gshard")
    return None if folder == "off" else storage.in_home(folder)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keeps the C++ libraries' greetings out of standard error while they are imported.

    TensorFlow logs some lines before it reads TF_CPP_MIN_LOG_LEVEL. Inside this context, log lines
    below severity E are dropped; errors and lines that are no log reach standard error as before,
    even if the import aborts the process. Nothing is dropped at another level than `prepare`'s.
    """
    if os.environ.get(_LOG_LEVEL, _ERRORS_ONLY) != _ERRORS_ONLY:
        yield
        return

    # C++ writes to the descriptor, so sys.stderr cannot filter it.
    sys.stderr.flush()
    stderr = os.dup(2)

    # A process of its own, because a thread would end with an abort before it has read the reason.
    greeting_filter = subprocess.Popen(
        ["sed", "-uE", f"/^({_GREETING})/d"],
        stdin=subprocess.PIPE,
        stdout=stderr,
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C"},  # Lines need not be UTF-8.
    )
    assert greeting_filter.stdin is not None
    os.dup2(greeting_filter.stdin.fileno(), 2)
    greeting_filter.stdin.close()

    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        with contextlib.suppress(subprocess.TimeoutExpired):  # A subprocess has inherited the pipe.
            greeting_filter.wait(timeout=1)


@contextlib.contextmanager
def without_keras() -> Iterator[None]:
    """Keeps Keras and Matplotlib, a second's work, out of an import of TensorFlow in this context.

    Afterwards, `tf.keras` is imported when it is first used.
    """
    name = "TF_USE_LEGACY_KERAS"  # TensorFlow would import that older package, which isn't here.
    if name in os.environ:
        yield
        return

    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def _disable_constant_folding() -> None:
    """Sets TensorFlow's flag; RuntimeError if TensorFlow was imported without it."""
    flags = os.environ.get("TF_XLA_FLAGS", "").split()
    if _NO_CONSTANT_FOLDING in flags:
        return

    if "tensorflow" in sys.modules:
        raise RuntimeError(
            "prepare: tensorflow was imported before the environment was prepared: "
            f"TF_XLA_FLAGS lacks {_NO_CONSTANT_FOLDING}. Call environment.prepare() first."
        )
    os.environ["TF_XLA_FLAGS"] = " ".join([*flags, _NO_CONSTANT_FOLDING])


def _set_compilation_cache() -> None:
    """Lets JAX keep what it compiles in the folder of this machine's kind."""
    folder = cache_folder()
    if folder is None:
        _set_jax("jax_enable_compilation_cache", False)
        return

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        # A program that was compiled for another instruction set would crash here.
        digest = hashlib.sha256("\n".join(_cpu_features()).encode()).hexdigest()
        path = folder / f"{platform.machine()}-{digest[:12]}"
        _set_jax("jax_compilation_cache_dir", str(path))

    # By default JAX leaves out programs that compile within a second, of which a start has many.
    _set_jax("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cpu_features(cpuinfo: pathlib.Path = _CPUINFO) -> list[str]:
    """Returns Linux's lines on the CPU's model and instruction set, or else the CPU's name."""
    if cpuinfo.exists():
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    else:
        text = platform.processor()  # It starts a process.
    lines = set(re.findall(r"^(?:flags|Features|model name)\s*:.*$", text, re.MULTILINE))
    return sorted(lines) or [text]


def _set_jax(option: str, value: object) -> None:
    """Sets an option of JAX, which reads its environment only when it is imported."""
    os.environ[option.upper()] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(option, value)


def _add_xla_flags(added: Mapping[str, str]) -> None:
    """Adds flags to XLA_FLAGS, but for those that the user has set."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # XLA takes the last one of a flag's values, so one that the user gave is not given again.
    users = {flag.partition("=")[0] for flag in flags}
    ours = {name: value for name, value in added.items() if name not in users}
    os.environ["XLA_FLAGS"] = " ".join(flags + versions.known_xla_flags(ours))


def _set_cpu_devices(num_devices: int) -> None:
    """Gives this process virtual CPU devices; RuntimeError if JAX has started with fewer."""
    flags = re.sub(rf"{_DEVICE_COUNT}=\S*", "", os.environ["XLA_FLAGS"]).split()
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_DEVICE_COUNT}={num_devices}"])

    # Where devices keep all cores busy, more threads would cost 8 to 14 % of a decoding step. XLA
    # does not know of a limit of time: it would start a thread for each core of the machine.
    cores = num_cores()
    if num_devices >= cores:
        os.environ.setdefault("PJRT_NPROC", "1")
    elif cores < _num_allowed_cores():
        os.environ.setdefault("PJRT_NPROC", str(cores))

    # What JAX has read by now stays as it was.
    if "jax" not in sys.modules:
        return
    import jax

    from lingvo_gshard.spmd import jax_private

    # device_count() would start JAX, which must not start before the processes have joined.
    if jax_private.has_started() and jax.device_count() < num_devices:
        raise RuntimeError(
            f"prepare: JAX has started already with {jax.device_count()} devices, "
            f"{num_devices} are wanted. Call environment.prepare() first."
        )


def _keep_freed_memory() -> None:
    """Lets each call reuse the memory of the last one's temporaries, if the C library is glibc.

    Getting it from the kernel again, page by page, would cost a fifth of a train step. Huge pages
    save another tenth, of lookups of addresses.
    """
    # musl and macOS have no mallopt.
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for option, value in _KEEP_MEMORY.items():
        libc.mallopt(option, value)
    _ask_for_huge_pages(libc)


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Asks for huge pages at the end of the heap, if this process keeps what it has freed.

    The heap then keeps the addresses of a block once it is freed, and the advice holds for these.
    So it is given for a block as large as half the memory, which takes none itself, as nothing is
    written to it.
    """
    libc.malloc.restype = ctypes.c_void_p
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    block = libc.malloc(ctypes.c_size_t(size_bytes))
    if block:
        # madvise takes whole pages.
        before_first_page = -block % _HUGE_PAGE_BYTES
        start = ctypes.c_void_p(block + before_first_page)
        length = ctypes.c_size_t(size_bytes - before_first_page)
        libc.madvise(start, length, _MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))
