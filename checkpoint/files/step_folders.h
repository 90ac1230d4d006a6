#pragma once

// Internal. Names and moves of the folders of steps; see checkpoint_folder.h.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

inline constexpr std::string_view kStep = "step_";
inline constexpr std::string_view kPartial = ".partial";
/// Of an earlier checkpoint while another takes its place, where the file system cannot exchange
/// two folders in one step.
inline constexpr std::string_view kAside = ".old.partial";
/// Of a checkpoint that is being removed.
inline constexpr std::string_view kRemoved = ".removed.partial";

/// Whether this errno of an exchange of two folders says that the file system lacks it, as NFS and
/// some in user space do, or that the system does.
bool lacks_exchange(int error);

/// N of a folder name "step_N".
std::optional<int64_t> step_number(std::string_view name);

/// Where the complete checkpoint `name` of `folder` lies: in its folder, or aside.
std::optional<std::filesystem::path> place_of_step(const std::filesystem::path& folder,
                                                   const std::string& name);

// Each throws std::filesystem::filesystem_error, or FileError, with the path.

/// Renames `from` to `to`, in one step; what was at `to` is then at `from`, or aside. Where that
/// takes more than one step, and the process ends between them, place_of_step() finds what was at
/// `to`.
void put_in_place(const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes what saves and removals that were interrupted left. A complete checkpoint that was left
/// aside gets its name back first. Returns what cannot be removed and why; empty if there is
/// nothing.
std::string clean_up_steps(const std::filesystem::path& folder);

/// Removes a file, or a folder with all in it; what is not there is no error. Returns "'path'
/// cannot be removed: why", or nothing.
std::string remove_tree(const std::filesystem::path& path);

/// Those that are not empty, with "; " between them.
std::string join_problems(std::vector<std::string> problems);

/// Removes folders of checkpoints: first they lose their names, so that none is ever taken for a
/// complete one; of one that lies elsewhere, behind a link, the link is removed. Returns what
/// cannot be removed and why; empty if there is nothing.
std::string remove_steps(const std::filesystem::path& folder,
                         const std::vector<std::string>& paths);

}  // namespace lockstep
