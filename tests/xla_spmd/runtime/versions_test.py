"""Which versions of JAX are accepted, and which XLA flags they get."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from xla_spmd.runtime import versions


@pytest.fixture
def installed(monkeypatch):
    def pretend(**packages):
        monkeypatch.setattr(versions, "installed", lambda names: packages)

    return pretend


@pytest.mark.parametrize("version", ["0.10.2", "0.12.3.dev1"])
def test_tested_versions_are_accepted_without_a_message(installed, version):
    installed(jax=version, jaxlib=version)
    assert versions.check_jax() is None


@pytest.mark.parametrize("version", ["0.11.0", "0.12.0", "0.14.0rc1"])
def test_other_versions_are_accepted_with_a_message(installed, version):
    tested = ">=0.10.2,<0.11 and >=0.12.0.1,<0.13"
    installed(jax="0.12.0.1", jaxlib=version)
    line = f"lingvo_gshard was not tested with jaxlib {version}, but with {tested}."
    assert versions.check_jax() == line

    installed(jax=version, jaxlib=version)
    line = (
        f"lingvo_gshard was not tested with jax {version} and jaxlib {version}, but with {tested}."
    )
    assert versions.check_jax() == line


@pytest.mark.parametrize(
    ("python", "install"), [((3, 11), ">=0.10.2,<0.11"), ((3, 14), ">=0.12.0.1,<0.13")]
)
@pytest.mark.parametrize("version", ["0.10.1", "0.9.2"])
def test_older_versions_are_refused_with_a_command_to_install(
    installed, monkeypatch, version, python, install
):
    monkeypatch.setattr(sys, "version_info", (*python, 0))
    installed(jax="0.12.0.1", jaxlib=version)
    message = (
        f"^jaxlib {version} is installed, but 0.10.2 or a later one is expected: "
        f"pip install 'jaxlib{install}'.$"
    )
    with pytest.raises(ValueError, match=message):
        versions.check_jax()


def test_the_ranges_equal_pips():
    requirements = pathlib.Path(__file__).parents[3] / "requirements/plan.txt"
    asked = re.findall(r"^jax(>=[\d.]+,<[\d.]+);", requirements.read_text(), re.MULTILINE)
    assert asked == [str(tested) for tested in reversed(versions._JAX)]


_START = """
import importlib.metadata, os, subprocess, sys
from xla_spmd.runtime import versions
versions.installed = lambda packages: {"jax": "0.11.2", "jaxlib": "0.11.2"}
from xla_spmd.runtime import environment
environment.prepare()
environment.prepare(num_devices=1)
if len(sys.argv) < 2:
    subprocess.run([sys.executable, "-c", os.environ["START"], "child"], check=True)
"""


def test_the_line_is_printed_once_for_a_process_and_its_children():
    environment = {**os.environ, "START": _START, "LINGVO_GSHARD_UNTESTED_JAX": ""}
    command = [sys.executable, "-c", _START]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("lingvo_gshard was not tested with jax 0.11.2 and jaxlib 0.11.2, but")


def test_a_missing_one_is_named(installed):
    installed(jaxlib="0.12.0")
    with pytest.raises(ValueError, match="^jax is not installed; `pip install jax`"):
        versions.check_jax()


def test_missing_required_packages_are_advised():
    folder = pathlib.Path(__file__).parents[3] / "requirements"
    requirements = (folder / "plan.txt").read_text() + (folder / "train.txt").read_text()
    packages = re.findall(r"^([\w-]+)[\[>=]", requirements, re.MULTILINE)
    # The module names of these packages differ from the packages' names.
    modules = {
        "absl-py": "absl",
        "fonttools": "fontTools",
        "orbax-checkpoint": "orbax",
        "protobuf": "google",
    }
    assert {modules.get(package, package) for package in packages} == versions._REQUIRED

    missing = ModuleNotFoundError(name="tensorflow.python")
    message = "tensorflow is not installed; `pip install lingvo_gshard`, or `make setup`"
    assert versions.advice(missing).startswith(message)
    planners = versions.advice(ModuleNotFoundError(name="google.protobuf"))
    assert planners is not None and planners.startswith("google is not installed; `pip install")
    assert versions.advice(ModuleNotFoundError(name="mine.tensorflow")) is None
    assert versions.advice(ModuleNotFoundError()) is None


def test_only_installed_packages_have_a_version():
    assert list(versions.installed(["no_such_package", "jax"])) == ["jax"]


_OURS = {
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_cpu_prefer_vector_width": "512",
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_gpu_enable_command_buffer": "",
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
}


def test_a_flag_is_given_to_the_tested_versions_that_know_it(installed):
    flags = {"--xla_cpu_use_fusion_emitters": "false", "--xla_backend_optimization_level": "0"}
    installed(jaxlib="0.10.2")
    both = ["--xla_cpu_use_fusion_emitters=false", "--xla_backend_optimization_level=0"]
    assert versions.known_xla_flags(flags) == both
    installed(jaxlib="0.12.0.1")
    assert versions.known_xla_flags(flags) == ["--xla_backend_optimization_level=0"]


def test_the_installed_xla_has_the_flags_of_the_table():
    assert _OURS.keys() == versions._FLAGS.keys()
    flags = [f"{name}={value}" for name, value in _OURS.items()]
    assert versions.known_xla_flags(_OURS) == versions._accepted_by_xla(flags)


@pytest.mark.parametrize("version", ["0.11.2", "0.13.0"])
def test_xla_itself_is_asked_about_other_versions(installed, version):
    installed(jaxlib=version)
    flags = {
        "--xla_no_such_flag": "1",
        "--xla_cpu_prefer_vector_width": "512",
        "--xla_another_one": "",
    }
    assert versions.known_xla_flags(flags) == ["--xla_cpu_prefer_vector_width=512"]
    assert versions.known_xla_flags({}) == []


def test_an_xla_that_does_not_answer_gets_no_flags(installed, monkeypatch):
    installed(jaxlib="0.13.0")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert versions.known_xla_flags({"--xla_cpu_prefer_vector_width": "512"}) == []
