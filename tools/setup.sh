#!/usr/bin/env bash
# Makes .venv, or VENV, with the packages that were tested. PYTHON names the Python. By default it is
# the newest of 3.13, 3.12 and 3.11, or of VERSIONS, that is on the PATH or that pyenv or uv know; as root on Debian
# or Ubuntu, the newest that apt has is installed if there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
read -ra versions <<<"${VERSIONS:-3.13 3.12 3.11}"

version_of() { "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Prints the newest Python that can make an environment; fails if there is none.
find_python() {
  local version candidate
  for version in "${versions[@]}"; do
    for candidate in "python$version" python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$version".*/bin/python \
      "$(command -v uv >/dev/null && uv python find --no-python-downloads "$version" 2>/dev/null)"; do
      if [ -n "$candidate" ] && [ "$(version_of "$candidate")" = "$version" ]; then
        echo "$candidate"
        return
      fi
    done
  done
  return 1
}

install_python() {
  local version
  apt-get update -qq
  for version in "${versions[@]}"; do
    if apt-cache show "python$version-venv" >/dev/null 2>&1; then
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$version" "python$version-venv"
      return
    fi
  done
}

if [ -n "${PYTHON:-}" ]; then
  python=$PYTHON
  found=$(version_of "$python" || true)
  if [ -z "$found" ]; then
    echo "setup: PYTHON=$python is no Python with the modules venv and ensurepip." >&2
    exit 1
  fi
  if [[ " ${versions[*]} " != *" $found "* ]]; then
    echo "setup: PYTHON=$python is Python $found; expected ${versions[-1]} to ${versions[0]}" \
      "(3.14 as soon as TensorFlow has a release for it)." >&2
    exit 1
  fi
elif ! python=$(find_python); then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install_python
  fi
  if ! python=$(find_python); then
    echo "setup: no Python ${versions[-1]} to ${versions[0]} with the module venv; install one (Debian, Ubuntu:" \
      "apt-get install python3-venv; uv python install ${versions[0]}; pyenv install ${versions[0]}), or set PYTHON." >&2
    exit 1
  fi
fi

version=$(version_of "$python")
echo "setup: Python $version ($python) in $venv"
"$python" -m venv "$venv"
# Other targets install with the same constraints.
cp "constraints/$version.txt" "$venv/constraints.txt"
echo "setup: installing packages, 3.7 GB, takes one to five minutes"
"$venv/bin/python" -m pip install --quiet -r requirements/dev.txt -c "$venv/constraints.txt"
# So that the programs run from any folder in the activated environment.
"$venv/bin/python" - "$PWD" <<'END'
import pathlib
import site
import sys

pathlib.Path(site.getsitepackages()[0], "checkout.pth").write_text(f"{sys.argv[1]}\n", encoding="utf-8")
END
# The command that the wheel installs.
cat >"$venv/bin/gshard" <<END
#!/bin/sh
exec "$(cd "$venv/bin" && pwd)/python" -m lingvo_gshard.gshard "\$@"
END
chmod +x "$venv/bin/gshard"
touch "$venv/ready"
echo "setup: done; \`. $venv/bin/activate\` puts gshard on the PATH"
