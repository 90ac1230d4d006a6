#pragma once

#include "lockstep/core/config.h"

/// What `train` does not do with a configuration, although each of its fields is valid. Nothing
/// here needs libtorch.
namespace lockstep {

/// Throws ConfigError, naming the field, if the configuration asks for something valid that `train`
/// cannot do or that would have no effect (check_experts_in_use() and its like), if the layers
/// cannot be cut into stages (see stage_layout()), or if the parameters are more than 64 bits can
/// count. With train.device = auto, what depends on the device is checked once there is one. Unlike
/// parse_config() it may refuse what earlier versions ran: their checkpoints remain readable.
void check_supported(const Config& config);

/// ConfigError if train.replay_interval is set without train.deterministic, which a GPU needs.
void check_replay(const TrainConfig& train, bool on_gpu);

}  // namespace lockstep
