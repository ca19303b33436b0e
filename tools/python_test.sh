#!/bin/sh
# Builds the Python package with pip, installs it into a virtual environment of its own and runs its
# tests. Needs PyPI for pip's build (meson-python, nanobind); PyTorch is that of $PYTHON, python3 by
# default, and tests that need it are skipped without it.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
folder=build-python
[ -x "$folder/bin/python" ] || "$python" -m venv --system-site-packages "$folder"
# A virtual environment inside another one does not see the packages of that one.
"$python" -c 'import site; print("\n".join(site.getsitepackages()))' \
  >"$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
"$folder/bin/python" -m pip install --quiet --upgrade "${1:-.}"
"$folder/bin/python" -m unittest discover --start-directory tests/python --top-level-directory tests/python
