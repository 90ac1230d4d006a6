#include "lockstep/parallel_state/process_mark.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

struct ProcessState {
  char state = 'X';
  std::string start;  ///< in clock ticks since boot
};

/// What /proc says about a process; nothing if it does not exist.
std::optional<ProcessState> read_process(const std::string& id) {
  std::string line;
  if (!std::getline(std::ifstream("/proc/" + id + "/stat"), line)) return std::nullopt;
  const size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos) return std::nullopt;
  std::istringstream words(line.substr(end_of_name + 1));
  ProcessState process;
  words >> process.state;
  constexpr int kBetween = 18;  // fields between the state and the start
  for (int i = 0; i <= kBetween; ++i) words >> process.start;
  return words ? std::optional(process) : std::nullopt;
}

/// The state as in /proc, 'X' if the process has ended; 0 if nothing is known.
char state_of(const std::string& mark) {
  std::istringstream words(mark);
  std::string host, id, start;
  if (!(words >> host >> id >> start) || host != fmt::format("{:016x}", process_namespace()))
    return 0;
  const auto process = read_process(id);
  return process && process->start == start ? process->state : 'X';
}

}  // namespace

uint64_t process_namespace() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat ids = {};
  if (boot.empty() || ::stat("/proc/self/ns/pid", &ids) != 0) return 0;
  return text_digest(fmt::format("{} {} {}", boot, ids.st_dev, ids.st_ino));
}

std::string process_mark() {
  const std::string id = std::to_string(::getpid());
  const auto process = read_process(id);
  const uint64_t host = process_namespace();
  return process && host != 0 ? fmt::format("{:016x} {} {}", host, id, process->start) : "";
}

bool process_has_ended(const std::string& mark) {
  const char state = state_of(mark);
  return state == 'Z' || state == 'X';
}

bool process_has_stopped(const std::string& mark) {
  const char state = state_of(mark);
  return state == 'T' || state == 't';
}

}  // namespace lockstep
