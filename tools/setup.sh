#!/usr/bin/env bash
# Makes .venv with the pinned packages. As root on Debian, it first installs Python 3.11 if needed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}

has_python() { command -v "$python" >/dev/null && "$python" -c 'import ensurepip, venv' 2>/dev/null; }

if ! has_python; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: $python with the venv module is missing; install it (Debian:" \
      "apt-get install python3.11-venv) or set PYTHON to another Python 3.11." >&2
    exit 1
  fi
  apt-get update
  apt-get install -y python3.11 python3.11-venv
fi
"$python" -m venv .venv
.venv/bin/python -m pip install --quiet -r requirements-dev.txt -c constraints.txt
touch .venv/ready
