"""Which versions of JAX are taken, and which XLA flags they are given."""

import pathlib
import re

import pytest

from lingvo_gshard.spmd import versions


@pytest.fixture
def installed(monkeypatch):
    def pretend(**packages):
        monkeypatch.setattr(versions, "installed", lambda names: packages)

    return pretend


@pytest.mark.parametrize("version", ["0.10.2", "0.10.9", "0.12.0.1", "0.12.3.dev1"])
def test_tested_versions_are_taken(installed, version):
    installed(jax=version, jaxlib=version)
    versions.check_jax()


@pytest.mark.parametrize(
    "version", ["0.10.1", "0.11.0", "0.11.2", "0.12.0", "0.13.0", "0.9.2", "1.0"]
)
def test_others_are_refused_with_what_was_found_and_what_to_install(installed, version):
    installed(jax="0.12.0.1", jaxlib=version)
    message = (
        f"^jaxlib {version} is installed, but >=0.10.2,<0.11 or >=0.12.0.1,<0.13 is expected: "
        "pip install 'jaxlib>=0.12.0.1,<0.13'.$"
    )
    with pytest.raises(ValueError, match=message):
        versions.check_jax()


def test_the_ranges_are_those_that_pip_is_given():
    requirements = pathlib.Path(__file__).parents[2] / "requirements.txt"
    asked = re.findall(r"^jax>=([\d.]+),<([\d.]+);", requirements.read_text(), re.MULTILINE)
    ranges = {(versions._numbers(first), versions._numbers(beyond)) for first, beyond in asked}
    assert ranges == set(versions._JAX) and len(ranges) == 2


def test_a_missing_one_is_named(installed):
    installed(jaxlib="0.12.0")
    with pytest.raises(ValueError, match="^jax is not installed; `pip install lingvo_gshard`"):
        versions.check_jax()


def test_what_train_installs_is_advised():
    requirements = pathlib.Path(__file__).parents[2] / "requirements-train.txt"
    packages = re.findall(r"^([\w-]+)[>=]", requirements.read_text(), re.MULTILINE)
    # Packages whose modules have another name.
    modules = {"orbax-checkpoint": "orbax", "fonttools": "fontTools"}
    assert {modules.get(package, package) for package in packages} == versions._TRAINING

    missing = ModuleNotFoundError(name="tensorflow.python")
    message = "tensorflow is not installed; `pip install 'lingvo_gshard[train]'`, or `make setup`"
    assert versions.advice(missing).startswith(message)
    assert versions.advice(ModuleNotFoundError(name="mine.tensorflow")) is None
    assert versions.advice(ModuleNotFoundError()) is None


def test_only_installed_packages_have_a_version():
    assert list(versions.installed(["no_such_package", "jax"])) == ["jax"]


def test_a_flag_is_given_to_the_versions_that_know_it(installed):
    flags = {"--xla_cpu_use_fusion_emitters": "false", "--xla_backend_optimization_level": "0"}
    installed(jaxlib="0.10.2")
    both = ["--xla_cpu_use_fusion_emitters=false", "--xla_backend_optimization_level=0"]
    assert versions.known_xla_flags(flags) == both
    installed(jaxlib="0.12.0.1")
    assert versions.known_xla_flags(flags) == ["--xla_backend_optimization_level=0"]
