#include "lockstep/datasets/index_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/uninterrupted.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/field_reader.h"
#include "lockstep/datasets/file_bytes.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

constexpr std::string_view kMagic("LSINDEX\1", 8);

static_assert(sizeof(SampleStart) == 16 && std::is_trivially_copyable_v<SampleStart>);

template <class T>
std::string_view bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
PackedArray<T> packed(const std::vector<T>& values) {
  return {bytes_of(values).data(), static_cast<int64_t>(values.size())};
}

/// Holds an exclusive lock where the file system has locks.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : file_(uninterrupted([&] {
          return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        })) {
    if (file_ >= 0) uninterrupted([this] { return ::flock(file_, LOCK_EX); });
  }
  ~FileLock() {
    if (file_ >= 0) ::close(file_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_;
};

/// The index in the file, if it is there, undamaged and of this description.
std::optional<SampleIndexView> find_index(const IndexCacheFile& file) {
  try {
    const auto content = std::make_shared<const FileBytes>(file.path);
    SampleIndexView view = parse_index_cache(content->bytes(), file.path);
    view.owner = content;
    if (view.description == file.description) return view;
  } catch (const FileError&) {
    // It is built again, with the same bytes.
  }
  return std::nullopt;
}

/// The index that another process is storing. Where locks do not reach other hosts, each builds,
/// and one may remove the unfinished file of another as abandoned; the last one completes its own.
std::optional<SampleIndexView> index_of_another(const IndexCacheFile& file) {
  constexpr auto kPatience = std::chrono::minutes(1);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const bool waits = is_being_written(file.path) && std::chrono::steady_clock::now() < end;
    if (auto found = find_index(file)) return found;
    if (!waits) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void write_file(const IndexCacheFile& file, const SampleIndex& index) {
  UnfinishedFile unfinished(file.path);
  write_index_cache(index, file.description,
                    [&](std::string_view bytes) { unfinished.write(bytes); });
  unfinished.sync();
  unfinished.publish();
  sync_folder_of(file.path);
}

}  // namespace

void write_index_cache(const SampleIndex& index, std::string_view description,
                       const std::function<void(std::string_view)>& write) {
  uint32_t checksum = 0;
  const auto add = [&](std::string_view bytes) {
    checksum = crc32(bytes, checksum);
    write(bytes);
  };
  const auto number = [&](uint64_t value) {
    add({reinterpret_cast<const char*>(&value), sizeof value});
  };
  add(kMagic);
  number(description.size());
  add(description);
  number(index.documents.size());
  number(index.order.size());
  add(bytes_of(index.documents));
  add(bytes_of(index.starts));
  add(bytes_of(index.order));
  write({reinterpret_cast<const char*>(&checksum), sizeof checksum});
}

SampleIndexView parse_index_cache(std::string_view bytes, const std::string& path) {
  FieldReader reader(bytes, path);
  require<FileError>(reader.text(kMagic.size(), "magic") == kMagic,
                     "'{}': byte 0: magic: found other bytes, allowed: those of a sample index",
                     path);
  SampleIndexView view;
  view.description =
      reader.text(reader.number<uint64_t>("bytes of the description"), "description");
  const auto documents = reader.number<uint64_t>("number of documents");
  const auto samples = reader.number<uint64_t>("number of samples");
  require<FileError>(samples < bytes.size(), "'{}': found {} samples in {} bytes", path, samples,
                     bytes.size());
  view.documents = reader.array<int32_t>(documents, "documents");
  view.starts = reader.array<SampleStart>(samples + 1, "starts of the samples");
  view.order = reader.array<int64_t>(samples, "order of the samples");
  const size_t end = reader.offset();
  const auto checksum = reader.number<uint32_t>("checksum");
  require<FileError>(reader.offset() == bytes.size(),
                     "'{}': byte {}: found {} bytes after the checksum, allowed: none", path,
                     reader.offset(), bytes.size() - reader.offset());
  const uint32_t found = crc32(bytes.substr(0, end));
  require<FileError>(found == checksum, "'{}': byte {}: checksum: found {:08x}, allowed: {:08x}",
                     path, end, checksum, found);
  return view;
}

SampleIndexView view_of(SampleIndex index) {
  const auto owner = std::make_shared<const SampleIndex>(std::move(index));
  return {.description = {},
          .documents = packed(owner->documents),
          .starts = packed(owner->starts),
          .order = packed(owner->order),
          .owner = owner};
}

SampleIndexView cached_sample_index(const IndexCacheFile& file,
                                    const std::function<SampleIndex()>& build) {
  if (auto found = find_index(file)) return *std::move(found);
  std::error_code error;
  const auto folder = std::filesystem::path(file.path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  const FileLock lock(folder / ".lock");
  if (auto found = find_index(file)) return *std::move(found);
  SampleIndex index = build();
  try {
    require<FileError>(!error, "'{}' cannot be created: {}", file.path, error.message());
    write_file(file, index);
  } catch (const FileError&) {
    if (auto found = index_of_another(file)) return *std::move(found);
    if (file.required) throw;
    return view_of(std::move(index));
  }
  if (auto written = find_index(file)) return *std::move(written);
  return view_of(std::move(index));
}

}  // namespace lockstep
