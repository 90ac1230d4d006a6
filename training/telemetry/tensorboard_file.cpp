#include "lockstep/training/tensorboard_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/training/crc32c.h"

#include "training/telemetry/tensorboard_event.pb.h"

namespace lockstep {
namespace {

constexpr std::string_view kEventPrefix = "events.out.tfevents.";

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// An integer in TFRecord's format, lowest byte first.
template <class Integer>
std::string little_endian(Integer value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFF);
  return bytes;
}

std::string masked_checksum(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return little_endian(((crc >> 15) | (crc << 17)) + uint32_t{0xA282EAD8});
}

/// A record of TFRecord: length, its checksum, the bytes, their checksum.
std::string record_of(const tensorboard::Event& event) {
  const std::string bytes = event.SerializeAsString();
  const std::string length = little_endian(static_cast<uint64_t>(bytes.size()));
  return length + masked_checksum(length) + bytes + masked_checksum(bytes);
}

/// The time in the name of an event file; 0 for any other.
int64_t time_in(std::string_view name) {
  if (!name.starts_with(kEventPrefix)) return 0;
  name.remove_prefix(kEventPrefix.size());
  int64_t time = 0;
  std::from_chars(name.data(), name.data() + name.size(), time);
  return time;
}

/// TensorBoard reads the files of a folder in the order of their names: this one comes after all
/// existing ones, even if two runs begin in the same second or the clock was set back.
std::string name_of_file(const std::string& folder) {
  auto time = static_cast<int64_t>(seconds_since_1970());
  for (const std::string& name : names_in_folder(folder)) time = std::max(time, time_in(name) + 1);
  std::array<char, 256> host = {};
  if (::gethostname(host.data(), host.size() - 1) != 0) host = {'?'};
  std::string host_name(host.data());
  std::replace(host_name.begin(), host_name.end(), '/', '_');
  return fmt::format("{}{:010}.{}.{}", kEventPrefix, time, host_name, ::getpid());
}

}  // namespace

TensorBoardFile::TensorBoardFile(const std::string& folder, int64_t first_step) : folder_(folder) {
  begin(first_step);
}

void TensorBoardFile::begin(int64_t first_step) {
  close();
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  require<FileError>(!error, "train.tensorboard: folder '{}' cannot be created: {}", folder_,
                     error.message());
  path_ = folder_ + "/" + name_of_file(folder_);
  do file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  while (file_ < 0 && errno == EINTR);
  tensorboard::Event version, start;
  version.set_wall_time(seconds_since_1970());
  version.set_file_version("brain.Event:2");
  start.set_wall_time(version.wall_time());
  start.set_step(first_step);
  start.mutable_session_log()->set_status(tensorboard::SessionLog::START);
  if (file_ >= 0 && append(record_of(version) + record_of(start))) return;
  const int reason = errno;
  close();
  fail<FileError>("train.tensorboard: '{}' cannot be written: {}", path_, std::strerror(reason));
}

TensorBoardFile::~TensorBoardFile() { close(); }

void TensorBoardFile::close() {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
  size_ = 0;
}

std::string TensorBoardFile::go_back(int64_t first_step) {
  if (failed_) return "";
  try {
    begin(first_step);
    return "";
  } catch (const FileError& error) {
    failed_ = true;
    return error.what();
  }
}

std::string TensorBoardFile::write(int64_t step, const std::vector<Scalar>& scalars) {
  if (failed_) return "";
  tensorboard::Event event;
  event.set_wall_time(seconds_since_1970());
  event.set_step(step);
  for (const Scalar& scalar : scalars) {
    tensorboard::Summary::Value* const value = event.mutable_summary()->add_value();
    value->set_tag(scalar.tag);
    value->set_simple_value(static_cast<float>(scalar.value));
  }
  if (append(record_of(event))) return "";
  failed_ = true;
  return fmt::format("'{}' cannot be written: {}; it ends before iteration {}", path_,
                     std::strerror(errno), step);
}

bool TensorBoardFile::append(const std::string& record) {
  for (std::string_view left = record; !left.empty();) {
    const ssize_t written = ::write(file_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int reason = errno;
      (void)!::ftruncate(file_, size_);
      errno = reason;
      return false;
    }
    left.remove_prefix(static_cast<size_t>(written));
  }
  size_ += static_cast<int64_t>(record.size());
  return true;
}

}  // namespace lockstep
