#include "lockstep/checkpoint/rewind_record.h"

#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

constexpr int64_t kLongestRecord = int64_t{1} << 20;

std::string path_in(const std::string& folder) { return folder + "/rewound"; }

}  // namespace

void record_rewind(const std::string& folder, const std::string& job_id, const CopyId& first) {
  write_output_file(path_in(folder), fmt::format("{} {} {}\n", first.round, first.number, job_id));
}

CopyId first_copy_that_counts(const std::string& folder, const std::string& job_id) {
  const std::string path = path_in(folder);
  if (kind_of_file(path) == FileKind::none) return {};
  const std::string text = read_file(path, kLongestRecord, /*follow_links=*/true);
  std::istringstream line(text);
  CopyId first;
  std::string job;
  line >> first.round >> first.number;
  const bool good = line.get() == ' ' && std::getline(line, job) && !line.eof();
  require<FileError>(good && first.round >= 0 && first.number >= 0,
                     "'{}': found '{}', allowed: a round, the number of a copy and a job", path,
                     text);
  return job == job_id ? first : CopyId();
}

}  // namespace lockstep
