#!/bin/sh
# Installs the Debian packages that Ballast is built from, and nothing else. Safe to run again: if
# everything is installed, it needs neither the network nor root.
set -eu

packages="g++ meson ninja-build pkg-config libfmt-dev nlohmann-json3-dev libcli11-dev liburing-dev
libtbb-dev libxsimd-dev libdnnl-dev libxxhash-dev libssl-dev libhwloc-dev
libopenmpi-dev openmpi-bin python3-dev python3-venv"
# --tests adds the packages that only tools/test.sh needs.
[ "${1:-}" = "--tests" ] && packages="$packages libgtest-dev clang clang-format
clang-tidy libclang-rt-dev libomp-dev lld iproute2 strace tmux"

missing=""
for package in $packages; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  case "$status" in
    *"ok installed") ;;
    *) missing="$missing $package" ;;
  esac
done

if [ -z "$missing" ]; then
  echo "setup: every package is installed"
  exit 0
fi

sudo=""
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "setup: error: not root and no sudo; as root run: apt-get install$missing" >&2
    exit 1
  }
  sudo="sudo"
fi
echo "setup: installing$missing"
log=$(mktemp)
if ! { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive \
       apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "setup: error: apt-get failed; its whole output is in $log" >&2
  exit 1
fi
rm -f "$log"
echo "setup: done"
