"""A py_test that runs one file's tests by pytest, as `make test` does."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, srcs, deps, data = [], **kwargs):
    """Declares a test.

    Args:
      name: of the target.
      srcs: the one file of tests.
      deps: what it imports, conftest included.
      data: files that it reads.
      **kwargs: of py_test.
    """
    py_test(
        name = name,
        srcs = srcs + ["//tools/bazel:run_pytest.py"],
        main = "//tools/bazel:run_pytest.py",
        args = ["$(location %s)" % srcs[0]],
        data = data + ["//:pyproject.toml"],
        deps = deps,
        **kwargs
    )
