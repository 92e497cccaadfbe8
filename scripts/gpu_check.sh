#!/usr/bin/env bash
# Checks, on a machine with an NVIDIA GPU, what cannot be checked without one, in under ten minutes, and writes one JSON
# report that can be posted (gpu-report.json in the repository). --dry-run says what would be checked, --help the rest.
# Python is $PYTHON, or that of .venv, or python3; it must have this package's requirements and PyCUDA.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

[[ -x $python ]] || python=python3
python=${PYTHON:-$python}
command -v "$python" >/dev/null || die "there is no $python" "install Python 3.10 or newer, or name one: PYTHON=/path/to/python3 $0"
"$python" -c 'import msgspec, numpy, xxhash' 2>/dev/null ||
    die "$python lacks what this package requires" "on a Jetson run scripts/bootstrap-jetson.sh; else pip install -e '.[tensorrt]'"

status=0
timeout --kill-after=10 600 "$python" -m tests.gpu "$@" || status=$?
((status != 124 && status != 137)) || die "the checks took more than ten minutes and were stopped" "run them with --small, and say so with the report"
exit "$status"
