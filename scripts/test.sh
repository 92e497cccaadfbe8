#!/usr/bin/env bash
# Makes .venv, installs everything the tests need and runs them all: on a fresh machine with Python 3.10 or newer this is
# the only command. Arguments go to pytest: scripts/test.sh tests/graph -x
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

environment test models report serve
# The tests of one file stay together. One more at once than there are cores, since many wait for processes of their own;
# more than four would want more memory than small machines have.
workers=$(($(nproc) + 1))
exec "$python" -m pytest -n "$((workers < 4 ? workers : 4))" --dist loadfile "$@"
