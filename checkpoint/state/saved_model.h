#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/models/gpt_model.h"

namespace lockstep {

/// Saves the weights of a model that this process holds whole as a checkpoint of `folder` (see
/// checkpoint_folder.h), without an optimizer's state. Returns its path. FileError names what
/// failed.
std::string save_model(const std::string& folder, int64_t iteration, const Config& config,
                       const GPTModel& model);

/// What the losses of a batch of up to `tokens`, or of one sequence if that is longer, may have in
/// memory at a time: `logits`, but always those of one token.
struct LogitsLimit {
  int64_t logits, tokens;
};

struct SavedModel {
  Config config;
  std::shared_ptr<GPTModel> model;
  std::string path;  ///< of the checkpoint
};

/// Loads the model of a checkpoint, whatever layout saved it, into this process. The checkpoint is
/// `folder`, or the newest in it, even while a run saves there and removes others. The model has
/// its adapters, if there are any, and is in fp32, or in fp64 if it was trained in fp64. Its
/// experts have no capacity, for which all tokens of a batch would compete: what a sequence gets
/// depends on no other and on no padding. Where the logits of a batch exceed `limit`,
/// model.cross_entropy_chunk_size becomes no larger than it allows. FileError: no complete
/// checkpoint, a file that is missing or damaged, a tensor that is missing, left over, of another
/// shape or not finite.
SavedModel load_model(const std::string& folder, c10::Device device,
                      const std::optional<LogitsLimit>& limit = {});

/// The part of the model that this rank has if the model is cut as `parallel` says, in one piece
/// per stage. Collective over all ranks; their sizes must be those of `parallel`. Rank 0 decides
/// which checkpoint of its `folder` is the newest, and all ranks load that one: FileError on all of
/// them if one cannot, or finds another checkpoint under that path. ConfigError if the model cannot
/// be cut in this way.
SavedModel load_model(const std::string& folder, const ParallelConfig& parallel,
                      const ParallelState& state);

}  // namespace lockstep
