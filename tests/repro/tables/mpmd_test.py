"""Figure 2a: the programs differ by the device's number alone, and compute one function together.

M, K, N: the sizes of Figure 2's product, which is split along K. R: rows that D does not divide.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.tables import mpmd, report
from tests import ports
from xla_plan.program import stablehlo_program
from xla_spmd.hlo import hlo_module

_M, _K, _N, _R = 3, 8, 5, 7
_WHOLE = jax.sharding.PartitionSpec()
_COLUMNS = jax.sharding.PartitionSpec(None, "d")
_ROWS = jax.sharding.PartitionSpec("d", None)


@pytest.fixture(scope="module")
def program():
    """Returns a program for two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))

    def split(spec):
        return jax.sharding.NamedSharding(mesh, spec)

    def fn(a_MK, b_KN, x_RN):
        # The last device has a row of padding, which must not be added.
        x_RN = jax.lax.with_sharding_constraint(x_RN, split(_ROWS))
        sum_N = jnp.sum(jnp.exp(x_RN), 0)
        return a_MK @ b_KN + sum_N

    args = []
    for shape, spec in (((_M, _K), _COLUMNS), ((_K, _N), _ROWS), ((_R, _N), _WHOLE)):
        args.append(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split(spec)))
    jitted = jax.jit(fn, out_shardings=split(_WHOLE))
    return stablehlo_program.of_jitted(jitted, args, "cpu")


@pytest.fixture(scope="module")
def module(program):
    return mpmd.partitioned(program, jax.devices()[:2])


def test_the_programs_differ_by_the_device_s_number_alone(module):
    spmd = hlo_module.parse(mpmd.spmd_program(module))
    for device in (0, 1):
        own = hlo_module.parse(mpmd.device_program(module, device))
        pairs = zip(spmd.instructions(), own.instructions(), strict=True)
        different = [(one, other) for one, other in pairs if one.proto != other.proto]
        assert different
        for one, other in different:
            assert one.opcode == "replica-id" and other.opcode == "constant"
            assert list(other.proto.literal.u32s) == [device]


@pytest.mark.slow
def test_each_device_runs_its_own_program(module, tmp_path):
    rng = np.random.default_rng(0)
    a_MK, b_KN, x_RN = (
        rng.standard_normal(shape, np.float32) for shape in ((_M, _K), (_K, _N), (_R, _N))
    )
    coordinator = f"127.0.0.1:{ports.free()}"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}

    processes = []
    for device in (0, 1):
        own = slice(device * _K // 2, (device + 1) * _K // 2)
        np.savez(tmp_path / f"{device}.npz", a=a_MK[:, own], b=b_KN[own], x=x_RN)
        (tmp_path / f"{device}.hlo").write_bytes(mpmd.device_program(module, device))
        command = [sys.executable, "-m", "tests.repro.tables.device_process", str(tmp_path)]
        command += [coordinator, "2", str(device)]
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait() for process in processes] == [0, 0]

    expected = a_MK @ b_KN + np.exp(x_RN).sum(0)
    for device in (0, 1):
        y_MN = np.load(tmp_path / f"{device}.npy")
        np.testing.assert_allclose(y_MN, expected, rtol=1e-5)


def test_both_ways_are_measured(program):
    row = mpmd.measure(program, jax.devices()[:2])
    assert len(row.mpmd) == 2
    # Offsets and masks of a known device are folded.
    assert all(own.instructions < row.spmd.instructions for own in row.mpmd)
    assert row.cpu_ratio == pytest.approx(row.mpmd_cpu_secs / row.spmd.cpu_secs)


def test_a_line_has_both_costs():
    one = mpmd.Compilation(cpu_secs=2.0, instructions=100)
    row = mpmd.Row(2.5, one, (mpmd.Compilation(1.5, 90), mpmd.Compilation(1.75, 95)))
    assert report.mpmd_line(row) == (
        "D = 2: one program 2.00 s (2.50 s with the partitioner), 100 instructions; "
        "D programs 3.25 s, 185 instructions; x1.6 s, x1.9 instructions"
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_only_the_separate_programs_grow_in_proportion_to_the_devices():
    rows = {d: mpmd.measure(mpmd.layer(d), jax.devices()[:d]) for d in (2, 4, 8)}
    assert [len(row.mpmd) for row in rows.values()] == [2, 4, 8]
    spmd = [row.spmd.instructions for row in rows.values()]
    assert max(spmd) < 1.15 * min(spmd)
    for row in rows.values():
        assert row.instruction_ratio == pytest.approx(len(row.mpmd), rel=0.05)
