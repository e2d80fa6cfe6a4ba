"""The planner's distribution lists all of its requirements and packages."""

import pathlib
import tomllib

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_FILE = tomllib.loads((_ROOT / "xla_plan/pyproject.toml").read_text())


@pytest.mark.parametrize(
    ("extra", "file"), [(None, "plan.txt"), ("tpu", "tpu.txt"), ("gpu", "plan-gpu.txt")]
)
def test_the_requirements_equal_the_checkouts(extra, file):
    project = _FILE["project"]
    listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    lines = (_ROOT / "requirements" / file).read_text().splitlines()
    assert listed == [line for line in lines if line and not line.startswith("#")]


def test_every_package_is_listed():
    found = [
        ".".join(path.parent.relative_to(_ROOT).parts)
        for package in ("xla_plan", "xla_spmd")
        for path in (_ROOT / package).rglob("__init__.py")
    ]
    assert _FILE["tool"]["setuptools"]["packages"] == sorted(found)


def test_data_files_are_listed():
    for package, files in _FILE["tool"]["setuptools"]["package-data"].items():
        for file in files:
            assert (_ROOT / package / file).is_file(), file
