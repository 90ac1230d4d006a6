#include "lockstep/program/installation.h"

namespace lockstep {

std::filesystem::path program_file() { return std::filesystem::read_symlink("/proc/self/exe"); }

std::filesystem::path installed_path(const std::filesystem::path& relative) {
  const auto folder = program_file().parent_path();
  const auto built = folder / relative;
  return std::filesystem::exists(built) ? built : folder.parent_path() / relative;
}

}  // namespace lockstep
