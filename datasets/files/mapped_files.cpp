#include "lockstep/datasets/mapped_files.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <string_view>

namespace lockstep {
namespace {

/// `begin` is written last and erased first, so that the handler sees only whole entries.
struct Mapping {
  std::atomic<bool> taken = false;
  std::atomic<uintptr_t> begin = 0;
  std::atomic<size_t> bytes = 0;
  std::atomic<const std::string*> path = nullptr;
};

std::array<Mapping, 64> mappings;

uintptr_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

void write_stderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

/// Makes only calls that are allowed in a signal handler.
void end_with_file(int signal, siginfo_t* info, void*) {
  const uintptr_t at = address_of(info->si_addr);
  for (const Mapping& mapping : mappings) {
    const uintptr_t begin = mapping.begin;
    if (begin == 0 || at < begin || at - begin >= mapping.bytes) continue;
    std::array<char, 24> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), at - begin).ptr;
    write_stderr("lockstep: '");
    write_stderr(*mapping.path.load());
    write_stderr("' can no longer be read at byte ");
    write_stderr({digits.data(), static_cast<size_t>(end - digits.data())});
    write_stderr(": it was truncated while it was read, or its disk has failed\n");
    ::_exit(1);
  }
  std::signal(signal, SIG_DFL);  // the access is tried again
}

}  // namespace

void note_mapping(const void* begin, size_t bytes, const std::string& path) {
  for (Mapping& mapping : mappings) {
    if (mapping.taken.exchange(true)) continue;
    mapping.bytes = bytes;
    mapping.path = &path;
    mapping.begin = address_of(begin);
    return;
  }
}

void forget_mapping(const void* begin) {
  for (Mapping& mapping : mappings) {
    uintptr_t expected = address_of(begin);
    if (!mapping.begin.compare_exchange_strong(expected, 0)) continue;
    mapping.taken = false;
    return;
  }
}

void tell_faults_of_mapped_files() {
  struct sigaction action = {};
  action.sa_sigaction = end_with_file;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace lockstep
