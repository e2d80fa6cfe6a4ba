"""What rules_python's own rules need; Bazel's own need nothing."""

def py_repositories():
    """Declares no repository."""
