#!/bin/sh
# Takes a fresh clone to a trained model: installs, builds, and trains configs/demo.json, whose
# optimizer states are on disk because they fit neither the device's nor the host's budget. CUDA
# kernels are compiled for the GPU of this machine only, and not at all without a driver. Extra
# arguments are passed to `ballast train`.
set -eu
cd "$(dirname "$0")/.."

tools/setup.sh
if [ ! -f build/build.ninja ]; then
  if [ -e /proc/driver/nvidia/version ]; then
    gpu=-Dgpu_architectures=native
    echo "demo: configuring"
  else
    gpu=-Dcuda=disabled
    echo "demo: configuring without CUDA: this machine has no NVIDIA driver"
  fi
  # Sources are compiled in groups, which takes half the time of a build from scratch.
  joined="-Dunity=on -Dunity_size=64 -Db_pch=false"
  meson setup build -Dtests=false $joined "$gpu" >build.log 2>&1 || { cat build.log >&2; exit 1; }
  mv build.log build/
fi
echo "demo: building (a few minutes the first time)"
ninja -C build program >build/demo.log 2>&1 || { tail -n 40 build/demo.log >&2; exit 1; }
exec build/tools/ballast train configs/demo.json "$@"
