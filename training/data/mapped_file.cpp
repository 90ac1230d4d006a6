#include "lockstep/training/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK the opening of a FIFO would wait for a writer.
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require<FileError>(file >= 0, "'{}' cannot be read: {}", path_, std::strerror(errno));
  struct stat status = {};
  const bool known = ::fstat(file, &status) == 0;
  const bool regular = known && S_ISREG(status.st_mode);
  const auto size = static_cast<size_t>(status.st_size);
  void* memory = nullptr;
  if (regular && size > 0) memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  ::close(file);
  require<FileError>(regular, "'{}' cannot be read: found no regular file", path_);
  require<FileError>(memory != MAP_FAILED, "'{}' cannot be mapped into memory: {}", path_,
                     std::strerror(error));
  if (memory != nullptr) bytes_ = {static_cast<const char*>(memory), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

}  // namespace lockstep
