#!/usr/bin/env bash
# As root on Debian, installs Slurm and Open MPI if needed. The tests of launch/ run under them.
set -euo pipefail

if command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v mpirun >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "setup_clusters: Slurm, munge or Open MPI is missing; install them" \
    "(Debian: apt-get install slurm-wlm munge openmpi-bin)." >&2
  exit 1
fi
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
  slurm-wlm munge openmpi-bin openssh-client
