#!/usr/bin/env bash
# run.sh [--device cuda|cpu] [--quick] [--out DIR]: proves and measures FastDecode on this machine, and writes DIR/report.md.
# It needs a Python (PYTHON, python3 by default) with torch >= 2.11 and transformers 5.17 or newer, and no package index.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "run.sh: there is no $python: set PYTHON" >&2; exit 2; }
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv --without-pip "$environment"
exec 3>&1
# Where the host lacks something, a report with that reason is written all the same.
KIT_FAILED=$("$environment/bin/python" "$here/gpu_kit/install.py" "$python" "$here/wheels" 2>&1 >&3) && KIT_FAILED=
export KIT_FAILED HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} PYTHONPATH="$here" PYTHONSAFEPATH=1
cd "${KIT_RUN_FROM:-$PWD}"
"$environment/bin/python" -m gpu_kit "$@" <&0 &
kit=$!
# The kit ends its part and writes the report when it is asked to stop, so this script waits for it.
for signal in TERM INT HUP; do trap "kill -TERM $kit 2> /dev/null" $signal; done
while code=0; wait $kit || code=$?; kill -0 $kit 2> /dev/null; do :; done
exit $code
