#!/usr/bin/env bash
# Checks kernels and engine on one GPU in less than eight minutes: one table, and OUT/check.json beside it.
#
#   tests/gpu/check.sh                      everything
#   tests/gpu/check.sh attention decode     these sections only (--help names them)
#   tests/gpu/check.sh --interpret          tiny shapes on a CPU, in Triton's interpreter: tries the script itself
#
# OUT: folder for the table, all figures and what was printed on the way, a new one unless given. PYTHON: python3 unless
# given; it needs torch with Triton, safetensors, msgspec, pydantic, numpy and pytest, and nothing that is installed of
# Octavo. What Triton compiles is kept where it always is: a second run finds it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${OUT:-$(mktemp -d)}
export PYTHONPATH="$root:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
for argument in "$@"; do
    if [ "$argument" = --interpret ]; then export TRITON_INTERPRET=1; fi
done
exec "${PYTHON:-python3}" -P -m gpu.check --out "$out" "$@"
