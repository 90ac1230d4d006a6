#pragma once

// Internal.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/hugging_face_weights.h"
#include "lockstep/core/config.h"
#include "lockstep/models/adapter_params.h"

namespace lockstep {

/// The whole weights of a checkpoint, with its adapters merged in; on the device `meta` or read
/// from disk. FileError names a tensor that is missing, damaged or not finite.
class SavedWeights : public TensorSource {
 public:
  /// `config` is the checkpoint's, for one process. Values are added up in fp32 and then rounded to
  /// `dtype`; buffers stay in fp32.
  SavedWeights(CheckpointReader& checkpoint, const Config& config, at::ScalarType dtype, bool meta);

  std::vector<std::string> names() const override;
  at::Tensor read(const std::string& name) const override;

  /// One tensor as it is saved, in fp32.
  at::Tensor read_alone(const std::string& name) const;

 private:
  at::ScalarType dtype_of(const std::string& name) const;

  CheckpointReader& checkpoint_;
  LoraConfig lora_;
  std::map<std::string, AdaptedLinear> adapted_;  ///< by the name of the weight
  std::set<std::string> buffers_;
  at::ScalarType dtype_;
  bool meta_;
};

}  // namespace lockstep
