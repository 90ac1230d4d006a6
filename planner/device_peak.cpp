#include "lockstep/planner/device_peak.h"

#include <array>
#include <cctype>

namespace lockstep {
namespace {

struct KnownDevice {
  std::string_view part_of_name;
  double half_tflops;  ///< bf16 and fp16, without sparsity
};

/// The first entry whose name is part of the device's name counts: variants come before the model.
constexpr std::array<KnownDevice, 7> kDevices = {{{"A100", 312},
                                                  {"H100 PCIe", 756},
                                                  {"H100 NVL", 835},
                                                  {"H100", 989},
                                                  {"H200 NVL", 835},
                                                  {"H200", 989},
                                                  {"B200", 2250}}};

}  // namespace

std::optional<double> peak_tflops(std::string_view model, Precision precision) {
  if (precision != Precision::bf16 && precision != Precision::fp16) return {};
  for (const auto& [part_of_name, half_tflops] : kDevices)
    if (const size_t at = model.find(part_of_name); at != model.npos) {
      const size_t end = at + part_of_name.size();
      const auto goes_on = [&] {
        return std::isalnum(static_cast<unsigned char>(model[end])) != 0;
      };
      const bool is_word = (at == 0 || model[at - 1] == ' ') && (end == model.size() || !goes_on());
      if (is_word) return half_tflops;
    }
  return {};
}

}  // namespace lockstep
