#!/usr/bin/env bash
# Makes .venv with the pinned packages; on Debian, as root, installs python3.11 if it lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}

can_make_venv() { command -v "$python" >/dev/null && "$python" -c 'import ensurepip, venv' 2>/dev/null; }

if ! can_make_venv; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: $python with venv is needed; install it (Debian: apt-get install python3.11-venv)," \
      "or name another with PYTHON=..." >&2
    exit 1
  fi
  apt-get update
  apt-get install -y python3.11 python3.11-venv
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet -r requirements-dev.txt -c constraints.txt
touch .venv/ready
