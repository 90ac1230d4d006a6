#include "lockstep/program/torchrun.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/program/installation.h"

namespace lockstep {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& command) {
  std::vector<char*> result;
  for (const std::string& word : command) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

/// Whether `command` runs and exits with 0. Its output is dropped.
bool succeeds(const std::vector<std::string>& command) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_addopen(&actions, descriptor, "/dev/null", O_WRONLY, 0);
  pid_t process = 0;
  const int error = ::posix_spawn(&process, command.front().c_str(), &actions, nullptr,
                                  pointers(command).data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  return error == 0 && ::waitpid(process, &status, 0) == process && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

/// "/usr/bin/python3" for a script that begins with "#!/usr/bin/python3"; empty for another file.
std::string python_of(const std::string& script) {
  constexpr size_t kLongestLine = 256;
  InputFile file(script);
  std::string line(kLongestLine, '\0');
  line.resize(file.read(line.data(), line.size()));
  line.resize(std::min(line.find('\n'), line.size()));
  const bool python = line.starts_with("#!/") && line.find(' ') == std::string::npos &&
                      std::filesystem::path(line).filename().string().starts_with("python");
  return python ? line.substr(2) : "";
}

bool works(const std::string& torchrun) {
  if (::access(torchrun.c_str(), X_OK) != 0) return false;
  std::string python;
  try {
    python = python_of(torchrun);
  } catch (const FileError&) {
    return false;
  }
  if (python.empty()) return succeeds({torchrun, "--help"});
  return succeeds({python, "-c",
                   "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))"});
}

/// bin/ of the environment if this file is lib/python3.X/site-packages/lockstep/bin/lockstep.
std::filesystem::path environment_folder() {
  const auto packages = program_file().parent_path().parent_path().parent_path();
  if (packages.filename() != "site-packages" && packages.filename() != "dist-packages") return {};
  return packages.parent_path().parent_path().parent_path() / "bin";
}

}  // namespace

std::string find_torchrun() {
  std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, waitpid() has no status of a process
  const char* const path = std::getenv("PATH");
  std::istringstream folders(environment_folder().string() + ":" + (path ? path : ""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = std::filesystem::path(folder) / "torchrun";
    if (!folder.empty() && works(candidate)) return candidate;
  }
  return "";
}

void become(const std::vector<std::string>& command) {
  ::execv(command.front().c_str(), pointers(command).data());
  fail<UsageError>("launch: {} cannot be run: {}", command.front(), std::strerror(errno));
}

}  // namespace lockstep
