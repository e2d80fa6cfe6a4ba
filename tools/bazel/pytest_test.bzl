"""Targets that run test files with pytest, as `make test` does."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

def pytest_tests(deps, data):
    """Declares tests of the *_test.py files in and below this package.

    Each folder has a target, `all_FOLDER_tests`, and the files beside the folders have
    `all_top_tests`: one process each, since starting one takes longer than most files. Each file
    has a target of its own, too, which `bazel test //...` leaves out.

    Args:
      deps: the libraries that the tests import.
      data: the files that they read.
    """
    tests = native.glob(["**/*_test.py"])
    py_library(
        name = "helpers",
        testonly = True,
        srcs = native.glob(["**/*.py"], exclude = tests),
        data = native.glob(["**"], exclude = ["**/__pycache__/**"]),  # Some tests look for others.
        deps = deps,
    )

    folders = {}
    for path in tests:
        folder = path.split("/")[0] if "/" in path else "top"
        folders.setdefault(folder, []).append(path)
        _pytest_test(path[:-len(".py")], [path], data, tags = ["manual"])
    for folder, paths in folders.items():
        _pytest_test("all_%s_tests" % folder, paths, data)

def _pytest_test(name, paths, data, tags = []):
    py_test(
        name = name,
        srcs = paths + ["//tools/bazel:run_pytest.py"],
        main = "//tools/bazel:run_pytest.py",
        args = ["$(location %s)" % path for path in paths],
        data = data,
        tags = tags,
        deps = [":helpers"],
    )
