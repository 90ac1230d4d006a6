// The `lockstep` program. This part does without libtorch, whose loading costs seconds and hundreds
// of megabytes: `launch`, `configs`, `data`, `plot`, `watch`, `trace`, `audit`, `megatron-flags`,
// the arithmetic of `plan` and the checks of `checkpoint` run here. For any other command the
// process becomes libexec/lockstep.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/program/commands.h"
#include "lockstep/program/installation.h"
#include "lockstep/program/program.h"
#include "lockstep/program/standard_descriptors.h"

namespace {

/// Asks the C library of the next program to take memory in huge pages where the kernel has them,
/// unless the user has set that. Tensors that caches do not hold are read and written faster. It
/// can only be set before a program starts.
void use_huge_pages() {
  constexpr const char* kVariable = "GLIBC_TUNABLES";
  constexpr const char* kTunable = "glibc.malloc.hugetlb";
  const char* const given = std::getenv(kVariable);
  std::string tunables = given ? given : "";
  if (tunables.find(kTunable) != std::string::npos) return;
  if (!tunables.empty()) tunables += ':';
  ::setenv(kVariable, (tunables + kTunable + "=1").c_str(), 1);
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::open_standard_descriptors();
  lockstep::allow_many_open_files();
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "launch")
    return lockstep::run_program_with_words(argc, argv, lockstep::add_launch_command);
  if (command == "configs") return lockstep::run_program(argc, argv, lockstep::add_configs_command);
  if (command == "data") return lockstep::run_program(argc, argv, lockstep::add_data_command);
  if (command == "plot") return lockstep::run_program(argc, argv, lockstep::add_plot_command);
  if (command == "watch") return lockstep::run_program(argc, argv, lockstep::add_watch_command);
  if (command == "trace") return lockstep::run_program(argc, argv, lockstep::add_trace_command);
  if (command == "audit") return lockstep::run_program(argc, argv, lockstep::add_audit_command);
  if (command == "megatron-flags")
    return lockstep::run_program_with_words(argc, argv, lockstep::add_megatron_flags_command);
  const std::string_view action = argc > 2 ? argv[2] : "";
  if (command == "plan" && (action == "groups" || action == "buckets" || action == "memory" ||
                            action == "schedule" || action == "audit"))
    return lockstep::run_program(argc, argv,
                                 [](CLI::App& program) { lockstep::add_plan_command(program); });
  if (command == "checkpoint" && (action == "inspect" || action == "verify"))
    return lockstep::run_program(
        argc, argv, [](CLI::App& program) { lockstep::add_checkpoint_command(program); });
  use_huge_pages();
  const std::string path = lockstep::installed_path("libexec/lockstep");
  ::execv(path.c_str(), argv);
  std::fprintf(stderr, "lockstep: cannot run %s: %s\n", path.c_str(), std::strerror(errno));
  return 1;
}
