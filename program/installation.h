#pragma once

#include <filesystem>

/// Finds the files that are installed with the program. Nothing here needs libtorch.
namespace lockstep {

/// The file that this process runs, links resolved.
std::filesystem::path program_file();

/// The path of what is installed under `relative` ("share/lockstep/configs"): in the folder of
/// program_file(), as in the build folder, otherwise in the folder above, as after installation.
/// The latter also if neither exists.
std::filesystem::path installed_path(const std::filesystem::path& relative);

}  // namespace lockstep
