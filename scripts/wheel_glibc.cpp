// What libstdc++ of g++ 12 and later asks of a C library, and glibc 2.28 lacks: linked into the extensions of wheels.
#include <unistd.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" {
// glibc 2.32. Reference counts are atomic while it is false, as they must be.
HIDDEN char __libc_single_threaded = 0;

// glibc 2.36, for std::random_device.
HIDDEN unsigned arc4random() {
  unsigned value = 0;
  return getentropy(&value, sizeof value) == 0 ? value : 0;
}
}
