#!/usr/bin/env bash
# Makes .venv, installs, builds a chain from a real OCR model and reads a line of text with it in less memory than half of
# the model's weights. The last line of standard output is one JSON object. Arguments go to scripts/quickstart.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

environment models
exec "$python" scripts/quickstart.py "$@"
