#!/usr/bin/env bash
# run.sh [--device cuda|cpu] [--quick] [--out DIR]: proves and measures FastDecode on this machine, and writes DIR/report.md.
# It needs a Python (PYTHON, python3 by default) with torch >= 2.11 and transformers 5.17 or newer, and no package index.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv --without-pip "$environment"
"$environment/bin/python" "$here/gpu_kit/install.py" "$python" "$here/wheels"
cd "${KIT_RUN_FROM:-$PWD}"
PYTHONPATH="$here" PYTHONSAFEPATH=1 "$environment/bin/python" -m gpu_kit "$@"
