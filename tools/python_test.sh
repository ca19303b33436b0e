#!/bin/sh
# Builds the Python package, installs it into a virtual environment in build-python, and runs its
# tests. PYTHON names the interpreter (default python3), whose packages, such as torch, are visible.
# Tests that need a missing package are skipped with the reason. Arguments are passed to unittest,
# for example
# `tools/python_test.sh -k Buffers`.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
folder=$PWD/build-python
venv=$folder/venv
mkdir -p "$folder"
[ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv"
# Makes the packages of a virtual environment visible, too.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site; print("\n".join(site.getsitepackages()))' >"$site/outer.pth"

# The build's dependencies come from PyPI, unless the interpreter has them.
isolation=""
! "$venv/bin/python" -c 'import mesonpy, nanobind' 2>/dev/null || isolation="--no-build-isolation"
# Kernels have tests elsewhere, and compiling them takes minutes.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check $isolation \
  "--config-settings=build-dir=$folder/wheel" "--config-settings=setup-args=-Dcuda=disabled" . >"$folder/install.log" 2>&1 || {
  tail -n 60 "$folder/install.log" >&2
  exit 1
}
# Spinning threads take several times as long when cores are shared.
export OMP_WAIT_POLICY=passive
# Runs in another folder, so that the installed package is tested.
tests=$PWD/tests/python
cd "$folder"
exec "$venv/bin/python" -B -m unittest discover --start-directory "$tests" "$@"
