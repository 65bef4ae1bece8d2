#!/bin/sh
# The check of a GPU on a machine without a network, from the root of the checkout:
#   sh benchmarks/gpu/offline.sh WHEELS [flags of python -m benchmarks.gpu]
# WHEELS is a folder that `python -m benchmarks.gpu.wheels WHEELS` has filled on a machine with a network. They are
# installed into build/gpu-site, and nothing else on the machine changes; torch and cupy are the machine's own.
set -eu
if [ $# -eq 0 ] || [ ! -d "$1" ]; then
    echo "usage: sh benchmarks/gpu/offline.sh WHEELS [flags of python -m benchmarks.gpu]; WHEELS is a folder" >&2
    exit 2
fi
wheels=$1
shift
site=$PWD/build/gpu-site
caches=$PWD/build/gpu-caches
if [ ! -d "$site" ]; then
    python3 -m pip install --quiet --root-user-action=ignore --no-index --no-deps --no-compile --no-cache-dir --target "$site.part" "$wheels"/*.whl
    mv "$site.part" "$site"
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"
export CUPY_CACHE_DIR="$caches/cupy" NUMBA_CACHE_DIR="$caches/numba"
# Each step is a process that loads all of it: compiled once, on all cores, that is faster.
python3 -m compileall -q -j 0 "$site" decentral comm peers scheduler benchmarks tests >/dev/null 2>&1 || true
exec python3 -m benchmarks.gpu "$@"
