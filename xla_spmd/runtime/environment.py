"""The process environment that TensorFlow and JAX need, prepared before they are imported.

from xla_spmd.runtime import environment
environment.prepare(num_devices=8)

Compiled programs are cached in ~/.cache/lingvo_gshard, which may be deleted at any time. A user
without a home lacks a default cache. JAX_COMPILATION_CACHE_DIR or, if it is not set,
LINGVO_GSHARD_COMPILATION_CACHE names a different folder. LINGVO_GSHARD_COMPILATION_CACHE=off
disables the cache.
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

from xla_spmd import checks
from xla_spmd.files import storage
from xla_spmd.runtime import log_lines, versions

# Without this flag, TensorFlow's constant folding, which finds no device, crashes the process when
# jax2tf.call_tf lowers a function with foldable operations.
_NO_CONSTANT_FOLDING = "--tf_xla_disable_constant_folding=true"
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Set unless XLA_FLAGS contains them.
_XLA_FLAGS = {
    # With many CPU devices on few cores, devices may reach a collective minutes apart. XLA aborts
    # after 40 s.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # Vectorizes the loops between products, on a CPU with vectors of 512 bits. XLA's default is
    # 256.
    "--xla_cpu_prefer_vector_width": "512",
    # Lets a GPU compute while it communicates.
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
}
# The share of a GPU's memory that XLA takes at its start; the rest is left to NCCL and the driver.
GPU_MEMORY_SHARE = 0.92

# Options of glibc's mallopt, and values with which one heap holds all blocks and its end is
# never returned to the kernel.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEEP_MEMORY = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1}

# Linux's advice to use huge pages, and the bytes of a huge page.
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2**21

# Linux's description of the CPU, and its names for instructions that multiply bfloat16 numbers.
_CPUINFO = pathlib.Path("/proc/cpuinfo")
_BFLOAT16_PRODUCTS = frozenset({"amx_bf16", "avx512_bf16"})

_GREETING_FILTER = pathlib.Path(__file__).with_name("greeting_filter.py")
# The warning about an untested JAX, once it has been printed.
_TOLD = "LINGVO_GSHARD_UNTESTED_JAX"


def prepare(num_devices: int | None = None, platform: str | None = None) -> None:
    """Sets the environment variables that TensorFlow and JAX read when they are loaded.

    Without `num_devices`, the number of devices does not change. `platform` is `cpu`, `cuda` or
    `tpu`; it defaults to the platform of JAX_PLATFORMS, or to `cpu`. On a CPU, this process then
    has `num_devices` virtual devices and keeps its freed memory for reuse. If there are at least as
    many devices as cores, each device has one thread, unless PJRT_NPROC is set. On a GPU, XLA takes
    GPU_MEMORY_SHARE of the memory, unless XLA_CLIENT_MEM_FRACTION is set.

    An untested JAX prints a line on standard error. Raises ValueError for fewer than one device, or
    if JAX is missing or too old. Raises RuntimeError if TensorFlow was imported earlier without the
    required flag, or if JAX has started with fewer devices.
    """
    if num_devices is not None:
        checks.check_count("prepare: num_devices", num_devices)
    _tell_of_untested_jax()

    # Both libraries need these settings on every platform.
    _disable_constant_folding()
    os.environ.setdefault(log_lines.VARIABLE, log_lines.WARNINGS)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # The older name; JAX refuses both.
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    _set_compilation_cache()
    _add_xla_flags(_XLA_FLAGS)

    # The platform and its devices; processes that only compile do not need devices.
    if num_devices is None:
        return
    platform = platform or os.environ.get("JAX_PLATFORMS") or "cpu"
    # The CPU stays available beside an accelerator, for computation on the host.
    _set_jax("jax_platforms", platform if platform.endswith("cpu") else f"{platform},cpu")
    if platform == "cpu":
        _set_cpu_devices(num_devices)
        _keep_freed_memory()


def return_freed_memory() -> None:
    """Returns freed memory of this process to the kernel, if the C library is glibc.

    Call it after a phase that takes more memory than the later ones.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
        # The addresses at the heap's end are gone, and so is the huge-page advice for them.
        _ask_for_huge_pages(libc)


def prepare_compiling() -> None:
    """Prepares a process that only compiles for machines elsewhere, and measures how long it takes.

    JAX then computes on the CPU. If it may compute on GPUs, it leaves out a CUDA plugin without the
    libraries that only computing needs, and with it the compiler.
    """
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
    prepare()
    _set_jax("jax_platforms", "cpu")


def prepare_tracing() -> None:
    """Prepares a process that only traces and lowers, with TensorFlow and JAX on the CPU.

    The parent process owns the accelerators. XLA_FLAGS are meant for JAX's XLA; TensorFlow's
    separate XLA would end the process at an unknown flag.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["XLA_FLAGS"] = ""
    _set_jax("jax_platforms", "cpu")
    _disable_constant_folding()


def prepare_profiling() -> None:
    """Makes GPU traces name each kernel, unless XLA_FLAGS sets it otherwise.

    XLA records many kernels in one graph and starts them together; then their traces lack names.
    """
    _add_xla_flags({"--xla_gpu_enable_command_buffer": ""})


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use, which a container may limit."""
    return math.ceil(min(_num_allowed_cores(), _cgroup_cores()))


def _num_allowed_cores() -> int:
    """Returns the number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Only Linux has it.
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory_bytes() -> int:
    """Returns this machine's memory, or the part of it to which a container limits this process."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(physical_bytes, _cgroup_bytes()))


def _cgroup_cores(root: pathlib.Path = pathlib.Path("/")) -> float:
    """Returns the CPU limit of this process's control groups, in cores; inf without a limit."""
    return min(map(_quota, _control_groups("cpu", root)), default=math.inf)


def _cgroup_bytes(root: pathlib.Path = pathlib.Path("/")) -> float:
    """Returns the memory limit of this process's control groups; inf without a limit."""
    return min(map(_memory_limit, _control_groups("memory", root)), default=math.inf)


def _control_groups(controller: str, root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders of this process's control groups that a controller limits.

    A group cannot exceed the groups above it, which are yielded, too.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not on Linux.
        return

    # Each line is ID:CONTROLLERS:GROUP; version 2 leaves CONTROLLERS empty.
    for membership in memberships:
        _, controllers, group = membership.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
        else:
            continue

        # A container may see its own group as the root.
        folder = mount / group.lstrip("/")
        for candidate in (folder, *folder.parents):
            if candidate == mount.parent:
                break
            yield candidate


def _memory_limit(group: pathlib.Path) -> float:
    """Returns a control group's own limit of memory, in bytes."""
    for name in ("memory.max", "memory.limit_in_bytes"):  # Versions 2 and 1.
        try:
            limit = (group / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return math.inf if limit == "max" else int(limit)
    return math.inf


def _quota(group: pathlib.Path) -> float:
    """Returns a control group's own CPU limit, in cores."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        is_limited = quota != "max" and int(quota) > 0  # In version 1, -1 means unlimited.
        return int(quota) / int(period) if is_limited else math.inf
    except (OSError, ValueError):
        return math.inf


def multiplies_bfloat16(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
    """Returns whether the CPU, which `prepare` chose, has instructions that multiply bfloat16.

    Such a CPU has matrix units (AMX), or instructions that multiply and add bfloat16 vectors
    (AVX512-BF16).
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return False
    words = " ".join(_cpu_features(cpuinfo)).split()
    return not _BFLOAT16_PRODUCTS.isdisjoint(words)


def cache_folder() -> pathlib.Path | None:
    """Returns the folder that is kept between starts on this machine.

    Returns None if it is turned off, or by default for a user without a home.
    """
    folder = os.environ.get("LINGVO_GSHARD_COMPILATION_CACHE", "~/.cache/lingvo_gshard")
    return None if folder == "off" else storage.in_home(folder)


def machine_cache_folder() -> pathlib.Path | None:
    """Returns the part of `cache_folder` for machines of this kind: the same CPU and instructions.

    A program that was compiled for other instructions would crash here.
    """
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256("\n".join(_cpu_features()).encode()).hexdigest()
    return folder / f"{platform.machine()}-{digest[:12]}"


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keeps the C++ libraries' greetings out of standard error while they are imported.

    TensorFlow and plugins of JAX log some lines before they read TF_CPP_MIN_LOG_LEVEL. Inside this
    context, the lines listed in log_lines.py are dropped. All other text reaches standard error in
    order, even if the import aborts the process.
    """
    if not log_lines.are_filtered():
        yield
        return

    # C++ writes to the descriptor, so sys.stderr cannot filter it.
    sys.stderr.flush()
    stderr = os.dup(2)

    # This needs a separate process, because a thread would end with an abort before it has read the
    # reason. In a separate session, it also outlives a Ctrl-C.
    greeting_filter = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GREETING_FILTER), log_lines.GREETING],
        stdin=subprocess.PIPE,
        stdout=stderr,
        start_new_session=True,
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # A subprocess still holds the pipe.
            greeting_filter.wait(timeout=1)


@contextlib.contextmanager
def without_keras() -> Iterator[None]:
    """Keeps the import of TensorFlow in this context from importing Keras and Matplotlib.

    This saves a second. Afterwards, `tf.keras` is imported when it is first used.
    """
    name = "TF_USE_LEGACY_KERAS"  # It selects that older package, which is not installed.
    if name in os.environ:
        yield
        return

    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def _tell_of_untested_jax() -> None:
    """Prints a line if JAX is untested, once for this process and its children.

    Raises ValueError if JAX is missing or too old.
    """
    line = versions.check_jax()
    if line is not None and os.environ.get(_TOLD) != line:
        os.environ[_TOLD] = line  # Children inherit it.
        print(line, file=sys.stderr)


def _disable_constant_folding() -> None:
    """Sets TensorFlow's flag.

    Raises RuntimeError if TensorFlow was imported without it.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "").split()
    if _NO_CONSTANT_FOLDING in flags:
        return

    if "tensorflow" in sys.modules:
        raise RuntimeError(
            "tensorflow was imported without the flags that it reads at its import: call "
            "lingvo_gshard.prepare() before `import tensorflow`."
        )
    os.environ["TF_XLA_FLAGS"] = " ".join([*flags, _NO_CONSTANT_FOLDING])


def _set_compilation_cache() -> None:
    """Makes JAX keep compiled programs in a folder for machines of this kind."""
    folder = machine_cache_folder()
    if folder is None:
        _set_jax("jax_enable_compilation_cache", False)
        return

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        _set_jax("jax_compilation_cache_dir", str(folder))

    # By default JAX omits programs that compile within a second, and a start has many of them.
    _set_jax("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cpu_features(cpuinfo: pathlib.Path = _CPUINFO) -> list[str]:
    """Returns Linux's lines about the CPU's model and instruction set, or else the CPU's name."""
    if cpuinfo.exists():
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    else:
        text = platform.processor()  # This starts a process.
    lines = set(re.findall(r"^(?:flags|Features|model name)\s*:.*$", text, re.MULTILINE))
    return sorted(lines) or [text]


def _set_jax(option: str, value: object) -> None:
    """Sets an option of JAX, which reads its environment only when it is imported."""
    os.environ[option.upper()] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(option, value)


def _add_xla_flags(added: Mapping[str, str]) -> None:
    """Adds flags to XLA_FLAGS, except flags that the user has set."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # XLA takes a flag's last value, so a flag that the user gave must not be added.
    users = {flag.partition("=")[0] for flag in flags}
    ours = {name: value for name, value in added.items() if name not in users}
    os.environ["XLA_FLAGS"] = " ".join(flags + versions.known_xla_flags(ours))


def _set_cpu_devices(num_devices: int) -> None:
    """Gives this process virtual CPU devices.

    Raises RuntimeError if JAX has started with fewer.
    """
    flags = re.sub(rf"{_DEVICE_COUNT}=\S*", "", os.environ["XLA_FLAGS"]).split()
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_DEVICE_COUNT}={num_devices}"])

    # If the devices keep all cores busy, more threads would cost 8 to 14 % of a decoding step. XLA
    # ignores a CPU time limit: it would start a thread for each core of the machine.
    cores = num_cores()
    if num_devices >= cores:
        os.environ.setdefault("PJRT_NPROC", "1")
    elif cores < _num_allowed_cores():
        os.environ.setdefault("PJRT_NPROC", str(cores))

    # Options that JAX has already read do not change.
    if "jax" not in sys.modules:
        return
    import jax

    from xla_spmd.runtime import jax_runtime

    # device_count() would start JAX, which must not start before the processes have joined.
    if jax_runtime.has_started() and jax.device_count() < num_devices:
        raise RuntimeError(
            f"prepare: JAX has started already with {jax.device_count()} devices, "
            f"{num_devices} are wanted. Call prepare() first."
        )


def _keep_freed_memory() -> None:
    """Makes calls reuse the memory of earlier temporaries, if the C library is glibc.

    Getting memory from the kernel again, page by page, would cost a fifth of a train step. Huge
    pages save another tenth by making address translation cheaper.
    """
    # musl and macOS lack mallopt.
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for option, value in _KEEP_MEMORY.items():
        libc.mallopt(option, value)
    _ask_for_huge_pages(libc)


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Asks for huge pages at the end of the heap, if this process keeps freed memory.

    The heap keeps a block's addresses after the block is freed, and the advice stays in force for
    them. So the advice is given for a block as large as half the memory. The block itself occupies
    no memory, because nothing is written to it.
    """
    libc.malloc.restype = ctypes.c_void_p
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    block = libc.malloc(ctypes.c_size_t(size_bytes))
    if block:
        # madvise requires whole pages.
        before_first_page = -block % _HUGE_PAGE_BYTES
        start = ctypes.c_void_p(block + before_first_page)
        length = ctypes.c_size_t(size_bytes - before_first_page)
        libc.madvise(start, length, _MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))
