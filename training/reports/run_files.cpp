#include "lockstep/training/run_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {

RunFiles run_files(const std::string& folder) {
  return {folder + "/metrics.jsonl", folder + "/config.textproto", folder + "/loss.svg",
          folder + "/traces", folder + "/audit.json"};
}

std::string layout_text(const ParallelConfig& parallel) {
  std::string text;
  for (const ParallelSize* size : parallel_size_table()) {
    const int64_t ranks = size->of(parallel);
    const int64_t usual = size->if_unset ? size->if_unset->of(parallel) : 1;
    if (ranks != usual) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", size->name, ranks);
  }
  return text;
}

bool is_newer(const std::string& path, const std::string& other) {
  std::error_code error;
  const auto written = std::filesystem::last_write_time(path, error);
  if (error) return false;
  const auto other_written = std::filesystem::last_write_time(other, error);
  return error || written >= other_written;
}

double seconds_since_change(const std::string& path) {
  std::error_code error;
  const auto written = std::filesystem::last_write_time(path, error);
  if (error) return 0;
  const auto age = std::filesystem::file_time_type::clock::now() - written;
  return std::max(std::chrono::duration<double>(age).count(), 0.0);
}

}  // namespace lockstep
