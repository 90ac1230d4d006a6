#pragma once

// Internal.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

/// An import replaces a checkpoint step_0 and files in hugging_face beside it, which belong
/// together. Meanwhile the folder step_0.companions.partial has the earlier files and a record:
/// which names there were, and the checksum of the manifest that step_0 had. If the process ends
/// before step_0 is replaced, the next clean-up (clean_up_steps()) puts the earlier files back.
namespace lockstep {

/// Suffix of that folder.
inline constexpr std::string_view kCompanionRecord = ".companions.partial";

/// Makes `record`, "FOLDER/step_0.companions.partial", before any file changes; it appears whole.
/// `names`: of the files in FOLDER/hugging_face that may change; earlier files are then to be moved
/// to `record`. `draft`: a new path on the same file system. FileError.
void begin_companion_record(const std::filesystem::path& record, const std::filesystem::path& draft,
                            const std::vector<std::string>& names);

/// If the checkpoint is as it was at the beginning, puts the earlier files back and removes the new
/// ones. Then removes `record`, if it is there. Returns what failed and why: then it stays, and the
/// next call continues.
std::string settle_companion_record(const std::filesystem::path& record);

/// Removes `record`: the checkpoint was replaced. Returns what cannot be removed and why; may throw
/// FileError.
std::string drop_companion_record(const std::filesystem::path& record);

}  // namespace lockstep
