#!/bin/sh
# Builds the Python package, installs it into a virtual environment in build-python, and runs its
# tests. PYTHON names the interpreter (default python3), whose packages are seen, such as torch: tests
# that need a missing one are skipped with the reason. Arguments go to unittest, such as
# `tools/python_test.sh -k Buffers`.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
folder=$PWD/build-python
venv=$folder/venv
mkdir -p "$folder"
[ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv"
# The packages of a virtual environment as well.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site; print("\n".join(site.getsitepackages()))' >"$site/outer.pth"

# What builds the package comes from PyPI, unless the interpreter has it.
isolation=""
! "$venv/bin/python" -c 'import mesonpy, nanobind' 2>/dev/null || isolation="--no-build-isolation"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check $isolation \
  "--config-settings=build-dir=$folder/wheel" . >"$folder/install.log" 2>&1 || {
  tail -n 60 "$folder/install.log" >&2
  exit 1
}
# Threads that spin for others take several times as long when cores are shared.
export OMP_WAIT_POLICY=passive
# From another folder, so that the installed package is tested.
tests=$PWD/tests/python
cd "$folder"
exec "$venv/bin/python" -B -m unittest discover --start-directory "$tests" "$@"
