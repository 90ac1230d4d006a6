#include "lockstep/training/profile_window.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/kineto_shim.h>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/uninterrupted.h"
#include "lockstep/training/trace_file.h"

namespace lockstep {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

/// Name and boot, so that a rebooted host, whose clock may have been set, counts as another.
std::string name_of_host() {
  std::array<char, 256> name = {};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  try {
    InputFile file("/proc/sys/kernel/random/boot_id");
    std::array<char, 36> id = {};
    boot.assign(id.data(), file.read(id.data(), id.size()));
  } catch (const FileError&) {
    boot = "unknown boot";
  }
  return fmt::format("{} {}", name.data(), boot);
}

std::set<ActivityType> activities_of(c10::Device device) {
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  return activities;
}

ProfilerConfig profiler_config() {
  torch::profiler::impl::ExperimentalConfig all_threads;
  all_threads.profile_all_threads = true;
  return ProfilerConfig(ProfilerState::KINETO, /*report_input_shapes=*/false,
                        /*profile_memory=*/false, /*with_stack=*/false, /*with_flops=*/false,
                        /*with_modules=*/false, all_threads);
}

/// Where Kineto writes before it renames; a trace that it could not write stays there.
std::string partial_trace(const std::string& path) { return path + ".tmp"; }

/// Kineto does not tell why: the system does when it is asked to write more.
std::string why_not_written(const std::string& path) {
  std::error_code no_folder;
  if (std::filesystem::is_directory(path, no_folder)) return std::strerror(EISDIR);
  const int file = ::open(partial_trace(path).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                          S_IRUSR | S_IWUSR);
  if (file < 0) return std::strerror(errno);
  const std::string more(1 << 20, '\n');
  ssize_t written = 1;
  for (int i = 0; i < 2 && written > 0; ++i)  // a full disk may take a part of the first
    written = uninterrupted([&] { return ::write(file, more.data(), more.size()); });
  const int error = errno;
  ::close(file);
  return written > 0 ? "the profiler does not say why" : std::strerror(error);
}

/// Keeps Kineto from reporting on standard error that it finds no GPU.
void quieten_kineto() { ::setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0); }

}  // namespace

ProfileRange parse_profile_range(const std::string& text, int64_t train_iters) {
  ProfileRange range;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, range.first);
  bool good = first.ec == std::errc() && first.ptr != end && *first.ptr == ':';
  if (good) {
    const auto last = std::from_chars(first.ptr + 1, end, range.last);
    good = last.ec == std::errc() && last.ptr == end;
  }
  require<ConfigError>(
      good && range.first >= 1 && range.first <= range.last && range.last <= train_iters,
      "--profile: found '{}', allowed: FIRST:LAST, 1 <= FIRST <= LAST <= "
      "train.train_iters ({})",
      text, train_iters);
  return range;
}

ProfileWindow::ProfileWindow(const ProfileRange& range, std::string folder,
                             const ParallelState& state)
    : range_(range), state_(state), path_(fmt::format("{}/rank_{}.json", folder, state.rank())) {
  quieten_kineto();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<FileError>(!error,
                     "--profile: folder '{}' cannot be "
                     "created: {}",
                     folder, error.message());
}

ProfileWindow::~ProfileWindow() {
  if (recording_) profiler::disableProfiler();
}

void ProfileWindow::before(int64_t iteration) {
  if (recording_ || done_ || iteration < range_.first || iteration > range_.last) return;
  const auto activities = activities_of(state_.device());
  profiler::prepareProfiler(profiler_config(), activities);
  profiler::enableProfiler(profiler_config(), activities);
  recording_ = true;
}

void ProfileWindow::after(int64_t iteration) {
  if (ends_after(iteration)) finish();
}

void ProfileWindow::finish() {
  if (!recording_) return;
  recording_ = false;
  done_ = true;
  profiler::addMetadataJson(kTraceHeaderKey, trace_header_json({.rank = state_.rank(),
                                                                .world_size = state_.world_size(),
                                                                .process = ::getpid(),
                                                                .host = name_of_host()}));
  const auto result = profiler::disableProfiler();
  std::error_code error;
  std::filesystem::remove(path_, error);
  result->save(path_);
  written_ = std::filesystem::file_size(path_, error) > 0 && !error;
  if (written_) return;
  problem_ = fmt::format("rank {}: --profile: '{}' could not be written: {}", state_.rank(), path_,
                         why_not_written(path_));
  std::filesystem::remove(partial_trace(path_), error);
}

}  // namespace lockstep
