#include "lockstep/checkpoint/moved_tokenizer.h"

#include <filesystem>

#include "lockstep/core/input_file.h"

namespace lockstep {

namespace paths = std::filesystem;

std::string find_moved_tokenizer(const std::string& name, const std::string& checkpoint) {
  const size_t colon = name.find(':');
  if (colon == std::string::npos) return name;
  const paths::path path = name.substr(colon + 1);
  const bool is_folder = name.substr(0, colon) == "gpt2";
  const paths::path folder = is_folder ? path : path.parent_path();
  if (folder.filename() != kKeptFolder) return name;
  const paths::path beside =
      paths::weakly_canonical(paths::absolute(checkpoint)).parent_path() / kKeptFolder;
  const paths::path moved = is_folder ? beside : beside / path.filename();
  if (kind_of_file(is_folder ? moved / "vocab.json" : moved) != FileKind::regular) return name;
  return name.substr(0, colon + 1) + moved.string();
}

}  // namespace lockstep
