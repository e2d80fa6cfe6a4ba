"""BUILD files as the imports are; `python -m tools.build_files` writes them."""

import pytest

from tools import build_files


def _project(root, files):
    for path, text in files.items():
        path = root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return build_files.read(root)


def test_every_build_file_is_as_the_imports_are():
    for folder, text in build_files.build_files(build_files.read(build_files.ROOT)).items():
        assert (build_files.ROOT / folder / "BUILD").read_text() == text, folder


def test_a_module_depends_on_what_it_imports_and_on_the_packages_around(tmp_path):
    graph = _project(
        tmp_path,
        {
            "params/__init__.py": "",
            "params/a.py": "import os\nfrom params import b\nfrom params.c import thing\n",
            "params/b.py": "",
            "params/c.py": "thing = 1\n",
        },
    )
    assert graph.deps["params.a"] == {"params", "params.b", "params.c"}


def test_what_only_a_type_checker_imports_is_no_dependency(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from params import b\n"
    graph = _project(tmp_path, {"params/a.py": text, "params/b.py": "from params import a\n"})
    assert graph.deps == {"params.a": set(), "params.b": {"params.a"}}


def test_an_import_that_closes_a_circle_is_the_programs_that_reach_it(tmp_path):
    graph = _project(
        tmp_path,
        {
            "params/a.py": "def f():\n    from params import b\n",
            "params/b.py": "from params import a\n",
            "bench/run.py": 'from params import a\nif __name__ == "__main__":\n    a.f()\n',
        },
    )
    assert graph.late == {"params.a": {"params.b"}}
    texts = build_files.build_files(graph)
    assert '"//params:b",' in texts["bench"]
    assert ":b" not in texts["params"].split('name = "b"')[0]


def test_modules_that_import_each_other_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"params\.a and params\.b import each other"):
        _project(tmp_path, {"params/a.py": "import params.b\n", "params/b.py": "import params.a\n"})


def test_a_test_gets_conftest_and_the_files_it_reads(tmp_path):
    graph = _project(
        tmp_path,
        {
            "tests/conftest.py": "",
            "tests/x_test.py": "import pathlib\n_ROOT = pathlib.Path(__file__)\n",
        },
    )
    text = build_files.build_files(graph)["tests"]
    assert 'data = ["//:files"],' in text
    assert 'deps = [":conftest"],' in text


def test_a_test_gets_the_conftests_of_its_folder_and_those_above(tmp_path):
    files = {"tests/conftest.py": "", "tests/a/conftest.py": "", "tests/a/x_test.py": ""}
    texts = build_files.build_files(_project(tmp_path, {**files, "tests/b/y_test.py": ""}))
    assert '"//tests:conftest",\n        ":conftest",' in texts["tests/a"]
    assert 'deps = ["//tests:conftest"],' in texts["tests/b"]
