#pragma once

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <initializer_list>
#include <vector>

/// System calls that fail on a thread.
namespace lockstep::testing {

/// From now on, these system calls of this thread and its children fail with `error`.
inline void forbid(std::initializer_list<unsigned> calls, int error) {
  std::vector<sock_filter> rules = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const unsigned call : calls) {
    rules.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    rules.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  rules.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program = {static_cast<unsigned short>(rules.size()), rules.data()};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

/// Other processes' memory cannot be read, as in a container that forbids it.
inline void forbid_reading() { forbid({SYS_process_vm_readv}, EPERM); }

/// As if there were too many threads already.
inline void forbid_threads() { forbid({SYS_clone, SYS_clone3}, EAGAIN); }

}  // namespace lockstep::testing
