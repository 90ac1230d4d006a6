#include "lockstep/datasets/file_bytes.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/mapped_files.h"

namespace lockstep {
namespace {

constexpr int64_t kLargestCopy = int64_t{64} << 20;

}  // namespace

FileBytes::FileBytes(std::string path) : path_(std::move(path)) {
  InputFile file(path_);
  if (file.size() <= kLargestCopy) {
    copy_ = read_all(file);
    bytes_ = copy_;
    return;
  }
  const auto size = static_cast<size_t>(file.size());
  void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  require<FileError>(memory != MAP_FAILED, "'{}' cannot be mapped into memory: {}", path_,
                     std::strerror(errno));
  bytes_ = {static_cast<const char*>(memory), size};
  note_mapping(memory, size, path_);
}

FileBytes::~FileBytes() {
  if (bytes_.data() == copy_.data()) return;
  forget_mapping(bytes_.data());
  ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

}  // namespace lockstep
