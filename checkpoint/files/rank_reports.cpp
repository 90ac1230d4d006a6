#include "lockstep/checkpoint/rank_reports.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>

#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

constexpr int64_t kLongestReport = int64_t{1} << 30;

std::string path_of_report(const PartialCheckpoint& checkpoint, int64_t rank) {
  return checkpoint.file(fmt::format("rank_{:05}.report", rank));
}

}  // namespace

void write_report(const PartialCheckpoint& checkpoint, int64_t rank, const Manifest& part,
                  const std::atomic<bool>* stop) {
  throw_if_cancelled(stop);
  const std::string path = path_of_report(checkpoint, rank);
  write_file(path + ".partial", {format_manifest(part)});
  throw_if_cancelled(stop);  // again, after waiting for the disk
  std::filesystem::rename(path + ".partial", path);
}

Manifest wait_for_report(const PartialCheckpoint& checkpoint, int64_t rank,
                         const std::atomic<bool>* stop) {
  const std::string path = path_of_report(checkpoint, rank);
  wait_for_path(path, stop);
  return parse_manifest_part(read_file(path, kLongestReport), path);
}

void remove_report(const PartialCheckpoint& checkpoint, int64_t rank) {
  std::filesystem::remove(path_of_report(checkpoint, rank));
}

void wait_for_path(const std::string& path, const std::atomic<bool>* stop) {
  using std::chrono::milliseconds;
  for (milliseconds pause(1); !std::filesystem::exists(path);
       pause = std::min(pause * 2, milliseconds(50))) {
    throw_if_cancelled(stop);
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace lockstep
