// What the C++ tests share: a check that counts what failed.
#pragma once

#include <cstdio>

inline int failures = 0;

inline void expect(bool ok, char const *what, int a = 0, int b = 0) {
  if (ok) return;
  std::printf("FAILED: %s (%d, %d)\n", what, a, b);
  ++failures;
}
