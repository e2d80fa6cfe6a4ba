"""What `export_bundle` refuses; trainer_test exports bundles, and makes one again from itself."""

import os
import subprocess
import sys

import pytest

from tests.decoding.conftest import made  # noqa: F401  (a fixture)


def _export(*flags):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "lingvo_gshard.export_bundle", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize("flags", [["--logdir=a"], ["--bundle=b", "--logdir=a", "--from_bundle=c"]])
def test_one_source_and_a_folder_to_write_are_needed(flags):
    done = _export(*flags)
    assert done.returncode == 1
    assert done.stderr.startswith("export_bundle: give --bundle, the folder to write, and either")


@pytest.mark.slow
def test_a_bundle_for_two_devices_is_read_on_a_machine_with_one(made, tmp_path):  # noqa: F811
    folder, _ = made
    done = _export(f"--from_bundle={folder}", f"--bundle={tmp_path / 'new'}")
    assert done.returncode == 1
    assert done.stderr == (
        f"export_bundle: {folder} does not record its experiment; export it again with --logdir.\n"
    )
