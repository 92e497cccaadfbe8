#!/usr/bin/env bash
# Makes .venv, installs everything the tests need and runs them all: on a fresh machine with Python 3.10 or newer this is
# the only command. Arguments go to pytest: scripts/test.sh tests/graph -x
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

environment test models report
# The tests of one file stay together; more than four at once would want more memory than small machines have.
exec "$python" -m pytest -n "$(($(nproc) < 4 ? $(nproc) : 4))" --dist loadfile "$@"
