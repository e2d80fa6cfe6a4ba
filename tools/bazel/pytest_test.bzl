"""Targets that run test files with pytest, as `make test` does."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

def pytest_tests(deps, data):
    """Declares a py_test for each *_test.py file in and below this package.

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
    for path in tests:
        py_test(
            name = path[:-len(".py")],
            srcs = [path, "//tools/bazel:run_pytest.py"],
            main = "//tools/bazel:run_pytest.py",
            args = ["$(location %s)" % path],
            data = data,
            deps = [":helpers"],
        )
