#include "lockstep/core/cuda_libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr char kVariable[] = "LOCKSTEP_LOAD_CUDA";
constexpr char kOfKernels[] = "liblockstep_kernels_cuda.so";

struct State {
  bool loaded = false;
  std::string error;
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

/// Of the libtorch that this process uses.
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

bool is_built() {
  std::error_code ignored;
  return fs::exists(folder_of_this_library() / kOfKernels, ignored);
}

/// What the environment says: true, false, or to look for a driver.
std::optional<bool> wish() {
  const char* const text = std::getenv(kVariable);
  if (!text) return std::nullopt;
  const std::string value = text;
  if (value != "0" && value != "1")
    state().error =
        fmt::format("environment variable {}: found '{}', allowed: 0 or 1", kVariable, value);
  return value == "1";
}

bool has_driver() { return ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr; }

[[maybe_unused]] const bool loaded_before_main = [] {
  const std::optional<bool> wanted = wish();
  if (is_built() && (wanted ? *wanted : has_driver())) state().error = load_cuda_libraries();
  return true;
}();

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

void check_cuda_libraries() { require<ConfigError>(state().error.empty(), "{}", state().error); }

void* find_cuda_part(const char* name) {
  if (!state().loaded) return nullptr;
  const fs::path path = folder_of_this_library() / fmt::format("lib{}.so", name);
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = library ? ::dlsym(library, name) : nullptr;
  require<ConfigError>(found != nullptr, "CUDA: {} cannot be loaded: {}", path.string(),
                       last_error());
  return found;
}

}  // namespace lockstep
