#!/usr/bin/env bash
# Sets up `bazel --config=offline`. As root on Debian, it first installs Bazel if needed.
set -euo pipefail
cd "$(dirname "$0")/.."
java_rules=/usr/share/bazel/rules/java

if ! command -v bazel >/dev/null || [ ! -d "$java_rules" ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup_bazel: bazel or $java_rules is missing; install it" \
      "(Debian: apt-get install bazel-bootstrap bazel-rules-java)." >&2
    exit 1
  fi
  apt-get update
  apt-get install -y --no-install-recommends bazel-bootstrap bazel-rules-java
fi
{
  echo "common:offline --override_repository=rules_java=$java_rules"
  for name in remote_coverage_tools rules_cc rules_python; do
    echo "common:offline --override_repository=$name=$PWD/tools/bazel/offline/$name"
  done
} >.bazelrc.offline
