#include "lockstep/program/output_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include "lockstep/core/check.h"

namespace lockstep {

void check_apart_from_output(const char* option, const std::string& path) {
  struct stat output = {}, file = {};
  const bool same = ::fstat(STDOUT_FILENO, &output) == 0 && ::stat(path.c_str(), &file) == 0 &&
                    output.st_dev == file.st_dev && output.st_ino == file.st_ino;
  require<ConfigError>(!same,
                       "{}: found '{}', which is standard output, allowed: another file, because "
                       "the command also prints",
                       option, path);
}

}  // namespace lockstep
