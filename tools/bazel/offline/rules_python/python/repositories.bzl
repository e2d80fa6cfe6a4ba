"""The repositories that rules_python needs; Bazel's native rules need none."""

def py_repositories():
    """Declares no repositories."""
