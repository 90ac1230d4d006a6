#include "lockstep/core/cuda_libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr char kVariable[] = "LOCKSTEP_LOAD_CUDA";
constexpr const char* kParts[] = {"lockstep_kernels_cuda", "lockstep_parallel_state_cuda"};

struct State {
  bool loaded = false;
  std::string error;    ///< for check_cuda_libraries()
  std::string absence;  ///< for why_no_cuda()
};

State& state() {
  static State state;
  return state;
}

fs::path folder_of_this_library() {
  static const char here = 0;
  Dl_info info;
  return ::dladdr(&here, &info) != 0 ? fs::path(info.dli_fname).parent_path() : fs::path();
}

/// The folder of the libtorch that this process uses.
fs::path folder_of_libtorch() {
  void* const library = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  const link_map* map = nullptr;
  if (!library || ::dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return {};
  return fs::path(map->l_name).parent_path();
}

std::string last_error() {
  const char* const text = ::dlerror();
  return text ? text : "no reason given";
}

fs::path path_of(const std::string& part) {
  return folder_of_this_library() / fmt::format("lib{}.so", part);
}

bool is_built() {
  std::error_code ignored;
  for (const char* const part : kParts)
    if (!fs::exists(path_of(part), ignored)) return false;
  return true;
}

/// Why the driver cannot be loaded; "" if it can.
std::string driver_obstacle() {
  return ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) ? "" : last_error();
}

/// Loads the libraries that the environment asks for; otherwise notes why not.
void load_before_main() {
  const char* const text = std::getenv(kVariable);
  const std::string wish = text ? text : "";
  const bool built = is_built();
  if (text && wish != "0" && (wish != "1" || !built))
    state().error = fmt::format("environment variable {}: found '{}', allowed: {}", kVariable, wish,
                                built ? "0 or 1" : "0, as this build has no CUDA");
  if (!built)
    state().absence = "this build has no CUDA";
  else if (text && wish != "1")
    state().absence = fmt::format("{} is '{}'", kVariable, wish);
  else if (const std::string obstacle = text ? "" : driver_obstacle(); !obstacle.empty())
    state().absence = "NVIDIA's driver cannot be loaded: " + obstacle;
  else
    state().error = state().absence = load_cuda_libraries();
}

[[maybe_unused]] const bool called_before_main = (load_before_main(), true);

}  // namespace

std::string load_cuda_libraries() {
  if (state().loaded || !is_built()) return "";
  const fs::path library = folder_of_libtorch() / "libtorch_cuda.so";
  state().loaded = ::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
  if (state().loaded) return "";
  return fmt::format(
      "CUDA: libtorch's library for it cannot be loaded: {}; allowed: a libtorch with CUDA, or "
      "{}=0, to use CPUs",
      last_error(), kVariable);
}

std::string why_no_cuda() { return state().loaded ? "" : state().absence; }

void check_cuda_libraries() {
  require<ConfigError>(state().error.empty(), "{}", state().error);
  for (const char* const part : kParts) (void)find_cuda_part(part);
}

void* find_cuda_part(const char* name) {
  if (!state().loaded) return nullptr;
  const fs::path path = path_of(name);
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = library ? ::dlsym(library, name) : nullptr;
  require<ConfigError>(found != nullptr,
                       "CUDA: {} cannot be loaded: {}; allowed: the library of this build, or "
                       "{}=0, to use CPUs",
                       path.string(), last_error(), kVariable);
  return found;
}

}  // namespace lockstep
