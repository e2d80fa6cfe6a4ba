#!/usr/bin/env bash
# As root on Debian, installs Chromium if needed. The tests of the server's page run in it.
set -euo pipefail

if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "setup_chromium: chromium is missing; install it (Debian: apt-get install chromium)." >&2
  exit 1
fi
apt-get update
apt-get install -y --no-install-recommends chromium
