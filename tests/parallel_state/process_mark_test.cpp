#include "lockstep/parallel_state/process_mark.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

namespace lockstep {
namespace {

/// The mark of a child process. The child reports it and waits for `hold` to close.
std::string mark_of_child(pid_t* child, int* hold) {
  int told[2] = {}, held[2] = {};
  if (::pipe(told) != 0 || ::pipe(held) != 0) return "";
  *child = ::fork();
  if (*child == 0) {
    const std::string mark = process_mark();
    char end = 0;
    ::close(held[1]);
    if (::write(told[1], mark.data(), mark.size()) < 0 || ::read(held[0], &end, 1) < 0) ::_exit(1);
    ::_exit(0);
  }
  ::close(told[1]);
  ::close(held[0]);
  *hold = held[1];
  char text[256] = {};
  const ssize_t size = ::read(told[0], text, sizeof text);
  ::close(told[0]);
  return {text, static_cast<size_t>(size)};
}

TEST(ProcessMark, AnEndedProcessIsKnownBeforeAndAfterItsParentLooks) {
  pid_t child = 0;
  int hold = -1;
  const std::string mark = mark_of_child(&child, &hold);
  ASSERT_FALSE(mark.empty());
  EXPECT_NE(mark, process_mark());
  EXPECT_FALSE(process_has_ended(mark));
  EXPECT_FALSE(process_has_ended(process_mark()));
  ::close(hold);
  siginfo_t info = {};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(process_has_ended(mark)) << "nobody has taken its status yet";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(process_has_ended(mark));
}

TEST(ProcessMark, AStoppedProcessIsKnownWhileItStandsStill) {
  pid_t child = 0;
  int hold = -1;
  const std::string mark = mark_of_child(&child, &hold);
  EXPECT_FALSE(process_has_stopped(mark));
  ::kill(child, SIGSTOP);
  ASSERT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
  EXPECT_TRUE(process_has_stopped(mark));
  EXPECT_FALSE(process_has_ended(mark));
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, nullptr, WCONTINUED), child);
  EXPECT_FALSE(process_has_stopped(mark));
  ::close(hold);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(process_has_stopped(mark));
  EXPECT_TRUE(process_has_ended(mark));
}

TEST(ProcessMark, AProcessMayCallItselfAnything) {
  char before[16] = {};
  ::prctl(PR_GET_NAME, before);
  const std::string mark = process_mark();
  for (const char* name : {"two\nlines", "\n", ") X 1 (", "", "\xff"}) {
    ::prctl(PR_SET_NAME, name);
    EXPECT_FALSE(process_has_ended(mark)) << name;
    EXPECT_EQ(process_mark(), mark) << name;
  }
  ::prctl(PR_SET_NAME, before);
}

TEST(ProcessMark, WithoutDescriptorsNothingIsKnown) {
  const std::string mark = process_mark();
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  const bool ended = process_has_ended(mark), stopped = process_has_stopped(mark);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_FALSE(ended);
  EXPECT_FALSE(stopped);
}

TEST(ProcessMark, AnotherProcessOfTheSameIdAndAnotherHostAreToldApart) {
  const std::string mine = process_mark();
  const std::string other_start = mine.substr(0, mine.rfind(' ') + 1) + "1";
  EXPECT_TRUE(process_has_ended(other_start)) << "its id was given to this process";
  std::string other_host = mine;
  other_host[0] = other_host[0] == '0' ? '1' : '0';
  EXPECT_FALSE(process_has_ended(other_host));
  for (const char* text : {"", "nonsense", "1 2", "x y z"}) EXPECT_FALSE(process_has_ended(text));
}

}  // namespace
}  // namespace lockstep
