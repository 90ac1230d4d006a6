#pragma once

// Internal. Naming and moving step folders; see checkpoint_folder.h.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

inline constexpr std::string_view kStep = "step_";
inline constexpr std::string_view kPartial = ".partial";
/// Suffix of an earlier checkpoint while another replaces it, if the file system cannot exchange
/// two folders atomically.
inline constexpr std::string_view kAside = ".old.partial";
/// Suffix of a checkpoint that is being removed.
inline constexpr std::string_view kRemoved = ".removed.partial";

/// Whether this errno of an exchange of two folders means that the file system does not support it,
/// like NFS and some user-space file systems, or that the system does not.
bool lacks_exchange(int error);

/// The N of a folder name "step_N".
std::optional<int64_t> step_number(std::string_view name);

/// Where the complete checkpoint `name` of `folder` is: in its folder, or put aside.
std::optional<std::filesystem::path> place_of_step(const std::filesystem::path& folder,
                                                   const std::string& name);

// Each throws std::filesystem::filesystem_error, or FileError, with the path.

/// Renames `from` to `to`, atomically; what was at `to` is then at `from`, or put aside. If that
/// takes more than one step, and the process ends in between, place_of_step() finds what was at
/// `to`.
void put_in_place(const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes what interrupted saves and removals left. First it restores the name of a complete
/// checkpoint that was put aside, and the files beside a checkpoint that an import did not replace
/// (see companion_record.h). Returns what cannot be removed and why; empty if there is nothing.
std::string clean_up_steps(const std::filesystem::path& folder);

/// Removes a file, or a folder with everything in it; a missing path is not an error. Returns
/// "'path' cannot be removed: why", or nothing.
std::string remove_tree(const std::filesystem::path& path);

/// Joins those that are not empty with "; ".
std::string join_problems(std::vector<std::string> problems);

/// Removes folders of checkpoints, or of what belongs to one. It renames them first, so that none
/// is ever mistaken for a complete one; of one that is a link to another place, only the link is
/// removed. Returns what cannot be removed and why; empty if there is nothing.
std::string remove_steps(const std::filesystem::path& folder,
                         const std::vector<std::string>& paths);

}  // namespace lockstep
