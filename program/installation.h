#pragma once

#include <filesystem>

/// Where the program finds what comes along with it. Nothing here needs libtorch.
namespace lockstep {

/// The file that this process runs, links resolved.
std::filesystem::path program_file();

/// What is installed under `relative` ("share/lockstep/configs"): in the folder of program_file(),
/// as in the build folder, else in the folder above, as once installed. The latter also where there
/// is neither.
std::filesystem::path installed_path(const std::filesystem::path& relative);

}  // namespace lockstep
