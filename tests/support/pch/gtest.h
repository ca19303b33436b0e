#ifndef BALLAST_PCH_GTEST_H
#define BALLAST_PCH_GTEST_H

// Precompiled header for test programs of several files.

#include <gtest/gtest.h>

#include "src/pch/standard.h"

#endif
