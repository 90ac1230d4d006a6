#include "lockstep/parallel_state/job_secret.h"

#include <sys/stat.h>

#include <cstdlib>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

constexpr char kSecret[] = "LOCKSTEP_SECRET", kSecretFile[] = "LOCKSTEP_SECRET_FILE";
constexpr int64_t kLongestFile = 1 << 16;  // bytes
constexpr size_t kRandomBytes = 32;

/// Checks the mode of the open file, whatever its name refers to meanwhile.
void check_that_only_its_owner_can_use(const InputFile& file) {
  struct stat status = {};
  constexpr mode_t kOfOthers = S_IRWXG | S_IRWXO;
  const bool known = ::fstat(file.descriptor(), &status) == 0;
  require<FileError>(known && (status.st_mode & kOfOthers) == 0,
                     "'{}' has mode {:o}, which gives other users access", file.path(),
                     status.st_mode & 07777U);
}

std::string read_secret_file(const std::string& path) {
  try {
    InputFile file(path);
    check_that_only_its_owner_can_use(file);
    std::string text = read_all(file, kLongestFile);
    if (text.ends_with('\n')) text.pop_back();
    require<FileError>(text.size() >= Secret::kLeastBytes, "'{}' has {} bytes", path, text.size());
    return text;
  } catch (const FileError& error) {
    fail<ConfigError>(
        "environment variable {}: {}; allowed: a file with {} to {} bytes that its owner alone can "
        "use (chmod 600)",
        kSecretFile, error.what(), Secret::kLeastBytes, kLongestFile);
  }
}

void put_into_environment(const std::string& path) {
  try {
    const std::string secret = read_secret_file(path);
    if (secret.find('\0') != std::string::npos) return;
    ::setenv(kSecret, secret.c_str(), /*overwrite=*/1);
    ::unsetenv(kSecretFile);
  } catch (const ConfigError&) {  // the ranks report it
  }
}

}  // namespace

std::shared_ptr<const Secret> read_job_secret(const EnvironmentReader& read) {
  const auto text = read(kSecret), path = read(kSecretFile);
  require<ConfigError>(!text || !path,
                       "environment variables {} and {}: both are set; allowed: one of them",
                       kSecret, kSecretFile);
  if (path) return std::make_shared<Secret>(read_secret_file(*path));
  if (!text) return nullptr;
  require<ConfigError>(text->size() >= Secret::kLeastBytes,
                       "environment variable {}: found {} bytes, allowed: {} or more", kSecret,
                       text->size(), Secret::kLeastBytes);
  return std::make_shared<Secret>(*text);
}

std::shared_ptr<const Secret> read_job_secret() {
  return read_job_secret(environment_of_process());
}

void give_job_secret(bool keeps_file) {
  const char* const path = std::getenv(kSecretFile);
  if (std::getenv(kSecret)) return;
  if (path) return keeps_file ? put_into_environment(path) : void();
  ::setenv(kSecret, in_hex(random_bytes(kRandomBytes)).c_str(), /*overwrite=*/1);
}

const char* job_secret_source(const EnvironmentReader& read) {
  return read(kSecret)       ? "of LOCKSTEP_SECRET"
         : read(kSecretFile) ? "of LOCKSTEP_SECRET_FILE"
                             : "none";
}

}  // namespace lockstep
