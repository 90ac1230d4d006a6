#include "lockstep/checkpoint/companion_record.h"

#include <cstdint>
#include <istream>
#include <sstream>
#include <system_error>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRecordFile = "record";
constexpr const char* kWasThere = "earlier";
constexpr const char* kWasNotThere = "new";
constexpr const char* kNoCheckpoint = "none";
constexpr int64_t kLongestRecord = int64_t{1} << 20;
constexpr int64_t kLongestReplaced = int64_t{1} << 30;

bool has_entry(const fs::path& path) {
  return kind_of_file(path, /*follow_links=*/false) != FileKind::none;
}

fs::path companions_beside(const fs::path& record) { return record.parent_path() / kKeptFolder; }

/// Of the checkpoint that is there now.
std::string checksum_beside(const fs::path& record) {
  std::string step = record.filename();
  step.resize(step.size() - kCompanionRecord.size());
  const auto place = place_of_step(record.parent_path(), step);
  if (!place) return kNoCheckpoint;
  return fmt::format("{:08x}", crc32(read_file(*place / kManifestName, kLongestReplaced)));
}

/// Takes the names from `lines`. May be interrupted and repeated.
void put_companions_back(const fs::path& record, std::istream& lines) {
  const fs::path companions = companions_beside(record);
  bool were_any = false;
  for (std::string state, name; lines >> state >> name;) {
    const bool was_there = state == kWasThere;
    were_any = were_any || was_there;
    if (fs::path(name).has_parent_path() || (was_there && !has_entry(record / name))) continue;
    fs::remove(companions / name);
    if (was_there) fs::rename(record / name, companions / name);
  }
  if (!fs::is_directory(companions)) return;
  sync_folder(companions);
  std::error_code is_not_empty;
  if (!were_any) fs::remove(companions, is_not_empty);
}

}  // namespace

void begin_companion_record(const fs::path& record, const fs::path& draft,
                            const std::vector<std::string>& names) {
  std::string text = checksum_beside(record) + "\n";
  for (const std::string& name : names) {
    const bool is_there = has_entry(companions_beside(record) / name);
    text += fmt::format("{} {}\n", is_there ? kWasThere : kWasNotThere, name);
  }
  try {
    fs::create_directory(draft);
    write_file(draft / kRecordFile, {text});
    sync_folder(draft);
    fs::rename(draft, record);
  } catch (const fs::filesystem_error& error) {
    fail<FileError>("'{}' cannot be created: {}", record.string(), error.code().message());
  }
  sync_folder(record.parent_path());
}

std::string settle_companion_record(const fs::path& record) {
  try {
    if (!has_entry(record)) return "";
    if (has_entry(record / kRecordFile)) {  // earlier versions wrote none
      std::istringstream lines(read_file(record / kRecordFile, kLongestRecord));
      std::string checksum;
      lines >> checksum;
      if (checksum == checksum_beside(record)) put_companions_back(record, lines);
    }
    return drop_companion_record(record);
  } catch (const fs::filesystem_error& error) {
    return fmt::format("'{}' cannot be put back: {}", error.path1().string(),
                       error.code().message());
  } catch (const FileError& error) {
    return error.what();
  }
}

std::string drop_companion_record(const fs::path& record) {
  return remove_steps(record.parent_path(), {record.string()});
}

}  // namespace lockstep
