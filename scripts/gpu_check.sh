#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, in one go and without a network.
#
#   scripts/gpu_check.sh [--wheels FOLDER] [options of `python -m benchmarks.gpu`]
#
# FOLDER holds wheels of what the machine lacks (pydantic, lmdb, ...), 60 MiB at most; torch, triton
# and cupy are always the machine's own. PYTHON names the interpreter, python3 by default.
# `--rehearse` goes through everything on a processor. The table is printed, and written as JSON to
# gpu_check.json, or where --out says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
wheels=
arguments=()
out=gpu_check.json
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
        --out) out=${2:?--out needs a file}; shift 2 ;;
        *) arguments+=("$1"); shift ;;
    esac
done

export PYTHONPATH=$PWD
if [ -n "$wheels" ]; then
    size_kib=$(du -sk "$wheels" | cut -f1)
    if [ "$size_kib" -gt $((60 * 1024)) ]; then
        echo "$wheels holds $size_kib KiB; at most 60 MiB of wheels are taken" >&2
        exit 2
    fi
    for wheel in "$wheels"/*.whl; do
        case $(basename "$wheel") in
            torch-*|triton-*|cupy*) echo "$wheel: the machine's own is used, leave it out" >&2; exit 2 ;;
        esac
    done
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$PWD:$site
fi

export PYTHONUNBUFFERED=1
"$python" -m benchmarks.gpu --out "$out" ${arguments[@]+"${arguments[@]}"}
