"""Bazel's native Python rules under their names in rules_python."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
