// A test program in plain C++: CHECK what must hold, report what does not, return the count from main.
#pragma once
#include <cstdio>

inline int check_failures = 0;

#define CHECK(condition, ...)                                                        \
  do {                                                                               \
    if (!(condition) && ++check_failures <= 20) {                                    \
      std::fprintf(stderr, "%s:%d: not true: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                             \
      std::fputc('\n', stderr);                                                      \
    }                                                                                \
  } while (0)

inline int check_summary(const char* name) {
  if (check_failures)
    std::fprintf(stderr, "%s: %d failures\n", name, check_failures);
  else
    std::printf("%s: all checks hold\n", name);
  return check_failures != 0;
}
