#!/bin/sh
# Removes the C++ tests and their data, nine tenths of all bytes, from the source package that
# `meson dist` makes in a build without tests. That is Python's sdist. tests/python stays.
set -eu
find "$MESON_DIST_ROOT/tests" -mindepth 1 -maxdepth 1 ! -name python -exec rm -r {} +
