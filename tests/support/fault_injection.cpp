// A library for LD_PRELOAD that makes file operations fail on demand. Plain C++ and libc.
//
//   LOCKSTEP_FAULTS=op:action:nth:path[;...]
//     op      open read write close fsync rename unlink mkdir stat list lock mmap link truncate
//     action  the name of an errno, as EIO: the call fails with it and does nothing (close closes)
//             short: a read or write of half the bytes; end: a read of 0 bytes
//             slow10: a call that begins 10 seconds later
//             stop: SIGSTOP before the call, which continues after SIGCONT
//             kill, kill-after: SIGKILL before or after the call; kill-inside: after half a write
//     nth     3: the third matching call; 3+: the third and all later ones
//     path    a part of the path; for calls on a descriptor, the path of the open file
//   LOCKSTEP_FAULTS_RANK=R   faults only if the environment has RANK=R
//   LOCKSTEP_FAULTS_COUNT=F  appends a line "op path" to F for each call that rules can match, or
//                            "op@R path" if the environment has RANK=R
//
// The count of calls restarts when the process becomes another program (exec). Reads and writes of
// pipes and sockets match by the names in /proc. Calls inside libc are not seen; of stdio, fopen,
// fread, fwrite and fflush are.

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "lockstep/tests/support/fault_rules.h"

namespace {

using namespace fault_injection;

/// Never destroyed: calls come until the process ends.
Rules& rules() {
  static Rules& rules = *new Rules;
  return rules;
}

std::string path_of(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  char path[4096];
  const long length = ::syscall(SYS_readlinkat, AT_FDCWD, link.c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : "";
}

std::string path_at(int folder, const char* path) {
  const std::string name = path == nullptr ? "" : path;
  if (folder == AT_FDCWD || name.starts_with("/")) return name;
  return name.empty() ? path_of(folder) : path_of(folder) + "/" + name;
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

/// One call of the program. Preserves errno, unless the call fails.
class Call {
 public:
  template <class Path>
  Call(const char* op, Path path) {
    if (rules().idle()) return;
    const int before = errno;
    unsigned seconds = 0;
    action_ = rules().judge(op, path(), error_, seconds);
    while (seconds > 0) seconds = ::sleep(seconds);  // a signal ends a sleep early
    errno = before;
    if (action_ == Action::stop) ::raise(SIGSTOP);
    if (action_ == Action::kill) die();
  }
  ~Call() {
    if (action_ == Action::kill_after || action_ == Action::kill_inside) die();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool fails() const {
    if (action_ == Action::fail) errno = error_;
    return action_ == Action::fail;
  }
  bool ends() const { return action_ == Action::end; }
  bool halves() const { return action_ == Action::half || action_ == Action::kill_inside; }
  size_t bytes(size_t all) const { return halves() && all > 1 ? all / 2 : all; }

 private:
  Action action_ = Action::none;
  int error_ = 0;
};

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

int access_mode(int flags, va_list arguments) {
  return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(arguments, int) : 0;
}

/// A read or write of `size` bytes. `act` does it and receives the number of bytes.
template <class Act>
ssize_t transfer(const char* op, int fd, size_t size, Act act) {
  const Call call(op, [&] { return path_of(fd); });
  if (call.fails()) return -1;
  if (call.ends()) return 0;
  return act(call.bytes(size));
}

/// The same for several buffers. A short call serves half of the first one.
template <class Act>
ssize_t transfer_parts(const char* op, int fd, const iovec* parts, int count, Act act) {
  const Call call(op, [&] { return path_of(fd); });
  if (call.fails()) return -1;
  if (call.ends()) return 0;
  if (!call.halves() || count < 1) return act(parts, count);
  const iovec first = {parts->iov_base, call.bytes(parts->iov_len)};
  return act(&first, 1);
}

}  // namespace

/// Defines libc's `name` as the call `op` on `path`. It returns `failed` if it is made to fail.
#define LOCKSTEP_CALL(result, name, parameters, op, path, failed, arguments) \
  result name parameters {                                                   \
    static const auto real = next<result(*) parameters>(#name);              \
    const Call call(op, [&] { return std::string(path); });                  \
    return call.fails() ? failed : real arguments;                           \
  }

extern "C" {

int open(const char* path, int flags, ...) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  va_list arguments;
  va_start(arguments, flags);
  const int mode = access_mode(flags, arguments);
  va_end(arguments);
  const Call call("open", [&] { return std::string(path); });
  return call.fails() ? -1 : real(path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  static const auto real = next<int (*)(int, const char*, int, ...)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const int mode = access_mode(flags, arguments);
  va_end(arguments);
  const Call call("open", [&] { return path_at(folder, path); });
  return call.fails() ? -1 : real(folder, path, flags, mode);
}

int open64(const char* path, int flags, ...) __attribute__((alias("open")));
int openat64(int folder, const char* path, int flags, ...) __attribute__((alias("openat")));
int __open_2(const char* path, int flags) { return open(path, flags); }
int __open64_2(const char* path, int flags) { return open(path, flags); }
int __openat_2(int folder, const char* path, int flags) { return openat(folder, path, flags); }
int __openat64_2(int folder, const char* path, int flags) { return openat(folder, path, flags); }
int creat(const char* path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

LOCKSTEP_CALL(FILE*, fopen, (const char* path, const char* mode), "open", path, nullptr,
              (path, mode))
LOCKSTEP_CALL(FILE*, fopen64, (const char* path, const char* mode), "open", path, nullptr,
              (path, mode))

ssize_t read(int fd, void* to, size_t size) {
  static const auto real = next<decltype(&read)>("read");
  return transfer("read", fd, size, [&](size_t n) { return real(fd, to, n); });
}

ssize_t pread(int fd, void* to, size_t size, off_t offset) {
  static const auto real = next<decltype(&pread)>("pread");
  return transfer("read", fd, size, [&](size_t n) { return real(fd, to, n, offset); });
}

ssize_t pread64(int, void*, size_t, off64_t) __attribute__((alias("pread")));
ssize_t __read_chk(int fd, void* to, size_t size, size_t) { return read(fd, to, size); }
ssize_t __pread_chk(int fd, void* to, size_t size, off_t at, size_t) {
  return pread(fd, to, size, at);
}

ssize_t readv(int fd, const iovec* parts, int count) {
  static const auto real = next<decltype(&readv)>("readv");
  return transfer_parts("read", fd, parts, count,
                        [&](const iovec* p, int n) { return real(fd, p, n); });
}

ssize_t preadv(int fd, const iovec* parts, int count, off_t offset) {
  static const auto real = next<decltype(&preadv)>("preadv");
  return transfer_parts("read", fd, parts, count,
                        [&](const iovec* p, int n) { return real(fd, p, n, offset); });
}

size_t fread(void* to, size_t size, size_t count, FILE* file) {
  static const auto real = next<decltype(&fread)>("fread");
  const Call call("read", [&] { return path_of(::fileno(file)); });
  if (!call.fails() && !call.ends()) return real(to, size, call.bytes(count), file);
  file->_flags |= call.ends() ? 0x10 : 0x20;  // feof(), ferror()
  return 0;
}

ssize_t write(int fd, const void* from, size_t size) {
  static const auto real = next<decltype(&write)>("write");
  return transfer("write", fd, size, [&](size_t n) { return real(fd, from, n); });
}

ssize_t pwrite(int fd, const void* from, size_t size, off_t offset) {
  static const auto real = next<decltype(&pwrite)>("pwrite");
  return transfer("write", fd, size, [&](size_t n) { return real(fd, from, n, offset); });
}

ssize_t pwrite64(int, const void*, size_t, off64_t) __attribute__((alias("pwrite")));

ssize_t writev(int fd, const iovec* parts, int count) {
  static const auto real = next<decltype(&writev)>("writev");
  return transfer_parts("write", fd, parts, count,
                        [&](const iovec* p, int n) { return real(fd, p, n); });
}

size_t fwrite(const void* from, size_t size, size_t count, FILE* file) {
  static const auto real = next<decltype(&fwrite)>("fwrite");
  const Call call("write", [&] { return path_of(::fileno(file)); });
  return call.fails() ? 0 : real(from, size, call.bytes(count), file);
}

int fflush(FILE* file) {
  static const auto real = next<decltype(&fflush)>("fflush");
  const Call call("write", [&] { return file ? path_of(::fileno(file)) : ""; });
  return call.fails() ? EOF : real(file);
}

int close(int fd) {
  static const auto real = next<decltype(&close)>("close");
  const Call call("close", [&] { return path_of(fd); });
  const int result = real(fd);  // as on Linux: the descriptor is gone, whatever close() returns
  return call.fails() ? -1 : result;
}

LOCKSTEP_CALL(int, fsync, (int fd), "fsync", path_of(fd), -1, (fd))
LOCKSTEP_CALL(int, fdatasync, (int fd), "fsync", path_of(fd), -1, (fd))

LOCKSTEP_CALL(int, rename, (const char* from, const char* to) noexcept, "rename",
              std::string(from) + " -> " + to, -1, (from, to))
LOCKSTEP_CALL(int, renameat, (int a, const char* from, int b, const char* to) noexcept, "rename",
              path_at(a, from) + " -> " + path_at(b, to), -1, (a, from, b, to))
LOCKSTEP_CALL(int, renameat2,
              (int a, const char* from, int b, const char* to, unsigned how) noexcept, "rename",
              path_at(a, from) + " -> " + path_at(b, to), -1, (a, from, b, to, how))

LOCKSTEP_CALL(int, unlink, (const char* path) noexcept, "unlink", path, -1, (path))
LOCKSTEP_CALL(int, unlinkat, (int folder, const char* path, int flags) noexcept, "unlink",
              path_at(folder, path), -1, (folder, path, flags))
LOCKSTEP_CALL(int, rmdir, (const char* path) noexcept, "unlink", path, -1, (path))
LOCKSTEP_CALL(int, remove, (const char* path) noexcept, "unlink", path, -1, (path))

LOCKSTEP_CALL(int, mkdir, (const char* path, mode_t mode) noexcept, "mkdir", path, -1, (path, mode))
LOCKSTEP_CALL(int, mkdirat, (int folder, const char* path, mode_t mode) noexcept, "mkdir",
              path_at(folder, path), -1, (folder, path, mode))

LOCKSTEP_CALL(int, stat, (const char* path, struct stat* to) noexcept, "stat", path, -1, (path, to))
LOCKSTEP_CALL(int, lstat, (const char* path, struct stat* to) noexcept, "stat", path, -1,
              (path, to))
LOCKSTEP_CALL(int, fstat, (int fd, struct stat* to) noexcept, "stat", path_of(fd), -1, (fd, to))
LOCKSTEP_CALL(int, fstatat, (int folder, const char* path, struct stat* to, int flags) noexcept,
              "stat", path_at(folder, path), -1, (folder, path, to, flags))
LOCKSTEP_CALL(int, statx,
              (int folder, const char* path, int flags, unsigned mask, struct statx* to) noexcept,
              "stat", path_at(folder, path), -1, (folder, path, flags, mask, to))
LOCKSTEP_CALL(int, access, (const char* path, int mode) noexcept, "stat", path, -1, (path, mode))
int stat64(const char*, struct stat64*) noexcept __attribute__((alias("stat")));
int lstat64(const char*, struct stat64*) noexcept __attribute__((alias("lstat")));
int fstat64(int, struct stat64*) noexcept __attribute__((alias("fstat")));
int fstatat64(int, const char*, struct stat64*, int) noexcept __attribute__((alias("fstatat")));

LOCKSTEP_CALL(DIR*, opendir, (const char* path), "list", path, nullptr, (path))
LOCKSTEP_CALL(DIR*, fdopendir, (int fd), "list", path_of(fd), nullptr, (fd))
LOCKSTEP_CALL(dirent*, readdir, (DIR * folder), "list", path_of(::dirfd(folder)), nullptr, (folder))
dirent64* readdir64(DIR*) __attribute__((alias("readdir")));

LOCKSTEP_CALL(int, flock, (int fd, int operation) noexcept, "lock", path_of(fd), -1,
              (fd, operation))
LOCKSTEP_CALL(void*, mmap,
              (void* at, size_t size, int protection, int flags, int fd, off_t offset) noexcept,
              "mmap", fd < 0 ? "" : path_of(fd), MAP_FAILED,
              (at, size, protection, flags, fd, offset))
void* mmap64(void*, size_t, int, int, int, off64_t) noexcept __attribute__((alias("mmap")));

LOCKSTEP_CALL(int, link, (const char* from, const char* to) noexcept, "link",
              std::string(from) + " -> " + to, -1, (from, to))
LOCKSTEP_CALL(int, symlink, (const char* from, const char* to) noexcept, "link",
              std::string(from) + " -> " + to, -1, (from, to))
LOCKSTEP_CALL(int, ftruncate, (int fd, off_t size) noexcept, "truncate", path_of(fd), -1,
              (fd, size))
int ftruncate64(int, off64_t) noexcept __attribute__((alias("ftruncate")));

int fcntl(int fd, int command, ...) {
  static const auto real = next<int (*)(int, int, ...)>("fcntl64");
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  const bool locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
                     command == F_OFD_SETLKW;
  if (!locks) return real(fd, command, argument);
  const Call call("lock", [&] { return path_of(fd); });
  return call.fails() ? -1 : real(fd, command, argument);
}

int fcntl64(int, int, ...) __attribute__((alias("fcntl")));

}  // extern "C"
