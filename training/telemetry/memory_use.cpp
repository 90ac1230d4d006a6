#include "lockstep/training/memory_use.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "lockstep/core/error.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

constexpr auto kRestOfLine = std::numeric_limits<std::streamsize>::max();

MemoryUse host_memory() {
  MemoryUse use;
  std::ifstream status("/proc/self/status");
  for (std::string field; status >> field; status.ignore(kRestOfLine, '\n')) {
    int64_t kilobytes = 0;
    if (field == "VmHWM:" && status >> kilobytes) use.peak_bytes = kilobytes << 10;
    if (field == "VmRSS:" && status >> kilobytes) {
      use.bytes = kilobytes << 10;
      break;
    }
  }
  return use;
}

/// The text after "Model:" in a GPU's description.
std::string model_in(std::string_view text) {
  constexpr std::string_view kField = "Model:";
  const size_t at = text.find(kField);
  if (at == text.npos) return "";
  text.remove_prefix(at + kField.size());
  text = text.substr(0, text.find('\n'));
  const size_t begin = text.find_first_not_of(" \t");
  return begin == text.npos ? "" : std::string(text.substr(begin));
}

}  // namespace

MemoryUse memory_use(c10::Device device) {
  if (!device.is_cuda()) return host_memory();
  const auto stats = at::getDeviceAllocator(c10::kCUDA)->getDeviceStats(device.index());
  return {stats.reserved_bytes[0].current, stats.reserved_bytes[0].peak};
}

std::string gpu_model(const std::string& folder) {
  std::error_code error;  // there is no such folder without the driver
  std::string model;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    std::string found;
    try {
      InputFile file(entry.path() / "information");
      found = model_in(read_all(file));
    } catch (const FileError&) {
      return "";
    }
    if (!model.empty() && found != model) return "";
    model = found;
  }
  return model;
}

}  // namespace lockstep
