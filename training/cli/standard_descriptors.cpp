#include "lockstep/training/cli/standard_descriptors.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

namespace lockstep {

void open_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number, which is this one.
    const int flags = descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY;
    if (::open("/dev/null", flags) != descriptor) std::_Exit(1);
  }
}

bool standard_output_is_open() {
  const int flags = ::fcntl(STDOUT_FILENO, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

}  // namespace lockstep
