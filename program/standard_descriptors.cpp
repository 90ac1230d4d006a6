#include "lockstep/program/standard_descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <streambuf>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

class StandardOutput final : public std::streambuf {
 public:
  StandardOutput() { setp(buffer_.data(), buffer_.data() + buffer_.size()); }
  /// errno of the first write that failed; 0 if none has.
  int error() const { return error_; }

 protected:
  int_type overflow(int_type next) override {
    if (sync() != 0) return traits_type::eof();
    return traits_type::eq_int_type(next, traits_type::eof())
               ? traits_type::not_eof(next)
               : sputc(traits_type::to_char_type(next));
  }

  int sync() override {
    for (const char* at = pbase(); at < pptr() && error_ == 0;) {
      const ssize_t written = ::write(STDOUT_FILENO, at, static_cast<size_t>(pptr() - at));
      if (written < 0 && errno != EINTR) error_ = errno;
      if (written > 0) at += written;
    }
    setp(buffer_.data(), buffer_.data() + buffer_.size());
    return error_ == 0 ? 0 : -1;
  }

 private:
  std::array<char, 1 << 16> buffer_;
  int error_ = 0;
};

/// Never destroyed: std::cout is flushed when the program ends.
StandardOutput& standard_output() {
  static StandardOutput& output = *new StandardOutput;
  return output;
}

}  // namespace

void open_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() takes the lowest free number, which is this one.
    const int flags = descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY;
    if (::open("/dev/null", flags) != descriptor) std::_Exit(1);
  }
}

void allow_many_open_files() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

void watch_standard_output() { std::cout.rdbuf(&standard_output()); }

void flush_standard_output(const std::string& who) {
  if (std::cout.flush().good()) return;
  fail<FileError>("{}{}standard output cannot be written: {}", who, who.empty() ? "" : ": ",
                  std::strerror(standard_output().error()));
}

bool standard_output_is_open() {
  const int flags = ::fcntl(STDOUT_FILENO, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

}  // namespace lockstep
