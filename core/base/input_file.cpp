#include "lockstep/core/input_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/uninterrupted.h"

namespace lockstep {
namespace {

constexpr size_t kAtOnce = size_t{1} << 20;
constexpr size_t kMostOfACall = size_t{1} << 30;

/// Like uninterrupted(), for calls that return a pointer.
template <class Call>
auto again_if_interrupted(Call call) {
  auto result = call();
  while (result == nullptr && errno == EINTR) {
    errno = 0;
    result = call();
  }
  return result;
}

bool find_status(const std::string& path, bool follow_links, struct stat& status) {
  return uninterrupted([&] {
           return follow_links ? ::stat(path.c_str(), &status) : ::lstat(path.c_str(), &status);
         }) == 0;
}

void check_kind(mode_t mode, const std::string& path, InputKinds allowed) {
  const bool regular = allowed == InputKinds::regular;
  require<FileError>(regular || !S_ISDIR(mode), "'{}' cannot be read: {}", path,
                     std::strerror(EISDIR));
  const bool good =
      S_ISREG(mode) || allowed == InputKinds::any || (!regular && S_ISFIFO(mode) != 0);
  require<FileError>(good, "'{}' cannot be read: found {}", path,
                     regular ? "no regular file" : "neither a regular file nor a pipe");
}

/// Makes room for `size` bytes.
void grow(std::string& text, size_t size, const std::string& path) {
  try {
    text.resize(size);
  } catch (const std::bad_alloc&) {
    fail<FileError>("'{}' cannot be read: {} bytes do not fit into the memory", path, size);
  } catch (const std::length_error&) {
    fail<FileError>("'{}' cannot be read: {} bytes do not fit into the memory", path, size);
  }
}

}  // namespace

FileKind kind_of_file(const std::string& path, bool follow_links) {
  struct stat status = {};
  const bool found = find_status(path, follow_links, status);
  if (!found && (errno == ENOENT || errno == ENOTDIR)) return FileKind::none;
  require<FileError>(found, "'{}' cannot be read: {}", path, std::strerror(errno));
  if (S_ISREG(status.st_mode)) return FileKind::regular;
  return S_ISDIR(status.st_mode) ? FileKind::folder : FileKind::other;
}

int64_t size_of_file(const std::string& path) {
  struct stat status = {};
  const bool found = find_status(path, /*follow_links=*/true, status);
  require<FileError>(found, "'{}' cannot be read: {}", path, std::strerror(errno));
  return S_ISREG(status.st_mode) ? static_cast<int64_t>(status.st_size) : 0;
}

std::vector<std::string> names_in_folder(const std::string& path) {
  const auto check = [&](bool good) {
    require<FileError>(good, "folder '{}' cannot be read: {}", path, std::strerror(errno));
  };
  const auto opened = again_if_interrupted([&] { return ::opendir(path.c_str()); });
  check(opened != nullptr);
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opened, &::closedir);
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* const entry = again_if_interrupted([&] { return ::readdir(folder.get()); });
    check(entry != nullptr || errno == 0);
    if (entry == nullptr) return names;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
}

InputFile::InputFile(std::string path, const InputOptions& options) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a FIFO waits for a writer.
  const int flags = O_RDONLY | O_CLOEXEC | (options.kinds == InputKinds::regular ? O_NONBLOCK : 0) |
                    (options.follow_links ? 0 : O_NOFOLLOW);
  file_ = uninterrupted([&] { return ::open(path_.c_str(), flags); });
  require<FileError>(file_ >= 0, "'{}' cannot be read: {}", path_, std::strerror(errno));
  try {
    struct stat status = {};
    const int result = uninterrupted([&] { return ::fstat(file_, &status); });
    require<FileError>(result == 0, "'{}' cannot be read: its size is not known: {}", path_,
                       std::strerror(errno));
    check_kind(status.st_mode, path_, options.kinds);
    size_ = S_ISREG(status.st_mode) ? static_cast<int64_t>(status.st_size) : 0;
  } catch (const FileError&) {
    ::close(file_);
    throw;
  }
}

InputFile::~InputFile() { ::close(file_); }

size_t InputFile::read(char* to, size_t count) {
  size_t done = 0;
  while (done < count) {
    const ssize_t got = uninterrupted(
        [&] { return ::read(file_, to + done, std::min(count - done, kMostOfACall)); });
    require<FileError>(got >= 0, "'{}' cannot be read at byte {}: {}", path_, position_,
                       std::strerror(errno));
    if (got == 0) break;
    done += static_cast<size_t>(got);
    position_ += got;
  }
  require<FileError>(done == count || position_ >= size_,
                     "'{}' cannot be read at byte {}: it ends there, allowed: {} bytes, as it had "
                     "when it was opened",
                     path_, position_, size_);
  return done;
}

void InputFile::read_at(int64_t offset, char* to, size_t count) const {
  while (count > 0) {
    const ssize_t got =
        uninterrupted([&] { return ::pread(file_, to, std::min(count, kMostOfACall), offset); });
    require<FileError>(got > 0, "'{}' cannot be read at byte {}: {}", path_, offset,
                       got < 0 ? std::strerror(errno) : "it was truncated");
    to += got;
    offset += got;
    count -= static_cast<size_t>(got);
  }
}

std::string read_all(InputFile& file, int64_t limit) {
  const auto check = [&](int64_t size) {
    require<FileError>(size <= limit,
                       "'{}' cannot be read: found {} bytes or more, allowed: up to {}",
                       file.path(), size, limit);
  };
  check(file.size());
  std::string text;
  size_t end = 0;
  // Asks for one byte more than expected, so that the end is seen.
  for (size_t room = static_cast<size_t>(file.size()) + 1;; room = kAtOnce) {
    grow(text, end + room, file.path());
    const size_t count = file.read(text.data() + end, room);
    end += count;
    check(static_cast<int64_t>(end));
    if (count == room) continue;
    text.resize(end);
    return text;
  }
}

std::string read_to_end(const std::string& path) {
  InputFile file(path, {.kinds = InputKinds::regular_or_pipe});
  return read_all(file);
}

std::string read_file(const std::string& path, int64_t limit, bool follow_links) {
  InputFile file(path, {.kinds = InputKinds::regular, .follow_links = follow_links});
  return read_all(file, limit);
}

}  // namespace lockstep
