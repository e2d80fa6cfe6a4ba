#!/usr/bin/env bash
# Writes constraints/VERSION.txt for the Python that is given: every package, direct or not, at the
# version that pip chooses now. `tools/write_constraints.sh .venv/bin/python`
#
# With UPGRADE=no, packages stay at the versions of the file that is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
file=constraints/$version.txt
report=$(mktemp)
trap 'rm -f "$report"' EXIT

keep=()
if [ "${UPGRADE:-yes}" = no ] && [ -e "$file" ]; then
  keep=(-c "$file")
fi
requirements=()
for each in requirements/*.txt; do
  requirements+=(-r "$each")
done
"$python" -m pip install --quiet --dry-run --ignore-installed --report "$report" \
  "${requirements[@]}" "${keep[@]}"
"$python" - "$report" "$version" >"$file" <<'END'
import json
import sys

report, version = sys.argv[1:]
print(f"# Every package, direct or not, at the version that was tested with Python {version}.")
for item in sorted(
    json.load(open(report))["install"], key=lambda item: item["metadata"]["name"].lower()
):
    print(f"{item['metadata']['name']}=={item['metadata']['version']}")
END
echo "Wrote $file."
