#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/models/adapter_params.h"

/// An uncut GPTModel, as checkpoints and Hugging Face's files hold it. Needs no libtorch.
namespace lockstep {

inline constexpr const char* kConfigFile = "config.json";

struct WholeParameter {
  std::string name;
  std::vector<int64_t> shape;  ///< without padding
  bool is_buffer = false;      ///< a registered buffer, which is fp32 in any file
};

/// The configuration for one process, resolved.
Config whole_config(Config config);

/// The parameters, in the order in which GPTModel registers them, then the expert biases of its
/// routers. `config` as above.
std::vector<WholeParameter> whole_parameters(const Config& config);

/// Its linear layers with adapters.
std::vector<AdaptedLinear> whole_adapters(const Config& config);

}  // namespace lockstep
