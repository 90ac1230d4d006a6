#include "lockstep/parallel_state/process_mark.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

struct ProcessState {
  char state = 0;     ///< as in /proc, 'X' if there is no such process, 0 if that is not known
  std::string start;  ///< in clock ticks since boot
};

/// What /proc says about a process. The name in it may hold anything, line ends and brackets too.
ProcessState read_process(const std::string& id) {
  errno = 0;
  std::ifstream file("/proc/" + id + "/stat");
  std::string text;
  if (!std::getline(file, text, '\0'))
    return {.state = errno == ENOENT || errno == ESRCH ? 'X' : '\0', .start = ""};
  const size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) return {};
  std::istringstream words(text.substr(end_of_name + 1));
  ProcessState process;
  words >> process.state;
  constexpr int kBetween = 18;  // fields between the state and the start
  for (int i = 0; i <= kBetween; ++i) words >> process.start;
  return words ? process : ProcessState();
}

/// The state as in /proc, 'X' if the process has ended; 0 if nothing is known.
char state_of(const std::string& mark) {
  std::istringstream words(mark);
  std::string host, id, start;
  if (!(words >> host >> id >> start) || host != fmt::format("{:016x}", process_namespace()))
    return 0;
  const ProcessState process = read_process(id);
  const bool other = process.state != 0 && process.start != start;  // which was given its id
  return other ? 'X' : process.state;
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
  const std::string start = read_process(id).start;
  const uint64_t host = process_namespace();
  return !start.empty() && host != 0 ? fmt::format("{:016x} {} {}", host, id, start) : "";
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
